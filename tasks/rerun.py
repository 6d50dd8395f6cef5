"""Running a crashed training again: the same parameters, the same deployment, at most so often.

Prefect's own retries cover Failed and never Crashed, and templates of automations pass only strings, so an automation
starts the deployment of `flows/rerun.py` with the id of what crashed, and that does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed

from ckpt.errors import ConfigError
from ckpt_tasks.launching import derived_name

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

NUMBER = "prefect-ckpt.rerun"
"""Label of a flow run that is a rerun: the how-manieth."""
ORIGIN = "prefect-ckpt.rerun-of"
"""Label of a flow run that is a rerun: id of the first that crashed."""


def run_again(flow_run_id: UUID, at_most: int) -> State[Any]:
    """Start a crashed flow run's deployment again with the parameters that it had.

    Asked twice about the same crash, it starts one flow run: automations may fire twice.

    Args:
        flow_run_id: of the crashed flow run.
        at_most: reruns of one first flow run, reruns of reruns included.

    Returns:
        A Completed state that says what was done and why.

    Raises:
        ConfigError: there is no such flow run.
    """
    with get_client(sync_client=True) as client:
        try:
            crashed = client.read_flow_run(flow_run_id)
        except ObjectNotFound as error:
            raise ConfigError(f"there is no flow run {flow_run_id}") from error
        if crashed.state is None or not crashed.state.is_crashed():
            return _not_run(crashed, "it is not Crashed (any more)")
        if crashed.deployment_id is None:
            return _not_run(crashed, "it was not started from a deployment; the same command goes on where it was")
        number = int(crashed.labels.get(NUMBER, 0)) + 1
        if number > at_most:
            return _not_run(crashed, f"it was run again {at_most} times already")
        again = _started(client, crashed, number)
    return Completed(
        name="Started", message=f"{crashed.name} crashed; {again.name} is rerun {number} of at most {at_most}"
    )


def _started(client: SyncPrefectClient, crashed: FlowRun, number: int) -> FlowRun:
    assert crashed.deployment_id is not None
    return client.create_flow_run_from_deployment(
        crashed.deployment_id, parameters=_named(crashed), tags=crashed.tags, job_variables=crashed.job_variables,
        work_queue_name=crashed.work_queue_name, idempotency_key=f"ckpt-rerun-{crashed.id}",
        labels={NUMBER: number, ORIGIN: str(crashed.labels.get(ORIGIN, crashed.id))},
    )  # fmt: skip


def _named(crashed: FlowRun) -> dict[str, Any]:
    """Its parameters; a run whose name was left to the flow run gets that name, so that it is continued."""
    config = crashed.parameters.get("config")
    if not isinstance(config, dict) or config.get("name"):
        return crashed.parameters
    return {**crashed.parameters, "config": {**config, "name": derived_name(crashed.name, crashed.id)}}


def _not_run(crashed: FlowRun, reason: str) -> State[Any]:
    return Completed(name="NotRun", message=f"{crashed.name} is not run again: {reason}")
