"""The compiled model of a scene, which every back end on MuJoCo's format starts from."""

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
from mujoco import mjtJoint, mjtObj, mjtSensor
from numpy.typing import NDArray

from robot_rl.core.errors import ModelError, nearest
from robot_rl.sim.robots.robot import RobotNames

Floats = NDArray[Any]
_OF_JOINTS = {"pos": mjtSensor.mjSENS_JOINTPOS, "vel": mjtSensor.mjSENS_JOINTVEL}
_OF_FRAMES = {
    kind: getattr(mjtSensor, f"mjSENS_FRAME{kind.upper()}")
    for kind in ("pos", "quat", "xaxis", "yaxis", "zaxis", "linvel", "angvel")
}
_COUNTS = {
    "actuator": "nu",
    "body": "nbody",
    "cam": "ncam",
    "dof": "njnt",
    "geom": "ngeom",
    "jnt": "njnt",
    "light": "nlight",
    "mat": "nmat",
    "site": "nsite",
}
"""First word of a field's name -> the size of its list of names."""
_STATES = {
    "TIME": "time",
    "QPOS": "qpos",
    "QVEL": "qvel",
    "ACT": "act",
    "HISTORY": "history",
    "WARMSTART": "qacc_warmstart",
    "CTRL": "ctrl",
    "QFRC_APPLIED": "qfrc_applied",
    "XFRC_APPLIED": "xfrc_applied",
    "EQ_ACTIVE": "eq_active",
    "MOCAP_POS": "mocap_pos",
    "MOCAP_QUAT": "mocap_quat",
    "USERDATA": "userdata",
    "PLASTIC": "plastic",
}
"""Bit of mjtState -> field of the data."""


def compile_scene(spec: mujoco.MjSpec, robot: RobotNames, quantities: Sequence[str]) -> mujoco.MjModel:
    """Compiles a scene, with a sensor for each quantity.

    Raises:
        ModelError: the scene lacks what a quantity names.
    """
    for name in dict.fromkeys(quantities):
        _add_sensor(spec, robot, name)
    return spec.compile()


def sensor_columns(model: mujoco.MjModel) -> dict[str, slice]:
    """Returns sensor name -> columns of `sensordata`."""
    first, size = model.sensor_adr, model.sensor_dim
    return {model.sensor(i).name: slice(int(first[i]), int(first[i] + size[i])) for i in range(model.nsensor)}


def state_columns(model: mujoco.MjModel) -> dict[str, slice]:
    """Returns field of the data -> its columns in a row of mjSTATE_INTEGRATION, where it has any."""
    bits = {name: getattr(mujoco.mjtState, f"mjSTATE_{name}", None) for name in _STATES}
    known = sorted(((bit.value, name) for name, bit in bits.items() if bit is not None))
    columns, first = dict[str, slice](), 0
    for bit, name in known:
        size = mujoco.mj_stateSize(model, bit) if bit & mujoco.mjtState.mjSTATE_INTEGRATION.value else 0
        if size:
            columns[_STATES[name]] = slice(first, first + size)
            first += size
    return columns


def locate(model: mujoco.MjModel, field: str, element: str) -> tuple[int, Floats]:
    """Returns the row of a named object in a field of the model, and its nominal value (k,).

    Raises:
        ModelError: there is no such field, or no such object.
    """
    kind = field.split("_")[0]
    if kind not in _COUNTS or not hasattr(model, field):
        fields = [name for name in dir(model) if name.split("_")[0] in _COUNTS]
        raise ModelError(f"vary: the model has no field {field!r}.{nearest(field, fields)}")
    access = getattr(model, "jnt" if kind == "dof" else kind)
    objects = [access(i).name for i in range(getattr(model, _COUNTS[kind]))]
    if element not in objects:
        raise ModelError(f"vary {field}: no {kind} named {element!r}.{nearest(element, objects)}")
    row = objects.index(element)
    row = int(model.jnt_dofadr[row]) if kind == "dof" else row
    return row, np.array(getattr(model, field)[row], dtype=float).reshape(-1)


def tool_orientation(model: mujoco.MjModel, robot: RobotNames, posture_rad: Sequence[float]) -> Floats:
    """Returns the tool's orientation at a posture of the arm, (3, 3), world from tool."""
    scratch = mujoco.MjData(model)
    for joint, angle in zip(robot.arm_joints, posture_rad, strict=True):
        scratch.joint(joint).qpos[:] = angle
    mujoco.mj_kinematics(model, scratch)
    return scratch.site(robot.tool_site).xmat.reshape(3, 3).copy()


def servo_time_s(model: mujoco.MjModel, robot: RobotNames) -> Floats:
    """Returns the time constants of the arm's servos, (n,)."""
    servos = [model.actuator(name).id for name in robot.arm_actuators]
    dofs = [int(model.joint(name).dofadr[0]) for name in robot.arm_joints]
    damping = model.dof_damping[dofs] - model.actuator_biasprm[servos, 2]
    return damping / model.actuator_gainprm[servos, 0]


def _add_sensor(spec: mujoco.MjSpec, robot: RobotNames, name: str) -> None:
    """Adds the sensor of a quantity, unless the scene has one of that name.

    `drawer.vel` is of a joint, `tip_in_hole.pos` of a site or body in the frame of another; `tool` is the
    robot's tool site, `left_tool` and `right_tool` those of two arms.
    """
    if spec.sensor(name) is not None:
        return
    thing, _, kind = name.rpartition(".")
    joint = spec.joint(thing)
    is_moved_by_one = joint is not None and joint.type in (mjtJoint.mjJNT_HINGE, mjtJoint.mjJNT_SLIDE)
    if is_moved_by_one and kind in _OF_JOINTS:
        if thing in robot.tool_sites:
            raise ModelError(
                f"quantity {name!r}: a joint is named {thing!r}, which means the tool site. Rename it."
            )
        spec.add_sensor(name=name, type=_OF_JOINTS[kind], objtype=mjtObj.mjOBJ_JOINT, objname=thing)
        return
    if kind not in _OF_FRAMES:
        raise ModelError(
            f"quantity {name!r}: no kind {kind!r} of this thing.{nearest(kind, {*_OF_JOINTS, *_OF_FRAMES})}"
        )
    thing, _, frame = thing.partition("_in_")
    objtype, objname = _frame(spec, robot, thing, name)
    sensor = spec.add_sensor(name=name, type=_OF_FRAMES[kind], objtype=objtype, objname=objname)
    if frame:
        sensor.reftype, sensor.refname = _frame(spec, robot, frame, name)


def _frame(spec: mujoco.MjSpec, robot: RobotNames, thing: str, quantity: str) -> tuple[mjtObj, str]:
    """Returns the kind and name of the site or body that a quantity means."""
    if thing in robot.tool_sites:
        return mjtObj.mjOBJ_SITE, robot.tool_sites[thing]
    if spec.site(thing) is not None:
        return mjtObj.mjOBJ_SITE, thing
    if spec.body(thing) is not None:
        return mjtObj.mjOBJ_XBODY, thing
    known = [each.name for each in (*spec.sites, *spec.bodies, *spec.joints) if each.name]
    raise ModelError(
        f"quantity {quantity!r}: the scene has no joint, site or body {thing!r}.{nearest(thing, known)}"
    )
