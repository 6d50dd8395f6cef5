"""`Result`: what a run left, from the run itself or from its storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ckpt.checkpoint import Checkpoint
from ckpt.credentials import Credentials
from ckpt.errors import CheckpointNotFoundError, ConfigError
from ckpt.layout import CommitId
from ckpt.manifest import typed
from ckpt.metrics import Metrics
from ckpt.records import ReportRecord, ReportState
from ckpt.retention import Candidate, ScoreOrder, rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the reports of a run."""

    reports: int = 0
    checkpoints: int = 0
    """Committed ones."""
    failed: int = 0
    skipped: int = 0
    fenced: int = 0
    lost: int = 0
    nbytes: int = 0
    """Of all committed checkpoints, retained or not."""
    retained_bytes: int = 0
    stall: float = 0.0
    """Seconds the training loop spent inside `report()`."""
    upload: float = 0.0
    """Seconds spent moving bytes, over all uploads."""
    wall: float = 0.0
    """Seconds from the run's start to its end; the newest attempt's."""

    def plus(self, record: ReportRecord) -> Totals:
        """With one more record."""
        counts = {
            ReportState.FAILED: "failed",
            ReportState.SKIPPED: "skipped",
            ReportState.FENCED: "fenced",
            ReportState.LOST: "lost",
        }
        changed = asdict(self)
        changed["reports"] += 1
        changed["stall"] += record.timings.stall
        changed["upload"] += record.timings.upload
        if record.checkpoint is not None:
            changed["checkpoints"] += 1
            changed["nbytes"] += record.nbytes
        if name := counts.get(record.state):
            changed[name] += 1
        return Totals(**changed)

    @classmethod
    def of(cls, records: Iterable[ReportRecord]) -> Totals:
        """Over records."""
        totals = cls()
        for record in records:
            totals = totals.plus(record)
        return totals

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Totals:
        """Read what `dataclasses.asdict` gave.

        Raises:
            TypeError: it is something else.
        """
        return cls(**typed(body, (item.name for item in fields(cls)), _NUMBERS))


_NUMBERS: Mapping[str, tuple[type, ...]] = {
    item.name: (int, float) if item.type == "float" else (int,) for item in fields(Totals)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run left behind. Everything in it can be rebuilt from the run's storage."""

    run: str
    """The run's name."""
    path: str
    """Where the run is: what `Result.from_path` and the `ckpt` commands take."""
    checkpoint: Checkpoint | None
    """The latest committed one."""
    metrics: Metrics
    """Those of the latest checkpoint; of the last report if there is none."""
    best_checkpoints: list[tuple[Checkpoint, Metrics]]
    """The retained ones with their metrics, evaluations included, in seq order."""
    history: Sequence[ReportRecord]
    """One record per report, retained or not, in order; read from storage when looked at."""
    totals: Totals = field(default_factory=Totals)
    error: BaseException | None = None
    """What ended the run, if anything did."""
    score_attribute: str | None = None
    score_order: ScoreOrder = "max"

    @property
    def best(self) -> Checkpoint | None:
        """The best retained checkpoint by the run's score attribute; None without one, or if none has a score."""
        if self.score_attribute is None:
            return None
        ranked = rank(self._candidates(), self.score_attribute, self.score_order)
        return self._at(ranked[0]) if ranked else None

    def get_best_checkpoint(self, metric: str, mode: ScoreOrder) -> Checkpoint:
        """The best retained checkpoint by any metric; of equal values the later.

        Raises:
            ConfigError: `mode` is neither `max` nor `min`.
            CheckpointNotFoundError: no retained checkpoint has a number under `metric`.
        """
        if mode not in ("max", "min"):
            raise ConfigError(f"mode={mode!r} must be 'max' or 'min'")
        ranked = rank(self._candidates(), metric, mode)
        if not ranked:
            raise CheckpointNotFoundError(f"no retained checkpoint of {self.path} has a number as metric {metric!r}")
        return self._at(ranked[0])

    @classmethod
    def from_path(
        cls, uri: str, credentials: Credentials | None = None, *, storage_options: Mapping[str, Any] | None = None
    ) -> Result:
        """The result of a finished, failed or running run, from its storage alone: `<storage_path>/<name>`.

        Raises:
            CheckpointNotFoundError: no run is there.
        """
        from ckpt.reading import read_result

        return read_result(uri, credentials, storage_options=storage_options)

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(id=CommitId(index, 0), metrics=metrics, created=0.0)
            for index, (_, metrics) in enumerate(self.best_checkpoints)
        ]

    def _at(self, candidate: Candidate) -> Checkpoint:
        return self.best_checkpoints[candidate.id.seq][0]
