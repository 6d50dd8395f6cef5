"""Reading runs from outside: references, listings, evaluations, pins, and a result that is the same from storage."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest
from helpers import DEADLINE, make_checkpoint, make_config, states

from ckpt import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailurePolicy,
    KeepBest,
    KeepLast,
    ReportRecord,
    ReportState,
    Result,
    Run,
    RunConfig,
    committed,
    list_runs,
    open_run,
    open_storage,
    pin,
    record_evaluation,
    resolve,
)
from ckpt._json import encode
from ckpt._memory import MemoryStorage
from ckpt.attempts import Owner, claim
from ckpt.commits import Lineage, Start
from ckpt.errors import CheckpointNotFoundError, CkptError, ConfigError, MetricsError
from ckpt.gathering import prune
from ckpt.history import History, write_segment
from ckpt.reading import open_run_files, split_reference
from ckpt.storage import join_uri
from ckpt.testing import CountingStorage

SCORES = [0.2, 0.9, 0.5, float("nan"), 0.9]
"""Of the reports of `scored`; the best is the later of the two 0.9."""


def report(run: Run, folder: Path, seq: int, **metrics: object):
    return run.report({"seq": seq, **metrics}, make_checkpoint(folder / f"{run.config.name}-{seq}"))


def train(config: RunConfig, folder: Path, scores: list[float]) -> Result:
    with open_run(config) as run:
        for seq, score in enumerate(scores):
            report(run, folder, seq, acc=score, val={"loss": -score})
    assert run.result is not None
    return run.result


def failing_after_a_report(run: Run, folder: Path, error: Exception) -> None:
    report(run, folder, 0)
    raise error


@pytest.fixture
def config(storage_path: str) -> RunConfig:
    return make_config(storage_path, checkpoint_config=CheckpointConfig(checkpoint_score_attribute="acc"))


@pytest.fixture
def scored(config: RunConfig, tmp_path: Path) -> Result:
    """A finished run of five scored checkpoints."""
    return train(config, tmp_path, SCORES)


# ----------------------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize(
    ("which", "seq"),
    [
        ("", 4), ("@latest", 4), ("@0", 0), ("@3", 3), ("@03", 3), ("@best", 4), ("@best:acc:max", 4), ("@best:acc:min", 0),
        ("@best:seq:max", 4), ("@best:val/loss:max", 0), ("@best:val/loss:min", 4),
    ],
)  # fmt: skip
def test_a_reference_names_a_checkpoint(scored, which, seq):
    """The latest, a seq, the best by the run's score or by any metric, nested ones too; NaN is never best."""
    assert resolve(scored.path + which).seq == seq


@pytest.mark.parametrize("which", ["newest", "-1", "1.5", "best:acc", "best:acc:up", ""])
def test_a_reference_that_does_not_parse_is_refused_with_what_would(scored, which):
    """The message has the reference, and what may stand behind the `@`."""
    with pytest.raises(ConfigError, match="must be 'latest', a seq like '12', 'best'"):
        resolve(f"{scored.path}@{which}")


def test_an_at_sign_in_a_folder_name_is_no_reference(tmp_path):
    """Only the last `@` counts, and only if no `/` follows it."""
    root = tmp_path / "a@b" / "c@latest"
    train(make_config(root), tmp_path, [0.1, 0.2])
    assert resolve(f"{root}/run").seq == 1
    assert resolve(f"{root}/run@0").seq == 0
    assert split_reference("s3://b@c/run") == ("s3://b@c/run", "latest")


def test_what_is_not_there_is_said_with_what_is(scored, storage_path):
    """A seq that is not committed, a metric that nobody reported, a run that does not exist."""
    with pytest.raises(
        CheckpointNotFoundError, match=r"@77: no such committed checkpoint .commits there: 0, 1, 2, 3, 4."
    ):
        resolve(f"{scored.path}@77")
    with pytest.raises(CheckpointNotFoundError, match=r"no committed checkpoint of .* has a number as metric 'f1'"):
        resolve(f"{scored.path}@best:f1:max")
    with pytest.raises(
        CheckpointNotFoundError, match=r"no run is at .*/other .there is no run.json.; a run is <storage_path>"
    ):
        resolve(join_uri(storage_path, "other"))
    with pytest.raises(FileNotFoundError):
        Result.from_path(join_uri(storage_path, "other"))


