"""Ending in time: what Prefect's background workers still hold is delivered within a deadline, or left."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from ckpt_tasks._logging import missed

NO_API = 75
"""Exit code of a process that the Prefect API went away from for good: EX_TEMPFAIL, the same command may work later."""


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


def unseen() -> tuple[int, int]:
    """Log lines and events of this process that the API has not taken; where Prefect's insides have changed, fewer."""
    logs, events = missed.logs, missed.events
    with contextlib.suppress(Exception):
        from prefect._internal.concurrency.services import QueueService

        services: Any = QueueService
        for service in list(services._instances.values()):  # noqa: SLF001 - there is no public way to ask
            sent = getattr(getattr(service, "_client", None), "_unconfirmed_events", ())  # and never acknowledged
            held = service._queue.qsize() + len(sent)  # noqa: SLF001 - as above
            logs += held if "Log" in type(service).__name__ else 0
            events += held if "Events" in type(service).__name__ else 0
    return logs, events


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


def api_answers(seconds: float = 5.0) -> bool:
    """Whether the Prefect API is there at all: one request with a short timeout; its client tries for over a minute."""
    if PREFECT_API_URL.value() is None:
        return True  # the temporary server of this very process
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings={"timeout": seconds}) as client,
        ):
            client.request("GET", "/health")
    except httpx.HTTPStatusError as error:
        return error.response.status_code < 500
    except Exception:  # noqa: BLE001 - whatever it is, it is no answer
        return False
    return True


def without_api() -> None:
    """Take it that the API stays away, from here to the end of the process: it ends in time, and with `NO_API`.

    Prefect's client tries a request twice instead of for 70 s, unless the user has set how often. What its background
    workers still hold when the program is over is left after 5 s, if the API is away then too.
    """
    if "PREFECT_CLIENT_MAX_RETRIES" not in os.environ:
        os.environ["PREFECT_CLIENT_MAX_RETRIES"] = "1"
        refresh_global_settings_context()
    if not any(thread.name == _LEAVING for thread in threading.enumerate()):
        threading.Thread(target=_leave_at_exit, args=(5.0,), name=_LEAVING, daemon=True).start()


_LEAVING = "ckpt-leaving"


def _leave_at_exit(seconds: float) -> None:
    """Wait for the end of the program, and end the process soon after, unless somebody listens again.

    Nothing but the standard library from here on: a daemon thread that is inside compiled code of another kind when the
    interpreter goes away takes the process down with SIGABRT.
    """
    url = urlsplit(PREFECT_API_URL.value() or "")
    address = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    while not getattr(threading, "_SHUTTING_DOWN", False):  # `sys.is_finalizing` comes after Prefect's waiting
        time.sleep(0.5)
    try:
        socket.create_connection(address, timeout=seconds).close()
    except OSError:
        time.sleep(seconds)
        logs, events = unseen()
        sys.stderr.write(f"The Prefect API is still away: {logs} log lines and {events} events are left.\n")
        _end(NO_API)


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _drain(timeout: float, done: threading.Event) -> None:
    from prefect._internal.concurrency.services import QueueService

    waited = QueueService.drain_all(timeout=timeout)
    if isinstance(waited, tuple) and not waited[1]:
        done.set()
