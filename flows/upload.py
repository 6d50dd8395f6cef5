"""The upload flow: a directory that is there already becomes a checkpoint elsewhere.

Other flows call it by `run_deployment("upload/upload", parameters={"config": {...}})`.
"""

from __future__ import annotations

from typing import cast

from prefect import flow
from prefect.states import Completed

from ckpt import ReportRecord
from ckpt_tasks import StandaloneUpload, run_upload


@flow(name="upload", log_prints=False, persist_result=False)
def upload(config: StandaloneUpload) -> ReportRecord:
    """Upload one checkpoint directory; it arrives with all its files and a manifest, or not at all.

    Args:
        config: What, and where to.
    """
    record = run_upload(config)
    message = f"committed {record.nfiles} files, {record.nbytes} bytes: {config.destination}"
    return cast("ReportRecord", Completed(message=message, data=record))
