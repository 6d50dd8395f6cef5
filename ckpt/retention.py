"""Retention: which committed checkpoints stay. Policies are small predicates over the whole list, any-of with `|`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ckpt.errors import ConfigError
from ckpt.layout import CommitId
from ckpt.metrics import Metrics, score_of

ScoreOrder = Literal["max", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed checkpoint as a policy sees it."""

    id: CommitId
    metrics: Metrics
    """With every evaluation recorded so far."""
    created: float
    """Unix seconds of its report() call."""
    pinned: bool = False


class RetentionPolicy(Protocol):
    """Says which of the committed checkpoints to keep."""

    def keep(self, candidates: Sequence[Candidate]) -> set[CommitId]:
        """The ids to keep, out of `candidates` in seq order. Whatever it says, latest, best and pinned ones stay."""
        ...


class _Policy:
    """Any-of: `KeepLast(3) | KeepEvery(100)`."""

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        return KeepAny((self, other))  # type: ignore[arg-type]  # every subclass has keep()


@dataclass(frozen=True, slots=True)
class KeepAll(_Policy):
    """Keeps everything."""

    def keep(self, candidates: Sequence[Candidate]) -> set[CommitId]:
        """All."""
        return {item.id for item in candidates}


@dataclass(frozen=True, slots=True)
class KeepLast(_Policy):
    """Keeps the newest `n`."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", self.n)

    def keep(self, candidates: Sequence[Candidate]) -> set[CommitId]:
        """The last `n` by seq."""
        return {item.id for item in candidates[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepBest(_Policy):
    """Keeps the best `n` by a metric; of equal scores the later. Those without a score rank behind all that have one."""

    n: int
    attribute: str
    order: ScoreOrder = "max"

    def __post_init__(self) -> None:
        _check_count("KeepBest", self.n)
        if not isinstance(self.attribute, str):
            raise ConfigError(f"KeepBest attribute={self.attribute!r} must be a metric's name")
        if self.order not in ("max", "min"):
            raise ConfigError(f"KeepBest order={self.order!r} must be 'max' or 'min'")

    def keep(self, candidates: Sequence[Candidate]) -> set[CommitId]:
        """The first `n` of the ranking, then the newest unscored ones if fewer have a score."""
        scored = rank(candidates, self.attribute, self.order)
        ids = {item.id for item in scored}
        unscored = [item for item in reversed(candidates) if item.id not in ids]
        return {item.id for item in [*scored, *unscored][: self.n]}


@dataclass(frozen=True, slots=True)
class KeepEvery(_Policy):
    """Keeps each checkpoint whose seq is a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery", self.n)

    def keep(self, candidates: Sequence[Candidate]) -> set[CommitId]:
        """By seq, so the same over all attempts."""
        return {item.id for item in candidates if item.id.seq % self.n == 0}


@dataclass(frozen=True, slots=True)
class KeepYounger(_Policy):
    """Keeps what was reported in the last `seconds`."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"KeepYounger({self.seconds!r}) must be above 0 seconds")

    def keep(self, candidates: Sequence[Candidate]) -> set[CommitId]:
        """By the report's time and this machine's clock."""
        since = time.time() - self.seconds
        return {item.id for item in candidates if item.created >= since}


@dataclass(frozen=True, slots=True)
class KeepAny(_Policy):
    """Keeps what any of several policies keeps."""

    policies: tuple[RetentionPolicy, ...] = field(default=())

    def keep(self, candidates: Sequence[Candidate]) -> set[CommitId]:
        """The union."""
        return set().union(*(policy.keep(candidates) for policy in self.policies))


def rank(candidates: Sequence[Candidate], attribute: str, order: ScoreOrder) -> list[Candidate]:
    """Those that have a score, best first; of equal scores the later first. NaN is no score."""
    sign = 1.0 if order == "max" else -1.0
    scored = [
        (sign * score, item.id, item) for item in candidates if (score := score_of(item.metrics, attribute)) is not None
    ]
    return [item for _, _, item in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def evicted(candidates: Sequence[Candidate], policy: RetentionPolicy, protected: set[CommitId]) -> list[CommitId]:
    """What may be deleted, oldest first: neither kept by the policy, nor protected, nor pinned, nor the newest."""
    if not candidates:
        return []
    keep = policy.keep(candidates) | protected | {candidates[-1].id}
    return [item.id for item in candidates if item.id not in keep and not item.pinned]


def _check_count(name: str, n: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"{name}({n!r}) must be an int of at least 1")
