"""LeRobot's robots: units and errors against a robot of LeRobot's interface; the packets of an SO-101."""

import gc
import json
import math
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.real.drivers.estimate import VelocityEstimate
from robot_rl.real.drivers.lerobot_arm import LeRobotArm, open_robot
from robot_rl.real.messages import Command
from robot_rl.real.station import LeRobotConfig
from robot_rl.testing.feetech import OVERLOAD, FakeFeetechBus, FakeServo, frame
from tests.real.supervisor.rig import two_joint_station

TIMEOUT_S = 20.0
MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


class FakeRobot:
    """lerobot.robots.Robot: degrees, and a gripper from 0 to 100."""

    def __init__(self):
        self.action_features = {"a.pos": float, "b.pos": float, "gripper.pos": float}
        self.is_calibrated = True
        self.position = {"a.pos": 90.0, "b.pos": 0.0, "gripper.pos": 50.0}
        self.cameras = {"front": SimpleNamespace(read_latest=lambda: self.picture)}
        self.picture = np.zeros((2, 2, 3), np.uint8)
        self.sent = []
        self.error: Exception | None = None

    def connect(self, calibrate):
        assert not calibrate  # it would ask questions at the keyboard

    def disconnect(self):
        self.sent.append("disconnect")

    def get_observation(self):
        if self.error is not None:
            raise self.error
        return dict(self.position)

    def send_action(self, action):
        self.sent.append(action)
        return action


@pytest.fixture
def robot():
    return FakeRobot()


@pytest.fixture
def make_arm():
    config = LeRobotConfig(type="fake", rad_per_unit=(math.pi / 180, -math.pi / 180), state_hz=500)
    station = two_joint_station(driver="lerobot", lerobot=config)
    made = []

    def make(robot):
        made.append(LeRobotArm(station, lambda _: robot))
        return made[-1]

    yield make
    for driver in made:
        driver.close()


@pytest.fixture
def arm(make_arm, robot):
    return make_arm(robot)


def until(condition):
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_degrees_and_shares_become_radians_and_openings(arm, robot):
    arm.connect()
    state = arm.read()
    assert state.position_rad == pytest.approx([math.pi / 2, 0.0])
    assert state.gripper == 0.5  # 50 of 100 between closed at 0 and open at 1
    robot.sent.clear()
    arm.send(Command(number=1, stamp_ns=0, target_rad=np.array([math.pi, math.pi]), gripper=0.2))
    until(lambda: robot.sent)
    assert robot.sent[0] == pytest.approx({"a.pos": 180.0, "b.pos": -180.0, "gripper.pos": 20.0})


def test_it_is_held_where_it_is_from_the_beginning_and_keeps_its_grip(arm, robot):
    arm.connect()
    until(lambda: robot.sent)
    assert robot.sent[0] == pytest.approx({"a.pos": 90.0, "b.pos": 0.0, "gripper.pos": 50.0})
    arm.send(Command(number=1, stamp_ns=0, target_rad=np.zeros(2), gripper=0.0))
    until(lambda: len(robot.sent) == 2)
    arm.stop("test")
    until(lambda: len(robot.sent) == 3)
    # 90 degrees away from its target, it is held where it is.
    assert robot.sent[2] == pytest.approx({"a.pos": 90.0, "b.pos": 0.0, "gripper.pos": 0.0})


class Loaded(FakeRobot):
    """Hangs 3 degrees (0.052 rad) below every target; a lead is 0.2 rad."""

    def send_action(self, action):
        self.position = {**action, "a.pos": action["a.pos"] - 3.0}
        return super().send_action(action)


def test_a_loaded_arm_does_not_sink_with_a_hundred_holds(make_arm):
    robot = Loaded()
    arm = make_arm(robot)
    arm.connect()
    arm.send(Command(number=1, stamp_ns=0, target_rad=np.array([math.pi / 2, 0.0]), gripper=0.0))
    until(lambda: robot.position["a.pos"] == 87.0)
    for number in range(100):
        sent = len(robot.sent)
        arm.hold()
        until(lambda sent=sent: len(robot.sent) > sent)
        state = arm.read()
        until(lambda state=state: arm.read() is not state)
        assert robot.position["a.pos"] == pytest.approx(87.0), f"after {number + 1} holds"


def test_a_target_that_the_bus_refused_is_sent_again(arm, robot):
    arm.connect()
    until(lambda: robot.sent)
    send, failures = robot.send_action, [OSError("busy"), OSError("busy")]

    def refuse(action):
        if failures:
            raise failures.pop()
        return send(action)

    robot.send_action = refuse
    arm.hold()
    until(lambda: len(robot.sent) == 2)
    assert robot.sent[1] == pytest.approx({"a.pos": 90.0, "b.pos": 0.0, "gripper.pos": 50.0})


