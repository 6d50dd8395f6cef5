"""Failed uploads: each has its place and its reason, the run goes on, and its end says what the policy says."""

import errno
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from helpers import DEADLINE, make_checkpoint, make_config, reasons, states, storage_of

from ckpt import CheckpointConfig, CheckpointUploadMode, FailurePolicy, open_run, report, staging
from ckpt.errors import (
    BucketNotFoundError,
    CheckpointsLostError,
    CkptError,
    NoActiveRunError,
    TooManyFailuresError,
    UploadFailedError,
)
from ckpt.testing import FailingStorage, FailOnceStorage, SlowStorage

ASYNC, SYNC, NO_UPLOAD = CheckpointUploadMode


def failing_uploads(*names):
    """A schedule that fails the uploads of checkpoints of these names."""

    def schedule(verb, key, _):
        hit = verb == "upload" and any(key.startswith(f"checkpoints/{name}-a") for name in names)
        return PermissionError(f"no access to {key}") if hit else None

    return schedule


def run_reports(config, tmp_path, names, *, mode=None, scores=()):
    """One report per name, each waited for; the open run's result comes back also if the run is red."""
    try:
        with open_run(config) as run:
            for number, name in enumerate(names):
                metrics = {"score": scores[number]} if scores else {}
                report(metrics, make_checkpoint(tmp_path / f"ck{number}"), name, mode).wait(DEADLINE)
    except CheckpointsLostError as red:
        return red.result, str(red)
    return run.result, None


# ----------------------------------------------------------------------------------------------------------- the policy


def test_a_sync_failure_that_the_trainer_handles_is_history_and_the_run_stays_green(
    storage_path, tmp_path, wrap_storage
):
    """Ray hangs here: the next report, of any mode, works."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    with open_run(make_config(storage_path)) as run:
        with pytest.raises(UploadFailedError, match="no access") as caught:
            report({"n": 0}, make_checkpoint(tmp_path / "a"), "bad", SYNC)
        assert caught.value.record.seq == 0
        assert pickle.loads(pickle.dumps(caught.value)).record == caught.value.record
        for number, mode in enumerate((SYNC, ASYNC, None, NO_UPLOAD), start=1):
            report({"n": number}, make_checkpoint(tmp_path / str(number)), "good", mode)
        report({"n": 5})
    assert states(run.result) == ["failed", *["committed"] * 5]
    assert "no access" in reasons(run.result)[0]


def test_a_sync_failure_at_the_very_end_that_the_trainer_handles_is_green(storage_path, tmp_path, wrap_storage):
    """The trainer knows, and went on."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    with open_run(make_config(storage_path)) as run:
        report({}, make_checkpoint(tmp_path / "a"), "good")
        with pytest.raises(UploadFailedError):
            report({}, make_checkpoint(tmp_path / "b"), "bad", SYNC)
    assert states(run.result) == ["committed", "failed"]


def test_an_async_failure_in_the_middle_is_a_gap_with_its_reason_and_the_run_is_green(
    storage_path, tmp_path, wrap_storage
):
    """Later reports commit."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    result, red = run_reports(make_config(storage_path), tmp_path, ["a", "bad", "c"])
    assert red is None
    assert states(result) == ["committed", "failed", "committed"]
    assert "PermissionError: no access" in reasons(result)[1]
    assert result.totals.failed == 1


def test_the_last_one_failing_is_red_and_carries_the_result(storage_path, tmp_path, wrap_storage):
    """What training made last is not there."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    result, red = run_reports(make_config(storage_path), tmp_path, ["a", "bad"])
    assert "the last checkpoint, report 1 bad, was lost" in red
    assert states(result) == ["committed", "failed"]
    assert result.checkpoint.seq == 0


