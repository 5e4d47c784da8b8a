"""Two arms on one base: from one model that has both, or two arms placed next to one another.

    name: my_pair                             name: two_ur5e
    model: {file: both.xml}                   left: {robot: ur5e.yaml, pos_m: [0, 0.35, 0]}
    left:                                     right: {robot: ur5e.yaml, pos_m: [0, -0.35, 0]}
      model: {tool: ..., servos: ...}
      arm_joints: [l1, l2, l3]
      ...                                     # the keys of a robot file for each arm
    right: ...

What is built: the elements of one model keep their names; those of arms that are placed begin with `left_`
and `right_`, on a body `torso`. The tools are `left_tool` and `right_tool`, the end effectors `left_gripper`
and `right_gripper`; left is towards y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import mujoco

from robot_rl.config.build import build
from robot_rl.core.errors import ConfigError, ModelError, RobotRLError
from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.robots.physics import empty_spec
from robot_rl.sim.robots.robot import Arm, Effector, Floats, Robot, RobotNames
from robot_rl.sim.robots.robot_file import ModelSource, RobotFile, build_model, read_description, turned

SIDES = ("left", "right")
"""The keys that tell such a file from others."""
_OF_ONE = ("hand", "tool", "servos", "suction")
"""Keys of `model` that each arm has; the others are of the model that both share."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which arm stands where on the base."""

    robot: str
    """Name in the registry, or a robot file in the same folder or by its path."""
    pos_m: Floats
    """Of the arm's base."""
    rotation_deg: Floats = (0.0, 0.0, 0.0)
    """Turned how, about the axes x, then y, then z."""

    def __post_init__(self) -> None:
        for name in ("pos_m", "rotation_deg"):
            if len(getattr(self, name)) != 3:
                raise ConfigError(f"{name}: got {list(getattr(self, name))}, allowed: three numbers.")


@dataclass(frozen=True, kw_only=True)
class TwoArmsFile:
    """The content of a robot file of two arms."""

    name: str
    model: dict[str, Any] | None = None
    """`ModelSource` without the keys of `_OF_ONE`; none of arms that are placed."""
    left: dict[str, Any]
    """A `Place`; of one model what a robot file has of an arm."""
    right: dict[str, Any]

    @property
    def sides(self) -> dict[str, dict[str, Any]]:
        """What the file says of each arm."""
        return dict(zip(SIDES, (self.left, self.right), strict=True))


def read_two_arms(path: Path, content: Mapping[str, Any], load: Callable[[str], Robot]) -> Robot:
    """Returns the robot of a file with `left:` and `right:`; `load` loads an arm by name or path.

    Raises:
        ModelError: an unknown or missing key, a wrong value, or an arm is wrong.
    """
    at = f"robot file {path}"
    allowed = [field.name for field in fields(TwoArmsFile)]
    if unknown := [str(key) for key in content if key not in allowed]:
        raise ModelError(
            f"{at}: unknown keys {', '.join(unknown)}, allowed: {', '.join(allowed)}. What a robot file says "
            "of an arm stands under left: and right:."
        )
    try:
        found = build(TwoArmsFile, content)
    except ConfigError as error:
        raise ModelError(f"{at}: {error}") from error
    placed = [side for side, given in found.sides.items() if "robot" in given]
    if len(placed) == 1:
        raise ModelError(
            f"{at}: robot: stands under {placed[0]} alone. Give both arms by it, or take both from model:."
        )
    if not placed:
        return _of_one_model(found, path, at)
    if found.model is not None:
        raise ModelError(f"{at}: got model: and robot:. Leave model: out; each arm brings its own.")
    places: list[Place] = []
    for side, given in found.sides.items():
        try:
            places.append(build(Place, given, at=side))
        except ConfigError as error:
            raise ModelError(f"{at}: {error}") from error
    left, right = (
        _load(place, path.parent, load, at, side) for place, side in zip(places, SIDES, strict=True)
    )
    return side_by_side(found.name, (left, right), (places[0], places[1]))


def _load(place: Place, folder: Path, load: Callable[[str], Robot], at: str, side: str) -> Robot:
    """Returns the arm of a side."""
    near = folder / place.robot
    try:
        return load(str(near) if near.is_file() else place.robot)
    except RobotRLError as error:
        text = str(error)  # of this file, where it names itself
        raise ModelError(text if text.startswith(at) else f"{at}: {side}.robot: {text}") from error


