"""What tests make: checkpoints, configurations, runs whose storage misbehaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ckpt import Checkpoint, Result, Run, RunConfig, UploadConfig

DEADLINE = 120.0
"""Seconds that any wait of a test may take before the test fails."""

T = TypeVar("T")


def eventually(look: Callable[[], T], good: Callable[[T], bool]) -> T:
    """What `look` gives once it is `good`: for another process's state, which only asking again can tell."""
    deadline = time.monotonic() + DEADLINE
    pause = threading.Event()
    while not good(seen := look()):
        assert time.monotonic() < deadline, f"after {DEADLINE} s still {seen}"
        pause.wait(0.1)
    return seen


def make_checkpoint(folder: Path, files: Mapping[str, bytes | str] | None = None) -> Checkpoint:
    """A checkpoint directory with `files` (default: one), and the reference that `report()` takes."""
    for path, data in (files or {"model.bin": b"weights"}).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)
    folder.mkdir(parents=True, exist_ok=True)
    return Checkpoint.from_directory(folder)


def make_config(
    storage_path: str | Path, name: str = "run", *, upload: Mapping[str, Any] | None = None, **changes: Any
) -> RunConfig:
    """A run's configuration; `upload` are fields of `UploadConfig`."""
    return RunConfig(name=name, storage_path=storage_path, upload_config=UploadConfig(**(upload or {})), **changes)


def storage_of(run: Run) -> Any:
    """The storage of an open run: the wrapper that the fixture `wrap_storage` put around it."""
    return run._live.storage


def states(result: Result | None) -> list[str]:
    """The state of every report, in order."""
    assert result is not None
    return [record.state.value for record in result.history]


def reasons(result: Result | None) -> dict[int, str]:
    """Why reports are not committed, by seq."""
    assert result is not None
    return {record.seq: record.reason for record in result.history if record.reason is not None}


def content(checkpoint: Checkpoint, folder: Path) -> dict[str, bytes]:
    """Every file of a checkpoint as it is restored into `folder`."""
    restored = checkpoint.to_directory(folder)
    return {path.relative_to(restored).as_posix(): path.read_bytes() for path in restored.rglob("*") if path.is_file()}
