"""Validation beside the training: it re-ranks, it never ends a run, and what was interrupted is done by the next attempt."""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from helpers import DEADLINE, eventually, make_checkpoint, make_config, states

from ckpt import (
    CheckpointConfig,
    CheckpointConsistencyMode,
    KeepLast,
    ReportedCheckpointStatus,
    Result,
    ValidationTaskConfig,
    committed,
    get_all_reported_checkpoints,
    get_context,
    open_run,
    report,
    resolve,
)
from ckpt.attempts import Owner, claim
from ckpt.errors import ConfigError, FencedError, TransientStorageError
from ckpt.gathering import prune
from ckpt.notes import Notes
from ckpt.testing import FailingStorage

COMMITTED, VALIDATED = CheckpointConsistencyMode
STATUS = ReportedCheckpointStatus
BEST_ONE = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy")


class Gate:
    """A validation function that waits until it is opened; `seen` are the checkpoints it was called with."""

    def __init__(self, accuracy=lambda checkpoint: checkpoint.seq):
        self.accuracy, self.open, self.entered = accuracy, threading.Event(), threading.Semaphore(0)
        self.seen, self.now, self.most = [], 0, 0
        self._lock = threading.Lock()

    def __call__(self, checkpoint):
        with self._lock:
            self.seen.append(checkpoint.seq)
            self.now += 1
            self.most = max(self.most, self.now)
        self.entered.release()
        assert self.open.wait(DEADLINE)
        with self._lock:
            self.now -= 1
        return {"accuracy": self.accuracy(checkpoint)}


@pytest.fixture
def first_verdict_fails(wrap_storage):
    """A function that makes the first verdict of this test fail; `after`: it is written, and its answer gets lost."""

    def arrange(*, after):
        errors = [TransientStorageError("away")]

        def schedule(verb, key, _):
            return errors.pop() if errors and verb == "create" and key.startswith("notes/") else None

        wrap_storage(FailingStorage, schedule, after=after)

    return arrange


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()  # what was abandoned must not wait for the end of the process


@contextmanager
def validated_run(storage_path, fn, **changes):
    with open_run(make_config(storage_path, validation_fn=fn, **changes)) as run:
        yield run


def report_some(tmp_path, count, **options):
    return [report({"n": n}, make_checkpoint(tmp_path / f"c{n}"), **options) for n in range(count)]


def statuses(mode=VALIDATED, timeout_s=DEADLINE):
    return [item.status for item in get_all_reported_checkpoints(mode, timeout_s)]


def test_a_validations_metrics_are_added_and_decide_what_is_best_and_what_stays(tmp_path, storage_path):
    """The first of four is the best, which only the validation knows; latest and best stay, everywhere."""
    with validated_run(storage_path, lambda c: {"accuracy": 1 - c.seq / 10}, checkpoint_config=BEST_ONE) as run:
        report_some(tmp_path, 4, validation=True)
        get_all_reported_checkpoints()
    result = run.result
    assert [metrics for _, metrics in result.best_checkpoints] == [{"n": 0, "accuracy": 1.0}, {"n": 3, "accuracy": 0.7}]
    assert result.best == resolve(f"{run.uri}@best") == result.best_checkpoints[0][0]
    assert Result.from_path(run.uri).best_checkpoints == result.best_checkpoints
    assert committed(run.uri)[0].to_directory(tmp_path / "restored").is_dir()


def test_the_function_reads_the_committed_checkpoint_in_the_context_of_its_run(tmp_path, storage_path):
    """As training code would: the checkpoint is there, and get_context() is the run's."""

    def fn(checkpoint):
        with checkpoint.as_directory() as folder:
            return {"bytes": len((folder / "model.bin").read_bytes()), "of": get_context().get_experiment_name()}

    with validated_run(storage_path, fn):
        report_some(tmp_path, 1, validation=True)
        (found,) = get_all_reported_checkpoints(VALIDATED, DEADLINE)
    assert found.metrics == {"n": 0, "bytes": 7, "of": "run"}
    assert found.status is STATUS.VALIDATED


