"""What a terminal shows at the end of a run: the reports, and how to get the best and the latest checkpoint back."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ckpt import Checkpoint, ReportRecord, ReportState, Result

if TYPE_CHECKING:
    from rich.console import Console

_ROWS = 40
"""Newest reports that are printed."""
_COLUMNS = 5
"""Metrics that get a column."""


def print_result(result: Result, console: Console) -> None:
    """Print the table of reports, the totals, and one restore command each for the best and the latest checkpoint."""
    newest = list(islice(reversed(result.history), _ROWS))[::-1]
    console.print(_table(result, newest))
    totals = result.totals
    console.print(
        f"{totals.reports} reports, {totals.checkpoints} checkpoints committed ({totals.nbytes / 2**20:.1f} MiB), "
        f"{totals.failed} failed, {totals.skipped} skipped, {totals.lost} lost; "
        f"training stalled {1000 * totals.stall:.0f} ms in all"
    )
    for label, checkpoint, which in (("Best", result.best, "best"), ("Latest", result.checkpoint, "latest")):
        if checkpoint is not None:
            console.print(_restore(label, checkpoint, f"{result.path}@{which}"), soft_wrap=True, highlight=False)


def _table(result: Result, rows: list[ReportRecord]) -> Table:
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))[:_COLUMNS]
    table = Table(title=f"Run {escape(result.run)}", title_justify="left")
    for heading in ("seq", "state", *metrics, "MiB", "upload s"):
        table.add_column(escape(heading), justify="left" if heading == "state" else "right")
    retained = {checkpoint.uri for checkpoint, _ in result.best_checkpoints}
    for row in rows:
        values = [_number(row.metrics.get(name)) for name in metrics]
        table.add_row(
            str(row.seq), _state(row, retained), *values, f"{row.nbytes / 2**20:.2f}", f"{row.timings.upload:.2f}"
        )
    return table


def _state(row: ReportRecord, retained: set[str]) -> str:
    if row.state is ReportState.COMMITTED:
        return "committed" if row.checkpoint is None or row.checkpoint.uri in retained else "pruned"
    return escape(f"{row.state.value}: {row.reason}")


def _number(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else escape(str("" if value is None else value))


def _restore(label: str, checkpoint: Checkpoint, ref: str) -> str:
    return escape(f"{label}: checkpoint {checkpoint.seq} at {checkpoint.uri}\n  ckpt restore {ref} --to ./restored")
