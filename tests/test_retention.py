"""Retention: which checkpoints stay, by policies and in runs."""

import time

import pytest
from helpers import DEADLINE, make_checkpoint, make_config, storage_of
from hypothesis import given
from hypothesis import strategies as st

from ckpt import (
    CheckpointConfig,
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepYounger,
    Result,
    open_run,
    pin,
    record_evaluation,
    report,
)
from ckpt.layout import CommitId
from ckpt.retention import Candidate, evicted, rank
from ckpt.testing import FailingStorage

NAN = float("nan")


def candidates(*scores, pinned=(), created=0.0):
    """One per score, by seq; a None has no score."""
    return [
        Candidate(
            id=CommitId(seq, 1),
            metrics={} if score is None else {"score": score},
            created=created,
            pinned=seq in pinned,
        )
        for seq, score in enumerate(scores)
    ]


def kept(policy, *scores, **options):
    found = candidates(*scores, **options)
    gone = evicted(found, policy, set())
    return [item.id.seq for item in found if item.id not in gone]


@pytest.mark.parametrize(
    ("order", "scores", "best_first"),
    [
        ("max", (1, 3, 2), [1, 2, 0]),
        ("min", (1, 3, 2), [0, 2, 1]),
        ("max", (5, 5, 5), [2, 1, 0]),
        ("min", (5, 5, 5), [2, 1, 0]),
        ("max", (1, NAN, 2), [2, 0]),
        ("min", (NAN, 1, None), [1]),
        ("max", (NAN, None), []),
        ("max", (float("-inf"), 0, float("inf")), [2, 1, 0]),
        ("min", (float("-inf"), 0, float("inf")), [0, 1, 2]),
        ("max", (0.0, -0.0), [1, 0]),
    ],
)
def test_the_best_is_first_ties_go_to_the_later_and_what_has_no_score_does_not_rank(order, scores, best_first):
    """In both orders: a missing or NaN score is never best."""
    assert [item.id.seq for item in rank(candidates(*scores), "score", order)] == best_first


@pytest.mark.parametrize(
    ("policy", "scores", "seqs"),
    [
        (KeepAll(), (1, 2, 3), [0, 1, 2]),
        (KeepLast(2), (1, 2, 3), [1, 2]),
        (KeepLast(9), (1, 2, 3), [0, 1, 2]),
        (KeepBest(1, "score"), (9, 1, 2), [0, 2]),
        (KeepBest(2, "score"), (9, 1, 2, 0), [0, 2, 3]),
        (KeepBest(2, "score", "min"), (9, 1, 2, 0), [1, 3]),
        (KeepBest(2, "score"), (NAN, NAN, 1, NAN), [2, 3]),
        (KeepBest(3, "score"), (None, None, 1, None), [1, 2, 3]),
        (KeepEvery(2), (1, 2, 3, 4), [0, 2, 3]),
        (KeepLast(1) | KeepEvery(3), (1, 2, 3, 4, 5, 6), [0, 3, 5]),
        (KeepLast(1) | KeepBest(1, "score") | KeepEvery(4), (1, 9, 3, 4, 5, 6), [0, 1, 4, 5]),
        (KeepAny(), (1, 2, 3), [2]),
    ],
)
def test_a_policy_keeps_what_it_says_and_the_newest_stays_always(policy, scores, seqs):
    """`num_to_keep` counts ranked ones; the newest is kept beside them."""
    assert kept(policy, *scores) == seqs


def test_pinned_ones_stay():
    """Whatever the policy says."""
    assert kept(KeepLast(1), 1, 2, 3, 4, pinned={1}) == [1, 3]


def test_young_ones_stay():
    """By the time of their reports."""
    assert kept(KeepYounger(60), 1, 2, created=time.time()) == [0, 1]
    assert kept(KeepYounger(60), 1, 2, created=time.time() - 120) == [1]


def test_protected_ones_stay():
    """Best and origin are handed in by whoever knows them."""
    found = candidates(1, 2, 3, 4)
    assert evicted(found, KeepLast(1), {found[1].id}) == [found[0].id, found[2].id]
    assert evicted([], KeepLast(1), set()) == []


