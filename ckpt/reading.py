"""Reading runs from storage, without owning them: references, results, listings, evaluations."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any

from ckpt.checkpoint import Checkpoint
from ckpt.commits import Lineage, list_commits, newest_of_living, read_commit, read_lineage, read_manifests
from ckpt.credentials import Credentials
from ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointPrunedError,
    CkptError,
    ConfigError,
    FormatError,
    NewerFormatError,
    ObjectNotFoundError,
)
from ckpt.history import History, Refer, reference
from ckpt.layout import RESULT, RUN, CommitId
from ckpt.manifest import Manifest, decode_object, typed
from ckpt.metrics import freeze_metrics
from ckpt.notes import Notes, write_note
from ckpt.records import ReportState
from ckpt.result import Result, Totals
from ckpt.retention import Candidate, ScoreOrder, rank
from ckpt.storage import Storage, join_uri, normalize_uri, open_storage

logger = logging.getLogger("ckpt")

_INFO: Mapping[str, tuple[type, ...]] = {
    "run_id": (str,), "name": (str,), "created": (int, float), "score_attribute": (str, NoneType),
    "score_order": (str,), "retention": (str, NoneType),
}  # fmt: skip
_RESULT: Mapping[str, tuple[type, ...]] = {"totals": (dict,)}
_BEST = re.compile(r"best(:(?P<metric>.+):(?P<order>max|min))?")
_REFERENCE = re.compile(rf"(?P<run>.*)@(?P<which>[^/@]*|{_BEST.pattern})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """One run as its storage shows it at one moment."""

    uri: str
    storage: Storage
    credentials: Credentials
    storage_options: Mapping[str, Any]
    info: Mapping[str, Any]
    """The body of run.json."""
    lineage: Lineage
    commits: list[CommitId]
    """Of all attempts, superseded ones included."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.uri.rsplit("/", 1)[-1]

    @property
    def counting(self) -> list[CommitId]:
        """Commits that no later attempt superseded."""
        return [commit for commit in self.commits if self.lineage.counts(commit)]

    @property
    def score_attribute(self) -> str | None:
        """What the run ranks its checkpoints by."""
        found = self.info.get("score_attribute")
        return None if found is None else str(found)

    @property
    def score_order(self) -> ScoreOrder:
        """Which end of the score is best."""
        return "min" if self.info.get("score_order") == "min" else "max"

    def newest(self) -> Manifest | None:
        """The commit a new run would go on from."""
        return self.settled()[1]

    def settled(self) -> tuple[RunFiles, Manifest | None]:
        """The commit a new run would go on from, and the run as it was when that was the newest.

        Retention may have deleted meanwhile what this listing shows; then the run is looked at again.
        """
        found, lineage, commits = newest_of_living(self.storage, self.lineage, self.commits)
        return replace(self, lineage=lineage, commits=commits), found

    @property
    def refer(self) -> Refer:
        """Makes references with this run's credentials."""
        return partial(reference, self.credentials, self.storage_options)

    @property
    def history(self) -> History:
        """Every report, lazily."""
        return History(objects=self.storage, refer=self.refer, lineage=self.lineage)

    def manifests(self) -> list[Manifest]:
        """The committed checkpoints, in seq order."""
        return list(read_manifests(self.storage, self.counting))

    def checkpoint(self, manifest: Manifest) -> Checkpoint:
        """The reference of a commit, knowing its manifest."""
        uri = manifest.uri(self.uri)
        return self.refer(uri, join_uri(self.uri, manifest.id.key)).with_manifest(manifest, self.storage)

    def best(
        self, manifests: list[Manifest], attribute: str | None = None, order: ScoreOrder | None = None
    ) -> Manifest:
        """The best by a metric, the run's own by default, evaluations included.

        Raises:
            CheckpointNotFoundError: there is no such metric.
        """
        attribute = attribute or self.score_attribute
        if attribute is None:
            raise CheckpointNotFoundError(
                f"{self.uri} has no score attribute: say which metric is meant, as in {self.uri}@best:loss:min"
            )
        notes = Notes(self.storage)
        notes.refresh()
        by_id = {manifest.id: manifest for manifest in manifests}
        candidates = [
            Candidate(id=item.id, metrics=notes.metrics(item.id, item.metrics), created=item.created)
            for item in manifests
        ]
        ranked = rank(candidates, attribute, order or self.score_order)
        if not ranked:
            raise CheckpointNotFoundError(f"no committed checkpoint of {self.uri} has a number as metric {attribute!r}")
        return by_id[ranked[0].id]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of a listing of runs."""

    name: str
    uri: str
    reports: int
    """Rows of history."""
    checkpoints: int
    """Committed and retained."""
    nbytes: int
    """Of those."""
    latest_seq: int | None
    created: float
    """Unix seconds."""
    state: str
    """`running or killed`, or how its last attempt ended."""


def open_run_files(
    uri: str | os.PathLike[str],
    credentials: Credentials | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> RunFiles:
    """Look at a run: `<storage_path>/<name>`.

    Raises:
        CheckpointNotFoundError: no run is there.
    """
    root = normalize_uri(os.fspath(uri))
    storage = open_storage(root, credentials=credentials or "env", storage_options=storage_options)
    try:
        info = _info(storage.read(RUN), join_uri(root, RUN))
    except ObjectNotFoundError as error:
        raise CheckpointNotFoundError(
            f"no run is at {root} (there is no {RUN}); a run is <storage_path>/<name>"
        ) from error
    commits = list_commits(storage)
    return RunFiles(
        uri=root, storage=storage, credentials=credentials or "env", storage_options=dict(storage_options or {}),
        info=info, lineage=read_lineage(storage), commits=commits,
    )  # fmt: skip


def read_result(
    uri: str | os.PathLike[str],
    credentials: Credentials | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Result:
    """`Result.from_path`."""
    files = open_run_files(uri, credentials, storage_options=storage_options)
    files, latest = files.settled()
    ended, history, notes = _result_object(files), files.history, Notes(files.storage)
    notes.refresh()
    manifests = files.manifests()
    retained = [(files.checkpoint(item), notes.metrics(item.id, item.metrics)) for item in manifests]
    totals = Totals.from_json(ended["totals"]) if "totals" in ended else Totals.of(history)
    totals = replace(totals, retained_bytes=sum(item.nbytes for item in manifests))
    error = ended.get("error")
    return Result(
        run=files.name, path=files.uri, checkpoint=None if latest is None else files.checkpoint(latest),
        metrics=_latest_metrics(latest, notes, history), best_checkpoints=retained, history=history, totals=totals,
        error=None if error is None else CkptError(error), score_attribute=files.score_attribute,
        score_order=files.score_order,
    )  # fmt: skip


def resolve(
    ref: str, credentials: Credentials | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """The checkpoint that a reference names: `<storage>/<run>@latest`, `@12`, `@best`, `@best:loss:min`.

    Without `@` it is the latest of the run. The same grammar is used by Python, the command line, YAML and events.

    Raises:
        ConfigError: the reference does not parse.
        CheckpointNotFoundError: nothing committed answers to it.
        CheckpointPrunedError: what it names was deleted after its commit.
    """
    files, manifest = _found(ref, credentials, storage_options)
    return files.checkpoint(manifest)


def split_reference(ref: str) -> tuple[str, str]:
    """(run, what is meant) of a reference; an `@` inside a folder name is no separator, a `/` inside a metric is none."""
    match = _REFERENCE.fullmatch(ref)
    return (match["run"], match["which"]) if match else (ref, "latest")


def pick(files: RunFiles, which: str, ref: str) -> Manifest:
    """The commit that the part of a reference behind `@` names; `ref` is for messages; raises as `resolve` does."""
    best = _BEST.fullmatch(which)
    if which == "latest":
        files, found = files.settled()
    elif which.isdecimal():
        found = _by_seq(files, int(which))
        if found is None and _was_committed(files, int(which)):
            raise CheckpointPrunedError(f"{ref}: pruned; it was committed, and is deleted since ({_available(files)})")
    elif best is not None:
        return files.best(files.manifests(), best["metric"], best["order"])  # type: ignore[arg-type]  # the pattern's
    else:
        raise ConfigError(
            f"reference {ref!r}: {which!r} after '@' must be 'latest', a seq like '12', 'best', or 'best:<metric>:<max|min>'"
        )
    if found is None:
        raise CheckpointNotFoundError(f"{ref}: no such committed checkpoint ({_available(files)})")
    return found


def committed(
    run: str,
    after: int = -1,
    credentials: Credentials | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Checkpoint]:
    """The committed checkpoints of a run with a seq above `after`, in order; lets an evaluator work without events."""
    files = open_run_files(run, credentials, storage_options=storage_options)
    wanted = [commit for commit in files.counting if commit.seq > after]
    return [files.checkpoint(manifest) for manifest in read_manifests(files.storage, wanted)]


def list_runs(
    storage_path: str, credentials: Credentials | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> list[RunSummary]:
    """The runs under a storage path, by name; damaged ones are passed over with a warning.

    Costs a few requests per run, and one listing of the whole path.
    """
    root = normalize_uri(storage_path)
    storage = open_storage(root, credentials=credentials or "env", storage_options=storage_options)
    names = sorted(entry.key.split("/")[0] for entry in storage.list() if entry.key.split("/")[1:] == [RUN])
    found = []
    for name in names:
        try:
            found.append(_summary(open_run_files(join_uri(root, name), credentials, storage_options=storage_options)))
        except NewerFormatError:
            raise
        except FormatError as error:
            logger.warning("Passing over run %s of %s: %s", name, root, error)
    return found


def record_evaluation(
    ref: str,
    metrics: Mapping[str, Any],
    source: str = "",
    *,
    credentials: Credentials | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Add metrics to a committed checkpoint from outside its run; every reader, retention and best-k see them.

    Append-only: nothing of the commit changes; of two evaluations of the same metric the later counts.

    Raises:
        CheckpointNotFoundError: nothing committed answers to `ref`.
        MetricsError: a value cannot be recorded.
    """
    frozen = freeze_metrics(metrics)
    files, manifest = _found(ref, credentials, storage_options)
    write_note(files.storage, manifest.id, metrics=frozen, source=source)


