"""The metrics plot."""

from __future__ import annotations

import base64
import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tasks.plot import lookup, metrics_svg, svg_data_uri

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Row:
    seq: int
    metrics: dict[str, Any]
    state: str = "committed"
    checkpoint: object | None = field(default_factory=object)


def rows(*values: float | None, name: str = "loss") -> list[Row]:
    return [Row(seq, {} if value is None else {name: value}) for seq, value in enumerate(values)]


def curves(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line, in pixels."""
    lines = [path.get("d", "") for path in ET.fromstring(svg).iter(f"{SVG}path") if path.get("class") == "l"]
    return [[(float(x), float(y)) for x, y in map(str.split, line[1:].split("L"))] for line in lines]


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_falling_loss_is_drawn_from_top_left_to_bottom_right() -> None:
    [curve] = curves(metrics_svg(rows(3.0, 2.0, 1.0), ["loss"]))
    xs, ys = zip(*curve, strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys), "y grows downwards in SVG"


def test_nothing_to_plot_is_empty_text() -> None:
    assert metrics_svg([], ["loss"]) == ""
    assert metrics_svg(rows(1.0), []) == ""


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e308, 5e-324])
def test_a_constant_metric_is_a_horizontal_line(value: float) -> None:
    [curve] = curves(metrics_svg(rows(value, value, value), ["loss"]))
    assert len({y for _, y in curve}) == 1


def test_a_single_report_is_a_dot_in_the_middle() -> None:
    svg = metrics_svg(rows(1.0), ["loss"])
    assert curves(svg) == []
    assert sum(1 for _ in ET.fromstring(svg).iter(f"{SVG}circle")) == 1


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf, "oops"])
def test_what_is_not_a_finite_number_leaves_a_gap(hole: Any) -> None:
    assert [len(curve) for curve in curves(metrics_svg(rows(1.0, 2.0, hole, 2.0, 1.0, 0.5), ["loss"]))] == [2, 3]


def test_a_metric_that_some_reports_do_not_have_is_joined_over_them() -> None:
    assert [len(curve) for curve in curves(metrics_svg(rows(1.0, None, None, 2.0), ["loss"]))] == [2]


def test_a_metric_without_any_finite_value_says_so() -> None:
    assert "no finite values" in texts(metrics_svg(rows(math.nan, math.nan), ["loss"]))


def test_a_loss_over_many_decades_gets_a_logarithmic_axis() -> None:
    svg = metrics_svg(rows(*(10.0**-power for power in range(8))), ["loss"])
    assert any("log scale" in text for text in texts(svg))
    [curve] = curves(svg)
    steps = {round(b[1] - a[1]) for a, b in pairwise(curve)}
    assert len(steps) <= 2, "equal steps, up to rounding"


def test_nested_metrics_are_named_by_path() -> None:
    svg = metrics_svg([Row(seq, {"val": {"acc": seq / 10}}) for seq in range(3)], ["val/acc"])
    assert len(curves(svg)) == 1
    assert lookup({"a/b": 1}, "a/b") == 1
    assert lookup({"a": {"b": 2}}, "a/b") == 2
    assert lookup({"a": 3}, "a/b") is None


def test_at_most_six_panels_are_drawn() -> None:
    names = [f"m{index}" for index in range(9)]
    svg = metrics_svg([Row(seq, dict.fromkeys(names, float(seq))) for seq in range(3)], names)
    assert len(curves(svg)) == 6


def test_ten_thousand_reports_make_a_bounded_picture_that_keeps_every_peak() -> None:
    def many() -> Iterator[Row]:
        for seq in range(10_000):
            noise = {f"m{index}": math.sin(seq * (index + 1)) for index in range(6)}
            yield Row(
                seq, {**noise, "m0": 100.0 if seq == 4321 else math.sin(seq)}, "failed" if seq % 3 else "committed"
            )

    svg = metrics_svg(many(), [f"m{index}" for index in range(6)], best=4321)
    assert len(svg) < 150_000
    assert len(svg_data_uri(svg)) < 200_000
    assert min(y for _, y in curves(svg)[0]) == 24.0, "the single peak reaches the top of the panel"


def test_names_are_escaped() -> None:
    evil = '</text><script>alert("1")</script>\x00&'
    svg = metrics_svg(rows(1.0, 2.0, name=evil), [evil])
    assert "<script" not in svg
    assert any(text.startswith("</text><script>") for text in texts(svg))


def test_committed_failed_and_best_reports_are_marked() -> None:
    reports = [*rows(3.0, 1.0, 2.0), Row(3, {"loss": 4.0}, "failed", None), Row(4, {"loss": 5.0}, "committed", None)]
    svg = metrics_svg(reports, ["loss"], best=1)
    marks = {path.get("class"): path.get("d", "") for path in list(ET.fromstring(svg).iter(f"{SVG}path"))[:-3]}
    assert marks["c"].count("v8") == 3
    assert marks["f"].count("v8") == 1
    assert "v" in marks
    assert "b" in marks


def test_a_data_uri_carries_the_svg() -> None:
    svg = metrics_svg(rows(1.0, 2.0), ["loss"])
    head, _, body = svg_data_uri(svg).partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(body).decode() == svg


@example([-1.634266486238469e308], "")  # room around one value beside the largest float
@example([sys.float_info.max], "")
@given(st.lists(st.floats() | st.none() | st.text(max_size=3), max_size=600), st.text(max_size=50))
def test_any_values_and_any_name_make_well_formed_xml(values: list[Any], name: str) -> None:
    svg = metrics_svg(rows(*values, name=name), [name], best=len(values) // 2)
    if svg:
        ET.fromstring(svg)
        assert "nan" not in "".join(path.get("d", "") for path in ET.fromstring(svg).iter(f"{SVG}path"))
