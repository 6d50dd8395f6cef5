"""A training that is told to stop keeps its time budget, loses no checkpoint, and leaves no run `Running` behind (G11).

The training is a process of its own (`trainer.py`) against the session's Prefect API.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID, uuid4

import faulty_server
import pytest
from helpers import DEADLINE, eventually
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.states import Cancelling

from ckpt import Result
from ckpt.layout import CHECKPOINTS

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(240)]

TRAINER = Path(__file__).with_name("trainer.py")
PREFECTS_KILL = 30.0
"""Seconds after which Prefect sends SIGKILL; `stop_timeout` (25 s) leaves 5 for the flow's last state."""


class Training:
    """The process, and what it has said so far."""

    def __init__(self, options: dict[str, object], **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), json.dumps(options)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "300", **environment},
        )  # fmt: skip
        self.output = ""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            self._lines.put(line.strip())
        self._lines.put(None)

    def said(self, start: str) -> str:
        """The next line that begins so; fails if the process ends before, or takes too long."""
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"no line {start!r} in\n{self.output}"
            if line.startswith(start):
                return line

    def send(self, number: int) -> float:
        """Send a signal; the time."""
        self.process.send_signal(number)
        return time.monotonic()

    def ended(self, within: float = DEADLINE) -> int:
        """Its exit code."""
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {within:.0f} s:\n{self.output}")
        self._reader.join(10)
        return code

    @property
    def flow_run_name(self) -> str:
        return self.output.split("Beginning flow run '")[1].split("'")[0]

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(prefect_server, tmp_path) -> Iterator[Callable[..., Training]]:
    """`start(steps=9, ...)`: a training in storage of this test, killed at its end."""
    started: list[Training] = []

    def begin(*, environment: dict[str, str] | None = None, **options: object) -> Training:
        started.append(Training({"storage": str(tmp_path / "runs"), **options}, **(environment or {})))
        return started[-1]

    yield begin
    for training in started:
        training.close()


def flow_runs(name: str):
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))


def states_of(flow_run_id: UUID) -> dict[str, str]:
    with get_client(sync_client=True) as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    return {run.name: "none" if run.state is None else run.state.name for run in found}


def check_states(training: Training, state: str) -> dict[str, str]:
    """The flow run has this state, and each of its task runs a final one; these are returned."""
    runs = eventually(lambda: flow_runs(training.flow_run_name), lambda runs: bool(runs) and runs[0].state.is_final())
    assert runs[0].state.name == state, training.output
    final = {"Completed", "Failed", "Skipped"}
    return eventually(lambda: states_of(runs[0].id), lambda tasks: len(tasks) > 0 and set(tasks.values()) <= final)


def result_in(tmp_path: Path, name: str = "run") -> Result:
    return Result.from_path(str(tmp_path / "runs" / name))


def rows(tmp_path: Path) -> list[str]:
    return [record.state.value for record in result_in(tmp_path).history]


def check_nothing_partial(tmp_path: Path) -> None:
    """Every folder of checkpoints that is there belongs to a commit."""
    root = tmp_path / "runs" / "run"
    committed = {Path(checkpoint.uri).name for checkpoint, _ in result_in(tmp_path).best_checkpoints}
    there = {path.name for path in (root / CHECKPOINTS).iterdir()} if (root / CHECKPOINTS).exists() else set()
    assert there <= committed


ENDS = {signal.SIGTERM: (-signal.SIGTERM, "Crashed"), signal.SIGINT: (-signal.SIGINT, "Crashed")}
"""Exit code and flow run state that Prefect makes of a termination from outside."""


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_the_loop_saves_just_in_time_and_the_next_run_goes_on_from_there(start, tmp_path, number):
    """Second signals change nothing; the just-in-time checkpoint is committed; no run is left Running."""
    training = start(steps=1000)
    training.said("step 1")
    began = training.send(number)
    eventually(lambda: training.output, lambda output: "stop requested" in output)
    training.send(signal.SIGINT)
    training.send(signal.SIGTERM)
    training.said("stopping after")
    code = training.ended()
    assert time.monotonic() - began < PREFECTS_KILL
    assert (code, "Crashed") == ENDS[number], training.output
    tasks = check_states(training, "Crashed")
    assert set(tasks.values()) == {"Completed"}
    assert {"gather-reports", "publish-result"} <= set(tasks)
    assert "stop requested" in training.output
    newest = result_in(tmp_path).checkpoint
    assert newest is not None
    step = newest.metrics["step"]
    assert len(tasks) == step + 3

    following = start(steps=step + 2, after=0.0)
    assert following.said("start") == f"start {step + 1} from {{'step': {step}}}"
    assert following.ended() == 0
    assert set(rows(tmp_path)) == {"committed"}


