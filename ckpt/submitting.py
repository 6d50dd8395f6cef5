"""From `report()` to the engine: a thread of the run's own submits, in order.

The engine's own work, a millisecond or more, stays out of the training loop. And a Ctrl-C in the loop cannot fall between
an upload's submission and its place in line: a report is handed over by one call that is done or not done.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.ordering import Reported, ReportLine
from ckpt.records import Pending, Report, ReportRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handed:
    """What the trainer's thread hands over."""

    reported: Reported
    context: contextvars.Context
    """Of the call, in which the upload is submitted."""
    error: BaseException | None = None
    """What interrupted the call."""


class Submitter:
    """Takes reports from the trainer's thread, submits their uploads, and puts them in line.

    Args:
        line: where they go, each after its submission.
        submit: starts an upload at the engine.
        refuse: makes of a report that could not be submitted, and the error, the record of its failure.
        left: called with a report when its upload is over.
    """

    def __init__(
        self,
        line: ReportLine,
        submit: Callable[[Report], Pending[ReportRecord]],
        refuse: Callable[[Report, BaseException], ReportRecord],
        left: Callable[[Reported], None],
    ) -> None:
        self._line, self._submit, self._refuse, self._left = line, submit, refuse, left
        self._handed: queue.SimpleQueue[_Handed | None] = queue.SimpleQueue()
        self._ended_by: BaseException | None = None
        self._thread = threading.Thread(target=self._keep_submitting, name="ckpt-submit", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, reported: Reported) -> None:
        """Hand a report over: one that is final already only goes in line."""
        self._handed.put(_Handed(reported=reported, context=contextvars.copy_context()))

    def put_interrupted(self, reported: Reported, error: BaseException) -> None:
        """Hand over a report whose call was interrupted; nothing happens if it was handed over before that."""
        self._handed.put(_Handed(reported=reported, context=contextvars.copy_context(), error=error))

    def close(self, error: BaseException | None) -> None:
        """No more reports come; closes the line behind the last one.

        Args:
            error: what ended the run, if anything did.
        """
        self._ended_by = error
        self._handed.put(None)

    def _keep_submitting(self) -> None:
        newest = -1
        while (handed := self._handed.get()) is not None:
            reported = handed.reported
            if reported.report.seq <= newest:
                continue
            newest = reported.report.seq
            if reported.final is None:
                self._begin(handed)
            self._line.put(reported)
        self._line.close(self._ended_by)

    def _begin(self, handed: _Handed) -> None:
        reported = handed.reported
        try:
            if handed.error is not None:
                raise handed.error
            pending = handed.context.run(self._submit, reported.report)
        except BaseException as error:  # noqa: BLE001 - an engine that is closing, an interrupted call: the report's failure
            reported.final = self._refuse(reported.report, error)
            reported.settle()
            return
        reported.pending = pending
        pending.add_done_callback(lambda _: self._left(reported))
