"""The physics options every scene starts from; `robot-rl bench physics` prints the table behind them."""

import mujoco

TIMESTEP_S = 0.005
"""Time step of the shipped scenes."""

IMPRATIO = 10.0
"""Friction stiffness over normal stiffness: what keeps a gripped object from creeping."""


def physics_options(spec: mujoco.MjSpec) -> None:
    """Sets integrator, time step and friction cone of `spec` to the shipped choice.

    `discrete` (MuJoCo >= 3.13) solves servo stiffness and contacts in one implicit step, so position
    servos stay stable and cheap at 5 ms; the elliptic cone with a high impratio is what keeps a
    grasped object from creeping; see `robot_rl.bench.physics`. Solving all contacts as one island
    is a tenth faster in scenes of a few objects; a scene of five or more should clear that flag.
    """
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_DISCRETE
    spec.option.timestep = TIMESTEP_S
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.option.impratio = IMPRATIO
    spec.option.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_ISLAND)


def empty_spec(name: str) -> mujoco.MjSpec:
    """Returns a spec with the shipped options, to which robots are attached."""
    spec = mujoco.MjSpec()
    spec.modelname = name
    spec.compiler.degree = False
    physics_options(spec)
    return spec
