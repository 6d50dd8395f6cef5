"""The commit object: a manifest (this checkpoint exists, and these are its files) or a tombstone (it never will).

Both live at the same key, made by `create`: exactly one of the two wins, so recovery and history cannot disagree.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ckpt._json import encode, loads
from ckpt.errors import ConfigError, FormatError, NewerFormatError
from ckpt.layout import FORMAT, CommitId, check_relative
from ckpt.metrics import Metrics


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


def decode_commit(data: bytes, where: str) -> Manifest | Tombstone:
    """Read a commit object; every path in it is checked, so that a crafted one cannot write outside on restore.

    Raises:
        FormatError: damaged, crafted, or of a newer format; `where` is named.
    """
    body = decode_object(data, where)
    try:
        if body["kind"] == "tombstone":
            return Tombstone(**{key: body[key] for key in _TOMBSTONE_FIELDS if key in body})
        files = tuple(_file(item) for item in body["files"])
        dirs = tuple(check_relative(item, "folder") for item in body["empty_dirs"])
        known = {key: body[key] for key in _FIELDS if key in body and key != "empty_dirs"}
        return Manifest(**known, files=files, empty_dirs=dirs)
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
    if body.get("format", FORMAT) > FORMAT:
        raise NewerFormatError(
            f"{where} has format {body['format']}, newer than the {FORMAT} that this version reads: upgrade prefect-ckpt"
        )
    return body


def _file(item: Mapping[str, Any]) -> FileEntry:
    known = {key: item[key] for key in ("size", "digest", "mode") if key in item}
    return FileEntry(path=check_relative(item["path"], "file"), **known)


@cache
def versions() -> dict[str, str]:
    """Versions worth knowing when a checkpoint is read years later; torch only if the program uses it."""
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
