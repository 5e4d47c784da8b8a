"""What a task is: a scene, a reset distribution, success, a reward and an expert, all batched.

B envs, n reset rows, A action dim. Every function sees a `View`: named arrays with a leading
axis over simulations, numpy's or tensors (`robot_rl.core.arrays`), so the same task runs on any back end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import mujoco

from robot_rl.core.arrays import Array, namespace
from robot_rl.core.errors import ConfigError, require
from robot_rl.core.registry import resolve, table
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.backends.backend import View
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Kind, Robot
from robot_rl.sim.scene import add_world, add_wrist_camera
from robot_rl.sim.start_classes import Resets
from robot_rl.sim.variation import Variation


@dataclass(frozen=True, kw_only=True)
class Control:
    """How an action in [-1, 1]^A becomes joint targets."""

    kind: Literal["ee_delta", "joint_delta"] = "ee_delta"
    rotation: Literal["none", "yaw", "full"] = "yaw"
    """Rotations in an end-effector action; the others are held at the home orientation."""
    gripper: Literal["action", "step", "shut"] = "action"
    """`action`: the last elements of the action command the end effectors; `step`: they change the commands.
    `shut`: grippers stay shut, cups off."""
    gripper_strokes_s: float = 1.0
    """Strokes per second by which a full-scale `step` changes the command of a gripper."""
    hz: float = 20.0
    linear_m: float = 0.05
    """Servo lead of a full-scale translation; in steady state about 0.5 m/s for the Panda."""
    angular_rad: float = 0.25
    joint_rad: float = 0.10
    """Servo lead of a full-scale joint-position delta; m for a slide."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Positions at the beginning of n episodes."""

    joints: Mapping[str, Array] = field(default_factory=dict)
    """Joint name -> (n, 1) position, or (n, 7) position and quaternion of a free joint."""
    velocities: Mapping[str, Array] = field(default_factory=dict)
    """Joint name -> (n, 1) velocity, or (n, 6) of a free joint: linear in the world, angular in the body."""
    held: Mapping[str, Array] = field(default_factory=dict)
    """Free joint name -> (n, 7) position and quaternion in the tool's frame; the gripper closes on it."""
    fingers: float | None = None
    """Position of every finger joint; the robot's home if None."""
    mocap: Mapping[str, Array] = field(default_factory=dict)
    """Mocap body name -> (n, 3) position in metres."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The expert's present target for the tool, in the world frame."""

    position_m: Array
    """(B, 3) position of the tool."""
    yaw_rad: Array
    """(B,) turn of the tool about z, from its present yaw."""
    closed: Array
    """(B,) bool: gripper shut."""


class Task:
    """A task is data and batched functions; subclasses fill in the class attributes.

    The observation `state` is the concatenation of the quantities in `observation`, preceded by
    the joint positions, finger positions, and position and x axis of each tool. docs/tasks.md says how
    quantities are named; the back end compiles the names.
    """

    name: ClassVar[str]
    instruction: ClassVar[str]
    horizon_s: ClassVar[float]
    control: ClassVar[Control] = Control()
    observation: ClassVar[tuple[str, ...]] = ()
    """Quantities that the policy observes."""
    privileged: ClassVar[tuple[str, ...]] = ()
    """More quantities: success, reward and expert read them, the policy does not."""
    camera: ClassVar[str] = "front"
    """The camera that shows the task best: `front`, `side` or `overhead`."""
    default_robot: ClassVar[str] = "panda"
    """The robot that the task is made for; others that reach the scene work too."""
    body: ClassVar[Kind] = "arm"
    """The kind of robots that do it; others are refused."""
    needs_gripper: ClassVar[bool] = True
    """Whether arms without a gripper are refused."""
    cup_serves: ClassVar[bool] = False
    """Whether a suction cup serves, in a task that needs a gripper."""
    hold_s: ClassVar[float] = 0.0
    """How long `success` of `evaluate` must last without a break until it counts."""
    ends_at_success: ClassVar[bool] = True
    """Whether success ends an episode; if not, each step of success is paid until the horizon."""
    vary: ClassVar[tuple[Vary, ...]] = ()
    resets: ClassVar[Resets | None] = None
    """Of which starts `robot-rl resets generate` makes a bank; see docs/resets.md."""
    variation: ClassVar[Variation | None] = None
    """In what its scenes may differ; see docs/variation.md."""
    joint_noise_rad: ClassVar[float] = 0.02
    symmetric: ClassVar[bool] = False
    """Whether the mirror image of an episode (left and right exchanged) is an episode of the task."""

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        """Adds objects to a spec that already holds robot, table and cameras."""
        raise NotImplementedError

    def start(self, rng: EpisodeRng) -> Start:
        """Draws the beginnings of n = `rng.num_rows` episodes."""
        raise NotImplementedError

    def evaluate(self, view: View) -> dict[str, Array]:
        """Returns named (B,) bool arrays: `success` always, `fail` if the task can be lost."""
        raise NotImplementedError

    def dense_reward(self, view: View) -> Array:
        """Returns (B,) shaped reward in [0, 1]; the sparse reward is success itself."""
        raise NotImplementedError

    def predicates(self) -> dict[str, Callable[[View], Array]]:
        """Returns what `env.formula` may name in addition to `sim/predicates.py`: (B,) bool of a view."""
        return {}

    def assist(self, view: View) -> dict[str, Array]:
        """Returns the way (B, 3) to its goal, in m, of each thing by its name that virtual forces may pull.

        Optional: `env.domain.assist_n` needs it.
        """
        raise NotImplementedError

    def expert(self, view: View, offset_m: Array) -> Aim:
        """Returns the target of the scripted expert, displaced by `offset_m` (B, 3)."""
        raise NotImplementedError

    @classmethod
    def has_expert(cls) -> bool:
        """Returns whether somebody wrote an expert for the task."""
        return cls.expert is not Task.expert


