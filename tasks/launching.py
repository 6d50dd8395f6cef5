"""`run_training`: a training function inside the caller's flow, as one run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.context import FlowRunContext, TaskRunContext

from ckpt import Result
from ckpt.errors import ConfigError, NoActiveRunError
from ckpt_tasks.form import TrainConfig
from ckpt_tasks.functions import resolve_function
from ckpt_tasks.training import training_run


def run_training(config: TrainConfig, train_fn: Callable[..., Any] | None = None) -> Result:
    """Run a training function inside the current flow or task run, with its reports as one run.

    The function finds its run through `ckpt.report`, `ckpt.get_checkpoint` and the others. One process for now.

    Args:
        config: the training.
        train_fn: takes `config.train_loop_config`, or nothing; default: the function that `config.train_fn` names.

    Returns:
        The run's result.

    Raises:
        ConfigError: no function, one that cannot be called so, or a value that can never work.
        CheckpointsLostError: by the failure policy; carries `.result`.
    """
    if train_fn is None and config.train_fn is None:
        raise ConfigError("no training function: set train_fn='package.module:function', or pass one in code")
    call = _bound(train_fn or resolve_function(str(config.train_fn)), config.train_loop_config)
    with training_run(config.run_config(_default_name()), task_runs=config.task_runs) as run:
        call()
    return run.result


def _bound(train_fn: Callable[..., Any], loop_config: dict[str, Any]) -> Callable[[], Any]:
    """The call, checked before anything is started."""
    takes = inspect.signature(train_fn).parameters
    if not takes:
        if loop_config:
            raise ConfigError(f"train_loop_config is given, and {train_fn!r} takes no argument")
        return train_fn
    return lambda: train_fn(dict(loop_config))


def derived_name(name: str, run_id: UUID) -> str:
    """What a run is called whose name was left to the flow run; people may call that as they like."""
    plain = re.sub(r"[^\w. -]+", "-", name).strip("-. ")[:60]
    return f"{plain}-{str(run_id)[-8:]}".lstrip("-")


def _default_name() -> str:
    """Of the flow run, so that its retries continue it and other flow runs do not."""
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    if flow is not None and flow.flow_run is not None:
        return derived_name(flow.flow_run.name, flow.flow_run.id)
    if task is not None:
        return derived_name(task.task_run.name, task.task_run.id)
    raise NoActiveRunError("run_training works inside a @flow or a @task")
