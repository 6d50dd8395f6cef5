"""Garbage collection: files that a crash left in a run and that no commit names."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ckpt.adopting import adopt
from ckpt.attempts import LEASE_TIME, Attempt, Found, Owner, claim
from ckpt.commits import READERS, Start, list_commits, read_commit
from ckpt.credentials import Credentials
from ckpt.inflight import Live
from ckpt.layout import CHECKPOINTS
from ckpt.manifest import Manifest
from ckpt.publishing import Publisher, Retention
from ckpt.reading import RunFiles, open_run_files
from ckpt.slots import UploadSlots
from ckpt.storage import Entry, Objects, join_uri
from ckpt.transferring import sweep_uploads

logger = logging.getLogger("ckpt")

_LOCATION = re.compile(rf"{CHECKPOINTS}.+?-a\d+(-\d+)?(?=/)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a garbage collection removed."""

    locations: tuple[str, ...]
    """URIs of the directories, in order."""
    files: int
    nbytes: int


def collect(
    run: str,
    *,
    credentials: Credentials | None = None,
    storage_options: dict[str, Any] | None = None,
    lease_time: float = LEASE_TIME,
    dry_run: bool = False,
) -> Collected:
    """Remove what no commit of a run names: the files of uploads that a crash cut short, of deletions half done.

    It claims an attempt first, as a new driver would, and settles every open report, so that no upload of an old driver can
    commit what is being removed, and aborts the multipart uploads that dead drivers left. Files outside `checkpoints/`, and
    external checkpoints, are never touched.

    Args:
        run: `<storage_path>/<name>`.
        credentials: see `ckpt.credentials`.
        storage_options: without secrets.
        lease_time: seconds a driver that may be alive is watched.
        dry_run: only say what would be removed; claims nothing, and may name what a living driver is uploading.

    Raises:
        RunBusyError: a driver owns the run and is alive.
        FormatError: a commit object cannot be read; what it names is not known, so nothing is removed.
        FencedError: a driver claimed the run meanwhile; nothing was removed.
    """
    files = open_run_files(run, credentials, storage_options=storage_options)
    if dry_run:
        return _told(files, orphans(files.storage))
    attempt, start, found = claim(files.storage, Owner(), lambda _: None, lease_time=lease_time, upkeep=True)
    try:
        sweep_uploads(files.storage)
        settle(files, attempt, start, found)
        left = orphans(files.storage)
        attempt.check_fence()  # whoever claims from here on uploads to locations that were not there to be listed
        files.storage.delete([entry.key for entries in left.values() for entry in entries])
    finally:
        attempt.end("collected")
    return _told(files, left)


def orphans(objects: Objects) -> dict[str, list[Entry]]:
    """Objects in locations of this format that no commit names, superseded ones included, by location.

    Raises:
        FormatError: a commit object cannot be read.
    """
    present = list(objects.list(CHECKPOINTS))
    with ThreadPoolExecutor(READERS, thread_name_prefix="ckpt-read") as pool:
        found = pool.map(lambda commit: read_commit(objects, commit), list_commits(objects))
        named = {manifest.location for manifest in found if isinstance(manifest, Manifest)}
    return _unnamed(present, named)


def _unnamed(present: Iterable[Entry], named: set[str]) -> dict[str, list[Entry]]:
    left: dict[str, list[Entry]] = {}
    for entry in present:
        match = _LOCATION.match(entry.key)
        if match is not None and not any(folder in named for folder in _folders(entry.key)):
            left.setdefault(match[0], []).append(entry)
    return left


def _folders(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts))]


def settle(files: RunFiles, attempt: Attempt, start: Start, found: Found) -> None:
    """Publish what an earlier driver committed and did not publish, and give up what it left open."""
    publisher = Publisher(
        run=files.name, storage=files.storage, attempt=attempt, start=start, retention=Retention(), refer=files.refer
    )
    live = Live(storage=files.storage, attempt=attempt, slots=UploadSlots(1, 1))
    adopt(publisher, live, found, start.first_seq)


def _told(files: RunFiles, left: dict[str, list[Entry]]) -> Collected:
    entries = [entry for location in left.values() for entry in location]
    return Collected(
        locations=tuple(join_uri(files.uri, location) for location in sorted(left)),
        files=len(entries),
        nbytes=sum(entry.size for entry in entries),
    )