def pin(
    ref: str,
    pinned: bool = True,  # noqa: FBT001, FBT002 - reads as it is meant: pin(ref), pin(ref, False)
    *,
    credentials: Credentials | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Protect a committed checkpoint from retention, or lift that; raises as `record_evaluation` does."""
    files, manifest = _found(ref, credentials, storage_options)
    write_note(files.storage, manifest.id, pin=pinned, source="pin")


def _found(
    ref: str, credentials: Credentials | None, storage_options: Mapping[str, Any] | None
) -> tuple[RunFiles, Manifest]:
    uri, which = split_reference(ref)
    files = open_run_files(uri, credentials, storage_options=storage_options)
    return files, pick(files, which, ref)


def _by_seq(files: RunFiles, seq: int) -> Manifest | None:
    for commit in reversed(files.counting):
        if commit.seq == seq and isinstance(found := read_commit(files.storage, commit), Manifest):
            return found
    return None


def _was_committed(files: RunFiles, seq: int) -> bool:
    """By the history, whose row is there before a checkpoint is deleted."""
    row = files.history.of(seq)
    return row is not None and row.state is ReportState.COMMITTED and row.checkpoint is not None


def _available(files: RunFiles) -> str:
    seqs = [commit.seq for commit in files.counting]
    return f"commits there: {', '.join(map(str, seqs[-10:]))}" if seqs else "the run has committed nothing"


def _info(data: bytes, where: str) -> dict[str, Any]:
    body = decode_object(data, where)
    try:
        typed(body, _INFO, _INFO)
    except TypeError as error:
        raise FormatError(f"{where} is not the record of a run: {error}") from error
    return body


def _result_object(files: RunFiles) -> dict[str, Any]:
    """The body of result.json, if the newest driver wrote it and it can be read; it is only ever a shortcut."""
    try:
        body = decode_object(files.storage.read(RESULT), join_uri(files.uri, RESULT))
        Totals.from_json(typed(body, ("totals",), _RESULT).get("totals", {}))
    except (ObjectNotFoundError, FormatError, TypeError):
        return {}
    return body if body.get("attempt") == files.lineage.last_driver else {}


def _latest_metrics(latest: Manifest | None, notes: Notes, history: History) -> dict[str, Any]:
    if latest is not None:
        return notes.metrics(latest.id, latest.metrics)
    return dict(history[-1].metrics) if len(history) else {}


def _summary(files: RunFiles) -> RunSummary:
    manifests, ended, history = files.manifests(), _result_object(files), files.history
    state = str(ended.get("state", "")) if files.lineage.last_driver in files.lineage.ended else "running or killed"
    return RunSummary(
        name=files.name, uri=files.uri, reports=len(history), checkpoints=len(manifests),
        nbytes=sum(manifest.nbytes for manifest in manifests),
        latest_seq=manifests[-1].seq if manifests else None, created=float(files.info.get("created", 0.0)),
        state=state or ReportState.FAILED.value,
    )  # fmt: skip
