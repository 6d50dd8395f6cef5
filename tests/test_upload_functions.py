"""Custom upload functions: whatever one does, its report has one clear end, and the run goes on."""

import functools
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from helpers import DEADLINE, content, make_checkpoint, make_config, reasons, states

from ckpt import Checkpoint, CheckpointUploadMode, FailurePolicy, get_context, open_run, open_storage, report
from ckpt.errors import UploadFunctionError

ASYNC, SYNC, NO_UPLOAD = CheckpointUploadMode
GREEN = FailurePolicy(red_on="nothing", stop_after=None)


class CheckpointException(BaseException):
    pass


def end_of(tmp_path, storage_path, upload_fn, **options):
    """The record of one report with `upload_fn`, after which the run commits another one."""
    with open_run(make_config(storage_path, upload=options)) as run:
        given = make_checkpoint(tmp_path / "ck", {"a": "1"})
        record = report({}, given, checkpoint_upload_fn=upload_fn).wait(DEADLINE)
        assert report({}, make_checkpoint(tmp_path / "next")).wait(DEADLINE).state.value == "committed"
    assert states(run.result) == [record.state.value, "committed"]
    return record


def raising(error):
    def upload(checkpoint, name):
        raise error

    return upload


# -------------------------------------------------------------------------------------------- what must not be returned


@pytest.mark.parametrize("value", [None, "s3://bucket/key", {"uri": "x"}, 7, [1]])
def test_what_is_no_checkpoint_fails_the_report_and_says_what_it_was(storage_path, tmp_path, value):
    """The reason has the function's name and the value."""
    record = end_of(tmp_path, storage_path, lambda checkpoint, name: value)
    assert record.state.value == "failed"
    assert "must return a ckpt.Checkpoint" in record.reason
    assert "<lambda>" in record.reason
    assert (repr(value)[:20] if value is not None else "None") in record.reason


def test_what_it_raises_is_the_reason(storage_path, tmp_path):
    """With the type."""
    record = end_of(tmp_path, storage_path, raising(KeyError("no such shard")))
    assert record.state.value == "failed"
    assert "KeyError: 'no such shard'" in record.reason


def test_a_base_exception_of_its_own_kind_is_a_failure_like_any_other(storage_path, tmp_path):
    """Torch's `CheckpointException` is a BaseException; it must not end the upload's thread unseen."""
    record = end_of(tmp_path, storage_path, raising(CheckpointException("rank 3 failed")))
    assert record.state.value == "failed"
    assert "CheckpointException: rank 3 failed" in record.reason


def test_a_reason_gives_no_secret_of_a_url_away(storage_path, tmp_path):
    """A presigned URL in somebody's exception."""
    record = end_of(tmp_path, storage_path, raising(OSError("GET https://b.s3/x?X-Amz-Signature=abc123def failed")))
    assert "abc123def" not in record.reason


def test_text_that_is_no_unicode_in_a_reason_does_not_stop_the_run(storage_path, tmp_path):
    """Undecodable file names end up in exceptions; the history must hold them somehow."""
    record = end_of(tmp_path, storage_path, raising(OSError("bad name \udcff")))
    assert record.state.value == "failed"


def test_an_empty_location_fails(storage_path, tmp_path):
    """Nothing is there to be committed, and the reason says where."""
    record = end_of(tmp_path, storage_path, lambda checkpoint, name: Checkpoint("memory://nothing/here"))
    assert record.state.value == "failed"
    assert "memory://nothing/here" in record.reason


def test_a_function_that_never_returns_is_abandoned_at_its_deadline(storage_path, tmp_path):
    """Its slot comes back, and the reason names it."""
    release = threading.Event()
    try:
        record = end_of(
            tmp_path, storage_path, lambda checkpoint, name: release.wait(DEADLINE), upload_fn_timeout=0.2,
            max_concurrent_uploads=1,
        )  # fmt: skip
    finally:
        release.set()
    assert record.state.value == "failed"
    assert "did not return within" in record.reason


