"""What torch's distributed checkpoints (DCP) need, without torch and without trusting the files."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from ckpt.errors import CorruptCheckpointError
from ckpt.storage import Transfers
from ckpt.transferring import ignore_progress

METADATA = ".metadata"
"""The file that DCP writes last: a pickle."""
_PICKLE = b"\x80"
"""What every pickle since protocol 2 begins with; a file of that name that does not is somebody else's."""


def check_shards(
    storage: Transfers, prefix: str, sizes: Mapping[str, int], scratch: Callable[[], AbstractContextManager[Path]]
) -> None:
    """Check that every shard file that a DCP checkpoint's `.metadata` refers to is there, and long enough.

    A DCP future that resolved proves less: writer threads may have died (pytorch#191391). Skipped for checkpoints of
    other kinds.

    Args:
        storage: where the files are.
        prefix: of their keys, with its final slash; empty at the storage's root.
        sizes: bytes by path, as listed.
        scratch: makes a folder for the copy of `.metadata`; only called if there is one.

    Raises:
        CorruptCheckpointError: a shard is missing or too short, or `.metadata` cannot be read; the file is named.
    """
    if METADATA not in sizes:
        return
    with scratch() as folder:
        copy = folder / "metadata"
        storage.download(prefix + METADATA, copy, progress=ignore_progress)
        needed = _lengths(copy)
    for path, length in sorted(needed.items()):
        if sizes.get(path, -1) < length:
            has = f"has {sizes[path]} bytes" if path in sizes else "is missing"
            raise CorruptCheckpointError(
                f"{prefix or 'the checkpoint'} is incomplete: its {METADATA} refers to {length} bytes of {path}, which {has}"
            )


class _Inert(dict[Any, Any]):
    """Stands for every class that a pickle names: it takes whatever it is given, and does nothing with it."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, _item: Any) -> None:
        """As a list."""

    def extend(self, _items: Any) -> None:
        """As a list."""

    def add(self, _item: Any) -> None:
        """As a set."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # dict has none, and these are keys
    __eq__ = object.__eq__


class _Reader(pickle.Unpickler):
    """Reads a pickle without importing or calling anything it names: its author may be anybody."""

    def find_class(self, _module: str, _name: str, /) -> Any:
        """The stand-in, for everything."""
        return _Inert

    def persistent_load(self, _pid: Any, /) -> Any:
        """As `find_class`."""
        return _Inert()


def _lengths(metadata: Path) -> dict[str, int]:
    """Bytes that the metadata refers to, by file."""
    with metadata.open("rb") as file:
        if file.read(1) != _PICKLE:
            return {}
        file.seek(0)
        try:
            body = _Reader(file).load()
        except Exception as error:
            raise CorruptCheckpointError(f"{METADATA} cannot be read: {type(error).__name__}: {error}") from error
    needed: dict[str, int] = {}
    places = getattr(body, "storage_data", None)
    for info in places.values() if isinstance(places, dict) else ():
        path, offset, length = (getattr(info, name, None) for name in ("relative_path", "offset", "length"))
        if isinstance(path, str) and isinstance(offset, int) and isinstance(length, int):
            needed[path] = max(needed.get(path, 0), offset + length)
    return needed
