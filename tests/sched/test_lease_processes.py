"""Leases between real processes: two cannot hold one device, and a killed one loses it."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from robot_rl.core.errors import LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.lease import Holder, this_process
from robot_rl.sched.leases import LeaseStore

ARM = DeviceSpec(name="arm1", kind="robot")
ONE_OF_MANY = 3

HOLD = """
import sys
from pathlib import Path
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.leases import LeaseStore
store = LeaseStore(Path(sys.argv[1]))
lease = store.acquire(DeviceSpec(name="arm1", kind="robot"), holder="child", ttl_s=float(sys.argv[2]))
print(lease.token, flush=True)
sys.stdin.read()
"""

RACE = """
import sys
from pathlib import Path
from robot_rl.core.errors import LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.leases import LeaseStore
sys.stdin.readline()
store = LeaseStore(Path(sys.argv[1]))
try:
    lease = store.acquire(DeviceSpec(name="arm1", kind="robot"), holder="racer")
    print("got", lease.token, flush=True)
except LeaseError:
    print("refused", flush=True)
sys.stdin.read()
"""


def start(code: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_of_many_racing_processes_gets_the_arm(tmp_path: Path) -> None:
    racers = [start(RACE, str(tmp_path / "leases.db")) for _ in range(ONE_OF_MANY)]
    try:
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        answers = sorted(first_line(racer) for racer in racers)
        assert answers == ["got 1", *["refused"] * (ONE_OF_MANY - 1)]
    finally:
        for racer in racers:
            stop(racer)


def test_a_killed_holder_loses_the_arm_at_once_also_before_it_is_reaped(tmp_path: Path) -> None:
    store = LeaseStore(tmp_path / "leases.db")
    child = start(HOLD, str(store.path), "3600")
    try:
        assert first_line(child) == "1"
        with pytest.raises(LeaseError, match=rf"Held by 'child' \(pid {child.pid} on "):
            store.acquire(ARM, holder="parent")
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the process table
        assert store.active() == []
        assert store.acquire(ARM, holder="parent").token == 2
    finally:
        stop(child)


def test_a_killed_holder_of_another_world_loses_the_arm_when_its_time_is_up(tmp_path: Path) -> None:
    # Seen from another process namespace the child's number means nothing, so only time tells.
    elsewhere = replace(this_process(), world="another container")
    store = LeaseStore(tmp_path / "leases.db", process=elsewhere)
    child = start(HOLD, str(store.path), "1.0")
    try:
        assert first_line(child) == "1"
        stop(child)
        with pytest.raises(LeaseError, match="Held by 'child'"):
            store.acquire(ARM, holder="parent")
        assert store.acquire(ARM, holder="parent", wait_s=5.0).token == 2
    finally:
        stop(child)


def test_this_process_lives() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert me.is_alive(seen_from=me) is True
    assert Holder.from_text(me.to_text()) == me


def test_a_later_process_with_the_same_number_is_another() -> None:
    me = this_process()
    assert replace(me, started="1").is_alive(seen_from=me) is False


def test_another_users_process_lives() -> None:
    # Process 1 belongs to root and lives as long as anything does.
    me = this_process()
    assert replace(me, pid=1, started="").is_alive(seen_from=me) is True


def test_another_world_is_not_judged() -> None:
    me = this_process()
    assert replace(me, world="elsewhere").is_alive(seen_from=me) is None
