"""A robot as tasks see it: element names, limits and a function that builds its model.

A robot is joints with position servos, some of which form arms, and end effectors. An action moves the tool
of each arm; a joint of no arm has an element of its own, and so has an end effector. Five kinds of bodies
differ in which of these they have:

    arm         one arm of all joints, a gripper, a suction cup or none
    mobile_arm  the joints of a base, one arm, its gripper
    two_arms    two arms, their grippers
    hand        joints alone
    rotors      end effectors alone, on a body that moves freely

One convention holds for the tool site of every arm: the origin lies between the finger tips, z is the
approach direction (out of the hand), y the direction the fingers open along. The tool site of a suction cup
is in the middle of its lip, that of a hand in its palm, that of rotors in the middle of their body.

A suction cup is a gripper without fingers: closed means that it pulls, open that it does not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mujoco

from robot_rl.core.errors import ConfigError, ModelError, nearest
from robot_rl.hal.safety import SafetyLimits

Floats = tuple[float, ...]
Kind = Literal["arm", "mobile_arm", "two_arms", "hand", "rotors"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A chain of joints with a tool at its end."""

    name: str = ""
    """Begins the names of its actions, such as `left_` of `left_tool.dx`."""
    joints: tuple[str, ...]
    """Base to tool."""
    tool_site: str


@dataclass(frozen=True, kw_only=True)
class Effector:
    """What one number works: a gripper, a suction cup or a rotor."""

    name: str
    """Of its element of the action."""
    actuator: str
    low: float
    """Control value of the action -1: a gripper is shut, a cup pulls, a rotor stands."""
    high: float
    """Control value of the action +1."""
    home: float
    """Control value at the beginning of an episode."""
    is_cup: bool = False
    """Whether it is a suction cup."""
    fingers: tuple[str, ...] = ()
    """Joints that it moves."""

    @property
    def idle(self) -> float:
        """The action in tasks whose actions leave it out: a gripper is shut, a cup does not pull."""
        return 1.0 if self.is_cup else -1.0


