"""The storage seam: what the protocol asks of a store, and `open_storage` that makes one from a URI.

The commit protocol uses five verbs on small objects (`Objects`), the bulk path two on files (`Transfers`). An object is
there whole or not at all: no verb leaves a torn one. Keys are POSIX paths relative to the storage's root.

    plain path, file://     ckpt._local.LocalStorage
    memory://               ckpt._memory.MemoryStorage
    s3://                   ckpt._s3.S3Storage          retried by ckpt._retry.RetryingStorage
    any other of fsspec     ckpt._fsspec.FsspecStorage  retried as well
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ckpt.credentials import Credentials, check_credentials, check_storage_options
from ckpt.errors import ConfigError
from ckpt.layout import check_relative

Progress = Callable[[int], None]
"""Called with the number of bytes that just moved, from any thread; an exception it raises cancels the transfer.

It is also called with 0 while a retry waits, so that a cancellation is noticed in time. It must return at once.
"""

MEMORY_BUDGET = 512 * 2**20
"""Bytes that all transfers of one storage may hold in memory at a time."""
STALL_TIMEOUT = 60.0
"""Seconds without a moved byte after which a transfer is cancelled and tried again."""
RETRY_BUDGET = 300.0
"""Seconds for which a failing operation is tried again."""
RESERVED = ".ckpt-tmp"
"""No part of a key may start so: files being written have such names, and no listing shows them."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ALIASES = {"s3a": "s3", "s3n": "s3", "local": "file", "gcs": "gs"}
_NAMED_ROOT = ("s3", "gs", "az", "abfs", "abfss", "adl", "oss", "memory")
"""Schemes whose first part names a bucket or container that has to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object as a listing shows it."""

    key: str
    """Relative to the storage's root."""
    size: int
    """Bytes."""
    etag: str | None = None
    """The store's own version or checksum token; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a transfer moved."""

    size: int
    """Bytes."""
    digest: str
    """`xxh3-128:<hex>` of the bytes as they were read from the source."""
    etag: str | None = None
    """What the store answered; a later listing must show the same."""


@runtime_checkable
class Objects(Protocol):
    """Small objects: all that the commit protocol needs."""

    @property
    def uri(self) -> str:
        """The root, without a trailing slash and without secrets."""

    def create(self, key: str, data: bytes) -> None:
        """Make the object appear whole, or raise `ObjectExistsError` if one is there: of N racing, one succeeds.

        An answer can get lost. A caller that is told that the object exists reads it back: its own bytes mean success.
        """

    def write(self, key: str, data: bytes) -> None:
        """Make the object hold `data`; readers see the old bytes or the new, never a mix."""

    def read(self, key: str) -> bytes:
        """All bytes of the object.

        Raises:
            ObjectNotFoundError: it is not there.
        """

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix` (a string, not a folder), by key; never from a cache."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects; a missing one is fine. All are tried before the first failure is raised."""


@runtime_checkable
class Transfers(Protocol):
    """Files: all that moving a checkpoint needs."""

    def upload(self, source: Path, key: str, *, progress: Progress) -> Receipt:
        """Copy a local file to `key`; memory stays within the storage's budget whatever the file's size.

        Raises:
            SourceChangedError: the file changed or vanished while it was read.
        """

    def download(self, key: str, target: Path, *, progress: Progress) -> Receipt:
        """Copy an object to a local file, which appears whole or not at all; missing parent folders are made."""


@runtime_checkable
class Storage(Objects, Transfers, Protocol):
    """Both halves."""


def open_storage(
    uri: str | os.PathLike[str],
    *,
    credentials: Credentials = "env",
    storage_options: Mapping[str, Any] | None = None,
    memory_budget: int = MEMORY_BUDGET,
    stall_timeout: float = STALL_TIMEOUT,
    retry_budget: float = RETRY_BUDGET,
) -> Storage:
    """The storage whose root is `uri`; nothing is contacted before the first operation.

    The result pickles as its configuration, works after a fork, and can be used by many threads at once.

    Args:
        uri: a local path, or a URI of any scheme that fsspec knows.
        credentials: see `ckpt.credentials`; resolved anew in every process and when the store says they have expired.
        storage_options: fsspec options without secrets: endpoints, regions, encryption, storage class.
        memory_budget: bytes that all transfers of this storage together may hold in memory.
        stall_timeout: seconds without a moved byte after which a transfer is cancelled.
        retry_budget: seconds for which a transient failure is tried again.

    Raises:
        ConfigError: one of the arguments can never work.
    """
    root = normalize_uri(uri)
    check_credentials(credentials)
    opener = _Opener(
        uri=root,
        credentials=credentials,
        options=check_storage_options(storage_options),
        memory_budget=memory_budget,
        stall_timeout=stall_timeout,
    )
    if scheme_of(root) in {"file", "memory"}:
        return opener()
    from ckpt._retry import RetryingStorage

    return RetryingStorage(opener, budget=retry_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opener:
    """Makes the bare storage: called once at first, and again when credentials have expired."""

    uri: str
    credentials: Credentials = field(repr=False)
    options: Mapping[str, Any]
    memory_budget: int
    stall_timeout: float

    def __call__(self) -> Storage:
        match scheme_of(self.uri):
            case "file":
                from ckpt._local import LocalStorage

                return LocalStorage(self.uri)
            case "memory":
                from ckpt._memory import MemoryStorage

                return MemoryStorage(self.uri)
            case "s3":
                from ckpt._s3 import S3Storage

                return S3Storage(
                    self.uri,
                    credentials=self.credentials,
                    storage_options=self.options,
                    memory_budget=self.memory_budget,
                    stall_timeout=self.stall_timeout,
                )
        from ckpt._fsspec import FsspecStorage

        return FsspecStorage(
            self.uri,
            credentials=self.credentials,
            storage_options=self.options,
            memory_budget=self.memory_budget,
            stall_timeout=self.stall_timeout,
        )


@dataclass(frozen=True, slots=True)
class Below:
    """The part of a storage below a folder, as a storage of its own: with the same connections, memory and retries."""

    inner: Storage
    folder: str
    """Relative to the inner storage's root, without a final slash."""

    @property
    def uri(self) -> str:
        """The root."""
        return join_uri(self.inner.uri, self.folder)

    def create(self, key: str, data: bytes) -> None:
        """See `Objects`."""
        self.inner.create(self._key(key), data)

    def write(self, key: str, data: bytes) -> None:
        """See `Objects`."""
        self.inner.write(self._key(key), data)

    def read(self, key: str) -> bytes:
        """See `Objects`."""
        return self.inner.read(self._key(key))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Objects`."""
        for entry in self.inner.list(self._key(prefix)):
            yield replace(entry, key=entry.key.removeprefix(f"{self.folder}/"))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Objects`."""
        self.inner.delete([self._key(key) for key in keys])

    def upload(self, source: Path, key: str, *, progress: Progress) -> Receipt:
        """See `Transfers`."""
        return self.inner.upload(source, self._key(key), progress=progress)

    def download(self, key: str, target: Path, *, progress: Progress) -> Receipt:
        """See `Transfers`."""
        return self.inner.download(self._key(key), target, progress=progress)

    def _key(self, key: str) -> str:
        return f"{self.folder}/{key}"


