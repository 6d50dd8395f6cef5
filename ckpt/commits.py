"""Reading a run: which commits count, and which of them is the newest.

An attempt n+1 that has started says with `first_seq` where its own reports begin; commits of older attempts at or above it
were made by a driver that did not know it had been replaced, and do not count (they are shown as superseded).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import FormatError, NewerFormatError, ObjectNotFoundError
from ckpt.layout import ATTEMPTS, COMMITS, CommitId, parse_attempt, parse_commit, start_key
from ckpt.manifest import Manifest, Tombstone, decode_commit, decode_object
from ckpt.storage import Objects, join_uri

logger = logging.getLogger("ckpt")

_READERS = 16
"""Small objects read at once when a whole run is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an attempt began."""

    attempt: int
    first_seq: int
    """Seq of its first report."""
    resumed_from: CommitId | None = None
    """The commit it restored; None: it began from scratch."""
    origin: str = ""
    """URI of the run that commit is in, if it is another run."""

    def to_json(self) -> dict[str, Any]:
        """The body of the start object."""
        return {
            "attempt": self.attempt,
            "first_seq": self.first_seq,
            "resumed_from": None if self.resumed_from is None else list(self.resumed_from),
            "origin": self.origin,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The attempts of a run, and with them which commit counts."""

    claimed: tuple[int, ...] = ()
    """Attempt numbers, ascending."""
    starts: Mapping[int, Start] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    """Attempts that ended by themselves."""

    @property
    def last(self) -> int:
        """The newest claimed attempt; 0 if none."""
        return self.claimed[-1] if self.claimed else 0

    def counts(self, commit: CommitId) -> bool:
        """Whether no later attempt superseded this commit (or history row)."""
        return all(
            commit.seq < start.first_seq for attempt, start in self.starts.items() if attempt > commit.attempt
        )

    def owner_of(self, seq: int) -> int:
        """The attempt whose report `seq` is: the newest one that had begun by then."""
        return max((a for a, start in self.starts.items() if start.first_seq <= seq), default=1)


def read_lineage(objects: Objects) -> Lineage:
    """One listing, and one read per started attempt."""
    found = [parsed for entry in objects.list(ATTEMPTS) if (parsed := parse_attempt(entry.key))]
    starts = [attempt for attempt, kind in found if kind == "start"]
    bodies = (decode_object(objects.read(start_key(n)), join_uri(objects.uri, start_key(n))) for n in starts)
    return Lineage(
        claimed=tuple(sorted(attempt for attempt, kind in found if kind == "claim")),
        starts={attempt: _start(attempt, body) for attempt, body in zip(starts, bodies, strict=True)},
        ended=frozenset(attempt for attempt, kind in found if kind == "end"),
    )


def _start(attempt: int, body: Mapping[str, Any]) -> Start:
    origin = body.get("resumed_from")
    return Start(
        attempt=attempt,
        first_seq=int(body["first_seq"]),
        resumed_from=None if origin is None else CommitId(*origin),
        origin=str(body.get("origin", "")),
    )


def list_commits(objects: Objects) -> list[CommitId]:
    """Every commit object, manifest or tombstone, superseded or not, by (seq, attempt); one listing."""
    return sorted(commit for entry in objects.list(COMMITS) if (commit := parse_commit(entry.key)))


def read_commit(objects: Objects, commit: CommitId) -> Manifest | Tombstone | None:
    """The commit object; None where there is none.

    Raises:
        FormatError: it is damaged or of a newer format.
    """
    try:
        return decode_commit(objects.read(commit.key), join_uri(objects.uri, commit.key))
    except ObjectNotFoundError:
        return None


def read_manifests(objects: Objects, commits: Iterable[CommitId]) -> Iterator[Manifest]:
    """The manifests among `commits`, in order; tombstones are left out, unreadable ones warned about."""

    def one(commit: CommitId) -> Manifest | None:
        return _manifest_or_none(objects, commit)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="ckpt-read") as pool:
        for found in pool.map(one, commits):
            if found is not None:
                yield found


def newest(objects: Objects, lineage: Lineage, commits: list[CommitId]) -> Manifest | None:
    """The commit to go on from: the newest of the newest started attempt, else what that attempt had resumed from.

    So a run rewound to `best` does not jump back to the branch it left. An unreadable commit is passed over with a
    warning.
    """
    for attempt in sorted(lineage.starts, reverse=True):
        own = [commit for commit in commits if commit.attempt == attempt and lineage.counts(commit)]
        for commit in reversed(own):
            if found := _manifest_or_none(objects, commit):
                return found
        origin = lineage.starts[attempt].resumed_from
        if origin is None or lineage.starts[attempt].origin:
            return None  # it began from scratch, or from another run
        if found := _manifest_or_none(objects, origin):
            return found
    return None


def _manifest_or_none(objects: Objects, commit: CommitId) -> Manifest | None:
    try:
        found = read_commit(objects, commit)
    except NewerFormatError:
        raise
    except FormatError as error:
        logger.warning("Passing over commit %s of %s: %s", commit.key, objects.uri, error)
        return None
    return found if isinstance(found, Manifest) else None
