"""What the trainer does to its directory after `report()` does not reach the upload."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest
from helpers import DEADLINE, content, make_checkpoint, make_config, reasons, states, storage_of

from ckpt import Checkpoint, CheckpointUploadMode, FailurePolicy, checkpoint_dir, open_run, report, staging
from ckpt.staging import Staging, scan
from ckpt.testing import FailingStorage, SlowStorage

ASYNC, SYNC, NO_UPLOAD = CheckpointUploadMode
SHM = Path("/dev/shm")
MODES = (None, ASYNC, SYNC)
GREEN = FailurePolicy(red_on="nothing", stop_after=None)


def staged(folder: Path) -> list[Path]:
    """Everything in staging folders below `folder`."""
    return [path for top in folder.rglob(".ckpt-staging-*") for owner in top.iterdir() for path in owner.iterdir()]


# ------------------------------------------------------------------------------------------------ temporary directories


@pytest.mark.parametrize("mode", MODES)
def test_a_temporary_directory_per_epoch_may_be_gone_before_its_upload_begins(
    storage_path, tmp_path, wrap_storage, mode
):
    """`with TemporaryDirectory()` inside the loop, as everybody writes it for Ray."""
    wrap_storage(SlowStorage, "upload")
    with open_run(make_config(storage_path)) as run:
        if mode is SYNC:
            storage_of(run).gate.set()
        for epoch in range(3):
            with tempfile.TemporaryDirectory() as folder:
                make_checkpoint(Path(folder), {"epoch": str(epoch)})
                report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
                make_checkpoint(Path(folder), {"more": "the directory can still be used"})
            assert not Path(folder).exists()
        storage_of(run).gate.set()
    for epoch, (checkpoint, _) in enumerate(run.result.best_checkpoints):
        assert content(checkpoint, tmp_path / str(epoch)) == {"epoch": str(epoch).encode()}
    assert states(run.result) == ["committed"] * 3


@pytest.mark.parametrize("mode", [ASYNC, SYNC])
def test_one_temporary_directory_outside_the_loop_can_be_used_again_and_again(
    storage_path, tmp_path, wrap_storage, mode
):
    """ASYNC named takes the files away at the call; SYNC is done with them when it returns."""
    wrap_storage(SlowStorage, "upload")
    with open_run(make_config(storage_path)) as run, tempfile.TemporaryDirectory() as folder:
        if mode is SYNC:
            storage_of(run).gate.set()
        for epoch in range(3):
            make_checkpoint(Path(folder), {"epoch": str(epoch)})
            report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
        storage_of(run).gate.set()
    for epoch, (checkpoint, _) in enumerate(run.result.best_checkpoints):
        assert content(checkpoint, tmp_path / str(epoch)) == {"epoch": str(epoch).encode()}
    assert states(run.result) == ["committed"] * 3


def test_with_the_mode_left_out_files_replaced_by_a_rename_are_safe(storage_path, tmp_path, wrap_storage):
    """One directory outside the loop, each save a rename over the last: the linked old file is what is uploaded."""
    wrap_storage(SlowStorage, "upload")
    with open_run(make_config(storage_path)) as run, tempfile.TemporaryDirectory() as folder:
        for epoch in range(3):
            make_checkpoint(Path(folder) / "new", {"epoch": str(epoch)})
            (Path(folder) / "new/epoch").replace(Path(folder) / "epoch")
            (Path(folder) / "new").rmdir()
            report({}, Checkpoint.from_directory(folder))
        storage_of(run).gate.set()
    for epoch, (checkpoint, _) in enumerate(run.result.best_checkpoints):
        assert content(checkpoint, tmp_path / str(epoch)) == {"epoch": str(epoch).encode()}


def test_checkpoint_dir_gives_a_fresh_directory_and_takes_it_back(storage_path):
    """Also if the block raises; the staging disk is empty at the end."""
    seen = []
    with open_run(make_config(storage_path)) as run:
        for mode in MODES:
            with checkpoint_dir() as folder:
                seen.append(folder)
                assert not any(folder.iterdir())
                report({}, make_checkpoint(folder), checkpoint_upload_mode=mode)
        with pytest.raises(KeyError), checkpoint_dir() as folder:
            raise KeyError
        assert not any(path.exists() for path in [*seen, folder])
    assert len(set(seen)) == 3
    assert states(run.result) == ["committed"] * 3


# ----------------------------------------------------------------------------------------------------- kept directories


@pytest.mark.parametrize("mode", [None, ASYNC])
def test_a_kept_directory_that_its_owner_removes_right_after_the_call_is_committed(
    storage_path, tmp_path, wrap_storage, mode
):
    """As Transformers rotates its own checkpoints."""
    wrap_storage(SlowStorage, "upload")
    with open_run(make_config(storage_path)) as run:
        folder = tmp_path / "out/checkpoint-1"
        report(
            {}, make_checkpoint(folder, {"a/b": "1"}), checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=False,
        )  # fmt: skip
        storage_of(run).wait_until_held()
        shutil.rmtree(folder)
        storage_of(run).gate.set()
    assert content(run.result.checkpoint, tmp_path / "restored") == {"a/b": b"1"}


def test_a_trainers_output_folder_reported_with_the_mode_left_out_loses_nothing(storage_path, tmp_path):
    """Ray's Transformers callback reports the folder that holds all of the trainer's files."""
    folder = tmp_path / "output"
    with open_run(make_config(storage_path)) as run:
        for step in range(3):
            report({"step": step}, make_checkpoint(folder, {f"checkpoint-{step}/model": str(step), "state.json": "{}"}))
            run.get_all_reported_checkpoints(timeout_s=DEADLINE)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-0",
        "checkpoint-1",
        "checkpoint-2",
        "state.json",
    ]


def rewrite(path: Path) -> None:
    path.write_bytes(b"XXXX")
    os.utime(path, ns=(0, 1))


def truncate(path: Path) -> None:
    os.truncate(path, 1)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [rewrite, truncate, append])
def test_a_file_rewritten_in_place_during_its_upload_fails_that_report_and_is_named(
    storage_path, tmp_path, wrap_storage, change
):
    """Size and modification time are those of the call, or nothing is committed."""
    wrap_storage(SlowStorage, "upload")
    with open_run(make_config(storage_path, failure_policy=GREEN)) as run:
        report({}, make_checkpoint(tmp_path / "ck", {"sub/shard": "1234"}))
        storage_of(run).wait_until_held()
        change(tmp_path / "ck/sub/shard")
        storage_of(run).gate.set()
        report({}, make_checkpoint(tmp_path / "next"))
    assert states(run.result) == ["failed", "committed"]
    assert "SourceChangedError: sub/shard of" in reasons(run.result)[0]


def test_a_file_that_is_not_staged_and_vanishes_fails_its_report_and_is_named(storage_path, tmp_path):
    """NO_UPLOAD and custom functions read where the files are."""

    def upload(checkpoint, name):
        raise FileNotFoundError(2, "No such file", str(tmp_path / "ck/shard"))

    with open_run(make_config(storage_path, failure_policy=GREEN)) as run:
        report({}, make_checkpoint(tmp_path / "ck"), checkpoint_upload_fn=upload)
        report({}, make_checkpoint(tmp_path / "next"))
    assert "ck/shard" in reasons(run.result)[0]


# ---------------------------------------------------------------------------------------- what is left, and what is not


def test_a_failed_report_keeps_the_newest_staged_copy_and_says_where(storage_path, tmp_path, wrap_storage):
    """ASYNC took the files away from the trainer; the copy may be all there is of them."""
    wrap_storage(FailingStorage, lambda verb, key, _: PermissionError("read-only") if verb == "upload" else None)
    with pytest.raises(Exception, match="no checkpoint was committed") as caught, open_run(make_config(storage_path)):  # noqa: PT012
        for number in range(2):
            report({}, make_checkpoint(tmp_path / "ck", {"n": str(number)}), checkpoint_upload_mode=ASYNC).wait(
                DEADLINE
            )
    places = [Path(reason.partition("kept at ")[2].rstrip(")")) for reason in reasons(caught.value.result).values()]
    assert (places[-1] / "n").read_text() == "1"
    assert not places[0].exists()


def test_an_upload_that_cannot_be_submitted_keeps_what_was_staged(tmp_path):
    """The engine is closing, or refuses: the files that were renamed away are not lost with it."""

    def refuse(_):
        raise RuntimeError("cannot schedule new futures after shutdown")

    with pytest.raises(Exception, match="no checkpoint") as caught, open_run(make_config(tmp_path / "runs"), refuse):
        report({}, make_checkpoint(tmp_path / "ck", {"n": "1"}), checkpoint_upload_mode=ASYNC)
    reason = reasons(caught.value.result)[0]
    assert "cannot schedule" in reason
    assert (Path(reason.partition("kept at ")[2].rstrip(")")) / "n").read_text() == "1"


def test_staging_folders_of_dead_owners_are_swept_and_nothing_else(staging, tmp_path):
    """Living owners, other machines, kept copies and other people's folders stay."""
    top = staging / f".ckpt-staging-{os.getuid()}"
    mine = staging_name(os.getpid(), start=None)
    dead = staging_name(os.getpid(), start=1)
    never = staging_name(2**22 + 1, start=1)
    elsewhere = "00000000-1-1-" + "0" * 8
    for name in (mine, dead, never, elsewhere, "kept-run", "something-else-of-yours"):
        (top / name / "x").mkdir(parents=True)
    with open_run(make_config(tmp_path / "runs")):
        left = {path.name for path in top.iterdir()}
    assert left & {mine, dead, never, elsewhere, "kept-run", "something-else-of-yours"} == {
        mine, elsewhere, "kept-run", "something-else-of-yours",
    }  # fmt: skip
    shutil.rmtree(top)


