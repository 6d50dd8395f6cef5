"""What a transfer over the network runs on: the event loop of this package, a byte budget, a stall watch."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from ckpt.errors import StalledError, StorageError
from ckpt.storage import Progress

T = TypeVar("T")
P = ParamSpec("P")
CLEANUP_TIMEOUT = 15.0
"""Seconds that a cancelled operation may take to clean up, e.g. to abort its multipart upload."""
LISTEN_EVERY = 0.5
"""Seconds between two questions to the caller's progress whether to go on, while no byte moves."""

_thread: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
_thread_lock = threading.Lock()
_kept: set[asyncio.Task[Any]] = set()
_at_exit: dict[int, Callable[[], Awaitable[object]]] = {}


def io_loop() -> asyncio.AbstractEventLoop:
    """The event loop that all storages of this process share, in a daemon thread.

    Not fsspec's: a user's own put on that one reads its files on the loop, and ours would seem to stall.
    """
    global _thread  # noqa: PLW0603 - one per process
    with _thread_lock:
        if _thread is None:
            loop = asyncio.new_event_loop()
            loop.set_default_executor(ThreadPoolExecutor(16, thread_name_prefix="ckpt-io"))
            thread = threading.Thread(target=loop.run_forever, name="ckpt-io", daemon=True)
            thread.start()
            _thread = (loop, thread)
        return _thread[0]


def _forget_loop() -> None:
    """In a forked child: the thread is not there, and closing anything would reach into the parent's epoll."""
    global _thread, _thread_lock
    if _thread is not None:
        immortal(_thread)
    _thread, _thread_lock = None, threading.Lock()
    _at_exit.clear()


