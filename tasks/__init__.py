"""Prefect tasks over `ckpt`. This folder is installed as `ckpt_tasks`: `tasks` is a name of your own project.

Each name is imported when it is first looked up: the `ckpt` command and the credentials entry point live here too, and
start without Prefect.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_tasks.embedded import embedded_server
    from ckpt_tasks.form import TrainConfig
    from ckpt_tasks.gather import gather_reports
    from ckpt_tasks.jobs import EvaluateConfig, PruneConfig, StandaloneUpload, run_evaluation, run_prune, run_upload
    from ckpt_tasks.launching import run_training
    from ckpt_tasks.publish import publish_result
    from ckpt_tasks.restore import prune_checkpoints, restore_checkpoint, verify_checkpoint
    from ckpt_tasks.training import training_run
    from ckpt_tasks.upload import upload_checkpoint

__all__ = [
    "EvaluateConfig",
    "PruneConfig",
    "StandaloneUpload",
    "TrainConfig",
    "embedded_server",
    "gather_reports",
    "prune_checkpoints",
    "publish_result",
    "restore_checkpoint",
    "run_evaluation",
    "run_prune",
    "run_training",
    "run_upload",
    "training_run",
    "upload_checkpoint",
    "verify_checkpoint",
]

_MODULES = {
    "EvaluateConfig": "jobs",
    "PruneConfig": "jobs",
    "StandaloneUpload": "jobs",
    "TrainConfig": "form",
    "embedded_server": "embedded",
    "gather_reports": "gather",
    "prune_checkpoints": "restore",
    "publish_result": "publish",
    "restore_checkpoint": "restore",
    "run_evaluation": "jobs",
    "run_prune": "jobs",
    "run_training": "launching",
    "run_upload": "jobs",
    "training_run": "training",
    "upload_checkpoint": "upload",
    "verify_checkpoint": "restore",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
