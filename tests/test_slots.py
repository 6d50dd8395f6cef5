"""Slots and places in line, without a run around them."""

import threading

import pytest
from helpers import DEADLINE
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CommittedError, DeadlineError
from ckpt.inflight import Flight, Locations, overlap
from ckpt.slots import DroppedError, UploadSlots


def enter(slots, seq, *, droppable=True, drop=False, timeout=0.0, interrupted=lambda: False):
    slots.enter(seq, droppable=droppable, drop=drop, timeout=timeout, interrupted=interrupted)


def test_slots_are_granted_in_the_order_of_the_reports_whatever_order_the_threads_start_in():
    """One slot, threads started backwards."""
    slots, got, hold = UploadSlots(1, 8), [], threading.Event()
    for seq in range(5):
        enter(slots, seq)

    def work(seq):
        with slots.slot(seq, timeout=DEADLINE):
            got.append(seq)
            assert hold.wait(DEADLINE)

    threads = [threading.Thread(target=work, args=(seq,)) for seq in reversed(range(5))]
    for thread in threads:
        thread.start()
    hold.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert got == [0, 1, 2, 3, 4]


def test_a_slot_comes_back_when_its_block_raises():
    """As every upload may."""
    slots = UploadSlots(1, 1)
    for seq in range(3):
        enter(slots, seq)
        with pytest.raises(KeyError), slots.slot(seq, timeout=DEADLINE):
            raise KeyError
        slots.leave(seq)
    assert (slots.pending, slots.waiting) == (0, 0)


def test_a_full_line_blocks_until_its_deadline_or_until_it_is_interrupted():
    """And takes no place then."""
    slots = UploadSlots(1, 1)
    enter(slots, 0)
    with pytest.raises(DeadlineError, match="max_pending=1"):
        enter(slots, 1, timeout=0.01)
    with pytest.raises(DeadlineError, match="another driver"):
        enter(slots, 1, timeout=DEADLINE, interrupted=lambda: True)
    assert slots.pending == 1


def test_a_dropped_report_is_told_so_when_it_asks_for_its_slot():
    """The oldest droppable one that waits; the newcomer takes its place."""
    slots = UploadSlots(1, 2)
    enter(slots, 0, droppable=False)
    enter(slots, 1)
    enter(slots, 2, drop=True)
    with pytest.raises(DroppedError, match="newer"), slots.slot(1, timeout=DEADLINE):
        pass
    with slots.slot(0, timeout=DEADLINE), pytest.raises(DeadlineError), slots.slot(2, timeout=0.01):
        pass


def test_nothing_droppable_waits_so_drop_blocks():
    """Of reports whose callers wait none is dropped."""
    slots = UploadSlots(1, 1)
    enter(slots, 0, droppable=False)
    with pytest.raises(DeadlineError):
        enter(slots, 1, drop=True, timeout=0.01)


def test_one_who_gives_up_waiting_lets_the_next_one_pass():
    """The head of the line may be cancelled before it asks."""
    slots = UploadSlots(1, 4)
    for seq in range(3):
        enter(slots, seq)
    slots.leave(0)
    with pytest.raises(DeadlineError), slots.slot(2, timeout=0.01):
        pass
    with slots.slot(1, timeout=DEADLINE):
        pass


def test_an_abort_reaches_waits_that_begin_after_it():
    """A custom function that is called a moment later ends its wait at once."""
    flight, told = Flight(seq=0), []
    flight.when_aborted(told.append)
    flight.abort("stopping")
    flight.when_aborted(told.append)
    assert told == ["stopping", "stopping"]
    with pytest.raises(DeadlineError, match="stopping"):
        flight.progress(1)


paths = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))


@given(st.lists(paths, max_size=6), paths)
def test_a_claim_is_refused_exactly_if_it_overlaps_one_that_was_granted(before, new):
    """Same as comparing it with each of them, which would cost more with every report."""
    locations, granted = Locations(), []
    for path in [*before, new]:
        if any(overlap(path, other) for other in granted):
            with pytest.raises(CommittedError):
                locations.claim(path)
        else:
            locations.claim(path)
            granted.append(path)
