"""The pruning flow: checkpoints of a finished run are deleted by rules that need not be those it ran with."""

from __future__ import annotations

from typing import cast

from prefect import flow
from prefect.states import Completed

from ckpt import Checkpoint
from ckpt_tasks import PruneConfig, run_prune


@flow(name="prune", log_prints=False, persist_result=False)
def prune(config: PruneConfig) -> list[Checkpoint]:
    """Delete the checkpoints of a run that no rule keeps; a run that is alive is left alone.

    Args:
        config: Which run, and what to keep.
    """
    gone = run_prune(config)
    return cast("list[Checkpoint]", Completed(message=f"{len(gone)} checkpoints deleted", data=gone))
