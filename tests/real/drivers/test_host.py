"""The driver host: what reaches the arm, what comes back, and who stops it when something is gone."""

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
from robot_rl.real.drivers.feed import _Peer
from robot_rl.real.drivers.host import DRIVER_SOCKET, EXIT_NO_ARM, SENSORS_SOCKET, Host
from robot_rl.real.link import Link, connect
from robot_rl.real.messages import Answer, Command, Control, Frame, Message, Plan
from robot_rl.testing.arm import FakeArm
from robot_rl.testing.devices import protective_stop
from tests.real.drivers.bench import TIMEOUT_S, Bench, wait_for
from tests.real.supervisor.rig import two_joint_station


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("h")


def test_states_come_and_commands_reach_the_arm_with_calibration_and_gripper_range(folder):
    with Bench(folder, joint_offset_rad=(0.5, 0.0)) as bench:
        assert bench.control("start").done
        bench.send(1.0, 1.0, gripper=7.0)
        wait_for(lambda: bench.arm.sent)
        assert bench.arm.sent[0].target_rad.tolist() == [0.5, 1.0]  # 1.0 of the model is 0.5 of the arm
        assert bench.arm.sent[0].gripper == 1.0  # open is 1
        wait_for(lambda: bench.hear() or (bench.states and bench.states[-1].position_rad[0] > 0.9))


@pytest.mark.parametrize("target", [(np.nan, 0.0), (0.0, 2.5), (0.0,)])
def test_what_no_supervisor_may_send_never_reaches_the_arm(folder, target):
    with Bench(folder) as bench:
        bench.control("start")
        bench.send(*target)
        bench.send(0.1, 0.1, age_s=1.0)
        wait_for(lambda: bench.host.gate.refused)
        bench.send(0.2, 0.2)
        wait_for(lambda: bench.arm.sent)
        assert [command.target_rad.tolist() for command in bench.arm.sent] == [[0.2, 0.2]]


def test_commands_are_refused_before_start_and_after_stop(folder):
    with Bench(folder) as bench:
        bench.send(0.1, 0.1)
        wait_for(lambda: bench.host.gate.refused == 1)
        bench.control("start")
        assert bench.control("stop").done
        assert bench.arm.calls[-3:] == ["hold", "stop", "hold"]
        bench.send(0.1, 0.1)
        wait_for(lambda: bench.host.gate.refused == 2)
        assert bench.arm.sent == []


def test_plans_pass_whole(folder):
    with Bench(folder, joint_offset_rad=(0.5, 0.0)) as bench:
        bench.control("start")
        targets = np.array([[0.0, 0.1], [0.0, 0.2]])
        plan = Plan(
            number=1,
            start_ns=time.monotonic_ns(),
            period_ns=500_000_000,
            targets_rad=targets,
            gripper=np.array([2.0, -1.0]),
        )
        bench.link.send(plan)
        wait_for(lambda: bench.arm.plans)
        assert bench.arm.plans[0].targets_rad.tolist() == [[-0.5, 0.1], [-0.5, 0.2]]
        assert bench.arm.plans[0].gripper.tolist() == [1.0, 0.0]


def test_an_order_overtakes_the_commands_before_it(folder):
    with Bench(folder) as bench:
        bench.control("start")
        bench.send(0.5, 0.5)
        assert bench.control("hold").done
        held = len(bench.arm.sent)
        bench.send(0.6, 0.6)  # a hold is no latch
        wait_for(lambda: len(bench.arm.sent) > held)
        assert bench.arm.sent[-1].target_rad.tolist() == [0.6, 0.6]


def test_a_supervisor_that_goes_leaves_a_held_and_stopped_arm(folder):
    with Bench(folder) as bench:
        bench.control("start")
        bench.send(1.0, 1.0)
        wait_for(lambda: bench.arm.sent)
        bench.link.close()
        wait_for(lambda: "close" in bench.arm.calls)  # after linger_s nobody wants it
        assert bench.arm.calls[:4] == ["connect", "start", "hold", "stop"]
        assert not bench.arm.is_started