@pytest.mark.parametrize(
    ("red_on", "names", "red"),
    [
        ("any", ["a", "bad", "c"], "1 of 3 reports failed"),
        ("any", ["a", "b"], None),
        ("nothing", ["a", "bad"], None),
        ("nothing", ["bad"], "no checkpoint was committed"),
        ("lost", ["bad"], "no checkpoint was committed"),
        ("any", ["bad"], "no checkpoint was committed"),
        ("nothing", [], None),
    ],
)
def test_red_on_says_which_failures_make_a_run_red(tmp_path, wrap_storage, red_on, names, red):
    """`any`, `lost`, `nothing`."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    config = make_config(tmp_path / "runs", failure_policy=FailurePolicy(red_on=red_on))
    assert (red or "") in (run_reports(config, tmp_path, names)[1] or "")
    assert (run_reports(config, tmp_path, names)[1] is None) is (red is None)


@pytest.mark.parametrize(
    ("scores", "red"), [((1, 9, 2), True), ((1, 9, 10), False), ((9, 1, 2), False), ((1, float("nan"), 2), False)]
)
def test_losing_the_best_is_red_until_a_better_one_is_committed(tmp_path, wrap_storage, scores, red):
    """By the run's score attribute."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    config = make_config(tmp_path / "runs", checkpoint_config=CheckpointConfig(checkpoint_score_attribute="score"))
    text = run_reports(config, tmp_path, ["a", "bad", "c"], scores=scores)[1]
    assert (text is not None and "the best checkpoint, report 1 bad, was lost" in text) is red


def test_three_failures_in_a_row_stop_the_next_report(storage_path, tmp_path, wrap_storage):
    """A week of GPUs must not burn on an expired key; metrics-only reports do not break the row."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    with pytest.raises(TooManyFailuresError, match="3 reports in a row"), open_run(make_config(storage_path)) as run:  # noqa: PT012
        for number in range(10):
            report({}, make_checkpoint(tmp_path / str(number)), "bad")
            run.get_all_reported_checkpoints(timeout_s=DEADLINE)
            report({})
    assert states(run.result) == ["failed", "committed", "failed", "committed", "failed"]
    assert isinstance(run.result.error, TooManyFailuresError)


def test_a_commit_in_between_begins_the_row_anew_and_none_never_stops(tmp_path, wrap_storage):
    """`stop_after=None`: training goes on whatever happens."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    result, _ = run_reports(make_config(tmp_path / "a"), tmp_path, ["bad", "bad", "ok", "bad", "bad", "ok"])
    assert len(result.history) == 6
    never = make_config(tmp_path / "b", failure_policy=FailurePolicy(stop_after=None))
    result, _ = run_reports(never, tmp_path, ["bad"] * 5 + ["ok"])
    assert states(result) == ["failed"] * 5 + ["committed"]


# ------------------------------------------------------------------------------------------------------------ when full


def test_drop_skips_the_oldest_that_waits_and_never_one_whose_caller_waits(storage_path, tmp_path, wrap_storage):
    """The newest state is worth most; what uploads already is not interrupted."""
    wrap_storage(SlowStorage, "upload")
    limits = {"max_concurrent_uploads": 1, "max_pending": 3, "when_full": "drop"}
    sync_done = threading.Event()
    with open_run(make_config(storage_path, upload=limits)) as run:
        report({}, make_checkpoint(tmp_path / "0", {"n": "0"}), checkpoint_upload_mode=ASYNC)
        storage_of(run).wait_until_held()

        def sync():
            report({}, make_checkpoint(tmp_path / "1", {"n": "1"}), checkpoint_upload_mode=SYNC)
            sync_done.set()

        waiting = threading.Thread(target=sync, name="trainer")
        waiting.start()
        while run._live.slots.waiting < 1:
            assert waiting.is_alive()
        dropped = report({}, make_checkpoint(tmp_path / "2", {"n": "2"}), checkpoint_upload_mode=ASYNC)
        last = report({}, make_checkpoint(tmp_path / "3", {"n": "3"}), checkpoint_upload_mode=ASYNC)
        assert dropped.wait(DEADLINE).state.value == "skipped"
        assert not last.state.final
        storage_of(run).gate.set()
        assert sync_done.wait(DEADLINE)
        waiting.join(DEADLINE)
    assert states(run.result) == ["committed", "committed", "skipped", "committed"]
    assert "when_full='drop'" in reasons(run.result)[2]
    assert run.result.totals.skipped == 1


