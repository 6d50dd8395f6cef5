"""The upload task: one run of it per reported checkpoint, and a task of its own in any other pipeline."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import cloudpickle
from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.states import Completed, Failed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from ckpt import Checkpoint, Report, ReportRecord, ReportState
from ckpt.calling import name_of
from ckpt.credentials import Credentials
from ckpt.errors import ConfigError, UploadFailedError, UploadFunctionError
from ckpt.inflight import Destination
from ckpt.records import UploadFn
from ckpt.uploading import upload, upload_standalone
from ckpt_tasks.limits import cross_run_limit

P = ParamSpec("P")
R = TypeVar("R")


class UploadTask(Task[P, R]):
    """A task that refuses, where it is submitted, a function that cannot be sent to where it would run."""

    if not TYPE_CHECKING:  # the signatures are those of Task

        def submit(self, *args: Any, **kwargs: Any) -> Any:
            """As `Task.submit`.

            Raises:
                UploadFunctionError: the `checkpoint_upload_fn` cannot leave this process, and the task runner is another.
            """
            _check_sendable(kwargs.get("checkpoint_upload_fn"))
            return super().submit(*args, **kwargs)

        def map(self, *args: Any, **kwargs: Any) -> Any:
            """As `Task.map`; raises as `submit` does."""
            _check_sendable(kwargs.get("checkpoint_upload_fn"))
            return super().map(*args, **kwargs)

        def with_options(self, **options: Any) -> Any:
            """As `Task.with_options`."""
            other = super().with_options(**options)
            other.__class__ = type(self)
            return other


def _run_name(parameters: dict[str, Any]) -> str:
    subject, destination = parameters["checkpoint"], parameters["destination"]
    if isinstance(subject, Report):
        return f"upload-{subject.seq:06d} {destination.run}"
    return f"upload {parameters.get('name') or str(destination).rstrip('/').rpartition('/')[2]}"


def _upload(
    checkpoint: Checkpoint | Report,
    destination: str | Destination,
    *,
    name: str | None = None,
    metrics: dict[str, Any] | None = None,
    seq: int | None = None,
    checkpoint_upload_fn: UploadFn | None = None,
    credentials: Credentials | None = None,
    storage_options: dict[str, Any] | None = None,
) -> ReportRecord:
    """Upload one checkpoint and commit it: it exists with all its files, or not at all.

    Retrying is per file and inside; `with_options(retries=...)` begins from nothing.

    Args:
        checkpoint: a local directory or a URI to copy from. A training run gives its frozen `Report` instead.
        destination: a prefix where nothing is yet: a standalone checkpoint, committed by `<destination>.manifest.json`.
            A training run gives its attempt instead.
        name: for people; default: the last part of `destination`.
        metrics: recorded in the manifest.
        seq: place in an order of the caller's own, for `gather_reports`.
        checkpoint_upload_fn: `fn(checkpoint, name) -> Checkpoint` instead of the default upload.
        credentials: for `destination`.
        storage_options: for `destination`, without secrets.

    Returns:
        A small record; no bytes travel through Prefect.

    Raises:
        UploadFailedError: carries the FAILED record.
    """
    if isinstance(checkpoint, Report):
        if not isinstance(destination, Destination):
            raise ConfigError(
                "a Report is uploaded to the Destination of its run; give a Checkpoint for a plain prefix"
            )
        return _in_run(checkpoint, destination)
    if isinstance(destination, Destination):
        raise ConfigError("inside a run, use report(); upload_checkpoint takes a plain prefix as destination")
    return upload_standalone(
        checkpoint,
        destination,
        name=name,
        metrics=metrics,
        seq=seq,
        checkpoint_upload_fn=checkpoint_upload_fn,
        credentials=credentials,
        storage_options=storage_options,
    )


upload_checkpoint = UploadTask(
    fn=_upload,
    name="upload-checkpoint",
    description="Upload one checkpoint, verify what arrived, and commit it; all or nothing.",
    task_run_name=cast("Any", _run_name),  # Prefect gives it the parameters if it takes one; its annotation lags behind
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)


def upload_quietly(report: Report, destination: Destination) -> ReportRecord:
    """Upload a report of a run without a task run of its own; if it failed, one shows it, in its state and with its reason.

    Raises:
        UploadFailedError: carries the FAILED record.
    """
    config = destination.upload_config
    try:
        return upload(report, destination, limit=cross_run_limit(config.concurrency_limit, config.limit_timeout))
    except UploadFailedError as error:
        with suppress(Exception):  # it only shows what the history says
            _failed_upload(checkpoint=report, destination=destination, error=error, return_state=True)
        raise


@task(
    name="upload-checkpoint",
    description="An upload that failed; the ones that did not have no task run.",
    task_run_name=cast("Any", _run_name),
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
def _failed_upload(checkpoint: Report, destination: Destination, error: UploadFailedError) -> Any:  # noqa: ARG001 - its name says
    return _failed(error)


def _failed(error: UploadFailedError) -> Any:
    return Failed(name=error.record.state.value.title(), message=str(error.record.reason), data=error)


def _check_sendable(fn: Any) -> None:
    """Only threads share this process's objects; a Future of the training loop, for one, means nothing anywhere else."""
    context = FlowRunContext.get()
    runner: TaskRunner[Any] | None = None if context is None else context.task_runner
    if fn is None or runner is None or isinstance(runner, ThreadPoolTaskRunner):
        return
    try:
        cloudpickle.dumps(fn)
    except Exception as error:
        raise UploadFunctionError(
            f"checkpoint_upload_fn {name_of(fn)} cannot be sent to the processes of a {type(runner).__name__}: "
            f"{_culprit(fn) or error}. Wait for it before the upload is submitted, or use a ThreadPoolTaskRunner"
        ) from error


def _culprit(fn: Any) -> str | None:
    """The variable of a closure that cannot be pickled."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=True):
        try:
            cloudpickle.dumps(cell.cell_contents)
        except Exception:  # noqa: BLE001 - whatever it says, it is this one
            kind = type(cell.cell_contents)
            return f"it closes over {name!r}, a {kind.__module__}.{kind.__qualname__}"
    return None


def _in_run(report: Report, destination: Destination) -> ReportRecord:
    """States instead of exceptions: a failed upload is a row of the history, and no stack trace in the trainer's log.

    Prefect takes a state that a task returns for the task run's own; `result()` of its future is the state's data.
    """
    config = destination.upload_config
    try:
        record = upload(report, destination, limit=cross_run_limit(config.concurrency_limit, config.limit_timeout))
    except UploadFailedError as error:
        return cast("ReportRecord", _failed(error))
    if record.state is ReportState.SKIPPED:
        return cast("ReportRecord", Completed(name="Skipped", message=str(record.reason), data=record))
    return record
