"""Moving the files of one checkpoint, several at a time; the first failure stops the rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from ckpt.errors import CorruptCheckpointError, SourceChangedError, StorageError
from ckpt.manifest import FileEntry
from ckpt.staging import Source, SourceFile
from ckpt.storage import Objects, Progress, Receipt, Storage

logger = logging.getLogger("ckpt")

T = TypeVar("T")
U = TypeVar("U")

FILES_IN_FLIGHT = 4
"""Files moved at once per checkpoint; the byte budget of the storage bounds their memory."""


class _StoppedError(Exception):
    """Raised inside a transfer whose sibling failed."""


def ignore_progress(_nbytes: int) -> None:
    """A progress callback for callers that do not watch."""


def upload_files(
    source: Source, storage: Storage, prefix: str, *, progress: Progress = ignore_progress
) -> tuple[tuple[FileEntry, ...], dict[str, Receipt]]:
    """Upload every file of `source` under `prefix`; each is checked against its state at the call once it was read.

    Returns:
        The manifest's file list, and what the store answered for each file by path.

    Raises:
        SourceChangedError: a file is not what it was at the call.
        StorageError: after the storage's own retries.
    """

    def one(file: SourceFile, moved: Progress) -> tuple[FileEntry, Receipt]:
        source.check(file)
        try:
            receipt = storage.upload(source.root / file.real, f"{prefix}/{file.path}", progress=moved)
        except FileNotFoundError:
            source.check(file)  # names the file if it is the source that is gone, and not a bucket
            raise
        source.check(file)
        if receipt.size != file.size:
            raise SourceChangedError(
                f"{file.path} of {source.original} had {file.size} bytes at the call, {receipt.size} now"
            )
        return FileEntry(path=file.path, size=receipt.size, digest=receipt.digest, mode=file.mode), receipt

    done = _each(one, source.files, progress)
    return tuple(entry for entry, _ in done), {entry.path: receipt for entry, receipt in done}


def download_files(
    storage: Storage, prefix: str, files: Iterable[FileEntry], target: Path, *, progress: Progress = ignore_progress
) -> None:
    """Download `files` from under `prefix` into `target`, checking each one's size and digest, and set their modes.

    Raises:
        CorruptCheckpointError: a file is not what the manifest says; it is named.
        StorageError: after the storage's own retries.
    """

    def one(file: FileEntry, moved: Progress) -> None:
        path = target / file.path
        receipt = storage.download(_key(prefix, file.path), path, progress=moved)
        if problem := mismatch(file, receipt):
            path.unlink()
            raise CorruptCheckpointError(f"{file.path} of {storage.uri}/{prefix} {problem}")
        path.chmod(file.mode & 0o777)  # no set-user-id: whoever wrote the manifest is not who restores it

    _each(one, list(files), progress)


def mismatch(file: FileEntry, receipt: Receipt) -> str | None:
    """What differs between a file's entry and the bytes that arrived; None if nothing."""
    if receipt.size != file.size:
        return f"has {receipt.size} bytes, the manifest says {file.size}"
    if (file.digest or "").startswith("xxh3-128:") and receipt.digest != file.digest:
        return f"has digest {receipt.digest}, the manifest says {file.digest}"
    if (file.digest or "").startswith("etag:") and receipt.etag and f"etag:{receipt.etag}" != file.digest:
        return f"has etag {receipt.etag}, the manifest says {file.digest}"
    return None


def check_arrived(objects: Objects, prefix: str, receipts: dict[str, Receipt]) -> None:
    """Look in the store itself, with one listing, that every file is there with its size and the etag it was given.

    Raises:
        CorruptCheckpointError: one is not; it is named.
    """
    present = {entry.key.removeprefix(f"{prefix}/"): entry for entry in objects.list(f"{prefix}/")}
    for path, receipt in receipts.items():
        entry = present.get(path)
        if entry is None:
            raise CorruptCheckpointError(f"{path} is not under {objects.uri}/{prefix} after its upload")
        if entry.size != receipt.size:
            raise CorruptCheckpointError(
                f"{path} under {objects.uri}/{prefix} has {entry.size} bytes after an upload of {receipt.size}"
            )
        if entry.etag and receipt.etag and entry.etag != receipt.etag:
            raise CorruptCheckpointError(
                f"{path} under {objects.uri}/{prefix} was replaced after its upload (etag differs)"
            )


def sweep_uploads(storage: Storage) -> None:
    """Abort the multipart uploads under a run that no living driver of it can have under way.

    To be called by the owner before its first upload: killed drivers leave some, and requests whose answers never came.
    A store that has none, or does not let us look, is left alone.
    """
    abort = getattr(getattr(storage, "inner", storage), "abort_uploads", None)
    if abort is None:
        return
    try:
        count = abort(older_than=float("-inf"))
    except StorageError as error:
        logger.debug("multipart uploads under %s could not be swept: %s", storage.uri, error)
        return
    if count:
        logger.info("aborted %d multipart uploads under %s that a dead driver left", count, storage.uri)


def list_files(storage: Storage, prefix: str = "") -> tuple[FileEntry, ...]:
    """The files under `prefix` (with its final slash) as the store lists them, for a checkpoint that we did not upload."""
    return tuple(
        FileEntry(
            path=entry.key.removeprefix(prefix), size=entry.size, digest=f"etag:{entry.etag}" if entry.etag else None
        )
        for entry in storage.list(prefix)
        if not entry.key.endswith("/")
    )


def _key(prefix: str, path: str) -> str:
    return f"{prefix}/{path}" if prefix else path


def _each(work: Callable[[T, Progress], U], items: Iterable[T], progress: Progress) -> list[U]:
    """Run `work` on every item, a few at a time and in order of submission; stop all at the first failure."""
    stop = threading.Event()

    def moved(nbytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        progress(nbytes)

    def guarded(item: T) -> U:
        if stop.is_set():
            raise _StoppedError
        return work(item, moved)

    with ThreadPoolExecutor(FILES_IN_FLIGHT, thread_name_prefix="ckpt-file") as pool:
        futures = [pool.submit(guarded, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        stop.set()
        failed = [error for future in futures if future.done() and (error := future.exception())]
        failed += [error for future in futures if (error := future.exception())]
    for error in failed:
        if not isinstance(error, _StoppedError):
            raise error
    return [future.result() for future in futures]
