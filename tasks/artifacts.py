"""What a run shows in Prefect's UI: the text of its result artifact and the rows of its live table. Pure functions."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ckpt import ReportRecord, ReportState, Result, Totals
from ckpt_tasks.plot import MAX_PANELS, lookup, metrics_svg, svg_data_uri

NEWEST = 200
"""Rows of the result artifact's table, and at most as many failures."""
LIVE_ROWS = 100
LIVE_BYTES = 256_000
"""Of the live table as JSON; it is sent again with every update."""

_COLUMNS = 4
"""Metrics that get a column in a table."""
_CELL = 160
"""Characters of a name, a reason or a value in a table; the whole is in the run's history."""
_KEY = 80
"""Characters of an artifact key."""

_LOST = (ReportState.FAILED, ReportState.SKIPPED, ReportState.FENCED, ReportState.LOST)
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#|<>~$&^])")
_SECRETS = re.compile(
    r"(?P<user>(?<=://)[^/\s@]+:[^/\s@]+(?=@))"
    r"|(?P<query>(?<=[?&])(?:X-Amz-[A-Za-z-]+|AWSAccessKeyId|Signature|sig|se|sp|sv|token|password|secret)=[^&\s'\"]+)"
    r"|(?P<key>\b(?:AKIA|ASIA)[0-9A-Z]{16}\b)"
)


def result_key(run: str) -> str:
    """The key of the result artifact of the run called `run`."""
    return _key("ckpt-result", run)


def live_key(run: str) -> str:
    """The key of the live table of the run called `run`."""
    return _key("ckpt-live", run)


