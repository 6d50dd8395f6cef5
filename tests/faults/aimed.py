"""Aimed crashes: a small run is stopped dead after its k-th storage operation, for every k, and started again.

As a program, from the root of the checkout:

    python tests/faults/aimed.py --store memory
    python tests/faults/aimed.py --store local

Nothing reaches the store after the k-th operation, from whatever thread. Then a new attempt runs to the end on what is
there. Three plans: the first attempt is stopped; the first is stopped in its middle and the second, which adopts, is stopped
at k; the garbage collection after a crash is stopped at k.
"""

from __future__ import annotations

import argparse
import contextvars
import logging
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

from ckpt import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailurePolicy,
    KeepLast,
    Report,
    ReportRecord,
    ReportState,
    Result,
    Run,
    RunConfig,
    UploadConfig,
    checkpoint_dir,
    committed,
    get_checkpoint,
    open_run,
    open_storage,
    opening,
    reading,
    resolve,
)
from ckpt.collecting import collect
from ckpt.errors import CheckpointNotFoundError, CkptError, UploadFailedError
from ckpt.layout import CommitId
from ckpt.reading import open_run_files
from ckpt.storage import Storage
from ckpt.testing import WrappedStorage
from ckpt.uploading import upload
from ckpt.verifying import verify

EPOCHS = 6
KEPT = 2
ASYNC, SYNC = CheckpointUploadMode.ASYNC, CheckpointUploadMode.SYNC
MODES = (None, ASYNC, SYNC, None, ASYNC, SYNC)
FAILING = 3
"""The epoch whose upload fails by itself."""
METRICS_ONLY = (1, 4)
"""Epochs followed by a report without a checkpoint."""


class Killed(BaseException):
    """The process is dead; nothing it does reaches the store any more."""


class Fuse:
    """Lets `after` storage operations happen, and then none."""

    def __init__(self, after: float = float("inf")) -> None:
        self._left = after
        self._lock = threading.Lock()
        self.used = 0
        self.blown = False

    def spend(self) -> None:
        with self._lock:
            if self.used >= self._left:
                self.blown = True
                raise Killed
            self.used += 1


class Mortal(WrappedStorage):
    """A store that a process uses until its fuse blows."""

    def __init__(self, inner: Storage, fuse: Fuse) -> None:
        super().__init__(inner)
        self._fuse = fuse

    def around(self, verb: str, key: str, work: Callable[[], Any], progress: Any = None) -> Any:
        self._fuse.spend()
        return work()


@dataclass(slots=True)
class Figures:
    """What the harness found."""

    points: int = 0
    """Crashes."""
    torn: int = 0
    """Checkpoints that a reader saw and that were not whole."""
    lost: int = 0
    """Acknowledged commits that were gone, not by retention."""
    collected: int = 0
    """Locations that garbage collection removed."""
    problems: list[str] = field(default_factory=list)
    stop_when_found: bool = False
    """Whether the first torn or lost one is enough."""

    @property
    def enough(self) -> bool:
        return self.stop_when_found and bool(self.torn or self.lost)

    def __str__(self) -> str:
        return f"{self.points} crash points, torn {self.torn}, lost {self.lost}, {self.collected} orphans collected"


@dataclass(slots=True)
class Life:
    """One process: an attempt of the run, from its start to its end or death."""

    acked: list[CommitId] = field(default_factory=list)
    """Commits whose upload was told that they are made."""
    published: list[int] = field(default_factory=list)
    """Seqs as observers were told of them, adopted ones first."""
    resumed: int | None = None
    first_seq: int = 0
    fuse: Fuse = field(default_factory=Fuse)

    @property
    def died(self) -> bool:
        return self.fuse.blown


