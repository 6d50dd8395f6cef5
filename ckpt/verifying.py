"""Verify: is a committed checkpoint still what its manifest says?"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckpt.checkpoint import Checkpoint
from ckpt.errors import CorruptCheckpointError, ObjectNotFoundError
from ckpt.manifest import FileEntry
from ckpt.storage import Entry, Progress, Receipt, Storage
from ckpt.transferring import ignore_progress, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a verification found."""

    uri: str
    files: int
    nbytes: int
    problems: tuple[str, ...] = ()
    """One line per file that is missing or differs."""
    unlisted: tuple[str, ...] = ()
    """Files that lie there and are in no manifest; harmless, and never restored."""
    unchecked: int = 0
    """Files whose content could be compared by size only: whoever uploaded them gave no digest."""

    @property
    def ok(self) -> bool:
        """Whether every file is there and the same."""
        return not self.problems

    def raise_if_corrupt(self) -> None:
        """Raise `CorruptCheckpointError` naming the files, if there is a problem."""
        if self.problems:
            raise CorruptCheckpointError(f"{self.uri}: {'; '.join(self.problems)}")


def verify(checkpoint: Checkpoint, *, content: bool = True, progress: Progress = ignore_progress) -> Verification:
    """Compare a committed checkpoint with its manifest: presence and sizes by a listing, and every byte by its digest.

    Args:
        checkpoint: a committed one.
        content: read the bytes; False compares presence, size and etag only.
        progress: called with the bytes that were read.

    Raises:
        CheckpointNotFoundError: it is not committed.
    """
    manifest = checkpoint.manifest
    storage = checkpoint.open()
    present = {entry.key: entry for entry in storage.list()}
    problems, unchecked = [], 0
    with tempfile.TemporaryDirectory(prefix="ckpt-verify-") as scratch:
        for file in manifest.files:
            problem = _listed_problem(file, present.get(file.path))
            digest = (file.digest or "").startswith("xxh3-128:")
            if problem is None and content and digest:
                problem = _content_problem(checkpoint, storage, file, Path(scratch), progress)
            unchecked += problem is None and not digest
            if problem is not None:
                problems.append(f"{file.path} {problem}")
    listed = {file.path for file in manifest.files}
    return Verification(
        uri=checkpoint.uri, files=len(manifest.files), nbytes=manifest.nbytes, problems=tuple(problems),
        unlisted=tuple(sorted(present.keys() - listed)), unchecked=unchecked,
    )  # fmt: skip


def _listed_problem(file: FileEntry, entry: Entry | None) -> str | None:
    if entry is None:
        return "is missing"
    return mismatch(file, Receipt(size=entry.size, digest=file.digest or "", etag=entry.etag))


def _content_problem(
    checkpoint: Checkpoint, storage: Storage, file: FileEntry, scratch: Path, progress: Progress
) -> str | None:
    try:
        if checkpoint.is_local:
            return mismatch(file, _read(Path(checkpoint.uri) / file.path, progress))
        copy = scratch / "file"
        receipt = storage.download(file.path, copy, progress=progress)
        copy.unlink()
        return mismatch(file, receipt)
    except (FileNotFoundError, ObjectNotFoundError):
        return "is missing"


def _read(path: Path, progress: Progress) -> Receipt:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
            progress(len(block))
    return Receipt(size=size, digest=f"xxh3-128:{digest.hexdigest()}")
