"""The flows upload, evaluate and prune, as their own processes run them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import deployed_training
import pytest
from helpers import make_checkpoint, make_config
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import Pending

from ckpt import CheckpointConfig, KeepLast, Result, committed, open_run, resolve
from ckpt.errors import CheckpointNotFoundError, CheckpointPrunedError, ConfigError, RunBusyError, UploadFailedError
from ckpt_tasks import EvaluateConfig, PruneConfig, StandaloneUpload, TrainConfig
from ckpt_tasks.functions import SETTING

FLOWS = Path(__file__).resolve().parents[1] / "flows"


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "deployed_training")


def load(file: str, name: str) -> Any:
    """A flow, as Prefect loads its file."""
    spec = importlib.util.spec_from_file_location(f"flow_{name}", FLOWS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def make_run(storage: str | Path, folder: Path, steps: int = 3, **options: Any) -> str:
    """A finished run with a checkpoint per step; its URI."""
    with open_run(make_config(storage, checkpoint_config=CheckpointConfig(**options))) as run:
        for step in range(steps):
            run.report({"step": step}, make_checkpoint(folder / f"c{step}", {"step": str(step)}))
    return run.uri


def score(**options: Any) -> EvaluateConfig:
    return EvaluateConfig(evaluate_fn="deployed_training:score", **options)


# ------------------------------------------------------------------------------------------------------- what was pruned


def test_a_reference_to_what_retention_deleted_says_so_and_one_to_what_never_was_does_not(tmp_path, storage_path):
    """Both are no checkpoint; only one of them is a mistake."""
    run = make_run(storage_path, tmp_path, retention=KeepLast(1))
    with pytest.raises(
        CheckpointPrunedError, match=r"@0: pruned; it was committed, and is deleted since \(commits there: 2\)"
    ):
        resolve(f"{run}@0")
    with pytest.raises(CheckpointNotFoundError, match="no such committed checkpoint") as missing:
        resolve(f"{run}@7")
    assert not isinstance(missing.value, CheckpointPrunedError)


def test_a_report_without_a_checkpoint_or_that_failed_is_not_pruned(tmp_path, storage_path):
    """Nothing was ever there."""

    def broken(checkpoint: Any, name: str) -> Any:
        raise ConnectionError("no")

    with open_run(make_config(storage_path)) as run:
        run.report({"step": 0})
        run.report({"step": 1}, make_checkpoint(tmp_path / "a"), checkpoint_upload_fn=broken)
        run.report({"step": 2}, make_checkpoint(tmp_path / "b"))
    for seq in (0, 1):
        with pytest.raises(CheckpointNotFoundError, match="no such committed") as missing:
            resolve(f"{run.uri}@{seq}")
        assert not isinstance(missing.value, CheckpointPrunedError)


# ------------------------------------------------------------------------------------------------------------- the flows


@pytest.mark.prefect
def test_an_evaluation_writes_its_scores_to_the_checkpoint_that_was_meant(prefect_server, tmp_path):
    """`@best` is settled at the start; best-k of readers sees the scores, with their source."""
    evaluate = load("evaluation.py", "evaluate")
    run = make_run(tmp_path / "runs", tmp_path, checkpoint_score_attribute="step", checkpoint_score_order="min")
    state = evaluate(f"{run}@best", score(source="nightly"), return_state=True)
    assert state.is_completed()
    assert state.result() == {"score": 10.0}
    evaluate(f"{run}@2", score())
    best, metrics = Result.from_path(run).get_best_checkpoint("score", "max"), Result.from_path(run).best_checkpoints
    assert best is not None
    assert best.seq == 2
    assert [found.get("score") for _, found in metrics] == [10.0, None, 12.0]


@pytest.mark.prefect
def test_an_evaluation_that_comes_too_late_is_completed_as_pruned(prefect_server, tmp_path, monkeypatch):
    """Before it began; and while the function runs, when the scores find no checkpoint to belong to."""
    evaluate, prune = load("evaluation.py", "evaluate"), load("prune.py", "prune")
    run = make_run(tmp_path / "runs", tmp_path)

    def prunes(folder: Path) -> dict[str, float]:
        gone = prune(PruneConfig(run=run, retention={"keep_last": 1}), return_state=True)
        assert gone.message == "2 checkpoints deleted"
        return {"score": 1.0}

    prunes.__module__ = "deployed_training"
    monkeypatch.setattr(deployed_training, "score", prunes)
    for _ in range(2):
        state = evaluate(f"{run}@0", score(), return_state=True)
        assert state.is_completed()
        assert state.message.startswith("pruned: ")
    assert [checkpoint.seq for checkpoint in committed(run)] == [2]
    monkeypatch.undo()


@pytest.mark.prefect
@pytest.mark.parametrize(
    ("ref", "function", "error", "text"),
    [
        ("@7", "deployed_training:score", CheckpointNotFoundError, "no such committed checkpoint"),
        ("@someday", "deployed_training:score", ConfigError, "after '@' must be"),
        (
            "@2",
            "deployed_training:nothing",
            ConfigError,
            "'deployed_training:nothing' returned NoneType; return a dict",
        ),
        ("@2", "os:system", ConfigError, "not allowed"),
    ],
)
def test_an_evaluation_that_cannot_be_made_fails_and_says_why(prefect_server, tmp_path, ref, function, error, text):
    """A wrong reference, a wrong function, a forbidden one."""
    evaluate = load("evaluation.py", "evaluate")
    run = make_run(tmp_path / "runs", tmp_path)
    state = evaluate(f"{run}{ref}", EvaluateConfig(evaluate_fn=function), return_state=True)
    assert state.is_failed()
    with pytest.raises(error, match=text):
        state.result()
    assert all("score" not in metrics for _, metrics in Result.from_path(run).best_checkpoints)


@pytest.mark.prefect
def test_a_living_run_is_not_pruned_and_a_finished_one_keeps_what_the_rules_say(prefect_server, tmp_path):
    """The latest and the best stay beside them."""
    prune = load("prune.py", "prune")
    config = make_config(tmp_path / "runs", checkpoint_config=CheckpointConfig(checkpoint_score_attribute="loss"))
    rules = {"keep_every": 3}
    with open_run(config) as run:
        for step in range(6):
            run.report({"loss": -abs(step - 1)}, make_checkpoint(tmp_path / f"c{step}"))
        refused = prune(PruneConfig(run=run.uri, retention=rules), return_state=True)
    with pytest.raises(RunBusyError):
        refused.result()
    state = prune(PruneConfig(run=run.uri, retention=rules), return_state=True)
    assert state.message == "2 checkpoints deleted"
    assert [checkpoint.seq for checkpoint in committed(run.uri)] == [0, 1, 3, 5]


@pytest.mark.prefect
def test_an_upload_whose_destination_is_taken_fails_and_changes_nothing(prefect_server, tmp_path):
    """The state says what was uploaded, or why nothing was."""
    upload = load("upload.py", "upload")
    source = make_checkpoint(tmp_path / "source", {"w": b"first"})
    config = StandaloneUpload(
        source=source.uri, destination=str(tmp_path / "to/1"), metrics={"loss": 1}, seq=4, name="export"
    )
    state = upload(config, return_state=True)
    assert state.message == f"committed 1 files, 5 bytes: {tmp_path}/to/1"
    record = state.result()
    assert (record.seq, record.name, record.metrics) == (4, "export", {"loss": 1})
    (tmp_path / "source/w").write_text("second")
    with pytest.raises(UploadFailedError, match="not empty"):
        upload(config)
    assert (tmp_path / "to/1/w").read_text() == "first"


@pytest.mark.prefect
def test_a_deployed_run_with_a_relative_storage_path_is_refused_before_it_writes(prefect_server, tmp_path, monkeypatch):
    """The working directory is a worker's. Outside a deployment the same path is the user's own folder."""
    monkeypatch.chdir(tmp_path)
    train = load("train.py", "train")
    config = TrainConfig(
        name="run", storage_path="runs", train_fn="deployed_training:train", train_loop_config={"steps": 1}
    )
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(train), "relative", enforce_parameter_schema=False)
        run = client.create_flow_run_from_deployment(deployment, state=Pending())
    state = run_flow(train, flow_run=run, parameters={"config": config}, return_type="state")
    with pytest.raises(
        ConfigError, match="storage_path='runs' is relative, and a deployed run begins in a folder of its"
    ):
        state.result()
    assert not (tmp_path / "runs").exists()
    assert train(config, return_state=True).is_completed()
    assert [checkpoint.seq for checkpoint in committed(str(tmp_path / "runs/run"))] == [0]
