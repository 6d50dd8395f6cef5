"""`TrainConfig`: what a person fills in to start a training, as a pydantic model that Prefect turns into a form.

Every limit stands in the form's JSON schema, so that the run form and Prefect's API refuse what can never work before a
run exists. What a schema cannot say, `RunConfig` checks at the start of the run.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ckpt import (
    CheckpointConfig,
    FailurePolicy,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepYounger,
    RetentionPolicy,
    RunConfig,
    UploadConfig,
)
from ckpt_tasks.functions import resolve_function

_DAYS = 366.0 * 24 * 3600
"""The longest time that a field takes, in seconds."""
_NAME = r"^([^./@\x00-\x1f\x7f][^/@\x00-\x1f\x7f]*)?$"
_RESUME = r"^(latest|best|must|none|.*@.+)$"
_SIZE = r"^[0-9]+(\.[0-9]+)? ?(([kKmMgG][iI]?)?[bB])?$"
_CREDENTIALS = r"^(env|profile:[^\s:/][^:/]*|block:[^\s:/]+/[^\s:/][^:/]*)$"


class Form(BaseModel):
    """Base of the forms: what is unknown is refused, and nothing changes after it was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def credentials_field(title: str = "Credentials") -> Any:
    """A field for credentials by name; in the schema only, as pydantic would repeat in its error what was given."""
    schema: dict[str, Any] = {"anyOf": [{"type": "string", "pattern": _CREDENTIALS}, {"type": "null"}]}
    text = "env (default), profile:<name>, or block:<type>/<name>; never a secret."
    return Field(default=None, title=title, description=text, json_schema_extra=schema)


def storage_options_field(title: str = "Storage options") -> Any:
    """A field for the options of a store."""
    text = "Endpoint, region, encryption and the like, as fsspec options; never secrets."
    return Field(default_factory=dict, title=title, description=text)


def _seconds(default: float, title: str, description: str) -> Any:
    return Field(default=default, gt=0, le=_DAYS, title=f"{title} (s)", description=description)


class Scaling(Form):
    """How many processes train."""

    nproc_per_node: int = Field(
        default=1, ge=1, le=1, title="Processes per node", description="One, until ranks are supported."
    )
    nnodes: int = Field(default=1, ge=1, le=1, title="Nodes", description="One, until ranks are supported.")


class Uploads(Form):
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
    block_timeout: float = _seconds(
        300.0, "Block timeout", "How long a report may block; stay below the 600 s of NCCL's watchdog."
    )
    concurrency_limit: str | None = Field(
        default=None,
        min_length=1,
        title="Concurrency limit",
        description="Name of a Prefect global concurrency limit that caps uploads over all runs; empty: none.",
    )
    limit_timeout: float = _seconds(600.0, "Limit timeout", "How long an upload may wait for that limit.")
    memory_budget: str = Field(
        default="512MiB", pattern=_SIZE, title="Memory budget", description="Of all transfers together, like 512MiB."
    )
    stall_timeout: float = _seconds(
        60.0, "Stall timeout", "A transfer in which no byte moves for so long is tried again."
    )
    retry_budget: float = _seconds(300.0, "Retry budget", "How long one file is tried again after transient errors.")
    upload_fn_timeout: float = _seconds(
        1800.0, "Upload function timeout", "How long a custom upload function may take before it is abandoned."
    )
    slow_upload_warning: float = _seconds(60.0, "Slow upload warning", "An upload that takes longer is warned about.")


