"""How the `ckpt` command draws what it read: pure functions from records to tables and lines.

The console that prints them has markup, emoji codes and highlighting off: a name in brackets is a name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from ckpt import FileEntry, ReportRecord, RunSummary, Totals
from ckpt.verifying import Verification
from ckpt_tasks._rows import AttemptRow, CheckpointRow, Found, RunView

_WIDE = 110
"""Width in characters from which a table has room for more than the most important."""
_LONGEST = 40
"""Characters of a metric's value that are shown."""


def runs_table(runs: Iterable[RunSummary]) -> Table:
    """The runs under a storage path."""
    table = _table("name", ">checkpoints", ">size", ">latest seq", ">reports", "created", "state")
    for run in runs:
        latest = "-" if run.latest_seq is None else str(run.latest_seq)
        row = (str(run.checkpoints), size(run.nbytes), latest, str(run.reports), moment(run.created), run.state)
        table.add_row(visible(run.name), *row)
    return table


def checkpoints_table(rows: Sequence[CheckpointRow], score: str | None, width: int) -> Table:
    """The committed checkpoints of a run."""
    metrics = metric_names([row.metrics for row in rows], score, width)
    numbers = [f">{name}" for name in metrics]
    table = _table(">seq", "name", *numbers, ">size", "created", "marks", wrapped=metrics)
    for row in rows:
        values = flatten(row.metrics)
        cells = [value(values.get(name)) for name in metrics]
        marks = " ".join(mark for mark in ("latest", "best", "pinned") if getattr(row, mark))
        table.add_row(str(row.seq), visible(row.name), *cells, size(row.nbytes), moment(row.created), marks)
    return table


def reports_table(records: Sequence[ReportRecord], retained: set[str], score: str | None, width: int) -> Table:
    """Reports in order; a committed checkpoint that is not retained shows as pruned."""
    metrics = metric_names([record.metrics for record in records], score, width)
    more = (">upload", "reported") if width >= _WIDE else ()
    table = _table(">seq", "name", "state", *(f">{name}" for name in metrics), ">size", *more, wrapped=metrics)
    for record in records:
        values = flatten(record.metrics)
        cells = [value(values.get(name)) for name in metrics]
        amount, seconds = (size(record.nbytes), f"{record.timings.upload:.2f} s") if record.checkpoint else ("", "")
        state = "pruned" if record.checkpoint and record.checkpoint.uri not in retained else record.state.value
        last = (seconds, moment(record.created)) if more else ()
        table.add_row(str(record.seq), visible(record.name), state, *cells, amount, *last)
    return table


def attempts_table(rows: Iterable[AttemptRow]) -> Table:
    """Who drove a run."""
    table = _table(">attempt", "status", "claimed", "by", ">first seq", "resumed from")
    for row in rows:
        by = f"{row.user}@{row.host} pid {row.pid}" + (f" flow run {row.flow_run_id}" if row.flow_run_id else "")
        first = "" if row.first_seq is None else str(row.first_seq)
        cells = (row.status, moment(row.claimed or 0.0), visible(by), first, visible(row.resumed_from or "scratch"))
        table.add_row(str(row.attempt), *cells)
    return table


def files_table(files: Iterable[FileEntry]) -> Table:
    """The files of a checkpoint."""
    table = _table("file", ">bytes", ">mode", "digest")
    for file in files:
        table.add_row(visible(file.path), str(file.size), f"{file.mode:o}", file.digest or "-")
    return table


def run_facts(view: RunView) -> Table:
    """The head of `ckpt show RUN`."""
    kept = sum(row.nbytes for row in view.checkpoints)
    facts = {
        "run": view.run, "where": view.uri, "state": view.state, "error": view.error, "created": moment(view.created),
        "latest": _named(view.marked("latest")), "best": _named(view.marked("best")), "ranked by": _ranking(view),
        "retention": view.retention, "checkpoints": f"{len(view.checkpoints)} committed and retained, {size(kept)}",
        "reports": str(view.nreports),
        "superseded": f"{view.superseded} commits of a replaced attempt do not count" if view.superseded else None,
        "totals": None if view.totals is None else _totals(view.totals),
    }  # fmt: skip
    return facts_table(facts)


