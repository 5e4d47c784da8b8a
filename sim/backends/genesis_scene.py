"""A compiled scene as Genesis takes it: an MJCF text of what moves and touches, and what the engine lacks.

Genesis reads MJCF by MuJoCo's own parser, but for its integrator, which is put into other numbers here:

- MuJoCo's `discrete` step solves (M + h D + h^2 K) a = f - h K v for servos of stiffness K and damping D. K
  and D are diagonal, so armature + h D + h^2 K and the force are all that Genesis needs: `Servos`.
- It also takes the reference of a constraint at the end of the step. For each row that is the usual reference
  of other `solref` and `solimp`: `continuous_reference`.

h: time step. n: rows. B simulations, U servos.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

import mujoco
import numpy as np
from mujoco import mjtBias, mjtDyn, mjtEq, mjtGain, mjtGeom, mjtJoint, mjtTrn
from numpy.typing import NDArray

from robot_rl.core.arrays import Array
from robot_rl.core.errors import ModelError

Floats = NDArray[Any]
_SHAPES = frozenset(
    {mjtGeom.mjGEOM_PLANE, mjtGeom.mjGEOM_SPHERE, mjtGeom.mjGEOM_CAPSULE, mjtGeom.mjGEOM_CYLINDER}
    | {mjtGeom.mjGEOM_BOX}
)


class Servos:
    """The servos and the damping of a model that `check_scene` accepts, as forces and as inertia.

    A servo pushes its joint by `gain ctrl + bias[0] + bias[1] q + bias[2] v`, within limits.
    """

    def __init__(self, model: mujoco.MjModel, asarray: Callable[[Any], Array]) -> None:
        joints, unlimited = model.actuator_trnid[:, 0], np.array([-np.inf, np.inf])
        ctrl = np.where(model.actuator_ctrllimited[:, None] != 0, model.actuator_ctrlrange, unlimited)
        force = np.where(model.actuator_forcelimited[:, None] != 0, model.actuator_forcerange, unlimited)
        self._ctrl, self._force = asarray(ctrl.T), asarray(force.T)
        self._qpos = asarray(model.jnt_qposadr[joints].astype(np.int64))
        self._dof = asarray(model.jnt_dofadr[joints].astype(np.int64))
        self._timestep_s = float(model.opt.timestep)

    def act(
        self, state: tuple[Array, Array, Array], gain: Array, bias: Array, damping: Array
    ) -> tuple[Array, Array]:
        """Returns generalised forces and what they add to the inertia of each dof, (B, nv) both.

        As MuJoCo's `discrete` integrator: stiffness and damping count as inertia, but not of a servo at its
        limit. Damping must not be applied again.

        Args:
            state: qpos (B, nq), qvel (B, nv) and ctrl (B, U).
            gain: `actuator_gainprm`, (B or 1, U, .); `bias` is `actuator_biasprm`.
            bias: see `gain`.
            damping: `dof_damping`, (B or 1, nv).
        """
        h, (qpos, qvel, ctrl) = self._timestep_s, state
        speed, ctrl = qvel[:, self._dof], ctrl.clip(*self._ctrl)
        force = gain[:, :, 0] * ctrl + bias[:, :, 0] + bias[:, :, 1] * qpos[:, self._qpos]
        force = force + bias[:, :, 2] * speed
        low, high = self._force
        is_free = (force > low) & (force < high)
        stiffness = h * (-bias[:, :, 1]).clip(0.0) * is_free
        total, inertia = -damping * qvel, h * damping + 0.0 * qvel
        total[:, self._dof] += force.clip(low, high) - stiffness * speed
        inertia[:, self._dof] += h * stiffness + h * (-bias[:, :, 2]).clip(0.0) * is_free
        return total, inertia


def touching_geoms(model: mujoco.MjModel) -> list[int]:
    """Returns the geoms that can touch something, which are those that Genesis gets."""
    return [i for i in range(model.ngeom) if model.geom_contype[i] or model.geom_conaffinity[i]]


def check_scene(model: mujoco.MjModel, scene: str) -> None:
    """Refuses a scene of which Genesis would simulate another.

    Raises:
        ModelError: with everything that it lacks.
    """
    geoms, joints = touching_geoms(model), model.jnt_type
    shapes = {mjtGeom(int(model.geom_type[i])) for i in geoms} - _SHAPES
    servo = (
        (model.actuator_trntype == mjtTrn.mjTRN_JOINT)
        & (model.actuator_gaintype == mjtGain.mjGAIN_FIXED)
        & (model.actuator_biastype == mjtBias.mjBIAS_AFFINE)
        & (model.actuator_dyntype == mjtDyn.mjDYN_NONE)
        & (model.actuator_gear[:, 0] == 1.0)
    )
    is_cup = model.actuator_trntype == mjtTrn.mjTRN_BODY
    driven = model.actuator_trnid[~is_cup, 0]
    lacks = {
        "friction of one geom that overrules the other's (priority)": model.geom_priority[geoms].any(),
        f"shapes that touch: {', '.join(sorted(each.name[7:].lower() for each in shapes))}": shapes,
        "contact dimensions other than 3 and 4": not np.isin(model.geom_condim[geoms], (3, 4)).all(),
        "margins and gaps of contacts": model.geom_margin[geoms].any() or model.geom_gap[geoms].any(),
        "pairs or exclusions of contacts": model.npair or model.nexclude,
        "ball joints": (joints == mjtJoint.mjJNT_BALL).any(),
        "springs of joints": model.jnt_stiffness.any(),
        "limits of a joint's whole force": model.jnt_actfrclimited.any(),
        "tendons": model.ntendon,
        "flexible bodies": model.nflex,
        "equalities other than of two joints": (model.eq_type != mjtEq.mjEQ_JOINT).any(),
        "suction cups (adhesion)": is_cup.any(),
        "actuators that are no position servos of a joint": not (servo | is_cup).all(),
        "two actuators of a joint": len(set(driven.tolist())) != len(driven),
        "activations, plugins or histories": model.na or model.nplugin or model.nhistory,
        "two joints of a body": (model.body_jntnum > 1).any(),
        "solref of stiffness and damping": (_solrefs(model) <= 0).any(),
        "contacts stiffer than the time step": _too_stiff(model, geoms),
        "integrators other than `discrete`": model.opt.integrator != mujoco.mjtIntegrator.mjINT_DISCRETE,
    }
    found = [name for name, is_there in lacks.items() if is_there]
    if found:
        raise ModelError(
            f"{scene}: env.engine=genesis lacks what this scene has: {'; '.join(found)}. Use "
            "env.engine=mujoco or mujoco_warp."
        )


def trees(model: mujoco.MjModel) -> list[list[int]]:
    """Returns the bodies of each entity of Genesis, its root first: the world's, and each mocap body's.

    Only the root of an entity can be put elsewhere in each simulation. A mocap body that touches and carries
    nothing is in none.
    """
    owner = [0] * model.nbody
    for i in range(1, model.nbody):
        owner[i] = i if model.body_mocapid[i] >= 0 else owner[model.body_parentid[i]]
    touching = {int(model.geom_bodyid[i]) for i in touching_geoms(model)}
    found = [[i for i in range(model.nbody) if owner[i] == root] for root in sorted(set(owner))]
    return [tree for tree in found if tree[0] == 0 or len(tree) > 1 or tree[0] in touching]


def plain_mjcf(model: mujoco.MjModel, tree: list[int]) -> str:
    """Returns an MJCF text of bodies `b<i>`, joints `j<i>`, touching geoms and equalities of a tree.

    Its root is the text's world. Masses are the compiled ones; servos and damping are left out (`Servos`).
    Numbers have all their digits, of which MuJoCo's own writer keeps six.
    """
    root = Element("mujoco")
    SubElement(root, "compiler", angle="radian", autolimits="false")
    bodies = {tree[0]: SubElement(root, "worldbody")}
    for i in tree[1:]:
        body = bodies[i] = SubElement(bodies[int(model.body_parentid[i])], "body", name=f"b{i}")
        _write(body, pos=model.body_pos[i], quat=model.body_quat[i])
        if model.body_mass[i] > 0:
            _write(
                SubElement(body, "inertial"), mass=model.body_mass[i], pos=model.body_ipos[i],
                quat=model.body_iquat[i], diaginertia=model.body_inertia[i],
            )  # fmt: skip
    joints = [i for i in range(model.njnt) if model.jnt_bodyid[i] in bodies]
    for i in joints:
        _write_joint(bodies[model.jnt_bodyid[i]], model, i)
    solref, solimp = continuous_reference(model.geom_solref, model.geom_solimp, model.opt.timestep)
    for i in touching_geoms(model):
        if model.geom_bodyid[i] in bodies:
            kind = mjtGeom(int(model.geom_type[i])).name.removeprefix("mjGEOM_").lower()
            _write(
                SubElement(bodies[model.geom_bodyid[i]], "geom", type=kind), pos=model.geom_pos[i],
                quat=model.geom_quat[i], size=model.geom_size[i], friction=model.geom_friction[i],
                contype=model.geom_contype[i], conaffinity=model.geom_conaffinity[i],
                condim=model.geom_condim[i], solref=solref[i], solimp=solimp[i],
            )  # fmt: skip
    equalities = SubElement(root, "equality")
    solref, solimp = continuous_reference(model.eq_solref, model.eq_solimp, model.opt.timestep)
    for i in np.flatnonzero(np.isin(model.eq_obj1id, joints)):
        equality = SubElement(equalities, "joint", joint1=f"j{model.eq_obj1id[i]}")
        if model.eq_obj2id[i] >= 0:
            equality.set("joint2", f"j{model.eq_obj2id[i]}")
        _write(equality, polycoef=model.eq_data[i, :5], solref=solref[i], solimp=solimp[i])
    return tostring(root, encoding="unicode")


def continuous_reference(solref: Floats, solimp: Floats, timestep_s: float) -> tuple[Floats, Floats]:
    """Returns `solref` (n, 2) and `solimp` (n, 5) whose usual rows are the `discrete` ones of the given.

    MuJoCo 4.0, "Solver parameters": a row of stiffness k, damping b and impedance d has
    R = (1 - d) / d * weight and reference -k d r - b v. The discrete row divides both by
    f = 1 + h b + h^2 k d, and has b + h k d in the place of b. R is equal at both ends of the impedance, the
    reference at the upper end; in between R is within 0.4 %, at the lower end the stiffness is 1.7 % and the
    damping 0.4 % off, of MuJoCo's default at 5 ms. Of friction's rows the damping is 8 % too large: MuJoCo
    counts no stiffness there, and Genesis has one `solref` for all rows of a contact.
    """
    lowest, highest = solimp[:, 0], solimp[:, 1]
    stiffness, damping = _stiffness_and_damping(solref, solimp)

    def divisor(impedance: Floats) -> Floats:
        return 1.0 + timestep_s * damping + timestep_s**2 * stiffness * impedance

    def impedance_of(impedance: Floats) -> Floats:
        odds = impedance / (1.0 - impedance) * divisor(impedance)
        return odds / (1.0 + odds)

    end = impedance_of(highest)
    new_damping = (damping + timestep_s * stiffness * highest) / divisor(highest)
    new_stiffness = stiffness * highest / divisor(highest) / end
    time_s = 2.0 / (end * new_damping)
    ratio = 1.0 / (end * time_s * np.sqrt(new_stiffness))
    rest = solimp[:, 2:]
    return np.stack([time_s, ratio], axis=1), np.column_stack([impedance_of(lowest), end, rest])


def _write_joint(body: Element, model: mujoco.MjModel, i: int) -> None:
    kind = mjtJoint(int(model.jnt_type[i]))
    if kind == mjtJoint.mjJNT_FREE:
        SubElement(body, "freejoint", name=f"j{i}")
        return
    solref, solimp = continuous_reference(
        model.jnt_solref[i : i + 1], model.jnt_solimp[i : i + 1], model.opt.timestep
    )
    dof, limited = model.jnt_dofadr[i], "true" if model.jnt_limited[i] else "false"
    _write(
        SubElement(
            body, "joint", name=f"j{i}", type=kind.name.removeprefix("mjJNT_").lower(), limited=limited
        ),
        pos=model.jnt_pos[i], axis=model.jnt_axis[i], range=model.jnt_range[i],
        armature=model.dof_armature[dof], ref=model.qpos0[model.jnt_qposadr[i]],
        frictionloss=model.dof_frictionloss[dof], solreflimit=solref[0], solimplimit=solimp[0],
    )  # fmt: skip


def _write(element: Element, **numbers: Any) -> None:
    for name, values in numbers.items():
        element.set(name, " ".join(repr(number) for number in np.ravel(values).tolist()))


def _stiffness_and_damping(solref: Floats, solimp: Floats) -> tuple[Floats, Floats]:
    time_s, ratio = solref.T
    return 1.0 / (solimp[:, 1] * time_s * ratio) ** 2, 2.0 / (solimp[:, 1] * time_s)


def _solrefs(model: mujoco.MjModel) -> Floats:
    return np.concatenate([model.geom_solref[touching_geoms(model)], model.jnt_solref, model.eq_solref])


def _too_stiff(model: mujoco.MjModel, geoms: list[int]) -> bool:
    """Returns whether MuJoCo would soften a contact or limit, whose spring the time step does not resolve."""
    solref = np.concatenate([model.geom_solref[geoms], model.jnt_solref])
    solimp = np.concatenate([model.geom_solimp[geoms], model.jnt_solimp])
    solref = np.where(solref <= 0, np.inf, solref)  # another reason has a line of its own
    stiffness, _ = _stiffness_and_damping(solref, solimp)
    return bool((model.opt.timestep**2 * stiffness * solimp[:, 1] > 1.0).any())
