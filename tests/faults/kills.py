"""Random kills: a real training program is killed at a random instant, looked at from outside, and started again.

As a program, from the root of the checkout:

    python tests/faults/kills.py --kills 100 --seed 1 --store local
    python tests/faults/kills.py --kills 100 --seed 1 --store moto --engine prefect

The program (little_training.py) is a process of its own that gets SIGKILL; the store, moto in this process or rclone's
gateway or a folder, survives it. The instant is random: after so many facts that the program notes, and a moment.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from little_training import KEPT, contents, digest, metrics_of
from servers import S3Server, free_port, stop, wait_for

from ckpt import Checkpoint, ReportState, Result, committed, open_storage, resolve
from ckpt.collecting import collect
from ckpt.errors import CheckpointNotFoundError, ObjectNotFoundError
from ckpt.verifying import verify

PROGRAM = Path(__file__).with_name("little_training.py")
EPOCHS = {"local": 24, "moto": 12, "rclone": 12}
"""Of one run, by the store. A life is killed after at most so many facts; each epoch has two or three."""
OPENING = {"threads": 0.4, "prefect": 2.5}
"""Seconds in which a program that has noted nothing yet is killed; between later facts there are milliseconds."""
MOMENT = 0.06
"""Seconds in which it is killed after a later fact."""
COLLECTED = 0.3
"""Share of the crashes after which garbage is collected at once, and not only at the end of the run."""


class Place(NamedTuple):
    """Where runs go: a store that survives the program."""

    root: str
    env: Mapping[str, str]
    """What the program needs in its environment to reach it."""
    epochs: int
    """Of one run."""


class Acked(NamedTuple):
    """A commit that the program was told of."""

    seq: int
    attempt: int
    epoch: int
    digest: str

    @property
    def merit(self) -> tuple[float, int]:
        """Retention lets go what others have more of."""
        return metrics_of(self.epoch)["score"], self.seq


@dataclass(slots=True)
class Figures:
    """What the harness found."""

    kills: int = 0
    starts: int = 0
    runs: int = 0
    """Trained to their end."""
    looked_at: int = 0
    """Checkpoints that a reader saw and every byte of which was compared."""
    torn: int = 0
    """Of those, not whole."""
    acked: int = 0
    """Commits that the program was told of."""
    lost: int = 0
    """Of those, gone, and not by retention."""
    resumed: int = 0
    """Starts that went on from a checkpoint."""
    rows_lost: int = 0
    """Reports that a start found neither committed nor given up."""
    orphans: int = 0
    """Files that no manifest names."""
    removed: int = 0
    """Of those, removed by garbage collection."""
    problems: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.torn or self.lost or self.orphans != self.removed or self.problems)

    def __str__(self) -> str:
        return (
            f"kills {self.kills}, restarts {self.starts - self.runs}, runs {self.runs}, torn {self.torn} of "
            f"{self.looked_at} looked at, lost {self.lost} of {self.acked} acknowledged, resumed {self.resumed}, "
            f"LOST rows {self.rows_lost}, orphan files found {self.orphans}, removed {self.removed}, "
            f"problems {len(self.problems)}"
        )


# -------------------------------------------------------------------------------------------------------- the processes


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of the program, from its start to its end or death, as its notes tell it."""

    code: int
    """0: it ended by itself, and well; -9: it was killed."""
    facts: list[dict[str, Any]]
    errors: str
    """The end of what it wrote to standard error."""

    def of(self, fact: str) -> list[dict[str, Any]]:
        """The facts of one kind."""
        return [found for found in self.facts if found["fact"] == fact]

    @property
    def acked(self) -> list[Acked]:
        """The commits it was told of."""
        return [Acked(f["seq"], f["attempt"], f["epoch"], f["digest"]) for f in self.of("acked")]