def test_a_loop_that_never_looks_is_interrupted(start, tmp_path):
    """After half of a short stop_timeout; what it knew to be committed is, and the report it was in has its row."""
    training = start(steps=1000, heeds=False, after=0.1, run={"stop_timeout": 4.0})
    training.said("step 2")
    began = training.send(signal.SIGTERM)
    assert training.ended() == -signal.SIGTERM
    assert time.monotonic() - began < PREFECTS_KILL
    assert "the training loop has not stopped in 2 s" in training.output
    check_states(training, "Crashed")
    known = training.output.count("\nstep ")
    history = list(result_in(tmp_path).history)
    assert known >= 3
    assert {record.state.value for record in history[:known]} == {"committed"}
    assert len(history) <= known + 1
    assert all(record.state.value == "committed" or record.reason for record in history)
    check_nothing_partial(tmp_path)


def test_a_termination_while_uploads_are_drained_lets_them_finish(start, tmp_path):
    """The block is left already; the upload gets the rest of the time, and is committed."""
    gate = tmp_path / "gate"
    training = start(steps=2, gate=str(gate), after=0.0)
    training.said("drain")
    training.send(signal.SIGTERM)
    eventually(lambda: training.output, lambda output: "stop requested" in output)
    gate.touch()
    training.said("end committed,committed")
    assert training.ended() == -signal.SIGTERM
    assert set(check_states(training, "Crashed").values()) == {"Completed"}


@pytest.mark.parametrize("drained", [False, True], ids=["in the loop", "in the drain"])
def test_an_upload_that_hangs_is_aborted_at_the_end_of_the_time(start, tmp_path, drained):
    """FAILED with the reason, in storage and in Prefect; the run ends as a termination, not as a failure to retry."""
    training = start(
        steps=1, hang=True, after=0.0 if drained else 60.0, run={"stop_timeout": 3.0}, environment={"RETRIES": "3"}
    )
    training.said("drain" if drained else "hanging")
    began = training.send(signal.SIGTERM)
    assert training.ended() == -signal.SIGTERM
    assert time.monotonic() - began < PREFECTS_KILL
    tasks = check_states(training, "Crashed")
    assert tasks["upload-000000 run"] == "Failed"
    history = list(result_in(tmp_path).history)
    assert [row.state.value for row in history] == ["failed"] if drained else ["failed", "committed"]
    assert "stop_timeout of 3 s is over" in str(history[0].reason)
    check_nothing_partial(tmp_path)


@contextmanager
def stuck_in_a_part(start, server):
    """A training whose multipart upload hangs, the proxy it hangs in, and the bucket."""
    with _bucket(server) as bucket, faulty_server.faulty(server) as s3:
        stuck = threading.Event()

        def rule(request):
            if request.operation == "UploadPart":
                stuck.set()
                return faulty_server.hang
            return None

        s3.rule = rule
        training = start(
            storage=f"s3://{bucket}/runs", steps=1, big=40 * 2**20, after=60.0, run={"stop_timeout": 5.0},
            environment={**server.env, "AWS_ENDPOINT_URL": s3.endpoint},
        )  # fmt: skip
        assert stuck.wait(DEADLINE)
        yield training, s3, bucket


def test_a_network_that_hangs_leaves_no_multipart_upload(start, moto_server):
    """The part that hangs is cancelled at once, its multipart upload aborted, and nothing else left in the bucket."""
    with stuck_in_a_part(start, moto_server) as (training, s3, bucket):
        began = training.send(signal.SIGTERM)
        assert training.ended() == -signal.SIGTERM
        assert time.monotonic() - began < PREFECTS_KILL
        check_states(training, "Crashed")
        client = moto_server.client()
        assert not client.list_multipart_uploads(Bucket=bucket).get("Uploads")
        keys = [found["Key"] for found in client.list_objects_v2(Bucket=bucket)["Contents"]]
        assert not [key for key in keys if f"/{CHECKPOINTS}" in key and not key.endswith(("/step",))]
        assert "AbortMultipartUpload" in s3.seen


