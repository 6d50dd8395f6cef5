"""A line plot of metrics over reports, as SVG text: no dependency, and small enough to live in a markdown artifact."""

from __future__ import annotations

import base64
import html
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_PANELS = 6
"""Metrics shown; one panel each, two panels in a row."""

_BUCKETS = 240
"""Of the x axis, per panel: a curve keeps its lowest and its highest point in each, so no peak is lost."""

_WIDTH, _HEIGHT = 340, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 24, 34
_PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT
_PLOT_HEIGHT = _HEIGHT - _TOP - _BOTTOM
_LEGEND = 22

# A card of its own: an image in a page cannot know whether the page around it is light or dark.
_STYLE = (
    "text{font:10px system-ui,sans-serif;fill:#57606a}.t{font-weight:600;fill:#1f2328}"
    ".g{stroke:#d8dee4;stroke-width:1}.l{fill:none;stroke:#0969da;stroke-width:1.4;stroke-linejoin:round}"
    ".p{fill:#0969da}.c{stroke:#1a7f37;stroke-width:1}.f{stroke:#cf222e;stroke-width:2}"
    ".b{fill:#bf8700;stroke:#fff;stroke-width:1}.v{stroke:#bf8700;stroke-width:1;stroke-dasharray:3 3}"
)
_LOST = frozenset({"failed", "skipped", "fenced", "lost"})
"""Report states that get a red mark."""


class Row(Protocol):
    """What a plot reads of a report; a `ckpt.ReportRecord` is one."""

    @property
    def seq(self) -> int:
        """Place on the x axis."""
        ...

    @property
    def state(self) -> str:
        """What became of the report."""
        ...

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Nested mappings are found as `a/b`."""
        ...

    @property
    def checkpoint(self) -> object | None:
        """Not None for a report that has a committed checkpoint."""
        ...


def metrics_svg(rows: Iterable[Row], metrics: Sequence[str], *, best: int | None = None) -> str:
    """Plot `metrics` over the reports, one panel each.

    A report without the metric is passed over; one where it is NaN, infinite or no number leaves a gap. Positive values
    over more than three decades get a logarithmic axis, which the panel's title says. The size of the text is bounded
    (about 25 kB a panel), whatever the number of rows; the rows are looked at once.

    Args:
        rows: reports in order.
        metrics: names as `ckpt.score_of` takes them; the first `MAX_PANELS` are shown.
        best: seq of the best report, to be marked.

    Returns:
        An SVG document; empty text if there are no rows or no metrics.
    """
    curves = {name: _Curve() for name in metrics[:MAX_PANELS]}
    marks = _Marks()
    for row in rows:
        marks.add(row)
        for name, curve in curves.items():
            value = lookup(row.metrics, name)
            if value is not None:
                curve.add(row.seq, value)
    if not curves or marks.first is None:
        return ""
    return _document([_panel(name, curve, marks, best) for name, curve in curves.items()])


def svg_data_uri(svg: str) -> str:
    """`svg` as a `data:` URI for an image tag: the way to show it in Prefect's UI, which strips raw SVG."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def lookup(metrics: Mapping[str, Any], name: str) -> float | None:
    """The value under `name` (`a/b` also looks inside); NaN for what is there and no number; None for what is not."""
    value: Any = metrics.get(name)
    if value is None and "/" in name:
        value = metrics
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        return None
    return float(value) if isinstance(value, int | float) else math.nan


