"""The run form: every field explained, limited and defaulted in its JSON schema, and enforced by Prefect's API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from ckpt import (
    CheckpointConfig,
    FailurePolicy,
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepYounger,
    RunConfig,
)
from ckpt import UploadConfig as Uploading
from ckpt.errors import ConfigError
from ckpt_tasks import EvaluateConfig, PruneConfig, StandaloneUpload, TrainConfig, run_prune
from ckpt_tasks.form import Retention

FORMS = [TrainConfig, EvaluateConfig, PruneConfig, StandaloneUpload]


def train(config: TrainConfig) -> None:
    """Stands for the flow of flows/train.py, whose parameters are these."""


def schema_of_form() -> dict[str, Any]:
    """What Prefect makes of the flow's parameters, nested models and all."""
    return parameter_schema(train).model_dump()


def properties(form: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a form and of the forms in it, by its path; a field that is a form has what that form says."""
    schema = form.model_json_schema()
    parts = schema.get("$defs", {})
    for model in [schema, *parts.values()]:
        for name, field in model["properties"].items():
            own = parts.get(field.get("$ref", "").rpartition("/")[2], {})
            yield (
                f"{model['title']}.{name}",
                {"title": own.get("title"), "description": own.get("description"), **field},
            )


@pytest.mark.parametrize("form", FORMS)
def test_every_field_has_a_title_and_a_description_and_all_but_the_subject_a_default(form):
    """The subject: what is uploaded where, what is evaluated how, what is pruned."""
    needed = {
        "StandaloneUpload": {"source", "destination"},
        "EvaluateConfig": {"evaluate_fn"},
        "PruneConfig": {"run", "retention"},
    }
    for path, field in properties(form):
        assert field["title"][0].isupper(), path
        assert len(field["description"]) > 8, path
        assert (
            "default" in field or path.rpartition(".")[2] in needed.get(form.__name__, set()) or _optional(form, path)
        ), path
    assert set(form.model_json_schema().get("required", [])) == needed.get(form.__name__, set())


def _optional(form: Any, path: str) -> bool:
    """A dict that is made anew has a default, which its schema does not show."""
    return path.rpartition(".")[2] in {"storage_options", "source_storage_options", "metrics", "train_loop_config"}


def test_every_number_of_the_form_has_a_limit():
    """A negative count or time can never work."""
    for path, field in properties(TrainConfig):
        for kind in [field, *field.get("anyOf", [])]:
            if kind.get("type") in ("integer", "number"):
                assert {"minimum", "exclusiveMinimum"} & set(kind), path


def test_the_form_has_every_setting_of_a_run():
    """Nothing that code can say is missing, but what has fields of its own, and how validations are called."""
    shown = set(TrainConfig.model_fields)
    assert {field.name for field in fields(RunConfig)} - shown == {
        "checkpoint_config", "upload_config", "failure_policy", "validation_task_config",
            "max_concurrent_validations",
    }  # fmt: skip
    parts = TrainConfig.model_fields
    assert {field.name for field in fields(Uploading)} == set(parts["upload"].annotation.model_fields)
    assert {field.name for field in fields(FailurePolicy)} == set(parts["failures"].annotation.model_fields)
    for name in ("num_to_keep", "checkpoint_score_attribute", "checkpoint_score_order"):
        assert name in {field.name for field in fields(CheckpointConfig)}
        assert name.removeprefix("checkpoint_") in Retention.model_fields


def test_the_defaults_of_the_form_are_those_of_the_configuration():
    """A form that nobody touched is a run that nobody configured."""
    assert TrainConfig().run_config("x") == RunConfig(
        name="x", storage_path="./runs", storage_options={}, checkpoint_config=CheckpointConfig(retention=KeepAll())
    )


def test_enums_are_drop_downs():
    """Of all values, in Prefect's own schema of the flow."""
    definitions = schema_of_form()["definitions"]
    found = {
        name: field["enum"]
        for part in definitions.values()
        for name, field in part["properties"].items()
        if "enum" in field
    }
    expected = {
        "when_full": ["block", "drop"], "red_on": ["lost", "any", "nothing"], "score_order": ["max", "min"],
    }  # fmt: skip
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("filled", "policy"),
    [
        ({}, KeepAll()),
        ({"num_to_keep": 3}, KeepLast(3)),
        ({"num_to_keep": 3, "score_attribute": "a/b", "score_order": "min"}, KeepBest(3, "a/b", "min")),
        (
            {"num_to_keep": 3, "score_attribute": "a", "keep_last": 2, "keep_every": 10, "keep_younger": 60},
            KeepAny((KeepAny((KeepAny((KeepBest(3, "a", "max"), KeepLast(2))), KeepEvery(10))), KeepYounger(60))),
        ),
    ],
)  # fmt: skip
def test_the_rules_of_retention_are_kept_by_any(filled, policy):
    """Each filled-in rule is a policy."""
    assert Retention(**filled).policy() == policy


