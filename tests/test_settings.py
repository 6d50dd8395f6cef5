"""Settings under `PREFECT_INTEGRATIONS_CKPT_*`, and how Prefect finds this package."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from helpers import make_config
from prefect.plugins import load_prefect_collections
from test_imports import run_python

import ckpt_tasks
from ckpt_tasks import training
from ckpt_tasks.settings import PREFIX, CkptSettings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}ALLOWED_FUNCTIONS", "mine.training, shared ,")
    monkeypatch.setenv(f"{PREFIX}STORAGE_PATH", "s3://bucket/runs")
    settings = CkptSettings()
    assert settings.allowed_functions == ["mine.training", "shared"]
    assert settings.storage_path == "s3://bucket/runs"
    assert settings.concurrency_limit is None


def test_settings_come_from_prefect_toml_as_those_of_any_integration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect.toml").write_text('[integrations.ckpt]\nconcurrency_limit = "ckpt-uploads"\n')
    monkeypatch.chdir(tmp_path)
    assert CkptSettings().concurrency_limit == "ckpt-uploads"


def test_a_run_takes_the_limit_of_its_place_and_keeps_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(f"{PREFIX}CONCURRENCY_LIMIT", "of-the-place")
    unnamed, named = make_config(tmp_path), make_config(tmp_path, upload={"concurrency_limit": "own"})
    assert training._limited(unnamed).upload_config.concurrency_limit == "of-the-place"
    assert training._limited(named).upload_config.concurrency_limit == "own"


def test_prefect_knows_this_package_as_a_collection() -> None:
    [entry] = [point for point in entry_points(group="prefect.collections") if point.name == "prefect_ckpt"]
    assert entry.load() is ckpt_tasks
    assert load_prefect_collections()["prefect_ckpt"] is ckpt_tasks


def test_what_prefect_imports_at_its_start_loads_next_to_nothing() -> None:
    loaded = json.loads(run_python("import ckpt_tasks, json, sys; print(json.dumps(sorted(sys.modules)))"))
    heavy = {"prefect", "torch", "ckpt", "pydantic", "rich", "cyclopts", "boto3", "httpx"}
    assert heavy.isdisjoint(loaded)