@dataclass(slots=True)
class _Curve:
    """The points of one metric, thinned as they come: memory is bounded, extremes stay."""

    points: list[tuple[int, float]] = field(default_factory=list)

    def add(self, seq: int, value: float) -> None:
        self.points.append((seq, value))
        if len(self.points) > 16 * _BUCKETS:
            self.thin()

    def thin(self) -> None:
        """Keep the lowest and the highest point of each of `_BUCKETS` buckets; a bucket without numbers is a gap."""
        if len(self.points) <= 2 * _BUCKETS:
            return
        first, last = self.points[0][0], self.points[-1][0]
        buckets: dict[int, list[tuple[int, float]]] = {}
        for point in self.points:
            buckets.setdefault((point[0] - first) * _BUCKETS // (last - first + 1), []).append(point)
        self.points = [point for bucket in buckets.values() for point in _extremes(bucket)]

    def finite(self) -> list[float]:
        return [value for _, value in self.points if math.isfinite(value)]


def _extremes(bucket: list[tuple[int, float]]) -> list[tuple[int, float]]:
    finite = [point for point in bucket if math.isfinite(point[1])]
    if not finite:
        return bucket[:1]
    return sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})


@dataclass(slots=True)
class _Marks:
    """Which reports have a checkpoint and which failed, thinned like a curve."""

    first: int | None = None
    last: int = 0
    committed: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    def add(self, row: Row) -> None:
        self.first = row.seq if self.first is None else self.first
        self.last = row.seq
        if row.state in _LOST:
            self._add(self.failed, row.seq)
        elif row.checkpoint is not None:
            self._add(self.committed, row.seq)

    def _add(self, marks: set[int], seq: int) -> None:
        marks.add(seq)
        if len(marks) > 16 * _PLOT_WIDTH:
            kept = {round(self.x(mark)): mark for mark in marks}
            marks.intersection_update(kept.values())

    def x(self, seq: int) -> float:
        """Where a report is, in pixels from the left of the plot; a single one is in the middle."""
        span = self.last - (self.first or 0)
        return _PLOT_WIDTH * (seq - (self.first or 0)) / span if span else _PLOT_WIDTH / 2


@dataclass(frozen=True, slots=True)
class _Axis:
    """The y axis of a panel."""

    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float]) -> _Axis:
        low, high = min(values), max(values)
        if low > 0 and high / low >= 1000:
            return cls(math.log10(low), math.log10(high), log=True)
        if low == high:
            room = abs(low) * 0.1 or 1.0
            largest = sys.float_info.max
            return cls(max(low - room, -largest), min(high + room, largest), log=False)
        return cls(low, high, log=False)

    def y(self, value: float) -> float:
        position = math.log10(value) if self.log else value
        # Halved before subtracting: the span of the largest floats would overflow.
        return _PLOT_HEIGHT * (1 - (position / 2 - self.low / 2) / (self.high / 2 - self.low / 2))

    def ticks(self) -> list[float]:
        """The values at the bottom, the middle and the top."""
        places = (self.low, self.low / 2 + self.high / 2, self.high)
        return [10**place for place in places] if self.log else list(places)


def _panel(name: str, curve: _Curve, marks: _Marks, best: int | None) -> str:
    """One metric: title, grid, curve, marks."""
    curve.thin()
    values = curve.finite()
    if not values:
        return _title(name, "no finite values") + _frame(marks)
    axis = _Axis.over(values)
    note = f"{_number(curve.points[-1][1])} last" + (", log scale" if axis.log else "")
    drawn = "".join(_line(segment, axis, marks) for segment in _segments(curve.points))
    return _title(name, note) + _grid(axis) + _best(best, curve, axis, marks) + drawn + _frame(marks)


def _title(name: str, note: str) -> str:
    shown = name if len(name) <= 32 else f"{name[:31]}…"
    return (
        f'<text class="t" x="{_LEFT}" y="15">{html.escape(_printable(shown))}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="15" text-anchor="end">{html.escape(note)}</text>'
    )


def _grid(axis: _Axis) -> str:
    lines = []
    for value, y in zip(axis.ticks(), (_PLOT_HEIGHT, _PLOT_HEIGHT / 2, 0.0), strict=True):
        lines.append(
            f'<path class="g" d="M{_LEFT} {_TOP + y:.1f}h{_PLOT_WIDTH}"/>'
            f'<text x="{_LEFT - 5}" y="{_TOP + y + 3:.1f}" text-anchor="end">{_number(value)}</text>'
        )
    return "".join(lines)


