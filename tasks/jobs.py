"""Jobs on what trainings left, each as a form and what it does: upload a directory, evaluate, prune a run.

The flows `flows/upload.py`, `flows/evaluate.py` and `flows/prune.py` are these, deployable.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from ckpt import Checkpoint, ReportRecord, record_evaluation, resolve
from ckpt.errors import ConfigError
from ckpt.metrics import Metrics, freeze_metrics
from ckpt.reading import split_reference
from ckpt_tasks._logging import run_logging
from ckpt_tasks.deployed import check_deployed_path
from ckpt_tasks.form import Form, Retention, credentials_field, storage_options_field
from ckpt_tasks.functions import resolve_function
from ckpt_tasks.restore import prune_checkpoints, restore_checkpoint
from ckpt_tasks.upload import upload_checkpoint


class StandaloneUpload(Form):
    """One directory that becomes a checkpoint of its own at another place."""

    source: str = Field(
        min_length=1,
        title="Source",
        description="A checkpoint directory: an absolute path that the worker sees, or a URI.",
    )
    destination: str = Field(
        min_length=1,
        title="Destination",
        description="Where nothing is yet: s3://bucket/exports/name, any fsspec URI, or an absolute path.",
    )
    name: str | None = Field(
        default=None, min_length=1, title="Name", description="For people; empty: the last part of the destination."
    )
    seq: int = Field(default=0, ge=0, title="Number", description="Its place in an order of your own.")
    metrics: dict[str, Any] = Field(default_factory=dict, title="Metrics", description="Recorded in the manifest.")
    checkpoint_upload_fn: str | None = Field(
        default=None,
        min_length=1,
        title="Upload function",
        description="package.module:function that uploads instead; empty: the default upload.",
    )
    source_credentials: str | None = credentials_field("Credentials of the source")
    source_storage_options: dict[str, Any] = storage_options_field("Storage options of the source")
    credentials: str | None = credentials_field("Credentials of the destination")
    storage_options: dict[str, Any] = storage_options_field("Storage options of the destination")


class EvaluateConfig(Form):
    """How a committed checkpoint is evaluated."""

    evaluate_fn: str = Field(
        min_length=1,
        title="Evaluation function",
        description="package.module:function, or a registered name; takes the restored folder (a Path), returns metrics.",
    )
    source: str = Field(
        default="",
        max_length=200,
        title="Source",
        description="Who says so, kept with the scores; empty: the function.",
    )
    credentials: str | None = credentials_field()
    storage_options: dict[str, Any] = storage_options_field()


class PruneConfig(Form):
    """Which checkpoints of a finished run stay."""

    run: str = Field(min_length=1, title="Run", description="<storage path>/<name>: a URI or an absolute path.")
    retention: Retention = Field(
        title="Retention", description="At least one rule; the latest, the best and pinned ones always stay."
    )
    credentials: str | None = credentials_field()
    storage_options: dict[str, Any] = storage_options_field()


def run_upload(config: StandaloneUpload) -> ReportRecord:
    """Upload a directory inside the current flow run, as one task run of `upload_checkpoint`.

    Raises:
        ConfigError: a value can never work.
        UploadFailedError: carries the FAILED record; nothing is at the destination then.
    """
    check_deployed_path(config.source, "source")
    check_deployed_path(config.destination, "destination")
    fn = config.checkpoint_upload_fn
    with run_logging():
        return upload_checkpoint(
            Checkpoint(config.source, config.source_credentials, storage_options=config.source_storage_options),
            config.destination,
            name=config.name,
            seq=config.seq,
            metrics=config.metrics,
            checkpoint_upload_fn=None if fn is None else resolve_function(fn),
            credentials=config.credentials,
            storage_options=config.storage_options,
        )


def run_evaluation(
    ref: str, config: EvaluateConfig, evaluate_fn: Callable[[Path], Mapping[str, Any]] | None = None
) -> Metrics:
    """Evaluate a committed checkpoint inside the current flow run, and write the scores back to it.

    The checkpoint is restored and verified into a temporary folder. What `@best` or `@latest` means is settled at the
    start.

    Args:
        ref: such as `s3://bucket/runs/digits@12`.
        config: how.
        evaluate_fn: takes the folder, returns metrics; default: the function that `config.evaluate_fn` names.

    Returns:
        The metrics as they were recorded.

    Raises:
        CheckpointPrunedError: retention deleted the checkpoint before its scores could be recorded.
        CheckpointNotFoundError: nothing committed ever answered to `ref`.
        ConfigError, MetricsError: the reference, the function, or what it returned cannot be used.
    """
    run, _ = split_reference(ref)
    check_deployed_path(run, "ref")
    fn = evaluate_fn or resolve_function(config.evaluate_fn)
    opened: dict[str, Any] = {"credentials": config.credentials, "storage_options": config.storage_options}
    with run_logging(), tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
        fixed = f"{run}@{resolve(ref, **opened).seq}"
        metrics = _scores(fn, restore_checkpoint(fixed, Path(folder) / "checkpoint", **opened), config.evaluate_fn)
        record_evaluation(fixed, metrics, source=config.source or config.evaluate_fn, **opened)
    return metrics


def run_prune(config: PruneConfig) -> list[Checkpoint]:
    """Prune a run inside the current flow run, as one task run of `prune_checkpoints`; what was deleted.

    Raises:
        ConfigError: no rule says what to keep, or a value can never work.
        RunBusyError: a driver owns the run and is alive.
    """
    check_deployed_path(config.run, "run")
    if not config.retention.rules():
        raise ConfigError("no rule says which checkpoints to keep: fill in one of the retention fields")
    with run_logging():
        return prune_checkpoints(
            config.run,
            config.retention.policy(),
            credentials=config.credentials,
            storage_options=config.storage_options,
        )


def _scores(fn: Callable[[Path], Any], folder: Path, name: str) -> Metrics:
    found = fn(folder)
    if not isinstance(found, Mapping):
        raise ConfigError(f"evaluation function {name!r} returned {type(found).__name__}; return a dict of metrics")
    return freeze_metrics(found)
