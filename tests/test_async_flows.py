"""Coroutine flows: a run opens and drains beside the event loop, and the tasks work where they are called from one."""

import asyncio
import threading
from pathlib import Path

import pytest
from helpers import DEADLINE, eventually, make_checkpoint, states
from prefect import allow_failure, flow

from ckpt import CheckpointUploadMode, Result, RunConfig, get_checkpoint, get_context, report
from ckpt.errors import CheckpointNotFoundError, CheckpointsLostError
from ckpt_tasks import (
    gather_reports,
    publish_result,
    restore_checkpoint,
    training_run,
    upload_checkpoint,
    verify_checkpoint,
)

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(name="run", storage_path=tmp_path / "runs")


class Held:
    """An upload function that waits; whoever waits for it must not be what lets it go."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, checkpoint, name):
        self.entered.set()
        assert self.open.wait(DEADLINE)
        return checkpoint


def run_async(body):
    """The coroutine function as a flow, to its end; raises what it raises."""
    return asyncio.run(asyncio.wait_for(flow(name="async-run", persist_result=False)(body)(), DEADLINE))


def test_other_coroutines_go_on_while_an_async_run_drains(tmp_path, config):
    """The upload ends because another coroutine lets it: with a blocked event loop it never would."""
    held = Held()

    async def lets_go():
        await asyncio.to_thread(held.entered.wait, DEADLINE)
        await asyncio.sleep(0)
        held.open.set()

    async def body() -> Result:
        other = asyncio.create_task(lets_go())
        async with training_run(config) as run:
            assert get_context().get_experiment_name() == "run"
            report({"loss": 1}, make_checkpoint(tmp_path / "a"), checkpoint_upload_fn=held)
            report({"loss": 0}, make_checkpoint(tmp_path / "b"))
        await other
        return run.result

    assert states(run_async(body)) == ["committed", "committed"]


def test_a_plain_with_works_in_an_async_flow(tmp_path, config):
    """It blocks the loop while it opens and drains, and nothing more; a second run goes on from the first."""

    async def body() -> Result:
        with training_run(config) as run:
            report({"loss": 1}, make_checkpoint(tmp_path / "a"))
        return run.result

    assert states(run_async(body)) == ["committed"]
    assert states(run_async(body)) == ["committed", "committed"]


def test_a_report_that_waits_is_made_in_a_thread(tmp_path, config):
    """SYNC, or a full queue: with `to_thread` the loop goes on, and the run is the coroutine's own."""

    async def body() -> Result:
        async with training_run(config) as run:
            folder = make_checkpoint(tmp_path / "a")
            handle = await asyncio.to_thread(report, {}, folder, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
            assert handle.wait(0).checkpoint is not None
            run.report({"after": 1})
        return run.result

    assert states(run_async(body)) == ["committed", "committed"]


def test_what_the_block_of_an_async_run_raises_wins_and_uploads_are_drained(tmp_path, config):
    """As in a plain one."""
    runs = []

    async def body() -> None:
        async with training_run(config) as run:
            runs.append(run)
            report({}, make_checkpoint(tmp_path / "a"))
            raise ZeroDivisionError("diverged")

    with pytest.raises(ZeroDivisionError, match="diverged"):
        run_async(body)
    assert states(runs[0].result) == ["committed"]
    assert isinstance(runs[0].result.error, ZeroDivisionError)


def test_what_opening_and_draining_raise_is_raised_in_the_coroutine(tmp_path, config):
    """Entering raises in entering, leaving in leaving."""

    def broken(checkpoint, name):
        raise ConnectionResetError("the cable is out")

    async def lost() -> None:
        async with training_run(config):
            report({}, make_checkpoint(tmp_path / "a"), checkpoint_upload_fn=broken)

    async def must() -> None:
        async with training_run(RunConfig(name="new", storage_path=tmp_path / "runs", resume="must")):
            raise AssertionError

    with pytest.raises(CheckpointsLostError, match="no checkpoint"):
        run_async(lost)
    with pytest.raises(CheckpointNotFoundError):
        run_async(must)


def test_a_cancelled_coroutine_drains_its_run_and_stays_cancelled(tmp_path, config):
    """Nothing that was reported is lost; the cancellation is raised after the drain."""
    runs, held = [], Held()

    async def train() -> None:
        async with training_run(config) as run:
            runs.append(run)
            report({}, make_checkpoint(tmp_path / "a"), checkpoint_upload_fn=held)
            await asyncio.Event().wait()

    async def body() -> bool:
        training = asyncio.create_task(train())
        await asyncio.to_thread(held.entered.wait, DEADLINE)
        training.cancel()
        await asyncio.sleep(0)
        held.open.set()
        with pytest.raises(asyncio.CancelledError):
            await training
        return training.cancelled()

    assert run_async(body)
    assert states(runs[0].result) == ["committed"]


def test_a_cancellation_during_the_drain_gives_uploads_the_stop_timeout(tmp_path):
    """A hung upload does not hold the coroutine for ever; what it was is in the result."""
    runs, held = [], Held()
    config = RunConfig(name="run", storage_path=tmp_path / "runs", stop_timeout=1)

    async def train() -> None:
        async with training_run(config) as run:
            runs.append(run)
            report({}, make_checkpoint(tmp_path / "a"), checkpoint_upload_fn=held)
            await asyncio.to_thread(held.entered.wait, DEADLINE)

    async def body() -> None:
        training = asyncio.create_task(train())
        await asyncio.to_thread(eventually, lambda: bool(runs) and runs[0]._closed, bool)
        training.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await training
        assert isinstance(caught.value.__cause__, CheckpointsLostError)

    run_async(body)
    held.open.set()
    assert states(runs[0].result) == ["failed"]


def test_the_tasks_work_in_an_async_flow(tmp_path):
    """Called, and submitted; get_checkpoint and its like are plain functions everywhere."""

    async def body() -> bytes:
        futures = [
            upload_checkpoint.submit(
                make_checkpoint(tmp_path / f"c{n}", {"data": str(n)}), str(tmp_path / f"out{n}"), seq=n
            )
            for n in range(2)
        ]
        result = gather_reports(allow_failure(futures))
        assert publish_result(result)
        assert verify_checkpoint(result.checkpoint).files == 1
        async with training_run(RunConfig(name="run", storage_path=tmp_path / "runs")):
            assert get_checkpoint() is None
        restored = restore_checkpoint.submit(result.checkpoint, tmp_path / "restored")
        return (await asyncio.to_thread(restored.result) / "data").read_bytes()

    assert run_async(body) == b"1"
