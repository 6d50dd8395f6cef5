"""An open run: what happens between `report()` and the end of the `with` block."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.checkpoint import Checkpoint
from ckpt.config import RunConfig, ValidationTaskConfig
from ckpt.context import CheckpointConsistencyMode, ReportedCheckpoint, StorageContext, TrainContext, acting_for
from ckpt.credentials import redact
from ckpt.errors import (
    CkptError,
    ConfigError,
    DeadlineError,
    FencedError,
    OrderingError,
    TooManyFailuresError,
    UploadFailedError,
)
from ckpt.inflight import Destination, Live
from ckpt.layout import check_relative, location_of
from ckpt.metrics import freeze_metrics
from ckpt.ordering import Reported, ReportLine
from ckpt.publishing import Publisher, raise_if_red
from ckpt.records import CheckpointUploadMode, Pending, Report, ReportRecord, ReportState, Submit, Timings, UploadFn
from ckpt.result import Result
from ckpt.staging import Source, scan
from ckpt.storage import join_uri
from ckpt.submitting import Submitter
from ckpt.upload_functions import check_upload_fn, freeze_function
from ckpt.validating import Validations

logger = logging.getLogger("ckpt")

Gather = Callable[[ReportLine], Pending[Result]]
"""Starts the ordering task; a thread by default."""

_PUBLISH_TIMEOUT = 3600.0
"""Seconds that `get_all_reported_checkpoints` waits if it is not told."""
_ABORT_TIME = 5.0
"""Seconds that aborted uploads get to clean up and to be published as failed; a fifth of a shorter `stop_timeout`."""
_LISTEN_EVERY = 0.5
"""Seconds between two looks at whether a drain was asked to stop meanwhile."""


class ReportHandle:
    """What `report()` gives back: the report's seq, its state, and a way to wait for its end."""

    def __init__(self, reported: Reported, live: Live) -> None:
        self._reported, self._live = reported, live

    @property
    def seq(self) -> int:
        """The report's place in the run's order."""
        return self._reported.report.seq

    @property
    def state(self) -> ReportState:
        """Where it is now."""
        if self._reported.final is not None:
            return self._reported.final.state
        if self._reported.pending is None:
            return ReportState.SUBMITTED
        with suppress(TimeoutError):
            return self._reported.outcome(0).state
        flight = self._live.flights.get(self.seq)
        return ReportState.SUBMITTED if flight is None else flight.state

    def wait(self, timeout: float | None = None) -> ReportRecord:
        """The final record; does not raise if the report failed.

        Raises:
            TimeoutError: not final after `timeout` seconds.
        """
        if not self._reported.settled.wait(timeout):
            raise DeadlineError(f"report {self.seq} is not final after {timeout} s")
        return self._reported.outcome(0)

    def __repr__(self) -> str:
        return f"ReportHandle(seq={self.seq}, state={self.state.value})"


@dataclass(slots=True, kw_only=True)
class _Stop:
    """The request to stop; taken note of at a report only."""

    asked: threading.Event
    noted: bool = False
    since: float | None = None
    """Monotonic seconds of the request."""
    aborted: str | None = None
    """Why uploads are ended, once they are."""


