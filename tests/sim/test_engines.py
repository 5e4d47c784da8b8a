"""MuJoCo Warp against MuJoCo: the same states, judgements and contacts; a broken simulation breaks no other.

On the CPU device of Warp, and on a GPU (`pytest -m gpu`). The first run compiles for minutes.
"""

import importlib
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.arrays import to_numpy
from robot_rl.core.errors import ConfigError
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.rollout.envs import make_env
from robot_rl.rollout.steps import StepRolloutSource
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.backends.mujoco_warp import MujocoWarp
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.robots.gantry import GANTRY
from robot_rl.sim.scene import add_free_box
from robot_rl.sim.vector import SimVectorEnv
from tests.read_back import outside_of_simulation, reads_back

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_ENVS = 4
ROUND_SEEDS = [3, 6, 12, 21]
"""Of episodes of `pick_cube` with `env.variation=varied` whose thing is a cylinder."""
POSITION_TOLERANCE, STATE_TOLERANCE = 1e-4, 1e-3
"""Of joints (m, rad), and of any observation, after 50 control steps; single precision rounds to 1e-7."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("mujoco_warp", reason="pip install -e '.[warp]'")
    return request.param


def pair(device: str, task: str = "gantry_peg", **config: Any) -> tuple[SimVectorEnv, Any]:
    ours = EnvConfig(task=task, num_threads=1, **config)
    return SimVectorEnv(ours, NUM_ENVS), warp_env(device, ours)


def warp_env(device: str, config: EnvConfig, num_envs: int = NUM_ENVS) -> Any:
    return SimVectorEnv(replace(config, engine="mujoco_warp", engine_device=device), num_envs)


def warp_of(env: Any) -> MujocoWarp:
    assert isinstance(env.backend, MujocoWarp)
    return env.backend


def boxes(device: str, **room: int) -> MujocoWarp:
    """Returns three gantries above a box that lies on a floor."""
    spec = GANTRY.build()
    spec.worldbody.add_geom(name="floor", type=0, size=[1, 1, 0.1])
    add_free_box(spec, "box", half_size_m=(0.05, 0.05, 0.05), mass_kg=0.2)
    backend = MujocoWarp(spec, GANTRY, ["box.pos"], 3, device=device, **room)
    first = backend.index.qpos_of["box"]
    pose = torch.tensor([0.3, 0.0, 0.0499, 1.0, 0.0, 0.0, 0.0])
    backend.bind("qpos")[:, first : first + 7] = pose
    backend.forward()
    return backend


@pytest.mark.parametrize("task", ["gantry_peg", "pick_cube"])
def test_fifty_control_steps_agree(device: str, task: str) -> None:
    ours, theirs = pair(device, task=task, reward="dense")
    ours.reset(seed=0)
    theirs.reset(seed=0)
    theirs.set_state(torch.as_tensor(ours.get_state()))
    rng = np.random.default_rng(0)
    shape = (50, NUM_ENVS, len(ours.action_names))
    actions = rng.uniform(-1.0, 1.0, shape).astype(np.float32)
    for step, action in enumerate(actions):
        seen, reward, terminated, truncated, infos = ours.step(action)
        got = theirs.step(torch.as_tensor(action))
        np.testing.assert_allclose(
            got[0]["state"].cpu(), seen["state"], atol=STATE_TOLERANCE, err_msg=str(step)
        )
        np.testing.assert_allclose(got[1].cpu(), reward, atol=STATE_TOLERANCE)
        for mine, other in ((terminated, got[2]), (truncated, got[3]), (infos["success"], got[4]["success"])):
            np.testing.assert_array_equal(other.cpu(), mine)
    position = slice(1, 1 + on_cpu(ours.backend).model.nq)
    np.testing.assert_allclose(
        theirs.get_state()[:, position].cpu(), ours.get_state()[:, position], atol=POSITION_TOLERANCE
    )
    contacts = sum(on_cpu(ours.backend).batch.get_data(env).ncon for env in range(NUM_ENVS))
    assert warp_of(theirs).num_contacts == contacts
    assert warp_of(theirs).num_overflows == 0


def test_a_suction_cup_lifts_carries_and_lets_go_as_on_the_cpu(device: str) -> None:
    ours, theirs = pair(device, task="pick_cube", robot="suction_gantry")
    ours.reset(seed=0)
    theirs.reset(seed=0)
    expert = ours.expert()
    while bool((ours.view["cube.pos"][:, 2] < 0.04).any()):  # the last one is lifted by 2 cm
        ours.step(expert.act())
    theirs.set_state(torch.as_tensor(ours.get_state()))
    held = np.tile(np.array([0.2, -0.2, 0.1, 0.2, -1.0], np.float32), (NUM_ENVS, 1))
    opened = np.tile(np.array([0.0, 0.0, 0.5, 0.0, 1.0], np.float32), (NUM_ENVS, 1))
    for action, steps in ((held, 10), (opened, 15)):
        for _ in range(steps):
            ours.step(action)
            theirs.step(torch.as_tensor(action))
        found, wanted = (to_numpy(env.view["cube.pos"]) for env in (theirs, ours))
        np.testing.assert_allclose(found, wanted, atol=STATE_TOLERANCE)
        in_tool = to_numpy(theirs.view["cube_in_tool.pos"])
        # In the lip by half a millimetre, or on the table, with the tool above it.
        assert bool((abs(in_tool[:, 2] - 0.0195) < 5e-4).all()) == (action is held)
    np.testing.assert_allclose(found[:, 2], 0.02, atol=1e-3)


def test_states_and_starts_are_those_of_the_cpu(device: str) -> None:
    ours, theirs = pair(device, randomize=True)
    seen, got = ours.reset(seed=3)[0]["state"], theirs.reset(seed=3)[0]["state"].cpu()
    # The gripper has closed on the peg: it still moves a little, and by single precision otherwise.
    np.testing.assert_allclose(got, seen, atol=0.01)
    rows = ours.get_state()
    theirs.set_state(torch.as_tensor(rows))
    np.testing.assert_allclose(theirs.get_state().cpu(), rows.astype(np.float32), rtol=1e-6, atol=1e-6)
    for field in ("geom_friction", "body_mass"):
        np.testing.assert_allclose(theirs.backend.expand(field).cpu(), ours.backend.expand(field), rtol=1e-5)
    state = theirs.state_dict()
    assert state["state"].dtype == np.float64
    np.testing.assert_allclose(theirs.load_state_dict(state)["state"].cpu(), seen, atol=1e-5)


def test_a_mask_leaves_the_others_as_they_are(device: str) -> None:
    env = warp_env(device, EnvConfig(task="gantry_peg"))
    env.reset(seed=0)
    before, active = env.get_state(), torch.tensor([True, False, True, False], device=env.device)
    env.step_masked(torch.ones((NUM_ENVS, 3), device=env.device), active)
    after = env.get_state()
    assert torch.equal(after[~active], before[~active])
    assert bool((after[active] != before[active]).any(dim=1).all())


def test_a_simulation_that_blows_up_is_found_and_put_back_and_touches_no_other(device: str) -> None:
    env, twin = (warp_env(device, EnvConfig(task="gantry_peg")) for _ in range(2))
    for each in (env, twin):
        each.reset(seed=0)
    env.backend.bind("qvel")[1, 0] = float("nan")
    still = torch.zeros((NUM_ENVS, 3), device=env.device)
    _, _, terminated, truncated, infos = env.step(still)
    twin.step(still)
    assert infos["diverged"].tolist() == [False, True, False, False]
    assert truncated.tolist() == [False, True, False, False]
    assert not terminated.any()
    assert env.num_diverged == 1
    assert bool(torch.isfinite(env.get_state()).all())
    others = [0, 2, 3]
    torch.testing.assert_close(env.get_state()[others], twin.get_state()[others], atol=1e-5, rtol=0.0)


def test_contacts_that_find_no_room_are_counted_and_room_grows_once(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = boxes(device, contacts=2, rows=32)  # a box on a floor has four contacts
    handed_out: Any = backend.bind("qpos")
    with caplog.at_level(logging.WARNING):
        first, second = backend.step(1), backend.step(1)
    assert bool(first.any())
    assert not second.any()
    assert backend.num_overflows == int(first.sum())
    assert backend.room == {"nconmax": 8, "njmax": 128}
    (record,) = caplog.records
    assert "ran out of contacts or constraint rows" in record.message
    assert "8 contacts and 128 rows" in record.message
    handed_out[:, 0] = 0.125
    assert backend.read_states()[:, 1].tolist() == [0.125] * 3  # what was bound stays bound
    for _ in range(20):
        assert not backend.step(1).any()
    assert backend.view["box.pos"][:, 2].tolist() == pytest.approx([0.05] * 3, abs=1e-3)


def test_room_that_is_too_small_after_it_has_grown_is_warned_about_rarely(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = boxes(device, contacts=32, rows=2)  # four contacts of four rows each need 16; 2 grow to 8
    begun, everyone = backend.read_states(), backend.asarray(np.arange(3))
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            backend.write_states(everyone, begun)
            assert backend.step(1).all()
    assert backend.num_overflows == 18
    assert backend.overflows.tolist() == [6, 6, 6]
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2  # after 3, when it grows, and after 6; the next one would come after 60
    assert "mujoco_warp: 6 times a simulation has run out of 128 contacts or 8 constraint rows" in messages[1]


def test_infos_say_which_simulation_ran_out_of_room(device: str) -> None:
    ours, theirs = pair(device)
    for env in (ours, theirs):
        env.reset(seed=0)
    backend = warp_of(theirs)
    backend._overflow[0] = backend._ran_out  # as a kernel writes it
    still = np.zeros((NUM_ENVS, len(ours.action_names)), np.float32)
    assert "overflowed" not in ours.step(still)[4]
    infos = theirs.step(still)[4]
    assert to_numpy(infos["overflowed"]).tolist() == [True, *[False] * (NUM_ENVS - 1)]
    assert bool(infos["diverged"][0])
    assert not theirs.step(still)[4]["overflowed"].any()


def test_what_a_waiting_simulation_ran_out_of_does_not_count_later(device: str) -> None:
    """A box on the floor has four contacts of four rows each, more than the room; one in the air none."""
    backend = boxes(device, contacts=32, rows=12)
    height: Any = backend.bind("qpos")[:, backend.index.qpos_of["box"] + 2]
    height[1:] = 1.0
    moves: Any = torch.tensor([False, True, True], device=backend.device)
    assert not backend.step(1, moves).any()
    height[0] = 1.0
    assert not backend.step(1).any()
    assert backend.num_overflows == 0


def test_what_episodes_draw_of_an_arm_is_the_same(device: str) -> None:
    domain = DomainConfig(
        friction=(0.0, 0.05), damping=(0.8, 1.2), stiffness=(0.9, 1.1), armature=(0.5, 2.0),
        payload_kg=(0.1, 0.5), joint_noise_rad=0.002, object_bias_m=0.005, delay_steps=2,
    )  # fmt: skip
    ours, theirs = pair(device, task="reach", domain=domain)
    for env in (ours, theirs):
        env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (10, NUM_ENVS, 4)).astype(np.float32)
    seen = [(ours.step(action)[0]["state"], to_numpy(theirs.step(action)[0]["state"])) for action in actions]
    np.testing.assert_allclose(*seen[-1], atol=STATE_TOLERANCE)
    for name in ("dof_armature", "dof_invweight0", "body_mass", "body_gravcomp", "dof_frictionloss"):
        found = to_numpy(theirs.backend.expand(name))
        np.testing.assert_allclose(found, ours.backend.expand(name).reshape(found.shape), rtol=1e-3)
    kept = theirs.state_dict()
    theirs.step(actions[0])
    np.testing.assert_allclose(to_numpy(theirs.load_state_dict(kept)["state"]), seen[-1][1], atol=1e-5)


def test_armatures_alone_change_the_weights_of_constraints_in_each_simulation(device: str) -> None:
    ours, theirs = pair(device, task="reach", domain=DomainConfig(armature=(0.5, 2.0)))
    for env in (ours, theirs):
        env.reset(seed=0)
    wanted = ours.backend.expand("dof_invweight0")
    assert len(np.unique(wanted[:, 0])) == NUM_ENVS
    np.testing.assert_allclose(to_numpy(theirs.backend.expand("dof_invweight0")), wanted, rtol=1e-3)


def test_each_simulation_looks_for_contacts_as_far_as_its_own_things_reach(device: str) -> None:
    """Else the last one's size would bound those of all, and a larger cube would be hit inside of it."""
    ours, theirs = pair(device, task="push_cube", variation="varied")
    for env in (ours, theirs):
        env.reset(seed=0)
    assert len(torch.unique(theirs.view["cube.half_size"], dim=0)) == NUM_ENVS
    for geom in ("cube", "cube_cylinder"):
        row, _ = theirs.backend.locate("geom_size", geom)
        half_m = theirs.backend.expand("geom_size")[:, row]
        reach_m = theirs.backend.expand("geom_rbound")[:, row]
        torch.testing.assert_close(reach_m, half_m.norm(dim=1))  # half the diagonal of what it is or cuts


