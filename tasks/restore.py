"""Tasks on committed checkpoints: restore, verify, prune. Each takes a reference, a URI or a `Checkpoint`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ckpt import Checkpoint, RetentionPolicy, resolve
from ckpt.credentials import Credentials
from ckpt.gathering import prune
from ckpt.verifying import Verification, verify


@task(
    name="restore-checkpoint",
    description="Download a committed checkpoint, checking every byte.",
    task_run_name="restore {checkpoint}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def restore_checkpoint(
    checkpoint: Checkpoint | str,
    target: str | os.PathLike[str],
    *,
    credentials: Credentials | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Path:
    """Restore a checkpoint into a local directory, which appears whole and verified, or not at all.

    Args:
        checkpoint: a `Checkpoint`, or a reference such as `s3://bucket/runs/digits@best`.
        target: the directory to make; it may exist if it is empty.
        credentials: for a reference.
        storage_options: for a reference, without secrets.

    Returns:
        The directory.

    Raises:
        CheckpointNotFoundError: nothing committed answers to the reference.
        CorruptCheckpointError: a file is not what its manifest says.
    """
    return _found(checkpoint, credentials, storage_options).to_directory(target)


@task(
    name="verify-checkpoint",
    description="Compare a committed checkpoint with its manifest.",
    task_run_name="verify {checkpoint}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def verify_checkpoint(
    checkpoint: Checkpoint | str,
    *,
    content: bool = True,
    credentials: Credentials | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Verification:
    """Check that every file is there and the same.

    Args:
        checkpoint: as for `restore_checkpoint`.
        content: read every byte; False compares presence, sizes and etags.
        credentials: for a reference.
        storage_options: for a reference, without secrets.

    Raises:
        CorruptCheckpointError: it is not; the files are named.
    """
    verification = verify(_found(checkpoint, credentials, storage_options), content=content)
    verification.raise_if_corrupt()
    return verification


@task(
    name="prune-checkpoints",
    description="Delete the checkpoints of a run that a policy does not keep.",
    task_run_name="prune {run}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def prune_checkpoints(
    run: str,
    retention: RetentionPolicy,
    *,
    credentials: Credentials | None = None,
    storage_options: dict[str, Any] | None = None,
) -> list[Checkpoint]:
    """Delete what a policy does not keep; latest, best and pinned checkpoints stay, and living runs are left alone.

    Args:
        run: `<storage_path>/<name>`.
        retention: what to keep.
        credentials: for the storage.
        storage_options: for the storage, without secrets.

    Returns:
        What was deleted.

    Raises:
        RunBusyError: a driver owns the run and is alive.
    """
    return prune(run, retention, credentials=credentials, storage_options=storage_options)


def _found(
    checkpoint: Checkpoint | str, credentials: Credentials | None, storage_options: dict[str, Any] | None
) -> Checkpoint:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    return resolve(checkpoint, credentials, storage_options=storage_options)