def live(root: str, fuse: Fuse) -> Life:
    """Train to the end, or until the fuse blows."""
    life = Life(fuse=fuse)
    config = RunConfig(
        name="run", storage_path=root, checkpoint_config=CheckpointConfig(retention=KeepLast(KEPT)),
        upload_config=UploadConfig(max_concurrent_uploads=2), failure_policy=FailurePolicy(stop_after=None, red_on="nothing"),
    )  # fmt: skip
    runs: list[Run] = []

    def work(report: Report) -> ReportRecord:
        record = upload(report, runs[0].destination)
        if record.state is ReportState.COMMITTED:
            life.acked.append(CommitId(record.seq, record.attempt))
        return record

    try:
        with mortal(fuse), ThreadPoolExecutor(4) as pool:

            def submit(report: Report) -> Future[ReportRecord]:
                return pool.submit(contextvars.copy_context().run, work, report)

            with open_run(config, submit, observers=[lambda record: life.published.append(record.seq)]) as run:
                runs.append(run)
                train(run, life)
    except (Killed, CkptError):
        if not fuse.blown:
            raise
    return life


def train(run: Run, life: Life) -> None:
    """The training loop: it goes on after the epoch that it restored."""
    restored = get_checkpoint()
    life.resumed, life.first_seq = None if restored is None else restored.seq, run.publisher.published
    for epoch in range(0 if restored is None else int(restored.metrics["epoch"]) + 1, EPOCHS):
        with checkpoint_dir() as folder:
            (folder / "epoch").write_text(str(epoch))
            (folder / "more").mkdir()
            (folder / "more" / "weights").write_bytes(bytes([epoch]) * 1000)
            fn = _failing if epoch == FAILING else None
            try:
                run.report({"epoch": epoch}, Checkpoint(folder), None, MODES[epoch], checkpoint_upload_fn=fn)
            except UploadFailedError:
                if not life.fuse.blown:
                    raise
        if epoch in METRICS_ONLY:
            run.report({"epoch": epoch, "only": "metrics"})


def _failing(checkpoint: Checkpoint, name: str) -> Checkpoint:
    raise OSError("this upload always fails")


@contextmanager
def mortal(fuse: Fuse) -> Iterator[None]:
    """Everything that opens a store for a run, or to read one, uses the fuse; threads that die of it die quietly."""
    hook = threading.excepthook

    def quiet(args: Any) -> None:
        if not issubclass(args.exc_type, Killed):
            hook(args)

    plain_run, plain_reading = opening._open, reading.open_storage
    with (
        mock.patch.object(opening, "_open", lambda config, uri: Mortal(plain_run(config, uri), fuse)),
        mock.patch.object(
            reading, "open_storage", lambda *args, **kwargs: Mortal(plain_reading(*args, **kwargs), fuse)
        ),
        mock.patch.object(threading, "excepthook", quiet),
    ):
        yield


# ---------------------------------------------------------------------------------------------------------- the checks


def look(uri: str, figures: Figures, acked: list[CommitId]) -> int | None:
    """What any reader sees after a crash: whole checkpoints, and no acknowledged one lost. Returns the newest's seq."""
    try:
        seen = committed(uri)
        newest = resolve(uri)
    except CheckpointNotFoundError:
        figures.lost += len(acked)
        return None
    for checkpoint in seen:
        if not verify(checkpoint).ok:
            figures.torn += 1
    seqs = [checkpoint.seq for checkpoint in seen]
    for commit in acked:
        newer = [seq for seq in seqs if seq > commit.seq]
        figures.lost += commit.seq not in seqs and len(newer) < KEPT
    with tempfile.TemporaryDirectory() as folder:
        restored = newest.to_directory(Path(folder) / "restored")
        figures.torn += (restored / "epoch").read_text() != str(newest.metrics["epoch"])
    return newest.seq


def check_life(life: Life, newest: int | None) -> Iterator[str]:
    """What must be right about an attempt that ran to its end, after one that left `newest`."""
    if life.resumed != newest:
        yield f"resumed from {life.resumed}, the newest was {newest}"
    own = [seq for seq in life.published if seq >= life.first_seq]
    if life.published != sorted(set(life.published)) or own != list(range(life.first_seq, life.first_seq + len(own))):
        yield f"published {life.published}"


def check_result(uri: str, life: Life) -> Iterator[str]:
    """What must be right about the run at its end."""
    result = Result.from_path(uri)
    rows = [(row.seq, row.state) for row in result.history]
    if [seq for seq, _ in rows] != list(range(len(rows))):
        yield f"rows {rows}"
    if result.checkpoint is None or result.checkpoint.metrics["epoch"] != EPOCHS - 1:
        yield f"the newest at the end is {result.checkpoint}"
    elif result.checkpoint.seq >= len(rows):
        yield f"rows end at {len(rows)}, the newest commit is {result.checkpoint.seq}"
    if any(seq >= life.first_seq for seq, state in rows if state is ReportState.LOST):
        yield f"lost without a crash: {rows}"
    if not all(state.final for _, state in rows):
        yield f"not final: {rows}"
    if len(result.best_checkpoints) != KEPT:
        yield f"{len(result.best_checkpoints)} are retained"


