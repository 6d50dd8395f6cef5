"""Secrets: every output of failing runs and commands is searched for the ones they were given."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from faulty_server import FaultyServer, answer, faulty
from helpers import make_checkpoint
from prefect import flow
from servers import S3Server, moto_server  # noqa: F401 - fixtures

from ckpt import (
    Checkpoint,
    CheckpointUploadMode,
    FailurePolicy,
    Result,
    RunConfig,
    UploadConfig,
    open_run,
    open_storage,
    report,
)
from ckpt.errors import CkptError, UploadFailedError

KEY, SECRET, TOKEN = "AKIAMARKEDKEY0000000", "marked-secret-5f1e9c", "marked-token-77ab01"
MARKS = (KEY, SECRET, TOKEN)
REFUSALS = {
    "AccessDenied": answer(403, "AccessDenied"),
    "InvalidAccessKeyId": answer(403, "InvalidAccessKeyId", "The key you provided does not exist"),
    "SignatureDoesNotMatch": answer(403, "SignatureDoesNotMatch", "Check your key and signing method"),
    "ExpiredToken": answer(400, "ExpiredToken"),
}


def no_mark(*texts: str | bytes) -> None:
    """None of the secrets is in any of the texts."""
    for text in texts:
        data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
        found = [mark for mark in MARKS if mark.encode() in data]
        assert not found, f"{found} in {data[max(0, data.find(found[0].encode()) - 200) :][:400]!r}"


def given() -> dict[str, str]:
    return {"key": KEY, "secret": SECRET, "token": TOKEN}


def quoting() -> dict[str, str]:
    raise ValueError(f"cannot parse {given()}")


def says_secret(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """A user's function that fails as HTTP clients do: with the whole URL of the request."""
    url = f"https://bucket.s3.amazonaws.com/x?X-Amz-Credential={KEY}%2F2026&X-Amz-Security-Token={TOKEN}&X-Amz-Signature={SECRET}"
    raise ConnectionError(f"403 for url: {url}; and via http://user:{SECRET}@proxy:3128/")