def test_a_coroutine_function_is_awaited(tmp_path):
    """As upload functions are."""

    async def fn(checkpoint):
        return {"accuracy": 1}

    with validated_run(tmp_path / "runs", fn):
        report_some(tmp_path, 1, validation=True)
        assert statuses() == [STATUS.VALIDATED]


def test_committed_does_not_wait_for_validations_and_validated_does(tmp_path, storage_path, gate, caplog):
    """What was reported without validation is COMMITTED in both; a timeout gives what there is, with a warning."""
    with validated_run(storage_path, gate):
        report_some(tmp_path, 1, validation=True)
        report({"n": 1}, make_checkpoint(tmp_path / "plain"))
        assert statuses(COMMITTED) == [STATUS.PENDING_VALIDATION, STATUS.COMMITTED]
        assert gate.entered.acquire(timeout=DEADLINE)
        assert statuses(VALIDATED, timeout_s=0.05) == [STATUS.PENDING_VALIDATION, STATUS.COMMITTED]
        assert "still under way" in caplog.text
        gate.open.set()
        assert statuses(VALIDATED) == [STATUS.VALIDATED, STATUS.COMMITTED]


def test_settings_of_a_report_win_over_those_of_the_run(tmp_path):
    """Key by key, as in Ray; the manifest says what was asked."""
    default = ValidationTaskConfig(fn_kwargs={"batch": 8, "split": "dev"}, timeout_s=77)
    own = ValidationTaskConfig(fn_kwargs={"split": "test"})
    with validated_run(tmp_path / "runs", lambda checkpoint, **kwargs: kwargs, validation_task_config=default) as run:
        report({}, make_checkpoint(tmp_path / "a"), validation=True)
        report({}, make_checkpoint(tmp_path / "b"), validation=own)
    assert [metrics for _, metrics in run.result.best_checkpoints] == [
        {"batch": 8, "split": "dev"},
        {"batch": 8, "split": "test"},
    ]
    asked = run.result.checkpoint.manifest.validation
    assert asked.pop("fn").endswith("<lambda>")
    assert asked == {"fn_kwargs": {"batch": 8, "split": "test"}, "timeout_s": 77}


def test_arguments_that_the_function_does_not_take_are_refused_at_the_call(tmp_path):
    """And the next report works."""
    with validated_run(tmp_path / "runs", lambda checkpoint: {}) as run:
        with pytest.raises(ConfigError, match="split"):
            report({}, make_checkpoint(tmp_path / "a"), validation=ValidationTaskConfig(fn_kwargs={"split": "test"}))
        with pytest.raises(ConfigError, match="validation='yes'"):
            report({}, make_checkpoint(tmp_path / "a"), validation="yes")
        report({}, make_checkpoint(tmp_path / "a"), validation=True)
    assert states(run.result) == ["committed"]


def raises(checkpoint):
    raise ZeroDivisionError("no samples")


class OfItsOwnKind(BaseException):
    """As torch's CheckpointException."""


def raises_base(checkpoint):
    raise OfItsOwnKind("shards")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (raises, "ZeroDivisionError: no samples"),
        (raises_base, "OfItsOwnKind: shards"),
        (lambda checkpoint: None, "it returned None"),
        (lambda checkpoint: {"accuracy": object()}, "'accuracy'"),
    ],
    ids=["raises", "raises-base", "none", "no-number"],
)
def test_a_failed_validation_is_recorded_and_ends_nothing(tmp_path, bad, reason):
    """The checkpoint keeps its own score, the next one is validated, the run is green, and it is not done again."""
    calls = []

    def fn(checkpoint):
        calls.append(checkpoint.seq)
        return bad(checkpoint) if checkpoint.seq == 0 else {"accuracy": 1}

    with validated_run(tmp_path / "runs", fn) as run:
        report_some(tmp_path, 2, validation=True)
        assert statuses() == [STATUS.VALIDATION_FAILED, STATUS.VALIDATED]
    notes = Notes(run._live.storage)
    notes.refresh()
    assert reason in notes.verdict((0, 1)).reason
    assert run.result.error is None
    with validated_run(tmp_path / "runs", fn):
        assert statuses() == [STATUS.VALIDATION_FAILED, STATUS.VALIDATED]
    assert calls == [0, 1]


