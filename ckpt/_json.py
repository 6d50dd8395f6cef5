"""JSON as this package stores it: strict (any JSON tool can read it), with non-finite floats kept.

NaN and the infinities are not JSON; they are written as `{"$float": "nan" | "inf" | "-inf"}` and read back as floats.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ckpt.errors import FormatError

_TAG = "$float"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Encode `value`, made of the JSON types and any float; text is kept readable, except what UTF-8 cannot hold."""
    tagged = _tag(value)
    text = json.dumps(tagged, allow_nan=False, ensure_ascii=False, indent=indent)
    if text.isascii() or not _LONE_SURROGATE.search(text):
        return text
    return json.dumps(tagged, allow_nan=False, indent=indent)


def loads(text: str | bytes, where: str) -> Any:
    """Decode what `dumps` wrote.

    Raises:
        FormatError: it is not JSON; `where` is named.
    """
    try:
        return json.loads(text, object_hook=_untag)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not valid JSON ({error}); it was damaged or is not of this format") from error


def encode(value: Any) -> bytes:
    """`dumps` for an object in a store: indented for people, with a final newline."""
    return (dumps(value, indent=1) + "\n").encode()


def _tag(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: repr(value)}
    if isinstance(value, dict):
        return {key: _tag(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tag(item) for item in value]
    return value


def _untag(item: dict[str, Any]) -> Any:
    if item.keys() != {_TAG}:
        return item
    if item[_TAG] not in ("nan", "inf", "-inf"):
        raise ValueError(f"{_TAG} is {item[_TAG]!r:.40}")
    return float(item[_TAG])
