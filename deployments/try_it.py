"""The runs and the checks of deployments/try.sh, which starts a server, an S3 gateway and a worker for them.

Prints a line per thing that was looked at; ends with 1 if one was not as it should be.
"""

from __future__ import annotations

import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import try_training
from prefect.client.orchestration import SyncPrefectClient, get_client

from ckpt import Result, committed
from ckpt_tasks.artifacts import live_key, result_key
from ckpt_tasks.setup import LIMIT

EPOCHS = 4
RUNS = 3
REPORTS = 40
"""Of each of the runs at once."""
SLOT_USE = 85.0
"""Percent that the slots of the limit should be in use while uploads wait for one."""
DEADLINE = 600.0
"""Seconds for whatever is waited for."""

T = TypeVar("T")


class Checks:
    """What was seen, a line each."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.failed = 0

    def say(self, text: str) -> None:
        """Something to know."""
        print(f"[{time.monotonic() - self._began:4.0f} s]      {text}", flush=True)

    def check(self, good: object, text: str) -> None:
        """Something that should be so."""
        self.failed += not good
        print(f"[{time.monotonic() - self._began:4.0f} s] {'ok  ' if good else 'FAIL'} {text}", flush=True)


class CountingProxy(socketserver.ThreadingTCPServer):
    """Passes connections on to the API, and counts the requests in them: what runs cost, apart from what others ask."""

    daemon_threads = True

    def __init__(self, api: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        parts = urlsplit(api)
        self.upstream = (str(parts.hostname), int(parts.port or 80))
        self.url = f"http://127.0.0.1:{self.server_address[1]}{parts.path}"
        self.calls: Counter[str] = Counter()

    def seen(self, data: bytes) -> None:
        """Count a request's beginning: a client sends one only after the answer to the one before."""
        if match := re.match(rb"([A-Z]+) ([^ ?]+)\S* HTTP/1\.1\r\n", data):
            method, path = (part.decode() for part in match.groups())
            self.calls[f"{method} {re.sub(r'[0-9a-f]{8}-[0-9a-f-]{27}', '{id}', path)}"] += 1


class _Connection(socketserver.BaseRequestHandler):
    server: CountingProxy

    def handle(self) -> None:
        with socket.create_connection(self.server.upstream) as api:
            answers = threading.Thread(target=_pump, args=(api, self.request, lambda _data: None), daemon=True)
            answers.start()
            _pump(self.request, api, self.server.seen)
            answers.join()


def _pump(source: socket.socket, sink: socket.socket, seen: Callable[[bytes], None]) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            seen(data)
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def counting(api: str) -> Iterator[CountingProxy]:
    """A proxy while the block lasts."""
    with CountingProxy(api) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()


def main() -> int:
    """Try everything; the exit code."""
    storage = os.environ["PREFECT_INTEGRATIONS_CKPT_STORAGE_PATH"]
    checks = Checks()
    with counting(os.environ["PREFECT_API_URL"]) as proxy, get_client(sync_client=True) as client:
        try_training_run(checks, client, proxy, storage)
        # 120 commits in a minute would be 120 evaluations, on the cores that the uploads are measured on.
        command(checks, "ckpt_tasks.cli", "setup", "--automations", "--evaluate", "none")
        try_limit(checks, client, proxy, storage)
    checks.say(f"{checks.failed} checks failed" if checks.failed else "everything was as it should be")
    return 1 if checks.failed else 0


def try_training_run(checks: Checks, client: SyncPrefectClient, proxy: CountingProxy, storage: str) -> None:
    """One run of the example: its reports, its artifacts, its events, and the evaluations that they start."""
    run = f"{storage}/digits"
    config = {
        "name": "digits", "storage_path": storage, "train_fn": "digits_training:train",
        "train_loop_config": {"epochs": EPOCHS}, "retention": {"score_attribute": "accuracy"},
    }  # fmt: skip
    flow_run = started(config, proxy)
    checks.check(final(client, flow_run) == "Completed", f"the training that the command line started: {run}")
    result = Result.from_path(run)
    seen = [record.state.value for record in result.history]
    checks.check(seen == ["committed"] * EPOCHS, f"its {EPOCHS} reports: {', '.join(seen)}")
    show_calls(checks, proxy, EPOCHS, {"one run": flow_run}, client)
    _artifacts(checks, client)
    _events(checks, client, flow_run)
    _evaluations(checks, client, run)


