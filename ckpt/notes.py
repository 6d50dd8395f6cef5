"""Notes: facts about a commit that came after it. Create-only objects, so that writers never meet."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from ckpt._json import encode
from ckpt.errors import FormatError, NewerFormatError, ObjectNotFoundError
from ckpt.layout import FORMAT, NOTES, CommitId, note_key, parse_note
from ckpt.manifest import decode_object, typed
from ckpt.metrics import Metrics
from ckpt.storage import Objects, join_uri

logger = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One later fact."""

    commit: CommitId
    metrics: Metrics = field(default_factory=dict)
    """Added to the report's own; of the same key the later note wins."""
    pin: bool | None = None
    """True protects the checkpoint from retention, False lifts that; the latest note that says either counts."""
    source: str = ""
    """Who says so."""
    created: float = 0.0
    """Unix seconds, by the writer's clock."""


def write_note(objects: Objects, commit: CommitId, **facts: Any) -> Note:
    """Add a note about a commit; `facts` are fields of `Note`."""
    note = Note(commit=commit, created=time.time(), **facts)
    body = {"format": FORMAT, "metrics": note.metrics, "pin": note.pin, "source": note.source, "created": note.created}
    objects.create(note_key(commit, uuid.uuid4().hex[:12]), encode(body))
    return note


class Notes:
    """The notes of a run as far as they were read; `refresh` reads only what is new."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._read: set[str] = set()
        self._of: dict[CommitId, list[Note]] = {}

    def refresh(self) -> None:
        """One listing, and one read per new note; damaged ones are passed over with a warning.

        Raises:
            NewerFormatError: a note that only a newer version understands.
        """
        for entry in self._objects.list(NOTES):
            commit = parse_note(entry.key)
            if commit is None or entry.key in self._read:
                continue
            try:
                body = decode_object(self._objects.read(entry.key), join_uri(self._objects.uri, entry.key))
                note = _note(commit, body)
            except ObjectNotFoundError:
                continue
            except NewerFormatError:
                raise  # it may be a pin
            except (FormatError, TypeError) as error:
                logger.warning("Passing over note %s of %s: %s", entry.key, self._objects.uri, error)
                self._read.add(entry.key)
                continue
            self._read.add(entry.key)
            self._of.setdefault(commit, []).append(note)

    def metrics(self, commit: CommitId, own: Mapping[str, Any]) -> Metrics:
        """A commit's metrics with every evaluation so far."""
        merged = dict(own)
        for note in self._sorted(commit):
            merged.update(note.metrics)
        return merged

    def pinned(self, commit: CommitId) -> bool:
        """Whether retention must leave the commit alone."""
        said = [note.pin for note in self._sorted(commit) if note.pin is not None]
        return bool(said and said[-1])

    def _sorted(self, commit: CommitId) -> list[Note]:
        return sorted(self._of.get(commit, ()), key=lambda note: note.created)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "metrics": (dict,), "pin": (bool, NoneType), "source": (str,), "created": (int, float),
}  # fmt: skip


def _note(commit: CommitId, body: Mapping[str, Any]) -> Note:
    return Note(commit=commit, **typed(body, _TYPES, _TYPES))
