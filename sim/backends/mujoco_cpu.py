"""The CPU back end: `mujoco.batch.Batch`, threads over simulations, results equal at any thread count.

Its arrays are numpy's, or torch tensors in the same memory.
"""

import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import mujoco
import numpy as np
from mujoco import mjtJoint, mjtObj, mjtSensor
from mujoco.batch import Batch

from robot_rl.core.arrays import Array, Kind, copied, namespace_of
from robot_rl.core.errors import ModelError, nearest
from robot_rl.sim.backends.backend import View
from robot_rl.sim.backends.inspect_model import model_hash, penetration_m
from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.cameras import Camera, Renderer, Renderers
from robot_rl.sim.config import MANY_SIMS
from robot_rl.sim.robots.robot import RobotNames

_POSITION_AND_VELOCITY = int(mujoco.mjtStage.mjSTAGE_VEL.value)
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


class MujocoCpu:
    """Steps many copies of one model; `robot_rl.sim.backends.backend.Backend` documents the methods.

    The batch is persistent (one MjData a simulation), so that sensors current at the end of a
    control step cost nothing extra: the next step continues from them.
    """

    caps = frozenset({"set_state", "fork", "render", "batch"})

    device = "cpu"
    largest_state = mujoco.mjMAXVAL

    def __init__(
        self,
        spec: mujoco.MjSpec,
        robot: RobotNames,
        quantities: Sequence[str],
        num_sims: int,
        num_threads: int = 0,
        *,
        array: Kind = "numpy",
    ) -> None:
        """Compiles a scene, with a sensor for each quantity.

        Raises:
            ModelError: the scene lacks what a quantity names.
        """
        for name in dict.fromkeys(quantities):
            _add_sensor(spec, robot, name)
        self.model = model = spec.compile()
        self.xp, self._robot = namespace_of(array), robot
        self.timestep_s = float(model.opt.timestep)
        self.cameras = tuple(model.camera(i).name for i in range(model.ncam))
        self.batch = _batch(model, num_sims, num_threads)
        self.state = self.asarray(self.batch.state)
        self._default_row = copied(self.state[0])
        self._warnings = self.batch.warning[:, :, 1]
        """(sims, kinds), live: how often MuJoCo has warned since the end of the last step."""
        self._warnings[:] = 0
        self.index = ModelIndex(model, robot, self.asarray)
        first, size = model.sensor_adr, model.sensor_dim
        columns = {
            model.sensor(i).name: slice(int(first[i]), int(first[i] + size[i])) for i in range(model.nsensor)
        }
        self.view = View(self.bind("sensordata"), columns, [f"{joint}.pos" for joint in robot.finger_joints])

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Returns values as an array of the back end; a numpy array shares its memory where it can."""
        return self.xp.asarray(values, dtype=dtype, device=self.device)

    def bind(self, field: str) -> Array:
        """Returns a live (sims, ...) view of an MjData field."""
        with warnings.catch_warnings():
            # A tensor cannot be read-only.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return self.asarray(self.batch.bind(field))

    def expand(self, field: str) -> Array:
        return self.asarray(self.batch.expand(field))

    def locate(self, field: str, element: str) -> tuple[int, Array]:
        model, kind = self.model, field.split("_")[0]
        if kind not in _COUNTS or not hasattr(model, field):
            fields = [name for name in dir(model) if name.split("_")[0] in _COUNTS]
            raise ModelError(f"vary: the model has no field {field!r}.{nearest(field, fields)}")
        access = getattr(model, "jnt" if kind == "dof" else kind)
        objects = [access(i).name for i in range(getattr(model, _COUNTS[kind]))]
        if element not in objects:
            raise ModelError(f"vary {field}: no {kind} named {element!r}.{nearest(element, objects)}")
        row = objects.index(element)
        row = int(model.jnt_dofadr[row]) if kind == "dof" else row
        return row, self.asarray(np.array(getattr(model, field)[row], dtype=float).reshape(-1))

    def recompute_constants(self, ids: Array) -> None:
        self.batch.set_const(np.asarray(ids))

    def step(self, num_substeps: int, mask: Array | None = None) -> Array:
        """Advances all or the masked simulations; returns which of them diverged, (sims,) bool.

        A simulation diverges when MuJoCo warns: of a bad state, control or acceleration, or that it
        ran out of contact or constraint memory.
        """
        self.batch.step(None if mask is None else np.asarray(mask), num_substeps, _POSITION_AND_VELOCITY)
        diverged = self._warnings.any(axis=1)
        # From zero each time: MuJoCo puts a bad state back itself, and its counters with it.
        self._warnings[:] = 0
        return self.asarray(diverged)

    def clear(self, ids: Array) -> None:
        self.state[ids] = self._default_row

    def forward(self, ids: Array | None = None) -> None:
        self.batch.forward(None if ids is None else np.asarray(ids), _POSITION_AND_VELOCITY)

    def tool_orientation(self, posture_rad: Sequence[float]) -> Array:
        scratch = mujoco.MjData(self.model)
        for joint, angle in zip(self._robot.arm_joints, posture_rad, strict=True):
            scratch.joint(joint).qpos[:] = angle
        mujoco.mj_kinematics(self.model, scratch)
        return self.asarray(scratch.site(self._robot.tool_site).xmat.reshape(3, 3).copy())

    def servo_time_s(self) -> Array:
        model, servos = self.model, self.index.arm_ctrl
        damping = model.dof_damping[self.index.arm_dof] - model.actuator_biasprm[servos, 2]
        return damping / model.actuator_gainprm[servos, 0]

    def model_hash(self) -> str:
        return model_hash(self.model)

    def penetration_m(self, ids: Array) -> Array:
        return self.asarray(penetration_m(self.model, np.asarray(self.state[ids])))

    def renderer(self, cameras: Sequence[Camera], num_threads: int = 1) -> Renderers:
        return Renderers(lambda: Renderer(self.model, cameras, self.batch), num_threads)


def _add_sensor(spec: mujoco.MjSpec, robot: RobotNames, name: str) -> None:
    """Adds the sensor of a quantity, unless the scene has one of that name.

    `drawer.vel` is of a joint, `tip_in_hole.pos` of a site or body in the frame of another; `tool` is the
    robot's tool site.
    """
    if spec.sensor(name) is not None:
        return
    thing, _, kind = name.rpartition(".")
    joint = spec.joint(thing)
    is_moved_by_one = joint is not None and joint.type in (mjtJoint.mjJNT_HINGE, mjtJoint.mjJNT_SLIDE)
    if is_moved_by_one and kind in _OF_JOINTS:
        if thing == "tool":
            raise ModelError(
                f"quantity {name!r}: a joint is named 'tool', which means the tool site. Rename it."
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
    if thing == "tool":
        return mjtObj.mjOBJ_SITE, robot.tool_site
    if spec.site(thing) is not None:
        return mjtObj.mjOBJ_SITE, thing
    if spec.body(thing) is not None:
        return mjtObj.mjOBJ_XBODY, thing
    known = [each.name for each in (*spec.sites, *spec.bodies, *spec.joints) if each.name]
    raise ModelError(
        f"quantity {quantity!r}: the scene has no joint, site or body {thing!r}.{nearest(thing, known)}"
    )


def _batch(model: mujoco.MjModel, num_sims: int, num_threads: int) -> Batch:
    """Makes the simulations; many of them in another thread, since this one gets no Ctrl-C within C."""
    if num_sims < MANY_SIMS:
        return Batch(model, num_sims, num_threads, persistent=True)
    made: Future[Batch] = Future()

    def make() -> None:
        try:
            made.set_result(Batch(model, num_sims, num_threads, persistent=True))
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, daemon=True).start()  # after an interrupt nothing waits for it
    return made.result()