def test_a_bus_that_hangs_does_not_keep_the_driver_from_ending(arm, robot, monkeypatch):
    monkeypatch.setattr("robot_rl.real.drivers.lerobot_arm._END_S", 0.05)
    answers = threading.Event()
    arm.connect()
    robot.get_observation = lambda: answers.wait(TIMEOUT_S)
    begun_s = time.monotonic()
    arm.close()
    assert time.monotonic() - begun_s < 1.0
    assert robot.sent[-1] == "disconnect"
    answers.set()


def test_pictures_come_once_each(arm, robot):
    arm.connect()
    assert [frame.name for frame in arm.frames()] == ["front.rgb"]
    assert arm.frames() == []
    robot.picture = np.ones((2, 2, 3), np.uint8)
    assert len(arm.frames()) == 1


def test_an_error_of_the_bus_is_told_until_it_is_cleared(arm, robot):
    arm.connect()
    robot.error = OSError("device reports readiness to read but returned no data")
    until(lambda: arm._error)
    with pytest.raises(DeviceError, match="bench: LeRobot says: device reports readiness"):
        arm.wait(1.0)
    robot.error = None
    arm.clear("Ada")
    until(lambda: arm.wait(1.0))


def test_targets_that_are_not_finite_are_refused(arm, robot):
    arm.connect()
    with pytest.raises(DeviceError, match=r"got target \[nan, 0.0\], need 2 finite"):
        arm.send(Command(number=1, stamp_ns=0, target_rad=np.array([np.nan, 0.0]), gripper=0.0))


def test_another_robot_and_a_missing_calibration_are_named(arm, robot):
    robot.is_calibrated = False
    with pytest.raises(
        DeviceError, match=r"bench: fake is not calibrated.*lerobot-calibrate --robot.type=fake"
    ):
        arm.connect()
    robot.action_features = {"a.pos": float, "c.pos": float}
    with pytest.raises(DeviceError) as error:
        arm.connect()
    assert str(error.value) == (
        "bench: LeRobot's fake has ['a.pos', 'c.pos'], the station file says "
        "['a.pos', 'b.pos', 'gripper.pos']. Correct `joints` and `lerobot.gripper` there."
    )


def test_speed_is_the_difference_over_the_window():
    estimate = VelocityEstimate(0.05)
    at_ns = [0, 20_000_000, 40_000_000, 60_000_000]
    speeds = [
        estimate.update(ns, np.array([rad])) for ns, rad in zip(at_ns, [0.0, 0.1, 0.1, 0.3], strict=True)
    ]
    # Over 20 ms, 40 ms and then 60 ms: the point at 0 is the last one that is 50 ms old.
    assert [float(speed[0]) for speed in speeds] == pytest.approx([0.0, 5.0, 2.5, 5.0])
    # A point at 80 ms is compared with the one at 20 ms.
    assert float(estimate.update(80_000_000, np.array([0.4]))[0]) == pytest.approx(0.3 / 0.06)


# --- packets ---------------------------------------------------------------------------------------


def test_packets_are_those_of_the_manual():
    # FF FF 01 02 01 FB: ping of servo 1; checksum ~(1 + 2 + 1) = FB.
    assert frame(1, 0x01, b"") == bytes.fromhex("ffff010201fb")
    with FakeFeetechBus([FakeServo(1, position=0x0802)], byte_s=0.0) as bus:
        port = os.open(bus.port, os.O_RDWR | os.O_NOCTTY)
        try:
            os.write(port, b"\x00\xff" + frame(1, 0x01, b"") + frame(1, 0x02, bytes([56, 2])))
            got = b""
            while len(got) < 14:
                got += os.read(port, 64)
        finally:
            os.close(port)
    assert got[:6] == bytes.fromhex("ffff010200fc")
    assert got[6:] == bytes.fromhex("ffff010400") + b"\x02\x08" + bytes([~(1 + 4 + 0 + 2 + 8) & 0xFF])


@pytest.fixture(scope="module")
def bus(tmp_path_factory):
    """Six servos on a bus, and the driver's way to them."""
    pytest.importorskip("scservo_sdk")
    folder = tmp_path_factory.mktemp("calibration")
    rows = {
        name: {"id": i + 1, "drive_mode": 0, "homing_offset": 0, "range_min": 48, "range_max": 4048}
        for i, name in enumerate(MOTORS)
    }
    (folder / "fake.json").write_text(json.dumps(rows))
    servos = [FakeServo(number, position=2048) for number in range(1, 7)]
    for servo in servos:
        servo.calibrate(low=48, high=4048)
    with FakeFeetechBus(servos) as bus:
        yield bus, {"port": bus.port, "id": "fake", "calibration_dir": str(folder)}