def _artifacts(checks: Checks, client: SyncPrefectClient) -> None:
    text = artifact(client, result_key("digits"))
    plot = "](data:image/svg+xml;base64," in text
    rows = text.replace("\N{NO-BREAK SPACE}", " ").count("committed, *kept*")
    checks.check(plot and rows == EPOCHS, f"artifact {result_key('digits')}: plot {plot}, {rows} rows of reports")
    live = json.loads(artifact(client, live_key("digits")))
    checks.check(len(live) == EPOCHS, f"artifact {live_key('digits')}: {len(live)} rows; the newest: {live[0]}")


def _events(checks: Checks, client: SyncPrefectClient, flow_run: UUID) -> None:
    def events() -> Counter[str]:
        return Counter(event["event"] for event in events_of(client, flow_run, "ckpt."))

    seen = eventually("the event ckpt.run.completed", events, lambda found: found["ckpt.run.completed"])
    told = ", ".join(f"{count} x {event}" for event, count in sorted(seen.items()))
    checks.check(seen["ckpt.report.committed"] == EPOCHS, f"its events: {told}")


def _evaluations(checks: Checks, client: SyncPrefectClient, run: str) -> None:
    def scores() -> list[float]:
        metrics = [metrics for _, metrics in Result.from_path(run).best_checkpoints]
        return [each["worst_class_accuracy"] for each in metrics if "worst_class_accuracy" in each]

    scored = eventually("the scores of the evaluations", scores, lambda found: len(found) == EPOCHS)
    checks.check(True, f"evaluations by the automation: scores in the store {[round(each, 3) for each in scored]}")
    deployment = client.read_deployment_by_name("evaluate/evaluate").id

    def ended() -> Counter[str]:
        body = {"deployments": {"id": {"any_": [str(deployment)]}}}
        return Counter(run["state_name"] for run in client.request("POST", "/flow_runs/filter", json=body).json())

    states = eventually("the end of the evaluations", ended, lambda found: found["Completed"] >= EPOCHS)
    checks.check(dict(states) == {"Completed": EPOCHS}, f"their flow runs: {dict(states)}")


def try_limit(checks: Checks, client: SyncPrefectClient, proxy: CountingProxy, storage: str) -> None:
    """Three runs at once: uploads never exceed the limit, and its slots are in use."""
    slots = client.read_global_concurrency_limit_by_name(LIMIT).limit
    proxy.calls.clear()
    with tempfile.TemporaryDirectory() as notes:
        runs = {}
        for name in (f"at-once-{number}" for number in range(RUNS)):
            config = {
                "name": name, "storage_path": storage, "train_fn": "try_training:train",
                "train_loop_config": {"reports": REPORTS, "notes": notes}, "upload": {"concurrency_limit": LIMIT},
            }  # fmt: skip
            runs[name] = started(config, proxy)
        checks.say(
            f"{RUNS} runs of {REPORTS} reports, uploads of {try_training.UPLOAD_TIME:g} s, {LIMIT} has {slots} slots"
        )
        ends = {name: final(client, flow_run) for name, flow_run in runs.items()}
        checks.check(set(ends.values()) == {"Completed"}, f"their ends: {ends}")
        by_run = {path.stem: sorted(map(json.loads, path.read_text().splitlines())) for path in Path(notes).iterdir()}
    counts = {name: len(list(committed(f"{storage}/{name}"))) for name in runs}
    checks.check(set(counts.values()) == {REPORTS}, f"checkpoints committed: {counts}")
    uploads = sorted(interval for found in by_run.values() for interval in found)
    most = most_at_once(uploads)
    checks.check(most <= slots, f"at most {most} of {len(uploads)} uploads went on at once; the limit is {slots}")
    _slot_use(checks, by_run, uploads, slots)
    show_calls(checks, proxy, RUNS * REPORTS, runs, client)
    left = eventually("the slots' return", lambda: active_slots(client), lambda active: active == 0)
    checks.check(left == 0, f"slots held after the runs: {left}")


