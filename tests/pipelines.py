"""A flow for the tests of task runners; other processes import it, and no test module can be imported."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from helpers import make_checkpoint
from prefect import allow_failure

from ckpt import KeepLast
from ckpt_tasks import (
    gather_reports,
    prune_checkpoints,
    publish_result,
    restore_checkpoint,
    upload_checkpoint,
    verify_checkpoint,
)


def broken(checkpoint, name):
    raise ConnectionResetError("the cable is out")


def outcome(work):
    """What it gives, or what it raises."""
    try:
        return work()
    except Exception as error:  # what a task runner brings back is the thing under test
        return error


def pipeline(root: Path) -> dict[str, Any]:
    checkpoints = [make_checkpoint(root / f"c{n}", {"data": str(n)}) for n in range(3)]
    destinations = [str(root / "out" / f"day-{n}") for n in range(3)]
    futures = [*upload_checkpoint.map(checkpoints, destinations, seq=[0, 1, 2])]
    bad = make_checkpoint(root / "bad")
    named = upload_checkpoint.with_options(name="export")
    futures.append(named.submit(bad, str(root / "out" / "bad"), seq=3, checkpoint_upload_fn=broken))
    result = gather_reports(allow_failure(futures), retention=KeepLast(2))
    best = result.best_checkpoints[-1][0]
    restored = restore_checkpoint.submit(best, str(root / "restored"))
    verified = verify_checkpoint.submit(best)
    pruned = prune_checkpoints.submit(str(root / "runs" / "run"), KeepLast(1))
    missing = verify_checkpoint.submit(str(root / "nowhere"))
    published = publish_result.submit(result)
    future: Future[None] = Future()
    future.set_result(None)

    def closes_over_a_future(checkpoint, name):
        future.result()
        return checkpoint

    def upload_live():
        destination = str(root / "out" / "live")
        return named.submit(
            make_checkpoint(root / "live"), destination, checkpoint_upload_fn=closes_over_a_future
        ).result()

    published.result()
    return {
        "records": [outcome(item.result) for item in futures],
        "result": result,
        "restored": restored.result(),
        "verified": verified.result(),
        "pruned": pruned.result(),
        "missing": outcome(missing.result),
        "live": outcome(upload_live),
    }
