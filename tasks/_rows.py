"""What the `ckpt` command shows, read from storage: records for people's tables and for `--json` alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from itertools import islice
from typing import Any

from ckpt import Checkpoint, ReportRecord, Totals
from ckpt.attempts import owner_details
from ckpt.commits import read_commit
from ckpt.errors import CheckpointNotFoundError, FormatError, ObjectNotFoundError
from ckpt.layout import MANIFEST_SUFFIX, RESULT, CommitId, end_key
from ckpt.manifest import Manifest, decode_object
from ckpt.metrics import Metrics
from ckpt.notes import Notes
from ckpt.reading import RunFiles, open_run_files, pick, split_reference
from ckpt.storage import Storage, join_uri

Access = Mapping[str, Any]
"""`credentials` and `storage_options`, as the functions of `ckpt.reading` take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One committed checkpoint of a run."""

    seq: int
    attempt: int
    name: str
    uri: str
    metrics: Metrics
    """Evaluations included."""
    nbytes: int
    nfiles: int
    created: float
    """Unix seconds of the report() call."""
    latest: bool
    best: bool
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One driver of a run."""

    attempt: int
    status: str
    """`ended`, `pruned`, ...; `running or killed` for the newest without an end, `replaced` for an older one."""
    claimed: float | None = None
    """Unix seconds."""
    user: str = ""
    host: str = ""
    pid: int | None = None
    flow_run_id: str | None = None
    first_seq: int | None = None
    resumed_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything `ckpt show` says about a run."""

    run: str
    uri: str
    state: str
    """`running or killed`, `completed`, `failed`, or `ended` where no result was written."""
    error: str | None
    created: float
    """Unix seconds."""
    score_attribute: str | None
    score_order: str
    retention: str | None
    checkpoints: list[CheckpointRow]
    superseded: int
    """Commits and tombstones of an attempt that did not know it had been replaced; they do not count."""
    attempts: list[AttemptRow]
    nreports: int
    """In all; `reports` has the newest of them."""
    reports: list[ReportRecord]
    totals: Totals | None
    """`all reports`, or the attempt that they are sums over."""

    def marked(self, mark: str) -> CheckpointRow | None:
        """The `latest` or `best` checkpoint."""
        return next((row for row in self.checkpoints if getattr(row, mark)), None)

    def to_json(self) -> dict[str, Any]:
        """For machines; the reports are rows of the history."""
        body = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "reports"}
        return {**body, "reports": [record.to_json() for record in self.reports]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A committed checkpoint, and the run it is of if it was found through one."""

    ref: str
    checkpoint: Checkpoint
    files: RunFiles | None = None

    @property
    def commit_uri(self) -> str:
        """Where the manifest is."""
        body = self.checkpoint.to_json()
        known = body.get("commit_uri") if isinstance(body, dict) else None
        return str(known or self.checkpoint.uri + MANIFEST_SUFFIX)

    def to_json(self) -> dict[str, Any]:
        """The manifest, with evaluations among the metrics, and where everything is."""
        manifest = self.checkpoint.manifest
        body = {**asdict(manifest), "nbytes": manifest.nbytes, "metrics": self.metrics()}
        return {"ref": self.ref, "uri": self.checkpoint.uri, "commit_uri": self.commit_uri, **body}

    def metrics(self) -> Metrics:
        """Those of the report, and later evaluations."""
        manifest = self.checkpoint.manifest
        if self.files is None:
            return manifest.metrics
        return _notes(self.files.storage).metrics(manifest.id, manifest.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Something to verify: a checkpoint, or a commit object that cannot even be read."""

    ref: str
    checkpoint: Checkpoint | None = None
    problem: str = ""


def find(ref: str, access: Access) -> Found:
    """The checkpoint that a reference, or the URI of a checkpoint directory, names.

    Raises:
        CheckpointNotFoundError: nothing committed answers to it.
    """
    run, which = split_reference(ref)
    try:
        files = open_run_files(run, **access)
    except CheckpointNotFoundError:
        directory = Checkpoint(ref, **access)
        if not _is_committed(directory):
            raise
        return Found(ref=ref, checkpoint=directory)
    return Found(ref=ref, checkpoint=files.checkpoint(pick(files, which, ref)), files=files)


def is_run(target: str, access: Access) -> RunFiles | None:
    """The run at `target`; None if that is a reference, or not a run."""
    if split_reference(target)[0] != target:
        return None
    try:
        return open_run_files(target, **access)
    except CheckpointNotFoundError:
        return None


def subjects(target: str, access: Access) -> Iterator[Subject]:
    """What verifying a run or a reference has to look at; raises as `find` does."""
    files = is_run(target, access)
    if files is None:
        yield Subject(ref=target, checkpoint=find(target, access).checkpoint)
        return
    for commit in files.counting:
        ref = f"{files.uri}@{commit.seq}"
        try:
            manifest = read_commit(files.storage, commit)
        except FormatError as error:
            yield Subject(ref=ref, problem=f"its commit object cannot be read: {error}")
        else:
            if isinstance(manifest, Manifest):
                yield Subject(ref=ref, checkpoint=files.checkpoint(manifest))


def checkpoint_rows(files: RunFiles) -> list[CheckpointRow]:
    """The committed checkpoints of a run, in seq order."""
    files, latest = files.settled()
    manifests, notes = files.manifests(), _notes(files.storage)
    best = _best(files, manifests)

    def row(item: Manifest) -> CheckpointRow:
        return CheckpointRow(
            seq=item.seq, attempt=item.attempt, name=item.name, uri=files.checkpoint(item).uri,
            metrics=notes.metrics(item.id, item.metrics), nbytes=item.nbytes, nfiles=len(item.files),
            created=item.created, latest=latest is not None and item.id == latest.id, best=item.id == best,
            pinned=notes.pinned(item.id),
        )  # fmt: skip

    return [row(item) for item in manifests]


def run_view(files: RunFiles, newest_reports: int | None) -> RunView:
    """A run with its newest reports; None: all of them, which reads every segment of the history."""
    history, ended = files.history, _ended(files)
    reports = list(islice(reversed(history), newest_reports))[::-1]
    attempts = [_attempt(files, number) for number in files.lineage.claimed]
    complete = len(reports) == len(history)
    return RunView(
        run=files.name, uri=files.uri, state=_state(files, ended), error=ended.get("error"),
        created=float(files.info.get("created", 0.0)), score_attribute=files.score_attribute,
        score_order=files.score_order, retention=files.info.get("retention"), checkpoints=checkpoint_rows(files),
        superseded=len(files.commits) - len(files.counting), attempts=attempts, nreports=len(history), reports=reports,
        totals=Totals.of(reports) if complete else Totals.from_json(ended["totals"]) if "totals" in ended else None,
    )  # fmt: skip


def plain(value: Any) -> Any:
    """JSON types only: records as objects, and `"NaN"`, `"Infinity"`, `"-Infinity"` for what JSON has no number for."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _notes(storage: Storage) -> Notes:
    notes = Notes(storage)
    notes.refresh()
    return notes


def _best(files: RunFiles, manifests: list[Manifest]) -> CommitId | None:
    try:
        return files.best(manifests).id
    except CheckpointNotFoundError:
        return None


def _is_committed(checkpoint: Checkpoint) -> bool:
    try:
        return bool(checkpoint.manifest)
    except CheckpointNotFoundError:
        return False


def _attempt(files: RunFiles, number: int) -> AttemptRow:
    start = files.lineage.starts.get(number)
    origin = None if start is None else start.resumed_from
    owner = _object(lambda: owner_details(files.storage, number))
    return AttemptRow(
        attempt=number, status=_status(files, number), claimed=owner.get("claimed"), user=str(owner.get("user", "")),
        host=str(owner.get("host", "")), pid=owner.get("pid"), flow_run_id=owner.get("flow_run_id"),
        first_seq=None if start is None else start.first_seq,
        resumed_from=None if start is None or origin is None else f"{start.origin}@{origin.seq}",
    )  # fmt: skip


def _status(files: RunFiles, number: int) -> str:
    if number not in files.lineage.ended:
        return "running or killed" if number == files.lineage.last else "replaced"
    return str(_object(lambda: _read(files, end_key(number))).get("status", "ended"))


def _ended(files: RunFiles) -> dict[str, Any]:
    """The body of result.json if the newest driver wrote it, else nothing."""
    body = _object(lambda: _read(files, RESULT))
    return body if body.get("attempt") == files.lineage.last_driver else {}


def _state(files: RunFiles, ended: Mapping[str, Any]) -> str:
    if files.lineage.last_driver not in files.lineage.ended:
        return "running or killed"
    return str(ended.get("state", "ended"))


def _read(files: RunFiles, key: str) -> dict[str, Any]:
    return decode_object(files.storage.read(key), join_uri(files.uri, key))


def _object(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A small object that only informs: where it is gone or damaged, nothing is said."""
    try:
        return read()
    except (ObjectNotFoundError, FormatError):
        return {}
