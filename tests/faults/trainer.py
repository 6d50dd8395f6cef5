"""A training flow as a process of its own, for tests that stop it: `python trainer.py '{"storage": ..., ...}'`.

It prints one line per event (`step 3`, `end committed,committed,failed`), so that a test can act in between.

Options (JSON):
    storage, name: where the run is.
    steps: how many; each reports a checkpoint and waits for its commit, so that `step N` means that N is in the store.
    after: seconds of "training" per step, in which signals arrive.
    heeds: whether the loop looks at `stop_requested()` (default true).
    hang: an upload function that never returns, at the last step.
    gate: a file; the last step's upload function waits for it, and the loop ends meanwhile.
    big: bytes of the last step's checkpoint; its commit is not waited for.
    opening: seconds that opening the storage takes.
    run, upload: more fields of RunConfig and UploadConfig.
    raises: the loop raises an error of its own when it is asked to stop.
    serve: name of a deployment to serve instead of running the flow.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from prefect import flow

from ckpt import (
    Checkpoint,
    RunConfig,
    UploadConfig,
    checkpoint_dir,
    get_checkpoint,
    opening,
    report,
    stop_requested,
)
from ckpt_tasks import embedded_server, training_run


def say(what: str) -> None:
    """One line, at once."""
    print(f"\n{what}", flush=True)


def hang(checkpoint: Checkpoint, name: str) -> Checkpoint:
    say("hanging")
    threading.Event().wait()
    return checkpoint


def wait_for(gate: str) -> Any:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        say("uploading")
        while not Path(gate).exists():
            time.sleep(0.05)
        return checkpoint

    return upload


def save_and_report(step: int, options: dict[str, Any], *, last: bool) -> Any:
    with checkpoint_dir() as folder:
        (folder / "step").write_text(str(step))
        if last and options.get("big"):
            (folder / "big").write_bytes(os.urandom(options["big"]))
        fn = None
        if last and options.get("hang"):
            fn = hang
        if last and options.get("gate"):
            fn = wait_for(options["gate"])
        if fn is None:
            return report({"step": step}, Checkpoint.from_directory(folder))
    kept = Path(options["storage"]).parent / f"custom-{os.getpid()}-{step}"
    kept.mkdir()
    (kept / "step").write_text(str(step))
    return report({"step": step}, Checkpoint.from_directory(kept), checkpoint_upload_fn=fn)


def loop(options: dict[str, Any]) -> None:
    found = get_checkpoint()
    start = 0
    if found is not None:
        with found.as_directory() as folder:
            start = int((folder / "step").read_text()) + 1
    say(f"start {start} from {None if found is None else found.metrics}")
    for step in range(start, options["steps"]):
        last = step == options["steps"] - 1
        handle = save_and_report(step, options, last=last)
        if not (last and (options.get("hang") or options.get("gate") or options.get("big"))):
            handle.wait(60)
        say(f"step {step}")
        train_until = time.monotonic() + options.get("after", 0.2)
        while time.monotonic() < train_until and not (options.get("heeds", True) and stop_requested()):
            time.sleep(0.02)
        if options.get("heeds", True) and stop_requested():
            if options.get("raises"):
                raise ConnectionError("a worker of the data loader is gone")
            save_and_report(step + 1, options, last=False)  # just in time
            say(f"stopping after {step}")
            return
    say("drain")


@flow(name="interrupted", persist_result=False, retries=int(os.environ.get("RETRIES", "0")))
def train(options: dict[str, Any]) -> None:
    if options.get("opening"):
        plain = opening._open

        def slowly(config: RunConfig, uri: str) -> Any:
            say("opening")
            time.sleep(options["opening"])
            return plain(config, uri)

        opening._open = slowly
    config = RunConfig(
        name=options.get("name", "run"),
        storage_path=options["storage"],
        upload_config=UploadConfig(**options.get("upload", {})),
        **options.get("run", {}),
    )
    run = None
    try:
        with training_run(config) as run:
            loop(options)
    finally:
        if run is not None and run.ended:
            say(f"end {','.join(record.state.value for record in run.result.history)}")


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("serve"):
        train.serve(name=options["serve"], parameters={"options": options}, print_starting_message=False)
        return
    with embedded_server():
        train(options)


if __name__ == "__main__":
    main()
