"""What must hold when things end in disorder: interrupts, engines and policies that misbehave, names used again."""

import logging
import os
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from helpers import DEADLINE, content, make_checkpoint, make_config, reasons, states

import ckpt
from ckpt import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailurePolicy,
    KeepLast,
    ReportState,
    committed,
    open_run,
)
from ckpt.attempts import Owner, claim
from ckpt.errors import CheckpointsLostError, ConfigError, OrderingError, RunBusyError
from ckpt.gathering import gather_records, prune
from ckpt.inflight import Live
from ckpt.run import Run
from ckpt.staging import Staging, is_running
from ckpt.storage import open_storage
from ckpt.submitting import Submitter
from ckpt.uploading import upload, upload_standalone
from ckpt.verifying import verify

ASYNC = CheckpointUploadMode.ASYNC


def refuse(checkpoint: Checkpoint, name: str) -> Checkpoint:
    raise ConnectionResetError("the cable is out")


# ---------------------------------------------------------------------------------------------------- nothing is lost


def test_what_was_written_again_since_the_report_is_not_deleted(tmp_path, storage_path, caplog):
    """A function with deletion: the next epoch is saved over the same file meanwhile, and stays."""
    caplog.set_level(logging.WARNING, "ckpt")
    folder, gate = tmp_path / "last", threading.Event()

    def held(checkpoint: Checkpoint, name: str) -> Checkpoint:
        assert gate.wait(DEADLINE)
        return make_checkpoint(tmp_path / "elsewhere", {"model.bin": b"one"})

    with open_run(make_config(storage_path)) as run:
        handle = run.report(
            {}, make_checkpoint(folder, {"model.bin": b"one", "old": b"x"}), "a", ASYNC, checkpoint_upload_fn=held
        )
        (folder / "model.bin").write_bytes(b"epoch two")
        gate.set()
        assert handle.wait(DEADLINE).state is ReportState.COMMITTED
    assert (folder / "model.bin").read_bytes() == b"epoch two"
    assert not (folder / "old").exists()
    assert any("model.bin" in record.message for record in caplog.records)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_report_keeps_the_files_and_the_row(tmp_path, storage_path, interrupt, monkeypatch):
    """Ctrl-C or a termination after the directory was staged: the report is FAILED with where its files are."""

    def interrupted(*_):
        raise interrupt

    with pytest.raises(interrupt), open_run(make_config(storage_path)) as run:  # noqa: PT012
        run.report({"i": 0}, make_checkpoint(tmp_path / "first")).wait(DEADLINE)
        monkeypatch.setattr(Live, "flight", interrupted)
        try:
            run.report({"i": 1}, make_checkpoint(tmp_path / "c", {"model.bin": b"weights"}), None, ASYNC)
        finally:
            monkeypatch.undo()
    assert states(run.result) == ["committed", "failed"]
    assert read_kept(reasons(run.result)[1]) == b"weights"


STEPS = [(Run, "_reserve"), (Run, "_enter"), (Run, "_staged"), (Live, "flight"), (Submitter, "put")]
"""What `report()` does once it has checked its arguments, in this order."""


