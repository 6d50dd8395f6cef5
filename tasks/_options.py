"""What every `ckpt` command takes, and how it shows what it found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from ckpt.errors import ConfigError
from ckpt_tasks import _rows
from ckpt_tasks._terminal import out

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """For people, or for machines."""

    json: Flag = False
    """Print one JSON document instead of tables."""
    debug: Flag = False
    """Show the stack trace of an error."""

    def show(self, document: Any, *parts: Any) -> None:
        """Print the document for machines, or the tables and lines for people."""
        if self.json:
            print(json.dumps(_rows.plain(document), indent=2, allow_nan=False))
            return
        console = out()
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Output(Shown):
    """What a command that needs no storage takes."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common(Shown):
    """What a command on a storage takes."""

    credentials: str | None = None
    """`env` (default), `profile:<name>`, or `block:<type>/<name>`."""
    storage_option: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """KEY=VALUE for the storage, such as `endpoint_url=http://localhost:9000`; the value may be JSON. Repeatable."""

    @property
    def access(self) -> dict[str, Any]:
        """As the functions of `ckpt` take it."""
        return {"credentials": self.credentials, "storage_options": dict(map(_option, self.storage_option))}


COMMON = Common()
OUTPUT = Output()


def _option(given: str) -> tuple[str, Any]:
    key, equals, text = given.partition("=")
    if not key or not equals:
        raise ConfigError(f"--storage-option {given!r} must be KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text
