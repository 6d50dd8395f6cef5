"""The records that travel: what the trainer said (`Report`) and what became of it (`ReportRecord`)."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from ckpt.checkpoint import Checkpoint
from ckpt.metrics import Metrics
from ckpt.staging import Source

T_co = TypeVar("T_co", covariant=True)

UploadFn = Callable[[Checkpoint, str], Any]
"""`fn(checkpoint, checkpoint_dir_name)`; what it may return is in docs/custom_upload_functions.md."""


class CheckpointUploadMode(enum.Enum):
    """How a reported checkpoint gets to where it belongs. What differs per mode is on the member.

    ASYNC returns at once; SYNC after the commit; NO_UPLOAD: the checkpoint is already where it belongs.
    """

    ASYNC = ("async", False, True, True)
    SYNC = ("sync", True, True, False)
    NO_UPLOAD = ("no_upload", False, False, False)

    def __init__(self, label: str, waits: bool, moves_bytes: bool, deletes_local: bool) -> None:
        self.label = label
        self.waits = waits
        """`report()` returns after the commit, and raises if it failed."""
        self.moves_bytes = moves_bytes
        """False: the files stay where they are and are only listed."""
        self.deletes_local = deletes_local
        """The default of `delete_local_checkpoint_after_upload` when this mode is named."""

    @property
    def may_be_dropped(self) -> bool:
        """Whether `when_full="drop"` may skip such a report: never one whose caller waits for it."""
        return not self.waits

    def __repr__(self) -> str:
        return f"CheckpointUploadMode.{self.name}"


class ReportState(enum.StrEnum):
    """Where a report is. The last five are final, and every report reaches one of them."""

    SUBMITTED = "submitted"
    UPLOADING = "uploading"
    COMMITTED = "committed"
    """The manifest exists (or, for a report without a checkpoint, the row is published)."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """Dropped before its upload began, because newer ones waited (`when_full="drop"`)."""
    FENCED = "fenced"
    """Another driver took the run over."""
    LOST = "lost"
    """The process died before this report was final; written by the attempt that came after."""

    @property
    def final(self) -> bool:
        """Whether nothing will change it any more."""
        return self not in (ReportState.SUBMITTED, ReportState.UPLOADING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a report's time went, in seconds."""

    stall: float = 0.0
    """Inside `report()`: what the training loop paid."""
    queue_wait: float = 0.0
    """Until the upload task began to run."""
    slot_wait: float = 0.0
    """For one of the process's upload slots."""
    limit_wait: float = 0.0
    """For the cross-run concurrency limit."""
    upload: float = 0.0
    """Moving bytes, or waiting for the custom function."""
    verify: float = 0.0
    """Checking what arrived."""
    commit: float = 0.0
    """Creating the manifest and checking for a newer driver."""
    order_wait: float = 0.0
    """Between being final and being published, behind earlier reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the trainer said: everything an upload needs, frozen at the call."""

    seq: int
    """Place in the run's order, from 0, over all attempts."""
    name: str
    """`checkpoint_dir_name`, given or made."""
    named: bool = True
    """Whether it was given."""
    metrics: Metrics
    checkpoint: Checkpoint | None = None
    """As the trainer gave it."""
    mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC
    delete_local: bool = False
    """Delete the local files once the commit is made."""
    upload_fn: UploadFn | None = None
    """The custom function, its closure bound at the call."""
    source: Source | None = None
    """The local files as they were at the call; None for a checkpoint that is not local."""
    location: str | None = None
    """Where the default persist puts the files, relative to the destination's root."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own, into the manifest."""
    validation: Mapping[str, Any] | None = None
    """How it is to be validated once it is committed, as the manifest says it; None: not at all."""
    created: float = field(default_factory=time.time)
    """Unix seconds of the call."""
    submitted: float = field(default_factory=time.monotonic)
    """Monotonic seconds, to measure `queue_wait` in this process."""
    stall: float = 0.0
    """Seconds the call took up to its submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRecord:
    """What became of a report: the only thing that travels back, and one row of the history."""

    seq: int
    attempt: int
    name: str
    state: ReportState
    metrics: Metrics
    checkpoint: Checkpoint | None = None
    """The committed one; None unless COMMITTED."""
    reason: str | None = None
    """Why it is not COMMITTED."""
    handled: bool = False
    """Its failure was raised in the trainer's own (SYNC) call, which went on: history, and by itself no reason for red."""
    nbytes: int = 0
    nfiles: int = 0
    timings: Timings = field(default_factory=Timings)
    created: float = 0.0
    """Unix seconds of the report() call."""

    def to_json(self) -> dict[str, Any]:
        """One row of the history."""
        row = {key: getattr(self, key) for key in _PLAIN}
        row["state"] = self.state.value
        row["checkpoint"] = None if self.checkpoint is None else self.checkpoint.uri
        row["timings"] = {key: round(value, 6) for key, value in asdict(self.timings).items()}
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any], checkpoint: Callable[[str], Checkpoint]) -> ReportRecord:
        """Read a row; `checkpoint` makes a reference from its URI (it knows the run's credentials)."""
        known = {key: value for key, value in row.items() if key in _PLAIN}
        uri = row.get("checkpoint")
        timings = {key: value for key, value in row.get("timings", {}).items() if key in Timings.__dataclass_fields__}
        return cls(
            **known,
            state=ReportState(row["state"]),
            checkpoint=None if uri is None else checkpoint(uri),
            timings=Timings(**timings),
        )


_PLAIN = ("seq", "attempt", "name", "metrics", "reason", "handled", "nbytes", "nfiles", "created")


class Pending(Protocol[T_co]):
    """What an engine gives back for a submission: `concurrent.futures.Future` and Prefect's futures both fit."""

    def result(self, timeout: float | None = None) -> T_co:
        """The value, or what the work raised; `TimeoutError` after `timeout` seconds."""
        ...

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None:
        """Call `fn` once the work is over, from any thread."""


Submit = Callable[[Report], Pending[ReportRecord]]
"""The one seam between `ckpt` and an engine."""
