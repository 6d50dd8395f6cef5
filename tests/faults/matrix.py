"""Every fault of a store and of the network at every operation of a run, within what retrying can bear and beyond it.

    python tests/faults/matrix.py --store moto --store rclone

Each cell is a whole run through a proxy that misbehaves (tests/faulty_server.py): a report before the fault, one under
it, one after it. Within the budget every report must be committed, and every byte of it be there; beyond it the report
under the fault must be FAILED with the cause named, and the next one commit. Afterwards every report has its row, no
checkpoint that a reader sees is torn, and no multipart upload is left on the server.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from uuid import uuid4

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # a program of its own, with the helpers of the tests

import xxhash  # noqa: E402
from faulty_server import (  # noqa: E402
    Action,
    FaultyServer,
    Request,
    answer,
    cut_answer,
    delay,
    faulty,
    hang,
    lose_answer,
    reset_in_body,
)
from servers import S3Server  # noqa: E402

from ckpt import (  # noqa: E402
    Checkpoint,
    CheckpointConfig,
    FailurePolicy,
    KeepLast,
    ReportRecord,
    ReportState,
    Run,
    RunConfig,
    UploadConfig,
    _s3,
    _s3_client,
    open_run,
)
from ckpt.collecting import collect  # noqa: E402
from ckpt.manifest import Manifest, decode_commit  # noqa: E402

STALL = 2.0
"""Seconds without a byte that are a stall; a small request has twice as long."""
BUDGET = 0.5
"""Seconds in which a request is tried again, and three times at least."""
WAIT = 240.0
"""Seconds for any report to become final."""
FOREVER = 10**6
LARGE = 2 * _s3.MIN_PART_SIZE + 1000
"""Bytes of a file that travels in three parts."""


class Fault(NamedTuple):
    """What goes wrong."""

    action: Action
    within: int | None
    """So many requests in a row are borne; None: not one is (there is no point in trying again)."""
    cause: str = ""
    """What the reason of a report that failed of it says; a pattern."""
    beyond: Action | None = None
    """What is too much, where more of the same is not."""
    answers: bool = False
    """It needs an answer that has a body."""
    harmless: bool = False
    """A report may be committed in spite of any number of them."""


BROKEN = "TransientStorageError"
SILENT = "no byte moved|Read timeout"
FAULTS = {
    "503 SlowDown": Fault(answer(503, "SlowDown"), 2, "SlowDown"),
    "500 InternalError": Fault(answer(500, "InternalError"), 2, "InternalError"),
    "reset in the body": Fault(reset_in_body, 2, BROKEN),
    "truncated answer": Fault(cut_answer, 2, BROKEN, answers=True),
    "black hole": Fault(hang, 1, SILENT),
    "latency": Fault(delay(0.2), FOREVER, SILENT, beyond=delay(3 * STALL), harmless=True),
    "403 AccessDenied": Fault(answer(403, "AccessDenied"), None, "AccessDenied"),
    "expired token": Fault(answer(400, "ExpiredToken"), 1, "ExpiredToken"),
    "clock skew": Fault(answer(403, "RequestTimeTooSkewed"), 2, "RequestTimeTooSkewed"),
    "answer lost": Fault(lose_answer, 1, BROKEN, harmless=True),
}


class Operation(NamedTuple):
    """Where it goes wrong."""

    hit: Callable[[Request, str, int], bool]
    """Whether a request is of this operation, for the report of a name and seq."""
    large: bool = False
    """The checkpoint has a file that travels in parts."""
    has_answer: bool = True
    """Its answers have bodies."""
    fails: bool = True
    """A report fails of it; else it is what comes after reports."""


def _on(operation: str, text: str) -> Callable[[Request, str, int], bool]:
    def hit(request: Request, name: str, seq: int) -> bool:
        place = request.path + "?" + ",".join(request.query.get("prefix", ()))
        return request.operation == operation and text.format(name=name, seq=seq) in place

    return hit


OPERATIONS = {
    "small object": Operation(_on("PutObject", "/checkpoints/{name}-a1/"), has_answer=False),
    "begin of parts": Operation(_on("CreateMultipartUpload", "/checkpoints/{name}-a1/"), large=True),
    "part": Operation(_on("UploadPart", "/checkpoints/{name}-a1/"), large=True, has_answer=False),
    "end of parts": Operation(_on("CompleteMultipartUpload", "/checkpoints/{name}-a1/"), large=True),
    "list": Operation(_on("ListObjectsV2", "/checkpoints/{name}-a1/")),
    "create": Operation(_on("PutObject", "/commits/{seq:06d}.a1.json"), has_answer=False),
    "read": Operation(_on("GetObject", "/attempts/0002.json")),
    "delete": Operation(lambda request, *_: request.operation in {"DeleteObjects", "DeleteObject"}, fails=False),
}


class Cell(NamedTuple):
    """One square of the matrix."""

    store: str
    fault: str
    operation: str
    within: bool

    def __str__(self) -> str:
        return f"{self.fault} x {self.operation}, {'within' if self.within else 'beyond'} ({self.store})"


@dataclass(slots=True)
class Figures:
    """What the matrix found."""

    cells: int = 0
    injected: int = 0
    """Faults."""
    reports: int = 0
    committed: int = 0
    failed: int = 0
    lost: int = 0
    """Reports that are neither committed and whole nor failed with a reason."""
    torn: int = 0
    """Checkpoints that a reader sees and that are not whole."""
    left: int = 0
    """Multipart uploads on the server after a run."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.cells} cells, {self.injected} faults injected, {self.reports} reports: {self.committed} committed, "
            f"{self.failed} failed, silent losses {self.lost}, torn {self.torn}, multipart uploads left {self.left}"
        )

    def add(self, other: Figures) -> None:
        """Sum up."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def cells(stores: Iterable[str]) -> list[Cell]:
    """Every combination that means something."""
    return [
        Cell(store, name, operation, within)
        for store in stores
        for name, fault in FAULTS.items()
        for operation, where in OPERATIONS.items()
        for within in (True, False)
        if not (within and fault.within is None) and not (fault.answers and not where.has_answer)
    ]


class _Injection:
    """The rule of a proxy: misbehave for one report, so many times."""

    def __init__(self, cell: Cell) -> None:
        self._fault, self._operation = FAULTS[cell.fault], OPERATIONS[cell.operation]
        self._action = self._fault.action if cell.within else self._fault.beyond or self._fault.action
        self._times = self._fault.within if cell.within and self._fault.within is not None else FOREVER
        self._lock = threading.Lock()
        self._target: tuple[str, int] | None = None
        self.injected = 0

    @contextmanager
    def on(self, name: str, seq: int) -> Iterator[None]:
        """Misbehave while the block lasts."""
        self._target = (name, seq)
        try:
            yield
        finally:
            self._target = None

    def __call__(self, request: Request) -> Action | None:
        with self._lock:
            if self._target is None or self.injected >= self._times:
                return None
            if not self._operation.hit(request, *self._target):
                return None
            self.injected += 1
            return self._action


def run_cell(cell: Cell, server: S3Server, bucket: str) -> Figures:
    """Train through the proxy, and look at what is there afterwards."""
    figures = Figures(cells=1)
    with tempfile.TemporaryDirectory(prefix="ckpt-matrix-") as folder, faulty(server) as proxy:
        training = _Training(cell, proxy, f"s3://{bucket}/{uuid4().hex}", Path(folder))
        training.run()
        figures.injected = training.injection.injected
        root = training.config.storage_path
        problems = [*training.check(_objects(server, bucket, root), figures)]
        if not training.operation.fails:
            training.collect()
            left = _objects(server, bucket, root)
            figures.torn += sum(not _is_whole(left, manifest) for manifest in _manifests(left))
            locations = tuple(f"{manifest.location}/" for manifest in _manifests(left))
            files = [key for key in left if key.startswith("checkpoints/")]
            problems += [f"{key} is left" for key in files if not key.startswith(locations)]
        figures.problems = [f"{cell}: {problem}" for problem in problems]
        if training.may_come_late:
            _settled(lambda: ["under way"] * proxy.busy)
            training.collect()
        figures.left = len(_settled(lambda: _uploads(server, bucket, root)))
    if figures.left:
        figures.problems.append(f"{cell}: {figures.left} multipart uploads left")
    if not figures.injected:
        figures.problems.append(f"{cell}: no fault was injected")
    return figures


class _Training:
    """One run: a report before the fault, one under it, one after it."""

    def __init__(self, cell: Cell, proxy: FaultyServer, root: str, folder: Path) -> None:
        self.cell, self.folder = cell, folder
        self.fault, self.operation = FAULTS[cell.fault], OPERATIONS[cell.operation]
        self.injection = proxy.rule = _Injection(cell)
        self.contents: dict[str, dict[str, bytes]] = {}
        self.records: dict[str, ReportRecord] = {}
        self.config = RunConfig(
            name="run", storage_path=root, credentials="env",
            storage_options={
                "client_kwargs": {"endpoint_url": proxy.endpoint}, "config_kwargs": {"read_timeout": 2 * STALL},
            },
            checkpoint_config=CheckpointConfig(retention=None if self.operation.fails else KeepLast(1)),
            upload_config=UploadConfig(stall_timeout=STALL, retry_budget=BUDGET),
            failure_policy=FailurePolicy(stop_after=None, red_on="nothing"),
            staging_dir=folder,
        )  # fmt: skip

    def run(self) -> None:
        with ExitStack() as stack:
            with open_run(self.config) as run:
                self._report(run, "before")
                if not self.operation.fails:  # deletions come when they like, up to the end of the run
                    stack.enter_context(self.injection.on("", 0))
                with self.injection.on("under", 1) if self.operation.fails else ExitStack():
                    self._report(run, "under")
                self._report(run, "after")
            self.result = run.result

    def _report(self, run: Run, name: str) -> None:
        files = {"small.bin": os.urandom(1000), "folder/other.bin": name.encode()}
        if self.operation.large:
            files["large.bin"] = os.urandom(1000) * (LARGE // 1000)
        source = self.folder / name
        for path, data in files.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes(data)
        self.contents[name] = files
        self.records[name] = run.report({}, Checkpoint.from_directory(source), name).wait(WAIT)

    def check(self, objects: dict[str, bytes], figures: Figures) -> Iterator[str]:
        """What must be right at the end, given every object of the run as the server has it."""
        rows = {row.name: row for row in self.result.history}
        visible = {manifest.name: manifest for manifest in _manifests(objects)}
        figures.torn += sum(not _is_whole(objects, manifest) for manifest in visible.values())
        for name, record in self.records.items():
            figures.reports += 1
            figures.committed += record.state is ReportState.COMMITTED
            figures.failed += record.state is ReportState.FAILED
            told = record.state is ReportState.FAILED and record.reason
            kept = name == "after" or self.operation.fails
            whole = record.state is ReportState.COMMITTED and (
                not kept or (name in visible and _files(objects, visible[name]) == self.contents[name])
            )
            if not told and not whole:
                figures.lost += 1
                yield f"report {name} is {record.state} and is not there"
            if name not in rows or rows[name].state is not record.state:
                yield f"the row of {name} is {rows.get(name)}"
        yield from self._check_states()
        if self.cell.within and not self.operation.fails and set(visible) != {"after"}:
            yield f"{sorted(visible)} are still there"

    @property
    def may_come_late(self) -> bool:
        """Whether the store may begin an upload after everybody has gone: the next start or garbage collection ends it."""
        return self.cell.fault == "latency" and not self.cell.within

    def _check_states(self) -> Iterator[str]:
        states = {name: record.state for name, record in self.records.items()}
        for name in ("before", "after"):
            if states[name] is not ReportState.COMMITTED:
                yield f"report {name} is {states[name]}: {self.records[name].reason}"
        under = self.records["under"]
        fine = under.state is ReportState.COMMITTED
        if self.cell.within or not self.operation.fails:
            if not fine:
                yield f"the report under the fault is {under.state}: {under.reason}"
        elif self.may_commit:
            return
        elif fine or not re.search(self.fault.cause, str(under.reason)):
            yield f"the report under the fault is {under.state}: {under.reason}"

    @property
    def may_commit(self) -> bool:
        """Whether the fault is none for a report, although it never ends: the store did it all the same, and that was seen."""
        return self.fault.harmless and self.records["under"].state is ReportState.COMMITTED

    def collect(self) -> None:
        """Remove what deletions that failed have left."""
        collect(f"{self.config.storage_path}/run", storage_options=self.config.storage_options)


def _objects(server: S3Server, bucket: str, root: Any) -> dict[str, bytes]:
    """What the server itself has of a run."""
    client, prefix = server.client(), f"{str(root).removeprefix(f's3://{bucket}/')}/run/"
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {
        item["Key"].removeprefix(prefix): client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        for item in found
    }


def _manifests(objects: dict[str, bytes]) -> list[Manifest]:
    found = [decode_commit(data, key) for key, data in objects.items() if key.startswith("commits/")]
    return [item for item in found if isinstance(item, Manifest)]


def _files(objects: dict[str, bytes], manifest: Manifest) -> dict[str, bytes | None]:
    return {file.path: objects.get(f"{manifest.location}/{file.path}") for file in manifest.files}


def _is_whole(objects: dict[str, bytes], manifest: Manifest) -> bool:
    found = _files(objects, manifest)
    return all(
        (data := found[file.path]) is not None and file.digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"
        for file in manifest.files
    )


def _settled(look: Callable[[], list[str]]) -> list[str]:
    """What is left once requests that are still on their way have come and gone, and what they made was aborted."""
    deadline = time.monotonic() + 5 * STALL
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _uploads(server: S3Server, bucket: str, root: Any) -> list[str]:
    """Multipart uploads under way below a storage path."""
    prefix = str(root).removeprefix(f"s3://{bucket}/")
    try:
        found = server.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    except server.client().exceptions.NoSuchUpload:  # rclone's way to say that there is none
        return []
    return [upload["Key"] for upload in found if upload["Key"].startswith(prefix)]


@contextmanager
def short_pauses() -> Iterator[None]:
    """Small parts, and pauses of milliseconds between the tries of a part: time passes in the budgets only."""
    plain = _s3_client._backoff
    with (
        mock.patch.object(_s3_client, "_backoff", lambda attempt: plain(attempt) / 100),
        mock.patch.dict(_s3.S3Storage.__init__.__kwdefaults__, part_size=_s3.MIN_PART_SIZE),
    ):
        yield


def run_all(
    wanted: list[Cell], servers: dict[str, S3Server], workers: int, told: Callable[[Cell, Figures], None]
) -> Figures:
    """Every cell, several at a time: most of them wait."""
    total = Figures()
    bucket = f"matrix-{uuid4().hex[:8]}"
    for server in servers.values():
        server.client().create_bucket(Bucket=bucket)
    some = next(iter(servers.values()))
    env = {name: value for name, value in some.env.items() if name != "AWS_ENDPOINT_URL"}
    with mock.patch.dict(os.environ, env), short_pauses(), ThreadPoolExecutor(workers, "matrix") as pool:
        futures = {pool.submit(run_cell, cell, servers[cell.store], bucket): cell for cell in wanted}
        for future, cell in futures.items():
            figures = future.result()
            total.add(figures)
            told(cell, figures)
    return total


def main() -> int:
    from kills import moto, rclone

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["moto", "rclone"], action="append")
    parser.add_argument("--fault", choices=list(FAULTS), action="append")
    parser.add_argument("--operation", choices=list(OPERATIONS), action="append")
    parser.add_argument("--workers", type=int, default=6)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    stores = options.store or ["moto"]
    wanted = [
        cell
        for cell in cells(stores)
        if cell.fault in (options.fault or FAULTS) and cell.operation in (options.operation or OPERATIONS)
    ]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-matrix-servers-"))
        start = {"moto": moto, "rclone": lambda: rclone(Path(folder))}
        servers = {store: stack.enter_context(start[store]()) for store in stores}
        ends: Counter[str] = Counter()

        def told(cell: Cell, figures: Figures) -> None:
            ends[f"{'within' if cell.within else 'beyond'}: {'ok' if not figures.problems else 'not ok'}"] += 1
            for problem in figures.problems:
                print(problem, flush=True)

        total = run_all(wanted, servers, options.workers, told)
    for end, count in sorted(ends.items()):
        print(f"{end}: {count} cells")
    print(total)
    return bool(total.problems or total.lost or total.torn or total.left)


if __name__ == "__main__":
    sys.exit(main())
