"""The ordering task: one run of it per training run, and the place where other pipelines gather their uploads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.utilities.annotations import allow_failure

from ckpt import ReportRecord, Result, RetentionPolicy
from ckpt.gathering import gather_records
from ckpt.ordering import ReportLine, gather


class Annotated(Protocol):
    """What `allow_failure(...)` gives, for type checkers: Prefect takes it apart before the task begins."""

    def unwrap(self) -> Any:
        """What is inside."""


@task(
    name="gather-reports",
    description="Publish finished uploads in the order of their reports, and make the result.",
    task_run_name="gather-reports",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
def gather_reports(
    records: ReportLine | Iterable[ReportRecord | BaseException | PrefectFuture[ReportRecord]] | Annotated,
    *,
    retention: RetentionPolicy | None = None,
) -> Result:
    """Gather uploads in sequence into one result; a failed one takes its place with its reason and blocks nothing.

    Args:
        records: what `upload_checkpoint` returned: records, or futures as `allow_failure(futures)`, so that the
            exceptions of failed ones arrive here. A training run gives its line of reports instead.
        retention: deletes the standalone checkpoints that it does not keep; None keeps all.

    Returns:
        The result, its history in seq order.
    """
    if isinstance(records, ReportLine):
        return gather(records)
    return gather_records([_outcome(item) for item in _bare(records)], retention=retention)


def _bare(value: Any) -> Any:
    return value.unwrap() if isinstance(value, allow_failure) else value


def _outcome(item: Any) -> Any:
    """A record or an exception, whatever of Prefect's is around it."""
    item = _bare(item)
    if isinstance(item, PrefectFuture):
        return item.result(raise_on_failure=False)
    if isinstance(item, State):
        return item.result(raise_on_failure=False)
    return item
