"""`prefect deploy --all`, and a process worker that runs what it gave: train, cancel, resume, evaluate, upload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from helpers import DEADLINE, eventually, make_checkpoint
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from workers import LIGHT, Worker, deployed_worker, final, prefect, started

from ckpt import Checkpoint, Result, committed, list_runs, resolve

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def deployed(prefect_server, tmp_path_factory) -> Iterator[Worker]:
    """The deployments of deployments/prefect.yaml, and a worker."""
    with deployed_worker(tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def training(storage: Path, name: str = "", **settings: object) -> dict[str, object]:
    return {
        "config": {
            "storage_path": str(storage), "name": name, "train_fn": f"{LIGHT}:train", "train_loop_config": settings,
            "retention": {"score_attribute": "step"},
        }
    }  # fmt: skip


def test_the_example_is_trained_and_evaluated_with_the_defaults_of_its_deployments(deployed, tmp_path):
    """`prefect deployment run train/train` commits; `evaluate/evaluate`, given a reference as text, writes scores back."""
    with get_client(sync_client=True) as client:
        default = client.read_deployment_by_name("train/train").parameters["config"]
    assert Path(default["storage_path"]).is_absolute()
    config = {**default, "train_loop_config": {"epochs": 2, "seed": 0}, "name": "by-command"}
    said = prefect("deployment", "run", "train/train", "--params", json.dumps({"config": config}))
    run_id = UUID(next(line.split("UUID: ")[1] for line in said.splitlines() if "UUID: " in line))
    assert final(run_id, deployed).name == "Completed"
    run = f"{default['storage_path']}/by-command"
    assert [checkpoint.seq for checkpoint in committed(run)] == [0, 1]
    assert [record.state.value for record in Result.from_path(run).history] == ["committed", "committed"]

    assert final(started("evaluate/evaluate", {"ref": f"{run}@1"}).id, deployed).name == "Completed"
    scored = [metrics for _, metrics in Result.from_path(run).best_checkpoints]
    assert "worst_class_accuracy" not in scored[0]
    assert 0.0 < scored[1]["worst_class_accuracy"] <= 1.0


def test_a_run_that_is_cancelled_under_a_worker_saves_just_in_time_and_is_continued_by_its_name(deployed, tmp_path):
    """`prefect flow-run cancel`: the state ends Cancelled, and the second run begins after the just-in-time checkpoint."""
    run = tmp_path / "runs" / "cancelled"
    first = started("train/train", training(tmp_path / "runs", "cancelled", steps=100_000, pause=0.5))
    eventually(lambda: list(run.glob("commits/*.json")), bool)
    prefect("flow-run", "cancel", str(first.id))
    assert final(first.id, deployed).name == "Cancelled"
    saved = resolve(str(run)).metrics
    assert saved["just_in_time"] is True

    second = started("train/train", training(tmp_path / "runs", "cancelled", steps=saved["step"] + 2))
    assert final(second.id, deployed).name == "Completed"
    assert resolve(str(run)).metrics == {"step": saved["step"] + 1, "started_at": saved["step"] + 1}
    assert {record.state.value for record in Result.from_path(run).history} == {"committed"}


def test_three_runs_started_at_once_with_an_empty_name_are_three_runs(deployed, tmp_path):
    """Also with flow run names that no folder can have."""
    names = ["nightly @ 3/4", "nightly @ 3/4", None]
    runs = [started("train/train", training(tmp_path / "runs", steps=2), name) for name in names]
    assert [final(run.id, deployed).name for run in runs] == ["Completed"] * 3
    found = list_runs(str(tmp_path / "runs"))
    assert [(run.reports, run.checkpoints) for run in found] == [(2, 2)] * 3
    assert sorted(run.name[-8:] for run in found) == sorted(str(run.id)[-8:] for run in runs)


def test_another_flow_uses_the_deployed_upload_flow(deployed, tmp_path):
    """By `run_deployment`: the upload is a run of its own under the caller, and the checkpoint is where it said."""
    source = make_checkpoint(tmp_path / "export", {"model.bin": b"weights", "a/b": b"x"})
    destination = str(tmp_path / "exports/1")

    @flow(name="nightly-export", persist_result=False)
    def nightly_export() -> FlowRun:
        config = {"source": source.uri, "destination": destination, "metrics": {"loss": 0.5}}
        return run_deployment("upload/upload", parameters={"config": config}, timeout=DEADLINE, poll_interval=0.5)

    run = nightly_export()
    state = final(run.id, deployed)
    assert state.name == "Completed"
    assert state.message == f"committed 2 files, 8 bytes: {destination}"
    uploaded = Checkpoint(destination)
    assert uploaded.metrics == {"loss": 0.5}
    assert sorted(file.path for file in uploaded.files()) == ["a/b", "model.bin"]


def test_a_worker_that_is_stopped_with_its_machine_lets_its_runs_save_just_in_time(deployed, tmp_path):
    """The last of this file, for it ends the worker. The run is Crashed: nobody asked for its end."""
    run = tmp_path / "runs" / "stopped"
    started_run = started("train/train", training(tmp_path / "runs", "stopped", steps=100_000, pause=0.5))
    eventually(lambda: list(run.glob("commits/*.json")), bool)
    deployed.stop()
    assert final(started_run.id, deployed).name == "Crashed"
    assert resolve(str(run)).metrics["just_in_time"] is True
    assert {record.state.value for record in Result.from_path(run).history} == {"committed"}