def test_cylinders_are_grasped_and_carried_as_on_the_cpu(device: str) -> None:
    ours, theirs = pair(device, task="pick_cube", variation="varied")
    for env in (ours, theirs):
        env.reset(seed=ROUND_SEEDS)
    assert ours.view["cube.is_round"].all()
    for name in ("cube.is_round", "cube.half_size"):
        np.testing.assert_allclose(to_numpy(theirs.view[name]), ours.view[name], rtol=1e-6)
    expert = ours.expert()
    while (low := ours.view["cube.pos"][:, 2] < 0.06).any():
        ours.step_masked(expert.act(), low)
    theirs.set_state(torch.as_tensor(ours.get_state()))
    held = np.tile(np.array([0.1, -0.1, 0.1, 0.0, -1.0], np.float32), (NUM_ENVS, 1))
    for _ in range(10):
        ours.step(held)
        theirs.step(torch.as_tensor(held))
    found, wanted = (to_numpy(env.view["cube.pos"]) for env in (theirs, ours))
    np.testing.assert_allclose(found, wanted, atol=POSITION_TOLERANCE)
    assert (found[:, 2] > 0.06).all()
    assert warp_of(theirs).num_contacts == 2 * NUM_ENVS  # one of each finger
    assert warp_of(theirs).num_overflows == 0


