"""Moving bytes in front of a person: a bar on a terminal, and a Ctrl-C that stops the transfers at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from ckpt.storage import Progress


class _CancelledError(Exception):
    """Raised inside the transfers once the command was interrupted."""


@contextmanager
def transfer(what: str, total: int) -> Iterator[Progress]:
    """A progress callback for transfers of `total` bytes.

    It draws on stderr, and only where that is a terminal. SIGINT and SIGTERM raise in the main thread, and make the
    callback raise too: else leaving the block would wait for every file that is under way.
    """
    stopped = threading.Event()
    with _stopping(stopped), _drawn(what, total) as draw:

        def moved(nbytes: int) -> None:
            if stopped.is_set():
                raise _CancelledError("interrupted")
            draw(nbytes)

        yield moved


@contextmanager
def _drawn(what: str, total: int) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield lambda _nbytes: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # stdout may be a pipe, and must stay one while the bar is drawn.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def _stopping(stopped: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.set()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
