"""Termination signals during a training run: the loop may save just in time, uploads may finish, and then it ends.

The first SIGTERM or SIGINT sets `stop_requested()`. The loop gets 10 s; if it is still in the block then, the
termination is raised in it. Uploads get the rest of `stop_timeout`, and are aborted after it. Later signals are ignored
meanwhile. What then ends the flow run is the handler that was there before: Prefect's, in a flow run.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from prefect.utilities import engine

from ckpt import Run

logger = logging.getLogger("ckpt")

LOOP_TIME = 10.0
"""Seconds that the training loop gets to notice `stop_requested()`, save, report and leave; half of a `stop_timeout`
under 20 s."""

_PUT_OFF = 2.0
"""Seconds for which a loop inside `report()` is not interrupted; a staging copy in it may take minutes."""
_PUT_OFF_EVERY = 0.02

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """The handler of both signals for one run; passes the termination on to whoever handled it before.

    The handler itself takes no lock: it interrupts the main thread anywhere, also where that holds one. What there is to
    do is done by a thread.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        """The run to stop; signals before it is open are passed on at once."""
        self._handler = self._on_signal  # one object: Prefect compares it by identity
        self._previous: dict[int, Any] = {}
        self._first: int | None = None
        self._in_block = False
        self._due = False
        """Set just before the signal is sent again, to be raised in the loop this time."""
        self._put_off = False
        """Whether `report()` may finish first."""
        self._received: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._keep_time, name="ckpt-stop", daemon=True)

    @property
    def requested(self) -> bool:
        """Whether a signal has come that the run is to obey."""
        return self._first is not None

    @property
    def exit_code(self) -> int:
        """What a process that the first signal ended has for a shell."""
        return 128 + (self._first or 0)

    def install(self) -> None:
        """Take over the signals; only the main thread can."""
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
        with _prefects_lock():
            if self._previous[signal.SIGTERM] is _prefects_handler():
                _be_prefects(self._handler)
            for number in _SIGNALS:
                signal.signal(number, self._handler)
        self._thread.start()

    def restore(self) -> None:
        """Give the signals back."""
        with _prefects_lock():
            if _prefects_handler() is self._handler:
                _be_prefects(self._previous[signal.SIGTERM])
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._received.put(None)
        self._thread.join(5.0)

    @contextmanager
    def block(self, run: Run) -> Iterator[None]:
        """The part in which the training loop runs, and may be interrupted by the termination."""
        self.run, self._in_block = run, True
        try:
            yield
        finally:
            self._in_block = False

    def pass_on(self) -> None:
        """Raise the termination that was put off, if there was one; the first signal's."""
        if self._first is not None:
            self._raise(self._first, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.run is None:
            self._raise(number, frame)
        elif self._first is not None and self._due:
            if self._put_off and self.run.reporting:
                return
            self._due = False
            if self._in_block:
                self._raise(self._first, frame)
        else:
            self._first = self._first or number
            self._received.put(number)  # a SimpleQueue's put may interrupt itself

    def _keep_time(self) -> None:
        """The thread: waits for the first signal, then for the two deadlines."""
        number, run = self._received.get(), self.run
        if number is None or run is None:
            return
        began, timeout = time.monotonic(), run.config.stop_timeout
        loop_time = min(LOOP_TIME, timeout / 2)
        run.request_stop()
        logger.warning(
            "%s: stop requested; the loop has %.0f s to save, uploads %.0f s in all",
            signal.Signals(number).name, loop_time, timeout,
        )  # fmt: skip
        if not self._passed(began + loop_time, began + timeout):
            return
        if self._in_block:
            logger.warning("the training loop has not stopped in %.0f s and is interrupted", loop_time)
            self._interrupt(number)
        if not self._passed(time.monotonic() + (run.drain_timeout() or 0.0), began + timeout):
            return
        run.abort(f"aborted: the run was asked to stop, and its stop_timeout of {timeout:.0f} s is over")
        if self._in_block:  # it caught the first
            self._interrupt(number)

    def _passed(self, deadline: float, end: float) -> bool:
        """Wait for a deadline, saying to further signals what goes on; False if the run has ended before."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                number = self._received.get(timeout=left)
            except queue.Empty:
                break
            if number is None:
                return False
            logger.warning("stopping already; %.0f s left for uploads", max(0.0, end - time.monotonic()))
        return True

    def _interrupt(self, number: int) -> None:
        """Raise the termination in the loop; between two reports, if there is such a moment soon."""
        main, deadline = threading.main_thread().ident or 0, time.monotonic() + _PUT_OFF
        self._due = self._put_off = True
        while self._put_off and self._in_block:
            self._put_off = time.monotonic() < deadline
            signal.pthread_kill(main, number)
            time.sleep(_PUT_OFF_EVERY)
            if not self._due:
                return

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


# A runner acknowledges a cancellation through the flow's process, which agrees only while SIGTERM leads to Prefect's own
# handler; without the agreement a cancelled run ends Crashed. So ours stands in its place, in Prefect's eyes too. With
# a Prefect that has no such place, nothing is done.


def _prefects_handler() -> Callable[..., Any] | None:
    return getattr(engine, "_prefect_sigterm_handler", None)


def _be_prefects(handler: Callable[..., Any]) -> None:
    engine._prefect_sigterm_handler = handler  # noqa: SLF001 - see above


def _prefects_lock() -> AbstractContextManager[Any]:
    lock: AbstractContextManager[Any] = getattr(engine, "_prefect_sigterm_bridge_lock", nullcontext())
    return lock
