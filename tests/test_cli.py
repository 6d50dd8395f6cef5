"""The `ckpt` command: what it prints, what it exits with, and what it leaves behind."""

import json
import os
import pty
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pytest
from helpers import make_checkpoint, make_config
from servers import moto_server  # noqa: F401 - a fixture

import ckpt.checkpoint
from ckpt import CheckpointConfig, CheckpointUploadMode, Result, errors, open_run, record_evaluation
from ckpt.testing import WrappedStorage
from ckpt.uploading import upload_standalone
from ckpt_tasks import _rows, _tables, _terminal, cli
from ckpt_tasks._progress import transfer

FILES = {"model.pt": b"w" * 3000, "sub/part 1.bin": b"p" * 10, "empty.bin": b""}
SYNC = CheckpointUploadMode.SYNC


@pytest.fixture
def command(capsys, monkeypatch):
    """A command in this process, as a call that gives its exit code, stdout and stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("CKPT_DEBUG", raising=False)

    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def document(command):
    """What a command prints with `--json`; it has to succeed."""

    def run(*arguments):
        code, out, err = command(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


def make_run(storage_path, tmp_path: Path, name="digits", losses=(0.5, 0.25, 0.75), files=None, **changes) -> str:
    """A finished run of one checkpoint per loss, and a report without one at the end; returns where it is."""
    ranked = CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min")
    with open_run(make_config(storage_path, name, checkpoint_config=ranked, **changes)) as run:
        for index, loss in enumerate(losses):
            folder = tmp_path / f"local-{uuid4().hex}"
            checkpoint = make_checkpoint(folder, files or FILES)
            (folder / "nothing/in here").mkdir(parents=True)
            (folder / next(iter(files or FILES))).chmod(0o640)
            checkpoint.set_metadata({"note": f"number {index}"})
            run.report({"loss": loss, "val": {"acc": index}}, checkpoint, checkpoint_upload_mode=SYNC)
        run.report({"loss": float("nan")})
    return f"{storage_path}/{name}"


@pytest.fixture
def digits(tmp_path: Path) -> str:
    return make_run(tmp_path / "runs", tmp_path)


def restored(folder: Path) -> dict[str, object]:
    """What is in a folder: bytes of files, None for folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


WHOLE = {**FILES, "sub": None, "nothing": None, "nothing/in here": None}


# ------------------------------------------------------------------------------------------------------------ ls


def test_ls_lists_the_runs_of_a_storage_path(storage_path, tmp_path, command, document):
    for name in ("digits", "letters"):
        make_run(storage_path, tmp_path, name)
    code, out, err = command("ls", storage_path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["digits", "letters"]
    assert "completed" in lines[2]
    (first, _) = document("ls", storage_path)["runs"]
    assert (first["name"], first["checkpoints"], first["latest_seq"], first["reports"]) == ("digits", 3, 2, 4)
    assert first["nbytes"] == 3 * 3010


def test_ls_lists_the_committed_checkpoints_of_a_run_with_their_marks(digits, command, document):
    assert command("pin", f"{digits}@0")[0] == 0
    record_evaluation(f"{digits}@0", {"top5": 0.125})
    _, out, _ = command("ls", digits)
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:5] == ["seq", "name", "loss", "val/acc", "top5"]
    assert [line[0] for line in lines[2:]] == ["0", "1", "2"]
    assert [line[-1] for line in lines[2:]] == ["pinned", "best", "latest"]
    rows = document("ls", digits)["checkpoints"]
    assert [(row["seq"], row["latest"], row["best"], row["pinned"]) for row in rows] == [
        (0, False, False, True), (1, False, True, False), (2, True, False, False),
    ]  # fmt: skip
    assert rows[0]["metrics"] == {"loss": 0.5, "val": {"acc": 0}, "top5": 0.125}


def test_unpin_lifts_the_pin(digits, command, document):
    command("pin", f"{digits}@0")
    command("unpin", f"{digits}@0")
    assert not any(row["pinned"] for row in document("ls", digits)["checkpoints"])