def test_block_has_a_deadline_after_which_the_report_is_failed_and_training_goes_on(
    storage_path, tmp_path, wrap_storage
):
    """It is not an exception in the training loop, and the local files stay where they are."""
    wrap_storage(SlowStorage, "upload")
    limits = {"max_concurrent_uploads": 1, "max_pending": 2, "block_timeout": 0.1}
    with open_run(make_config(storage_path, upload=limits)) as run:
        for number in range(3):
            report({}, make_checkpoint(tmp_path / str(number)), checkpoint_upload_mode=ASYNC)
        storage_of(run).gate.set()
        run.get_all_reported_checkpoints(timeout_s=DEADLINE)
        report({}, make_checkpoint(tmp_path / "3"))
    assert states(run.result) == ["committed", "committed", "failed", "committed"]
    assert "2 earlier reports are still uploading" in reasons(run.result)[2]
    assert (tmp_path / "2/model.bin").exists()
    assert run.result.history[2].timings.stall >= 0.1


def test_a_blocked_report_goes_on_as_soon_as_there_is_room(storage_path, tmp_path, wrap_storage):
    """It does not wait for its deadline."""
    wrap_storage(SlowStorage, "upload")
    with open_run(make_config(storage_path, upload={"max_concurrent_uploads": 1, "max_pending": 1})) as run:
        report({}, make_checkpoint(tmp_path / "0"))
        storage_of(run).wait_until_held()
        opener = threading.Timer(0.05, storage_of(run).gate.set)
        opener.start()
        report({}, make_checkpoint(tmp_path / "1"))
        opener.join(DEADLINE)
    assert states(run.result) == ["committed", "committed"]


# ---------------------------------------------------------------------------------------------------- disks and buckets