def test_a_validation_that_hangs_is_abandoned_at_its_deadline(tmp_path, gate):
    """Its slot is free for the next; a timeout is a verdict."""

    def fn(checkpoint):
        return gate(checkpoint) if checkpoint.seq == 0 else {"accuracy": 1}

    quick = ValidationTaskConfig(timeout_s=0.1)
    with validated_run(tmp_path / "runs", fn) as run:
        report({}, make_checkpoint(tmp_path / "a"), validation=quick)
        report({}, make_checkpoint(tmp_path / "b"), validation=True)
        assert statuses() == [STATUS.VALIDATION_TIMEOUT, STATUS.VALIDATED]
    assert states(run.result) == ["committed", "committed"]


@pytest.mark.parametrize("bound", [1, 2])
def test_validations_are_bounded_and_start_in_the_order_of_the_reports(tmp_path, gate, bound):
    """However fast checkpoints are committed."""
    with validated_run(tmp_path / "runs", gate, max_concurrent_validations=bound):
        report_some(tmp_path, 5, validation=True)
        statuses(COMMITTED)
        for _ in range(bound):
            assert gate.entered.acquire(timeout=DEADLINE)
        assert sorted(gate.seen) == list(range(bound))
        gate.open.set()
        assert statuses() == [STATUS.VALIDATED] * 5
    assert gate.most <= bound
    assert sorted(gate.seen) == list(range(5))


def test_a_checkpoint_whose_validation_is_pending_is_not_pruned(tmp_path, storage_path, gate):
    """However many better ones come; once the verdict is there it goes like any other."""
    gate.accuracy = lambda checkpoint: -1
    with validated_run(storage_path, gate, checkpoint_config=BEST_ONE) as run:
        first = report({"accuracy": 0.5}, make_checkpoint(tmp_path / "first"), validation=True)
        assert gate.entered.acquire(timeout=DEADLINE)
        for n in range(1, 4):
            report({"accuracy": n}, make_checkpoint(tmp_path / f"c{n}"), checkpoint_dir_name=f"c{n}")
        statuses(COMMITTED)
        eventually(lambda: [item.seq for item in committed(run.uri)], lambda seqs: seqs == [0, 3])
        gate.open.set()
        statuses(VALIDATED)
        eventually(lambda: [item.seq for item in committed(run.uri)], lambda seqs: seqs == [3])
    assert first.wait(0).checkpoint not in [checkpoint for checkpoint, _ in run.result.best_checkpoints]


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=["returns", "raises"])
def test_the_end_of_the_block_waits_for_validations(tmp_path, error):
    """Also when the training raised: its checkpoints are worth as much."""
    try:
        with validated_run(tmp_path / "runs", lambda checkpoint: {"accuracy": checkpoint.seq}) as run:
            report_some(tmp_path, 3, validation=True)
            if error is not None:
                raise error
    except ZeroDivisionError:
        assert error is not None
    assert [metrics["accuracy"] for _, metrics in run.result.best_checkpoints] == [0, 1, 2]


def test_a_stop_leaves_validations_to_the_next_attempt(tmp_path, storage_path, gate, caplog):
    """The block ends while one is under way and one waits; neither has a verdict, and both are done next time."""
    with validated_run(storage_path, gate) as run:
        report_some(tmp_path, 2, validation=True)
        assert gate.entered.acquire(timeout=DEADLINE)
        run.request_stop()
    assert states(run.result) == ["committed", "committed"]
    assert "left for the next attempt: checkpoints 0, 1" in caplog.text
    with open_run(make_config(storage_path)):
        assert statuses() == [STATUS.PENDING_VALIDATION] * 2  # no function: kept, and not waited for
    assert "this attempt has no validation_fn" in caplog.text
    with validated_run(storage_path, lambda checkpoint: {"accuracy": checkpoint.seq}) as run:
        assert statuses() == [STATUS.VALIDATED] * 2
    assert [metrics["accuracy"] for _, metrics in run.result.best_checkpoints] == [0, 1]


