"""Resuming: what a run begins with, whatever the one before it left, and who may take a run over."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, content, eventually, make_checkpoint, make_config, reasons, states, storage_of

from ckpt import (
    CheckpointConfig,
    FailurePolicy,
    KeepLast,
    ReportHandle,
    ReportState,
    Result,
    Run,
    RunConfig,
    get_checkpoint,
    list_runs,
    open_run,
    open_storage,
    opening,
    resolve,
)
from ckpt._json import loads
from ckpt._memory import MemoryStorage
from ckpt.attempts import Attempt, Owner, claim
from ckpt.collecting import collect
from ckpt.errors import CheckpointNotFoundError, CheckpointsLostError, FencedError, NewerFormatError, RunBusyError
from ckpt.layout import CommitId
from ckpt.reading import open_run_files
from ckpt.storage import Storage, join_uri
from ckpt.testing import SlowStorage, WrappedStorage

LENIENT = FailurePolicy(stop_after=None, red_on="nothing")


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "ckpt")
    return caplog


def report(run: Run, folder: Path, epoch: int, **metrics: object) -> ReportHandle:
    """A report whose checkpoint holds its epoch."""
    files = {"epoch": str(epoch)}
    return run.report(
        {"epoch": epoch, **metrics}, make_checkpoint(folder / f"{run.destination.attempt}-{epoch}", files)
    )


def train(config: RunConfig, folder: Path, *epochs: int, scores: Callable[[int], float] = float) -> Result:
    """A run that reports `epochs`."""
    with open_run(config) as run:
        for epoch in epochs:
            report(run, folder, epoch, score=scores(epoch))
    assert run.result is not None
    return run.result


def crash(config: RunConfig, folder: Path, *epochs: int, before: Callable[[Run], None] = lambda run: None) -> None:
    """A run whose process dies after its reports are committed: nothing is published, no end is written."""
    died = threading.Event()

    class Dying(WrappedStorage):
        def around(self, verb, key, work, progress=None):
            late = verb == "create" and (key.startswith("history/") or ".end." in key)
            if died.is_set() or late:
                raise DiedError
            return work()

    with pytest.MonkeyPatch.context() as patch, suppress(DiedError):
        _wrap(patch, Dying)
        with open_run(config) as run:
            try:
                for handle in [report(run, folder, epoch) for epoch in epochs]:
                    handle.wait(DEADLINE)
                before(run)
            finally:
                died.set()
            raise DiedError


class DiedError(Exception):
    """Stands for the end of a process."""


def _wrap(patch: pytest.MonkeyPatch, kind: Callable[[Storage], Storage]) -> None:
    plain = opening._open
    patch.setattr(opening, "_open", lambda config, uri: kind(plain(config, uri)))


def restored_epoch(folder: Path) -> int | None:
    """What the active run restored, read from the files."""
    checkpoint = get_checkpoint()
    return None if checkpoint is None else int(content(checkpoint, folder)["epoch"])


def objects(config: RunConfig) -> Storage:
    return open_storage(join_uri(config.storage_path, config.name))


# ------------------------------------------------------------------------------------------------------ what it takes


def test_a_second_run_goes_on_from_the_latest_and_says_so(tmp_path, storage_path, info):
    """Seqs go on, the checkpoint is the newest one, and one line says from what and why."""
    config = make_config(storage_path)
    train(config, tmp_path, 0, 1, 2)
    info.clear()
    with open_run(config) as run:
        assert get_checkpoint().seq == 2
        assert restored_epoch(tmp_path / "restored") == 2
        assert report(run, tmp_path, 3).seq == 3
    assert "attempt 2 resumes from checkpoint 2 of attempt 1 (resume='latest')" in info.text
    assert states(run.result) == ["committed"] * 4
    assert [row.metrics["epoch"] for row in run.result.history] == [0, 1, 2, 3]


def test_a_first_run_starts_from_scratch_and_says_so(tmp_path, storage_path, info):
    """There is nothing to restore, and the log says that nothing is committed yet."""
    with open_run(make_config(storage_path)) as run:
        assert get_checkpoint() is None
        report(run, tmp_path, 0)
    assert "attempt 1 starts from scratch (nothing is committed yet)" in info.text


def test_a_complete_run_can_be_opened_again_and_changes_nothing(tmp_path, storage_path):
    """A run that finds its training complete reports nothing; its result is the same as before."""
    config = make_config(storage_path)
    before = train(config, tmp_path, 0, 1)
    with open_run(config) as run:
        assert get_checkpoint().metrics["epoch"] == 1
    assert run.result.checkpoint == before.checkpoint
    assert run.result.metrics == before.metrics
    assert states(run.result) == ["committed"] * 2


@pytest.mark.parametrize(
    ("resume", "epoch"), [("best", 1), ("@0", 0), ("@best:score:min", 2), ("must", 2), ("latest", 2)]
)
def test_a_run_resumes_from_what_it_is_told(tmp_path, storage_path, resume, epoch):
    """`best` by the run's score, a seq, a metric, or the latest."""
    scored = CheckpointConfig(checkpoint_score_attribute="score")
    config = make_config(storage_path, checkpoint_config=scored)
    train(config, tmp_path, 0, 1, 2, scores={0: 0.5, 1: 0.9, 2: 0.1}.__getitem__)
    with open_run(replace(config, resume=resume)) as run:
        assert get_checkpoint().seq == epoch
        assert restored_epoch(tmp_path / "restored") == epoch
        assert report(run, tmp_path, epoch + 1).seq == 3


