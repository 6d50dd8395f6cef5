"""Order: whatever order uploads end in, what is published is in the order of the reports, with every report in its place."""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from helpers import DEADLINE, eventually, make_checkpoint, make_config, reasons, states, storage_of

from ckpt import (
    CheckpointConsistencyMode,
    FailurePolicy,
    Report,
    ReportHandle,
    ReportRecord,
    ReportState,
    Result,
    Run,
    UploadConfig,
    open_run,
    ordering,
)
from ckpt._memory import MemoryStorage
from ckpt.attempts import Owner, claim
from ckpt.errors import ConfigError, OrderingError, UploadFailedError
from ckpt.inflight import Live
from ckpt.ordering import Reported, ReportLine, gather
from ckpt.publishing import Publisher, Retention
from ckpt.reading import open_run_files
from ckpt.slots import UploadSlots
from ckpt.storage import Storage
from ckpt.testing import FailOnceStorage, WrappedStorage

LENIENT = FailurePolicy(stop_after=None, red_on="nothing")


class Gates(WrappedStorage):
    """Holds each upload (one file per checkpoint) until the test lets that one go on, by its place in the run."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.arrived: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._gates: dict[str, threading.Event] = {}

    def around(self, verb, key, work, progress=None):
        if verb == "upload":
            gate = self._gate(key)
            self.arrived.put(key)
            assert gate.wait(DEADLINE), f"nobody opened the gate of {key}"
        return work()

    def open(self, key: str) -> None:
        self._gate(key).set()

    def _gate(self, key: str) -> threading.Event:
        return self._gates.setdefault(key, threading.Event())


def report(run: Run, folder: Path, seq: int, **metrics: object) -> ReportHandle:
    return run.report({"seq": seq, **metrics}, make_checkpoint(folder / str(seq)))


# -------------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.parametrize("seed", range(4))
def test_twelve_reports_whose_uploads_end_in_any_order_are_published_in_theirs(
    tmp_path, storage_path, wrap_storage, seed
):
    """With three slots, and any of the three running uploads ending next, rows and events are 0..11."""
    wrap_storage(Gates)
    choose, published = random.Random(seed), []
    config = make_config(storage_path, upload={"max_concurrent_uploads": 3, "max_pending": 12})
    ended: list[str] = []
    with open_run(config, observers=[lambda record: published.append(record.seq)]) as run:
        gates = storage_of(run)
        for seq in range(12):
            report(run, tmp_path, seq)
        running = [gates.arrived.get(timeout=DEADLINE) for _ in range(3)]
        while running:
            ended.append(running.pop(choose.randrange(len(running))))
            gates.open(ended[-1])
            if len(ended) + len(running) < 12:
                running.append(gates.arrived.get(timeout=DEADLINE))
    assert ended != sorted(ended), "the seed gives no disorder"
    assert published == list(range(12))
    assert [row.metrics["seq"] for row in run.result.history] == list(range(12))
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == list(range(12))
    assert run.result.checkpoint.seq == 11


def test_uploads_overlap_up_to_the_limit(tmp_path, wrap_storage):
    """With three slots, three uploads are under way at once: each waits for the two others."""
    barrier = threading.Barrier(3, timeout=DEADLINE)

    class Meeting(WrappedStorage):
        def around(self, verb, key, work, progress=None):
            if verb == "upload":
                barrier.wait()
            return work()

    wrap_storage(Meeting)
    with open_run(make_config(tmp_path / "runs", upload={"max_concurrent_uploads": 3, "max_pending": 3})) as run:
        for seq in range(3):
            report(run, tmp_path, seq)
    assert states(run.result) == ["committed"] * 3


def test_a_failure_at_the_head_of_the_line_holds_nobody_up(tmp_path, storage_path, wrap_storage):
    """The first upload fails last of all; the rest is published after it, in order, with its reason in its row."""
    wrap_storage(Gates)

    def failing(checkpoint, name):
        assert go.wait(DEADLINE)
        raise OSError("the disk is on fire")

    go = threading.Event()
    with open_run(make_config(storage_path, failure_policy=LENIENT)) as run:
        head = run.report({}, make_checkpoint(tmp_path / "0"), checkpoint_upload_fn=failing)
        rest = [report(run, tmp_path, seq) for seq in (1, 2)]
        for handle in rest:
            storage_of(run).open(storage_of(run).arrived.get(timeout=DEADLINE))
            assert handle.wait(DEADLINE).state is ReportState.COMMITTED
        assert run.publisher.published == 0
        go.set()
        assert head.wait(DEADLINE).state is ReportState.FAILED
    assert states(run.result) == ["failed", "committed", "committed"]
    assert "the disk is on fire" in reasons(run.result)[0]


def test_a_dead_upload_at_the_head_is_given_up_and_cannot_commit_any_more(tmp_path, storage_path, wrap_storage):
    """After its deadline a tombstone takes its place; when it wakes up at its commit it finds that place taken."""
    asleep, wake, refused = threading.Event(), threading.Event(), []

    class Sleeping(WrappedStorage):
        def around(self, verb, key, work, progress=None):
            if (verb, key) != ("create", "commits/000000.a1.json") or asleep.is_set():
                return work()
            asleep.set()
            assert wake.wait(DEADLINE)
            try:
                return work()
            except FileExistsError as error:
                refused.append(error)
                raise

    wrap_storage(Sleeping)
    soon = {"stall_timeout": 0.1, "retry_budget": 0.1, "limit_timeout": 0.1, "slow_upload_warning": 0.1}
    with open_run(make_config(storage_path, upload=soon, failure_policy=LENIENT)) as run:
        head = report(run, tmp_path, 0)
        assert asleep.wait(DEADLINE)
        second = report(run, tmp_path, 1)
        given_up = head.wait(DEADLINE)
        assert second.wait(DEADLINE).state is ReportState.COMMITTED
        assert run.publisher.wait_published(2, DEADLINE)
        wake.set()
    assert refused
    assert given_up.state is ReportState.FAILED
    assert "without a sign of life" in given_up.reason
    assert states(run.result) == ["failed", "committed"]
    assert [commit.seq for commit in open_run_files(run.uri).manifests()] == [1]


def test_the_death_of_the_ordering_task_is_told_at_the_next_report(tmp_path, storage_path, wrap_storage):
    """What nobody would publish is not accepted, and the run ends with the same error."""
    wrap_storage(FailOnceStorage, "create", "history/*", error=RuntimeError("a bug"), times=100)

    def train(run: Run) -> None:
        report(run, tmp_path, 0)
        assert isinstance(run._ordering.exception(DEADLINE), RuntimeError)
        with pytest.raises(OrderingError, match="a bug"):
            run.report({"loss": 1.0})

    with pytest.raises(OrderingError, match="a bug"), open_run(make_config(storage_path)) as run:
        train(run)


def test_reports_without_a_checkpoint_wait_for_nothing_but_their_place(tmp_path, storage_path, wrap_storage):
    """They are taken at once while the only upload place is taken, and published after what came before them."""
    wrap_storage(Gates)
    with open_run(make_config(storage_path, upload={"max_pending": 1, "max_concurrent_uploads": 1})) as run:
        report(run, tmp_path, 0)
        handles = [run.report({"seq": seq}) for seq in range(1, 6)]
        key = storage_of(run).arrived.get(timeout=DEADLINE)
        assert {handle.state for handle in handles} == {ReportState.SUBMITTED}
        storage_of(run).open(key)
        assert [handle.wait(DEADLINE).state for handle in handles] == [ReportState.COMMITTED] * 5
    assert [row.metrics["seq"] for row in run.result.history] == list(range(6))


# ----------------------------------------------------------------------------------------- get_all_reported_checkpoints


@pytest.mark.parametrize("mode", CheckpointConsistencyMode)
def test_all_reported_checkpoints_are_given_once_every_report_is_published(tmp_path, storage_path, wrap_storage, mode):
    """It waits for what was reported before it, and gives the retained ones in order with their metrics."""
    wrap_storage(Gates)
    with open_run(make_config(storage_path)) as run:
        report(run, tmp_path, 0)
        run.report({"seq": 1})
        report(run, tmp_path, 2)
        answer: Future[list[int]] = Future()
        asking = threading.Thread(
            target=lambda: answer.set_result(
                [item.metrics["seq"] for item in run.get_all_reported_checkpoints(mode, DEADLINE)]
            )
        )
        asking.start()
        keys = [storage_of(run).arrived.get(timeout=DEADLINE) for _ in range(2)]
        assert not answer.done()
        for key in reversed(keys):
            storage_of(run).open(key)
        assert answer.result(DEADLINE) == [0, 2]
        asking.join(DEADLINE)


def test_all_reported_checkpoints_gives_what_there_is_after_its_timeout(tmp_path, storage_path, wrap_storage, caplog):
    """As in Ray: a warning, and the checkpoints so far."""
    wrap_storage(Gates)
    with open_run(make_config(storage_path)) as run:
        first = report(run, tmp_path, 0)
        storage_of(run).open(storage_of(run).arrived.get(timeout=DEADLINE))
        first.wait(DEADLINE)
        assert run.publisher.wait_published(1, DEADLINE)
        report(run, tmp_path, 1)
        key = storage_of(run).arrived.get(timeout=DEADLINE)
        with caplog.at_level(logging.WARNING, "ckpt"):
            found = run.get_all_reported_checkpoints(timeout_s=0.01)
        storage_of(run).open(key)
        with pytest.raises(ConfigError, match="consistency_mode='latest'"):
            run.get_all_reported_checkpoints("latest")
    assert [item.checkpoint.seq for item in found] == [0]
    assert "not every report is published" in caplog.text


# --------------------------------------------------------------------------------- the law, over orders of completion


def publish_in(order: Sequence[int], failing: frozenset[int]) -> tuple[list[ReportRecord], Result]:
    """Let the real ordering publish reports whose uploads end in `order`, those of `failing` with an error."""
    storage = MemoryStorage()
    attempt, start, _ = claim(storage, Owner(), lambda _: None)
    publisher = Publisher(
        run="law", storage=storage, attempt=attempt, start=start, retention=Retention(), refer=lambda uri, commit: None
    )
    published: list[ReportRecord] = []
    publisher.observers.append(published.append)
    line = ReportLine(publisher, Live(storage=storage, attempt=attempt, slots=UploadSlots(1, 1)), UploadConfig())
    pending = [Future() for _ in order]
    for seq, future in enumerate(pending):
        line.put(Reported(report=Report(seq=seq, name=str(seq), metrics={}), attempt=1, pending=future))
    line.close()
    outcome: Future[Result] = Future()
    ordering = threading.Thread(target=lambda: outcome.set_result(gather(line)))
    ordering.start()
    done: set[int] = set()
    for seq in order:
        state = ReportState.FAILED if seq in failing else ReportState.COMMITTED
        record = ReportRecord(seq=seq, attempt=1, name=str(seq), state=state, metrics={}, reason="injected")
        done.add(seq)
        pending[seq].set_exception(UploadFailedError(record)) if seq in failing else pending[seq].set_result(record)
        ready = next(first for first in itertools.count() if first not in done)
        assert publisher.wait_published(ready, DEADLINE)
        assert publisher.published == ready, "published before what came before it"
    result = outcome.result(DEADLINE)
    ordering.join(DEADLINE)
    attempt.end("ended")
    return published, result


def check_law(order: Sequence[int], failing: frozenset[int]) -> None:
    published, result = publish_in(order, failing)
    expected = [(seq, "failed" if seq in failing else "committed") for seq in sorted(order)]
    assert [(record.seq, record.state.value) for record in published] == expected
    assert [(row.seq, row.state.value) for row in result.history] == expected
    assert result.totals.failed == len(failing)


@pytest.mark.parametrize("count", range(1, 5))
def test_every_order_of_completion_publishes_the_same_sequence_whatever_fails(count, caplog):
    """All permutations of up to four reports, each with every set of failures."""
    caplog.set_level(logging.CRITICAL, "ckpt")
    for order in itertools.permutations(range(count)):
        for number in range(2**count):
            check_law(order, failures(number, count))


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 6, 7])
def test_every_order_of_a_longer_line_publishes_the_same_sequence(count, caplog):
    """All permutations of up to seven reports; the sets of failures take turns, and each one has its turn."""
    caplog.set_level(logging.CRITICAL, "ckpt")
    for turn, order in enumerate(itertools.permutations(range(count))):
        check_law(order, failures(turn % 2**count, count))


def failures(number: int, count: int) -> frozenset[int]:
    """The set of reports that the bits of `number` name."""
    return frozenset(seq for seq in range(count) if number >> seq & 1)


def test_how_uploads_stand_is_told_while_one_waits(tmp_path, storage_path, caplog, monkeypatch):
    """One line for all of them, and none where nothing waits."""
    monkeypatch.setattr(ordering, "TELL_EVERY", 0.05)
    going = threading.Event()

    def held(checkpoint, name):
        assert going.wait(DEADLINE)
        return checkpoint

    config = make_config(storage_path, upload={"max_concurrent_uploads": 1, "max_pending": 3})
    with caplog.at_level(logging.INFO, "ckpt"), open_run(config) as run:
        for index in range(3):
            run.report({"i": index}, make_checkpoint(tmp_path / str(index)), checkpoint_upload_fn=held)
        eventually(lambda: caplog.text, lambda text: "1 uploading, 2 waiting for a slot" in text)
        going.set()
    told = [record.message for record in caplog.records if record.message.startswith("committed 2 ")]
    assert all(part in told[0] for part in ("MiB in", "queue", "slot", "limit", "verify", "commit "))