def test_a_process_exits_although_a_function_never_returns(tmp_path):
    """The function runs in a daemon thread; neither the drain nor the interpreter's end waits for it."""
    code = f"""
import threading
from ckpt import *
limits = UploadConfig(upload_fn_timeout=0.2)
config = RunConfig(name="run", storage_path={str(tmp_path / "runs")!r}, upload_config=limits)
try:
    with open_run(config) as run:
        given = Checkpoint.from_directory({str(tmp_path)!r})
        report({{}}, given, checkpoint_upload_fn=lambda c, n: threading.Event().wait())
except errors.CheckpointsLostError as error:
    print("red:", error.result.totals.failed)
"""
    (tmp_path / "file").write_text("x")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "red: 1\n"


# ------------------------------------------------------------------------------------------------------ where it may be


def test_a_location_outside_the_run_is_committed_as_external_and_nothing_is_written_there(storage_path, tmp_path):
    """The files are listed and sized as they lie."""
    outside = tmp_path / "outside"
    record = end_of(tmp_path, storage_path, lambda checkpoint, name: make_checkpoint(outside, {"x": "123"}))
    assert record.state.value == "committed"
    assert record.checkpoint.uri == str(outside)
    assert record.checkpoint.manifest.external
    assert [(file.path, file.size) for file in record.checkpoint.files()] == [("x", 3)]
    assert [path.name for path in outside.iterdir()] == ["x"]


@pytest.mark.parametrize("mode", [None, ASYNC, SYNC])
def test_the_checkpoint_it_was_given_may_be_returned_and_is_never_deleted_then(tmp_path, mode):
    """ASYNC's default deletes the local directory after the commit; here that directory is the committed data."""
    with open_run(make_config(tmp_path / "runs")) as run:
        report(
            {}, make_checkpoint(tmp_path / "ck", {"a": "1"}), checkpoint_upload_mode=mode,
            checkpoint_upload_fn=lambda checkpoint, name: checkpoint,
        )  # fmt: skip
    assert content(run.result.checkpoint, tmp_path / "restored") == {"a": b"1"}


def test_the_checkpoint_it_was_given_is_recognised_behind_a_symbolic_link(tmp_path):
    """Another spelling of the same directory is still the committed data."""
    folder = tmp_path / "ck"
    (tmp_path / "link").symlink_to(folder)
    with open_run(make_config(tmp_path / "runs")) as run:
        report(
            {}, make_checkpoint(folder, {"a": "1"}), checkpoint_upload_mode=ASYNC,
            checkpoint_upload_fn=lambda checkpoint, name: Checkpoint(tmp_path / "link"),
        )  # fmt: skip
    assert (folder / "a").read_text() == "1"
    assert states(run.result) == ["committed"]


@pytest.mark.parametrize(("first", "second"), [("x", "x"), ("x", "x/below"), ("x/below", "x")])
def test_a_location_that_equals_contains_or_lies_in_another_is_refused(storage_path, tmp_path, first, second):
    """The second report fails and names both; the first stays as it was."""
    with open_run(make_config(storage_path, failure_policy=GREEN)) as run:
        for where in (first, second):
            place = make_checkpoint(tmp_path / "out" / where, {"f/g": where})
            report({}, make_checkpoint(tmp_path / "ck"), checkpoint_upload_fn=lambda c, n, at=place: at).wait(DEADLINE)
        report({}, make_checkpoint(tmp_path / "next")).wait(DEADLINE)
    assert states(run.result) == ["committed", "failed", "committed"]
    assert str(tmp_path / "out" / first) in reasons(run.result)[1]
    assert "build_checkpoint_path_from_name" in reasons(run.result)[1]


@pytest.mark.parametrize("where", ["runs/run", "runs/run/commits", "runs/run/attempts/x", "runs", "."])
def test_a_location_among_the_records_of_the_run_is_refused(tmp_path, where):
    """The run itself, its control folders, and what contains the run."""
    record = end_of(
        tmp_path, tmp_path / "deep/runs", lambda c, n: make_checkpoint(tmp_path / "deep" / where, {"file": "x"})
    )
    assert record.state.value == "failed"
    assert "run's own records" in record.reason


