"""Publishing: history, retention and the final result, always in seq order, by the ordering task alone."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckpt._json import encode
from ckpt.attempts import Attempt
from ckpt.checkpoint import Checkpoint
from ckpt.commits import Lineage, Start, read_lineage
from ckpt.config import FailurePolicy
from ckpt.context import ReportedCheckpointStatus
from ckpt.errors import CheckpointsLostError, ConfigError, FencedError, FormatError, StorageError
from ckpt.history import History, Refer, commit_of, write_segment
from ckpt.layout import CHECKPOINTS, FORMAT, RESULT, CommitId
from ckpt.manifest import Manifest
from ckpt.notes import Notes
from ckpt.records import ReportRecord, ReportState
from ckpt.result import Result, Totals
from ckpt.retention import Candidate, KeepAll, RetentionPolicy, ScoreOrder, evicted, rank
from ckpt.storage import Storage, join_uri
from ckpt.validating import Verdict, status_of

logger = logging.getLogger("ckpt")

FLUSH_INTERVAL = 1.0
"""Seconds that a published row may wait for its history segment; a failure is flushed at once."""

_PENDING = ReportedCheckpointStatus.PENDING_VALIDATION

Observer = Callable[[ReportRecord], None]
"""Told of each record as it is published; must not block."""


Ask = Callable[[CommitId, Checkpoint, Mapping[str, Any]], None]
"""Has a committed checkpoint validated, as its manifest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How a run ranks and keeps its checkpoints."""

    policy: RetentionPolicy = field(default_factory=KeepAll)
    score_attribute: str | None = None
    score_order: ScoreOrder = "max"


@dataclass(slots=True, kw_only=True)
class _Streak:
    """What the failure policy needs to know about the reports so far."""

    in_a_row: int = 0
    failures: int = 0
    """Reports that failed, without those whose SYNC call raised in the trainer."""
    last_lost: ReportRecord | None = None
    """The newest report with a checkpoint, if that was not committed."""
    best_lost: ReportRecord | None = None
    """A failed report whose score beats every committed one."""


class Publisher:
    """The one place that makes anything public, in seq order.

    Args:
        run: the run's name.
        storage: rooted at the run.
        attempt: the ownership.
        start: where the attempt began.
        retention: what stays.
        refer: makes a reference from a URI and its commit's; pickles with the result.
    """

    def __init__(
        self,
        *,
        run: str,
        storage: Storage,
        attempt: Attempt,
        start: Start,
        retention: Retention,
        refer: Refer,
    ) -> None:
        self.run, self._storage, self._attempt, self._retention = run, storage, attempt, retention
        self._objects, self.refer, self._start = attempt.objects, refer, start
        self._unflushed: list[ReportRecord] = []
        self._flush_due: float | None = None
        self._kept: dict[CommitId, tuple[Candidate, ReportRecord]] = {}
        self._notes = Notes(self._objects)
        self._validation: dict[CommitId, ReportedCheckpointStatus] = {}
        """How far those retained checkpoints are whose validation was asked for."""
        self._validating: set[CommitId] = set()
        """Those whose verdict this attempt waits for."""
        self._pruner = Pruner(storage, attempt)
        self._streak = _Streak()
        self._last: ReportRecord | None = None
        self._totals = Totals()
        self._began = time.monotonic()
        self._fenced = False
        """Whether a report came back FENCED."""
        self._replaced = False
        """Whether a write found a newer attempt."""
        self.observers: list[Observer] = []
        self.ask: Ask | None = None
        """None: this attempt validates nothing, and keeps what waits for it."""
        self.latest: Checkpoint | None = None
        """The newest published checkpoint; the restored one at first."""
        self.published = start.first_seq
        """Seq that is published next."""
        self._advanced = threading.Condition()

    @property
    def failures_in_a_row(self) -> int:
        """Failed reports since the last committed one."""
        return self._streak.in_a_row

    @property
    def totals(self) -> Totals:
        """Of the run so far; `wall` is this attempt's."""
        return replace(self._totals, wall=time.monotonic() - self._began)

    @property
    def best(self) -> CommitId | None:
        """The best retained checkpoint by the score attribute."""
        if self._retention.score_attribute is None:
            return None
        ranked = rank(self._candidates(), self._retention.score_attribute, self._retention.score_order)
        return ranked[0].id if ranked else None

    def retained(self) -> list[ReportRecord]:
        """Records of the checkpoints that stay, in seq order, with every evaluation read so far."""
        with self._advanced:
            kept = list(self._kept.values())
        return [replace(record, metrics=dict(candidate.metrics)) for candidate, record in kept]

    def status(self, record: ReportRecord) -> ReportedCheckpointStatus:
        """How far a retained checkpoint is."""
        return self._validation.get(commit_of(record), ReportedCheckpointStatus.COMMITTED)

    @property
    def validating(self) -> bool:
        """Whether verdicts are to be waited for."""
        return bool(self._validating) and not self.fenced

    @property
    def fenced(self) -> bool:
        """Whether another driver owns the run now."""
        return self._replaced or self._fenced

    def reference(self, manifest: Manifest) -> Checkpoint:
        """The reference of a commit of this run."""
        uri = manifest.uri(self._storage.uri)
        return self.refer(uri, join_uri(self._storage.uri, manifest.id.key)).with_manifest(manifest, self._storage)

    def adopt(
        self, retained: Sequence[ReportRecord], unpublished: Sequence[ReportRecord], earlier: Iterable[ReportRecord]
    ) -> None:
        """Take over from earlier attempts.

        Args:
            retained: checkpoints that stay, in seq order.
            unpublished: rows that nobody had published.
            earlier: every row of the run so far, those included, in seq order: gaps of earlier attempts carry on.
        """
        self._adopt_kept(retained)
        for record in earlier:
            self._totals = self._totals.plus(record)
            self._judge(record)
            self._last = record
        self._streak.in_a_row = 0  # whoever starts a run again has seen why it stopped
        for rows in _consecutive(unpublished):
            write_segment(self._objects, self._attempt.number, rows)
        for record in unpublished:
            self._observe(record)

    def _adopt_kept(self, retained: Sequence[ReportRecord]) -> None:
        """What stays; validations that were asked for and not done are done now, if this attempt can."""
        asked = [None if record.checkpoint is None else record.checkpoint.manifest.validation for record in retained]
        if any(asked):
            self._notes.refresh()
        for record, validation in zip(retained, asked, strict=True):
            self._keep(record, validation)
        if self.ask is None and (waiting := self._waiting()):
            logger.warning(
                "this attempt has no validation_fn; what waits for its validation is kept until then: checkpoints %s",
                waiting,
            )

    def _waiting(self) -> str:
        """Seqs of the checkpoints without a verdict; for people."""
        return ", ".join(str(commit.seq) for commit in self._validation if self._notes.verdict(commit) is None)

    def publish(self, record: ReportRecord, *, handled: bool = False, asked: Mapping[str, Any] | None = None) -> None:
        """Make the next report public: history, retention, observers.

        Args:
            record: final, and of the next seq.
            handled: its failure was raised in the trainer's own call, which went on.
            asked: how it is to be validated, if it was committed.
        """
        record = replace(record, handled=handled and record.state is ReportState.FAILED)
        self._totals = self._totals.plus(record)
        self._judge(record)
        self._last = record
        self._fenced = self._fenced or record.state is ReportState.FENCED
        self._unflushed.append(record)
        if self._flush_due is None:
            self._flush_due = time.monotonic() + FLUSH_INTERVAL
        if record.checkpoint is not None:
            self._keep(record, asked)
            self.latest = record.checkpoint
        if record.state not in (ReportState.COMMITTED, ReportState.SKIPPED):
            logger.warning("report %d %s is %s: %s", record.seq, record.name, record.state.value, record.reason)
            self._flush_due = 0.0
        self.flush_if_due()
        if record.checkpoint is not None:
            self._prune()
        self._observe(record)
        with self._advanced:
            self.published = record.seq + 1
            self._advanced.notify_all()

    def wait_published(self, seq: int, timeout: float | None) -> bool:
        """Wait until every report below `seq` is public; False if `timeout` seconds were not enough."""
        with self._advanced:
            return self._advanced.wait_for(lambda: self.published >= seq, timeout)

    def next_flush(self) -> float | None:
        """Seconds until a flush is due; None if nothing waits."""
        return None if self._flush_due is None else max(0.0, self._flush_due - time.monotonic())

    def flush_if_due(self) -> None:
        """Write the rows that waited long enough; if the store is away they stay, and are tried again."""
        if self._flush_due is not None and time.monotonic() >= self._flush_due:
            self._flush()

    def finish(self, error: BaseException | None) -> Result:
        """Write what is left, wait for deletions that are under way, and make the result."""
        if self._unflushed:
            self._flush()
        self._prune()  # what a crashed attempt had not pruned yet, if this one committed nothing
        self._pruner.close()
        result = self._result(error)
        self._write_result(result)
        if waiting := self._waiting():
            logger.warning("validation is left for the next attempt: checkpoints %s", waiting)
        return result

    def hurry(self) -> None:
        """Do not wait for deletions at the end: the process has to go."""
        self._pruner.hurry()

    def verdict(self, policy: FailurePolicy) -> str | None:
        """Why the failure policy calls the run red; None if it does not."""
        streak = self._streak
        if streak.failures == 0 and streak.last_lost is None:
            return None
        nothing = self.latest is None or not self._kept
        if nothing and (streak.failures or streak.in_a_row):
            return "no checkpoint was committed"
        if policy.red_on == "any" and streak.failures:
            return f"{streak.failures} of {self._totals.reports} reports failed (red_on='any')"
        if policy.red_on == "lost":
            for lost, what in ((streak.last_lost, "last"), (streak.best_lost, "best")):
                if lost is not None:
                    return f"the {what} checkpoint, report {lost.seq} {lost.name}, was lost: {lost.reason}"
        return None

    def _judge(self, record: ReportRecord) -> None:
        streak = self._streak
        if record.checkpoint is not None:
            streak.in_a_row, streak.last_lost = 0, None
            if streak.best_lost is not None and not self._beats_all(streak.best_lost, also=record):
                streak.best_lost = None
        elif record.state is ReportState.FAILED:
            streak.in_a_row += 1
        if record.state in (ReportState.FAILED, ReportState.SKIPPED, ReportState.FENCED) and not record.handled:
            streak.failures += record.state is not ReportState.SKIPPED
            streak.last_lost = record
            if self._beats_all(record):
                streak.best_lost = record

    def _beats_all(self, lost: ReportRecord, also: ReportRecord | None = None) -> bool:
        """Whether a lost report's score is better than that of every retained checkpoint (the best always is one)."""
        attribute = self._retention.score_attribute
        if attribute is None:
            return False
        others = [record for _, record in self._kept.values()] + ([also] if also else [])
        as_candidates = [
            Candidate(id=commit_of(record), metrics=record.metrics, created=0.0) for record in (*others, lost)
        ]
        ranked = rank(as_candidates, attribute, self._retention.score_order)
        return bool(ranked) and ranked[0].id == commit_of(lost)

    def _keep(self, record: ReportRecord, asked: Mapping[str, Any] | None = None) -> None:
        """Remember a checkpoint without its manifest: what is remembered must not grow with the number of files."""
        commit = commit_of(record)
        candidate = Candidate(id=commit, metrics=record.metrics, created=record.created)
        checkpoint = record.checkpoint and self.refer(record.checkpoint.uri, join_uri(self._storage.uri, commit.key))
        with self._advanced:
            self._kept[commit] = (candidate, replace(record, checkpoint=checkpoint))
        if asked is not None:
            self._keep_for_validation(record, asked)

    def _keep_for_validation(self, record: ReportRecord, asked: Mapping[str, Any]) -> None:
        commit = commit_of(record)
        with self._advanced:
            status = self._validation[commit] = status_of(self._notes.verdict(commit))
            ask = self.ask if status is _PENDING else None
            if ask is None or record.checkpoint is None:
                return
            self._validating.add(commit)
        try:
            ask(commit, record.checkpoint, asked)
        except ConfigError as error:  # a manifest that somebody else wrote
            logger.warning("Passing over the validation of checkpoint %d: %s", commit.seq, error)
            self._validating.discard(commit)

    def validated(self, verdict: Verdict) -> None:
        """Take a verdict in: its metrics rank from now on, and retention need not wait for it any longer."""
        commit = verdict.commit
        if verdict.reason is not None:
            logger.warning("validation of checkpoint %d: %s: %s", commit.seq, verdict.status.value, verdict.reason)
        else:
            logger.info("validated %d in %.2f s: %s", commit.seq, verdict.seconds, verdict.metrics)
        with self._advanced:
            self._validation[commit] = verdict.status
            candidate, record = self._kept[commit]
            self._kept[commit] = (replace(candidate, metrics={**candidate.metrics, **verdict.metrics}), record)
            self._validating.discard(commit)
            self._advanced.notify_all()
        self._prune()

    def wait_validated(self, timeout: float | None) -> bool:
        """Wait until no verdict is waited for; False if `timeout` seconds were not enough."""
        with self._advanced:
            return self._advanced.wait_for(lambda: not self.validating, timeout)

    def leave_validations(self) -> None:
        """Wait for no verdict any longer: the next attempt does what is not done."""
        with self._advanced:
            self.ask = None
            self._validating.clear()
            self._advanced.notify_all()

    def _candidates(self) -> list[Candidate]:
        return [candidate for candidate, _ in self._kept.values()]

    def _prune(self) -> None:
        """Hand what the policy lets go to the pruner; rows first, so that a pruned report never looks lost."""
        if isinstance(self._retention.policy, KeepAll) or not self._evicted():
            return
        try:
            self._refresh_notes()
            self._flush()
        except (StorageError, FormatError) as error:
            logger.warning("Retention waits: %s", error)
            return
        if self._unflushed:
            return
        gone = self._evicted()
        for commit in gone:
            with self._advanced:
                _, record = self._kept.pop(commit)
                self._validation.pop(commit, None)
            self._pruner.prune(commit, record)

    def _evicted(self) -> list[CommitId]:
        protected = {commit for commit in (self.best, self._origin()) if commit is not None}
        protected |= {commit for commit, status in self._validation.items() if status is _PENDING}
        try:
            return evicted(self._candidates(), self._retention.policy, protected)
        except Exception:
            logger.exception("The retention policy %s failed; nothing is deleted", self._retention.policy)
            return []

    def _origin(self) -> CommitId | None:
        """What this attempt resumed from, as long as it has committed nothing itself: a crash now would need it."""
        own = any(commit.attempt == self._attempt.number for commit in self._kept)
        return None if own else self._start.resumed_from

    def _refresh_notes(self) -> None:
        self._notes.refresh()
        for commit, (candidate, record) in list(self._kept.items()):
            metrics, pinned = self._notes.metrics(commit, record.metrics), self._notes.pinned(commit)
            self._kept[commit] = (replace(candidate, metrics=metrics, pinned=pinned), record)

    def _flush(self) -> None:
        """Write the waiting rows, unless a newer attempt was claimed: it has seen what was there, and publishes the rest."""
        if self._replaced:
            self._flush_due = None
            return
        try:
            self._attempt.check_fence()
            for rows in _consecutive(self._unflushed):
                write_segment(self._objects, self._attempt.number, rows)
                del self._unflushed[: len(rows)]
            self._flush_due = None
        except FencedError as error:
            logger.warning("%s", error)
            self._replaced, self._flush_due = True, None
        except StorageError as error:
            logger.warning("The history could not be written and is tried again: %s", error)
            self._flush_due = time.monotonic() + FLUSH_INTERVAL

    def _result(self, error: BaseException | None) -> Result:
        try:
            self._refresh_notes()
            lineage = read_lineage(self._objects)
        except (StorageError, FormatError) as failure:
            logger.warning("The result is made without a last look at the store: %s", failure)
            lineage = None
        retained = self.retained()
        latest = next((record for record in retained if record.checkpoint == self.latest), None)
        last = latest or self._last
        totals = replace(self.totals, retained_bytes=sum(record.nbytes for record in retained))
        return Result(
            run=self.run, path=self._storage.uri, checkpoint=latest.checkpoint if latest else None,
            metrics=dict(last.metrics) if last else {},
            best_checkpoints=[(record.checkpoint, record.metrics) for record in retained if record.checkpoint],
            history=self._unflushed if lineage is None else self._history(lineage), totals=totals, error=error,
            score_attribute=self._retention.score_attribute, score_order=self._retention.score_order,
        )  # fmt: skip

    def _history(self, lineage: Lineage) -> History:
        return History(objects=self._objects, refer=self.refer, lineage=lineage, tail=tuple(self._unflushed))

    def _write_result(self, result: Result) -> None:
        state = "completed" if result.error is None else "failed"
        body = {
            "format": FORMAT, "run": self.run, "attempt": self._attempt.number, "state": state,
            "error": None if result.error is None else f"{type(result.error).__name__}: {result.error}",
            "latest": None if result.checkpoint is None else result.checkpoint.uri,
            "best": None if result.best is None else result.best.uri,
            "totals": asdict(result.totals), "ended": time.time(),
        }  # fmt: skip
        try:
            self._attempt.check_fence()
            self._objects.write(RESULT, encode(body))
        except (FencedError, StorageError) as error:
            self._replaced = self._replaced or isinstance(error, FencedError)
            logger.warning("%s was not written: %s", RESULT, error)

    def _observe(self, record: ReportRecord) -> None:
        for observer in self.observers:
            try:
                observer(record)
            except Exception:
                logger.exception("An observer of published reports failed; the run goes on")


