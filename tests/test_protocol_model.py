"""An exhaustive model of owners and newcomers of one run: the real protocol code, every interleaving of its storage calls.

Each actor runs real code in a thread of its own, over a wrapped in-memory store in which only the scheduler lets a call
happen. A schedule is replayed from the start for every choice that was not tried yet, until none is left. Of schedules
that differ in the order of independent calls only, one is run ("sleep sets"; Godefroid 1996): every state is still visited.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

import ckpt._memory
import ckpt.attempts
import ckpt.collecting
import ckpt.commits
import ckpt.history
import ckpt.publishing
import ckpt.reading
from ckpt import Checkpoint, KeepLast, ReportRecord, ReportState
from ckpt._json import encode
from ckpt._memory import MemoryStorage
from ckpt.adopting import adopt
from ckpt.attempts import Attempt, Chosen, Found, Owner, begin, claim, look
from ckpt.commits import Lineage, Start, list_commits, newest, newest_of_living, read_commit, read_lineage
from ckpt.errors import CommittedError, FencedError, ObjectExistsError
from ckpt.history import History
from ckpt.inflight import Live
from ckpt.layout import FORMAT, CommitId, claim_key, location_of, start_key
from ckpt.manifest import FileEntry, Manifest, Tombstone
from ckpt.publishing import Pruner, Publisher, Retention
from ckpt.slots import UploadSlots
from ckpt.storage import Storage
from ckpt.testing import WrappedStorage

pytestmark = pytest.mark.slow

DEADLINE = 30.0
"""Seconds that an actor or the scheduler waits for the other before the test fails."""
WRITES = {"create", "write", "delete", "upload"}
NAMES = ("owner", "second", "third")


class ViolationError(AssertionError):
    """An interleaving broke an invariant."""


# ------------------------------------------------------------------------------------------------------ the scheduler


Call = tuple[str, str]
"""Verb and key."""


def _taken() -> threading.Lock:
    """A lock as a binary semaphore that starts at 0: much faster than `threading.Semaphore`, and there are many steps."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True)
class Actor:
    """One thread whose storage calls the scheduler lets happen one by one."""

    name: str
    act: Callable[[], None]
    call: Call | None = None
    """What it will do next; None: it is done."""
    error: BaseException | None = None
    go: threading.Lock = field(default_factory=_taken)
    back: threading.Lock = field(default_factory=_taken)

    def start(self) -> None:
        threading.Thread(target=self._run, name=self.name, daemon=True).start()
        self._wait()

    def step(self) -> None:
        """Let its next call happen, and all that follows up to the one after."""
        self.go.release()
        self._wait()

    def pause(self, call: Call) -> None:
        """Called by the actor itself: wait for the scheduler."""
        self.call = call
        self.back.release()
        assert self.go.acquire(timeout=DEADLINE), f"{self.name} was never let go on"

    def _wait(self) -> None:
        assert self.back.acquire(timeout=DEADLINE), f"{self.name} does not come back"

    def _run(self) -> None:
        try:
            self.act()
        except BaseException as error:
            self.error = error
        self.call = None
        self.back.release()


def independent(one: Call, other: Call) -> bool:
    """Whether the order of two calls of different actors can make no difference, to them or to any reader."""
    (verb, key), (other_verb, other_key) = one, other
    if verb not in WRITES and other_verb not in WRITES:
        return True
    if verb in WRITES and other_verb in WRITES and _shape_rows(key) and _shape_rows(other_key):
        return False  # which of two rows of one report a reader sees depends on both
    if verb == "list":
        return not other_key.startswith(key)
    if other_verb == "list":
        return not key.startswith(other_key)
    return key != other_key


def _shape_rows(key: str) -> bool:
    return key.startswith("history/") or key.endswith(".start.json")


class Scheduled(WrappedStorage):
    """A store in which one actor's calls wait for the scheduler."""

    actor: Actor | None = None

    def around(self, verb, key, work, progress=None):
        if self.actor is not None:
            self.actor.pause((verb, key))
        return work()


@dataclass(slots=True)
class World:
    """One replay: a store, its actors, and what they said about it."""

    raw: MemoryStorage
    actors: list[Actor] = field(default_factory=list)
    acked: list[CommitId] = field(default_factory=list)
    """Commits that were acknowledged, in that order."""
    given_up: list[CommitId] = field(default_factory=list)
    """Reports that somebody was told are given up."""
    started: dict[int, tuple[Start, Found]] = field(default_factory=dict)
    rows: dict[int, ReportState] = field(default_factory=dict)
    """What the history last showed."""
    checks: list[Callable[[], None]] = field(default_factory=list)
    """Run at the end of each interleaving."""

    def storage(self) -> Scheduled:
        return Scheduled(self.raw)

    def add(self, name: str, storage: Scheduled, act: Callable[[], None]) -> None:
        storage.actor = Actor(name, act)
        self.actors.append(storage.actor)


