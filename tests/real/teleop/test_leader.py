"""A leader arm: LeRobot's interface, played by a fake; and LeRobot's own table of names."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.real.station import LeRobotConfig, load_station
from robot_rl.real.teleop.intent import Array, Intent
from robot_rl.real.teleop.leader import Leader, open_leader

WANTED = np.zeros(6)


class Keys:
    """Somebody who says who drives."""

    def __init__(self) -> None:
        self.drives = self.closed = False

    def begin(self) -> None: ...

    def read(self, wanted: Array) -> Intent:
        return Intent(takes_over=self.drives, verdict="success")

    def ask(self, question: str) -> None: ...

    def close(self) -> None:
        self.closed = True


class FakeLeader:
    name = "fake_leader"

    def __init__(self, joints: tuple[str, ...]) -> None:
        self.action_features = {f"{joint}.pos": float for joint in (*joints, "gripper")}
        self.reads = 0
        self.fails = False

    def connect(self, calibrate: bool = True) -> None:
        if self.fails:
            raise ConnectionError("no such port")

    def get_action(self) -> dict[str, float]:
        self.reads += 1
        return {name: 90.0 for name in self.action_features} | {"gripper.pos": 75.0}

    def disconnect(self) -> None:
        raise RuntimeError("not connected")


def station() -> Any:
    return replace(load_station("sim_arm"), driver="lerobot", lerobot=LeRobotConfig(type="so101_follower"))


def test_the_follower_does_what_the_leader_does_while_the_person_drives() -> None:
    keys, device = Keys(), FakeLeader(station().joints)
    leader = Leader(station(), keys, device)
    intent = leader.read(WANTED)
    assert not intent.takes_over
    assert intent.verdict == "success"
    assert device.reads == 0, "the bus is left alone while the policy drives"
    keys.drives = True
    intent = leader.read(WANTED)
    assert intent.joints_rad is not None
    np.testing.assert_allclose(intent.joints_rad, [math.pi / 2] * 7)  # 90 degrees
    assert intent.gripper == pytest.approx(0.5)  # 75 of 0 to 100, in -1 to 1
    leader.close()
    assert keys.closed


def test_a_leader_of_another_arm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fake_leader does not give joint1.pos, .*Choose the leader"):
        Leader(station(), Keys(), FakeLeader(("shoulder_pan",)))


def test_a_leader_that_cannot_be_reached_says_what_to_look_at() -> None:
    device = FakeLeader(station().joints)
    device.fails = True
    with pytest.raises(DeviceError, match=r"cannot connect fake_leader: no such port. Look at the power"):
        Leader(station(), Keys(), device)


def test_a_station_without_lerobot_has_no_leader() -> None:
    with pytest.raises(ConfigError, match=r"'sim_arm' is driven by 'ros2'. Use keyboard or gamepad"):
        Leader(load_station("sim_arm"), Keys(), FakeLeader(()))


@pytest.mark.slow
def test_lerobot_makes_its_own_leaders() -> None:
    pytest.importorskip("lerobot.teleoperators")
    assert "shoulder_pan.pos" in open_leader("so101_leader", {"port": "/dev/null"}).action_features
    with pytest.raises(
        ConfigError, match=r"no teleoperator named 'so102_leader'. Did you mean 'so101_leader'"
    ):
        open_leader("so102_leader", {})
    with pytest.raises(ConfigError, match=r"human.leader_options: .*prot.*LeRobot's so101_leader"):
        open_leader("so101_leader", {"prot": "/dev/null"})