def test_best_without_a_score_attribute_asks_for_the_metric(tmp_path, storage_path):
    """The message shows the form that names one."""
    result = train(make_config(storage_path), tmp_path, [0.1])
    with pytest.raises(
        CheckpointNotFoundError, match=r"no score attribute: say which metric is meant, as in .*@best:loss:min"
    ):
        resolve(f"{result.path}@best")


def test_an_empty_run_says_that_nothing_is_committed(storage_path):
    """A run that has only begun."""
    with open_run(make_config(storage_path)) as run:
        pass
    with pytest.raises(CheckpointNotFoundError, match="the run has committed nothing"):
        resolve(run.uri)
    assert (run.result.checkpoint, len(run.result.history)) == (None, 0)
    assert Result.from_path(run.uri).checkpoint is None


def test_committed_lists_the_checkpoints_after_a_seq(scored):
    """In order; a poller passes the last seq it has seen."""
    assert [checkpoint.seq for checkpoint in committed(scored.path)] == [0, 1, 2, 3, 4]
    assert [checkpoint.metrics["seq"] for checkpoint in committed(scored.path, after=2)] == [3, 4]
    assert committed(scored.path, after=4) == []


def test_runs_are_listed_with_their_state(tmp_path, storage_path):
    """Finished, failed, running and merely begun ones, by name, and nothing else that lies there."""
    train(make_config(storage_path, "b-done"), tmp_path, [0.1, 0.2])
    with pytest.raises(RuntimeError, match="boom"), open_run(make_config(storage_path, "c-failed")) as run:
        failing_after_a_report(run, tmp_path, RuntimeError("boom"))
    open_storage(storage_path).write("notes.txt", b"mine")
    open_storage(storage_path).write("deep/er/run.json", b"{}")
    with open_run(make_config(storage_path, "a-running")) as run:
        report(run, tmp_path, 0).wait(DEADLINE)
        assert run.publisher.wait_published(1, DEADLINE)
        found = list_runs(storage_path)
    assert [(item.name, item.state) for item in found] == [
        ("a-running", "running or killed"), ("b-done", "completed"), ("c-failed", "failed"),
    ]  # fmt: skip
    done = found[1]
    assert (done.reports, done.checkpoints, done.latest_seq, done.nbytes) == (2, 2, 1, 2 * len(b"weights"))
    assert done.created > 1.7e9
    assert list_runs(join_uri(storage_path, "empty")) == []


# ---------------------------------------------------------------------------------------------- evaluations and pins


def test_an_evaluation_from_outside_is_seen_by_every_reader(scored):
    """References, the result, its ranking; the manifest is what it was, and of two evaluations the later counts."""
    record_evaluation(f"{scored.path}@2", {"acc": 0.7, "bleu": 31.5}, source="first")
    record_evaluation(f"{scored.path}@2", {"acc": 0.99}, source="second")
    assert resolve(f"{scored.path}@best").seq == 2
    assert resolve(f"{scored.path}@best:bleu:max").seq == 2
    result = Result.from_path(scored.path)
    assert (result.best.seq, result.get_best_checkpoint("bleu", "min").seq) == (2, 2)
    assert result.best_checkpoints[2][1]["acc"] == 0.99
    assert resolve(f"{scored.path}@2").metrics["acc"] == 0.5


def test_an_evaluation_that_cannot_be_recorded_is_refused(scored):
    """A value without a JSON form, a checkpoint that does not exist: nothing is written."""
    with pytest.raises(MetricsError, match="acc"):
        record_evaluation(scored.path, {"acc": object()})
    with pytest.raises(CheckpointNotFoundError):
        record_evaluation(f"{scored.path}@9", {"acc": 1.0})
    assert list(open_storage(scored.path).list("notes/")) == []


def test_an_evaluation_changes_what_a_running_run_keeps(tmp_path, storage_path):
    """Retention looks at the notes before it lets go: the newly best stays, the former one goes."""
    keep = CheckpointConfig(retention=KeepBest(1, "acc"), checkpoint_score_attribute="acc")
    with open_run(make_config(storage_path, checkpoint_config=keep)) as run:
        report(run, tmp_path, 0, acc=0.9).wait(DEADLINE)
        report(run, tmp_path, 1, acc=0.1).wait(DEADLINE)
        record_evaluation(f"{run.uri}@1", {"acc": 0.95})
        report(run, tmp_path, 2, acc=0.2)
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == [1, 2]
    assert run.result.best.seq == 1
    assert [checkpoint.seq for checkpoint in committed(run.uri)] == [1, 2]
    assert states(run.result) == ["committed"] * 3


