"""Metrics: what a report may record, and how a score is looked up in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckpt._json import dumps
from ckpt.errors import MetricsError

Metrics = dict[str, Any]
"""Plain JSON types and floats (non-finite ones included), nested at will."""

MAX_BYTES = 1_000_000
"""Bytes of one report's metrics as JSON: a history row must stay cheap to read and far below a task parameter's limit."""
_MAX_DEPTH = 32


def freeze_metrics(metrics: Mapping[str, Any]) -> Metrics:
    """Copy `metrics` into plain values, so that the caller may change its own from here on.

    numpy and torch scalars (any array or tensor of one element) become Python numbers; tuples become lists.

    Raises:
        MetricsError: a value cannot be recorded (its key is named), or the whole is over 1 MB.
    """
    if not isinstance(metrics, Mapping):
        raise MetricsError(f"metrics must be a mapping of names to values, not {type(metrics).__name__}")
    frozen = {_key(key, ""): _freeze(value, str(key), 1) for key, value in metrics.items()}
    try:
        size = len(dumps(frozen).encode())
    except ValueError as error:  # an integer of thousands of digits
        raise MetricsError(f"metrics cannot be written as JSON: {error}") from error
    if size > MAX_BYTES:
        largest = max(frozen, key=lambda key: len(dumps(frozen[key])))
        raise MetricsError(
            f"metrics take {size} bytes as JSON, over {MAX_BYTES}; the largest is {largest!r}: put it into the checkpoint"
        )
    return frozen


def score_of(metrics: Mapping[str, Any], attribute: str) -> float | None:
    """The number under `attribute` (`a/b` also looks inside nested mappings); None if missing, NaN or not a number."""
    value: Any = metrics.get(attribute)
    if value is None and "/" in attribute:
        value = metrics
        for part in attribute.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
    try:
        score = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an int beyond every float
        return None
    return None if math.isnan(score) else score


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise MetricsError(f"metric key {where}{key!r} is {type(key).__name__}; keys must be strings")
    if key == "$float":
        raise MetricsError("the metric key '$float' is reserved by the storage format; choose another name")
    return _text(key, where)


def _text(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise MetricsError(f"metric {where!r} holds {value!r:.80}, which is not valid Unicode") from None
    return str(value)


def _freeze(value: Any, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise MetricsError(f"metric {where!r} is nested over {_MAX_DEPTH} levels deep (or contains itself)")
    if value is None or isinstance(value, str):
        return None if value is None else _text(value, where)
    if isinstance(value, bool | int | float):
        return _plain_number(value)
    if isinstance(value, Mapping):
        return {_key(key, f"{where}/"): _freeze(item, f"{where}/{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_freeze(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    return _scalar(value, where)


def _plain_number(value: float) -> float | int | bool:
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise AssertionError(value)


def _scalar(value: Any, where: str) -> Any:
    """A numpy or torch scalar, recognised by `.item()` so that neither has to be imported."""
    try:
        item = value.item()
    except (AttributeError, ValueError, RuntimeError, TypeError) as error:
        raise MetricsError(
            f"metric {where!r} is {type(value).__module__}.{type(value).__qualname__}, which cannot be recorded: "
            "give a number, a string, None, or lists and mappings of these (for a tensor, .item() or .tolist())"
        ) from error
    if not isinstance(item, bool | int | float | str):
        raise MetricsError(f"metric {where!r} is {type(value).__qualname__} of a {type(item).__name__}; give a number")
    return item
