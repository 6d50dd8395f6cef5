"""Another project, with packages called `tasks` and `flows` of its own, reuses the tasks in a pipeline without training."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DEADLINE, content

from ckpt import Checkpoint

PROJECT = Path(__file__).resolve().parents[1] / "examples" / "other_pipeline"
pytestmark = pytest.mark.prefect


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy: nothing of this checkout is above or beside it."""
    return Path(shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__")))


def python(project: Path, *arguments: str, **env: str) -> str:
    """Run the installed Python in the project's folder; what it prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=project, env={**clean, **env}, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_nightly_export_uploads_verifies_and_restores_its_tables(project, tmp_path, prefect_server):
    """Two tables are uploaded whole, the empty one is a row with its reason, and what was uploaded is what was exported."""
    destination = str(tmp_path / "exports")
    out = python(project, "-m", "flows.nightly_export", destination, PREFECT_API_URL=prefect_server)
    said = json.loads(out.splitlines()[-1])
    assert [uri.rpartition("/")[2] for uri in said["uploaded"]] == ["customers", "orders"]
    assert list(said["failed"]) == ["returns"]
    assert "holds no file" in said["failed"]["returns"]
    assert content(Checkpoint(said["uploaded"][0]), tmp_path / "back") == {
        "table.csv": b"id,name\r\n1,Ada\r\n2,Grace\r\n"
    }


def test_the_names_tasks_and_flows_stay_the_projects_own(project):
    """Whichever is imported first; ours are elsewhere."""
    look = "; print(*(Path(next(iter(m.__path__))).resolve() for m in (tasks, flows, ckpt_tasks)), sep='\\n')"
    for order in ("ckpt_tasks, tasks, flows", "tasks, flows, ckpt_tasks"):
        own_tasks, own_flows, ours = python(project, "-c", f"import {order}; from pathlib import Path{look}").split()
        assert (own_tasks, own_flows) == (str(project.resolve() / "tasks"), str(project.resolve() / "flows"))
        assert project.resolve() not in Path(ours).parents
