"""Every error this package raises on purpose.

    CkptError
    ├── ConfigError (ValueError)                 a configuration or argument that can never work
    │   └── MetricsError (TypeError)             a metric that cannot be recorded
    ├── NoActiveRunError (RuntimeError)          `report()` and friends outside a run
    ├── RunBusyError (RuntimeError)              another driver owns the run name
    ├── FencedError (RuntimeError)               another driver took the run over
    ├── FormatError (ValueError)                 an object of ours that does not parse
    │   └── NewerFormatError                     an object of a newer format
    ├── CheckpointNotFoundError (FileNotFoundError)
    │   └── CheckpointPrunedError                it was committed, and retention has deleted it
    ├── CorruptCheckpointError (OSError)         a checkpoint that is not what its manifest says
    ├── CommittedError (FileExistsError)         an attempt to change what is committed
    ├── UploadFailedError (RuntimeError)         one report's upload did not end in a commit
    ├── ValidationFailedError (RuntimeError)     one checkpoint's validation did not give metrics
    ├── UploadFunctionError (TypeError)          a `checkpoint_upload_fn` broke its contract
    ├── CheckpointsLostError (RuntimeError)      the run ended, and the failure policy calls it red
    ├── TooManyFailuresError (RuntimeError)      `stop_after` failures in a row
    ├── OrderingError (RuntimeError)             the ordering task died
    ├── DeadlineError (TimeoutError)             a wait reached its deadline
    ├── SourceChangedError (OSError)             a file changed while it was being uploaded
    └── StorageError (OSError)
        ├── ObjectNotFoundError (FileNotFoundError)
        ├── ObjectExistsError (FileExistsError)
        ├── BucketNotFoundError (FileNotFoundError)
        ├── AccessDeniedError (PermissionError)
        ├── StorageFullError
        └── TransientStorageError                worth trying again
            ├── StalledError (TimeoutError)      no byte moved for too long
            └── CredentialsExpiredError (PermissionError)

Each class is also the builtin that a caller would catch. Each keeps its constructor's parameters in `args`, so that it
survives the pickling that task runners do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.records import ReportRecord
    from ckpt.result import Result
    from ckpt.validating import Verdict


class CkptError(Exception):
    """Base of all errors of this package."""


class ConfigError(CkptError, ValueError):
    """A configuration or an argument that can never work. The text names the value and what to write instead."""


class MetricsError(ConfigError, TypeError):
    """A metric that cannot be recorded. The text names its key."""


class NoActiveRunError(CkptError, RuntimeError):
    """A function that acts on the active run was called where there is none."""


class RunBusyError(CkptError, RuntimeError):
    """Another driver owns this run name and is alive. The text names the owner."""


class FencedError(CkptError, RuntimeError):
    """Another driver took this run over; nothing of this one is published any more."""


class FormatError(CkptError, ValueError):
    """An object under a run that does not parse."""


class NewerFormatError(FormatError):
    """An object written by a newer version of the format; guessing at it could lose data, so it is refused."""


class CheckpointNotFoundError(CkptError, FileNotFoundError):
    """No committed checkpoint answers to a reference."""


class CheckpointPrunedError(CheckpointNotFoundError):
    """The checkpoint that a reference names was committed, and retention, or somebody, has deleted it since."""


class CorruptCheckpointError(CkptError, OSError):
    """A checkpoint whose files are not those of its manifest. The text names the files."""


class CommittedError(CkptError, FileExistsError):
    """An attempt to write to, or to change, what is committed already."""


class UploadFailedError(CkptError, RuntimeError):
    """A report whose upload did not end in a commit.

    Args:
        record: the report's final record; `record.reason` tells why.
    """

    def __init__(self, record: ReportRecord) -> None:
        super().__init__(record)
        self.record = record

    def __str__(self) -> str:
        return f"report {self.record.seq} ({self.record.name}) is {self.record.state.value}: {self.record.reason}"


class ValidationFailedError(CkptError, RuntimeError):
    """A checkpoint whose validation did not give metrics; it ends nothing, and the checkpoint stays.

    Args:
        verdict: as it is noted; `verdict.reason` tells why.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict

    def __str__(self) -> str:
        verdict = self.verdict
        return f"checkpoint {verdict.commit.seq}: {verdict.status.value}: {verdict.reason}"


class UploadFunctionError(CkptError, TypeError):
    """A `checkpoint_upload_fn` returned, or closed over, something that its contract does not allow."""


class CheckpointsLostError(CkptError, RuntimeError):
    """The run ended and its failure policy calls it red.

    Args:
        reason: what was lost.
        result: the complete result, as if the run had been green.
    """

    def __init__(self, reason: str, result: Result) -> None:
        super().__init__(reason, result)
        self.result = result

    def __str__(self) -> str:
        return str(self.args[0])


class TooManyFailuresError(CkptError, RuntimeError):
    """`FailurePolicy.stop_after` reports in a row failed; training on would burn hardware for nothing."""


class OrderingError(CkptError, RuntimeError):
    """The ordering task died; nothing reported from here on would be published."""


class DeadlineError(CkptError, TimeoutError):
    """A wait reached its deadline. The text names what was waited for and for how long."""


class SourceChangedError(CkptError, OSError):
    """A file changed between `report()` and the end of its upload. The text names the file."""


class StorageError(CkptError, OSError):
    """A storage operation failed. The text names the operation, the URI and the store's own words."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """The object is not there."""


class ObjectExistsError(StorageError, FileExistsError):
    """`create` found an object at its key."""


class BucketNotFoundError(StorageError, FileNotFoundError):
    """The bucket, container or mount itself is not there. Not retried."""


class AccessDeniedError(StorageError, PermissionError):
    """The store refused these credentials. Not retried."""


class StorageFullError(StorageError):
    """No space or quota left. Not retried."""


class TransientStorageError(StorageError):
    """Throttling, a server error, a broken connection, clock skew: worth trying again."""


class StalledError(TransientStorageError, TimeoutError):
    """No byte moved for the stall timeout; the transfer was cancelled."""


class CredentialsExpiredError(TransientStorageError, PermissionError):
    """The store says the token has expired: tried again with freshly resolved credentials."""
