"""Uploads that overlap: 12 reports whose uploads take random times, some ten times longer, one at a time and three at once.

Prints both wall times, their ratio, the order in which uploads ended, and the order in which reports were published.

    python benchmarks/overlap.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

from ckpt import Checkpoint, RunConfig, UploadConfig, open_run, report

REPORTS = 12


def measure(slots: int, seed: int) -> tuple[float, list[int], list[int]]:
    """Seconds of one run, the seqs in the order their uploads ended, and in the order they were published."""
    times = random.Random(seed)
    pauses = [times.choice((0.05, 0.1, 0.5)) for _ in range(REPORTS)]
    ended: list[int] = []

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        threading.Event().wait(pauses[int(name)])
        ended.append(int(name))
        return checkpoint

    with tempfile.TemporaryDirectory() as folder:
        limits = UploadConfig(max_concurrent_uploads=slots, max_pending=REPORTS)
        began = time.perf_counter()
        with open_run(RunConfig(name="overlap", storage_path=f"{folder}/runs", upload_config=limits)) as run:
            for index in range(REPORTS):
                source = Path(folder) / f"c{index}"
                source.mkdir()
                (source / "model.bin").write_bytes(b"weights")
                report({}, Checkpoint.from_directory(source), str(index), checkpoint_upload_fn=upload)
        return time.perf_counter() - began, ended, [row.seq for row in run.result.history]


def main() -> None:
    """Measure in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    ones, threes = [], []
    for seed in range(repeats):
        ones.append(measure(1, seed)[0])
        took, ended, published = measure(3, seed)
        threes.append(took)
        print(f"seed {seed}: uploads ended {ended}, published {published}")
    ratios = [one / three for one, three in zip(ones, threes, strict=True)]
    print(f"one at a time  median {statistics.median(ones):.2f} s")
    print(f"three at once  median {statistics.median(threes):.2f} s")
    print(f"ratio          median {statistics.median(ratios):.2f}, worst {min(ratios):.2f}")


if __name__ == "__main__":
    main()