def check_collection(uri: str, figures: Figures) -> Iterator[str]:
    """Garbage collection removes the files that no manifest names, and nothing else."""
    store = open_storage(uri)
    before = {entry.key for entry in store.list()}
    named = tuple(f"{manifest.location}/" for manifest in open_run_files(uri).manifests())
    expected = {key for key in before if key.startswith("checkpoints/") and not key.startswith(named)}
    found = collect(uri)
    gone = before - {entry.key for entry in store.list()}
    figures.collected += len(found.locations)
    if gone != expected or found.files != len(expected):
        yield f"collected {sorted(gone)}, the orphans were {sorted(expected)}"
    for checkpoint in committed(uri):
        figures.torn += not verify(checkpoint).ok


def after_crash(uri: str, root: str, figures: Figures, acked: list[CommitId], where: str) -> None:
    """Look, start again, run to the end, look again, collect."""
    figures.points += 1
    newest = look(uri, figures, acked)
    life = live(root, Fuse())
    problems = [*check_life(life, newest), *check_result(uri, life)]
    look(uri, figures, [*acked, *life.acked])
    problems += check_collection(uri, figures)
    figures.problems += [f"{where}: {problem}" for problem in problems]


# ----------------------------------------------------------------------------------------------------------- the plans


def first_attempt(new_root: Callable[[], str], figures: Figures) -> None:
    """The first attempt is stopped after each of its operations."""
    for k in _until_survival():
        root = new_root()
        life = live(root, Fuse(k))
        if not life.died or figures.enough:
            return
        after_crash(f"{root}/run", root, figures, life.acked, f"first attempt stopped after {k}")


def second_attempt(new_root: Callable[[], str], figures: Figures) -> None:
    """The first attempt is stopped in its middle, and the second, which adopts what it left, after each operation."""
    middle = live(new_root(), Fuse()).fuse.used // 2
    for k in _until_survival():
        root = new_root()
        first = live(root, Fuse(middle + k % 5))
        second = live(root, Fuse(k))
        if not second.died:
            return
        after_crash(f"{root}/run", root, figures, first.acked + second.acked, f"second attempt stopped after {k}")


def collection(new_root: Callable[[], str], figures: Figures) -> None:
    """A garbage collection after a crash is stopped after each of its operations."""
    middle = live(new_root(), Fuse()).fuse.used // 2
    for k in _until_survival():
        root = new_root()
        life, fuse = live(root, Fuse(middle + k % 5)), Fuse(k)
        try:
            with mortal(fuse):
                collect(f"{root}/run")
        except Killed:
            pass
        else:
            return
        after_crash(f"{root}/run", root, figures, life.acked, f"collection stopped after {k}")


PLANS = (first_attempt, second_attempt, collection)


def _until_survival() -> Iterator[int]:
    yield from range(1, 2000)
    raise AssertionError("the run never survives")


@contextmanager
def roots(store: str) -> Iterator[Callable[[], str]]:
    """Gives a fresh storage path each time it is called."""
    if store == "memory":
        yield lambda: f"memory://{uuid4().hex}"
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-aimed-") as folder:
        made: list[Path] = []

        def new() -> str:
            for old in made:
                shutil.rmtree(old, ignore_errors=True)
            made[:] = [Path(folder) / uuid4().hex]
            return str(made[0])

        yield new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["memory", "local"], default="memory")
    logging.disable(logging.CRITICAL)
    figures = Figures()
    with roots(parser.parse_args().store) as new_root:
        for plan in PLANS:
            before = figures.points
            plan(new_root, figures)
            print(f"{plan.__name__}: {figures.points - before} crash points")
    print(figures)
    print("\n".join(figures.problems) or "no problems")
    return bool(figures.torn or figures.lost or figures.problems)


if __name__ == "__main__":
    sys.exit(main())