def side_by_side(name: str, arms: tuple[Robot, Robot], places: tuple[Place, Place]) -> Robot:
    """Returns two arms, left and right, on a body `torso` at the origin.

    Raises:
        ModelError: one is no single arm, or their limits cannot be those of one robot.
    """
    for side, arm in zip(SIDES, arms, strict=True):
        if arm.kind != "arm":
            raise ModelError(f"robot {name}: {side}: got {arm.name}, of kind {arm.kind}; allowed: kind arm.")

    def build_both() -> mujoco.MjSpec:
        spec = empty_spec(name)
        torso = spec.worldbody.add_body(name="torso")
        for side, arm, place in zip(SIDES, arms, places, strict=True):
            one = arm.build()
            one.visual = spec.visual  # else MuJoCo warns that it leaves the arm's out
            frame = torso.add_frame(pos=place.pos_m, quat=turned(place.rotation_deg))
            spec.attach(one, frame=frame, prefix=f"{side}_")
        return spec

    left, right = (prefixed(arm, f"{side}_") for side, arm in zip(SIDES, arms, strict=True))
    return both(name, left, right, build_both)


def prefixed(arm: Robot, prefix: str) -> Robot:
    """Returns an arm, all of whose elements are called by longer names; its `build` does not know them."""

    def longer(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{prefix}{name}" for name in names)

    return replace(
        arm,
        arm_joints=longer(arm.arm_joints),
        arm_actuators=longer(arm.arm_actuators),
        gripper_actuator=f"{prefix}{arm.gripper_actuator}" if arm.gripper_actuator else "",
        finger_joints=longer(arm.finger_joints),
        tool_site=f"{prefix}{arm.tool_site}",
    )


def both(name: str, left: RobotNames, right: RobotNames, spec_of: Callable[[], mujoco.MjSpec]) -> Robot:
    """Returns the robot of two arms, whose elements have the same names in its model.

    Raises:
        ModelError: they claim the same joint, actuator or tool, or their limits cannot be those of one robot.
    """
    sides = {f"{side}_": arm for side, arm in zip(SIDES, (left, right), strict=True)}
    arms, effectors = list[Arm](), list[Effector]()
    for side, arm in sides.items():
        arms.append(Arm(name=side, joints=arm.arm_joints, tool_site=arm.tool_site))
        effectors += [
            replace(each, name=f"{side}{each.name}", home=arm.gripper_home) for each in arm.all_effectors
        ]
    return Robot(
        name=name,
        kind="two_arms",
        arm_joints=(*left.arm_joints, *right.arm_joints),
        arm_actuators=(*left.arm_actuators, *right.arm_actuators),
        arms=tuple(arms),
        effectors=tuple(effectors),
        finger_joints=(*left.finger_joints, *right.finger_joints),
        tool_site=left.tool_site,
        home_rad=(*left.home_rad, *right.home_rad),
        limits=_limits(name, left.limits, right.limits),
        build=spec_of,
    )


def _limits(name: str, left: SafetyLimits, right: SafetyLimits) -> SafetyLimits:
    """Returns the limits of both arms; a box is one of one tool, and other numbers have to be equal."""
    found: dict[str, Any] = {}
    for field in fields(SafetyLimits):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, tuple) and isinstance(other, tuple) and not field.name.startswith("workspace"):
            found[field.name] = (*one, *other)
        elif one != other or isinstance(one, tuple):
            raise ModelError(
                f"robot {name}: limits.{field.name}: got {one} of the left arm and {other} of the right one, "
                "allowed: equal ones, and no box for a tool. Leave them out, or make them equal."
            )
        else:
            found[field.name] = one
    return SafetyLimits(**found)


def _of_one_model(found: TwoArmsFile, path: Path, at: str) -> Robot:
    """Returns two arms that one model has."""
    shared = found.model
    if shared is None:
        raise ModelError(f"{at}: model: missing. Give the file of both arms, or left.robot and right.robot.")
    own = [key for key in shared if key in _OF_ONE]
    if own:
        raise ModelError(f"{at}: model.{own[0]}: is of one arm. Write it under left.model and right.model.")
    try:
        source = build(ModelSource, shared, at="model")
    except ConfigError as error:
        raise ModelError(f"{at}: {error}") from error
    if source.builder is not None:
        raise ModelError(
            f"{at}: model.builder: got {source.builder!r}, allowed: none, as a builder makes one arm. Give "
            "model.file, a model of both arms; or write a robot file for each arm, and place them by "
            "left.robot and right.robot."
        )
    if source.file is None:
        raise ModelError(f"{at}: model.file: missing. Give the path of an MJCF or URDF that has both arms.")
    arms: dict[str, RobotFile] = {}
    for side, given in found.sides.items():
        mine = given.get("model") or {}
        if not isinstance(mine, Mapping):
            raise ModelError(f"{at}: {side}.model: got {mine!r}, allowed: keys and values.")
        for key in ("name", "kind", *(f"model.{key}" for key in mine if key not in _OF_ONE)):
            if key in given or key.startswith("model."):
                raise ModelError(f"{at}: {side}.{key}: is of both arms. Leave it out there.")
        merged = {
            "tool_site": f"{side}_tool",
            **given,
            "name": f"{found.name} {side}",
            "model": {**shared, **mine},
        }
        arms[f"{side}_"] = read_description(merged, f"{at}: {side}")
    left, right = arms.values()
    return both(found.name, left, right, lambda: build_model(found.name, source, arms, path.parent))
