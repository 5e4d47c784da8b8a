"""Leases on a clock that is turned by hand: who gets what, for how long, and under which token."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import LeaseError
from robot_rl.hal.device import DeviceSpec, Fence
from robot_rl.sched.lease import Holder, clock_time, this_process
from robot_rl.sched.leases import GivenUpError, Lease, LeaseStore, default_path

ARM = DeviceSpec(name="arm1", kind="robot")
GPU = DeviceSpec(name="gpu0", kind="gpu", slots=3)
NOON_S = 1_800_000_000.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON_S)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> LeaseStore:
    return LeaseStore(tmp_path / "leases.db", clock)


def stranger(**changes: object) -> Holder:
    """Returns a process of another container of this machine: same clock, other process numbers."""
    given = {"pid": 4242, "host": "lab1", "command": "robot-rl train", "started": "77", "world": "lab1"}
    return replace(this_process(), **{**given, **changes})


def test_a_lease_says_what_it_is(store: LeaseStore) -> None:
    lease = store.acquire(ARM, holder="train", ttl_s=20.0)
    assert (lease.device, lease.token, lease.slot_ids, lease.slots, lease.exclusive) == (
        "arm1",
        1,
        (0,),
        1,
        True,
    )
    assert (lease.since_s, lease.expires_s) == (NOON_S, NOON_S + 20.0)
    assert lease.process == this_process()
    assert store.active() == [lease]


def test_tokens_grow_over_release_and_expiry_and_never_repeat(store: LeaseStore, clock: ManualClock) -> None:
    # Released, expired, released: 1, 2, 3. Each device counts for itself.
    tokens: list[int] = []
    for ends_by_itself in (False, True, False):
        lease = store.acquire(ARM, holder="train", ttl_s=10.0)
        tokens.append(lease.token)
        if ends_by_itself:
            clock.advance(10.0)
        else:
            store.release(lease)
    assert tokens == [1, 2, 3]
    assert store.acquire(GPU, holder="train").token == 1


def test_a_lease_ends_at_the_second_it_expires(store: LeaseStore, clock: ManualClock) -> None:
    store.acquire(ARM, holder="first", ttl_s=10.0)
    clock.advance(9.9)
    with pytest.raises(LeaseError):
        store.acquire(ARM, holder="second")
    clock.advance(0.1)
    assert store.active() == []
    assert store.acquire(ARM, holder="second").token == 2


def test_a_renewal_counts_from_now(store: LeaseStore, clock: ManualClock) -> None:
    # Taken at 0 for 10 s, renewed at 6: until 16; renewed then for 3 s: until 9.
    lease = store.acquire(ARM, holder="train", ttl_s=10.0)
    clock.advance(6.0)
    assert store.renew(lease).expires_s == NOON_S + 16.0
    assert store.renew(lease, ttl_s=3.0).expires_s == NOON_S + 9.0
    assert store.active()[0].expires_s == NOON_S + 9.0


def test_an_expired_lease_that_nobody_overtook_may_be_renewed(store: LeaseStore, clock: ManualClock) -> None:
    lease = store.acquire(ARM, holder="train", ttl_s=10.0)
    clock.advance(100.0)
    assert store.has_expired(lease)
    store.renew(lease)
    assert [held.token for held in store.active()] == [1]


def test_an_overtaken_lease_cannot_be_renewed(store: LeaseStore, clock: ManualClock) -> None:
    old = store.acquire(ARM, holder="slept", ttl_s=10.0)
    clock.advance(11.0)
    new = store.acquire(ARM, holder="awake")
    with pytest.raises(
        LeaseError, match=f"token 1 is no longer held.*expired at {clock_time(NOON_S + 10.0)}"
    ):
        store.renew(old)
    store.release(old)  # harmless: it is not the newer lease that ends
    assert store.active()[0].token == new.token
    fence = Fence("arm1")
    fence.admit(new)
    with pytest.raises(LeaseError, match="token 1 refused, token 2"):
        fence.admit(old)


def test_a_refusal_says_who_since_when_until_when_and_what_to_do(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "leases.db"
    theirs = LeaseStore(path, clock, process=stranger(command="robot-rl train recipe=pick_cube"))
    theirs.acquire(ARM, holder="train pick_cube seed 3", ttl_s=30.0)
    clock.advance(5.0)
    with pytest.raises(LeaseError) as caught:
        LeaseStore(path, clock).acquire(ARM, holder="deploy")
    assert str(caught.value) == (
        "lease of arm1: wanted all alone, 0 of 1 slots are free. Held by 'train pick_cube seed 3' "
        "(pid 4242 on lab1, `robot-rl train recipe=pick_cube`) "
        f"since {clock_time(NOON_S)}, until {clock_time(NOON_S + 30.0)} unless renewed. "
        "Wait (lease_wait_s=600), end that process, or take another device: `robot-rl devices` shows all."
    )


# Slots


def test_slots_are_shared_until_none_is_left(store: LeaseStore) -> None:
    # Three slots: 2 + 1 fill them; the slot that comes back is the one that is given next.
    pair = store.acquire(GPU, holder="a", slots=2)
    single = store.acquire(GPU, holder="b", slots=1)
    assert (pair.slot_ids, single.slot_ids) == ((0, 1), (2,))
    with pytest.raises(LeaseError, match=r"wanted 1 slot, 0 of 3 slots are free. Held by 'a' .*; 'b' "):
        store.acquire(GPU, holder="c", slots=1)
    store.release(pair)
    with pytest.raises(LeaseError, match="wanted 3 slots, 2 of 3 slots are free"):
        store.acquire(GPU, holder="c", slots=3)
    assert store.acquire(GPU, holder="c", slots=1).slot_ids == (0,)


def test_nobody_joins_an_exclusive_lease_whatever_it_believes_of_the_device(store: LeaseStore) -> None:
    store.acquire(ARM, holder="alone")
    bigger = DeviceSpec(name="arm1", kind="robot", slots=4)
    with pytest.raises(LeaseError, match=r"wanted 1 slot, 3 of 4 slots are free. Held by 'alone'"):
        store.acquire(bigger, holder="company", slots=1)


def test_an_exclusive_lease_waits_for_every_slot(store: LeaseStore) -> None:
    store.acquire(GPU, holder="a", slots=1)
    with pytest.raises(LeaseError, match="wanted all alone, 2 of 3 slots are free"):
        store.acquire(GPU, holder="b")


@pytest.mark.parametrize("slots", [0, 4])
def test_an_impossible_number_of_slots_is_named(store: LeaseStore, slots: int) -> None:
    with pytest.raises(LeaseError, match=f"gpu0: got slots {slots}, allowed 1 to 3, or None for all"):
        store.acquire(GPU, holder="a", slots=slots)


def test_a_life_must_be_positive(store: LeaseStore) -> None:
    with pytest.raises(LeaseError, match=r"arm1: got ttl_s 0.0, allowed: above 0"):
        store.acquire(ARM, holder="a", ttl_s=0.0)


# Holders that die


@pytest.mark.parametrize(("answer", "is_freed"), [(True, False), (None, False), (False, True)])
def test_only_a_holder_known_to_be_dead_loses_its_lease_at_once(
    tmp_path: Path, clock: ManualClock, answer: bool | None, is_freed: bool
) -> None:
    path = tmp_path / "leases.db"
    LeaseStore(path, clock, process=stranger()).acquire(ARM, holder="theirs")
    ours = LeaseStore(path, clock, is_alive=lambda holder: answer)
    assert (ours.active() == []) is is_freed
    if is_freed:
        assert ours.acquire(ARM, holder="ours").token == 2
    else:
        with pytest.raises(LeaseError, match="Held by 'theirs'"):
            ours.acquire(ARM, holder="ours")


# The queue


def in_line(store: LeaseStore, results: list[str], name: str, priority: int) -> threading.Thread:
    def wait() -> None:
        lease = store.acquire(ARM, holder=name, priority=priority, wait_s=10.0)
        results.append(name)
        store.release(lease)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def wait_for_line(path: Path, length: int) -> None:
    found = 0
    for _ in range(200):
        with sqlite3.connect(path) as rows:
            found = rows.execute("SELECT count(*) FROM waiting").fetchone()[0]
        rows.close()
        if found == length:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{found} in line, expected {length}")


def test_the_line_goes_by_priority_then_by_arrival(store: LeaseStore) -> None:
    first = store.acquire(ARM, holder="first")
    results: list[str] = []
    threads: list[threading.Thread] = []
    for count, (name, priority) in enumerate([("early", 0), ("late", 0), ("urgent", 5)], start=1):
        threads.append(in_line(store, results, name, priority))
        wait_for_line(store.path, count)
    with pytest.raises(LeaseError, match="0 of 1 slots are free, 3 waiting before you"):
        store.acquire(ARM, holder="pushy")
    store.release(first)
    for thread in threads:
        thread.join()
    assert results == ["urgent", "early", "late"]


def test_several_devices_are_taken_at_one_moment_or_none(store: LeaseStore) -> None:
    arm, cores = store.acquire_all([(ARM, None), (GPU, 2)], holder="first")
    assert [(lease.device, lease.slot_ids, lease.exclusive) for lease in (arm, cores)] == [
        ("arm1", (0,), True),
        ("gpu0", (0, 1), False),
    ]
    store.release(arm)
    with pytest.raises(LeaseError, match="lease of gpu0: wanted 2 slots, 1 of 3 slots are free"):
        store.acquire_all([(ARM, None), (GPU, 2)], holder="second")
    assert [lease.device for lease in store.active()] == ["gpu0"]
    assert store.acquire(ARM, holder="third").token == arm.token + 1  # no token was spent for nothing
    with pytest.raises(LeaseError) as both:
        store.acquire_all([(ARM, None), (GPU, 2)], holder="second")
    assert [line.partition(": ")[0] for line in str(both.value).splitlines()] == [
        "lease of arm1",
        "lease of gpu0",
    ]
    with pytest.raises(LeaseError, match="got slots 4, allowed 1 to 3"):
        store.acquire_all([(ARM, 1), (GPU, 4)], holder="greedy")


def all_in_line(store: LeaseStore, results: list[str], name: str, *specs: DeviceSpec) -> threading.Thread:
    def wait() -> None:
        with store.hold_all([(spec, None) for spec in specs], holder=name, wait_s=10.0) as held:
            results.append(name)
            assert [one.device for one in held] == [spec.name for spec in specs]

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_who_wants_the_same_devices_in_another_order_is_served_one_after_the_other(tmp_path: Path) -> None:
    store, results = LeaseStore(tmp_path / "leases.db"), list[str]()
    arm = store.acquire(ARM, holder="first")
    threads = [all_in_line(store, results, "arm, then gpu", ARM, GPU)]
    wait_for_line(store.path, 1)
    # It waits for the arm alone: who has that may need some of the GPU before it lets it go.
    store.release(store.acquire(GPU, holder="first", slots=1))
    threads.append(all_in_line(store, results, "gpu, then arm", GPU, ARM))
    wait_for_line(store.path, 2)
    assert [lease.device for lease in store.active()] == ["arm1"]  # who waits holds nothing
    store.release(arm)
    for thread in threads:
        thread.join()
    assert results == ["arm, then gpu", "gpu, then arm"]
    assert store.active() == []


def test_who_waits_in_vain_is_told_and_leaves_the_line(store: LeaseStore) -> None:
    store.acquire(ARM, holder="first")
    with pytest.raises(LeaseError, match="Held by 'first'"):
        store.acquire(ARM, holder="second", wait_s=0.05)
    wait_for_line(store.path, 0)


def test_who_gives_up_waiting_leaves_the_line_and_asks_nobody(store: LeaseStore) -> None:
    held, has_given_up = store.acquire(ARM, holder="first", preemptible=True), threading.Event()

    def wait() -> None:
        how: dict[str, Any] = {
            "priority": 1,
            "wait_s": 600.0,
            "preempt_s": 600.0,
            "given_up": has_given_up.is_set,
        }
        with (
            pytest.raises(GivenUpError, match="lease of arm1, gpu0: the caller gave up waiting"),
            store.hold([ARM, GPU], holder="second", slots=1, **how),
        ):
            raise AssertionError("nobody gave the arm up")

    store.acquire(GPU, holder="first")
    with ThreadPoolExecutor(1) as waiter:
        done = waiter.submit(wait)
        wait_for_line(store.path, 2)
        assert store.preemption(held) is not None
        has_given_up.set()
        done.result()
    wait_for_line(store.path, 0)
    assert store.preemption(held) is None


@pytest.mark.parametrize(("is_alive", "silence_s"), [(False, 0.0), (None, 5.0), (True, 60.0)])
def test_the_dead_and_the_silent_do_not_block_the_line(
    tmp_path: Path, clock: ManualClock, is_alive: bool | None, silence_s: float
) -> None:
    path = tmp_path / "leases.db"
    store = LeaseStore(path, clock, is_alive=lambda holder: is_alive if holder.pid == 4242 else True)
    with sqlite3.connect(path) as rows:
        text = stranger().to_text()
        rows.execute(
            "INSERT INTO waiting (device, priority, process, asked_s) VALUES ('arm1', 9, ?, ?)",
            (text, NOON_S),
        )
    rows.close()
    if silence_s:  # it may live elsewhere, or hang: believed for a while
        clock.advance(silence_s - 0.1)
        with pytest.raises(LeaseError, match="1 waiting before you"):
            store.acquire(ARM, holder="ours")
        clock.advance(0.2)
    assert store.acquire(ARM, holder="ours").token == 1


# Held leases


def test_a_held_lease_is_renewed_and_given_back(tmp_path: Path) -> None:
    store = LeaseStore(tmp_path / "leases.db")  # by the real clock: a renewal every 0.1 s
    with store.hold(ARM, holder="train", ttl_s=0.3) as held:
        until_s = held.lease.expires_s
        threading.Event().wait(0.5)
        held.check()
        assert held.lease.expires_s > until_s + 0.2
        assert (held.device, held.token, held.slot_ids) == ("arm1", 1, (0,))
        assert [lease.holder for lease in store.active()] == ["train"]
    assert store.active() == []


def test_a_lost_lease_is_told_at_the_next_check(tmp_path: Path) -> None:
    store = LeaseStore(tmp_path / "leases.db")
    with store.hold(ARM, holder="train", ttl_s=0.15) as held:
        held.check()
        store.release(held.lease)  # as if it had expired and somebody had freed it
        threading.Event().wait(0.2)
        with pytest.raises(LeaseError, match="token 1 is no longer held"):
            held.check()


def test_after_a_long_sleep_the_check_itself_asks(store: LeaseStore, clock: ManualClock) -> None:
    with store.hold(ARM, holder="train", ttl_s=3600.0) as held:
        clock.advance(7200.0)  # the renewing thread slept as well
        held.check()
        assert held.lease.expires_s == NOON_S + 7200.0 + 3600.0
        clock.advance(7200.0)
        store.acquire(ARM, holder="other")
        with pytest.raises(LeaseError, match="token 1 is no longer held"):
            held.check()


def test_an_error_inside_still_gives_the_slots_back(store: LeaseStore) -> None:
    with pytest.raises(RuntimeError, match="crash"), store.hold(ARM, holder="train"):
        raise RuntimeError("crash")
    assert store.active() == []


# The file


@pytest.mark.parametrize(
    ("own", "state", "expected"),
    [
        ("/srv/lab", "/xdg", "/srv/lab/leases.db"),
        (None, "/xdg", "/xdg/robot_rl/leases.db"),
        (None, None, "/home/ada/.local/state/robot_rl/leases.db"),
    ],
)
def test_the_file_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, own: str | None, state: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for name, value in (("ROBOT_RL_STATE", own), ("XDG_STATE_HOME", state)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert default_path() == Path(expected)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "leases.db"
    path.write_text("this is not a database, " * 100)
    with pytest.raises(
        LeaseError, match=r"leases.db: the lease file cannot be used: .*Check the folder's rights"
    ):
        LeaseStore(path)


def test_a_file_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "leases.db"
    LeaseStore(path)
    with sqlite3.connect(path) as rows:
        rows.execute("PRAGMA user_version = 9")
    rows.close()
    with pytest.raises(LeaseError, match="has version 9, this program writes 2"):
        LeaseStore(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LeaseError, match="set ROBOT_RL_STATE to a folder on a local disk"):
        LeaseStore(tmp_path / "file" / "leases.db")


def test_a_lease_is_what_a_device_wants(store: LeaseStore) -> None:
    lease: Lease = store.acquire(GPU, holder="train", slots=2)
    Fence("gpu0", slots=3).admit(lease)


def test_a_lease_file_may_be_made_by_several_at_once(tmp_path: Path) -> None:
    # A write-ahead log failed here in one of twenty: the switch to it does not wait for another's.
    def make(path: Path, start: threading.Barrier) -> None:
        start.wait()
        LeaseStore(path)

    with ThreadPoolExecutor(3) as makers:
        for number in range(100):
            start = threading.Barrier(3)
            made = [makers.submit(make, tmp_path / str(number) / "leases.db", start) for _ in range(3)]
            for one in made:
                one.result()
