"""A run under Prefect: task runs, states, artifacts, and the tasks on their own."""

import os
import threading
from pathlib import Path

import pytest
from helpers import eventually, make_checkpoint
from prefect import allow_failure, flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.context import FlowRunContext
from prefect.futures import as_completed
from prefect.task_runners import ThreadPoolTaskRunner

import ckpt
from ckpt import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailurePolicy,
    KeepLast,
    ReportState,
    Result,
    RunConfig,
    UploadConfig,
    ValidationTaskConfig,
    report,
)
from ckpt.errors import CheckpointsLostError, ConfigError, CorruptCheckpointError, UploadFailedError
from ckpt_tasks import (
    TrainConfig,
    gather_reports,
    prune_checkpoints,
    restore_checkpoint,
    run_training,
    training_run,
    upload_checkpoint,
    verify_checkpoint,
)
from ckpt_tasks.artifacts import result_key

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def storage_path(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def broken(checkpoint: Checkpoint, name: str) -> Checkpoint:
    raise ConnectionResetError("the cable is out")


def run_flow(body):
    """Run `body` as a flow; its final state, and the id of the flow run."""
    seen = []

    @flow(name="test-run", persist_result=False)
    def wrapped():
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        seen.append(context.flow_run.id)
        return body()

    state = wrapped(return_state=True)
    return state, seen[0]


def task_runs(flow_run_id):
    """Names and state names of a flow run's task runs, once the events that carry them have arrived."""
    with get_client(sync_client=True) as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    return {run.name: run.state.name if run.state else None for run in found}


def artifact(key: str):
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    return max(found, key=lambda artifact: artifact.created)  # the newest version: the server answers in no order


def reports(storage_path: str, tmp_path: Path, count: int, *, fail: tuple[int, ...] = (), **options):
    def body() -> Result:
        with training_run(RunConfig(name="digits", storage_path=storage_path, **options)) as run:
            for index in range(count):
                fn = broken if index in fail else None
                checkpoint = make_checkpoint(tmp_path / f"c{index}", {"weights": os.urandom(64)})
                report({"loss": 1 / (index + 1)}, checkpoint, checkpoint_upload_fn=fn)
        assert run.result is not None
        return run.result

    return body


def test_a_run_shows_one_task_run_per_upload_and_one_for_the_order(tmp_path, storage_path):
    """Three reports: three upload task runs, one gather-reports, one publish-result, all Completed, and the artifact."""
    state, flow_run_id = run_flow(reports(storage_path, tmp_path, 3))
    result = state.result()
    assert [row.seq for row in result.history] == [0, 1, 2]
    expected = {f"upload-{seq:06d} digits" for seq in range(3)} | {"gather-reports", "publish-result"}
    found = eventually(
        lambda: task_runs(flow_run_id), lambda runs: expected <= set(runs) and set(runs.values()) == {"Completed"}
    )
    assert set(found) == expected
    assert "ckpt restore" in artifact(result_key("digits")).data


def test_a_failed_upload_in_the_middle_is_a_gap_in_a_green_flow(tmp_path, storage_path):
    """The flow is Completed; the failed report's task run is Failed and its reason is in history and artifact."""
    state, flow_run_id = run_flow(reports(storage_path, tmp_path, 3, fail=(1,)))
    assert state.is_completed()
    rows = list(state.result().history)
    assert [row.state for row in rows] == [ReportState.COMMITTED, ReportState.FAILED, ReportState.COMMITTED]
    assert "the cable is out" in str(rows[1].reason)
    eventually(
        lambda: task_runs(flow_run_id),
        lambda runs: (runs.get("upload-000001 digits"), runs.get("upload-000002 digits")) == ("Failed", "Completed"),
    )
    assert "the cable is out" in artifact(result_key("digits")).data


def test_losing_the_last_checkpoint_makes_the_flow_red(tmp_path, storage_path):
    """The flow is Failed with an error that carries the complete result."""
    state, _ = run_flow(reports(storage_path, tmp_path, 3, fail=(2,)))
    assert state.is_failed()
    with pytest.raises(CheckpointsLostError, match="last checkpoint, report 2") as caught:
        state.result()
    assert len(caught.value.result.history) == 3


def test_red_on_any_failure(tmp_path, storage_path):
    """`red_on='any'` makes a superseded gap red as well."""
    state, _ = run_flow(reports(storage_path, tmp_path, 3, fail=(0,), failure_policy=FailurePolicy(red_on="any")))
    assert state.is_failed()


def test_the_trainers_own_exception_wins_and_uploads_are_drained(tmp_path, storage_path):
    """What was reported before the exception is committed, and the flow fails with that exception."""

    def body() -> None:
        with training_run(RunConfig(name="digits", storage_path=storage_path)):
            report({"loss": 1.0}, make_checkpoint(tmp_path / "c", {"w": b"x"}))
            raise ZeroDivisionError("training broke")

    state, _ = run_flow(body)
    with pytest.raises(ZeroDivisionError):
        state.result()
    left = Result.from_path(f"{storage_path}/digits")
    assert [row.state for row in left.history] == [ReportState.COMMITTED]
    assert "ZeroDivisionError" in str(left.error)


def test_with_task_runs_for_failures_only_a_failed_report_shows_with_its_reason(tmp_path, storage_path):
    """Hundreds of reports stay readable: what went well is in the table, what did not is a task run."""

    def body() -> tuple[Result, object]:
        config = RunConfig(name="digits", storage_path=storage_path)
        with training_run(config, task_runs="failures") as run:
            for index in range(6):
                fn = broken if index == 4 else None
                report({"i": index}, make_checkpoint(tmp_path / f"c{index}", {"w": b"x"}), checkpoint_upload_fn=fn)
        return run.result, FlowRunContext.get().flow_run.id

    state, _ = run_flow(body)
    result, flow_run_id = state.result()
    assert [row.state for row in result.history].count(ReportState.COMMITTED) == 5
    expected = {"gather-reports": "Completed", "publish-result": "Completed", "upload-000004 digits": "Failed"}
    eventually(lambda: task_runs(flow_run_id), lambda runs: runs == expected)


@pytest.mark.parametrize(
    "wrong", [{"task_runs": "some"}, {"task_runs": "failures", "task_runner": ThreadPoolTaskRunner()}]
)
def test_a_switch_that_can_never_work_is_refused_before_anything_happens(storage_path, wrong):
    def body() -> None:
        with training_run(RunConfig(name="digits", storage_path=storage_path), **wrong):
            raise AssertionError("not reached")

    state, _ = run_flow(body)
    with pytest.raises(ConfigError, match="task_run"):
        state.result()


def test_a_retry_of_the_flow_resumes_from_the_newest_commit(tmp_path, storage_path):
    """The second try of the same flow run takes the run over at once and goes on after the commit."""
    resumed = []

    @flow(retries=1, persist_result=False)
    def train() -> Result:
        with training_run(RunConfig(name="digits", storage_path=storage_path)) as run:
            found = ckpt.get_checkpoint()
            resumed.append(None if found is None else found.seq)
            for index in range(0 if found is None else found.seq + 1, 3):
                report({"i": index}, make_checkpoint(tmp_path / f"c{len(resumed)}{index}", {"w": b"x"})).wait(60)
                if len(resumed) == 1 and index == 1:
                    raise ConnectionError("a node went away")
        assert run.result is not None
        return run.result

    result = train()
    assert resumed == [None, 1]
    assert [row.metrics["i"] for row in result.history] == [0, 1, 2]


def test_training_run_works_inside_a_task(tmp_path, storage_path):
    """A task may hold the run; its uploads are task runs of the same flow run."""

    @task
    def train() -> Result:
        return reports(storage_path, tmp_path, 2)()

    state, _ = run_flow(train)
    assert [row.seq for row in state.result().history] == [0, 1]


def test_uploads_overlap_under_the_slots_of_the_process(tmp_path, storage_path):
    """Three uploads meet at a barrier that only three at once can pass; what is published is in order."""
    meeting = threading.Barrier(3)

    def meet(checkpoint: Checkpoint, name: str) -> Checkpoint:
        meeting.wait(60)
        return checkpoint

    def body() -> Result:
        config = RunConfig(
            name="digits",
            storage_path=storage_path,
            upload_config=UploadConfig(max_concurrent_uploads=3, max_pending=12),
        )
        with training_run(config) as run:
            for index in range(12):
                report({"i": index}, make_checkpoint(tmp_path / f"c{index}", {"w": b"x"}), checkpoint_upload_fn=meet)
        assert run.result is not None
        return run.result

    state, _ = run_flow(body)
    assert [row.seq for row in state.result().history] == list(range(12))


def test_run_training_calls_the_function_with_its_settings(tmp_path, storage_path):
    """`run_training` gives `train_loop_config`, and the run is found through `ckpt`."""

    def train_fn(config: dict) -> None:
        for index in range(config["epochs"]):
            ckpt.report({"i": index}, make_checkpoint(tmp_path / f"c{index}", {"w": b"x"}))

    config = TrainConfig(name="named", storage_path=storage_path, train_loop_config={"epochs": 2})
    state, _ = run_flow(lambda: run_training(config, train_fn))
    assert state.result().run == "named"
    assert len(state.result().history) == 2


def test_the_upload_task_works_on_its_own(tmp_path, storage_path):
    """Uploads of another pipeline: map, gather with a failure among them, restore, verify."""
    sources = [make_checkpoint(tmp_path / f"s{index}", {"a/b.bin": os.urandom(100 + index)}) for index in range(3)]

    def body() -> tuple[Result, Path]:
        uploads = [
            upload_checkpoint.submit(
                source, f"{storage_path}/export/{index}", seq=index, metrics={"i": index},
                checkpoint_upload_fn=broken if index == 1 else None,
            )
            for index, source in enumerate(sources)
        ]  # fmt: skip
        list(as_completed(uploads, timeout=120))
        result = gather_reports(allow_failure(uploads))
        verify_checkpoint(result.best_checkpoints[0][0])
        return result, restore_checkpoint(result.best_checkpoints[1][0], tmp_path / "restored")

    state, _ = run_flow(body)
    result, restored = state.result()
    assert [row.state for row in result.history] == [ReportState.COMMITTED, ReportState.FAILED, ReportState.COMMITTED]
    assert (restored / "a/b.bin").read_bytes() == (Path(sources[2].uri) / "a/b.bin").read_bytes()
    assert Path(f"{storage_path}/export/2.manifest.json").exists()


def test_the_upload_task_raises_with_the_record(tmp_path, storage_path):
    """Called directly it raises UploadFailedError, and nothing stays that looks like a checkpoint."""
    source = make_checkpoint(tmp_path / "s", {"w": b"x"})

    def body() -> None:
        upload_checkpoint(source, f"{storage_path}/export/0", checkpoint_upload_fn=broken)

    state, _ = run_flow(body)
    with pytest.raises(UploadFailedError, match="the cable is out"):
        state.result()
    assert not Path(f"{storage_path}/export/0.manifest.json").exists()


def test_standalone_retention_deletes_the_manifest_and_the_listed_files(tmp_path, storage_path):
    """`gather_reports(retention=KeepLast(1))` leaves the newest export only."""
    sources = [make_checkpoint(tmp_path / f"s{index}", {"w": bytes([index])}) for index in range(3)]

    def body() -> Result:
        uploads = [upload_checkpoint(source, f"{storage_path}/export/{i}", seq=i) for i, source in enumerate(sources)]
        return gather_reports(uploads, retention=KeepLast(1))

    state, _ = run_flow(body)
    assert [checkpoint.path for checkpoint, _ in state.result().best_checkpoints] == [f"{storage_path}/export/2"]
    left = {path.relative_to(storage_path).as_posix() for path in Path(storage_path).rglob("*") if path.is_file()}
    assert left == {"export/2/w", "export/2.manifest.json"}


def test_a_flipped_byte_fails_the_verify_task(tmp_path, storage_path):
    """The task run fails, naming the file."""
    run_flow(reports(storage_path, tmp_path, 1))
    path = Path(ckpt.resolve(f"{storage_path}/digits@0").uri) / "weights"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    state, _ = run_flow(lambda: verify_checkpoint(f"{storage_path}/digits@latest"))
    with pytest.raises(CorruptCheckpointError, match="weights"):
        state.result()


def test_the_prune_task_leaves_what_must_stay(tmp_path, storage_path):
    """`KeepLast(1)` from outside keeps the latest, and the best by the run's score."""
    config = CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="max")
    run_flow(reports(storage_path, tmp_path, 4, checkpoint_config=config))
    state, _ = run_flow(lambda: prune_checkpoints(f"{storage_path}/digits", KeepLast(1)))
    assert [Path(item.uri).name for item in state.result()] == ["checkpoint_000001-a1", "checkpoint_000002-a1"]
    assert [item.seq for item in ckpt.committed(f"{storage_path}/digits")] == [0, 3]


