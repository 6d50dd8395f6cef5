"""The wheel holds exactly the modules of ckpt/ and tasks/, and the tests run against what was installed.

CKPT_WHEEL names a wheel that was already built; without it one is built here. CKPT_SOURCE names the checkout the wheel
must agree with, for a run where ckpt/ and tasks/ are not beside the tests.
"""

import importlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint, distribution
from pathlib import Path, PurePosixPath
from types import ModuleType
from zipfile import ZipFile

import pytest

HERE = Path(__file__).resolve().parents[1]
SOURCE = Path(os.environ.get("CKPT_SOURCE", HERE))
FOLDER_OF = {"ckpt": "ckpt", "ckpt_tasks": "tasks"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    if "CKPT_WHEEL" in os.environ:
        return ZipFile(os.environ["CKPT_WHEEL"])
    # A copy: an old build/ in the checkout would put modules into the wheel that are deleted by now.
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCE / name, copy)
    for folder in FOLDER_OF.values():
        shutil.copytree(SOURCE / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    return ZipFile(built)


def modules_in(wheel: ZipFile) -> dict[str, bytes]:
    """Every file of the wheel outside its metadata folder, with its bytes."""
    return {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}


def modules_in_source() -> dict[str, bytes]:
    """The same files as the checkout holds them, sub-folders included, under the names they are installed as."""
    return {
        f"{package}/{path.relative_to(SOURCE / folder).as_posix()}": path.read_bytes()
        for package, folder in FOLDER_OF.items()
        for path in (SOURCE / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_source_file_byte_for_byte_and_nothing_else(wheel):
    built, source = modules_in(wheel), modules_in_source()
    assert sorted(built) == sorted(source)
    assert [name for name in built if built[name] != source[name]] == []


def test_the_wheel_installs_two_flat_packages_and_no_common_name(wheel):
    paths = [PurePosixPath(name) for name in modules_in(wheel)]
    assert {path.parent for path in paths} == {PurePosixPath(package) for package in FOLDER_OF}
    assert {path.suffix for path in paths if path.name != "py.typed"} == {".py"}


def test_both_packages_are_typed_and_have_an_init(wheel):
    assert {f"{package}/{name}" for package in FOLDER_OF for name in ("__init__.py", "py.typed")} <= {*wheel.namelist()}


def test_the_licence_travels_with_the_wheel(wheel):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


@pytest.mark.parametrize("entry", distribution("prefect-ckpt").entry_points, ids=lambda entry: entry.name)
def test_every_entry_point_of_the_distribution_loads(entry: EntryPoint):
    loaded = entry.load()
    assert callable(loaded) or isinstance(loaded, ModuleType)


@pytest.mark.skipif((HERE / "ckpt").exists(), reason="the sources are beside the tests: an editable install")
@pytest.mark.parametrize("package", FOLDER_OF)
def test_the_package_under_test_is_the_wheel(wheel, package: str):
    folder = Path(importlib.import_module(package).__path__[0])
    assert folder.parent.name == "site-packages"
    assert {f"{package}/{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()} == {
        name: data for name, data in modules_in(wheel).items() if name.startswith(f"{package}/")
    }
