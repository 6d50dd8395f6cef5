"""What a new attempt takes over: it publishes what was committed and not published, and says what was lost."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

from ckpt.attempts import Attempt, Found
from ckpt.commits import read_commit, read_manifests
from ckpt.errors import FormatError, NewerFormatError
from ckpt.history import History
from ckpt.inflight import Live
from ckpt.layout import CommitId
from ckpt.manifest import Manifest, Tombstone
from ckpt.publishing import Publisher
from ckpt.records import ReportRecord, ReportState

_MOST_LOST = 100_000
"""Reports without a row that a killed process can have left, by far: what is pending is bounded."""
_LOST = "its process ended before the report was final"


def adopt(publisher: Publisher, live: Live, found: Found, first_seq: int) -> None:
    """Give every seq below `first_seq` a published row, and hand over what is retained.

    For a seq that has neither a commit nor a row a tombstone is created at the commit's own key, so that a straggling
    upload of the old driver cannot commit it any more; if the commit was there first after all, it is adopted.

    Raises:
        FormatError: so many seqs are missing that a name in the store must be damaged or made up.
    """
    manifests = {
        manifest.seq: manifest
        for manifest in read_manifests(live.attempt.objects, [c for c in found.commits if found.lineage.counts(c)])
    }
    history = History(objects=live.attempt.objects, refer=publisher.refer, lineage=found.lineage)
    published = history.seqs()
    if first_seq - len(published) > _MOST_LOST:
        raise FormatError(
            f"{live.attempt.objects.uri} has objects up to seq {first_seq - 1}, and rows of {len(published)} reports only: "
            "a name below commits/ or history/, or a first_seq below attempts/, is damaged or made up; remove that object"
        )
    missing = sorted(set(range(first_seq)) - published)
    rows = [_row(publisher, live.attempt, found, manifests, seq) for seq in missing]
    committed = {seq: record_of(publisher, manifest) for seq, manifest in manifests.items()}
    committed |= {row.seq: row for row in rows if row.checkpoint is not None}
    retained = [record for _, record in sorted(committed.items())]
    for record in retained:
        if record.checkpoint is not None:
            live.locations.add(record.checkpoint.uri)
    publisher.adopt(retained, rows, heapq.merge(history.read_ahead(), rows, key=attrgetter("seq")))


def record_of(publisher: Publisher, manifest: Manifest) -> ReportRecord:
    """The record of a commit that was read."""
    return ReportRecord(
        seq=manifest.seq, attempt=manifest.attempt, name=manifest.name, state=ReportState.COMMITTED,
        metrics=manifest.metrics, checkpoint=publisher.reference(manifest), nbytes=manifest.nbytes,
        nfiles=len(manifest.files), created=manifest.created,
    )  # fmt: skip


def _row(
    publisher: Publisher, attempt: Attempt, found: Found, manifests: Mapping[int, Manifest], seq: int
) -> ReportRecord:
    if seq in manifests:
        return record_of(publisher, manifests[seq])
    commit = CommitId(seq, found.lineage.owner_of(seq))
    lost = Tombstone(seq=seq, attempt=commit.attempt, name="", state=ReportState.LOST.value, reason=_LOST)
    try:
        settled = (read_commit(attempt.objects, commit) if commit in found.commits else None) or attempt.give_up(lost)
    except NewerFormatError:
        raise
    except FormatError as error:
        settled = replace(lost, reason=f"its commit object cannot be read: {error}")
    if isinstance(settled, Manifest):
        return record_of(publisher, settled)
    return ReportRecord(
        seq=seq, attempt=commit.attempt, name=settled.name, state=ReportState(settled.state), metrics=settled.metrics,
        reason=settled.reason, created=settled.created,
    )  # fmt: skip
