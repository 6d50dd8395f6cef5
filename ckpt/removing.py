"""Removing a whole run: what a crash in the middle leaves is not a run that looks intact, and the next try finishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.attempts import LEASE_TIME, Attempt, Owner, claim
from ckpt.credentials import Credentials
from ckpt.errors import CheckpointNotFoundError, StorageError
from ckpt.layout import ATTEMPTS, CHECKPOINTS, COMMITS, HISTORY, NOTES, RESULT, RUN
from ckpt.storage import RESERVED, Storage, normalize_uri, open_storage
from ckpt.transferring import sweep_uploads

_ORDER = (COMMITS, CHECKPOINTS, NOTES, HISTORY, RESULT, RUN)
"""Commits first: without them no checkpoint exists, whatever is left of its files. The ownership goes last."""
_PORTION = 1000
"""Objects deleted between two looks at whether somebody else has claimed the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was removed."""

    uri: str
    commits: int
    """Commit objects: manifests and tombstones."""
    files: int
    """Objects in all."""
    nbytes: int
    left: tuple[str, ...]
    """Keys in the run's folder that are not of this format: somebody else's, and still there."""


def remove(
    run: str,
    *,
    credentials: Credentials | None = None,
    storage_options: Mapping[str, Any] | None = None,
    lease_time: float = LEASE_TIME,
) -> Removed:
    """Remove a run with all its checkpoints; what a crash in the middle leaves is removed by the next call.

    It claims an attempt first, as a new driver would, so that no driver that lives loses its run. External checkpoints, and
    what is not of this format, stay.

    Args:
        run: `<storage_path>/<name>`.
        credentials: see `ckpt.credentials`.
        storage_options: without secrets.
        lease_time: seconds a driver that may be alive is watched.

    Raises:
        CheckpointNotFoundError: no run is there, nor the rest of one.
        RunBusyError: a driver owns the run and is alive.
        FencedError: a driver claimed the run meanwhile; what was not removed by then stays.
    """
    uri = normalize_uri(run)
    storage = open_storage(uri, credentials=credentials or "env", storage_options=storage_options)
    if not is_there(storage):
        raise CheckpointNotFoundError(f"no run is at {uri}: give <storage_path>/<name>, as `ckpt ls` shows it")
    attempt, _, _ = claim(storage, Owner(), lambda _: None, lease_time=lease_time, upkeep=True)
    try:
        sweep_uploads(storage)
        removed = _removed(storage, attempt)
        storage.delete([entry.key for entry in storage.list(ATTEMPTS)])
    except BaseException:
        with suppress(StorageError):  # the next try watches its lease then
            attempt.end("removal cut short")
        raise
    if "://" not in uri:
        for folder in (Path(uri, RESERVED), Path(uri)):
            with suppress(OSError):  # not empty: somebody else's files are in it
                folder.rmdir()
    return removed


def is_there(storage: Storage) -> bool:
    """Whether a run is at the storage's root, or the rest of one that was being removed."""
    return any(entry.key == RUN for entry in storage.list(RUN)) or any(True for _ in storage.list(ATTEMPTS))


def _removed(storage: Storage, attempt: Attempt) -> Removed:
    commits = files = nbytes = 0
    for part in _ORDER:
        entries = [entry for entry in storage.list(part) if part.endswith("/") or entry.key == part]
        for portion in _portions([entry.key for entry in entries]):
            attempt.check_fence()
            attempt.renew()
            storage.delete(portion)
        files += len(entries)
        nbytes += sum(entry.size for entry in entries)
        commits += len(entries) if part == COMMITS else 0
    attempt.check_fence()
    left = tuple(entry.key for entry in storage.list() if not entry.key.startswith(ATTEMPTS))
    return Removed(uri=storage.uri, commits=commits, files=files, nbytes=nbytes, left=left)


def _portions(keys: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), _PORTION):
        yield keys[start : start + _PORTION]
