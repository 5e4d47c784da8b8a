"""What start banks need of a compiled model: a hash of what motion depends on, and how deep things overlap.

N rows of states.
"""

import hashlib
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_PARTS = (
    "actuator_", "body_", "dof_", "eq_", "exclude_", "flex_", "geom_", "hfield_", "jnt_", "mesh_", "pair_",
    "qpos", "site_", "tendon_", "wrap_",
)  # fmt: skip
_UNSEEN = (
    "_rgba", "_matid", "_group", "_user", "_castshadow", "adr", "bvhnum", "body_geomnum", "site_size",
    "site_type", "site_sameframe", "_plugin", "texcoord", "_bvhadr",
)  # fmt: skip
"""Ends of names of fields on which no motion depends: looks, and where something is in other fields."""


def model_hash(model: mujoco.MjModel) -> str:
    """Returns a hash (16 hex digits) of all that a motion depends on.

    Names, looks, cameras, lights, sensors and geoms that touch nothing are left out, so that a state fits a
    scene whose looks vary, or of which more is observed. Numbers count as float32: what the compiler computes
    may differ in the last bit between processors.
    """
    found = hashlib.sha256()
    touches = (model.geom_contype | model.geom_conaffinity) != 0
    for name in sorted(dir(model)):
        if not name.startswith(_PARTS) or name.endswith(_UNSEEN):
            continue
        value = getattr(model, name)
        if not isinstance(value, np.ndarray):
            continue
        value = value[touches] if name.startswith("geom_") else value
        _add(found, name, value)
    for name in sorted(dir(model.opt)):
        if not name.startswith("_"):
            _add(found, f"opt.{name}", np.asarray(getattr(model.opt, name)))
    return found.hexdigest()[:16]


def _add(found: Any, name: str, value: Array) -> None:
    if value.dtype.kind not in "fiub":
        return
    value = value.astype(np.float32) if value.dtype.kind == "f" else value.astype(np.int64)
    found.update(f"{name} {value.shape}".encode())
    found.update((value + 0).tobytes())  # -0.0 + 0 is 0.0


def marks(model: mujoco.MjModel) -> tuple[str, ...]:
    """Returns the bodies without joints that have shapes, none of which can touch anything."""
    bodies = [model.body(i) for i in range(1, model.nbody)]
    touching = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    shapes = {body.name: model.geom_bodyid == body.id for body in bodies if body.jntnum[0] == 0}
    return tuple(name for name, own in shapes.items() if own.any() and not touching[own].any())


def penetration_m(model: mujoco.MjModel, states: Array) -> Array:
    """Returns how deep the deepest contact of each state (N, nstate) is, in metres; 0 without contact."""
    kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    scratch = mujoco.MjData(model)
    deepest = np.zeros(len(states))
    for i, row in enumerate(np.ascontiguousarray(states)):
        mujoco.mj_setState(model, scratch, row, kind)
        mujoco.mj_kinematics(model, scratch)
        mujoco.mj_comPos(model, scratch)
        mujoco.mj_collision(model, scratch)
        if scratch.ncon:
            deepest[i] = max(0.0, -float(scratch.contact.dist.min()))
    return deepest
