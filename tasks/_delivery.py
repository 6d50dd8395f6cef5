"""What Prefect's background workers still hold, delivered within a deadline."""

from __future__ import annotations

import threading


def deliver(timeout: float) -> bool:
    """Send the logs and events that wait in this process.

    Prefect does this at interpreter exit too, but without a limit: with the API away it takes 7 s per event. A process
    that must end in time calls this and, where it says no, leaves by `os._exit`.

    Args:
        timeout: seconds for logs and events together.

    Returns:
        Whether everything was sent (or given up by Prefect) in time.
    """
    done = threading.Event()
    threading.Thread(target=_drain, args=(timeout, done), daemon=True, name="ckpt-deliver").start()
    return done.wait(timeout)


def _drain(timeout: float, done: threading.Event) -> None:
    from prefect._internal.concurrency.services import QueueService

    waited = QueueService.drain_all(timeout=timeout)
    if isinstance(waited, tuple) and not waited[1]:
        done.set()
