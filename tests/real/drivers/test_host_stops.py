"""The driver host brings an arm to rest: if nobody commands it, if it does not heed, and if all fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from robot_rl.core.errors import DeviceError
from robot_rl.real.drivers import host as host_module
from robot_rl.real.drivers.host import EXIT_HUNG, Host
from robot_rl.real.drivers.orders import Orders
from robot_rl.real.link import Link, connect
from robot_rl.real.messages import Answer, Command, Control, Plan
from robot_rl.testing.arm import FakeArm
from tests.real.drivers.bench import TIMEOUT_S, Bench, wait_for
from tests.real.supervisor.rig import two_joint_station


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("h")


def watched(hold_after_s=0.1, stop_after_s=60.0, **more):
    """Returns a supervisor's settings with short silences."""
    settings = two_joint_station().supervisor
    return replace(settings, hold_after_s=hold_after_s, stop_after_s=stop_after_s, **more)


# --- silence -----------------------------------------------------------------------------------------


def test_a_plan_without_a_supervisor_ends_with_a_hold(folder):
    with Bench(folder, supervisor=watched()) as bench:
        bench.control("start")
        bench.plan((1.0, 0.0), period_s=1.0)  # at 1 rad/s, and then nothing more is heard
        wait_for(lambda: "hold" in bench.arm.calls)
        held_rad = bench.measured().position_rad[0]
        assert held_rad < 0.9
        bench.hear()
        wait_for(lambda: bench.hear() or abs(bench.states[-1].velocity_rad_s[0]) < 0.04)
        time.sleep(0.2)
        assert bench.measured().position_rad[0] < held_rad + 0.05
        assert not bench.host.fault
        bench.plan((0.5, 0.0))  # it is back
        wait_for(lambda: len(bench.arm.plans) == 2)


def test_beats_keep_a_plan_going(folder):
    with Bench(folder, supervisor=watched(hold_after_s=0.3)) as bench:
        bench.control("start")
        bench.plan((0.2, 0.0), (0.4, 0.0), (0.6, 0.0), period_s=0.3)
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            bench.beat()
            time.sleep(0.01)
        assert "hold" not in bench.arm.calls
        assert bench.measured().position_rad[0] == 0.6


def test_what_waited_in_a_queue_is_no_sign_of_life(folder):
    with Bench(folder, supervisor=watched()) as bench:
        bench.control("start")
        bench.plan((1.0, 0.0), period_s=1.0)
        until_s = time.monotonic() + 1.0
        while "hold" not in bench.arm.calls:
            assert time.monotonic() < until_s
            bench.beat(age_s=0.2)  # 0.1 s are allowed
            time.sleep(0.01)


@pytest.mark.parametrize("streams", [True, False])
def test_a_supervisor_that_stays_silent_is_a_fault_until_a_person_clears_it(folder, streams):
    with Bench(folder, supervisor=watched(stop_after_s=0.3)) as bench:
        bench.control("start")
        if streams:
            bench.send(0.1, 0.0)
        else:
            bench.plan((1.0, 0.0), period_s=1.0)
        wait_for(lambda: "stop" in bench.arm.calls)
        wait_for(lambda: "the supervisor is silent for 0." in bench.reason())
        assert bench.arm.calls.index("hold") < bench.arm.calls.index("stop")
        answer = bench.control("start")
        assert not answer.done
        assert "A person clears it first" in answer.message
        assert bench.control("clear", by="Ada").done
        assert bench.control("start").done


def test_a_supervisor_that_died_is_a_fault_that_the_next_one_sees(folder):
    with Bench(folder) as bench:
        bench.control("start")
        bench.send(0.1, 0.0)
        bench.reconnect()
        wait_for(lambda: bench.reason() == "driver of bench: the supervisor is gone")
        assert bench.control("start").message == (
            "driver of bench: the supervisor is gone. A person clears it first."
        )
        assert bench.control("clear", by="Ada").done
        wait_for(lambda: not bench.reason())
        assert bench.control("start").done


class Hesitant(FakeArm):
    """Takes its time to stop."""

    def __init__(self) -> None:
        super().__init__(two_joint_station())
        self.may_stop = threading.Event()

    def stop(self, reason: str) -> None:
        assert self.may_stop.wait(TIMEOUT_S)
        super().stop(reason)


def test_a_supervisor_that_went_before_its_stop_was_done_is_a_fault(folder):
    arm = Hesitant()
    with Bench(folder, arm) as bench:
        bench.control("start")
        bench.link.send(Control(operation="stop", by="test"))
        wait_for(lambda: "hold" in arm.calls)
        bench.reconnect()
        assert "the supervisor is gone" in bench.host.fault
        arm.may_stop.set()