@dataclass(frozen=True, kw_only=True)
class RobotNames:
    """A body of one of the kinds: names in its MJCF, limits and home pose."""

    name: str
    """Name in the registry and in configuration."""
    kind: Kind = "arm"
    arm_joints: tuple[str, ...]
    """Joints with position servos, hinges or slides: first those of no arm, then each arm's, base to tool."""
    arm_actuators: tuple[str, ...]
    """Position servos of the arm joints, same order; control in rad, in m for a slide."""
    arms: tuple[Arm, ...] = ()
    """Left out of kind `arm`, which is one arm of all joints. `all_arms` has those of any kind."""
    effectors: tuple[Effector, ...] = ()
    """Left out of kind `arm`, whose gripper the next fields describe. `all_effectors` has those of any."""
    gripper_actuator: str = ""
    """The one position servo of the gripper, or the adhesion actuator of a suction cup; empty, like all of
    the gripper's fields, if there is none."""
    gripper_open: float = 0.0
    """Control value that opens the gripper, in the actuator's unit (m or rad); 0 of a suction cup."""
    gripper_closed: float = 0.0
    """Control value that closes it; of a suction cup the share of its force with which it holds."""
    finger_joints: tuple[str, ...] = ()
    """Joints that grippers move; a suction cup has none."""
    tool_site: str
    """Site between the finger tips, in the lip of a cup, or at the tip of a bare tool: z approaches, y is
    where fingers open. Of several arms that of the first."""
    home_rad: Floats
    """Arm joint positions at rest: the gripper above the table, pointing down."""
    gripper_home: float = 0.0
    """Gripper control value at rest, of kind `arm`."""
    limits: SafetyLimits
    """Limits of the joints; the compiled model's are equal (a test says so)."""

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
        self._check_parts()
        self._check_owners()
        if self.kind == "arm":
            self._check_gripper()
        low, high = self.limits.position_low_rad, self.limits.position_high_rad
        for joint, lowest, home, highest in zip(self.arm_joints, low, self.home_rad, high, strict=True):
            if not lowest <= home <= highest:
                raise ModelError(
                    f"robot {self.name}: home_rad of {joint} is {home}, allowed is [{lowest}, {highest}]."
                )

    def _check_gripper(self) -> None:
        """Refuses fingers that nothing moves, and a suction cup whose controls are no shares of its force."""
        at = f"robot {self.name}"
        if self.finger_joints and not self.gripper_actuator:
            raise ModelError(
                f"{at}: got finger_joints {list(self.finger_joints)} and no gripper_actuator; a gripper has "
                "both, a suction cup has no finger_joints, a robot without them neither."
            )
        controls = (self.gripper_open, self.gripper_closed, self.gripper_home)
        opened, closed, home = controls
        if self.has_cup and not (opened == home == 0.0 < closed <= 1.0):
            raise ModelError(
                f"{at}: got gripper_open, gripper_closed and gripper_home {list(controls)} of a gripper "
                "without finger_joints, which is a suction cup; allowed: 0, a share of its force above 0 and "
                "at most 1, and 0. Or name the finger_joints."
            )

    def _check_parts(self) -> None:
        """Refuses arms and end effectors that do not make a body of the kind."""
        at, num_arms = f"robot {self.name}", {"mobile_arm": 1, "two_arms": 2}.get(self.kind, 0)
        if len(self.arms) != num_arms:
            raise ModelError(f"{at}: got {len(self.arms)} entries of arms, kind {self.kind} has {num_arms}.")
        if (self.kind == "rotors") != bool(self.effectors) and self.kind in ("arm", "hand", "rotors"):
            word = "at least one" if self.kind == "rotors" else "none"
            raise ModelError(f"{at}: got {len(self.effectors)} effectors, kind {self.kind} has {word}.")
        if (self.kind == "rotors") == bool(self.arm_joints):
            word = "none" if self.kind == "rotors" else "at least one"
            raise ModelError(f"{at}: got {len(self.arm_joints)} arm_joints, kind {self.kind} has {word}.")
        in_arms = tuple(joint for arm in self.arms for joint in arm.joints)
        if in_arms != self.arm_joints[self.num_arm_joints - len(in_arms) :]:
            raise ModelError(
                f"{at}: arm_joints must end with the joints of the arms, {list(in_arms)}, got "
                f"{list(self.arm_joints)}."
            )

    def _check_owners(self) -> None:
        """Refuses joints, actuators and tools that both of two arms claim."""
        if len(self.arms) < 2:
            return
        claimed = {
            "joint": (*self.arm_joints, *self.finger_joints),
            "actuator": (*self.arm_actuators, *self.effector_actuators),
            "tool site": tuple(arm.tool_site for arm in self.arms),
        }
        for what, names in claimed.items():
            for name in names:
                if names.count(name) > 1:
                    raise ModelError(
                        f"robot {self.name}: {what} {name!r} is named {names.count(name)} times; each "
                        "belongs to one arm or to one end effector. Give every part its own."
                    )

    @property
    def all_arms(self) -> tuple[Arm, ...]:
        """The arms of a robot of any kind."""
        if self.kind == "arm":
            return (Arm(joints=self.arm_joints, tool_site=self.tool_site),)
        return self.arms

    @property
    def all_effectors(self) -> tuple[Effector, ...]:
        """The end effectors of a robot of any kind."""
        if self.kind != "arm" or not self.gripper_actuator:
            return self.effectors
        closed, opened = self.gripper_closed, self.gripper_open
        return (
            Effector(
                name="gripper",
                actuator=self.gripper_actuator,
                low=closed,
                high=opened,
                home=opened,
                is_cup=self.has_cup,
                fingers=self.finger_joints,
            ),
        )

    @property
    def has_cup(self) -> bool:
        """Whether a robot of kind `arm` has a suction cup in the place of a gripper with fingers."""
        return bool(self.gripper_actuator) and not self.finger_joints

    @property
    def tool_sites(self) -> dict[str, str]:
        """Sites by the names that quantities have for them: `tool`, and of two arms `left_tool` too."""
        arms = self.arms if len(self.arms) > 1 else ()
        return {"tool": self.tool_site, **{f"{arm.name}tool": arm.tool_site for arm in arms}}

    @property
    def tools(self) -> tuple[str, ...]:
        """Names in quantities of the tools that move: `tool`, or those of two arms."""
        if self.kind == "hand":
            return ()
        names = tuple(self.tool_sites)
        return names[1:] or names

    @property
    def finger_home(self) -> Floats:
        """Positions of the finger joints at rest."""
        if self.kind == "arm":
            return (self.gripper_home,) * len(self.finger_joints)
        rest = {joint: each.home for each in self.effectors for joint in each.fingers}
        return tuple(rest[joint] for joint in self.finger_joints)

    @property
    def num_arm_joints(self) -> int:
        return len(self.arm_joints)

    @property
    def effector_actuators(self) -> tuple[str, ...]:
        """The actuators of the end effectors: of an arm the gripper's servo, or nothing."""
        return tuple(effector.actuator for effector in self.all_effectors)

    def own_elements(self, beginnings: tuple[str, ...]) -> tuple[str, ...]:
        """Returns beginnings of names of the state, `joint` and `finger` replaced by this robot's joints.

        So one setting fits robots whose joints have other names, or that have no fingers.
        """
        own = {"joint": self.arm_joints, "finger": self.finger_joints}
        each = [tuple(f"{name}." for name in own[word]) if word in own else (word,) for word in beginnings]
        return tuple(beginning for part in each for beginning in part) or beginnings


@dataclass(frozen=True, kw_only=True)
class Robot(RobotNames):
    """A body, and how to build it."""

    build: Callable[[], mujoco.MjSpec]
    """Returns a fresh spec of the robot alone: base at the origin, z up, no scene."""


def require_arm(robot: RobotNames, what: str, *, at: str = "robot") -> None:
    """Refuses a robot that is not a single arm.

    Args:
        robot: what is refused.
        what: needs an arm.
        at: begins the message.

    Raises:
        ConfigError: says the kind.
    """
    if robot.kind != "arm":
        raise ConfigError(f"{at}: got {robot.name}, of kind {robot.kind}; {what} needs one of kind arm.")


def check_names(robot: RobotNames, spec: mujoco.MjSpec, *, actuators: bool = True) -> None:
    """Raises ModelError if the spec lacks an element that `robot` names."""
    wanted = [("joint", (*robot.arm_joints, *robot.finger_joints), spec.joints)]
    if actuators:
        wanted += [
            ("actuator", (*robot.arm_actuators, *robot.effector_actuators), spec.actuators),
            ("site", (robot.tool_site, *(arm.tool_site for arm in robot.arms)), spec.sites),
        ]
    for kind, names, elements in wanted:
        existing = [element.name for element in elements if element.name]
        for name in names:
            if name not in existing:
                raise ModelError(
                    f"robot {robot.name}: the model has no {kind} {name!r}.{nearest(name, existing)} "
                    f"It has: {', '.join(existing) or 'no named ' + kind}."
                )
