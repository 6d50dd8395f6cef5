"""URIs, options, credentials, retrying, and the wrappers that tests are made of."""

import asyncio
import logging
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import errors
from ckpt._fsspec import FsspecStorage
from ckpt._local import LocalStorage
from ckpt._memory import MemoryStorage
from ckpt._retry import RetryingStorage
from ckpt._s3 import S3Storage
from ckpt._transfer import Budget, HighWater, Watch
from ckpt.credentials import check_credentials, check_storage_options, merged, redact, resolve_credentials
from ckpt.storage import check_key, join_uri, normalize_uri, open_storage, scheme_of
from ckpt.testing import (
    BAD_KEYS,
    ODD_NAMES,
    CountingStorage,
    FailingStorage,
    FailOnceStorage,
    RecordingStorage,
    SlowStorage,
)

IGNORE = lambda count: None  # noqa: E731

# ----------------------------------------------------------------------------------------------------------------- URIs


@pytest.mark.parametrize(
    ("uri", "normal"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket//a///b/", "s3://bucket/a/b"),
        ("s3://bucket/./a/.", "s3://bucket/a"),
        ("S3A://Bucket/A", "s3://Bucket/A"),
        ("gcs://bucket/a", "gs://bucket/a"),
        ("abfs://container@account.dfs.core.windows.net/a/", "abfs://container@account.dfs.core.windows.net/a"),
        ("sftp://user@host//srv/a", "sftp://user@host/srv/a"),
        ("hdfs:///a/b", "hdfs:///a/b"),
        ("memory://m/", "memory://m"),
        ("file:///srv//runs/", "/srv/runs"),
        ("/srv//runs/./a/", "/srv/runs/a"),
        ("//srv/runs", "/srv/runs"),
        ("/", "/"),
        ("/a b/\u00fc%20#?", "/a b/\u00fc%20#?"),
        (Path("/srv/runs"), "/srv/runs"),
    ],
)
def test_a_location_has_one_spelling(uri, normal):
    assert normalize_uri(uri) == normal
    assert normalize_uri(normal) == normal


def test_a_relative_path_becomes_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert normalize_uri("runs/a") == f"{tmp_path}/runs/a"
    assert normalize_uri(Path("runs")) == f"{tmp_path}/runs"
    assert normalize_uri("~/runs") == "/home/me/runs"


@pytest.mark.parametrize(
    "uri",
    [
        "", " ", "s3://", "s3:///", "s3:///key", "gs://", "memory://", "../runs", "/a/../b", "s3://bucket/../x",
        "/a\0b",
        "s3://b/a\nb", "file://relative/path", "file://", "simplecache::s3://bucket/a",
    ],
)  # fmt: skip
def test_a_location_that_can_never_work_is_refused(uri):
    with pytest.raises(errors.ConfigError):
        normalize_uri(uri)


def test_a_password_in_a_uri_is_refused_and_not_repeated():
    with pytest.raises(errors.ConfigError, match="credentials=") as caught:
        open_storage("sftp://user:hunter2@host/srv")
    assert "hunter2" not in str(caught.value)


def test_joining_goes_down_only():
    assert join_uri("s3://bucket/", "a", "b/c/") == "s3://bucket/a/b/c"
    assert join_uri("s3://bucket") == "s3://bucket"
    assert join_uri("/", "a") == "/a"
    assert join_uri("/srv//runs/", "", "a") == "/srv/runs/a"
    for part in ("/a", "../a", "a/../..", "a\0"):
        with pytest.raises(errors.ConfigError):
            join_uri("/srv", part)


@given(st.text(max_size=30))
def test_a_key_is_taken_as_it_is_or_refused(key):
    try:
        assert check_key(key) == key
    except errors.ConfigError:
        return
    assert join_uri("s3://bucket/root", key) == f"s3://bucket/root/{key}"


def test_names_that_people_have_are_keys_and_bad_ones_are_not():
    for name in ODD_NAMES:
        assert check_key(f"a/{name}") == f"a/{name}"
    for key in BAD_KEYS:
        with pytest.raises(errors.ConfigError):
            check_key(key)


def test_the_scheme_chooses_the_storage(tmp_path):
    kinds = {
        str(tmp_path): LocalStorage,
        f"file://{tmp_path}": LocalStorage,
        "memory://x": MemoryStorage,
        "s3://bucket/a": S3Storage,
        "sftp://host/srv": FsspecStorage,
    }
    for uri, kind in kinds.items():
        storage = open_storage(uri)
        assert type(getattr(storage, "inner", storage)) is kind
        assert storage.uri == normalize_uri(uri)
        assert type(pickle.loads(pickle.dumps(storage))) is type(storage)