def test_a_dropped_report_is_a_skipped_task_run(tmp_path, storage_path):
    """With `when_full='drop'` the oldest waiting report becomes SKIPPED, in the history and in the UI."""
    gate = threading.Event()

    def held(checkpoint: Checkpoint, name: str) -> Checkpoint:
        assert gate.wait(60)
        return checkpoint

    def body() -> Result:
        limits = UploadConfig(max_concurrent_uploads=1, max_pending=2, when_full="drop")
        with training_run(RunConfig(name="digits", storage_path=storage_path, upload_config=limits)) as run:
            first = report({"i": 0}, make_checkpoint(tmp_path / "c0", {"w": b"x"}), checkpoint_upload_fn=held)
            eventually(lambda: first.state, lambda state: state is ReportState.UPLOADING)
            for index in (1, 2):
                report({"i": index}, make_checkpoint(tmp_path / f"c{index}", {"w": b"x"}))
            gate.set()
            sync = report(
                {"i": 3},
                make_checkpoint(tmp_path / "c3", {"w": b"x"}),
                checkpoint_upload_mode=CheckpointUploadMode.SYNC,
            )
            assert sync.state is ReportState.COMMITTED
        assert run.result is not None
        return run.result

    state, flow_run_id = run_flow(body)
    assert [row.state.value for row in state.result().history] == ["committed", "skipped", "committed", "committed"]
    eventually(lambda: task_runs(flow_run_id), lambda runs: runs.get("upload-000001 digits") == "Skipped")