class Pruner:
    """Deletes evicted checkpoints on a thread of its own: slow or failing deletions never delay a report.

    The commit object goes first, so that a half-deleted checkpoint does not exist; then the files. External files stay.
    """

    CLOSE_TIMEOUT = 60.0
    """Seconds that the end of a run waits for deletions under way; what is left is found by the next garbage collection."""

    def __init__(self, storage: Storage, attempt: Attempt) -> None:
        self._storage, self._attempt = storage, attempt
        self._todo: deque[tuple[CommitId, ReportRecord]] = deque()
        self._running = False
        self._hurried = False
        self._changed = threading.Condition()

    def prune(self, commit: CommitId, record: ReportRecord) -> None:
        """Delete a checkpoint soon; the thread lasts as long as there is something to delete."""
        with self._changed:
            self._todo.append((commit, record))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="ckpt-prune", daemon=True).start()

    def hurry(self) -> None:
        """End a `close()` that waits, and let later ones not wait."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for what is under way."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._hurried or not self._running, self.CLOSE_TIMEOUT)
            if self._running:
                waited = time.monotonic() - began
                logger.warning("Deletions of old checkpoints are still under way after %.0f s; left", waited)

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._delete(*item)
        except BaseException:
            with self._changed:
                self._running = False
                self._changed.notify_all()
            raise

    def _next(self) -> tuple[CommitId, ReportRecord] | None:
        with self._changed:
            if self._todo:
                return self._todo.popleft()
            self._running = False  # decided under the lock: whoever prunes next starts another thread
            self._changed.notify_all()
            return None

    def _delete(self, commit: CommitId, record: ReportRecord) -> None:
        try:
            self._attempt.check_fence()
            delete_checkpoint(self._storage, commit, record)
        except FencedError:
            with self._changed:
                self._todo.clear()
        except Exception as error:  # noqa: BLE001 - one failed deletion never stops a run
            logger.warning("Could not delete checkpoint %d: %s; left for garbage collection", commit.seq, error)


def delete_checkpoint(storage: Storage, commit: CommitId, record: ReportRecord) -> None:
    """Delete a commit, then its files if they lie in the run's own `checkpoints/` folder."""
    storage.delete([commit.key])
    uri = "" if record.checkpoint is None else record.checkpoint.uri
    location = uri.removeprefix(f"{storage.uri}/")
    if location != uri and location.startswith(CHECKPOINTS):
        storage.delete([entry.key for entry in storage.list(f"{location}/")])


def raise_if_red(publisher: Publisher, policy: FailurePolicy, result: Result) -> None:
    """Raise `CheckpointsLostError` where the policy says so."""
    if reason := publisher.verdict(policy):
        raise CheckpointsLostError(f"run {publisher.run}: {reason} (result: {result.path})", result)


def _consecutive(records: Sequence[ReportRecord]) -> list[list[ReportRecord]]:
    """Split into stretches of consecutive seqs: one segment each."""
    stretches: list[list[ReportRecord]] = []
    for record in records:
        if stretches and stretches[-1][-1].seq + 1 == record.seq:
            stretches[-1].append(record)
        else:
            stretches.append([record])
    return stretches
