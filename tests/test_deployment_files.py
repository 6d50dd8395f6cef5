"""The files of deployments/, as far as they can be checked without Docker and Kubernetes: nothing here runs them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.utilities.callables import parameter_schema
from prefect.workers.base import BaseJobConfiguration

from ckpt_tasks import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(os.environ.get("CKPT_SOURCE", ROOT))
"""The checkout with its packages; the tests of the wheel run in one without."""
if not (ROOT / "deployments").is_dir():
    pytest.skip("the deployments are not beside these tests", allow_module_level=True)
BUDGET = TrainConfig().stop_timeout
"""Seconds that a run takes from SIGTERM to its end."""
PREFECTS_PART = 10
"""Seconds that Prefect may take after it to record the last state."""


def read(name: str) -> Any:
    """A YAML file."""
    return yaml.safe_load((ROOT / "deployments" / name).read_text())


DEPLOYMENTS = {item["name"]: item for item in read("prefect.yaml")["deployments"]}


def test_there_is_a_deployment_for_each_flow_in_one_pool_with_an_enforced_form():
    """As docs/deploy.md and automations name them."""
    assert {"train", "upload", "evaluate", "prune"} <= set(DEPLOYMENTS)
    for item in DEPLOYMENTS.values():
        assert item["work_pool"]["name"] == "ckpt"
        assert item["enforce_parameter_schema"] is True
    assert DEPLOYMENTS["evaluate"]["concurrency_limit"] == {"limit": 2, "collision_strategy": "ENQUEUE"}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_entrypoint_of_a_deployment_is_a_flow_of_its_name_that_takes_its_parameters(name, monkeypatch):
    """Default values included: they pass the form."""
    monkeypatch.chdir(ROOT)
    found = load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"])
    assert isinstance(found, Flow)
    assert found.name == name
    given = DEPLOYMENTS[name].get("parameters", {})
    schema = parameter_schema(found).model_dump()
    assert set(given) <= set(schema["properties"])
    if given:
        needed = {"ref": "s3://bucket/runs/digits@12"} if name == "evaluate" else {}
        found.validate_parameters({**needed, **given})


def test_every_function_that_the_deployments_name_is_in_the_flows_folder():
    """The project's folder is where functions may be named without a setting."""
    named = re.findall(r"(?:train_fn|evaluate_fn): (\w+):(\w+)", (ROOT / "deployments/prefect.yaml").read_text())
    assert len(named) == 2
    for module, function in named:
        assert f"def {function}(" in (ROOT / "flows" / f"{module}.py").read_text()


def test_the_job_template_is_one_that_the_server_takes_and_a_worker_can_fill_in():
    """Every variable is declared; the pod's grace period covers the budget."""
    template = json.loads((ROOT / "deployments/kubernetes/base-job-template.json").read_text())
    assert WorkPoolCreate(name="ckpt", type="kubernetes", base_job_template=template).base_job_template == template
    manifest = template["job_configuration"]["job_manifest"]
    assert manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == "{{ termination_grace_period }}"
    grace = template["variables"]["properties"]["termination_grace_period"]
    assert grace["minimum"] >= BUDGET + PREFECTS_PART
    assert grace["default"] > grace["minimum"]
    unused = [
        name
        for name in template["variables"]["properties"]
        if f"{{{{ {name} }}}}" not in json.dumps(template["job_configuration"])
    ]
    assert unused == []


@pytest.mark.prefect
def test_a_worker_fills_the_job_template_in(prefect_server):
    """With the defaults: numbers stay numbers, and what is empty is left out."""

    class Job(BaseJobConfiguration):
        job_manifest: dict[str, Any]

    template = json.loads((ROOT / "deployments/kubernetes/base-job-template.json").read_text())
    job = asyncio.run(Job.from_template_and_values(template, {"memory_limit": "4Gi"}))
    pod = job.job_manifest["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 45
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "4Gi"}
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "50Gi"


def test_the_compose_file_is_complete():
    """Every service has an image or a build, dependencies and volumes exist, ports are published to loopback only."""
    compose = read("compose.yaml")
    services = compose["services"]
    assert set(services) == {"postgres", "server", "s3", "setup", "worker"}
    for name, service in services.items():
        assert "image" in service, name
        assert not re.fullmatch(r"[^:]+|.*:latest", service["image"]) or "build" in service, "a fixed version"
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose["volumes"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
        for dependency, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[dependency]
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
    grace = services["worker"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= BUDGET + PREFECTS_PART
    assert services["worker"]["environment"]["PREFECT_INTEGRATIONS_CKPT_STORAGE_PATH"].startswith("s3://")
    json.loads(compose["configs"]["s3"]["content"])


def test_the_server_of_the_compose_file_is_the_version_that_is_tested():
    """A server that is older than its clients refuses them."""
    version = re.search(r"^prefect==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    assert read("compose.yaml")["services"]["server"]["image"].startswith(f"prefecthq/prefect:{version[1]}-")
    assert str(read("prefect.yaml")["prefect-version"]) == version[1]


def test_the_dockerfile_copies_what_exists_runs_as_a_user_and_passes_signals_on():
    """What hadolint looks for it was asked by hand; it had nothing to say."""
    text = (ROOT / "deployments/Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    words = [line.split() for line in lines]
    assert {line[0] for line in words} <= {"FROM", "WORKDIR", "COPY", "ARG", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    for line in words:
        if line[0] == "COPY" and not line[1].startswith("--from"):
            assert all((SOURCE / source).exists() for source in line[1:-1]), line
        if line[0] == "FROM":
            assert ":" in line[1], "a version"
        if line[0] in ("ENTRYPOINT", "CMD"):
            json.loads(" ".join(line[1:]))
    assert [line[1] for line in words if line[0] == "USER"][-1] == "1000"
    assert any("tini" in line for line in lines if line.startswith("ENTRYPOINT"))
