"""A robot as it was measured: a file that names another robot, and says what its joints are really like.

    like: panda                        # a name, or a robot file in the same folder or by its path
    measured:
      friction_n_m: [1.1, 0.9, ...]    # dry friction of each arm joint
      damping_n_m_s: [...]
      armature_kg_m2: [...]

Names, limits and home are those of the other robot, so a policy fits both. `robot-rl sysid`
writes such files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import mujoco
import numpy as np

from robot_rl.config.build import build
from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.sim.robots.robot import Floats, Robot

LIKE = "like"
"""The key that tells such a file from others."""
_ALLOWED = "friction_n_m, damping_n_m_s and armature_kg_m2, a list each"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What arm joints are like, base to tool; N and kg for N m and kg m^2 where a joint slides."""

    friction_n_m: Floats | None = None
    """Dry friction; the robot's own if None, as below."""
    damping_n_m_s: Floats | None = None
    """Viscous damping of the joint, without that of its servo."""
    armature_kg_m2: Floats | None = None
    """Inertia of rotor and gears, as felt at the joint."""

    def __post_init__(self) -> None:
        for name, numbers in self.given().items():
            if not all(0 <= number < float("inf") for number in numbers):
                raise ConfigError(f"measured.{name}: got {list(numbers)}, allowed: numbers from 0.")

    def given(self) -> dict[str, Floats]:
        """Returns what was measured."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: numbers for name, numbers in found.items() if numbers is not None}


def joints_of(robot: Robot) -> Measured:
    """Returns what the joints of a robot's model are like."""
    spec = robot.build()
    joints = [spec.joint(name) for name in robot.arm_joints]
    return Measured(
        friction_n_m=tuple(float(joint.frictionloss) for joint in joints),
        damping_n_m_s=tuple(float(joint.damping[0]) for joint in joints),
        armature_kg_m2=tuple(float(joint.armature) for joint in joints),
    )


def with_measured(robot: Robot, measured: Measured) -> Robot:
    """Returns the robot with other joints.

    Raises:
        ModelError: there are not as many numbers as joints.
    """
    for name, numbers in measured.given().items():
        if len(numbers) != robot.num_arm_joints:
            raise ModelError(
                f"robot {robot.name}: measured.{name} has {len(numbers)} entries for {robot.num_arm_joints} "
                f"arm joints: {', '.join(robot.arm_joints)}."
            )

    def build_measured() -> mujoco.MjSpec:
        spec = robot.build()
        write_joints(spec, robot, {name: np.array(value) for name, value in measured.given().items()})
        return spec

    return replace(robot, build=build_measured)


def write_joints(spec: mujoco.MjSpec, robot: Robot, numbers: Mapping[str, Any]) -> None:
    """Writes numbers (n,) by the names of `Measured` into the arm joints of a spec."""
    for name, values in numbers.items():
        for joint_name, value in zip(robot.arm_joints, values, strict=True):
            joint = spec.joint(joint_name)
            if name == "friction_n_m":
                joint.frictionloss = value
            elif name == "armature_kg_m2":
                joint.armature = value
            else:
                joint.damping = np.array([value, *joint.damping[1:]])


def read_measured(path: Path, content: Mapping[str, Any], load: Callable[[str], Robot]) -> Robot:
    """Returns the robot of a file with `like:`; `load` loads the other robot by name or path.

    Raises:
        ModelError: an unknown key, a wrong value, or the other robot is wrong.
    """
    at = f"robot file {path}"
    unknown = content.keys() - {LIKE, "measured"}
    if unknown:
        raise ModelError(
            f"{at}: unknown keys {', '.join(sorted(map(str, unknown)))}, allowed: {LIKE}, measured. "
            f"A file with `{LIKE}:` changes joints only; the rest is that of the other robot."
        )
    other, near = str(content[LIKE]), path.parent / str(content[LIKE])
    given = content.get("measured") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{at}: measured: got {given!r}, allowed: {_ALLOWED}.")
    try:
        measured = build(Measured, dict(cast("Mapping[str, Any]", given)))
    except ConfigError as error:
        raise ModelError(f"{at}: {error}") from error
    return with_measured(load(str(near) if near.is_file() else other), measured)
