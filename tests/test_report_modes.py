"""Every mode beside every other: what is reported, in which order it is published, and what happens to local files."""

import inspect
import itertools

import pytest
from helpers import DEADLINE, content, make_checkpoint, make_config, states

import ckpt
from ckpt import Checkpoint, CheckpointUploadMode, Run, get_checkpoint, open_run, report
from ckpt.errors import ConfigError, NoActiveRunError

ASYNC, SYNC, NO_UPLOAD = CheckpointUploadMode
KINDS = (ASYNC, SYNC, NO_UPLOAD, None)
PARAMETERS = [
    "metrics",
    "checkpoint",
    "checkpoint_dir_name",
    "checkpoint_upload_mode",
    "delete_local_checkpoint_after_upload",
    "checkpoint_upload_fn",
    "validation",
]


def test_all_sixteen_pairs_of_kinds_are_published_in_order_with_their_own_metrics(storage_path, tmp_path):
    """32 reports, each pair of kinds after the other: 24 checkpoints in order, and `get_checkpoint` never goes back."""
    kinds = list(itertools.chain.from_iterable(itertools.product(KINDS, repeat=2)))
    seen = []
    with open_run(make_config(storage_path)) as run:
        for number, kind in enumerate(kinds):
            checkpoint = None if kind is None else make_checkpoint(tmp_path / f"ck{number}", {"n": str(number)})
            report({"n": number}, checkpoint, checkpoint_upload_mode=kind)
            if (now := get_checkpoint()) is not None:
                seen.append(now.seq)
    result = run.result
    assert [record.seq for record in result.history] == list(range(32))
    assert [record.metrics["n"] for record in result.history] == list(range(32))
    assert set(states(result)) == {"committed"}
    with_checkpoint = [number for number, kind in enumerate(kinds) if kind is not None]
    assert [metrics["n"] for _, metrics in result.best_checkpoints] == with_checkpoint
    assert len(with_checkpoint) == 24
    assert [checkpoint.seq for checkpoint, _ in result.best_checkpoints] == with_checkpoint
    for number, (checkpoint, _) in zip(with_checkpoint, result.best_checkpoints, strict=True):
        assert content(checkpoint, tmp_path / f"restored{number}") == {"n": str(number).encode()}
    assert seen == sorted(seen)


def test_a_sync_report_returns_after_its_commit(storage_path, tmp_path):
    """When the call returns the checkpoint exists for everybody."""
    with open_run(make_config(storage_path)) as run:
        handle = report({"a": 1}, make_checkpoint(tmp_path / "ck"), checkpoint_upload_mode=SYNC)
        assert handle.state.value == "committed"
        assert [found.seq for found in ckpt.committed(run.uri)] == [handle.seq]


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("mode", [None, ASYNC, SYNC, NO_UPLOAD])
def test_local_files_go_only_where_that_is_asked_for_or_the_default_of_a_mode_that_moves_them(tmp_path, mode, asked):
    """ASYNC named deletes by default; SYNC, NO_UPLOAD and a mode left out do not; NO_UPLOAD never does."""
    folder = tmp_path / "ck"
    checkpoint = make_checkpoint(folder, {"a": "1", "sub/b": "2"})
    with open_run(make_config(tmp_path / "runs")) as run:
        report({}, checkpoint, checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=asked)
    expected = mode is ASYNC if asked is None else asked
    gone = expected and mode is not NO_UPLOAD
    assert folder.is_dir()
    assert sorted(path.name for path in folder.rglob("*")) == ([] if gone else ["a", "b", "sub"])
    assert states(run.result) == ["committed"]
    assert content(run.result.checkpoint, tmp_path / "restored") == {"a": b"1", "sub/b": b"2"}


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("mode", [None, ASYNC, SYNC])
def test_with_a_custom_function_the_same_files_go_after_the_commit(storage_path, tmp_path, mode, asked):
    """The directory stays where it is until its commit, and files that came after the call are not touched."""
    folder, elsewhere = tmp_path / "ck", tmp_path / "elsewhere"
    checkpoint = make_checkpoint(folder, {"a": "1"})

    def upload(given, name):
        assert (folder / "a").exists()
        (folder / "late").write_text("came after the call")
        return make_checkpoint(elsewhere / name, {"a": "1"})

    with open_run(make_config(storage_path)) as run:
        report(
            {}, checkpoint, checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=asked,
            checkpoint_upload_fn=upload,
        ).wait(DEADLINE)  # fmt: skip
    gone = mode is ASYNC if asked is None else asked
    assert sorted(path.name for path in folder.iterdir()) == (["late"] if gone else ["a", "late"])
    assert states(run.result) == ["committed"]


