"""What torch's distributed checkpoints (DCP) need; the only module that imports torch, and only where a program has."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt.errors import CorruptCheckpointError
from ckpt.storage import Transfers
from ckpt.transferring import ignore_progress

METADATA = ".metadata"
"""The file that DCP writes last."""


def check_shards(storage: Transfers, prefix: str, sizes: Mapping[str, int], scratch: Path) -> None:
    """Check that every shard file that a DCP checkpoint's `.metadata` refers to is there, and long enough.

    A DCP future that resolved proves less: writer threads may have died (pytorch#191391). Skipped for checkpoints of
    other kinds, and in programs that have not imported torch.

    Args:
        storage: where the files are.
        prefix: of their keys, with its final slash; empty at the storage's root.
        sizes: bytes by path, as listed.
        scratch: a folder for the copy of `.metadata`.

    Raises:
        CorruptCheckpointError: a shard is missing or too short; it is named.
    """
    if METADATA not in sizes or "torch" not in sys.modules:
        return
    copy = scratch / "metadata"
    storage.download(prefix + METADATA, copy, progress=ignore_progress)
    try:
        needed = _lengths(copy)
    finally:
        copy.unlink()
    for path, length in sorted(needed.items()):
        if sizes.get(path, -1) < length:
            has = f"has {sizes[path]} bytes" if path in sizes else "is missing"
            raise CorruptCheckpointError(
                f"{prefix or 'the checkpoint'} is incomplete: its {METADATA} refers to {length} bytes of {path}, which {has}"
            )


def _lengths(metadata: Path) -> dict[str, int]:
    """Bytes that the metadata refers to, by file; written by the very process that reads it here."""
    import torch.distributed.checkpoint.metadata  # noqa: F401 - unpickling needs it

    with metadata.open("rb") as file:
        body: Any = pickle.load(file)  # noqa: S301 - the program's own, written moments ago
    needed: dict[str, int] = {}
    for info in (getattr(body, "storage_data", None) or {}).values():
        path, end = getattr(info, "relative_path", None), getattr(info, "offset", 0) + getattr(info, "length", 0)
        if isinstance(path, str):
            needed[path] = max(needed.get(path, 0), end)
    return needed
