"""The `ckpt` command: look at runs in their storage, verify, restore and maintain them.

It needs no Prefect server, and imports Prefect only for credentials that are a block. This module reads the command
line and says what went wrong; `_rows` reads the storage, `_tables` draws.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from ckpt import Checkpoint, KeepAny, KeepBest, KeepLast, RetentionPolicy, RunSummary, list_runs
from ckpt.collecting import collect
from ckpt.errors import CheckpointNotFoundError, ConfigError
from ckpt.gathering import prune as prune_run
from ckpt.reading import pin as pin_checkpoint
from ckpt.storage import normalize_uri
from ckpt.verifying import Verification
from ckpt.verifying import verify as verify_files
from ckpt_tasks import _rows, _tables
from ckpt_tasks._options import COMMON, Common, Flag
from ckpt_tasks._progress import transfer
from ckpt_tasks._terminal import failed, log_lines, out
from ckpt_tasks._upkeep import upkeep

HELP = """Checkpoints of training runs: list, inspect, verify, restore, clean up; set up Prefect and find out what is wrong.

RUN is `<storage_path>/<name>`; REF is a run with `@latest`, `@12` (a seq), `@best` or
`@best:<metric>:<min|max>`, or the place of a checkpoint itself. A storage path is a folder, `s3://bucket/prefix`,
or any fsspec URI.

With `--json` stdout is one JSON document, and empty on an error; numbers that JSON does not have are the strings "NaN",
"Infinity" and "-Infinity"; times are Unix seconds. Errors are one line on stderr; `--debug` or `CKPT_DEBUG=1` adds the
stack trace.