Scenario = Callable[[World], None]


@dataclass(slots=True)
class Node:
    """One choice of the schedule."""

    pending: dict[int, Call]
    """The next call of each actor that is not done."""
    asleep: set[int]
    """Actors whose call was tried before a sibling that it is independent of: the same states, by another way."""
    current: int = -1

    def choose(self) -> bool:
        """Turn to the next choice that leads somewhere new; False if there is none."""
        if self.current >= 0:
            self.asleep.add(self.current)
        left = [actor for actor in self.pending if actor not in self.asleep]
        self.current = left[0] if left else -1
        return bool(left)

    def asleep_below(self) -> set[int]:
        chosen = self.pending[self.current]
        return {actor for actor in self.asleep if independent(self.pending[actor], chosen)}


def explore(scenario: Scenario) -> int:
    """Try every interleaving, of those that differ only in the order of independent calls one; every state is visited.

    Returns:
        How many were run to their ends.

    Raises:
        ViolationError: one of them broke an invariant; the message has the schedule.
    """
    stack: list[Node] = []
    ended = 0
    while True:
        ended += _replay(scenario, stack)
        while stack and not stack[-1].choose():
            stack.pop()
        if not stack:
            return ended


def _replay(scenario: Scenario, stack: list[Node]) -> bool:
    """Follow the stack's choices, then go on to an end, or to where everything left was seen already (False)."""
    world = World(MemoryStorage("memory://model"))
    _wipe()
    scenario(world)
    known = len(stack)
    for actor in world.actors:
        actor.start()
    try:
        world.rows = check_readers(world)
        for depth in itertools.count():
            pending = {index: actor.call for index, actor in enumerate(world.actors) if actor.call is not None}
            if not pending:
                check_end(world)
                return True
            if depth == len(stack):
                stack.append(Node(pending, stack[-1].asleep_below() if stack else set()))
                if not stack[-1].choose():
                    return False
            _step(world, stack[depth], check=depth >= known - 1)
        raise AssertionError
    except AssertionError as error:
        said = "\n".join(
            f"  {world.actors[node.current].name}: {' '.join(node.pending[node.current])}" for node in stack
        )
        raise ViolationError(f"{error}\nin the schedule\n{said}") from error
    finally:
        _let_all_end(world)


def _step(world: World, node: Node, *, check: bool) -> None:
    said = len(world.acked), len(world.given_up)
    world.actors[node.current].step()
    verb, key = node.pending[node.current]
    changed = verb in WRITES or said != (len(world.acked), len(world.given_up))
    if check and changed:
        world.rows = check_readers(world)
    elif changed and _shape_rows(key):
        world.rows = _rows(world)


def _let_all_end(world: World) -> None:
    for actor in world.actors:
        while actor.call is not None:
            actor.step()


def _wipe() -> None:
    ckpt._memory._objects.clear()


# ------------------------------------------------------------------------------------------------------ the invariants


def check_readers(world: World) -> dict[int, ReportState]:
    """What must hold at every moment, for any reader."""
    commits, lineage, rows = list_commits(world.raw), read_lineage(world.raw), _rows(world)
    check_acknowledged(world, lineage)
    found = newest(world.raw, lineage, commits)
    last = max((commit.seq for commit in world.acked), default=-1)
    assert found is not None or not world.acked, f"{world.acked} were acknowledged and the run looks empty"
    assert found is None or found.seq >= last, f"{last} was acknowledged and the newest is {found.id}"
    present = {entry.key for entry in world.raw.list("checkpoints/")}
    for there in [there for commit in commits if isinstance(there := read_commit(world.raw, commit), Manifest)]:
        counts = lineage.counts(there.id)
        published = (
            rows.get(there.seq) is ReportState.COMMITTED and sum(other.seq == there.seq for other in commits) == 1
        )
        assert counts or not published, f"{there.id} is published as committed and does not count"
        assert f"{there.location}/w" in present or not counts, f"{there.id} is committed and its files are gone"
    for seq, state in world.rows.items():
        assert rows.get(seq) == state, f"the published row {seq} was {state} and is {rows.get(seq)}"
    return rows


