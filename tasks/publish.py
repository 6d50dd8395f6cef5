"""The result artifact: what a finished run shows in the UI."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from ckpt import Result
from ckpt_tasks.artifacts import result_key, result_markdown


@task(
    name="publish-result",
    description="Create the result artifact of a run.",
    task_run_name="publish-result",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
def publish_result(result: Result) -> str:
    """Create the artifact `ckpt-result-<run>`: best, latest, plot, table, failures, totals. Keyed, so it has versions.

    Args:
        result: of a run, or of `gather_reports`.

    Returns:
        The artifact's key.
    """
    key = result_key(result.run)
    create_markdown_artifact(result_markdown(result), key=key, description=f"Result of run {result.run}")
    return key
