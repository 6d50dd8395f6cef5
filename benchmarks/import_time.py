"""How long an interpreter with `import ckpt` lives, beside a bare one and others: medians of fresh processes.

    python benchmarks/import_time.py [rounds]

The statements take turns, so that a busy moment of the machine hits all of them.
"""

import statistics
import subprocess
import sys
import time

STATEMENTS = ("pass", "import json", "import ckpt", "import ckpt_tasks", "import prefect", "import torch")


def wall_ms(statement: str) -> float:
    """Milliseconds from the start of a fresh interpreter that runs `statement` to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=120)
    return (time.perf_counter() - start) * 1e3


def main(rounds: int = 11) -> None:
    """Measure after one warm-up round that fills the page cache and the bytecode caches."""
    times: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for measured in [False] + [True] * rounds:
        for statement in STATEMENTS:
            ms = wall_ms(statement)
            if measured:
                times[statement].append(ms)
    bare = statistics.median(times["pass"])
    print(f"{'statement':<20}{'median ms':>10}{'min':>8}{'max':>8}{'over bare python':>18}   ({rounds} rounds)")
    for statement, ms in times.items():
        median = statistics.median(ms)
        print(f"{statement:<20}{median:>10.1f}{min(ms):>8.1f}{max(ms):>8.1f}{median - bare:>+18.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
