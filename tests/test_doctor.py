"""`ckpt doctor`: what it finds in stores that work and in stores with traps, what it exits with, what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
)
from servers import S3Server

from ckpt.examining import Finding, Level, clock, examine_storage
from ckpt_tasks import cli


@pytest.fixture
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, str]]:
    """Of the server that is asked for: a client of it, and a new bucket."""

    def make(server: str) -> tuple[Any, str]:
        store: S3Server = request.getfixturevalue(server)
        for name, value in store.env.items():
            monkeypatch.setenv(name, value)
        client, name = store.client(), f"doctor-{uuid4().hex}"
        client.create_bucket(Bucket=name)
        return client, name

    return make


def found(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    """Those that are not OK."""
    return {check: finding.level.value for check, finding in findings.items() if finding.level is not Level.OK}


def test_a_local_folder_that_works_is_all_right_and_left_as_it_was(tmp_path: Path) -> None:
    findings = found(examine_storage(str(tmp_path / "runs")))
    assert levels(findings) == {}
    assert set(findings) == {"write", "read", "list", "delete", "create if absent", "multipart", "clock"}
    assert list(tmp_path.iterdir()) == [], "a folder that was not there is not there afterwards"


def test_what_is_in_a_storage_already_stays_untouched(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/mine.txt").write_text("mine")
    assert levels(found(examine_storage(str(tmp_path / "runs")))) == {}
    assert [path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()] == ["mine.txt"]


def test_a_storage_that_cannot_be_written_is_one_failure_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    [finding] = examine_storage(str(tmp_path / "file"))
    assert (finding.check, finding.level) == ("write", Level.FAIL)
    assert finding.fix


def test_a_bucket_that_is_not_there_says_so(bucket: Any) -> None:
    bucket("moto_server")
    [finding] = examine_storage(f"s3://nowhere-{uuid4().hex}/runs")
    assert finding.level is Level.FAIL
    assert "create the bucket" in finding.fix


def test_a_plain_bucket_works_and_lacks_a_rule_for_unfinished_uploads(bucket: Any) -> None:
    client, name = bucket("moto_server")
    findings = found(examine_storage(f"s3://{name}/runs"))
    assert levels(findings) == {"unfinished uploads": "WARN"}
    assert "AbortIncompleteMultipartUpload" in findings["unfinished uploads"].fix
    assert "in parts" in findings["multipart"].said
    assert "Contents" not in client.list_objects_v2(Bucket=name), "nothing is left behind"


def test_versioning_without_a_rule_for_old_versions_is_a_warning(bucket: Any) -> None:
    client, name = bucket("moto_server")
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    versioning = found(examine_storage(f"s3://{name}/runs"))["versioning"]
    assert versioning.level is Level.WARN
    assert "NoncurrentVersionExpiration" in versioning.fix


def test_rules_that_end_unfinished_uploads_are_good_and_rules_that_delete_checkpoints_a_trap(bucket: Any) -> None:
    client, name = bucket("moto_server")
    everywhere = {"Status": "Enabled", "Filter": {"Prefix": ""}}
    rules = [
        {"ID": "parts", **everywhere, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}},
        {"ID": "old", **everywhere, "Expiration": {"Days": 30}},
        {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}},
    ]  # fmt: skip
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": rules})
    findings = found(examine_storage(f"s3://{name}/runs"))
    assert levels(findings) == {"lifecycle": "WARN"}
    assert "'old' deletes objects" in findings["lifecycle"].said


def test_a_gateway_that_ignores_the_condition_of_create_is_a_warning(bucket: Any) -> None:
    _, name = bucket("rclone_server")
    findings = found(examine_storage(f"s3://{name}/runs"))
    assert findings["create if absent"].level is Level.WARN
    assert "If-None-Match" in findings["create if absent"].said
    assert findings["multipart"].level is Level.OK


@pytest.mark.parametrize(
    ("skew", "level"), [(0.4, Level.OK), (-59.0, Level.OK), (-61.0, Level.FAIL), (3600.0, Level.FAIL)]
)
def test_a_clock_that_is_a_minute_off_fails(skew: float, level: Level) -> None:
    assert clock("clock", skew, "the store's").level is level


# ------------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def ckpt(prefect_server: str, capsys: Any) -> Callable[..., tuple[int, dict[str, Any]]]:
    """A command in this process: its exit code, and its findings by check."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = cli.main(["doctor", *arguments, "--json"])
        document = json.loads(capsys.readouterr().out)
        assert document["ok"] == (code == 0)
        return code, {finding["check"]: finding for finding in document["findings"]}

    return run


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.mark.prefect
def test_a_limit_that_is_named_and_missing_fails_and_the_fix_makes_it(ckpt: Any, tmp_path: Path) -> None:
    name = f"limit-{uuid4()}"
    code, findings = ckpt(str(tmp_path), "--limit", name)
    assert code == 1
    assert findings["concurrency limit"]["level"] == "FAIL"
    assert findings["concurrency limit"]["fix"] == f"`ckpt setup --limit {name}`"
    assert findings["server"]["level"] == "OK"
    assert cli.main(["setup", "--limit", name, "--pool", f"pool-{uuid4()}"]) == 0


@pytest.mark.prefect
def test_slots_that_nobody_can_hold_are_a_warning(ckpt: Any, client: SyncPrefectClient) -> None:
    name = f"limit-{uuid4()}"
    client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=4))
    code, findings = ckpt("--limit", name)
    assert (code, findings["concurrency limit"]["said"]) == (0, f"{name}: 0 of 4 slots taken")
    client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(active_slots=2))
    code, findings = ckpt("--limit", name)
    assert code == 0
    assert findings["concurrency limit"]["level"] == "WARN"
    assert f"gcl update {name} --active-slots 0" in findings["concurrency limit"]["fix"]


@pytest.mark.prefect
def test_a_pool_without_a_worker_is_a_warning_and_one_with_a_worker_is_not(
    ckpt: Any, client: SyncPrefectClient
) -> None:
    name = f"pool-{uuid4()}"
    client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    _, findings = ckpt("--pool", name)
    assert f"prefect worker start --pool {name}" in findings["work pool"]["fix"]
    client.request(
        "POST", "/work_pools/{name}/workers/heartbeat", path_params={"name": name}, json={"name": "worker-1"}
    )
    _, findings = ckpt("--pool", name)
    assert findings["work pool"]["said"] == f"{name}, type process, 1 workers online"


def test_what_can_never_work_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "s3:///no-bucket"]) == 2
    assert "names no bucket" in capsys.readouterr().err
