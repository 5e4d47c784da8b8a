"""Genesis against MuJoCo: the formulas without it, then whole envs where it is installed.

On Genesis's CPU device, in double precision: kernels compile for half a minute a scene.
"""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from robot_rl.core.errors import ConfigError, ModelError, RenderError
from robot_rl.core.registry import resolve
from robot_rl.rollout.envs import make_env
from robot_rl.sim.backends.frames import Frames
from robot_rl.sim.backends.genesis import Genesis
from robot_rl.sim.backends.genesis_scene import Servos, check_scene, continuous_reference, plain_mjcf, trees
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.backends.scene_model import compile_scene, state_columns
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.looks import scene_and_looks
from robot_rl.sim.robots.gantry import GANTRY
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.vector import SimVectorEnv

NUM_ENVS = 4
MOST_APART, MOST_APART_SEEN = 1e-4, 1e-3
"""Of joints (m, rad), and of any observation, after 50 control steps: those of tests/sim/test_engines.py."""


def model_of(task: str, quantities: Sequence[str] = ()) -> mujoco.MjModel:
    ours = resolve("task", task)()
    robot = load_robot(ours.default_robot)
    return compile_scene(scene_and_looks(ours, robot, "fixed")[0], robot, quantities)


def moved(model: mujoco.MjModel, seed: int = 0) -> mujoco.MjData:
    """Returns a random state of a model, a step of which has been computed."""
    rng, state = np.random.default_rng(seed), mujoco.MjData(model)
    state.qpos[:] = model.qpos0 + 0.1 * rng.standard_normal(model.nq)
    mujoco.mj_normalizeQuat(model, state.qpos)
    state.qvel[:] = 0.5 * rng.standard_normal(model.nv)
    mujoco.mj_forward(model, state)
    return state


# --- formulas ----------------------------------------------------------------------------------


def test_rows_of_a_usual_step_are_those_of_the_discrete_one() -> None:
    """MuJoCo's default at 5 ms, d from 0.9 to 0.95.

    k = 1 / (0.95 * 0.02)^2 = 2770.08, b = 2 / (0.95 * 0.02) = 105.263. At 0.95 f = 1 + 0.005 b + 0.005^2 *
    0.95 k = 1.592105: the odds 19 become 30.25, so d = 0.968. At 0.9 f = 1.588643: 9 becomes 14.2978,
    d = 0.934631.
    Damping (b + 0.005 * 0.95 k) / f = 74.3802, so the time is 2 / (0.968 * 74.3802) = 0.0277778. Stiffness
    0.95 k / f / 0.968 = 1707.53, so the ratio is 1 / (0.968 * 0.0277778 * 41.3223) = 0.9.
    """
    solref, solimp = np.array([[0.02, 1.0]]), np.array([[0.9, 0.95, 0.001, 0.5, 2.0]])
    new_ref, new_imp = continuous_reference(solref, solimp, 0.005)
    np.testing.assert_allclose(new_ref, [[0.0277778, 0.9]], rtol=1e-5)
    np.testing.assert_allclose(new_imp, [[0.934631, 0.968, 0.001, 0.5, 2.0]], rtol=1e-5)


def test_servos_as_force_and_inertia_are_the_discrete_step() -> None:
    """(M + inertia) a = force + weights - bias gives MuJoCo's acceleration, also of a servo at its limit."""
    model = model_of("reach")
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_CONSTRAINT)
    state = moved(model)
    state.ctrl[:] = model.actuator_ctrlrange[:, 0]
    state.ctrl[2] = state.qpos[2] + 0.01
    before = state.qvel.copy()
    servos, mass = Servos(model, np.asarray), np.zeros((model.nv, model.nv))
    mujoco.mj_forward(model, state)
    mujoco.mj_fullM(model, state, mass)
    force, inertia = servos.act(
        (state.qpos[None], before[None], state.ctrl[None]),
        model.actuator_gainprm[None],
        model.actuator_biasprm[None],
        model.dof_damping[None],
    )
    smooth = force[0] + state.qfrc_gravcomp - state.qfrc_bias
    at_limit = np.abs(state.actuator_force) >= model.actuator_forcerange[:, 1]
    assert at_limit.any()
    assert not at_limit.all()
    mujoco.mj_step(model, state)
    acceleration = np.linalg.solve(mass + np.diag(inertia[0]), smooth)
    np.testing.assert_allclose((state.qvel - before) / model.opt.timestep, acceleration, rtol=1e-9, atol=1e-9)


