"""Station files: the shipped ones fit their robots, and mistakes are told by key, value and remedy."""

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from robot_rl.config import CONFIGS, plain
from robot_rl.core.errors import ConfigError
from robot_rl.real.station import STATIONS, load_station
from tests.real.supervisor.rig import two_joint_station

SHIPPED = sorted(path.stem for path in STATIONS.glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_station_has_the_limits_of_its_robot(name):
    station = load_station(name)
    robot = yaml.safe_load((CONFIGS / "robots" / f"{station.robot}.yaml").read_text())
    limits = asdict(station.limits)
    assert {key: list(limits[key]) for key in robot["limits"]} == robot["limits"]
    assert list(station.home_rad) == robot["home_rad"]
    assert (station.gripper.open, station.gripper.closed) == (robot["gripper_open"], robot["gripper_closed"])
    assert station.name == name


def test_only_simulated_arms_say_that_nothing_real_moves():
    assert [name for name in SHIPPED if not load_station(name).real] == [
        "sim_arm",
        "sim_arm_cameras",
        "sim_arm_trajectory",
        "sim_in_process",
    ]


LIMITS = plain(two_joint_station().limits)
PLANAR = {"a": {"axis": [0, 0, 1]}, "b": {"xyz": [0.5, 0.0, 0.0], "axis": [0, 0, 1]}}
"""Links of 0.5 m."""


def write(folder: Path, **changes: object) -> str:
    """Writes a station of two joints; a change of None leaves a key out."""
    content = {**plain(two_joint_station()), **changes}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return str(path)


def test_a_file_of_ones_own_is_read(tmp_path):
    assert load_station(write(tmp_path)) == two_joint_station()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"home_rad": [0.0]}, "home_rad: got 1 entries, allowed: 2, one a joint."),
        ({"safe_rad": [0.0, 2.5]}, "safe_rad: b is 2.5, allowed: -2.0 to 2.0."),
        ({"joint_offset_rad": [0.0] * 3}, "joint_offset_rad: got 3 entries, allowed: 2, one a joint."),
        (
            {"joints": ["a"], "home_rad": [0.0], "safe_rad": [0.0]},
            "limits: got 2 entries in every list, allowed: 1.",
        ),
        ({"driver": "ros2"}, "ros2: missing. A station with driver: ros2 needs it."),
        ({"driver": "ros1"}, "driver: got 'ros1', allowed: one of 'ros2', 'lerobot', 'sim'"),
        (
            {"gripper": {"open": 1.0, "closed": 1.0}},
            "gripper.open: got 1.0, allowed: not gripper.closed (1.0)",
        ),
        (
            {"driver": "ros2", "ros2": {}, "cameras": {"front": {}}},
            "cameras.front.topic: missing. A ROS 2 arm brings no sensors itself.",
        ),
        (
            {"driver": "lerobot", "lerobot": {"type": "so101_follower", "rad_per_unit": [1.0, 0.0]}},
            "lerobot.rad_per_unit: got (1.0, 0.0), allowed: 2 entries, none of them 0.",
        ),
        (
            {"driver": "ros2", "ros2": {"command": "velocity"}},
            "ros2.command_timeout_s: missing. With command: velocity the arm moves on at its last speed if "
            "the driver's host dies",
        ),
        (
            {"driver": "ros2", "ros2": {"command": "velocity", "command_timeout_s": 1.5}},
            "ros2.command_timeout_s: got 1.5, allowed: above 0.01 (a period of supervisor.command_hz), at "
            "most 1 (supervisor.max_plan_s: the longest time that an arm may move without a watcher)",
        ),
        (
            {"driver": "ros2", "ros2": {"command": "twist", "command_timeout_s": 0.0}},
            "ros2.command_timeout_s: got 0.0, allowed: above 0.01",
        ),
        (
            {
                "driver": "lerobot",
                "lerobot": {"type": "so101_follower", "options": {"disable_torque_on_disconnect": True}},
            },
            "options.disable_torque_on_disconnect: got True, allowed: false, or left out. An arm without "
            "torque falls",
        ),
        (
            {"kinematics": {"joints": {"a": PLANAR["a"]}, "tool": {}}},
            "kinematics.joints: got ['a'], allowed: ['a', 'b'], as in joints.",
        ),
        (
            {"kinematics": {"joints": {"a": {"axis": [0, 0, 2]}, "b": PLANAR["b"]}, "tool": {}}},
            "kinematics.joints.a: axis: got (0.0, 0.0, 2.0), allowed: a direction of length 1",
        ),
        (
            {"kinematics": {"joints": PLANAR, "tool": {"xyz": [0.5, 0.0]}}},
            "kinematics.tool.xyz: got [0.5, 0.0], allowed: a list of 3",
        ),
        (
            {"kinematics": {"joints": PLANAR, "tool": {"rpy": [float("nan"), 0.0, 0.0]}}},
            "kinematics.tool: rpy: got (nan, 0.0, 0.0), allowed: finite numbers",
        ),
        (
            {"limits": LIMITS | {"workspace_low_m": [0, 0, 0], "workspace_high_m": [1, 1, 1]}},
            "limits.workspace_low_m: a box for the tool needs to know where the tool is. Add kinematics:",
        ),
        (
            {  # stretched out: 0.5 + 0.5 m
                "limits": LIMITS | {"workspace_low_m": [-1, -1, -1], "workspace_high_m": [0.9, 1, 1]},
                "kinematics": {"joints": PLANAR, "tool": {"xyz": [0.5, 0.0, 0.0]}},
            },
            "home_rad: there the tool is at (1.0, 0.0, 0.0) m, allowed: in its box, (-1.0, -1.0, -1.0) to (",
        ),
        ({"sim": {"state_hz": 0}}, "state_hz: got 0.0, allowed: above 0"),
        ({"homes_rad": [0.0, 0.0]}, "homes_rad: no such key. Did you mean 'home_rad'?"),
    ],
)
def test_mistakes_name_the_key_what_is_there_and_what_is_allowed(tmp_path, changes, message):
    with pytest.raises(ConfigError) as error:
        load_station(write(tmp_path, **changes))
    assert message in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_arms_that_move_at_a_speed_say_when_they_stop_by_themselves(tmp_path):
    def coasts_s(**ros2: object) -> float | None:
        station = load_station(write(tmp_path, driver="ros2", ros2=ros2))
        assert station.ros2 is not None
        return station.ros2.coasts_s

    assert coasts_s(command="velocity", command_timeout_s=0.25) == 0.25
    assert coasts_s(command="pose") == 0.1  # MoveIt Servo's own
    assert coasts_s(command="position") is None


def test_an_unknown_station_is_answered_with_the_nearest():
    with pytest.raises(ConfigError) as error:
        load_station("sim_arn")
    assert str(error.value) == (
        "station: no station named 'sim_arn'. Did you mean 'sim_arm'? "
        "A station file of your own is given by its path, such as station=path/to/mine.yaml."
    )
