"""The Prefect API for commands that set things up or look at them: there, or said to be away at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from ckpt.errors import ConfigError
from ckpt_tasks._delivery import api_answers

_SECONDS = 15.0


@contextmanager
def prefect_api() -> Iterator[SyncPrefectClient]:
    """A client of the configured server.

    Raises:
        ConfigError: none is configured, or it does not answer.
    """
    url = PREFECT_API_URL.value()
    if url is None:
        raise ConfigError(
            "no Prefect server is configured: start one with `prefect server start` and run "
            "`prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    if not api_answers():
        raise ConfigError(f"no Prefect server answers at {url}: start it, or correct PREFECT_API_URL")
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 2}),
            get_client(sync_client=True, httpx_settings={"timeout": _SECONDS}) as client,
        ):
            yield client
    except httpx.TransportError as error:
        raise ConfigError(f"the Prefect server at {url} went away: {type(error).__name__}: {error}") from error
