"""A context manager whose entering and leaving block, used by a coroutine: both happen in one thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


@asynccontextmanager
async def aside(manager: AbstractContextManager[T], cancelled: Callable[[T], None]) -> AsyncIterator[T]:
    """Enter and leave `manager` in a thread with this coroutine's context; the event loop goes on meanwhile.

    A cancellation never leaves the thread behind: it is raised once that is done.

    Args:
        manager: entered and left in the same thread, and in the same context.
        cancelled: told what was entered, if a cancellation comes while it is being left: to hurry.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-aside")
    context = contextvars.copy_context()

    def start(action: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(thread.submit(context.run, action, *args))

    try:
        entering = start(manager.__enter__)
        try:
            entered: T = await _done(entering, lambda: None)
        except asyncio.CancelledError:
            if entering.exception() is None:
                await _done(start(manager.__exit__, *sys.exc_info()), lambda: cancelled(entering.result()))
            raise
        try:
            yield entered
        except BaseException:
            if not await _done(start(manager.__exit__, *sys.exc_info()), lambda: cancelled(entered)):
                raise
        else:
            await _done(start(manager.__exit__, None, None, None), lambda: cancelled(entered))
    finally:
        thread.shutdown(wait=False)


async def _done(future: asyncio.Future[Any], cancelled: Callable[[], None]) -> Any:
    """What the thread gives or raises; a cancellation meanwhile is told, and raised in its place once it is done."""
    interruption: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # an anyio scope would cancel again and again
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                interruption = error
                cancelled()
    if interruption is None:
        return future.result()
    raise interruption from future.exception()  # asked for also because asyncio complains of errors that nobody looks at
