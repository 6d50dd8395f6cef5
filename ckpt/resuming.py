"""What a run begins with: which commit to restore and why, and whether the configuration is still the same."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from ckpt._json import encode
from ckpt.attempts import Choose, Chosen, Found, Owner, owner_details
from ckpt.checkpoint import Checkpoint
from ckpt.commits import Start, read_commit
from ckpt.config import RunConfig
from ckpt.errors import CheckpointNotFoundError, ObjectExistsError
from ckpt.layout import FORMAT, RUN
from ckpt.manifest import Manifest, decode_object
from ckpt.reading import RunFiles, open_run_files, pick, split_reference
from ckpt.storage import Objects, Storage, join_uri, normalize_uri

logger = logging.getLogger("ckpt")


def run_info(config: RunConfig, storage: Objects) -> dict[str, Any]:
    """The body of run.json: created by whoever comes first, never changed; a differing configuration is told.

    Raises:
        FormatError: the run was written in a format this version does not read.
    """
    settings = _settings(config)
    body = {"format": FORMAT, "run_id": uuid.uuid4().hex, "name": config.name, "created": time.time(), **settings}
    try:
        storage.create(RUN, encode(body))
    except ObjectExistsError:
        body = decode_object(storage.read(RUN), join_uri(storage.uri, RUN))
    changed = {key: (body.get(key), value) for key, value in settings.items() if body.get(key) != value}
    if changed:
        told = ", ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in changed.items())
        logger.warning("run %s continues with a different configuration: %s", config.name, told)
    return body


def chooser(config: RunConfig, storage: Storage, info: dict[str, Any], owner: Owner) -> Choose:
    """How this run picks the commit to resume from. A retry of the same flow run always takes the latest."""

    def choose(found: Found) -> Chosen | None:
        resume = "latest" if _is_retry(storage, found, owner) else config.resume
        if resume == "none":
            return None
        if resume in ("latest", "must"):
            latest = latest_of(found)
            if latest is None and resume == "must":
                raise CheckpointNotFoundError(f"resume='must', and nothing is committed in {storage.uri}")
            return latest
        return _referred(config, storage, info, found)

    return choose


def describe_start(config: RunConfig, start: Start, found: Found) -> str:
    """One line that says from what the run goes on, and why."""
    begun = f"run {config.name}: attempt {start.attempt}"
    if start.resumed_from is None:
        why = "nothing is committed yet" if found.newest is None else f"resume={config.resume!r}"
        return f"{begun} starts from scratch ({why})"
    seq, of = start.resumed_from
    where = f" of run {start.origin}" if start.origin else ""
    later = start.first_seq - 1
    passed = f"; reports {seq + 1}..{later} came after it" if not start.origin and later > seq else ""
    return f"{begun} resumes from checkpoint {seq} of attempt {of}{where} (resume={config.resume!r}{passed})"


def restored(config: RunConfig, storage: Storage, start: Start) -> Checkpoint | None:
    """The reference of what the attempt resumed from.

    Raises:
        CheckpointNotFoundError: it was deleted meanwhile; starting from scratch instead would lose the training so far.
    """
    if start.resumed_from is None:
        return None
    files = open_run_files(start.origin or storage.uri, config.credentials, storage_options=config.storage_options)
    manifest = read_commit(files.storage, start.resumed_from)
    if not isinstance(manifest, Manifest):
        raise CheckpointNotFoundError(
            f"{join_uri(files.uri, start.resumed_from.key)}, which {config.name} was to resume from, is gone: say with "
            "resume='@<seq>' or a reference which other checkpoint to take, or resume='none' to start from scratch"
        )
    return files.checkpoint(manifest)


def _settings(config: RunConfig) -> dict[str, Any]:
    """What readers need to know, and what should not change between attempts unnoticed."""
    checkpoint_config = config.checkpoint_config
    return {
        "score_attribute": checkpoint_config.checkpoint_score_attribute,
        "score_order": checkpoint_config.checkpoint_score_order,
        "retention": str(checkpoint_config.policy),
    }


def _is_retry(storage: Storage, found: Found, owner: Owner) -> bool:
    if owner.flow_run_id is None:
        return False
    trained = found.lineage.trained
    last = owner_details(storage, max(trained)) if trained else {}
    return last.get("flow_run_id") == owner.flow_run_id and int(last.get("run_count", 0)) < owner.run_count


def latest_of(found: Found) -> Chosen | None:
    """The newest commit; before the first, what the last attempt itself had taken from another run."""
    if found.newest is not None:
        return Chosen(commit=found.newest.id)
    trained = found.lineage.trained
    last = trained[max(trained)] if trained else None
    if last is None or not last.origin or last.resumed_from is None:
        return None
    return Chosen(commit=last.resumed_from, origin=last.origin)


def _referred(config: RunConfig, storage: Storage, info: dict[str, Any], found: Found) -> Chosen:
    """`best` or `@12` in this run, or a reference into another run."""
    run, which = ("", "best") if config.resume == "best" else split_reference(config.resume)
    if run and normalize_uri(run) != storage.uri:
        return _from_run(config, normalize_uri(run), which)
    files = RunFiles(
        uri=storage.uri, storage=storage, credentials=config.credentials or "env",
        storage_options=dict(config.storage_options or {}), info=info, lineage=found.lineage, commits=found.commits,
    )  # fmt: skip
    return Chosen(commit=pick(files, which, config.resume).id)


def _from_run(config: RunConfig, run: str, which: str) -> Chosen:
    files = open_run_files(run, config.credentials, storage_options=config.storage_options)
    return Chosen(commit=pick(files, which, f"{run}@{which}").id, origin=run)