def check_acknowledged(world: World, lineage: Lineage) -> None:
    """What was said to be committed stays so; what was given up is never committed."""
    assert len({commit.seq for commit in world.acked}) == len(world.acked), f"one seq acknowledged twice: {world.acked}"
    rows = _rows(world)
    for commit in world.acked:
        there = read_commit(world.raw, commit)
        newer = any(other.seq > commit.seq for other in world.acked)
        assert not isinstance(there, Tombstone), f"{commit} was acknowledged and is a tombstone"
        assert there is not None or newer, f"{commit} was acknowledged and is gone, with no newer one acknowledged"
        assert there is None or lineage.counts(commit), f"{commit} was acknowledged and does not count"
        assert rows.get(commit.seq, ReportState.COMMITTED) is ReportState.COMMITTED, f"{commit}: row {rows[commit.seq]}"
    for commit in world.given_up:
        assert not isinstance(read_commit(world.raw, commit), Manifest), f"{commit} was given up and is committed"


def _rows(world: World) -> dict[int, ReportState]:
    history = History(objects=world.raw, refer=_refer, lineage=read_lineage(world.raw))
    return {row.seq: row.state for row in history}


def check_end(world: World) -> None:
    """What must hold when everybody is done."""
    for actor in world.actors:
        assert actor.error is None, f"{actor.name} raised {actor.error!r}"
    for number, (start, found) in world.started.items():
        older = [commit for commit in world.acked if commit.attempt < number]
        for commit in older:
            assert commit in found.commits or read_commit(world.raw, commit) is None, (
                f"attempt {number} never saw {commit}"
            )
        if older:
            assert start.resumed_from is not None, f"attempt {number} began from scratch beside {older}"
            assert start.resumed_from.seq >= max(older).seq, f"attempt {number} resumed from {start.resumed_from}"
    lineage = read_lineage(world.raw)
    history = list(History(objects=world.raw, refer=_refer, lineage=lineage))
    if world.started:
        last = max(world.started)
        assert [row.seq for row in history if row.seq < world.started[last][0].first_seq] == list(
            range(world.started[last][0].first_seq)
        ), f"rows are missing or double: {[row.seq for row in history]}"
    for row in history:
        there = read_commit(world.raw, CommitId(row.seq, row.attempt))
        if isinstance(there, Manifest):
            assert row.state is ReportState.COMMITTED, f"report {row.seq} is committed and its row says {row.state}"
        elif isinstance(there, Tombstone):
            assert row.state.value == there.state, f"report {row.seq} is {there.state} and its row says {row.state}"
    for check in world.checks:
        check()


# ---------------------------------------------------------------------------------------------------------- the actors


def _refer(uri: str, commit_uri: str | None = None) -> Checkpoint:
    return Checkpoint(uri, commit_uri=commit_uri)


def _manifest(seq: int, attempt: int) -> Manifest:
    return Manifest(
        seq=seq, attempt=attempt, name=f"c{seq}", location=location_of(f"c{seq}", attempt),
        files=(FileEntry(path="w", size=1),), nonce=f"{seq}.{attempt}",
    )  # fmt: skip


def _dead(nonce: str) -> Owner:
    """An owner whom every newcomer knows to be gone, although the model lets it live on."""
    return Owner(nonce=nonce, pid=1, started=-1 - NAMES.index(nonce))


def _latest(found: Found) -> Chosen | None:
    return None if found.newest is None else Chosen(commit=found.newest.id)


def _publisher(storage: Storage, attempt: Attempt, start: Start) -> Publisher:
    retention = Retention(policy=KeepLast(1))
    return Publisher(run="model", storage=storage, attempt=attempt, start=start, retention=retention, refer=_refer)


def _record(publisher: Publisher, manifest: Manifest, state: ReportState = ReportState.COMMITTED) -> ReportRecord:
    checkpoint = publisher.reference(manifest) if state is ReportState.COMMITTED else None
    return ReportRecord(
        seq=manifest.seq, attempt=manifest.attempt, name=manifest.name, state=state, metrics={}, checkpoint=checkpoint
    )


def _upload(world: World, attempt: Attempt, manifest: Manifest) -> ReportState:
    """What an upload does at its end: files, commit, fence check; and what it says then."""
    attempt.objects.write(f"{manifest.location}/w", b"w")
    try:
        attempt.commit(manifest)
    except FencedError:
        return ReportState.FENCED
    except CommittedError:
        return ReportState.FAILED
    world.acked.append(manifest.id)
    return ReportState.COMMITTED


