"""What a lease costs among many devices and jobs, against SQLite's own transactions on the same disk."""

import sqlite3
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from robot_rl.hal.device import DeviceSpec
from robot_rl.sched import preemption
from robot_rl.sched.leases import LeaseStore

JOBS, TURNS = 100, 40


def filled(folder: Path, devices: int) -> tuple[LeaseStore, list[DeviceSpec]]:
    """Returns a store in which every second device is held, and 100 jobs wait for those."""
    store = LeaseStore(folder / f"{devices}.db")
    specs = [DeviceSpec(name=f"arm{number}", kind="robot") for number in range(devices)]
    me, now_s = store._process.to_text(), store._clock.now_s()
    with store._file.transaction() as rows:
        preemption.create(rows)
        for spec in specs[::2]:
            lease = (spec.name, 1, "0", True, "job", me, now_s, now_s + 1e6, 1e6)
            rows.execute("INSERT INTO devices VALUES (?, 1)", (spec.name,))
            rows.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", lease)
        for number in range(JOBS):
            waiter = (specs[2 * (number % (devices // 2))].name, 0, me, now_s + 1e6)
            rows.execute(
                "INSERT INTO waiting (device, priority, process, asked_s) VALUES (?, ?, ?, ?)", waiter
            )
    return store, specs


def bare(path: Path) -> Callable[[], None]:
    """Writes a row in a transaction as safe as that of a lease; returns what removes it."""

    def write(statement: str) -> None:
        rows = sqlite3.connect(path, isolation_level=None)
        rows.execute("PRAGMA synchronous = EXTRA")
        rows.execute("BEGIN IMMEDIATE")
        rows.execute(statement)
        rows.execute("COMMIT")
        rows.close()

    write("INSERT INTO rows VALUES (1)")
    return lambda: write("DELETE FROM rows")


def leased(store: LeaseStore, specs: DeviceSpec | list[DeviceSpec]) -> Callable[[], None]:
    """Takes a lease; returns what gives it back."""
    lease = store.acquire(specs, holder="bench")
    return lambda: store.release(lease)


def medians_ms(*calls: Callable[[], Callable[[], None]]) -> list[float]:
    """Returns the median milliseconds of the processor of each, in turns, without what undoes it."""
    took_s: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, kept in zip(calls, took_s, strict=True):
            began_s = time.process_time()
            undo = call()
            kept.append(time.process_time() - began_s)
            undo()
    return [1e3 * statistics.median(kept) for kept in took_s]


@pytest.mark.benchmark
def test_a_lease_among_a_thousand_devices_costs_a_few_transactions(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with sqlite3.connect(tmp_path / "bare.db") as rows:
        rows.execute("CREATE TABLE rows (number INTEGER)")
    rows.close()
    stores = [filled(tmp_path, devices) for devices in (10, 1000, 10_000)]
    took_ms = medians_ms(
        lambda: bare(tmp_path / "bare.db"),
        *(lambda kept=kept: leased(kept[0], kept[1][-1]) for kept in stores),
        *(lambda kept=kept: leased(*kept) for kept in stores),
    )
    record_property("ms: bare, a device by name of 10, 1,000, 10,000, any of as many", took_ms)
    limit, few, many, most, _, any_many, any_most = took_ms
    assert most < 2.0 * few, "a device by name does not cost more among more devices"
    assert many < 6.0 * limit, took_ms
    assert any_many < 12.0 * limit, took_ms
    assert any_most < 15.0 * any_many, "no worse than linear"
