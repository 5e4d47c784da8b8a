"""Leases and clocks: steps of the wall clock, boots, other hosts; the file of an older version."""

import ctypes
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import DeviceError, LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched import lease as lease_module
from robot_rl.sched.lease import BootClock, Holder, _since_boot, this_process, wall_s
from robot_rl.sched.leases import LeaseStore

ARM = DeviceSpec(name="arm1", kind="robot")
START_S = 5000.0
HOUR_S = 3600.0
SCHEMA_1 = """
CREATE TABLE devices (name TEXT PRIMARY KEY, last_token INTEGER NOT NULL);
CREATE TABLE leases (
    device TEXT NOT NULL, token INTEGER NOT NULL, slot_ids TEXT NOT NULL, exclusive INTEGER NOT NULL,
    holder TEXT NOT NULL, process TEXT NOT NULL, since_s REAL NOT NULL, expires_s REAL NOT NULL,
    PRIMARY KEY (device, token)
);
CREATE TABLE waiting (
    ticket INTEGER PRIMARY KEY AUTOINCREMENT, device TEXT NOT NULL, priority INTEGER NOT NULL,
    process TEXT NOT NULL, asked_s REAL NOT NULL
);
PRAGMA user_version = 1;
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.db"


def rows_of(path: Path, query: str, *values: object) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as rows:
        found = rows.execute(query, values).fetchall()
    rows.close()
    return found


def wait_for(holds: Callable[[], object]) -> None:
    until_s = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def elsewhere(**changes: str) -> Holder:
    """Returns a process of another machine that shares the file."""
    return replace(this_process(), **{"host": "lab2", "boot": "b2", "world": "lab2", **changes})


# Steps of the wall clock


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
def test_a_step_of_the_wall_clock_ends_no_lease(
    path: Path, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LeaseStore(path)
    lease = store.acquire(ARM, holder="first")
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + step_s)
    assert not store.has_expired(lease)
    with pytest.raises(LeaseError, match="Held by 'first'"):
        LeaseStore(path).acquire(ARM, holder="second")
    # And none lasts longer: 30 s from now, by a clock that was not set.
    assert store.renew(lease).expires_s - BootClock().now_s() == pytest.approx(30.0, abs=5.0)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
def test_a_step_of_the_wall_clock_leaves_the_line_as_it_is(
    path: Path, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, got = LeaseStore(path), list[str]()
    first = store.acquire(ARM, holder="first", ttl_s=2 * HOUR_S)

    def wait(name: str, priority: int) -> None:
        lease = LeaseStore(path).acquire(ARM, holder=name, priority=priority, wait_s=20.0)
        got.append(name)
        store.release(lease)

    urgent = threading.Thread(target=wait, args=("urgent", 5))
    urgent.start()
    wait_for(lambda: len(rows_of(path, "SELECT 1 FROM waiting")) == 1)
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + step_s)
    # Somebody who came after the step looks at the line, and would throw the ticket away.
    with pytest.raises(LeaseError, match="1 waiting before you"):
        store.acquire(ARM, holder="pushy", priority=0)
    late = threading.Thread(target=wait, args=("late", 0))
    late.start()
    wait_for(lambda: len(rows_of(path, "SELECT 1 FROM waiting")) == 2)
    store.release(first)
    urgent.join()
    late.join()
    assert got == ["urgent", "late"]


def test_a_ticket_that_was_taken_away_is_put_back_in_its_place(path: Path) -> None:
    store = LeaseStore(path)
    lease = store.acquire(ARM, holder="first")
    waiter = threading.Thread(target=lambda: store.acquire(ARM, holder="second", priority=5, wait_s=20.0))
    waiter.start()
    ask = "SELECT ticket, device, priority FROM waiting"
    wait_for(lambda: rows_of(path, ask) == [(1, "arm1", 5)])
    rows_of(path, "DELETE FROM waiting")  # as somebody does who saw it silent for five seconds
    wait_for(lambda: rows_of(path, ask) == [(1, "arm1", 5)])
    store.release(lease)
    waiter.join()
    assert [held.holder for held in store.active()] == ["second"]
    assert rows_of(path, ask) == []


def test_times_are_shown_as_the_wall_clock_has_them() -> None:
    assert wall_s(BootClock().now_s() - 7.0) == pytest.approx(time.time() - 7.0, abs=0.5)


# Boots and hosts


def test_a_lease_of_before_the_machine_was_started_again_is_over(path: Path) -> None:
    # Token and priority queue outlive the boot; who held and who waited does not.
    before = replace(this_process(), boot="yesterday", world="yesterday")
    LeaseStore(path, ManualClock(9 * HOUR_S), process=before).acquire(ARM, holder="before", ttl_s=HOUR_S)
    rows_of(
        path,
        "INSERT INTO waiting (device, priority, process, asked_s) VALUES ('arm1', 9, ?, ?)",
        before.to_text(),
        9 * HOUR_S,
    )
    store = LeaseStore(path, ManualClock(60.0))
    assert store.active() == []
    assert store.acquire(ARM, holder="after").token == 2


def test_a_holder_with_another_clock_is_believed_for_its_whole_life_after_it_was_last_seen(
    path: Path,
) -> None:
    # Its clock says 9 h, ours START_S: they cannot be compared, so what counts is how long we saw no change.
    theirs_clock, ours_clock = ManualClock(9 * HOUR_S), ManualClock(START_S)
    theirs = LeaseStore(path, theirs_clock, process=elsewhere())
    ours = LeaseStore(path, ours_clock)
    lease = theirs.acquire(ARM, holder="theirs", ttl_s=10.0)
    (seen,) = ours.active()
    assert (seen.since_s, seen.expires_s) == (START_S, START_S + 10.0)
    ours_clock.advance(9.0)
    theirs_clock.advance(9.0)
    theirs.renew(lease)
    assert [held.expires_s for held in ours.active()] == [START_S + 19.0]
    ours_clock.advance(9.9)
    with pytest.raises(LeaseError, match="Held by 'theirs'"):
        ours.acquire(ARM, holder="ours")
    ours_clock.advance(0.2)
    assert ours.active() == []
    assert ours.acquire(ARM, holder="ours").token == 2
    assert rows_of(path, "SELECT * FROM seen") == []
    with pytest.raises(LeaseError, match="token 1 is no longer held"):
        theirs.renew(lease)


def test_two_hosts_that_look_do_not_keep_a_dead_holder_alive(path: Path) -> None:
    clocks = [ManualClock(9 * HOUR_S), ManualClock(START_S), ManualClock(70.0)]
    who = [elsewhere(), None, elsewhere(host="lab3", boot="b3", world="lab3")]
    holder, *watchers = (LeaseStore(path, clock, process=it) for clock, it in zip(clocks, who, strict=True))
    holder.acquire(ARM, holder="dead", ttl_s=10.0)
    for _ in range(10):  # each second, both look
        assert all(len(watcher.active()) == 1 for watcher in watchers)
        for clock in clocks:
            clock.advance(1.0)
    assert all(watcher.active() == [] for watcher in watchers)


def test_a_waiter_with_another_clock_is_believed_for_five_seconds_of_silence(path: Path) -> None:
    clock = ManualClock(START_S)
    store = LeaseStore(path, clock)
    rows_of(
        path,
        "INSERT INTO waiting (device, priority, process, asked_s) VALUES ('arm1', 9, ?, 1.0)",
        elsewhere().to_text(),
    )
    for _ in range(2):
        with pytest.raises(LeaseError, match="1 waiting before you"):
            store.acquire(ARM, holder="ours")
        clock.advance(3.0)
    rows_of(path, "UPDATE waiting SET asked_s = 2.0")  # it asks again
    with pytest.raises(LeaseError, match="1 waiting before you"):
        store.acquire(ARM, holder="ours")
    clock.advance(5.1)
    assert store.acquire(ARM, holder="ours").token == 1


def test_processes_share_a_clock_within_one_boot_and_time_namespace() -> None:
    me = this_process()
    assert me.shares_clock(me)
    assert not me.shares_clock(replace(me, boot="b2"))
    assert not me.shares_clock(replace(me, time_space="time:[2]"))
    unknown = replace(me, boot="")
    assert not unknown.shares_clock(unknown)
    assert replace(me, boot="b2", host="lab2").is_alive(seen_from=me) is not False


def test_the_clock_counts_sleep_on_linux_and_on_macos() -> None:
    linux = SimpleNamespace(CLOCK_BOOTTIME=7, CLOCK_MONOTONIC_RAW=4, CLOCK_MONOTONIC=1)
    macos = SimpleNamespace(CLOCK_MONOTONIC_RAW=4, CLOCK_MONOTONIC=6)
    assert (_since_boot(linux), _since_boot(macos)) == (7, 4)


def test_a_boot_of_macos_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: bytes, out: ctypes.Array[ctypes.c_char], *_: object) -> int:
        out.value = b"4F1C0A53"
        return 0 if name == b"kern.bootsessionuuid" else -1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=read))
    assert lease_module._macos_boot() == "4F1C0A53"
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    assert lease_module._macos_boot() == ""


# Tokens that the device remembers


def test_tokens_go_on_from_what_the_device_remembers(path: Path) -> None:
    remembered = iter((41, 0, 7, 100))
    spec = DeviceSpec(name="arm1", kind="robot", last_token=lambda: next(remembered))
    store = LeaseStore(path)
    tokens: list[int] = []
    for _ in range(4):
        lease = store.acquire(spec, holder="train")
        tokens.append(lease.token)
        store.release(lease)
    assert tokens == [42, 43, 44, 101]
    assert "last_token" not in spec.to_json()


def test_a_device_whose_memory_cannot_be_read_is_not_leased(path: Path) -> None:
    def unreadable() -> int:
        raise DeviceError("claim: no rights")

    store = LeaseStore(path)
    with pytest.raises(DeviceError, match="no rights"):
        store.acquire(DeviceSpec(name="arm1", kind="robot", last_token=unreadable), holder="train")
    assert store.active() == []
    assert store.acquire(ARM, holder="train").token == 1


# Files of version 1


def test_a_file_of_version_1_is_taken_over_with_its_tokens(path: Path) -> None:
    dead = replace(this_process(), started="1")
    with sqlite3.connect(path) as rows:
        rows.executescript(SCHEMA_1)
        rows.execute("INSERT INTO devices VALUES ('arm1', 41)")
        for token, process, left_s in ((40, this_process(), -1.0), (41, dead, HOUR_S)):
            values = ("arm1", token, "0", 1, "train", process.to_text(), 1.0, time.time() + left_s)
            rows.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    rows.close()
    store = LeaseStore(path)
    assert store.active() == []
    assert store.acquire(ARM, holder="new").token == 42


def test_a_file_of_version_1_is_left_to_who_still_uses_it(path: Path) -> None:
    with sqlite3.connect(path) as rows:
        rows.executescript(SCHEMA_1)
        values = ("arm1", 1, "0", 1, "train old", this_process().to_text(), 1.0, time.time() + 30.0)
        rows.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    rows.close()
    with pytest.raises(LeaseError, match=r"'train old' \(pid .*\) has arm1 under an older version.*Wait"):
        LeaseStore(path)
    assert rows_of(path, "SELECT device, token FROM leases") == [("arm1", 1)]
