"""What can go away is tried again: with growing, jittered pauses, for minutes, one file at a time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import tenacity

from ckpt._files import Guarded
from ckpt._transfer import HighWater
from ckpt.errors import AccessDeniedError, CredentialsExpiredError, TransientStorageError
from ckpt.storage import RETRY_BUDGET, Entry, Progress, Receipt, Storage

T = TypeVar("T")
MIN_TRIES = 3
"""A large file may fail after more than the whole budget; it gets this many tries all the same."""
FIRST_PAUSE = 0.5
"""Seconds."""
LONGEST_PAUSE = 30.0
"""Seconds."""
_LISTEN_EVERY = 0.25
_random = random.Random()
"""Of our own: a training must draw the same numbers with uploads as without."""

logger = logging.getLogger("ckpt")


class RetryingStorage:
    """A storage whose transient failures are tried again; everything else is raised at once.

    When the store says that credentials have expired, or refuses those that were replaced meanwhile, the storage is opened
    anew, which resolves them afresh. A `create` whose answer got lost ends in `ObjectExistsError`: callers read back and compare.

    Args:
        opener: makes the storage; pickled along.
        budget: seconds after the first failure in which to try again.
        first_pause: seconds before the second try, about; they double up to half a minute.
    """

    def __init__(
        self, opener: Callable[[], Storage], *, budget: float = RETRY_BUDGET, first_pause: float = FIRST_PAUSE
    ) -> None:
        self._opener = opener
        self._budget = budget
        self._first_pause = first_pause
        self._storage = opener()

    def __repr__(self) -> str:
        return f"RetryingStorage({self._storage!r})"

    @property
    def uri(self) -> str:
        """The root."""
        return self._storage.uri

    @property
    def inner(self) -> Storage:
        """The storage itself, as it is open now."""
        return self._storage

    def create(self, key: str, data: bytes) -> None:
        """Make the object appear, or raise `ObjectExistsError`."""
        self._retry(lambda storage: storage.create(key, data))

    def write(self, key: str, data: bytes) -> None:
        """Make the object hold `data`."""
        self._retry(lambda storage: storage.write(key, data))

    def read(self, key: str) -> bytes:
        """All bytes of the object."""
        return self._retry(lambda storage: storage.read(key))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix`, by key."""
        return iter(self._retry(lambda storage: tuple(storage.list(prefix))))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects; a missing one is fine."""
        todo = tuple(keys)
        self._retry(lambda storage: storage.delete(todo))

    def upload(self, source: Path, key: str, *, progress: Progress) -> Receipt:
        """Copy a local file to `key`; every byte is counted once, however often it is sent."""
        moved = Guarded(progress)
        count = HighWater(moved)
        return self._retry(lambda storage: storage.upload(source, key, progress=count), moved, count)

    def download(self, key: str, target: Path, *, progress: Progress) -> Receipt:
        """Copy an object to a local file; every byte is counted once."""
        moved = Guarded(progress)
        count = HighWater(moved)
        return self._retry(lambda storage: storage.download(key, target, progress=count), moved, count)

    def _retry(self, verb: Callable[[Storage], T], moved: Guarded | None = None, count: HighWater | None = None) -> T:
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: _is_worth_it(error, moved)),
            stop=_StopAfter(self._budget),
            wait=self._pause_after,
            sleep=lambda seconds: _pause(seconds, moved),
            before_sleep=_log,
            reraise=True,
        )
        result: T = attempts(self._once, verb, count)
        return result

    def _pause_after(self, retry_state: tenacity.RetryCallState) -> float:
        return _random.uniform(
            0.0, min(LONGEST_PAUSE, self._first_pause * 2.0 ** min(retry_state.attempt_number - 1, 60))
        )

    def _once(self, verb: Callable[[Storage], T], count: HighWater | None) -> T:
        if count is not None:
            count.restart()
        storage = self._storage
        try:
            return verb(storage)
        except CredentialsExpiredError:
            self._reopen(storage, "have expired")
            raise
        except AccessDeniedError as error:
            if self._storage is storage and not (isinstance(storage, Renewable) and storage.credentials_changed()):
                raise
            self._reopen(storage, "were replaced")
            raise CredentialsExpiredError(str(error)) from error

    def _reopen(self, expired: Storage, why: str) -> None:
        if self._storage is expired:  # else another thread was faster; if both reopen, no harm is done
            logger.info("credentials for %s %s: resolving them again", self.uri, why)
            self._storage = self._opener()


@runtime_checkable
class Renewable(Protocol):
    """A storage that knows whether its credentials were replaced, as somebody does who rotates keys."""

    def credentials_changed(self) -> bool:
        """Whether opening it anew would use others."""
        ...


class _StopAfter(tenacity.stop.stop_base):
    """Stops when the budget is spent, counted from the end of the first failed try, but not before `MIN_TRIES`.

    Args:
        budget: seconds.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._first_failure: float | None = None

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        now = time.monotonic()
        if self._first_failure is None:
            self._first_failure = now
        spent = now - self._first_failure + retry_state.upcoming_sleep > self._budget
        return spent and (retry_state.attempt_number >= MIN_TRIES or self._budget <= 0)


def _is_worth_it(error: BaseException, moved: Guarded | None) -> bool:
    # What the caller's own progress function raised is a cancellation, whatever its type.
    return isinstance(error, TransientStorageError) and (moved is None or moved.error is not error)


def _pause(seconds: float, moved: Guarded | None) -> None:
    """Sleep, asking the caller's progress function now and then whether to go on."""
    if moved is None:
        time.sleep(seconds)
        return
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        moved(0)
        time.sleep(min(left, _LISTEN_EVERY))


def _log(retry_state: tenacity.RetryCallState) -> None:
    error = retry_state.outcome.exception() if retry_state.outcome else None
    pause = retry_state.next_action.sleep if retry_state.next_action else 0.0
    logger.info("trying again in %.1f s (try %d failed): %s", pause, retry_state.attempt_number, error)
