"""Which devices meet a need, in which order, and what is said where none does; a lease of any of several."""

import threading
import time
from pathlib import Path

import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import DeviceError, LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.leases import LeaseStore
from robot_rl.sched.needs import Need, choose
from tests.sched.test_leases import stranger

WEST = DeviceSpec(name="west", kind="robot", real=True, labels={"robot": "panda", "cell": "west"})
EAST = DeviceSpec(
    name="east", kind="robot", real=True, labels={"robot": "panda", "cell": "east", "hand": "wsg"}
)
TWIN = DeviceSpec(name="twin", kind="robot", labels={"robot": "panda"})
GPU = DeviceSpec(name="gpu0", kind="gpu", slots=2, node="lab2")
ALL = [WEST, EAST, TWIN, GPU]


@pytest.fixture
def store(tmp_path: Path) -> LeaseStore:
    return LeaseStore(tmp_path / "leases.db", ManualClock(100.0))


@pytest.mark.parametrize(
    ("need", "found"),
    [
        (Need(kind="robot", labels={"robot": "panda"}), [TWIN, WEST, EAST]),  # the least able first
        (Need(kind="robot", real=True), [WEST, EAST]),
        (Need(kind="robot", labels={"hand": "wsg"}), [EAST]),
        (Need(kind="gpu", slots=2, node="lab2"), [GPU]),
    ],
)
def test_devices_that_meet_a_need(need: Need, found: list[DeviceSpec]) -> None:
    assert choose(need, ALL) == found


def test_free_ones_come_first(store: LeaseStore) -> None:
    store.acquire(TWIN, holder="train")
    need = Need(kind="robot", labels={"robot": "panda"})
    assert choose(need, ALL, store.active()) == [WEST, EAST, TWIN]


@pytest.mark.parametrize(
    ("need", "message"),
    [
        (
            Need(kind="robot", labels={"robot": "ur5e"}),
            "Nearest is west, held by 'train': its robot is panda, not",
        ),
        (Need(kind="robot", real=False, labels={"hand": "wsg"}), "Nearest is east.*: it is real"),
        (
            Need(kind="robot", real=False, labels={"hand": "x", "cell": "west"}),
            "nearest is twin|it has no hand",
        ),
        (Need(kind="gpu", slots=4), "it has 2 slots, not 4"),
        (Need(kind="gpu", node="lab1"), "it is on lab2, not lab1"),
        (Need(kind="gpu", caps=frozenset({"render"})), "it cannot render"),
        (Need(kind="world"), "no device of kind 'world' is known"),
    ],
)
def test_a_need_that_nobody_meets_says_what_the_nearest_lacks(
    store: LeaseStore, need: Need, message: str
) -> None:
    store.acquire(WEST, holder="train")
    with pytest.raises(DeviceError, match=message):
        choose(need, ALL, store.active())


def test_the_first_of_several_that_is_free_is_leased(store: LeaseStore) -> None:
    first = store.acquire([WEST, EAST], holder="a")
    second = store.acquire([WEST, EAST], holder="b")
    assert (first.device, second.device) == ("west", "east")
    with pytest.raises(LeaseError, match=r"lease of west(.|\n)*lease of east"):
        store.acquire([WEST, EAST], holder="c")
    store.release(second)
    assert store.acquire([WEST, EAST], holder="c", wait_s=1.0).device == "east"
    assert len(store.active()) == 2


def test_the_preferred_of_several_is_free_when_its_holder_is_dead_or_late(tmp_path: Path) -> None:
    clock, dead = ManualClock(100.0), set[str]()
    store = LeaseStore(tmp_path / "leases.db", clock, is_alive=lambda holder: holder.command not in dead)
    gone = LeaseStore(
        tmp_path / "leases.db", clock, process=stranger(command="gone"), is_alive=lambda _: True
    )
    gone.acquire(WEST, holder="killed", ttl_s=1000.0)
    assert store.acquire([WEST, EAST], holder="a").device == "east"
    dead.add("gone")
    killed = store.acquire([WEST, TWIN], holder="b", ttl_s=5.0)
    assert killed.device == "west"
    clock.advance(6.0)
    assert store.acquire([WEST, TWIN], holder="c").device == "west"


def test_the_preferred_of_several_is_leased_while_it_has_enough_slots(store: LeaseStore) -> None:
    wide, empty = (DeviceSpec(name=name, kind="gpu", slots=4) for name in ("wide", "empty"))
    store.acquire(wide, holder="a", slots=1)
    assert store.acquire([wide, empty], holder="b", slots=3).device == "wide"
    assert store.acquire([wide, empty], holder="c", slots=1).device == "empty"


def test_who_comes_late_takes_no_device_from_who_waits(store: LeaseStore) -> None:
    held, got = store.acquire(WEST, holder="a"), list[str]()

    def wait() -> None:
        with store.hold([WEST], holder="waits", wait_s=20.0) as lease:
            got.append("waits")
            lease.check()

    thread = threading.Thread(target=wait)
    thread.start()
    while not store.waiting():
        time.sleep(0.01)
    store.release(held)
    with store.hold([WEST], holder="late", wait_s=20.0):
        got.append("late")
    thread.join()
    assert got == ["waits", "late"]


def test_a_stopped_one_of_several_is_passed_over(store: LeaseStore) -> None:
    store.stop("west", "The supervisor was gone.", "deploy")
    assert store.acquire([WEST, EAST], holder="a").device == "east"
    with pytest.raises(LeaseError, match="it stopped at"):
        store.acquire([WEST], holder="b")


def test_the_first_of_several_whose_holder_is_willing_is_preempted(
    store: LeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "robot_rl.sched.preemption.forgive", lambda rows, process, device: None
    )  # it waits on
    west, east = (store.acquire(spec, holder="slow", preemptible=True) for spec in (WEST, EAST))
    twin = store.acquire(TWIN, holder="deaf")
    with pytest.raises(LeaseError):
        store.acquire([TWIN, EAST, WEST], holder="fast", priority=1, wait_s=1e-9, preempt_s=1e-9)
    assert store.preemption(twin) is None
    assert store.preemption(east) is not None
    assert store.preemption(west) is None


def test_nobody_is_preempted_where_one_of_several_is_free(store: LeaseStore) -> None:
    west = store.acquire(WEST, holder="slow", preemptible=True)
    found = store.acquire([WEST, EAST], holder="fast", priority=1, wait_s=1.0, preempt_s=1.0)
    assert found.device == "east"
    assert store.preemption(west) is None
