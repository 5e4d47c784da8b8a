"""Station files: the arm, its cameras and tracked objects, and its limits.

One YAML file per station, in `configs/stations/` or anywhere: `station=sim_arm` or
`station=path/to/mine.yaml`. n arm joints, in the order of `joints`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import robot_rl
from robot_rl.config import read
from robot_rl.core.errors import ConfigError, nearest, require
from robot_rl.core.files import is_yaml
from robot_rl.hal.safety import SafetyLimits
from robot_rl.real.kinematics import Kinematics, KinematicsConfig

STATIONS = Path(robot_rl.__file__).parent / "configs" / "stations"
"""Folder of the shipped station files."""

Floats = tuple[float, ...]
_OWN_LABELS = frozenset({"robot", "driver", "cameras"})
_SERVO_TIMEOUT_S = 0.1
"""MoveIt Servo's default incoming_command_timeout."""


@dataclass(frozen=True, kw_only=True)
class GripperConfig:
    """The gripper, in its own unit (metres of one finger's travel, radians, or share)."""

    open: float
    closed: float

    def __post_init__(self) -> None:
        require(self.open != self.closed, "gripper.open", self.open, f"not gripper.closed ({self.closed})")


@dataclass(frozen=True, kw_only=True)
class Ros2Config:
    """Where the arm is on the ROS graph. Names are resolved as ROS does: relative ones in `namespace`."""

    namespace: str = ""
    domain_id: int | None = None
    """$ROS_DOMAIN_ID, else 0, if None."""
    transport: Literal["auto", "rclpy", "dds"] = "auto"
    """auto: rclpy where it can be imported, else the pip-only transport."""
    command: Literal["position", "velocity", "trajectory", "twist", "pose"] = "position"
    """position, velocity: forward controllers, streamed at `command_hz`; trajectory: the way that soft
    servos would take, in pieces of `supervisor.max_plan_s`, to a joint_trajectory_controller whose arm
    follows closely; twist, pose: MoveIt Servo's topics."""
    joint_states: str = "joint_states"
    position_controller: str = "forward_position_controller"
    velocity_controller: str = "forward_velocity_controller"
    trajectory_controller: str = "joint_trajectory_controller"
    gripper_controller: str = "gripper_controller"
    gripper_command: Literal["action", "position", "trajectory", "none"] = "action"
    """action: control_msgs/GripperCommand goals; position: a forward controller; trajectory: a
    joint_trajectory_controller of `finger_joints`."""
    gripper_effort_n: float = 40.0
    """Largest effort of gripper goals."""
    command_timeout_s: float | None = None
    """The arm stops by itself this long after the last command, also when the driver host is dead: by a
    time-out of its controller or its firmware. Needed for `command: velocity`, since ros2_control's own
    forward controllers have none and go on at the last speed for ever. twist and pose: the
    incoming_command_timeout of MoveIt Servo, 0.1 if None."""
    servo_node: str = "servo_node"
    servo_scale: tuple[float, float] | None = (0.4, 0.8)
    """MoveIt Servo's linear (m/s) and rotational (rad/s) scale; None for `command_in_type: speed_units`."""
    base_frame: str = "base_link"
    """Frame of twists and poses."""
    controller_manager: str = "controller_manager"
    finger_joints: tuple[str, ...] = ()
    """Joints of /joint_states whose mean is the gripper's opening."""
    estop_max_age_s: float | None = None
    """Longest silence of an e-stop button on the driver's `~/estop` (std_msgs/Bool, false while it is not
    pressed): a longer silence stops the arm, and without a button it does not start. None: no limit."""
    safety_status: str = ""
    """Topic (std_msgs/String) with the reason why the arm has stopped itself; none if empty."""
    clear_service: str = ""
    """std_srvs/Trigger that lifts the arm's own stop; none if empty."""
    reset_service: str = ""
    """std_srvs/Trigger that puts a simulated scene back, after the parameter `episode_seed` of the node
    `scene_node` was set; a person does it if empty."""
    scene_node: str = ""
    remap: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    use_sim_time: bool = False
    """Whether stamps follow /clock."""

    def __post_init__(self) -> None:
        age_s = self.estop_max_age_s
        require(age_s is None or age_s > 0, "ros2.estop_max_age_s", age_s, "above 0, or null")

    @property
    def controller(self) -> str:
        """Gets the station's commands; with twist and pose, it gets those of MoveIt Servo."""
        own = {"position": self.position_controller, "velocity": self.velocity_controller}
        return own.get(self.command, self.trajectory_controller)

    @property
    def coasts_s(self) -> float | None:
        """How long the arm goes on at its last speed after commands stop; None of targets at rest."""
        match self.command:
            case "velocity":
                return self.command_timeout_s
            case "twist" | "pose":
                return _SERVO_TIMEOUT_S if self.command_timeout_s is None else self.command_timeout_s
            case _:
                return None