def control_of(
    task: Task, robot: Robot, *, common: bool = False, gripper_steps: bool = False, at: str = "env."
) -> Control:
    """Returns how the task's actions move this robot.

    Args:
        task: what is done.
        robot: what does it.
        common: the actions that all tasks share; see `EnvConfig.common_actions`.
        gripper_steps: see `EnvConfig.gripper_steps`.
        at: begins the message.

    Raises:
        ConfigError: the robot is of another kind than the task's, lacks a gripper or the fingers that the
            task needs, or has no grippers to which `gripper_steps` could apply.
    """
    if robot.kind != task.body:
        fit = [name for name in table("task") if resolve("task", name).body == robot.kind]
        raise ConfigError(
            f"{at}robot: {robot.name} is of kind {robot.kind}, and {task.name} is for {task.body}, such as "
            f"{task.default_robot}. Tasks for {robot.kind}: {', '.join(fit) or 'none'}."
        )
    control = replace(task.control, rotation="yaw", gripper="action") if common else task.control
    if not can_grip(type(task), robot):
        able = [name for name in table("task") if can_grip(resolve("task", name), robot)]
        able = ", ".join(name for name in able if resolve("task", name).body == robot.kind)
        if robot.has_cup:
            raise ConfigError(
                f"{at}robot: {robot.name} has a suction cup, and {task.name} needs fingers. "
                f"Tasks for it: {able}."
            )
        raise ConfigError(
            f"{at}robot: {robot.name} has no gripper, and {task.name} needs one. "
            f"Tasks that need none: {able}. Or name the gripper in the robot file."
        )
    if gripper_steps:
        works = control.gripper != "shut" and bool(robot.all_arms) and bool(robot.all_effectors)
        allowed = f"false: no action of {task.name} works a gripper of {robot.name}"
        require(works, f"{at}gripper_steps", gripper_steps, allowed)
        return replace(control, gripper="step")
    return control if robot.all_effectors else replace(control, gripper="shut")


def can_grip(task: type[Task], robot: Robot) -> bool:
    """Returns whether a robot has the end effector that a task needs, if it needs one."""
    return not task.needs_gripper or (task.cup_serves if robot.has_cup else bool(robot.all_effectors))


def build_scene(task: Task, robot: Robot) -> mujoco.MjSpec:
    """Returns robot, table, cameras and the task's own scene as one MJCF."""
    spec = robot.build()
    add_world(spec)
    if robot.all_arms:
        add_wrist_camera(spec, robot.tool_site)
    task.scene(spec, robot)
    return spec


def state_quantities(task: Task, robot: Robot) -> tuple[str, ...]:
    """Returns the quantities that make the observation `state`, in its order."""
    joints = [f"{joint}.pos" for joint in (*robot.arm_joints, *robot.finger_joints)]
    tools = [f"{tool}.{kind}" for tool in robot.tools for kind in ("pos", "xaxis")]
    return (*joints, *tools, *task.observation)


def closeness(distance_m: Array, scale_m: float) -> Array:
    """Returns 1 at zero distance, falling to 0.24 at `scale_m` (1 - tanh)."""
    return 1.0 - namespace(distance_m).tanh(distance_m / scale_m)
