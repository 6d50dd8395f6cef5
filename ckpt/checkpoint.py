"""`Checkpoint`: a reference to a checkpoint directory at any URI. It never holds bytes, clients or secrets."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt.credentials import Credentials, check_credentials, check_storage_options
from ckpt.errors import CheckpointNotFoundError, CommittedError, ConfigError, ObjectNotFoundError
from ckpt.layout import COMMITS, MANIFEST_SUFFIX, parse_commit
from ckpt.manifest import FileEntry, Manifest, decode_commit
from ckpt.metrics import Metrics, freeze_metrics
from ckpt.staging import scan
from ckpt.storage import Below, Progress, Storage, join_uri, normalize_uri, open_storage
from ckpt.transferring import download_files, ignore_progress, list_files

_IN_RUN = re.compile(r"(?P<run>.+)/(?P<location>checkpoints/.+-a\d+(-\d+)?)")


class Checkpoint:
    """A reference to a checkpoint directory.

    It names files and promises nothing about them; `files()` and the downloads check against the manifest where there
    is one, that is for every checkpoint that `report()` or `upload_checkpoint` committed. Pickles and round-trips as
    JSON.

    Args:
        uri: a directory: a local path, `s3://bucket/key`, or any fsspec URI.
        credentials: `env`, `profile:<name>`, `block:<type>/<name>`, or a callable; see docs/credentials.md.
        storage_options: endpoint, region and the like, without secrets.
        commit_uri: where the manifest is, if known.

    Raises:
        ConfigError: the URI, the credentials' form or an option cannot be used.
    """

    __slots__ = ("_commit_uri", "_credentials", "_manifest", "_metadata", "_opened", "_options", "_uri")

    def __init__(
        self,
        uri: str | os.PathLike[str],
        credentials: Credentials | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        commit_uri: str | None = None,
    ) -> None:
        self._uri = normalize_uri(os.fspath(uri))
        self._credentials = check_credentials(credentials or "env")
        self._options = check_storage_options(storage_options)
        self._commit_uri = commit_uri
        self._manifest: Manifest | None = None
        self._metadata: dict[str, Any] = {}
        self._opened: dict[str, Storage] = {}

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """A reference to a local directory, as `report()` takes it."""
        return cls(os.path.abspath(os.fspath(path)))  # noqa: PTH100 - symbolic links stay as they are

    @property
    def uri(self) -> str:
        """Where the directory is: a URI, or an absolute local path."""
        return self._uri

    @property
    def path(self) -> str:
        """The URI without its scheme: `bucket/key`, or the local path."""
        return self._uri.split("://", 1)[-1]

    @property
    def is_local(self) -> bool:
        """Whether the directory is on this machine's file systems."""
        return "://" not in self._uri

    @property
    def credentials(self) -> Credentials:
        """How the directory is opened."""
        return self._credentials

    @property
    def storage_options(self) -> dict[str, Any]:
        """A copy of the options the directory is opened with."""
        return dict(self._options)

    @property
    def seq(self) -> int:
        """The report's place in its run.

        Raises:
            CheckpointNotFoundError: the checkpoint is not committed.
        """
        return self.manifest.seq

    @property
    def metrics(self) -> Metrics:
        """The metrics of its report; raises as `seq` does."""
        return self.manifest.metrics

    @property
    def metadata(self) -> dict[str, Any]:
        """The user's metadata; the same as `get_metadata()`."""
        return self.get_metadata()

    @property
    def manifest(self) -> Manifest:
        """What was committed; read once.

        Raises:
            CheckpointNotFoundError: no commit names this directory.
        """
        if self._manifest is None:
            self._manifest = self._find_manifest()
        if self._manifest is None:
            raise CheckpointNotFoundError(f"{self._uri} is not a committed checkpoint: no manifest names it")
        return self._manifest

    def open(self) -> Storage:
        """The storage rooted at the directory itself."""
        return self._open(self._uri)

    def files(self) -> list[FileEntry]:
        """Its files, by the manifest; for an uncommitted one as a listing shows them (no digests)."""
        if self._committed():
            return list(self.manifest.files)
        if self.is_local:
            if not Path(self._uri).is_dir():
                raise CheckpointNotFoundError(f"nothing is at {self._uri}, and no manifest names it")
            return [FileEntry(path=file.path, size=file.size, mode=file.mode) for file in scan(Path(self._uri)).files]
        return list(list_files(self.open()))

    def get_metadata(self) -> dict[str, Any]:
        """The user's metadata, a copy: of the manifest once committed, else what will go into it."""
        return dict(self.manifest.metadata) if self._committed() else dict(self._metadata)

    @property
    def pending_metadata(self) -> dict[str, Any]:
        """What `set_metadata` was given, for the manifest to come; looks nothing up."""
        return dict(self._metadata)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata that the report will write into the manifest.

        Raises:
            CommittedError: the checkpoint is committed and cannot change any more.
            MetricsError: a value has no JSON form.
        """
        if self._committed():
            raise CommittedError(
                f"{self._uri} is committed; its metadata cannot change. record_evaluation() adds facts after the commit"
            )
        self._metadata = freeze_metrics(metadata)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata that the report will write; raises as `set_metadata` does."""
        self.set_metadata({**self._metadata, **metadata})

    def to_directory(self, path: str | os.PathLike[str] | None = None, *, progress: Progress = ignore_progress) -> Path:
        """Copy the checkpoint to a local directory, which appears whole and verified, or not at all.

        Args:
            path: the directory to make; it may exist if it is empty. Default: a new temporary one.
            progress: called with the bytes that just arrived.

        Returns:
            The directory.

        Raises:
            ConfigError: `path` has content: files of two checkpoints would mix.
            CorruptCheckpointError: a file is not what the manifest says.
        """
        target = Path(tempfile.mkdtemp(prefix="checkpoint-")) if path is None else Path(path).absolute()
        if target.is_symlink():
            raise ConfigError(
                f"cannot restore into {target}: it is a symbolic link; name the directory that it leads to"
            )
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"cannot restore into {target}: it exists and is not an empty directory; name a new one")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
        partial.mkdir()
        try:
            download_files(self.open(), "", self._present_files(), partial, progress=progress)
            for folder in self.manifest.empty_dirs if self._committed() else ():
                (partial / folder).mkdir(parents=True, exist_ok=True)
            partial.replace(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return target

    @contextmanager
    def as_directory(self) -> Iterator[Path]:
        """The checkpoint as a local directory for the length of a `with` block: itself if local, else a temporary copy."""
        if self.is_local:
            yield Path(self._uri)
            return
        parent = tempfile.mkdtemp(prefix="checkpoint-")
        try:
            yield self.to_directory(Path(parent) / "checkpoint")
        finally:
            shutil.rmtree(parent, ignore_errors=True)

    def with_manifest(self, manifest: Manifest, storage: Storage) -> Checkpoint:
        """The same reference, knowing its manifest, and the open storage that its run or its prefix lies in."""
        other = Checkpoint(self._uri, self._credentials, storage_options=self._options, commit_uri=self._commit_uri)
        other._manifest = manifest
        other._opened[storage.uri] = storage
        return other

    def _present_files(self) -> list[FileEntry]:
        files = self.files()
        if not files and not self._committed():
            raise CheckpointNotFoundError(f"nothing is at {self._uri}")
        return files

    def _committed(self) -> bool:
        if self._manifest is None:
            self._manifest = self._find_manifest()
        return self._manifest is not None

    def _find_manifest(self) -> Manifest | None:
        """By its known URI, beside the directory (standalone), or among the run's commits."""
        if self._commit_uri:
            root, commits, key = self._commit_uri.rpartition(f"/{COMMITS}")
            return self._read_manifest(root, COMMITS + key) if commits else self._beside(self._commit_uri)
        if match := _IN_RUN.fullmatch(self._uri):
            return self._search(match["run"], match["location"])
        return self._beside(self._uri + MANIFEST_SUFFIX)

    def _beside(self, commit_uri: str) -> Manifest | None:
        """The manifest of a standalone checkpoint."""
        root, _, key = commit_uri.rpartition("/")
        return self._read_manifest(root, key) if root and not root.endswith(":/") else None

    def _search(self, run: str, location: str) -> Manifest | None:
        storage = self._open(run)
        for entry in storage.list(COMMITS):
            if parse_commit(entry.key):
                found = self._read_manifest(run, entry.key)
                if found and found.location == location:
                    self._commit_uri = join_uri(run, entry.key)
                    return found
        return None

    def _read_manifest(self, root: str, key: str) -> Manifest | None:
        try:
            commit = decode_commit(self._open(root).read(key), join_uri(root, key))
        except ObjectNotFoundError:
            return None
        return commit if isinstance(commit, Manifest) else None

    def _open(self, uri: str) -> Storage:
        """The storage at `uri`; below one that is open already, on the same connections."""
        for root, storage in self._opened.items():
            if uri == root or uri.startswith(f"{root}/"):
                return storage if uri == root else Below(storage, uri.removeprefix(f"{root}/"))
        self._opened[uri] = open_storage(uri, credentials=self._credentials, storage_options=self._options)
        return self._opened[uri]

    def __repr__(self) -> str:
        return f"Checkpoint({self._uri!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self._uri == other._uri

    def __hash__(self) -> int:
        return hash(self._uri)

    def __fspath__(self) -> str:
        if not self.is_local:
            raise TypeError(f"{self._uri} is not a local path: use to_directory() or as_directory()")
        return self._uri

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._uri, self._credentials, self._options, self._commit_uri, self._metadata)

    def to_json(self) -> str | dict[str, Any]:
        """The URI alone where that says everything, else an object; `Checkpoint.from_json` reads both."""
        extra = {
            "credentials": self._credentials if self._credentials != "env" else None,
            "storage_options": self._options or None,
            "commit_uri": self._commit_uri,
        }
        given = {key: value for key, value in extra.items() if value is not None}
        return {"uri": self._uri, **given} if given else self._uri

    @classmethod
    def from_json(cls, value: str | Mapping[str, Any] | Checkpoint) -> Checkpoint:
        """Read what `to_json` gave, or a plain URI string.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(value, Checkpoint):
            return value
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping) or "uri" not in value:
            raise ConfigError(f"a checkpoint is a URI, or a mapping with `uri`; got {value!r:.200}")
        known = {key: value[key] for key in ("uri", "credentials", "storage_options", "commit_uri") if key in value}
        return cls(**known)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Lets a flow parameter or model field of this type be given as a URI string."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls.from_json, serialization=core_schema.plain_serializer_function_ser_schema(cls.to_json)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "title": "Checkpoint", "description": "URI of a checkpoint directory"}


def _rebuild(
    uri: str, credentials: Credentials, options: dict[str, Any], commit_uri: str | None, metadata: dict[str, Any]
) -> Checkpoint:
    checkpoint = Checkpoint(uri, credentials, storage_options=options, commit_uri=commit_uri)
    checkpoint._metadata = metadata  # noqa: SLF001 - its own module
    return checkpoint
