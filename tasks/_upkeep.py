"""Commands of `ckpt` that look after a place: `setup`, `doctor`, `rm`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.table import Table

from ckpt.errors import CheckpointNotFoundError, ConfigError
from ckpt.examining import Finding, Level, examine_staging, examine_storage
from ckpt.removing import is_there, remove
from ckpt.storage import normalize_uri, open_storage
from ckpt_tasks import _tables
from ckpt_tasks._options import COMMON, OUTPUT, Common, Flag, Output

upkeep = App()
"""Part of the `ckpt` command."""


@upkeep.command
def setup(
    *,
    limit: str | None = None,
    slots: int | None = None,
    pool: str = "ckpt",
    block: str | None = None,
    profile: str | None = None,
    key_env: str = "AWS_ACCESS_KEY_ID",
    secret_env: str = "AWS_SECRET_ACCESS_KEY",  # noqa: S107 - the name of a variable
    token_env: str | None = None,
    region: str | None = None,
    endpoint_url: str | None = None,
    automations: Flag = False,
    evaluate: Literal["every", "best", "none"] = "every",
    notify: str | None = None,
    silence: Annotated[float, Parameter("--no-commit-hours")] = 6.0,
    reruns: int = 3,
    flow: str = "train",
    output: Output = OUTPUT,
) -> None:
    """Make what runs need on the Prefect server: limit, work pool, credentials block, automations. Twice changes nothing.

    Args:
        limit: name of the global concurrency limit for uploads; default: the setting, else `ckpt-uploads`.
        slots: uploads at once over all runs; default 4, and an existing limit stays as it is.
        pool: name of the work pool, of type process.
        block: also make this credentials block, `aws-credentials/NAME` or `minio-credentials/NAME`.
        profile: of the AWS config files, for the block.
        key_env: environment variable that holds the block's access key.
        secret_env: environment variable that holds the block's secret key.
        token_env: environment variable that holds the block's session token.
        region: of the block.
        endpoint_url: of the block, for stores that are not AWS.
        automations: also make the automations; the deployments must exist.
        evaluate: start an evaluation for every committed checkpoint, or every new best.
        notify: notification block, `<type>/<name>`; default: failures are noted in the event feed.
        silence: hours without a commit after which a run is reported.
        reruns: how often a crashed training is run again; 0 never.
        flow: name of the training flow.
        output: what every command takes.
    """
    from ckpt_tasks.automations import Reactions
    from ckpt_tasks.setup import CredentialsBlock, Wanted
    from ckpt_tasks.setup import setup as make

    made = None
    if block is not None:
        made = CredentialsBlock(
            reference=block, profile=profile, key_env=key_env, secret_env=secret_env, token_env=token_env, region=region,
            endpoint_url=endpoint_url,
        )  # fmt: skip
    reactions = (
        Reactions(evaluate=evaluate, notify=notify, silence=silence, reruns=reruns, flow=flow) if automations else None
    )
    steps = list(make(Wanted(limit=limit, slots=slots, pool=pool, block=made, reactions=reactions)))
    table = Table(box=None, show_header=False, pad_edge=False)
    for step in steps:
        table.add_row(step.done, _tables.visible(step.what), _tables.visible(step.note))
    changed = sum(step.done != "unchanged" for step in steps)
    said = f"{changed} of {len(steps)} were made or changed" if changed else "nothing changed: everything was there"
    output.show({"changed": changed, "steps": steps}, table, said)


@upkeep.command
def doctor(
    storage: str | None = None,
    *,
    limit: str | None = None,
    pool: str = "ckpt",
    staging_dir: str | None = None,
    common: Common = COMMON,
) -> int:
    """Find out what would go wrong: server, limit, work pool, storage, clocks, staging disk. Each finding has its fix.

    Exit code 0 if nothing fails, 1 if something does, 2 if it could not look. Writes to the storage only below a folder of
    its own, which it removes.

    Args:
        storage: storage path; default: the setting PREFECT_INTEGRATIONS_CKPT_STORAGE_PATH, else it is not looked at.
        limit: name of the global concurrency limit; default: the setting, else `ckpt-uploads`.
        pool: name of the work pool.
        staging_dir: where runs stage checkpoints; default: the system's temporary folder.
        common: what every command takes.
    """
    from ckpt_tasks.doctor import examine_prefect
    from ckpt_tasks.settings import CkptSettings

    path = storage or CkptSettings().storage_path
    found: list[Finding] = []
    if path is not None:
        found += examine_storage(path, **common.access)
    found += examine_staging(staging_dir, path)
    found += examine_prefect(limit=limit, pool=pool)
    worst = max((item.level for item in found), key=list(Level).index)
    lines = [
        f"{item.level.value:<4}  {item.check}: {item.said}{f'. Fix: {item.fix}' if item.fix else ''}" for item in found
    ]
    if path is None:
        lines.append("no storage was looked at: name a storage path, or set PREFECT_INTEGRATIONS_CKPT_STORAGE_PATH")
    common.show({"ok": worst is not Level.FAIL, "storage": path, "findings": found}, *map(_tables.visible, lines))
    return int(worst is Level.FAIL)


@upkeep.command
def rm(run: str, *, yes: Flag = False, common: Common = COMMON) -> None:
    """Remove a run with all its checkpoints, for good; what crashed in the middle is finished by the same command.

    Args:
        run: RUN; refused while a driver of it is alive. External checkpoints stay.
        yes: do not ask.
        common: what every command takes.
    """
    uri = normalize_uri(run)
    if not is_there(
        open_storage(uri, credentials=common.credentials or "env", storage_options=common.access["storage_options"])
    ):
        raise CheckpointNotFoundError(f"no run is at {uri}: give <storage_path>/<name>, as `ckpt ls` shows it")
    if not yes:
        _ask(f"Remove {uri} with all its checkpoints, for good?")
    gone = remove(run, **common.access)
    said = f"removed {gone.uri}: {gone.commits} commits, {gone.files} objects in all, {_tables.size(gone.nbytes)}"
    left = [f"left, because it is not part of the run: {key}" for key in gone.left]
    common.show(gone, *map(_tables.visible, [*left, said]))


def _ask(question: str) -> None:
    """Go on only after a `y`.

    Raises:
        ConfigError: nobody can be asked, or the answer is another.
    """
    if not sys.stdin.isatty():
        raise ConfigError("rm removes a run for good and nobody is there to ask: add --yes")
    sys.stderr.write(f"{_tables.visible(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was removed")
