"""One report's upload: move or call, verify, commit. This is what the `upload_checkpoint` task runs.

Order of things, for every mode: files first; then a look into the store that they are all there; then the manifest, by
one `create`; then a check that no newer driver exists; only then is anything local deleted.
"""

from __future__ import annotations

import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from ckpt._dcp import check_shards
from ckpt.calling import PASS_THROUGH, name_of
from ckpt.checkpoint import Checkpoint
from ckpt.credentials import redact
from ckpt.errors import (
    CheckpointNotFoundError,
    CommittedError,
    ConfigError,
    FencedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    UploadFailedError,
)
from ckpt.inflight import Destination, Flight, Live, overlap
from ckpt.layout import CHECKPOINTS, MANIFEST_SUFFIX
from ckpt.manifest import FileEntry, Manifest, Tombstone, decode_commit, versions
from ckpt.metrics import freeze_metrics
from ckpt.records import Report, ReportRecord, ReportState, Timings, UploadFn
from ckpt.slots import DroppedError
from ckpt.staging import Source, scan
from ckpt.storage import Storage, join_uri, normalize_uri, open_storage
from ckpt.transferring import check_arrived, list_files, upload_files
from ckpt.upload_functions import call_upload_fn, check_upload_fn, freeze_function

logger = logging.getLogger("ckpt")

Limit = Callable[[Flight], AbstractContextManager[None]]
"""The cross-run limit: a context manager to hold while bytes move."""


def no_limit(_flight: Flight) -> AbstractContextManager[None]:
    """Only the process's own slots bound uploads."""
    return nullcontext()


def upload(report: Report, destination: Destination, *, limit: Limit = no_limit) -> ReportRecord:
    """Upload one report of a run and commit it, all or nothing: COMMITTED, and the checkpoint exists, or not.

    Args:
        report: as `report()` froze it.
        destination: the run's attempt.
        limit: held while bytes move, inside the process's slot.

    Returns:
        The report's final record: COMMITTED, or SKIPPED if it was dropped while it waited.

    Raises:
        UploadFailedError: it is FAILED or FENCED; carries the record.
    """
    live = destination.live()
    work = _Upload(report=report, target=_InRun(destination, live), flight=live.flight(report.seq))
    try:
        return work.run(live, limit)
    finally:
        live.flights.pop(report.seq, None)


