"""Ending in time: what Prefect's background workers still hold is delivered within a deadline, or left."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def deliver(timeout: float) -> bool:
    """Send the logs and events that wait in this process.

    Prefect does this at interpreter exit too, but without a limit: with the API away it takes 7 s per event.

    Args:
        timeout: seconds for logs and events together.

    Returns:
        Whether everything was sent (or given up by Prefect) in time.
    """
    done = threading.Event()
    threading.Thread(target=_drain, args=(timeout, done), daemon=True, name="ckpt-deliver").start()
    return done.wait(timeout)


def leave(status: int, *, within: float) -> NoReturn:
    """End the process with `status`, at the latest after about `within` seconds.

    The way out for a program whose results are stored and printed: with the API away, the interpreter would wait for
    Prefect's workers for minutes, and then lose their items anyway.
    """
    if deliver(within):
        sys.exit(status)
    _end(status)


def leave_after(seconds: float, status: int) -> Callable[[], None]:
    """End the process with `status` in `seconds`, unless the function that this returns is called before.

    For the part that only Prefect's engine can end: with the API away, setting a flow run's last state takes 70 s.
    """
    timer = threading.Timer(seconds, _end, args=(status,))
    timer.daemon = True
    timer.start()
    return timer.cancel


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _drain(timeout: float, done: threading.Event) -> None:
    from prefect._internal.concurrency.services import QueueService

    waited = QueueService.drain_all(timeout=timeout)
    if isinstance(waited, tuple) and not waited[1]:
        done.set()
