"""The active run, and the functions that training code calls on it: the same names as in Ray Train."""

from __future__ import annotations

import contextvars
import enum
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.checkpoint import Checkpoint
from ckpt.config import ValidationTaskConfig
from ckpt.errors import NoActiveRunError
from ckpt.layout import check_relative, location_of
from ckpt.metrics import Metrics
from ckpt.records import CheckpointUploadMode, UploadFn
from ckpt.storage import join_uri

if TYPE_CHECKING:
    from ckpt.run import ReportHandle, Run

_active: contextvars.ContextVar[Run | None] = contextvars.ContextVar("ckpt_run", default=None)
_here: list[Run] = []
_lock = threading.Lock()


class CheckpointConsistencyMode(enum.Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "committed"
    """Every report made so far is published."""
    VALIDATED = "validated"
    """The same, and every validation asked for is over."""

    @property
    def waits_for_validation(self) -> bool:
        """Whether it waits for verdicts as well."""
        return self is CheckpointConsistencyMode.VALIDATED


class ReportedCheckpointStatus(enum.Enum):
    """How far a reported checkpoint is."""

    COMMITTED = "committed"
    """No validation was asked for."""
    PENDING_VALIDATION = "pending_validation"
    """Asked for, and not over."""
    VALIDATED = "validated"
    """Its metrics are among the checkpoint's."""
    VALIDATION_TIMEOUT = "validation_timeout"
    VALIDATION_FAILED = "validation_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCheckpoint:
    """A committed checkpoint that is retained."""

    checkpoint: Checkpoint
    metrics: Metrics
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """Where the active run keeps its checkpoints."""

    uri: str
    """Of the run."""
    attempt: int

    def build_checkpoint_path_from_name(self, name: str) -> str:
        """Where the checkpoint `name` of this attempt belongs, without a scheme: `bucket/key`, or a local path.

        A pure function of (attempt, name), equal on all ranks; write `f"s3://{...}"` where a URI is needed.
        """
        return self.build_checkpoint_uri_from_name(name).split("://", 1)[-1]

    def build_checkpoint_uri_from_name(self, name: str) -> str:
        """The same as a URI."""
        return join_uri(self.uri, location_of(check_relative(name, "checkpoint name"), self.attempt))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    """Who and where this process is in the training."""

    experiment_name: str
    storage: StorageContext
    world_size: int = 1
    world_rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    def get_experiment_name(self) -> str:
        """The run's name."""
        return self.experiment_name

    def get_storage(self) -> StorageContext:
        """Where checkpoints go."""
        return self.storage

    def get_world_size(self) -> int:
        """Ranks in all."""
        return self.world_size

    def get_world_rank(self) -> int:
        """This rank, from 0."""
        return self.world_rank

    def get_local_rank(self) -> int:
        """This rank on its node, from 0."""
        return self.local_rank

    def get_local_world_size(self) -> int:
        """Ranks on this node."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """This node, from 0."""
        return self.node_rank


@contextmanager
def activate(run: Run) -> Iterator[None]:
    """Make `run` the active one of this context, and of threads that were started without a context."""
    token = _active.set(run)
    with _lock:
        _here.append(run)
    try:
        yield
    finally:
        with _lock:
            _here.remove(run)
        _active.reset(token)


@contextmanager
def acting_for(run: Run) -> Iterator[None]:
    """Make `run` the active one of this context only: what is started inside belongs to it, whatever run is open here."""
    token = _active.set(run)
    try:
        yield
    finally:
        _active.reset(token)


def active_run() -> Run:
    """The active run: this context's, or the only one open in the process.

    Raises:
        NoActiveRunError: there is none, or several and this thread has no context that says which.
    """
    run = _active.get()
    if run is not None:
        return run
    with _lock:
        if len(_here) == 1:
            return _here[0]
        several = len(_here)
    if several:
        raise NoActiveRunError(
            f"{several} runs are open in this process and this thread belongs to none: call run.report(), or start the "
            "thread with contextvars.copy_context().run"
        )
    raise NoActiveRunError(
        "there is no active run: call this inside `with training_run(...)` (ckpt_tasks) or `with open_run(...)` (ckpt)"
    )


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | None = None,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: UploadFn | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> ReportHandle:
    """Report metrics, and a checkpoint if there is one, to the active run; the upload happens in the background.

    No network and no hashing in the caller's thread. What the caller does to the directory, the metrics or a loop
    variable afterwards does not reach the report; a kept directory must not be rewritten in place before its commit
    (that report then fails, with the file's name).

    Args:
        metrics: names to numbers, strings, None, or lists and mappings of these; numpy and torch scalars are converted.
        checkpoint: a directory, usually `Checkpoint.from_directory(path)`.
        checkpoint_dir_name: its name under the run; default `checkpoint_<seq>`.
        checkpoint_upload_mode: ASYNC, SYNC or NO_UPLOAD. Left out: as ASYNC, and nothing local is deleted.
        delete_local_checkpoint_after_upload: default: True for a named ASYNC, else False.
        checkpoint_upload_fn: `fn(checkpoint, checkpoint_dir_name) -> Checkpoint` instead of the default upload.
        validation: True: once it is committed, `RunConfig.validation_fn` is called on it in the background, and the metrics it
            returns are added to the checkpoint's; a `ValidationTaskConfig` gives arguments and a deadline of its own.

    Returns:
        A handle with `.seq`, `.state` and `.wait(timeout)`.

    Raises:
        NoActiveRunError: outside a run.
        ConfigError: an argument can never work; nothing was recorded.
        UploadFailedError: SYNC only: the upload failed; the run goes on and may be used further.
        TooManyFailuresError: `FailurePolicy.stop_after` reports in a row failed.
        FencedError: another driver took the run over.
        OrderingError: the ordering task died.
    """
    return active_run().report(
        metrics,
        checkpoint,
        checkpoint_dir_name,
        checkpoint_upload_mode,
        delete_local_checkpoint_after_upload,
        checkpoint_upload_fn,
        validation,
    )


def get_checkpoint() -> Checkpoint | None:
    """The newest published checkpoint of the active run, the restored one at first; None if there is none. Never waits."""
    return active_run().get_checkpoint()


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED, timeout_s: float | None = None
) -> list[ReportedCheckpoint]:
    """The retained checkpoints, in report order, once every report made so far is published.

    Args:
        consistency_mode: what to wait for.
        timeout_s: after so many seconds a warning is logged and what is there is returned, as in Ray; None: 1 hour.
    """
    return active_run().get_all_reported_checkpoints(consistency_mode, timeout_s)


def get_context() -> TrainContext:
    """Ranks, name and storage of the active run; works in the trainer's and in the uploads' threads."""
    return active_run().context


@contextmanager
def checkpoint_dir() -> Iterator[Path]:
    """A fresh local directory on the staging disk, removed at the end of the block: the best place to save into."""
    with active_run().checkpoint_dir() as path:
        yield path


def stop_requested() -> bool:
    """True once the active run was asked to stop (SIGTERM, Ctrl-C, cancel): save, report and leave the loop.

    The answer changes at a `report()` only, so that all ranks see it at the same one.
    """
    return active_run().stop_requested()
