"""Termination signals during a training run: the loop may save just in time, uploads may finish, and then it ends.

The first SIGTERM or SIGINT sets `stop_requested()`. The loop gets 10 s; if it is still in the block then, the
termination is raised in it. Uploads get the rest of `stop_timeout`, and are aborted after it. Later signals are ignored
meanwhile.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ckpt import Run

logger = logging.getLogger("ckpt")

LOOP_TIME = 10.0
"""Seconds that the training loop gets to notice `stop_requested()`, save, report and leave."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """The handler of both signals for one run; passes the termination on to whoever handled it before."""

    def __init__(self) -> None:
        self.run: Run | None = None
        """The run to stop; signals before it is open are passed on at once."""
        self._previous: dict[int, Any] = {}
        self._first: int | None = None
        self._in_block = False
        self._raising = False
        self._timers: list[threading.Timer] = []

    def install(self) -> None:
        """Take over the signals; only the main thread can."""
        self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def restore(self) -> None:
        """Give the signals back."""
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def block(self, run: Run) -> Iterator[None]:
        """The part in which the training loop runs, and may be interrupted by the termination."""
        self.run, self._in_block = run, True
        try:
            yield
        finally:
            self._in_block = False

    def pass_on(self) -> None:
        """Raise the termination that was put off, if there was one and it was not raised yet."""
        if self._first is not None and not self._raising:
            self._raising = True
            self._raise(self._first, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.run is None:
            self._raise(number, frame)
        elif self._first is None:
            self._first = number
            self._begin(self.run, number)
        elif self._in_block and self._due:
            self._raising = True
            self._raise(self._first, frame)

    _due = False
    """Set by the timer just before it sends the signal again."""

    def _begin(self, run: Run, number: int) -> None:
        logger.warning(
            "%s: stop requested; the loop has %.0f s to save, uploads %.0f s in all",
            signal.Signals(number).name, LOOP_TIME, run.config.stop_timeout,
        )  # fmt: skip
        run.request_stop()
        self._after(min(LOOP_TIME, run.config.stop_timeout / 2), lambda: self._interrupt(number))
        self._after(run.drain_timeout() or 0.0, lambda: run.abort("aborted: stop_timeout is over"))

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.name = "ckpt-stop"
        timer.start()
        self._timers.append(timer)

    def _interrupt(self, number: int) -> None:
        self._due = True
        if self._in_block:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def stop_signals() -> Iterator[Stopping]:
    """Own the termination signals for the length of the block; outside the main thread they are left alone."""
    stopping = Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    stopping.install()
    try:
        yield stopping
    finally:
        stopping.restore()
