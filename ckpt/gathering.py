"""Gathering and pruning outside a training run: for pipelines that reuse the upload task, and for maintenance."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from ckpt.attempts import Found, Owner, claim
from ckpt.checkpoint import Checkpoint
from ckpt.collecting import settle
from ckpt.credentials import Credentials
from ckpt.errors import ConfigError, UploadFailedError
from ckpt.layout import MANIFEST_SUFFIX, CommitId
from ckpt.notes import Notes
from ckpt.publishing import delete_checkpoint
from ckpt.reading import open_run_files
from ckpt.records import ReportRecord, ReportState
from ckpt.result import Result, Totals
from ckpt.retention import Candidate, RetentionPolicy, evicted, rank
from ckpt.storage import open_storage

logger = logging.getLogger("ckpt")


def gather_records(
    records: Iterable[ReportRecord | BaseException], *, retention: RetentionPolicy | None = None, name: str = ""
) -> Result:
    """Put finished uploads in order into one result; what failed takes its place with its reason.

    Args:
        records: records of `upload_checkpoint`, or the exceptions it raised.
        retention: deletes the standalone checkpoints it does not keep, the manifest first; None keeps all.
        name: of the result.

    Returns:
        The result; its history is in memory, in seq order.
    """
    rows = sorted((_record(item, index) for index, item in enumerate(records)), key=lambda row: row.seq)
    done = [row for row in rows if row.checkpoint is not None]
    retained = done if retention is None else _retain(done, retention)
    latest = retained[-1] if retained else None
    last = latest or (rows[-1] if rows else None)
    return Result(
        run=name, path="", checkpoint=None if latest is None else latest.checkpoint,
        metrics=dict(last.metrics) if last else {},
        best_checkpoints=[(row.checkpoint, row.metrics) for row in retained if row.checkpoint], history=rows,
        totals=Totals.of(rows),
    )  # fmt: skip


def prune(
    run: str,
    retention: RetentionPolicy,
    *,
    credentials: Credentials | None = None,
    storage_options: dict[str, object] | None = None,
) -> list[Checkpoint]:
    """Delete the checkpoints of a run that a policy does not keep.

    Latest, best, pinned and not yet validated ones stay whatever it says.

    It claims an attempt first, as a new driver would, so that it never works beside a living one.

    Returns:
        What was deleted.

    Raises:
        RunBusyError: a driver owns the run and is alive.
    """
    files = open_run_files(run, credentials, storage_options=storage_options)
    attempt, start, found = claim(files.storage, Owner(), lambda _: None, upkeep=True)
    try:
        settle(files, attempt, start, found)
        files = open_run_files(run, credentials, storage_options=storage_options)
        notes = Notes(files.storage)
        notes.refresh()
        by_id = {manifest.id: manifest for manifest in files.manifests()}
        candidates = [
            Candidate(
                id=item.id,
                metrics=notes.metrics(item.id, item.metrics),
                created=item.created,
                pinned=notes.pinned(item.id),
            )
            for item in by_id.values()
        ]
        protected = _protected(files.score_attribute, files.score_order, candidates, found)
        protected |= {item.id for item in by_id.values() if notes.awaits_validation(item)}
        gone = evicted(candidates, retention, protected)
        for commit in gone:
            attempt.check_fence()
            delete_checkpoint(files.storage, commit, _reference_record(files.checkpoint(by_id[commit]), commit))
        return [files.checkpoint(by_id[commit]) for commit in gone]
    finally:
        attempt.end("pruned")


def _protected(attribute: str | None, order: object, candidates: list[Candidate], found: Found) -> set[CommitId]:
    protected = set() if found.newest is None else {found.newest.id}
    if attribute is not None:
        protected |= {item.id for item in rank(candidates, attribute, "min" if order == "min" else "max")[:1]}
    return protected


def _reference_record(checkpoint: Checkpoint, commit: CommitId) -> ReportRecord:
    return ReportRecord(
        seq=commit.seq, attempt=commit.attempt, name="", state=ReportState.COMMITTED, metrics={}, checkpoint=checkpoint
    )


def _record(item: ReportRecord | BaseException, index: int) -> ReportRecord:
    if isinstance(item, ReportRecord):
        return item
    if isinstance(item, UploadFailedError):
        return item.record
    if isinstance(item, BaseException):
        reason = f"{type(item).__name__}: {item}"
        return ReportRecord(
            seq=index, attempt=0, name="", state=ReportState.FAILED, metrics={}, reason=reason, created=time.time()
        )
    raise ConfigError(
        f"records[{index}] is {type(item).__name__}; gather takes ReportRecords and the exceptions of uploads"
    )


def _retain(rows: list[ReportRecord], retention: RetentionPolicy) -> list[ReportRecord]:
    """Rows that stay; the others' checkpoints are deleted. Callers may leave `seq` out, so their place is their id."""
    candidates = [
        Candidate(id=CommitId(place, 0), metrics=row.metrics, created=row.created) for place, row in enumerate(rows)
    ]
    gone = {commit.seq for commit in evicted(candidates, retention, set())}
    for place in gone:
        if (checkpoint := rows[place].checkpoint) is not None:
            _delete_standalone(checkpoint)
    return [row for place, row in enumerate(rows) if place not in gone]


def _delete_standalone(checkpoint: Checkpoint) -> None:
    """The manifest first, so that a half-deleted checkpoint does not exist; then the files it listed, and no others."""
    manifest = checkpoint.manifest
    root, _, folder = checkpoint.uri.rpartition("/")
    if manifest.location != folder:
        logger.warning("Not deleting %s: a custom function put it there, or it belongs to a run", checkpoint.uri)
        return
    storage = open_storage(root, credentials=checkpoint.credentials, storage_options=checkpoint.storage_options)
    storage.delete([folder + MANIFEST_SUFFIX])
    storage.delete([f"{folder}/{file.path}" for file in manifest.files])
