"""What try.sh has three runs of the deployment `train` do at once: reports whose uploads take a second each.

Every upload notes when it began and ended, so that the limit on uploads can be checked after the fact.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import fsspec

from ckpt import Checkpoint, CheckpointUploadMode, get_context, report

UPLOAD_TIME = 1.0
"""Seconds of one upload."""


def train(config: dict[str, Any]) -> None:
    """Report as fast as uploads allow.

    Args:
        config: `reports`, and `notes`: the folder for the times of uploads, one file per run, [began, ended] in seconds
            since the epoch per line.
    """
    storage, name = get_context().get_storage(), get_context().get_experiment_name()
    notes = Path(config["notes"]) / f"{name}.jsonl"

    def upload(checkpoint: Checkpoint, _name: str) -> Checkpoint:
        began = time.time()
        with fsspec.open(f"{checkpoint.uri}/weights", "wb") as file:
            file.write(b"weights")
        time.sleep(max(0.0, began + UPLOAD_TIME - time.time()))
        with notes.open("a") as file:
            file.write(json.dumps([began, time.time()]) + "\n")
        return checkpoint

    for step in range(int(config["reports"])):
        target = Checkpoint(storage.build_checkpoint_uri_from_name(f"step-{step}"))
        report({"step": step}, target, f"step-{step}", CheckpointUploadMode.ASYNC, checkpoint_upload_fn=upload)
