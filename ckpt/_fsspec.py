"""Any other file system of fsspec: Google Cloud Storage, Azure, SFTP, HDFS, ...

Only calls that say what they did are used, on explicit keys: `pipe_file`, `put_file`, `cat_file`, `info`, `find`,
`rm_file`. A file system that can rename (SFTP, HDFS, SMB) gets every object under a hidden name first; one that cannot
is an object store, whose puts are whole.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from ckpt._files import Guarded, NewFile, Source, translate_os_error
from ckpt._transfer import LISTEN_EVERY
from ckpt.credentials import Credentials, check_credentials, check_storage_options, merged, redact, resolve_credentials
from ckpt.errors import (
    AccessDeniedError,
    CkptError,
    ConfigError,
    CredentialsExpiredError,
    ObjectExistsError,
    ObjectNotFoundError,
    StalledError,
    StorageError,
    TransientStorageError,
)
from ckpt.storage import (
    MEMORY_BUDGET,
    RESERVED,
    STALL_TIMEOUT,
    Entry,
    Progress,
    Receipt,
    check_key,
    normalize_uri,
    scheme_of,
)

T = TypeVar("T")
IN_MEMORY = 64 * 2**20
"""Bytes that one transfer may hold: gcsfs and others send and receive pieces of up to 50 MiB."""
SLOWEST = 256 * 2**10
"""Bytes per second. Many file systems report progress rarely or never: only what is slower than this is a stall."""
_ETAGS = ("ETag", "etag", "md5Hash", "generation")
_NETWORK = ("aiohttp", "requests", "urllib3", "http", "paramiko", "azure", "gcsfs", "google", "fsspec")


class FsspecStorage:
    """Objects below a URI of an fsspec file system, opened without any of fsspec's caches.

    Where the file system has no conditional write, `create` looks, writes and reads back: of two drivers in the same
    split second both may then believe that they won.

    Args:
        uri: `<protocol>://...`.
        credentials: see `ckpt.credentials`.
        storage_options: fsspec options without secrets.
        memory_budget: bytes; as many transfers run at a time as fit, at 64 MiB each.
        stall_timeout: seconds without a moved byte, beyond what the slowest bearable line takes, that are a stall.
    """

    def __init__(
        self,
        uri: str,
        *,
        credentials: Credentials = "env",
        storage_options: Mapping[str, Any] | None = None,
        memory_budget: int = MEMORY_BUDGET,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        self._uri = normalize_uri(uri)
        self._credentials = check_credentials(credentials)
        self._options = check_storage_options(storage_options)
        self._transfers_at_a_time = max(1, memory_budget // IN_MEMORY)
        self._stall_timeout = stall_timeout
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._opened: _Opened | None = None
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self._transfers_at_a_time)

    def __repr__(self) -> str:
        return f"FsspecStorage({self._uri!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in {"_opened", "_lock", "_slots", "_pid"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def uri(self) -> str:
        """The root."""
        return self._uri

    def create(self, key: str, data: bytes) -> None:
        """Make the object appear by a conditional write where there is one, or raise `ObjectExistsError`."""
        path = self._path(key)
        with self._translated("create", key):
            if self._open().is_conditional:
                self._open().fs.pipe_file(path, data, mode="create")
                return
            if self._open().fs.exists(path):
                raise FileExistsError(path)
            self._write(path, data)
            if self._open().fs.cat_file(path) != data:
                raise FileExistsError(path)

    def write(self, key: str, data: bytes) -> None:
        """Put the object; where it is renamed into place, an old one may be away for a moment."""
        path = self._path(key)
        with self._translated("write", key):
            self._write(path, data)

    def read(self, key: str) -> bytes:
        """All bytes of the object."""
        path = self._path(key)
        with self._translated("read", key):
            return bytes(self._open().fs.cat_file(path))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix`, by key, asked of the store now."""
        folder = prefix.rpartition("/")[0]
        with self._translated("list", prefix):
            return iter(self._open().find(self._path(folder) if folder else self._open().root, prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects; a missing one is fine. On a file system with folders, emptied ones go too."""
        paths = {key: self._path(key) for key in keys}
        opened = self._open()

        def one(key: str) -> Exception | None:
            try:
                with self._translated("delete", key):
                    opened.fs.rm_file(paths[key])
            except ObjectNotFoundError:
                return None
            except (CkptError, OSError) as error:
                return error
            return None

        if opened.fs.async_impl:
            with ThreadPoolExecutor(8) as pool:
                failed = [error for error in pool.map(one, paths) if error is not None]
        else:
            failed = [error for error in map(one, paths) if error is not None]
        opened.remove_empty({os.path.dirname(path) for path in paths.values()})  # noqa: PTH120 - keys, not files
        if failed:
            raise failed[0]

    def upload(self, source: Path, key: str, *, progress: Progress) -> Receipt:
        """Copy a local file to `key`, and ask the store whether all of it arrived."""
        path, moved = self._path(key), Guarded(progress)
        with self._slots, Source(source) as reading:
            for _ in reading.chunks():
                pass
            with self._translated("upload", key, moved):
                self._watched(
                    f"upload {self._uri}/{key}", reading.size, moved, lambda seen: self._send(reading, path, seen)
                )
                info = self._open().fs.info(path)
        if info["size"] != reading.size:
            raise TransientStorageError(f"upload {self._uri}/{key}: {info['size']} bytes arrived of {reading.size}")
        return Receipt(size=reading.size, digest=reading.digest, etag=_etag(info))

    def download(self, key: str, target: Path, *, progress: Progress) -> Receipt:
        """Copy an object to a local file, piece by piece, and look that it was one version of it."""
        path, moved = self._path(key), Guarded(progress)
        with self._slots, self._translated("download", key, moved):
            fs = self._open().fs
            info = fs.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
            with NewFile(target.parent) as new:
                self._watched(
                    f"download {self._uri}/{key}", info["size"], moved, lambda seen: _fetch(fs, path, info, new, seen)
                )
                after = fs.info(path)
                if (new.size, _etag(after)) != (info["size"], _etag(info)):
                    raise TransientStorageError(f"download {self._uri}/{key}: the object was replaced meanwhile")
                new.replace(target)
        return Receipt(size=new.size, digest=new.digest, etag=_etag(info))

    def _path(self, key: str) -> str:
        return f"{self._open().root}/{check_key(key)}"

    def _open(self) -> _Opened:
        if self._pid != os.getpid():  # forked: connections and locks are the parent's
            self._begin()
        with self._lock:
            if self._opened is None:
                self._opened = _open(self._uri, self._credentials, self._options)
            return self._opened

    def _write(self, path: str, data: bytes) -> None:
        self._open().place(path, lambda name: self._open().fs.pipe_file(name, data))

    def _send(self, source: Source, path: str, moved: Callable[[int], None]) -> None:
        opened = self._open()
        if opened.fs.async_impl or opened.renames or source.size > IN_MEMORY:

            def look(count: int) -> None:
                if count == 0:
                    source.check_unchanged()  # fsspec's own loop spins for ever on a file that became shorter
                moved(count)

            def fill(name: str) -> None:
                opened.fs.put_file(str(source.path), name, callback=_callback(look))
                source.check_unchanged()

            with opened.nothing_left_of(path):
                opened.place(path, fill)
            return
        # A file system that writes through a stream would show the object growing.
        data = source.path.read_bytes()
        moved(len(data))
        source.check_unchanged()
        opened.place(path, lambda name: opened.fs.pipe_file(name, data))

    def _watched(self, what: str, size: int, moved: Guarded, work: Callable[[Callable[[int], None]], None]) -> None:
        """Do `work` in a thread of its own; when no byte moves for too long, its next one ends it."""
        watch = _Watch(size, moved, self._stall_timeout)
        failed: list[BaseException] = []

        def body() -> None:
            try:
                work(watch.moved)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                failed.append(error)
            finally:
                watch.done.set()

        threading.Thread(target=body, name="ckpt-fsspec", daemon=True).start()
        try:
            watch.wait(what)
        finally:
            watch.abandoned = not watch.done.is_set()
        if failed:
            raise failed[0]
        watch.moved(size - watch.count)

    @contextlib.contextmanager
    def _translated(self, verb: str, key: str, progress: Guarded | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, CkptError) or (progress is not None and error is progress.error):
                raise
            raise _translate(verb, f"{self._uri}/{key}", error) from error


class _Watch:
    def __init__(self, size: int, progress: Callable[[int], None], timeout: float) -> None:
        self._size = size
        self._progress = progress
        self._timeout = timeout
        self._last = time.monotonic()
        self.count = 0
        self.abandoned = False
        self.done = threading.Event()

    def moved(self, count: int) -> None:
        """Of the file system's callback; some report more than there is, or the same twice."""
        if self.abandoned:
            raise StalledError("given up")
        count = min(count, self._size - self.count)
        if count:
            self._last = time.monotonic()
        self.count += count
        self._progress(count)

    def wait(self, what: str) -> None:
        while not self.done.wait(max(0.0, min(self._left(), LISTEN_EVERY))):
            if self._left() <= 0:
                raise StalledError(f"{what}: no byte moved for {self._timeout:g} s")
            self._progress(0)  # an abort must not wait for a byte

    def _left(self) -> float:
        return self._last + self._timeout + (self._size - self.count) / SLOWEST - time.monotonic()


class _Opened:
    """A file system as it is open in this process, with what it can do."""

    def __init__(self, fs: Any, root: str) -> None:
        from fsspec import AbstractFileSystem

        self.fs = fs
        self.root = root.rstrip("/")
        pipe = "_pipe_file" if fs.async_impl else "pipe_file"
        own = getattr(type(fs), pipe)
        self.is_conditional = own is not AbstractFileSystem.pipe_file and "mode" in inspect.signature(own).parameters
        self.renames = not fs.async_impl and type(fs).mv is not AbstractFileSystem.mv

    def place(self, path: str, write: Callable[[str], object]) -> None:
        """Have `write` fill an object that then is at `path`."""
        if not self.renames:
            write(path)
            return
        hidden = f"{self.root}/{RESERVED}-{uuid4().hex}"
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            write(hidden)
            try:
                self.fs.mv(hidden, path)
            except Exception:
                if not self.fs.exists(path):
                    raise
                self.fs.rm_file(path)  # renaming does not replace here
                self.fs.mv(hidden, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.fs.rm_file(hidden)
            raise

    @contextlib.contextmanager
    def nothing_left_of(self, path: str) -> Iterator[None]:
        """Where a put can leave a part behind, remove it: streams of fsspec are completed when they are closed."""
        torn = not self.fs.async_impl and not self.renames and not self.fs.exists(path)
        try:
            yield
        except BaseException:
            if torn:
                with contextlib.suppress(Exception):
                    self.fs.rm_file(path)
            raise

    def find(self, folder: str, prefix: str) -> list[Entry]:
        """Entries below a folder, of those keys that start with `prefix`, by key."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(folder, detail=True)
        except FileNotFoundError:
            return []
        start = len(self.root.strip("/")) + 1 if self.root.strip("/") else 0
        entries = [
            Entry(key=name.strip("/")[start:], size=info["size"], etag=_etag(info))
            for name, info in found.items()
            if info["type"] == "file" and not name.endswith("/")
        ]
        visible = [entry for entry in entries if entry.key.startswith(prefix) and f"/{RESERVED}" not in f"/{entry.key}"]
        return sorted(visible, key=lambda entry: entry.key)

    def remove_empty(self, folders: Iterable[str]) -> None:
        """Remove folders that are empty, and those above them, on a file system that has any."""
        if not self.renames:
            return
        for folder in sorted(folders, reverse=True):
            below = folder
            with contextlib.suppress(Exception):  # not empty
                while below.startswith(f"{self.root}/"):
                    self.fs.rmdir(below)
                    below = below.rpartition("/")[0]


def _open(uri: str, credentials: Credentials, options: Mapping[str, Any]) -> _Opened:
    import fsspec

    found = resolve_credentials(credentials, scheme_of(uri))
    found.pop("expires_at", None)
    given = {**merged(found, options), "skip_instance_cache": True, "use_listings_cache": False}
    try:
        fs, root = fsspec.core.url_to_fs(uri, **given)
    except ImportError as error:
        raise ConfigError(f"storage URI {uri!r}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"storage URI {uri!r}: fsspec says {redact(str(error))}") from error
    except Exception as error:
        raise _translate("open", uri, error) from error
    return _Opened(fs, root)


def _fetch(fs: Any, path: str, info: Mapping[str, Any], new: NewFile, moved: Callable[[int], None]) -> None:
    step = IN_MEMORY // 4
    for start in range(0, info["size"], step):
        piece = fs.cat_file(path, start=start, end=min(start + step, info["size"]))
        moved(len(piece))
        new.write(piece)


def _callback(moved: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    before = 0

    class Moved(Callback):  # type: ignore[misc]
        def call(self, *_: Any, **__: Any) -> None:
            nonlocal before
            grown, before = self.value - before, max(before, self.value)
            moved(max(0, grown))

    return Moved()


def _etag(info: Mapping[str, Any]) -> str | None:
    return next((str(info[name]).strip('"') for name in _ETAGS if info.get(name)), None)


def _translate(verb: str, where: str, error: Exception) -> Exception:
    text = f"{verb} {where}: {type(error).__name__}: {redact(str(error))}"
    status = next(
        (value for name in ("code", "status_code", "status") if isinstance(value := getattr(error, name, 0), int)), 0
    )
    kind = _KINDS.get(status)
    if kind is None and isinstance(error, FileExistsError):
        kind = ObjectExistsError
    if kind is None and isinstance(error, OSError):
        return translate_os_error(verb, where, error)
    if kind is None and (status >= 500 or type(error).__module__.partition(".")[0] in _NETWORK):
        kind = TransientStorageError
    return (kind or StorageError)(text)


_KINDS: dict[int, type[StorageError]] = {
    401: CredentialsExpiredError,
    403: AccessDeniedError,
    404: ObjectNotFoundError,
    408: TransientStorageError,
    409: ObjectExistsError,
    412: ObjectExistsError,
    429: TransientStorageError,
}