def test_a_run_that_must_resume_fails_where_there_is_nothing(tmp_path, storage_path):
    """The error says so; the next try, without `must`, is not held up by it."""
    config = make_config(storage_path, resume="must")
    with pytest.raises(CheckpointNotFoundError, match="nothing is committed in"), open_run(config):
        raise AssertionError
    assert train(replace(config, resume="latest"), tmp_path, 0).checkpoint.seq == 0


def test_none_starts_from_scratch_in_the_same_run(tmp_path, storage_path, info):
    """Nothing is restored, the seqs go on, and a crash right after it starts from scratch again."""
    config = make_config(storage_path, resume="none")
    train(config, tmp_path, 0, 1)
    with open_run(config):
        assert get_checkpoint() is None
    assert "starts from scratch (resume='none')" in info.text
    with open_run(replace(config, resume="latest")) as run:
        assert get_checkpoint() is None
        assert report(run, tmp_path, 0).seq == 2


def test_a_run_resumes_from_another_run_and_does_again_after_an_early_crash(tmp_path, storage_path):
    """Before its first own commit, every attempt begins from the same checkpoint of the other run, also after gc."""
    train(make_config(storage_path, "teacher"), tmp_path, 0, 1, 2)
    reference = f"{join_uri(storage_path, 'teacher')}@1"
    config = make_config(storage_path, "student", resume=reference)
    for folder in ("first", "second"):
        crash(config, tmp_path, before=lambda run: None)
        with open_run(replace(config, resume="latest")):
            assert get_checkpoint().uri == resolve(reference).uri
            assert restored_epoch(tmp_path / folder) == 1
        collect(join_uri(storage_path, "student"))
    with open_run(replace(config, resume="latest")) as run:
        assert report(run, tmp_path, 2).seq == 0
    with open_run(replace(config, resume="latest")):
        assert get_checkpoint().uri == run.result.checkpoint.uri


def test_a_crash_after_a_rewind_does_not_jump_back_to_the_branch_that_was_left(tmp_path, storage_path):
    """Rewound to an early checkpoint and killed before the next commit: the next attempt begins there again."""
    config = make_config(storage_path)
    train(config, tmp_path, 0, 1, 2)
    crash(replace(config, resume="@0"), tmp_path)
    with open_run(config) as run:
        assert get_checkpoint().seq == 0
        report(run, tmp_path, 1)
    assert resolve(run.uri).seq == 3
    with open_run(config):
        assert get_checkpoint().seq == 3


