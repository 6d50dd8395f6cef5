"""The ordering task: the only consumer of the line of reports, so that order holds by construction."""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ckpt.calling import PASS_THROUGH
from ckpt.config import UploadConfig
from ckpt.errors import FencedError, FormatError, StorageError, UploadFailedError
from ckpt.inflight import Live
from ckpt.manifest import Manifest, Tombstone
from ckpt.publishing import FLUSH_INTERVAL, Publisher
from ckpt.records import Pending, Report, ReportRecord, ReportState, Timings
from ckpt.result import Result
from ckpt.validating import Verdict

logger = logging.getLogger("ckpt")

TELL_EVERY = 10.0
"""Seconds between two log lines about uploads that wait, and that one has to wait to be worth a line."""


@dataclass(slots=True, kw_only=True, eq=False)
class Reported:
    """One report in line: what was said, and the pending answer (None for one that needs no upload)."""

    report: Report
    attempt: int
    pending: Pending[ReportRecord] | None = None
    final: ReportRecord | None = None
    """Set where the outcome is known without an upload, or was settled by the ordering task."""
    done_at: float | None = None
    """Monotonic seconds when it became final, for `order_wait`."""
    settled: threading.Event = field(default_factory=threading.Event)
    """Set once `outcome()` answers at once: the upload is over, or the row is published."""

    def stalled(self, began: float) -> None:
        """Note what the call of `report()` took; `began` are monotonic seconds."""
        now = time.monotonic()
        self.report = replace(self.report, submitted=now, stall=now - began)
        if self.final is not None:
            self.final = replace(self.final, timings=replace(self.final.timings, stall=now - began))

    def settle(self) -> None:
        """Note that the outcome is known."""
        self.done_at = time.monotonic()
        self.settled.set()

    def outcome(self, timeout: float | None = None) -> ReportRecord:  # noqa: PLR0911 - one line per way to end
        """The final record; whatever the engine raised becomes one.

        Raises:
            TimeoutError: not final after `timeout` seconds.
        """
        if self.final is not None:
            return self.final
        assert self.pending is not None
        over = self.settled.is_set()
        try:
            return self.pending.result(timeout)
        except UploadFailedError as error:
            return error.record
        except TimeoutError as error:
            if self.final is not None:
                return self.final
            if over:
                return self.failed(
                    f"{type(error).__name__}: {error}"
                )  # how the engine's work ended, and no wait of ours
            raise
        except PASS_THROUGH as error:
            return self.failed(f"interrupted by {type(error).__name__}")
        except BaseException as error:  # noqa: BLE001 - an engine's own ways to end, such as Prefect's crashed runs
            return self.failed(f"{type(error).__name__}: {error}")

    def failed(self, reason: str) -> ReportRecord:
        """A FAILED record with a reason."""
        report = self.report
        return ReportRecord(
            seq=report.seq, attempt=self.attempt, name=report.name, state=ReportState.FAILED, metrics=report.metrics,
            reason=reason, created=report.created, timings=Timings(stall=report.stall),
        )  # fmt: skip


class _Signal(enum.Enum):
    """What else may come along the line."""

    CLOSED = enum.auto()
    """No more reports come."""
    LOOK = enum.auto()
    """Nothing; whether to wait any longer may have changed."""


class ReportLine:
    """The line of reports in order; the trainer's thread appends, the ordering task takes.

    Verdicts of validations come along it too, and are published in between: what is kept changes in one thread only.

    Args:
        publisher: makes them public.
        live: the open attempt.
        config: for deadlines.
    """

    def __init__(self, publisher: Publisher, live: Live, config: UploadConfig) -> None:
        self.publisher, self.live, self.config = publisher, live, config
        self._queue: queue.SimpleQueue[Reported | Verdict | _Signal] = queue.SimpleQueue()
        self.told = 0.0
        """Monotonic seconds of the last line about uploads that wait."""
        self.error: BaseException | None = None
        """What ended the run, told by `close`."""

    def put(self, reported: Reported) -> None:
        """Append the next report."""
        self._queue.put(reported)

    def answer(self, verdict: Verdict) -> None:
        """Append how a validation ended."""
        self._queue.put(verdict)

    def close(self, error: BaseException | None = None) -> None:
        """No more reports come; the rest is drained."""
        self.error = error
        self._queue.put(_Signal.CLOSED)

    def leave_validations(self) -> None:
        """Drain without waiting for validations any longer."""
        self.publisher.leave_validations()
        self._queue.put(_Signal.LOOK)

    def __iter__(self) -> Iterator[Reported]:
        """The reports, until the line is closed and nothing is being validated any more."""
        closed = False
        while not closed or self.publisher.validating:
            try:
                item = self._queue.get(timeout=self.publisher.next_flush())
            except queue.Empty:
                self.publisher.flush_if_due()
                continue
            if isinstance(item, Reported):
                yield item
            elif isinstance(item, Verdict):
                self.publisher.validated(item)
            else:
                closed = closed or item is _Signal.CLOSED


