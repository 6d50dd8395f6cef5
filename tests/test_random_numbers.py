"""A training draws the same random numbers with uploads as without (G10).

Each in a process of its own: the threads of other libraries, Prefect's among them, draw from the global generators.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from uuid import uuid4

import pytest
from faulty_server import answer, faulty
from helpers import DEADLINE

PROGRAM = """
import pathlib, random, sys
import numpy as np
import torch
from ckpt import Checkpoint, CheckpointUploadMode, RunConfig, open_run, report
from ckpt._retry import RetryingStorage
from ckpt.errors import TransientStorageError
from ckpt.storage import open_storage
from ckpt.testing import FailOnceStorage

uri, folder = sys.argv[1], pathlib.Path(sys.argv[2])

def state():
    legacy = np.random.get_state()
    return random.getstate(), legacy[1].tobytes(), torch.random.get_rng_state().numpy().tobytes()

random.seed(1), np.random.seed(1), torch.manual_seed(1)
before = state()
{work}
print(state() == before)
"""

REPORTS = """
with open_run(RunConfig(name="run", storage_path=uri)) as run:
    for number, mode in enumerate((None, *CheckpointUploadMode)):
        path = folder / str(number)
        path.mkdir()
        (path / "model.bin").write_bytes(b"weights")
        report({"n": number}, Checkpoint.from_directory(path), checkpoint_upload_mode=mode)
assert [row.state.value for row in run.result.history] == ["committed"] * 4
"""

RETRIES = """
flaky = FailOnceStorage(open_storage(uri), "write", error=TransientStorageError("503"), times=2)
RetryingStorage(lambda: flaky, budget=10, first_pause=0.001).write("key", b"data")
assert flaky.read("key") == b"data"
"""


def unchanged(work: str, *arguments: str) -> bool:
    """Whether the global generators are as they were after `work`."""
    program = PROGRAM.replace("{work}", textwrap.dedent(work))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "True"


@pytest.mark.parametrize("work", [REPORTS, RETRIES], ids=["reports", "retries"])
def test_uploads_do_not_touch_any_random_number_generator(tmp_path, work):
    """In no mode; and the pauses between two tries are random by a generator of their own."""
    assert unchanged(work, str(tmp_path / "store"), str(tmp_path))


def test_neither_does_a_store_that_throttles(moto_server, tmp_path, monkeypatch):
    """The client of S3 has pauses of its own."""
    bucket = f"random-{uuid4().hex[:12]}"
    moto_server.client().create_bucket(Bucket=bucket)
    for name, value in moto_server.env.items():
        monkeypatch.setenv(name, value)
    with faulty(moto_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.rule = lambda request: answer(503, "SlowDown") if request.number == 0 else None
        assert unchanged(REPORTS, f"s3://{bucket}/runs", str(tmp_path))
    assert len(proxy.seen) > 0


def test_what_draws_is_noticed(tmp_path):
    """The check can fail."""
    assert not unchanged("random.random()", str(tmp_path / "store"), str(tmp_path))