def test_the_path_that_the_context_gives_is_inside_the_run_and_ours_to_prune(storage_path, tmp_path):
    """Both the scheme-less form of Ray and the URI name the same place; it is committed as relative to the run."""

    def upload(checkpoint, name):
        storage = get_context().get_storage()
        uri = storage.build_checkpoint_uri_from_name(name)
        assert uri.endswith(storage.build_checkpoint_path_from_name(name))
        open_storage(uri).write("shard", b"12345")
        return Checkpoint(uri)

    record = end_of(tmp_path, storage_path, upload)
    assert record.state.value == "committed"
    assert record.checkpoint.manifest.location == "checkpoints/checkpoint_000000-a1"
    assert content(record.checkpoint, tmp_path / "restored") == {"shard": b"12345"}


def test_no_upload_commits_what_is_there_and_refuses_it_a_second_time(storage_path, tmp_path):
    """The same directory twice would be one checkpoint with two names."""
    folder = make_checkpoint(tmp_path / "there", {"a": "1"})
    with open_run(make_config(storage_path, failure_policy=GREEN)) as run:
        for _ in range(2):
            report({}, folder, checkpoint_upload_mode=NO_UPLOAD).wait(DEADLINE)
    assert states(run.result) == ["committed", "failed"]


# --------------------------------------------------------------------------------------------------- what it may return


@dataclass
class AsyncSaveResponse:
    staging_completion: Future
    upload_completion: Future


def future(value=None, *, error=None):
    made = Future()
    if error is not None:
        made.set_exception(error)
    else:
        made.set_result(value)
    return made


def test_coroutines_futures_and_async_save_responses_are_awaited(storage_path, tmp_path):
    """Also one that resolves to another."""

    async def coroutine(checkpoint, name):
        return checkpoint

    shapes = [
        coroutine,
        lambda checkpoint, name: future(checkpoint),
        lambda checkpoint, name: future(future(checkpoint)),
        lambda checkpoint, name: future(coroutine(checkpoint, name)),
        functools.partial(lambda where, checkpoint, name: where, make_checkpoint(tmp_path / "partial")),
        lambda checkpoint, name: AsyncSaveResponse(future(), future(checkpoint)),
    ]
    with open_run(make_config(storage_path)) as run:
        for number, shape in enumerate(shapes):
            report({}, make_checkpoint(tmp_path / f"ck{number}"), checkpoint_upload_fn=shape)
    assert states(run.result) == ["committed"] * len(shapes)


def test_a_failing_one_of_them_is_the_reason(storage_path, tmp_path):
    """Whichever part fails, of a response also the staging."""

    async def coroutine(checkpoint, name):
        raise OSError("coroutine broke")

    shapes = {
        "coroutine broke": coroutine,
        "future broke": lambda checkpoint, name: future(error=OSError("future broke")),
        "staging broke": lambda checkpoint, name: AsyncSaveResponse(future(error=OSError("staging broke")), future()),
        "upload broke": lambda checkpoint, name: AsyncSaveResponse(
            future(), future(error=CheckpointException("upload broke"))
        ),
    }
    with open_run(make_config(storage_path, failure_policy=GREEN)) as run:
        for number, shape in enumerate(shapes.values()):
            report({}, make_checkpoint(tmp_path / f"ck{number}"), checkpoint_upload_fn=shape)
        report({}, make_checkpoint(tmp_path / "next"))
    found = reasons(run.result)
    assert states(run.result) == ["failed"] * len(shapes) + ["committed"]
    for number, text in enumerate(shapes):
        assert text in found[number]


def test_a_future_that_never_resolves_is_abandoned_with_a_reason(storage_path, tmp_path):
    """The deadline is that of the whole call, and its text says so."""
    record = end_of(tmp_path, storage_path, lambda checkpoint, name: Future(), upload_fn_timeout=0.2)
    assert "did not return within" in record.reason


@pytest.mark.parametrize(
    "wrong", [future, lambda checkpoint: checkpoint, "module:function", 3], ids=["none", "one", "text", "int"]
)
def test_what_cannot_be_called_with_a_checkpoint_and_a_name_is_refused_at_the_call(tmp_path, wrong):
    """Before anything is recorded."""
    with open_run(make_config(tmp_path / "runs")) as run:
        with pytest.raises(UploadFunctionError, match="checkpoint_upload_fn"):
            report({}, make_checkpoint(tmp_path / "ck"), checkpoint_upload_fn=wrong)
        report({}, make_checkpoint(tmp_path / "ck"))
    assert states(run.result) == ["committed"]
