"""The training flow: `python flows/train.py` runs it here; `prefect deploy` makes it start from the UI.

Without a Prefect server it brings its own for as long as it runs. The same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import httpx
from prefect import flow
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, PREFECT_UI_URL, temporary_settings
from rich.console import Console
from rich.markup import escape

from ckpt import Result
from ckpt.errors import CheckpointsLostError, CkptError
from ckpt_tasks import TrainConfig, embedded_server, run_training
from ckpt_tasks._delivery import NO_API, api_answers, leave, unseen
from ckpt_tasks.form import Retention, Uploads
from ckpt_tasks.summary import print_result

DIGITS = "digits_training:train"


@flow(name="train", log_prints=False, persist_result=False)
def train(config: TrainConfig) -> Result:
    """Train as the form says; every report's checkpoint is uploaded, committed and published in order.

    Args:
        config: What to train, where its checkpoints go, and how.
    """
    return run_training(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: train, then print what is there.

    Returns:
        0; 1 if the run is red; 2 if it could not begin; 130 after Ctrl-C. Where the Prefect API is away at the start, or
        went away for good, the program ends with 75, within a minute of the last commit: everything is in storage, and
        the UI misses the end.
    """
    options = _parser().parse_args(arguments)
    config = TrainConfig(
        name=options.name,
        storage_path=options.storage,
        credentials=options.credentials,
        train_fn=options.train_fn,
        train_loop_config={"epochs": options.epochs, "seed": options.seed},
        resume=options.resume,
        upload=Uploads(max_concurrent_uploads=options.uploads),
        retention=Retention(num_to_keep=options.keep, score_attribute="accuracy"),
    )
    console = Console()
    try:
        with embedded_server(), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 2}):
            if not api_answers(seconds=15):
                console.print(
                    f"[bold red]The Prefect API is away:[/] {PREFECT_API_URL.value()} does not answer. Start a server "
                    "there, or unset PREFECT_API_URL to bring one along."
                )
                return NO_API
            result = train(config)
    except CheckpointsLostError as error:
        print_result(error.result, console)
        console.print(f"[bold red]Red:[/] {escape(str(error))}")
        return 1
    except CkptError as error:
        console.print(f"[bold red]{type(error).__name__}:[/] {escape(str(error))}")
        return 2
    except httpx.HTTPError as error:
        _without_api(config, console, error)
        leave(NO_API, within=5)
    except KeyboardInterrupt:
        _print_stored(config, console)
        console.print("Interrupted; the same command goes on from here.")
        leave(130, within=5)
    print_result(result, console)
    if ui := PREFECT_UI_URL.value():
        console.print(f"UI: {ui}")
    return 0


def _without_api(config: TrainConfig, console: Console, error: httpx.HTTPError) -> None:
    """Print what the run left in storage, and what the UI misses."""
    console.print(f"[bold red]The Prefect API is away:[/] {escape(f'{type(error).__name__}: {error}')}")
    _print_stored(config, console)
    logs, events = unseen()
    console.print(
        f"Its UI misses the end of this flow run (it says Running), {logs} log lines, and "
        f"{events} events, the states of task runs among them."
    )


def _print_stored(config: TrainConfig, console: Console) -> None:
    try:
        print_result(Result.from_path(f"{config.storage_path}/{config.name}", config.credentials), console)
    except CkptError as error:
        console.print(escape(str(error)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="digits", help="same name = continue that training (default: %(default)s)")
    parser.add_argument("--storage", default="./runs", help="folder, s3://bucket/prefix, any fsspec URI (%(default)s)")
    parser.add_argument("--credentials", help="env (default), profile:<name>, or block:<type>/<name>")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=int, help="checkpoints to keep, best first; default: all")
    parser.add_argument("--uploads", type=int, default=2, help="uploads at once (%(default)s)")
    parser.add_argument("--resume", default="latest", help="latest, best, must, none, or a reference (%(default)s)")
    parser.add_argument("--train-fn", default=DIGITS, help="package.module:function (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
