"""The cross-run limit: a Prefect global concurrency limit, held while an upload moves bytes.

The slots of the process are the real limiter; this one caps uploads over all runs and hosts. Prefect's client serves
the waiters of one process one at a time, with gaps of up to 30 s, so a lease that one upload is done with is handed to
the next of the same process instead of being given back, for up to a minute.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

import httpx
from prefect.concurrency.sync import concurrency
from prefect.settings import PREFECT_API_URL

from ckpt.errors import ConfigError, DeadlineError
from ckpt.inflight import Flight
from ckpt.uploading import Limit, no_limit

logger = logging.getLogger("ckpt")

HANDOVER_TIME = 60.0
"""Seconds for which one lease serves the uploads of a process back to back; then others get their turn."""
_ASK_TIME = 30.0
"""Seconds of one request for a slot; between two the API's health is looked at."""
_TELL_EVERY = 10.0
"""Seconds between two log lines of a waiting upload."""


def cross_run_limit(name: str | None, timeout: float) -> Limit:
    """The limit called `name`, for `upload`; with None only the process's own slots bound uploads.

    Args:
        name: of a Prefect global concurrency limit, which must exist.
        timeout: seconds that one upload may wait for it.
    """
    if name is None:
        return no_limit

    def limit(flight: Flight) -> AbstractContextManager[None]:
        return _held(_queue(name), flight, timeout)

    return limit


@contextmanager
def _held(waiting: _Queue, flight: Flight, timeout: float) -> Iterator[None]:
    lease = waiting.get(flight, timeout)
    try:
        yield
    finally:
        waiting.done(lease)


@dataclass(slots=True, kw_only=True)
class _Lease:
    """A slot of the limit; `give_back` is None where the API was away and the upload goes on without one."""

    give_back: Callable[[], None] | None
    since: float = field(default_factory=time.monotonic)


class _Queue:
    """The uploads of this process that wait for one limit, in line, and the thread that asks for them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiters: deque[Future[_Lease]] = deque()
        self._lock = threading.Lock()
        self._asking = False

    def get(self, flight: Flight, timeout: float) -> _Lease:
        """Wait for a lease.

        Raises:
            DeadlineError: none in `timeout` seconds.
            ConfigError: there is no such limit.
        """
        turn: Future[_Lease] = Future()
        with self._lock:
            self._waiters.append(turn)
            ask = not self._asking
            self._asking = True
        if ask:
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(self._ask,), name=f"ckpt-limit-{self._name}", daemon=True
            ).start()
        return self._wait(turn, flight, timeout)

    def done(self, lease: _Lease) -> None:
        """Hand the lease to the next upload that waits, or give it back."""
        if time.monotonic() - lease.since < HANDOVER_TIME and self._hand(lease):
            return
        if lease.give_back is not None:
            lease.give_back()

    def _wait(self, turn: Future[_Lease], flight: Flight, timeout: float) -> _Lease:
        began = time.monotonic()
        flight.on_abort.append(lambda reason: _fail(turn, DeadlineError(reason)))
        while True:
            waited = time.monotonic() - began
            try:
                return turn.result(min(_TELL_EVERY, max(0.0, timeout - waited)))
            except TimeoutError:
                waited = time.monotonic() - began
            flight.enter(f"waiting for limit {self._name} {waited:.0f} s")
            if waited >= timeout and turn.cancel():
                raise DeadlineError(
                    f"no slot of the concurrency limit {self._name!r} came free in {timeout:.0f} s: other uploads hold "
                    "them, or slots are stale (`prefect gcl inspect` shows them)"
                )
            logger.info("upload %d waits for limit %s, %.0f s so far", flight.seq, self._name, waited)

    def _hand(self, lease: _Lease) -> bool:
        with self._lock:
            while self._waiters:
                turn = self._waiters.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(lease)
                    return True
        return False

    def _ask(self) -> None:
        """Ask for slots as long as anybody waits."""
        while self._anybody():
            try:
                lease = self._acquired()
            except Exception as error:  # noqa: BLE001 - told to the upload that waits
                self._refuse(error)
                continue
            if lease is not None and not self._hand(lease) and lease.give_back is not None:
                lease.give_back()

    def _anybody(self) -> bool:
        with self._lock:
            while self._waiters and self._waiters[0].done():
                self._waiters.popleft()
            self._asking = bool(self._waiters)
            return self._asking

    def _refuse(self, error: Exception) -> None:
        with self._lock:
            turn = self._waiters.popleft() if self._waiters else None
        if turn is not None:
            _fail(turn, error)

    def _acquired(self) -> _Lease | None:
        """A lease; one without a slot if the API is away; None if all were taken for as long as a request lasts."""
        if not _api_answers():
            logger.warning(
                "The Prefect API is away: uploads go on without limit %s, bounded by this process only", self._name
            )
            return _Lease(give_back=None)
        slot = concurrency(self._name, timeout_seconds=_ASK_TIME, strict=True, raise_on_lease_renewal_failure=False)
        try:
            slot.__enter__()
        except TimeoutError:
            return None
        except Exception as error:
            if not _api_answers():
                return None
            raise ConfigError(
                f"the concurrency limit {self._name!r} cannot be used: {error}. Create it: "
                f"`prefect gcl create {self._name} --limit 4`"
            ) from error
        return _Lease(give_back=lambda: _give_back(slot, self._name))


def _give_back(slot: AbstractContextManager[None], name: str) -> None:
    """In a thread: with the API away it takes a minute, and the server takes the slot back by itself then."""

    def leave() -> None:
        try:
            slot.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - the lease expires at the server
            logger.debug("A slot of limit %s was not given back: %s", name, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(leave,), name=f"ckpt-limit-{name}", daemon=True).start()


def _api_answers() -> bool:
    """Whether the Prefect API is there at all; asked with a short timeout: its client waits for over a minute."""
    url = PREFECT_API_URL.value()
    if url is None:
        return True  # the temporary server of this very process
    try:
        return httpx.get(f"{url}/health", timeout=5.0).is_success
    except httpx.HTTPError:
        return False


def _fail(turn: Future[_Lease], error: Exception) -> None:
    with suppress(InvalidStateError):
        turn.set_exception(error)


_queues: dict[str, _Queue] = {}
_queues_lock = threading.Lock()


def _queue(name: str) -> _Queue:
    with _queues_lock:
        return _queues.setdefault(name, _Queue(name))
