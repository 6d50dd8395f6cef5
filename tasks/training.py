"""`training_run`: a run whose uploads and ordering are Prefect task runs, inside any flow or task."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prefect.context import FlowRunContext, TaskRunContext
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from ckpt import Report, ReportRecord, Result, Run, RunConfig, open_run
from ckpt.attempts import Owner
from ckpt.context import acting_for
from ckpt.errors import ConfigError, NoActiveRunError
from ckpt.inflight import Destination
from ckpt.ordering import ReportLine
from ckpt.records import Pending
from ckpt.validating import Validation, Verdict
from ckpt_tasks._aside import aside
from ckpt_tasks._delivery import api_answers, deliver, leave_after, without_api
from ckpt_tasks._logging import run_logging
from ckpt_tasks.deployed import check_deployed_path
from ckpt_tasks.gather import gather_reports
from ckpt_tasks.limits import settle
from ckpt_tasks.publish import publish_result
from ckpt_tasks.settings import CkptSettings
from ckpt_tasks.signals import Stopping, stop_signals
from ckpt_tasks.upload import upload_checkpoint, upload_quietly
from ckpt_tasks.validate import validate_checkpoint
from ckpt_tasks.view import RunView

if TYPE_CHECKING:
    from prefect.futures import PrefectFuture

logger = logging.getLogger("ckpt")

TaskRuns = Literal["all", "failures"]
"""Which uploads are task runs."""
Running: TypeAlias = "Callable[[Stopping], AbstractContextManager[Run]]"
"""Opens a run and drains it, under the signals that may stop it."""
_Uploads: TypeAlias = TaskRunner[Any] | ThreadPoolExecutor

PUBLISH_TIME = 15.0
"""Seconds that the result artifact and the live table's last state may take at the end; the store has it all anyway."""
_LAST_SECONDS = 1.0
"""What each step of the end gets after a termination signal whose time is used up."""


class training_run(AbstractContextManager["Run"], AbstractAsyncContextManager["Run"]):  # noqa: N801 - called like open()
    """Open a run inside a flow or a task: `report()` in the block submits upload tasks under the flow run.

    Leaving the block drains, whatever happened in it, then raises what the failure policy says; the block's own
    exception wins. Owns SIGTERM and SIGINT meanwhile (see `ckpt_tasks.signals`), if it is in the main thread: after one,
    the termination is raised, and wins over any other exception: a dying process must not begin a retry.

    In an async flow write `async with`: the run is opened and drained in a thread, and other coroutines go on. A
    cancellation while it drains gives the uploads `stop_timeout` to finish, and is raised then.

    Args:
        config: the run.
        task_runner: for the upload tasks; default: threads, as many as reports may be pending. It belongs to the run: a
            flow's own runner would drop queued uploads at the flow's end.
        task_runs: `all`: one task run per uploaded report. `failures`: uploads run in plain threads, and only a failed one
            gets a task run, so that hundreds of reports stay readable and cost the API nothing.

    Entering gives the run; `run.report(...)` is `ckpt.report(...)`, and `run.result` is set after the block.

    Raises:
        NoActiveRunError: outside a flow or task run.
        RunBusyError, StorageError, ConfigError: the run cannot begin; said before any training.
        CheckpointsLostError: at the end, by the failure policy; carries `.result`.
    """

    def __init__(
        self, config: RunConfig, task_runner: TaskRunner[Any] | None = None, *, task_runs: TaskRuns = "all"
    ) -> None:
        self._running = partial(_running, config, task_runner, task_runs)
        self._sync: AbstractContextManager[Run] | None = None
        self._async: AbstractAsyncContextManager[Run] | None = None

    def __enter__(self) -> Run:
        self._sync = _entered_here(self._running)
        return self._sync.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._sync is not None
        return self._sync.__exit__(kind, error, trace)

    async def __aenter__(self) -> Run:
        self._async = _entered_aside(self._running)
        return await self._async.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._async is not None
        return await self._async.__aexit__(kind, error, trace)


@contextmanager
def _entered_here(running: Running) -> Iterator[Run]:
    with _terminating() as stopping, running(stopping) as run:
        yield run


@asynccontextmanager
async def _entered_aside(running: Running) -> AsyncIterator[Run]:
    with _terminating() as stopping:
        async with aside(running(stopping), Run.request_stop) as run:
            with acting_for(run):  # in this coroutine and what it starts
                yield run


