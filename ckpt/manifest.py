"""The commit object: a manifest (this checkpoint exists, and these are its files) or a tombstone (it never will).

Both live at the same key, made by `create`: exactly one of the two wins, so recovery and history cannot disagree.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

from ckpt._json import encode, loads
from ckpt.errors import ConfigError, FormatError, NewerFormatError
from ckpt.layout import FORMAT, CommitId, check_relative
from ckpt.metrics import Metrics
from ckpt.storage import join_uri, normalize_uri


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """POSIX, relative to the checkpoint."""
    size: int
    """Bytes."""
    digest: str | None = None
    """`xxh3-128:<hex>`, or `etag:<value>` as the store gave it for files we did not move; None where neither is known."""
    mode: int = 0o644
    """Permission bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed checkpoint. Created last, after every file in it was found present with its size."""

    seq: int
    attempt: int
    name: str
    location: str
    """Relative to the run (or to the manifest's folder, standalone) where the files lie inside it, else a URI."""
    files: tuple[FileEntry, ...]
    empty_dirs: tuple[str, ...] = ()
    metrics: Metrics = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own."""
    validation: Mapping[str, Any] | None = None
    """How the checkpoint is to be validated, if that was asked for: so that a next attempt can do it."""
    run: str = ""
    run_id: str = ""
    nonce: str = ""
    """Tells our own object from another's when an answer got lost."""
    uploaded_by: str = "persist"
    """`persist`, `no_upload`, or the custom function's dotted name."""
    created: float = 0.0
    """Unix seconds of the report() call."""
    committed: float = 0.0
    """Unix seconds of this object's creation, by the owner's clock."""
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None

    def __post_init__(self) -> None:
        _check_location(self.location)
        _check_tree(self.files, self.empty_dirs)

    @property
    def id(self) -> CommitId:
        """Which commit this is."""
        return CommitId(self.seq, self.attempt)

    @property
    def nbytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(file.size for file in self.files)

    @property
    def external(self) -> bool:
        """Whether the files lie outside the run; such files are never deleted."""
        return "://" in self.location or self.location.startswith("/")

    def uri(self, run: str) -> str:
        """Where the files are, given the run's URI."""
        return self.location if self.external else join_uri(run, self.location)

    def encode(self) -> bytes:
        """The object's bytes."""
        body = {key: getattr(self, key) for key in _FIELDS}
        body["files"] = [asdict(file) for file in self.files]
        return encode({"format": FORMAT, "kind": "manifest", "nbytes": self.nbytes, **body})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A report that was given up; nothing is ever committed at its key."""

    seq: int
    attempt: int
    name: str
    state: str
    """`failed`, `skipped` or `lost`."""
    reason: str
    metrics: Metrics = field(default_factory=dict)
    run_id: str = ""
    nonce: str = ""
    created: float = 0.0

    @property
    def id(self) -> CommitId:
        """Which commit this is."""
        return CommitId(self.seq, self.attempt)

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode({"format": FORMAT, "kind": "tombstone", **{key: getattr(self, key) for key in _TOMBSTONE_FIELDS}})


_FIELDS = tuple(name for name in Manifest.__dataclass_fields__ if name != "files")
_TOMBSTONE_FIELDS = tuple(Tombstone.__dataclass_fields__)
_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*://")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "seq": (int,), "attempt": (int,), "name": (str,), "location": (str,), "metrics": (dict,), "metadata": (dict,),
    "run": (str,), "run_id": (str,), "nonce": (str,), "uploaded_by": (str,), "created": (int, float),
    "committed": (int, float), "versions": (dict,), "git_commit": (str, NoneType), "validation": (dict, NoneType),
    "state": (str,), "reason": (str,),
    "size": (int,), "mode": (int,), "digest": (str, NoneType),
}  # fmt: skip
"""What the fields of a commit object are, in JSON."""


def decode_commit(data: bytes, where: str) -> Manifest | Tombstone:
    """Read a commit object; every path in it is checked, so that a crafted one cannot write outside on restore.

    Raises:
        FormatError: damaged, crafted, or of a newer format; `where` is named.
    """
    body = decode_object(data, where)
    try:
        if body["kind"] == "tombstone":
            return Tombstone(**typed(body, _TOMBSTONE_FIELDS))
        if body["kind"] != "manifest":
            raise TypeError(f"kind is {body['kind']!r:.40}")
        files = tuple(FileEntry(path=item["path"], **typed(item, ("size", "digest", "mode"))) for item in body["files"])
        known = typed(body, (name for name in _FIELDS if name != "empty_dirs"))
        return Manifest(**known, files=files, empty_dirs=tuple(body["empty_dirs"]))
    except (KeyError, TypeError, ConfigError) as error:
        raise FormatError(f"{where} is not a commit object of format {FORMAT}: {error}") from error


def decode_object(data: bytes, where: str) -> dict[str, Any]:
    """Read any JSON object of a run.

    Raises:
        FormatError: it does not parse.
        NewerFormatError: it says a newer format.
    """
    body = loads(data, where)
    if not isinstance(body, dict):
        raise FormatError(f"{where} holds a {type(body).__name__}, not an object")
    version = body.get("format", FORMAT)
    if not isinstance(version, int):
        raise FormatError(f"{where} has format {version!r:.40}, which is no number")
    if version > FORMAT:
        raise NewerFormatError(
            f"{where} has format {version}, newer than the {FORMAT} that this version reads: upgrade prefect-ckpt"
        )
    return body


def typed(
    body: Mapping[str, Any], names: Iterable[str], types: Mapping[str, tuple[type, ...]] = _TYPES
) -> dict[str, Any]:
    """Those of the fields that are there, each of its type; numbers that count something are not negative.

    Raises:
        TypeError: one is of another type; it is named.
    """
    found = {name: body[name] for name in names if name in body}
    for name, value in found.items():
        kinds = types[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name} is {value!r:.40}")
        if kinds == (int,) and isinstance(value, int) and value < 0:
            raise TypeError(f"{name} is {value}, below 0")
    return found


def _check_location(location: str) -> None:
    if _ABSOLUTE.match(location):
        normalize_uri(location)
    else:
        check_relative(location, "location")


def _check_tree(files: tuple[FileEntry, ...], folders: tuple[str, ...]) -> None:
    """Every path is plain, and all of them fit into one directory."""
    paths = {check_relative(file.path, "file") for file in files}
    if len(paths) != len(files):
        raise ConfigError("a file is listed twice")
    for folder in folders:
        check_relative(folder, "folder")
    for folder in {above for path in (*paths, *(f"{folder}/" for folder in folders)) for above in _above(path)}:
        if folder in paths:
            raise ConfigError(f"{folder!r} is a file and a folder at once")


def _above(path: str) -> Iterator[str]:
    """The folders that `path` lies in."""
    end = path.find("/")
    while end != -1:
        yield path[:end]
        end = path.find("/", end + 1)


@cache
def versions() -> dict[str, str]:
    """Versions worth knowing when a checkpoint is read years later; torch only if the program uses it."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    try:
        found["ckpt"] = version("prefect-ckpt")
    except PackageNotFoundError:
        found["ckpt"] = "unknown"
    if torch := sys.modules.get("torch"):
        found["torch"] = str(torch.__version__)
    return found


@cache
def git_commit() -> str | None:
    """The commit checked out in the working directory, read from its files (no process is started); None outside one."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / ".git").is_dir():
            return _head(folder / ".git")
    return os.environ.get("GIT_COMMIT")


def _head(git: Path) -> str | None:
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        ref = git / head.removeprefix("ref: ")
        return ref.read_text().strip() if ref.is_file() else None
    except OSError:
        return None
