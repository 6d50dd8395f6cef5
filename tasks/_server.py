"""The child process of `embedded_server`: a Prefect server that ends with whoever started it.

Run by path (`python -P _server.py FD PARENT_PID`), not imported: it needs the standard library and Prefect only, so it
works from a checkout and from a wheel alike. FD is a listening socket that the parent bound: no port can be raced for,
and the parent's first request waits in the socket's backlog until the server is up. Standard input is the lifeline: its
end means stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

_PARENT_CHECK_SECONDS = 2.0
"""How often the parent's pid is looked at: a forked child of the parent may hold the lifeline open after its death."""

_QUIET_TICKS = 12
"""uvicorn ticks (0.1 s) to go on after the last event: the services write once a second (see `embedded`)."""

_SHUTDOWN_SECONDS = 20.0
"""What the server gets to write what it has received, and to close, before the process ends anyway."""


def main() -> None:
    """Serve on the inherited socket until the lifeline ends."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # until it is up: importing and migrating allocate much and free little
    stop = threading.Event()
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]), stop), daemon=True).start()
    _make_server(stop).run(sockets=[listening])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything is written and closed; taking the interpreter down would cost two more seconds


def _make_server(stop: threading.Event) -> uvicorn.Server:
    import uvicorn
    from prefect.server.api.server import create_app

    class Server(uvicorn.Server):
        quiet_ticks = 0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            with _one_migration_at_a_time():
                await super().startup(sockets)
            gc.enable()

        async def on_tick(self, counter: int) -> bool:
            ending = stop.is_set() and _received_is_consumed()
            self.quiet_ticks = self.quiet_ticks + 1 if ending else 0
            return await super().on_tick(counter) or self.quiet_ticks > _QUIET_TICKS

    app = create_app(final=True)
    return Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=3))


def _end_with_parent(parent: int, stop: threading.Event) -> None:
    """Ask for the end when the lifeline or the parent ends; end the process if that takes too long."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _PARENT_CHECK_SECONDS)
        if readable and not os.read(0, 1):
            break
    last_resort = threading.Timer(_SHUTDOWN_SECONDS, os._exit, args=(1,))
    last_resort.daemon = True
    last_resort.start()
    stop.set()


def _received_is_consumed() -> bool:
    """Whether the server's services have taken all events received so far out of their queues.

    Task runs reach the database as events, through queues in memory that a shutdown drops. Prefect has no public way to
    ask; where its insides have changed, this waits for nothing.
    """
    with contextlib.suppress(Exception):
        from prefect.server.utilities.messaging.memory import Topic

        subscriptions = Topic.by_name("events")._subscriptions  # noqa: SLF001
        return all(queue.empty() for each in subscriptions for queue in (each._queue, each._retry))  # noqa: SLF001
    return True


@contextlib.contextmanager
def _one_migration_at_a_time() -> Iterator[None]:
    """Two first runs that start together must not create the same database twice."""
    from prefect.settings import PREFECT_HOME

    with (Path(PREFECT_HOME.value()) / "temporary-server.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
