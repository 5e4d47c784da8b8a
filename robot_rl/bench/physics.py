"""Compares contact shapes, integrators and time steps on one grasp, to choose those of the scenes.

A Panda closes its gripper on a 4 cm, 50 g cube, lifts it, holds it still for `hold_s`, then moves at random
for `shake_s`. Every setting runs the same script in the same number of simulations, with the cube at
different positions.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.sim.robots.panda import GRIPPER_KP_N_M, PANDA
from robot_rl.sim.robots.physics import physics_options
from robot_rl.sim.scene import add_free_box, add_world

Array = NDArray[Any]
Shapes = Literal["capsule pads", "box pads", "hulls"]

_AT_CUBE_RAD = (0.0, 0.4568, 0.0, -2.4244, 0.0, 2.8812, 0.7854)
"""Tool at (0.48, 0, 0.02) m, pointing down."""
_LIFTED_RAD = (0.0, -0.0814, 0.0, -2.4108, 0.0, 2.3294, 0.7854)
"""Tool at (0.48, 0, 0.24) m, pointing down."""
_HALF_CUBE_M = 0.02
_CUBE_MASS_KG = 0.05
_CONTROL_S = 0.02
_CREEP_S = 2.0
_LOST_M = 0.025
"""A cube that moved this far in the hand is lost."""

_INTEGRATORS = {
    "euler": mujoco.mjtIntegrator.mjINT_EULER,
    "implicitfast": mujoco.mjtIntegrator.mjINT_IMPLICITFAST,
    "discrete": mujoco.mjtIntegrator.mjINT_DISCRETE,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table."""

    shapes: Shapes = "capsule pads"
    """Collision shapes; hulls: convex meshes on every link, ten boxes on the fingers, self-collision."""
    integrator: Literal["euler", "implicitfast", "discrete"] = "discrete"
    timestep_ms: float = 5.0
    elliptic: bool = True
    """Elliptic cone with impratio 10; else MuJoCo's defaults, pyramidal with 1."""
    grip: float = 5.0
    """Gripper gain as a multiple of the usual model's 100 N/m."""
    arm: Literal["soft", "stiff"] = "soft"
    """Arm servos: the shipped gains, or ten times as stiff and damped, as in the usual model."""
    remark: str = ""


SHIPPED = Setting(remark="shipped")
USUAL = Setting(
    shapes="hulls", integrator="implicitfast", timestep_ms=2.0, elliptic=False, grip=1.0, arm="stiff",
    remark="the usual default",
)  # fmt: skip
SETTINGS = (
    USUAL,
    Setting(shapes="hulls", integrator="implicitfast", timestep_ms=1.0, elliptic=False, arm="stiff"),
    Setting(shapes="hulls", timestep_ms=2.0, arm="stiff"),
    Setting(shapes="hulls"),
    Setting(integrator="euler", timestep_ms=2.0, elliptic=False),
    Setting(integrator="euler", timestep_ms=4.0, elliptic=False),
    Setting(integrator="euler"),
    Setting(integrator="implicitfast", elliptic=False),
    Setting(integrator="implicitfast"),
    Setting(integrator="implicitfast", arm="stiff"),
    Setting(elliptic=False),
    Setting(grip=1.0),
    Setting(arm="stiff"),
    Setting(shapes="box pads"),
    SHIPPED,
    Setting(timestep_ms=10.0),
    Setting(timestep_ms=0.5, remark="reference"),
)


def run(*, hold_s: float = 10.0, shake_s: float = 4.0, num_sims: int = 8) -> dict[str, Any]:
    """Measures all settings; about half a minute on one core.

    Args:
        hold_s: seconds of holding the cube still.
        shake_s: seconds of random motion.
        num_sims: simulations for each setting.
    """
    return compare(SETTINGS, hold_s=hold_s, shake_s=shake_s, num_sims=num_sims)


def compare(settings: Sequence[Setting], *, hold_s: float, shake_s: float, num_sims: int) -> dict[str, Any]:
    """Measures the settings one after the other; returns `{title, rows, notes}`.

    Raises:
        ConfigError: no time to hold, or no simulation.
    """
    if hold_s < _CREEP_S or shake_s <= 0 or num_sims < 1:
        raise ConfigError(
            f"bench physics: got hold_s={hold_s:g}, shake_s={shake_s:g}, num_sims={num_sims}; allowed: "
            f"hold_s at least {_CREEP_S:g}, shake_s above 0, num_sims at least 1"
        )
    rows = [measure(setting, hold_s=hold_s, shake_s=shake_s, num_sims=num_sims) for setting in settings]
    return {
        "title": f"Physics: lift a cube, hold {hold_s:g} s, move {shake_s:g} s; {num_sims} simulations",
        "rows": rows,
        "notes": [
            f"held: share of cubes within {_LOST_M * 1e3:g} mm of the grasp after {hold_s:g} s; "
            f"held_moving: after another {shake_s:g} s of random joint motion",
            f"creep_mm: mean motion of the cube in the hand in the first {_CREEP_S:g} s without motion",
            "cpu_ms: processor time per simulated second in motion; steps_per_cpu_s: physics steps per "
            f"second of one core, in motion and at rest; MuJoCo {mujoco.__version__}",
        ],
    }


