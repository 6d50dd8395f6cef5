"""The temporary server and the logs of a run, as a user meets them: a program on a machine without a server."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = textwrap.dedent(
    """
    import logging, threading
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.task_runners import ThreadPoolTaskRunner
    from ckpt.errors import CkptError
    from ckpt_tasks._logging import run_logging
    from ckpt_tasks.embedded import embedded_server

    log = logging.getLogger("ckpt")

    @task(name="upload_checkpoint", task_run_name="upload-{seq:06d}", cache_policy=NO_CACHE)
    def upload(seq):
        log.info("report %d committed", seq)

    @flow
    def train():
        with run_logging(), ThreadPoolTaskRunner(max_workers=4) as runner:
            other = threading.Thread(target=log.info, args=("from another thread",))
            other.start()
            other.join()
            for future in [runner.submit(upload, {"seq": seq}) for seq in range(30)]:
                future.result(timeout=60)

    if __name__ == "__main__":
        with embedded_server() as url:
            print("API", url, flush=True)
            train()
    """
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def environment(home: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    python_path = os.pathsep.join(path for path in sys.path if path)
    quiet = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "COLUMNS": "200"}
    return {**ours, **quiet, "PREFECT_HOME": str(home), "PYTHONPATH": python_path}


def run(program: Path, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program)],
        env={**environment(home), **more},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_first_run_on_a_fresh_machine_is_clean_and_its_history_is_complete(program: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = run(program, home)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for word in ("Traceback", "ERROR", "WARNING", "locked", "Error"):
        assert word not in said
    assert said.count("report 7 committed") == 1
    assert re.search(r"Flow run '.*' - from another thread", said)
    assert "Task run 'upload-000007' - Finished in state" not in said

    with sqlite3.connect(home / "prefect.db") as database:
        states = database.execute("select state_type, count(*) from task_run group by 1").fetchall()
        logged = database.execute("select count(*) from log where message like 'report % committed'").fetchone()[0]
        on_page = database.execute("select count(*) from log where task_run_id is not null").fetchone()[0]
        flows = database.execute("select state_type from flow_run").fetchall()
    database.close()
    assert states == [("COMPLETED", 30)]
    assert flows == [("COMPLETED",)]
    assert (logged, on_page) == (30, 30)
    assert "Traceback" not in (home / "temporary-server.log").read_text()


def test_no_server_survives_a_killed_parent(program: Path, tmp_path: Path) -> None:
    slow = PROGRAM.replace("range(30)", "range(10**6)")
    program.write_text(slow)
    parent = subprocess.Popen(
        [sys.executable, str(program)], env=environment(tmp_path / "home"), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith("API http://127.0.0.1:")
    [child] = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=10)
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "_server.py" in Path(f"/proc/{child}/cmdline").read_text():
        assert time.monotonic() < deadline, "the server is still there"
        threading.Event().wait(0.1)


def test_a_configured_server_is_used_and_none_is_started(program: Path, tmp_path: Path) -> None:
    program.write_text(PROGRAM.replace("        train()\n", ""))
    done = run(program, tmp_path / "home", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.stdout.strip() == "API http://127.0.0.1:9/api"
    assert not (tmp_path / "home" / "temporary-server.log").exists()


def test_a_server_that_cannot_start_says_why(program: Path, tmp_path: Path) -> None:
    done = run(
        program, tmp_path / "home", PREFECT_API_DATABASE_CONNECTION_URL="sqlite+aiosqlite:////nowhere/prefect.db"
    )
    assert done.returncode == 1
    assert "The temporary Prefect server ended" in done.stderr
    assert "unable to open database file" in done.stderr