def staging_name(pid: int, *, start: int | None) -> str:
    own = staging.start_time(os.getpid()) if start is None else start
    return f"{staging.machine_id()}-{pid}-{own}-{uuid4().hex[:8]}"


def test_two_runs_of_one_process_do_not_share_a_staging_folder(tmp_path, wrap_storage):
    """The end of one leaves alone what the other still uploads from."""
    wrap_storage(SlowStorage, "upload")
    with open_run(make_config(tmp_path / "runs", "slow")) as slow:
        slow.report({}, make_checkpoint(tmp_path / "ck", {"a": "1"}), checkpoint_upload_mode=ASYNC)
        storage_of(slow).wait_until_held()
        with open_run(make_config(tmp_path / "runs", "quick")) as quick:
            storage_of(quick).gate.set()
            quick.report({}, make_checkpoint(tmp_path / "ck2"), checkpoint_upload_mode=ASYNC)
        storage_of(slow).gate.set()
    assert states(slow.result) == ["committed"]


# --------------------------------------------------------------------------------------------------- other file systems


@pytest.fixture
def other_disk(tmp_path):
    if not SHM.is_dir() or SHM.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    folder = SHM / f"ckpt-test-{uuid4().hex[:8]}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("mode", [None, ASYNC])
def test_without_a_staging_folder_on_the_file_system_files_are_copied_in_the_call_with_one_warning(
    storage_path, tmp_path, other_disk, caplog, mode
):
    """What is to be deleted is deleted in the call, so that the next save into the directory is not hit."""
    with caplog.at_level(logging.WARNING, "ckpt"), open_run(make_config(storage_path)) as run:
        for epoch in range(3):
            report({}, make_checkpoint(other_disk, {"epoch": str(epoch)}), checkpoint_upload_mode=mode)
            assert (other_disk / "epoch").exists() is (mode is None)
            (other_disk / "epoch").unlink(missing_ok=True)
    for epoch, (checkpoint, _) in enumerate(run.result.best_checkpoints):
        assert content(checkpoint, tmp_path / str(epoch)) == {"epoch": str(epoch).encode()}
    assert len([record for record in caplog.records if "had to be copied" in record.message]) == 1


