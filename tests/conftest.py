"""Fixtures of every test: a place for runs, and a look at what a test leaves behind."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ckpt import opening

pytest_plugins = ["servers", "prefect_server"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in the background. Tests send the signal, also to programs that inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LASTING = ("ckpt-io", "ckpt-upload-fn-", "ckpt-validation-fn-")
"""Threads that may outlive a test: the process's one event loop, and abandoned custom functions."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logs may be no Unicode, and has to reach the process that prints it all the same."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(params=["local", "memory"])
def storage_path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where runs go: a local folder, and a store in memory."""
    return str(tmp_path / "runs") if request.param == "local" else f"memory://{uuid4().hex}"


@pytest.fixture
def wrap_storage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`wrap_storage(SlowStorage, "upload")`: runs opened from now on use that; `helpers.storage_of(run)` gives it."""

    def wrap(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        plain = opening._open
        monkeypatch.setattr(opening, "_open", lambda config, uri: kind(plain(config, uri), *args, **kwargs))

    return wrap


@pytest.fixture
def staging(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder of this test, where staging folders are made."""
    folder = tmp_path_factory.mktemp("system")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_left_behind(staging: Path) -> Iterator[None]:
    """No staged file, thread or process of ours outlives a test; what a FAILED report keeps is meant to."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("ckpt-") and not thread.name.startswith(LASTING):
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} is still running"
    left = [
        path for top in staging.glob(".ckpt-staging*") for path in top.iterdir() if not path.name.startswith("kept-")
    ]
    assert not left
    assert not multiprocessing.active_children()
