"""Calling a function of the user's that may never return: own daemon thread, the caller's context, a deadline."""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from ckpt.errors import DeadlineError, UploadFunctionError

T = TypeVar("T")

PASS_THROUGH = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Never turned into a failed report, or a failed validation."""


def name_of(fn: Any) -> str:
    """The dotted name that manifests and messages use."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{named.__module__}.{named.__qualname__}"


def call_with_deadline(
    call: Callable[[float], T],
    *,
    what: str,
    thread: str,
    timeout: float,
    when_aborted: Callable[[Callable[[str], None]], None],
) -> T:
    """Run `call` in a daemon thread with this thread's context, so that it cannot hang the process, and wait for it.

    Args:
        call: is given its deadline, in monotonic seconds.
        what: names it in messages.
        thread: the thread's name.
        timeout: seconds it may take.
        when_aborted: is given what ends the wait early, for a reason.

    Raises:
        DeadlineError: it took longer, or was aborted; it is abandoned.
        UploadFunctionError: it raised a `BaseException` of its own kind.
    """
    outcome: Future[T] = Future()
    context = contextvars.copy_context()
    deadline = time.monotonic() + timeout

    def run() -> None:
        try:
            value = context.run(call, deadline)
        except BaseException as error:  # noqa: BLE001 - carried to the waiting thread, which sorts it
            _fail(outcome, error)
        else:
            _settle(lambda: outcome.set_result(value))

    when_aborted(lambda reason: _fail(outcome, DeadlineError(reason)))
    threading.Thread(target=run, name=thread, daemon=True).start()
    try:
        return outcome.result(timeout)
    except PASS_THROUGH:
        raise
    except TimeoutError as error:
        if time.monotonic() < deadline:
            raise  # the function's own, or an abort
        raise DeadlineError(
            f"{what} did not return within {timeout:.0f} s and was abandoned; its thread may still be running"
        ) from error
    except Exception:
        raise
    except BaseException as error:  # torch's CheckpointException is one
        raise UploadFunctionError(f"{what} raised {type(error).__name__}: {error}") from error


def _fail(outcome: Future[Any], error: BaseException) -> None:
    _settle(lambda: outcome.set_exception(error))


def _settle(end: Callable[[], None]) -> None:
    """Set the outcome unless it is set: of the function's end and an abort, the first counts."""
    with suppress(InvalidStateError):
        end()
