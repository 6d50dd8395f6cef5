"""A little training program for the kill harness: the product's real path, a few kilobytes at a time.

It imports neither torch nor numpy, so that a start takes half a second. What it reports is a function of the epoch alone:
whoever looks at the store from outside knows every byte. What it was told is noted in a file, line by line, each on disk
before the next step, and then on standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailurePolicy,
    ReportHandle,
    ReportRecord,
    ReportState,
    Run,
    RunConfig,
    UploadConfig,
    checkpoint_dir,
    get_checkpoint,
    get_context,
    open_run,
    open_storage,
)

KEPT = 2
"""Checkpoints that stay, best first; the latest beside them."""
ASYNC, SYNC = CheckpointUploadMode.ASYNC, CheckpointUploadMode.SYNC
MODES = (None, ASYNC, SYNC, ASYNC, None)
"""Of the epochs, in turn."""
CUSTOM = 3
"""Every so many epochs the checkpoint is uploaded by a function of the program's own."""
METRICS_ONLY = 4
"""Every so many epochs a report without a checkpoint follows."""

Say = Callable[..., None]
"""Notes one fact: `say("acked", seq=3)`."""


def contents(epoch: int) -> dict[str, bytes]:
    """Every file of an epoch's checkpoint."""
    noise = random.Random(epoch)
    return {
        "state.json": json.dumps({"epoch": epoch}).encode(),
        "model.bin": noise.randbytes(20_000 + 1_000 * (epoch % 7)),
        "shards/0 of 2.bin": noise.randbytes(300),
        "shards/1 of 2.bin": noise.randbytes(300),
        "empty": b"",
    }


def digest(files: Mapping[str, bytes]) -> str:
    """One digest of a whole checkpoint."""
    whole = hashlib.sha256()
    for path, data in sorted(files.items()):
        whole.update(f"{path}\0{len(data)}\0".encode() + data)
    return whole.hexdigest()


def metrics_of(epoch: int) -> dict[str, Any]:
    """What is reported with an epoch; the score goes up and down."""
    return {"epoch": epoch, "score": random.Random(-1 - epoch).randrange(10)}


def config_of(storage: str, name: str, lease_time: float = 60.0) -> RunConfig:
    """The run's configuration."""
    return RunConfig(
        name=name, storage_path=storage, lease_time=lease_time,
        checkpoint_config=CheckpointConfig(num_to_keep=KEPT, checkpoint_score_attribute="score"),
        upload_config=UploadConfig(max_concurrent_uploads=2), failure_policy=FailurePolicy(red_on="any"),
    )  # fmt: skip


def write(folder: Path, epoch: int) -> Checkpoint:
    """Save an epoch's checkpoint."""
    for path, data in contents(epoch).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
    return Checkpoint.from_directory(folder)


def upload_myself(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """A custom upload function: every file by a request of its own."""
    uri = get_context().get_storage().build_checkpoint_uri_from_name(name)
    storage = open_storage(uri)
    for path in sorted(Path(checkpoint.path).rglob("*")):
        if path.is_file():
            storage.upload(path, path.relative_to(checkpoint.path).as_posix(), progress=lambda _: None)
    return Checkpoint(uri)


def restored_epoch() -> int:
    """The epoch of the newest checkpoint, every byte of which is looked at; -1: there is none."""
    if (newest := get_checkpoint()) is None:
        return -1
    epoch = int(newest.metrics["epoch"])
    with newest.as_directory() as folder:
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == contents(epoch), f"checkpoint {newest.seq} of epoch {epoch} is not what was reported"
    return epoch


def train(run: Run, epochs: int, say: Say) -> None:
    """The training loop: it goes on after the epoch that it restored."""
    newest = get_checkpoint()
    say(
        "began",
        attempt=run.destination.attempt,
        first_seq=run.publisher.published,
        resumed=None if newest is None else newest.seq,
    )
    waiting = [train_epoch(run, epoch, say) for epoch in range(restored_epoch() + 1, epochs)]
    say("trained")
    for thread in waiting:
        thread.join()


def train_epoch(run: Run, epoch: int, say: Say) -> threading.Thread:
    """One epoch: save and report. Gives the thread that notes the acknowledgement whenever it comes."""
    metrics, mode = metrics_of(epoch), MODES[epoch % len(MODES)]
    if epoch % CUSTOM == CUSTOM - 1:  # its function reads the directory where it is, and ASYNC deletes what is in it
        checkpoint = write(Path(tempfile.mkdtemp(prefix="trainer-")), epoch)
        handle = run.report(metrics, checkpoint, None, ASYNC, checkpoint_upload_fn=upload_myself)
    else:
        with checkpoint_dir() as folder:
            handle = run.report(metrics, write(folder, epoch), None, mode)
    if epoch % METRICS_ONLY == METRICS_ONLY - 1:
        run.report({"epoch": epoch, "only": "metrics"})
    waiting = threading.Thread(target=acknowledge, args=(handle, epoch, say))
    waiting.start()
    return waiting


def acknowledge(handle: ReportHandle, epoch: int, say: Say) -> None:
    """Wait until the report is final, and note it if it is committed."""
    record = handle.wait()
    if record.state is ReportState.COMMITTED:
        say("acked", seq=record.seq, attempt=record.attempt, epoch=epoch, digest=digest(contents(epoch)))


def noting(file: Path) -> Say:
    """Notes facts in a file, each on disk before the call returns, and on standard output."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(fact: str, **details: Any) -> None:
        line = json.dumps({"fact": fact, **details}).encode() + b"\n"
        os.write(descriptor, line)
        os.fsync(descriptor)
        os.write(1, line)

    return say


def with_threads(config: RunConfig, epochs: int, say: Say) -> None:
    """`ckpt` alone."""
    with open_run(config, observers=[publishing(say)]) as run:
        train(run, epochs, say)


def with_prefect() -> Callable[[RunConfig, int, Say], None]:
    """The same in a flow; imported before the program says that it is ready."""
    from prefect import flow

    from ckpt_tasks import training_run

    @flow(name="little training", persist_result=False)
    def little_training(config: RunConfig, epochs: int, say: Any) -> None:
        with training_run(config) as run:
            run.publisher.observers.append(publishing(say))
            train(run, epochs, say)

    return little_training.with_options(validate_parameters=False)


def publishing(say: Say) -> Callable[[ReportRecord], None]:
    """An observer that notes what is published."""
    return lambda record: say("published", seq=record.seq, state=record.state.value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--name", default="run")
    parser.add_argument("--engine", choices=["threads", "prefect"], default="threads")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--notes", type=Path, required=True, help="file that the facts are noted in")
    options = parser.parse_args()
    say = noting(options.notes)
    go = with_prefect() if options.engine == "prefect" else with_threads
    say("ready")
    go(config_of(options.storage, options.name), options.epochs, say)
    say("finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
