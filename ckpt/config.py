"""What a user configures, checked at construction: frozen records with the offending value in every message."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckpt.calling import name_of
from ckpt.credentials import Credentials, check_credentials, check_storage_options
from ckpt.errors import ConfigError, MetricsError
from ckpt.layout import check_run_name
from ckpt.metrics import freeze_metrics
from ckpt.retention import KeepAll, KeepBest, KeepLast, RetentionPolicy, ScoreOrder
from ckpt.storage import normalize_uri

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(value: int | str, what: str) -> int:
    """`512MiB`, `1GB` or a number of bytes, as bytes.

    Raises:
        ConfigError: it is neither, or not positive; `what` is named.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if not match or match[2].upper() not in _UNITS:
        raise ConfigError(f"{what}={value!r} is no size: write bytes as a number, or like '512MiB' or '2GB'")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"{what}={value!r} must be more than 0 bytes")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Which committed checkpoints stay. The latest, the best, pinned ones and those being validated always do."""

    num_to_keep: int | None = None
    """Keep so many: the best by the score attribute, or the newest without one. None keeps all."""
    checkpoint_score_attribute: str | None = None
    """The metric that ranks checkpoints; `a/b` looks inside nested metrics."""
    checkpoint_score_order: ScoreOrder = "max"
    """`max` or `min`: which end of the score is best."""
    retention: RetentionPolicy | None = None
    """A policy (`KeepLast`, `KeepBest`, `KeepEvery`, `KeepYounger`, any-of with `|`) instead of `num_to_keep`."""

    def __post_init__(self) -> None:
        if self.num_to_keep is not None:
            _check_int(self, "num_to_keep")
        if not isinstance(self.checkpoint_score_attribute, str | None):
            raise ConfigError(f"checkpoint_score_attribute={self.checkpoint_score_attribute!r} must be a metric's name")
        if self.checkpoint_score_order not in ("max", "min"):
            raise ConfigError(f"checkpoint_score_order={self.checkpoint_score_order!r} must be 'max' or 'min'")
        if self.num_to_keep is not None and self.retention is not None:
            raise ConfigError(f"give num_to_keep={self.num_to_keep} or retention={self.retention}, not both")
        if self.retention is not None and not callable(getattr(self.retention, "keep", None)):
            raise ConfigError(f"retention={self.retention!r} must be a policy, such as KeepLast(3)")

    @property
    def policy(self) -> RetentionPolicy:
        """The policy that these fields say."""
        if self.retention is not None:
            return self.retention
        if self.num_to_keep is None:
            return KeepAll()
        if self.checkpoint_score_attribute is None:
            return KeepLast(self.num_to_keep)
        return KeepBest(self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadConfig:
    """How uploads of one process are bounded. Times are seconds."""

    max_concurrent_uploads: int = 2
    """Checkpoints uploading at once; the others wait for a slot in the order of their reports."""
    max_pending: int = 4
    """Reports with a checkpoint that are not final yet, uploading ones included."""
    when_full: Literal["block", "drop"] = "block"
    """At `max_pending`: `block` the next report, or `drop` the oldest that still waits (never a SYNC one)."""
    block_timeout: float = 300.0
    """How long a report may block, below the 600 s after which NCCL's watchdog ends the process; then it is FAILED."""
    concurrency_limit: str | None = None
    """Name of a Prefect global concurrency limit that caps uploads over all runs and hosts."""
    limit_timeout: float = 600.0
    """How long an upload may wait for that limit."""
    memory_budget: int | str = "512MiB"
    """Memory of all transfers of the process together."""
    stall_timeout: float = 60.0
    """A transfer in which no byte moves for so long is cancelled and tried again."""
    retry_budget: float = 300.0
    """How long one file, or one request, is tried again after transient errors."""
    upload_fn_timeout: float = 1800.0
    """How long a custom function may take before it is abandoned."""
    slow_upload_warning: float = 60.0
    """An upload still running after so long is named in a warning, again each time as much has passed."""

    def __post_init__(self) -> None:
        _check_int(self, "max_concurrent_uploads", "max_pending")
        _check_seconds(
            self,
            "block_timeout", "limit_timeout", "stall_timeout", "retry_budget", "upload_fn_timeout", "slow_upload_warning",
        )  # fmt: skip
        if self.when_full not in ("block", "drop"):
            raise ConfigError(f"when_full={self.when_full!r} must be 'block' or 'drop'")
        limit = self.concurrency_limit
        if limit is not None and not (isinstance(limit, str) and limit.strip()):
            raise ConfigError(
                f"concurrency_limit={limit!r} must be the name of a Prefect global concurrency limit, or None"
            )
        parse_bytes(self.memory_budget, "memory_budget")

    @property
    def memory_bytes(self) -> int:
        """The budget in bytes."""
        return parse_bytes(self.memory_budget, "memory_budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """When failed uploads stop a run, and when they make it red."""

    stop_after: int | None = 3
    """So many failed reports in a row, and the next `report()` raises; None never stops."""
    red_on: Literal["lost", "any", "nothing"] = "lost"
    """The end is red: `lost`: the last or the best checkpoint was lost, or none was committed; `any`: any failure;
    `nothing`: only if checkpoints were reported and none was committed."""

    def __post_init__(self) -> None:
        if self.stop_after is not None:
            _check_int(self, "stop_after")
        if self.red_on not in ("lost", "any", "nothing"):
            raise ConfigError(f"red_on={self.red_on!r} must be 'lost', 'any' or 'nothing'")


VALIDATION_TIMEOUT = 3600.0
"""Seconds that a validation may take if nobody says another time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationTaskConfig:
    """How one checkpoint is validated: for all of a run in `RunConfig`, or in `report(validation=...)` for one of them."""

    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, plain JSON values: they are in the manifest, so that the next attempt knows."""
    timeout_s: float | None = None
    """Seconds that it may take; None: as the run says, and 3600 where that says nothing."""

    def __post_init__(self) -> None:
        _check_type(self, "fn_kwargs", Mapping)
        try:
            object.__setattr__(self, "fn_kwargs", freeze_metrics(self.fn_kwargs))
        except MetricsError as error:
            raise ConfigError(
                f"fn_kwargs={dict(self.fn_kwargs)!r:.200} cannot be written into a manifest: {error}"
            ) from error
        if self.timeout_s is not None:
            _check_seconds(self, "timeout_s")

    def over(self, default: ValidationTaskConfig) -> ValidationTaskConfig:
        """These settings, and the default's where they say nothing."""
        timeout = default.timeout_s if self.timeout_s is None else self.timeout_s
        return replace(self, fn_kwargs={**default.fn_kwargs, **self.fn_kwargs}, timeout_s=timeout)

    def to_json(self, fn: Callable[..., Any]) -> dict[str, Any]:
        """What a manifest says was asked; `fn` by name, for people."""
        timeout = VALIDATION_TIMEOUT if self.timeout_s is None else self.timeout_s
        return {"fn": name_of(fn), "fn_kwargs": dict(self.fn_kwargs), "timeout_s": timeout}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ValidationTaskConfig:
        """Read what `to_json` gave.

        Raises:
            ConfigError: it is something else.
        """
        return cls(fn_kwargs=body.get("fn_kwargs", {}), timeout_s=body.get("timeout_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run: a name under a storage path, and how it is carried out."""

    name: str
    """The run's name, one folder name; the same name under the same path continues that run."""
    storage_path: str | os.PathLike[str]
    """Where runs are kept: a local folder, `s3://bucket/prefix`, or any fsspec URI."""
    credentials: Credentials | None = None
    """`env` (the default), `profile:<name>`, `block:<type>/<name>`, or a callable."""
    storage_options: Mapping[str, Any] | None = None
    """fsspec options: endpoint, region, encryption and the like. Secrets are refused: they belong into credentials."""
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    upload_config: UploadConfig = field(default_factory=UploadConfig)
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    resume: str = "latest"
    """What a new run of the same name begins with: `latest`, `best`, `must` (latest, and an error if there is none),
    `none` (from scratch), or a reference such as `@12` or `s3://bucket/runs/other@best`."""
    stop_timeout: float = 25.0
    """Seconds from a termination signal to the end; Prefect kills after 30."""
    staging_dir: str | os.PathLike[str] | None = None
    """Where reported directories wait for their upload, best on the file system that checkpoints are saved to."""
    validation_fn: Callable[..., Any] | None = None
    """`fn(checkpoint, **fn_kwargs) -> metrics`, called for each committed checkpoint that was reported with `validation`."""
    validation_task_config: ValidationTaskConfig = field(default_factory=ValidationTaskConfig)
    """Its arguments and deadline, unless a report says others."""
    max_concurrent_validations: int = 1
    """Checkpoints validated at once; the others wait, in the order of their reports."""
    lease_time: float = 60.0
    """Seconds of silence after which another driver may take the run over."""

    def __post_init__(self) -> None:
        check_run_name(self.name)
        _check_type(self, "storage_path", str, os.PathLike)
        _check_type(self, "staging_dir", str, os.PathLike, type(None))
        _check_type(self, "checkpoint_config", CheckpointConfig)
        _check_type(self, "upload_config", UploadConfig)
        _check_type(self, "failure_policy", FailurePolicy)
        normalize_uri(self.storage_path)
        check_credentials(self.credentials or "env")
        check_storage_options(self.storage_options or {})
        _check_seconds(self, "stop_timeout", "lease_time")
        if not isinstance(self.resume, str) or not (
            self.resume in ("latest", "best", "must", "none") or "@" in self.resume
        ):
            raise ConfigError(
                f"resume={self.resume!r} must be 'latest', 'best', 'must', 'none', or a reference such as '@12' or "
                "'<storage>/<run>@best'"
            )
        _check_type(self, "validation_task_config", ValidationTaskConfig)
        _check_int(self, "max_concurrent_validations")
        if self.validation_fn is not None:
            _check_validation_fn(self.validation_fn)

    def asked(self, validation: bool | ValidationTaskConfig) -> dict[str, Any] | None:  # noqa: FBT001 - as report() takes it
        """What `report(validation=...)` asks for, for the manifest; None: nothing.

        Raises:
            ConfigError: the run has no function for it, or the function does not take the arguments.
        """
        if not isinstance(validation, bool | ValidationTaskConfig):
            raise ConfigError(f"validation={validation!r} must be True, False or a ValidationTaskConfig")
        if validation is False:
            return None
        if self.validation_fn is None:
            raise ConfigError(
                "validation was asked for, and the run has no function for it: set RunConfig(validation_fn=...)"
            )
        default = self.validation_task_config
        task = default if validation is True else validation.over(default)
        _check_takes(self.validation_fn, task.fn_kwargs)
        return task.to_json(self.validation_fn)


def _check_validation_fn(fn: object) -> None:
    if not callable(fn):
        raise ConfigError(f"validation_fn={fn!r} must be callable: fn(checkpoint, **fn_kwargs) -> metrics")


def _check_takes(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(fn).bind(None, **kwargs)
    except TypeError as error:
        given = "".join(f", {name}=..." for name in kwargs)
        raise ConfigError(f"validation_fn {name_of(fn)} must take (checkpoint{given}): {error}") from error
    except ValueError:
        pass  # a builtin without a signature


def _check_type(config: Any, name: str, *kinds: type) -> None:
    value = getattr(config, name)
    if not isinstance(value, kinds):
        raise ConfigError(f"{name}={value!r} must be {' or '.join(kind.__name__ for kind in kinds)}")


def _check_int(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} must be an int of at least 1")


def _check_seconds(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value!r} must be a finite number of seconds above 0")