def live(place: Place, name: str, folder: Path, *, engine: str, facts: int | None, moment: float) -> Life:
    """Start the program, and kill it `moment` seconds after it has noted `facts` facts (None: never)."""
    notes, errors = folder / "notes.jsonl", folder / "stderr.txt"
    notes.unlink(missing_ok=True)
    command = [sys.executable, str(PROGRAM), "--storage", place.root, "--name", name, "--engine", engine]
    command += ["--epochs", str(place.epochs), "--notes", str(notes)]
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, **place.env, "TMPDIR": str(folder / "tmp")}
    with errors.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment
        )
    assert process.stdout is not None
    with process.stdout:
        try:
            if facts is not None and all(process.stdout.readline() for _ in range(1 + facts)):
                time.sleep(moment)  # the random instant; nothing waits for anything here
                process.kill()
            while process.stdout.read(4096):
                pass
            process.wait()
        finally:
            process.kill()
            process.wait()
    lines = notes.read_bytes().splitlines(keepends=True) if notes.exists() else []
    return Life(
        code=process.returncode,
        facts=[json.loads(line) for line in lines if line.endswith(b"\n")],
        errors=errors.read_text(errors="replace")[-2000:],
    )


def hunt(
    place: Place, figures: Figures, *, kills: int, seed: int, engine: str = "threads", seconds: float = float("inf")
) -> None:
    """Kill `kills` lives, or as many as `seconds` allow, of as many runs as that takes; each is then trained to its end."""
    chance, target, deadline = random.Random(f"{seed} {engine}"), figures.kills + kills, time.monotonic() + seconds
    while figures.kills < target and time.monotonic() < deadline:
        with tempfile.TemporaryDirectory(prefix="ckpt-kills-") as folder:
            name = f"{engine}-{seed}-{figures.runs}"
            one_run(place, name, Path(folder), figures, target=target, chance=chance, engine=engine)
        if figures.bad:
            return


def one_run(
    place: Place, name: str, folder: Path, figures: Figures, *, target: int, chance: random.Random, engine: str
) -> None:
    """One run, killed again and again until it survives or there were kills enough."""
    uri, acked, newest = f"{place.root}/{name}", [], None
    while True:
        facts = chance.randrange(place.epochs) if figures.kills < target else None
        moment = chance.uniform(0, MOMENT if facts else OPENING[engine])
        life = live(place, name, folder, engine=engine, facts=facts, moment=moment)
        figures.starts += 1
        acked += life.acked
        figures.acked += len(life.acked)
        where = f"{name}, start {figures.starts}"
        figures.problems += [f"{where}: {problem}" for problem in check_life(life, newest, figures)]
        if life.code == 0:
            break
        if life.code != -9:
            figures.problems.append(f"{where} ended with {life.code}: {life.errors}")
            return
        figures.kills += 1
        settle(place.root)
        newest = look(uri, figures, acked)
        problems = list(check_rows(uri, acked))
        if chance.random() < COLLECTED and newest is not None:
            problems += check_collection(uri, figures)
            newest = look(uri, figures, acked)
        figures.problems += [f"{where}: {problem}" for problem in problems]
    figures.runs += 1
    look(uri, figures, acked)
    ends = [*check_rows(uri, acked), *check_end(uri, folder, figures, place.epochs), *check_collection(uri, figures)]
    figures.problems += [f"{name} at its end: {problem}" for problem in ends]
    look(uri, figures, acked)


# ----------------------------------------------------------------------------------------------------------- the checks


def settle(root: str) -> None:
    """A server may still be at a dead client's last request: wait until two listings agree."""
    storage, seen = open_storage(root), None
    if "://" not in root:
        return
    while (now := list(storage.list())) != seen:
        seen = now
        time.sleep(0.02)