@given(st.lists(st.none() | st.floats(), max_size=12), st.integers(1, 5), st.sampled_from(["max", "min"]))
def test_the_best_and_the_newest_are_never_evicted_by_keep_best(scores, n, order):
    """Whatever scores there are, and at most one more than `n` stays."""
    found = candidates(*scores)
    left = kept(KeepBest(n, "score", order), *scores)
    ranked = rank(found, "score", order)
    assert not found or found[-1].id.seq in left
    assert not ranked or ranked[0].id.seq in left
    assert len(left) <= n + 1


# -------------------------------------------------------------------------------------------------------------- in runs


def run_scores(config, tmp_path, scores, each=lambda run, number: None):
    with open_run(config) as run:
        for number, score in enumerate(scores):
            report({} if score is None else {"score": score}, make_checkpoint(tmp_path / f"ck{number}"))
            run.get_all_reported_checkpoints(timeout_s=DEADLINE)
            each(run, number)
    return run


@pytest.mark.parametrize(
    ("checkpoint_config", "scores", "seqs", "best"),
    [
        (CheckpointConfig(), (1, 2, 3), [0, 1, 2], None),
        (CheckpointConfig(num_to_keep=1), (1, 2, 3), [2], None),
        (CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score"), (9, 1, 2), [0, 2], 0),
        (
            CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="min"),
            (NAN, 3, 1, 2, NAN), [2, 3, 4], 2,
        ),
        (CheckpointConfig(retention=KeepLast(1), checkpoint_score_attribute="score"), (1, 9, 2, 3), [1, 3], 1),
    ],
    ids=["all", "last", "best", "min", "policy"],
)  # fmt: skip
def test_a_run_keeps_its_best_and_its_latest_and_the_files_of_no_other(
    storage_path, tmp_path, checkpoint_config, scores, seqs, best
):
    """Result, storage and history agree: what is retained is there, and every report has its row."""
    run = run_scores(make_config(storage_path, checkpoint_config=checkpoint_config), tmp_path, scores)
    result = run.result
    assert [checkpoint.seq for checkpoint, _ in result.best_checkpoints] == seqs
    assert [checkpoint.seq for checkpoint, _ in Result.from_path(run.uri).best_checkpoints] == seqs
    assert (result.best and result.best.seq) == best
    assert result.checkpoint.seq == len(scores) - 1
    assert len(result.history) == len(scores)
    keys = [entry.key for entry in storage_of(run).list()]
    assert sorted(key.split("/")[1] for key in keys if key.startswith("checkpoints/")) == [
        f"checkpoint_{seq:06d}-a1" for seq in seqs
    ]


def test_a_pin_and_an_evaluation_made_from_outside_count(storage_path, tmp_path):
    """The run reads them before it deletes anything."""

    def outside(run, number):
        if number == 0:
            pin(f"{run.uri}@0")
        if number == 1:
            record_evaluation(f"{run.uri}@1", {"score": 100})

    config = make_config(
        storage_path, checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    )
    run = run_scores(config, tmp_path, (1, 0, 5, 6, 7), outside)
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == [0, 1, 4]
    assert run.result.best.seq == 1
    assert run.result.best_checkpoints[1][1] == {"score": 100}


def test_external_checkpoints_are_let_go_and_never_deleted(storage_path, tmp_path):
    """Their files are somebody else's."""
    with open_run(make_config(storage_path, checkpoint_config=CheckpointConfig(num_to_keep=1))) as run:
        for number in range(3):
            report(
                {}, make_checkpoint(tmp_path / f"ck{number}"), checkpoint_upload_fn=lambda checkpoint, name: checkpoint
            )
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == [2]
    assert all((tmp_path / f"ck{number}/model.bin").exists() for number in range(3))


def test_a_deletion_that_fails_never_stops_training(storage_path, tmp_path, wrap_storage, caplog):
    """It is warned about, and left to garbage collection."""
    wrap_storage(
        FailingStorage,
        lambda verb, key, _: PermissionError("no delete") if verb == "delete" and "commits" in key else None,
    )
    run = run_scores(make_config(storage_path, checkpoint_config=CheckpointConfig(num_to_keep=1)), tmp_path, (1, 2, 3))
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == [2]
    assert "no delete" in caplog.text
