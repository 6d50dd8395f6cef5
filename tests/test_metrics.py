"""Metrics: recorded as they were at the call, in plain values, and ranked the way people mean."""

import math

import numpy as np
import pytest
import torch
from helpers import make_checkpoint, make_config
from hypothesis import given
from hypothesis import strategies as st

from ckpt import Result, open_run, report
from ckpt._json import dumps, loads
from ckpt.errors import MetricsError
from ckpt.metrics import MAX_BYTES, freeze_metrics, score_of

NAN, INF = float("nan"), float("inf")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), below, max_size=3)
    ),
    max_leaves=10,
)


def same(one, other) -> bool:
    return repr(one) == repr(other)


def test_metrics_changed_after_the_call_are_recorded_as_they_were(storage_path, tmp_path):
    """At any depth, in the manifest and in the history."""
    metrics = {"loss": 1.0, "per_class": {"a": [1, 2]}}
    with open_run(make_config(storage_path)) as run:
        report(metrics, make_checkpoint(tmp_path / "ck"))
        report(metrics)
        metrics["loss"] = 9.0
        metrics["per_class"]["a"].append(3)
        metrics["new"] = 1
    for record in run.result.history:
        assert record.metrics == {"loss": 1.0, "per_class": {"a": [1, 2]}}
    assert run.result.checkpoint.metrics == {"loss": 1.0, "per_class": {"a": [1, 2]}}


@pytest.mark.parametrize(
    ("given_value", "recorded"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array(2.0), 2.0),
        (np.array([2.5]), 2.5),
        (np.str_("x"), "x"),
        (np.float64("nan"), NAN),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([3]), 3),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (True, True),
        (None, None),
        ((1, (2, 3)), [1, [2, 3]]),
        ({"a": {"b": np.int8(1)}}, {"a": {"b": 1}}),
        ([-INF, INF, NAN], [-INF, INF, NAN]),
    ],
    ids=repr,
)
def test_scalars_of_numpy_and_torch_become_plain_numbers(given_value, recorded):
    """The type too: a bool stays a bool."""
    frozen = freeze_metrics({"x": given_value})["x"]
    assert same(frozen, recorded)
    assert type(frozen) is type(recorded)


def test_non_finite_metrics_survive_storage(storage_path, tmp_path):
    """NaN and the infinities are no JSON, and still come back as they were."""
    metrics = {"nan": NAN, "inf": INF, "minus": -INF, "nested": {"list": [NAN, 1.0]}}
    with open_run(make_config(storage_path)) as run:
        report(metrics, make_checkpoint(tmp_path / "ck"))
    for found in (run.result.history[0].metrics, run.result.checkpoint.metrics, Result.from_path(run.uri).metrics):
        assert same(found, metrics)


class Unrecordable:
    pass


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"bad": Unrecordable()}, "'bad'"),
        ({"a": {"b": [1, {"c": Unrecordable()}]}}, "a/b[1]/c"),
        ({"bad": np.zeros(3)}, "'bad'"),
        ({"bad": torch.zeros(2)}, "'bad'"),
        ({"bad": 1 + 2j}, "'bad'"),
        ({"bad": b"bytes"}, "'bad'"),
        ({"bad": {1, 2}}, "'bad'"),
        ({"bad": np.datetime64("2020-01-01")}, "'bad'"),
        ({"bad": "lone \ud800 surrogate"}, "'bad'"),
        ({"bad": 10**5000}, "JSON"),
        ({1: 2}, "1"),
        ({"a": {2: 3}}, "a/"),
        ({"$float": 1}, "$float"),
        ({"big": "x" * MAX_BYTES, "small": 1}, "'big'"),
        ([("loss", 1)], "list"),
        (None, "NoneType"),
    ],
    ids=[
        "object", "nested", "array", "tensor", "complex", "bytes", "set", "date", "surrogate", "huge", "key",
        "nested-key", "reserved", "big", "pairs", "none",
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_a_type_error_at_the_call_that_names_the_key(tmp_path, metrics, named):
    """Nothing is recorded, and the run goes on."""
    with open_run(make_config(tmp_path / "runs")) as run:
        with pytest.raises(TypeError) as caught:
            report(metrics, make_checkpoint(tmp_path / "ck"))
        report({"n": 1})
    assert isinstance(caught.value, MetricsError)
    assert named in str(caught.value)
    assert [record.metrics for record in run.result.history] == [{"n": 1}]


def test_metrics_that_contain_themselves_are_refused():
    """With the depth, not with a recursion error."""
    metrics = {}
    metrics["self"] = metrics
    with pytest.raises(MetricsError, match="levels deep"):
        freeze_metrics(metrics)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])).filter(lambda key: key != "$float"), values, max_size=4
    )
)
def test_whatever_can_be_recorded_survives_json(metrics):
    """Text, numbers of every size, non-finite ones, nested at will."""
    try:
        frozen = freeze_metrics(metrics)
    except MetricsError as error:
        assert "$float" in str(error)  # noqa: PT017 - the one key that the format needs itself
        return
    assert same(loads(dumps(frozen), "here"), frozen)


@pytest.mark.parametrize(
    ("metrics", "attribute", "score"),
    [
        ({"loss": 2}, "loss", 2.0),
        ({"eval": {"loss": 2}}, "eval/loss", 2.0),
        ({"eval/loss": 3, "eval": {"loss": 2}}, "eval/loss", 3.0),
        ({"a": {"b": {"c": 1}}}, "a/b/c", 1.0),
        ({"loss": INF}, "loss", INF),
        ({"ok": True}, "ok", 1.0),
        ({"loss": NAN}, "loss", None),
        ({"loss": "low"}, "loss", None),
        ({"loss": None}, "loss", None),
        ({"loss": [1]}, "loss", None),
        ({"loss": 10**400}, "loss", None),
        ({}, "loss", None),
        ({"eval": 1}, "eval/loss", None),
    ],
)
def test_a_score_is_a_number_under_the_attribute_or_nothing(metrics, attribute, score):
    """Nested keys by slashes; NaN and what is no number do not rank."""
    assert score_of(metrics, attribute) == score
    assert score is None or not math.isnan(score)
