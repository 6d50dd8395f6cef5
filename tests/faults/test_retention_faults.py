"""Retention when deletions fail, are slow, or are cut off in their middle; and what it never deletes, whatever happens."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, content, eventually, make_checkpoint, make_config, states, storage_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import (
    CheckpointConfig,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepYounger,
    Result,
    committed,
    open_run,
    open_storage,
    opening,
    pin,
    record_evaluation,
    report,
    resolve,
)
from ckpt.collecting import collect
from ckpt.errors import AccessDeniedError, TransientStorageError
from ckpt.layout import CommitId
from ckpt.metrics import score_of
from ckpt.retention import Candidate, evicted, rank
from ckpt.testing import FailingStorage, SlowStorage, WrappedStorage
from ckpt.verifying import verify

KEEP_ONE = CheckpointConfig(retention=KeepLast(1))


def seqs(checkpoints: Any) -> list[int]:
    return [checkpoint.seq for checkpoint in checkpoints]


def locations(uri: str) -> set[str]:
    return {entry.key.split("/")[1] for entry in open_storage(uri).list("checkpoints/")}


# --------------------------------------------------------------------------------------------------- slow and failing ones


def test_a_deletion_that_hangs_delays_neither_reports_nor_publication(storage_path, tmp_path, wrap_storage):
    """Ten reports are committed, published and readable while the first deletion is still under way."""
    wrap_storage(SlowStorage, "delete", pattern="c*")  # commits and checkpoints; not the probe of the start
    with open_run(make_config(storage_path, checkpoint_config=KEEP_ONE)) as run:
        for number in range(10):
            report({"n": number}, make_checkpoint(tmp_path / str(number))).wait(DEADLINE)
        assert len(run.get_all_reported_checkpoints(timeout_s=DEADLINE)) == 1
        storage_of(run).wait_until_held()
        assert run.get_checkpoint().seq == 9
        assert resolve(run.uri).seq == 9
        assert len(Result.from_path(run.uri).history) == 10
        storage_of(run).gate.set()
    assert seqs(committed(run.uri)) == [9]
    assert locations(run.uri) == {"checkpoint_000009-a1"}


@pytest.mark.parametrize("error", [AccessDeniedError("no delete for you"), TransientStorageError("SlowDown")])
@pytest.mark.parametrize("pattern", ["commits/", "checkpoints/"])
def test_deletions_that_always_fail_are_warned_about_and_nothing_else(
    storage_path, tmp_path, wrap_storage, caplog, error, pattern
):
    """Every report is committed; what stays is whole, or is no checkpoint any more and garbage collection takes it."""
    wrap_storage(FailingStorage, lambda verb, key, _: error if verb == "delete" and key.startswith(pattern) else None)
    with open_run(make_config(storage_path, checkpoint_config=KEEP_ONE)) as run:
        for number in range(4):
            report({"n": number}, make_checkpoint(tmp_path / str(number)))
    assert states(run.result) == ["committed"] * 4
    assert str(error) in caplog.text
    left = committed(run.uri)
    assert seqs(left) == ([0, 1, 2, 3] if pattern == "commits/" else [3])
    assert all(verify(item).ok for item in left)
    assert len(collect(run.uri).locations) == (0 if pattern == "commits/" else 3)
    assert len(locations(run.uri)) == len(left)


def test_a_deletion_that_failed_is_made_up_for_by_the_next_attempt(storage_path, tmp_path, wrap_storage, monkeypatch):
    """Its commit is still there, so the policy lets it go again."""
    with monkeypatch.context() as patch:
        plain = opening._open
        refuse = lambda verb, key, _: AccessDeniedError("no") if verb == "delete" and key.startswith("c") else None  # noqa: E731
        patch.setattr(opening, "_open", lambda config, uri: FailingStorage(plain(config, uri), refuse))
        with open_run(make_config(storage_path, checkpoint_config=KEEP_ONE)) as run:
            for number in range(3):
                report({}, make_checkpoint(tmp_path / str(number)))
    assert seqs(committed(run.uri)) == [0, 1, 2]
    with open_run(make_config(storage_path, checkpoint_config=KEEP_ONE)):
        report({}, make_checkpoint(tmp_path / "3"))
    assert seqs(committed(run.uri)) == [3]


# ----------------------------------------------------------------------------------------------------- cut off in the middle


class Killed(BaseException):
    """The process is dead from here on."""


class DiesDeleting(WrappedStorage):
    """A process that dies at its k-th deletion of an object of the run's, counted from 1."""

    def __init__(self, inner: Any, k: int) -> None:
        super().__init__(inner)
        self.left, self.dead, self.lock = k, threading.Event(), threading.Lock()

    def around(self, verb: str, key: str, work: Any, progress: Any = None) -> Any:
        with self.lock:
            if verb == "delete" and key.startswith(("commits/", "checkpoints/")):
                self.left -= 1
                if self.left <= 0:
                    self.dead.set()
            if self.dead.is_set():
                raise Killed
        return work()


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_in_the_middle_of_a_deletion_leaves_nothing_half_visible(
    storage_path, tmp_path, wrap_storage, monkeypatch, k
):
    """The commit goes first: what is left of the files is no checkpoint, and garbage collection takes it, nothing else."""
    files = {f"f{number}": b"x" * number for number in range(4)}
    with monkeypatch.context() as patch:
        plain = opening._open
        patch.setattr(opening, "_open", lambda config, uri: DiesDeleting(plain(config, uri), k))
        with pytest.raises(BaseException), open_run(make_config(storage_path, checkpoint_config=KEEP_ONE)) as run:  # noqa: B017, PT011, PT012
            report({}, make_checkpoint(tmp_path / "0", files)).wait(DEADLINE)
            report({}, make_checkpoint(tmp_path / "1", files)).wait(DEADLINE)
            assert storage_of(run).dead.wait(DEADLINE)
            raise Killed
    seen = committed(run.uri)
    assert seqs(seen) == ([0, 1] if k == 1 else [1])
    assert all(verify(item).ok for item in seen)
    assert resolve(run.uri).seq == 1
    orphans = [] if k == 1 else ["checkpoint_000000-a1"]
    found = collect(run.uri, lease_time=0.2)
    assert [uri.rpartition("/")[2] for uri in found.locations] == orphans
    assert found.files == (0 if k == 1 else 6 - k)
    assert content(resolve(run.uri), tmp_path / "restored") == {
        path: data if isinstance(data, bytes) else data.encode() for path, data in files.items()
    }