def test_a_supervisor_that_stopped_the_arm_leaves_no_fault(folder):
    with Bench(folder) as bench:
        bench.control("start")
        bench.send(0.1, 0.0)
        assert bench.control("stop").done
        bench.reconnect()
        assert bench.control("start").done
        assert not bench.host.fault


# --- again and again ---------------------------------------------------------------------------------


class Unheeding(FakeArm):
    """Loses the first holds, as a line may; `lost` of them."""

    lost = 3

    def hold(self) -> None:
        self.lost -= 1
        if self.lost < 0:
            super().hold()
        else:
            self.calls.append("lost")


@pytest.mark.parametrize("why", ["asked", "silence", "stop", "gone"])
def test_an_arm_that_does_not_heed_a_hold_is_held_again(folder, why):
    arm = Unheeding(two_joint_station())
    with Bench(folder, arm, supervisor=watched(hold_after_s=0.2 if why == "silence" else 60.0)) as bench:
        bench.control("start")
        bench.plan((2.0, 0.0), period_s=1.2)
        wait_for(lambda: arm.plans)
        if why in ("asked", "stop"):
            bench.link.send(Control(operation="hold" if why == "asked" else "stop", by="test"))
        elif why == "gone":
            bench.link.close()
        wait_for(lambda: "hold" in arm.calls)
        wait_for(lambda: bench.host._holding.is_done)
        assert arm.calls.count("lost") == 3
        assert bench.measured().position_rad[0] < 1.9  # the plan leads to 2 rad


class Refusing(FakeArm):
    """Raises at the first holds or stops."""

    def __init__(self, holds: int = 0, stops: int = 0) -> None:
        super().__init__(two_joint_station())
        self.holds, self.stops = holds, stops

    def hold(self) -> None:
        self.holds -= 1
        if self.holds >= 0:
            raise RuntimeError("no line")
        super().hold()

    def stop(self, reason: str) -> None:
        self.stops -= 1
        if self.stops >= 0:
            raise DeviceError("ros2: controller_manager did not answer within 2 s.")
        super().stop(reason)


def test_a_hold_that_is_refused_is_tried_again_and_hides_no_earlier_fault(folder, caplog):
    arm = Refusing(holds=5)
    with Bench(folder, arm) as bench:
        bench.control("start")
        bench.plan((2.0, 0.0), period_s=1.2)
        wait_for(lambda: arm.plans)
        answer = bench.control("hold")
        assert not answer.done
        assert answer.message == "driver of bench: hold: no line"
        wait_for(lambda: "hold" in arm.calls and bench.host._holding.is_done)
        assert bench.measured().position_rad[0] < 1.9
        assert bench.reason() == "driver of bench: hold: no line"
        assert [text for text in caplog.messages if "hold: no line" in text and "stopping" not in text] == [
            "driver of bench: hold: no line"
        ]


def test_a_stop_that_is_refused_is_tried_again_until_it_is_done(folder, monkeypatch):
    monkeypatch.setattr(host_module, "_STOP_AGAIN_NS", 20_000_000)
    arm = Refusing(stops=4)
    with Bench(folder, arm) as bench:
        bench.control("start")
        answer = bench.control("stop")
        assert answer == Answer(
            operation="stop", done=False, message="ros2: controller_manager did not answer within 2 s."
        )
        wait_for(lambda: "stop" in arm.calls)
        assert not arm.is_started
        assert bench.host.fault == (
            "driver of bench: stop: ros2: controller_manager did not answer within 2 s."
        )
        wait_for(lambda: not bench.host._is_ours)


def test_nobody_forgets_an_arm_that_is_not_stopped(folder, monkeypatch):
    monkeypatch.setattr(host_module, "_STOP_AGAIN_NS", 20_000_000)
    monkeypatch.setattr(host_module, "STUBBORN_S", 0.4)
    arm = Refusing(stops=100_000)
    with Bench(folder, arm) as bench:
        bench.control("start")
        begun_s = time.monotonic()
        bench.link.close()
        wait_for(lambda: bench.host._end_ns is not None)
        assert time.monotonic() - begun_s > 0.9  # 0.5 s to linger, 0.4 s more
        arm.stops = 0
        bench.thread.join(TIMEOUT_S)
        assert not arm.is_started


# --- what hangs --------------------------------------------------------------------------------------


