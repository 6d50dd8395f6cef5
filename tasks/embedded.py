"""A quiet temporary Prefect server, for `python flows/train.py` on a machine where no server is configured.

Prefect starts such a server by itself, but its output (stack traces of locked databases and cancelled services) runs
into the user's terminal, a first start gets 20 s, what is not written at the end is dropped, and the server outlives a
parent that is killed. This one writes to a log file in `PREFECT_HOME`, serves the UI while the run lasts, writes all it
has received, and ends with its parent. The database is the same: a `prefect server start` later shows the runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
from prefect.context import refresh_global_settings_context
from prefect.logging import get_logger
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
    temporary_settings,
)

from ckpt_tasks._delivery import deliver
from ckpt_tasks._logging import quiet_prefect

_LOG_NAME = "temporary-server.log"
_LOG_BYTES = 4 * 2**20
"""A longer log is started over at the next start."""

_STARTUP_SECONDS = 180.0
"""A first start creates the database: 8 s of pure CPU on an idle 2-core machine, several times that on a busy one."""

_PATIENCE_SECONDS = 3.0
"""A start that takes longer is explained to the user."""

_SETTLE_SECONDS = 5.0
"""What the events and logs that still wait in this process get to reach the server."""

_STOP_SECONDS = 25.0

_SERVER_ENVIRONMENT = {
    # Services for deployments, schedules and automations: nothing of a single run needs them, they write to the same
    # SQLite file, and a second of their loops would often be cut off by the shutdown.
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    # Two seconds saved on a first start; the next `prefect server start` registers them.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_API_BASE_PATH": "",
    # One transaction a second for task run states, instead of one per state.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
}


@contextlib.contextmanager
def embedded_server() -> Iterator[str | None]:
    """Have a Prefect API for the block: the configured one, else a temporary server of our own.

    Starts nothing where `PREFECT_API_URL` is set (environment or profile) or where Prefect's own temporary server is
    switched off. The server ends with the block, and within seconds of the parent's death, SIGKILL included. In all
    cases Prefect's noise about an API that is away is kept short from here on (`quiet_prefect`).

    Yields:
        The API's URL; None where none is configured and a temporary one is switched off.

    Raises:
        RuntimeError: the server did not start; the text has the end of its log.
    """
    quiet_prefect()
    if PREFECT_API_URL.value() or not PREFECT_SERVER_EPHEMERAL_ENABLED.value():
        yield PREFECT_API_URL.value()
        return
    server = _Server.start()
    try:
        server.wait_ready()
        with _api_url(server.url):
            try:
                yield server.url
            finally:
                server.settle()
    finally:
        server.stop()


class _Server:
    """The child process, its address and its log."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, log_start: int) -> None:
        self._process = process
        self._log = log
        self._log_start = log_start
        self.url = f"http://127.0.0.1:{port}/api"

    @classmethod
    def start(cls) -> _Server:
        """Start the child on a free loopback port; returns at once."""
        with socket.create_server(("127.0.0.1", 0)) as listening, _open_log() as log:
            port, log_start = listening.getsockname()[1], log.tell()
            script = Path(__file__).with_name("_server.py")
            process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(listening.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[listening.fileno()],
                env=_environment(f"http://127.0.0.1:{port}/api"),
                start_new_session=True,  # a Ctrl-C in the terminal is for the run, which still needs its server
            )
        return cls(process, port, Path(log.name), log_start)

    def wait_ready(self) -> None:
        """Return once the API answers."""
        logger = get_logger("ckpt")
        seconds = max(_STARTUP_SECONDS, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value())
        if not self._answers(_PATIENCE_SECONDS):
            logger.info("Starting a temporary Prefect server (the first start creates its database) ...")
            if not self._answers(seconds):
                raise RuntimeError(f"The temporary Prefect server did not start in {seconds:.0f} s.{self._excerpt()}")
        logger.info("Temporary Prefect server: %s (log: %s)", self.url.removesuffix("/api"), self._log)

    def _answers(self, seconds: float) -> bool:
        """One request that waits in the backlog until the server is up."""
        try:
            return httpx.get(f"{self.url}/health", timeout=seconds, trust_env=False).is_success
        except httpx.TimeoutException:
            return False
        except httpx.HTTPError as exc:
            code = self._exit_code(seconds=1.0)
            raise RuntimeError(f"The temporary Prefect server ended (exit code {code}).{self._excerpt()}") from exc

    def settle(self) -> None:
        """Let what the run has sent arrive and be written; bounded, and silent where it cannot be."""
        if self._exit_code() is not None:
            get_logger("ckpt").warning("The temporary Prefect server ended during the run.%s", self._excerpt())
            return
        deliver(timeout=_SETTLE_SECONDS)

    def stop(self) -> None:
        """End the child: politely, then not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._exit_code(_STOP_SECONDS) is None:
            self._process.kill()
            self._process.wait()

    def _exit_code(self, seconds: float = 0.0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=seconds)
        return None

    def _excerpt(self) -> str:
        """The log's name and its last lines, to be appended to an error."""
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[self._log_start :].decode(errors="replace")
            if lines := text.splitlines()[-20:]:
                return "\n".join([f" Its log, {self._log}, ends:", *lines])
        return f" Its log is {self._log}."


def _open_log() -> IO[bytes]:
    """The server's log file, started over when it has grown long."""
    path = Path(PREFECT_HOME.value()) / _LOG_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    grown = path.exists() and path.stat().st_size > _LOG_BYTES
    return path.open("wb" if grown else "ab")


def _environment(url: str) -> dict[str, str]:
    """The child's environment: ours, with the settings in force here (a profile's included) and the server's own."""
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    return {**os.environ, **settings, **_SERVER_ENVIRONMENT, "PREFECT_API_URL": url}


@contextlib.contextmanager
def _api_url(url: str) -> Iterator[None]:
    """Make `url` the API of this process, its threads and the processes it starts."""
    before = os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = url
    refresh_global_settings_context()
    try:
        with temporary_settings({PREFECT_API_URL: url}):
            yield
    finally:
        if before is None:
            del os.environ["PREFECT_API_URL"]
        else:
            os.environ["PREFECT_API_URL"] = before
        refresh_global_settings_context()
