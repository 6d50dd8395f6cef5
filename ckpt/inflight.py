"""What one process knows of a run it has open: slots, locations in use, and where each upload is.

`upload()` gets a small picklable `Destination`; in the run's own process it finds the live state here, in another one
(a process pool, Dask, Ray) it makes what it needs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ckpt.attempts import Attempt, LooksFirst
from ckpt.config import UploadConfig
from ckpt.credentials import Credentials
from ckpt.errors import CommittedError, DeadlineError
from ckpt.records import ReportState
from ckpt.slots import UploadSlots
from ckpt.staging import Staging
from ckpt.storage import Objects, Storage, open_storage


@dataclass(slots=True, kw_only=True)
class Flight:
    """One upload on its way."""

    seq: int
    state: ReportState = ReportState.SUBMITTED
    step: str = "submitted"
    """For people: `waiting for a slot`, `uploading`, ..."""
    moved: int = 0
    """Bytes moved so far, retries included."""
    since: float = field(default_factory=time.monotonic)
    """Monotonic seconds when it was submitted."""
    entered: float = field(default_factory=time.monotonic)
    """Monotonic seconds when it began its step."""
    active: float = field(default_factory=time.monotonic)
    """Monotonic seconds of its last sign of life."""
    aborted: str | None = None
    """Why it must stop, once it must."""
    on_abort: list[Callable[[str], None]] = field(default_factory=list)
    """Called with the reason; for waits that bytes do not interrupt."""

    def enter(self, step: str, state: ReportState | None = None) -> None:
        """Begin a step; said again of the same step, it is a sign of life."""
        now = time.monotonic()
        if step != self.step:
            self.entered = now
        self.step, self.state, self.active = step, state or self.state, now

    def when_aborted(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called with the reason once it must stop; at once if it must already. It may be called twice."""
        self.on_abort.append(callback)
        if self.aborted is not None:
            callback(self.aborted)

    def abort(self, reason: str) -> None:
        """Make it stop at the next moved byte, or at once where it waits."""
        self.aborted = reason
        for callback in list(self.on_abort):
            callback(reason)

    def progress(self, nbytes: int) -> None:
        """A sign of life: bytes moved; raises `DeadlineError` inside the transfer once it was aborted.

        0 is one too: bytes that are sent again are not counted again, and a pause between two tries is short of its budget.
        """
        if self.aborted is not None:
            raise DeadlineError(self.aborted)
        self.moved += nbytes
        self.active = time.monotonic()


class Locations:
    """Where this run's checkpoints are: no two may share, contain or lie in one another.

    What an answer costs depends on how deep a location lies, not on how many there are.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken: set[str] = set()
        self._inside: dict[str, str] = {}
        """Each folder above a location, with one such location."""
        self._lock = threading.Lock()
        for uri in taken:
            self.add(uri)

    def claim(self, uri: str) -> None:
        """Take a location.

        Raises:
            CommittedError: another report has it, or one that contains it or lies in it.
        """
        with self._lock:
            if other := self._overlapping(uri):
                raise CommittedError(
                    f"location {uri} equals, contains or lies in {other}, which another report of this run uses: "
                    "give every checkpoint a location of its own (build_checkpoint_path_from_name makes one)"
                )
            self._add(uri)

    def add(self, uri: str) -> None:
        """Note a location that is in use already, whatever it overlaps."""
        with self._lock:
            self._add(uri)

    def overlapping(self, uri: str) -> str | None:
        """A location in use that `uri` equals, contains or lies in."""
        with self._lock:
            return self._overlapping(uri)

    def _add(self, uri: str) -> None:
        self._taken.add(uri)
        self._inside.update(dict.fromkeys(_folders(uri), uri))

    def _overlapping(self, uri: str) -> str | None:
        own = uri.rstrip("/")
        above = next((folder for folder in (*_folders(uri), own) if folder in self._taken), None)
        return above or self._inside.get(own)


def overlap(one: str, other: str) -> bool:
    """Whether two locations are the same, or one lies in the other."""
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def _folders(uri: str) -> list[str]:
    parts = uri.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The live state of one open attempt."""

    storage: Storage
    """Rooted at the run."""
    attempt: Attempt
    slots: UploadSlots
    staging: Staging | None = None
    locations: Locations = field(default_factory=Locations)
    flights: dict[int, Flight] = field(default_factory=dict)
    validating: dict[int, Flight] = field(default_factory=dict)
    """Validations under way, by the seq of their checkpoint; `abort` leaves them alone."""

    def flight(self, seq: int) -> Flight:
        """The report's flight; made on first use."""
        return self.flights.setdefault(seq, Flight(seq=seq))

    def abort(self, reason: str) -> None:
        """End every upload: those that wait are dropped, those under way stop and clean up."""
        self.slots.drop_waiting(reason)
        for flight in list(self.flights.values()):
            flight.abort(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where the uploads of one attempt go: picklable, and without secrets."""

    uri: str
    """Of the run."""
    run: str
    """Its name."""
    run_id: str
    attempt: int
    nonce: str
    """Of the attempt's owner."""
    credentials: Credentials
    storage_options: dict[str, Any]
    upload_config: UploadConfig
    create_enforced: bool = True
    git_commit: str | None = None

    def open(self) -> Storage:
        """A storage rooted at the run."""
        config = self.upload_config
        return open_storage(
            self.uri,
            credentials=self.credentials,
            storage_options=self.storage_options,
            memory_budget=config.memory_bytes,
            stall_timeout=config.stall_timeout,
            retry_budget=config.retry_budget,
        )

    def live(self) -> Live:
        """The attempt's live state in this process; made where the run was not opened here."""
        with _lock:
            found = _open.get(self._key)
            if found is None:
                storage = self.open()
                slots = UploadSlots(self.upload_config.max_concurrent_uploads, self.upload_config.max_pending)
                found = _open[self._key] = Live(storage=storage, attempt=self.attempt_on(storage), slots=slots)
            return found

    def attempt_on(self, objects: Objects) -> Attempt:
        """The ownership, as an uploading process needs it."""
        checked = objects if self.create_enforced else LooksFirst(objects)
        return Attempt(objects=checked, number=self.attempt, nonce=self.nonce)

    def register(self, live: Live) -> None:
        """Make `live` what uploads of this process find."""
        with _lock:
            _open[self._key] = live

    def unregister(self) -> None:
        """Forget the live state."""
        with _lock:
            _open.pop(self._key, None)

    @property
    def _key(self) -> tuple[str, int, str]:
        return self.uri, self.attempt, self.nonce


_open: dict[tuple[str, int, str], Live] = {}
_lock = threading.Lock()
