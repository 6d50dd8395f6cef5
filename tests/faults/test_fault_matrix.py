"""Whole runs under faults of the store and the network; the full matrix is the program beside this file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import S3Server, moto_server, rclone_server  # noqa: F401 - fixtures

sys.path.insert(0, str(Path(__file__).parent))  # beside this file, not in tests/: it is a program of its own
import matrix

WORKERS = 8
SOME = [
    cell
    for number, fault in enumerate(matrix.FAULTS)
    for cell in matrix.cells(["rclone" if number % 4 == 3 else "moto"])
    if cell.fault == fault and cell.operation == list(matrix.OPERATIONS)[number % len(matrix.OPERATIONS)]
]
"""Every fault at one operation, every operation under some fault."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A fault makes warnings by the dozen; they are not the result."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_fault_and_every_operation_is_among_those_tried_here():
    """The choice above leaves nothing out."""
    assert {cell.fault for cell in SOME} == set(matrix.FAULTS)
    assert {cell.operation for cell in SOME} == set(matrix.OPERATIONS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_can_be_borne_is_borne_and_what_cannot_is_named(moto_server: S3Server, rclone_server: S3Server):  # noqa: F811
    """Within the budget all is committed, beyond it FAILED with the cause; nothing torn, lost or left on the server."""
    figures = matrix.run_all(SOME, {"moto": moto_server, "rclone": rclone_server}, WORKERS, lambda *_: None)
    print(figures)
    assert figures.problems == []
    assert (figures.lost, figures.torn, figures.left) == (0, 0, 0)
    assert figures.cells == len(SOME)
    assert figures.committed > figures.failed > 0


@pytest.mark.slow
def test_a_loss_that_nobody_tells_is_caught(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """The harness can fail: an object that vanishes after its commit shows as torn and as a silent loss."""
    plain = matrix._objects

    def without(server, bucket, root):
        return {
            key: data for key, data in plain(server, bucket, root).items() if not key.endswith("under-a1/small.bin")
        }

    monkeypatch.setattr(matrix, "_objects", without)
    cell = matrix.Cell("moto", "503 SlowDown", "small object", within=True)
    figures = matrix.run_all([cell], {"moto": moto_server}, 1, lambda *_: None)
    assert (figures.torn, figures.lost) == (1, 1)
    assert figures.problems