def test_a_checkpoint_to_resume_from_that_is_deleted_meanwhile_is_an_error(tmp_path, storage_path, monkeypatch):
    """Starting from scratch instead, silently, would throw the training away."""
    config = make_config(storage_path)
    train(config, tmp_path, 0)

    class Vanishing(WrappedStorage):
        def around(self, verb, key, work, progress=None):
            result = work()
            if (verb, key) == ("create", "attempts/0002.start.json"):
                self.inner.delete(["commits/000000.a1.json"])
            return result

    _wrap(monkeypatch, Vanishing)
    with pytest.raises(CheckpointNotFoundError, match="is gone: say with"), open_run(config):
        raise AssertionError


# ---------------------------------------------------------------------------------------------------- what crashes leave


def test_an_attempt_that_died_before_its_first_save_changes_nothing(tmp_path, storage_path):
    """The next one resumes from what was there, and reuses the seqs."""
    config = make_config(storage_path)
    train(config, tmp_path, 0)
    crash(config, tmp_path)
    with open_run(config) as run:
        assert get_checkpoint().seq == 0
        assert report(run, tmp_path, 1).seq == 1


def test_commits_that_were_never_published_are_published_by_the_next_attempt(tmp_path, storage_path):
    """A process killed between commit and publication loses nothing."""
    config = make_config(storage_path)
    crash(config, tmp_path, 0, 1)
    assert len(Result.from_path(join_uri(storage_path, "run")).history) == 0
    with open_run(config) as run:
        assert get_checkpoint().seq == 1
    assert states(run.result) == ["committed", "committed"]
    assert [row.metrics["epoch"] for row in run.result.history] == [0, 1]
    assert list(map(str, run.result.history)) == list(map(str, Result.from_path(run.uri).history))


def test_an_upload_that_a_crash_cut_short_is_lost_and_a_straggler_cannot_commit_it(tmp_path, storage_path):
    """The gap below the newest commit has a LOST row and a tombstone, which the old driver's late commit meets."""
    config = make_config(storage_path)
    straggler: list[tuple[Attempt, Any]] = []

    def remember(run: Run) -> None:
        straggler.append((run._live.attempt, run.destination))

    crash(config, tmp_path, 0, 1, before=remember)
    objects(config).delete(["commits/000000.a1.json"])  # as if its upload were still under way
    with open_run(config) as run:
        report(run, tmp_path, 2)
    assert states(run.result) == ["lost", "committed", "committed"]
    assert "before the report was final" in reasons(run.result)[0]
    manifest = replace(resolve(f"{run.uri}@1").manifest, seq=0, nonce="straggler")
    with pytest.raises(FileExistsError, match="is taken"):
        Attempt(objects=objects(config), number=1).commit(manifest)