@pytest.mark.parametrize("mode", [None, ASYNC], ids=["kept", "deleted"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
def test_an_interrupt_between_the_steps_of_report_loses_nothing(
    tmp_path, staging, monkeypatch, owner, step, when, mode
):
    """Every commit has its row, the files are somewhere, and the run can be used."""
    plain, trainer = getattr(owner, step), threading.current_thread()
    folder = tmp_path / "c"

    def interrupted(self, *args):
        if threading.current_thread() is trainer:
            monkeypatch.undo()
            if when == "after":
                plain(self, *args)
            raise KeyboardInterrupt
        return plain(self, *args)

    config = make_config(tmp_path / "runs", failure_policy=FailurePolicy(red_on="nothing"), staging_dir=staging)
    with open_run(config) as run:
        checkpoint = make_checkpoint(folder, {"model.bin": b"weights"})
        monkeypatch.setattr(owner, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.report({"i": 0}, checkpoint, None, mode)
        run.report({"i": 1}, make_checkpoint(tmp_path / "d"))
    rows = list(run.result.history)
    handed_over = (step, when) == ("put", "after")
    assert [row.state.value for row in rows] == ["committed" if handed_over else "failed", "committed"]
    assert [found.seq for found in committed(run.result.path)] == ([0, 1] if handed_over else [1])
    if not handed_over and not (folder / "model.bin").exists():
        assert b"weights" in {kept.read_bytes() for kept in staging.rglob("model.bin")}


def read_kept(reason: str) -> bytes:
    """The file of a failed report, from where the reason says that it is kept."""
    return (Path(reason.partition("kept at ")[2].rstrip(")")) / "model.bin").read_bytes()


def test_what_is_still_staged_at_the_end_is_kept(tmp_path, storage_path, caplog):
    """An engine that never ran an upload, and an ordering task that died: the renamed-away files are kept and named."""
    caplog.set_level(logging.WARNING, "ckpt")
    dead: Future = Future()
    dead.set_exception(RuntimeError("no"))
    run_of = []

    def gather(line):
        answer: Future = Future()
        run_of.append(answer)
        return answer

    with pytest.raises(OrderingError), open_run(make_config(storage_path), lambda _: Future(), gather=gather) as run:  # noqa: PT012
        run.report({}, make_checkpoint(tmp_path / "c", {"model.bin": b"weights"}), None, ASYNC)
        run_of[0].set_exception(RuntimeError("the ordering task died"))
    told = [record.getMessage() for record in caplog.records if "kept at" in record.getMessage()]
    assert (Path(told[0].partition("kept at ")[2]) / "model.bin").read_bytes() == b"weights"


def test_a_function_cannot_be_sent_to_a_place_that_is_committed(tmp_path, storage_path):
    """The same name twice with a function that writes where the name says: refused at the call, the first stays whole."""

    def write(checkpoint: Checkpoint, name: str) -> Checkpoint:
        uri = ckpt.get_context().get_storage().build_checkpoint_uri_from_name(name)
        open_storage(uri).write("model.bin", os.urandom(8))
        return Checkpoint(uri)

    with open_run(make_config(storage_path)) as run:
        run.report({}, make_checkpoint(tmp_path / "c"), "best", CheckpointUploadMode.SYNC, checkpoint_upload_fn=write)
        with pytest.raises(ConfigError, match="'best' is taken"):
            run.report({}, make_checkpoint(tmp_path / "c"), "best", checkpoint_upload_fn=write)
        run.report({}, make_checkpoint(tmp_path / "c"), "better", checkpoint_upload_fn=write)
    assert states(run.result) == ["committed", "committed"]
    assert all(verify(checkpoint).ok for checkpoint, _ in run.result.best_checkpoints)


def test_no_upload_with_a_function_is_refused(tmp_path, storage_path):
    """The function would never be called."""
    with open_run(make_config(storage_path)) as run, pytest.raises(ConfigError, match="NO_UPLOAD moves nothing"):
        run.report(
            {}, make_checkpoint(tmp_path / "c"), None, CheckpointUploadMode.NO_UPLOAD, checkpoint_upload_fn=refuse
        )


# --------------------------------------------------------------------------------- engines and policies that misbehave


@pytest.mark.parametrize("error", [TimeoutError("engine"), RuntimeError("engine")])
def test_an_engine_whose_work_ends_in_an_error_of_its_own_fails_the_report(tmp_path, storage_path, error):
    """Also a TimeoutError, which is not a wait of ours: the report is FAILED, and the end does not hang."""

    def broken(report):
        answer: Future = Future()
        answer.set_exception(error)
        return answer

    with pytest.raises(CheckpointsLostError), open_run(make_config(storage_path), broken) as run:  # noqa: PT012 - a run
        run.report({}, make_checkpoint(tmp_path / "c"))
        run.report({"i": 1})
    assert states(run.result) == ["failed", "committed"]
    assert "engine" in reasons(run.result)[0]


def test_a_retention_policy_that_raises_deletes_nothing(tmp_path, storage_path, caplog):
    """The run goes on, keeps everything, and says so."""
    caplog.set_level(logging.ERROR, "ckpt")

    class Broken:
        def keep(self, candidates):
            return {item.id for item in candidates if item.metrics["missing"] > 0}

    config = make_config(storage_path, checkpoint_config=CheckpointConfig(retention=Broken()))
    with open_run(config) as run:
        for index in range(3):
            run.report({}, make_checkpoint(tmp_path / f"c{index}"))
    assert len(run.result.best_checkpoints) == 3
    assert any("retention policy" in record.message for record in caplog.records)


def test_stop_requested_changes_at_a_report_only(tmp_path, storage_path):
    """So that all ranks of a training would see it at the same report."""
    with open_run(make_config(storage_path)) as run:
        run.request_stop()
        before = ckpt.stop_requested()
        run.report({})
        after = ckpt.stop_requested()
    assert (before, after) == (False, True)


# ------------------------------------------------------------------------------------------------ over several attempts


def test_gaps_and_totals_carry_over_to_the_next_attempt(tmp_path, storage_path):
    """A run whose last checkpoint was lost stays red until a later one is committed; totals count every attempt."""
    config = make_config(storage_path)
    with pytest.raises(CheckpointsLostError), open_run(config) as run:  # noqa: PT012 - a run
        run.report({}, make_checkpoint(tmp_path / "a"))
        run.report({}, make_checkpoint(tmp_path / "b"), checkpoint_upload_fn=refuse)
    with pytest.raises(CheckpointsLostError, match="report 1"), open_run(config):
        pass
    with open_run(config) as run:
        run.report({}, make_checkpoint(tmp_path / "c"))
    assert (run.result.totals.reports, run.result.totals.checkpoints, run.result.totals.failed) == (3, 2, 1)
    assert ckpt.Result.from_path(run.uri).totals == run.result.totals


def test_a_sync_failure_that_was_handled_does_not_make_a_later_attempt_red(tmp_path, storage_path):
    """That it was handled is in the history."""
    config = make_config(storage_path, failure_policy=FailurePolicy(red_on="any"))
    with open_run(config) as run:
        run.report({}, make_checkpoint(tmp_path / "a"))
        with pytest.raises(ckpt.errors.UploadFailedError):
            run.report({}, make_checkpoint(tmp_path / "b"), None, CheckpointUploadMode.SYNC, None, refuse)
    with open_run(config) as run:
        run.report({"i": 1})
    assert states(run.result) == ["committed", "failed", "committed"]


def test_resume_is_heeded_in_a_second_run_of_the_same_try(tmp_path, storage_path):
    """Only a later try of a flow run is a retry, which takes the latest whatever `resume` says."""
    with open_run(make_config(storage_path), owner=Owner(flow_run_id="f", run_count=1)) as run:
        for index in range(3):
            run.report({"i": index}, make_checkpoint(tmp_path / f"c{index}"))
    for seq in (2, 0):  # the second try of the flow run, then another run in the same try
        with open_run(make_config(storage_path, resume="@0"), owner=Owner(flow_run_id="f", run_count=2)):
            found = ckpt.get_checkpoint()
            assert found is not None
            assert found.seq == seq


def test_an_owner_is_watched_for_as_long_as_it_said(storage_path):
    """A newcomer with a shorter lease time than the owner's waits for the owner's: slow beats are beats."""
    storage = open_storage(f"{storage_path}/run")
    elsewhere = Owner(machine="elsewhere", lease_time=600.0)
    attempt, _, _ = claim(storage, elsewhere, lambda _: None)
    waited = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            attempt.renew()

    with pytest.raises(RunBusyError):
        claim(storage, Owner(), lambda _: None, lease_time=0.001, wait=wait)
    assert waited[0] == pytest.approx(20.0)


def test_pruning_publishes_what_a_dead_driver_left_unpublished(tmp_path, storage_path):
    """A commit behind a slow head is no lost report because somebody pruned before the next attempt."""
    gate, done = threading.Event(), threading.Event()

    def held(checkpoint: Checkpoint, name: str) -> Checkpoint:
        gate.wait(DEADLINE)
        return checkpoint

    def silent(line):
        return Future()  # an ordering task that never publishes: its driver is about to die

    with pytest.raises(KeyboardInterrupt), open_run(make_config(storage_path), gather=silent) as run:  # noqa: PT012
        for index in range(3):
            assert run.report({"i": index}, make_checkpoint(tmp_path / f"c{index}")).wait(DEADLINE).checkpoint
        done.set()
        run.end = run._submitter.close  # nothing else of the end happens
        raise KeyboardInterrupt
    gone = prune(run.uri, KeepLast(1))
    assert len(gone) == 2
    assert states(ckpt.Result.from_path(run.uri)) == ["committed"] * 3


# ------------------------------------------------------------------------------------------------- standalone uploads


def test_retention_of_gathered_uploads_goes_by_place_and_spares_what_is_not_ours(tmp_path):
    """Without `seq` the order of the records counts; what a custom function left elsewhere is never deleted."""
    mine = make_checkpoint(tmp_path / "mine", {"model.bin": b"mine"})
    records = [
        upload_standalone(make_checkpoint(tmp_path / f"s{index}"), str(tmp_path / f"out/{index}")) for index in range(2)
    ]
    custom = upload_standalone(
        mine, str(tmp_path / "out/custom"), checkpoint_upload_fn=lambda checkpoint, _: checkpoint
    )
    last = upload_standalone(make_checkpoint(tmp_path / "s9"), str(tmp_path / "out/9"))
    result = gather_records([*records, custom, last], retention=KeepLast(1))
    assert [checkpoint.uri for checkpoint, _ in result.best_checkpoints] == [str(tmp_path / "out/9")]
    assert (tmp_path / "mine/model.bin").read_bytes() == b"mine"
    assert not (tmp_path / "out/0").exists()


def test_a_failed_standalone_upload_leaves_its_destination_usable(tmp_path, monkeypatch):
    """What it wrote is deleted, so that a retry of the task begins from nothing."""
    source = make_checkpoint(tmp_path / "s", {"a": b"1", "b": b"2"})
    monkeypatch.setattr("ckpt.uploading.check_arrived", lambda *_: refuse(source, ""))
    with pytest.raises(ckpt.errors.UploadFailedError):
        upload_standalone(source, str(tmp_path / "out/0"))
    monkeypatch.undo()
    record = upload_standalone(source, str(tmp_path / "out/0"))
    assert record.checkpoint is not None
    assert content(record.checkpoint, tmp_path / "restored") == {"a": b"1", "b": b"2"}


def test_a_local_upload_needs_no_scratch_folder(tmp_path, storage_path, monkeypatch):
    """With a full staging disk the upload that would free it must not ask for more of it."""
    runs = []

    def submit(report):
        answer: Future = Future()
        monkeypatch.setattr("tempfile.mkdtemp", refuse)
        answer.set_result(upload(report, runs[0].destination))
        monkeypatch.undo()
        return answer

    with open_run(make_config(storage_path), submit) as run:
        runs.append(run)
        run.report({}, make_checkpoint(tmp_path / "c"))
    assert states(run.result) == ["committed"]


def test_staging_that_a_rebooted_node_left_goes_after_two_weeks(staging):
    """On a disk that outlives its node nobody else would ever remove it; what is younger may be a living neighbour's."""
    top = staging / f".ckpt-staging-{os.getuid()}"
    old, young = (top / f"{boot}-1-1-{boot}" for boot in ("00000001", "00000002"))
    for folder in (old, young):
        (folder / "staged").mkdir(parents=True)
    then = time.time() - 15 * 86400
    os.utime(old, (then, then))
    Staging([staging], "run").sweep()
    assert (old.exists(), young.exists()) == (False, True)
    shutil.rmtree(top)


def test_a_process_that_may_not_be_seen_counts_as_running(monkeypatch):
    """Hidden by the system or another user's: whether it started when the owner said cannot be told, so it may live."""
    monkeypatch.setattr("ckpt.staging.os.kill", lambda *_: refuse_permission())
    monkeypatch.setattr("ckpt.staging.Path.read_text", lambda _: refuse_file())
    assert is_running(4242, 17)


def refuse_permission():
    raise PermissionError


def refuse_file():
    raise FileNotFoundError
