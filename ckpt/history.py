"""The published history: one row per report, in create-only segments, read lazily."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from types import NoneType
from typing import Any, overload

from ckpt._json import dumps, loads
from ckpt.checkpoint import Checkpoint
from ckpt.commits import READERS, Lineage
from ckpt.credentials import Credentials
from ckpt.errors import FormatError, ObjectExistsError, ObjectNotFoundError
from ckpt.layout import HISTORY, CommitId, Segment, parse_segment
from ckpt.manifest import typed
from ckpt.records import ReportRecord, ReportState, Timings
from ckpt.storage import Objects, join_uri

logger = logging.getLogger("ckpt")

Refer = Callable[[str, str], Checkpoint]
"""Makes a reference from the URI of a checkpoint and that of its commit object, with the run's credentials."""


def reference(
    credentials: Credentials | None, storage_options: Mapping[str, Any] | None, uri: str, commit_uri: str
) -> Checkpoint:
    """A `Refer`, once its first two arguments are bound; a plain function, so that a result pickles."""
    return Checkpoint(uri, credentials, storage_options=storage_options, commit_uri=commit_uri)


def write_segment(objects: Objects, attempt: int, rows: Sequence[ReportRecord]) -> None:
    """Publish rows of consecutive seqs, by one `create`."""
    segment = Segment(attempt, rows[0].seq, rows[-1].seq)
    body = "".join(dumps(row.to_json()) + "\n" for row in rows)
    try:
        objects.create(segment.key, body.encode())
    except ObjectExistsError:
        logger.debug("%s is there already, from a try whose answer got lost", segment.key)


