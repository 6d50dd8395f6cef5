"""A Prefect server for the tests of a session, with a database of its own; import the fixture where it is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from prefect.context import refresh_global_settings_context

from ckpt_tasks.embedded import embedded_server


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API's URL; whatever server the developer has configured is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            patch.delenv(name)
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect-home")))
        patch.setenv("PREFECT_SERVER_EPHEMERAL_ENABLED", "true")
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("DO_NOT_TRACK", "1")
        refresh_global_settings_context()
        with embedded_server() as url:
            assert url is not None
            yield url
    refresh_global_settings_context()