def checkpoint_facts(found: Found) -> Table:
    """The head of `ckpt show REF`."""
    manifest = found.checkpoint.manifest
    return facts_table({
        "checkpoint": manifest.name, "run": manifest.run or None, "seq": f"{manifest.seq} (attempt {manifest.attempt})",
        "where": found.checkpoint.uri, "manifest": found.commit_uri,
        "files": f"{len(manifest.files)}, {size(manifest.nbytes)} ({manifest.nbytes} bytes)",
        "empty folders": ", ".join(manifest.empty_dirs) or None, "reported": moment(manifest.created),
        "committed": moment(manifest.committed), "uploaded by": manifest.uploaded_by,
        "versions": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()) or None,
        "git commit": manifest.git_commit,
        **{f"metric {name}": value(item) for name, item in flatten(found.metrics()).items()},
        **{f"metadata {name}": value(item) for name, item in flatten(manifest.metadata).items()},
    })  # fmt: skip


def facts_table(facts: Mapping[str, str | None]) -> Table:
    """Names and values; what is None is left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=28, overflow="fold")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact is not None:
            table.add_row(visible(name), visible(fact))
    return table


def failure_lines(records: Iterable[ReportRecord]) -> list[str]:
    """Why reports are not committed."""
    return [visible(f"{row.seq} {row.name} {row.state.value}: {row.reason}") for row in records if row.reason]


def verification_lines(ref: str, found: Verification) -> list[str]:
    """One line for a checkpoint, and one for each file that differs."""
    verdict = "ok" if found.ok else "DIFFERS"
    notes = [f"{found.files} files, {size(found.nbytes)}"]
    notes += [f"{found.unchecked} compared by size only"] if found.unchecked else []
    notes += [f"{len(found.unlisted)} files there that are in no manifest"] if found.unlisted else []
    lines = [f"{verdict:8}{ref}  {'; '.join(notes)}", *(f"  {problem}" for problem in found.problems)]
    return [visible(line) for line in lines]


def metric_names(rows: Iterable[Mapping[str, Any]], score: str | None, width: int) -> list[str]:
    """The metrics that get a column: the score first, then by first appearance, as many as there is room for."""
    names = dict.fromkeys(name for row in rows for name in flatten(row))
    ordered = sorted(names, key=lambda name: name != score)
    return ordered[: 6 if width >= _WIDE else 2]


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested metrics under `a/b`, as references name them."""
    flat: dict[str, Any] = {}
    for name, item in metrics.items():
        flat.update(flatten(item, f"{prefix}{name}/") if isinstance(item, Mapping) else {f"{prefix}{name}": item})
    return flat


def value(item: Any) -> str:
    """A metric's value, short."""
    if isinstance(item, float):
        return f"{item:.5g}"
    text = "" if item is None else item if isinstance(item, str) else json.dumps(item)
    return visible(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}...")


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def moment(seconds: float) -> str:
    """Unix seconds as local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "-"


def visible(text: str) -> str:
    """Text that cannot steer a terminal: control and other unprintable characters are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _table(*headings: str, wrapped: Collection[str] = ()) -> Table:
    """Headings that begin with `>` are of numbers; those do not wrap, unless they are among `wrapped`."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        number = heading.startswith(">")
        title = heading.removeprefix(">")
        fixed = number and title not in wrapped
        table.add_column(visible(title), justify="right" if number else "left", no_wrap=fixed, overflow="fold")
    return table


def _named(row: CheckpointRow | None) -> str | None:
    return None if row is None else f"@{row.seq}  {row.uri}"


def _ranking(view: RunView) -> str | None:
    return None if view.score_attribute is None else f"{view.score_attribute}, {view.score_order} is best"


def _totals(totals: Totals) -> str:
    gone = {"failed": totals.failed, "skipped": totals.skipped, "fenced": totals.fenced, "lost": totals.lost}
    counts = [f"{totals.reports} reports", f"{totals.checkpoints} checkpoints committed ({size(totals.nbytes)})"]
    counts += [f"{count} {name}" for name, count in gone.items() if count]
    return ", ".join([*counts, f"training stalled {totals.stall:.2f} s", f"uploads took {totals.upload:.2f} s"])