def gather(line: ReportLine) -> Result:
    """Await every report in sequence and publish it; a failed or skipped one takes its place and never blocks the next.

    Holds no upload slot and calls no engine. Every wait has a deadline: an upload without a sign of life for longer than
    its own deadlines allow is given up, by a tombstone that either wins against its commit or loses to it.

    Returns:
        The result, after the line was closed and drained.
    """
    for reported in line:
        record = _await(reported, line)
        if record.checkpoint is None and reported.pending is None and record.state is ReportState.SUBMITTED:
            record = replace(record, state=ReportState.COMMITTED)
        if reported.done_at is not None:
            waited = max(0.0, time.monotonic() - reported.done_at)
            record = replace(record, timings=replace(record.timings, order_wait=waited))
        reported.final = record
        report = reported.report
        line.publisher.publish(record, handled=report.mode.waits, asked=report.validation)
        reported.settled.set()
    return line.publisher.finish(line.error)


def _await(reported: Reported, line: ReportLine) -> ReportRecord:
    """The record of the head of the line; meanwhile flushes, warns of slow uploads, and watches for a dead one."""
    warned = began = time.monotonic()
    while True:
        flush = line.publisher.next_flush()
        try:
            return reported.outcome(min(FLUSH_INTERVAL, line.config.slow_upload_warning) if flush is None else flush)
        except TimeoutError:
            line.publisher.flush_if_due()
        _tell(line)
        if time.monotonic() - warned >= line.config.slow_upload_warning:
            warned = time.monotonic()
            _warn(line)
        if (silent := _silence(reported, line, began)) is not None:
            return _give_up(reported, line, silent)


def _tell(line: ReportLine) -> None:
    """One line of how uploads stand while one waits: `3 uploading, 1 waiting for limit ckpt-uploads 42 s`."""
    now, flights = time.monotonic(), list(line.live.flights.values())
    waits: dict[str, list[float]] = {}
    for flight in flights:
        if flight.state is ReportState.SUBMITTED and flight.step.startswith("waiting"):
            waits.setdefault(flight.step, []).append(now - flight.entered)
    if now - line.told < TELL_EVERY or max((max(times) for times in waits.values()), default=0.0) < TELL_EVERY:
        return
    line.told = now
    uploading = sum(flight.state is ReportState.UPLOADING for flight in flights)
    parts = [f"{len(times)} {step} {max(times):.0f} s" for step, times in waits.items()]
    logger.info("%s", ", ".join([f"{uploading} uploading", *parts]))


def _warn(line: ReportLine) -> None:
    now = time.monotonic()
    for flight in list(line.live.flights.values()):
        logger.warning(
            "upload %d has taken %.0f s so far: %s, %.1f MiB moved", flight.seq, now - flight.since, flight.step,
            flight.moved / 2**20,
        )  # fmt: skip


def _silence(reported: Reported, line: ReportLine, began: float) -> float | None:
    """Seconds without a sign of life, if that is more than the upload's own deadlines can explain.

    An upload that is over and whose engine does not answer gets the same time, from when its turn came.
    """
    flight = line.live.flights.get(reported.report.seq)
    active = began if flight is None else flight.active
    config = line.config
    slowest = config.upload_fn_timeout if reported.report.upload_fn else config.stall_timeout + config.retry_budget
    silent = time.monotonic() - active
    return silent if silent > slowest + config.limit_timeout + config.stall_timeout else None


def _give_up(reported: Reported, line: ReportLine, silent: float) -> ReportRecord:
    report = reported.report
    reason = f"given up after {silent:.0f} s without a sign of life from its upload"
    line.live.flight(report.seq).abort(reason)
    tombstone = Tombstone(
        seq=report.seq, attempt=reported.attempt, name=report.name, state=ReportState.FAILED.value, reason=reason,
        metrics=report.metrics, created=report.created,
    )  # fmt: skip
    try:
        won = line.live.attempt.give_up(tombstone)
        if not isinstance(won, Manifest):
            return reported.failed(reason)
        line.live.attempt.check_fence()
    except FencedError as error:
        return replace(reported.failed(str(error)), state=ReportState.FENCED)
    except (StorageError, FormatError) as error:
        return reported.failed(f"{reason}; {error}")
    return replace(
        reported.failed(reason), state=ReportState.COMMITTED, reason=None, checkpoint=line.publisher.reference(won),
        nbytes=won.nbytes, nfiles=len(won.files),
    )  # fmt: skip
