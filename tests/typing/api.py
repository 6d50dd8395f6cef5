"""The public API as a user writes it. Checked by mypy (strict) and pyright, never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prefect import allow_failure, flow
from prefect.futures import PrefectFuture

import ckpt
from ckpt import (
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    FailurePolicy,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepYounger,
    Report,
    ReportedCheckpoint,
    ReportHandle,
    ReportRecord,
    ReportState,
    Result,
    Run,
    RunConfig,
    Storage,
    UploadConfig,
    checkpoint_dir,
    committed,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    list_runs,
    open_run,
    open_storage,
    pin,
    record_evaluation,
    report,
    resolve,
    stop_requested,
)
from ckpt.uploading import upload
from ckpt_tasks import (
    EvaluateConfig,
    PruneConfig,
    StandaloneUpload,
    TrainConfig,
    gather_reports,
    prune_checkpoints,
    publish_result,
    restore_checkpoint,
    run_evaluation,
    run_prune,
    run_training,
    run_upload,
    training_run,
    upload_checkpoint,
    verify_checkpoint,
)
from ckpt_tasks.form import Retention

CONFIG = RunConfig(
    name="typed",
    storage_path=Path("runs"),
    credentials="env",
    storage_options={"client_kwargs": {"region_name": "eu-west-1"}},
    checkpoint_config=CheckpointConfig(
        checkpoint_score_attribute="loss", checkpoint_score_order="min", retention=KeepLast(2) | KeepEvery(10)
    ),
    upload_config=UploadConfig(max_concurrent_uploads=3, when_full="drop", memory_budget="1GiB"),
    failure_policy=FailurePolicy(stop_after=None, red_on="any"),
    resume="best",
)


def wait_for_it(checkpoint: Checkpoint, name: str) -> Checkpoint:
    return Checkpoint(f"s3://bucket/{name}")


async def wait_async(checkpoint: Checkpoint, name: str) -> Checkpoint:
    return checkpoint


def reporting() -> None:
    handle: ReportHandle = report({"loss": 0.1, "nested": {"a": 1}})
    report({"loss": 0.1}, Checkpoint.from_directory("x"), "name", CheckpointUploadMode.SYNC, False, wait_for_it, False)
    report(
        metrics={"loss": 0.1},
        checkpoint=Checkpoint("s3://bucket/key", "profile:team"),
        checkpoint_dir_name="name",
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
        checkpoint_upload_fn=wait_async,
        validation=False,
    )
    seq: int = handle.seq
    state: ReportState = handle.state
    record: ReportRecord = handle.wait(timeout=10.0)
    print(seq, state, record.checkpoint, record.timings.upload)
    with checkpoint_dir() as folder:
        (folder / "model.pt").write_bytes(b"")
    found: Checkpoint | None = get_checkpoint()
    if found is not None:
        with found.as_directory() as local:
            path: Path = local
            print(path)
        metadata: dict[str, Any] = found.get_metadata()
        found.set_metadata({**metadata, "note": "x"})
        sizes: list[int] = [file.size for file in found.files()]
        print(found.uri, found.path, found.seq, found.metrics, sizes)
    everything: list[ReportedCheckpoint] = get_all_reported_checkpoints(
        CheckpointConsistencyMode.COMMITTED, timeout_s=1.0
    )
    context = get_context()
    where: str = context.get_storage().build_checkpoint_path_from_name("name")
    size: int = context.get_world_size() + context.get_world_rank() + context.get_local_rank() + context.get_node_rank()
    stop: bool = stop_requested()
    print(everything, where, size, stop, context.get_experiment_name())


def without_prefect() -> Result:
    pool = ThreadPoolExecutor(4)
    runs: list[Run] = []

    def submit(item: Report) -> Future[ReportRecord]:
        return pool.submit(upload, item, runs[0].destination)

    with open_run(CONFIG, submit=submit) as run:
        runs.append(run)
        run.report({"loss": 1.0})
    return run.result


def reading(result: Result) -> None:
    best: Checkpoint = result.get_best_checkpoint("loss", "min")
    pairs: list[tuple[Checkpoint, dict[str, Any]]] = result.best_checkpoints
    rows: Sequence[ReportRecord] = result.history
    again: Result = Result.from_path(result.path)
    latest: Checkpoint = resolve(f"{result.path}@latest")
    newer: list[Checkpoint] = committed(result.path, after=3)
    names: list[str] = [run.name for run in list_runs("runs")]
    record_evaluation(f"{result.path}@best:loss:min", {"accuracy": 0.9}, source="nightly")
    pin(f"{result.path}@12")
    storage: Storage = open_storage("s3://bucket/prefix")
    print(
        best,
        pairs,
        rows[0],
        rows[1:],
        again,
        latest,
        newer,
        names,
        storage.uri,
        KeepBest(2, "loss", "min"),
        KeepYounger(60),
    )


@flow
def training(epochs: int) -> Result:
    with training_run(CONFIG) as run:
        for _ in range(epochs):
            run.report({"loss": 0.1})
    return run.result


@flow
async def training_beside(epochs: int) -> Result:
    async with training_run(CONFIG) as run:
        for _ in range(epochs):
            run.report(
                {"loss": 0.1}, Checkpoint("/tmp/c"), validation=ckpt.ValidationTaskConfig(fn_kwargs={"split": "dev"})
            )
    return run.result


@flow
def trained(config: TrainConfig) -> Result:
    def train_fn(settings: Mapping[str, Any]) -> None:
        ckpt.report({"epochs": settings["epochs"]})

    return run_training(config, train_fn)


@flow
def reusing() -> Result:
    submitted = upload_checkpoint.submit(Checkpoint.from_directory("x"), "s3://bucket/exports/0", seq=0)  # pyright: ignore[reportUnknownMemberType]  # Prefect's overloads
    uploads: list[PrefectFuture[ReportRecord]] = [submitted]
    gathered: Result = gather_reports(allow_failure(uploads), retention=KeepLast(3))
    folder: Path = restore_checkpoint("s3://bucket/runs/digits@best", "restored")
    verify_checkpoint(f"{folder}")
    prune_checkpoints("s3://bucket/runs/digits", KeepLast(3))
    key: str = publish_result(gathered)
    print(key)
    return gathered


@flow
def jobs(ref: str) -> list[Checkpoint]:
    def score(folder: Path) -> Mapping[str, float]:
        return {"files": float(len(list(folder.iterdir())))}

    scores: dict[str, Any] = run_evaluation(ref, EvaluateConfig(evaluate_fn="package.module:score"), score)
    record: ReportRecord = run_upload(StandaloneUpload(source="/a", destination="s3://bucket/b", metrics=scores))
    print(record)
    return run_prune(PruneConfig(run="s3://bucket/runs/digits", retention=Retention(keep_last=3)))