def _own_first(world: World, storage: Scheduled) -> tuple[Attempt, Start]:
    """Attempt 1, which has committed and published report 0 already; nobody else is there yet."""
    attempt, start, _ = claim(storage, _dead("owner"), _latest)
    return attempt, start


def owner(world: World, *committing: int, published: bool = True, metrics_only: int | None = None) -> None:
    """Attempt 1: report 0 is out; the uploads of `committing` end in that order; all are published by seq, and pruned."""
    storage = world.storage()
    attempt, start = _own_first(world, storage)
    publisher = _publisher(storage, attempt, start)
    first = _manifest(0, 1)
    if published:
        _upload(world, attempt, first)
        publisher.publish(_record(publisher, first))

    def act() -> None:
        states = {seq: _upload(world, attempt, _manifest(seq, 1)) for seq in committing}
        for seq in sorted(states):
            publisher.publish(_record(publisher, _manifest(seq, 1), states[seq]))

    world.add("owner", storage, act)


def newcomer(world: World, name: str = "second", *, own: int = 1) -> None:
    """The attempt after: claims, adopts, reads what it resumed from, makes `own` commits, and prunes."""
    storage = world.storage()

    def act() -> None:
        try:
            attempt, start, found = claim(storage, _dead(name), _latest)
            goes_on(world, storage, attempt, start, found, own)
        except FencedError:
            return

    world.add(name, storage, act)


def goes_on(world: World, storage: Scheduled, attempt: Attempt, start: Start, found: Found, own: int) -> None:
    """What an attempt does after its claim."""
    world.started[attempt.number] = (start, found)
    publisher = _publisher(storage, attempt, start)
    adopt(publisher, Live(storage=storage, attempt=attempt, slots=UploadSlots(1, 1)), found, start.first_seq)
    if start.resumed_from is not None:
        restored = read_commit(storage, start.resumed_from)
        assert isinstance(restored, Manifest), (
            f"{start.resumed_from}, which attempt {attempt.number} resumed from, is gone"
        )
        storage.read(f"{restored.location}/w")
    for seq in range(start.first_seq, start.first_seq + own):
        manifest = _manifest(seq, attempt.number)
        publisher.publish(_record(publisher, manifest, _upload(world, attempt, manifest)))


@pytest.fixture(autouse=True)
def _step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish and prune at once and on the actor's own thread, so that each actor is one sequence of calls."""
    monkeypatch.setattr(ckpt.publishing, "FLUSH_INTERVAL", 0.0)
    for module in (ckpt.commits, ckpt.history, ckpt.collecting):
        monkeypatch.setattr(module, "READERS", 1)

    def prune(self: Pruner, commit: CommitId, record: ReportRecord) -> None:
        self._todo.append((commit, record))
        self._run()

    monkeypatch.setattr(Pruner, "prune", prune)


# ------------------------------------------------------------------------------------------------------------ the tests


def test_a_commit_races_with_a_takeover() -> None:
    """The owner's commit is either in the newcomer's listing or never acknowledged."""

    def scenario(world: World) -> None:
        owner(world, 0, published=False)
        newcomer(world)

    print("interleavings:", explore(scenario))


def test_retention_races_with_a_takeover() -> None:
    """What a newcomer resumes from is never pruned by the owner it replaces."""

    def scenario(world: World) -> None:
        owner(world, 1)
        newcomer(world, own=1)

    print("interleavings:", explore(scenario))


def test_two_uploads_of_which_the_second_commits_first() -> None:
    """A report that ends after a newer one is committed, adopted, or lost, and everybody says the same."""

    def scenario(world: World) -> None:
        owner(world, 1, 0, published=False)
        newcomer(world, own=1)

    print("interleavings:", explore(scenario))


def test_a_claim_that_never_started_wakes_up() -> None:
    """A driver that is replaced between its claim and its start changes nothing for the one that replaced it."""
    print("interleavings:", explore(_woken_claim))


def _woken_claim(world: World) -> None:
    owner(world, 0, published=False)
    slow = world.storage()
    pause, resume = _held_claim(world, slow)
    world.add("second", slow, resume)
    newcomer(world, "third", own=0)
    pause()