def _slot_use(checks: Checks, by_run: dict[str, list[list[float]]], uploads: list[list[float]], slots: int) -> None:
    first, last = uploads[0][0], max(end for _, end in uploads)
    for name, own in sorted(by_run.items(), key=lambda item: item[1]):
        checks.say(f"  {name} uploaded from {own[0][0] - first:.1f} to {max(end for _, end in own) - first:.1f} s")
    used = 100 * sum(end - began for began, end in uploads) / (slots * (last - first))
    checks.check(
        used >= SLOT_USE,
        f"slot use {used:.1f} % over {last - first:.1f} s, first upload's begin to last one's end (goal: {SLOT_USE:g} %); "
        f"longest time without any upload {longest_pause(uploads):.2f} s",
    )


def most_at_once(intervals: list[list[float]]) -> int:
    """The largest number of intervals that overlap."""
    changes = sorted([(began, 1) for began, _ in intervals] + [(end, -1) for _, end in intervals])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def longest_pause(intervals: list[list[float]]) -> float:
    """The longest time in which none of the intervals, sorted, went on."""
    longest, until = 0.0, intervals[0][0]
    for began, ended in intervals:
        longest, until = max(longest, began - until), max(until, ended)
    return longest


def show_calls(
    checks: Checks, proxy: CountingProxy, reports: int, runs: dict[str, UUID], client: SyncPrefectClient
) -> None:
    """What the runs' processes asked of the API; events travel over one websocket per process."""
    total = sum(proxy.calls.values())
    checks.say(f"API calls: {total} of {len(runs)} run(s), {reports} reports: {total / reports:.1f} per report")
    for what, count in proxy.calls.most_common(8):
        checks.say(f"  {count:4d} {what}")
    sent = sum(len(events_of(client, flow_run, "prefect.task-run.")) for flow_run in runs.values())
    checks.say(f"  events of task runs: {sent}, {sent / reports:.1f} per report, over a websocket")


def started(config: dict[str, Any], proxy: CountingProxy) -> UUID:
    """A run of train/train by the command line, which talks to the API through the proxy."""
    said = subprocess.run(
        [
            sys.executable, "-m", "prefect", "deployment", "run", "train/train",
            "--params", json.dumps({"config": config}),
            "--job-variable", f"env={json.dumps({'PREFECT_API_URL': proxy.url})}",
        ],
        check=True, capture_output=True, text=True, timeout=DEADLINE,
    ).stdout  # fmt: skip
    return UUID(next(line.split("UUID: ")[1] for line in said.splitlines() if "UUID: " in line))


def final(client: SyncPrefectClient, flow_run: UUID) -> str:
    """Name of its last state."""
    state = eventually(f"the end of flow run {flow_run}", lambda: client.read_flow_run(flow_run).state, _is_final)
    assert state is not None
    return state.name or ""


def _is_final(state: Any) -> bool:
    return state is not None and bool(state.is_final())


def active_slots(client: SyncPrefectClient) -> int:
    """Slots of the limit that somebody holds."""
    return client.read_global_concurrency_limit_by_name(LIMIT).active_slots


def artifact(client: SyncPrefectClient, key: str) -> str:
    """The data of the newest version."""
    return str(client.request("GET", "/artifacts/{key}/latest", path_params={"key": key}).json()["data"])


def events_of(client: SyncPrefectClient, flow_run: UUID, prefix: str) -> list[dict[str, Any]]:
    """What the server has of a flow run, all pages."""
    related = {"id": [f"prefect.flow-run.{flow_run}"], "role": ["flow-run"]}
    body = {"filter": {"event": {"prefix": [prefix]}, "related": related}, "limit": 50}
    page = client.request("POST", "/events/filter", json=body).json()
    found = list(page["events"])
    while page["next_page"]:
        token = page["next_page"].split("page-token=")[1]
        page = client.request("GET", "/events/filter/next", params={"page-token": token}).json()
        found += page["events"]
    return found


def eventually(what: str, look: Callable[[], T], good: Callable[[T], Any]) -> T:
    """What `look` gives once it is good, or at the deadline."""
    deadline = time.monotonic() + DEADLINE
    while not good(seen := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} in {DEADLINE:.0f} s: {seen}")
        time.sleep(0.5)
    return seen


def command(checks: Checks, module: str, *arguments: str) -> None:
    """Run one, show what it says."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    for line in done.stdout.splitlines():
        checks.say(f"  {line}")
    checks.check(done.returncode == 0, f"{module} {' '.join(arguments)} {done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