def upload_standalone(
    checkpoint: Checkpoint,
    destination: str,
    *,
    name: str | None = None,
    metrics: dict[str, Any] | None = None,
    seq: int | None = None,
    checkpoint_upload_fn: UploadFn | None = None,
    credentials: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReportRecord:
    """Upload a checkpoint to a plain prefix, outside any run; committed by `<destination>.manifest.json`, written last.

    Args:
        checkpoint: what to upload.
        destination: a local path or URI; nothing may be there yet.
        name: for people; default: the last part of `destination`.
        metrics: recorded in the manifest.
        seq: its place in an order of the caller's own; default 0.
        checkpoint_upload_fn: called instead of the default upload, as in `report()`.
        credentials: for `destination`; default: those of the environment.
        storage_options: for `destination`, without secrets.

    Returns:
        The COMMITTED record.

    Raises:
        ConfigError: an argument can never work; raised before anything is moved.
        UploadFailedError: carries the FAILED record.
    """
    root, _, folder = normalize_uri(destination).rpartition("/")
    if not root or root.endswith(":/") or not folder:
        raise ConfigError(f"destination={destination!r} must name a folder of its own, not the root of a store")
    report = Report(
        seq=seq or 0,
        name=name or folder,
        metrics=freeze_metrics(metrics or {}),
        checkpoint=checkpoint,
        upload_fn=None if checkpoint_upload_fn is None else freeze_function(check_upload_fn(checkpoint_upload_fn)),
        source=scan(Path(checkpoint.path)) if checkpoint.is_local and checkpoint_upload_fn is None else None,
        location=folder,
        metadata=checkpoint.pending_metadata,
    )
    storage = open_storage(root, credentials=credentials or "env", storage_options=storage_options)
    target = _Standalone(storage, folder, credentials, storage_options)
    return _Upload(report=report, target=target, flight=Flight(seq=report.seq)).run()


class _Target:
    """Where an upload is committed: a run's attempt, or a standalone prefix."""

    storage: Storage
    attempt = 0
    run = ""
    run_id = ""
    git_commit: str | None = None
    upload_fn_timeout = 1800.0
    slow_upload_warning = 60.0

    def commit(self, manifest: Manifest) -> None:
        raise NotImplementedError

    def give_up(self, tombstone: Tombstone) -> Manifest | Tombstone:
        raise NotImplementedError

    def check_fence(self) -> None:
        """Raise `FencedError` if another driver took over."""

    def claim(self, uri: str) -> None:
        """Take a location where somebody else put files."""

    def check_empty(self, uri: str) -> None:
        """Refuse a location for our own upload where something is already: files of two uploads would mix."""

    def reference(self, uri: str, manifest: Manifest) -> Checkpoint:
        raise NotImplementedError

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for the length of the block."""
        with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
            yield Path(folder)

    def keep(self, source: Source, seq: int, kind: str) -> Path:  # noqa: ARG002 - the run's has a place for them
        return source.root


class _InRun(_Target):
    def __init__(self, destination: Destination, live: Live) -> None:
        self.storage, self._live, self._destination = live.storage, live, destination
        self.attempt, self.run, self.run_id = destination.attempt, destination.run, destination.run_id
        self.git_commit = destination.git_commit
        self.upload_fn_timeout = destination.upload_config.upload_fn_timeout
        self.slow_upload_warning = destination.upload_config.slow_upload_warning

    def commit(self, manifest: Manifest) -> None:
        self._live.attempt.commit(manifest)

    def give_up(self, tombstone: Tombstone) -> Manifest | Tombstone:
        return self._live.attempt.give_up(tombstone)

    def check_fence(self) -> None:
        self._live.attempt.check_fence()

    def claim(self, uri: str) -> None:
        """Take it; outside `checkpoints/` nothing of the run is a checkpoint's, and above it is everything."""
        root = self.storage.uri
        inside = uri.startswith(f"{root}/{CHECKPOINTS}")
        if not inside and (uri == root or uri.startswith(f"{root}/") or root.startswith(f"{uri.rstrip('/')}/")):
            raise CommittedError(
                f"location {uri} is, contains or lies among the run's own records ({root}): use the one that "
                "build_checkpoint_path_from_name makes, or one outside the run"
            )
        self._live.locations.claim(uri)

    def reference(self, uri: str, manifest: Manifest) -> Checkpoint:
        return Checkpoint(
            uri,
            self._destination.credentials,
            storage_options=self._destination.storage_options,
            commit_uri=join_uri(self.storage.uri, manifest.id.key),
        ).with_manifest(manifest, self.storage)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """In the staging folder, where it is swept at the next start if this process is killed."""
        staging = self._live.staging
        with super().scratch() if staging is None else staging.scratch() as folder:
            yield folder

    def keep(self, source: Source, seq: int, kind: str) -> Path:
        return source.root if self._live.staging is None else self._live.staging.keep(source, seq, kind)


class _Standalone(_Target):
    def __init__(
        self, storage: Storage, folder: str, credentials: Any, storage_options: Mapping[str, Any] | None
    ) -> None:
        self.storage, self._credentials, self._options = storage, credentials, storage_options
        self._folder, self._key = folder, folder + MANIFEST_SUFFIX
        self._writes = False
        """Whether what is in the folder is this upload's."""

    def commit(self, manifest: Manifest) -> None:
        try:
            self.storage.create(self._key, manifest.encode())
        except ObjectExistsError as error:
            found = decode_commit(self.storage.read(self._key), self._key)
            if found.nonce != manifest.nonce:
                raise CommittedError(f"{join_uri(self.storage.uri, self._key)} was committed meanwhile") from error

    def give_up(self, tombstone: Tombstone) -> Manifest | Tombstone:
        """No tombstone: what was uploaded is deleted, so that the destination can be used again.

        Unless a commit whose answer got lost was made after all; then that is what there is.
        """
        try:
            return decode_commit(self.storage.read(self._key), self._key)
        except ObjectNotFoundError:
            if self._writes:
                self.storage.delete([entry.key for entry in self.storage.list(f"{self._folder}/")])
            return tombstone

    def check_empty(self, uri: str) -> None:
        folder = uri.removeprefix(f"{self.storage.uri}/")
        if any(entry.key == self._key or entry.key.startswith(f"{folder}/") for entry in self.storage.list(folder)):
            raise CommittedError(f"{uri} is not empty: name a destination where nothing is yet")
        self._writes = True

    def reference(self, uri: str, manifest: Manifest) -> Checkpoint:
        commit = join_uri(self.storage.uri, self._key)
        found = Checkpoint(uri, self._credentials, storage_options=self._options, commit_uri=commit)
        return found.with_manifest(manifest, self.storage)


@dataclass(slots=True, kw_only=True)
class _Upload:
    """One upload on its way through its steps; `timings` grows as they end."""

    report: Report
    target: _Target
    flight: Flight
    timings: Timings = field(default_factory=Timings)
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, live: Live | None = None, limit: Limit = no_limit) -> ReportRecord:
        """All steps; every way out is a final record."""
        self.timings = replace(
            self.timings, stall=self.report.stall, queue_wait=max(0.0, time.monotonic() - self.report.submitted)
        )
        try:
            with self._slot(live), self._limit(limit):
                manifest = self._moved_and_checked()
                with self._step("commit", "committing"):
                    self.flight.progress(0)  # one that was aborted or given up meanwhile must not commit
                    self.target.commit(manifest)
            return self._committed(manifest)
        except DroppedError as dropped:
            return self._dropped(str(dropped))
        except FencedError as error:
            raise UploadFailedError(self._fenced(error)) from error
        except PASS_THROUGH:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the report ends FAILED with it as the reason
            return self._failed(error)

    @contextmanager
    def _step(self, timing: str, label: str) -> Iterator[None]:
        """Time a step under a field of `Timings`."""
        self.flight.enter(label)
        began = time.monotonic()
        try:
            yield
        finally:
            took = getattr(self.timings, timing) + time.monotonic() - began
            self.timings = replace(self.timings, **{timing: took})

    @contextmanager
    def _slot(self, live: Live | None) -> Iterator[None]:
        slot = nullcontext() if live is None else live.slots.slot(self.report.seq)
        with self._entered(slot, "slot_wait", "waiting for a slot"):
            yield

    @contextmanager
    def _limit(self, limit: Limit) -> Iterator[None]:
        with self._entered(limit(self.flight), "limit_wait", "waiting for the limit"):
            yield

    @contextmanager
    def _entered(self, held: AbstractContextManager[None], timing: str, label: str) -> Iterator[None]:
        with self._step(timing, label):
            held.__enter__()
        try:
            yield
        finally:
            held.__exit__(None, None, None)

    def _moved_and_checked(self) -> Manifest:
        self.flight.enter("uploading", ReportState.UPLOADING)
        report = self.report
        if report.upload_fn is not None and report.mode.moves_bytes:
            return self._by_function(report.upload_fn)
        if not report.mode.moves_bytes:
            return self._in_place(_given(report), "no_upload")
        return self._persisted()

    def _persisted(self) -> Manifest:
        report, location = self.report, str(self.report.location)
        with ExitStack() as stack:
            source = report.source or self._fetched(stack.enter_context(self.target.scratch()))
            if not source.files:
                raise CheckpointNotFoundError(f"{source.original} holds no file; nothing was uploaded")
            self.target.check_empty(join_uri(self.target.storage.uri, location))
            with self._step("upload", "uploading"):
                files, receipts = upload_files(source, self.target.storage, location, progress=self.flight.progress)
            with self._step("verify", "verifying"):
                check_arrived(self.target.storage, location, receipts)
                sizes = {file.path: file.size for file in files}
                check_shards(open_storage(source.root), "", sizes, self.target.scratch)
        return self._manifest(location, files, source.empty_dirs, "persist")

    def _fetched(self, scratch: Path) -> Source:
        """A checkpoint that is in another store, brought here on its way."""
        with self._step("upload", "downloading"):
            return scan(_given(self.report).to_directory(scratch / "checkpoint", progress=self.flight.progress))

    def _by_function(self, fn: UploadFn) -> Manifest:
        with self._step("upload", f"waiting for {name_of(fn)}"):
            given = call_upload_fn(
                fn,
                _given(self.report),
                self.report.name,
                timeout=self.target.upload_fn_timeout,
                when_aborted=self.flight.when_aborted,
            )
        return self._in_place(given, name_of(fn))

    def _in_place(self, checkpoint: Checkpoint, uploaded_by: str) -> Manifest:
        """Commit files that somebody else put where they are: listed and sized, and not a byte written beside them."""
        self.target.claim(checkpoint.uri)
        with self._step("verify", "verifying"):
            storage, prefix = self._place(checkpoint)
            files, empty = self._listed(checkpoint, storage, prefix)
            check_shards(storage, prefix, {file.path: file.size for file in files}, self.target.scratch)
        inside = checkpoint.uri.removeprefix(f"{self.target.storage.uri}/")
        return self._manifest(inside, files, empty, uploaded_by)

    def _place(self, checkpoint: Checkpoint) -> tuple[Storage, str]:
        """Where a checkpoint's files are, and the prefix of their keys: in the run's own storage if it lies in the run."""
        root = f"{self.target.storage.uri}/"
        if checkpoint.uri.startswith(root):
            return self.target.storage, f"{checkpoint.uri.removeprefix(root)}/"
        return checkpoint.open(), ""

    def _listed(
        self, checkpoint: Checkpoint, storage: Storage, prefix: str
    ) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
        if checkpoint.is_local:
            source = scan(Path(checkpoint.uri))
            files, empty = tuple(_hashed(source, self.flight)), source.empty_dirs
        else:
            files, empty = list_files(storage, prefix), ()
        if not files:
            raise CheckpointNotFoundError(f"nothing is at {checkpoint.uri}; a checkpoint has at least one file")
        return files, empty

    def _manifest(
        self, location: str, files: tuple[FileEntry, ...], empty: tuple[str, ...], uploaded_by: str
    ) -> Manifest:
        report, target = self.report, self.target
        return Manifest(
            seq=report.seq, attempt=target.attempt, name=report.name, location=location, files=files, empty_dirs=empty,
            metrics=report.metrics, metadata=report.metadata, validation=report.validation, run=target.run,
            run_id=target.run_id, nonce=self.nonce, uploaded_by=uploaded_by, created=report.created,
            committed=time.time(), versions=versions(), git_commit=target.git_commit,
        )  # fmt: skip

    def _committed(self, manifest: Manifest) -> ReportRecord:
        uri = manifest.uri(self.target.storage.uri)
        source = self.report.source
        if source is not None:
            source.discard()
            if self.report.delete_local and not source.staged:
                self._delete_original(source, uri)
        self.flight.enter("committed", ReportState.COMMITTED)
        record = self._record(
            ReportState.COMMITTED,
            checkpoint=self.target.reference(uri, manifest),
            nbytes=manifest.nbytes,
            nfiles=len(manifest.files),
        )
        logger.info("%s", _line(record))
        return record

    def _delete_original(self, source: Source, committed: str) -> None:
        original = str(source.original.resolve())
        if "://" not in committed and overlap(str(Path(committed).resolve()), original):
            logger.warning("Not deleting %s: it is, or overlaps, the committed checkpoint %s", original, committed)
            return
        try:
            if left := source.delete_original():
                logger.warning("Not deleting what was written to %s since its report: %s", original, ", ".join(left))
        except OSError as error:
            logger.warning("Could not delete the local checkpoint %s after its commit: %s", original, error)

    def _dropped(self, reason: str) -> ReportRecord:
        if self.report.source is not None:
            self.report.source.discard()
        with suppress(StorageError):
            self.target.give_up(self._tombstone(ReportState.SKIPPED, reason))
        self.flight.enter("skipped", ReportState.SKIPPED)
        return self._record(ReportState.SKIPPED, reason=reason)

    def _fenced(self, error: FencedError) -> ReportRecord:
        """Nothing of this driver counts any more; what it has locally may be all there is of it, so it stays."""
        where = self._whereabouts(f".fenced-{self.report.seq}")
        self.flight.enter("fenced", ReportState.FENCED)
        return self._record(ReportState.FENCED, reason=f"{error}{where}")

    def _failed(self, error: Exception) -> ReportRecord:
        """Settle a failure in the store; a commit whose answer got lost turns out here, and stands.

        Not where it stays unknown whether a newer driver exists: whoever comes next takes the commit, or supersedes it.
        """
        reason = redact(f"{type(error).__name__}: {error}")
        won: Manifest | Tombstone | None = None
        try:
            won = self.target.give_up(self._tombstone(ReportState.FAILED, reason))
            self.target.check_fence()  # a newer driver gives up what it finds open: that is no failure of the upload
            if isinstance(won, Manifest) and won.nonce == self.nonce:
                return self._committed(won)
        except FencedError as fenced:
            raise UploadFailedError(self._fenced(fenced)) from error
        except StorageError as second:
            logger.debug("The end of report %d could not be recorded: %s", self.report.seq, second)
            if isinstance(won, Manifest):
                reason += " (its manifest is there, but whether this driver still owns the run could not be checked)"
        self.flight.enter("failed", ReportState.FAILED)
        raise UploadFailedError(self._record(ReportState.FAILED, reason=reason + self._whereabouts())) from error

    def _whereabouts(self, kind: str = "") -> str:
        """Keep the local files and say where they are."""
        source = self.report.source
        if source is None:
            return ""
        try:
            where = self.target.keep(source, self.report.seq, kind)
        except OSError as error:
            return f" (its files are at {source.root}; they could not be moved: {error})"
        return f" (its files are kept at {where})"

    def _tombstone(self, state: ReportState, reason: str) -> Tombstone:
        report = self.report
        return Tombstone(
            seq=report.seq, attempt=self.target.attempt, name=report.name, state=state.value, reason=reason,
            metrics=report.metrics, run_id=self.target.run_id, nonce=self.nonce, created=report.created,
        )  # fmt: skip

    def _record(
        self,
        state: ReportState,
        *,
        checkpoint: Checkpoint | None = None,
        reason: str | None = None,
        nbytes: int = 0,
        nfiles: int = 0,
    ) -> ReportRecord:
        report = self.report
        return ReportRecord(
            seq=report.seq, attempt=self.target.attempt, name=report.name, state=state, metrics=report.metrics,
            checkpoint=checkpoint, reason=reason, nbytes=nbytes, nfiles=nfiles, timings=self.timings,
            created=report.created,
        )  # fmt: skip


def _given(report: Report) -> Checkpoint:
    if report.checkpoint is None:
        raise ConfigError(f"report {report.seq} has no checkpoint to upload")
    return report.checkpoint


def _hashed(source: Source, flight: Flight) -> Iterator[FileEntry]:
    """Files that lie on a local disk, with their digests; each checked against a change while it was read."""
    for file in source.files:
        digest = xxhash.xxh3_128()
        with (source.root / file.real).open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
                flight.progress(len(block))
        source.check(file)
        yield FileEntry(path=file.path, size=file.size, digest=f"xxh3-128:{digest.hexdigest()}", mode=file.mode)


def _line(record: ReportRecord) -> str:
    """What was committed, how fast, and where its time went."""
    t = record.timings
    rate = f", {record.nbytes / t.upload / 2**20:.1f} MiB/s" if t.upload > 0 and record.nbytes else ""
    waits = f"queue {t.queue_wait:.2f} s, slot {t.slot_wait:.2f} s, limit {t.limit_wait:.2f} s"
    return (
        f"committed {record.seq} {record.name}: {record.nbytes / 2**20:.2f} MiB in {t.upload:.2f} s{rate} "
        f"(waited: {waits}; verify {t.verify:.2f} s, commit {t.commit:.2f} s)"
    )