def so101_arm(options):
    config = LeRobotConfig(type="so101_follower", options=options)
    limits = {
        name: (value,) * 5
        for name, value in {
            "position_low_rad": -2.0,
            "position_high_rad": 2.0,
            "velocity_rad_s": 4.0,
            "acceleration_rad_s2": 20.0,
            "effort_n_m": 3.0,
        }.items()
    }
    still = (0.0,) * 5
    return LeRobotArm(
        two_joint_station(
            limits=limits, joints=MOTORS[:5], driver="lerobot", lerobot=config, home_rad=still, safe_rad=still
        )
    )


@pytest.mark.slow
def test_the_servos_stay_stiff_when_the_driver_ends_or_cannot_begin(bus):
    """LeRobot's own default, and its `__del__`, take their torque."""
    wire, options = bus
    servos = list(wire.servos.values())
    driver = so101_arm(options)
    driver.connect()
    driver.close()
    del driver
    gc.collect()
    assert [servo.is_stiff for servo in servos] == [True] * 6

    servos[5].silent = True
    failing = so101_arm(options)
    with pytest.raises(DeviceError, match="LeRobot cannot connect so101_follower"):
        failing.connect()
    failing.close()
    del failing
    gc.collect()
    servos[5].silent = False
    assert [servo.is_stiff for servo in servos] == [True] * 6


@pytest.fixture(scope="module")
def so101(bus):
    """LeRobot's own SO-101 code and the vendor's SDK, down to the bytes on the wire."""
    wire, options = bus
    driver = so101_arm(options)
    driver.connect()
    yield driver, list(wire.servos.values())
    driver.close()


@pytest.mark.slow
def test_an_so101_moves_over_its_bus(so101):
    arm, servos = so101
    assert arm.read().position_rad == pytest.approx(np.zeros(5), abs=1e-9)  # the middle of the range
    assert all(servo.is_stiff and abs(servo.goal - 2048) <= 1 for servo in servos)  # LeRobot rounds down
    arm.send(Command(number=1, stamp_ns=0, target_rad=np.full(5, 0.5), gripper=1.0))
    until(lambda: abs(arm.read().position_rad[4] - 0.5) < 0.002)
    # 0.5 rad of 4096 steps a turn, and the gripper at the end of its range.
    assert servos[0].goal == pytest.approx(2048 + 0.5 * 4096 / (2 * math.pi), abs=1.5)
    assert servos[5].goal == 4048


@pytest.mark.slow
def test_faults_of_the_bus_have_names(so101):
    arm, servos = so101

    def error() -> str:
        until(lambda: arm._error)
        with pytest.raises(DeviceError) as raised:
            arm.wait(0.0)
        return str(raised.value)

    def cleared() -> bool:
        # A reading that was begun before may tell of the fault once more: then it is cleared again.
        arm.clear("Ada")
        try:
            return arm.wait(0.5)
        except DeviceError:
            return False

    servos[2].silent = True
    assert "bench: no answer from elbow_flex. Look at cables and power." in error()
    servos[2].silent = False
    until(cleared)

    servos[1].corrupt = True
    assert "Incorrect status packet" in error()
    servos[1].corrupt = False
    until(cleared)

    servos[3].overload()
    assert servos[3].answer(0x01, b"")[4] == OVERLOAD
    until(lambda: arm.read().stop_reason == "bench: wrist_flex: overload. Free the arm, then clear.")
    servos[3].overload(False)
    arm.clear("Ada")
    until(lambda: not arm.read().stop_reason)


@pytest.mark.slow
def test_mistakes_in_options_name_what_is_allowed(so101):
    with pytest.raises(ConfigError, match=r"lerobot.type: got 'so102', allowed: .*so101_follower"):
        open_robot(LeRobotConfig(type="so102"))
    with pytest.raises(ConfigError, match=r"lerobot.options: The fields `prt` are not valid"):
        open_robot(LeRobotConfig(type="so101_follower", options={"prt": "/dev/ttyACM0"}))


@pytest.mark.slow
def test_nobody_at_the_port_is_told_with_what_to_look_at(so101, tmp_path):
    arm, _ = so101
    config = replace(arm._config, options={"port": str(tmp_path / "none"), "id": "x"})
    nobody = LeRobotArm(two_joint_station(driver="lerobot", lerobot=config))
    with pytest.raises(
        DeviceError, match=r"(?s)bench: LeRobot cannot connect so101_follower: .*none.*lerobot-find-port"
    ):
        nobody.connect()
    nobody.close()