# ------------------------------------------------------------------------------------------------------------ what never goes

NAMES = ("score", "other")
policies = st.recursive(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 3)),
        st.builds(KeepEvery, st.integers(1, 4)),
        st.builds(KeepYounger, st.floats(0.001, 1e6)),
        st.builds(KeepBest, st.integers(1, 3), st.sampled_from(NAMES), st.sampled_from(["max", "min"])),
        st.just(KeepAny()),
    ),
    lambda inner: st.builds(lambda a, b: KeepAny((a, b)), inner, inner),
    max_leaves=3,
)
scores = st.none() | st.floats() | st.sampled_from([0.0, 1.0, -0.0, math.nan, math.inf, -math.inf, True, "high", [1]])


@given(
    st.lists(st.tuples(scores, st.booleans(), st.floats(0, 2e9)), min_size=1, max_size=12),
    policies,
    st.sampled_from(["max", "min"]),
)
def test_latest_best_and_pinned_never_go(items, policy, order):
    """Whatever the scores (NaN, none, ties, no numbers), the order, the times and the policy."""
    found = [
        Candidate(
            id=CommitId(seq, 1), metrics={} if score is None else {"score": score}, pinned=pinned, created=created
        )
        for seq, (score, pinned, created) in enumerate(items)
    ]
    ranked = rank(found, "score", order)
    best = {ranked[0].id} if ranked else set()
    gone = set(evicted(found, policy, best))
    assert found[-1].id not in gone
    assert not gone & best
    assert not gone & {item.id for item in found if item.pinned}
    numbers = {item.id: score_of(item.metrics, "score") for item in found}
    if ranked:
        top = numbers[ranked[0].id]
        beats = (lambda a: a > top) if order == "max" else (lambda a: a < top)
        assert not any(beats(number) for number in numbers.values() if number is not None)
        assert not any(numbers[item.id] == top for item in found if item.id > ranked[0].id)  # ties: the later


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.none() | st.sampled_from([1.0, 2.0, 2.0, math.nan]), min_size=1, max_size=5),
    policies,
    st.sampled_from(["max", "min"]),
    st.data(),
)
def test_in_a_run_latest_best_and_pinned_are_whole_and_evicted_ones_keep_their_row(
    tmp_path_factory, values, policy, order, data
):
    """The same law through storage: a random pin, random scores, and every report has its row with its metrics."""
    folder: Path = tmp_path_factory.mktemp("law")
    settings_ = CheckpointConfig(retention=policy, checkpoint_score_attribute="score", checkpoint_score_order=order)
    pinned = data.draw(st.integers(0, len(values) - 1))
    with open_run(make_config(f"memory://{folder.name}-{id(values)}", checkpoint_config=settings_)) as run:
        for number, value in enumerate(values):
            metrics = {"n": number} if value is None else {"n": number, "score": value}
            report(metrics, make_checkpoint(folder / str(number))).wait(DEADLINE)
            if number == pinned and number in seqs(committed(run.uri)):
                pin(f"{run.uri}@{number}")
    kept = committed(run.uri)
    assert all(verify(item).ok for item in kept)
    assert kept[-1].seq == len(values) - 1
    ranked = [
        (value if order == "max" else -value, seq)
        for seq, value in enumerate(values)
        if value and not math.isnan(value)
    ]
    if ranked:
        assert max(ranked)[1] in seqs(kept)
        assert run.result.best.seq == max(ranked)[1]
    assert [row.metrics["n"] for row in Result.from_path(run.uri).history] == list(range(len(values)))
    assert all(row.checkpoint is not None for row in run.result.history)


