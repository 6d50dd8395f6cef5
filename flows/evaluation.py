"""The evaluation flow: scores of a committed checkpoint, written back to it from outside its run."""

from __future__ import annotations

from typing import Any, cast

from prefect import flow
from prefect.states import Completed

from ckpt.errors import CheckpointPrunedError
from ckpt_tasks import EvaluateConfig, run_evaluation


@flow(name="evaluate", log_prints=False, persist_result=False)
def evaluate(ref: str, config: EvaluateConfig) -> dict[str, Any]:
    """Restore a checkpoint, evaluate it, and record its scores; retention, `best` and every reader see them.

    One that retention deleted before ends Completed: an evaluation that came too late is no failure.

    Args:
        ref: The checkpoint: <storage path>/<run>@12, @latest, @best, or @best:loss:min.
        config: How to evaluate it.
    """
    try:
        return dict(run_evaluation(ref, config))
    except CheckpointPrunedError as error:
        return cast("dict[str, Any]", Completed(message=f"pruned: {error}"))