def test_frames_are_read_as_mujoco_reads_them() -> None:
    kinds = ("pos", "quat", "xaxis", "yaxis", "zaxis", "linvel", "angvel")
    things = ("cube", "tool", "goal", "cube_in_tool", "tool_in_cube", "hand_in_cube")
    names = [f"{thing}.{kind}" for thing in things for kind in kinds]
    model = model_of("push_cube", [*names, "joint2.pos", "finger_joint1.vel"])
    state, speed = moved(model), np.zeros(6)
    velocity = np.zeros((model.nbody, 6))
    for body in range(model.nbody):
        mujoco.mj_objectVelocity(model, state, mujoco.mjtObj.mjOBJ_XBODY, body, speed, 0)
        velocity[body] = speed
    bodies = state.xpos[None], state.xquat[None], velocity[None, :, 3:], velocity[None, :, :3]
    frames = Frames(model, np.asarray)
    read = frames.read(bodies, state.qpos[None], state.qvel[None])
    np.testing.assert_allclose(read[0], state.sensordata, atol=1e-12)
    position, matrix = frames.sites(state.xpos[None], state.xquat[None])
    np.testing.assert_allclose(position[0], state.site_xpos, atol=1e-12)
    np.testing.assert_allclose(matrix[0], state.site_xmat, atol=1e-12)


@pytest.mark.parametrize(("task", "roots"), [("pick_cube", ["world"]), ("open_drawer", ["world", "chest"])])
def test_the_text_for_the_engine_has_all_that_moves_and_touches(task: str, roots: list[str]) -> None:
    model = model_of(task)
    found = trees(model)
    assert [model.body(tree[0]).name for tree in found] == roots
    texts = [mujoco.MjModel.from_xml_string(plain_mjcf(model, tree)) for tree in found]
    assert sum(text.nv for text in texts) == model.nv
    touching = (model.geom_contype | model.geom_conaffinity) != 0
    assert sum(text.ngeom for text in texts) == touching.sum()
    for text, tree in zip(texts, found, strict=True):
        for body in tree[1:]:
            np.testing.assert_array_equal(text.body(f"b{body}").mass, model.body_mass[body])
            np.testing.assert_allclose(text.body(f"b{body}").inertia, model.body_inertia[body], rtol=1e-12)
            np.testing.assert_allclose(
                text.body(f"b{body}").invweight0, model.body_invweight0[body], rtol=1e-6, atol=1e-9
            )


def test_a_scene_that_the_engine_would_change_is_refused_by_name() -> None:
    check_scene(model_of("push_cube"), "push_cube")
    with pytest.raises(ModelError, match=r"gantry_peg: env.engine=genesis lacks.*priority.*Use env"):
        check_scene(model_of("gantry_peg"), "gantry_peg")
    spec = GANTRY.build()
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    spec.joint("x").stiffness = np.array([1.0, 0.0, 0.0])
    with pytest.raises(ModelError, match=r"mine: .*springs of joints; integrators other than `discrete`"):
        check_scene(spec.compile(), "mine")


def test_columns_of_a_state_are_mujocos() -> None:
    model = model_of("push_cube")
    state, kind = moved(model), mujoco.mjtState.mjSTATE_INTEGRATION.value
    row = np.zeros(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, state, row, kind)
    columns = state_columns(model)
    assert max(column.stop for column in columns.values()) == len(row)
    for field in ("qpos", "qvel", "ctrl", "mocap_pos"):
        np.testing.assert_array_equal(row[columns[field]], getattr(state, field).ravel())


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        ConfigError, match=r"'genesis', which is not installed.*pip install -e '.\[genesis\]'"
    ):
        Genesis(GANTRY.build(), GANTRY, [], 1)


# --- whole envs --------------------------------------------------------------------------------

Pair = tuple[SimVectorEnv, Any]


def pair_of(task: str) -> Pair:
    pytest.importorskip("genesis", reason="pip install -e '.[genesis]'")
    ours = EnvConfig(task=task, num_threads=1, reward="dense", randomize=task != "reach")
    theirs = replace(ours, engine="genesis", engine_device="cpu")
    return SimVectorEnv(ours, NUM_ENVS), SimVectorEnv(theirs, NUM_ENVS)


@pytest.fixture(scope="module")
def reach() -> Pair:
    return pair_of("reach")


@pytest.fixture(scope="module")
def push_cube() -> Pair:
    return pair_of("push_cube")


def of(env: Any) -> Genesis:
    assert isinstance(env.backend, Genesis)
    return env.backend


def apart(ours: SimVectorEnv, theirs: Any) -> Any:
    """Returns the largest difference of positions of each env."""
    columns = state_columns(on_cpu(ours.backend).model)["qpos"]
    return np.abs(theirs.get_state()[:, columns].numpy() - ours.get_state()[:, columns]).max(axis=1)


@pytest.mark.slow
def test_fifty_control_steps_without_contact_agree(reach: Pair) -> None:
    ours, theirs = reach
    ours.reset(seed=0)
    theirs.reset(seed=0)
    theirs.set_state(torch.as_tensor(ours.get_state()))
    rng = np.random.default_rng(0)
    for action in rng.uniform(-1.0, 1.0, (50, NUM_ENVS, len(ours.action_names))).astype(np.float32):
        seen, reward, terminated, truncated, infos = ours.step(action)
        got = theirs.step(torch.as_tensor(action))
        np.testing.assert_allclose(got[0]["state"], seen["state"], atol=MOST_APART_SEEN)
        np.testing.assert_allclose(got[1], reward, atol=MOST_APART_SEEN)
        for mine, other in ((terminated, got[2]), (truncated, got[3]), (infos["success"], got[4]["success"])):
            np.testing.assert_array_equal(other, mine)
    assert apart(ours, theirs).max() < MOST_APART
    assert of(theirs).num_contacts == 0


