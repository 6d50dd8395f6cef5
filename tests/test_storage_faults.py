"""A store and a network that misbehave: no torn object, nothing left behind, tried again exactly where that helps."""

import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    SSLError,
)
from faulty_server import answer, cut_answer, damage_body, faulty, hang, hang_up, lose_answer
from test_storage import _bucket_on, _RawS3

from ckpt import errors
from ckpt._s3 import MIN_PART_SIZE, S3Storage
from ckpt._s3_errors import translate
from ckpt.storage import open_storage

LARGE = 3 * MIN_PART_SIZE
IGNORE = lambda count: None  # noqa: E731


@pytest.fixture
def proxy(moto_server, monkeypatch):
    for name, value in moto_server.env.items():
        monkeypatch.setenv(name, value)
    with faulty(moto_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def raw(moto_server):
    raw = _RawS3(moto_server, _bucket_on(moto_server), f"faults/{uuid4().hex}/")
    yield raw
    assert raw.uploads() == []


@pytest.fixture
def uri(raw):
    return f"s3://{raw.bucket}/{raw.prefix}"


@pytest.fixture
def storage(proxy, uri):
    return S3Storage(uri, part_size=MIN_PART_SIZE, stall_timeout=20)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(os.urandom(1000) * (LARGE // 1000))
    return path


class Sum:
    def __init__(self):
        self.total, self.lock = 0, threading.Lock()

    def __call__(self, count):
        with self.lock:
            self.total += count


def on(operation, action, *, times=1000, first=0):
    """Do it to some requests of one operation."""

    def rule(request):
        hit = request.operation == operation and first <= request.number < first + times
        return action if hit else None

    return rule


# -------------------------------------------------------------------------------------------------------------- uploads


@pytest.mark.parametrize(
    "action",
    [answer(503, "SlowDown"), answer(500, "InternalError"), answer(400, "RequestTimeout"), hang_up, lose_answer],
    ids=["503", "500", "timeout", "hang up", "lost answer"],
)
def test_a_part_that_fails_is_sent_again_and_the_others_are_not(proxy, storage, raw, source, action):
    proxy.rule = on("UploadPart", action, first=1, times=2)
    moved = Sum()
    sent = storage.upload(source, "file", progress=moved)
    assert raw.get("file") == source.read_bytes()
    assert moved.total == sent.size == source.stat().st_size
    assert proxy.seen.count("UploadPart") == 3 + 2
    assert proxy.seen.count("CreateMultipartUpload") == 1


def test_a_part_that_is_refused_ends_the_upload_at_once(proxy, storage, raw, source):
    proxy.rule = on("UploadPart", answer(403, "AccessDenied"), first=1)
    with pytest.raises(errors.AccessDeniedError, match=r"upload s3://.*/file: AccessDenied: said the test"):
        storage.upload(source, "file", progress=IGNORE)
    assert raw.keys() == set()
    assert proxy.seen.count("AbortMultipartUpload") == 1


def test_a_part_that_fails_for_good_ends_the_upload(proxy, storage, raw, source, monkeypatch):
    monkeypatch.setattr("ckpt._s3_client._backoff", lambda attempt: 0.0)
    proxy.rule = on("UploadPart", answer(503, "SlowDown"))
    with pytest.raises(errors.TransientStorageError, match="SlowDown"):
        storage.upload(source, "file", progress=IGNORE)
    assert raw.keys() == set()


@pytest.mark.parametrize("action", [lose_answer, hang_up, answer(500, "InternalError")])
def test_the_answer_to_the_last_request_of_an_upload_may_get_lost(proxy, storage, raw, source, action):
    proxy.rule = on("CompleteMultipartUpload", action, times=1)
    sent = storage.upload(source, "file", progress=IGNORE)
    assert raw.get("file") == source.read_bytes()
    assert [entry.etag for entry in storage.list()] == [sent.etag]


def test_a_success_that_is_an_error_in_its_body_is_an_error(proxy, storage, raw, source):
    """S3 answers CompleteMultipartUpload with 200 before it knows, and puts the failure into the body."""
    body = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>later</Message></Error>"
    proxy.rule = on("CompleteMultipartUpload", answer(200, "", body=body), times=1)
    storage.upload(source, "file", progress=IGNORE)
    assert raw.get("file") == source.read_bytes()
    assert proxy.seen.count("CompleteMultipartUpload") == 2


def test_an_upload_that_somebody_aborted_starts_over(proxy, uri, raw, source):
    def rule(request):
        if request.operation == "CompleteMultipartUpload" and request.number == 0:
            raw.client.abort_multipart_upload(
                Bucket=raw.bucket, Key=f"{raw.prefix}file", UploadId=request.query["uploadId"][0]
            )

    proxy.rule = rule
    source.write_bytes(source.read_bytes() * 3)
    moved = Sum()
    open_storage(uri).upload(source, "file", progress=moved)
    assert raw.get("file") == source.read_bytes()
    assert moved.total == source.stat().st_size


@pytest.mark.parametrize("operation", ["UploadPart", "PutObject"])
def test_an_upload_that_hangs_is_a_stall(proxy, uri, raw, source, operation):
    storage = S3Storage(uri, part_size=MIN_PART_SIZE, stall_timeout=1.5)
    if operation == "PutObject":
        source.write_bytes(b"small")
    proxy.rule = on(operation, hang)
    start = time.monotonic()
    with pytest.raises(errors.StalledError, match=r"upload .*file: no byte moved for 1.5 s"):
        storage.upload(source, "file", progress=IGNORE)
    assert 1.4 < time.monotonic() - start < 15
    assert raw.keys() == set()


def test_a_stalled_upload_is_tried_again(proxy, uri, raw, source):
    storage = open_storage(uri, stall_timeout=1.5)
    proxy.rule = on("PutObject", hang, times=1)
    moved = Sum()
    storage.upload(source, "file", progress=moved)
    assert raw.get("file") == source.read_bytes()
    assert moved.total == source.stat().st_size


def test_waiting_for_memory_is_no_stall(proxy, uri, raw, source):
    """Six uploads share the memory of one part, and the store takes its time for each."""

    def slow(handler):
        time.sleep(0.3)
        handler.reply(*handler.forward())

    proxy.rule = on("UploadPart", slow)
    storage = S3Storage(uri, part_size=MIN_PART_SIZE, memory_budget=MIN_PART_SIZE, stall_timeout=2.5)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: storage.upload(source, f"file-{number}", progress=IGNORE), range(6)))
    assert raw.keys() == {f"file-{number}" for number in range(6)}


def test_an_interrupt_of_the_waiting_thread_cancels_the_upload(proxy, uri, raw, source):
    """As Ctrl-C does: nothing goes on behind the back of who gave up."""
    script = """
import os, signal, sys, threading
from pathlib import Path
from ckpt._s3 import S3Storage
timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
def moved(count):
    if not timer.ident:
        timer.start()
try:
    S3Storage(sys.argv[1], part_size=5 * 2**20).upload(Path(sys.argv[2]), "file", progress=moved)
except KeyboardInterrupt:
    sys.exit(7)
"""
    proxy.rule = on("UploadPart", hang)
    ended = subprocess.run([sys.executable, "-c", script, uri, str(source)], timeout=90, check=False)
    assert ended.returncode == 7
    assert raw.keys() == set()


def test_bytes_that_are_damaged_on_the_way_are_sent_again(ceph_server, monkeypatch, source):
    """The store compares Content-MD5 (moto does not)."""
    for name, value in ceph_server.env.items():
        monkeypatch.setenv(name, value)
    raw = _RawS3(ceph_server, _bucket_on(ceph_server), f"faults/{uuid4().hex}/")
    with faulty(ceph_server) as proxy:
        storage = open_storage(f"s3://{raw.bucket}/{raw.prefix}", storage_options={"endpoint_url": proxy.endpoint})
        for operation, size in (("UploadPart", 34 * 2**20), ("PutObject", 1000)):
            proxy.rule = on(operation, damage_body, times=1)
            proxy.seen.clear()
            source.write_bytes(os.urandom(1000) * (size // 1000))
            storage.upload(source, "file", progress=IGNORE)
            assert raw.get("file") == source.read_bytes()
            assert proxy.seen.count(operation) == 1 + {"UploadPart": 3, "PutObject": 1}[operation]
        proxy.rule = on("PutObject", damage_body, times=1)
        proxy.seen.clear()
        storage.create("created", b"x" * 100)
        assert raw.get("created") == b"x" * 100


test_bytes_that_are_damaged_on_the_way_are_sent_again = pytest.mark.ceph(
    test_bytes_that_are_damaged_on_the_way_are_sent_again
)


# ------------------------------------------------------------------------------------------------------------ downloads


@pytest.mark.parametrize("action", [cut_answer, hang_up, answer(503, "SlowDown")], ids=["cut", "hang up", "503"])
def test_a_range_that_breaks_is_fetched_again(proxy, storage, raw, source, tmp_path, action):
    raw.put("file", source.read_bytes())
    for first in (0, 1):
        proxy.seen.clear()
        proxy.rule = on("GetObject", action, first=first, times=1)
        moved = Sum()
        storage.download("file", tmp_path / "target", progress=moved)
        assert (tmp_path / "target").read_bytes() == source.read_bytes()
        assert moved.total == LARGE // 1000 * 1000
        assert proxy.seen.count("GetObject") == 3 + 1


def test_an_object_that_is_replaced_during_its_download_is_fetched_from_the_start(proxy, uri, raw, source, tmp_path):
    raw.put("file", source.read_bytes() * 4)
    new = os.urandom(1000) * 60_000

    def rule(request):
        if request.operation == "GetObject" and request.number == 1:
            raw.put("file", new)

    proxy.rule = rule
    open_storage(uri).download("file", tmp_path / "target", progress=IGNORE)
    assert (tmp_path / "target").read_bytes() == new


def test_a_download_that_hangs_is_a_stall(proxy, uri, raw, source, tmp_path):
    raw.put("file", source.read_bytes())
    proxy.rule = on("GetObject", hang, first=1)
    with pytest.raises(errors.StalledError):
        S3Storage(uri, part_size=MIN_PART_SIZE, stall_timeout=1.5).download(
            "file", tmp_path / "target", progress=IGNORE
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_full_local_disk_is_not_the_stores_fault(storage, raw, tmp_path, monkeypatch):
    raw.put("file", b"x" * 1000)

    def full(fd, data):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ckpt._files.os.write", full)
    with pytest.raises(errors.StorageFullError, match=r"write .*target: No space"):
        storage.download("file", tmp_path / "target", progress=IGNORE)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- small objects


def test_a_create_whose_answer_gets_lost_ends_in_exists_with_our_bytes_there(proxy, uri, raw):
    proxy.rule = on("PutObject", lose_answer, times=1)
    with pytest.raises(errors.ObjectExistsError):
        open_storage(uri).create("commit", b"our nonce")
    assert raw.get("commit") == b"our nonce"


def test_a_create_that_meets_another_one_under_way_asks_again(proxy, storage, raw):
    proxy.rule = on("PutObject", answer(409, "ConditionalRequestConflict"), times=2)
    storage.create("a", b"1")
    assert raw.get("a") == b"1"
    raw.put("b", b"theirs")
    proxy.seen.clear()
    with pytest.raises(errors.ObjectExistsError):
        storage.create("b", b"ours")


@pytest.mark.parametrize("status_code", [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests")])
def test_what_can_go_away_is_tried_again_and_logged(proxy, uri, raw, status_code, caplog):
    storage = open_storage(uri)
    verbs = {
        "PutObject": lambda: storage.write("a", b"1"),
        "GetObject": lambda: storage.read("a"),
        "ListObjectsV2": lambda: list(storage.list()),
        "DeleteObjects": lambda: storage.delete(["a"]),
    }
    for operation, verb in verbs.items():
        proxy.seen.clear()
        caplog.clear()
        proxy.rule = on(operation, answer(*status_code), times=1)
        with caplog.at_level(logging.INFO, "ckpt"):
            verb()
        assert proxy.seen.count(operation) == 2
        assert f"{status_code[1]}: said the test" in caplog.text
    assert raw.keys() == set()


def test_what_is_refused_is_not_tried_again(proxy, uri):
    storage = open_storage(uri)
    refusals = {
        (403, "AccessDenied"): errors.AccessDeniedError,
        (403, "InvalidAccessKeyId"): errors.AccessDeniedError,
        (403, "SignatureDoesNotMatch"): errors.AccessDeniedError,
        (404, "NoSuchBucket"): errors.BucketNotFoundError,
        (403, "QuotaExceeded"): errors.StorageFullError,
        (507, "XMinioStorageFull"): errors.StorageFullError,
        (400, "InvalidArgument"): errors.StorageError,
    }
    for refusal, kind in refusals.items():
        proxy.seen.clear()
        proxy.rule = on("PutObject", answer(*refusal))
        with pytest.raises(kind, match=refusal[1]) as caught:
            storage.write("a", b"")
        assert type(caught.value) is kind
        assert proxy.seen.count("PutObject") == 1


def test_a_store_that_cannot_delete_in_bulk_deletes_one_by_one(proxy, storage, raw):
    for key in "abc":
        raw.put(key, b"")
    proxy.rule = on("DeleteObjects", answer(501, "NotImplemented"))
    storage.delete(["a", "b", "not there"])
    assert raw.keys() == {"c"}


def test_one_key_that_cannot_be_deleted_does_not_keep_the_others(proxy, storage, raw):
    for key in "abc":
        raw.put(key, b"")
    body = b"""<?xml version='1.0'?><DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code><Message>locked</Message>
    </Error></DeleteResult>"""
    proxy.rule = on("DeleteObjects", answer(200, "", body=body))
    with pytest.raises(errors.AccessDeniedError, match=r"delete .*a: AccessDenied: locked"):
        storage.delete(["a", "b", "c"])
    proxy.rule = lambda request: (
        answer(501, "NotImplemented")
        if request.operation == "DeleteObjects"
        else answer(403, "AccessDenied")
        if request.operation == "DeleteObject" and request.path.endswith("/a")
        else None
    )
    with pytest.raises(errors.AccessDeniedError):
        storage.delete(["a", "b", "c"])
    assert raw.keys() == {"a"}


def test_a_small_request_that_hangs_ends(proxy, uri):
    proxy.rule = on("GetObject", hang)
    with pytest.raises(errors.StalledError):
        S3Storage(uri, stall_timeout=0.75).read("a")


def test_a_store_that_is_away_is_a_transient_failure(proxy, storage):
    storage.write("a", b"")
    gone = S3Storage(storage.uri, storage_options={"endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(errors.TransientStorageError, match=r"127\.0\.0\.1:9"):
        gone.read("a")


# ---------------------------------------------------------------------------------------------------------- credentials


def test_expired_credentials_are_resolved_again(proxy, uri, raw, caplog):
    resolved = []

    def credentials():
        resolved.append(len(resolved))
        return {"key": f"key{len(resolved)}", "secret": "very-secret-1", "token": "very-secret-2"}

    def rule(request):
        old = "Credential=key1/" in request.headers.get("Authorization", "")
        return answer(400, "ExpiredToken", "The provided token has expired.") if old else None

    proxy.rule = rule
    storage = open_storage(uri, credentials=credentials)
    with caplog.at_level(logging.INFO):
        storage.write("a", b"1")
    assert raw.get("a") == b"1"
    assert len(resolved) == 2
    assert "very-secret" not in caplog.text


def test_credentials_with_a_known_end_are_renewed_before_it(proxy, uri, raw):
    keys = iter(range(1, 100))

    def credentials():
        number = next(keys)
        return {
            "key": f"key{number}",
            "secret": "s",
            "token": "t",
            "expires_at": time.time() + (1 if number == 1 else 3600),
        }

    used = set()

    def rule(request):
        used.add(request.headers["Authorization"].partition("Credential=")[2].partition("/")[0])

    proxy.rule = rule
    storage = S3Storage(uri, credentials=credentials)
    storage.write("a", b"1")
    storage.write("b", b"1")
    assert used == {"key2"}
    assert raw.keys() == {"a", "b"}


def test_without_credentials_the_error_says_what_to_do(proxy, uri, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(errors.AccessDeniedError, match="AWS_ACCESS_KEY_ID"):
        S3Storage(uri).read("a")


def test_a_profile_that_is_not_there_is_a_configuration_error(proxy, uri):
    with pytest.raises(errors.ConfigError, match="nobody"):
        S3Storage(uri, credentials="profile:nobody").read("a")


def test_a_profile_gives_credentials(proxy, uri, raw, tmp_path, monkeypatch):
    (tmp_path / "config").write_text("[profile team]\naws_access_key_id = profilekey\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    used = set()
    proxy.rule = lambda request: used.add(request.headers["Authorization"].partition("=")[2].partition("/")[0])
    S3Storage(uri, credentials="profile:team").write("a", b"1")
    assert used == {"profilekey"}


def test_options_of_encryption_reach_every_way_of_writing(proxy, uri, raw, source):
    storage = S3Storage(
        uri, part_size=MIN_PART_SIZE, storage_options={"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}
    )
    headers = {}
    proxy.rule = lambda request: headers.setdefault(request.operation, request.headers) and None
    storage.create("created", b"1")
    storage.upload(source, "file", progress=IGNORE)
    for operation in ("PutObject", "CreateMultipartUpload"):
        assert headers[operation]["x-amz-server-side-encryption"] == "AES256"
    assert "If-None-Match" in headers["PutObject"]
    assert "Content-MD5" in headers["PutObject"]
    assert "Content-MD5" in headers["UploadPart"]


def test_an_option_that_s3fs_does_not_have_is_named(proxy, uri):
    with pytest.raises(errors.ConfigError, match="end_point"):
        S3Storage(uri, storage_options={"end_point": "http://127.0.0.1:9"}).read("a")


# ----------------------------------------------------------------------------------------------------------- the rest


def test_a_budget_that_holds_no_part_is_refused():
    assert S3Storage("s3://bucket", memory_budget=MIN_PART_SIZE).uri == "s3://bucket"
    with pytest.raises(errors.ConfigError, match="memory_budget"):
        S3Storage("s3://bucket", memory_budget=MIN_PART_SIZE - 1)


def _said(code, status=400):
    return ClientError(
        {"Error": {"Code": code, "Message": "words"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Op"
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (_said("NoSuchKey", 404), errors.ObjectNotFoundError),
        (_said("404", 404), errors.ObjectNotFoundError),
        (_said("NoSuchBucket", 404), errors.BucketNotFoundError),
        (_said("PreconditionFailed", 412), errors.ObjectExistsError),
        (_said("403", 403), errors.AccessDeniedError),
        (_said("SomethingNew", 403), errors.AccessDeniedError),
        (_said("ExpiredToken"), errors.CredentialsExpiredError),
        (_said("RequestTimeTooSkewed", 403), errors.TransientStorageError),
        (_said("RequestTimeout"), errors.TransientStorageError),
        (_said("BadDigest"), errors.TransientStorageError),
        (_said("SomethingNew", 503), errors.TransientStorageError),
        (_said("InvalidObjectState", 403), errors.StorageError),
        (_said("NotImplemented", 501), errors.StorageError),
        (_said("SomethingNew", 400), errors.StorageError),
        (EndpointConnectionError(endpoint_url="http://x", error="refused"), errors.TransientStorageError),
        (ConnectTimeoutError(endpoint_url="http://x"), errors.TransientStorageError),
        (ReadTimeoutError(endpoint_url="http://x"), errors.TransientStorageError),
        (SSLError(endpoint_url="http://x", error="CERTIFICATE_VERIFY_FAILED"), errors.StorageError),
        (SSLError(endpoint_url="http://x", error="EOF"), errors.TransientStorageError),
        (ConnectionResetError(104, "reset"), errors.TransientStorageError),
        (TimeoutError(), errors.TransientStorageError),
        (NoCredentialsError(), errors.AccessDeniedError),
        (ProfileNotFound(profile="p"), errors.ConfigError),
        (ValueError("Invalid endpoint: x"), errors.ConfigError),
        (RuntimeError("what?"), errors.StorageError),
    ],
    ids=str,
)
def test_every_error_has_its_class_and_names_verb_and_uri(error, kind):
    translated = translate("read", "s3://bucket/key", error)
    assert type(translated) is kind
    assert str(translated).startswith("read s3://bucket/key: ")


def test_memory_stays_within_the_budget_whatever_the_size(rclone_server, monkeypatch, tmp_path):
    """In a process of its own: the highest resident size while a file of 256 MiB goes both ways with 24 MiB."""
    raw = _RawS3(rclone_server, _bucket_on(rclone_server), f"memory/{uuid4().hex}/")
    with (tmp_path / "source").open("wb") as source:
        source.truncate(256 * 2**20)
    script = """
import resource, sys
from pathlib import Path
from ckpt._s3 import S3Storage
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
storage = S3Storage(sys.argv[1], part_size=8 * 2**20, memory_budget=24 * 2**20)
folder = Path(sys.argv[2])
storage.write("warm", b"up")
before = peak()
storage.upload(folder / "source", "file", progress=lambda _: None)
storage.download("file", folder / "target", progress=lambda _: None)
print(peak() - before)
"""
    env = {**os.environ, **rclone_server.env}
    command = [sys.executable, "-c", script, f"s3://{raw.bucket}/{raw.prefix}", str(tmp_path)]
    grown = int(subprocess.run(command, env=env, timeout=100, check=True, capture_output=True, text=True).stdout)
    assert grown < 64 * 2**20
    raw.remove("file")


def test_a_process_that_ends_closes_its_connections_quietly(proxy, uri):
    script = """
import sys
from ckpt.storage import open_storage
storage = open_storage(sys.argv[1])
storage.write("a", b"1")
print(storage.read("a"))
"""
    command = [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore::DeprecationWarning", "-c", script, uri]
    ended = subprocess.run(command, timeout=90, check=True, capture_output=True, text=True)
    assert ended.stdout == "b'1'\n"
    assert "Unclosed" not in ended.stderr
