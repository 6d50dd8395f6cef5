"""What people look at and automations listen to while a run goes on: live table and events. It never holds up the run."""

from __future__ import annotations

import contextvars
import json
import logging
import threading
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from ckpt import ReportRecord, Result, Run, Totals
from ckpt.metrics import score_of
from ckpt_tasks.artifacts import LIVE_ROWS, live_description, live_key, live_rows
from ckpt_tasks.events import RunEvents, Source

logger = logging.getLogger("ckpt")

_INTERVAL = 1.0
"""Seconds between two updates, at least."""
_REQUEST_SECONDS = 5.0
"""For one API call; Prefect's client would try for over a minute."""
_PAUSE = 30.0
"""Longest pause after calls that failed, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """What the UI does not know at the end; false if it knows everything."""

    reports: int
    """Published after the last update of the live table that the API took."""
    events: int
    """Dropped, or not sent."""
    failures: int
    """API calls that failed, over the whole run."""
    error: str | None
    """The last of their errors."""

    def __bool__(self) -> bool:
        return self.reports > 0 or self.events > 0


class RunView:
    """One table artifact of a run, created at the first report and updated in place; and the run's events.

    `publish` is called by the ordering task: it remembers and returns, whatever the API does. A daemon thread sends the
    newest state, at most once a second, with short timeouts; what it could not send is overtaken by the next state.
    Events are sent in their order, from `opened` on; those that wait while the API is away are bounded.

    Made inside a flow or task run; elsewhere the artifact belongs to no run.

    Args:
        run: the run's name.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._records: deque[ReportRecord] = deque(maxlen=LIVE_ROWS)
        self._totals = Totals()
        self._shown = 0
        self._failures = 0
        self._error: str | None = None
        self._closing = False
        self._events = RunEvents()
        self._changed = threading.Condition()
        self._artifact: UUID | None = None
        self._client: SyncPrefectClient | None = None
        self._client_scope = ExitStack()
        self._owner = _owner()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._keep_showing,), name="ckpt-view", daemon=True)
        self._thread.start()

    def publish(self, record: ReportRecord) -> None:
        """Take the next report in; O(1), no I/O."""
        totals = self._totals.plus(record)
        with self._changed:
            self._records.append(record)
            self._totals = totals
            self._events.published(record)
            self._changed.notify()

    def opened(self, run: Run) -> None:
        """The run is open: now it is known which one speaks."""
        flow = FlowRunContext.get()
        flow_run = None if flow is None or flow.flow_run is None else (flow.flow_run.id, flow.flow_run.name)
        config = run.config.checkpoint_config
        source = Source(
            run_id=run.destination.run_id, name=run.config.name, uri=run.uri, best=_best_score(run), flow_run=flow_run,
            score_attribute=config.checkpoint_score_attribute, score_order=config.checkpoint_score_order,
        )  # fmt: skip
        with self._changed:
            self._events.opened(source)
            self._changed.notify()

    def completed(self, result: Result) -> None:
        """The run ended by itself; an event says so."""
        with self._changed:
            self._events.completed(result)
            self._changed.notify()

    def close(self, deadline: float) -> Missed:
        """Show the last state, and stop.

        Args:
            deadline: seconds; a call under way after them is left to its daemon thread.

        Returns:
            What the table does not show.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(deadline)
        with self._changed:
            reports, events = self._totals.reports - self._shown, len(self._events) + self._events.dropped
            return Missed(reports=reports, events=events, failures=self._failures, error=self._error)

    def _keep_showing(self) -> None:
        """The thread: the newest state, a pause, again; once more at closing."""
        pause = 0.0
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), ExitStack() as self._client_scope:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause)
                    self._changed.wait_for(lambda: self._closing or self._behind())
                    closing, behind = self._closing, self._behind()
                if behind:
                    pause = _INTERVAL if self._show() else min(_PAUSE, 2 * max(pause, _INTERVAL))
                if closing:
                    return

    def _behind(self) -> bool:
        return self._totals.reports > self._shown or len(self._events) > 0

    def _show(self) -> bool:
        """Send events that wait and the newest state; whether the API took them."""
        with self._changed:
            records, totals = list(self._records), self._totals
        try:
            while batch := self._events.batch():
                self._api().request("POST", "/events", json=batch)
                self._events.sent(batch)
            if totals.reports > self._shown:
                self._send(json.dumps(live_rows(records)), live_description(self._run, totals))
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on and the next state tries again
            self._give_up_client(error)
            return False
        with self._changed:
            self._shown = totals.reports
        return True

    def _api(self) -> SyncPrefectClient:
        if self._client is None:
            client = get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_SECONDS})
            self._client = self._client_scope.enter_context(client)
        return self._client

    def _send(self, table: str, description: str) -> None:
        client = self._api()
        if self._artifact is None:
            flow_run, task_run = self._owner
            artifact = ArtifactCreate(
                key=live_key(self._run), type="table", data=table, description=description, flow_run_id=flow_run,
                task_run_id=task_run,
            )  # fmt: skip
            self._artifact = client.create_artifact(artifact).id
            return
        # Not `update_artifact`: that also emits an event with the whole table in it, every time.
        body = {"data": table, "description": description}
        client.request("PATCH", "/artifacts/{id}", path_params={"id": self._artifact}, json=body)

    def _give_up_client(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            self._error = f"{type(error).__name__}: {error}"
        logger.debug("The live table was not updated: %s", error)
        self._client = None
        with suppress(Exception):
            self._client_scope.close()


def _best_score(run: Run) -> float | None:
    """Of the checkpoints that the run found and keeps."""
    attribute = run.config.checkpoint_config.checkpoint_score_attribute
    if attribute is None:
        return None
    scores = [
        score for record in run.publisher.retained() if (score := score_of(record.metrics, attribute)) is not None
    ]
    return (max if run.config.checkpoint_config.checkpoint_score_order == "max" else min)(scores, default=None)


def _owner() -> tuple[UUID | None, UUID | None]:
    """Ids of the flow run and the task run that this code runs in."""
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    flow_run = flow.flow_run.id if flow is not None and flow.flow_run is not None else None
    if task is None:
        return flow_run, None
    return task.task_run.flow_run_id or flow_run, task.task_run.id
