"""One driver at a time, between real processes: who is refused, who takes over, and that a replaced one changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, eventually

from ckpt import Result, committed, open_storage, resolve
from ckpt.collecting import collect
from ckpt.errors import RunBusyError
from ckpt.verifying import verify

sys.path.insert(0, str(Path(__file__).parent))  # beside this file, not in tests/: they are programs of their own
from little_training import KEPT, contents, metrics_of

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("driven.py")
PATIENT = 60.0
"""A lease time so long that a test which waited for it would fail."""
SHORT = 2.0
"""A lease time that a test may wait for."""


class Driver:
    """A process of driven.py."""

    def __init__(self, storage: str, folder: Path, env: Mapping[str, str], lease_time: float) -> None:
        self.log = folder / f"driver-{uuid.uuid4().hex[:8]}.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), storage, str(lease_time)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, env={**os.environ, **env}, bufsize=0,
            )  # fmt: skip
        self.pid = self.process.pid

    def tell(self, **command: Any) -> None:
        """Put a command into its pipe."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Its next answer; `ended` if there is none any more."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"ended": self.process.wait(DEADLINE)}

    def ask(self, **command: Any) -> dict[str, Any]:
        """Command and answer."""
        self.tell(**command)
        return self.hear()

    def begin(self) -> dict[str, Any]:
        """Have it open the run; it is training, or refused."""
        assert self.hear() == {"ready": True}
        return self.ask(begin=True)

    def report(self, epoch: int) -> dict[str, Any]:
        """Report an epoch and wait until it is final."""
        return self.ask(wait=self.ask(report=epoch)["reported"])

    def gated(self, epoch: int, gate: Path) -> Path:
        """Report an epoch whose upload has arrived and waits for `gate`; gives its local directory."""
        os.mkfifo(gate)
        self.tell(report=epoch, gate=str(gate))
        answers = [self.hear(), self.hear()]
        return Path(next(answer["local"] for answer in answers if "local" in answer))

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0], lambda state: state == "T")

    def wake(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def leave(self) -> int:
        """Have it leave the block; its exit code."""
        self.tell(leave=True)
        return self.process.wait(DEADLINE)

    def end(self) -> None:
        """Whatever it does, it is gone after this."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


Start = Callable[..., Driver]


@pytest.fixture(params=["local", "moto", pytest.param("ceph", marks=pytest.mark.ceph)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A storage path on each store that enforces a single driver; the environment leads there."""
    return _place(request.param, request, tmp_path, monkeypatch)


@pytest.fixture
def rclone_place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A storage path on one that does not."""
    return _place("rclone", request, tmp_path, monkeypatch)


def _place(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if kind == "local":
        return str(tmp_path / "runs")
    server = request.getfixturevalue(f"{kind}_server")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    bucket = f"ckpt-{uuid.uuid4().hex[:12]}"
    server.client().create_bucket(Bucket=bucket)
    return f"s3://{bucket}/runs"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts drivers of one run, on one machine with one temporary folder; none of them outlives the test."""
    drivers: list[Driver] = []
    (tmp_path / "tmp").mkdir()

    def one(storage: str, lease_time: float = PATIENT) -> Driver:
        drivers.append(Driver(storage, tmp_path, {"TMPDIR": str(tmp_path / "tmp")}, lease_time))
        return drivers[-1]

    yield one
    for driver in drivers:
        driver.end()


def _open_gate(gate: Path) -> None:
    gate.write_bytes(b"")


def _stops(driver: Driver) -> None:
    """A report raises, at the latest the one after it found out; the process ends with an error."""
    answer = eventually(lambda: driver.ask(report=9), lambda answer: "reported" not in answer)
    assert answer["error"] == "FencedError"
    assert driver.hear()["ended"] != 0


def _keys(storage: str) -> dict[str, bytes]:
    store = open_storage(f"{storage}/run")
    return {entry.key: store.read(entry.key) for entry in store.list() if not entry.key.endswith(".lease")}


def _locations(storage: str) -> set[str]:
    return {entry.key.split("/")[1] for entry in open_storage(f"{storage}/run").list("checkpoints/")}


def _retained(epochs: int) -> list[int]:
    """The epochs whose checkpoints stay."""
    best = sorted(range(epochs), key=lambda epoch: (metrics_of(epoch)["score"], epoch))[-KEPT:]
    return sorted({*best, epochs - 1})


def _visible(storage: str) -> list[tuple[int, int, int]]:
    """(seq, attempt, epoch) of every checkpoint that a reader sees."""
    seen = committed(f"{storage}/run")
    return [(checkpoint.seq, checkpoint.manifest.attempt, checkpoint.metrics["epoch"]) for checkpoint in seen]


def _rows(storage: str) -> list[tuple[int, int, str]]:
    """(seq, attempt, state) of the published history."""
    return [(row.seq, row.attempt, row.state.value) for row in Result.from_path(f"{storage}/run").history]


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_of_eight_drivers_at_once_one_trains(place, start):
    """The others are refused, and told who has the run."""
    drivers = [start(place, lease_time=6.0) for _ in range(8)]
    for driver in drivers:
        assert driver.hear() == {"ready": True}
    for driver in drivers:
        driver.tell(begin=True)
    answers = {driver: driver.hear() for driver in drivers}
    [winner] = [driver for driver, answer in answers.items() if "training" in answer]
    assert answers.pop(winner) == {"training": 1, "first_seq": 0, "resumed": None}
    for driver, answer in answers.items():
        assert answer["error"] == "RunBusyError"
        assert f"attempt 1 (process {winner.pid} of " in answer["text"]
        assert driver.process.wait(DEADLINE) != 0
    assert winner.report(0)["final"] == "committed"
    assert winner.leave() == 0
    assert _visible(place) == [(0, 1, 0)]


def test_the_restart_of_a_killed_owner_takes_over_at_once(place, start):
    """It does not wait for a lease of a minute: the machine knows that the owner is dead."""
    first = start(place)
    assert first.begin()["training"] == 1
    assert first.report(0)["final"] == "committed"
    first.process.kill()
    first.process.wait()
    second = start(place)
    began = time.monotonic()
    assert second.begin() == {"training": 2, "first_seq": 1, "resumed": 0}
    assert time.monotonic() - began < PATIENT / 2
    assert second.leave() == 0


def test_a_stopped_owner_that_wakes_up_changes_nothing(place, start, tmp_path):
    """Its two uploads under way are FENCED with the local files kept, nothing of it shows or is deleted, and it ends red."""
    old, gates = start(place, SHORT), [tmp_path / "gate-1", tmp_path / "gate-2"]
    assert old.begin()["training"] == 1
    assert old.report(0)["final"] == "committed"
    local = [old.gated(1, gates[0]), old.gated(2, gates[1])]
    assert old.ask(report=3) == {"reported": 3}  # waits for a slot: the gated ones have both
    old.freeze()

    new = start(place, SHORT)
    assert new.begin() == {"training": 2, "first_seq": 1, "resumed": 0}
    assert [new.report(epoch)["final"] for epoch in (1, 2, 3)] == ["committed"] * 3
    visible = eventually(lambda: _visible(place), lambda seen: [epoch for *_, epoch in seen] == _retained(4))
    assert {attempt for seq, attempt, _ in visible if seq} == {2}
    theirs = {f"checkpoint_{seq:06d}-a{attempt}" for seq, attempt, _ in visible}
    eventually(
        lambda: _locations(place) - theirs, lambda others: others <= {f"checkpoint_00000{seq}-a1" for seq in (1, 2)}
    )
    before = _keys(place)

    old.wake()
    for gate in gates:
        _open_gate(gate)
    for seq in (1, 2, 3):
        answer = old.ask(wait=seq)
        assert answer["final"] == "fenced"
        assert f"was replaced by attempt 2 (process {new.pid} of " in answer["reason"]
        if seq < 3:
            assert _files(local[seq - 1]) == contents(seq)
        else:
            kept = Path(answer["reason"].rpartition("kept at ")[2].rstrip(")"))
            assert _files(kept) == contents(3)
    _stops(old)

    after = _keys(place)
    assert {key for key in before if after.get(key) != before[key]} == set()
    made = {key for key in after if key not in before and not key.startswith("history/a2-")}
    made.remove("attempts/0001.end.json")
    assert all(key.startswith(("commits/", "checkpoints/")) and ("-a1/" in key or ".a1." in key) for key in made)
    assert _visible(place) == visible
    assert all(verify(checkpoint).ok for checkpoint in committed(f"{place}/run"))
    assert new.report(4)["final"] == "committed"
    assert new.leave() == 0
    assert _rows(place) == [(0, 1, "committed")] + [(seq, 2, "committed") for seq in (1, 2, 3, 4)]
    assert resolve(f"{place}/run").seq == 4


def test_a_late_commit_of_a_report_that_was_given_up_is_fenced(place, start, tmp_path):
    """The newcomer has written it off as LOST, and adopted what came after it; the local files are kept."""
    old, gate = start(place, SHORT), tmp_path / "gate"
    assert old.begin()["training"] == 1
    local = old.gated(0, gate)
    assert old.report(1)["final"] == "committed"
    old.freeze()

    new = start(place, SHORT)
    assert new.begin() == {"training": 2, "first_seq": 2, "resumed": 1}
    old.wake()
    _open_gate(gate)
    answer = old.ask(wait=0)
    assert answer["final"] == "fenced"
    assert _files(local) == contents(0)
    _stops(old)
    assert new.leave() == 0
    assert _visible(place) == [(1, 1, 1)]
    assert _rows(place) == [(0, 1, "lost"), (1, 1, "committed")]


def test_a_stopped_owner_that_only_has_to_end_does_not_end_well(place, start):
    """It has nothing to report any more; that the run is somebody else's now still shows in its exit code."""
    old = start(place, SHORT)
    assert old.begin()["training"] == 1
    assert old.report(0)["final"] == "committed"
    old.freeze()
    new = start(place, SHORT)
    assert new.begin()["training"] == 2
    old.wake()
    assert old.leave() != 0
    assert old.hear()["error"] == "FencedError"
    assert new.leave() == 0
    assert Result.from_path(f"{place}/run").history[0].attempt == 1


def test_collecting_beside_a_stopped_owner_claims_first(place, start, tmp_path):
    """It takes the files of the upload under way, because that can never be committed any more: it is FENCED."""
    old, gate = start(place, SHORT), tmp_path / "gate"
    assert old.begin()["training"] == 1
    assert old.report(0)["final"] == "committed"
    local = old.gated(1, gate)
    old.freeze()
    found = collect(f"{place}/run", lease_time=SHORT)
    assert found.files == len(contents(1))
    assert [Path(location).name for location in found.locations] == ["checkpoint_000001-a1"]
    before = _keys(place)
    assert "attempts/0002.json" in before

    old.wake()
    _open_gate(gate)
    answer = old.ask(wait=1)
    assert answer["final"] == "fenced"
    assert _files(local) == contents(1)
    _stops(old)
    after = _keys(place)
    assert {key: after.get(key) for key in before} == before
    assert _visible(place) == [(0, 1, 0)]

    third = start(place)
    assert third.begin()["resumed"] == 0
    assert third.leave() == 0


def test_collecting_beside_a_living_owner_is_refused(place, start):
    """It is named, and goes on undisturbed."""
    owner = start(place, SHORT)
    assert owner.begin()["training"] == 1
    with pytest.raises(RunBusyError, match=f"process {owner.pid} of "):
        collect(f"{place}/run", lease_time=PATIENT)
    assert owner.report(0)["final"] == "committed"
    assert owner.leave() == 0


def test_where_a_single_driver_cannot_be_enforced_it_is_said(rclone_place, start):
    """One driver is right there, and a second that comes later is refused all the same."""
    owner = start(rclone_place, lease_time=6.0)
    assert owner.begin()["training"] == 1
    assert "cannot be enforced" in owner.log.read_text()
    second = start(rclone_place, lease_time=6.0)
    assert second.begin()["error"] == "RunBusyError"
    assert [owner.report(epoch)["final"] for epoch in (0, 1)] == ["committed"] * 2
    owner.process.kill()
    owner.process.wait()
    third = start(rclone_place)
    assert third.begin() == {"training": 2, "first_seq": 2, "resumed": 1}
    assert third.report(2)["final"] == "committed"
    assert third.leave() == 0
    assert _rows(rclone_place) == [(0, 1, "committed"), (1, 1, "committed"), (2, 2, "committed")]
