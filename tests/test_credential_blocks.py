"""Credentials blocks of Prefect: used by name, and a rotated one is taken by the next upload of a running run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from faulty_server import FaultyServer, Request, answer, faulty
from helpers import make_checkpoint, make_config, states
from prefect.blocks.core import Block
from prefect_aws import AwsCredentials, MinIOCredentials
from prefect_aws.client_parameters import AwsClientParameters
from pydantic import SecretStr
from servers import S3Server

from ckpt import CheckpointUploadMode, open_run
from ckpt.errors import ConfigError
from ckpt_tasks.credentials import load_block

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def store(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A store on loopback; nothing in the environment tells how to get in."""
    for name, value in moto_server.env.items():
        if "KEY" in name or "ENDPOINT" in name:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with faulty(moto_server) as found:
        yield found


def aws(key: str, endpoint: str) -> Block:
    return AwsCredentials(
        aws_access_key_id=key, aws_secret_access_key=SecretStr("secret"), region_name="us-east-1",
        aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
    )  # fmt: skip


def minio(key: str, endpoint: str) -> Block:
    return MinIOCredentials(
        minio_root_user=key, minio_root_password=SecretStr("secret"), region_name="us-east-1",
        aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "make"), [("aws-credentials", aws), ("minio-credentials", minio)])
def test_a_rotated_block_is_taken_by_the_next_upload_of_a_running_run(
    store: FaultyServer, moto_server: S3Server, tmp_path: Path, kind: str, make: Any
) -> None:
    valid, used = {"KEYOLD"}, []

    def rule(request: Request) -> Any:
        key = request.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        used.append(key)
        refused = answer(403, "InvalidAccessKeyId", "The key does not exist in our records.")
        return None if key in valid else refused

    store.rule = rule
    name, bucket = f"b{uuid4().hex[:8]}", f"block-{uuid4().hex}"
    moto_server.client().create_bucket(Bucket=bucket)
    make("KEYOLD", store.endpoint).save(name)
    config = make_config(f"s3://{bucket}/runs", credentials=f"block:{kind}/{name}")
    with open_run(config) as run:
        run.report({}, make_checkpoint(tmp_path / "0"), checkpoint_upload_mode=CheckpointUploadMode.SYNC)
        assert set(used) == {"KEYOLD"}
        make("KEYNEW", store.endpoint).save(name, overwrite=True)
        valid.clear()
        valid.add("KEYNEW")
        run.report({}, make_checkpoint(tmp_path / "1"), checkpoint_upload_mode=CheckpointUploadMode.SYNC)
    assert states(run.result) == ["committed", "committed"]
    assert used[-1] == "KEYNEW"


def test_a_key_that_is_refused_and_was_not_replaced_fails_at_once(
    store: FaultyServer, moto_server: S3Server, tmp_path: Path
) -> None:
    store.rule = lambda _: answer(403, "InvalidAccessKeyId")
    name = f"b{uuid4().hex[:8]}"
    aws("KEYOLD", store.endpoint).save(name)
    with (
        pytest.raises(PermissionError),
        open_run(make_config("s3://bucket/runs", credentials=f"block:aws-credentials/{name}")),
    ):
        pytest.fail("the run began")
    assert store.seen.count("PutObject") == 1


class GcpCredentials(Block):
    """The fields of prefect-gcp's block that matter here, as it documents them."""

    _block_type_slug = "gcp-credentials"
    service_account_file: str | None = None
    service_account_info: SecretStr | None = None
    project: str | None = None


class AzureBlobStorageCredentials(Block):
    """The fields of prefect-azure's block, as it documents them."""

    _block_type_slug = "azure-blob-storage-credentials"
    account_url: str | None = None
    connection_string: SecretStr | None = None


@pytest.mark.parametrize("protocol", ["gs", "gcs"])
def test_a_gcp_block_gives_what_gcsfs_takes(protocol: str) -> None:
    name = f"g{uuid4().hex[:8]}"
    GcpCredentials(service_account_file="/etc/key.json", project="lab").save(name)
    assert load_block(f"gcp-credentials/{name}", protocol) == {"token": "/etc/key.json", "project": "lab"}


@pytest.mark.parametrize("protocol", ["abfs", "az"])
def test_an_azure_block_gives_what_adlfs_takes(protocol: str) -> None:
    name = f"z{uuid4().hex[:8]}"
    AzureBlobStorageCredentials(connection_string=SecretStr("AccountName=a;AccountKey=k")).save(name)
    assert load_block(f"azure-blob-storage-credentials/{name}", protocol) == {
        "connection_string": "AccountName=a;AccountKey=k"
    }
    AzureBlobStorageCredentials(account_url="https://lab.blob.core.windows.net").save(name, overwrite=True)
    assert load_block(f"azure-blob-storage-credentials/{name}", protocol) == {"account_name": "lab"}


def test_a_block_of_another_store_is_refused_with_those_that_fit() -> None:
    with pytest.raises(ConfigError, match="known are aws-credentials, minio-credentials"):
        load_block("gcp-credentials/lab", "s3")
