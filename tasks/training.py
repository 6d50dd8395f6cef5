"""`training_run`: a run whose uploads and ordering are Prefect task runs, inside any flow or task."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prefect.context import FlowRunContext, TaskRunContext
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from ckpt import Report, ReportRecord, Result, Run, RunConfig, open_run
from ckpt.attempts import Owner
from ckpt.errors import NoActiveRunError
from ckpt.ordering import ReportLine
from ckpt_tasks._logging import run_logging
from ckpt_tasks.gather import gather_reports
from ckpt_tasks.publish import publish_result
from ckpt_tasks.signals import stop_signals
from ckpt_tasks.upload import upload_checkpoint
from ckpt_tasks.view import RunView

if TYPE_CHECKING:
    from prefect.futures import PrefectFuture

logger = logging.getLogger("ckpt")

PUBLISH_TIME = 15.0
"""Seconds that the result artifact and the live table's last state may take at the end; the store has it all anyway."""


@contextmanager
def training_run(config: RunConfig, task_runner: TaskRunner[Any] | None = None) -> Iterator[Run]:
    """Open a run inside a flow or a task: `report()` in the block submits upload tasks under the flow run.

    Leaving the block drains, whatever happened in it, then raises what the failure policy says; the block's own
    exception wins. Owns SIGTERM and SIGINT meanwhile (see `ckpt_tasks.signals`), if it is in the main thread.

    Args:
        config: the run.
        task_runner: for the upload tasks; default: threads, as many as reports may be pending. It belongs to the run: a
            flow's own runner would drop queued uploads at the flow's end.

    Yields:
        The run; `run.report(...)` is `ckpt.report(...)`, and `run.result` is set after the block.

    Raises:
        NoActiveRunError: outside a flow or task run.
        RunBusyError, StorageError, ConfigError: the run cannot begin; said before any training.
        CheckpointsLostError: at the end, by the failure policy; carries `.result`.
    """
    owner = _owner()
    uploads = task_runner or ThreadPoolTaskRunner(max_workers=config.upload_config.max_pending)
    opened: list[Run] = []

    def submit(report: Report) -> PrefectFuture[ReportRecord]:
        return uploads.submit(upload_checkpoint, {"checkpoint": report, "destination": opened[0].destination})

    ordering: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=1)
    with stop_signals() as stopping, run_logging(), uploads, ordering:
        view = RunView(config.name)
        try:
            with open_run(config, submit, gather=_gather_on(ordering), owner=owner, observers=[view.publish]) as run:
                opened.append(run)
                with stopping.block(run):
                    yield run
        finally:
            if opened and opened[0].ended:
                _show(opened[0].result, view)
        stopping.pass_on()


def _gather_on(runner: ThreadPoolTaskRunner[Any]) -> Callable[[ReportLine], PrefectFuture[Result]]:
    def gather(line: ReportLine) -> PrefectFuture[Result]:
        return runner.submit(gather_reports, {"records": line, "retention": None})

    return gather


def _owner() -> Owner:
    """This process as the driver of the current flow run; a retry of the flow run has a higher count."""
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    if flow is not None and flow.flow_run is not None:
        retries = task.task_run.run_count if task is not None else 0
        return Owner(flow_run_id=str(flow.flow_run.id), run_count=flow.flow_run.run_count * 1000 + retries)
    if task is not None:
        return Owner(flow_run_id=str(task.task_run.id), run_count=task.task_run.run_count)
    raise NoActiveRunError(
        "training_run works inside a @flow or a @task; without Prefect use `with ckpt.open_run(config)` instead"
    )


def _show(result: Result, view: RunView) -> None:
    """Show the end in the UI, from a thread that is left at its deadline: with the API away a call takes minutes."""

    def publish() -> None:
        try:
            publish_result(result)
        except Exception as error:  # noqa: BLE001 - the result is in the store; the artifact only shows it
            logger.warning("The result artifact of run %s could not be made: %s", result.run, error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(publish,), name="ckpt-publish", daemon=True)
    thread.start()
    deadline = time.monotonic() + PUBLISH_TIME
    missed = view.close(PUBLISH_TIME)
    thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive() or missed:
        logger.warning(
            "The Prefect UI misses the end of run %s (its API does not answer); everything is in %s",
            result.run,
            result.path,
        )