@dataclass(frozen=True, kw_only=True)
class LeRobotConfig:
    """An arm that LeRobot drives, such as an SO-101."""

    type: str
    """LeRobot's name of it: so101_follower, koch_follower, ..."""
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Fields of LeRobot's own config class: port, id, cameras, ... The servos stay stiff when the driver
    ends, in contrast to LeRobot's default."""
    rad_per_unit: Floats | None = None
    """Radians per unit of LeRobot, one a joint, with the sign of the robot model: pi / 180, for degrees, if
    None. `joint_offset_rad` is added after that."""
    gripper: str = "gripper"
    """LeRobot's name of the gripper's motor."""
    gripper_units: tuple[float, float] = (0.0, 100.0)
    """LeRobot's values of the closed and of the open gripper."""
    state_hz: float = 100.0
    """Rate of the arm's states; the serial bus may allow less."""

    def __post_init__(self) -> None:
        require(self.state_hz > 0, "state_hz", self.state_hz, "above 0")
        closed, opened = self.gripper_units
        require(closed != opened, "gripper_units", self.gripper_units, "two different numbers")
        limp = "disable_torque_on_disconnect"
        require(
            not self.options.get(limp),
            f"options.{limp}",
            self.options.get(limp),
            "false, or left out. An arm without torque falls; switch it off when it lies in its rest",
        )


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """A simulated arm within the driver's process: no ROS, same time."""

    task: str | None = None
    """Task of the scene; the deployed policy's (without one, pick_cube) if None."""
    robot: str | None = None
    """Name or file; the task's own if None."""
    plant: str = "mujoco"
    """Name in the registry."""
    state_hz: float = 200.0
    camera_hz: float = 20.0
    image_size: tuple[int, int] = (96, 96)
    """Height and width in pixels."""

    def __post_init__(self) -> None:
        require(self.state_hz > 0, "state_hz", self.state_hz, "above 0")
        require(self.camera_hz > 0, "camera_hz", self.camera_hz, "above 0")


@dataclass(frozen=True, kw_only=True)
class CameraConfig:
    """A camera: on the ROS graph, or the driver's own."""

    topic: str = ""
    """On the ROS graph; empty for a camera that the driver reads."""
    compressed: bool = True
    """CompressedImage (JPEG or PNG), else Image."""
    max_age_s: float = 0.5
    """Older pictures stop the policy."""
    crop: tuple[int, int, int, int] | None = None
    """top, left, height, width in pixels, before it is resized to what the policy saw in training."""
    stretch: bool = False
    """Resize what has other proportions than the policy's pictures, if training did so, too; else it is
    refused."""


@dataclass(frozen=True, kw_only=True)
class ObjectConfig:
    """A tracked object: PoseStamped in the arm's base frame, or a pose the driver knows."""

    topic: str = ""
    max_age_s: float = 0.5


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """How the supervisor watches and moves the arm."""

    command_hz: float = 100.0
    """Rate of targets to the arm."""
    interpolate: Literal["hold", "linear", "jerk_limited"] = "jerk_limited"
    """Between a plan's targets: hold each (soft servos, as in simulation), straight lines, or the
    fastest motion (ruckig) of the targets of an arm within its limits. Trajectories do not use it."""
    jerk_rad_s3: Floats | None = None
    """Largest joint jerks of homing and of jerk_limited; 100 times the acceleration limits per s if None."""
    hold_after_s: float = 0.25
    """After this time without a plan the arm holds where it is."""
    stop_after_s: float = 2.0
    """After this time it stops and latches."""
    max_state_age_s: float = 0.1
    """Joint states older than that stop the arm."""
    tracking_rad: Floats | None = None
    """Largest |target - position| per joint that may last for `tracking_s`; velocity limit x lookahead x 1.5
    if None."""
    tracking_s: float = 0.5
    max_plan_s: float = 1.0
    """Longest piece of a plan for an arm that follows plans by itself (ros2.command: trajectory); longer
    plans are sent piece by piece. The arm may move for this long without a watcher."""
    flight_s: float = 30.0
    """Seconds that the flight recorder keeps."""