def test_memory_storages_with_one_uri_see_the_same_objects():
    one, two, below = open_storage("memory://shared/run"), open_storage("memory://shared/run/"), None
    one.write("a/b", b"1")
    below = open_storage("memory://shared/run/a")
    assert two.read("a/b") == below.read("b") == b"1"
    assert list(open_storage("memory://shared/ru").list()) == []
    assert MemoryStorage().uri != MemoryStorage().uri


def test_a_scheme_that_nobody_knows_is_a_configuration_error():
    with pytest.raises(errors.ConfigError, match="nonsense"):
        open_storage("nonsense://a/b").read("c")


def test_importing_the_storage_module_imports_no_client():
    clients = {"s3fs", "fsspec", "boto3", "botocore", "aiohttp", "torch", "prefect"}
    script = f"import sys, ckpt.storage; print(sorted({clients} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[]\n"


# ---------------------------------------------------------------------------------------------- options and credentials


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"key": "x"}, "key"),
        ({"secret": "x"}, "secret"),
        ({"token": "x"}, "token"),
        ({"password": "x"}, "password"),
        ({"aws_secret_access_key": "x"}, "aws_secret_access_key"),
        ({"account_key": "x"}, "account_key"),
        ({"sas_token": "x"}, "sas_token"),
        ({"connection_string": "x"}, "connection_string"),
        ({"credential": object()}, "credential"),
        ({"client_kwargs": {"aws_session_token": "x"}}, "client_kwargs.aws_session_token"),
        ({"s3_additional_kwargs": {"SSECustomerKey": "x"}}, "s3_additional_kwargs.SSECustomerKey"),
        ({"a": [{"b": {"Secret": "x"}}]}, "a[0].b.Secret"),
        ({"endpoint_url": "https://me:x@host"}, "endpoint_url"),
        ({"headers": {"Authorization": "Bearer x"}}, "headers.Authorization"),
    ],
)
def test_an_option_that_carries_a_secret_is_named_and_its_value_is_not(options, named):
    with pytest.raises(errors.ConfigError, match="credentials=") as caught:
        check_storage_options(options)
    assert repr(named) in str(caught.value)
    assert "'x'" not in str(caught.value)
    assert "me:x" not in str(caught.value)


def test_options_without_secrets_are_taken():
    options = {
        "endpoint_url": "http://127.0.0.1:9000",
        "anon": True,
        "token": "anon",
        "client_kwargs": {"region_name": "eu-central-1", "verify": False},
        "config_kwargs": {"s3": {"addressing_style": "path"}, "proxies": {"https": "http://proxy:3128"}},
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/x", "BucketKeyEnabled": True},
        "key_filename": "/home/me/.ssh/id",
    }
    assert check_storage_options(options) == options
    assert check_storage_options(None) == {}
    with pytest.raises(errors.ConfigError, match="mapping"):
        check_storage_options("key=x")


@pytest.mark.parametrize("value", ["env", "profile:team a", "block:aws-credentials/prod", dict])
def test_credentials_by_name_or_by_callable(value):
    assert check_credentials(value) is value


@pytest.mark.parametrize(
    "value", ["", "ENV", "profile:", "block:aws", "block:/prod", "block:a/b/c", "secret hunter2", None, 7, {}]
)
def test_credentials_of_another_kind_are_refused_and_not_repeated(value):
    with pytest.raises(errors.ConfigError, match="profile:<name>") as caught:
        check_credentials(value)
    assert "hunter2" not in str(caught.value)


def test_credentials_are_resolved_when_they_are_needed(monkeypatch):
    from importlib import metadata

    assert resolve_credentials("env", "gs") == {}
    assert resolve_credentials("profile:team", "s3") == {"profile": "team"}
    assert resolve_credentials(lambda: {"key": "k"}, "s3") == {"key": "k"}
    with pytest.raises(errors.ConfigError, match="profile of the AWS"):
        resolve_credentials("profile:team", "gs")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    with pytest.raises(errors.ConfigError, match="entry point"):
        resolve_credentials("block:aws-credentials/prod", "s3")

    class Point:
        name, value = "block", "somewhere:load"

        @staticmethod
        def load():
            return lambda ref, protocol: {"key": f"{ref} for {protocol}"}

    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [Point()] if group == "prefect_ckpt.credentials" else []
    )
    assert resolve_credentials("block:aws-credentials/prod", "s3") == {"key": "aws-credentials/prod for s3"}