@pytest.fixture
def proxy(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:  # noqa: F811
    """The environment points to it, with marked secrets."""
    for name, value in moto_server.env.items():
        monkeypatch.setenv(name, value)
    with faulty(moto_server) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
        yield found


@pytest.fixture
def root(moto_server: S3Server) -> str:  # noqa: F811
    bucket = f"secrets-{uuid4().hex[:8]}"
    moto_server.client().create_bucket(Bucket=bucket)
    return f"s3://{bucket}/runs"


def config(root: str, credentials: Any = "env") -> RunConfig:
    return RunConfig(
        name="run", storage_path=root, credentials=credentials, upload_config=UploadConfig(retry_budget=0.1, stall_timeout=5),
        failure_policy=FailurePolicy(stop_after=None, red_on="any"),
    )  # fmt: skip


def refuse(proxy: FaultyServer, action: Any) -> None:
    """Refuse the files of the report called `bad`."""
    proxy.rule = lambda request: action if "/checkpoints/bad-" in request.path else None


def fail_in_every_way(tmp_path: Path, settings: RunConfig) -> Result:
    """Reports that succeed, are refused, and fail in a user's function; the result as the run's red end carries it."""
    with pytest.raises(CkptError) as caught, open_run(settings) as run:  # noqa: PT012
        report({"loss": 1}, make_checkpoint(tmp_path / "a"))
        report({}, make_checkpoint(tmp_path / "b"), "bad")
        report({}, make_checkpoint(tmp_path / "c"), checkpoint_upload_fn=says_secret)
        with pytest.raises(UploadFailedError) as sync:
            report({}, make_checkpoint(tmp_path / "d"), "bad", CheckpointUploadMode.SYNC)
    for error in (caught.value, sync.value):
        no_mark(str(error), repr(error), pickle.dumps(error), "".join(_lines(error)))
    assert [row.state.value for row in run.result.history] == ["committed", "failed", "failed", "failed"]
    return run.result


def _lines(error: BaseException) -> list[str]:
    """A traceback without lines of source: those of this file show the marks' names only."""
    return [str(item) for item in traceback.TracebackException.from_exception(error).format()]


@pytest.mark.parametrize("credentials", ["env", given], ids=["env", "callable"])
@pytest.mark.parametrize("action", REFUSALS.values(), ids=list(REFUSALS))
def test_a_failing_run_tells_no_secret(proxy, root, tmp_path, caplog, capfd, credentials, action):
    """Log records, printed text, errors with their causes, pickles, and every object that was stored."""
    caplog.set_level(logging.DEBUG, "ckpt")
    refuse(proxy, action)
    result = fail_in_every_way(tmp_path, config(root, credentials))
    for text in (repr(result), pickle.dumps(result), *(repr(row) for row in result.history)):
        if credentials == "env" or isinstance(text, str):
            no_mark(text)
    no_mark(caplog.text, *(str(vars(record)) for record in caplog.records if not record.exc_info))
    no_mark(*capfd.readouterr())
    proxy.rule = lambda request: None
    store = open_storage(root)
    no_mark(*(store.read(entry.key) for entry in store.list()), *(entry.key for entry in store.list()))
    assert any("403 for url" in str(row.reason) for row in result.history)


def test_a_callable_that_quotes_what_it_was_given_is_not_repeated(proxy, root, caplog):
    """Only the type of its error is passed on; its cause stays in the traceback of whoever looks for it."""
    with pytest.raises(CkptError, match="ValueError") as caught, open_run(config(root, quoting)):
        pytest.fail("the block was entered")
    no_mark(str(caught.value), pickle.dumps(caught.value), caplog.text)


def test_configurations_and_references_hold_no_secret(proxy, root):
    """Names only; a callable pickles by its name."""
    for credentials in ("env", given):
        settings = config(root, credentials)
        no_mark(repr(settings), pickle.dumps(settings))
        checkpoint = Checkpoint(f"{root}/x", credentials)
        storage = open_storage(root, credentials=credentials)
        list(storage.list())  # it has connected, so it knows them
        no_mark(repr(checkpoint), pickle.dumps(checkpoint), repr(storage), pickle.dumps(storage))


COMMANDS = [
    ["ls", "{root}"], ["ls", "{root}/run"], ["show", "{root}/run"], ["verify", "{root}/run"], ["gc", "{root}/run"],
    ["restore", "{root}/run@latest", "--to", "{to}"], ["ls", "{root}", "--credentials", "profile:none"],
    ["show", "s3://" + KEY + ":" + SECRET + "@bucket/x"], ["ls", "{root}", "--storage-options", '{"secret": "' + SECRET + '"}'],
]  # fmt: skip


@pytest.mark.parametrize("code", ["AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId"])
def test_failing_commands_print_no_secret(proxy, root, tmp_path, capfd, caplog, code):
    """Every request is refused; also where the secret was given in the wrong place."""
    from ckpt_tasks.cli import main

    proxy.rule = lambda request: REFUSALS[code]
    for command in COMMANDS:
        words = [word.replace("{root}", root).replace("{to}", str(tmp_path / "to")) for word in command]
        assert main(words) != 0, command
        no_mark(*capfd.readouterr(), caplog.text)


def test_a_failing_command_of_its_own_process_prints_no_secret(proxy, root):
    """Also what libraries print at the end of a process."""
    proxy.rule = lambda request: REFUSALS["AccessDenied"]
    command = [sys.executable, "-m", "ckpt_tasks.cli", "ls", root]
    done = subprocess.run(command, capture_output=True, timeout=100, env=dict(os.environ), check=False)
    assert done.returncode != 0
    no_mark(done.stdout, done.stderr)


@pytest.mark.prefect
@pytest.mark.slow
def test_a_failing_flow_leaves_no_secret_at_the_server(
    proxy,
    root,
    tmp_path,
    caplog,
    capfd,
    prefect_server,
    tmp_path_factory,
):
    """Its database has parameters, logs, artifacts, events, results and states: none of the marks is in any file of it."""
    from ckpt_tasks import training_run

    refuse(proxy, REFUSALS["SignatureDoesNotMatch"])

    @flow(name="secrets")
    def train(place: str) -> None:
        with training_run(config(place, given)):
            report({}, make_checkpoint(tmp_path / "a"))
            report({}, make_checkpoint(tmp_path / "b"), "bad")
            report({}, make_checkpoint(tmp_path / "c"), checkpoint_upload_fn=says_secret)

    state = train(root, return_state=True)
    assert state.is_failed()
    no_mark(state.model_dump_json(exclude={"data"}), caplog.text, *capfd.readouterr())
    no_mark(str(state.message))
    homes = list(tmp_path_factory.getbasetemp().glob("prefect-home*"))
    assert homes
    files = [path for home in homes for path in home.rglob("*") if path.is_file()]
    assert any(path.suffix == ".db" for path in files)
    assert any(b"403 for url" in path.read_bytes() for path in files)
    for path in files:
        no_mark(path.read_bytes())
