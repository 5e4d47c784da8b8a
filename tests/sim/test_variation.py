"""Scenes that differ: sets without a common shape, sizes and masses by hand, experts that still succeed."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.arrays import to_numpy
from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve, table
from robot_rl.sim.backends.inspect_model import model_hash
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.backends.scene_model import compile_scene
from robot_rl.sim.config import EnvConfig, ResetsConfig, Scenes
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.task import Task, build_scene
from robot_rl.sim.variants import box_inertia
from robot_rl.sim.variation import Variation
from robot_rl.sim.vector import SimVectorEnv

Array = NDArray[Any]
DECLARING = tuple(name for name in sorted(table("task")) if resolve("task", name).variation is not None)
SETS: tuple[Scenes, ...] = ("varied", "held_out")
NUMBERS = {
    # One thing has 3 * 3 * 3 shapes; the sum of their levels is 0 once, 4 six times: 7 are held out. Two have
    # 3^6 pairs, with the sums 0, 4, 8 and 12 in 1 + 90 + 90 + 1 = 182. Three goals but of stack_cube, with
    # none, and four numbers of boxes.
    "pick_cube": (27 * 12, 7 * 12),
    "push_cube": (27 * 12, 7 * 12),
    "pick_blue_cube": (729 * 12, 182 * 12),
    "pick_red_cube": (729 * 12, 182 * 12),
    "stack_cube": (729 * 4, 182 * 4),
}


def declared_by(task: str) -> Variation:
    found = resolve("task", task).variation
    assert found is not None
    return found


def make(task: str, variation: Scenes, num_envs: int = 4, **settings: Any) -> SimVectorEnv:
    config = EnvConfig(task=task, variation=variation, num_threads=1)
    return SimVectorEnv(replace(config, **settings), num_envs)


def field_of(env: SimVectorEnv, field: str, thing: str) -> Array:
    """Returns a field of the model of a thing, (B, k)."""
    row, nominal = env.backend.locate(field, thing)
    return env.backend.expand(field).reshape(env.num_envs, -1, len(nominal))[:, row]


def boxes_of(env: SimVectorEnv) -> Array:
    """Returns where the boxes are, (B, boxes, 3)."""
    rows = [row for name, row in sorted(env.index.mocap_of.items()) if name.startswith("clutter_")]
    return env.backend.bind("mocap_pos")[:, rows]


# The grid


@pytest.mark.parametrize("task", DECLARING)
def test_the_sets_are_disjoint_and_every_level_is_in_both(task: str) -> None:
    declared = declared_by(task)
    ours, theirs = declared.variants(held_out=False), declared.variants(held_out=True)
    assert (len(declared.levels), len(theirs)) == NUMBERS[task]
    assert sorted([*ours, *theirs]) == list(range(len(declared.levels)))
    shapes = declared.levels[:, : 3 * len(declared.things)]
    assert not {*map(tuple, shapes[ours].tolist())} & {*map(tuple, shapes[theirs].tolist())}
    for axis, size in enumerate(declared.shape):
        for rows in (ours, theirs):
            assert set(declared.levels[rows, axis].tolist()) == set(range(size))


@pytest.mark.parametrize("task", DECLARING)
def test_the_tasks_own_scene_is_a_variant_of_training(task: str) -> None:
    declared = declared_by(task)
    is_own = (declared.scales() == 1.0).all(axis=(1, 2)) & (declared.counts() == 0)
    is_own &= (declared.goals() == 0.0).all(axis=1)
    (own,) = np.flatnonzero(is_own)
    assert own in declared.variants(held_out=False)


def test_levels_by_hand() -> None:
    declared = Variation(
        things=("a",), widths=(0.5, 1.0), heights=(1.0, 2.0), clutter=(0, 5), path=("a", "a")
    )
    # 2 * 2 * 2 shapes, one goal, two counts; number 13 is 1101 in binary: x 1, y 1, z 0, clutter 1.
    assert declared.levels[13].tolist() == [1, 1, 0, 0, 1]
    np.testing.assert_array_equal(declared.scales()[13], [[1.0, 1.0, 1.0]])
    assert declared.counts()[13] == 5
    # Of eight shapes only that with the sum 0 is held out, with both counts.
    assert declared.variants(held_out=True).tolist() == [0, 1]


# What an episode draws


@pytest.mark.parametrize("variation", SETS)
@pytest.mark.parametrize("task", DECLARING)
def test_sizes_masses_and_inertias_are_those_of_the_variant(task: str, variation: Scenes) -> None:
    env, declared = make(task, variation, 32), declared_by(task)
    variant = env.reset(seed=0)[1]["variant"]
    assert np.isin(variant, declared.variants(held_out=variation == "held_out")).all()
    assert len(np.unique(variant)) > 16
    scales, plain = declared.scales()[variant], make(task, "fixed", 1)
    for i, thing in enumerate(declared.things):
        own_m, own_kg = plain.view[f"{thing}.half_size"][0], plain.backend.locate("body_mass", thing)[1]
        half_m, mass_kg = own_m * scales[:, i], own_kg * scales[:, i].prod(axis=1)
        np.testing.assert_allclose(field_of(env, "geom_size", thing), half_m)
        np.testing.assert_array_equal(env.view[f"{thing}.half_size"], field_of(env, "geom_size", thing))
        np.testing.assert_allclose(field_of(env, "body_mass", thing)[:, 0], mass_kg)
        np.testing.assert_allclose(field_of(env, "body_inertia", thing), box_inertia(mass_kg, half_m))


def test_a_larger_cube_weighs_more() -> None:
    env, declared = make("pick_cube", "varied", 64), declared_by("pick_cube")
    levels = declared.levels[env.reset(seed=0)[1]["variant"]]
    mass_kg = field_of(env, "body_mass", "cube")[:, 0]
    # Of 50 g: 50 g * 1.3 * 1.3 * 1.0 = 84.5 g, and 50 g * 0.75 * 1.0 * 1.0 = 37.5 g.
    assert mass_kg[(levels[:, :3] == [2, 2, 1]).all(axis=1)] == pytest.approx(0.0845)
    assert mass_kg[(levels[:, :3] == [0, 1, 1]).all(axis=1)] == pytest.approx(0.0375)
    assert {(2, 2, 1), (0, 1, 1)} <= {*map(tuple, levels[:, :3].tolist())}


def test_inertia_by_hand() -> None:
    # 3 kg, half sizes 1, 2, 3 m: 3 / 3 * (4 + 9), (1 + 9), (1 + 4).
    np.testing.assert_allclose(box_inertia(np.array([3.0]), np.array([[1.0, 2.0, 3.0]])), [[13, 10, 5]])


@pytest.mark.parametrize("task", DECLARING)
def test_a_simulation_is_that_of_a_scene_written_with_these_sizes(task: str) -> None:
    """MuJoCo's compiler, given a variant's sizes and masses, makes the same constants."""
    env, declared = make(task, "varied", 3), declared_by(task)
    env.reset(seed=1)
    described: Task = resolve("task", task)()
    for sim in range(3):
        robot = load_robot(described.default_robot)
        spec = build_scene(described, robot)
        for thing in declared.things:
            spec.geom(thing).size = field_of(env, "geom_size", thing)[sim]
            spec.geom(thing).mass = field_of(env, "body_mass", thing)[sim, 0]
        model, ours = spec.compile(), on_cpu(env.backend).batch.get_model(sim)
        for thing in declared.things:
            theirs, body = model.body(thing), ours.body(thing)
            # The compiler sorts the axes of inertia, and may turn them.
            assert sorted(body.inertia) == pytest.approx(sorted(theirs.inertia))
            assert body.invweight0 == pytest.approx(theirs.invweight0, rel=1e-6)
            assert ours.geom(thing).rbound >= model.geom(thing).rbound - 1e-12
            dofs, own = model.joint(thing).dofadr[0], ours.joint(thing).dofadr[0]
            np.testing.assert_allclose(
                ours.dof_invweight0[own : own + 6], model.dof_invweight0[dofs : dofs + 6], rtol=1e-6
            )


@pytest.mark.parametrize("task", DECLARING)
def test_things_rest_on_the_table_whatever_their_size(task: str) -> None:
    env = make(task, "varied", 32)
    env.reset(seed=0)
    things = declared_by(task).things
    for _ in range(10):  # half a second; the arm stays above
        env.step(np.zeros((32, len(env.action_names)), np.float32))
    for thing in things:
        height_m = env.view[f"{thing}.pos"][:, 2]
        np.testing.assert_allclose(height_m, env.view[f"{thing}.half_size"][:, 2], atol=2e-4)


@pytest.mark.parametrize("task", DECLARING)
def test_boxes_stand_away_from_the_path_and_absent_ones_touch_nothing(task: str) -> None:
    env, declared = make(task, "varied", 256), declared_by(task)
    variant = env.reset(seed=0)[1]["variant"]
    boxes, count = boxes_of(env), declared.counts()[variant]
    assert set(count) == {0, 1, 2, 3}
    np.testing.assert_array_equal((boxes[:, :, 2] > 0).sum(axis=1), count)
    ends = [env.backend.bind("xpos")[:, env.index.tracked[name].body] for name in declared.path]
    for begin, end in pairwise(ends):
        points = begin[:, None] + np.linspace(0, 1, 50)[None, :, None] * (end - begin)[:, None]
        apart = np.linalg.norm(boxes[:, :, None, :2] - points[:, None, :, :2], axis=3).min(axis=2)
        stands = boxes[:, :, 2] > 0
        assert (apart[stands] >= 0.11 - 1e-3).mean() >= 0.99  # where 16 candidates are too near, the best
    for _ in range(2):
        env.step(np.zeros((256, len(env.action_names)), np.float32))
    contacts = [on_cpu(env.backend).batch.get_data(sim).ncon for sim in range(256)]
    assert set(contacts) == {4 * len(declared.things)}  # corners of things on the table


def test_goals_are_moved_by_their_region() -> None:
    env, declared = make("pick_cube", "varied", 64), declared_by("pick_cube")
    plain = make("pick_cube", "fixed", 64)
    variant = env.reset(seed=3)[1]["variant"]
    plain.reset(seed=3)  # the task's own draws are those of the same stream
    moved = env.view["goal.pos"] - plain.view["goal.pos"]
    np.testing.assert_allclose(moved, declared.goals()[variant], atol=1e-12)
    np.testing.assert_array_equal(env.view["cube.pos"][:, :2], plain.view["cube.pos"][:, :2])


# Episodes


def played(env: SimVectorEnv, seed: list[int]) -> list[Array]:
    env.reset(seed=seed)
    rows = [env.get_state()]
    for step in range(5):
        action = np.random.default_rng(step).uniform(-1, 1, len(env.action_names)).astype(np.float32)
        env.step(np.repeat(action[None], env.num_envs, axis=0))
        rows.append(env.get_state())
    return rows


@pytest.mark.parametrize("task", DECLARING)
def test_an_episode_depends_on_its_seed_alone(task: str) -> None:
    many = played(make(task, "varied", 6, num_threads=2), [5, 6, 7, 5, 8, 9])
    alone = played(make(task, "varied", 1), [7])
    for rows, row in zip(many, alone, strict=True):
        np.testing.assert_array_equal(rows[2], row[0])
        np.testing.assert_array_equal(rows[0], rows[3])
        assert not np.array_equal(rows[0], rows[1])


def test_tensors_draw_what_arrays_draw() -> None:
    config = EnvConfig(task="pick_red_cube", variation="varied", randomize=True, num_threads=1)
    ours, theirs = SimVectorEnv(config, 8), SimVectorEnv(config, 8, array="torch")
    for _ in range(2):
        variant, other = ours.reset()[1]["variant"], theirs.reset()[1]["variant"]
        np.testing.assert_array_equal(variant, to_numpy(other))
        np.testing.assert_allclose(ours.get_state(), to_numpy(theirs.get_state()), atol=1e-12)
        for field in ("geom_size", "body_mass", "body_inertia"):
            np.testing.assert_allclose(field_of(ours, field, "red"), to_numpy(field_of(theirs, field, "red")))


def test_the_next_episode_draws_anew() -> None:
    env = make("push_cube", "varied", 16, horizon_s=0.1)
    first = env.reset(seed=0)[1]["variant"]
    sizes = field_of(env, "geom_size", "cube").copy()
    env.step(np.zeros((16, 4), np.float32))
    _, _, _, truncated, infos = env.step(np.zeros((16, 4), np.float32))
    assert truncated.all()
    np.testing.assert_array_equal(infos["variant"], first)  # of the episode that ended
    second = env.step(np.zeros((16, 4), np.float32))[4]["variant"]
    assert (second != first).mean() > 0.8
    scales = declared_by("push_cube").scales()[second, 0]
    np.testing.assert_allclose(field_of(env, "geom_size", "cube"), 0.025 * scales)
    assert not np.array_equal(field_of(env, "geom_size", "cube"), sizes)


def test_a_masked_reset_leaves_the_others_sizes() -> None:
    env = make("stack_cube", "varied", 4)
    env.reset(seed=0)
    before = field_of(env, "geom_size", "red").copy()
    env.reset(options={"reset_mask": np.array([True, False, True, False])}, seed=[90, None, 91, None])
    after = field_of(env, "geom_size", "red")
    np.testing.assert_array_equal(before[[1, 3]], after[[1, 3]])
    assert not np.array_equal(before[[0, 2]], after[[0, 2]])


def test_a_state_dict_brings_sizes_back() -> None:
    env, other = (make("pick_cube", "varied", 3, randomize=True) for _ in range(2))
    env.reset(seed=3)
    other.reset(seed=40)
    other.load_state_dict(env.state_dict())
    for field in ("geom_size", "body_mass", "body_inertia"):
        np.testing.assert_array_equal(field_of(env, field, "cube"), field_of(other, field, "cube"))
    env.set_state(env.get_state())  # both: safety starts afresh
    for step in range(3):
        action = np.random.default_rng(step).uniform(-1, 1, (3, 5)).astype(np.float32)
        got, expected = other.step(action), env.step(action)
        np.testing.assert_array_equal(got[0]["state"], expected[0]["state"])
        np.testing.assert_array_equal(got[4]["variant"], expected[4]["variant"])


def test_randomised_masses_are_scaled() -> None:
    env, plain = (make("pick_cube", kind, 32, randomize=True) for kind in ("varied", "fixed"))
    for _ in range(2):  # the second episode too: nothing adds up
        variant = env.reset()[1]["variant"]
        plain.reset()
        ratio = declared_by("pick_cube").scales()[variant, 0].prod(axis=1)
        drawn = field_of(plain, "body_mass", "cube")[:, 0]
        np.testing.assert_allclose(field_of(env, "body_mass", "cube")[:, 0], drawn * ratio)


# The task's own scene, experts, and what is refused


@pytest.mark.parametrize("task", DECLARING)
def test_a_fixed_scene_is_the_tasks_own(task: str) -> None:
    env, described = make(task, "fixed", 2), resolve("task", task)()
    robot = load_robot(described.default_robot)
    own = compile_scene(build_scene(described, robot), robot, ())
    assert env.backend.model_hash() == model_hash(own) != make(task, "varied", 1).backend.model_hash()
    assert not [name for name in env.index.mocap_of if name.startswith("clutter")]
    assert "variant" not in env.reset(seed=0)[1]
    assert env.variants.terms.fields == ()


@pytest.mark.parametrize("variation", SETS)
@pytest.mark.parametrize("task", DECLARING)
def test_the_expert_solves_it(task: str, variation: Scenes) -> None:
    config = EnvConfig(task=task, variation=variation, num_threads=1)
    env = SimVectorEnv(config, 64, autoreset="disabled")
    assert not env.reset(seed=0)[1]["success"].any()
    expert, live, solved = env.expert(), np.ones(64, bool), np.zeros(64, bool)
    for _ in range(env.horizon):
        _, _, terminated, truncated, infos = env.step_masked(expert.act(), live)
        solved |= infos["success"]
        live &= ~(terminated | truncated)
        if not live.any():
            break
    assert solved.mean() >= 0.95  # of 256 episodes: 0.977 to 1.0


def test_a_task_that_declares_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"env.variation: got 'varied', allowed: fixed, as 'reach' declares no .*pick_cube"
    ):
        make("reach", "varied")


def test_a_bank_is_refused() -> None:
    message = r"env.resets.bank: got 'banks/x', allowed: none with env.variation: its states are of one scene"
    with pytest.raises(ConfigError, match=message):
        EnvConfig(task="pick_cube", variation="varied", resets=ResetsConfig(bank="banks/x"))
    with pytest.raises(ConfigError, match=r"env.variation: got 'varied'"):
        EnvConfig(kind="gym", id="Pendulum-v1", variation="varied")