class HangingStart(FakeArm):
    """Its `start` comes back when the test says."""

    def __init__(self) -> None:
        super().__init__(two_joint_station())
        self.may_start = threading.Event()

    def start(self) -> None:
        assert self.may_start.wait(TIMEOUT_S)
        super().start()


def test_a_start_that_hangs_keeps_no_stop_from_being_done(folder):
    arm = HangingStart()
    with Bench(folder, arm) as bench:
        bench.host._orders = Orders(bench.host._wake.set, hung_s=0.1)
        bench.link.send(Control(operation="start", by="test"))
        bench.link.send(Control(operation="stop", by="test"))
        wait_for(lambda: "hold" in arm.calls)  # at once
        wait_for(lambda: bench.hear() or len(bench.answers) == 2)
        start, stop = bench.answers
        assert (start.operation, start.done) == ("start", False)
        assert "not done after 0." in start.message
        assert stop == Answer(operation="stop", done=True)
        assert "driver of bench: start: not done after 0." in bench.host.fault
        stops = arm.calls.count("stop")
        arm.may_start.set()  # it comes back after all, and takes the arm
        wait_for(lambda: "start" in arm.calls)
        wait_for(lambda: arm.calls.count("stop") > stops)
        assert not arm.is_started


class Hanging(FakeArm):
    """A library that never comes back, in one method."""

    def __init__(self, method: str) -> None:
        super().__init__(two_joint_station())
        self.method, self.goes_on = method, threading.Event()

    def _hang(self, method: str) -> None:
        if method == self.method:
            self.goes_on.wait(TIMEOUT_S)

    def wait(self, timeout_s: float) -> bool:
        self._hang("wait")
        return super().wait(timeout_s)

    def frames(self):
        self._hang("frames")
        return super().frames()

    def stop(self, reason: str) -> None:
        self._hang("stop")
        super().stop(reason)

    def close(self) -> None:
        self._hang("close")
        super().close()


@pytest.mark.parametrize("method", ["wait", "frames", "stop", "close"])
def test_a_host_ends_whatever_hangs(folder, monkeypatch, method):
    for name in ("_END_S", "_JOIN_S", "_CLOSE_S"):
        monkeypatch.setattr(host_module, name, 0.2)
    monkeypatch.setattr("robot_rl.real.drivers.feed._END_S", 0.2)
    arm = Hanging(method)
    with Bench(folder, arm) as bench, connect(folder / host_module.SENSORS_SOCKET):
        time.sleep(0.1)
        begun_s = time.monotonic()
        bench.host.close()
        bench.thread.join(TIMEOUT_S)
        assert time.monotonic() - begun_s < 2.0
        assert not bench.thread.is_alive()
        assert "hold" in arm.calls
        arm.goes_on.set()


# --- what fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device"), ValueError("x")])
def test_an_error_of_the_host_itself_ends_in_a_held_arm(folder, error):
    with Bench(folder) as bench:
        bench.control("start")
        bench.plan((1.0, 0.0), period_s=1.0)
        wait_for(lambda: bench.arm.plans)

        def fail(message: Command | Plan, now_ns: int) -> str:
            raise error

        refuses, bench.host.gate.refuses = bench.host.gate.refuses, fail
        bench.send(0.1, 0.1)
        wait_for(lambda: "stop" in bench.arm.calls)
        wait_for(lambda: bench.reason() == f"driver of bench: the driver host failed: {error!r}")
        bench.host.gate.refuses = refuses
        assert bench.control("clear", by="Ada").done
        assert bench.control("start").done


class Quitting(FakeArm):
    """Ends the process, as some libraries do where others raise."""

    def send(self, command: Command) -> None:
        sys.exit("serial port lost")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_library_that_ends_the_process_leaves_a_stopped_arm(folder):
    arm = Quitting(two_joint_station())
    with Bench(folder, arm) as bench:
        bench.control("start")
        bench.send(0.1, 0.1)
        bench.thread.join(TIMEOUT_S)
        assert arm.calls[:4] == ["connect", "start", "hold", "stop"]
        assert arm.calls[-1] == "close"


def test_a_link_that_breaks_while_a_state_is_sent_is_a_supervisor_that_is_gone(folder):
    with Bench(folder) as bench:
        bench.control("start")
        link = bench.host._link
        assert link is not None
        link.close()  # as `send` does when the peer has reset it
        wait_for(lambda: bench.host.fault)
        assert bench.host.fault == "driver of bench: the supervisor is gone"


