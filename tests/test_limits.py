"""The cross-run limit: a Prefect global concurrency limit, held by uploads, never waited for in silence."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from helpers import DEADLINE, eventually, make_checkpoint, make_config, reasons, states
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect_server import ApiServer

from ckpt import CheckpointUploadMode, UploadConfig, report
from ckpt.errors import ConfigError, DeadlineError, UploadFailedError
from ckpt.inflight import Flight
from ckpt_tasks import limits, training_run

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def limit(prefect_server) -> Iterator[Callable[[int], str]]:
    """`limit(1)`: the name of a new limit of one slot; deleted at the end."""
    made = []

    def make(slots: int) -> str:
        made.append(f"uploads-{uuid4().hex[:8]}")
        with get_client(sync_client=True) as client:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=made[-1], limit=slots))
        return made[-1]

    yield make
    with get_client(sync_client=True) as client:
        for name in made:
            client.delete_global_concurrency_limit_by_name(name)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The names that Prefect was asked for a slot of, once per acquisition."""
    names: list[str] = []
    plain = limits.concurrency

    def counted(name, **options):
        names.append(name)
        return plain(name, **options)

    monkeypatch.setattr(limits, "concurrency", counted)
    return names


def active(name: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(name).active_slots


def held(name: str | None, timeout: float = DEADLINE, seq: int = 0):
    return limits.cross_run_limit(name, timeout)(Flight(seq=seq))


def run_reports(config, tmp_path, count: int, **options):
    """A flow with so many reports; its run."""
    runs = []

    @flow(name="limited", persist_result=False)
    def train() -> None:
        with training_run(config) as run:
            runs.append(run)
            for index in range(count):
                report({"i": index}, make_checkpoint(tmp_path / f"c{index}"), **options)

    train(return_state=True)
    return runs[0]


def test_a_slot_is_held_for_the_length_of_the_block_and_given_back(limit):
    name = limit(1)
    with held(name):
        assert active(name) == 1
    assert eventually(lambda: active(name), lambda slots: slots == 0) == 0


def test_without_a_name_nothing_is_asked(asked):
    with held(None):
        pass
    assert asked == []


def test_a_missing_limit_fails_the_report_and_says_how_to_create_it(tmp_path):
    """Strict: no upload goes on without the limit that was asked for."""
    config = make_config(tmp_path / "runs", upload={"concurrency_limit": "nowhere"})
    run = run_reports(config, tmp_path, 2)
    assert states(run.result) == ["failed", "failed"]
    assert "prefect gcl create nowhere --limit" in reasons(run.result)[0]


def test_a_wait_beyond_the_deadline_fails_the_report_and_later_ones_commit(tmp_path, limit, caplog, monkeypatch):
    """As behind a process that was SIGKILLed, until its lease expires: the reason says where to look."""
    name = limit(1)

    @flow(name="waits", persist_result=False)
    def train():
        config = make_config(tmp_path / "runs", upload={"concurrency_limit": name, "limit_timeout": 1.0})
        with training_run(config) as run:
            with held(name), pytest.raises(UploadFailedError, match="no slot of the concurrency limit") as failed:
                report({"i": 0}, make_checkpoint(tmp_path / "c0"), checkpoint_upload_mode=CheckpointUploadMode.SYNC)
            assert f"prefect gcl inspect {name}" in str(failed.value)
            eventually(lambda: active(name), lambda slots: slots == 0)
            report({"i": 1}, make_checkpoint(tmp_path / "c1")).wait(DEADLINE)
        return states(run.result)

    assert train() == ["failed", "committed"]


def test_the_slot_of_a_killed_process_comes_back_when_its_lease_ends(limit, tmp_path):
    """Until then a wait is a wait: it ends at its own deadline, and the lease asked for is a short one."""
    name = limit(1)
    holder = textwrap.dedent(
        f"""
        import threading
        from ckpt.inflight import Flight
        from ckpt_tasks.limits import cross_run_limit
        with cross_run_limit({name!r}, 60)(Flight(seq=0)):
            print("held", flush=True)
            threading.Event().wait()
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert active(name) == 1
    with pytest.raises(DeadlineError, match="came free in 1 s"), held(name, timeout=1.0):
        pass
    assert UploadConfig().block_timeout > limits.LEASE_TIME, "a restart gets the slot back before its reports fail"


def test_a_wait_is_told_by_the_upload(limit):
    """Who waits, for what, and since when; what the log says is made of that."""
    name = limit(1)
    flight, got = Flight(seq=7), threading.Event()

    def wait_for_it():
        with limits.cross_run_limit(name, DEADLINE)(flight):
            got.set()

    with ThreadPoolExecutor(1) as pool:
        with held(name):
            waiting = pool.submit(wait_for_it)
            eventually(lambda: flight.step, lambda step: step == f"waiting for limit {name}")
            assert not got.is_set()
        waiting.result(DEADLINE)
    assert got.is_set()


def test_an_abort_ends_a_wait_at_once(limit):
    """Aborted by a termination, or dropped: with that reason, and the next one gets its turn."""
    name = limit(1)
    flight = Flight(seq=1)

    def wait_for_it():
        with limits.cross_run_limit(name, DEADLINE)(flight):
            pass

    with ThreadPoolExecutor(2) as pool:
        with held(name):
            waiting = pool.submit(wait_for_it)
            eventually(lambda: flight.on_abort, bool)
            flight.abort("the run was asked to stop")
            with pytest.raises(DeadlineError, match="the run was asked to stop"):
                waiting.result(DEADLINE)
        with held(name):
            pass


def test_one_lease_serves_the_uploads_of_a_process(tmp_path, limit, asked):
    """Eight uploads that wait for one slot ask Prefect once, and its retry gaps are not paid eight times.

    The first upload ends when seven wait, so the number of acquisitions does not depend on time.
    """
    name = limit(1)
    order: list[int] = []
    entered, go = threading.Event(), threading.Event()
    waiting = [Flight(seq=seq) for seq in range(1, 8)]

    def first():
        with held(name):
            entered.set()
            assert go.wait(DEADLINE)

    def upload(flight):
        with limits.cross_run_limit(name, DEADLINE)(flight):
            order.append(flight.seq)

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(first)]
        assert entered.wait(DEADLINE)
        granted = len(asked)
        for flight in waiting:
            futures.append(pool.submit(upload, flight))
            eventually(lambda flight=flight: flight.on_abort, bool)
        go.set()
        for future in futures:
            future.result(DEADLINE)
    assert order == [flight.seq for flight in waiting]
    assert granted == 1
    refused = len(asked) - granted
    assert refused <= 3, "tries while the slot was taken; none of the seven was given one of its own"
    eventually(lambda: active(name), lambda slots: slots == 0)


def test_a_lease_that_was_handed_on_outlives_the_task_run_that_asked_for_it(tmp_path, limit):
    """Prefect gives back, at the end of a task run, what was acquired inside it: not what the next upload holds."""
    name = limit(1)
    seen: list[int] = []
    started, go = threading.Event(), threading.Event()

    def look(checkpoint, checkpoint_name):
        if checkpoint_name == "first":
            started.set()
            assert go.wait(DEADLINE)
        else:
            assert first[0].wait(DEADLINE)  # its task run is over, or about to be
            seen.append(active(name))
        return checkpoint

    first = []

    @flow(name="handed", persist_result=False)
    def train():
        upload = {"concurrency_limit": name, "max_concurrent_uploads": 2}
        with training_run(make_config(tmp_path / "runs", upload=upload)) as run:
            first.append(report({}, make_checkpoint(tmp_path / "a"), "first", checkpoint_upload_fn=look))
            assert started.wait(DEADLINE)
            second = report({}, make_checkpoint(tmp_path / "b"), "second", checkpoint_upload_fn=look)
            eventually(lambda: run._live.flights[second.seq].on_abort, bool)
            go.set()
            second.wait(DEADLINE)
        return states(run.result)

    assert train() == ["committed", "committed"]
    assert seen == [1]


def test_with_the_api_away_uploads_go_on_and_one_warning_says_so(limit, caplog, monkeypatch):
    """Bounded by the process's own slots; strict again when the API is back."""
    name = limit(1)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), caplog.at_level(logging.WARNING, "ckpt"):
        for seq in range(3):
            with held(name, seq=seq):
                pass
    assert caplog.text.count("The Prefect API is away") == 1
    with held(name):
        assert active(name) == 1
    assert "is back" in caplog.text


def test_two_processes_share_a_limit_of_one_without_ever_overlapping(limit, tmp_path):
    """Each upload creates a file that the other process must not see, and removes it."""
    name, barrier = limit(1), tmp_path / "holding"
    program = textwrap.dedent(
        f"""
        import os, sys, time
        from concurrent.futures import ThreadPoolExecutor
        from ckpt.inflight import Flight
        from ckpt_tasks.limits import cross_run_limit, settle

        limit, overlaps = cross_run_limit({name!r}, 100), []

        def upload(seq):
            with limit(Flight(seq=seq)):
                try:
                    os.close(os.open({str(barrier)!r}, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    overlaps.append(seq)
                else:
                    time.sleep(0.02)  # what an upload takes
                    os.unlink({str(barrier)!r})

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(upload, range(20)))
        settle(30)  # as a training run does at its end
        print(len(overlaps))
        """
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=child_environment())
        for _ in range(2)
    ]
    try:
        assert [process.communicate(timeout=100)[0].strip() for process in processes] == ["0", "0"]
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_restarted_server_that_forgot_its_leases_is_told_of_and_mended_as_said(tmp_path):
    """Prefect keeps leases in memory and the count of slots in its database: the slot is taken by nobody, for ever."""
    server = ApiServer(tmp_path / "server")
    server.start()
    try:
        settings = {PREFECT_API_URL: server.url, PREFECT_CLIENT_MAX_RETRIES: 0}
        with server.client() as client, temporary_settings(settings):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="stale", limit=1))
            with held("stale"):
                server.kill()
                server.start()
            with pytest.raises(DeadlineError, match="prefect gcl update stale --active-slots 0"), held("stale", 1.0):
                pass
            client.update_global_concurrency_limit("stale", GlobalConcurrencyLimitUpdate(active_slots=0))
            with held("stale"):
                assert client.read_global_concurrency_limit_by_name("stale").active_slots == 1
            limits.settle(DEADLINE)
    finally:
        server.kill()


def child_environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PREFECT_API_URL": PREFECT_API_URL.value(),
    }


def test_a_config_error_is_what_a_missing_limit_raises():
    with pytest.raises(ConfigError, match="prefect gcl create"), held("nowhere"):
        pass