@pytest.mark.parametrize("mode", [None, ASYNC])
def test_a_full_disk_while_staging_is_a_failed_report_and_no_exception(tmp_path, monkeypatch, mode):
    """The trainer's files stay."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_run(make_config(tmp_path / "runs")) as run:
        with monkeypatch.context() as patched:
            patched.setattr(os, "link", full)
            patched.setattr(staging, "_move", full)
            report({}, make_checkpoint(tmp_path / "ck", {"a": "1"}), checkpoint_upload_mode=mode)
        assert (tmp_path / "ck/a").read_text() == "1"
        report({}, make_checkpoint(tmp_path / "ck2"))
    assert states(run.result) == ["failed", "committed"]
    assert "No space left" in reasons(run.result)[0]


def test_a_copy_that_the_staging_disk_has_no_room_for_is_refused_before_it_fills_it(tmp_path, monkeypatch):
    """The reason says how much is needed and what to do."""
    monkeypatch.setattr(staging.Staging, "_bases", lambda self, original: iter(()))
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: SimpleNamespace(free=4))
    with open_run(make_config(tmp_path / "runs", failure_policy=FailurePolicy(red_on="nothing"))) as run:
        report({}, make_checkpoint(tmp_path / "ck0"), checkpoint_upload_fn=lambda c, n: c)
        report({}, make_checkpoint(tmp_path / "ck", {"a": "12345"}), checkpoint_upload_mode=ASYNC)
    assert "StorageFullError" in reasons(run.result)[1]
    assert "needs 5 bytes" in reasons(run.result)[1]
    assert "staging_dir" in reasons(run.result)[1]
    assert (tmp_path / "ck/a").exists()


def test_a_missing_bucket_is_said_as_such_and_not_as_a_missing_file(storage_path, tmp_path, wrap_storage):
    """Both are FileNotFoundErrors."""
    wrap_storage(FailOnceStorage, "upload", error=BucketNotFoundError("bucket 'x' does not exist"))
    result, _ = run_reports(make_config(storage_path), tmp_path, ["a", "b"])
    assert "BucketNotFoundError: bucket 'x' does not exist" in reasons(result)[0]


def test_a_commit_whose_answer_got_lost_stands(storage_path, tmp_path, wrap_storage):
    """The store made it; the failure turns out to be none."""
    wrap_storage(FailOnceStorage, "create", "commits/*", error=ConnectionResetError("reset"), after=True)
    result, red = run_reports(make_config(storage_path), tmp_path, ["a"])
    assert (states(result), red) == (["committed"], None)


# -------------------------------------------------------------------------------------------------------- ends of a run


def test_the_trainers_own_exception_wins_and_uploads_in_flight_are_still_drained(storage_path, tmp_path, wrap_storage):
    """Also over a run that would be red."""
    wrap_storage(SlowStorage, "upload")
    with pytest.raises(ZeroDivisionError), open_run(make_config(storage_path)) as run:  # noqa: PT012
        for number in range(3):
            report({}, make_checkpoint(tmp_path / str(number)), checkpoint_upload_mode=ASYNC)
        threading.Timer(0.05, storage_of(run).gate.set).start()
        raise ZeroDivisionError
    assert states(run.result) == ["committed"] * 3
    assert isinstance(run.result.error, ZeroDivisionError)


def test_the_trainers_own_exception_wins_over_a_red_end(storage_path, tmp_path, wrap_storage):
    """What broke first is what the user has to see."""
    wrap_storage(FailingStorage, failing_uploads("bad"))
    with pytest.raises(ZeroDivisionError), open_run(make_config(storage_path)) as run:  # noqa: PT012
        report({}, make_checkpoint(tmp_path / "a"), "bad")
        raise ZeroDivisionError
    assert states(run.result) == ["failed"]


def test_a_report_after_the_end_says_so(storage_path):
    """Through the run, and through the module where no run is active any more."""
    with open_run(make_config(storage_path)) as run:
        run.report({})
    with pytest.raises(CkptError, match="has ended"):
        run.report({})
    with pytest.raises(NoActiveRunError):
        report({})


def test_two_open_runs_do_not_mix(tmp_path):
    """The inner one is active; the outer one is reached through its own object, from any thread."""
    with open_run(make_config(tmp_path / "runs", "outer")) as outer:
        with open_run(make_config(tmp_path / "runs", "inner")) as inner:
            report({"to": "inner"}, make_checkpoint(tmp_path / "a"))
            outer.report({"to": "outer"}, make_checkpoint(tmp_path / "b"))
            with ThreadPoolExecutor(1) as other, pytest.raises(NoActiveRunError, match="2 runs are open"):
                other.submit(report, {}).result(DEADLINE)
        report({"to": "outer"})
    assert [record.metrics for record in inner.result.history] == [{"to": "inner"}]
    assert [record.metrics for record in outer.result.history] == [{"to": "outer"}] * 2


def test_ctrl_c_while_a_sync_report_waits_is_ctrl_c_and_not_a_failed_upload(storage_path, tmp_path, wrap_storage):
    """The upload goes on and is drained."""
    wrap_storage(SlowStorage, "upload")

    def interrupt(slow):
        slow.wait_until_held()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), open_run(make_config(storage_path)) as run:  # noqa: PT012
        thread = threading.Thread(target=interrupt, args=(storage_of(run),))
        thread.start()
        try:
            report({}, make_checkpoint(tmp_path / "ck"), checkpoint_upload_mode=SYNC)
        finally:
            thread.join(DEADLINE)
            storage_of(run).gate.set()
    assert states(run.result) == ["committed"]
