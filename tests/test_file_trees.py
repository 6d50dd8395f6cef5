"""Whatever files a checkpoint has, they come back; what cannot be stored is refused at the call."""

import os
import socket
import stat
from pathlib import Path
from uuid import uuid4

import pytest
from helpers import content, make_checkpoint, make_config, states, storage_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt import Checkpoint, CheckpointUploadMode, open_run, report
from ckpt.errors import ConfigError
from ckpt.staging import scan
from ckpt.testing import SlowStorage
from ckpt.uploading import upload_standalone

ASYNC, SYNC, NO_UPLOAD = CheckpointUploadMode
NFC, NFD = "caf\u00e9", "cafe\u0301"
NAMES = [
    "plain",
    "with space",
    "a+b",
    "a#b",
    "a?b",
    "100%",
    "%2F",
    ".hidden",
    "..two",
    "🔥.bin",
    NFC,
    NFD,
    "a=b&c",
    "[x]*",
    "~",
    "-r",
    "a\\b",
    "ü/ö/ä",
]


@pytest.mark.parametrize("mode", [None, ASYNC])
def test_names_of_all_kinds_come_back_as_they_were(storage_path, tmp_path, mode):
    """Unicode forms are kept apart; nothing is decoded or escaped."""
    files = {name: f"{number}" for number, name in enumerate(NAMES)}
    with open_run(make_config(storage_path)) as run:
        report({}, make_checkpoint(tmp_path / "ck", files), checkpoint_upload_mode=mode)
    found = content(run.result.checkpoint, tmp_path / "restored")
    assert found == {name: data.encode() for name, data in files.items()}


