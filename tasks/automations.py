"""The automations of `ckpt setup --automations`: evaluate, notify, run again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from prefect.events.actions import ActionTypes, DoNothing, RunDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from ckpt.errors import ConfigError
from ckpt_tasks import events

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

EVALUATE = "evaluate/evaluate"
RERUN = "rerun/rerun"
"""Deployments that automations start."""
DEPLOY = "`prefect deploy --prefect-file deployments/prefect.yaml --all`"

Done = Literal["created", "changed", "unchanged", "removed"]

_EVALUATE = "ckpt: evaluate checkpoints"
_RERUN = "ckpt: run a crashed training again"
_MADE = "Made by `ckpt setup`"
_RUNS: dict[str, Any] = {"prefect.resource.id": f"{events.RESOURCE}.*"}
_RUN = "{{ event.payload.run }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reactions:
    """What automations do."""

    evaluate: Literal["every", "best", "none"] = "every"
    """Start an evaluation run for every committed checkpoint, for every new best one, or not at all."""
    notify: str | None = None
    """Notification block, `<type>/<name>`; None: failures are noted in the event feed, as triggered automations."""
    silence: float = 6.0
    """Hours without a commit after which a run that has not ended is reported."""
    reruns: int = 3
    """How often a crashed training is run again with the same parameters; 0: never."""
    flow: str = "train"
    """Name of the flow whose crashed and failed runs count."""

    def __post_init__(self) -> None:
        if not self.silence * 3600 >= 10:
            raise ConfigError(f"silence={self.silence} hours is too short: Prefect looks every 10 s at best")
        if self.reruns < 0:
            raise ConfigError(f"reruns={self.reruns} must be 0 or more")


def ensure_automations(client: SyncPrefectClient, wanted: Reactions) -> Iterator[tuple[str, Done, str]]:
    """Create or change the automations; nothing is created unless everything that they name is there.

    An automation that somebody edited or paused stays so, until what is wanted changes.

    Yields:
        Name, what was done, and a note.

    Raises:
        ConfigError: a deployment or a block that is named does not exist.
    """
    automations = list(_automations(client, wanted))
    for automation, note in automations:
        known = client.read_automations_by_name(automation.name)
        if not known:
            client.create_automation(automation)
            yield automation.name, "created", note
        elif known[0].description == automation.description:
            yield automation.name, "unchanged", note
        else:
            client.update_automation(known[0].id, automation)
            yield automation.name, "changed", note
    for name in {_EVALUATE, _RERUN} - {automation.name for automation, _ in automations}:
        for found in client.read_automations_by_name(name):
            if found.description.startswith(_MADE):
                client.delete_automation(found.id)
                yield name, "removed", "not wanted any more"


def _automations(client: SyncPrefectClient, wanted: Reactions) -> Iterator[tuple[AutomationCore, str]]:
    if wanted.evaluate != "none":
        yield _evaluating(client, wanted.evaluate), f"starts {EVALUATE} for {wanted.evaluate} committed checkpoint"
    told = _telling(client, wanted.notify)
    note = f"tells {wanted.notify}" if wanted.notify else "noted in the event feed; --notify TYPE/NAME tells somebody"
    yield _failed_report(told), note
    yield _failed_flow(told, wanted.flow), note
    yield _silent(told, wanted.silence), note
    if wanted.reruns:
        yield _rerunning(client, wanted), f"at most {wanted.reruns} times"


def _evaluating(client: SyncPrefectClient, which: str) -> AutomationCore:
    expect = events.COMMITTED if which == "every" else events.BEST_CHANGED
    start = _start(_deployment(client, EVALUATE), {"ref": "{{ event.payload.ref }}"})
    return _automation(_EVALUATE, _when({expect}, match=_RUNS), start)


def _failed_report(told: _Told) -> AutomationCore:
    action = told("Checkpoint lost", f"Report {{{{ event.payload.seq }}}} of {_RUN}: {{{{ event.payload.reason }}}}")
    # One message an hour and run: an expired key fails every report.
    trigger = _when({events.FAILED}, match=_RUNS, for_each={"prefect.resource.id"}, within=timedelta(hours=1))
    return _automation("ckpt: a report failed", trigger, action)


def _failed_flow(told: _Told, flow: str) -> AutomationCore:
    action = told(
        "Training failed", "Flow run {{ flow_run.name }} ended {{ flow_run.state.name }}: {{ flow_run.state.message }}"
    )
    return _automation(
        "ckpt: a training failed", _ended({"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}, flow), action
    )


def _silent(told: _Told, hours: float) -> AutomationCore:
    """Like a heartbeat: the start and every commit begin a new wait, the end of the run ends it."""
    trigger = EventTrigger(
        match=_RUNS, for_each={"prefect.resource.id"}, posture=Posture.Proactive, threshold=1,
        after={events.STARTED, events.COMMITTED}, expect={events.COMMITTED, events.COMPLETED},
        within=timedelta(hours=hours),
    )  # fmt: skip
    action = told("No checkpoint committed", f"{_RUN} has committed nothing for {hours:g} hours")
    return _automation("ckpt: no commit for too long", trigger, action)


def _rerunning(client: SyncPrefectClient, wanted: Reactions) -> AutomationCore:
    # As text: Prefect renders a lone value as JSON, and a UUID is none.
    parameters = {"flow_run_id": "{{ flow_run.id | string }}", "at_most": wanted.reruns}
    start = _start(_deployment(client, RERUN), parameters)
    return _automation(_RERUN, _ended({"prefect.flow-run.Crashed"}, wanted.flow), start)


def _ended(states: set[str], flow: str) -> EventTrigger:
    related = {"prefect.resource.role": "flow", "prefect.resource.name": flow}
    return _when(states, match={"prefect.resource.id": "prefect.flow-run.*"}, related=related)


def _when(
    expect: set[str],
    *,
    match: dict[str, Any],
    related: dict[str, Any] | None = None,
    for_each: set[str] | None = None,
    within: timedelta = timedelta(0),
) -> EventTrigger:
    return EventTrigger(
        match=match, match_related=related or {}, expect=expect, posture=Posture.Reactive, threshold=1,
        for_each=for_each or set(), within=within,
    )  # fmt: skip


def _automation(name: str, trigger: EventTrigger, action: ActionTypes) -> AutomationCore:
    """Its description carries a digest of what was wanted: the server rewrites templates, so that nothing else compares."""
    body = json.dumps([trigger.model_dump(mode="json"), action.model_dump(mode="json")], sort_keys=True, default=sorted)
    digest = hashlib.sha256(_sorted(body).encode()).hexdigest()[:12]
    return AutomationCore(name=name, description=f"{_MADE} ({digest})", trigger=trigger, actions=[action])


def _sorted(body: str) -> str:
    """With the lists that stand for sets in one order."""

    def order(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: order(item) for key, item in value.items()}
        return sorted(map(order, value), key=json.dumps) if isinstance(value, list) else value

    return json.dumps(order(json.loads(body)), sort_keys=True)


@dataclass(frozen=True, slots=True)
class _Told:
    """Makes the action that tells people."""

    block: Any = None

    def __call__(self, subject: str, body: str) -> ActionTypes:
        if self.block is None:
            return DoNothing()
        return SendNotification(block_document_id=self.block, subject=subject, body=body)


def _telling(client: SyncPrefectClient, block: str | None) -> _Told:
    if block is None:
        return _Told()
    kind, _, name = block.partition("/")
    try:
        document = client.read_block_document_by_name(name, kind)
    except ObjectNotFound as error:
        raise ConfigError(
            f"there is no block {block!r}: make one in the UI (Blocks, a notification such as Slack Webhook), and name it "
            "<type>/<name>, such as slack-webhook/ops"
        ) from error
    schema = document.block_schema
    if schema is None or "notify" not in schema.capabilities:
        raise ConfigError(f"block {block!r} sends no notifications: name one such as slack-webhook/ops")
    return _Told(document.id)


def _start(deployment: UUID, parameters: dict[str, Any]) -> RunDeployment:
    return RunDeployment(source="selected", deployment_id=deployment, parameters=parameters, job_variables=None)


def _deployment(client: SyncPrefectClient, name: str) -> UUID:
    try:
        return client.read_deployment_by_name(name).id
    except ObjectNotFound as error:
        raise ConfigError(
            f"there is no deployment {name!r}: deploy first, with {DEPLOY}, and run this again"
        ) from error
