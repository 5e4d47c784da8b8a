"""Leases that a larger priority takes, on a clock that is turned by hand; and between two threads."""

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.lease import BootClock, Holder
from robot_rl.sched.leases import GivenUpError, Lease, LeaseStore
from tests.sched.test_leases import ARM, GPU, NOON_S, stranger

OTHER = DeviceSpec(name="arm2", kind="robot")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON_S)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> LeaseStore:
    return LeaseStore(tmp_path / "leases.db", clock, is_alive=lambda holder: True)


@pytest.fixture
def waiting_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what `ask` asked for, as if its waiter were in line still."""
    monkeypatch.setattr("robot_rl.sched.preemption.forgive", lambda rows, process, device: None)


def ask(
    store: LeaseStore, spec: DeviceSpec = ARM, *, priority: int = 1, slots: int | None = None
) -> Lease | None:
    """Asks once, as a waiter does in every round; holders have a nanosecond of the turned clock."""
    try:
        return store.acquire(
            spec, holder="urgent", slots=slots, priority=priority, wait_s=1e-9, preempt_s=1e-9
        )
    except LeaseError:
        return None


def ask_in_a_minute(store: LeaseStore, *specs: DeviceSpec, slots: int | None = None) -> Lease | None:
    """Asks once, without end of its wait: holders have a minute of the turned clock."""
    tries = iter([False, True])
    how: dict[str, Any] = {"slots": slots, "priority": 1, "wait_s": 60.0, "preempt_s": 60.0}
    try:
        return store.acquire(specs, holder="urgent", given_up=lambda: next(tries), **how)
    except GivenUpError:
        return None


@pytest.mark.usefixtures("waiting_on")
def test_a_holder_that_promised_is_asked_and_the_lease_is_over_at_the_deadline(
    tmp_path: Path, clock: ManualClock
) -> None:
    store = LeaseStore(tmp_path / "leases.db", clock)
    held = store.acquire(ARM, holder="patient", preemptible=True)
    assert store.preemption(held) is None
    assert ask(store) is None
    wanted = store.preemption(held)
    assert wanted is not None
    assert (wanted.by, wanted.left_s) == ("urgent", pytest.approx(0.0, abs=1e-6))
    clock.advance(1e-6)
    taken = store.acquire(ARM, holder="urgent", priority=1)
    assert taken.token == held.token + 1
    with pytest.raises(LeaseError, match="no longer held"):
        store.renew(held)


@pytest.mark.parametrize(("priority", "preemptible"), [(0, True), (1, False)])
def test_equals_and_those_who_did_not_promise_keep_their_lease(
    store: LeaseStore, clock: ManualClock, priority: int, preemptible: bool
) -> None:
    held = store.acquire(ARM, holder="patient", preemptible=preemptible)
    assert ask(store, priority=priority) is None
    clock.advance(1.0)
    assert ask(store, priority=priority) is None
    assert store.active() == [held]


@pytest.mark.usefixtures("waiting_on")
def test_equals_are_asked_when_the_turn_of_a_holder_is_over(store: LeaseStore, clock: ManualClock) -> None:
    held = store.acquire(ARM, holder="first", priority=1, preemptible=True, turn_s=60.0)
    clock.advance(25.0)
    held = store.renew(held)
    clock.advance(25.0)
    held = store.renew(held)
    clock.advance(9.0)
    assert ask(store, priority=1) is None
    assert store.preemption(held) is None
    clock.advance(1.0)
    assert ask(store, priority=0) is None  # a smaller priority waits until it has finished
    assert store.preemption(held) is None
    assert ask(store, priority=1) is None
    wanted = store.preemption(held)
    assert wanted is not None
    assert wanted.by == "urgent"
    clock.advance(1e-6)
    assert store.acquire(ARM, holder="second", priority=1).token == held.token + 1


@pytest.mark.usefixtures("waiting_on")
def test_the_turn_of_a_holder_with_another_clock_ends(tmp_path: Path, clock: ManualClock) -> None:
    # Theirs says 5 s, ours NOON_S: the turn of 60 s counts from when we first saw the lease, renewed or not.
    path, theirs = tmp_path / "leases.db", ManualClock(5.0)
    ours = LeaseStore(path, clock)
    far = LeaseStore(path, theirs, process=stranger(time_space="time:[7]"))
    held = far.acquire(ARM, holder="far", priority=1, preemptible=True, turn_s=60.0)
    for _ in range(3):
        assert ask(ours, priority=1) is None
        assert far.preemption(held) is None
        theirs.advance(20.0)
        clock.advance(20.0)
        held = far.renew(held)
    assert ask(ours, priority=1) is None
    assert far.preemption(held) is not None
    assert [(lease.since_s, lease.expires_s) for lease in ours.active()] == [(NOON_S, NOON_S + 90.0)]
    far.release(held)
    with closing(sqlite3.connect(path)) as rows:
        assert rows.execute("SELECT row FROM seen").fetchall() == []


def test_two_of_the_same_priority_take_turns(tmp_path: Path) -> None:
    store, had, over = LeaseStore(tmp_path / "leases.db"), list[tuple[str, float]](), threading.Event()

    def share(name: str, turn_s: float) -> None:
        while not over.is_set():
            with store.hold(
                ARM, holder=name, wait_s=20.0, preempt_s=10.0, preemptible=True, turn_s=turn_s
            ) as held:
                while held.preemption is None and not over.is_set():
                    time.sleep(0.01)
                had.append((name, BootClock().now_s() - held.lease.since_s))

    threads = [threading.Thread(target=share, args=turn) for turn in (("long", 1.0), ("short", 0.3))]
    for thread in threads:
        thread.start()
    while len(had) < 6:
        time.sleep(0.05)
    over.set()
    for thread in threads:
        thread.join()
    names = [name for name, _ in had[:6]]
    assert names in (["long", "short"] * 3, ["short", "long"] * 3)
    assert all(seconds >= {"long": 1.0, "short": 0.3}[name] for name, seconds in had[:6])


@pytest.mark.usefixtures("waiting_on")
def test_the_fewest_are_asked_the_smallest_priority_first_and_the_newest_of_equals(
    store: LeaseStore, clock: ManualClock
) -> None:
    first = store.acquire(GPU, holder="a", slots=1, priority=1, preemptible=True)
    second = store.acquire(GPU, holder="b", slots=1, priority=0, preemptible=True)
    third = store.acquire(GPU, holder="c", slots=1, priority=0, preemptible=True)
    assert ask(store, GPU, slots=1, priority=5) is None
    assert [store.preemption(lease) is not None for lease in (first, second, third)] == [False, False, True]
    assert ask(store, GPU, slots=2, priority=5) is None
    assert [store.preemption(lease) is not None for lease in (first, second, third)] == [False, True, True]
    clock.advance(1.0)
    assert ask(store, GPU, slots=2, priority=5) is not None
    assert store.active() == [first, *store.active()[1:]]


@pytest.mark.usefixtures("waiting_on")
def test_who_was_asked_once_is_enough_when_the_turn_of_another_ends(
    store: LeaseStore, clock: ManualClock
) -> None:
    how: dict[str, Any] = {"ttl_s": 600.0, "priority": 1, "preemptible": True}
    first = store.acquire(GPU, holder="a", slots=1, turn_s=60.0, **how)
    second = store.acquire(GPU, holder="b", slots=2, turn_s=90.0, **how)
    clock.advance(60.0)
    assert ask_in_a_minute(store, GPU, slots=1) is None
    assert [store.preemption(lease) is not None for lease in (first, second)] == [True, False]
    clock.advance(30.0)  # of equals the newest goes first, but one has been asked
    assert ask_in_a_minute(store, GPU, slots=1) is None
    assert [store.preemption(lease) is not None for lease in (first, second)] == [True, False]
    assert ask_in_a_minute(store, GPU, slots=3) is None
    assert [store.preemption(lease) is not None for lease in (first, second)] == [True, True]


@pytest.mark.usefixtures("waiting_on")
def test_one_of_two_devices_is_asked_for_and_the_other_where_that_is_not_enough(
    store: LeaseStore, clock: ManualClock
) -> None:
    how: dict[str, Any] = {"ttl_s": 600.0, "priority": 1, "preemptible": True}
    first = store.acquire(ARM, holder="a", turn_s=100.0, **how)
    second = store.acquire(OTHER, holder="b", turn_s=60.0, **how)
    asked = list[list[bool]]()
    for _ in range(3):
        clock.advance(40.0)
        assert ask_in_a_minute(store, ARM, OTHER) is None
        asked.append([store.preemption(lease) is not None for lease in (first, second)])
    # After 40, 80 and 120 s: no turn is over, that at the second device, that at the preferred one too.
    assert asked == [[False, False], [False, True], [False, True]]
    store.stop("arm2", "The emergency stop is pressed.", "b")
    assert ask_in_a_minute(store, ARM, OTHER) is None
    assert store.preemption(first) is not None


def test_nobody_is_asked_where_it_would_not_be_enough(store: LeaseStore) -> None:
    gives = store.acquire(GPU, holder="a", slots=1, preemptible=True)
    store.acquire(GPU, holder="b", slots=2)
    assert ask(store, GPU, slots=2) is None
    assert store.preemption(gives) is None


@pytest.mark.usefixtures("waiting_on")
def test_a_request_by_another_clock_counts_from_when_it_is_seen(tmp_path: Path, clock: ManualClock) -> None:
    path, theirs = tmp_path / "leases.db", ManualClock(5.0)
    ours = LeaseStore(path, clock, is_alive=lambda holder: True)
    other: Holder = stranger(time_space="time:[7]")
    far = LeaseStore(path, theirs, process=other, is_alive=lambda holder: True)
    held = ours.acquire(ARM, holder="patient", preemptible=True)
    assert ask(far) is None
    seen = ours.preemption(held)
    assert seen is not None
    assert seen.left_s == 1e-9
    clock.advance(0.5)
    later = ours.preemption(held)
    assert later is not None
    assert later.left_s == pytest.approx(1e-9 - 0.5)


def test_who_waits_no_more_takes_nothing(store: LeaseStore, clock: ManualClock) -> None:
    held = store.acquire(ARM, holder="patient", preemptible=True)
    assert ask(store) is None
    assert store.preemption(held) is None
    clock.advance(1.0)
    assert store.active() == [held]


@pytest.mark.usefixtures("waiting_on")
def test_the_earlier_of_two_deadlines_holds(store: LeaseStore) -> None:
    held = store.acquire(ARM, holder="patient", preemptible=True)
    for priority, within_s in ((1, 2e-9), (2, 1e-9), (3, 5e-9)):
        with pytest.raises(LeaseError):
            store.acquire(ARM, holder=str(priority), priority=priority, wait_s=9e-9, preempt_s=within_s)
    wanted = store.preemption(held)
    assert wanted is not None
    assert (wanted.by, wanted.left_s) == ("2", 1e-9)


def test_a_time_to_give_up_beyond_the_wait_is_refused(store: LeaseStore) -> None:
    with pytest.raises(LeaseError, match="got preempt_s 5, allowed: 0 to wait_s=1"):
        store.acquire(ARM, holder="urgent", wait_s=1.0, preempt_s=5)


def test_a_held_lease_says_who_wants_it_and_is_gone_in_time(tmp_path: Path) -> None:
    store, handed = LeaseStore(tmp_path / "leases.db"), list[float]()

    def urgent() -> None:
        began_s = time.monotonic()
        with store.hold(ARM, holder="urgent", priority=1, wait_s=20.0, preempt_s=10.0):
            handed.append(time.monotonic() - began_s)

    with store.hold(ARM, holder="patient", preemptible=True) as held:
        thread = threading.Thread(target=urgent)
        thread.start()
        deadline_s = time.monotonic() + 10.0
        while held.preemption is None and time.monotonic() < deadline_s:
            held.check()
            time.sleep(0.01)
        assert held.preemption is not None
        assert held.preemption.by == "urgent"
        assert 5.0 < held.preemption.left_s <= 10.0
    thread.join()
    assert handed
    assert handed[0] < 5.0


def test_a_holder_that_does_not_give_up_loses_the_lease(tmp_path: Path) -> None:
    store = LeaseStore(tmp_path / "leases.db")
    with (
        store.hold(ARM, holder="deaf", preemptible=True) as held,
        store.hold(ARM, holder="urgent", priority=1, wait_s=20.0, preempt_s=0.5) as taken,
    ):
        assert taken.token > held.token
        with pytest.raises(LeaseError, match="'urgent' has it now"):
            held.check()
