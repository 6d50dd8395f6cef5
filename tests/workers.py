"""The deployments of deployments/prefect.yaml with a worker that runs them, and what tests ask of both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from helpers import DEADLINE, eventually
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State

from ckpt_tasks.functions import SETTING

ROOT = Path(__file__).resolve().parents[1]
LIGHT = "deployed_training"
"""The module whose functions the worker allows beside those of the project."""


def prefect(*arguments: str, **environment: str) -> str:
    """What the command prints, run in the repository's root."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=2 * DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Worker:
    """deployments/worker.py, started in a folder that knows nothing of the repository."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "worker.log"
        env = {**os.environ, SETTING: LIGHT, "PYTHONPATH": str(Path(__file__).parent), "COLUMNS": "300"}
        env["PREFECT_WORKER_QUERY_SECONDS"] = "1"
        command = [sys.executable, str(ROOT / "deployments/worker.py"), "--pool", "ckpt"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def stop(self) -> None:
        """SIGTERM, as a container's end; its runs end with it."""
        self.process.terminate()
        self.process.wait(DEADLINE)

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)


def started(deployment: str, parameters: dict[str, object], name: str | None = None) -> FlowRun:
    """A flow run as the form makes one."""
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name(deployment)
        return client.create_flow_run_from_deployment(found.id, parameters=parameters, name=name)


def final(flow_run_id: UUID, worker: Worker) -> State:
    """Its last state."""
    with get_client(sync_client=True) as client:
        found = eventually(
            lambda: client.read_flow_run(flow_run_id).state, lambda state: state is not None and state.is_final()
        )
    assert found is not None
    print(worker.log.read_text(errors="replace"))  # shown where a test fails
    return found


@contextmanager
def deployed_worker(folder: Path) -> Iterator[Worker]:
    """Everything deployed on the server of the session, and a worker; runs go to `folder` unless something else is said."""
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="ckpt", type="process"), overwrite=True)
    runs = str(folder / "default-runs")
    prefect(
        "deploy", "--prefect-file", "deployments/prefect.yaml", "--all", PREFECT_INTEGRATIONS_CKPT_STORAGE_PATH=runs
    )
    worker = Worker(folder)
    try:
        yield worker
    finally:
        worker.close()