def test_a_supervisor_that_falls_silent_leaves_a_held_arm(folder):
    with Bench(folder, supervisor=replace(two_joint_station().supervisor, hold_after_s=0.05)) as bench:
        bench.control("start")
        bench.send(1.0, 1.0)
        wait_for(lambda: "hold" in bench.arm.calls)
        bench.send(1.0, 1.0)  # it is back
        wait_for(lambda: len(bench.arm.sent) == 2)


def test_another_supervisor_is_turned_away_while_one_lives(folder):
    with Bench(folder) as bench, connect(folder / DRIVER_SOCKET) as second:
        messages: list[object] = []
        wait_for(lambda: messages.extend(second.receive()) or second.closed)
        assert messages == [
            Answer(operation="start", done=False, message="driver of bench has a supervisor already.")
        ]
        assert bench.control("start").done


class Broken(FakeArm):
    """Raises what a vendor's library might."""

    def send(self, command: Command) -> None:
        raise RuntimeError("the bus is on fire")


def test_whatever_a_driver_raises_stops_the_arm_until_a_person_clears(folder):
    arm = Broken(two_joint_station())
    with Bench(folder, arm) as bench:
        bench.control("start")
        bench.send(0.1, 0.1)
        wait_for(bench.reason)
        assert bench.reason() == "driver of bench: send: the bus is on fire"
        wait_for(lambda: "stop" in arm.calls)
        assert bench.control("start") == Answer(
            operation="start",
            done=False,
            message="driver of bench: send: the bus is on fire. A person clears it first.",
        )
        assert not bench.control("clear", by=" ").done
        assert bench.control("clear", by="Ada").done
        assert "clear by Ada" in arm.calls
        wait_for(lambda: not bench.reason())
        assert bench.control("start").done


def test_a_lost_arm_is_told_as_the_reason_to_stop(folder):
    with Bench(folder) as bench:
        bench.control("start")
        bench.arm._dropped = True
        wait_for(lambda: "connection lost" in bench.reason())
        wait_for(lambda: "stop" in bench.arm.calls)


def test_the_arms_own_stop_ends_obedience_at_once(folder):
    with Bench(folder) as bench:
        bench.control("start")
        bench.arm.script.append(protective_stop())
        wait_for(lambda: bench.reason() == "collision")
        wait_for(lambda: "hold" in bench.arm.calls)
        bench.send(0.1, 0.1)
        wait_for(lambda: bench.host.gate.refused)
        assert bench.arm.sent == []


class Slow(FakeArm):
    """Takes its time to start."""

    def __init__(self) -> None:
        super().__init__(two_joint_station())
        self.may_start = threading.Event()

    def start(self) -> None:
        assert self.may_start.wait(TIMEOUT_S)
        super().start()


def test_a_stop_has_the_last_word_over_a_start_under_way(folder):
    arm = Slow()
    with Bench(folder, arm) as bench:
        bench.link.send(Control(operation="start", by="test"))
        bench.link.send(Control(operation="stop", by="test"))
        wait_for(lambda: arm.calls.count("hold") >= 1)  # at once, though `start` blocks
        seen = len(bench.states)
        wait_for(lambda: bench.hear() or len(bench.states) > seen)  # and states go on
        arm.may_start.set()
        wait_for(lambda: bench.hear() or len(bench.answers) == 2)
        assert [answer.operation for answer in bench.answers] == ["start", "stop"]
        bench.send(0.1, 0.1)
        wait_for(lambda: bench.host.gate.refused)
        assert arm.sent == []


def test_scenes_are_reset_in_simulation_only(folder, tmp_path):
    with Bench(folder) as bench:
        assert bench.control("reset", seed=3).message == (
            "driver of bench: a real scene is put back by a person, not by a program."
        )
        assert not bench.control("home").done
    with Bench(tmp_path, real=False) as bench:
        assert bench.control("reset", seed=3).done
        assert "reset 3" in bench.arm.calls


