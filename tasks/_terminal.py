"""The `ckpt` command and its terminal: what is printed where, and which exit code an error has."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from cyclopts import CycloptsError
from rich.console import Console

from ckpt.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    CkptError,
    ConfigError,
    CorruptCheckpointError,
    FencedError,
    ObjectNotFoundError,
    RunBusyError,
)
from ckpt_tasks._tables import visible

_BUG, _INTERRUPTED, _BROKEN_PIPE = 70, 130, 141
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (CycloptsError, 2),
    (ConfigError, 2),
    (CheckpointNotFoundError, 3),
    (BucketNotFoundError, 3),
    (ObjectNotFoundError, 3),
    (CorruptCheckpointError, 1),
    (RunBusyError, 5),
    (FencedError, 5),
    (KeyboardInterrupt, _INTERRUPTED),
    (BrokenPipeError, _BROKEN_PIPE),
    (CkptError, 4),
    (OSError, 4),
)
"""The first that fits; explained in the command's help."""
_UNCUT = 1000
"""Columns where stdout is no terminal: what is piped to another program is not wrapped."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def out() -> Console:
    """The console of stdout: text as it is, colours on a terminal only."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _UNCUT
    return _Console(markup=False, emoji=False, highlight=False, width=width)


def complain(text: str) -> None:
    """Say something on stderr, in one line."""
    sys.stderr.write(f"ckpt: {' '.join(visible(line) for line in text.splitlines() if line)}\n")


def failed(error: BaseException, *, debug: bool) -> int:
    """Say what went wrong, and return the exit code."""
    code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), _BUG)
    if code == _BROKEN_PIPE:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read the pipe has seen enough
        return code
    if debug:
        traceback.print_exception(error)
    texts = {_INTERRUPTED: "interrupted", _BUG: f"{type(error).__name__}: {error} (a bug; --debug shows where)"}
    complain(texts.get(code) or str(error) or type(error).__name__)
    return code


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(record.getMessage())


@contextmanager
def log_lines() -> Iterator[None]:
    """What the library says meanwhile (objects passed over, retries that wait) as lines on stderr."""
    logger, handler = logging.getLogger("ckpt"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