@pytest.mark.parametrize("damage", ["missing", "truncated", "not an object"])
def test_a_damaged_result_object_is_made_again_from_the_rest(tmp_path, storage_path, damage):
    """It is a shortcut: the result is the same without it, and the next run writes a new one."""
    config = make_config(storage_path)
    before = train(config, tmp_path, 0, 1)
    store = objects(config)
    whole = store.read("result.json")
    store.delete(["result.json"])
    if damage != "missing":
        store.write("result.json", whole[: len(whole) // 2] if damage == "truncated" else b"[]")
    after = Result.from_path(before.path)
    assert (after.checkpoint, after.metrics, states(after)) == (before.checkpoint, before.metrics, states(before))
    assert after.totals.checkpoints == 2
    assert [item.name for item in list_runs(config.storage_path)] == ["run"]
    train(config, tmp_path, 2)
    assert loads(store.read("result.json"), "result.json")["attempt"] == 2


@pytest.mark.parametrize("damage", ["missing", "truncated", "binary"])
def test_damaged_history_shows_as_lost_or_is_published_again(tmp_path, storage_path, damage, caplog):
    """A segment that is gone is made again from the commits; a row that cannot be read says so and hides no other."""
    config = make_config(storage_path)
    train(config, tmp_path, 0, 1)
    train(config, tmp_path, 2)
    store = objects(config)
    first = next(entry.key for entry in store.list("history/"))
    whole = store.read(first)
    if damage == "missing":
        store.delete([first])
    else:
        store.write(first, whole[: len(whole) - 20] if damage == "truncated" else b"\xff\x00" * 50)
    with open_run(config) as run:
        assert get_checkpoint().seq == 2
    first_two = {"missing": ["committed", "committed"], "truncated": ["committed", "lost"], "binary": ["lost", "lost"]}
    assert states(run.result) == [*first_two[damage], "committed"]
    assert [row.seq for row in run.result.history] == [0, 1, 2]
    if damage != "missing":
        assert "is damaged and shows as lost" in caplog.text


def test_a_commit_that_was_deleted_by_hand_is_passed_over(tmp_path, storage_path):
    """The next attempt resumes from the one before it, and new reports get new seqs."""
    config = make_config(storage_path)
    train(config, tmp_path, 0, 1, 2)
    objects(config).delete(["commits/000002.a1.json"])
    with open_run(config) as run:
        assert get_checkpoint().seq == 1
        assert report(run, tmp_path, 2).seq == 3
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == [0, 1, 3]


def test_a_corrupt_newest_commit_is_passed_over_with_a_warning(tmp_path, storage_path, caplog):
    """Published or not, it hinders nothing: the one before it is taken, and the warning names the object."""
    config = make_config(storage_path)
    crash(config, tmp_path, 0, 1)
    objects(config).write("commits/000001.a1.json", b'{"format": 1, "kind": "manif')
    with open_run(config) as run:
        assert get_checkpoint().seq == 0
        assert report(run, tmp_path, 1).seq == 2
    assert "Passing over commit commits/000001.a1.json" in caplog.text
    assert states(run.result) == ["committed", "lost", "committed"]
    assert "cannot be read" in reasons(run.result)[1]
    assert resolve(run.uri).seq == 2


@pytest.mark.parametrize("key", ["run.json", "commits/000001.a1.json", "attempts/0001.start.json"])
def test_a_newer_format_is_refused(tmp_path, storage_path, key):
    """Guessing at what a newer version wrote could lose data: the error says what to upgrade, and nothing is claimed over."""
    config = make_config(storage_path)
    train(config, tmp_path, 0, 1)
    store = objects(config)
    body = json.loads(store.read(key))
    store.write(key, json.dumps({**body, "format": 99}).encode())
    with pytest.raises(NewerFormatError, match=f"{key} has format 99.*upgrade prefect-ckpt"), open_run(config):
        raise AssertionError
    store.write(key, json.dumps(body).encode())
    with open_run(config):
        assert get_checkpoint().seq == 1


def test_a_different_configuration_is_warned_about_with_its_difference(tmp_path, storage_path, caplog):
    """The run goes on; what ranks and keeps its checkpoints has changed, and the log says from what to what."""
    train(make_config(storage_path), tmp_path, 0)
    assert "different configuration" not in caplog.text
    changed = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="min")
    train(make_config(storage_path, checkpoint_config=changed), tmp_path, 1)
    assert "score_attribute was None and is 'score'" in caplog.text
    assert "score_order was 'max' and is 'min'" in caplog.text


# ----------------------------------------------------------------------------------------------------- who may take over


def claimed_by(config: RunConfig, owner: Owner) -> Attempt:
    """A run owned by somebody else."""
    return claim(objects(config), owner, lambda _: None)[0]


def elsewhere(**changes: Any) -> Owner:
    """An owner on another machine, of whom nothing is known but its lease."""
    return Owner(**{"host": "node7", "machine": "beefbeef", "pid": 4242, "user": "ann", **changes})


def test_a_retry_of_the_same_flow_run_takes_over_at_once(tmp_path, storage_path):
    """It has a higher run count; no lease is waited for, and it takes the latest whatever `resume` says."""
    config = make_config(storage_path, resume="none", lease_time=3600)
    train(config, tmp_path, 0)
    first = elsewhere(flow_run_id="f1", run_count=1)
    with suppress(DiedError), open_run(replace(config, resume="latest"), owner=first):
        raise DiedError
    objects(config).delete(["attempts/0002.end.json"])
    with open_run(config, owner=elsewhere(flow_run_id="f1", run_count=2)):
        assert get_checkpoint().seq == 0


def test_a_dead_process_of_this_machine_is_taken_over_at_once(storage_path):
    """Its pid is nobody's, or another process's by now: no lease is waited for."""
    config = make_config(storage_path, lease_time=3600)
    claimed_by(config, Owner(started=1))
    with open_run(config) as run:
        assert run.destination.attempt == 2
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    config = replace(config, name="other")
    claimed_by(config, Owner(pid=gone))
    with open_run(config) as run:
        assert run.destination.attempt == 2


def test_a_living_owner_is_not_replaced(storage_path, tmp_path):
    """The newcomer is refused, the error names the owner, and the owner goes on unharmed."""
    config = make_config(storage_path, lease_time=1.0)
    with open_run(config, owner=elsewhere(flow_run_id="f7")) as run:
        with (
            pytest.raises(RunBusyError, match=r"attempt 1 .process 4242 of ann on node7, flow run f7.*alive"),
            open_run(config),
        ):
            raise AssertionError
        report(run, tmp_path, 0)
    assert states(run.result) == ["committed"]


def test_a_run_that_this_process_has_open_is_busy(storage_path):
    """Two drivers in one process are two drivers."""
    config = make_config(storage_path, lease_time=1.0)
    with open_run(config), pytest.raises(RunBusyError), open_run(config):
        raise AssertionError


def test_a_silent_owner_is_taken_over_after_its_lease(storage_path):
    """No sign of life for a whole lease time; the end record makes that wait unnecessary."""
    config = make_config(storage_path)
    silent = claimed_by(config, elsewhere(lease_time=0.3))
    waited: list[float] = []
    newcomer = elsewhere(machine="cafecafe", pid=1)
    attempt, *_ = claim(objects(config), newcomer, lambda _: None, lease_time=0.3, wait=lambda s: _sleep(waited, s))
    assert (attempt.number, bool(waited)) == (2, True)
    with pytest.raises(FencedError, match=r"attempt 1 of .* was replaced by attempt 2 .process 1 of ann on node7"):
        silent.check_fence()
    attempt.end("ended")
    waited.clear()
    assert claim(objects(config), elsewhere(), lambda _: None, wait=lambda s: _sleep(waited, s))[0].number == 3
    assert not waited


def _sleep(waited: list[float], seconds: float) -> None:
    waited.append(seconds)
    threading.Event().wait(seconds)


def test_of_eight_claims_at_once_one_wins(storage_path):
    """Seven are refused or fenced; exactly one starts."""
    config = make_config(storage_path)
    outcomes: list[object] = []

    def try_to() -> None:
        try:
            outcomes.append(claim(objects(config), Owner(), lambda _: None, lease_time=0.5))
        except (RunBusyError, FencedError) as error:
            outcomes.append(error)

    # The winner gives signs of life as `open_run` does.
    threads = [threading.Thread(target=try_to) for _ in range(8)]
    alive = threading.Event()

    def beat() -> None:
        while not alive.wait(0.05):
            for outcome in outcomes:
                if isinstance(outcome, tuple):
                    outcome[0].renew()

    beating = threading.Thread(target=beat)
    beating.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    alive.set()
    beating.join(DEADLINE)
    winners = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert len(outcomes) == 8
    assert len(winners) == 1
    winners[0][0].end("ended")


def test_a_fenced_owner_stops_and_keeps_what_it_has(tmp_path, storage_path, wrap_storage):
    """Its upload under way ends FENCED with the local copy kept, its next report raises, it prunes and publishes nothing."""
    wrap_storage(SlowStorage, "create", pattern="commits/000001*")
    config = make_config(
        storage_path, checkpoint_config=CheckpointConfig(retention=KeepLast(1)), failure_policy=LENIENT
    )
    with open_run(config, owner=Owner(started=1)) as run:
        report(run, tmp_path, 0).wait(DEADLINE)
        assert run.publisher.wait_published(1, DEADLINE)
        handle = report(run, tmp_path, 1)
        storage_of(run).wait_until_held()
        successor, start, _ = claim(objects(config), Owner(), lambda found: None)
        before = {entry.key for entry in objects(config).list()}
        storage_of(run).gate.set()
        record = handle.wait(DEADLINE)
        assert run.publisher.wait_published(2, DEADLINE)
        with pytest.raises(FencedError, match=r"another driver took|was replaced by attempt 2"):
            run.report({"epoch": 2})
    successor.end("ended")
    assert record.state is ReportState.FENCED
    assert "was replaced by attempt 2" in record.reason
    kept = Path(record.reason.rpartition("kept at ")[2].rstrip(")"))
    assert (kept / "epoch").read_text() == "1"
    assert (tmp_path / "1-1" / "epoch").read_text() == "1"
    assert start.first_seq == 1
    made = {entry.key for entry in objects(config).list()} - before
    assert made == {"commits/000001.a1.json", "attempts/0001.end.json", "attempts/0002.end.json"}
    assert [commit.seq for commit in open_run_files(run.uri).counting] == [0]


def test_a_fenced_owner_that_only_reports_metrics_publishes_nothing(tmp_path, storage_path):
    """Rows that a newer attempt has not seen are not written, and the owner learns of it at its next report."""
    config = make_config(storage_path)
    with open_run(config, owner=Owner(started=1)) as run:
        report(run, tmp_path, 0).wait(DEADLINE)
        assert run.publisher.wait_published(1, DEADLINE)
        eventually(run.publisher.next_flush, lambda due: due is None)
        rows = [entry.key for entry in objects(config).list("history/")]
        successor, *_ = claim(objects(config), Owner(), lambda _: None)
        successor.end("ended")
        run.report({"epoch": 1}).wait(DEADLINE)
        eventually(lambda: run.publisher.fenced, bool)
        with pytest.raises(FencedError):
            run.report({"epoch": 2})
    assert [row.metrics for row in run.result.history] == [{"epoch": 0}, {"epoch": 1}]
    assert [entry.key for entry in objects(config).list("history/")] == rows != []
    assert "result.json" not in {entry.key for entry in objects(config).list()}


def test_an_attempt_that_was_replaced_before_it_started_cannot_start(storage_path, tmp_path):
    """Its place is taken before the newcomer looks, so that it supersedes nothing when it wakes up."""
    config = make_config(storage_path)
    train(config, tmp_path, 0)
    store = objects(config)
    woken: list[BaseException] = []

    def slow(found: Any) -> None:
        claim(store, elsewhere(flow_run_id="f", run_count=2), lambda _: None)

    try:
        claim(store, elsewhere(flow_run_id="f", run_count=1), slow)
    except FencedError as error:
        woken.append(error)
    assert woken
    lineage = open_run_files(join_uri(storage_path, "run")).lineage
    assert sorted(lineage.starts) == [1, 3]
    assert lineage.void == {2}
    assert lineage.counts(CommitId(0, 1))


def test_a_store_that_ignores_create_is_warned_about_and_one_process_is_right(tmp_path, caplog, monkeypatch):
    """What cannot be enforced is said; a single driver's run, its restart and its retention work all the same."""

    class Careless(WrappedStorage):
        def create(self, key: str, data: bytes) -> None:
            self.inner.write(key, data)

    _wrap(monkeypatch, Careless)
    config = make_config(MemoryStorage().uri, checkpoint_config=CheckpointConfig(num_to_keep=2))
    train(config, tmp_path, 0, 1, 2)
    assert "ignores the condition of a conditional create" in caplog.text
    run_id = loads(objects(config).read("run.json"), "run.json")["run_id"]
    result = train(config, tmp_path, 3)
    assert loads(objects(config).read("run.json"), "run.json")["run_id"] == run_id
    assert states(result) == ["committed"] * 4
    assert [checkpoint.seq for checkpoint, _ in result.best_checkpoints] == [2, 3]


def test_a_lost_last_checkpoint_is_said_at_the_end_and_the_next_run_goes_on(tmp_path, storage_path, wrap_storage):
    """The error carries the result; what was committed before is what the next run takes."""
    config = make_config(storage_path)

    def failing(checkpoint, name):
        raise OSError("no")

    def train_badly(run: Run) -> None:
        report(run, tmp_path, 0)
        run.report({}, make_checkpoint(tmp_path / "x"), checkpoint_upload_fn=failing)

    with pytest.raises(CheckpointsLostError, match="the last checkpoint, report 1") as caught, open_run(config) as run:
        train_badly(run)
    assert states(caught.value.result) == ["committed", "failed"]
    with open_run(config) as run:
        assert get_checkpoint().seq == 0
        report(run, tmp_path, 1)