def test_report_has_the_names_order_and_defaults_of_ray_train():
    """Code written for `ray.train.report` calls it without a change."""
    for function, skipped in ((report, 0), (Run.report, 1)):
        parameters = list(inspect.signature(function).parameters.values())[skipped:]
        assert [parameter.name for parameter in parameters] == PARAMETERS
        assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        assert [parameter.default for parameter in parameters[1:]] == [None, None, None, None, None, False]


def test_positional_and_keyword_calls_do_the_same(storage_path, tmp_path):
    """All seven parameters, given both ways."""
    called = []

    def upload(given, name):
        called.append(name)
        return make_checkpoint(tmp_path / "out" / name)

    with open_run(make_config(storage_path)) as run:
        report({"a": 1}, make_checkpoint(tmp_path / "one"), "one", SYNC, True, upload, False)
        report(
            metrics={"a": 2},
            checkpoint=make_checkpoint(tmp_path / "two"),
            checkpoint_dir_name="two",
            checkpoint_upload_mode=SYNC,
            delete_local_checkpoint_after_upload=True,
            checkpoint_upload_fn=upload,
            validation=False,
        )
    assert called == ["one", "two"]
    assert [record.name for record in run.result.history] == ["one", "two"]
    assert not any((tmp_path / "one").iterdir())
    assert not any((tmp_path / "two").iterdir())


def test_ray_checkpoint_dir_names_may_repeat(storage_path, tmp_path):
    """The same name twice is two locations; which one is newest says the order of the reports."""
    with open_run(make_config(storage_path)) as run:
        for number in range(3):
            report({}, make_checkpoint(tmp_path / str(number), {"n": str(number)}), "last")
    locations = [record.checkpoint.uri for record in run.result.history]
    assert len(set(locations)) == 3
    assert content(run.result.checkpoint, tmp_path / "restored") == {"n": b"2"}


def test_metadata_of_a_checkpoint_goes_into_its_manifest(storage_path, tmp_path):
    """`set_metadata` before the report is read back from the committed checkpoint."""
    checkpoint = make_checkpoint(tmp_path / "ck")
    checkpoint.set_metadata({"tokenizer": "v3"})
    with open_run(make_config(storage_path)) as run:
        report({"loss": 1.0}, checkpoint, checkpoint_upload_mode=SYNC)
    found = Checkpoint(run.result.checkpoint.uri)
    assert found.get_metadata() == {"tokenizer": "v3"}
    assert found.metrics == {"loss": 1.0}


@pytest.mark.parametrize("mode", ["async", True, 1])
def test_a_mode_that_is_no_mode_is_refused_at_the_call(tmp_path, mode):
    """The text names the value; the run goes on."""
    with open_run(make_config(tmp_path / "runs")) as run:
        with pytest.raises(ConfigError, match=repr(mode)):
            report({}, make_checkpoint(tmp_path / "ck"), checkpoint_upload_mode=mode)
        report({}, make_checkpoint(tmp_path / "ck"))
    assert states(run.result) == ["committed"]


def test_the_functions_of_a_run_say_that_there_is_none():
    """Outside a run every one of them raises the same, with what to do."""
    for call in (get_checkpoint, ckpt.get_context, ckpt.stop_requested, ckpt.get_all_reported_checkpoints):
        with pytest.raises(NoActiveRunError, match="open_run"):
            call()
    with pytest.raises(NoActiveRunError, match="open_run"):
        report({})