def test_what_a_block_says_of_a_region_or_endpoint_is_merged_with_the_users_options():
    found = {"key": "k", "client_kwargs": {"endpoint_url": "http://block", "verify": False}}
    options = {"endpoint_url": None, "client_kwargs": {"endpoint_url": "http://mine"}}
    assert merged(found, options) == {
        "key": "k",
        "endpoint_url": None,
        "client_kwargs": {"endpoint_url": "http://mine", "verify": False},
    }


def test_what_a_credentials_callable_raises_is_not_repeated():
    def broken():
        raise ValueError("hunter2")

    with pytest.raises(errors.AccessDeniedError, match="ValueError") as caught:
        resolve_credentials(broken, "s3")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(errors.ConfigError, match="mapping"):
        resolve_credentials(lambda: "hunter2", "s3")


def test_what_urls_give_away_is_taken_out_of_texts():
    text = "GET https://me:hunter2@host/c?sv=1&sig=hunter2&X-Amz-Signature=hunter2&account_key=hunter2 failed"
    assert "hunter2" not in redact(text)
    assert redact("nothing to hide: a=1") == "nothing to hide: a=1"


def test_a_storage_shows_no_credentials():
    storage = open_storage("s3://bucket/a", credentials=lambda: {"secret": "hunter2"})
    assert "credentials" not in repr(storage)


# ------------------------------------------------------------------------------------------------------------- retrying


def _retrying(inner, **options):
    return RetryingStorage(lambda: inner, first_pause=0.01, **{"budget": 5.0, **options})


def test_a_transient_failure_is_tried_again_and_any_other_raised_at_once(tmp_path):
    (tmp_path / "source").write_bytes(b"data")
    verbs = {
        "create": lambda s: s.create("a", b"1"),
        "write": lambda s: s.write("a", b"1"),
        "read": lambda s: s.read("there"),
        "list": lambda s: list(s.list()),
        "delete": lambda s: s.delete(["there"]),
        "upload": lambda s: s.upload(tmp_path / "source", "a", progress=IGNORE),
        "download": lambda s: s.download("there", tmp_path / "target", progress=IGNORE),
    }
    for verb, work in verbs.items():
        memory = MemoryStorage()
        memory.write("there", b"x")
        counting = CountingStorage(FailOnceStorage(memory, verb, times=3))
        work(_retrying(counting))
        assert counting.counts[verb] == 4
        counting = CountingStorage(FailOnceStorage(memory, verb, error=errors.AccessDeniedError("no")))
        with pytest.raises(errors.AccessDeniedError):
            work(_retrying(counting))
        assert counting.counts[verb] == 1


def test_trying_again_ends_with_the_budget(caplog):
    counting = CountingStorage(FailOnceStorage(MemoryStorage(), "read", times=1000))
    start = time.monotonic()
    with caplog.at_level(logging.INFO, "ckpt"), pytest.raises(errors.TransientStorageError, match="injected"):
        _retrying(counting, budget=0.3).read("a")
    assert 0.05 < time.monotonic() - start < 5
    assert counting.counts["read"] >= 3
    assert caplog.text.count("injected") == counting.counts["read"] - 1


def test_a_file_that_takes_longer_than_the_budget_gets_three_tries(tmp_path):
    class Slow(FailOnceStorage):
        def around(self, verb, key, work, progress=None):
            time.sleep(0.2)
            return super().around(verb, key, work, progress)

    (tmp_path / "source").write_bytes(b"data")
    _retrying(Slow(MemoryStorage(), "upload", times=2), budget=0.1).upload(tmp_path / "source", "a", progress=IGNORE)


def test_without_a_budget_nothing_is_tried_again():
    counting = CountingStorage(FailOnceStorage(MemoryStorage(), "read"))
    with pytest.raises(errors.TransientStorageError):
        _retrying(counting, budget=0).read("a")
    assert counting.counts["read"] == 1


def test_a_cancellation_is_noticed_while_a_retry_waits(tmp_path):
    (tmp_path / "source").write_bytes(b"data")
    failed = threading.Event()

    class StopError(Exception):
        pass

    def progress(count):
        if failed.is_set():
            raise StopError

    def schedule(verb, key, number):
        failed.set()
        return errors.TransientStorageError("again")

    storage = RetryingStorage(lambda: FailingStorage(MemoryStorage(), schedule), budget=600, first_pause=300)
    with pytest.raises(StopError):
        storage.upload(tmp_path / "source", "a", progress=progress)


