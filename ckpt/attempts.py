"""Owning a run: one driver at a time makes commits, by claiming first and looking second.

A driver becomes attempt n by creating `attempts/<n>.json`, and only then lists what is there. An owner that has created a
commit acknowledges it only after checking that no attempt n+1 has been claimed. Whatever the interleaving, either the
newcomer's listing sees the commit, or the owner's check sees the newcomer (tests/test_protocol_model.py tries them all).
"""

from __future__ import annotations

import getpass
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt._json import encode
from ckpt.commits import Lineage, Start, list_commits, newest, read_commit, read_lineage
from ckpt.errors import (
    CommittedError,
    FencedError,
    FormatError,
    ObjectExistsError,
    ObjectNotFoundError,
    RunBusyError,
    StorageError,
)
from ckpt.layout import FORMAT, HISTORY, CommitId, claim_key, end_key, lease_key, parse_segment, start_key
from ckpt.manifest import Manifest, Tombstone, decode_object
from ckpt.staging import is_running, machine_id, start_time
from ckpt.storage import Entry, Objects, join_uri

logger = logging.getLogger("ckpt")

LEASE_TIME = 60.0
"""Seconds without a sign of life after which an owner may be replaced; it gives one every third of that."""

_open_here: set[str] = set()
"""Nonces of the attempts that are open in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who claims an attempt."""

    host: str = field(default_factory=lambda: os.uname().nodename)
    machine: str = field(default_factory=machine_id)
    """This boot of this machine: where `pid` and `started` mean something."""
    pid: int = field(default_factory=os.getpid)
    started: int = field(default_factory=lambda: start_time(os.getpid()) or 0)
    """The process's start, in the kernel's ticks: a pid alone may be another process's by now."""
    user: str = field(default_factory=lambda: _user())  # noqa: PLW0108 - defined below
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    lease_time: float = LEASE_TIME
    """Seconds of silence after which this owner may be replaced; whoever watches it waits at least so long."""
    flow_run_id: str | None = None
    run_count: int = 0
    """How often this flow run was started, from Prefect; a retry has a higher one."""

    def __str__(self) -> str:
        flow = f", flow run {self.flow_run_id}" if self.flow_run_id else ""
        return f"process {self.pid} of {self.user} on {self.host}{flow}"

    def is_gone(self, newcomer: Owner) -> bool:
        """Whether this owner is known to be dead, or to be an earlier try of the newcomer's own flow run."""
        if self.flow_run_id and self.flow_run_id == newcomer.flow_run_id and self.run_count < newcomer.run_count:
            return True
        if self.machine != newcomer.machine:
            return False
        if (self.pid, self.started) == (newcomer.pid, newcomer.started):
            return self.nonce not in _open_here
        return not is_running(self.pid, self.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a newcomer saw after its claim."""

    lineage: Lineage
    commits: list[CommitId]
    newest: Manifest | None
    """The commit to go on from."""
    next_seq: int
    """1 + the highest seq seen anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The commit to resume from."""

    commit: CommitId
    origin: str = ""
    """URI of the run it is in, if it is another run."""


Choose = Callable[[Found], Chosen | None]
"""Picks the commit to resume from; None: begin from scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The ownership of one attempt of one run, until somebody claims the next."""

    objects: Objects
    """Rooted at the run."""
    number: int
    """From 1."""
    nonce: str = ""

    def check_fence(self) -> None:
        """Raise `FencedError` if a newer attempt was claimed; to be called before anything is done on a commit's strength."""
        try:
            body = self.objects.read(claim_key(self.number + 1))
        except ObjectNotFoundError:
            return
        owner = _owner(body, claim_key(self.number + 1))
        raise FencedError(
            f"attempt {self.number} of {self.objects.uri} was replaced by attempt {self.number + 1} ({owner or 'unreadable'}); "
            "this driver publishes nothing any more, and its local copies are kept"
        )

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint exist: create its manifest, whole or not at all, then check for a newer attempt.

        Raises:
            CommittedError: the report was given up meanwhile; nothing is committed.
            FencedError: another driver took over; the commit is not acknowledged.
        """
        try:
            self.objects.create(manifest.id.key, manifest.encode())
        except ObjectExistsError as error:
            won = read_commit(self.objects, manifest.id)
            if won is None or won.nonce != manifest.nonce:
                reason = won.reason if isinstance(won, Tombstone) else "another commit is there"
                raise CommittedError(f"{manifest.id.key} of {self.objects.uri} is taken: {reason}") from error
        self.check_fence()

    def give_up(self, tombstone: Tombstone) -> Manifest | Tombstone:
        """Settle that a report will never be committed, unless it has been.

        Returns:
            What is at the commit's key now: the tombstone, or the commit that was made before it.
        """
        try:
            self.objects.create(tombstone.id.key, tombstone.encode())
        except ObjectExistsError:
            return read_commit(self.objects, tombstone.id) or tombstone
        return tombstone

    def renew(self) -> None:
        """Give a sign of life."""
        self.objects.write(lease_key(self.number), encode({"nonce": self.nonce, "beat": uuid.uuid4().hex}))

    def end(self, status: str) -> None:
        """Say that this attempt ended by itself, so that the next need not wait for its lease to run out."""
        try:
            self.objects.create(
                end_key(self.number), encode({"format": FORMAT, "status": status, "ended": time.time()})
            )
        except ObjectExistsError:
            pass  # ours, from a try whose answer got lost
        finally:
            _open_here.discard(self.nonce)


def claim(
    objects: Objects,
    owner: Owner,
    choose: Choose,
    *,
    lease_time: float = LEASE_TIME,
    wait: Callable[[float], object] = time.sleep,
    upkeep: bool = False,
) -> tuple[Attempt, Start, Found]:
    """Become the owner of the run's next attempt.

    Args:
        objects: rooted at the run.
        owner: who claims.
        choose: picks the commit to resume from; called after the claim is made.
        lease_time: seconds an owner that may be alive is watched for a sign of life.
        wait: sleeps for so many seconds.
        upkeep: whether it is claimed for maintenance only, and will make no reports.

    Returns:
        The ownership, where the attempt begins, and what was found.

    Raises:
        RunBusyError: another driver owns the run and is alive.
        FencedError: another driver claimed after this one.
    """
    attempt = _claim_next(objects, owner, lease_time, wait)
    try:
        return attempt, *begin(attempt, choose, upkeep=upkeep)
    except BaseException:
        with suppress(StorageError):
            attempt.end("failed to start")
        raise


def begin(attempt: Attempt, choose: Choose, *, upkeep: bool = False) -> tuple[Start, Found]:
    """What follows a claim: look, choose, and say where the attempt begins.

    Raises:
        FencedError: another driver claimed after this one.
    """
    attempt.renew()
    found = look(attempt.objects)
    chosen = choose(found)
    start = Start(
        attempt=attempt.number,
        first_seq=found.next_seq,
        resumed_from=None if chosen is None else chosen.commit,
        origin="" if chosen is None else chosen.origin,
        upkeep=upkeep,
    )
    with suppress(
        ObjectExistsError
    ):  # ours, from a try whose answer got lost; or void, and then the fence shows by whom
        attempt.objects.create(start_key(attempt.number), encode({"format": FORMAT, **start.to_json()}))
    attempt.check_fence()
    return start, found


def look(objects: Objects) -> Found:
    """What is there, by three listings: attempts, commits, history."""
    commits = list_commits(objects)
    lineage = read_lineage(objects)
    segments = [segment for entry in objects.list(HISTORY) if (segment := parse_segment(entry.key))]
    highest = max([*(commit.seq for commit in commits), *(segment.last for segment in segments)], default=-1)
    begun = max((start.first_seq for start in lineage.starts.values()), default=0)
    return Found(
        lineage=lineage,
        commits=commits,
        newest=newest(objects, lineage, commits),
        next_seq=max(highest + 1, begun),
    )


def _claim_next(objects: Objects, owner: Owner, lease_time: float, wait: Callable[[float], object]) -> Attempt:
    while True:
        lineage = read_lineage(objects)
        if lineage.last and lineage.last not in lineage.ended:
            _check_gone(objects, lineage.last, owner, lease_time, wait)
        number = lineage.last + 1
        try:
            objects.create(claim_key(number), encode({"format": FORMAT, "claimed": time.time(), **asdict(owner)}))
        except ObjectExistsError:
            found = _owner(objects.read(claim_key(number)), claim_key(number))
            if found is None or found.nonce != owner.nonce:
                continue  # lost the race: look again, and find its winner alive
        _open_here.add(owner.nonce)
        _close_unstarted(objects, lineage)
        return Attempt(objects=objects, number=number, nonce=owner.nonce)


def _close_unstarted(objects: Objects, lineage: Lineage) -> None:
    """Take the place of the start objects that replaced drivers have not made.

    One that wakes up between its claim and its start would else begin from a listing older than ours, and so supersede
    commits that we go on from. Create lets one of the two win; if it is theirs, it is there before we look.
    """
    for attempt in set(lineage.claimed) - lineage.starts.keys() - lineage.void:
        with suppress(ObjectExistsError):
            objects.create(start_key(attempt), encode({"format": FORMAT, "void": True}))


def _check_gone(
    objects: Objects, attempt: int, newcomer: Owner, lease_time: float, wait: Callable[[float], object]
) -> None:
    """Raise `RunBusyError` unless the owner of `attempt` is gone: known to be, or silent for a whole lease time."""
    owner = _owner(objects.read(claim_key(attempt)), claim_key(attempt))
    if owner is not None and owner.is_gone(newcomer):
        return
    if owner is not None:
        lease_time = max(lease_time, owner.lease_time)
    logger.warning(
        "%s: attempt %d (%s) has not ended; watching it for a sign of life for up to %.0f s",
        objects.uri, attempt, owner, lease_time,
    )  # fmt: skip
    seen, deadline = _lease(objects, attempt), time.monotonic() + lease_time
    while (left := deadline - time.monotonic()) > 0:
        wait(min(left, lease_time / 30))
        if attempt in read_lineage(objects).ended:
            return
        if _lease(objects, attempt) != seen:
            raise RunBusyError(
                f"{objects.uri} is owned by attempt {attempt} ({owner}), which is alive: "
                "stop it first, or give this run another name"
            )


def _lease(objects: Objects, attempt: int) -> bytes | None:
    """The last sign of life, if there was any."""
    try:
        return objects.read(lease_key(attempt))
    except ObjectNotFoundError:
        return None


def _owner(body: bytes, where: str) -> Owner | None:
    try:
        found = decode_object(body, where)
        return Owner(**{key: found[key] for key in Owner.__dataclass_fields__ if key in found or key != "lease_time"})
    except (FormatError, KeyError, TypeError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def enforces_create(objects: Objects) -> bool:
    """Whether the store refuses to `create` what exists; found out on a throw-away object.

    Some gateways accept the condition and ignore it (rclone's does): there a single driver cannot be enforced.
    """
    key = f"attempts/probe-{uuid.uuid4().hex}"
    try:
        _create_probe(objects, key)
        objects.create(key, b"2")
    except ObjectExistsError:
        return True
    finally:
        objects.delete([key])
    return False


def _create_probe(objects: Objects, key: str) -> None:
    with suppress(ObjectExistsError):  # ours, from a try whose answer got lost
        objects.create(key, b"1")


@dataclass(frozen=True, slots=True)
class LooksFirst:
    """Objects of a store that ignores the condition of `create`.

    It looks first, which narrows the race and keeps one process right, and no more.
    """

    inner: Objects

    @property
    def uri(self) -> str:
        """See `Objects`."""
        return self.inner.uri

    def create(self, key: str, data: bytes) -> None:
        """Look, then create."""
        if any(entry.key == key for entry in self.inner.list(key)):
            raise ObjectExistsError(f"create {join_uri(self.uri, key)}: it exists")
        self.inner.create(key, data)

    def write(self, key: str, data: bytes) -> None:
        """See `Objects`."""
        self.inner.write(key, data)

    def read(self, key: str) -> bytes:
        """See `Objects`."""
        return self.inner.read(key)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Objects`."""
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Objects`."""
        self.inner.delete(keys)


def owner_details(objects: Objects, attempt: int) -> dict[str, Any]:
    """The claim of an attempt, for people."""
    return decode_object(objects.read(claim_key(attempt)), join_uri(objects.uri, claim_key(attempt)))
