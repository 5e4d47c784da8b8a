"""A robot as tasks see it: element names, limits and a function that builds its model.

One convention holds for every robot's tool site: the origin lies between the finger tips, z is
the approach direction (out of the hand), y the direction the fingers open along.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mujoco

from robot_rl.core.errors import ModelError, nearest
from robot_rl.hal.safety import SafetyLimits

Floats = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RobotNames:
    """One arm, with a gripper or with none: names in its MJCF, limits and home pose."""

    name: str
    """Name in the registry and in configuration."""
    arm_joints: tuple[str, ...]
    """Joints of the arm, hinges or slides, base to tool."""
    arm_actuators: tuple[str, ...]
    """Position servos of the arm joints, same order; control in rad, in m for a slide."""
    gripper_actuator: str = ""
    """The one position servo of the gripper; empty, like all of the gripper's fields, if there is none."""
    gripper_open: float = 0.0
    """Control value that opens the gripper, in the actuator's unit (m or rad)."""
    gripper_closed: float = 0.0
    """Control value that closes it."""
    finger_joints: tuple[str, ...] = ()
    """Joints the gripper moves."""
    tool_site: str
    """Site between the finger tips, or at the tip of a bare tool: z approaches, y is where fingers open."""
    home_rad: Floats
    """Arm joint positions at rest: the gripper above the table, pointing down."""
    gripper_home: float = 0.0
    """Gripper control value at rest."""
    limits: SafetyLimits
    """Limits of the arm; the compiled model's are equal (a test says so)."""

    def __post_init__(self) -> None:
        num_joints = len(self.arm_joints)
        sizes = {
            "arm_actuators": len(self.arm_actuators),
            "home_rad": len(self.home_rad),
            "limits": len(self.limits.position_low_rad),
        }
        for name, size in sizes.items():
            if size != num_joints:
                raise ModelError(f"robot {self.name}: {name} has {size} entries for {num_joints} arm joints.")
        if bool(self.gripper_actuator) != bool(self.finger_joints):
            raise ModelError(
                f"robot {self.name}: got gripper_actuator {self.gripper_actuator!r} and finger_joints "
                f"{list(self.finger_joints)}; a gripper has both, a robot without one neither."
            )
        low, high = self.limits.position_low_rad, self.limits.position_high_rad
        for joint, lowest, home, highest in zip(self.arm_joints, low, self.home_rad, high, strict=True):
            if not lowest <= home <= highest:
                raise ModelError(
                    f"robot {self.name}: home_rad of {joint} is {home}, allowed is [{lowest}, {highest}]."
                )

    @property
    def num_arm_joints(self) -> int:
        return len(self.arm_joints)

    @property
    def gripper_actuators(self) -> tuple[str, ...]:
        """The gripper's servo, or nothing."""
        return (self.gripper_actuator,) if self.gripper_actuator else ()

    def own_elements(self, beginnings: tuple[str, ...]) -> tuple[str, ...]:
        """Returns beginnings of names of the state, `joint` and `finger` replaced by this robot's joints.

        So one setting fits robots whose joints have other names, or that have no fingers.
        """
        own = {"joint": self.arm_joints, "finger": self.finger_joints}
        each = [tuple(f"{name}." for name in own[word]) if word in own else (word,) for word in beginnings]
        return tuple(beginning for part in each for beginning in part) or beginnings


@dataclass(frozen=True, kw_only=True)
class Robot(RobotNames):
    """One arm, and how to build it."""

    build: Callable[[], mujoco.MjSpec]
    """Returns a fresh spec of the robot alone: base at the origin, z up, no scene."""


def check_names(robot: RobotNames, spec: mujoco.MjSpec, *, actuators: bool = True) -> None:
    """Raises ModelError if the spec lacks an element that `robot` names."""
    wanted = [("joint", (*robot.arm_joints, *robot.finger_joints), spec.joints)]
    if actuators:
        wanted += [
            ("actuator", (*robot.arm_actuators, *robot.gripper_actuators), spec.actuators),
            ("site", (robot.tool_site,), spec.sites),
        ]
    for kind, names, elements in wanted:
        existing = [element.name for element in elements if element.name]
        for name in names:
            if name not in existing:
                raise ModelError(
                    f"robot {robot.name}: the model has no {kind} {name!r}.{nearest(name, existing)} "
                    f"It has: {', '.join(existing) or 'no named ' + kind}."
                )
