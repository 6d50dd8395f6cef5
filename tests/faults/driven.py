"""A driver of a run that does as it is told: one JSON command a line in, one JSON answer a line out.

    {"report": 3}                   report epoch 3 asynchronously, its local files to be deleted
    {"report": 3, "gate": "/fifo"}  the same with an upload function that uploads, and then waits for the gate to open
    {"wait": 7}                     until report 7 is final
    {"leave": true}                 leave the run's block

What is in the pipe while the program is stopped it does when it wakes up.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from little_training import ASYNC, config_of, metrics_of, restored_epoch, upload_myself, write

from ckpt import Checkpoint, ReportHandle, Run, get_checkpoint, open_run


def say(**facts: Any) -> None:
    """Answer."""
    print(json.dumps(facts), flush=True)


def obey(run: Run) -> None:
    """Do what is asked until told to leave."""
    handles: dict[int, ReportHandle] = {}
    for line in sys.stdin:
        match json.loads(line):
            case {"report": epoch, **options}:
                handle = report(run, epoch, options.get("gate"))
                handles[handle.seq] = handle
                say(reported=handle.seq)
            case {"wait": seq}:
                record = handles[seq].wait(60)
                say(final=record.state.value, reason=record.reason)
            case {"leave": True}:
                return


def report(run: Run, epoch: int, gate: str | None) -> ReportHandle:
    """Report an epoch; ASYNC asks that what the trainer has locally is deleted once it is committed."""

    def gated(checkpoint: Checkpoint, name: str) -> Checkpoint:
        uploaded = upload_myself(checkpoint, name)
        say(gated=name, local=checkpoint.path)
        Path(str(gate)).read_bytes()  # a FIFO: until somebody has opened and closed it
        return uploaded

    checkpoint = write(Path(tempfile.mkdtemp(prefix="trainer-")), epoch)
    fn = gated if gate else None
    return run.report(metrics_of(epoch), checkpoint, None, ASYNC, checkpoint_upload_fn=fn)


def main() -> None:
    storage, lease_time = sys.argv[1], float(sys.argv[2])
    say(ready=True)
    sys.stdin.readline()
    try:
        with open_run(config_of(storage, "run", lease_time)) as run:
            newest = get_checkpoint()
            restored_epoch()
            resumed = None if newest is None else newest.seq
            say(training=run.destination.attempt, first_seq=run.publisher.published, resumed=resumed)
            obey(run)
    except Exception as error:
        say(error=type(error).__name__, text=str(error))
        raise


if __name__ == "__main__":
    main()
