"""The live table, against a Prefect server and without one."""

from __future__ import annotations

import json
import socket
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.context import FlowRunContext, TaskRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from ckpt import Checkpoint, ReportRecord, ReportState
from ckpt_tasks.artifacts import LIVE_ROWS, live_key
from ckpt_tasks.view import RunView


def record(seq: int) -> ReportRecord:
    return ReportRecord(
        seq=seq,
        attempt=1,
        name=f"epoch-{seq}",
        state=ReportState.COMMITTED,
        metrics={"loss": 1 / (seq + 1)},
        checkpoint=Checkpoint(f"s3://bucket/runs/digits/checkpoints/epoch-{seq}-a1"),
        nbytes=10,
        nfiles=1,
    )


def artifacts(key: str) -> list[Artifact]:
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


def until(condition: Any, seconds: float = 20.0) -> None:
    """Poll what nothing notifies about: the server's state."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within its deadline"
        threading.Event().wait(0.05)


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_one_artifact_is_created_and_then_updated_in_place() -> None:
    @flow
    def train() -> tuple[Any, Any]:
        view = RunView("one-artifact")
        view.publish(record(0))
        until(lambda: len(artifacts(live_key("one-artifact"))) == 1)
        first = artifacts(live_key("one-artifact"))[0]
        for seq in range(1, 150):
            view.publish(record(seq))
        assert not view.close(20)
        return first, FlowRunContext.get().flow_run.id  # type: ignore[union-attr]

    first, flow_run = train()
    [artifact] = artifacts(live_key("one-artifact"))
    rows = json.loads(artifact.data)
    assert artifact.id == first.id
    assert artifact.type == "table"
    assert artifact.flow_run_id == flow_run
    assert [row["report"] for row in rows] == [str(seq) for seq in reversed(range(50, 150))]
    assert len(rows) == LIVE_ROWS
    assert "150 reports" in str(artifact.description)


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_inside_a_task_the_table_belongs_to_the_task_run() -> None:
    @task
    def train() -> Any:
        view = RunView("in-a-task")
        view.publish(record(0))
        assert not view.close(20)
        return TaskRunContext.get().task_run.id  # type: ignore[union-attr]

    @flow
    def around() -> Any:
        return train()

    task_run = around()
    [artifact] = artifacts(live_key("in-a-task"))
    assert artifact.task_run_id == task_run
    assert artifact.flow_run_id is not None


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_updates_are_at_most_one_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []
    send = RunView._send
    monkeypatch.setattr(RunView, "_send", lambda *args: (sent.append(time.monotonic()), send(*args)))
    view = RunView("paced")
    end = time.monotonic() + 3.2
    for seq in range(10**6):
        view.publish(record(seq))
        if time.monotonic() > end:
            break
    assert not view.close(20)
    assert len(sent) >= 3
    gaps = [after - before for before, after in pairwise(sent)]
    assert all(gap >= 1.0 for gap in gaps[:-1]), "all but the one at closing"


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_a_run_without_reports_makes_no_artifact() -> None:
    assert not RunView("silent").close(5)
    assert artifacts(live_key("silent")) == []


@pytest.fixture
def nobody() -> str:
    """The URL of an API that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}/api"


@pytest.fixture
def mute() -> Any:
    """The URL of an API that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"


def test_with_the_api_away_nothing_is_raised_and_what_is_missing_is_told(nobody: str) -> None:
    with temporary_settings({PREFECT_API_URL: nobody}):
        view = RunView("away")
        for seq in range(5):
            view.publish(record(seq))
        missed = view.close(20)
    assert missed
    assert missed.reports == 5
    assert missed.failures >= 1
    assert missed.error is not None


def test_an_api_that_hangs_delays_neither_publish_nor_close(mute: str) -> None:
    with temporary_settings({PREFECT_API_URL: mute}):
        view = RunView("mute")
        began = time.monotonic()
        for seq in range(1000):
            view.publish(record(seq))
        published = time.monotonic() - began
        began = time.monotonic()
        missed = view.close(0.5)
    assert published < 1.0
    assert time.monotonic() - began < 1.5
    assert missed.reports == 1000


@pytest.mark.prefect
def test_a_table_that_was_behind_catches_up_when_the_api_is_back(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, calls = RunView._send, []

    def flaky(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise ConnectionError("away")
        send(*args)

    monkeypatch.setattr(RunView, "_send", flaky)
    view = RunView("back-again")
    view.publish(record(0))
    until(lambda: len(artifacts(live_key("back-again"))) == 1)
    missed = view.close(20)
    assert not missed
    assert missed.failures == 1