def test_a_checkpoint_pinned_while_deletions_are_stuck_stays(storage_path, tmp_path, wrap_storage):
    """A pin that comes before the next deletion is decided counts, also if an earlier deletion hangs."""
    wrap_storage(SlowStorage, "delete", pattern="c*")
    with open_run(make_config(storage_path, checkpoint_config=KEEP_ONE)) as run:
        for number in range(2):
            report({}, make_checkpoint(tmp_path / str(number))).wait(DEADLINE)
        storage_of(run).wait_until_held()
        pin(f"{run.uri}@1")
        for number in range(2, 4):
            report({}, make_checkpoint(tmp_path / str(number))).wait(DEADLINE)
        storage_of(run).gate.set()
    assert seqs(committed(run.uri)) == [1, 3]


def test_an_evaluation_from_outside_protects_what_it_makes_the_best(storage_path, tmp_path):
    """The note is read before anything is decided; NaN from outside makes nothing best."""
    best = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score")
    with open_run(make_config(storage_path, checkpoint_config=best)) as run:
        report({"score": 1}, make_checkpoint(tmp_path / "0")).wait(DEADLINE)
        record_evaluation(f"{run.uri}@0", {"score": 50})
        report({"score": 2}, make_checkpoint(tmp_path / "1")).wait(DEADLINE)
        record_evaluation(f"{run.uri}@1", {"score": math.nan})
        report({"score": 3}, make_checkpoint(tmp_path / "2")).wait(DEADLINE)
    assert seqs(committed(run.uri)) == [0, 2]
    assert run.result.best.seq == 0


def test_evicted_reports_are_in_the_history_of_a_reader_with_everything_but_their_files(storage_path, tmp_path):
    """State, metrics, sizes and where the files were; what is gone says so when it is opened."""
    with open_run(make_config(storage_path, checkpoint_config=KEEP_ONE)) as run:
        for number in range(3):
            report({"n": number}, make_checkpoint(tmp_path / str(number), {"a": "12345"}))
    eventually(lambda: seqs(committed(run.uri)), lambda found: found == [2])
    rows = list(Result.from_path(run.uri).history)
    assert [(row.state.value, row.metrics, row.nbytes) for row in rows] == [
        ("committed", {"n": n}, 5) for n in range(3)
    ]
    with pytest.raises(FileNotFoundError):
        rows[0].checkpoint.to_directory(tmp_path / "restored")
