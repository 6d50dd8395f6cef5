"""A process worker that can be stopped: `python deployments/worker.py --pool ckpt`.

`prefect worker start` that gets SIGTERM while it has runs kills them without a word, or does not stop at all, depending
on where the signal meets it (Prefect 3.9.1). This program passes the signal to the runs first, which save just in time,
and stops the worker when they are over. Whoever stops it should wait for a minute before SIGKILL. For Linux.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

PAUSE = 0.2
"""Seconds between two looks at the processes."""
WORKER_TIME = 10.0
"""Seconds that a worker without runs gets to say goodbye."""


def main(arguments: list[str]) -> int:
    """Run a worker until it ends, or until SIGTERM or SIGINT: then stop its runs, and it.

    Args:
        arguments: for `prefect worker start`.

    Returns:
        The worker's exit code; 0 if it was stopped.
    """
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", *arguments]
    worker = subprocess.Popen(command, start_new_session=True)  # a Ctrl-C in a terminal is for this program alone
    while not stopping.wait(PAUSE):
        if worker.poll() is not None:
            return worker.returncode
    _stop_runs(worker)
    worker.terminate()
    try:
        worker.wait(WORKER_TIME)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
    return 0


def _stop_runs(worker: subprocess.Popen[bytes]) -> None:
    """One SIGTERM to each process below the worker, those it still starts included, until there is none."""
    told: set[int] = set()
    while worker.poll() is None and (runs := _below(worker.pid)):
        for pid in runs - told:
            _terminate(pid)
        told |= runs
        threading.Event().wait(PAUSE)


def _below(pid: int) -> set[int]:
    """Every process that this one, and those it started, have started and that has not ended."""
    parent = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if state != "Z":
            parent[int(stat.parent.name)] = int(above)
    found = {pid}
    while more := {child for child, above in parent.items() if above in found} - found:
        found |= more
    return found - {pid}


def _terminate(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
