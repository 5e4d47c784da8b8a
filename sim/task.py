"""What a task is: a scene, a reset distribution, success, a reward and an expert, all batched.

B envs, n reset rows, A action dim. Every function sees a `View`: named arrays with a leading
axis over simulations, numpy's or tensors (`robot_rl.core.arrays`), so the same task runs on any back end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import mujoco
import numpy as np

from robot_rl.core.arrays import Array, namespace
from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve, table
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import add_world, add_wrist_camera, sense, sense_joints


@dataclass(frozen=True, kw_only=True)
class Control:
    """How an action in [-1, 1]^A becomes joint targets."""

    kind: Literal["ee_delta", "joint_delta"] = "ee_delta"
    rotation: Literal["none", "yaw", "full"] = "yaw"
    """Which rotations an end-effector action has; the others are held at the home orientation."""
    gripper: Literal["action", "shut"] = "action"
    """The gripper is the last element of the action, or stays shut (if there is one) and is no part of it."""
    hz: float = 20.0
    linear_m: float = 0.05
    """Servo lead of a full-scale translation; in steady state about 0.5 m/s for the Panda."""
    angular_rad: float = 0.25
    joint_rad: float = 0.10
    """Servo lead of a full-scale joint-position delta."""


class View:
    """Named, live, read-only arrays over all simulations: sensors by name, and `fingers.width`."""

    def __init__(self, model: mujoco.MjModel, sensordata: Array, robot: Robot) -> None:
        self._arrays: dict[str, Array] = {}
        self._fingers = [f"{joint}.pos" for joint in robot.finger_joints]
        for i in range(model.nsensor):
            start, size = int(model.sensor_adr[i]), int(model.sensor_dim[i])
            self._arrays[model.sensor(i).name] = sensordata[:, start : start + size]

    def __getitem__(self, sensor: str) -> Array:
        """Returns (B, dim), current as of the end of the last control step."""
        if sensor == "fingers.width":
            width: Any = sum(self._arrays[name] for name in self._fingers)
            return width
        return self._arrays[sensor]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where things are at the beginning of n episodes."""

    joints: Mapping[str, Array] = field(default_factory=dict)
    """Joint name -> (n, 1) position, or (n, 7) position and quaternion of a free joint."""
    held: Mapping[str, Array] = field(default_factory=dict)
    """Free joint name -> (n, 7) position and quaternion in the tool's frame; the gripper closes on it."""
    fingers: float | None = None
    """Position of every finger joint; the robot's home if None."""
    mocap: Mapping[str, Array] = field(default_factory=dict)
    """Mocap body name -> (n, 3) position in metres."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What the expert wants now, in the world frame."""

    position_m: Array
    """(B, 3) where the tool should be."""
    yaw_rad: Array
    """(B,) by how much the tool should turn about z, from where it is."""
    closed: Array
    """(B,) bool: gripper shut."""


class Task:
    """A task is data and batched functions; subclasses fill in the class attributes.

    The observation `state` is the concatenation of the sensors in `observation`, preceded by
    the arm's joint positions, finger positions, tool position and tool x axis.
    """

    name: ClassVar[str]
    instruction: ClassVar[str]
    horizon_s: ClassVar[float]
    control: ClassVar[Control] = Control()
    observation: ClassVar[tuple[str, ...]] = ()
    camera: ClassVar[str] = "front"
    """The camera that shows it best: `front`, `side` or `overhead`."""
    default_robot: ClassVar[str] = "panda"
    """The robot it is made for; any other that reaches its scene will do."""
    needs_gripper: ClassVar[bool] = True
    """Whether a robot without a gripper is refused; where not, the gripper is no part of its actions."""
    vary: ClassVar[tuple[Vary, ...]] = ()
    joint_noise_rad: ClassVar[float] = 0.02
    symmetric: ClassVar[bool] = False
    """Whether the mirror image of an episode (left and right changed) is one that could be met as well."""

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        """Adds objects and their sensors to a spec that already holds robot, table and cameras."""
        raise NotImplementedError

    def start(self, rng: EpisodeRng) -> Start:
        """Draws where n = `rng.num_rows` episodes begin."""
        raise NotImplementedError

    def evaluate(self, view: View) -> dict[str, Array]:
        """Returns named (B,) bool arrays: `success` always, `fail` if the task can be lost."""
        raise NotImplementedError

    def dense_reward(self, view: View) -> Array:
        """Returns (B,) shaped reward in [0, 1]; the sparse reward is success itself."""
        raise NotImplementedError

    def expert(self, view: View, offset_m: Array) -> Aim:
        """Returns what a scripted expert does, its target displaced by `offset_m` (B, 3)."""
        raise NotImplementedError


def control_of(task: Task, robot: Robot, *, at: str = "env.") -> Control:
    """Returns how the task's actions move this robot.

    Raises:
        ConfigError: the task needs a gripper, and the robot has none.
    """
    if robot.gripper_actuator:
        return task.control
    if task.needs_gripper:
        able = [name for name in table("task") if not resolve("task", name).needs_gripper]
        raise ConfigError(
            f"{at}robot: {robot.name} has no gripper, and {task.name} needs one. "
            f"Tasks that need none: {', '.join(able)}. Or name the gripper in the robot file."
        )
    return replace(task.control, gripper="shut")


def compile_task(task: Task, robot: Robot) -> mujoco.MjModel:
    """Builds robot, table, cameras, common sensors and the task's own scene into one model."""
    spec = robot.build()
    add_world(spec)
    add_wrist_camera(spec, robot.tool_site)
    tool = ("site", robot.tool_site)
    sense_joints(spec, (*robot.arm_joints, *robot.finger_joints))
    sense(spec, "tool.pos", "pos", tool)
    sense(spec, "tool.xaxis", "xaxis", tool)
    sense(spec, "tool.zaxis", "zaxis", tool)
    task.scene(spec, robot)
    return spec.compile()


def state_sensors(task: Task, robot: Robot) -> tuple[str, ...]:
    """Returns the sensors that make the observation `state`, in its order."""
    joints = [f"{joint}.pos" for joint in (*robot.arm_joints, *robot.finger_joints)]
    return (*joints, "tool.pos", "tool.xaxis", *task.observation)


def state_layout(task: Task, robot: Robot, model: mujoco.MjModel) -> tuple[Array, tuple[str, ...]]:
    """Returns which elements of `sensordata` make the observation `state`, and their names."""
    index: list[int] = []
    names: list[str] = []
    for sensor in state_sensors(task, robot):
        start, size = int(model.sensor(sensor).adr[0]), int(model.sensor(sensor).dim[0])
        index += range(start, start + size)
        names += [sensor] if size == 1 else [f"{sensor}.{i}" for i in range(size)]
    return np.array(index), tuple(names)


def closeness(distance_m: Array, scale_m: float) -> Array:
    """Returns 1 at zero distance, falling to 0.24 at `scale_m` (1 - tanh)."""
    return 1.0 - namespace(distance_m).tanh(distance_m / scale_m)
