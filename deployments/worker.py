"""A worker whose runs stop with it: `python deployments/worker.py --pool ckpt`.

`prefect worker start` that gets SIGTERM takes no new runs and waits for those it has, however long they take; whoever
stops a container kills them then without a word. This program passes SIGTERM on to the runs too, so that they save just
in time. systemd needs none of it: it signals every process of a unit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Start the worker; at SIGTERM or SIGINT stop it and all that it started; its exit code."""
    # A session of its own: a Ctrl-C in a terminal arrives here, and once.
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", *arguments]
    worker = subprocess.Popen(command, start_new_session=True)

    def stop(_number: int, _frame: object) -> None:
        for pid in _below(os.getpid()):
            _terminate(pid)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return worker.wait()


def _below(pid: int) -> set[int]:
    """Every process that this one, and those it started, have started."""
    parent = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parent[int(stat.parent.name)] = int(fields[1])
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