@dataclass(frozen=True, kw_only=True)
class StationConfig:
    """One place with one arm."""

    name: str
    robot: str
    """Name or file of the robot; equal to that of the policy."""
    joints: tuple[str, ...]
    driver: Literal["ros2", "lerobot", "sim"]
    gripper: GripperConfig
    home_rad: Floats
    """Where episodes begin."""
    safe_rad: Floats
    """Where the arm may be left alone."""
    limits: SafetyLimits
    real: bool = True
    """False for simulated arms: only their scenes may be reset by a program."""
    labels: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Free words by which a job can ask for it (`needs.labels.cell=west`): cell, gripper, operator."""
    ros2: Ros2Config | None = None
    lerobot: LeRobotConfig | None = None
    sim: SimConfig | None = None
    cameras: dict[str, CameraConfig] = field(default_factory=lambda: dict[str, CameraConfig]())
    objects: dict[str, ObjectConfig] = field(default_factory=lambda: dict[str, ObjectConfig]())
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    joint_offset_rad: Floats | None = None
    """Calibration: what to add to the arm's joint positions to get the robot model's; zeros if None."""
    kinematics: KinematicsConfig | None = None
    """The chain to the tool; a box for the tool (limits.workspace_low_m) needs it."""

    def __post_init__(self) -> None:
        count, limits = len(self.joints), self.limits
        for key in ("home_rad", "safe_rad", "joint_offset_rad"):
            given = getattr(self, key)
            if given is not None and len(given) != count:
                raise ConfigError(f"{key}: got {len(given)} entries, allowed: {count}, one a joint.")
        units = None if self.lerobot is None else self.lerobot.rad_per_unit
        if units is not None and (len(units) != count or 0.0 in units):
            raise ConfigError(f"lerobot.rad_per_unit: got {units}, allowed: {count} entries, none of them 0.")
        if limits.num_joints != count:
            raise ConfigError(f"limits: got {limits.num_joints} entries in every list, allowed: {count}.")
        for key in ("home_rad", "safe_rad"):
            ranges = zip(self.joints, limits.position_low_rad, limits.position_high_rad, strict=True)
            for (joint, low, high), given in zip(ranges, getattr(self, key), strict=True):
                if not low <= given <= high:
                    raise ConfigError(f"{key}: {joint} is {given}, allowed: {low} to {high}.")
        if getattr(self, self.driver) is None:
            raise ConfigError(f"{self.driver}: missing. A station with driver: {self.driver} needs it.")
        if self.driver == "ros2":
            for group in ("cameras", "objects"):
                for name, entry in getattr(self, group).items():
                    if not entry.topic:
                        raise ConfigError(
                            f"{group}.{name}.topic: missing. A ROS 2 arm brings no sensors itself."
                        )
            self._check_command_timeout(self.ros2 or Ros2Config(), self.supervisor)
        self._check_box()
        for word in sorted(_OWN_LABELS & set(self.labels)):
            raise ConfigError(f"labels: got {word!r}, which the station says itself, allowed: other words.")

    def _check_command_timeout(self, ros2: Ros2Config, supervisor: SupervisorConfig) -> None:
        """Refuses an arm that moves on when the host of its driver is gone."""
        if ros2.command not in ("velocity", "twist", "pose"):
            return
        coasts_s, shortest_s = ros2.coasts_s, 1.0 / supervisor.command_hz
        if coasts_s is None:
            raise ConfigError(
                "ros2.command_timeout_s: missing. With command: velocity the arm moves on at its last speed "
                "if the driver's host dies, unless its controller or its firmware stops it. Say after how "
                "many seconds it does, or use command: position. ros2_control's own forward controllers "
                "have no such time-out."
            )
        require(
            shortest_s < coasts_s <= supervisor.max_plan_s,
            "ros2.command_timeout_s",
            coasts_s,
            f"above {shortest_s:g} (a period of supervisor.command_hz), at most {supervisor.max_plan_s:g} "
            "(supervisor.max_plan_s: the longest time that an arm may move without a watcher)",
        )

    def _check_box(self) -> None:
        chain, low, high = self.kinematics, self.limits.workspace_low_m, self.limits.workspace_high_m
        if chain is not None and set(chain.joints) != set(self.joints):
            raise ConfigError(
                f"kinematics.joints: got {list(chain.joints)}, allowed: {list(self.joints)}, as in joints."
            )
        if low is None or high is None:
            return
        if chain is None:
            raise ConfigError(
                "limits.workspace_low_m: a box for the tool needs to know where the tool is. Add kinematics: "
                "with xyz, rpy and axis of each joint of the arm's URDF, and xyz and rpy of the tool, as in "
                "panda_ros2.yaml, or remove the box."
            )
        for key in ("home_rad", "safe_rad"):
            tool_m = Kinematics(chain, self.joints).tool_m(np.asarray(getattr(self, key)))
            if not ((tool_m >= low) & (tool_m <= high)).all():
                at = tuple(round(float(value), 3) for value in tool_m)
                raise ConfigError(
                    f"{key}: there the tool is at {at} m, allowed: in its box, {low} to {high} m (limits)."
                )


def load_station(name_or_path: str) -> StationConfig:
    """Returns a shipped station by name, or the one a YAML file describes.

    Raises:
        ConfigError: no such station, or a mistake in its file; the message names the key.
    """
    return read(StationConfig, station_file(name_or_path))


def station_file(name_or_path: str) -> Path:
    """Returns the file of a shipped station, or the path itself.

    Raises:
        ConfigError: no station of that name is shipped.
    """
    if is_yaml(name_or_path):
        return Path(name_or_path)
    shipped = {file.stem: file for file in STATIONS.glob("*.yaml")}
    if name_or_path not in shipped:
        raise ConfigError(
            f"station: no station named {name_or_path!r}.{nearest(name_or_path, shipped)} "
            "A station file of your own is given by its path, such as station=path/to/mine.yaml."
        )
    return shipped[name_or_path]
