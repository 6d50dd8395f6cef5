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
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

import httpx
from prefect.concurrency.context import ConcurrencyContext
from prefect.concurrency.sync import concurrency

from ckpt.errors import ConfigError, DeadlineError
from ckpt.inflight import Flight
from ckpt.uploading import Limit, no_limit
from ckpt_tasks._delivery import api_answers

logger = logging.getLogger("ckpt")

HANDOVER_TIME = 60.0
"""Seconds for which one lease serves the uploads of a process back to back; then others get their turn."""
LEASE_TIME = 120.0
"""Seconds after which the server takes the slot of a dead process back. Prefect's own 300 are as long as `report()`
blocks: a restart would find its own dead slot in the way for longer."""
_ASK_TIME = 30.0
"""Seconds for one request for a slot, Prefect's own retries included."""
_ASK_EVERY = 5.0
"""Seconds between two requests while all slots are taken, at most; Prefect's client would wait for up to 30."""
_ASK_SELDOM = 0.5
"""Seconds between two requests, at least; the server's own suggestion can be next to nothing."""
_LIVE_EVERY = 10.0
"""Seconds between two signs of life of a waiting upload."""
_LOCKED = 423


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
        self._changed = threading.Condition()
        self._asking = False
        self._away = False
        """Whether the API did not answer the last time; said once."""

    def get(self, flight: Flight, timeout: float) -> _Lease:
        """Wait for a lease.

        Raises:
            DeadlineError: none in `timeout` seconds, or the upload was aborted.
            ConfigError: there is no such limit.
        """
        turn: Future[_Lease] = Future()
        with self._changed:
            self._waiters.append(turn)
            ask = not self._asking
            self._asking = True
        if ask:
            context = contextvars.copy_context()
            # Its leases outlive the task run of this upload, which would give them back at its end.
            context.run(ConcurrencyContext.__var__.set, None)  # type: ignore[arg-type]
            threading.Thread(
                target=context.run, args=(self._ask,), name=f"ckpt-limit-{self._name}", daemon=True
            ).start()
        try:
            return self._wait(turn, flight, timeout)
        finally:
            with self._changed:
                self._changed.notify_all()

    def done(self, lease: _Lease) -> None:
        """Hand the lease to the next upload that waits, or give it back."""
        if lease.give_back is None:
            return
        if time.monotonic() - lease.since >= HANDOVER_TIME or not self._hand(lease):
            lease.give_back()

    def _wait(self, turn: Future[_Lease], flight: Flight, timeout: float) -> _Lease:
        began = time.monotonic()
        flight.when_aborted(lambda reason: _fail(turn, DeadlineError(reason)))
        while True:
            flight.enter(f"waiting for limit {self._name}")
            waited = time.monotonic() - began
            if wait([turn], min(_LIVE_EVERY, max(0.0, timeout - waited))).done:
                return turn.result()
            if time.monotonic() - began >= timeout and turn.cancel():
                raise DeadlineError(
                    f"no slot of the concurrency limit {self._name!r} came free in {timeout:.0f} s: other uploads hold "
                    f"them (`prefect gcl inspect {self._name}` counts them), or a restarted server forgot who does "
                    f"(`prefect gcl update {self._name} --active-slots 0`, when nothing uploads)"
                )

    def _hand(self, lease: _Lease) -> bool:
        with self._changed:
            while self._waiters:
                with suppress(InvalidStateError):  # gave up waiting
                    self._waiters.popleft().set_result(lease)
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
            if not isinstance(lease, _Lease):
                self._pause(lease)
            elif not self._hand(lease) and lease.give_back is not None:
                lease.give_back()

    def _anybody(self) -> bool:
        with self._changed:
            while self._waiters and self._waiters[0].done():
                self._waiters.popleft()
            self._asking = bool(self._waiters)
            return self._asking

    def _pause(self, seconds: float) -> None:
        """Wait, but not if nobody else does."""
        with self._changed:
            self._changed.wait_for(lambda: all(turn.done() for turn in self._waiters), seconds)

    def _refuse(self, error: Exception) -> None:
        with self._changed:
            turn = self._waiters.popleft() if self._waiters else None
        if turn is not None:
            _fail(turn, error)

    def _acquired(self) -> _Lease | float:
        """A lease; one without a slot if the API is away; seconds until the next try if all are taken."""
        if not api_answers():
            if not self._away:
                logger.warning(
                    "The Prefect API is away: uploads go on without limit %s, bounded by this process only", self._name
                )
            self._away = True
            return _Lease(give_back=None)
        if self._away:
            logger.warning("The Prefect API is back, and limit %s with it", self._name)
            self._away = False
        slot = concurrency(
            self._name, timeout_seconds=_ASK_TIME, max_retries=0, lease_duration=LEASE_TIME, strict=True,
            raise_on_lease_renewal_failure=False,
        )  # fmt: skip
        try:
            slot.__enter__()
        except TimeoutError:
            return 0.0
        except Exception as error:
            if (pause := _taken(error)) is not None:
                return pause
            if not api_answers():
                return 0.0
            raise ConfigError(
                f"the concurrency limit {self._name!r} cannot be used: {error}. Create it: "
                f"`prefect gcl create {self._name} --limit 4`"
            ) from error
        return _Lease(give_back=lambda: _give_back(slot, self._name))


def _taken(error: Exception) -> float | None:
    """Seconds to wait if the server says that all slots are taken; None if it says something else."""
    cause = error.__cause__
    if not isinstance(cause, httpx.HTTPStatusError) or cause.response.status_code != _LOCKED:
        return None
    try:
        return min(_ASK_EVERY, max(_ASK_SELDOM, float(cause.response.headers["Retry-After"])))
    except (KeyError, ValueError):
        return _ASK_EVERY


def _give_back(slot: AbstractContextManager[None], name: str) -> None:
    """In a thread: with the API away it takes a minute, and the server takes the slot back by itself then."""

    def leave() -> None:
        try:
            slot.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - the lease expires at the server
            logger.debug("A slot of limit %s was not given back: %s", name, error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(leave,), name=f"ckpt-limit-{name}", daemon=True)
    _leaving.append(thread)
    thread.start()


def settle(seconds: float) -> None:
    """Wait until the slots that were given back have arrived: what a process takes along is missing for `LEASE_TIME`."""
    deadline = time.monotonic() + seconds
    while _leaving:
        thread = _leaving.popleft()
        thread.join(max(0.0, deadline - time.monotonic()))


_leaving: deque[threading.Thread] = deque(maxlen=64)


def _fail(turn: Future[_Lease], error: Exception) -> None:
    with suppress(InvalidStateError):
        turn.set_exception(error)


_queues: dict[str, _Queue] = {}
_queues_lock = threading.Lock()


def _queue(name: str) -> _Queue:
    with _queues_lock:
        return _queues.setdefault(name, _Queue(name))
