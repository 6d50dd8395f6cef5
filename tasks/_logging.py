"""The `ckpt` logger in a Prefect run: once in the console, once in the run's logs; Prefect's own noise kept short."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import prefect.logging.handlers as prefect_handlers
from prefect.context import TaskRunContext
from prefect.logging.handlers import APILogWorker
from prefect.logging.loggers import get_run_logger, task_run_logger

from ckpt.errors import CkptError

logger = logging.getLogger("ckpt")

_OUR_TASKS = frozenset(
    {
        "evaluate_checkpoint",
        "gather_reports",
        "prune_checkpoints",
        "publish_result",
        "restore_checkpoint",
        "upload_checkpoint",
        "validate_checkpoint",
        "verify_checkpoint",
    }
)
"""Tasks whose outcome the `ckpt` logger tells: Prefect's "Finished in state Completed()" would say it twice."""


@contextlib.contextmanager
def run_logging(level: int = logging.INFO) -> Iterator[None]:
    """Send what the `ckpt` logger says, in any thread, to the current flow or task run for the length of the block.

    A record made inside a task run (an upload) goes to that task run's page, all others to the run that entered the
    block. Each appears once, also where `PREFECT_LOGGING_EXTRA_LOGGERS` names `ckpt`. Prefect's noise is quieted from
    here on (`quiet_prefect`).

    Args:
        level: the lowest that is sent; ranks above 0 give `logging.WARNING`.

    Raises:
        MissingContextError: outside of a flow or task run.
    """
    handler = _RunHandler(cast("logging.LoggerAdapter[logging.Logger]", get_run_logger()))
    quiet_prefect()
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])


class _RunHandler(logging.Handler):
    """Hands records to Prefect's own run loggers, so that its console format and its API handler do the rest."""

    def __init__(self, run: logging.LoggerAdapter[logging.Logger]) -> None:
        super().__init__()
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        context = TaskRunContext.get()
        run = self._run if context is None else task_run_logger(context.task_run, context.task)
        record = copy.copy(record)
        record.name = run.logger.name
        record.__dict__.update(run.extra or {})
        run.logger.handle(record)


class _Missed:
    """What Prefect's background workers could not deliver; told to the user once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.logs = 0
        self.events = 0

    def add(self, *, logs: int = 0, events: int = 0) -> None:
        with self._lock:
            first = not (self.logs or self.events)
            self.logs += logs
            self.events += events
        if first:
            logger.warning("The Prefect API does not answer. The run goes on; the UI will miss what happens meanwhile.")


missed = _Missed()
"""Logs and events (task run states among them) of this process that the Prefect API did not take."""


def quiet_prefect() -> None:
    """Keep Prefect's reports of its own troubles short, for the rest of this process; idempotent.

    With the API away, Prefect dumps every undelivered event and prints to stderr for every undelivered batch of logs;
    here they are counted (`missed`) and told once. Stack traces are cut where the exception is one of ours or a failed
    connection: its text says it all. Nothing else is touched.
    """
    for name, verdict in _VERDICTS.items():
        target = logging.getLogger(name)
        if verdict not in target.filters:
            target.addFilter(verdict)
    if prefect_handlers._api_log_sink is None:  # noqa: SLF001 - a process of Prefect's own pool has one already
        prefect_handlers.set_api_log_sink(_send_log)


def _send_log(log: dict[str, Any]) -> None:
    _LogWorker.instance().send(log)


class _LogWorker(APILogWorker):
    """Prefect's, but a batch that cannot be sent is counted instead of announced on stderr."""

    async def _handle_batch(self, items: list[bytes]) -> None:
        try:
            await self._client.request(
                "POST", "/logs/", content=b"[" + b",".join(items) + b"]", headers={"Content-Type": "application/json"}
            )
        except Exception:  # noqa: BLE001 - whatever it was, these logs are lost, and there is no one to raise it to
            missed.add(logs=len(items))


_OF_LOST_ITEMS = ("failed to process item", "Unable to connect to", "Still processing items")


def _undelivered(record: logging.LogRecord) -> bool:
    """Whether to keep a record of Prefect's background services; a lost item of theirs is counted instead."""
    lost = any(said in str(record.msg) for said in _OF_LOST_ITEMS)
    if lost and "EventsWorker" in str(record.args):
        missed.add(events=1)
    return not lost


def _short(record: logging.LogRecord) -> bool:
    """Cut the stack trace of an error whose text says it all; keep the record."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None or isinstance(error, CkptError | httpx.TransportError):
        record.exc_info = None
    return True


def _told_once(record: logging.LogRecord) -> bool:
    """Whether to keep a record of a task run: of ours, not what the `ckpt` logger or the final state says anyway."""
    ours = str(getattr(record, "task_name", "")).replace("-", "_") in _OUR_TASKS
    finished = record.levelno <= logging.INFO and str(record.msg).startswith("Finished in state")
    _short(record)
    failed = record.exc_info is None and str(record.msg).startswith("Task run failed with")
    return not (ours and (finished or failed))


_VERDICTS: dict[str, Callable[[logging.LogRecord], bool]] = {
    "prefect._internal.concurrency": _undelivered,
    "prefect.concurrency": _short,
    "prefect.events.clients": _undelivered,
    "prefect.flow_runs": _short,
    "prefect.task_runs": _told_once,
    **dict.fromkeys(("APILogWorker", "EventsWorker", "_LogWorker"), _undelivered),
}
