"""Input that somebody made up, and disks and clocks that fail: refused by name, nothing written outside, nothing torn."""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, content, make_checkpoint, make_config, reasons, states, storage_of
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import moto_server  # noqa: F401 - a fixture

from ckpt import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailurePolicy,
    KeepLast,
    KeepYounger,
    Result,
    committed,
    list_runs,
    open_run,
    open_storage,
    pin,
    report,
    resolve,
)
from ckpt._dcp import check_shards
from ckpt.errors import (
    CkptError,
    ConfigError,
    CorruptCheckpointError,
    FormatError,
    NewerFormatError,
    RunBusyError,
    StorageFullError,
)
from ckpt.testing import FailingStorage, SlowStorage

# ------------------------------------------------------------------------------------------------------ crafted manifests


@pytest.fixture
def run_uri(storage_path: str, tmp_path: Path) -> str:
    """A run of three checkpoints."""
    with open_run(make_config(storage_path)) as run:
        for number in range(3):
            report({"loss": number}, make_checkpoint(tmp_path / f"ck{number}", {"a": "1", "f/b": "22"}))
    return run.uri


def craft(uri: str, key: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite an object behind everybody's back; `change` gets its body and may return another one."""
    store = open_storage(uri)
    body = json.loads(store.read(key))
    changed = change(body)
    store.write(key, json.dumps(body if changed is None else changed).encode())


def file(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Change fields of a manifest's first file."""
    return lambda body: body["files"][0].update(fields)


def both(*changes: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for one in changes:
            one(body)

    return change


EVIL = {
    "an absolute path": file(path="/tmp/evil"),
    "dots": file(path="../evil"),
    "dots inside": file(path="f/../../evil"),
    "NUL": file(path="ev\0il"),
    "a newline": file(path="ev\nil"),
    "an empty path": file(path=""),
    "an empty part": file(path="f//b"),
    "no text": file(path=["a"]),
    "no Unicode": file(path="\ud800"),
    "a path of 1000 bytes": file(path="x" * 1000),
    "a size that is no number": file(size="3"),
    "a size below 0": file(size=-1),
    "a size that is true": file(size=True),
    "a size that is no whole number": file(size=1.5),
    "a mode that is no number": file(mode="rwx"),
    "a digest that is no text": file(digest=5),
    "a file twice": lambda body: body["files"].append(body["files"][0]),
    "a file that is a folder": lambda body: body["files"].append({"path": "a/b", "size": 1}),
    "an empty folder that is a file": lambda body: body.update(empty_dirs=["a"]),
    "an empty folder below a file": lambda body: body.update(empty_dirs=["a/b"]),
    "an empty folder outside": lambda body: body.update(empty_dirs=["../evil"]),
    "no list of files": lambda body: body.update(files=5),
    "files that are none": lambda body: body.update(files=["a"]),
    "files missing": lambda body: body.pop("files"),
    "a location above": lambda body: body.update(location="../other/checkpoints/x-a1"),
    "a location with dots": lambda body: body.update(location="/tmp/../etc"),
    "a location that is no text": lambda body: body.update(location=5),
    "a location with a password": lambda body: body.update(location="s3://user:pass@bucket/x"),
    "metrics that are a list": lambda body: body.update(metrics=[1]),
    "metadata that is a text": lambda body: body.update(metadata="x"),
    "a seq that is a text": lambda body: body.update(seq="1"),
    "the seq of another report": lambda body: body.update(seq=0),
    "the attempt of another": lambda body: body.update(attempt=7),
    "a time that is a text": lambda body: body.update(created="now"),
    "a float that is none": lambda body: body.update(metrics={"a": {"$float": [1]}}),
    "a format that is a text": lambda body: body.update(format="1"),
    "another kind": lambda body: body.update(kind="manifesto"),
    "no object": lambda body: [body],
}


@pytest.mark.parametrize("change", EVIL.values(), ids=list(EVIL))
def test_a_crafted_manifest_is_no_checkpoint_and_hides_no_other(run_uri, tmp_path, change, caplog):
    """Nothing is restored from it; readers pass it over with a warning that names it, and see the rest of the run."""
    craft(run_uri, "commits/000001.a1.json", change)
    before = set(tmp_path.rglob("*"))
    assert [checkpoint.seq for checkpoint in committed(run_uri)] == [0, 2]
    assert "commits/000001.a1.json" in caplog.text
    assert [checkpoint.seq for checkpoint, _ in Result.from_path(run_uri).best_checkpoints] == [0, 2]
    assert resolve(f"{run_uri}@latest").seq == 2
    assert [run.checkpoints for run in list_runs(run_uri.rpartition("/")[0])] == [2]
    with pytest.raises(CkptError, match=r"000001\.a1\.json|no such committed checkpoint"):
        resolve(f"{run_uri}@1").to_directory(tmp_path / "restored")
    assert set(tmp_path.rglob("*")) == before
    with open_run(make_config(run_uri.rpartition("/")[0])) as run:
        assert run.get_checkpoint().seq == 2


@pytest.mark.parametrize("change", EVIL.values(), ids=list(EVIL))
def test_a_crafted_manifest_of_the_newest_is_passed_over_by_a_resume(run_uri, change):
    """The run goes on from the newest that can be read."""
    craft(run_uri, "commits/000002.a1.json", change)
    with open_run(make_config(run_uri.rpartition("/")[0])) as run:
        assert run.get_checkpoint().seq == 1


@pytest.mark.parametrize(
    "change", [file(size=10**30), file(size=2**62), file(size=0), file(digest="xxh3-128:00")],
    ids=["a size beyond every disk", "a huge size", "no size", "another digest"],
)  # fmt: skip
def test_what_a_manifest_says_wrongly_of_a_file_restores_nothing(run_uri, tmp_path, change):
    """No space is reserved on its word; the file is named."""
    craft(run_uri, "commits/000001.a1.json", change)
    with pytest.raises(CorruptCheckpointError, match=r"a of .* has"):
        resolve(f"{run_uri}@1").to_directory(tmp_path / "restored")
    assert not list(tmp_path.glob("*restored*"))


def test_a_restored_file_is_never_set_user_id(run_uri, tmp_path):
    """Whoever wrote the manifest is not who restores it."""
    craft(run_uri, "commits/000001.a1.json", file(mode=0o6755))
    restored = resolve(f"{run_uri}@1").to_directory(tmp_path / "restored")
    assert stat.S_IMODE((restored / "a").stat().st_mode) == 0o755


def test_a_link_is_no_place_to_restore_to(run_uri, tmp_path):
    """Where it leads somebody else may have chosen; links above it are the user's own way there."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for target in ("link", "broken"):
        with pytest.raises(ConfigError, match="symbolic link"):
            resolve(f"{run_uri}@1").to_directory(tmp_path / target)
    assert not list((tmp_path / "elsewhere").iterdir())
    resolve(f"{run_uri}@1").to_directory(tmp_path / "link/restored")
    assert (tmp_path / "elsewhere/restored/a").read_text() == "1"


def test_a_newer_format_is_refused_by_name(run_uri):
    """Guessing at it could lose data."""
    craft(run_uri, "commits/000001.a1.json", lambda body: body.update(format=2))
    with pytest.raises(NewerFormatError, match=r"000001.*format 2.*upgrade"):
        committed(run_uri)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_manifest_it_is_read_or_refused(tmp_path_factory, data):
    """Any field replaced by any JSON: a checkpoint whose paths stay inside, or a `FormatError`; nothing else."""
    from ckpt.manifest import FileEntry, Manifest, decode_commit

    entry = FileEntry(path="a/b", size=1, digest="xxh3-128:0")
    body = json.loads(Manifest(seq=1, attempt=1, name="x", location="checkpoints/x-a1", files=(entry,)).encode())
    place = data.draw(st.sampled_from([body, body["files"][0]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(json_values)
    try:
        found = decode_commit(json.dumps(body).encode(), "here")
    except FormatError:
        return
    for item in getattr(found, "files", ()):
        assert not item.path.startswith("/")
        assert ".." not in item.path.split("/")
        assert item.size >= 0


# --------------------------------------------------------------------------------------------- other objects, made up too


def nothing_breaks(uri: str) -> None:
    """Every reader gives an answer, or says in an error of this package which object is wrong."""
    root, told = uri.rpartition("/")[0], []
    for read in (
        lambda: committed(uri), lambda: resolve(uri), lambda: resolve(f"{uri}@best:loss:min"), lambda: list_runs(root),
        lambda: list(Result.from_path(uri).history), lambda: repr(Result.from_path(uri).totals),
        lambda: Result.from_path(uri).get_best_checkpoint("loss", "min"),
    ):  # fmt: skip
        try:
            read()
        except CkptError as error:
            told.append(str(error))
    assert all(uri in text for text in told)


RECORDS = ("run.json", "attempts/0001.json", "attempts/0001.start.json", "attempts/0001.end.json", "result.json")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_made_up_records_break_no_reader(data):
    """Any field of run.json, claim, start, end and result replaced by any JSON, or the whole object."""
    uri = _memory_run()
    key = data.draw(st.sampled_from(RECORDS))
    value = data.draw(json_values)

    def change(body: dict[str, Any]) -> Any:
        field = data.draw(st.sampled_from([*sorted(body), ""]))
        if not field:
            return value
        body[field] = value
        return body

    craft(uri, key, change)
    nothing_breaks(uri)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_made_up_rows_and_notes_break_no_reader(data):
    """A damaged row shows as LOST, a damaged note is passed over; the checkpoints are all there."""
    uri = _memory_run()
    store = open_storage(uri)
    value = data.draw(json_values)
    [segment] = [entry.key for entry in store.list("history/")]
    rows = [json.loads(line) for line in store.read(segment).splitlines()]
    rows[1][data.draw(st.sampled_from(sorted(rows[1])))] = value
    store.write(segment, "\n".join(map(json.dumps, rows)).encode())
    note = {"format": 1, "metrics": {"loss": 1}, "pin": None, "source": "x", "created": 1.0}
    note[data.draw(st.sampled_from(sorted(note)))] = data.draw(json_values)
    store.write("notes/000001.a1.abc.json", json.dumps(note).encode())
    try:
        result = Result.from_path(uri)
    except NewerFormatError:
        assert note["format"] != 1
        return
    assert [row.seq for row in result.history] == [0, 1, 2]
    assert [checkpoint.seq for checkpoint, _ in result.best_checkpoints] == [0, 1, 2]
    nothing_breaks(uri)


_made: list[str] = []


def _memory_run() -> str:
    """A fresh run in memory: three rows in one segment."""
    uri = f"memory://hostile-{len(_made)}-{os.getpid()}"
    _made.append(uri)
    store = open_storage(f"{uri}/run")
    for key, data in _template().items():
        store.write(key, data)
    return f"{uri}/run"


def _template() -> dict[str, bytes]:
    if not _objects:
        import tempfile

        with tempfile.TemporaryDirectory() as folder, open_run(make_config("memory://hostile-template")) as run:
            for number in range(3):
                report({"loss": number}, make_checkpoint(Path(folder) / str(number)))
            run.get_all_reported_checkpoints(timeout_s=DEADLINE)
        store = open_storage("memory://hostile-template/run")
        found = {entry.key: store.read(entry.key) for entry in store.list()}
        rows = b"".join(found.pop(key) for key in sorted(found) if key.startswith("history/"))
        _objects.update(found, **{"history/a1-000000-000002.jsonl": rows})
    return _objects


_objects: dict[str, bytes] = {}


@pytest.mark.parametrize(
    "key", ["commits/999999999999.a1.json", "history/a1-999999999999-999999999999.jsonl", "attempts/0001.start.json"]
)
def test_a_made_up_number_of_reports_is_refused_before_it_costs_anything(run_uri, key):
    """No row for each of a million million seqs."""
    if key.startswith("attempts"):
        craft(run_uri, key, lambda body: body.update(first_seq=999999999999))
        open_storage(run_uri).delete(["attempts/0001.end.json"])
    else:
        open_storage(run_uri).create(key, b"{}\n")
    storage_path, _, name = run_uri.rpartition("/")
    with pytest.raises(FormatError, match="damaged or made up"), open_run(make_config(storage_path, name)):
        pass


def test_a_damaged_run_does_not_hide_the_others(storage_path, tmp_path, caplog):
    """`list_runs` passes it over with a warning."""
    for name in ("good", "bad"):
        with open_run(make_config(storage_path, name)):
            report({}, make_checkpoint(tmp_path / name))
    open_storage(f"{storage_path}/bad").write("run.json", b'{"created": "yesterday"}')
    assert [run.name for run in list_runs(storage_path)] == ["good"]
    assert "created is 'yesterday'" in caplog.text


# --------------------------------------------------------------------------------------------- pickles, and odd object keys


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/ckpt-bomb-went-off",)


def test_the_metadata_pickle_of_a_checkpoint_runs_nothing(storage_path, tmp_path):
    """A `.metadata` by anybody: it is read without importing or calling what it names."""
    Path("/tmp/ckpt-bomb-went-off").unlink(missing_ok=True)
    bomb = make_checkpoint(tmp_path / "bomb", {".metadata": pickle.dumps({"storage_data": Bomb()}), "w": "1"})
    with open_run(make_config(storage_path)) as run:
        report({}, bomb)
        report({}, bomb, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    assert states(run.result) == ["committed", "committed"]
    assert not Path("/tmp/ckpt-bomb-went-off").exists()


@pytest.mark.parametrize("data", [b"\x80\x04garbage", b"\x80"])
def test_a_metadata_pickle_that_is_cut_off_fails_its_report(storage_path, tmp_path, data):
    """DCP wrote it last, so nothing of such a checkpoint is sure."""
    with open_run(make_config(storage_path, failure_policy=FailurePolicy(red_on="nothing"))) as run:
        report({}, make_checkpoint(tmp_path / "a", {".metadata": data, "w": "1"}))
        report({}, make_checkpoint(tmp_path / "b", {".metadata": "no pickle: some other tool's file"}))
    assert states(run.result) == ["failed", "committed"]
    assert "CorruptCheckpointError: .metadata cannot be read" in reasons(run.result)[0]


def test_real_dcp_metadata_is_understood(tmp_path):
    """The shards it refers to are looked for, without torch's own classes."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    model = torch.nn.Linear(8, 2)
    dcp.save({"model": model.state_dict(), "epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "dcp").iterdir()}
    store, scratch = open_storage(tmp_path / "dcp"), lambda: nullcontext(tmp_path)
    check_shards(store, "", sizes, scratch)
    [shard] = [name for name in sizes if name.endswith(".distcp")]
    with pytest.raises(CorruptCheckpointError, match=f"bytes of {shard}, which has 5 bytes"):
        check_shards(store, "", {**sizes, shard: 5}, scratch)
    with pytest.raises(CorruptCheckpointError, match=f"{shard}, which is missing"):
        check_shards(store, "", {".metadata": sizes[".metadata"]}, scratch)


def test_what_cannot_be_restored_is_not_committed(moto_server, tmp_path, monkeypatch):  # noqa: F811
    """An object store holds keys that no directory can; a commit of them would be one that nobody can read."""
    for name, value in moto_server.env.items():
        monkeypatch.setenv(name, value)
    client = moto_server.client()
    client.create_bucket(Bucket="odd-keys")
    for place, keys in {"both": ("a", "a/b"), "dots": ("../x", "y"), "empty": ("a//b",)}.items():
        for key in keys:
            client.put_object(Bucket="odd-keys", Key=f"{place}/{key}", Body=b"x")
    policy = FailurePolicy(red_on="nothing", stop_after=None)
    with open_run(make_config(tmp_path / "runs", failure_policy=policy)) as run:
        for place in ("both", "dots", "empty"):
            report({}, Checkpoint(f"s3://odd-keys/{place}"), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        report({}, make_checkpoint(tmp_path / "good"))
    assert states(run.result) == ["failed", "failed", "failed", "committed"]
    assert "'a' is a file and a folder at once" in reasons(run.result)[0]
    assert "'../x' is not a plain relative path" in reasons(run.result)[1]
    assert [checkpoint.seq for checkpoint in committed(run.uri)] == [3]


# --------------------------------------------------------------------------------------------------------------- full disks


def full_after(monkeypatch: pytest.MonkeyPatch, below: Path, nbytes: int) -> None:
    """Files below a folder can take so many bytes more, then the disk is full."""
    plain, left, lock = os.write, [nbytes], threading.Lock()

    def write(fd: int, data: Any) -> int:
        if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(f"{below}/"):
            return plain(fd, data)
        with lock:
            if len(data) > left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left[0] -= len(data)
        return plain(fd, data)

    monkeypatch.setattr(os, "write", write)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_a_disk_that_fills_while_restoring_leaves_nothing(storage_path, tmp_path, monkeypatch):
    """Neither the target nor a part of it; the error says that the disk is full and where."""
    files = {f"f{number}": b"x" * 10_000 for number in range(8)}
    with open_run(make_config(storage_path)) as run:
        report({}, make_checkpoint(tmp_path / "ck", files))
    checkpoint = resolve(run.uri)
    (tmp_path / "disk").mkdir()
    with monkeypatch.context() as patch:
        full_after(patch, tmp_path / "disk", 35_000)
        with pytest.raises(StorageFullError, match=r"write .*disk.*No space left"):
            checkpoint.to_directory(tmp_path / "disk/restored")
    assert list((tmp_path / "disk").iterdir()) == []
    assert len(content(checkpoint, tmp_path / "disk/restored")) == 8


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
@pytest.mark.parametrize("nbytes", [15_000, 40_200], ids=["among the files", "at the commit"])
def test_a_local_storage_that_fills_up_fails_that_report_and_nothing_torn_is_seen(tmp_path, monkeypatch, nbytes):
    """With space again the next report commits; what was staged is kept, and garbage collection finds the rest."""
    from ckpt.collecting import collect

    files = {f"f{number}": b"x" * 10_000 for number in range(4)}
    policy = FailurePolicy(red_on="nothing")
    with open_run(make_config(tmp_path / "runs", failure_policy=policy)) as run:
        report({}, make_checkpoint(tmp_path / "a", files)).wait(DEADLINE)
        with monkeypatch.context() as patch:
            full_after(patch, tmp_path / "runs", nbytes)
            failed = report({}, make_checkpoint(tmp_path / "b", files)).wait(DEADLINE)
        assert [checkpoint.seq for checkpoint in committed(run.uri)] == [0]
        report({}, make_checkpoint(tmp_path / "c", files))
    assert states(run.result) == ["committed", "failed", "committed"]
    assert "StorageFullError" in str(failed.reason)
    assert "No space left" in str(failed.reason)
    assert [checkpoint.seq for checkpoint in committed(run.uri)] == [0, 2]
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.name.startswith(".ckpt-tmp-")]
    collect(run.uri)
    kept = {entry.key.split("/")[1] for entry in open_storage(run.uri).list("checkpoints/")}
    assert kept == {"checkpoint_000000-a1", "checkpoint_000002-a1"}


def test_a_store_without_space_for_its_records_does_not_stop_training(storage_path, tmp_path, wrap_storage):
    """History and leases cannot be written for a while: the rows come later, none is missing."""
    full = threading.Event()

    def schedule(verb: str, key: str, _: int) -> BaseException | None:
        hit = full.is_set() and key.startswith("history/") and verb == "create"
        return StorageFullError(f"{verb} {key}: No space left on device") if hit else None

    wrap_storage(FailingStorage, schedule)
    with open_run(make_config(storage_path)) as run:
        full.set()
        for number in range(3):
            report({}, make_checkpoint(tmp_path / str(number)))
        run.get_all_reported_checkpoints(timeout_s=DEADLINE)
        full.clear()
    assert states(run.result) == ["committed"] * 3
    assert [row.seq for row in Result.from_path(run.uri).history] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------------------- clocks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """`clock[0]` is added to the time of day, for everybody in this process."""
    offset, plain = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: plain() + offset[0])
    return offset


def test_a_clock_that_jumps_changes_neither_order_nor_retention_nor_latest(storage_path, tmp_path, clock):
    """By seq, whatever the clock said: back ten years, forward ten, and back."""
    year = 365 * 86400.0
    config = make_config(storage_path, checkpoint_config=CheckpointConfig(retention=KeepLast(2)))
    with open_run(config) as run:
        for jump in (0, -10, 10, -5, 0):
            clock[0] = jump * year
            report({"jump": jump}, make_checkpoint(tmp_path / f"ck{jump}")).wait(DEADLINE)
    assert [row.metrics["jump"] for row in run.result.history] == [0, -10, 10, -5, 0]
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == [3, 4]
    assert resolve(run.uri).seq == 4
    assert all(0 <= row.timings.queue_wait < DEADLINE for row in run.result.history)
    clock[0] = -20 * year
    with open_run(config) as again:
        assert again.get_checkpoint().seq == 4


def test_a_clock_that_jumps_forward_lets_keep_younger_delete_the_old_but_never_the_protected(
    storage_path, tmp_path, clock
):
    """It goes by this machine's clock, as it says; latest, best and pinned stay all the same."""
    young = CheckpointConfig(retention=KeepYounger(3600), checkpoint_score_attribute="score")
    with open_run(make_config(storage_path, checkpoint_config=young)) as run:
        for number, score in enumerate((1, 9, 2, 3)):
            report({"score": score}, make_checkpoint(tmp_path / str(number))).wait(DEADLINE)
        pin(f"{run.uri}@2")
        clock[0] = 1e9
        report({"score": 0}, make_checkpoint(tmp_path / "last"))
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == [1, 2, 4]


def test_a_living_owner_is_not_replaced_however_wrong_a_clock_is(storage_path, tmp_path, clock, monkeypatch):
    """The newcomer watches the lease change, on a clock of its own that cannot be set."""
    from ckpt.attempts import Owner, claim

    with open_run(make_config(storage_path, lease_time=0.6)) as run:
        report({}, make_checkpoint(tmp_path / "ck"))
        for jump in (1e9, -1e9):
            clock[0] = jump
            stranger = Owner(host="elsewhere", machine="00000000", pid=1, started=1)
            with pytest.raises(RunBusyError, match="alive"):
                claim(open_storage(run.uri), stranger, lambda _: None, lease_time=5)
    assert states(run.result) == ["committed"]


# -------------------------------------------------------------------------------------------------- sources that go wrong


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda path: path.write_bytes(b"x" * 5), "changed"),
        (lambda path: os.truncate(path, 10), "changed|shorter"),
        (lambda path: path.unlink(), "went away|gone"),
        (lambda path: os.utime(path, ns=(1, 1)), "changed"),
    ],
    ids=["rewritten", "truncated", "deleted", "touched"],
)
def test_a_file_that_a_custom_upload_reads_where_it_is_must_not_change(
    storage_path, tmp_path, wrap_storage, spoil, named
):
    """NO_UPLOAD of a local folder hashes it in place: a change meanwhile fails the report, by the file's name."""
    from ckpt.staging import Source

    plain = Source.check
    spoiled = threading.Event()

    def check(self: Any, entry: Any) -> None:
        if self.root == tmp_path / "ck" and not spoiled.is_set():
            spoiled.set()
            spoil(self.root / "model.bin")
        plain(self, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "check", check)
        with open_run(make_config(storage_path, failure_policy=FailurePolicy(red_on="nothing"))) as run:
            checkpoint = make_checkpoint(tmp_path / "ck", {"model.bin": b"y" * 100})
            report({}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
            report({}, make_checkpoint(tmp_path / "good"))
    assert spoiled.is_set()
    assert states(run.result) == ["failed", "committed"]
    assert "model.bin" in reasons(run.result)[0]
    assert any(word in reasons(run.result)[0] for word in named.split("|"))


def test_a_staged_file_that_is_truncated_through_its_other_name_fails_its_report(storage_path, tmp_path, wrap_storage):
    """A hard link shares the bytes; the stat of the call tells."""
    wrap_storage(SlowStorage, "upload")
    with open_run(make_config(storage_path, failure_policy=FailurePolicy(red_on="nothing"))) as run:
        report({}, make_checkpoint(tmp_path / "ck", {"a": b"y" * 100, "b": b"z"}))
        storage_of(run).wait_until_held()
        os.truncate(tmp_path / "ck/a", 10)
        storage_of(run).gate.set()
        report({}, make_checkpoint(tmp_path / "good"))
    assert states(run.result) == ["failed", "committed"]
    assert "a of" in reasons(run.result)[0]
