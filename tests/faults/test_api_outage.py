"""A run depends on its storage, not on the Prefect API (G12): away at the start, in the middle, or for good."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import DEADLINE, eventually
from prefect_server import ApiServer

from ckpt import Result

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = Path(__file__).parents[2] / "flows" / "train.py"

FUNCTION = textwrap.dedent(
    """
    import os
    import threading
    from pathlib import Path
    from ckpt import Checkpoint, checkpoint_dir, report

    def train(config):
        gate = Path(__file__).with_name("gate")
        for step in range(config["epochs"]):
            with checkpoint_dir() as folder:
                (folder / "weights").write_bytes(os.urandom(1000))
                report({"step": step, "accuracy": step / 10}, Checkpoint.from_directory(folder)).wait(60)
            print(f"\\nstep {step}", flush=True)
            while step == 1 and not gate.exists():
                threading.Event().wait(0.05)
    """
)
"""Two steps, then it waits for the file `gate` beside it, then the rest."""

OWN_FLOW = textwrap.dedent(
    """
    import sys
    import small_steps
    from prefect import flow
    from ckpt import RunConfig
    from ckpt_tasks import training_run

    @flow(name="own", persist_result=False)
    def train():
        with training_run(RunConfig(name="digits", storage_path=sys.argv[1])):
            small_steps.train({"epochs": 6})

    train()
    """
)
"""What a user writes, without any of `flows/train.py`'s care."""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A database that is made once."""
    return tmp_path_factory.mktemp("api")


@pytest.fixture
def api(home) -> Iterator[ApiServer]:
    server = ApiServer(home)
    server.start()
    yield server
    server.kill()


class Program:
    """A training in a process of its own, and all it prints."""

    def __init__(self, tmp_path: Path, url: str, *, own: bool = False) -> None:
        self.folder, self.storage = tmp_path, tmp_path / "runs"
        (tmp_path / "small_steps.py").write_text(FUNCTION)
        (tmp_path / "own.py").write_text(OWN_FLOW)
        given = ["--storage", str(self.storage), "--train-fn", "small_steps:train", "--epochs", "6"]
        command = [str(tmp_path / "own.py"), str(self.storage)] if own else [str(TRAIN), *given]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
                "PREFECT_API_URL": url, "PREFECT_HOME": str(tmp_path / "home"), "COLUMNS": "200",
            },
        )  # fmt: skip
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def said(self, what: str) -> None:
        eventually(lambda: self.output, lambda output: what in output or self.process.poll() is not None)
        assert what in self.output, self.output

    def go_on(self) -> float:
        (self.folder / "gate").touch()
        return time.monotonic()

    def ended(self, within: float = 2 * DEADLINE) -> int:
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {within:.0f} s:\n{self.output}")
        self._reader.join(10)
        return code

    @property
    def result(self) -> Result:
        return Result.from_path(str(self.storage / "digits"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def program(request, tmp_path) -> Iterator:
    """`program(url, own=False)`: started, and killed at the end."""
    started = []

    def start(url: str, *, own: bool = False) -> Program:
        started.append(Program(tmp_path, url, own=own))
        return started[-1]

    yield start
    for one in started:
        one.close()


def nobody() -> str:
    return "http://127.0.0.1:9/api"


def check_no_dump(output: str) -> None:
    """No stack trace, no undelivered event in full."""
    assert "Traceback" not in output, output
    assert "failed to process item" not in output
    assert not re.search(r"Event\(|prefect\.task-run\.", output)
    assert max(map(len, output.splitlines()), default=0) < 500


def test_down_at_the_start_is_a_clear_error_and_nothing_is_half_made(program, tmp_path):
    """Within seconds, with what to do, and not a file in storage."""
    training = program(nobody())
    began = time.monotonic()
    assert training.ended() == 75
    assert time.monotonic() - began < 45  # most of it imports
    assert "The Prefect API is away" in training.output
    assert "unset PREFECT_API_URL" in training.output
    check_no_dump(training.output)
    assert not training.storage.exists()


def test_killed_in_mid_run_and_started_again(program, api):
    """Training and uploads go on meanwhile, all is committed, and the run ends as if nothing had been."""
    training = program(api.url)
    training.said("step 1")
    api.kill()
    training.go_on()
    training.said("step 3")
    assert training.result.checkpoint is not None
    api.start()
    assert training.ended() == 0, training.output
    assert [record.state.value for record in training.result.history] == ["committed"] * 6
    check_no_dump(training.output)
    with api.client() as client:
        runs = eventually(client.read_flow_runs, lambda runs: all(run.state.is_final() for run in runs))
    assert {run.state.name for run in runs} == {"Completed"}


@pytest.mark.parametrize("own", [False, True], ids=["flows/train.py", "a flow of the user's own"])
def test_gone_for_good_the_process_ends_in_time(program, api, own):
    """Within 60 s of the last commit, not 0; the store and the terminal have it all, and what the UI misses is said."""
    training = program(api.url, own=own)
    training.said("step 1")
    api.kill()
    training.go_on()
    training.said("step 5")
    last_commit = time.monotonic()
    code = training.ended()
    took = time.monotonic() - last_commit
    print(f"exit code {code}, {took:.1f} s after the last commit")
    assert took < 60
    assert [record.state.value for record in training.result.history] == ["committed"] * 6
    assert (training.storage / "digits" / "result.json").exists()
    assert "The UI misses the end of run digits" in training.output
    assert code == 75, training.output
    if own:
        return  # the stack trace is Prefect's, and the program's to catch
    assert "6 checkpoints committed" in training.output
    assert re.search(
        r"misses the end of this flow run .*, [1-9]\d* log lines, and \d+ events",
        " ".join(training.output.split()),
    )
    assert "ckpt restore" in training.output
    check_no_dump(training.output)
