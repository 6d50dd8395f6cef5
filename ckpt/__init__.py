"""Checkpoints for people who train models: report, upload in the background, commit, order, resume.

The only public path of the library; the modules behind it may move. Works without a Prefect server and without Prefect;
`ckpt_tasks` adds the Prefect tasks.
"""

from ckpt import errors
from ckpt.checkpoint import Checkpoint
from ckpt.config import CheckpointConfig, FailurePolicy, RunConfig, UploadConfig, ValidationTaskConfig
from ckpt.context import (
    CheckpointConsistencyMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    StorageContext,
    TrainContext,
    checkpoint_dir,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    report,
    stop_requested,
)
from ckpt.errors import CkptError
from ckpt.manifest import FileEntry
from ckpt.opening import open_run
from ckpt.reading import RunSummary, committed, list_runs, pin, record_evaluation, resolve
from ckpt.records import CheckpointUploadMode, Pending, Report, ReportRecord, ReportState, Submit, Timings
from ckpt.result import Result, Totals
from ckpt.retention import KeepAll, KeepAny, KeepBest, KeepEvery, KeepLast, KeepYounger, RetentionPolicy
from ckpt.run import ReportHandle, Run
from ckpt.storage import Storage, open_storage

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "CkptError",
    "FailurePolicy",
    "FileEntry",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepYounger",
    "Pending",
    "Report",
    "ReportHandle",
    "ReportRecord",
    "ReportState",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RetentionPolicy",
    "Run",
    "RunConfig",
    "RunSummary",
    "Storage",
    "StorageContext",
    "Submit",
    "Timings",
    "Totals",
    "TrainContext",
    "UploadConfig",
    "ValidationTaskConfig",
    "checkpoint_dir",
    "committed",
    "errors",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "list_runs",
    "open_run",
    "open_storage",
    "pin",
    "record_evaluation",
    "report",
    "resolve",
    "stop_requested",
]


def _publish_classes() -> None:
    """Prefect stores class paths in results, and pickles hold them: the public path keeps old ones readable."""
    for name in __all__:
        public = globals()[name]
        if isinstance(public, type) and public.__module__.startswith("ckpt."):
            public.__module__ = __name__


_publish_classes()
del _publish_classes
