"""A real training process that is killed at random instants, and started again, loses nothing and leaves nothing torn.

The longer run: `python tests/faults/kills.py --kills 1000`.
"""

from __future__ import annotations

import logging
import sys
import uuid
from pathlib import Path

import pytest

from ckpt import committed, open_storage

sys.path.insert(0, str(Path(__file__).parent))  # beside this file, not in tests/: it is a program of its own
import kills

pytestmark = pytest.mark.slow
SEED = 7


@pytest.fixture(autouse=True)
def quiet() -> object:
    """A crash makes warnings by the dozen; they are not the result."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _hunt(place: kills.Place, count: int, engine: str = "threads") -> None:
    figures = kills.Figures()
    kills.hunt(place, figures, kills=count, seed=SEED, engine=engine)
    print(figures, *figures.problems, sep="\n")
    assert figures.kills == count
    assert not figures.bad


def _on(server, monkeypatch) -> kills.Place:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    bucket = f"kills-{uuid.uuid4().hex[:12]}"
    server.client().create_bucket(Bucket=bucket)
    return kills.Place(f"s3://{bucket}/runs", server.env, 6)


def test_kills_on_a_local_disk(tmp_path):
    """Four, with `ckpt` alone."""
    _hunt(kills.Place(str(tmp_path / "runs"), {}, 12), 4)


@pytest.mark.prefect
def test_kills_of_the_flow(tmp_path, prefect_server, monkeypatch):
    """Two, of a flow run with its upload and ordering tasks."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    _hunt(kills.Place(str(tmp_path / "runs"), {}, 8), 2, "prefect")


def test_kills_on_s3(moto_server, monkeypatch):
    """Two."""
    _hunt(_on(moto_server, monkeypatch), 2)


def test_kills_on_a_gateway_that_enforces_nothing(rclone_server, monkeypatch):
    """Two, on rclone's; a single driver is right there, too."""
    _hunt(_on(rclone_server, monkeypatch), 2)


def test_a_torn_and_a_lost_checkpoint_are_seen(tmp_path):
    """The harness can fail: what is damaged, deleted or too much in a store shows in its figures."""
    place, figures = kills.Place(str(tmp_path / "runs"), {}, 6), kills.Figures()
    (tmp_path / "work").mkdir()
    life = kills.live(place, "run", tmp_path / "work", engine="threads", facts=None, moment=0)
    uri, acked = f"{place.root}/run", life.acked
    assert life.code == 0
    assert len(acked) == 6
    kills.look(uri, figures, acked)
    assert not figures.bad

    first, *_, last = committed(uri)
    storage = open_storage(uri)
    model = Path(first.uri) / "model.bin"
    plain = model.read_bytes()
    model.write_bytes(plain[:-1])
    kills.look(uri, figures, acked)
    assert figures.torn == 1
    model.write_bytes(plain)

    storage.delete([last.manifest.id.key])
    figures = kills.Figures()
    kills.look(uri, figures, acked)
    assert figures.lost > 0
    assert any("the newest was" in problem for problem in kills.check_life(life, 3, figures))
    assert list(kills.check_collection(uri, figures)) == []
    assert figures.orphans == figures.removed == len(kills.contents(0))
