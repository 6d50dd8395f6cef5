"""The flow that runs a crashed training again; `ckpt setup --automations` makes the automation that starts it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect import flow
from prefect.client.schemas.objects import State

from ckpt_tasks.rerun import run_again


@flow(name="rerun", persist_result=False)
def rerun(flow_run_id: UUID, at_most: int = 3) -> State[Any]:
    """Start the deployment of a crashed flow run again with the same parameters, at most so often."""
    return run_again(flow_run_id, at_most)
