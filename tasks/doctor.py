"""`ckpt doctor`: the Prefect side of what runs need; the storage's is `ckpt.examining`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import httpx
import prefect
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from ckpt.errors import ConfigError
from ckpt.examining import Finding, clock, fail, ok, warn
from ckpt_tasks._api import prefect_api
from ckpt_tasks.settings import CkptSettings
from ckpt_tasks.setup import LIMIT

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


def examine_prefect(*, limit: str | None, pool: str) -> Iterator[Finding]:
    """Look at server, limit, work pool and workers.

    Args:
        limit: name of the global concurrency limit; None: what the setting says, else `ckpt-uploads`.
        pool: name of the work pool.
    """
    if PREFECT_API_URL.value() is None:
        yield warn(
            "server", "none is configured: each program brings a temporary one along, and no worker or automation runs",
            "`prefect server start`, then `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`",
        )  # fmt: skip
        return
    try:
        with prefect_api() as client:
            yield from _server(client)
            yield from _limit(client, limit)
            yield from _pool(client, pool)
    except ConfigError as error:
        yield fail("server", str(error), "start it, or correct PREFECT_API_URL")
    except httpx.HTTPStatusError as error:
        yield fail("server", f"refused: {error.response.status_code}", "set PREFECT_API_KEY or PREFECT_API_AUTH_STRING")


def _server(client: SyncPrefectClient) -> Iterator[Finding]:
    answer = client.request("GET", "/admin/version")
    theirs, ours = str(answer.json()), prefect.__version__
    said = f"{PREFECT_API_URL.value()} runs Prefect {theirs}, this client is {ours}"
    if _minor(theirs) < _minor(ours):
        yield warn("server", said, f"upgrade the server to {ours}: it should be at least as new as its clients")
    else:
        yield ok("server", said)
    if when := answer.headers.get("date"):
        yield clock("server's clock", parsedate_to_datetime(when).timestamp() - time.time(), "the Prefect server's")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _limit(client: SyncPrefectClient, named: str | None) -> Iterator[Finding]:
    name = named or CkptSettings().concurrency_limit
    check = "concurrency limit"
    try:
        found = client.read_global_concurrency_limit_by_name(name or LIMIT)
    except ObjectNotFound:
        if name is None:
            yield warn(check, f"there is none called {LIMIT}: uploads are bounded per process only", "`ckpt setup`")
        else:
            yield fail(check, f"{name} does not exist, and runs that name it fail", f"`ckpt setup --limit {name}`")
        return
    used = f"{found.name}: {found.active_slots} of {found.limit} slots taken"
    reset = f"when nothing uploads: `prefect gcl update {found.name} --active-slots 0`"
    if not found.active:
        yield warn(check, f"{found.name} is switched off, and bounds nothing", f"`prefect gcl enable {found.name}`")
    elif found.limit == 0:
        yield fail(check, f"{found.name} has no slots: nothing uploads", f"`prefect gcl update {found.name} --limit 4`")
    elif found.active_slots and not _running(client):
        yield warn(
            check, f"{used}, and no flow run is running: a restarted server may have forgotten who has them", reset
        )
    elif found.active_slots > found.limit:
        yield warn(check, f"{used}: more than there are", reset)
    else:
        yield ok(check, used)


def _running(client: SyncPrefectClient) -> int:
    running = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}}}
    return int(client.request("POST", "/flow_runs/count", json=running).json())


def _pool(client: SyncPrefectClient, name: str) -> Iterator[Finding]:
    try:
        found = client.read_work_pool(name)
    except ObjectNotFound:
        yield warn(
            "work pool", f"there is none called {name}: nothing can be deployed to it", f"`ckpt setup --pool {name}`"
        )
        return
    if found.is_paused:
        yield warn("work pool", f"{name} is paused: its flow runs wait", f"`prefect work-pool resume {name}`")
        return
    workers = [worker for worker in client.read_workers_for_work_pool(name) if str(worker.status).endswith("ONLINE")]
    if not workers:
        yield warn("work pool", f"{name} has no worker: its flow runs wait", f"`prefect worker start --pool {name}`")
        return
    yield ok("work pool", f"{name}, type {found.type}, {len(workers)} workers online")