def test_ls_says_so_where_there_is_nothing(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("ls")
    assert (code, out) == (3, "")
    assert err == f"ckpt: no folder is at {tmp_path}/runs; give the storage path of your runs, or a run in it\n"
    (tmp_path / "runs").mkdir()
    assert command("ls") == (0, "no runs directly under ./runs\n", "")


def test_ls_of_a_run_without_checkpoints_says_where_to_look(tmp_path, command):
    run = make_run(tmp_path, tmp_path, losses=())
    code, out, _ = command("ls", run)
    assert code == 0
    assert "no committed checkpoint" in out


# ---------------------------------------------------------------------------------------------------------- show


def test_show_tells_everything_about_a_run(digits, command, document):
    code, out, err = command("show", digits)
    assert (code, err) == (0, "")
    for said in ("completed", "@2  ", "@1  ", "loss, min is best", "3 committed and retained", "4 reports", "scratch"):
        assert said in out
    view = document("show", digits)
    assert view["run"] == "digits"
    assert [report["seq"] for report in view["reports"]] == [0, 1, 2, 3]
    assert view["reports"][3]["metrics"] == {"loss": "NaN"}
    assert view["totals"]["checkpoints"] == 3
    assert [(row["attempt"], row["status"], row["first_seq"]) for row in view["attempts"]] == [(1, "ended", 0)]


def test_show_names_failed_reports_with_their_reasons(tmp_path, command):
    def broken(checkpoint, name):
        raise RuntimeError("the disk [of ours] is full")

    with open_run(make_config(tmp_path, "digits")) as run:
        with pytest.raises(errors.UploadFailedError):
            run.report({}, make_checkpoint(tmp_path / "a"), checkpoint_upload_fn=broken, checkpoint_upload_mode=SYNC)
        run.report({}, make_checkpoint(tmp_path / "b"), checkpoint_upload_mode=SYNC)
    _, out, _ = command("show", tmp_path / "digits")
    assert "not committed" in out
    assert "the disk [of ours] is full" in out
    assert "1 failed" in out


def test_show_lists_the_newest_reports_and_all_of_them_on_demand(tmp_path, command, document):
    with open_run(make_config(tmp_path, "digits")) as run:
        for step in range(60):
            run.report({"step": step})
    view = document("show", tmp_path / "digits")
    assert [report["seq"] for report in view["reports"]] == list(range(10, 60))
    assert (view["nreports"], view["totals"]["reports"]) == (60, 60)
    assert "--all shows 10 older ones too" in command("show", tmp_path / "digits")[1]
    assert len(document("show", tmp_path / "digits", "--all")["reports"]) == 60


def test_show_tells_a_run_that_goes_on_from_one_that_ended(tmp_path, document):
    with open_run(make_config(tmp_path, "digits")) as run:
        run.report({}, make_checkpoint(tmp_path / "a"), checkpoint_upload_mode=SYNC)
        assert document("show", tmp_path / "digits")["state"] == "running or killed"
    with pytest.raises(ZeroDivisionError), open_run(make_config(tmp_path, "digits")):
        raise ZeroDivisionError("oops")
    view = document("show", tmp_path / "digits")
    assert (view["state"], view["error"]) == ("failed", "ZeroDivisionError: oops")
    assert [row["resumed_from"] for row in view["attempts"]] == [None, "@0"]


@pytest.mark.parametrize(
    ("which", "seq"),
    [
        ("latest", 2), ("best", 1), ("0", 0), ("best:loss:max", 2), ("best:val/acc:max", 2),
    ],
)  # fmt: skip
def test_show_of_a_reference_tells_everything_about_the_checkpoint(digits, command, document, which, seq):
    ref = f"{digits}@{which}"
    record_evaluation(ref, {"top5": 0.125})
    code, out, _ = command("show", ref)
    assert code == 0
    manifest = Result.from_path(digits).best_checkpoints[seq][0].manifest
    digest = manifest.files[0].digest
    for said in (f"{seq} (attempt 1)", "model.pt", digest, "640", "top5", f"number {seq}", "nothing/in"):
        assert said in out
    shown = document("show", ref)
    assert (shown["seq"], shown["nbytes"], shown["metrics"]["top5"]) == (seq, 3010, 0.125)
    assert Path(shown["commit_uri"]).is_file()
    assert {file["path"] for file in shown["files"]} == set(FILES)
    assert document("show", shown["uri"])["commit_uri"] == shown["commit_uri"]


# -------------------------------------------------------------------------------------------------------- verify


def test_verify_of_a_whole_run_is_content(storage_path, tmp_path, command, document):
    run = make_run(storage_path, tmp_path)
    code, out, err = command("verify", run)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["ok", "ok", "ok", "3"]
    assert document("verify", f"{run}@best", "--no-content")["checkpoints"][0]["ok"]


def test_verify_names_the_file_in_which_a_byte_differs(digits, command, capsys):
    damaged = Path(ckpt.resolve(f"{digits}@1").uri) / "sub/part 1.bin"
    damaged.write_bytes(b"p" * 9 + b"q")
    code, out, _ = command("verify", digits)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == ["ok", "DIFFERS", "sub/part", "ok", "3"]
    assert "  sub/part 1.bin has digest" in out
    assert command("verify", f"{digits}@0", f"{digits}@2")[0] == 0
    assert command("verify", digits, "--no-content")[0] == 0
    code, out, _ = command("verify", digits, "--json")
    assert code == 1
    assert [row["ok"] for row in json.loads(out)["checkpoints"]] == [True, False, True]
    code, _, err = command("restore", f"{digits}@1", "--to", Path(digits).parent / "out")
    assert code == 1
    assert "sub/part 1.bin" in err


def test_verify_names_missing_files_and_commits_that_cannot_be_read(digits, command):
    (Path(ckpt.resolve(f"{digits}@1").uri) / "model.pt").unlink()
    (Path(digits) / "commits/000002.a1.json").write_text("{")
    code, out, _ = command("verify", digits, "--no-content")
    assert code == 1
    assert "  model.pt is missing" in out
    assert "its commit object cannot be read" in out
    assert "3 checkpoints, 2 with problems" in out


def test_verify_looks_every_reference_up_before_it_reads_a_byte(digits, command):
    code, out, err = command("verify", digits, f"{digits}@77")
    assert (code, out) == (3, "")
    assert "@77" in err


def test_verify_without_a_target_is_wrong_usage(command):
    assert command("verify")[0] == 2


# ------------------------------------------------------------------------------------------------------- restore


def test_restore_brings_back_files_modes_and_empty_folders(storage_path, tmp_path, command, document):
    run = make_run(storage_path, tmp_path)
    target = tmp_path / "out"
    target.mkdir()
    code, out, err = command("restore", f"{run}@best", "--to", target)
    assert (code, err) == (0, "")
    assert restored(target) == WHOLE
    assert stat.S_IMODE((target / "model.pt").stat().st_mode) == 0o640
    assert out.splitlines() == [
        f"restored checkpoint 1 (3 files, 2.9 KiB) to {target}",
        f"load it: torch.load('{target}/model.pt', weights_only=True)",
    ]
    said = document("restore", run, "--to", tmp_path / "deep/er")
    assert (said["seq"], said["directory"], said["files"]) == (2, str(tmp_path / "deep/er"), 3)


def test_restore_says_how_to_load_only_what_torch_saved(tmp_path, command):
    run = make_run(tmp_path / "runs", tmp_path, files={"weights.bin": b"w"})
    assert "torch.load" not in command("restore", run, "--to", tmp_path / "out")[1]


def test_restore_does_not_touch_a_folder_that_has_content(digits, tmp_path, command):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    code, out, err = command("restore", digits, "--to", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err == f"ckpt: cannot restore into {tmp_path}/out: it exists and is not an empty directory; name a new one\n"
    assert restored(tmp_path / "out") == {"mine": b"mine"}


def test_a_standalone_checkpoint_is_shown_verified_and_restored_by_its_place(tmp_path, command):
    place = str(tmp_path / "store/model@v1")
    upload_standalone(make_checkpoint(tmp_path / "a", FILES), place, metrics={"loss": float("-inf")})
    code, out, _ = command("show", place, "--json")
    assert code == 0
    assert json.loads(out)["metrics"] == {"loss": "-Infinity"}
    assert json.loads(out)["commit_uri"] == f"{place}.manifest.json"
    assert command("verify", place)[0] == 0
    assert command("restore", place, "--to", tmp_path / "out")[0] == 0
    assert (tmp_path / "out/model.pt").read_bytes() == FILES["model.pt"]


class Interrupting(WrappedStorage):
    """Its downloads do not end by themselves; the first to begin sends the process a signal."""

    number = signal.SIGINT
    _sent = threading.Lock()

    def download(self, key, target, *, progress):
        pause = threading.Event()
        if self._sent.acquire(blocking=False):
            pause.wait(0.2)  # so that the main thread waits for the transfers by then
            os.kill(os.getpid(), self.number)
        for _ in range(300):
            progress(1)
            pause.wait(0.1)
        raise AssertionError("the transfer was not cancelled")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_restore_stops_at_once_and_leaves_nothing(digits, tmp_path, command, monkeypatch, number):
    plain = ckpt.reading.open_storage
    monkeypatch.setattr(Interrupting, "number", number)
    monkeypatch.setattr(Interrupting, "_sent", threading.Lock())
    monkeypatch.setattr(ckpt.reading, "open_storage", lambda *given, **named: Interrupting(plain(*given, **named)))
    before = sorted(tmp_path.iterdir())
    if number == signal.SIGINT:
        code, out, err = command("restore", digits, "--to", tmp_path / "out")
        assert (code, out, err) == (130, "", "ckpt: interrupted\n")
    else:
        with pytest.raises(SystemExit, match="143"):
            command("restore", digits, "--to", tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_the_signals_are_their_owners_again_after_a_transfer():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with transfer("x", 1) as moved:
        moved(1)
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --------------------------------------------------------------------------------------------------------- prune


def test_prune_deletes_what_no_rule_keeps(digits, command, document):
    assert document("prune", digits, "--keep-last", "1") == {
        "run": digits,
        "deleted": [f"{digits}/checkpoints/checkpoint_000000-a1"],  # 1 is the best, 2 the latest
    }
    assert [row["seq"] for row in document("ls", digits)["checkpoints"]] == [1, 2]
    assert document("ls", Path(digits).parent)["runs"][0]["state"] == document("show", digits)["state"] == "completed"
    assert command("prune", digits, "--keep-best", "1:loss:min")[1] == "0 checkpoints deleted\n"


@pytest.mark.parametrize("rule", [(), ("--keep-best", "loss"), ("--keep-best", "1:loss:most"), ("--keep-last", "0")])
def test_prune_refuses_rules_that_cannot_be_meant(digits, command, document, rule):
    code, out, err = command("prune", digits, *rule)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert len(document("ls", digits)["checkpoints"]) == 3


def test_gc_removes_what_no_commit_names_and_says_so_before(digits, command, document):
    left = Path(digits) / "checkpoints/crashed-a1/model.pt"
    left.parent.mkdir()
    left.write_bytes(b"12345")
    said = document("gc", digits, "--dry-run")
    assert (said["locations"], said["files"], said["nbytes"]) == ([str(left.parent)], 1, 5)
    assert left.exists()
    assert command("gc", digits)[1] == f"removed {left.parent}\nremoved 1 files, 5 B\n"
    assert not left.exists()
    assert command("verify", digits)[0] == 0
    view = document("show", digits)
    assert (view["state"], view["attempts"][-1]["status"]) == ("completed", "collected")


# -------------------------------------------------------------------------------------- errors, names, terminals


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CorruptCheckpointError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.CheckpointNotFoundError("x"), 3),
        (errors.BucketNotFoundError("x"), 3),
        (errors.AccessDeniedError("x"), 4),
        (errors.NewerFormatError("x"), 4),
        (PermissionError(13, "denied", "x"), 4),
        (errors.RunBusyError("x"), 5),
        (ZeroDivisionError("x"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_kind_of_error_has_its_exit_code_and_one_line(command, monkeypatch, error, code):
    def fail(*_given, **_named):
        raise error

    monkeypatch.setattr(_rows, "open_run_files", fail)
    got, out, err = command("ls", "/somewhere")
    assert (got, out) == (code, "")
    assert err.startswith("ckpt: ")
    assert err.count("\n") == 1
    assert "Traceback" in command("ls", "/somewhere", "--debug")[2]
    monkeypatch.setenv("CKPT_DEBUG", "1")
    assert "Traceback" in command("ls", "/somewhere")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",), ("ls", "--nonsense"), ("show",), ("restore", "x"), ("show", "./x@y"),
        ("ls", "--storage-option", "novalue"), ("ls", "--storage-option", "secret=AKIA123"),
        ("ls", "--credentials", "AKIA123"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_that_repeats_no_secret(tmp_path, command, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*arguments)
    assert code == (3 if arguments[0] == "show" and len(arguments) > 1 else 2)
    assert out == ""
    assert err.startswith("ckpt: ")
    assert err.count("\n") == 1
    assert "AKIA123" not in err


def test_help_and_version_are_no_errors(command):
    code, out, _ = command("--help")
    assert code == 0
    assert "Exit codes" in out
    assert "profile:<name>" in command("restore", "--help")[1]
    assert command("--version")[0] == 0


NASTY = "b[red]r :smile: [/]"


def test_odd_names_are_shown_as_they_are(tmp_path, command, document):
    path = tmp_path / "ex@mple [bold]x"
    files = {"we ights [1].pt": b"1", "ü/😀 [/red].bin": b"2"}
    run = make_run(path, tmp_path, NASTY.replace("/", "|"), files=files)
    name = run.rpartition("/")[2]
    assert name in command("ls", path)[1]
    assert [row["name"] for row in document("ls", path)["runs"]] == [name]
    assert command("ls", run)[0] == 0
    assert run in command("show", run)[1]
    out = command("show", f"{run}@1")[1]
    assert all(file in out for file in files)
    assert f"{run}@2" in command("verify", run)[1]
    target = tmp_path / "to [x]"
    assert str(target) in command("restore", f"{run}@best", "--to", target)[1]
    assert {key: data for key, data in restored(target).items() if data is not None} == files


def test_text_that_would_steer_the_terminal_is_escaped(tmp_path, command):
    with open_run(make_config(tmp_path, "digits")) as run:
        run.report({"\x1b[31mred": "\x1b]0;title\x07", "b": "a\u202eb"}, make_checkpoint(tmp_path / "a"))
    for arguments in (("ls", tmp_path / "digits"), ("show", tmp_path / "digits"), ("show", f"{tmp_path}/digits@0")):
        code, out, _ = command(*arguments)
        assert code == 0
        assert "\\x1b[31mred" in out
        assert not {"\x1b", "\x07", "\u202e"} & set(out)


def test_a_narrow_terminal_gets_tables_that_fit(tmp_path, command, monkeypatch):
    losses = [0.123456789 * index for index in range(12)]
    run = make_run(tmp_path / "runs", tmp_path, "a_run_with_quite_a_long_name_of_its_own", losses)
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (("ls", tmp_path / "runs"), ("ls", run), ("show", run), ("show", f"{run}@best")):
        code, out, _ = command(*arguments)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert "…" not in out
    rows = [line.split() for line in command("ls", run)[1].splitlines()]
    assert rows[2:][3][:3] == ["3", "checkpoint_000003", "0.37037"]


def test_what_is_piped_is_neither_wrapped_nor_coloured(tmp_path, command):
    run = make_run(tmp_path / "runs", tmp_path, "n" * 150)
    assert "n" * 150 in command("ls", tmp_path / "runs")[1]
    assert "\x1b" not in "".join(command("show", run)[1] for _ in range(2))


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_sizes_are_binary_and_short(nbytes, text):
    assert _tables.size(nbytes) == text


# ------------------------------------------------------------------------------------------------------ processes


def run_ckpt(*arguments, **options):
    """The command in a process of its own."""
    given = [sys.executable, "-m", "ckpt_tasks.cli", *map(str, arguments)]
    return subprocess.run(given, stdout=subprocess.PIPE, text=True, timeout=60, check=False, **options)


def test_listing_loads_neither_prefect_nor_torch_nor_a_storage_client(digits):
    code = (
        "import sys; from ckpt_tasks.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'prefect', 'torch', 'fsspec', 'boto3', 'pydantic'} & set(sys.modules)), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "ls", digits], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] 0"
    assert "checkpoint_000002" in done.stdout


def test_the_command_ends_with_its_exit_code(digits):
    done = run_ckpt("ls", digits, "--json", stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["checkpoints"]) == 3
    done = run_ckpt("show", f"{digits}@99", stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("ckpt: ")
    assert "commits there: 0, 1, 2" in done.stderr


def test_a_terminal_gets_a_progress_bar_and_a_pipe_stays_clean(digits, tmp_path):
    ours, theirs = pty.openpty()
    try:
        done = run_ckpt(
            "restore", digits, "--to", tmp_path / "out", "--json", stderr=theirs, env={**os.environ, "TERM": "xterm"}
        )
        os.set_blocking(ours, False)
        drawn = os.read(ours, 100_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert json.loads(done.stdout)["nbytes"] == 3010
    assert "restoring checkpoint_000002" in drawn
    assert "2.9/2.9 KiB" in drawn


def test_a_reader_that_has_seen_enough_is_no_error(digits):
    read, write = os.pipe()
    os.close(read)
    given = [sys.executable, "-m", "ckpt_tasks.cli", "show", digits]
    try:
        done = subprocess.run(given, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (_terminal._BROKEN_PIPE, "")


def test_it_works_on_an_object_store_with_storage_options(moto_server, tmp_path, command, monkeypatch):  # noqa: F811
    for name, given in moto_server.env.items():
        monkeypatch.setenv(name, given)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    bucket = f"cli-{uuid4().hex[:8]}"
    moto_server.client().create_bucket(Bucket=bucket)
    endpoint = ("--storage-option", f"endpoint_url={moto_server.endpoint}")
    path = f"s3://{bucket}/some runs"
    run = make_run(path, tmp_path, losses=[0.5], storage_options={"endpoint_url": moto_server.endpoint})
    code, out, err = command("ls", path, *endpoint)
    assert (code, err) == (0, "")
    assert "digits" in out
    assert command("restore", f"{run}@best", "--to", tmp_path / "out", *endpoint)[0] == 0
    assert restored(tmp_path / "out") == WHOLE
    key = "some runs/digits/checkpoints/checkpoint_000000-a1/model.pt"
    moto_server.client().put_object(Bucket=bucket, Key=key, Body=b"v" * 3000)
    code, out, _ = command("verify", run, *endpoint)
    assert code == 1
    assert "model.pt has digest" in out
    code, _, err = command("ls", "s3://no-such-bucket-of-ours/x", *endpoint)
    assert (code, err.count("\n")) == (3, 1)


def test_every_public_name_of_ckpt_tasks_is_found_when_it_is_looked_up():
    code = (
        "import sys, ckpt_tasks; assert 'prefect' not in sys.modules;"
        "from ckpt_tasks import *; print(upload_checkpoint.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout == "upload-checkpoint\n", done.stderr