def test_a_stop_that_comes_while_the_end_waits_for_validations_ends_the_wait(tmp_path, gate):
    """As for a drain of uploads."""
    runs = []

    def stop():
        assert gate.entered.acquire(timeout=DEADLINE)
        eventually(lambda: runs[0]._closed, lambda closed: closed)
        runs[0].request_stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with validated_run(tmp_path / "runs", gate) as run:
        runs.append(run)
        report_some(tmp_path, 1, validation=True)
    stopper.join(DEADLINE)
    assert states(run.result) == ["committed"]


PROGRAM = """
import os, signal, sys
from pathlib import Path
from ckpt import Checkpoint, RunConfig, ValidationTaskConfig, open_run, report

def dies(checkpoint, split):
    os.kill(os.getpid(), signal.SIGKILL)

with open_run(RunConfig(name="run", storage_path=sys.argv[1], validation_fn=dies)):
    folder = Path(sys.argv[2])
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"weights")
    task = ValidationTaskConfig(fn_kwargs={"split": "test"}, timeout_s=50)
    report({"accuracy": 0}, Checkpoint.from_directory(folder), validation=task)
"""


def test_a_validation_during_which_the_process_was_killed_is_done_by_the_next_attempt(tmp_path):
    """With the arguments that were asked for; nothing but the store knows of it. And then never again."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), str(tmp_path / "ck")]
    assert subprocess.run(command, timeout=DEADLINE, check=False).returncode == -signal.SIGKILL
    calls = []

    def fn(checkpoint, split):
        calls.append((checkpoint.seq, split))
        return {"accuracy": 7}

    for _ in range(2):
        with validated_run(tmp_path / "runs", fn) as run:
            assert statuses() == [STATUS.VALIDATED]
    assert calls == [(0, "test")]
    assert run.result.metrics == {"accuracy": 7}


def test_pruning_from_outside_leaves_what_waits_for_its_validation(tmp_path, gate):
    """Also where no run is open."""
    with validated_run(tmp_path / "runs", gate) as run:
        report_some(tmp_path, 1, validation=True)
        for n in range(1, 4):
            report({}, make_checkpoint(tmp_path / f"c{n}"))
        assert gate.entered.acquire(timeout=DEADLINE)
        run.request_stop()
    prune(run.uri, KeepLast(1))
    assert [item.seq for item in committed(run.uri)] == [0, 3]


def test_a_verdict_that_cannot_be_written_is_none(tmp_path, first_verdict_fails):
    """The next attempt validates again."""
    first_verdict_fails(after=False)
    with validated_run(tmp_path / "runs", lambda checkpoint: {"accuracy": 1}):
        report_some(tmp_path, 1, validation=True)
        assert statuses() == [STATUS.PENDING_VALIDATION]
    with validated_run(tmp_path / "runs", lambda checkpoint: {"accuracy": 2}) as run:
        assert statuses() == [STATUS.VALIDATED]
    assert run.result.metrics == {"n": 0, "accuracy": 2}


def test_a_verdict_whose_answer_got_lost_stands(tmp_path, first_verdict_fails):
    """As a commit's."""
    first_verdict_fails(after=True)
    with validated_run(tmp_path / "runs", lambda checkpoint: {"accuracy": 1}):
        report_some(tmp_path, 1, validation=True)
        statuses()
    with validated_run(tmp_path / "runs", raises) as run:
        assert statuses() == [STATUS.VALIDATED]
    assert run.result.metrics == {"n": 0, "accuracy": 1}


def test_a_driver_that_was_replaced_gives_no_verdict(tmp_path):
    """What fails for it may work for its successor, which validates again."""

    def fn(checkpoint):
        claim(run._live.storage, Owner(flow_run_id="f", run_count=2), lambda _: None)
        raise OSError("this host is going down")

    owner = Owner(flow_run_id="f", run_count=1)
    with pytest.raises(FencedError), open_run(make_config(tmp_path / "runs", validation_fn=fn), owner=owner) as run:
        report_some(tmp_path, 1, validation=True)
    assert not list((tmp_path / "runs" / "run").glob("notes/*"))
