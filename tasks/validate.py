"""The validation task: one run of it per checkpoint that was reported with `validation`."""

from __future__ import annotations

from typing import Any, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed

from ckpt.errors import ValidationFailedError
from ckpt.validating import Validation, Verdict, validate


def _run_name(parameters: dict[str, Any]) -> str:
    validation: Validation = parameters["validation"]
    return f"validate-{validation.commit.seq:06d} {validation.destination.run}"


@task(
    name="validate-checkpoint",
    description="Validate one committed checkpoint of a training run, and note the verdict.",
    task_run_name=cast("Any", _run_name),  # as for the upload task
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
def validate_checkpoint(validation: Validation) -> Verdict:
    """Call the run's `validation_fn` on a committed checkpoint; what goes wrong is its verdict.

    Args:
        validation: made by the run.

    Returns:
        The verdict; the task run is Interrupted where there is none yet.

    Raises:
        ValidationFailedError: carries any other verdict than VALIDATED.
    """
    try:
        verdict = validate(validation)
    except ValidationFailedError as error:  # a state instead of an exception, as for the upload task
        name = error.verdict.status.value.replace("_", " ").title()
        return cast("Verdict", Failed(name=name, message=str(error.verdict.reason), data=error))
    if not verdict.over:
        return cast("Verdict", Completed(name="Interrupted", message=str(verdict.reason), data=verdict))
    return verdict
