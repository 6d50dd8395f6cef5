"""`ckpt setup`: what it makes, that a second time changes nothing, and what its automations say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed, Running

from ckpt.errors import ConfigError
from ckpt_tasks import cli
from ckpt_tasks.automations import Reactions
from ckpt_tasks.rerun import NUMBER, ORIGIN, run_again

pytestmark = pytest.mark.prefect


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def ckpt(prefect_server: str, capsys: Any) -> Callable[..., Any]:
    """A command that has to succeed, as the document it prints."""

    def run(*arguments: str, code: int = 0) -> Any:
        given = cli.main([*arguments, "--json"])
        out, err = capsys.readouterr()
        assert given == code, err
        return json.loads(out) if code == 0 else err

    return run


def done(document: dict[str, Any]) -> dict[str, str]:
    return {step["what"]: step["done"] for step in document["steps"]}


def deployment(client: SyncPrefectClient, name: str) -> UUID:
    """A deployment called `<name>/<name>`; it is never run."""

    @flow(name=name)
    def nothing() -> None: ...

    flow_id = client.create_flow(nothing)
    return client.create_deployment(flow_id, name, work_pool_name="ckpt", entrypoint="nowhere.py:nothing")


@pytest.fixture
def deployed(client: SyncPrefectClient) -> None:
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name="ckpt", type="process"))
    for name in ("evaluate", "rerun"):
        deployment(client, name)


@pytest.mark.slow
def test_a_second_setup_changes_nothing_and_says_so(ckpt: Any, client: SyncPrefectClient) -> None:
    limit, pool = f"limit-{uuid4()}", f"pool-{uuid4()}"
    first = ckpt("setup", "--limit", limit, "--slots", "3", "--pool", pool)
    assert done(first) == {f"concurrency limit {limit}": "created", f"work pool {pool}": "created"}
    assert client.read_global_concurrency_limit_by_name(limit).limit == 3
    assert client.read_work_pool(pool).type == "process"
    again = ckpt("setup", "--limit", limit, "--pool", pool)
    assert again["changed"] == 0
    assert client.read_global_concurrency_limit_by_name(limit).limit == 3, "who names no number keeps it"
    changed = ckpt("setup", "--limit", limit, "--slots", "5", "--pool", pool)
    assert done(changed)[f"concurrency limit {limit}"] == "changed"
    assert client.read_global_concurrency_limit_by_name(limit).limit == 5


@pytest.mark.slow
def test_a_credentials_block_is_made_of_the_environment_and_changes_with_it(
    ckpt: Any, monkeypatch: Any, capsys: Any
) -> None:
    name = f"lab-{uuid4().hex[:8]}"
    arguments = ["setup", "--block", f"aws-credentials/{name}", "--key-env", "LAB_KEY", "--secret-env", "LAB_SECRET"]
    assert "LAB_KEY is not set" in ckpt(*arguments, code=2)
    monkeypatch.setenv("LAB_KEY", "AKIAFIRST")
    monkeypatch.setenv("LAB_SECRET", "first-secret")
    step = f"credentials block aws-credentials/{name}"
    assert done(ckpt(*arguments))[step] == "created"
    assert done(ckpt(*arguments))[step] == "unchanged"
    monkeypatch.setenv("LAB_SECRET", "second-secret")
    rotated = ckpt(*arguments)
    assert done(rotated)[step] == "changed"
    assert "second-secret" not in json.dumps(rotated)
    block: Any = Block.load(f"aws-credentials/{name}")
    assert block.aws_secret_access_key.get_secret_value() == "second-secret"


def test_automations_name_what_must_be_deployed_first(ckpt: Any, client: SyncPrefectClient) -> None:
    said = ckpt("setup", "--automations", "--evaluate", "none", "--notify", "slack-webhook/nobody", code=2)
    assert "there is no block 'slack-webhook/nobody'" in said


@pytest.mark.slow
@pytest.mark.usefixtures("deployed")
def test_automations_are_made_once_and_change_only_with_what_is_wanted(ckpt: Any, client: SyncPrefectClient) -> None:
    made = done(ckpt("setup", "--automations"))
    assert [what for what, how in made.items() if how == "created" and what.startswith("automation")] == [
        "automation 'ckpt: evaluate checkpoints'",
        "automation 'ckpt: a report failed'",
        "automation 'ckpt: a training failed'",
        "automation 'ckpt: no commit for too long'",
        "automation 'ckpt: run a crashed training again'",
    ]
    assert ckpt("setup", "--automations")["changed"] == 0
    best = done(ckpt("setup", "--automations", "--evaluate", "best", "--no-commit-hours", "2", "--reruns", "0"))
    changed = {what: how for what, how in best.items() if how != "unchanged"}
    assert changed == {
        "automation 'ckpt: evaluate checkpoints'": "changed",
        "automation 'ckpt: no commit for too long'": "changed",
        "automation 'ckpt: run a crashed training again'": "removed",
    }
    [evaluating] = client.read_automations_by_name("ckpt: evaluate checkpoints")
    assert evaluating.trigger.expect == {"ckpt.best.changed"}  # type: ignore[union-attr]
    [action] = evaluating.actions
    assert action.deployment_id == client.read_deployment_by_name("evaluate/evaluate").id  # type: ignore[union-attr]
    assert "event.payload.ref" in json.dumps(action.model_dump(mode="json")["parameters"])


def test_without_a_server_setup_says_which_one_does_not_answer(capsys: Any) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert cli.main(["setup"]) == 2
    assert "no Prefect server answers at http://127.0.0.1:9/api" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"silence": 0.0}, {"reruns": -1}])
def test_reactions_that_can_never_work_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Reactions(**changes)


# ------------------------------------------------------------------------------------------------------------ run again


def crashed(client: SyncPrefectClient, run: FlowRun) -> FlowRun:
    for state in (Running(), Crashed(message="killed")):
        client.set_flow_run_state(run.id, state, force=True)
    return client.read_flow_run(run.id)


@pytest.mark.usefixtures("deployed")
def test_a_crashed_training_is_run_again_with_its_parameters_and_at_most_so_often(client: SyncPrefectClient) -> None:
    training = deployment(client, f"train-{uuid4().hex[:8]}")
    parameters = {
        "config": {"name": "", "storage_path": "/runs", "train_loop_config": {"epochs": 3, "lr": [0.1, None]}}
    }
    first = crashed(client, client.create_flow_run_from_deployment(training, parameters=parameters, tags=["night"]))
    told = [run_again(first.id, 2), run_again(first.id, 2)]
    again = [run for run in client.read_flow_runs() if run.labels.get(ORIGIN) == str(first.id)]
    assert len(again) == 1, "an automation that fires twice starts one"
    assert "rerun 1 of at most 2" in str(told[0].message)
    name = f"{first.name}-{str(first.id)[-8:]}"
    assert again[0].parameters == {"config": {**parameters["config"], "name": name}}, "the same training goes on"
    assert again[0].tags == ["night"]
    assert again[0].state is not None
    assert again[0].state.type is StateType.SCHEDULED
    run_again(crashed(client, again[0]).id, 2)
    [second] = [run for run in client.read_flow_runs() if run.labels.get(NUMBER) == 2]
    assert second.parameters == again[0].parameters
    last = run_again(crashed(client, second).id, 2)
    assert "was run again 2 times already" in str(last.message)
    assert len([run for run in client.read_flow_runs() if run.labels.get(ORIGIN) == str(first.id)]) == 2


@pytest.mark.usefixtures("deployed")
def test_what_is_not_crashed_or_not_deployed_is_not_run_again(client: SyncPrefectClient) -> None:
    scheduled = client.create_flow_run_from_deployment(deployment(client, f"train-{uuid4().hex[:8]}"))
    assert "not Crashed" in str(run_again(scheduled.id, 3).message)

    @flow
    def by_hand() -> None: ...

    alone = crashed(client, client.create_flow_run(by_hand))
    assert "not started from a deployment" in str(run_again(alone.id, 3).message)
    with pytest.raises(ConfigError, match="no flow run"):
        run_again(uuid4(), 3)
