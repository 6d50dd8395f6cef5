"""Objects as files under a folder of a POSIX file system, NFS and parallel file systems included."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from ckpt._files import CHUNK, Guarded, NewFile, Source, device_of, sweep, translate_os_error
from ckpt.errors import ConfigError, ObjectExistsError, StorageError
from ckpt.storage import RESERVED, Entry, Progress, Receipt, check_key, normalize_uri, scheme_of

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_IS_EMPTY_OR_GONE = {errno.ENOENT, errno.ENOTDIR}


class LocalStorage:
    """Objects as files below a folder; what is there after a crash of the host is whole.

    Files in flight are hidden in `.ckpt-tmp` below the root. Unlike in an object store, a key cannot be a file and a
    folder at once. A listing follows symbolic links and leaves out what is neither a file nor a folder.

    Args:
        uri: an absolute or relative path, or `file:///...`. The folder is made by the first write.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self._uri = normalize_uri(uri)
        if scheme_of(self._uri) != "file":
            raise ConfigError(f"storage URI {self._uri!r} is not a local path")
        self._root = Path(self._uri)
        self._sweep_once = threading.Lock()

    def __repr__(self) -> str:
        return f"LocalStorage({self._uri!r})"

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[str]]:
        return type(self), (self._uri,)

    @property
    def uri(self) -> str:
        """The root, an absolute path."""
        return self._uri

    def create(self, key: str, data: bytes) -> None:
        """Make the file appear by a hard link to a finished one, or raise `ObjectExistsError`."""
        target = self._path(key)
        try:
            with self._new(target) as new:
                new.write(data)
                new.link(target)
        except FileExistsError as error:
            raise _exists("create", target) from error
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StorageError(
                    f"create {target}: the file system allows no hard link here ({error.strerror}), and nothing else "
                    "on it creates a file whole and once; use another storage_path"
                ) from error
            raise translate_os_error("create", target, error) from error

    def write(self, key: str, data: bytes) -> None:
        """Put a finished file in place of what is there."""
        target = self._path(key)
        with _translated("write", target), self._new(target) as new:
            new.write(data)
            new.replace(target)

    def read(self, key: str) -> bytes:
        """All bytes of the file."""
        path = self._path(key)
        with _translated("read", path):
            return path.read_bytes()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every file whose key starts with `prefix`, by key; what vanishes meanwhile is left out."""
        folder = prefix.rpartition("/")[0]
        start = self._path(folder) if folder else self._root
        with _translated("list", start):
            yield from _walk(start, f"{folder}/" if folder else "", prefix, frozenset())

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the files, and the folders that this empties, up to the root."""
        first: OSError | None = None
        folders = set()
        for path in [self._path(key) for key in keys]:
            try:
                path.unlink()
            except OSError as error:
                if error.errno not in _IS_EMPTY_OR_GONE:
                    first = first or translate_os_error("delete", path, error)
            folders.add(path.parent)
        for folder in sorted(folders, reverse=True):
            self._remove_empty(folder)
        if first is not None:
            raise first

    def upload(self, source: Path, key: str, *, progress: Progress) -> Receipt:
        """Copy a local file to `key`, hashed on the way."""
        target, moved = self._path(key), Guarded(progress)
        with Source(source) as reading, _translated("upload", target, moved), self._new(target) as new:
            for chunk in reading.chunks():
                new.write(chunk)
                moved(len(chunk))
            reading.check_unchanged()
            new.replace(target)
        return Receipt(size=new.size, digest=reading.digest)

    def download(self, key: str, target: Path, *, progress: Progress) -> Receipt:
        """Copy a file out of the storage, hashed on the way."""
        source, moved = self._path(key), Guarded(progress)
        with (
            _translated("download", source, moved),
            source.open("rb", buffering=0) as reading,
            _translated("write", target, moved),
            NewFile(target.parent) as new,
        ):
            _copy(reading.fileno(), new, moved)
            new.replace(target)
        return Receipt(size=new.size, digest=new.digest)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _new(self, target: Path) -> NewFile:
        """In the hidden folder below the root, or beside the target where that is on another file system."""
        hidden = self._root / RESERVED
        if self._sweep_once.acquire(blocking=False):  # never released: once in the life of this storage
            sweep(hidden)
        return NewFile(hidden if device_of(hidden) == device_of(target.parent) else target.parent)

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._root and self._root in folder.parents:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                sweep(folder)
                try:
                    folder.rmdir()
                except OSError:
                    return  # somebody else's files are in it, or it is a symbolic link
            folder = folder.parent


def _walk(folder: Path, key: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[Entry]:
    """Files below `folder`, whose own key is `key`, in the order of their keys."""
    try:
        here = folder.stat()
        with os.scandir(folder) as scan:
            # A folder sorts with its slash: "a-b" comes before "a/b".
            visible = [(entry.name + "/" * entry.is_dir(), entry) for entry in scan if _is_visible(entry.name)]
    except OSError as error:
        if error.errno in _IS_EMPTY_OR_GONE:
            return
        raise
    inode = (here.st_dev, here.st_ino)
    if inode in above:
        return  # a symbolic link that leads back up
    for name, entry in sorted(visible, key=itemgetter(0)):
        below = key + name
        if not below.startswith(prefix):
            continue
        if name.endswith("/"):
            yield from _walk(folder / entry.name, below, prefix, above | {inode})
        else:
            yield from _entry(below, entry)


def _entry(key: str, entry: os.DirEntry[str]) -> Iterator[Entry]:
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile, or a broken link
        if entry.is_file():
            yield Entry(key=key, size=entry.stat().st_size)


def _is_visible(name: str) -> bool:
    return not name.startswith(RESERVED)


def _copy(fd: int, new: NewFile, progress: Progress) -> None:
    buffer = memoryview(bytearray(CHUNK))
    while count := os.readv(fd, [buffer]):
        new.write(buffer[:count])
        progress(count)


def _exists(verb: str, path: Path) -> ObjectExistsError:
    return ObjectExistsError(f"{verb} {path}: it exists")


@contextlib.contextmanager
def _translated(verb: str, path: Path, progress: Guarded | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if progress is not None and error is progress.error:
            raise
        raise translate_os_error(verb, path, error) from error