class Run:
    """An open run. Made by `open_run` and `training_run`; its `report` is `ckpt.report` inside the block."""

    def __init__(
        self,
        config: RunConfig,
        destination: Destination,
        live: Live,
        publisher: Publisher,
        submit: Submit,
        first_seq: int,
    ) -> None:
        self.config = config
        self.destination = destination
        self._result: Result | None = None
        self.line = ReportLine(publisher, live, config.upload_config)
        self.publisher = publisher
        self.context = TrainContext(
            experiment_name=config.name, storage=StorageContext(uri=destination.uri, attempt=destination.attempt)
        )
        self._live = live
        self._submit = submit
        self._submitter = Submitter(self.line, self._start, self._refused, self._left)
        self._validations: Validations | None = None
        self._ordering: Pending[Result] | None = None
        self._next_seq = first_seq
        self._uses: dict[str, int] = {}
        self._copying = False
        self._stop = _Stop(asked=threading.Event())
        self._fenced: FencedError | None = None
        self.reporting = False
        """Whether a thread is in the part of `report()` that a termination is better put off for."""
        self._fence_told = False
        """Whether the trainer knows."""
        self._closed = False
        self._lock = threading.Lock()
        self._real_root = self.uri if "://" in self.uri else os.path.realpath(self.uri)

    @property
    def result(self) -> Result:
        """What the run left.

        Raises:
            CkptError: its block has not ended.
        """
        if self._result is None:
            raise CkptError(f"run {self.config.name} has no result before the end of its `with` block")
        return self._result

    @property
    def ended(self) -> bool:
        """Whether the block has ended and the result is made."""
        return self._result is not None

    @property
    def uri(self) -> str:
        """Where the run is."""
        return self.destination.uri

    def get_checkpoint(self) -> Checkpoint | None:
        """See `ckpt.get_checkpoint`."""
        return self.publisher.latest

    def get_all_reported_checkpoints(
        self,
        consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
        timeout_s: float | None = None,
    ) -> list[ReportedCheckpoint]:
        """See `ckpt.get_all_reported_checkpoints`."""
        if not isinstance(consistency_mode, CheckpointConsistencyMode):
            raise ConfigError(f"consistency_mode={consistency_mode!r} must be a CheckpointConsistencyMode")
        timeout = _PUBLISH_TIMEOUT if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout
        if not self.publisher.wait_published(self._next_seq, timeout):
            logger.warning("get_all_reported_checkpoints: not every report is published after %.0f s", timeout)
        elif consistency_mode.waits_for_validation and not self.publisher.wait_validated(deadline - time.monotonic()):
            logger.warning("get_all_reported_checkpoints: validations are still under way after %.0f s", timeout)
        return [
            ReportedCheckpoint(
                checkpoint=record.checkpoint, metrics=record.metrics, status=self.publisher.status(record)
            )
            for record in self.publisher.retained()
            if record.checkpoint is not None
        ]

    def request_stop(self) -> None:
        """Ask the training to stop; `stop_requested()` says so from the next report on.

        Validations are not waited for from now on: the next attempt does those that are not over.
        """
        self._stop.since = self._stop.since or time.monotonic()
        self._stop.asked.set()
        self._stop_validations()

    def abort(self, reason: str) -> None:
        """End every upload that is not done, and later ones too; they become FAILED or SKIPPED with this reason."""
        self._stop.aborted = reason
        self._live.abort(reason)
        self.publisher.hurry()
        self._stop_validations()

    def _stop_validations(self) -> None:
        if self._validations is not None:
            self._validations.stop()
            self.line.leave_validations()

    def time_left(self) -> float | None:
        """Seconds until the end, if a stop was requested: what is left of `stop_timeout`; None: no limit."""
        if self._stop.since is None:
            return None
        return max(0.0, self._stop.since + self.config.stop_timeout - time.monotonic())

    def drain_timeout(self) -> float | None:
        """Seconds that uploads have to finish: what is left without the time to abort them; None: no limit."""
        left = self.time_left()
        return None if left is None else max(0.0, left - self._abort_time)

    @property
    def _abort_time(self) -> float:
        return min(_ABORT_TIME, self.config.stop_timeout / 5)

    def stop_requested(self) -> bool:
        """See `ckpt.stop_requested`."""
        return self._stop.noted

    @contextmanager
    def checkpoint_dir(self) -> Iterator[Path]:
        """See `ckpt.checkpoint_dir`."""
        assert self._live.staging is not None
        with self._live.staging.scratch() as path:
            yield path

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode | None = None,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: UploadFn | None = None,
        validation: bool | ValidationTaskConfig = False,
    ) -> ReportHandle:
        """See `ckpt.report`."""
        began = time.monotonic()
        with self._lock, self._put_off():
            self._check_usable()
            draft = self._draft(
                metrics, checkpoint, checkpoint_dir_name, checkpoint_upload_mode, delete_local_checkpoint_after_upload,
                checkpoint_upload_fn, validation,
            )  # fmt: skip
            reported = self._place(draft, began)
            self._stop.noted = self._stop.asked.is_set()
        handle = ReportHandle(reported, self._live)
        if draft.mode.waits and draft.checkpoint is not None:
            record = handle.wait()
            if record.state is not ReportState.COMMITTED:
                raise UploadFailedError(record)
        return handle

    @contextmanager
    def _put_off(self, on: bool = True) -> Iterator[None]:
        """Say that this is no place to be interrupted, or with `on=False` that it is one again."""
        self.reporting = on
        try:
            yield
        finally:
            self.reporting = not on

    def _check_usable(self) -> None:
        if self._closed:
            raise CkptError(f"run {self.config.name} has ended; reports are made inside its `with` block")
        self._check_fenced()
        if self._ordering is not None:
            try:
                self._ordering.result(0)
            except TimeoutError:
                pass
            except Exception as error:
                raise OrderingError(f"the ordering task of run {self.config.name} died: {error}") from error
            else:
                raise OrderingError(f"the ordering task of run {self.config.name} ended early")
        limit = self.config.failure_policy.stop_after
        if limit is not None and self.publisher.failures_in_a_row >= limit:
            raise TooManyFailuresError(
                f"{self.publisher.failures_in_a_row} reports in a row failed (stop_after={limit}); the reasons are in the "
                f"history of {self.uri}"
            )

    def _draft(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        name: str | None,
        mode: CheckpointUploadMode | None,
        delete: bool | None,
        fn: UploadFn | None,
        validation: bool | ValidationTaskConfig,
    ) -> Report:
        """Everything that can be validated, validated; nothing has happened yet if this raises."""
        if mode is not None and not isinstance(mode, CheckpointUploadMode):
            raise ConfigError(
                f"checkpoint_upload_mode={mode!r} must be a CheckpointUploadMode, such as CheckpointUploadMode.ASYNC"
            )
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise ConfigError(
                f"checkpoint must be a ckpt.Checkpoint, not {type(checkpoint).__name__}: "
                "use Checkpoint.from_directory(path) or Checkpoint(uri)"
            )
        if validation is not False and checkpoint is None:
            raise ConfigError("validation needs a checkpoint: report one with it")
        asked = self.config.asked(validation)
        chosen = mode or CheckpointUploadMode.ASYNC
        delete_local = delete if delete is not None else (mode is not None and mode.deletes_local)
        seq = self._next_seq
        label = check_relative(name, "checkpoint_dir_name") if name is not None else f"checkpoint_{seq:06d}"
        draft = Report(
            seq=seq,
            name=label,
            named=name is not None,
            metrics=freeze_metrics(metrics),
            checkpoint=checkpoint,
            mode=chosen,
            delete_local=delete_local and chosen.moves_bytes,
            upload_fn=None if fn is None else freeze_function(check_upload_fn(fn)),
            metadata={} if checkpoint is None else checkpoint.pending_metadata,
            validation=asked,
        )
        return draft if checkpoint is None else self._with_source(draft, checkpoint)

    def _with_source(self, draft: Report, checkpoint: Checkpoint) -> Report:
        if not draft.mode.moves_bytes:
            if draft.upload_fn is not None:
                raise ConfigError(
                    "NO_UPLOAD moves nothing, so a checkpoint_upload_fn is never called: leave one of them out"
                )
            if checkpoint.is_local and not Path(checkpoint.uri).is_dir():
                raise ConfigError(f"NO_UPLOAD of {checkpoint.uri}: it is not a directory that exists")
            return draft
        if not checkpoint.is_local:
            return draft
        path = Path(checkpoint.uri)
        if draft.upload_fn is not None and not path.is_dir():
            return draft  # the function may know what this path means
        self._check_apart(path, draft)
        source = scan(path)
        if not source.files and draft.upload_fn is None:
            raise ConfigError(f"checkpoint directory {path} holds no file: save before reporting")
        return replace(draft, source=source)

    def _check_apart(self, path: Path, draft: Report) -> None:
        """A directory that is, contains or lies in the run's own place must not be uploaded into itself, or deleted."""
        real = str(path.resolve())
        if real == "/":
            raise ConfigError("the root of the file system cannot be a checkpoint")
        if draft.delete_local and (other := self._live.locations.overlapping(str(path))):
            raise ConfigError(
                f"checkpoint directory {path} overlaps the committed checkpoint {other}, and is to be deleted after its "
                "upload: report another directory, or give delete_local_checkpoint_after_upload=False"
            )
        if "://" in self.uri:
            return
        root = self._real_root
        contains = root == real or root.startswith(f"{real}/")
        if contains and (draft.delete_local or draft.upload_fn is None):
            raise ConfigError(
                f"checkpoint directory {path} contains the run's storage {root}: report the checkpoint's own directory"
            )
        if real.startswith(f"{root}/") and draft.upload_fn is None:
            raise ConfigError(
                f"checkpoint directory {path} lies in the run's storage {root}: report it with "
                "CheckpointUploadMode.NO_UPLOAD, or save it elsewhere"
            )

    def _place(self, draft: Report, began: float) -> Reported:
        """Take a location and stage, then hand over; what goes wrong after the location is a FAILED report."""
        reported = Reported(report=draft, attempt=self.destination.attempt)
        try:
            if draft.checkpoint is None:
                reported.final = self._record(draft, ReportState.SUBMITTED)
                reported.done_at = time.monotonic()
            else:
                reported.report = replace(draft, location=self._reserve(draft))
                self._prepare(reported)
            reported.stalled(began)
            self._next_seq = draft.seq + 1
            self._submitter.put(reported)
        except Exception:
            raise  # nothing has happened
        except BaseException as error:  # Ctrl-C, a termination: what was staged is kept, and the report has its row
            self._next_seq = draft.seq + 1
            self._submitter.put_interrupted(reported, error)
            raise
        return reported

    def _prepare(self, reported: Reported) -> None:
        """Wait for room, and stage."""
        try:
            with self._put_off(on=False):
                self._enter(reported.report)
            reported.report = replace(reported.report, source=self._staged(reported.report))
            self._live.flight(reported.report.seq)
        except Exception as error:  # noqa: BLE001 - the trainer's loop must survive a full disk
            reported.final = self._refused(reported.report, error)
            reported.settle()

    def _start(self, report: Report) -> Pending[ReportRecord]:
        """Submit an upload; called by the submitter, in the context of the `report()` call."""
        flight = self._live.flight(report.seq)
        if self._stop.aborted is not None:
            flight.abort(self._stop.aborted)
        with acting_for(self):
            return self._submit(report)

    def _enter(self, draft: Report) -> None:
        config = self.config.upload_config
        self._live.slots.enter(
            draft.seq,
            droppable=draft.mode.may_be_dropped,
            drop=config.when_full == "drop" and draft.mode.may_be_dropped,
            timeout=config.block_timeout,
            interrupted=lambda: self.publisher.fenced or self._fenced is not None,
        )

    def _left(self, reported: Reported) -> None:
        self._live.flights.pop(reported.report.seq, None)
        self._live.slots.leave(reported.report.seq)
        reported.settle()

    def _reserve(self, draft: Report) -> str | None:
        """A location that no other report has, for the default persist; custom uploads of the same name count as uses."""
        use = self._uses.get(draft.name, 0) + 1
        location = None
        if draft.upload_fn is None and draft.mode.moves_bytes:
            location = location_of(draft.name, self.destination.attempt, use)
            self._live.locations.claim(join_uri(self.uri, location))
        elif draft.upload_fn is not None:
            self._check_built_path_free(draft.name)
        if draft.named:
            self._uses[draft.name] = use
        return location

    def _check_built_path_free(self, name: str) -> None:
        """A function that writes where `build_checkpoint_path_from_name` says would overwrite what is committed there."""
        built = join_uri(self.uri, location_of(name, self.destination.attempt))
        if self._live.locations.overlapping(built):
            raise ConfigError(
                f"checkpoint_dir_name={name!r} is taken in this attempt, and a checkpoint_upload_fn that writes to "
                f"{built} would overwrite a committed checkpoint: give each checkpoint a name of its own"
            )

    def _staged(self, draft: Report) -> Source | None:
        """With a custom function the directory stays where it is: an async writer may still be writing."""
        if draft.source is None or draft.upload_fn is not None:
            return draft.source
        assert self._live.staging is not None
        staged, copied = self._live.staging.take(draft.source, rename=draft.delete_local)
        if copied and not self._copying:
            self._copying = True
            logger.warning(
                "%s had to be copied inside report(): no staging folder is on its file system. Set staging_dir to a folder "
                "there, or save into checkpoint_dir()", draft.source.original,
            )  # fmt: skip
        return staged

    def _refused(self, report: Report, error: BaseException) -> ReportRecord:
        """The failure of a report before its upload began; what is staged may be all there is of it, and is kept."""
        self._live.slots.leave(report.seq)
        self._live.flights.pop(report.seq, None)
        reason = redact(str(error) if isinstance(error, DeadlineError) else f"{type(error).__name__}: {error}")
        if report.source is not None and report.source.staged and self._live.staging is not None:
            try:
                reason += f" (its files are kept at {self._live.staging.keep(report.source, report.seq)})"
            except OSError as failure:
                reason += f" (its files are at {report.source.root}; they could not be moved: {failure})"
        return self._record(report, ReportState.FAILED, reason)

    def _record(self, report: Report, state: ReportState, reason: str | None = None) -> ReportRecord:
        return ReportRecord(
            seq=report.seq, attempt=self.destination.attempt, name=report.name, state=state, metrics=report.metrics,
            reason=reason, created=report.created, timings=Timings(stall=report.stall),
        )  # fmt: skip

    def validates(self, validations: Validations) -> None:
        """Have checkpoints validated that were reported for it; said before anything is published."""
        self._validations = validations
        self.publisher.ask = validations.ask

    def begin(self, gather: Gather) -> None:
        """Start the ordering task, and the validations that an earlier attempt left."""
        self._ordering = gather(self.line)
        self._submitter.start()
        if self._validations is not None:
            with acting_for(self):
                self._validations.begin()

    def fence(self, error: FencedError) -> None:
        """Another driver owns the run: the next report raises, or the end of the block if there is none."""
        self._fenced = error
        self._stop_validations()

    def _check_fenced(self) -> None:
        if self._fenced is not None or self.publisher.fenced:
            self._fence_told = True
            raise self._fenced or FencedError(
                f"another driver took {self.uri} over; this run publishes nothing any more"
            )

    def check_end(self) -> None:
        """Raise what makes a drained run red: that it is another driver's, if no report said so; else by the policy.

        Raises:
            FencedError, CheckpointsLostError: it is red.
        """
        if not self._fence_told:
            self._check_fenced()
        raise_if_red(self.publisher, self.config.failure_policy, self.result)

    def end(self, error: BaseException | None) -> Result:
        """No more reports; drain what is in flight and take the result.

        As long as bytes move there is no limit; once the run was asked to stop, before or meanwhile, there is one.

        Args:
            error: what ended the block, if anything did.

        Raises:
            OrderingError: the ordering task died, or uploads did not even end when they were aborted.
        """
        with self._lock:
            self._closed = True
        self._submitter.close(error)
        assert self._ordering is not None
        try:
            self._result = self._drained(self._ordering)
        except Exception as failure:
            raise OrderingError(f"the ordering task of run {self.config.name} died: {failure}") from failure
        finally:
            if self._validations is not None:
                self._validations.leave()
        return self._result

    def _drained(self, ordering: Pending[Result]) -> Result:
        over = threading.Event()
        ordering.add_done_callback(lambda _: over.set())
        while not over.wait(_LISTEN_EVERY):
            if self.drain_timeout() == 0.0:
                timeout = self.config.stop_timeout
                self.abort(f"aborted: the run was asked to stop, and its stop_timeout of {timeout:.0f} s is over")
                break
        if not over.wait(self._abort_time):
            raise DeadlineError(f"aborted uploads have not stopped after {self._abort_time:.0f} s")
        return ordering.result()