def test_a_pinned_checkpoint_is_kept_until_it_is_unpinned(tmp_path, storage_path):
    """By a running run and by `prune` alike."""
    config = make_config(storage_path, checkpoint_config=CheckpointConfig(num_to_keep=1))
    with open_run(config) as run:
        report(run, tmp_path, 0).wait(DEADLINE)
        pin(f"{run.uri}@0")
        for seq in (1, 2):
            report(run, tmp_path, seq)
    assert [checkpoint.seq for checkpoint in committed(run.uri)] == [0, 2]
    assert prune(run.uri, KeepLast(1)) == []
    pin(f"{run.uri}@0", False)
    assert [checkpoint.uri for checkpoint in prune(run.uri, KeepLast(1))] == [run.result.best_checkpoints[0][0].uri]
    assert [checkpoint.seq for checkpoint in committed(run.uri)] == [2]


@pytest.mark.parametrize("body", [b"{", b"[]", encode({"format": 1, "metrics": {"acc": 5.0}})[:-9]])
def test_a_damaged_note_is_passed_over_with_a_warning(tmp_path, config, body, caplog):
    """It stops neither readers nor the retention of a running run."""
    keep = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="acc")
    with open_run(make_config(config.storage_path, checkpoint_config=keep)) as run:
        report(run, tmp_path, 0, acc=0.1).wait(DEADLINE)
        open_storage(run.uri).write("notes/000000.a1.abc.json", body)
        report(run, tmp_path, 1, acc=0.2)
    assert [checkpoint.seq for checkpoint in committed(run.uri)] == [1]
    assert "Passing over note notes/000000.a1.abc.json" in caplog.text
    assert Result.from_path(run.uri).best.seq == 1


# -------------------------------------------------------------------------------------------------- the result, twice


def told(result: Result) -> dict[str, object]:
    """All that two results can be compared by."""
    totals = result.totals
    return {
        "rows": [str(row) for row in result.history], "checkpoint": result.checkpoint, "metrics": str(result.metrics),
        "retained": str(result.best_checkpoints), "best": result.best, "path": result.path, "run": result.run,
        "totals": (totals.reports, totals.checkpoints, totals.failed, totals.nbytes, totals.retained_bytes),
    }  # fmt: skip


def test_the_result_from_storage_is_the_live_one(tmp_path, storage_path):
    """History, totals, latest, best and retained ones, after failures, pruning and reports without a checkpoint."""
    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="acc")
    policy = FailurePolicy(red_on="nothing")

    def failing(checkpoint, name):
        raise OSError("no")

    with open_run(make_config(storage_path, checkpoint_config=keep, failure_policy=policy)) as run:
        for seq, score in enumerate(SCORES):
            report(run, tmp_path, seq, acc=score)
            run.report({"loss": score})
        run.report({"acc": 7.0}, make_checkpoint(tmp_path / "bad"), checkpoint_upload_fn=failing)
    stored = Result.from_path(run.uri)
    assert told(stored) == told(run.result)
    assert states(stored) == ["committed"] * 10 + ["failed"]
    assert (stored.error, stored.totals.retained_bytes) == (None, len(stored.best_checkpoints) * len(b"weights"))
    open_storage(run.uri).delete(["result.json"])
    assert told(Result.from_path(run.uri)) == told(run.result)


def test_the_error_that_ended_a_run_is_in_its_result(tmp_path, storage_path):
    """Live it is the exception itself, from storage its text."""
    with pytest.raises(ZeroDivisionError), open_run(make_config(storage_path)) as run:
        failing_after_a_report(run, tmp_path, ZeroDivisionError("oops"))
    assert isinstance(run.result.error, ZeroDivisionError)
    stored = Result.from_path(run.uri)
    assert isinstance(stored.error, CkptError)
    assert str(stored.error) == "ZeroDivisionError: oops"
    assert stored.checkpoint.seq == 0


def test_the_result_of_a_running_run_is_what_is_published(tmp_path, storage_path):
    """It can be read at any moment; what is committed and not published yet is restorable already."""
    with open_run(make_config(storage_path)) as run:
        for seq in range(3):
            report(run, tmp_path, seq).wait(DEADLINE)
        assert run.publisher.wait_published(3, DEADLINE)
        running = Result.from_path(run.uri)
        assert running.checkpoint.seq == 2
        assert running.error is None
        assert [checkpoint.seq for checkpoint, _ in running.best_checkpoints] == [0, 1, 2]
        assert all(row.state is ReportState.COMMITTED for row in running.history)


