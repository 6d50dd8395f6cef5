"""The events of a run: their schema, their order, and that nothing is held up by an API that is away."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from helpers import eventually, make_checkpoint, make_config
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from ckpt import Checkpoint, CheckpointConfig, ReportRecord, ReportState, committed, open_run, resolve
from ckpt_tasks.events import BATCH, RunEvents, Source
from ckpt_tasks.view import RunView


def record(seq: int, **changes: Any) -> ReportRecord:
    known = {"state": ReportState.COMMITTED, "checkpoint": Checkpoint(f"s3://bucket/runs/digits/checkpoints/{seq}-a1")}
    return ReportRecord(
        seq=seq, attempt=1, name=f"epoch-{seq}", **{"metrics": {"loss": 1 / (seq + 1)}, **known, **changes}
    )


def spoken(*records: ReportRecord, **changes: Any) -> list[tuple[str, dict[str, str]]]:
    """What a run says about these reports: kind and payload."""
    events = RunEvents()
    source = {"score_attribute": "loss", "score_order": "min", **changes}
    events.opened(Source(run_id="1234", name="digits", uri="s3://bucket/runs/digits", **source))
    for item in records:
        events.published(item)
    return [(event["event"], event["payload"]) for event in events.batch()[1:]]


def events_of(flow_run: Any) -> list[dict[str, Any]]:
    """What the server has of a flow run's run, oldest first, all pages."""
    related = {"id": [f"prefect.flow-run.{flow_run}"], "role": ["flow-run"]}
    body = {"event": {"prefix": ["ckpt."]}, "related": related, "order": "ASC"}
    with get_client(sync_client=True) as client:
        page = client.request("POST", "/events/filter", json={"filter": body, "limit": 50}).json()
        found = page["events"]
        while page["next_page"]:
            page = client.request(
                "GET", "/events/filter/next", params={"page-token": page["next_page"].split("page-token=")[1]}
            ).json()
            found += page["events"]
    return found


def test_a_committed_report_is_told_with_everything_that_an_evaluator_needs() -> None:
    assert spoken(record(7)) == [
        (kind, {
            "ref": "s3://bucket/runs/digits@7", "uri": "s3://bucket/runs/digits/checkpoints/7-a1", "seq": "7",
            "score": "0.125", "run": "s3://bucket/runs/digits",
        })
        for kind in ("ckpt.report.committed", "ckpt.best.changed")
    ]  # fmt: skip


def test_best_changes_only_where_the_score_is_as_good_as_the_best_before() -> None:
    scores = [3.0, 5.0, float("nan"), 3.0, 1.0]
    told = spoken(*(record(seq, metrics={"loss": score}) for seq, score in enumerate(scores)), best=4.0)
    assert [payload["seq"] for kind, payload in told if kind == "ckpt.best.changed"] == ["0", "3", "4"]


def test_a_run_without_a_score_has_no_best_and_says_so_by_an_empty_score() -> None:
    [(kind, payload)] = spoken(record(0), score_attribute=None)
    assert (kind, payload["score"]) == ("ckpt.report.committed", "")


def test_a_failed_report_is_told_with_its_reason_and_without_a_secret() -> None:
    lost = record(3, state=ReportState.FAILED, checkpoint=None, reason="PUT https://h/b?X-Amz-Signature=abc123\nfailed")
    [(kind, payload)] = spoken(lost)
    assert kind == "ckpt.report.failed"
    assert (payload["state"], payload["ref"], payload["seq"]) == ("failed", "", "3")
    assert "failed" in payload["reason"]
    assert "abc123" not in payload["reason"]


@pytest.mark.parametrize("state", [ReportState.SKIPPED, ReportState.COMMITTED])
def test_dropped_reports_and_reports_of_metrics_alone_are_no_events(state: ReportState) -> None:
    assert spoken(record(0, state=state, checkpoint=None)) == []


def test_every_value_of_a_payload_is_a_string() -> None:
    events = RunEvents()
    events.opened(Source(run_id="1", name="n", uri="/runs/n"))
    events.published(record(0))
    events.published(record(1, state=ReportState.LOST, checkpoint=None))
    assert all(isinstance(value, str) for event in events.batch() for value in event["payload"].values())


def test_what_was_adopted_before_the_run_was_open_is_told_once_it_is() -> None:
    events = RunEvents()
    events.published(record(0))
    assert events.batch() == []
    events.opened(Source(run_id="1", name="n", uri="/runs/n"))
    assert [event["event"] for event in events.batch()] == ["ckpt.run.started", "ckpt.report.committed"]


def test_events_that_nobody_takes_are_bounded_and_counted() -> None:
    events = RunEvents()
    events.opened(Source(run_id="1", name="n", uri="/runs/n"))
    for seq in range(5000):
        events.published(record(seq))
    assert len(events) == 1000
    assert events.dropped == 4001
    assert len(events.batch()) == BATCH


def test_with_the_api_away_the_run_ends_and_counts_what_nobody_heard(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/api"
    with temporary_settings({PREFECT_API_URL: nobody}):
        view = RunView("away")
        with open_run(make_config(tmp_path / "runs"), observers=[view.publish]) as run:
            view.opened(run)
            run.report({"loss": 1.0}, make_checkpoint(tmp_path / "c"))
        view.completed(run.result)
        missed = view.close(20)
    assert missed
    assert missed.events == 3, "started, committed, completed"


@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_burst_of_a_hundred_commits_reaches_the_server_whole_and_in_order(tmp_path: Path) -> None:
    config = make_config(
        f"memory://{uuid4().hex}", "burst", upload={"max_pending": 16, "max_concurrent_uploads": 8},
        checkpoint_config=CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min"),
    )  # fmt: skip

    @flow
    def train() -> tuple[Any, str, str]:
        view = RunView("burst")
        with open_run(config, observers=[view.publish]) as run:
            view.opened(run)
            for seq in range(100):
                run.report({"loss": 1.0 if seq else 0.0}, make_checkpoint(tmp_path / str(seq)))
        view.completed(run.result)
        assert not view.close(60)
        return FlowRunContext.get().flow_run.id, run.uri, run.destination.run_id  # type: ignore[union-attr]

    flow_run, uri, run_id = train()
    found = eventually(lambda: events_of(flow_run), lambda events: len(events) >= 103)
    kinds = [event["event"] for event in found]
    assert kinds == [
        "ckpt.run.started",
        "ckpt.report.committed",
        "ckpt.best.changed",
        *["ckpt.report.committed"] * 99,
        "ckpt.run.completed",
    ]
    told = [event["payload"] for event in found if event["event"] == "ckpt.report.committed"]
    assert [payload["seq"] for payload in told] == [str(seq) for seq in range(100)]
    assert {event["resource"]["prefect.resource.id"] for event in found} == {f"prefect-ckpt.run.{run_id}"}
    assert {event["resource"]["prefect.resource.name"] for event in found} == {"burst"}
    assert resolve(told[-1]["ref"]).uri == told[-1]["uri"]
    assert [checkpoint.seq for checkpoint in committed(uri, after=97)] == [98, 99], "the truth behind the hints"
    assert found[-1]["payload"] == {
        "ref": f"{uri}@latest", "uri": told[-1]["uri"], "run": uri, "seq": "99", "score": "1.0", "state": "completed",
    }  # fmt: skip
