"""What is different in a run that a worker started: its working directory is the worker's, and may be temporary."""

from __future__ import annotations

import os
from pathlib import Path

from prefect.context import FlowRunContext

from ckpt.errors import ConfigError
from ckpt.storage import scheme_of


def check_deployed_path(path: str | os.PathLike[str], what: str) -> None:
    """Refuse a relative path in a run of a deployment, before anything is written where nobody will find it.

    Args:
        path: a local path or a URI.
        what: the parameter's name, for the message.

    Raises:
        ConfigError: it is relative, and the current flow run is of a deployment.
    """
    context = FlowRunContext.get()
    deployed = context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
    text = os.fspath(path)
    if deployed and scheme_of(text) == "file" and "://" not in text and not Path(text).expanduser().is_absolute():
        raise ConfigError(
            f"{what}={text!r} is relative, and a deployed run begins in a folder of its worker's ({Path.cwd()}): "
            "give an absolute path, or a URI such as s3://bucket/runs"
        )