def _segments(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The runs of finite points between the gaps."""
    segments: list[list[tuple[int, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            segments[-1].append(point)
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


def _line(segment: Sequence[tuple[int, float]], axis: _Axis, marks: _Marks) -> str:
    placed = [f"{_LEFT + marks.x(seq):.1f} {_TOP + axis.y(value):.1f}" for seq, value in segment]
    if len(placed) == 1:
        x, y = placed[0].split()
        return f'<circle class="p" cx="{x}" cy="{y}" r="2"/>'
    return f'<path class="l" d="M{"L".join(placed)}"/>'


def _best(best: int | None, curve: _Curve, axis: _Axis, marks: _Marks) -> str:
    """A line at the best report, and a diamond where the curve has it."""
    if best is None or not (marks.first or 0) <= best <= marks.last:
        return ""
    x = _LEFT + marks.x(best)
    line = f'<path class="v" d="M{x:.1f} {_TOP}v{_PLOT_HEIGHT}"/>'
    value = dict(curve.points).get(best, math.nan)
    if not math.isfinite(value):
        return line
    return line + f'<path class="b" d="M{x:.1f} {_TOP + axis.y(value) - 5:.1f}l5 5-5 5-5-5z"/>'


def _frame(marks: _Marks) -> str:
    """Below the curve: a green tick per checkpoint, a red one per failed report, and the first and last seq."""
    base = _TOP + _PLOT_HEIGHT
    ends = f'<text x="{_LEFT}" y="{base + 28}">{marks.first}</text>'
    if marks.last != marks.first:
        ends += f'<text x="{_WIDTH - _RIGHT}" y="{base + 28}" text-anchor="end">{marks.last}</text>'
    middle = _LEFT + _PLOT_WIDTH / 2
    ends += f'<text x="{middle:.0f}" y="{base + 28}" text-anchor="middle">report</text>'
    return _ticks(marks.committed, "c", base, marks) + _ticks(marks.failed, "f", base, marks) + ends


def _ticks(seqs: Iterable[int], kind: str, base: float, marks: _Marks) -> str:
    """One tick per pixel at most."""
    columns = sorted({round(_LEFT + marks.x(seq)) for seq in seqs})
    return f'<path class="{kind}" d="{"".join(f"M{x} {base + 5}v8" for x in columns)}"/>' if columns else ""


def _document(panels: Sequence[str]) -> str:
    columns = min(2, len(panels))
    width = columns * _WIDTH
    height = math.ceil(len(panels) / columns) * _HEIGHT + _LEGEND
    placed = "".join(
        f'<g transform="translate({index % columns * _WIDTH} {index // columns * _HEIGHT})">{panel}</g>'
        for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<style>{_STYLE}</style>"
        f'<rect width="{width - 1}" height="{height - 1}" x=".5" y=".5" rx="6" fill="#fff" stroke="#d0d7de"/>'
        f"{placed}{_legend(height - 9)}</svg>"
    )


def _legend(y: int) -> str:
    return (
        f'<path class="c" d="M{_LEFT} {y - 8}v8"/><text x="{_LEFT + 6}" y="{y}">checkpoint</text>'
        f'<path class="f" d="M{_LEFT + 74} {y - 8}v8"/><text x="{_LEFT + 80}" y="{y}">failed</text>'
        f'<path class="b" d="M{_LEFT + 124} {y - 9}l5 5-5 5-5-5z"/><text x="{_LEFT + 134}" y="{y}">best</text>'
    )


def _number(value: float) -> str:
    """Seven characters at most but for the sign, so that it fits beside the axis."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def _printable(text: str) -> str:
    """Without the characters that XML forbids."""
    return "".join(char if char.isprintable() else " " for char in text)