def look(uri: str, figures: Figures, acked: list[Acked]) -> int | None:
    """What any reader sees: whole checkpoints, and no acknowledged one lost. Gives the newest's seq."""
    try:
        seen, newest = committed(uri), resolve(uri)
    except CheckpointNotFoundError:
        figures.lost += len(acked)
        return None
    found = {checkpoint.seq: checkpoint for checkpoint in seen}
    digests = {checkpoint.seq: whole(checkpoint, figures) for checkpoint in seen}
    merits = [(checkpoint.metrics["score"], seq) for seq, checkpoint in found.items()]
    for ack in acked:
        if ack.seq in found:
            figures.lost += found[ack.seq].manifest.attempt != ack.attempt or digests[ack.seq] != ack.digest
        else:  # let go by retention, which needs enough better ones, and a newer one
            figures.lost += ack.seq > newest.seq or sum(merit > ack.merit for merit in merits) < KEPT
    return newest.seq


def whole(checkpoint: Checkpoint, figures: Figures) -> str:
    """Count a checkpoint that is not what was reported, in the manifest's eyes or in ours; the digest of what is there."""
    figures.looked_at += 1
    storage, files = checkpoint.open(), {}
    for file in checkpoint.manifest.files:
        with suppress(ObjectNotFoundError):
            files[file.path] = storage.read(file.path)
    figures.torn += files != contents(int(checkpoint.metrics["epoch"])) or not verify(checkpoint).ok
    return digest(files)


def check_life(life: Life, newest: int | None, figures: Figures) -> Iterator[str]:
    """A life went on from the newest checkpoint that was seen before it, and published in order."""
    for began in life.of("began"):
        figures.resumed += began["resumed"] is not None
        if began["resumed"] != newest:
            yield f"resumed from {began['resumed']}, the newest was {newest}"
        published = [fact["seq"] for fact in life.of("published")]
        own = [seq for seq in published if seq >= began["first_seq"]]
        if published != sorted(set(published)) or own != list(range(began["first_seq"], began["first_seq"] + len(own))):
            yield f"published {published}, own reports from {began['first_seq']}"
    bad = [fact for fact in life.of("published") if fact["state"] not in ("committed", "lost")]
    if bad:
        yield f"published without a fault: {bad}"


def check_rows(uri: str, acked: list[Acked]) -> Iterator[str]:
    """The history has every report below the last start's first, in order; what was acknowledged is committed in it."""
    try:
        result = Result.from_path(uri)
    except CheckpointNotFoundError:
        return
    rows = {row.seq: row for row in result.history}
    starts = [json.loads(data) for key, data in _objects(uri, "attempts/") if key.endswith(".start.json")]
    first = max((start["first_seq"] for start in starts if not start.get("void")), default=0)
    if list(rows) != sorted(rows) or len(rows) != len(result.history):
        yield f"rows in the order {[row.seq for row in result.history]}"
    for ack in acked:
        row = rows.get(ack.seq)
        if row is not None and (row.state is not ReportState.COMMITTED or row.metrics != metrics_of(ack.epoch)):
            yield f"acknowledged report {ack.seq} has the row {row}"
    if any(row.state is ReportState.LOST and row.seq >= first for row in rows.values()):
        yield f"LOST rows at or above {first}, where the last start begins"
    if not all(row.state in (ReportState.COMMITTED, ReportState.LOST) for row in rows.values()):
        yield f"rows {[(row.seq, row.state.value, row.reason) for row in rows.values()]}"


def check_end(uri: str, folder: Path, figures: Figures, epochs: int) -> Iterator[str]:
    """A run that was trained to its end has a row for every report, and leaves nothing behind but its store."""
    result = Result.from_path(uri)
    figures.rows_lost += sum(row.state is ReportState.LOST for row in result.history)
    if [row.seq for row in result.history] != list(range(len(result.history))):
        yield f"rows {[row.seq for row in result.history]}"
    if result.checkpoint is None or result.checkpoint.metrics["epoch"] != epochs - 1:
        yield f"the newest at the end is {result.checkpoint}"
    if not KEPT <= len(result.best_checkpoints) <= KEPT + 1:
        yield f"{len(result.best_checkpoints)} are retained"
    theirs = ("trainer-", "checkpoint-")  # what the trainer saved and restored to is its own
    left = [str(path) for path in (folder / "tmp").glob("*") if not path.name.startswith((*theirs, ".ckpt-staging"))]
    left += [str(path) for path in (folder / "tmp").glob(".ckpt-staging*/*")]
    if left:
        yield f"left in the temporary folder: {sorted(left)}"


