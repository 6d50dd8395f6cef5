"""The tasks under the task runners that people use: threads, processes, Dask. Ray is not tried here."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import content, make_checkpoint
from pipelines import pipeline
from prefect import flow
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from ckpt import Checkpoint, Result, RunConfig, open_run
from ckpt.errors import CheckpointNotFoundError, UploadFailedError, UploadFunctionError

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


def dask() -> Any:
    from prefect_dask import DaskTaskRunner

    return DaskTaskRunner(cluster_kwargs={"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None})


def needs(module: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)


RUNNERS = {
    "threads": lambda: ThreadPoolTaskRunner(max_workers=2),
    "processes": lambda: ProcessPoolTaskRunner(max_workers=1),
    "dask": dask,
}


@dataclass
class Seen:
    """What the tasks did under one task runner; a flow is run once for all tests."""

    shares_memory: bool
    root: Path
    records: list[Any]
    """Of uploads: a record, or what was raised."""
    result: Result
    restored: Path
    verified: Any
    pruned: list[Checkpoint]
    missing: Exception
    live: Any
    """Of a function that closes over a Future: a record, or the refusal."""


@pytest.fixture(
    scope="module",
    params=[
        "threads",
        pytest.param("processes", marks=pytest.mark.slow),
        pytest.param("dask", marks=[pytest.mark.slow, needs("prefect_dask", "prefect-dask is not installed")]),
        pytest.param(
            "ray", marks=pytest.mark.skip(reason="prefect-ray is too heavy for a test environment; Dask's path")
        ),
    ],
)
def seen(request, tmp_path_factory, prefect_server):
    root = tmp_path_factory.mktemp(request.param)
    with open_run(RunConfig(name="run", storage_path=root / "runs")) as run:
        for n in range(3):
            run.report({}, make_checkpoint(root / f"r{n}"))
    runner = RUNNERS[request.param]()
    found = flow(name=f"under-{request.param}", task_runner=runner)(pipeline)(root)
    return Seen(root=root, shares_memory=request.param == "threads", **found)


def test_uploads_are_gathered_in_order_whatever_runs_them(seen):
    """With the failure in its place, its reason from the other process; retention deletes what it does not keep."""
    assert [(row.seq, row.state.value) for row in seen.result.history] == [
        (0, "committed"), (1, "committed"), (2, "committed"), (3, "failed")
    ]  # fmt: skip
    assert "the cable is out" in seen.result.history[3].reason
    assert [checkpoint.path for checkpoint, _ in seen.result.best_checkpoints] == [
        str(seen.root / "out" / f"day-{n}") for n in (1, 2)
    ]
    assert not (seen.root / "out" / "day-0").exists()


def test_a_failed_upload_comes_back_as_the_error_it_was(seen):
    """With its record: errors survive the way between processes."""
    error = seen.records[3]
    assert isinstance(error, UploadFailedError)
    assert error.record.seq == 3
    assert [record.seq for record in seen.records[:3]] == [0, 1, 2]


def test_a_checkpoint_is_restored_verified_and_pruned_by_any_process(seen, tmp_path):
    """From the reference alone."""
    assert (seen.restored / "data").read_text() == "2"
    assert seen.verified.files == 1
    assert [checkpoint.path.endswith(f"checkpoint_00000{n}-a1") for n, checkpoint in enumerate(seen.pruned)] == [
        True
    ] * 2
    assert content(seen.result.checkpoint, tmp_path / "again") == {"data": b"2"}


def test_an_error_of_a_task_is_of_its_own_class(seen):
    """A reference that leads nowhere."""
    assert isinstance(seen.missing, CheckpointNotFoundError)
    assert "nowhere" in str(seen.missing)


def test_a_function_that_closes_over_a_future_is_refused_where_it_cannot_work(seen):
    """With the variable's name; threads share it."""
    if seen.shares_memory:
        assert seen.live.checkpoint is not None
        return
    assert isinstance(seen.live, UploadFunctionError)
    assert "closes over 'future', a concurrent.futures._base.Future" in str(seen.live)
    assert "ThreadPoolTaskRunner" in str(seen.live)