def test_grippers_beyond_their_range_are_counted(folder, caplog):
    caplog.set_level("INFO")
    with Bench(folder) as bench:
        bench.control("start")
        for number, opening in enumerate((1e9, 0.5, -1e9)):
            bench.send(0.1, 0.1, gripper=opening)
            wait_for(lambda number=number: len(bench.arm.sent) > number)
    assert [command.gripper for command in bench.arm.sent] == [1.0, 0.5, 0.0]
    assert any("0 commands refused, 2 grippers limited" in text for text in caplog.messages)


# --- the process -------------------------------------------------------------------------------------

PROCESS = """
import sys, threading, time
from pathlib import Path
from robot_rl.real.drivers import host
from robot_rl.testing.arm import FakeArm
from tests.real.supervisor.rig import two_joint_station

class Arm(FakeArm):
    def connect(self):
        print("connecting", flush=True)
        if sys.argv[2] == "hangs":
            time.sleep(60.0)

    def stop(self, reason):
        super().stop(reason)
        print("stopped", reason, flush=True)

host._LAST_S = 0.5
host.load_station = lambda name: two_joint_station()
host.open_driver = Arm
sys.exit(host.main(["--station", "bench", "--folder", sys.argv[1]]))
"""


def process(folder, how, **pipes):
    command = [sys.executable, "-c", PROCESS, str(folder), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_hangs_while_it_connects_ends_when_it_is_asked_to(folder, number):
    with process(folder, "hangs") as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "connecting\n"
        os.kill(host.pid, number)
        assert host.wait(TIMEOUT_S) == EXIT_HUNG


@pytest.mark.slow
def test_a_process_on_a_full_disk_stops_the_arm_all_the_same(folder):
    """/dev/full refuses every line of the log as a full disk does."""
    with open("/dev/full", "w") as full, process(folder, "connects", stderr=full) as host:
        assert host.stdout is not None
        host.stdout.readline()
        wait_for((folder / host_module.DRIVER_SOCKET).exists)
        with connect(folder / host_module.DRIVER_SOCKET) as link:
            link.send(Control(operation="start", by="test"))
            wait_for(lambda: any(isinstance(message, Answer) for message in link.receive()))
        assert host.stdout.readline() == "stopped the supervisor is gone\n"
        os.kill(host.pid, signal.SIGTERM)
        assert host.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_a_process_whose_log_nobody_reads_stops_the_arm_all_the_same(folder):
    """A pipe that is full blocks who writes to it, as a disk that hangs does."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        while True:
            os.write(writes, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writes, True)
    with process(folder, "connects", stderr=writes) as host:
        assert host.stdout is not None
        host.stdout.readline()
        wait_for((folder / host_module.DRIVER_SOCKET).exists)
        with connect(folder / host_module.DRIVER_SOCKET) as link:
            link.send(Control(operation="start", by="test"))
            wait_for(lambda: any(isinstance(message, Answer) for message in link.receive()))
        assert host.stdout.readline() == "stopped the supervisor is gone\n"
        os.kill(host.pid, signal.SIGTERM)
        assert host.wait(TIMEOUT_S) in (0, EXIT_HUNG)
    os.close(reads)
    os.close(writes)


def test_the_arm_of_a_closed_bench_is_at_rest(folder):
    arm = FakeArm(two_joint_station())
    with Bench(folder, arm) as bench:
        bench.control("start")
        bench.plan((1.0, 0.0), period_s=1.0)
        wait_for(lambda: arm.plans)
        bench.link.close()
        bench.host.close()
        bench.thread.join(TIMEOUT_S)
    assert np.abs(bench.measured().velocity_rad_s).max() < 0.04
    assert arm.calls[-1] == "close"


class Waited:
    """A link in which messages waited while the host was stopped (SIGSTOP)."""

    closed = False

    def __init__(self, *messages):
        self.messages = messages

    def receive(self):
        return list(self.messages)

    def send(self, message):
        return True


def test_a_plan_that_waited_beside_a_hold_is_overtaken_by_it(tmp_path):
    station = two_joint_station()
    arm = FakeArm(station)
    host = Host(arm, station, tmp_path)
    host._live = True
    plan = Plan(
        number=1,
        start_ns=time.monotonic_ns(),
        period_ns=500_000_000,
        targets_rad=np.zeros((2, 2)),
        gripper=np.ones(2),
    )
    for waited, sent in ((Waited(plan, Control(operation="hold", by="test")), 0), (Waited(plan), 1)):
        host._link = cast("Link", waited)
        host._read_messages()
        assert len(arm.plans) == sent