def test_a_store_that_is_gone_does_not_hold_the_process(start, moto_server):
    """Nothing can be written any more, not even the failure: the process goes all the same."""
    with stuck_in_a_part(start, moto_server) as (training, s3, _):
        s3.rule = lambda _: faulty_server.hang
        began = training.send(signal.SIGINT)
        assert training.ended() != 0
        assert time.monotonic() - began < PREFECTS_KILL
        runs = eventually(lambda: flow_runs(training.flow_run_name), bool)
        assert runs[0].state.name == "Crashed"


def test_a_termination_before_the_run_is_open_ends_it_at_once(start, tmp_path):
    """Nothing was begun: Prefect's own way."""
    training = start(steps=1, opening=60)
    training.said("opening")
    began = training.send(signal.SIGTERM)
    assert training.ended() == -signal.SIGTERM
    assert time.monotonic() - began < PREFECTS_KILL
    runs = eventually(lambda: flow_runs(training.flow_run_name), lambda runs: runs[0].state.is_final())
    assert runs[0].state.name == "Crashed"
    assert not (tmp_path / "runs" / "run").exists()


def test_an_error_of_a_loop_that_was_stopped_does_not_start_a_retry(start, tmp_path):
    """A data loader's workers die of the same signal: the run ends as terminated, though the flow has retries."""
    training = start(steps=1000, raises=True, environment={"RETRIES": "3"})
    training.said("step 0")
    training.send(signal.SIGTERM)
    assert training.ended() == -signal.SIGTERM
    assert "a worker of the data loader is gone" in training.output
    check_states(training, "Crashed")
    assert set(rows(tmp_path)) == {"committed"}


def test_a_cancelled_run_ends_cancelled_and_is_resumed_by_the_next(start, tmp_path):
    """`prefect flow-run cancel` of a run that a runner started: checkpoints intact, just-in-time one included."""
    name = f"cancel-{os.getpid()}"
    runner = start(steps=1000, serve=name)
    with get_client(sync_client=True) as client:
        deployment = eventually(lambda: _deployment(client, f"interrupted/{name}"), lambda found: found is not None)
        run = client.create_flow_run_from_deployment(deployment.id)
        runner.said("step 1")
        client.set_flow_run_state(run.id, Cancelling())
        runner.said("stopping after")
        runner.said("end committed,committed,committed")
        final = eventually(lambda: client.read_flow_run(run.id).state, lambda state: state.is_final())
        assert final.name == "Cancelled", runner.output
        tasks = eventually(
            lambda: states_of(run.id), lambda tasks: set(tasks.values()) == {"Completed"} and "publish-result" in tasks
        )
        steps = len(rows(tmp_path))
        assert len(tasks) == steps + 2
        following = client.create_flow_run_from_deployment(deployment.id)
        assert runner.said("start") == f"start {steps} from {{'step': {steps - 1}}}"
        runner.said(f"step {steps}")
        runner.send(signal.SIGTERM)  # the runner's own shutdown: a machine that goes down
        runner.said("stopping after")
        runner.ended()
        final = eventually(lambda: client.read_flow_run(following.id).state, lambda state: state.is_final())
        assert set(states_of(following.id).values()) == {"Completed"}
        assert set(rows(tmp_path)) == {"committed"}


@contextmanager
def _bucket(server) -> Iterator[str]:
    name = f"stop-{uuid4().hex[:12]}"
    server.client().create_bucket(Bucket=name)
    yield name


def _deployment(client, name):
    with suppress(Exception):
        return client.read_deployment_by_name(name)
    return None


def test_nothing_survives_a_parent_that_is_killed(start, tmp_path):
    """SIGKILL: the temporary server ends by itself, and nothing else of ours was there."""
    training = start(steps=1000, environment={"PREFECT_API_URL": ""})
    training.said("step 1")
    family = _descendants(training.process.pid)
    assert len(family) == 1, "the temporary server"
    training.send(signal.SIGKILL)
    training.ended()
    eventually(lambda: [pid for pid in family if Path(f"/proc/{pid}").exists()], lambda left: not left)
    assert result_in(tmp_path).checkpoint is not None


def _descendants(pid: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
