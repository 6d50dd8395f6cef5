"""`Checkpoint`: a reference that travels, and restores whole or not at all."""

import json
import os
import pickle
from pathlib import Path

import pydantic
import pytest
from helpers import content, make_checkpoint, make_config

from ckpt import Checkpoint, CheckpointUploadMode, open_run, open_storage, report
from ckpt.errors import CheckpointNotFoundError, CommittedError, ConfigError, CorruptCheckpointError, MetricsError
from ckpt.verifying import verify

SYNC = CheckpointUploadMode.SYNC


@pytest.fixture
def committed(storage_path, tmp_path):
    """A committed checkpoint with two files, known by its URI alone."""
    with open_run(make_config(storage_path)) as run:
        report(
            {"loss": 0.5}, make_checkpoint(tmp_path / "ck", {"a": "12345", "sub/b": "x"}), checkpoint_upload_mode=SYNC
        )
    return Checkpoint(run.result.checkpoint.uri)


def test_a_committed_checkpoint_is_known_from_its_uri_alone(committed):
    """seq, metrics, files with sizes and digests: found among the run's commits."""
    assert committed.seq == 0
    assert committed.metrics == {"loss": 0.5}
    assert [(file.path, file.size) for file in committed.files()] == [("a", 5), ("sub/b", 1)]
    assert all(file.digest.startswith("xxh3-128:") for file in committed.files())


def test_what_is_not_committed_says_so(tmp_path):
    """It has files, and no seq."""
    checkpoint = make_checkpoint(tmp_path / "ck", {"a": "1"})
    assert [(file.path, file.size) for file in checkpoint.files()] == [("a", 1)]
    assert checkpoint.metadata == {}
    with pytest.raises(CheckpointNotFoundError, match="no manifest"):
        _ = checkpoint.seq


def test_to_directory_makes_a_new_directory_or_fills_an_empty_one(committed, tmp_path):
    """Or a temporary one, if none is named."""
    (tmp_path / "empty").mkdir()
    assert content(committed, tmp_path / "deep/new") == {"a": b"12345", "sub/b": b"x"}
    assert content(committed, tmp_path / "empty") == {"a": b"12345", "sub/b": b"x"}
    made = committed.to_directory()
    assert sorted(path.name for path in made.iterdir()) == ["a", "sub"]


def test_to_directory_refuses_what_has_content(committed, tmp_path):
    """Files of two checkpoints would mix; nothing there is touched."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for target in ("full", "file"):
        with pytest.raises(ConfigError, match="not an empty directory"):
            committed.to_directory(tmp_path / target)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


@pytest.mark.parametrize("damage", [b"1234X", b"1234", b""])
def test_a_damaged_checkpoint_restores_nothing_and_names_the_file(committed, tmp_path, damage):
    """Same size, shorter, empty: the digest or the size tells, and `verify` too."""
    committed.open().write("a", damage)
    with pytest.raises(CorruptCheckpointError, match=r"^a of"):
        committed.to_directory(tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    assert not list(tmp_path.glob("*partial*"))
    assert verify(committed).problems[0].startswith("a has ")
    with pytest.raises(CorruptCheckpointError, match="a has"):
        verify(committed).raise_if_corrupt()


def test_a_missing_file_restores_nothing_and_verify_names_it(committed, tmp_path):
    """Unlisted files are no problem, and are not restored."""
    committed.open().delete(["sub/b"])
    committed.open().write("extra", b"")
    with pytest.raises(FileNotFoundError, match="sub/b"):
        committed.to_directory(tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    found = verify(committed)
    assert found.problems == ("sub/b is missing",)
    assert found.unlisted == ("extra",)
    assert not found.ok


def test_verify_without_content_looks_at_presence_and_size_only(committed):
    """One listing."""
    committed.open().write("a", b"1234X")
    assert [problem.split()[0] for problem in verify(committed).problems] == ["a"]
    assert verify(committed, content=False).ok


def test_as_directory_is_the_directory_itself_where_it_is_local_else_a_copy_for_the_block(committed):
    """The copy is gone afterwards, the original is not."""
    with committed.as_directory() as folder:
        assert (folder / "a").read_text() == "12345"
    assert folder.exists() is committed.is_local


def test_metadata_can_be_set_until_the_commit(committed, tmp_path):
    """After it, it is an error that says what to do instead."""
    checkpoint = make_checkpoint(tmp_path / "new")
    checkpoint.set_metadata({"a": 1, "b": 1})
    checkpoint.update_metadata({"b": 2})
    assert checkpoint.get_metadata() == {"a": 1, "b": 2}
    with pytest.raises(MetricsError, match="'c'"):
        checkpoint.set_metadata({"c": object()})
    with pytest.raises(CommittedError, match="record_evaluation"):
        committed.set_metadata({"a": 1})


class Parameters(pydantic.BaseModel):
    checkpoint: Checkpoint


def test_a_checkpoint_pickles_and_is_a_plain_string_in_json_and_forms(committed):
    """With credentials or options it is an object; never with a secret."""
    named = Checkpoint("s3://bucket/key", "profile:dev", storage_options={"endpoint_url": "http://localhost:1"})
    for checkpoint in (committed, named):
        assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint
        text = Parameters(checkpoint=checkpoint).model_dump_json()
        found = Parameters.model_validate_json(text).checkpoint
        assert (found.uri, found.credentials, found.storage_options) == (
            checkpoint.uri, checkpoint.credentials, checkpoint.storage_options,
        )  # fmt: skip
    assert json.loads(Parameters(checkpoint=committed).model_dump_json())["checkpoint"] == committed.uri
    assert Parameters.model_json_schema()["properties"]["checkpoint"]["type"] == "string"


@pytest.mark.parametrize("value", ["", "s3://", "s3://b/../c", 5, None, {"url": "x"}, ["s3://b/c"]])
def test_what_is_no_reference_is_a_validation_error_in_a_form(value):
    """And not a crash of the form."""
    with pytest.raises(pydantic.ValidationError):
        Parameters(checkpoint=value)


def test_secrets_in_options_are_refused_and_not_repeated():
    """A reference is pickled, logged and shown."""
    with pytest.raises(ConfigError, match="credentials=") as caught:
        Checkpoint("s3://bucket/key", storage_options={"secret": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_spellings_of_one_place_are_one_reference(tmp_path, monkeypatch):
    """Relative paths are made absolute; a trailing slash says nothing."""
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.from_directory("ck") == Checkpoint(f"{tmp_path}/ck/") == Checkpoint(Path("ck"))
    assert len({Checkpoint("s3://b/k"), Checkpoint("s3://b/k/"), Checkpoint("s3://b//k")}) == 1
    assert Checkpoint("s3://b/k").path == "b/k"
    assert os.fspath(Checkpoint("ck")) == f"{tmp_path}/ck"
    with pytest.raises(TypeError, match="to_directory"):
        os.fspath(Checkpoint("s3://b/k"))


def test_a_crafted_manifest_cannot_write_outside(storage_path, tmp_path):
    """Paths are checked when they are read, too."""
    storage = open_storage(storage_path)
    body = {"format": 1, "kind": "manifest", "seq": 0, "attempt": 0, "name": "x", "location": "x", "empty_dirs": []}
    for path in ("../evil", "/evil", "a/../../evil", "", 5, "a\x00b"):
        storage.write("x.manifest.json", json.dumps({**body, "files": [{"path": path, "size": 1}]}).encode())
        with pytest.raises(ValueError, match=r"x\.manifest\.json is not a commit object"):
            Checkpoint(f"{storage.uri}/x").to_directory(tmp_path / "restored")
    storage.delete(["x.manifest.json"])
