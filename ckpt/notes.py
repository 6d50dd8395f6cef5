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
from ckpt.errors import FormatError, NewerFormatError, ObjectExistsError, ObjectNotFoundError
from ckpt.layout import FORMAT, NOTES, CommitId, note_key, parse_note
from ckpt.manifest import Manifest, decode_object, typed
from ckpt.metrics import Metrics
from ckpt.storage import Objects, join_uri

logger = logging.getLogger("ckpt")

_VERDICT = "validation"
"""The id of the note with a commit's verdict: create lets only one of several win."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One later fact."""

    commit: CommitId
    metrics: Metrics = field(default_factory=dict)
    """Added to the report's own; of the same key the later note wins."""
    pin: bool | None = None
    """True protects the checkpoint from retention, False lifts that; the latest note that says either counts."""
    verdict: str | None = None
    """How the validation that the report asked for ended: `validated`, `failed` or `timeout`. At most one note has it."""
    reason: str | None = None
    """Why it is not `validated`."""
    source: str = ""
    """Who says so."""
    created: float = 0.0
    """Unix seconds, by the writer's clock."""


def write_note(objects: Objects, commit: CommitId, **facts: Any) -> Note:
    """Add a note about a commit; `facts` are fields of `Note`."""
    note = Note(commit=commit, created=time.time(), **facts)
    objects.create(note_key(commit, uuid.uuid4().hex[:12]), _body(note))
    return note


def write_verdict(objects: Objects, commit: CommitId, **facts: Any) -> Note:
    """Say how a commit's validation ended; there is one such note, and the first one made counts.

    Returns:
        What is noted now.

    Raises:
        FormatError: there is one already, and it cannot be read.
    """
    note = Note(commit=commit, created=time.time(), **facts)
    key = note_key(commit, _VERDICT)
    try:
        objects.create(key, _body(note))
    except ObjectExistsError:
        return _decoded(objects, commit, key)
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
                note = _decoded(self._objects, commit, entry.key)
            except ObjectNotFoundError:
                continue
            except NewerFormatError:
                raise  # it may be a pin
            except FormatError as error:
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

    def verdict(self, commit: CommitId) -> Note | None:
        """How the commit's validation ended; None: it has not."""
        return next((note for note in self._of.get(commit, ()) if note.verdict is not None), None)

    def awaits_validation(self, manifest: Manifest) -> bool:
        """Whether a validation was asked for and has not ended: retention must leave the commit alone."""
        return manifest.validation is not None and self.verdict(manifest.id) is None

    def _sorted(self, commit: CommitId) -> list[Note]:
        return sorted(self._of.get(commit, ()), key=lambda note: note.created)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "metrics": (dict,), "pin": (bool, NoneType), "verdict": (str, NoneType), "reason": (str, NoneType), "source": (str,),
    "created": (int, float),
}  # fmt: skip


def _body(note: Note) -> bytes:
    return encode({"format": FORMAT, **{name: getattr(note, name) for name in _TYPES}})


def _decoded(objects: Objects, commit: CommitId, key: str) -> Note:
    where = join_uri(objects.uri, key)
    body = decode_object(objects.read(key), where)
    try:
        return Note(commit=commit, **typed(body, _TYPES, _TYPES))
    except TypeError as error:
        raise FormatError(f"{where} is no note: {error}") from error
