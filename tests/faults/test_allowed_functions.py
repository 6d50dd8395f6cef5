"""Functions by name: what a form or YAML may call, and what it may not."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from ckpt.errors import ConfigError
from ckpt_tasks import functions
from ckpt_tasks.functions import SETTING, resolve_function

PROGRAM = """
import functools, os, subprocess
from shutil import rmtree
from json import loads as shadowed

class Trainer:
    def fit(self, config): ...
    def __call__(self, config): ...

def train(config): return "trained"

instance = Trainer()
bound = instance.fit
partial = functools.partial(train, {})
evil_partial = functools.partial(functools.partial(os.system), "true")
number = 5
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, which is a project's folder as for a deployment."""
    name = f"project_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(SETTING, raising=False)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("attribute", ["train", "Trainer.fit", "Trainer", "instance", "bound", "partial"])
def test_what_the_project_defines_may_be_called(project, attribute):
    """Functions, methods, classes, callable objects, partials of these."""
    assert callable(resolve_function(f"{project}:{attribute}"))


@pytest.mark.parametrize(
    "name",
    [
        "os:system", "subprocess:run", "shutil:rmtree", "builtins:exec", "builtins:eval", "posix:system", "pickle:loads",
        "importlib:import_module", "prefect.utilities.processutils:run_process", "ckpt:open_run", "torch.hub:load",
    ],
)  # fmt: skip
def test_what_is_installed_may_not(project, name):
    """The refusal names the module and the setting to change."""
    with pytest.raises(ConfigError, match=rf"not allowed: module .*{SETTING}=\w+ where the flow runs"):
        resolve_function(name)


@pytest.mark.parametrize(
    "attribute",
    [
        "os.system", "subprocess.run", "rmtree", "shadowed", "evil_partial", "train.__globals__.clear", "os",
        "train.__class__", "functools.reduce", "Trainer.fit.__globals__.update", "Trainer.mro",
    ],
)  # fmt: skip
def test_a_way_through_the_project_to_something_else_is_refused(project, attribute):
    """What counts is where a function is defined, not where its name was found."""
    with pytest.raises(ConfigError, match="not allowed: module"):
        resolve_function(f"{project}:{attribute}")


@pytest.mark.parametrize(
    "name",
    ["", "train", "os.system", "os", ":system", "os:", "os:system()", "os:system;x", "../x:y", "os :system", "a-b:c"],
)
def test_what_is_no_name_is_refused(project, name):
    """Neither `package.module:attribute` nor an entry point."""
    with pytest.raises(ConfigError, match="neither"):
        resolve_function(name)


@pytest.mark.parametrize("folder", ["/", str(Path(functions._STDLIB).parents[1]), str(functions._STDLIB)])
def test_a_working_directory_above_python_itself_makes_it_no_project(monkeypatch, folder):
    """Containers run in `/`, and homes hold a Python of their own."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv(SETTING, raising=False)
    for name in ("os:system", "json.tool:main", "cProfile:run", "torch.hub:load", "pytest:main"):
        with pytest.raises(ConfigError, match="not allowed"):
            resolve_function(name)


def test_the_setting_allows_a_module_and_those_below_it_and_no_other(project, monkeypatch):
    """Prefixes are of whole parts."""
    monkeypatch.setenv(SETTING, " json , os.path")
    assert resolve_function("json:loads") is not None
    assert resolve_function("json.decoder:JSONDecoder.decode") is not None
    for name in ("jsonschema:validate", "os:system", "json:codecs.open"):
        with pytest.raises(ConfigError, match="not allowed"):
            resolve_function(name)


def test_an_entry_point_is_allowed_by_being_installed(project, monkeypatch):
    """Its name is the function's."""
    point = importlib.metadata.EntryPoint("team-train", f"{project}:train", functions.GROUP)
    monkeypatch.setattr(functions, "entry_points", lambda group, name: [point] if name == "team-train" else [])
    assert resolve_function("team-train")({}) == "trained"


def test_what_leads_nowhere_or_cannot_be_called_says_so(project):
    """With the reason."""
    with pytest.raises(ConfigError, match="no attribute 'nothing'"):
        resolve_function(f"{project}:nothing")
    with pytest.raises(ConfigError, match="not allowed"):
        resolve_function(f"{project}:number")


def test_a_refused_module_is_not_even_imported(tmp_path, monkeypatch):
    """Importing runs code."""
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "runs_at_import.py").write_text("raise SystemExit('imported')")
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(str(package))
    with pytest.raises(ConfigError, match="not allowed"):
        resolve_function("runs_at_import:anything")
