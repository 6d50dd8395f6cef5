"""The events of a run: hints for automations and other listeners, with the schema of docs/events.md.

The store is the truth, `ckpt.committed(run, after=seq)` reads it. What the API does not take is dropped and counted;
after a crash the next attempt says again what it adopts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from ckpt import ReportRecord, ReportState, Result
from ckpt.metrics import score_of
from ckpt.retention import ScoreOrder
from ckpt_tasks.artifacts import shown

STARTED = "ckpt.run.started"
COMMITTED = "ckpt.report.committed"
FAILED = "ckpt.report.failed"
BEST_CHANGED = "ckpt.best.changed"
COMPLETED = "ckpt.run.completed"

RESOURCE = "prefect-ckpt.run"
"""Resource ids are `prefect-ckpt.run.<run id>`."""
BATCH = 100
"""Events in one request."""
_HELD = 1000
"""Events that wait at most while the API is away; then the oldest go."""
_GONE = (ReportState.FAILED, ReportState.FENCED, ReportState.LOST)
"""What is told as failed. A skipped report is not: somebody asked for that with `when_full="drop"`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Which run speaks."""

    run_id: str
    name: str
    uri: str
    """`<storage_path>/<name>`."""
    score_attribute: str | None = None
    score_order: ScoreOrder = "max"
    best: float | None = None
    """Score of the best checkpoint so far."""
    flow_run: tuple[UUID, str] | None = None
    """Id and name of the flow run that it runs in."""


class RunEvents:
    """What a run has to say, in the order it happened, until somebody has sent it; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._best: float | None = None
        self._early: deque[tuple[ReportRecord, datetime]] = deque(maxlen=_HELD)
        self._waiting: deque[dict[str, Any]] = deque()
        self._last = datetime.now(UTC)
        self.dropped = 0
        """Events that nobody will hear of."""

    def __len__(self) -> int:
        return len(self._waiting)

    def opened(self, source: Source) -> None:
        """The run began; what it has adopted by then is told first."""
        with self._lock:
            self._source, self._best = source, source.best
            self._add(STARTED, self._now(), {"ref": "", "uri": "", "seq": "", "score": ""})
            while self._early:
                self._record(*self._early.popleft())

    def published(self, record: ReportRecord) -> None:
        """The next report became public; O(1), no I/O."""
        with self._lock:
            if self._source is None:
                self._early.append((record, self._now()))
            else:
                self._record(record, self._now())

    def completed(self, result: Result) -> None:
        """The run ended by itself."""
        with self._lock:
            latest = result.checkpoint
            payload = {
                "ref": "" if latest is None else f"{result.path}@latest",
                "uri": "" if latest is None else latest.uri,
                "seq": str(result.totals.reports - 1) if result.totals.reports else "",
                "score": self._score(result.metrics),
                "state": "completed" if result.error is None else "failed",
            }
            self._add(COMPLETED, self._now(), payload)

    def batch(self) -> list[dict[str, Any]]:
        """The oldest that wait, as the API takes them; they stay until `sent`."""
        with self._lock:
            return [self._waiting[index] for index in range(min(BATCH, len(self._waiting)))]

    def sent(self, batch: list[dict[str, Any]]) -> None:
        """The API took these."""
        with self._lock:
            ids = {event["id"] for event in batch}
            while self._waiting and self._waiting[0]["id"] in ids:
                self._waiting.popleft()

    def _record(self, record: ReportRecord, occurred: datetime) -> None:
        assert self._source is not None
        about = {
            "ref": f"{self._source.uri}@{record.seq}",
            "uri": "" if record.checkpoint is None else record.checkpoint.uri,
            "seq": str(record.seq),
            "score": self._score(record.metrics),
        }
        if record.state is ReportState.COMMITTED and record.checkpoint is not None:
            self._add(COMMITTED, occurred, about)
            if self._is_best(record.metrics):
                self._add(BEST_CHANGED, self._now(), about)
        elif record.state in _GONE:
            reason = shown(record.reason or "")
            self._add(FAILED, occurred, {**about, "ref": "", "state": record.state.value, "reason": reason})

    def _is_best(self, metrics: Mapping[str, Any]) -> bool:
        """Whether this beats what was best, or equals it; remembered."""
        score = self._score_of(metrics)
        assert self._source is not None
        sign = 1.0 if self._source.score_order == "max" else -1.0
        if score is None or (self._best is not None and sign * score < sign * self._best):
            return False
        self._best = score
        return True

    def _score_of(self, metrics: Mapping[str, Any]) -> float | None:
        attribute = None if self._source is None else self._source.score_attribute
        return None if attribute is None else score_of(metrics, attribute)

    def _score(self, metrics: Mapping[str, Any]) -> str:
        score = self._score_of(metrics)
        return "" if score is None else repr(float(score))

    def _add(self, event: str, occurred: datetime, payload: Mapping[str, str]) -> None:
        source = self._source
        assert source is not None
        related = []
        if source.flow_run is not None:
            flow_run, name = source.flow_run
            related.append(
                {
                    "prefect.resource.id": f"prefect.flow-run.{flow_run}",
                    "prefect.resource.role": "flow-run",
                    "prefect.resource.name": name,
                }
            )
        self._waiting.append(
            {
                "id": str(uuid4()),
                "event": event,
                "occurred": occurred.isoformat(),
                "resource": {
                    "prefect.resource.id": f"{RESOURCE}.{source.run_id}",
                    "prefect.resource.name": source.name,
                },
                "related": related,
                "payload": {**payload, "run": source.uri},
            }
        )
        if len(self._waiting) > _HELD:
            self._waiting.popleft()
            self.dropped += 1

    def _now(self) -> datetime:
        """Strictly later than the last, so that events sort as they happened."""
        self._last = max(datetime.now(UTC), self._last + timedelta(microseconds=1))
        return self._last