def test_what_takes_numpy_arrays_gets_them(device: str) -> None:
    config = EnvConfig(task="gantry_peg", engine="mujoco_warp", engine_device=device)
    env = make_env(config, 2)
    obs, _ = env.reset(seed=0)
    seen, reward, *_ = env.step(np.zeros((2, 3), np.float32))
    assert all(isinstance(each, np.ndarray) for each in (obs["state"], seen["state"], reward))
    assert make_env(config, 2, tensors=True).xp is not np


def test_a_control_step_reads_four_numbers_and_the_rollout_none(device: str) -> None:
    """Whether targets are finite, simulations diverged (the engine, and the env), and episodes ended."""
    env = make_env(
        EnvConfig(task="gantry_peg", engine="mujoco_warp", engine_device=device), NUM_ENVS, tensors=True
    )
    policy = GaussianPolicy(
        GaussianPolicyConfig(width=8, depth=1),
        state_dim=len(env.state_names),
        action_dim=len(env.action_names),
        generator=torch.Generator().manual_seed(0),
    ).to(device)
    source = StepRolloutSource(env, policy, steps=5, seed=7, device=device)
    publisher = Publisher(stays=True)
    publisher.offer(0, policy.state_dict)
    source.collect(publisher)  # allocates
    with reads_back() as reads:
        rollout = source.collect(publisher)
    assert rollout.reward.device.type == torch.device(device).type
    assert not (rollout.terminated | rollout.truncated).any()
    (figures,) = outside_of_simulation(reads)
    assert figures.startswith("numpy at robot_rl/rollout/sources.py")
    reads.remove(figures)
    assert len(reads) == 4 * 5
    assert all(read.startswith("_local_scalar_dense") for read in reads)


def test_evaluations_are_made_on_the_cpu() -> None:
    config = EnvConfig(task="gantry_peg", engine="mujoco_warp", engine_device="cuda:1")
    assert config.evaluated() == EnvConfig(task="gantry_peg")


def test_a_device_without_the_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.engine_device.*'cuda'.*null with env.engine=mujoco"):
        EnvConfig(engine_device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    pytest.importorskip("mujoco_warp", reason="pip install -e '.[warp]'")
    with pytest.raises(ConfigError, match=r"env.engine_device: got 'cuda', and torch sees no GPU"):
        warp_env("cuda", EnvConfig(task="gantry_peg"), 1)


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"'mujoco_warp', which is not installed.*\.\[warp\]"):
        MujocoWarp(GANTRY.build(), GANTRY, [], 1)