def test_progress_over_several_tries_adds_up_to_the_size(tmp_path):
    (tmp_path / "source").write_bytes(bytes(10 * 2**20))
    failing = FailOnceStorage(MemoryStorage(), "upload", times=2, after=True)
    moved = []
    _retrying(failing).upload(tmp_path / "source", "a", progress=moved.append)
    assert sum(moved) == 10 * 2**20


def test_expired_credentials_open_the_storage_again():
    memory = MemoryStorage()
    memory.write("a", b"1")
    opened = []

    def opener():
        opened.append(None)
        error = errors.CredentialsExpiredError("expired") if len(opened) < 3 else None
        return FailingStorage(memory, lambda verb, key, number: error)

    assert RetryingStorage(opener, first_pause=0.01).read("a") == b"1"
    assert len(opened) == 3


# ----------------------------------------------------------------------------------------------------- budget and watch


def test_memory_is_given_out_in_order_and_comes_back_from_who_gave_up():
    async def scenario():
        budget, watch, order = Budget(10), Watch(IGNORE, 60), []

        async def take(name, count):
            held = await budget.acquire(count, watch)
            order.append(name)
            return held

        assert await take("a", 6) == 6
        big = asyncio.ensure_future(take("b", 8))
        small = asyncio.ensure_future(take("c", 2))
        await asyncio.sleep(0)
        assert order == ["a"]  # c would fit, but it is not its turn
        assert budget.try_acquire(1) is None
        big.cancel()
        await asyncio.wait([big, small], timeout=5)
        assert order == ["a", "c"]
        budget.release(6)
        budget.release(2)
        assert await take("more than there is", 99) == 10
        waiting = asyncio.ensure_future(take("d", 10))
        await asyncio.sleep(0)
        budget.release(10)
        waiting.cancel()  # in the same moment in which it gets its turn
        await asyncio.wait([waiting])
        assert budget.try_acquire(10) == 10

    asyncio.run(scenario())


def test_repeated_bytes_are_counted_once():
    seen = []
    count = HighWater(seen.append)
    for tries in ([3, 3], [2, 2, 2, 2], [8, 1]):
        count.restart()
        for moved in tries:
            count(moved)
    assert sum(seen) == 9
    assert min(seen) == 0


# ------------------------------------------------------------------------------------------------------------- wrappers


def test_wrappers_count_record_and_fail_as_told(tmp_path):
    (tmp_path / "source").write_bytes(b"data")
    recording = RecordingStorage(MemoryStorage())
    failing = FailOnceStorage(recording, "write", "b/*", times=2, after=True)
    storage = CountingStorage(failing)
    storage.create("a", b"1")
    for _ in range(2):
        with pytest.raises(errors.TransientStorageError, match="write b/c"):
            storage.write("b/c", b"2")
    storage.write("b/c", b"3")
    storage.upload(tmp_path / "source", "d", progress=IGNORE)
    assert [entry.key for entry in storage.list("b")] == ["b/c"]
    storage.delete(["a", "d"])
    assert storage.counts == {"create": 1, "write": 3, "upload": 1, "list": 1, "delete": 2}
    assert recording.calls == (
        ("create", "a"), ("write", "b/c"), ("write", "b/c"), ("write", "b/c"), ("upload", "d"), ("list", "b"),
        ("delete", "a"), ("delete", "d"),
    )  # fmt: skip
    assert storage.uri == recording.uri


def test_a_slow_storage_waits_for_its_gate_and_can_be_cancelled(tmp_path):
    (tmp_path / "source").write_bytes(b"data")
    slow = SlowStorage(MemoryStorage(), "upload", pattern="held/*")
    slow.upload(tmp_path / "source", "free/a", progress=IGNORE)
    stop = threading.Event()
    ended = []

    def progress(count):
        if stop.is_set():
            raise KeyError("stop")

    def run(key, progress):
        try:
            ended.append(slow.upload(tmp_path / "source", key, progress=progress).size)
        except KeyError:
            ended.append("stopped")

    threads = [threading.Thread(target=run, args=args) for args in (("held/a", progress), ("held/b", IGNORE))]
    for thread in threads:
        thread.start()
    slow.wait_until_held(2)
    stop.set()
    threads[0].join(10)
    assert ended == ["stopped"]
    slow.gate.set()
    threads[1].join(10)
    assert ended == ["stopped", 4]


def test_every_storage_names_its_scheme():
    assert [scheme_of(uri) for uri in ("/a", "file:///a", "s3a://b", "GS://b")] == ["file", "file", "s3", "gs"]