def result_markdown(result: Result) -> str:
    """The text of the result artifact: how to restore, best and latest, plot, table, failures, totals.

    Bounded (below 500 kB, whatever the run's length), reads the history once, opens no checkpoint, and shows no secret.
    """
    seen = _Seen(result)
    for record in result.history:
        seen.add(record)
    parts = [
        f"# {_text(result.run)}",
        _headline(result, seen),
        _restore(result),
        _plot(result, seen),
        _table(seen),
        _failures(seen, result.totals),
        _totals(result.totals),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def live_rows(records: Sequence[ReportRecord]) -> list[dict[str, str]]:
    """The newest reports as rows of a table, newest first; fewer than `LIVE_ROWS` where they would be too large."""
    newest = list(records)[-LIVE_ROWS:]
    metrics = metric_names(newest)[:_COLUMNS]
    rows = [_live_row(record, metrics) for record in reversed(newest)]
    while len(json.dumps(rows)) > LIVE_BYTES:
        rows = rows[: len(rows) // 2]
    return rows


def live_description(run: str, totals: Totals) -> str:
    """The line of totals above the live table."""
    return f"**{_text(run)}**: {_counts(totals)}, {_size(totals.nbytes)} uploaded, {_seconds(totals.stall)} stalled"


def metric_names(records: Iterable[ReportRecord], first: str | None = None) -> list[str]:
    """Names of numeric metrics (`a/b` for nested ones) in order of appearance; `first` goes ahead."""
    names = {} if first is None else {first: None}
    for record in records:
        names.update(dict.fromkeys(_numeric(record.metrics)))
    return list(names)


@dataclass(slots=True)
class _Seen:
    """One pass over the history: what the artifact shows of it."""

    result: Result
    newest: deque[ReportRecord] = field(default_factory=lambda: deque(maxlen=NEWEST))
    lost: deque[ReportRecord] = field(default_factory=lambda: deque(maxlen=NEWEST))
    best: ReportRecord | None = None
    latest: ReportRecord | None = None
    names: dict[str, None] = field(default_factory=dict)
    retained: set[str] = field(default_factory=set)
    best_uri: str | None = None

    def __post_init__(self) -> None:
        best = self.result.best
        self.best_uri = None if best is None else best.uri
        self.retained = {checkpoint.uri for checkpoint, _ in self.result.best_checkpoints}
        if self.result.score_attribute is not None:
            self.names[self.result.score_attribute] = None

    def add(self, record: ReportRecord) -> None:
        self.newest.append(record)
        if record.state in _LOST:
            self.lost.append(record)
        if record.checkpoint is not None:
            self.latest = record
            if record.checkpoint.uri == self.best_uri:
                self.best = record
        if len(self.names) < MAX_PANELS:
            self.names.update(dict.fromkeys(_numeric(record.metrics)))


def _headline(result: Result, seen: _Seen) -> str:
    """A small table: where the run is, and what matters of it."""
    totals = result.totals
    rows = [("run", _code(result.path)), ("---", "---")]
    if result.error is not None:
        rows.append(("ended by", _text(f"{type(result.error).__name__}: {result.error}")))
    if seen.best_uri is not None:
        rows.append(("**best**", _best(result, seen)))
    if result.checkpoint is not None:
        where = _code(_within(result, result.checkpoint.uri))
        rows.append(("**latest**", f"{_report(seen.latest)}{_metrics(result.metrics)}{where}"))
    rows += [
        ("**retained**", f"{len(result.best_checkpoints)} checkpoints, {_size(totals.retained_bytes)}"),
        ("**stalled**", _share(totals.stall, totals.wall)),
        ("**reports**", _counts(totals)),
    ]
    return "\n".join(map(_line, rows))


def _best(result: Result, seen: _Seen) -> str:
    uri, score = seen.best_uri or "", result.score_attribute or ""
    scores = {checkpoint.uri: lookup(metrics, score) for checkpoint, metrics in result.best_checkpoints}
    told = f"{result.score_order} of {_text(score)} = {_number(scores.get(uri))}"
    return f"{_report(seen.best)}{told}, {_code(_within(result, uri))}"


def _within(result: Result, uri: str) -> str:
    """A checkpoint's place relative to the run; the whole URI of one that lies elsewhere."""
    return uri.removeprefix(f"{result.path.rstrip('/')}/")


def _report(record: ReportRecord | None) -> str:
    return "" if record is None else f"report {record.seq}, "


def _metrics(metrics: Mapping[str, Any]) -> str:
    shown = list(_numeric(metrics))[:_COLUMNS]
    return "".join(f"{_text(name)} {_number(lookup(metrics, name))}, " for name in shown)


def _restore(result: Result) -> str:
    """The line that gets the checkpoint back, to be pasted into a shell."""
    if result.checkpoint is None:
        return ""
    which = "best" if result.best is not None else "latest"
    command = f"ckpt restore {shlex.quote(_one_line(f'{result.path}@{which}'))} --to DIR"
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", command) or [""]))
    return f"Restore the {which} checkpoint, no Prefect needed:\n\n{fence}sh\n{command}\n{fence}"


def _plot(result: Result, seen: _Seen) -> str:
    best = None if seen.best is None else seen.best.seq
    svg = metrics_svg(result.history, list(seen.names), best=best)
    return f"![metrics over reports]({svg_data_uri(svg)})" if svg else ""


def _table(seen: _Seen) -> str:
    records = list(seen.newest)
    if seen.best is not None and seen.best.seq < records[0].seq:
        records.insert(0, seen.best)
    if not records:
        return "No report was made."
    metrics = list(seen.names)[:_COLUMNS]
    header = ["report", "state", *map(_text, metrics), "size", "files", "upload", "stall", "name"]
    lines = [_line(header), _line(["---"] * len(header))]
    lines += [_line(_row(record, metrics, seen)) for record in reversed(records)]
    total = seen.result.totals.reports
    shown = f"The newest {NEWEST} of {total} reports, and the best" if total > NEWEST else "All reports"
    note = f"{shown}, newest first. **Bold** is the best; *kept* still has its checkpoint."
    return "\n".join(["## Reports", "", note, "", *lines])


def _row(record: ReportRecord, metrics: Sequence[str], seen: _Seen) -> list[str]:
    uri = None if record.checkpoint is None else record.checkpoint.uri
    number = f"**{record.seq}**" if uri is not None and uri == seen.best_uri else str(record.seq)
    state = _state(record) + (", *kept*" if uri in seen.retained else "")
    values = [_number(lookup(record.metrics, name)) for name in metrics]
    files = str(record.nfiles) if uri is not None else ""
    size = _size(record.nbytes) if uri is not None else ""
    timings = record.timings
    cells = [number, state, *values, size, files, _seconds(timings.upload), _seconds(timings.stall), _text(record.name)]
    return [cell.replace(" ", "\N{NO-BREAK SPACE}") for cell in cells]


def _failures(seen: _Seen, totals: Totals) -> str:
    if not seen.lost:
        return ""
    total = totals.failed + totals.skipped + totals.fenced + totals.lost
    note = f" (the newest {len(seen.lost)} of {total})" if total > len(seen.lost) else ""
    header = ["report", "state", "when", "name", "reason"]
    lines = [_line(header), _line(["---"] * len(header))]
    for record in reversed(seen.lost):
        reason = _text(record.reason or "no reason was recorded")
        lines.append(_line([str(record.seq), _state(record), _when(record.created), _text(record.name), reason]))
    return f"## Failed, skipped or lost{note}\n\n" + "\n".join(lines)


def _totals(totals: Totals) -> str:
    rate = totals.nbytes / totals.upload if totals.upload else 0.0
    uploads = f"{_size(totals.nbytes)} in {_seconds(totals.upload)}" + (f", {_size(rate)}/s per upload" if rate else "")
    return f"## Totals\n\n{_counts(totals)}. Uploaded {uploads}. Run time {_seconds(totals.wall)}."


def _live_row(record: ReportRecord, metrics: Sequence[str]) -> dict[str, str]:
    timings = record.timings
    where = record.reason if record.checkpoint is None else record.checkpoint.uri
    values = {name: _number(lookup(record.metrics, name)) for name in metrics}
    return {
        "report": str(record.seq),
        "state": _state(record),
        **{shown(f"metric {name}" if name in _FIXED else name): value for name, value in values.items()},
        "size": _size(record.nbytes) if record.checkpoint is not None else "",
        "upload": _seconds(timings.upload),
        "rate": _rate(record),
        "waited": _seconds(timings.queue_wait + timings.slot_wait + timings.limit_wait),
        "stall": _seconds(timings.stall),
        "name": shown(record.name),
        "where": shown(where or ""),
    }


_FIXED = frozenset({"report", "state", "size", "upload", "rate", "waited", "stall", "name", "where"})


def _rate(record: ReportRecord) -> str:
    """Of the upload, in MB/s (10^6 bytes)."""
    took = record.timings.upload
    return f"{record.nbytes / took / 1e6:.1f} MB/s" if record.checkpoint is not None and took > 0 else ""


def _state(record: ReportRecord) -> str:
    """A report without a checkpoint has nothing to commit, only metrics."""
    if record.state is ReportState.COMMITTED and record.checkpoint is None:
        return "metrics only"
    return record.state.value


def _counts(totals: Totals) -> str:
    lost = {"failed": totals.failed, "skipped": totals.skipped, "fenced": totals.fenced, "lost": totals.lost}
    kinds = [f"{totals.reports} reports", f"{totals.checkpoints} checkpoints committed"]
    return ", ".join(kinds + [f"{count} {name}" for name, count in lost.items() if count])


def _numeric(metrics: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    """Names of the numbers in `metrics`, those of nested mappings as `a/b`."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numeric(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}"


def _key(prefix: str, run: str) -> str:
    """Lowercase letters, digits and dashes only, as Prefect asks; a hash keeps names apart that would become one."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    room = _KEY - len(prefix) - 10
    if slug and slug == run and len(slug) <= room:
        return f"{prefix}-{slug}"
    digest = hashlib.sha256(run.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return "-".join(part for part in (prefix, slug[:room].strip("-"), digest) if part)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: str) -> str:
    """`value` as markdown that shows it and nothing else, in one line."""
    return _MARKDOWN.sub(r"\\\1", shown(value)).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")


def _code(value: str) -> str:
    """`value` as code, whole, fit for a table cell."""
    shown = _one_line(value).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if len(fence) > 1 else f"`{shown}`"


def shown(value: str) -> str:
    """`value` in one line and not too long, without control characters and secrets."""
    line = _one_line(value)
    return line if len(line) <= _CELL else f"{line[: _CELL - 1]}…"


def _one_line(value: str) -> str:
    """In one line, without control characters, half surrogates and secrets."""
    visible = "".join(char if char.isprintable() else " " for char in value)
    return " ".join(_SECRETS.sub("***", visible).split())


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if math.isfinite(value) else str(value)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


_UNITS: tuple[tuple[float, Callable[[float], str]], ...] = (
    (1, lambda s: f"{s * 1000:.1f} ms"),
    (120, lambda s: f"{s:.1f} s"),
    (7200, lambda s: f"{s / 60:.1f} min"),
)


def _seconds(seconds: float) -> str:
    return next((show(seconds) for limit, show in _UNITS if seconds < limit), f"{seconds / 3600:.1f} h")


def _share(stall: float, wall: float) -> str:
    share = f", {100 * stall / wall:.2g} % of {_seconds(wall)}" if wall > 0 else ""
    return f"{_seconds(stall)} in `report()`{share}"


def _when(created: float) -> str:
    return f"{datetime.fromtimestamp(created, UTC):%Y-%m-%d %H:%M:%S} UTC" if created else ""