def test_a_folder_beside_the_grandparent_is_used_and_removed(tmp_path, other_disk, caplog):
    """Where neither the temporary folder nor the storage is on the checkpoint's disk."""
    with open_run(make_config(tmp_path / "runs")) as run:
        report({}, make_checkpoint(other_disk / "out/ck"), checkpoint_upload_mode=ASYNC)
        report({}, make_checkpoint(other_disk / "out/ck2"))
    assert "had to be copied" not in caplog.text
    assert states(run.result) == ["committed", "committed"]
    assert [path.name for path in other_disk.iterdir()] == ["out"]


def test_staging_dir_comes_first(tmp_path, other_disk):
    """Also for `checkpoint_dir()`."""
    with open_run(make_config(tmp_path / "runs", staging_dir=other_disk)) as run, checkpoint_dir() as folder:
        assert other_disk in folder.parents
        report({}, make_checkpoint(folder), checkpoint_upload_mode=ASYNC)
    assert states(run.result) == ["committed"]
    assert not any(other_disk.iterdir())


def test_a_directory_that_cannot_be_renamed_is_linked_and_emptied(tmp_path, monkeypatch):
    """The process's own working directory, and a path that is a symbolic link."""
    folder = make_checkpoint(tmp_path / "ck", {"a": "1", "b/c": "2"}).uri
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    with open_run(make_config(tmp_path / "runs")) as run:
        report({}, Checkpoint.from_directory("."), checkpoint_upload_mode=ASYNC)
        assert not any(Path(folder).iterdir())
        make_checkpoint(Path(folder), {"d": "3"})
        report({}, Checkpoint.from_directory(tmp_path / "link"), checkpoint_upload_mode=ASYNC)
        assert not any(Path(folder).iterdir())
    found = [content(checkpoint, tmp_path / str(n)) for n, (checkpoint, _) in enumerate(run.result.best_checkpoints)]
    assert found == [{"a": b"1", "b/c": b"2"}, {"d": b"3"}]


def test_a_rename_that_leaves_no_directory_behind_is_undone(tmp_path, monkeypatch):
    """The new directory cannot be made: the trainer has its files back, and no file is lost."""
    source = scan(Path(make_checkpoint(tmp_path / "out/ck", {"a": "1"}).uri))
    taking = Staging([tmp_path / "stage"])
    (tmp_path / "stage").mkdir()
    real = Path.mkdir

    def mkdir(self, *args, **kwargs):
        if self == source.original:
            raise OSError(28, "No space left on device")
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(OSError, match="No space left"):
        taking.take(source, rename=True)
    assert (source.original / "a").read_text() == "1"
    taking.close()