def immortal(thing: object) -> None:
    """Never run the destructor of `thing`: it would act on file descriptors shared with the parent process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def close_at_exit(key: int, close: Callable[[], Awaitable[object]]) -> Callable[[], None]:
    """Have `close` awaited at the end of the process; returns what does it now, without waiting."""
    _at_exit[key] = close

    def now() -> None:
        todo = _at_exit.pop(key, None)
        if todo is not None and _thread is not None and _thread[0].is_running():
            asyncio.run_coroutine_threadsafe(_quietly(todo), _thread[0])

    return now


async def _quietly(close: Callable[[], Awaitable[object]]) -> None:
    with contextlib.suppress(Exception):
        await close()


@atexit.register
def _close_all() -> None:
    if _thread is None or not _at_exit:
        return

    async def close_all() -> None:
        await asyncio.gather(*[_quietly(close) for close in _at_exit.values()])

    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(close_all(), _thread[0]).result(2)
    _at_exit.clear()


os.register_at_fork(after_in_child=_forget_loop)


class Watch:
    """Counts the bytes of one operation, and knows when none has moved for too long.

    Waiting for memory is no stall while nothing of this operation is on the wire.

    Args:
        progress: the caller's; what it raises cancels the operation.
        timeout: seconds without a byte that are a stall.
    """

    def __init__(self, progress: Progress, timeout: float) -> None:
        self._progress = progress
        self._timeout = timeout
        self._last = time.monotonic()
        self._waiting = 0
        self._on_the_wire = 0
        self._cancel: Callable[[], object] = lambda: None
        self.error: BaseException | None = None

    def moved(self, count: int) -> None:
        """`count` bytes move.

        Raises:
            asyncio.CancelledError: the caller's progress raised; not one byte more is to be sent.
        """
        self._last = time.monotonic()
        self._hear(count)
        if self.error is not None:
            raise asyncio.CancelledError

    def _hear(self, count: int) -> None:
        if self.error is None:
            try:
                self._progress(count)
            except BaseException as error:  # noqa: BLE001 - raised by `run` in the caller's thread
                self.error = error
                self._cancel()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for something that is not the store's fault."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._last = time.monotonic()

    @contextlib.contextmanager
    def on_the_wire(self) -> Iterator[None]:
        """Around a request."""
        self._on_the_wire += 1
        try:
            yield
        finally:
            self._on_the_wire -= 1

    def left(self) -> float:
        """Seconds until it is a stall, if no byte moves."""
        if self._waiting and not self._on_the_wire:
            self._last = time.monotonic()
        return self._last + self._timeout - time.monotonic()

    def run(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """The coroutine's result; on a stall, or whatever interrupts this thread, it is cancelled and cleans up first.

        Args:
            coroutine: run on the event loop of this package.
            what: for the error's text.

        Raises:
            StalledError: no byte moved for the timeout.
        """
        loop = io_loop()
        task: asyncio.Task[T] | None = None

        async def main() -> T:
            nonlocal task
            task = loop.create_task(coroutine)
            self._cancel = task.cancel
            return await task

        if threading.current_thread() is _loop_thread():
            coroutine.close()
            raise StorageError(f"{what}: called on the event loop that has to do it; call it from another thread")
        future = asyncio.run_coroutine_threadsafe(main(), loop)
        try:
            while not concurrent.futures.wait([future], max(0.0, min(self.left(), LISTEN_EVERY))).done:
                if self.left() <= 0:
                    raise StalledError(f"{what}: no byte moved for {self._timeout:g} s")
                if self.error is not None:
                    raise self.error
                loop.call_soon_threadsafe(self._hear, 0)  # an abort must not wait for a byte
            result = future.result()
            if self.error is not None:
                raise self.error
            return result
        except concurrent.futures.CancelledError:
            if self.error is not None:
                raise self.error from None
            raise
        except BaseException:
            loop.call_soon_threadsafe(lambda: task.cancel() if task is not None else future.cancel())
            concurrent.futures.wait([future], CLEANUP_TIMEOUT)
            raise


class HighWater:
    """Counts the bytes of an operation that is tried again: only those beyond the best try so far are passed on.

    Args:
        progress: hears of every byte once, and of 0 where bytes are repeated.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._top = self._now = 0

    def restart(self) -> None:
        """The next try begins."""
        self._now = 0

    def __call__(self, count: int) -> None:
        if count == 0:  # from any thread
            self._progress(0)
            return
        self._now += count
        fresh = max(0, self._now - self._top)
        self._top += fresh
        self._progress(fresh)


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`call`, off the event loop. A cancellation waits for its end: it works on files that are closed after us."""
    future = asyncio.get_running_loop().run_in_executor(None, lambda: call(*args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def keep(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that nobody may be left to hold on to."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _kept.add(task)
    task.add_done_callback(_kept.discard)
    return task


def _loop_thread() -> threading.Thread | None:
    return None if _thread is None else _thread[1]


class Budget:
    """Bytes of memory that all transfers of a storage share, given out in the order of asking. For the event loop.

    Args:
        total: bytes.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, count: int, watch: Watch) -> int:
        """Wait for `count` bytes, or for all there are if that is less; returns what `release` must get back."""
        count = min(count, self._total)
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        self._serve()
        try:
            with watch.waiting():
                await turn
        except BaseException:
            # Given in the same moment, or still in the way of those behind.
            self.release(count if turn.done() and not turn.cancelled() else 0)
            raise
        return count

    def try_acquire(self, count: int) -> int | None:
        """As `acquire`, or None where it would have to wait."""
        count = min(count, self._total)
        if self._queue or count > self._free:
            return None
        self._free -= count
        return count

    def release(self, count: int) -> None:
        """Give bytes back."""
        self._free += count
        self._serve()

    @contextlib.asynccontextmanager
    async def hold(self, count: int, watch: Watch) -> AsyncIterator[None]:
        """`acquire` and `release` around a block."""
        held = await self.acquire(count, watch)
        try:
            yield
        finally:
            self.release(held)

    def _serve(self) -> None:
        while self._queue and (self._queue[0][1].done() or self._queue[0][0] <= self._free):
            count, turn = self._queue.popleft()
            if not turn.done():
                self._free -= count
                turn.set_result(None)
