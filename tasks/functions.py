"""Functions by name: in the UI and in YAML they are `package.module:attribute`, resolved under allowed places only.

Whoever can start a deployment could otherwise run any function of any installed package. Allowed are the entry points
of the group `prefect_ckpt.functions`, modules of the project's own folder (the working directory, and that of the
program's own file), and what `PREFECT_INTEGRATIONS_CKPT_ALLOWED_FUNCTIONS`
names: module prefixes, separated by commas.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ckpt.errors import ConfigError

SETTING = "PREFECT_INTEGRATIONS_CKPT_ALLOWED_FUNCTIONS"
GROUP = "prefect_ckpt.functions"

_NAME = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<attribute>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")


def resolve_function(name: str) -> Callable[..., Any]:
    """The function that `package.module:attribute`, or an entry point's name, stands for.

    Raises:
        ConfigError: the name does not parse, is not allowed (the setting to change is named), or leads nowhere.
    """
    for entry in entry_points(group=GROUP, name=name):
        return _checked(entry.load(), name)
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"function {name!r} is neither 'package.module:attribute' nor an entry point of group {GROUP!r}"
        )
    _check_allowed(match["module"], name)
    try:
        found: Any = importlib.import_module(match["module"])
        for part in match["attribute"].split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"function {name!r} cannot be found: {error}") from error
    return _checked(found, name)


def _check_allowed(module: str, name: str) -> None:
    prefixes = [prefix.strip() for prefix in os.environ.get(SETTING, "").split(",") if prefix.strip()]
    if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes) or _in_project(module):
        return
    raise ConfigError(
        f"function {name!r} is not allowed: its module is not in the project folder {Path.cwd()}; "
        f"set {SETTING}={module.partition('.')[0]} where the flow runs to allow it"
    )


def _in_project(module: str) -> bool:
    """Whether the module's top package is a file of the project, by the same search that an import would do."""
    spec = PathFinder.find_spec(module.partition(".")[0], sys.path)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(_inside(Path(place), project) for place in places if place for project in _project_folders())


def _project_folders() -> list[Path]:
    """Where the program runs (a deployment's working directory is its project), and where its own file is."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return [Path.cwd().resolve(), *([] if main is None else [Path(main).resolve().parent])]


def _inside(place: Path, project: Path) -> bool:
    resolved = place.resolve()
    return project in resolved.parents and "site-packages" not in resolved.parts


def _checked(found: Any, name: str) -> Callable[..., Any]:
    if not callable(found):
        raise ConfigError(f"function {name!r} is {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]