def test_validations_are_task_runs_and_a_failed_one_leaves_the_flow_green(tmp_path, storage_path):
    """Named after the checkpoint; the metrics re-rank, and the state tells how each ended."""

    def validate(checkpoint, split):
        if checkpoint.seq == 1:
            raise ValueError("no samples")
        return {split: 1 - checkpoint.seq / 10}

    best = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="dev")

    def body() -> Result:
        config = RunConfig(name="digits", storage_path=storage_path, validation_fn=validate, checkpoint_config=best)
        with training_run(config) as run:
            for n in range(3):
                task = ValidationTaskConfig(fn_kwargs={"split": "dev"})
                report({"n": n}, make_checkpoint(tmp_path / f"c{n}"), validation=task)
        return run.result

    state, flow_run_id = run_flow(body)
    assert state.is_completed()
    assert [metrics for _, metrics in state.result().best_checkpoints] == [{"n": 0, "dev": 1.0}, {"n": 2, "dev": 0.8}]
    expected = {
        "validate-000000 digits": "Completed",
        "validate-000001 digits": "Validation Failed",
        "validate-000002 digits": "Completed",
    }
    eventually(lambda: task_runs(flow_run_id), lambda runs: expected.items() <= runs.items())


def test_a_validation_function_of_the_form_is_given_by_name(tmp_path, storage_path, monkeypatch):
    """As the training function; a bad name is refused before anything is trained."""
    (tmp_path / "my_validation.py").write_text("def accuracy(checkpoint):\n    return {'accuracy': 0.5}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def loop():
        report({}, make_checkpoint(tmp_path / "ck"), validation=True)

    config = TrainConfig(name="digits", storage_path=storage_path, validation_fn="my_validation:accuracy")
    state, _ = run_flow(lambda: run_training(config, loop))
    assert state.result().metrics == {"accuracy": 0.5}
    missing = config.model_copy(update={"validation_fn": "my_validation:precision"})
    state, _ = run_flow(lambda: run_training(missing, loop))
    with pytest.raises(ConfigError, match="precision"):
        state.result()