def scheme_of(uri: str) -> str:
    """The lower-case scheme of a URI, `file` for a plain path; aliases such as `s3a` under their common name."""
    match = _SCHEME.match(uri)
    scheme = match[1].lower() if match else "file"
    return _ALIASES.get(scheme, scheme)


def normalize_uri(uri: str | os.PathLike[str]) -> str:
    """One spelling per location: absolute local paths without a scheme, no trailing, double or `.` parts.

    Local paths keep their symbolic links. Nothing is percent-decoded: a `%` is a `%`.

    Raises:
        ConfigError: it has `..`, NUL or control characters, a password, no bucket, or is chained (`::`).
    """
    text = os.fspath(uri)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"storage URI {uri!r} is empty: give a local path or a URI such as 's3://bucket/folder'")
    _check_text(text)
    scheme = scheme_of(text)
    rest = _SCHEME.sub("", text, count=1)
    if scheme == "file":
        return _local_path(text, rest)
    parts = [part for part in rest.split("/") if part not in {"", "."}]
    if not parts or (scheme in _NAMED_ROOT and rest.startswith("/")):
        raise ConfigError(f"storage URI {text!r} names no bucket: write '{scheme}://bucket/folder'")
    return f"{scheme}://{'/' if rest.startswith('/') else ''}{'/'.join(parts)}"


def join_uri(uri: str | os.PathLike[str], *parts: str) -> str:
    """The location `parts` below `uri`, normalized; empty parts are left out.

    Raises:
        ConfigError: a part is absolute or has `..` or control characters.
    """
    root = normalize_uri(uri)
    below = [check_relative(part.rstrip("/"), "path") for part in parts if part]
    return "/".join([root.rstrip("/"), *below]) if below else root


def check_key(key: str) -> str:
    """`key` itself, if it can be an object's key in every store.

    Raises:
        ConfigError: it is absolute, has `.`/`..`/empty parts or control characters, is no valid Unicode, is too long,
            or uses the names that files being written have.
    """
    check_relative(key, "key")
    if RESERVED in key and any(part.startswith(RESERVED) for part in key.split("/")):
        raise ConfigError(
            f"key {key!r} uses a name that starts with {RESERVED!r}; such names are kept for files in flight"
        )
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"key {key!r} is not valid Unicode; rename the file to a name that UTF-8 can hold") from None
    return key


def _local_path(text: str, rest: str) -> str:
    if text != rest and not rest.startswith("/"):
        raise ConfigError(f"storage URI {text!r} has no absolute path: write 'file:///folder' with three slashes")
    path = os.path.abspath(os.path.expanduser(rest))  # noqa: PTH100, PTH111 - as text; symbolic links are kept
    return re.sub(r"^/+", "/", path)  # POSIX lets "//x" be special, and abspath keeps it


def _check_text(uri: str) -> None:
    if any(ord(char) < 32 or char == "\x7f" for char in uri):
        raise ConfigError(f"storage URI {uri!r} has NUL or control characters")
    if ".." in uri.split("/"):
        raise ConfigError(f"storage URI {uri!r} has a '..' part: write where it leads")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return
    if "::" in uri:
        raise ConfigError(f"storage URI {uri!r} is chained; give the URI of the store itself")
    if ":" in rest.split("/")[0].rpartition("@")[0]:
        raise ConfigError(f"the storage URI ({scheme}://...) has a password in it: use credentials= instead")