def test_garbage_collection_races_with_an_upload_that_wakes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it removes cannot be committed any more: an upload of an old driver finds its place taken."""
    print("interleavings:", explore(_collection(monkeypatch)))


def _collection(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.setattr(ckpt.collecting, "Owner", lambda: _dead("second"))

    def scenario(world: World) -> None:
        owner(world, 1, 0, published=False)
        storage = world.storage()
        world.raw.create("run.json", b"{}")
        monkeypatch.setattr(ckpt.reading, "open_storage", lambda *args, **kwargs: storage)
        world.add("second", storage, lambda: ckpt.collecting.collect(world.raw.uri) and None)

    return scenario


def _held_claim(world: World, storage: Scheduled) -> tuple[Callable[[], None], Callable[[], None]]:
    """A newcomer that has claimed already when the model begins, and does the rest as the scheduler says."""
    holder: dict[str, Attempt] = {}

    def pause() -> None:
        body = encode({"format": FORMAT, "claimed": 0.0, **_details(_dead("second"))})
        world.raw.create(claim_key(2), body)
        holder["attempt"] = Attempt(objects=storage, number=2, nonce="second")

    def resume() -> None:
        with suppress(FencedError):
            begin(holder["attempt"], _latest)

    return pause, resume


def _details(who: Owner) -> dict[str, object]:
    return {name: getattr(who, name) for name in Owner.__dataclass_fields__}


def test_giving_up_races_with_the_commit_and_a_takeover() -> None:
    """Of a tombstone and a commit one wins, and the owner, the newcomer and every reader agree which."""

    def scenario(world: World) -> None:
        storage, gathering = world.storage(), world.storage()
        attempt, _ = _own_first(world, storage)
        world.add("owner", storage, lambda: _upload(world, attempt, _manifest(0, 1)) and None)
        world.add("gathering", gathering, lambda: _give_up(world, replace(attempt, objects=gathering), 0))
        newcomer(world, own=0)

    print("interleavings:", explore(scenario))


def _give_up(world: World, attempt: Attempt, seq: int) -> None:
    tombstone = Tombstone(seq=seq, attempt=1, name="", state="failed", reason="deadline")
    if attempt.give_up(tombstone) is tombstone:
        world.given_up.append(tombstone.id)


def test_a_reader_beside_retention_always_finds_a_checkpoint() -> None:
    """`@latest` during the owner's pruning gives one of the two, and never says that the run is empty."""

    def scenario(world: World) -> None:
        owner(world, 1)
        storage = world.storage()
        seen: list[int | None] = []

        def act() -> None:
            commits = list_commits(storage)
            found, *_ = newest_of_living(storage, read_lineage(storage), commits)
            seen.append(found and found.seq)

        world.add("reader", storage, act)
        world.checks.append(lambda: _assert_in(seen, [[0], [1]]))

    print("interleavings:", explore(scenario))


def _assert_in(value: object, allowed: list[object]) -> None:
    assert value in allowed, f"{value} is none of {allowed}"


# ----------------------------------------------------------------------------- controls: the model finds what is wrong


def test_listing_before_claiming_is_caught() -> None:
    """The wrong order, looking first and claiming then, breaks an invariant in some interleaving."""

    def wrong(world: World) -> None:
        storage = world.storage()

        def act() -> None:
            found = look(storage)
            with suppress(ObjectExistsError):
                storage.create(claim_key(2), b"{}")
            start = Start(attempt=2, first_seq=found.next_seq, resumed_from=found.newest and found.newest.id)
            storage.create(start_key(2), encode({"format": FORMAT, **start.to_json()}))
            goes_on(world, storage, Attempt(objects=storage, number=2), start, found, 0)

        world.add("second", storage, act)

    def scenario(world: World) -> None:
        owner(world, 1)
        wrong(world)

    with pytest.raises(ViolationError) as caught:
        explore(scenario)
    print(caught.value)


def test_a_start_object_left_open_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that does not take the place of unstarted attempts goes on from what one of them supersedes."""
    monkeypatch.setattr(ckpt.attempts, "_close_unstarted", lambda objects, lineage: None)
    with pytest.raises(ViolationError, match="is published as committed and does not count"):
        explore(_woken_claim)


def test_collecting_without_settling_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose report is still open may be committed after they were removed."""
    monkeypatch.setattr(ckpt.collecting, "settle", lambda *args: None)
    with pytest.raises(ViolationError, match="is committed and its files are gone"):
        explore(_collection(monkeypatch))


def test_acknowledging_without_a_fence_check_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that does not look for a newer claim acknowledges what nobody will ever see."""
    monkeypatch.setattr(Attempt, "check_fence", lambda self: None)

    def scenario(world: World) -> None:
        owner(world, 1)
        newcomer(world)

    with pytest.raises(ViolationError) as caught:
        explore(scenario)
    print(caught.value)