FILLED = TrainConfig(
    name="Größe 8", storage_path="s3://bucket/runs", train_fn="a.b:c", train_loop_config={"lr": 1e-3, "layers": [1, {"x": None}]},
    credentials="block:aws-credentials/prod", storage_options={"client_kwargs": {"region_name": "eu-west-1"}}, resume="@12",
    upload={"when_full": "drop", "concurrency_limit": "ckpt-uploads"}, retention={"num_to_keep": 2, "score_attribute": "loss"},
    failures={"stop_after": None, "red_on": "any"}, stop_timeout=10, staging_dir="/scratch", lease_time=30,
)  # fmt: skip


@pytest.mark.parametrize("config", [TrainConfig(), FILLED], ids=["untouched", "filled in"])
def test_the_json_of_the_form_round_trips(config):
    """Through JSON, and through Prefect's own serialization of parameters."""
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config

    @flow
    def training(config: TrainConfig) -> None: ...

    sent = training.serialize_parameters({"config": config})
    assert training.validate_parameters(json.loads(json.dumps(sent)))["config"] == config


BAD: list[dict[str, Any]] = [
    {"name": "a/b"}, {"name": ".hidden"}, {"name": "a@b"}, {"name": "x" * 201}, {"name": None}, {"storage_path": ""},
    {"resume": "yesterday"}, {"stop_timeout": 0}, {"stop_timeout": "soon"}, {"lease_time": 0}, {"surprise": 1},
    {"scaling": {"nproc_per_node": 0}}, {"upload": {"max_concurrent_uploads": 0}}, {"upload": {"max_pending": 0}},
    {"upload": {"when_full": "wait"}}, {"upload": {"memory_budget": "much"}}, {"upload": {"stall_timeout": -1}},
    {"upload": {"concurrency_limit": ""}}, {"upload": {"max_pending": 1.5}}, {"retention": {"num_to_keep": 0}},
    {"retention": {"score_order": "best"}}, {"retention": {"keep_younger": 0}}, {"failures": {"red_on": "never"}},
    {"failures": {"stop_after": 0}}, {"train_loop_config": "epochs=3"},
]  # fmt: skip


@pytest.mark.parametrize("values", BAD, ids=str)
def test_a_bad_value_is_refused_by_the_form_itself(values):
    """By pydantic, naming the field."""
    with pytest.raises(ValidationError) as refused:
        TrainConfig(**values)
    [field] = values
    assert field in str(refused.value)


@pytest.mark.prefect
def test_the_server_refuses_bad_values_and_takes_good_ones(prefect_server):
    """Before a run exists; a credential that is none is not stored. What the form says is what the flow gets."""
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name("train-form")
        deployment = client.create_deployment(
            flow_id,
            "form",
            parameter_openapi_schema=parameter_schema(train).model_dump(),
            enforce_parameter_schema=True,
        )
        secret = {"credentials": "AKIA-marked-secret"}
        for values in [*BAD, secret]:
            with pytest.raises(PrefectHTTPStatusError) as refused:
                client.create_flow_run_from_deployment(deployment, parameters={"config": values})
            assert refused.value.response.status_code in (409, 422), values
        for config in (TrainConfig(), FILLED):
            run = client.create_flow_run_from_deployment(
                deployment, parameters={"config": config.model_dump(mode="json")}
            )
            assert TrainConfig(**client.read_flow_run(run.id).parameters["config"]) == config
        empty = client.create_flow_run_from_deployment(deployment, parameters={"config": {}})
        assert TrainConfig(**client.read_flow_run(empty.id).parameters["config"]) == TrainConfig()


def test_pruning_without_a_rule_is_refused(tmp_path):
    """Nothing would be kept by rule, or everything: whoever fills in nothing means neither."""
    with pytest.raises(ConfigError, match="no rule says which checkpoints to keep"):
        run_prune(PruneConfig(run=str(tmp_path), retention={}))


def test_the_forms_of_the_flows_are_these():
    """`flows/*.py` take them under the names that prefect.yaml and automations use."""
    folder = Path(__file__).resolve().parents[1] / "flows"
    expected = {"train": ["config"], "upload": ["config"], "evaluation": ["ref", "config"], "prune": ["config"]}
    sys.path.insert(0, str(folder))
    try:
        for module, names in expected.items():
            made = __import__(module)
            found = made.evaluate if module == "evaluation" else getattr(made, module)
            schema = parameter_schema(found).model_dump()
            assert list(schema["properties"]) == names
            assert all(field.get("description") for field in schema["properties"].values())
    finally:
        sys.path.remove(str(folder))
        for module in expected:
            sys.modules.pop(module, None)
