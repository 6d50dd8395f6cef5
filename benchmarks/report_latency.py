"""How long `report()` holds up the training loop: 200 ASYNC reports of 1 MB under Prefect, with a server running.

Beside it, in the same process and on the same files, what a loop pays that copies its checkpoint itself:
`shutil.copytree` to the same storage. The first lines say what was measured; the goals are p50 <= 1 ms and p99 <= 10
ms.

    python benchmarks/report_latency.py [--reports 200] [--files 1] [--kilobytes 1000] [--storage DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from prefect import flow

from ckpt import Checkpoint, CheckpointUploadMode, RunConfig, UploadConfig, report
from ckpt_tasks import embedded_server, training_run

STEP = 0.05
"""Seconds of a pretended training step between reports, so that uploads run beside the loop and not behind it."""


def save(folder: Path, files: int, size: int) -> None:
    """A checkpoint of `files` files of `size` bytes."""
    folder.mkdir(parents=True)
    for index in range(files):
        (folder / f"{index:04d}.bin").write_bytes(os.urandom(size))


@flow(name="report-latency", log_prints=False)
def measure(storage: str, scratch: str, reports: int, files: int, size: int) -> list[float]:
    """Seconds of each `report()` call."""
    calls = []
    config = RunConfig(name="latency", storage_path=storage, upload_config=UploadConfig(max_pending=16))
    with training_run(config):
        for index in range(reports):
            folder = Path(scratch) / f"c{index}"
            save(folder, files, size)
            began = time.perf_counter()
            report(
                {"loss": 1.0},
                Checkpoint.from_directory(folder),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            )
            calls.append(time.perf_counter() - began)
            step()
    return calls


def step() -> None:
    """Compute for a while, as a training step would; it wants the interpreter lock, like the uploads."""
    until = time.perf_counter() + STEP
    while time.perf_counter() < until:
        sum(range(1000))


def copying(storage: str, scratch: str, reports: int, files: int, size: int) -> list[float]:
    """Seconds of each `copytree` in place of a report."""
    calls = []
    for index in range(reports):
        folder = Path(scratch) / f"p{index}"
        save(folder, files, size)
        began = time.perf_counter()
        shutil.copytree(folder, Path(storage) / "copied" / str(index))
        calls.append(time.perf_counter() - began)
        step()
    return calls


def show(label: str, calls: list[float]) -> None:
    """One line of milliseconds."""
    ordered = sorted(calls)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(
        f"{label:32} p50 {1000 * statistics.median(ordered):8.3f} ms   p99 {1000 * p99:8.3f} ms   "
        f"max {1000 * ordered[-1]:8.3f} ms   n {len(ordered)}"
    )


def main() -> None:
    """Measure both, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=200)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--kilobytes", type=int, default=1000, help="of one checkpoint")
    parser.add_argument("--storage", help="default: a temporary folder")
    options = parser.parse_args()
    size = options.kilobytes * 1000 // options.files
    print(f"{options.reports} reports, {options.files} files of {size} bytes each")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as scratch:
        storage = options.storage or f"{scratch}/runs"
        with embedded_server():
            calls = measure(storage, scratch, options.reports, options.files, size)
        show("report(), ASYNC", calls)
        show("shutil.copytree in the loop", copying(storage, scratch, options.reports, options.files, size))


if __name__ == "__main__":
    main()