def measure(setting: Setting, *, hold_s: float, shake_s: float, num_sims: int) -> dict[str, Any]:
    """Returns one row: whether the grasp holds, its creep, and the cost of a second."""
    grasp = Grasp(build_scene(setting), num_sims)
    grasp.close_and_lift()
    before = grasp.cube_in_tool()
    grasp.still(_CREEP_S)
    creep_m = np.linalg.norm(grasp.cube_in_tool() - before, axis=1)
    grasp.still(hold_s - _CREEP_S)
    held = grasp.held()
    still_cost = grasp.step_cost_s()
    grasp.shake(shake_s)
    moving_cost = grasp.step_cost_s()
    return {
        "shapes": setting.shapes,
        "integrator": setting.integrator,
        "timestep_ms": setting.timestep_ms,
        "cone": "elliptic 10" if setting.elliptic else "pyramidal 1",
        "grip": f"x{setting.grip:g}",
        "arm": setting.arm,
        "held": float(held.mean()),
        "held_moving": float(grasp.held().mean()),
        "creep_mm": float(creep_m.mean() * 1e3),
        "cpu_ms": moving_cost / setting.timestep_ms * 1e6,
        "steps_per_cpu_s": 1.0 / moving_cost,
        "steps_per_cpu_s_still": 1.0 / still_cost,
        "remark": setting.remark,
    }


class Grasp:
    """The scripted grasp in B simulations, with the time of their steps."""

    def __init__(self, model: mujoco.MjModel, num_sims: int) -> None:
        self._model, self._rng = model, np.random.default_rng(0)
        self._batch = Batch(model, num_sims, 1)
        self._ctrl = self._batch.bind("ctrl")
        self._substeps = round(_CONTROL_S / model.opt.timestep)
        self._spent_s, self._steps = 0.0, 0
        self._tool, self._cube = model.site(PANDA.tool_site).id, model.body("cube").id
        qpos = self._batch.bind("qpos")
        qpos[:, :7], qpos[:, 7:9] = _AT_CUBE_RAD, PANDA.gripper_open
        qpos[:, 9:16] = _cube_poses(num_sims)
        self._batch.forward()
        self._grasped = self.cube_in_tool()

    def close_and_lift(self) -> None:
        """Opens, closes in 0.5 s, lifts in 1.5 s, and waits 1 s."""
        self._go(_AT_CUBE_RAD, _AT_CUBE_RAD, 0.2, PANDA.gripper_open)
        self._go(_AT_CUBE_RAD, _AT_CUBE_RAD, 0.5, PANDA.gripper_closed)
        self._grasped = self.cube_in_tool()
        self._go(_AT_CUBE_RAD, _LIFTED_RAD, 1.5, PANDA.gripper_closed)
        self.still(1.0)

    def still(self, duration_s: float) -> None:
        self._go(_LIFTED_RAD, _LIFTED_RAD, duration_s, PANDA.gripper_closed)

    def shake(self, duration_s: float) -> None:
        """Moves the arm's targets by a filtered random walk with a pull to the lifted posture."""
        offset = np.zeros((len(self._ctrl), 7))
        speed = np.zeros_like(offset)
        for _ in range(round(duration_s / _CONTROL_S)):
            speed = 0.9 * speed + 0.003 * self._rng.normal(size=speed.shape) - 0.03 * offset
            offset += speed
            self._ctrl[:, :7] = np.asarray(_LIFTED_RAD) + offset
            self._step()

    def cube_in_tool(self) -> Array:
        """Returns where the cube is in the tool's frame, (B, 3) metres."""
        sims = len(self._ctrl)
        tool_from_world = self._batch.bind("site_xmat")[:, self._tool].reshape(sims, 3, 3)
        offset = self._batch.bind("xpos")[:, self._cube] - self._batch.bind("site_xpos")[:, self._tool]
        return np.einsum("bji,bj->bi", tool_from_world, offset)

    def held(self) -> Array:
        """Returns in which simulations the cube is still where it was grasped, (B,) bool."""
        return np.linalg.norm(self.cube_in_tool() - self._grasped, axis=1) < _LOST_M

    def step_cost_s(self) -> float:
        """Returns processor time per physics step since the last call."""
        cost = self._spent_s / max(self._steps, 1)
        self._spent_s, self._steps = 0.0, 0
        return cost

    def _go(self, start: Sequence[float], end: Sequence[float], duration_s: float, gripper_m: float) -> None:
        self._ctrl[:, 7] = gripper_m
        for share in np.linspace(0.0, 1.0, round(duration_s / _CONTROL_S) + 1)[1:]:
            self._ctrl[:, :7] = (1 - share) * np.asarray(start) + share * np.asarray(end)
            self._step()

    def _step(self) -> None:
        began = time.process_time()
        self._batch.step(None, self._substeps)
        self._spent_s += time.process_time() - began
        self._steps += self._substeps * len(self._ctrl)