def test_pruning_does_not_make_a_finished_run_look_otherwise(scored):
    """An attempt that was claimed for maintenance is no driver: state, error and totals stay those of the training."""
    prune(scored.path, KeepLast(1))
    after = Result.from_path(scored.path)
    assert [checkpoint.seq for checkpoint, _ in after.best_checkpoints] == [4]
    assert (after.totals.reports, after.totals.checkpoints, after.error) == (5, 5, None)
    assert [row.state.value for row in after.history] == ["committed"] * 5
    assert open_run_files(scored.path).lineage.last_driver == 1
    with open_run(make_config(scored.path.rpartition("/")[0])) as run:
        assert run.get_checkpoint().seq == 4


def test_a_result_pickles(scored, tmp_path, config):
    """Live and from storage: history, references and manifests arrive on the other side."""
    for result in (scored, Result.from_path(scored.path)):
        copied = pickle.loads(pickle.dumps(result))
        assert told(copied) == told(result)
        assert copied.history[1].checkpoint.metrics["acc"] == 0.9
        assert copied.checkpoint.manifest.nbytes == len(b"weights")


def test_rows_name_checkpoints_that_know_their_commit(tmp_path, storage_path):
    """Also one that lies outside the run, whose place tells nothing of the run that committed it."""
    outside = make_checkpoint(tmp_path / "outside")
    with open_run(make_config(storage_path)) as run:
        run.report({"acc": 0.5}, outside, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    for result in (run.result, Result.from_path(run.uri), pickle.loads(pickle.dumps(run.result))):
        assert result.history[0].checkpoint.metrics == {"acc": 0.5}
        assert result.checkpoint.uri == outside.uri
        assert pickle.loads(pickle.dumps(result.checkpoint)).seq == 0


# ------------------------------------------------------------------------------------------------------- lazy history


@pytest.fixture
def long_history() -> History:
    """Thirty rows in ten segments of three, behind a storage that counts."""
    storage = CountingStorage(MemoryStorage())
    attempt, *_ = claim(storage, Owner(), lambda _: None)
    for first in range(0, 30, 3):
        rows = [
            ReportRecord(seq=seq, attempt=1, name=str(seq), state=ReportState.COMMITTED, metrics={"seq": seq})
            for seq in range(first, first + 3)
        ]
        write_segment(storage, 1, rows)
    attempt.end("ended")
    storage.counts.clear()
    lineage = Lineage(claimed=(1,), starts={1: Start(attempt=1, first_seq=0)})
    return History(objects=storage, refer=lambda uri, commit: Checkpoint(uri, commit_uri=commit), lineage=lineage)


def test_history_reads_only_what_is_looked_at(long_history):
    """Its length costs a listing, one row one segment; a second look at the same segment costs nothing."""
    counts = long_history.objects.counts
    assert len(long_history) == 30
    assert (counts["list"], counts["read"]) == (1, 0)
    assert long_history[-1].metrics["seq"] == 29
    assert counts["read"] == 1
    assert long_history[29].seq == 29
    assert counts["read"] == 1
    assert next(iter(long_history)).seq == 0
    assert counts["read"] == 2


def test_history_is_a_sequence(long_history):
    """Indexes from both ends, slices, reversal and iteration give the same rows; outside there is an IndexError."""
    rows = list(long_history)
    assert [row.metrics["seq"] for row in rows] == list(range(30))
    assert [long_history[index].seq for index in range(30)] == list(range(30))
    assert [long_history[index - 30].seq for index in range(30)] == list(range(30))
    assert list(reversed(long_history)) == rows[::-1]
    for part in (slice(None), slice(3, 9), slice(-4, None), slice(None, None, -7), slice(40, 50), slice(2, 1)):
        assert long_history[part] == rows[part]
    for index in (30, -31):
        with pytest.raises(IndexError, match="of 30"):
            long_history[index]
    assert rows[4] in long_history
    assert long_history.index(rows[4]) == 4


def test_history_pickles_and_is_read_on_the_other_side(tmp_path):
    """It travels as a place to read from, not as rows."""
    result = train(make_config(tmp_path / "runs"), tmp_path, [0.1] * 3)
    copied = pickle.loads(pickle.dumps(result.history))
    assert [row.seq for row in copied] == [0, 1, 2]
    assert len(pickle.dumps(Result.from_path(result.path).history)) < 3000


def test_reading_warns_of_nothing_in_a_sound_run(scored, caplog):
    """A clean run reads clean."""
    caplog.set_level(logging.WARNING, "ckpt")
    result = Result.from_path(scored.path)
    list(result.history)
    resolve(f"{scored.path}@best")
    assert caplog.text == ""
