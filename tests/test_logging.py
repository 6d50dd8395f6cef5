"""Where the records of the `ckpt` logger go in a Prefect run, and what is left of Prefect's own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.states import Failed
from prefect.task_runners import ThreadPoolTaskRunner

from ckpt.errors import CkptError
from ckpt_tasks._logging import missed, quiet_prefect, run_logging

log = logging.getLogger("ckpt")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What reaches the console: the handlers of the root logger."""
    with caplog.at_level(logging.DEBUG, logger="prefect"):
        yield caplog


def of(said: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in said.records if text in record.getMessage()]


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_a_record_of_any_thread_reaches_the_flow_run_once(said: pytest.LogCaptureFixture) -> None:
    @flow
    def train() -> str:
        with run_logging():
            log.info("from %s", "the flow")
            thread = threading.Thread(target=log.info, args=("from a thread",))
            thread.start()
            thread.join()
        return str(FlowRunContext.get().flow_run.id)  # type: ignore[union-attr]

    run = train()
    for text in ("from the flow", "from a thread"):
        [record] = of(said, text)
        assert record.name == "prefect.flow_runs"
        assert record.flow_run_id == run  # type: ignore[attr-defined]


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_a_record_of_a_task_run_reaches_that_task_run(said: pytest.LogCaptureFixture) -> None:
    @task(name="upload_checkpoint", task_run_name="upload-{seq:06d}", cache_policy=NO_CACHE)
    def upload(seq: int) -> None:
        log.warning("report %d is committed", seq)

    @flow
    def train() -> None:
        with run_logging(logging.WARNING), ThreadPoolTaskRunner(max_workers=2) as runner:
            log.info("too quiet for this rank")
            for future in [runner.submit(upload, {"seq": seq}) for seq in range(3)]:
                future.result(timeout=30)

    train()
    [record] = of(said, "report 1 is committed")
    assert record.name == "prefect.task_runs"
    assert record.task_run_name == "upload-000001"  # type: ignore[attr-defined]
    assert of(said, "too quiet") == []
    finished = {getattr(record, "task_name", None) for record in of(said, "Finished in state Completed")}
    assert finished == {None}, "the flow's own; an upload's would be said twice"


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_a_failed_upload_is_one_line_and_a_user_error_keeps_its_stack(said: pytest.LogCaptureFixture) -> None:
    @task(name="upload_checkpoint", cache_policy=NO_CACHE)
    def upload() -> Any:
        return Failed(name="Failed", message="disk full", data=CkptError("disk full"))

    @task(cache_policy=NO_CACHE)
    def mine() -> None:
        raise ValueError("a bug")

    @flow
    def train() -> str:
        with run_logging(), ThreadPoolTaskRunner(max_workers=2) as runner:
            futures = [runner.submit(upload, {}), runner.submit(mine, {})]
            return str([future.result(timeout=30, raise_on_failure=False) for future in futures])

    train()
    [record] = of(said, "disk full")
    assert "Finished in state" in record.getMessage()
    [record] = of(said, "Task run failed with exception")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_the_logger_is_as_before_after_the_block() -> None:
    @flow
    def train() -> tuple[Any, ...]:
        with pytest.raises(RuntimeError), run_logging():
            raise RuntimeError
        return log.handlers, log.propagate, log.level

    before = log.handlers, log.propagate, log.level
    assert train() == before


def test_outside_a_run_it_says_so() -> None:
    with pytest.raises(MissingContextError), run_logging():
        pass


def test_undelivered_events_are_counted_and_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(missed, "events", 0)
    monkeypatch.setattr(missed, "logs", 0)
    quiet_prefect()
    worker = logging.getLogger("prefect._internal.concurrency")
    monkeypatch.setattr(worker, "propagate", True)
    for _ in range(3):
        worker.error("Service %r failed to process item %r", "EventsWorker", {"a": "dump"})
    worker.error("something else")
    assert missed.events == 3
    assert [record.getMessage() for record in caplog.records if record.name != "ckpt"] == ["something else"]
    assert len([record for record in caplog.records if record.name == "ckpt"]) == 1


def test_a_lost_connection_is_told_without_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    quiet_prefect()
    try:
        raise httpx.ConnectError("refused")
    except httpx.ConnectError:
        logging.getLogger("prefect.flow_runs").exception("Encountered exception", extra={"send_to_api": False})
    [record] = caplog.records
    assert record.exc_info is None