@pytest.mark.slow
def test_a_resting_cube_and_an_expert_that_pushes_it_agree(push_cube: Pair) -> None:
    """A control step from equal states, again and again; a push itself is chaotic."""
    ours, theirs = push_cube
    ours.reset(seed=0)
    theirs.reset(seed=0)
    for field in ("geom_friction", "body_mass"):
        np.testing.assert_allclose(theirs.backend.expand(field), ours.backend.expand(field), rtol=1e-12)
    expert, errors, equal, contacts = ours.expert(), list[Any](), 0, 0
    for step in range(60):
        theirs.set_state(torch.as_tensor(ours.get_state()))
        action = np.asarray(expert.act(), np.float32)
        infos, got = ours.step(action)[4], theirs.step(torch.as_tensor(action))[4]
        errors.append(apart(ours, theirs))
        equal += int((got["success"].numpy() == infos["success"]).sum())
        if step == 0:  # four cubes with four corners on the table each
            contacts = sum(on_cpu(ours.backend).batch.get_data(env).ncon for env in range(NUM_ENVS))
            assert of(theirs).num_contacts == contacts == 16
    assert max(each.max() for each in errors[:10]) < 1e-5  # nothing touches the cubes yet
    assert np.median(errors) < 1e-4
    assert equal >= 0.99 * 60 * NUM_ENVS


@pytest.mark.slow
def test_the_same_row_has_the_same_future(push_cube: Pair) -> None:
    _, env = push_cube
    env.reset(seed=1)
    rows, action = env.get_state().clone(), torch.full((NUM_ENVS, len(env.action_names)), 0.3)
    futures = list[Any]()
    for _ in range(2):
        env.set_state(rows)
        for _ in range(5):
            env.step(action)
        futures.append(env.get_state().clone())
    assert torch.equal(*futures)


@pytest.mark.slow
def test_a_mask_leaves_the_others_as_they_are(push_cube: Pair) -> None:
    _, env = push_cube
    env.reset(seed=0)
    before, active = env.get_state().clone(), torch.tensor([True, False, True, False])
    env.step_masked(torch.ones((NUM_ENVS, len(env.action_names))), active)
    after = env.get_state()
    assert torch.equal(after[~active], before[~active])
    assert bool((after[active] != before[active]).any(dim=1).all())


@pytest.mark.slow
@pytest.mark.parametrize("field", ["qvel", "qpos", "ctrl"])
def test_a_simulation_that_blows_up_is_put_back_and_touches_no_other(push_cube: Pair, field: str) -> None:
    _, env = push_cube
    still, futures = torch.zeros((NUM_ENVS, len(env.action_names))), list[Any]()
    for is_broken in (False, True):
        env.reset(seed=0)
        diverged = env.num_diverged
        if is_broken:
            env.backend.bind(field)[1, 0] = float("nan")
        env.backend.step(1)
        found = env.backend.step(1)
        futures.append(env.backend.read_states().clone())
        assert found.tolist() == [False, is_broken, False, False]
    others = [0, 2, 3]
    assert torch.equal(futures[0][others], futures[1][others])
    env.reset(seed=0)
    env.backend.bind("qvel")[1, 0] = float("nan")
    _, _, terminated, truncated, infos = env.step(still)
    assert infos["diverged"].tolist() == truncated.tolist() == [False, True, False, False]
    assert not terminated.any()
    assert env.num_diverged == diverged + 1
    assert bool(torch.isfinite(env.get_state()).all())


@pytest.mark.slow
def test_what_the_engine_lacks_is_refused(reach: Pair) -> None:
    _, env = reach
    with pytest.raises(RenderError, match=r"env.engine=genesis draws no pictures"):
        env.picture()
    with pytest.raises(ModelError, match=r"cannot vary 'dof_armature'.*It can: .*body_mass"):
        env.backend.expand("dof_armature")
    with pytest.raises(ModelError, match=r"no field 'qpoz'.*qpos"):
        env.backend.bind("qpoz")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"env.engine_device: got 'cuda', and torch sees no GPU"):
            SimVectorEnv(replace(env.config, engine_device="cuda"), 1)


@pytest.mark.slow
def test_what_takes_numpy_arrays_gets_them() -> None:
    pytest.importorskip("genesis", reason="pip install -e '.[genesis]'")
    env = make_env(EnvConfig(task="reach", engine="genesis", engine_device="cpu"), 2)
    obs, _ = env.reset(seed=0)
    seen, reward, *_ = env.step(np.zeros((2, len(env.action_names)), np.float32))
    assert all(isinstance(each, np.ndarray) for each in (obs["state"], seen["state"], reward))
