"""The pages: what they name exists, what they show runs, what they say a bucket must allow is what is asked of it."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from faulty_server import Request, answer, faulty
from helpers import make_checkpoint, make_config
from servers import moto_server  # noqa: F401 - a fixture

from ckpt import CheckpointConfig, FailurePolicy, KeepLast, Result, _s3, _s3_client, committed, open_run, pin, resolve
from ckpt.collecting import collect
from ckpt.verifying import verify

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
if not (ROOT / "docs").is_dir():
    pytest.skip("the pages are not beside these tests", allow_module_level=True)

_NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def names_of_tests(path: Path) -> set[str]:
    """Names of the test functions of a file, those of its classes included."""
    found = ast.walk(ast.parse(path.read_text()))
    return {item.name for item in found if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")}


def blocks(page: str) -> list[str]:
    """The python code of a page."""
    return _BLOCK.findall((ROOT / page).read_text())


# ------------------------------------------------------------------------------------------------------------ what is named


def test_every_test_that_the_reliability_page_names_exists():
    """A guarantee is as good as the test that proves it."""
    named = set(_NAMED.findall((ROOT / "docs/reliability.md").read_text()))
    assert len(named) > 40
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if not (ROOT / "tests" / file).is_file() or name not in names_of_tests(ROOT / "tests" / file)
    ]
    assert not missing


def test_every_guarantee_and_every_test_of_rays_has_its_line():
    """G1 to G12, and 1 to 57 without a gap."""
    page = (ROOT / "docs/reliability.md").read_text()
    assert re.findall(r"^\| (G\d+) \|", page, re.MULTILINE) == [f"G{number}" for number in range(1, 13)]
    numbers: list[int] = []
    for first, last in re.findall(r"^\| (\d+)(?:-(\d+))? ", page, re.MULTILINE):
        numbers += range(int(first), int(last or first) + 1)
    assert numbers == list(range(1, 58))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_and_picture_exists(page):
    """Anchors as well."""
    for target in _LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_program_and_folder_that_a_page_names_exists(page):
    """In commands and in text."""
    for path in re.findall(r"\b((?:flows|examples|benchmarks|tests)/[\w/]+\.py)\b", page.read_text()):
        assert (ROOT / path).is_file(), path


# ------------------------------------------------------------------------------------------------------------ what is shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_that_a_program_on_a_page_imports_exists(page):
    """And every attribute of `ckpt` that it uses."""
    for block in _BLOCK.findall(page.read_text()):
        for item in ast.walk(ast.parse(block)):
            if isinstance(item, ast.ImportFrom) and str(item.module).split(".")[0] in ("ckpt", "ckpt_tasks"):
                module = importlib.import_module(str(item.module))
                assert [name.name for name in item.names if not hasattr(module, name.name)] == []
            if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "ckpt":
                assert hasattr(importlib.import_module("ckpt"), item.attr), item.attr


def test_the_programs_of_the_readme_are_flows():
    """They define what they say, with torch or without."""
    training, reuse = blocks("README.md")
    for block, name in ((training.replace("import torch\n", ""), "train"), (reuse, "nightly_export")):
        defined: dict[str, object] = {}
        exec(compile(block, "README.md", "exec"), defined)
        assert type(defined[name]).__name__ == "Flow"


def test_the_configuration_of_the_quickstart_is_one():
    """Its block is complete."""
    [block] = [block for block in blocks("docs/quickstart.md") if "@flow" not in block]
    exec(compile(block, "quickstart.md", "exec"), {})


@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_quickstart_runs_as_it_stands(tmp_path):
    """The flow twice, the second time with more epochs, and the commands between them."""
    program = next(block for block in blocks("docs/quickstart.md") if "@flow" in block)
    program = program.replace("/tmp/runs", f"{tmp_path}/runs")
    (tmp_path / "train_flow.py").write_text(program)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(tmp_path / "home"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    env["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "90"  # Prefect's own 20 s are short for a busy machine
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    assert "'loss': 0.2" in run(sys.executable, "train_flow.py")
    for line in re.findall(r"^    (ckpt .+)$", (ROOT / "docs/quickstart.md").read_text(), re.MULTILINE):
        words = line.replace("/tmp/", f"{tmp_path}/").split()
        run(sys.executable, "-m", "ckpt_tasks.cli", *words[1:])
    assert (tmp_path / "restored/epoch.txt").read_text() == "4"
    (tmp_path / "train_flow.py").write_text(program.replace("result = train()", "result = train(epochs=8)"))
    run(sys.executable, "train_flow.py")
    assert resolve(f"{tmp_path}/runs/first").metrics == {"loss": 1 / 8}


# ---------------------------------------------------------------------------------------------- what a bucket has to allow

ACTIONS = {
    "PutObject": "s3:PutObject", "CreateMultipartUpload": "s3:PutObject", "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject", "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListParts": "s3:ListMultipartUploadParts", "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectsV2": "s3:ListBucket", "GetObject": "s3:GetObject", "HeadObject": "s3:GetObject",
    "DeleteObjects": "s3:DeleteObject", "DeleteObject": "s3:DeleteObject",
}  # fmt: skip
"""What IAM asks for each request."""


def test_the_policy_allows_what_is_asked_and_nothing_else(moto_server, tmp_path, monkeypatch):  # noqa: F811
    """A run with large files, retention, a failed upload and a lost answer; garbage collection; and readers."""
    for name, value in moto_server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_s3_client, "_backoff", lambda attempt: 0.0)
    monkeypatch.setitem(_s3.S3Storage.__init__.__kwdefaults__, "part_size", _s3.MIN_PART_SIZE)
    bucket = f"policy-{uuid4().hex[:8]}"
    moto_server.client().create_bucket(Bucket=bucket)
    policy = json.loads(re.findall(r"```json\n(.*?)```", (ROOT / "docs/credentials.md").read_text(), re.DOTALL)[0])
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    large = {"large": os.urandom(1000) * (2 * _s3.MIN_PART_SIZE // 1000 + 1)}

    def refuse(request: Request):
        return answer(403, "AccessDenied") if request.operation == "UploadPart" and "/bad-a1/" in request.path else None

    with faulty(moto_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.rule = refuse
        kept, fine = CheckpointConfig(retention=KeepLast(1)), FailurePolicy(red_on="nothing")
        with open_run(make_config(f"s3://{bucket}/runs", checkpoint_config=kept, failure_policy=fine)) as run:
            for name in ("a", "bad", "c"):
                run.report({}, make_checkpoint(tmp_path / name, large), name)
        pin(f"{run.uri}@latest")
        collect(run.uri)
        asked = {ACTIONS[operation] for operation in proxy.seen}
        proxy.seen.clear()
        [checkpoint] = committed(run.uri)
        assert verify(checkpoint).ok
        checkpoint.to_directory(tmp_path / "restored")
        list(Result.from_path(run.uri).history)
        readers = {ACTIONS[operation] for operation in proxy.seen}
    assert asked == allowed
    assert readers == {"s3:ListBucket", "s3:GetObject"}
