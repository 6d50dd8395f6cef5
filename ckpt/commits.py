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

READERS = 16
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
    upkeep: bool = False
    """Claimed to prune or to collect garbage: it makes no reports, and nothing goes on from it."""

    def to_json(self) -> dict[str, Any]:
        """The body of the start object."""
        return {
            "attempt": self.attempt,
            "first_seq": self.first_seq,
            "resumed_from": None if self.resumed_from is None else list(self.resumed_from),
            "origin": self.origin,
            "upkeep": self.upkeep,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The attempts of a run, and with them which commit counts."""

    claimed: tuple[int, ...] = ()
    """Attempt numbers, ascending."""
    starts: Mapping[int, Start] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    """Attempts that ended by themselves, or were replaced before they had started."""
    void: frozenset[int] = frozenset()
    """Of those, the ones whose start object a newcomer made in their place: they can never start."""

    @property
    def last(self) -> int:
        """The newest claimed attempt; 0 if none."""
        return self.claimed[-1] if self.claimed else 0

    @property
    def trained(self) -> dict[int, Start]:
        """The attempts that trained, by number."""
        return {attempt: start for attempt, start in self.starts.items() if not start.upkeep}

    @property
    def last_driver(self) -> int:
        """The newest attempt that trained or is about to; 0 if none. Its result is the run's."""
        about_to = set(self.claimed) - self.starts.keys() - self.ended
        return max([*self.trained, *about_to], default=0)

    def counts(self, commit: CommitId) -> bool:
        """Whether no later attempt superseded this commit (or history row)."""
        return all(commit.seq < start.first_seq for attempt, start in self.starts.items() if attempt > commit.attempt)

    def owner_of(self, seq: int) -> int:
        """The attempt whose report `seq` is: the newest one that had begun by then."""
        return max((a for a, start in self.starts.items() if start.first_seq <= seq), default=1)


def read_lineage(objects: Objects) -> Lineage:
    """One listing, and one read per started attempt."""
    found = [parsed for entry in objects.list(ATTEMPTS) if (parsed := parse_attempt(entry.key))]
    starts = [attempt for attempt, kind in found if kind == "start"]
    read = {n: decode_object(objects.read(start_key(n)), join_uri(objects.uri, start_key(n))) for n in starts}
    void = frozenset(attempt for attempt, body in read.items() if body.get("void"))
    return Lineage(
        claimed=tuple(sorted(attempt for attempt, kind in found if kind == "claim")),
        starts={n: _start(n, body, join_uri(objects.uri, start_key(n))) for n, body in read.items() if n not in void},
        ended=frozenset(attempt for attempt, kind in found if kind == "end") | void,
        void=void,
    )


def _start(attempt: int, body: Mapping[str, Any], where: str) -> Start:
    try:
        origin = body.get("resumed_from")
        return Start(
            attempt=attempt,
            first_seq=int(body["first_seq"]),
            resumed_from=None if origin is None else CommitId(*map(int, origin)),
            origin=str(body.get("origin", "")),
            upkeep=bool(body.get("upkeep", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{where} is not a start object: {error!r}") from error


def list_commits(objects: Objects) -> list[CommitId]:
    """Every commit object, manifest or tombstone, superseded or not, by (seq, attempt); one listing."""
    return sorted(commit for entry in objects.list(COMMITS) if (commit := parse_commit(entry.key)))


def read_commit(objects: Objects, commit: CommitId) -> Manifest | Tombstone | None:
    """The commit object; None where there is none.

    Raises:
        FormatError: it is damaged or of a newer format.
    """
    where = join_uri(objects.uri, commit.key)
    try:
        found = decode_commit(objects.read(commit.key), where)
    except ObjectNotFoundError:
        return None
    if found.id != commit:
        raise FormatError(f"{where} holds report {found.seq} of attempt {found.attempt}, which its name is not")
    return found


def read_manifests(objects: Objects, commits: Iterable[CommitId]) -> Iterator[Manifest]:
    """The manifests among `commits`, in order; tombstones are left out, unreadable ones warned about."""

    def one(commit: CommitId) -> Manifest | None:
        return _manifest_or_none(objects, commit)

    with ThreadPoolExecutor(READERS, thread_name_prefix="ckpt-read") as pool:
        for found in pool.map(one, commits):
            if found is not None:
                yield found


def newest(objects: Objects, lineage: Lineage, commits: list[CommitId]) -> Manifest | None:
    """The commit to go on from: the newest of the newest started attempt, else what that attempt had resumed from.

    So a run rewound to `best` does not jump back to the branch it left. An unreadable commit is passed over with a
    warning.
    """
    for commit in _by_preference(lineage, commits):
        if found := _manifest_or_none(objects, commit):
            return found
    return None


def newest_of_living(
    objects: Objects, lineage: Lineage, commits: list[CommitId]
) -> tuple[Manifest | None, Lineage, list[CommitId]]:
    """`newest` for a reader beside a living owner, whose retention may delete what a listing has just shown.

    Where a commit that should be there is gone the listing is taken again, until it does not change: an owner deletes a
    commit only after a newer one is there, so that a run never looks empty.

    Returns:
        The newest commit, and the attempts and commits it was found in.
    """
    while True:
        for commit in _by_preference(lineage, commits):
            found = _readable(objects, commit)
            if isinstance(found, Manifest):
                return found, lineage, commits
            if found is None:
                break
        else:
            return None, lineage, commits
        again, lineage_again = list_commits(objects), read_lineage(objects)
        if (again, lineage_again) == (commits, lineage):
            return newest(objects, lineage, commits), lineage, commits
        commits, lineage = again, lineage_again


def _by_preference(lineage: Lineage, commits: list[CommitId]) -> Iterator[CommitId]:
    """The commits to go on from, the first choice first."""
    for attempt, start in sorted(lineage.trained.items(), reverse=True):
        own = [commit for commit in commits if commit.attempt == attempt and lineage.counts(commit)]
        yield from reversed(own)
        if start.resumed_from is None or start.origin:
            return  # it began from scratch, or from another run
        yield start.resumed_from


def _manifest_or_none(objects: Objects, commit: CommitId) -> Manifest | None:
    found = _readable(objects, commit)
    return found if isinstance(found, Manifest) else None


def _readable(objects: Objects, commit: CommitId) -> Manifest | Tombstone | FormatError | None:
    """What is at the commit's key; damage is warned about and given back as the error."""
    try:
        return read_commit(objects, commit)
    except NewerFormatError:
        raise
    except FormatError as error:
        logger.warning("Passing over commit %s of %s: %s", commit.key, objects.uri, error)
        return error
