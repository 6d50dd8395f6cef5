"""The local end of every transfer: a source that must not change, a target that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from uuid import uuid4

import xxhash

from ckpt.errors import (
    AccessDeniedError,
    CkptError,
    ObjectNotFoundError,
    SourceChangedError,
    StorageError,
    StorageFullError,
    TransientStorageError,
)
from ckpt.storage import RESERVED, Progress

T = TypeVar("T")

CHUNK = 4 * 2**20
"""Bytes read or written at a time: long enough that the GIL is free most of the time."""
ABANDONED_AFTER = 3600.0
"""Seconds after which a file in flight that nobody holds a lock on is taken for a dead writer's."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_TRANSIENT = {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENETDOWN}


def translate_os_error(verb: str, where: str | Path, error: OSError) -> OSError:
    """The `StorageError` for what the operating system said about `where`; an error of this package as it is."""
    kind: type[StorageError] = StorageError
    if isinstance(error, CkptError):
        return error
    if error.errno in _FULL:
        kind = StorageFullError
    elif error.errno in _DENIED or isinstance(error, PermissionError):
        kind = AccessDeniedError
    elif error.errno == errno.ENOENT or isinstance(error, FileNotFoundError):
        kind = ObjectNotFoundError
    elif error.errno in _TRANSIENT or isinstance(error, TimeoutError | ConnectionError):
        kind = TransientStorageError
    return kind(f"{verb} {where}: {error.strerror or error}")


class Source:
    """A local file being uploaded: read once, in order, hashed on the way. Use as a context manager.

    Raises:
        SourceChangedError: it is not there (any more).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = xxhash.xxh3_128()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise SourceChangedError(f"{path} is gone before it could be uploaded") from error
        except OSError as error:
            raise translate_os_error("open", path, error) from error
        self._stat = os.fstat(self._fd)
        self._offset = 0
        self.size = self._stat.st_size
        if not stat.S_ISREG(self._stat.st_mode):
            os.close(self._fd)
            raise StorageError(f"upload {path}: not a regular file")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The number may belong to another file next: a thread of ours that comes late must not use it.
        fd, self._fd = self._fd, -1
        os.close(fd)

    @property
    def digest(self) -> str:
        """Of what was read so far."""
        return f"xxh3-128:{self._hash.hexdigest()}"

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes.

        Raises:
            SourceChangedError: there are not that many left.
        """
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[filled:]], self._offset + filled)
            except OSError as error:
                raise translate_os_error("read", self.path, error) from error
            if not count:
                raise SourceChangedError(f"{self.path} became shorter while it was being uploaded")
            filled += count
        self._offset += filled
        self._hash.update(buffer)

    def chunks(self) -> Iterator[memoryview]:
        """All bytes, a piece at a time in one buffer: a piece is valid until the next is asked for."""
        buffer = memoryview(bytearray(min(CHUNK, self.size)))
        left = self.size
        while left:
            piece = buffer[: min(len(buffer), left)]
            self.read_into(piece)
            left -= len(piece)
            yield piece

    def check_unchanged(self) -> None:
        """Call after the last read and before the object appears.

        Raises:
            SourceChangedError: size or modification time are not those at the start.
        """
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise SourceChangedError(f"{self.path} changed while it was being uploaded")


class NewFile:
    """A file being written under a hidden name; `replace` or `link` gives it its own. Use as a context manager.

    It is flushed to the disk before it gets its name. Left without that, it is removed.

    Args:
        directory: where the hidden file is; on the file system of the target.
    """

    def __init__(self, directory: Path) -> None:
        self._hash = xxhash.xxh3_128()
        self.size = 0
        self.path = directory / f"{RESERVED}-{uuid4().hex}"
        self._fd = _open_new(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        # The number may belong to another file next: a thread of ours that comes late must not use it.
        fd, self._fd = self._fd, -1
        os.close(fd)

    @property
    def digest(self) -> str:
        """Of what was written so far."""
        return f"xxh3-128:{self._hash.hexdigest()}"

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data)
        self._hash.update(view)
        self.size += len(view)
        while view:
            view = view[os.write(self._fd, view) :]

    def replace(self, target: Path) -> None:
        """Become `target`, whatever was there."""
        sync(self._fd)
        _insist(target, lambda: self.path.replace(target))
        _sync_folder(target.parent)

    def link(self, target: Path) -> None:
        """Become `target`, or raise `FileExistsError` if it is there: of N racing, one succeeds."""
        sync(self._fd)
        try:
            _insist(target, lambda: os.link(self.path, target))
        except FileExistsError:
            # A file server that answers a resent request says that it exists though it was we who made it.
            if os.fstat(self._fd).st_nlink < 2:
                raise
        _sync_folder(target.parent)


class Guarded:
    """A progress callback that keeps what it raised, so that nobody takes that for the store's own error."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.error: BaseException | None = None

    def __call__(self, count: int) -> None:
        try:
            self._progress(count)
        except BaseException as error:
            self.error = error
            raise


def make_folders(path: Path) -> None:
    """Create `path` and what is missing above it, so that it survives a crash of the host."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:  # never passed on: it would be taken for the object's own existence
        if not stat.S_ISDIR(path.stat().st_mode):  # one look: it can be gone, and be there again, at any moment
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return
    _sync_folder(path.parent)


def device_of(path: Path) -> int:
    """The device that `path` is on, or would be on: that of the nearest folder above it that exists."""
    for folder in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return folder.stat().st_dev
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def sync(fd: int) -> None:
    """Flush a file to the disk itself (on macOS `fsync` alone does not)."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full)


def sweep(folder: Path) -> None:
    """Remove files in flight whose writers died; those of living writers are locked or young."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith(f"{RESERVED}-"):
                _remove_if_abandoned(entry)


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    with contextlib.suppress(OSError):
        # Both clocks are the file system's as seen here; a wrong one only makes this later.
        if time.time() - entry.stat(follow_symlinks=False).st_mtime < ABANDONED_AFTER:
            return
        fd = os.open(entry.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(entry.path).unlink()
        finally:
            os.close(fd)


def _open_new(path: Path) -> int:
    fd = _insist(path, lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    with contextlib.suppress(OSError):  # no locks on this file system: a leftover stays, hidden
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _insist(path: Path, action: Callable[[], T]) -> T:
    """Do `action` in the folder of `path`, made again if somebody's delete removes it as empty in between."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            make_folders(path.parent)
            return action()
    raise TransientStorageError(f"create {path}: its folder disappears again and again")


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:  # this file system cannot flush folders
                raise
        finally:
            os.close(fd)
