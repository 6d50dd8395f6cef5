"""Functions by name: in the UI and in YAML they are `package.module:attribute`, resolved under allowed places only.

Whoever can start a deployment could otherwise run any function of any installed package. Allowed are the entry points
of the group `prefect_ckpt.functions`, modules of the project's own folder (the working directory, and that of the
program's own file), and what the setting `PREFECT_INTEGRATIONS_CKPT_ALLOWED_FUNCTIONS` names (`ckpt_tasks.settings`).
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ckpt.errors import ConfigError
from ckpt_tasks.settings import PREFIX, CkptSettings

SETTING = f"{PREFIX}ALLOWED_FUNCTIONS"
GROUP = "prefect_ckpt.functions"

_STDLIB = Path(os.__file__).resolve().parent
"""A worker that runs in `/`, or in a home with a Python of its own, has it below its working directory."""
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
    _check_allowed(_defined_in(found), name)  # `train:subprocess.run` is found in an allowed module, and not of one
    return _checked(found, name)


def _check_allowed(module: str, name: str) -> None:
    prefixes = CkptSettings().allowed_functions
    if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes) or _in_project(module):
        return
    raise ConfigError(
        f"function {name!r} is not allowed: module {module!r} is not in the project folder {Path.cwd()}; "
        f"set {SETTING}={module.partition('.')[0]} where the flow runs to allow it"
    )


def _defined_in(found: Any) -> str:
    """The module that an object is from; of a partial, that of what it calls."""
    while isinstance(found, functools.partial):
        found = found.func
    if isinstance(found, ModuleType):
        return found.__name__
    return str(getattr(found, "__module__", None) or type(found).__module__)


def _in_project(module: str) -> bool:
    """Whether the module is a file of the project: as it was imported, else by the search that an import would do."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        places = [getattr(loaded, "__file__", None), *getattr(loaded, "__path__", ())]
    else:
        spec = PathFinder.find_spec(module.partition(".")[0], sys.path)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(_inside(Path(place), project) for place in places if place for project in _project_folders())


def _project_folders() -> list[Path]:
    """Where the program runs (a deployment's working directory is its project), and where its own file is."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return [Path.cwd().resolve(), *([] if main is None else [Path(main).resolve().parent])]


def _inside(place: Path, project: Path) -> bool:
    resolved = place.resolve()
    return (
        project in resolved.parents
        and not {"site-packages", "dist-packages"} & set(resolved.parts)
        and _STDLIB not in resolved.parents
    )


def _checked(found: Any, name: str) -> Callable[..., Any]:
    if not callable(found):
        raise ConfigError(f"function {name!r} is {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]
