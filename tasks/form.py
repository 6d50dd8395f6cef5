"""`TrainConfig`: what a person fills in to start a training, as a pydantic model that Prefect turns into a form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ckpt import CheckpointConfig, FailurePolicy, RunConfig, UploadConfig


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scaling(_Part):
    """How many processes train."""

    nproc_per_node: int = Field(
        default=1, ge=1, le=1, title="Processes per node", description="One, until ranks are supported."
    )
    nnodes: int = Field(default=1, ge=1, le=1, title="Nodes", description="One, until ranks are supported.")


class Uploads(_Part):
    """How uploads are bounded."""

    max_concurrent_uploads: int = Field(default=2, ge=1, le=64, title="Uploads at once", description="Per process.")
    max_pending: int = Field(
        default=4,
        ge=1,
        le=1000,
        title="Pending reports",
        description="Reports that are not final yet, uploading ones included.",
    )
    when_full: Literal["block", "drop"] = Field(
        default="block", title="When full", description="Block the next report, or drop the oldest that still waits."
    )
    concurrency_limit: str | None = Field(
        default=None,
        title="Concurrency limit",
        description="A Prefect global concurrency limit that caps uploads over all runs.",
    )
    memory_budget: str = Field(
        default="512MiB", title="Memory budget", description="Of all transfers together, like 512MiB."
    )
    stall_timeout: float = Field(
        default=60.0,
        gt=0,
        title="Stall timeout (s)",
        description="A transfer in which no byte moves for so long is tried again.",
    )


class Retention(_Part):
    """Which checkpoints stay; the latest and the best always do."""

    num_to_keep: int | None = Field(
        default=None, ge=1, title="Keep", description="So many checkpoints; empty keeps all."
    )
    score_attribute: str | None = Field(
        default=None, title="Score", description="The metric that ranks checkpoints; a/b looks inside nested metrics."
    )
    score_order: Literal["max", "min"] = Field(
        default="max", title="Best is", description="Which end of the score is best."
    )


class Failures(_Part):
    """When failed uploads stop the run, and when they make it red."""

    stop_after: int | None = Field(
        default=3,
        ge=1,
        title="Stop after",
        description="So many failed reports in a row stop the run; empty never does.",
    )
    red_on: Literal["lost", "any", "nothing"] = Field(
        default="lost",
        title="Red on",
        description="lost: the last or best checkpoint; any: any failure; nothing: only if nothing was committed.",
    )


class TrainConfig(_Part):
    """One training."""

    name: str = Field(
        default="",
        title="Name",
        description="Same name = continue that training. Empty: a new one, named after the flow run.",
    )
    storage_path: str = Field(
        default="./runs",
        title="Storage path",
        description="Where runs are kept: a folder, s3://bucket/prefix, or any fsspec URI.",
    )
    train_fn: str | None = Field(
        default=None,
        title="Training function",
        description="package.module:function; takes the settings below, or nothing.",
    )
    train_loop_config: dict[str, Any] = Field(
        default_factory=dict, title="Training settings", description="Given to the training function."
    )
    credentials: str | None = Field(
        default=None, title="Credentials", description="env (default), profile:<name>, or block:<type>/<name>."
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict, title="Storage options", description="Endpoint, region and the like; never secrets."
    )
    resume: str = Field(
        default="latest", title="Resume from", description="latest, best, must, none, or a reference such as @12."
    )
    scaling: Scaling = Field(default=Scaling(), title="Scaling")
    upload: Uploads = Field(default=Uploads(), title="Uploads")
    retention: Retention = Field(default=Retention(), title="Retention")
    failures: Failures = Field(default=Failures(), title="Failures")
    stop_timeout: float = Field(
        default=25.0, gt=0, le=3600, title="Stop timeout (s)", description="From a termination signal to the end."
    )
    staging_dir: str | None = Field(
        default=None, title="Staging folder", description="Where reported directories wait for their upload."
    )

    def run_config(self, default_name: str) -> RunConfig:
        """The run that this form says.

        Args:
            default_name: for an empty `name`.

        Raises:
            ConfigError: a value can never work.
        """
        return RunConfig(
            name=self.name or default_name,
            storage_path=self.storage_path,
            credentials=self.credentials,
            storage_options=self.storage_options,
            checkpoint_config=CheckpointConfig(
                num_to_keep=self.retention.num_to_keep,
                checkpoint_score_attribute=self.retention.score_attribute,
                checkpoint_score_order=self.retention.score_order,
            ),
            upload_config=UploadConfig(**self.upload.model_dump()),
            failure_policy=FailurePolicy(**self.failures.model_dump()),
            resume=self.resume,
            stop_timeout=self.stop_timeout,
            staging_dir=self.staging_dir,
        )
