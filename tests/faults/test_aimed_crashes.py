"""A run stopped dead after its k-th storage operation, for every k, loses nothing and leaves nothing torn."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from ckpt import publishing
from ckpt.layout import CHECKPOINTS

sys.path.insert(0, str(Path(__file__).parent))  # beside this file, not in tests/: it is a program of its own
import aimed


@pytest.fixture(autouse=True)
def quiet() -> object:
    """A crash makes warnings by the dozen; they are not the result."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """In place of the check of the same name: a driver that is stopped dead in this process cleans up nothing."""


def _hunt(store: str, plan, *, stop_when_found: bool = False) -> aimed.Figures:
    figures = aimed.Figures(stop_when_found=stop_when_found)
    with aimed.roots(store) as new_root:
        plan(new_root, figures)
    print(f"{plan.__name__} on {store}: {figures}")
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "local"])
@pytest.mark.parametrize("plan", aimed.PLANS, ids=lambda plan: plan.__name__)
def test_every_crash_point_is_survived(store, plan):
    """No torn checkpoint, no acknowledged one lost, rows for every seq, and garbage collection takes the orphans only."""
    figures = _hunt(store, plan)
    assert figures.points > 15
    assert (figures.torn, figures.lost, figures.problems) == (0, 0, [])


@pytest.mark.slow
def test_deleting_the_files_before_the_commit_is_caught(monkeypatch):
    """The harness can fail: a pruner in the wrong order shows as torn checkpoints."""

    def wrong(storage, commit, record):
        location = record.checkpoint.uri.removeprefix(f"{storage.uri}/")
        assert location.startswith(CHECKPOINTS)
        storage.delete([entry.key for entry in storage.list(f"{location}/")])
        storage.delete([commit.key])

    monkeypatch.setattr(publishing, "delete_checkpoint", wrong)
    assert _hunt("memory", aimed.first_attempt, stop_when_found=True).torn > 0


@pytest.mark.slow
def test_acknowledging_what_is_not_committed_is_caught(monkeypatch):
    """The harness can fail: an upload that is acknowledged although its commit was not made shows as lost."""
    plain = aimed.upload

    def hasty(report, destination):
        try:
            return plain(report, destination)
        except aimed.Killed:
            return aimed.ReportRecord(seq=report.seq, attempt=1, name="", state=aimed.ReportState.COMMITTED, metrics={})

    monkeypatch.setattr(aimed, "upload", hasty)
    assert _hunt("memory", aimed.first_attempt, stop_when_found=True).lost > 0
