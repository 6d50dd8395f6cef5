"""Removing a run: all of it, only it, never a living one, and to the end after a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from helpers import make_checkpoint, make_config

from ckpt import CheckpointUploadMode, committed, list_runs, open_run, removing
from ckpt.errors import CheckpointNotFoundError, RunBusyError
from ckpt.removing import remove
from ckpt.storage import open_storage
from ckpt.testing import WrappedStorage
from ckpt_tasks import cli


def make_run(storage_path: str | Path, folder: Path, name: str = "digits") -> str:
    with open_run(make_config(storage_path, name)) as run:
        for index in range(3):
            run.report({"i": index}, make_checkpoint(folder / f"{name}-{index}", {"w.bin": b"weights", "a/b": b"x"}))
    return f"{storage_path}/{name}"


def keys(uri: str) -> list[str]:
    return [entry.key for entry in open_storage(uri).list()]


def test_a_removed_run_is_gone_and_its_neighbour_is_not(storage_path: str, tmp_path: Path) -> None:
    run, other = make_run(storage_path, tmp_path), make_run(storage_path, tmp_path, "digits2")
    before = keys(other)
    gone = remove(run)
    assert (gone.commits, gone.left) == (3, ())
    assert keys(run) == []
    assert keys(other) == before
    assert [summary.name for summary in list_runs(storage_path)] == ["digits2"]
    if "://" not in storage_path:
        assert not Path(run).exists()


def test_its_name_can_be_used_again_from_the_start(storage_path: str, tmp_path: Path) -> None:
    run = make_run(storage_path, tmp_path)
    remove(run)
    assert [checkpoint.seq for checkpoint in committed(make_run(storage_path, tmp_path / "again"))] == [0, 1, 2]


def test_what_is_not_of_the_run_stays_and_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", tmp_path)
    Path(run, "notes.txt").write_text("mine")
    assert remove(run).left == ("notes.txt",)
    assert keys(run) == ["notes.txt"]


def test_an_external_checkpoint_is_never_touched(tmp_path: Path) -> None:
    outside = make_checkpoint(tmp_path / "outside")
    with open_run(make_config(tmp_path / "runs", "digits")) as run:
        run.report({}, outside, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD).wait(60)
    assert remove(run.uri).commits == 1
    assert (tmp_path / "outside/model.bin").read_bytes() == b"weights"


def test_a_run_whose_owner_is_alive_is_refused_and_stays_whole(tmp_path: Path) -> None:
    with open_run(make_config(tmp_path / "runs", "digits", lease_time=3.0)) as run:
        run.report({}, make_checkpoint(tmp_path / "c")).wait(60)
        with pytest.raises(RunBusyError, match="is alive"):
            remove(run.uri, lease_time=3.0)
        assert [checkpoint.seq for checkpoint in committed(run.uri)] == [0]
        run.report({}, make_checkpoint(tmp_path / "d"))
    assert [checkpoint.seq for checkpoint in committed(run.uri)] == [0, 1]


def test_a_run_whose_owner_was_killed_is_removed_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib, ckpt\n"
        "with ckpt.open_run(ckpt.RunConfig(name='digits', storage_path=sys.argv[1])) as run:\n"
        "    with ckpt.checkpoint_dir() as folder:\n"
        "        pathlib.Path(folder, 'w').write_text('x')\n"
        "        ckpt.report({}, ckpt.Checkpoint.from_directory(folder)).wait(60)\n"
        "    os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "runs")], timeout=120, check=False)
    assert done.returncode == 9
    assert remove(str(tmp_path / "runs/digits"), lease_time=600.0).commits == 1


class _Crash(WrappedStorage):
    """Dies at the n-th deletion."""

    def __init__(self, inner, crash_at: int) -> None:
        super().__init__(inner)
        self.left = crash_at

    def delete(self, keys) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.inner.delete(keys)


@pytest.mark.parametrize("crash_at", range(9))
def test_after_a_crash_at_any_deletion_no_half_checkpoint_exists_and_the_next_try_finishes(
    storage_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    run = make_run(storage_path, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(removing, "_PORTION", 2)
        patch.setattr(removing, "open_storage", lambda uri, **kwargs: _Crash(open_storage(uri, **kwargs), crash_at))
        with pytest.raises(KeyboardInterrupt):
            remove(run)
    commits = [key for key in keys(run) if key.startswith("commits/")]
    files = {key for key in keys(run) if key.startswith("checkpoints/")}
    assert len(files) == 6 or not commits, "files go only when no commit names them"
    remove(run)
    assert keys(run) == []


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no run is at"):
        remove(str(tmp_path / "nowhere"))


def test_a_run_in_a_bucket_is_removed_with_every_object(
    moto_server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in moto_server.env.items():
        monkeypatch.setenv(name, value)
    bucket = f"rm-{uuid4().hex}"
    moto_server.client().create_bucket(Bucket=bucket)
    remove(make_run(f"s3://{bucket}/runs", tmp_path))
    assert "Contents" not in moto_server.client().list_objects_v2(Bucket=bucket)


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_command_asks_and_takes_only_a_yes(tmp_path: Path, monkeypatch, capsys) -> None:
    run = make_run(tmp_path / "runs", tmp_path)
    assert cli.main(["rm", run]) == 2
    assert "add --yes" in capsys.readouterr().err
    master, slave = os.openpty()
    with os.fdopen(slave, "r") as terminal, os.fdopen(master, "w") as typing:
        monkeypatch.setattr(sys, "stdin", terminal)
        typing.write("n\n")
        typing.flush()
        assert cli.main(["rm", run]) == 2
        assert "nothing was removed" in capsys.readouterr().err
        typing.write("y\n")
        typing.flush()
        assert cli.main(["rm", run]) == 0
    assert "3 commits" in capsys.readouterr().out
    assert not Path(run).exists()


def test_the_command_tells_machines_what_it_removed(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "runs", tmp_path)
    assert cli.main(["rm", run, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commits"] == 3
    assert cli.main(["rm", run, "--yes"]) == 3
