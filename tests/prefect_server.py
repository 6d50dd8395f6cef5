"""A Prefect server for the tests of a session, with a database of its own.

The one instance: a fixture that test modules import is another one in each of them. Prefect is imported by the tests that
use it only.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


_instances: list[str] = []
"""The addresses of this session's servers: one."""


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API's URL; whatever server the developer has configured is left alone."""
    from prefect.context import refresh_global_settings_context

    from ckpt_tasks.embedded import embedded_server

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            patch.delenv(name)
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect-home")))
        patch.setenv("PREFECT_SERVER_EPHEMERAL_ENABLED", "true")
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("DO_NOT_TRACK", "1")
        refresh_global_settings_context()
        assert not _instances, "prefect_server is a fixture of the whole session: name it, and never import it"
        with embedded_server() as url:
            assert url is not None
            _instances.append(url)
            yield url
    refresh_global_settings_context()


class ApiServer:
    """A Prefect API with a port and a database of its own, which can be killed, and started again at the same place.

    Args:
        home: a folder for its database and its log.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/api"

    def start(self) -> None:
        """Returns once it answers."""
        import httpx

        from ckpt_tasks import embedded

        script = Path(embedded.__file__).with_name("_server.py")
        mine = {"PREFECT_HOME": str(self._home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self._home.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", self._port)) as listening, (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(listening.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[listening.fileno()],
                env={**ours, **embedded._SERVER_ENVIRONMENT, **mine, "PREFECT_API_URL": self.url},
            )  # fmt: skip
        assert httpx.get(f"{self.url}/health", timeout=90, trust_env=False).is_success

    def kill(self) -> None:
        """SIGKILL, as a machine that goes away."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None

    def client(self) -> SyncPrefectClient:
        """To look what it knows."""
        from prefect.client.orchestration import SyncPrefectClient

        return SyncPrefectClient(self.url)
