"""Validation beside the training: the user's function on each committed checkpoint that was reported for it.

`validate()` is what the `validate_checkpoint` task runs. Its verdict is a note in the store, so a validation that was
interrupted is one that was asked for in a manifest and has no verdict: the next attempt does it.
"""

from __future__ import annotations

import contextvars
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt.calling import PASS_THROUGH, call_with_deadline, name_of
from ckpt.checkpoint import Checkpoint
from ckpt.config import VALIDATION_TIMEOUT, RunConfig, ValidationTaskConfig
from ckpt.context import ReportedCheckpointStatus
from ckpt.credentials import redact
from ckpt.errors import DeadlineError, FencedError, FormatError, StorageError, ValidationFailedError
from ckpt.inflight import Destination, Flight
from ckpt.layout import CommitId
from ckpt.metrics import Metrics, freeze_metrics
from ckpt.notes import Note, write_verdict
from ckpt.records import Pending
from ckpt.upload_functions import freeze_function

_STATUS = {
    "validated": ReportedCheckpointStatus.VALIDATED,
    "timeout": ReportedCheckpointStatus.VALIDATION_TIMEOUT,
    "failed": ReportedCheckpointStatus.VALIDATION_FAILED,
}
_LABEL = {status: label for label, status in _STATUS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One checkpoint to validate."""

    commit: CommitId
    checkpoint: Checkpoint
    destination: Destination
    """The run's attempt."""
    fn: Callable[..., Any]
    task: ValidationTaskConfig
    """The function's arguments, and its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a validation ended."""

    commit: CommitId
    status: ReportedCheckpointStatus
    """PENDING_VALIDATION: it was interrupted, and the next attempt does it."""
    metrics: Metrics = field(default_factory=dict)
    """What it added to the checkpoint's."""
    reason: str | None = None
    """Why it is not VALIDATED."""
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Whether it is in the store and will not be done again."""
        return self.status is not ReportedCheckpointStatus.PENDING_VALIDATION


SubmitValidation = Callable[[Validation], Pending[Verdict]]
"""Starts `validate(validation)` on an engine; a thread pool by default."""


def validate(validation: Validation) -> Verdict:
    """Validate one committed checkpoint, and note the verdict in its run: the first verdict made is the one that counts.

    Whatever the function does is a verdict. It is interrupted, without one, if the run ends, if another driver took the
    run over, or if the verdict cannot be written.

    Returns:
        VALIDATED; or PENDING_VALIDATION, if it was interrupted.

    Raises:
        ValidationFailedError: any other verdict, which it carries.
    """
    live = validation.destination.live()
    flight = live.validating.setdefault(validation.commit.seq, Flight(seq=validation.commit.seq))
    began = time.monotonic()
    verdict = _judged(validation, flight)
    verdict = replace(verdict, seconds=time.monotonic() - began)
    if not verdict.over:
        return verdict
    try:
        live.attempt.check_fence()  # what fails for a driver that was replaced may work for its successor
        note = write_verdict(
            live.attempt.objects, verdict.commit, metrics=verdict.metrics, verdict=_LABEL[verdict.status],
            reason=verdict.reason, source=f"validation by {name_of(validation.fn)}",
        )  # fmt: skip
    except (FencedError, FormatError, StorageError) as error:
        return _interrupted(verdict, f"its verdict could not be noted: {redact(str(error))}")
    noted = replace(verdict, status=status_of(note), metrics=note.metrics, reason=note.reason)
    if noted.status is not ReportedCheckpointStatus.VALIDATED:
        raise ValidationFailedError(noted)
    return noted


def status_of(note: Note | None) -> ReportedCheckpointStatus:
    """What a verdict's note says; without one the validation is still to be done."""
    if note is None:
        return ReportedCheckpointStatus.PENDING_VALIDATION
    return _STATUS.get(str(note.verdict), ReportedCheckpointStatus.VALIDATION_FAILED)


def _judged(validation: Validation, flight: Flight) -> Verdict:
    """What the function says, or what is wrong with it."""
    fn, task = validation.fn, validation.task
    timeout = VALIDATION_TIMEOUT if task.timeout_s is None else task.timeout_s
    deadline = time.monotonic() + timeout
    verdict = Verdict(commit=validation.commit, status=ReportedCheckpointStatus.VALIDATION_FAILED)
    try:
        metrics = call_with_deadline(
            partial(_metrics, fn, validation.checkpoint, task.fn_kwargs),
            what=f"validation_fn {name_of(fn)}",
            thread=f"ckpt-validation-fn-{validation.commit.seq}",
            timeout=timeout,
            when_aborted=flight.when_aborted,
        )
    except PASS_THROUGH:
        raise
    except DeadlineError as error:
        if flight.aborted is not None:
            return _interrupted(verdict, flight.aborted)
        timed_out = time.monotonic() >= deadline
        status = ReportedCheckpointStatus.VALIDATION_TIMEOUT if timed_out else verdict.status
        return replace(verdict, status=status, reason=redact(str(error)))
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the verdict's reason and ends nothing
        return replace(verdict, reason=redact(f"{type(error).__name__}: {error}"))
    return replace(verdict, status=ReportedCheckpointStatus.VALIDATED, metrics=metrics)


def _metrics(fn: Callable[..., Any], checkpoint: Checkpoint, kwargs: Mapping[str, Any], deadline: float) -> Metrics:
    value = fn(checkpoint, **kwargs)
    if inspect.iscoroutine(value):
        import asyncio

        value = asyncio.run(asyncio.wait_for(value, deadline - time.monotonic()))
    if not isinstance(value, Mapping):
        raise TypeError(f"validation_fn {name_of(fn)} must return a mapping of metrics; it returned {value!r:.80}")
    return freeze_metrics(value)


def _interrupted(verdict: Verdict, reason: str) -> Verdict:
    return replace(verdict, status=ReportedCheckpointStatus.PENDING_VALIDATION, metrics={}, reason=reason)


class Validations:
    """The validations of one attempt: so many at once, started in the order they were asked for.

    Args:
        destination: the attempt.
        config: has the function, and how many at once.
        submit: starts one.
        answer: is given each verdict, in the thread that it came in.
    """

    def __init__(
        self,
        destination: Destination,
        config: RunConfig,
        submit: SubmitValidation,
        answer: Callable[[Verdict], None],
    ) -> None:
        self._destination, self._fn = destination, freeze_function(config.validation_fn)
        self._submit, self._answer = submit, answer
        self._flights = destination.live().validating
        self._free = config.max_concurrent_validations
        self._waiting: deque[Validation] = deque()
        self._running: dict[CommitId, Flight] = {}
        self._context: contextvars.Context | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def ask(self, commit: CommitId, checkpoint: Checkpoint, asked: Mapping[str, Any]) -> None:
        """Have a committed checkpoint validated; `asked` is what its manifest says."""
        task = ValidationTaskConfig.from_json(asked)
        validation = Validation(
            commit=commit, checkpoint=checkpoint, destination=self._destination, fn=self._fn, task=task
        )
        with self._lock:
            self._waiting.append(validation)
        self._start_some()

    def begin(self) -> None:
        """Start what waits, and from now on what comes; all of it with this thread's context."""
        self._context = contextvars.copy_context()
        self._start_some()

    def stop(self) -> None:
        """Start no more; those under way go on."""
        with self._lock:
            self._stopped = True

    def leave(self) -> None:
        """End those under way, without a verdict; the next attempt does them."""
        with self._lock:
            self._stopped = True
            flights = list(self._running.values())
        for flight in flights:
            flight.abort("the run ended")

    def _start_some(self) -> None:
        while (item := self._next()) is not None:
            self._start(item)

    def _next(self) -> Validation | None:
        with self._lock:
            if self._context is None or self._stopped or not self._free or not self._waiting:
                return None
            item = self._waiting.popleft()
            self._free -= 1
            self._running[item.commit] = self._flights.setdefault(item.commit.seq, Flight(seq=item.commit.seq))
            return item

    def _start(self, item: Validation) -> None:
        assert self._context is not None
        try:
            pending = self._context.copy().run(self._submit, item)
        except Exception as error:  # noqa: BLE001 - an engine that takes nothing any more ends no training
            failed: Future[Verdict] = Future()
            failed.set_exception(error)
            pending = failed
        pending.add_done_callback(lambda _: self._over(item, pending))

    def _over(self, item: Validation, pending: Pending[Verdict]) -> None:
        with self._lock:
            self._running.pop(item.commit, None)
            self._flights.pop(item.commit.seq, None)
            self._free += 1
        self._answer(_outcome(item, pending))
        self._start_some()


def _outcome(item: Validation, pending: Pending[Verdict]) -> Verdict:
    """The verdict; what an engine made of it otherwise is none."""
    try:
        return pending.result(0)
    except ValidationFailedError as error:
        return error.verdict
    except BaseException as error:  # noqa: BLE001 - an engine's own ways to end
        reason = redact(f"{type(error).__name__}: {error}")
        return Verdict(commit=item.commit, status=ReportedCheckpointStatus.PENDING_VALIDATION, reason=reason)
