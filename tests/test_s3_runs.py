"""Whole runs against real S3 servers: moto in this process, rclone's gateway, and Ceph where it is installed."""

import logging
import os
import pickle
import uuid
from collections.abc import Iterator

import pytest
from helpers import content, make_checkpoint, make_config
from servers import S3Server, ceph_server, moto_server, rclone_server  # noqa: F401 - fixtures

import ckpt
from ckpt import Checkpoint, CheckpointConfig, CheckpointUploadMode, Result, open_run, report, resolve
from ckpt.errors import AccessDeniedError, BucketNotFoundError, ConfigError, StorageError
from ckpt.verifying import verify

SECRET = "testsecret"
SERVERS = ["moto_server", "rclone_server", pytest.param("ceph_server", marks=pytest.mark.ceph)]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server, and the environment that points to it."""
    found: S3Server = request.getfixturevalue(request.param)
    for name, value in found.env.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def bucket(server: S3Server) -> Iterator[str]:
    """A new bucket, emptied and removed at the end."""
    name = f"ckpt-{uuid.uuid4().hex[:12]}"
    client = server.client()
    client.create_bucket(Bucket=name)
    yield name
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
        for item in page.get("Contents", []):
            client.delete_object(Bucket=name, Key=item["Key"])
    client.delete_bucket(Bucket=name)
    client.close()


def test_a_run_on_s3_commits_in_order_resumes_and_restores(bucket, tmp_path, caplog):
    """Two attempts, retention, a big file among small ones: what is restored is what was reported."""
    caplog.set_level(logging.WARNING, "ckpt")
    config = make_config(
        f"s3://{bucket}/runs",
        checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="acc"),
    )
    big = os.urandom(40 * 2**20)
    for attempt in range(2):
        with open_run(config) as run:
            found = ckpt.get_checkpoint()
            assert (None if found is None else found.seq) == (2 if attempt else None)
            for index in range(3):
                seq = 3 * attempt + index
                files = {"model.bin": big if index == 1 else os.urandom(100), "a b/+#?%é🦄.txt": f"{seq}", "empty": b""}
                report({"acc": seq % 3, "seq": seq}, make_checkpoint(tmp_path / f"c{seq}", files))
    assert run.result is not None
    assert [row.metrics["seq"] for row in run.result.history] == list(range(6))
    assert [checkpoint.seq for checkpoint, _ in run.result.best_checkpoints] == [2, 5]
    best = resolve(f"s3://{bucket}/runs/run@best")
    assert best.seq == 5
    assert verify(best).ok
    assert content(best, tmp_path / "restored") == content(
        Checkpoint.from_directory(tmp_path / "c5"), tmp_path / "again"
    )
    assert len(Result.from_path(f"s3://{bucket}/runs/run").history) == 6


def test_no_multipart_upload_is_left_behind(bucket, server, tmp_path):
    """After a run with multipart files the bucket has no upload under way."""
    with open_run(make_config(f"s3://{bucket}/runs")):
        report({}, make_checkpoint(tmp_path / "c", {"big": os.urandom(40 * 2**20)}))
    client = server.client()
    try:
        assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    finally:
        client.close()


def test_no_upload_of_objects_that_are_there_already(bucket, server, tmp_path):
    """NO_UPLOAD commits what somebody else put into the run and elsewhere, with the store's own checksums."""
    client = server.client()
    client.put_object(Bucket=bucket, Key="elsewhere/model.bin", Body=b"abc")
    with open_run(make_config(f"s3://{bucket}/runs")) as run:
        inside = ckpt.get_context().get_storage().build_checkpoint_uri_from_name("mine")
        client.put_object(Bucket=bucket, Key=inside.removeprefix(f"s3://{bucket}/") + "/model.bin", Body=b"defg")
        for uri in (inside, f"s3://{bucket}/elsewhere"):
            report({}, Checkpoint(uri), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    client.close()
    assert run.result is not None
    kept = [checkpoint for checkpoint, _ in run.result.best_checkpoints]
    assert [(item.manifest.external, item.files()[0].size) for item in kept] == [(False, 4), (True, 3)]
    assert all(str(item.files()[0].digest).startswith("etag:") for item in kept)
    assert all(verify(item).ok for item in kept)


def test_a_flipped_byte_on_s3_is_found(bucket, server, tmp_path):
    """An object that was replaced behind our back fails verification and restoring, by name."""
    with open_run(make_config(f"s3://{bucket}/runs")):
        report({}, make_checkpoint(tmp_path / "c", {"model.bin": b"weights"}))
    checkpoint = resolve(f"s3://{bucket}/runs/run@latest")
    client = server.client()
    client.put_object(Bucket=bucket, Key=f"{checkpoint.path.removeprefix(f'{bucket}/')}/model.bin", Body=b"weightz")
    client.close()
    assert verify(checkpoint).problems[0].startswith("model.bin has digest")
    with pytest.raises(OSError, match=r"model\.bin"):
        checkpoint.to_directory(tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_a_store_that_does_not_enforce_create_is_named(bucket, server, request, tmp_path, caplog):
    """Rclone's gateway takes the condition and ignores it; the run says so. The others enforce it, and say nothing."""
    caplog.set_level(logging.WARNING, "ckpt")
    with open_run(make_config(f"s3://{bucket}/runs")):
        report({}, make_checkpoint(tmp_path / "c"))
    ignores = "rclone" in request.node.callspec.id
    assert any("cannot be enforced" in record.message for record in caplog.records) is ignores


def test_a_missing_bucket_is_refused_before_any_training(server, tmp_path):
    """The error names the bucket; the block is never entered."""
    with (
        pytest.raises(BucketNotFoundError, match="no-such-bucket-1234"),
        open_run(make_config("s3://no-such-bucket-1234/runs")),
    ):
        pytest.fail("the block was entered")


@pytest.mark.parametrize(
    "server", ["rclone_server", pytest.param("ceph_server", marks=pytest.mark.ceph)], indirect=True
)
def test_wrong_credentials_are_refused_and_appear_nowhere(bucket, server, monkeypatch, caplog):
    """A wrong secret is refused at the start; neither it nor the key is in the error, the log or a pickle of either."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-value")
    with pytest.raises(AccessDeniedError) as caught, open_run(make_config(f"s3://{bucket}/runs")):
        pytest.fail("the block was entered")
    said = f"{caught.value!r} {pickle.dumps(caught.value)!r} " + " ".join(
        record.getMessage() for record in caplog.records if record.name.startswith("ckpt")
    )
    assert "wrong-secret-value" not in said
    assert bucket in str(caught.value)


def test_no_secret_is_written_or_pickled(bucket, server, tmp_path):
    """A run with credentials from a callable leaves no secret in its objects, its result's pickle, or its errors."""
    config = make_config(
        f"s3://{bucket}/runs",
        credentials=_credentials,
        storage_options={"client_kwargs": {"endpoint_url": server.endpoint}},
    )
    with open_run(config) as run:
        report({}, make_checkpoint(tmp_path / "c"))
        report({}, make_checkpoint(tmp_path / "d"), checkpoint_upload_fn=_refused)
        report({}, make_checkpoint(tmp_path / "e"))
    client = server.client()
    written = b""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for item in page["Contents"]:
            written += client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
    client.close()
    assert SECRET.encode() not in written
    assert SECRET.encode() not in pickle.dumps(run.result)
    assert SECRET not in repr(run.result)


def test_secrets_in_options_are_refused_by_key_name():
    """The message names the key and not the value."""
    with pytest.raises(ConfigError, match="secret") as caught:
        make_config("s3://bucket/runs", storage_options={"secret": "hunter2hunter2"})
    assert "hunter2hunter2" not in str(caught.value)


def test_an_unreachable_endpoint_is_a_storage_error(monkeypatch, moto_server):  # noqa: F811
    """Nobody listens: after the retry budget the start of the run fails, naming the endpoint's trouble."""
    for name, value in moto_server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    config = make_config("s3://bucket/runs", upload={"retry_budget": 0.5})
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:9"), open_run(config):
        pytest.fail("the block was entered")


def _credentials():
    return {"key": "test", "secret": SECRET}


def _refused(checkpoint: Checkpoint, name: str) -> Checkpoint:
    raise PermissionError("no")
