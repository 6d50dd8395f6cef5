"""`ckpt setup`: what runs need on a Prefect server, made once; a second time changes nothing and says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect.blocks.core import Block
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate, WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from ckpt.errors import ConfigError
from ckpt_tasks._api import prefect_api
from ckpt_tasks.automations import Done, Reactions, ensure_automations
from ckpt_tasks.settings import CkptSettings

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

LIMIT = "ckpt-uploads"
"""Name of the limit, where the setting names none."""
SLOTS = 4
"""Uploads at once over all runs, where nobody says how many."""
POOL = "ckpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that a set up server has."""

    what: str
    done: Done
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialsBlock:
    """A credentials block to make; secrets come from the environment, never from a command line."""

    reference: str
    """`aws-credentials/<name>` or `minio-credentials/<name>`."""
    profile: str | None = None
    """Of the AWS config files, instead of keys."""
    key_env: str = "AWS_ACCESS_KEY_ID"
    """Name of the environment variable that holds the access key."""
    secret_env: str = "AWS_SECRET_ACCESS_KEY"  # noqa: S105 - the name of a variable
    token_env: str | None = None
    region: str | None = None
    endpoint_url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to set up."""

    limit: str | None = None
    """Name of the global concurrency limit; None: what the setting says, else `ckpt-uploads`."""
    slots: int | None = None
    """None: 4 for a new limit; an existing one is left as it is."""
    pool: str = POOL
    """Name of the work pool, of type process."""
    block: CredentialsBlock | None = None
    reactions: Reactions | None = None
    """Automations; None: none."""


def setup(wanted: Wanted) -> Iterator[Step]:
    """Make what is missing, change what differs.

    Yields:
        What was done, as it is done.

    Raises:
        ConfigError: no server answers, or something that is wanted can never work.
    """
    with prefect_api() as client:
        yield _limit(client, wanted.limit or CkptSettings().concurrency_limit or LIMIT, wanted.slots)
        yield _pool(client, wanted.pool)
        if wanted.block is not None:
            yield _block(wanted.block)
        if wanted.reactions is not None:
            for name, done, note in ensure_automations(client, wanted.reactions):
                yield Step(what=f"automation {name!r}", done=done, note=note)


def _limit(client: SyncPrefectClient, name: str, slots: int | None) -> Step:
    what = f"concurrency limit {name}"
    try:
        found = client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        limit = slots or SLOTS
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))
        return Step(what=what, done="created", note=f"{limit} uploads at once over all runs that name it")
    if slots is None or found.limit == slots:
        return Step(what=what, done="unchanged", note=f"{found.limit} slots")
    client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=slots))
    return Step(what=what, done="changed", note=f"{slots} slots instead of {found.limit}")


def _pool(client: SyncPrefectClient, name: str) -> Step:
    what = f"work pool {name}"
    try:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    except ObjectAlreadyExists:
        found = client.read_work_pool(name)
        return Step(what=what, done="unchanged", note=f"of type {found.type}")
    return Step(what=what, done="created", note=f"start a worker with `prefect worker start --pool {name}`")


def _block(wanted: CredentialsBlock) -> Step:
    kind, _, name = wanted.reference.partition("/")
    block = _made(kind, wanted)
    if not name:
        raise ConfigError(f"block {wanted.reference!r} must be <type>/<name>, such as aws-credentials/prod")
    step = f"credentials block {wanted.reference}"
    note = f"use it with credentials=block:{wanted.reference}"
    try:
        found: Any = Block.load(wanted.reference)
    except ValueError:
        block.save(name)
        return Step(what=step, done="created", note=note)
    if _values(found) == _values(block):
        return Step(what=step, done="unchanged", note=note)
    block.save(name, overwrite=True)
    return Step(what=step, done="changed", note="the next upload of a run that uses it takes the new credentials")


def _values(block: Any) -> dict[str, Any]:
    """What the block holds, without where it is kept."""
    return {name: value for name, value in block.model_dump().items() if not name.startswith("_")}


def _made(kind: str, wanted: CredentialsBlock) -> Any:
    try:
        from prefect_aws.client_parameters import AwsClientParameters
        from prefect_aws.credentials import AwsCredentials, MinIOCredentials
    except ImportError as error:
        raise ConfigError("credentials blocks of S3 come with prefect-aws: pip install prefect-aws") from error
    client = AwsClientParameters(endpoint_url=wanted.endpoint_url)
    if kind == "minio-credentials":
        return MinIOCredentials(
            minio_root_user=_from_env(wanted.key_env), minio_root_password=_from_env(wanted.secret_env),
            region_name=wanted.region, aws_client_parameters=client,
        )  # fmt: skip
    if kind != "aws-credentials":
        raise ConfigError(
            f"blocks of type {kind!r} are not made here; make aws-credentials/NAME or minio-credentials/NAME"
        )
    if wanted.profile is not None:
        return AwsCredentials(profile_name=wanted.profile, region_name=wanted.region, aws_client_parameters=client)
    return AwsCredentials(
        aws_access_key_id=_from_env(wanted.key_env), aws_secret_access_key=_from_env(wanted.secret_env),
        aws_session_token=None if wanted.token_env is None else _from_env(wanted.token_env),
        region_name=wanted.region, aws_client_parameters=client,
    )  # fmt: skip


def _from_env(name: str) -> Any:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(
            f"the environment variable {name} is not set; it names the place of a secret, and is read here"
        )
    return value
