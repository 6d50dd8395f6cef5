"""What the deployed flows of test_deployments.py call by name: a training without torch, and an evaluation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ckpt import Checkpoint, checkpoint_dir, get_checkpoint, report, stop_requested


def save_and_report(step: int, **metrics: Any) -> None:
    with checkpoint_dir() as folder:
        (folder / "step").write_text(str(step))
        report({"step": step, **metrics}, Checkpoint.from_directory(folder)).wait(60)


def train(config: dict[str, Any]) -> None:
    """One report per step; asked to stop, it saves just in time and leaves."""
    found = get_checkpoint()
    start = 0 if found is None else found.metrics["step"] + 1
    for step in range(start, int(config["steps"])):
        save_and_report(step, started_at=start)
        until = time.monotonic() + float(config.get("pause", 0))
        while time.monotonic() < until and not stop_requested():
            time.sleep(0.02)
        if stop_requested():
            save_and_report(step + 1, started_at=start, just_in_time=True)
            return


def score(folder: Path) -> dict[str, float]:
    return {"score": 10.0 + int((folder / "step").read_text())}


def nothing(folder: Path) -> None:
    """Forgets to return its scores."""