def test_zero_byte_files_empty_folders_and_modes_come_back(storage_path, tmp_path):
    """An object store has no folders and no permissions; the manifest has."""
    folder = tmp_path / "ck"
    make_checkpoint(folder, {"empty.bin": "", "run.sh": "#!/bin/sh", "deep/file": "x"})
    (folder / "run.sh").chmod(0o755)
    (folder / "empty.bin").chmod(0o600)
    (folder / "none/at/all").mkdir(parents=True)
    (folder / "deep/none").mkdir()
    with open_run(make_config(storage_path)) as run:
        report({}, Checkpoint.from_directory(folder))
    restored = run.result.checkpoint.to_directory(tmp_path / "restored")
    assert (restored / "empty.bin").read_bytes() == b""
    assert stat.S_IMODE((restored / "run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((restored / "empty.bin").stat().st_mode) == 0o600
    assert (restored / "none/at/all").is_dir()
    assert (restored / "deep/none").is_dir()


part = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/"), min_size=1, max_size=12).filter(
    lambda text: text not in {".", ".."} and not text.startswith(".ckpt-tmp") and len(text.encode()) < 60
)
trees = st.recursive(
    st.binary(max_size=64), lambda below: st.dictionaries(part, below, max_size=4), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def write(tree, folder: Path) -> None:
    folder.mkdir()
    for name, below in tree.items():
        write(below, folder / name) if isinstance(below, dict) else (folder / name).write_bytes(below)


def read(folder: Path):
    return {path.name: read(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def has_a_file(tree) -> bool:
    return any(not isinstance(below, dict) or has_a_file(below) for below in tree.values())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(tree=trees)
@pytest.mark.parametrize("store", ["local", "memory"])
def test_any_file_tree_comes_back(tmp_path, store, tree):
    """Files, folders and empty folders, on a file system and in a store that has keys only."""
    case = tmp_path / uuid4().hex
    case.mkdir()
    write(tree, case / "ck")
    destination = str(case / "stored") if store == "local" else f"memory://{uuid4().hex}/stored"
    if not has_a_file(tree):
        with pytest.raises(Exception, match="holds no file"):
            upload_standalone(Checkpoint.from_directory(case / "ck"), destination)
        return
    record = upload_standalone(Checkpoint.from_directory(case / "ck"), destination)
    assert read(Checkpoint(record.checkpoint.uri).to_directory(case / "restored")) == tree


# ------------------------------------------------------------------------------------------------------- symbolic links


@pytest.mark.parametrize("mode", [None, ASYNC])
def test_links_inside_the_checkpoint_are_followed_also_after_it_was_renamed_away(
    storage_path, tmp_path, wrap_storage, mode
):
    """Relative and absolute ones, to files and to folders."""
    wrap_storage(SlowStorage, "upload")
    folder = tmp_path / "ck"
    make_checkpoint(folder, {"blobs/1": "one", "blobs/2": "two", "snap/.keep": ""})
    (folder / "snap/relative").symlink_to("../blobs/1")
    (folder / "snap/absolute").symlink_to(folder / "blobs/2")
    (folder / "folder").symlink_to(folder / "blobs")
    (folder / "chain").symlink_to("snap/relative")
    with open_run(make_config(storage_path)) as run:
        report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
        storage_of(run).gate.set()
    assert content(run.result.checkpoint, tmp_path / "restored") == {
        "blobs/1": b"one", "blobs/2": b"two", "snap/.keep": b"", "snap/relative": b"one", "snap/absolute": b"two",
        "folder/1": b"one", "folder/2": b"two", "chain": b"one",
    }  # fmt: skip


def test_local_files_behind_links_are_deleted_after_a_custom_upload(tmp_path):
    """The links themselves too, and no file outside."""
    folder = tmp_path / "ck"
    make_checkpoint(folder, {"blobs/1": "one"})
    (folder / "snap").symlink_to("blobs")
    with open_run(make_config(tmp_path / "runs")) as run:
        report(
            {}, Checkpoint.from_directory(folder), checkpoint_upload_mode=ASYNC,
            checkpoint_upload_fn=lambda c, n: make_checkpoint(tmp_path / "out"),
        )  # fmt: skip
    assert states(run.result) == ["committed"]
    assert not any(folder.iterdir())


def broken(folder: Path) -> None:
    (folder / "bad").symlink_to("nowhere")


def escaping(folder: Path) -> None:
    (folder.parent / "outside").write_text("secret")
    (folder / "bad").symlink_to("../outside")


def escaping_to_a_folder(folder: Path) -> None:
    (folder / "bad").symlink_to("..")


def looping_on_itself(folder: Path) -> None:
    (folder / "bad").symlink_to("bad")


def looping_to_its_folder(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/bad").symlink_to("..")


def looping_through_two(folder: Path) -> None:
    for one, other in (("a", "bad"), ("bad", "a")):
        (folder / one).mkdir()
        (folder / one / "bad").symlink_to(f"../{other}")


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "bad")


def unix_socket(folder: Path) -> None:
    here = Path.cwd()
    os.chdir(folder)  # the path of a socket may have about 100 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("bad")
    finally:
        os.chdir(here)


def undecodable(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/bad\xff")).write_text("x")


def control_character(folder: Path) -> None:
    (folder / "bad\n").write_text("x")


@pytest.mark.parametrize(
    "spoil",
    [
        broken, escaping, escaping_to_a_folder, looping_on_itself, looping_to_its_folder, looping_through_two, fifo,
        unix_socket, undecodable, control_character,
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [None, ASYNC])
def test_what_cannot_be_stored_is_refused_at_the_call_and_named(tmp_path, spoil, mode):
    """Nothing is recorded, nothing of the directory is touched, and the run goes on."""
    folder = tmp_path / "ck"
    make_checkpoint(folder, {"good": "1"})
    spoil(folder)
    before = names(folder)
    with open_run(make_config(tmp_path / "runs")) as run:
        with pytest.raises(ConfigError, match="bad"):
            report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
        assert names(folder) == before
        report({}, make_checkpoint(tmp_path / "next"))
    assert states(run.result) == ["committed"]


def test_a_file_that_vanishes_while_the_directory_is_listed_is_left_out(tmp_path, monkeypatch):
    """An async writer renames its temporary files while `report()` takes its snapshot for a custom function."""
    folder = Path(make_checkpoint(tmp_path / "ck", {"a": "1", "b.tmp": "2"}).uri)
    real = os.stat

    def vanishing(path, *args, **kwargs):
        if str(path).endswith("b.tmp"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", vanishing)
    assert [file.path for file in scan(folder).files] == ["a"]


def test_hundreds_of_files_are_one_checkpoint(storage_path, tmp_path):
    """More than any pool has threads or a listing has entries on a page."""
    files = {f"{number % 40}/{number}": str(number) for number in range(400)}
    with open_run(make_config(storage_path)) as run:
        report({}, make_checkpoint(tmp_path / "ck", files), checkpoint_upload_mode=ASYNC)
    assert len(run.result.checkpoint.files()) == len(files)
    assert content(run.result.checkpoint, tmp_path / "restored") == {
        path: data.encode() for path, data in files.items()
    }
