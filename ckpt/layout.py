"""Every key of a run, in one place. The format is versioned and printed in docs/storage_format.md."""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpt.errors import ConfigError

FORMAT = 1
"""Version of the storage format; a reader refuses a newer one."""

RUN = "run.json"
RESULT = "result.json"
ATTEMPTS = "attempts/"
COMMITS = "commits/"
CHECKPOINTS = "checkpoints/"
HISTORY = "history/"
NOTES = "notes/"
MANIFEST_SUFFIX = ".manifest.json"
"""Of a standalone checkpoint: `<destination>.manifest.json`, beside the files and not among them."""

_COMMIT = re.compile(r"commits/(\d{6,})\.a(\d+)\.json")
_ATTEMPT = re.compile(r"attempts/(\d{4,})(\.start|\.end)?\.json")
_SEGMENT = re.compile(r"history/a(\d+)-(\d+)-(\d+)\.jsonl")
_NOTE = re.compile(r"notes/(\d{6,})\.a(\d+)\.([0-9a-zA-Z_-]+)\.json")

_PART = r"(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]+"
_PLAIN = re.compile(rf"{_PART}(?:/{_PART})*")


class CommitId(NamedTuple):
    """A commit object's identity; sorts by seq, then attempt."""

    seq: int
    attempt: int

    @property
    def key(self) -> str:
        """Its key under the run."""
        return f"{COMMITS}{self.seq:06d}.a{self.attempt}.json"


class Segment(NamedTuple):
    """One create-only piece of the history: the rows `first`..`last` as attempt `attempt` published them."""

    attempt: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """Its key under the run."""
        return f"{HISTORY}a{self.attempt}-{self.first:06d}-{self.last:06d}.jsonl"


def claim_key(attempt: int) -> str:
    """The object whose creation makes a driver the owner of attempt `attempt`."""
    return f"{ATTEMPTS}{attempt:04d}.json"


def start_key(attempt: int) -> str:
    """Where the attempt begins: `first_seq` and what it resumed from."""
    return f"{ATTEMPTS}{attempt:04d}.start.json"


def end_key(attempt: int) -> str:
    """Written by an attempt that ended by itself."""
    return f"{ATTEMPTS}{attempt:04d}.end.json"


def lease_key(attempt: int) -> str:
    """Rewritten by a living owner."""
    return f"{ATTEMPTS}{attempt:04d}.lease"


def note_key(commit: CommitId, note: str) -> str:
    """A later fact about a commit; `note` is unique."""
    return f"{NOTES}{commit.seq:06d}.a{commit.attempt}.{note}.json"


def parse_commit(key: str) -> CommitId | None:
    """The commit of a key, or None if it is no commit's."""
    match = _COMMIT.fullmatch(key)
    return CommitId(int(match[1]), int(match[2])) if match else None


def parse_attempt(key: str) -> tuple[int, str] | None:
    """(attempt, "claim" | "start" | "end") of a key, or None."""
    match = _ATTEMPT.fullmatch(key)
    return (int(match[1]), (match[2] or ".claim")[1:]) if match else None


def parse_segment(key: str) -> Segment | None:
    """The history segment of a key, or None."""
    match = _SEGMENT.fullmatch(key)
    return Segment(int(match[1]), int(match[2]), int(match[3])) if match else None


def parse_note(key: str) -> CommitId | None:
    """The commit that a note is about, or None."""
    match = _NOTE.fullmatch(key)
    return CommitId(int(match[1]), int(match[2])) if match else None


def location_of(name: str, attempt: int, use: int = 1) -> str:
    """Where the `use`-th checkpoint called `name` of an attempt lives, relative to the run: the same on all ranks."""
    return f"{CHECKPOINTS}{name}-a{attempt}" + (f"-{use}" if use > 1 else "")


def check_relative(path: str, what: str) -> str:
    """`path` itself, if it is a plain relative POSIX path; used for names on write and manifest paths on read.

    Raises:
        ConfigError: it is no string, empty, absolute, no valid Unicode, or has `.`/`..`/empty parts or control
        characters.
    """
    if not isinstance(path, str):
        raise ConfigError(f"{what} {path!r} is {type(path).__name__}; give a string")
    if not _PLAIN.fullmatch(path):
        raise ConfigError(
            f"{what} {path!r} is not a plain relative path: use letters, digits and other printable characters, "
            "'/' between folders, and no '.', '..', empty part or leading '/'"
        )
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{what} {path!r} is not valid Unicode: give it a name that UTF-8 can hold") from None
    if size > 900:
        raise ConfigError(
            f"{what} {path[:60]!r}... is over 900 bytes long; object stores allow keys of 1024 bytes in all"
        )
    return path


def check_run_name(name: str) -> str:
    """`name` itself, if it can name a run: one path part, without `@` (references use it).

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(name, str) or "/" in name or "@" in name or name.startswith(".") or len(name.encode()) > 200:
        raise ConfigError(
            f"run name {name!r} cannot be used: give one folder name of at most 200 bytes without '/', '@' or a leading dot"
        )
    return check_relative(name, "run name")
