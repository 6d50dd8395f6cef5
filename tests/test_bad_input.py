"""Bad input is refused at the call or at the start of a run: what, where, what to do; and nothing is left behind."""

import os
from pathlib import Path

import pytest
from helpers import make_checkpoint, make_config, states, storage_of

from ckpt import Checkpoint, CheckpointUploadMode, list_runs, open_run, report
from ckpt.errors import AccessDeniedError, CkptError, ConfigError
from ckpt.testing import FailOnceStorage

ASYNC, SYNC, NO_UPLOAD = CheckpointUploadMode


def refuse(tmp_path, *arguments, error=ConfigError, says, storage_path=None, **options):
    """`report` with these arguments is refused, nothing of it is anywhere, and the next report works."""
    with open_run(make_config(storage_path or tmp_path / "runs")) as run:
        before = [entry.key for entry in storage_of(run).list()]
        with pytest.raises(error, match=says):
            report({}, *arguments, **options)
        assert [entry.key for entry in storage_of(run).list()] == before
        handle = report({"n": 1}, make_checkpoint(tmp_path / "good"), checkpoint_upload_mode=SYNC)
    assert handle.seq == 0
    assert states(run.result) == ["committed"]


@pytest.mark.parametrize("mode", [None, ASYNC, SYNC, NO_UPLOAD])
def test_a_missing_directory_is_refused_and_named(tmp_path, mode):
    """As a typo in a path."""
    refuse(tmp_path, Checkpoint.from_directory(tmp_path / "nowhere"), checkpoint_upload_mode=mode, says="nowhere")


@pytest.mark.parametrize("mode", [None, ASYNC, SYNC, NO_UPLOAD])
def test_a_file_instead_of_a_directory_is_refused_and_named(tmp_path, mode):
    """Everybody tries `Checkpoint.from_directory("model.pt")` once."""
    (tmp_path / "model.pt").write_text("x")
    refuse(tmp_path, Checkpoint.from_directory(tmp_path / "model.pt"), checkpoint_upload_mode=mode, says=r"model\.pt")
    assert (tmp_path / "model.pt").read_text() == "x"


@pytest.mark.parametrize("mode", [None, ASYNC, SYNC])
def test_an_empty_directory_is_refused(tmp_path, mode):
    """Somebody forgot to save, or saved after the report."""
    (tmp_path / "empty/folder").mkdir(parents=True)
    refuse(
        tmp_path,
        Checkpoint.from_directory(tmp_path / "empty"),
        checkpoint_upload_mode=mode,
        says="save before reporting",
    )


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/../b", "/abs", "", "a//b", ".", "a\x00b", "a\nb", "x\udcff", "n" * 901]
)
def test_a_name_that_is_no_relative_path_is_refused(tmp_path, name):
    """It would lead out of the run."""
    refuse(tmp_path, make_checkpoint(tmp_path / "ck"), name, says="checkpoint_dir_name")


@pytest.mark.parametrize("name", [5, Path("x"), b"x"])
def test_a_name_of_another_type_is_refused(tmp_path, name):
    """As `checkpoint_dir_name=epoch`."""
    refuse(tmp_path, make_checkpoint(tmp_path / "ck"), name, says="checkpoint_dir_name .* give a string")


@pytest.mark.parametrize("checkpoint", ["/some/path", Path("/some/path"), {"state": 1}, 3])
def test_what_is_no_checkpoint_is_refused_with_how_to_make_one(tmp_path, checkpoint):
    """Paths are the usual mistake."""
    refuse(tmp_path, checkpoint, says="from_directory")


def test_validation_in_a_run_that_has_no_function_for_it_is_refused(tmp_path):
    """Rather than being ignored."""
    refuse(tmp_path, make_checkpoint(tmp_path / "ck"), validation=True, says="validation_fn")


def test_validation_without_a_checkpoint_is_refused(tmp_path):
    """There is nothing to validate."""
    refuse(tmp_path, validation=True, says="needs a checkpoint")


@pytest.mark.parametrize("mode", [None, ASYNC, SYNC])
@pytest.mark.parametrize("where", [".", "runs", "runs/run", "runs/run/commits"])
def test_a_directory_that_contains_the_runs_storage_or_lies_in_it_is_refused(tmp_path, where, mode):
    """It would be uploaded into itself, and with ASYNC be taken away with everything in it."""
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    refuse(tmp_path, Checkpoint.from_directory(tmp_path / where), checkpoint_upload_mode=mode, says="the run's storage")


def test_it_is_refused_behind_a_symbolic_link_too(tmp_path):
    """In either path."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refuse(
        tmp_path, Checkpoint.from_directory(tmp_path / "real"), checkpoint_upload_mode=ASYNC, says="the run's storage",
        storage_path=tmp_path / "link/runs",
    )  # fmt: skip


def test_the_root_of_the_file_system_is_refused(tmp_path):
    """Whatever the mode."""
    refuse(tmp_path, Checkpoint.from_directory("/"), checkpoint_upload_mode=ASYNC, says="root of the file system")


def test_a_directory_that_is_a_committed_checkpoint_is_not_taken_away(tmp_path):
    """A custom function returned it; renaming it away for the next report would destroy that commit."""
    folder = make_checkpoint(tmp_path / "ck", {"a": "1"})
    with open_run(make_config(tmp_path / "runs")) as run:
        report({}, folder, checkpoint_upload_mode=SYNC, checkpoint_upload_fn=lambda checkpoint, name: checkpoint)
        for path in (folder, Checkpoint.from_directory(tmp_path)):
            with pytest.raises(ConfigError, match=r"committed checkpoint|the run's storage"):
                report({}, path, checkpoint_upload_mode=ASYNC)
        report({}, folder, checkpoint_upload_mode=SYNC)
    assert states(run.result) == ["committed", "committed"]
    assert (tmp_path / "ck/a").read_text() == "1"


# ----------------------------------------------------------------------------------------------------- start of the run


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_storage_that_cannot_be_written_to_is_refused_at_the_start(tmp_path):
    """Before any training."""
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(AccessDeniedError, match="locked"), open_run(make_config(tmp_path / "locked/runs")):
        pytest.fail("the run began")


def test_a_storage_path_that_is_a_file_is_refused_at_the_start(tmp_path):
    """With its name."""
    (tmp_path / "file").write_text("x")
    with pytest.raises((CkptError, OSError), match="file"), open_run(make_config(tmp_path / "file")):
        pytest.fail("the run began")
    assert (tmp_path / "file").read_text() == "x"


def test_a_storage_that_refuses_the_first_write_is_refused_at_the_start(storage_path, tmp_path, wrap_storage):
    """Nothing is left open: the next try of the same name works."""
    wrap_storage(FailOnceStorage, "create", error=AccessDeniedError("create x: 403"), times=1)
    with pytest.raises(AccessDeniedError, match="403"), open_run(make_config(storage_path)):
        pytest.fail("the run began")


def test_a_start_that_fails_half_way_lets_the_next_one_in(storage_path, tmp_path, wrap_storage):
    """The claimed attempt is ended, so that nobody waits for its lease."""
    with open_run(make_config(storage_path)):
        pass
    with pytest.raises(CkptError, match="must"), open_run(make_config(storage_path, resume="must")):
        pytest.fail("the run began")
    with open_run(make_config(storage_path)) as run:
        report({}, make_checkpoint(tmp_path / "ck"))
    assert states(run.result) == ["committed"]
    assert [found.name for found in list_runs(storage_path)] == ["run"]