def check_collection(uri: str, figures: Figures) -> Iterator[str]:
    """Garbage collection removes the files that no manifest names, and nothing else."""
    before = _keys(uri)
    manifests = [json.loads(data) for _, data in _objects(uri, "commits/")]
    named = tuple(f"{manifest['location']}/" for manifest in manifests if manifest["kind"] == "manifest")
    orphans = {key for key in before if key.startswith("checkpoints/") and not key.startswith(named)}
    found = collect(uri)
    after = _keys(uri)
    figures.orphans += len(orphans)
    figures.removed += len(orphans - after)
    if before - after != orphans or found.files != len(orphans):
        yield f"collected {sorted(before - after)}, the orphans were {sorted(orphans)}"
    if strange := [key for key in after - before if not key.startswith(("attempts/", "commits/", "history/"))]:
        yield f"collecting made {strange}"


def _keys(uri: str) -> set[str]:
    return {entry.key for entry in open_storage(uri).list()}


def _objects(uri: str, prefix: str) -> list[tuple[str, bytes]]:
    storage = open_storage(uri)
    return [(entry.key, storage.read(entry.key)) for entry in storage.list(prefix)]


# ----------------------------------------------------------------------------------------------------------- the stores


@contextmanager
def store(kind: str) -> Iterator[Place]:
    """A store that survives the program; this process reaches it as well."""
    with tempfile.TemporaryDirectory(prefix="ckpt-kills-") as folder:
        if kind == "local":
            yield Place(f"{folder}/runs", {}, EPOCHS[kind])
            return
        with moto() if kind == "moto" else rclone(Path(folder)) as server, mock.patch.dict(os.environ, server.env):
            server.client().create_bucket(Bucket="kills")
            yield Place("s3://kills/runs", server.env, EPOCHS[kind])


@contextmanager
def moto() -> Iterator[S3Server]:
    """In a thread of this process."""
    from moto.server import ThreadedMotoServer

    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        yield S3Server(endpoint=f"http://127.0.0.1:{port}", key="test", secret="testsecret")
    finally:
        server.stop()


@contextmanager
def rclone(folder: Path) -> Iterator[S3Server]:
    """A process of its own, over a folder."""
    program = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    endpoint = f"127.0.0.1:{free_port()}"
    (folder / "buckets").mkdir()
    command = [program, "serve", "s3", str(folder / "buckets"), "--addr", endpoint, "--auth-key", "test,testsecret"]
    command += ["--config", os.devnull, "--cache-dir", str(folder / "cache")]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://{endpoint}", process)
        yield S3Server(endpoint=f"http://{endpoint}", key="test", secret="testsecret")
    finally:
        stop(process)


@contextmanager
def prefect_api(engine: str) -> Iterator[None]:
    """One Prefect server for all the programs, where the engine needs one."""
    if engine != "prefect":
        yield
        return
    from ckpt_tasks import embedded_server

    with embedded_server() as url, mock.patch.dict(os.environ, {"PREFECT_API_URL": str(url)}):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=["local", "moto", "rclone"], default="local")
    parser.add_argument("--engine", choices=["threads", "prefect"], default="threads")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    figures, began = Figures(), time.monotonic()
    with store(options.store) as place, prefect_api(options.engine):
        limits = {"kills": options.kills, "seconds": 60 * options.minutes}
        hunt(place, figures, seed=options.seed, engine=options.engine, **limits)
    print(f"{options.store}, {options.engine}, seed {options.seed}, {time.monotonic() - began:.0f} s: {figures}")
    print("\n".join(figures.problems) or "no problems")
    return int(figures.bad)


if __name__ == "__main__":
    sys.exit(main())
