"""The nightly export: `python -m flows.nightly_export <destination>`."""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import allow_failure, flow, unmapped
from tasks.tables import ROWS, export_table

from ckpt_tasks import gather_reports, restore_checkpoint, upload_checkpoint

upload_table = upload_checkpoint.with_options(name="upload-table", retries=0)


@flow
def nightly_export(destination: str, tables: list[str]) -> dict[str, Any]:
    """Export tables below `<destination>/<day>/`; the flow is green also if one of them fails, and says which and why."""
    day = datetime.now(UTC).date().isoformat()
    with tempfile.TemporaryDirectory() as scratch:
        exported = export_table.map(tables, unmapped(Path(scratch)))
        uploads = upload_table.map(
            exported,
            [f"{destination}/{day}/{table}" for table in tables],
            name=tables,
            seq=list(range(len(tables))),
        )
        result = gather_reports(allow_failure(uploads))
        if result.checkpoint is not None:
            restored = restore_checkpoint(result.checkpoint, Path(scratch) / "trial")
            assert (restored / "table.csv").read_bytes()
    return {
        "uploaded": [checkpoint.uri for checkpoint, _ in result.best_checkpoints],
        "failed": {tables[row.seq]: row.reason for row in result.history if row.checkpoint is None},
    }


if __name__ == "__main__":
    print(json.dumps(nightly_export(sys.argv[1], list(ROWS))))