def list_segments(objects: Objects) -> list[Segment]:
    """Every segment, by first seq; one listing."""
    found = [segment for entry in objects.list(HISTORY) if (segment := parse_segment(entry.key))]
    return sorted(found, key=lambda segment: (segment.first, segment.attempt, segment.last))


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows that one segment contributes: `first`..`last`, the first of them at `position` in the history."""

    position: int
    segment: Segment
    first: int
    last: int


@dataclass(slots=True, kw_only=True, eq=False)
class History(Sequence[ReportRecord]):
    """Every report of a run, retained or not, checkpoint or not, in order; segments are read when they are looked at.

    A damaged row shows as LOST and says so.
    """

    objects: Objects
    """Rooted at the run."""
    refer: Refer
    lineage: Lineage
    tail: Sequence[ReportRecord] = ()
    """Rows that could not be written to the store."""
    _pieces: list[_Piece] | None = field(default=None, repr=False)
    _cached: tuple[Segment, list[ReportRecord]] | None = field(default=None, repr=False)

    def seqs(self) -> set[int]:
        """Seqs that have a row; one listing."""
        return {seq for piece in self._index() for seq in range(piece.first, piece.last + 1)}

    def of(self, seq: int) -> ReportRecord | None:
        """The row of a report, None if it has none; one listing and one read."""
        for piece in self._index():
            if piece.first <= seq <= piece.last:
                return self._rows(piece)[seq - piece.first]
        return next((row for row in self.tail if row.seq == seq), None)

    def __len__(self) -> int:
        pieces = self._index()
        stored = pieces[-1].position + pieces[-1].last - pieces[-1].first + 1 if pieces else 0
        return stored + len(self.tail)

    @overload
    def __getitem__(self, index: int) -> ReportRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReportRecord]: ...
    def __getitem__(self, index: int | slice) -> ReportRecord | list[ReportRecord]:
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"report {index} of {len(self)}")
        return self._at(position)

    def __iter__(self) -> Iterator[ReportRecord]:
        for piece in self._index():
            yield from self._rows(piece)
        yield from self.tail

    def read_ahead(self) -> Iterator[ReportRecord]:
        """Every row in order, as `__iter__`, with several segments read at a time: for a pass over a whole run."""

        def load(piece: _Piece) -> list[ReportRecord]:
            return _of_piece(piece, read_segment(self.objects, piece.segment, self.refer))

        with ThreadPoolExecutor(READERS, thread_name_prefix="ckpt-read") as pool:
            for rows in pool.map(load, self._index()):
                yield from rows
        yield from self.tail

    def __reversed__(self) -> Iterator[ReportRecord]:
        yield from reversed(self.tail)
        for piece in reversed(self._index()):
            yield from reversed(self._rows(piece))

    def _at(self, position: int) -> ReportRecord:
        stored = len(self) - len(self.tail)
        if position >= stored:
            return self.tail[position - stored]
        pieces = self._index()
        piece = pieces[bisect_right(pieces, position, key=attrgetter("position")) - 1]
        return self._rows(piece)[position - piece.position]

    def _index(self) -> list[_Piece]:
        if self._pieces is None:
            self._pieces = []
            position, done = 0, -1
            for segment in list_segments(self.objects):
                last = self._last_counting(segment)
                first = max(segment.first, done + 1)
                if first <= last:
                    self._pieces.append(_Piece(position, segment, first, last))
                    position, done = position + last - first + 1, last
        return self._pieces

    def _last_counting(self, segment: Segment) -> int:
        """The last seq of a segment that no later attempt superseded."""
        bounds = [start.first_seq for n, start in self.lineage.starts.items() if n > segment.attempt]
        return min([segment.last, *(bound - 1 for bound in bounds)])

    def _rows(self, piece: _Piece) -> list[ReportRecord]:
        if self._cached is None or self._cached[0] != piece.segment:
            self._cached = (piece.segment, read_segment(self.objects, piece.segment, self.refer))
        return _of_piece(piece, self._cached[1])


def _of_piece(piece: _Piece, rows: list[ReportRecord]) -> list[ReportRecord]:
    """The rows that a segment contributes, damaged ones stood in for."""
    by_seq = {row.seq: row for row in rows}
    return [by_seq.get(seq) or _damaged(piece.segment, seq) for seq in range(piece.first, piece.last + 1)]


def read_segment(objects: Objects, segment: Segment, refer: Refer) -> list[ReportRecord]:
    """The rows of one segment that can be read; damage is warned about."""
    where = join_uri(objects.uri, segment.key)
    rows = []
    try:
        lines = objects.read(segment.key).splitlines()
    except ObjectNotFoundError:
        logger.warning("%s is gone; its reports show as lost", where)
        return []
    for line in lines:
        try:
            rows.append(_row(loads(line, where), objects.uri, refer))
        except (FormatError, KeyError, TypeError, ValueError) as error:
            logger.warning("A row of %s is damaged and shows as lost: %s", where, error)
    return rows


_ROW: Mapping[str, tuple[type, ...]] = {
    "seq": (int,), "attempt": (int,), "name": (str,), "metrics": (dict,), "reason": (str, NoneType), "nbytes": (int,),
    "nfiles": (int,), "created": (int, float), "checkpoint": (str, NoneType), "timings": (dict,),
}  # fmt: skip
_TIMINGS: Mapping[str, tuple[type, ...]] = dict.fromkeys(Timings.__dataclass_fields__, (int, float))


def _row(body: dict[str, Any], run: str, refer: Refer) -> ReportRecord:
    typed(body, _ROW, _ROW)
    typed(body.get("timings", {}), Timings.__dataclass_fields__, _TIMINGS)
    commit = CommitId(body["seq"], body["attempt"])
    return ReportRecord.from_json(body, lambda uri: refer(uri, join_uri(run, commit.key)))


def _damaged(segment: Segment, seq: int) -> ReportRecord:
    return ReportRecord(
        seq=seq,
        attempt=segment.attempt,
        name="",
        state=ReportState.LOST,
        metrics={},
        reason=f"its row in {segment.key} cannot be read",
    )


def commit_of(record: ReportRecord) -> CommitId:
    """The commit of a record."""
    return CommitId(record.seq, record.attempt)