@contextmanager
def _running(
    config: RunConfig, task_runner: TaskRunner[Any] | None, task_runs: TaskRuns, stopping: Stopping
) -> Iterator[Run]:
    """The run, in the thread that opens and drains it; the signals are another's."""
    owner, config = _owner(), _limited(config)
    check_deployed_path(config.storage_path, "storage_path")
    if task_runner is not None and not isinstance(task_runner, ThreadPoolTaskRunner):
        raise ConfigError(
            f"training_run cannot upload on a {type(task_runner).__name__} yet: slots, stops and locations are this process's. "
            "Leave task_runner out, or give a ThreadPoolTaskRunner; upload_checkpoint itself runs under any task runner"
        )
    uploads, upload = _uploader(task_runner, task_runs, config.upload_config.max_pending)
    opened: list[Run] = []

    def submit(report: Report) -> Pending[ReportRecord]:
        return upload(report, opened[0].destination)

    def submit_validation(validation: Validation) -> PrefectFuture[Verdict]:
        return validations.submit(validate_checkpoint, {"validation": validation})

    ordering: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=1)
    validations: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=config.max_concurrent_validations)
    runners = (uploads, ordering, validations)
    with run_logging(), _slots_given_back(), _left_in_time(stopping, *runners):
        view = RunView(config.name)
        try:
            with open_run(
                config,
                submit,
                gather=_gather_on(ordering),
                owner=owner,
                observers=[view.publish],
                submit_validation=submit_validation,
            ) as run:
                opened.append(run)
                view.opened(run)
                with stopping.block(run):
                    yield run
        finally:
            if opened and opened[0].ended:
                _show(opened[0].result, view, _seconds(opened[0], PUBLISH_TIME))
            else:
                view.close(_LAST_SECONDS)


@contextmanager
def _terminating() -> Iterator[Stopping]:
    """Own the signals; after one of them, deliver what Prefect's workers hold, and raise the termination at the end.

    Prefect takes a termination as the end of the process, and what its workers still hold is lost with it: the states of
    our task runs, which would look as if they were running for ever.
    """
    failed: Exception | None = None
    with stop_signals() as stopping:
        try:
            yield stopping
        except Exception as error:
            if not stopping.requested:
                raise
            failed = error
            logger.warning("the run was stopped, and ends with that; before: %s: %s", type(error).__name__, error)
        finally:
            if stopping.requested and stopping.run is not None:
                deliver(_seconds(stopping.run, 5.0))
    stopping.pass_on()
    if failed is not None:  # a handler of the user's own, which lets the process live
        raise failed


@contextmanager
def _left_in_time(stopping: Stopping, *runners: _Uploads) -> Iterator[None]:
    """Start the task runners, and stop them; after a termination signal, one that does not stop in time is left.

    Its thread hangs in the store's client, perhaps for minutes, and the interpreter would wait for it as well.
    """
    for runner in runners:
        runner.__enter__()
    try:
        yield
    finally:
        for runner in reversed(runners):
            if stopping.run is None or not stopping.requested:
                runner.__exit__(None, None, None)
            elif not _in_time(partial(runner.__exit__, None, None, None), _seconds(stopping.run, 5.0)):
                logger.warning("an upload hangs and is left behind; nothing of it is committed")
                leave_after(5.0, stopping.exit_code)


@contextmanager
def _slots_given_back() -> Iterator[None]:
    try:
        yield
    finally:
        settle(_LAST_SECONDS)


def _seconds(run: Run, wanted: float) -> float:
    """`wanted`, or what a termination signal left of it."""
    left = run.time_left()
    return wanted if left is None else max(_LAST_SECONDS, min(wanted, left))


def _in_time(action: Callable[[], object], seconds: float) -> bool:
    """Whether `action`, in a daemon thread with this one's context, was over in so many seconds."""
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(action,), name="ckpt-ending", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _limited(config: RunConfig) -> RunConfig:
    """With the place's own concurrency limit, if the configuration names none."""
    limit = config.upload_config.concurrency_limit or CkptSettings().concurrency_limit
    return replace(config, upload_config=replace(config.upload_config, concurrency_limit=limit))


def _uploader(
    task_runner: ThreadPoolTaskRunner[Any] | None, task_runs: TaskRuns, workers: int
) -> tuple[_Uploads, Callable[[Report, Destination], Pending[ReportRecord]]]:
    """What uploads run on, and how one is begun there."""
    if task_runs not in ("all", "failures"):
        raise ConfigError(f"task_runs={task_runs!r} must be 'all' or 'failures'")
    if task_runs == "all":
        runner = task_runner or ThreadPoolTaskRunner(max_workers=workers)
        return runner, lambda report, destination: runner.submit(
            upload_checkpoint, {"checkpoint": report, "destination": destination}
        )
    if task_runner is not None:
        raise ConfigError("task_runs='failures' uploads in plain threads: leave task_runner out")
    pool = ThreadPoolExecutor(workers, thread_name_prefix="ckpt-upload")
    return pool, lambda report, destination: pool.submit(
        contextvars.copy_context().run, upload_quietly, report, destination
    )


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


def _show(result: Result, view: RunView, seconds: float) -> None:
    """Show the end in the UI, from a thread that is left at its deadline: with the API away a call takes minutes."""

    def publish() -> None:
        try:
            publish_result(result)
        except Exception as error:  # noqa: BLE001 - the result is in the store; the artifact only shows it
            logger.warning("The result artifact of run %s could not be made: %s", result.run, error)

    view.completed(result)
    deadline = time.monotonic() + seconds
    away = not api_answers(min(5.0, seconds))
    published = not away and _in_time(publish, seconds)
    unseen = view.close(0.0 if away else max(0.0, deadline - time.monotonic()))
    if away:
        without_api()
    if not published or unseen:
        logger.warning(
            "The Prefect API %s. The UI misses the end of run %s: its result, %d reports in the live table, %d events; "
            "everything is in %s", "does not answer" if away else "is slow", result.run, unseen.reports, unseen.events,
            result.path,
        )  # fmt: skip