def build_scene(setting: Setting) -> mujoco.MjModel:
    """Compiles the Panda, the table and the cube under one setting."""
    spec = PANDA.build()
    add_world(spec)
    add_free_box(spec, "cube", half_size_m=(_HALF_CUBE_M,) * 3, mass_kg=_CUBE_MASS_KG)
    if setting.shapes in _RESHAPE:
        _RESHAPE[setting.shapes](spec)
    _set_gains(spec, setting)
    physics_options(spec)
    spec.option.integrator = _INTEGRATORS[setting.integrator]
    spec.option.timestep = setting.timestep_ms * 1e-3
    if not setting.elliptic:
        spec.option.cone, spec.option.impratio = mujoco.mjtCone.mjCONE_PYRAMIDAL, 1.0
    return spec.compile()


def _cube_poses(num_sims: int) -> Array:
    """Returns (B, 7) poses: off centre by up to 4 mm and turned by up to 0.15 rad."""
    rng = np.random.default_rng(1)
    half_yaw = 0.5 * rng.uniform(-0.15, 0.15, num_sims)
    poses = np.zeros((num_sims, 7))
    poses[:, :3] = (0.48, 0.0, _HALF_CUBE_M)
    poses[:, :2] += rng.uniform(-0.004, 0.004, (num_sims, 2))
    poses[:, 3], poses[:, 6] = np.cos(half_yaw), np.sin(half_yaw)
    return poses


def _set_gains(spec: mujoco.MjSpec, setting: Setting) -> None:
    """Scales gripper and arm gains; the finger damping follows the gain."""
    scale = {PANDA.gripper_actuator: setting.grip * 100.0 / GRIPPER_KP_N_M}
    if setting.arm == "stiff":
        scale |= dict.fromkeys(PANDA.arm_actuators, 10.0)
    for name, factor in scale.items():
        actuator = spec.actuator(name)
        actuator.gainprm = actuator.gainprm * factor
        actuator.biasprm = actuator.biasprm * factor


def _box_pads(spec: mujoco.MjSpec) -> None:
    """Replaces the capsule of each pad by a box: four contacts with a face, not two."""
    for side in ("left", "right"):
        _add_box(spec, side, (0.0, 0.004, 0.045), (0.0095, 0.004, 0.0095))
        spec.delete(spec.geom(f"{side}_pad"))


def _hulls(spec: mujoco.MjSpec) -> None:
    """Gives links convex meshes and self-collision, and each finger a block and four nubs."""
    parent = {body.name: body.parent.name for body in spec.bodies[1:]}
    for side in ("left", "right"):
        spec.delete(spec.geom(f"{side}_pad"))
    capsules = [
        geom for body in spec.bodies[1:] for geom in body.geoms if geom.type == mujoco.mjtGeom.mjGEOM_CAPSULE
    ]
    for index, geom in enumerate(capsules):
        points = _capsule_points(np.asarray(geom.fromto), float(geom.size[0]))
        spec.add_mesh(name=f"hull{index}", uservert=points.ravel())
        geom.parent.add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname=f"hull{index}")
        spec.delete(geom)
    for side in ("left", "right"):
        _add_box(spec, side, (0.0, 0.0055, 0.045), (0.0085, 0.004, 0.0085))
        for x in (-0.0055, 0.0055):
            for z in (0.0395, 0.0500):
                _add_box(spec, side, (x, 0.002, z), (0.003, 0.002, 0.003))
    for body, above in parent.items():
        grand = parent.get(above)
        if grand is not None and grand != "world":
            spec.add_exclude(bodyname1=body, bodyname2=grand)
    spec.add_exclude(bodyname1="left_finger", bodyname2="right_finger")


def _add_box(spec: mujoco.MjSpec, side: str, pos_m: Sequence[float], half_m: Sequence[float]) -> None:
    spec.body(f"{side}_finger").add_geom(
        type=mujoco.mjtGeom.mjGEOM_BOX,
        pos=pos_m,
        size=half_m,
        contype=0,
        conaffinity=1,
        friction=(0.5, 0.005, 0.0001),
    )


def _capsule_points(fromto: Array, radius_m: float) -> Array:
    """Returns (132, 3) points of a capsule's surface: three rings of 22 on each cap."""
    start, end = fromto[:3], fromto[3:]
    axis = (end - start) / np.linalg.norm(end - start)
    side = np.cross(axis, np.eye(3)[np.argmin(np.abs(axis))])
    side /= np.linalg.norm(side)
    other = np.cross(axis, side)
    angles = np.linspace(0.0, 2.0 * np.pi, 22, endpoint=False)
    circle = np.cos(angles)[:, None] * side + np.sin(angles)[:, None] * other
    rings = [
        centre + radius_m * (np.cos(tilt) * circle + sign * np.sin(tilt) * axis)
        for centre, sign in ((start, -1.0), (end, 1.0))
        for tilt in (0.0, 0.5, 1.2)
    ]
    return np.concatenate(rings)


_RESHAPE: dict[Shapes, Callable[[mujoco.MjSpec], None]] = {"box pads": _box_pads, "hulls": _hulls}
"""Replaces the shipped capsule pads."""
