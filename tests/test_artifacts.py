"""The texts that a run shows in the UI."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import Checkpoint, ReportRecord, ReportState, Result, Timings, Totals
from ckpt_tasks.artifacts import (
    LIVE_BYTES,
    LIVE_ROWS,
    NEWEST,
    live_description,
    live_key,
    live_rows,
    result_key,
    result_markdown,
)

ROOT = "s3://bucket/runs/digits"


def committed(seq: int, **metrics: Any) -> ReportRecord:
    return ReportRecord(
        seq=seq,
        attempt=1,
        name=f"epoch-{seq}",
        state=ReportState.COMMITTED,
        metrics=metrics or {"accuracy": seq / 100},
        checkpoint=Checkpoint(f"{ROOT}/checkpoints/epoch-{seq}-a1"),
        nbytes=2**20,
        nfiles=3,
        timings=Timings(stall=0.001, upload=2.0),
        created=1.7e9 + seq,
    )


def failed(seq: int, reason: str = "disk full", state: ReportState = ReportState.FAILED) -> ReportRecord:
    return ReportRecord(
        seq=seq,
        attempt=1,
        name=f"epoch-{seq}",
        state=state,
        metrics={"accuracy": seq / 100},
        reason=reason,
        created=1.7e9,
    )


def result(records: Sequence[ReportRecord], *, keep: int = 5, **changes: Any) -> Result:
    kept = [(record.checkpoint, record.metrics) for record in records if record.checkpoint is not None][-keep:]
    given = {
        "run": "digits",
        "path": ROOT,
        "checkpoint": kept[-1][0] if kept else None,
        "metrics": kept[-1][1] if kept else {},
        "best_checkpoints": kept,
        "history": records,
        "totals": Totals.of(records),
        "score_attribute": "accuracy",
    }
    return Result(**{**given, **changes})


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}")[2].partition("\n## ")[0]


def test_the_artifact_tells_best_latest_size_stall_and_totals() -> None:
    text = result_markdown(result([*(committed(seq) for seq in range(10)), failed(10)]))
    assert f"| run | `{ROOT}` |" in text
    assert "report 9, max of accuracy = 0.09, `checkpoints/epoch-9-a1`" in text
    assert "5 checkpoints" in text
    assert "10.0 ms in `report()`" in text
    assert "11 reports, 10 checkpoints committed, 1 failed" in section(text, "Totals")
    assert "![metrics over reports](data:image/svg+xml;base64," in text


def test_the_restore_line_can_be_pasted_into_a_shell() -> None:
    text = result_markdown(result([committed(0)], path="s3://bucket/it's a `run`/$HOME"))
    block = re.search(r"(`{3,})sh\n(.*)\n\1", text)
    assert block is not None
    assert shlex.split(block[2]) == ["ckpt", "restore", "s3://bucket/it's a `run`/$HOME@best", "--to", "DIR"]


def test_without_a_score_the_latest_is_restored() -> None:
    text = result_markdown(result([committed(0)], score_attribute=None))
    assert f"ckpt restore {ROOT}@latest --to DIR" in text
    assert "**best**" not in text


def test_a_run_without_reports_has_an_artifact_too() -> None:
    text = result_markdown(result([]))
    assert "No report was made." in text
    assert "ckpt restore" not in text
    assert "data:image" not in text


def test_every_failure_shows_its_reason() -> None:
    states = (ReportState.FAILED, ReportState.SKIPPED, ReportState.FENCED, ReportState.LOST)
    text = section(
        result_markdown(result([failed(i, f"why {i}", s) for i, s in enumerate(states)])), "Failed, skipped or lost"
    )
    for index, state in enumerate(states):
        assert re.search(rf"\| {index} \| {state.value} \|.*\| why {index} \|", text)


def test_a_reason_cannot_break_out_of_its_cell() -> None:
    reason = "a | b\nc <img src=x onerror=alert(1)> [x](javascript:y) `z` \x1b[31m"
    text = section(result_markdown(result([failed(0, reason)])), "Failed, skipped or lost")
    [row] = [line for line in text.splitlines() if line.startswith("| 0 ")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "<img" not in text
    assert "](" not in text.replace("\\](", "").replace("]\\(", "")
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "secret",
    [
        "s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@host/x",
        "https://b.s3.amazonaws.com/k?X-Amz-Signature=deadbeef&X-Amz-Credential=wJalrXUtnFEMI",
        "https://acct.blob.core.windows.net/c?sv=1&sig=wJalrXUtnFEMI%3D",
        "key AKIAIOSFODNN7EXAMPLE was refused",
    ],
)
def test_no_secret_of_a_reason_is_shown(secret: str) -> None:
    text = result_markdown(result([failed(0, f"denied: {secret}")]))
    for hidden in ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI", "deadbeef"):
        assert hidden not in text


def test_a_long_run_makes_a_bounded_artifact_with_the_newest_rows_and_the_best() -> None:
    name = "n" * 4000
    later = [failed(seq, f"{name} {seq}") if seq % 2 else committed(seq) for seq in range(1, 5000)]
    records = [committed(0, accuracy=99.0), *later]
    kept = [(records[0].checkpoint, records[0].metrics), (records[-2].checkpoint, records[-2].metrics)]
    text = result_markdown(result(records, best_checkpoints=kept))
    assert len(text.encode()) < 500_000
    table = [line for line in section(text, "Reports").splitlines() if re.match(r"\| \**\d", line)]
    assert len(table) == NEWEST + 1
    assert table[0].startswith("| 4999 |")
    assert table[-1].startswith("| **0** |")
    assert f"the newest {NEWEST} of 2500" in text


def test_the_history_is_not_indexed_and_no_checkpoint_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(list[ReportRecord]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("random access to a history in a store is slow")

    monkeypatch.setattr(Checkpoint, "open", lambda self: pytest.fail("opened"))
    assert "report 2" in result_markdown(
        result([committed(seq) for seq in range(3)], history=Lazy(map(committed, range(3))))
    )


def test_an_error_that_ended_the_run_is_on_top() -> None:
    text = result_markdown(result([committed(0)], error=RuntimeError("CUDA | out of memory")))
    assert "RuntimeError: CUDA \\| out of memory" in text.partition("## ")[0]


@pytest.mark.parametrize(
    ("run", "key"), [("digits", "ckpt-result-digits"), ("a-b-1", "ckpt-result-a-b-1"), ("", r"ckpt-result-[0-9a-f]{8}")]
)
def test_a_plain_name_is_its_own_key(run: str, key: str) -> None:
    assert re.fullmatch(key, result_key(run))


def test_names_that_look_alike_have_different_keys() -> None:
    names = [
        "Digits",
        "digits",
        "digits ",
        "DIGITS",
        "di/gits",
        "di_gits",
        "di-gits",
        "数字",
        "数",
        "x" * 500,
        "x" * 501,
    ]
    assert len({result_key(name) for name in names}) == len(names)
    assert live_key("digits") != result_key("digits")


@given(st.text())
def test_any_name_makes_a_key_that_prefect_accepts(name: str) -> None:
    key = result_key(name)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key)
    assert len(key) <= 80


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_name_and_reason_make_whole_table_rows(name: str, reason: str) -> None:
    record = ReportRecord(
        seq=0, attempt=1, name=name, state=ReportState.FAILED, metrics={name: 1.0, "b": math.nan}, reason=reason
    )
    text = result_markdown(result([record], run=name or "x"))
    text.encode()
    widths: list[int] = []
    for line in section(text, "Reports").splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            widths.append(len(re.findall(r"(?<!\\)\|", line)))
    assert len(set(widths)) == 1


def test_live_rows_are_the_newest_hundred_newest_first() -> None:
    rows = live_rows([committed(seq) for seq in range(150)])
    assert [row["report"] for row in rows] == [str(seq) for seq in reversed(range(50, 150))]
    assert rows[0]["accuracy"] == "1.49"
    assert rows[0]["where"].endswith("epoch-149-a1")


def test_the_live_table_stays_small_whatever_is_in_it() -> None:
    huge = [
        ReportRecord(
            seq=seq, attempt=1, name="é" * 5000, state=ReportState.FAILED, metrics={"x" * 9000: 1.0}, reason="𝄞" * 9000
        )
        for seq in range(LIVE_ROWS)
    ]
    rows = live_rows(huge)
    assert rows
    assert len(json.dumps(rows)) < LIVE_BYTES


def test_the_live_table_is_strict_json() -> None:
    [row] = live_rows([committed(0, loss=math.nan, accuracy=math.inf)])
    assert (row["loss"], row["accuracy"]) == ("nan", "inf")
    json.dumps(row, allow_nan=False)


def test_a_metric_called_like_a_column_does_not_overwrite_it() -> None:
    [row] = live_rows([committed(7, state=3.0, report=4.0)])
    assert (row["report"], row["state"], row["metric state"]) == ("7", "committed", "3")


def test_the_live_table_has_totals() -> None:
    text = live_description("digits", Totals.of([committed(0), failed(1)]))
    assert text == "**digits**: 2 reports, 1 checkpoints committed, 1 failed, 1.0 MiB uploaded, 1.0 ms stalled"


def test_a_checkpoint_outside_the_run_is_named_in_full() -> None:
    elsewhere = ReportRecord(
        seq=0, attempt=1, name="x", state=ReportState.COMMITTED, metrics={}, checkpoint=Checkpoint("s3://other/place")
    )
    assert "`s3://other/place`" in result_markdown(result([elsewhere]))