class Retention(Form):
    """Which checkpoints stay: what any of these keeps, and always the latest, the best and pinned ones."""

    num_to_keep: int | None = Field(
        default=None, ge=1, title="Keep", description="So many: the best by the score, or the newest without one."
    )
    score_attribute: str | None = Field(
        default=None,
        min_length=1,
        title="Score",
        description="The metric that ranks checkpoints; a/b looks inside nested metrics.",
    )
    score_order: Literal["max", "min"] = Field(
        default="max", title="Best is", description="Which end of the score is best."
    )
    keep_last: int | None = Field(default=None, ge=1, title="Keep newest", description="The newest so many.")
    keep_every: int | None = Field(
        default=None, ge=1, title="Keep every n-th", description="Those whose report number is a multiple of it."
    )
    keep_younger: float | None = Field(
        default=None, gt=0, le=10 * _DAYS, title="Keep younger than (s)", description="Those reported since then."
    )

    def rules(self) -> list[RetentionPolicy]:
        """One policy per filled-in rule; none keeps everything."""
        number, score = self.num_to_keep, self.score_attribute
        rules: list[RetentionPolicy] = []
        if number is not None:
            rules.append(KeepLast(number) if score is None else KeepBest(number, score, self.score_order))
        if self.keep_last is not None:
            rules.append(KeepLast(self.keep_last))
        if self.keep_every is not None:
            rules.append(KeepEvery(self.keep_every))
        if self.keep_younger is not None:
            rules.append(KeepYounger(self.keep_younger))
        return rules

    def policy(self) -> RetentionPolicy:
        """All rules together."""
        rules: list[Any] = self.rules()
        return reduce(or_, rules) if rules else KeepAll()


class Failures(Form):
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


class TrainConfig(Form):
    """One training."""

    name: str = Field(
        default="",
        max_length=200,
        pattern=_NAME,
        title="Name",
        description="Same name = continue that training. Empty: a new one, named after the flow run.",
    )
    storage_path: str = Field(
        default="./runs",
        min_length=1,
        title="Storage path",
        description="Where runs are kept: s3://bucket/prefix, any fsspec URI, or a folder (deployed: an absolute one).",
    )
    train_fn: str | None = Field(
        default=None,
        min_length=1,
        title="Training function",
        description="package.module:function, or a registered name; takes the settings below, or nothing.",
    )
    train_loop_config: dict[str, Any] = Field(
        default_factory=dict, title="Training settings", description="Given to the training function."
    )
    validation_fn: str | None = Field(
        default=None,
        min_length=1,
        title="Validation function",
        description="package.module:function; called with each checkpoint reported with validation=True, returns metrics.",
    )
    credentials: str | None = credentials_field()
    storage_options: dict[str, Any] = storage_options_field()
    resume: str = Field(
        default="latest",
        pattern=_RESUME,
        title="Resume from",
        description="latest, best, must, none, or a reference such as @12.",
    )
    scaling: Scaling = Field(default=Scaling(), title="Scaling", description="How many processes train.")
    upload: Uploads = Field(default=Uploads(), title="Uploads", description="How uploads are bounded.")
    retention: Retention = Field(default=Retention(), title="Retention", description="Which checkpoints stay.")
    failures: Failures = Field(default=Failures(), title="Failures", description="What failed uploads do to the run.")
    task_runs: Literal["all", "failures"] = Field(
        default="all", title="Task runs", description="One per uploaded report, or only for reports that failed."
    )
    stop_timeout: float = Field(
        default=25.0,
        gt=0,
        le=3600,
        title="Stop timeout (s)",
        description="From a termination signal to the end; a Prefect worker kills 30 s after it.",
    )
    staging_dir: str | None = Field(
        default=None,
        min_length=1,
        title="Staging folder",
        description="Where reported directories wait for their upload; empty: found by itself.",
    )
    lease_time: float = Field(
        default=60.0,
        ge=3,
        le=3600,
        title="Lease time (s)",
        description="After so long without a sign of life another run may take this name over.",
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
                checkpoint_score_attribute=self.retention.score_attribute,
                checkpoint_score_order=self.retention.score_order,
                retention=self.retention.policy(),
            ),
            upload_config=UploadConfig(**self.upload.model_dump()),
            failure_policy=FailurePolicy(**self.failures.model_dump()),
            resume=self.resume,
            stop_timeout=self.stop_timeout,
            staging_dir=self.staging_dir,
            lease_time=self.lease_time,
            validation_fn=None if self.validation_fn is None else resolve_function(self.validation_fn),
        )
