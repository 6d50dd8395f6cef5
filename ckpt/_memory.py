"""Objects in this process's memory: for tests, examples and dry runs."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from ckpt._files import Guarded, NewFile, Source, translate_os_error
from ckpt.errors import ObjectExistsError, ObjectNotFoundError
from ckpt.storage import Entry, Progress, Receipt, check_key, normalize_uri


class _Object(NamedTuple):
    data: bytes
    etag: str


_objects: defaultdict[str, dict[str, _Object]] = defaultdict(dict)
"""By the first part of the URI, then by whole path: a listing need not look at what other tests left there."""
_lock = threading.Lock()
_versions = itertools.count(1)


class MemoryStorage:
    """Objects in this process's memory. Two storages with one URI see the same objects, also one below the other.

    Args:
        uri: `memory://<name>/...`; left out, a fresh root that no other storage has.
    """

    def __init__(self, uri: str | None = None) -> None:
        self._uri = normalize_uri(uri if uri is not None else f"memory://{uuid4().hex}")
        self._name = self._uri.removeprefix("memory://").partition("/")[0]

    def __repr__(self) -> str:
        return f"MemoryStorage({self._uri!r})"

    @property
    def uri(self) -> str:
        """The root."""
        return self._uri

    def create(self, key: str, data: bytes) -> None:
        """Make the object appear, or raise `ObjectExistsError`."""
        with _lock:
            if self._path(key) in _objects[self._name]:
                raise ObjectExistsError(f"create {self._path(key)}: it exists")
            self._put(key, data)

    def write(self, key: str, data: bytes) -> None:
        """Make the object hold `data`."""
        with _lock:
            self._put(key, data)

    def read(self, key: str) -> bytes:
        """All bytes of the object."""
        return self._get("read", key).data

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix`, by key, as it was at the call."""
        root = f"{self._uri}/"
        with _lock:
            found = {
                path.removeprefix(root): held
                for path, held in _objects[self._name].items()
                if path.startswith(root + prefix)
            }
        return (Entry(key=key, size=len(found[key].data), etag=found[key].etag) for key in sorted(found))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects; a missing one is fine."""
        for key in keys:
            with _lock:
                _objects[self._name].pop(self._path(key), None)

    def upload(self, source: Path, key: str, *, progress: Progress) -> Receipt:
        """Copy a local file to `key`."""
        self._path(key)
        with Source(source) as reading:
            data = bytearray()
            for chunk in reading.chunks():
                progress(len(chunk))
                data += chunk
            reading.check_unchanged()
        with _lock:
            return Receipt(size=len(data), digest=reading.digest, etag=self._put(key, bytes(data)))

    def download(self, key: str, target: Path, *, progress: Progress) -> Receipt:
        """Copy an object to a local file."""
        held = self._get("download", key)
        moved = Guarded(progress)
        try:
            with NewFile(target.parent) as writing:
                writing.write(held.data)
                moved(len(held.data))
                writing.replace(target)
        except OSError as error:
            if error is moved.error:
                raise
            raise translate_os_error("write", target, error) from error
        return Receipt(size=len(held.data), digest=writing.digest, etag=held.etag)

    def _path(self, key: str) -> str:
        return f"{self._uri}/{check_key(key)}"

    def _put(self, key: str, data: bytes) -> str:
        etag = f"v{next(_versions)}"
        _objects[self._name][self._path(key)] = _Object(bytes(data), etag)
        return etag

    def _get(self, verb: str, key: str) -> _Object:
        path = self._path(key)
        with _lock:
            held = _objects[self._name].get(path)
        if held is None:
            raise ObjectNotFoundError(f"{verb} {path}: no such object")
        return held