Exit codes: 0 ok; 1 a check failed (a file is missing or differs); 2 wrong usage or configuration; 3 not found;
4 storage or access error; 5 the run is busy; 70 a bug in ckpt; 130 interrupted.
"""

NEWEST = 50
"""Reports that `show` lists without `--all`."""


def _version() -> str:
    try:
        return version("prefect-ckpt")
    except PackageNotFoundError:
        return "unknown (not installed)"


app = App(name="ckpt", help=HELP, help_format="markdown", version=_version)


app.command(upkeep, name="*")


@app.command
def ls(storage_path: str = "./runs", *, common: Common = COMMON) -> None:
    """List the runs under a storage path, or the committed checkpoints of one run.

    Args:
        storage_path: where runs are kept; or a run itself.
        common: what every command takes.
    """
    files = _rows.is_run(storage_path, common.access)
    if files is None:
        runs = _runs(storage_path, common)
        shown = _tables.runs_table(runs) if runs else f"no runs directly under {storage_path}"
        common.show({"storage_path": normalize_uri(storage_path), "runs": runs}, shown)
        return
    rows = _rows.checkpoint_rows(files)
    table = _tables.checkpoints_table(rows, files.score_attribute, out().width)
    nothing = f"{files.uri} has no committed checkpoint; `ckpt show` lists its reports"
    common.show({"run": files.uri, "checkpoints": rows}, table if rows else nothing)


@app.command
def show(
    target: str,
    *,
    all_reports: Annotated[bool, Parameter("--all", negative="", show_default=False)] = False,
    common: Common = COMMON,
) -> None:
    """Show a run with its reports, failures and attempts; or one checkpoint with its files, metrics and origin.

    Args:
        target: RUN or REF.
        all_reports: every report of the run, not only the newest 50.
        common: what every command takes.
    """
    files = _rows.is_run(target, common.access)
    if files is None:
        found = _rows.find(target, common.access)
        files_table = _tables.files_table(found.checkpoint.manifest.files)
        common.show(found.to_json(), _tables.checkpoint_facts(found), "", files_table)
        return
    view = _rows.run_view(files, None if all_reports else NEWEST)
    common.show(view.to_json(), *_run_parts(view, out().width))


@app.command
def verify(*targets: str, content: bool = True, common: Common = COMMON) -> int:
    """Check that committed checkpoints are what their manifests say; exit code 1 if a file is missing or differs.

    Args:
        targets: RUN or REF; a run stands for all its committed checkpoints.
        content: read and compare every byte; --no-content compares presence and sizes only.
        common: what every command takes.
    """
    if not targets:
        raise ConfigError("verify: name at least one RUN or REF")
    subjects = [subject for target in targets for subject in _rows.subjects(target, common.access)]
    known = [subject.checkpoint for subject in subjects if subject.checkpoint is not None]
    total = sum(checkpoint.manifest.nbytes for checkpoint in known) if content else 0
    with transfer("verifying", total) as progress:
        checked = [(subject.ref, _verified(subject, content, progress)) for subject in subjects]
    bad = sum(not found.ok for _, found in checked)
    rows = [{"ref": ref, "ok": found.ok, **_rows.plain(found)} for ref, found in checked]
    lines = [line for ref, found in checked for line in _tables.verification_lines(ref, found)]
    common.show({"ok": not bad, "checkpoints": rows}, *lines, f"{len(checked)} checkpoints, {bad} with problems")
    return int(bad > 0)


@app.command
def restore(ref: str, *, to: Path, common: Common = COMMON) -> None:
    """Download a checkpoint into a new directory, which appears whole and verified, or not at all.

    Args:
        ref: REF; a run stands for its latest checkpoint.
        to: the directory to make; it may exist if it is empty.
        common: what every command takes.
    """
    checkpoint = _rows.find(ref, common.access).checkpoint
    manifest = checkpoint.manifest
    with transfer(f"restoring {manifest.name}", manifest.nbytes) as progress:
        where = checkpoint.to_directory(to, progress=progress)
    document = {
        "ref": ref, "uri": checkpoint.uri, "seq": manifest.seq, "directory": str(where), "files": len(manifest.files),
        "nbytes": manifest.nbytes,
    }  # fmt: skip
    amount = f"{len(manifest.files)} files, {_tables.size(manifest.nbytes)}"
    said = f"restored checkpoint {manifest.seq} ({amount}) to {where}"
    common.show(document, _tables.visible(said), *_loading(checkpoint, where))


@app.command
def pin(ref: str, *, common: Common = COMMON) -> None:
    """Protect a committed checkpoint from retention and `prune`.

    Args:
        ref: REF.
        common: what every command takes.
    """
    _pin(ref, True, common)


@app.command
def unpin(ref: str, *, common: Common = COMMON) -> None:
    """Lift the protection of `pin`.

    Args:
        ref: REF.
        common: what every command takes.
    """
    _pin(ref, False, common)


@app.command
def prune(run: str, *, keep_last: int | None = None, keep_best: str | None = None, common: Common = COMMON) -> None:
    """Delete the checkpoints of a run that no rule keeps; latest, best and pinned ones stay whatever the rules say.

    Args:
        run: RUN; refused while a driver of it is alive.
        keep_last: keep the newest N.
        keep_best: keep the best N by a metric, as N:METRIC:min or N:METRIC:max.
        common: what every command takes.
    """
    policies: list[RetentionPolicy] = [] if keep_last is None else [KeepLast(keep_last)]
    policies += [] if keep_best is None else [_keep_best(keep_best)]
    if not policies:
        raise ConfigError("prune: say what to keep, with --keep-last N, --keep-best N:METRIC:min|max, or both")
    deleted = [checkpoint.uri for checkpoint in prune_run(run, KeepAny(tuple(policies)), **common.access)]
    lines = [_tables.visible(f"deleted {uri}") for uri in deleted]
    common.show({"run": normalize_uri(run), "deleted": deleted}, *lines, f"{len(deleted)} checkpoints deleted")


@app.command
def gc(run: str, *, dry_run: Flag = False, common: Common = COMMON) -> None:
    """Remove files that a crash left in a run and that no commit names.

    Args:
        run: RUN; refused while a driver of it is alive.
        dry_run: only say what would be removed; may name what a living driver is uploading.
        common: what every command takes.
    """
    found = collect(run, dry_run=dry_run, **common.access)
    done = "would remove" if dry_run else "removed"
    lines = [_tables.visible(f"{done} {uri}") for uri in found.locations]
    total = f"{done} {found.files} files, {_tables.size(found.nbytes)}"
    common.show({"run": normalize_uri(run), "dry_run": dry_run, **asdict(found)}, *lines, total)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; default: this process's own.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("CKPT_DEBUG", "") not in ("", "0")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with log_lines():
            command, bound, _ = app.parse_args(given, exit_on_error=False, print_error=False, verbose=False)
            code = command(*bound.args, **bound.kwargs)
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error becomes a line and an exit code
        return failed(error, debug=debug)


def _runs(storage_path: str, common: Common) -> list[RunSummary]:
    root = normalize_uri(storage_path)
    if "://" not in root and not Path(root).is_dir():
        raise CheckpointNotFoundError(f"no folder is at {root}; give the storage path of your runs, or a run in it")
    return list_runs(root, **common.access)


def _run_parts(view: _rows.RunView, width: int) -> Iterator[Any]:
    """What `show RUN` prints, from top to bottom."""
    yield _tables.run_facts(view)
    if view.reports:
        left_out = view.nreports - len(view.reports)
        yield f"\nreports (--all shows {left_out} older ones too)" if left_out else "\nreports"
        yield _tables.reports_table(view.reports, {row.uri for row in view.checkpoints}, view.score_attribute, width)
    if failures := _tables.failure_lines(view.reports):
        yield from ("\nnot committed", *failures)
    yield from ("\nattempts", _tables.attempts_table(view.attempts))


def _verified(subject: _rows.Subject, content: bool, progress: Callable[[int], None]) -> Verification:
    if subject.checkpoint is None:
        return Verification(uri=subject.ref, files=0, nbytes=0, problems=(subject.problem,))
    return verify_files(subject.checkpoint, content=content, progress=progress)


def _loading(checkpoint: Checkpoint, where: Path) -> list[str]:
    """How to load it, where that can be known."""
    found = [file.path for file in checkpoint.manifest.files if file.path.endswith((".pt", ".pth"))]
    return [f"load it: torch.load({_tables.visible(str(where / found[0]))!r}, weights_only=True)"] if found else []


def _keep_best(given: str) -> KeepBest:
    count, _, rest = given.partition(":")
    metric, _, order = rest.rpartition(":")
    if not count.isdecimal() or not metric or order not in ("min", "max"):
        raise ConfigError(f"--keep-best {given!r} must be N:METRIC:min or N:METRIC:max, such as 3:loss:min")
    return KeepBest(int(count), metric, "min" if order == "min" else "max")


def _pin(ref: str, pinned: bool, common: Common) -> None:
    pin_checkpoint(ref, pinned, **common.access)
    said = f"{ref} is {'pinned' if pinned else 'not pinned any more'}"
    common.show({"ref": ref, "pinned": pinned}, _tables.visible(said))


if __name__ == "__main__":
    sys.exit(main())