def test_joints_of_another_arm_are_refused(folder):
    arm = FakeArm(replace(two_joint_station(), joints=("a", "c")))
    host = Host(arm, two_joint_station(), folder)
    with pytest.raises(DeviceError) as error:
        host.run()
    assert str(error.value) == (
        "driver of bench: the arm has joints ['a', 'c'], the station file says ['a', 'b']. "
        "Correct `joints` or `driver` there."
    )
    assert arm.calls[-1] == "close"


class Filming(FakeArm):
    """Two cameras of 2 MB each: more than a socket holds, so each waits for its turn."""

    def frames(self) -> list[Frame]:
        stamp_ns = time.monotonic_ns()
        picture = np.zeros((800, 800, 3), np.uint8)
        return [Frame(name=name, stamp_ns=stamp_ns, array=picture) for name in ("one.rgb", "two.rgb")]


def test_cameras_alternate_however_much_goes_out_in_a_turn():
    """One frame in a turn, then two, then one again: the camera that ends a turn does not begin the next."""

    class Socket:
        closed, room, sent = False, 0, ""

        def receive(self) -> list[Message]:
            return []

        def is_idle(self) -> bool:
            return self.room > 0

        def send(self, frame: Frame) -> None:
            self.room, self.sent = self.room - 1, self.sent + frame.name[0]

    link = Socket()
    peer = _Peer(cast("Link", link))
    for link.room in (1, 2, 1, 2, 1):
        peer.offer(Filming(two_joint_station()).frames())
    assert link.sent == "otototo"


def test_every_camera_gets_its_turn_and_an_idle_listener_delays_no_state(folder):
    seen: dict[str, int] = {}

    def read(reader: Link) -> bool:
        for message in reader.receive():
            assert isinstance(message, Frame)
            seen[message.name] = seen.get(message.name, 0) + 1
        return len(seen) == 2 and min(seen.values()) >= 3

    with (
        Bench(folder, Filming(two_joint_station())) as bench,
        connect(folder / SENSORS_SOCKET),
        connect(folder / SENSORS_SOCKET) as reader,
    ):
        wait_for(lambda: read(reader))
        assert max(seen.values()) - min(seen.values()) <= 1
        known = len(bench.states)
        wait_for(lambda: bench.hear() or len(bench.states) > known + 20)


@pytest.mark.slow
def test_the_process_stops_the_arm_and_ends_on_sigterm(folder):
    """Of the real thing: a simulated arm in process, pictures and all."""
    command = [sys.executable, "-m", "robot_rl.real.drivers.host", "--folder", str(folder)]
    with subprocess.Popen(
        [*command, "--station", "sim_in_process"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        until_s = time.monotonic() + 60.0
        while not (folder / DRIVER_SOCKET).exists():
            assert time.monotonic() < until_s
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        with connect(folder / DRIVER_SOCKET) as link, connect(folder / SENSORS_SOCKET) as sensors:
            names: set[str] = set()

            def both_came() -> bool:  # each in a message of its own
                names.update(m.name for m in sensors.receive() if isinstance(m, Frame))
                return len(names) >= 2

            wait_for(both_came)
            assert names == {"cube", "goal"}
            os.kill(process.pid, signal.SIGTERM)
            log = process.stderr.read()
            assert process.wait(TIMEOUT_S) == 0, log
            wait_for(lambda: link.receive() or link.closed)
    assert "stopping: the driver host ends" in log
    assert "cycles, p50" in log
    assert not (folder / DRIVER_SOCKET).exists()


@pytest.mark.slow
def test_the_process_says_which_station_there_is_not(folder):
    command = [sys.executable, "-m", "robot_rl.real.drivers.host", "--folder", str(folder)]
    done = subprocess.run([*command, "--station", "sim_arn"], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_NO_ARM
    assert "station: no station named 'sim_arn'. Did you mean 'sim_arm'?" in done.stderr
    assert "Traceback" not in done.stderr
