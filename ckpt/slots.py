"""Upload slots: how many checkpoints upload at once in a process, granted in the order of their reports."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.errors import DeadlineError


class DroppedError(Exception):
    """The report was dropped while it waited; carries the reason."""


class UploadSlots:
    """Slots in line order, and the bound on what is pending.

    A report takes its place in line at its `report()` call and its slot in the upload task, so that slots are granted
    in seq order whatever order the tasks' threads start in.

    Args:
        slots: uploads at once.
        max_pending: reports that are not final, uploading ones included.
    """

    def __init__(self, slots: int, max_pending: int) -> None:
        self._free = slots
        self._max_pending = max_pending
        self._line: deque[int] = deque()
        self._droppable: set[int] = set()
        self._dropped: dict[int, str] = {}
        self._pending: set[int] = set()
        self._changed = threading.Condition()

    def enter(self, seq: int, *, droppable: bool, drop: bool, timeout: float, interrupted: Callable[[], bool]) -> None:
        """Take a place in line; where none is free, drop the oldest droppable one that waits, or block.

        Raises:
            DeadlineError: no place came free in `timeout` seconds, or `interrupted()` said to give up.
        """
        with self._changed:
            if drop and len(self._pending) >= self._max_pending:
                self._drop_oldest()
            deadline = time.monotonic() + timeout
            while len(self._pending) >= self._max_pending:
                left = deadline - time.monotonic()
                if interrupted():
                    raise DeadlineError("another driver took the run over while this report waited for a place in line")
                if left <= 0:
                    raise DeadlineError(
                        f"{self._max_pending} earlier reports are still uploading after {timeout:.0f} s (max_pending="
                        f"{self._max_pending}): uploads are slower than reports"
                    )
                self._changed.wait(min(left, 1.0))
            self._pending.add(seq)
            self._line.append(seq)
            if droppable:
                self._droppable.add(seq)

    def leave(self, seq: int) -> None:
        """The report is final (or was never submitted)."""
        with self._changed:
            self._pending.discard(seq)
            self._forget(seq)
            self._changed.notify_all()

    @contextmanager
    def slot(self, seq: int, *, timeout: float | None = None) -> Iterator[None]:
        """Hold a slot for the length of the block; the head of the line gets the next free one.

        Raises:
            DroppedError: the report was dropped while it waited.
            DeadlineError: no slot in `timeout` seconds.
        """
        with self._changed:
            if seq not in self._line and seq not in self._dropped:
                self._line.append(seq)  # a task run on its own, without a report() before it
            ready = self._changed.wait_for(
                lambda: seq in self._dropped or (self._free > 0 and self._line[0] == seq), timeout
            )
            reason = self._dropped.get(seq)
            self._forget(seq)
            if reason is not None or not ready:
                self._changed.notify_all()
                if reason is not None:
                    raise DroppedError(reason)
                raise DeadlineError(f"no upload slot came free in {timeout:.0f} s")
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    @property
    def pending(self) -> int:
        """Reports that are not final."""
        with self._changed:
            return len(self._pending)

    @property
    def waiting(self) -> int:
        """Reports in line for a slot."""
        with self._changed:
            return len(self._line)

    def drop_waiting(self, reason: str) -> None:
        """Drop every report that still waits for a slot."""
        with self._changed:
            for seq in list(self._line):
                self._dropped[seq] = reason
                self._line.remove(seq)
            self._changed.notify_all()

    def _drop_oldest(self) -> None:
        for seq in self._line:
            if seq in self._droppable:
                self._dropped[seq] = f"dropped for a newer report: {self._max_pending} were pending (when_full='drop')"
                self._line.remove(seq)
                self._pending.discard(seq)
                self._changed.notify_all()
                return

    def _forget(self, seq: int) -> None:
        self._droppable.discard(seq)
        self._dropped.pop(seq, None)
        if seq in self._line:
            self._line.remove(seq)
