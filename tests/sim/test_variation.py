"""Scenes that differ: disjoint sets, shapes, sizes and masses by hand, experts that still succeed."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import mujoco
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
from robot_rl.sim.shapes import SPECK_M, inertias
from robot_rl.sim.task import Task, build_scene
from robot_rl.sim.variation import Variation
from robot_rl.sim.vector import SimVectorEnv

Array = NDArray[Any]
DECLARING = tuple(name for name in sorted(table("task")) if resolve("task", name).variation is not None)
SETS: tuple[Scenes, ...] = ("varied", "held_out")
NUMBERS = {
    # One thing has 3 * 3 * 3 boxes and 3 * 3 cylinders. The sum of a box's levels is 0 once and 4 six
    # times, that of a cylinder's (2 + x + z) is 4 three times: 10 of 36 are held out. The sums modulo 4 occur
    # 7 + 3, 6 + 2, 7 + 2 and 7 + 2 times, so of the 36^2 pairs of two things the sums are 0 modulo 4 in
    # 10 * 10 + 2 * 8 * 9 + 9 * 9 = 325. Three goals but of stack_cube, with none, and four numbers of
    # obstacles.
    "pick_cube": (36 * 12, 10 * 12),
    "push_cube": (36 * 12, 10 * 12),
    "pick_blue_cube": (1296 * 12, 325 * 12),
    "pick_red_cube": (1296 * 12, 325 * 12),
    "stack_cube": (1296 * 4, 325 * 4),
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


def obstacles_of(env: SimVectorEnv) -> Array:
    """Returns where the obstacles are, (B, obstacles, 3)."""
    rows = [row for name, row in sorted(env.index.mocap_of.items()) if name.startswith("clutter_")]
    return env.backend.bind("mocap_pos")[:, rows]


# The grid


@pytest.mark.parametrize("task", DECLARING)
def test_the_sets_are_disjoint_and_every_level_is_in_both(task: str) -> None:
    declared = declared_by(task)
    ours, theirs = declared.variants(held_out=False), declared.variants(held_out=True)
    assert (len(declared.levels), len(theirs)) == NUMBERS[task]
    assert sorted([*ours, *theirs]) == list(range(len(declared.levels)))
    forms = declared.levels[:, : 4 * len(declared.things)]
    assert not {*map(tuple, forms[ours].tolist())} & {*map(tuple, forms[theirs].tolist())}
    assert len(np.unique(declared.levels, axis=0)) == len(declared.levels)
    num_goals, num_counts = len(declared.goals_m), len(declared.clutter)
    sizes = [*(2, 3, 3, 3) * len(declared.things), num_goals, num_counts]
    assert sizes == (declared.levels.max(axis=0) + 1).tolist()
    for rows in (ours, theirs):
        for axis, size in enumerate(sizes):
            assert set(declared.levels[rows, axis].tolist()) == set(range(size))
        for first in range(0, 4 * len(declared.things), 4):  # of each shape, too
            for shape in range(2):
                found = declared.levels[rows][declared.levels[rows, first] == shape, first + 1 : first + 4]
                assert all(set(column) == {0, 1, 2} for column in found.T.tolist())
                assert shape == 0 or (found[:, 0] == found[:, 1]).all()


@pytest.mark.parametrize("task", DECLARING)
def test_the_tasks_own_scene_is_a_variant_of_training(task: str) -> None:
    declared = declared_by(task)
    is_own = (declared.scales() == 1.0).all(axis=(1, 2)) & (declared.counts() == 0)
    is_own &= (declared.shown() == 0).all(axis=1)
    is_own &= (declared.goals() == 0.0).all(axis=1)
    (own,) = np.flatnonzero(is_own)
    assert own in declared.variants(held_out=False)


def test_levels_by_hand() -> None:
    declared = Variation(
        things=("a",), widths=(0.5, 1.0), heights=(1.0, 2.0), clutter=(0, 5), path=("a", "a")
    )
    # 2 * 2 * 2 boxes, one goal, two counts; number 13 is 1101 in binary: x 1, y 1, z 0, clutter 1.
    assert declared.levels[13].tolist() == [0, 1, 1, 0, 0, 1]
    np.testing.assert_array_equal(declared.scales()[13], [[1.0, 1.0, 1.0]])
    assert declared.counts()[13] == 5
    # Of eight boxes only that with the sum 0 is held out, with both counts.
    assert declared.variants(held_out=True).tolist() == [0, 1]


def test_cylinders_by_hand() -> None:
    declared = Variation(
        things=("a",), shapes=("box", "cylinder"), widths=(0.5, 1.0), heights=(1.0, 2.0, 3.0),
        clutter=(0,), path=("a", "a"),
    )  # fmt: skip
    # 2 * 2 * 3 boxes, then 2 * 3 cylinders: the third of these has the first width and the third height.
    assert declared.levels[14].tolist() == [1, 0, 0, 2, 0, 0]
    np.testing.assert_array_equal(declared.scales()[14], [[0.5, 0.5, 3.0]])
    assert declared.shown()[:, 0].tolist() == [0] * 12 + [1] * 6
    # Boxes with the sums 0 and 4: (0, 0, 0), (1, 1, 2). Cylinders with x + z = 2: (0, 2), (1, 1).
    assert declared.variants(held_out=True).tolist() == [0, 11, 14, 16]


def test_shapes_are_the_box_or_the_box_and_the_cylinder() -> None:
    with pytest.raises(
        ConfigError, match=r"variation.shapes: got \('cylinder',\), allowed: the first or more"
    ):
        Variation(things=("a",), shapes=("cylinder",), path=("a", "a"))


# What an episode draws


@pytest.mark.parametrize("variation", SETS)
@pytest.mark.parametrize("task", DECLARING)
def test_sizes_masses_and_inertias_are_those_of_the_variant(task: str, variation: Scenes) -> None:
    env, declared = make(task, variation, 32), declared_by(task)
    variant = env.reset(seed=0)[1]["variant"]
    assert np.isin(variant, declared.variants(held_out=variation == "held_out")).all()
    assert len(np.unique(variant)) > 16
    scales, is_round = declared.scales()[variant], declared.shown()[variant] == 1
    plain = make(task, "fixed", 1)
    assert not plain.view[f"{declared.things[0]}.is_round"].any()
    for i, thing in enumerate(declared.things):
        own_m, own_kg = plain.view[f"{thing}.half_size"][0], plain.backend.locate("body_mass", thing)[1]
        # A cylinder fills pi / 4 of the box around it.
        share = np.where(is_round[:, i], np.pi / 4, 1.0) * scales[:, i].prod(axis=1)
        half_m, mass_kg, shown = own_m * scales[:, i], own_kg * share, is_round[:, i].astype(int)
        box_m, cylinder_m = (field_of(env, "geom_size", name) for name in (thing, f"{thing}_cylinder"))
        np.testing.assert_allclose(box_m[shown == 0], half_m[shown == 0])
        np.testing.assert_allclose(cylinder_m[shown == 1][:, :2], half_m[shown == 1][:, [0, 2]])
        np.testing.assert_array_equal(box_m[shown == 1], SPECK_M)
        np.testing.assert_array_equal(cylinder_m[shown == 0], [[SPECK_M, SPECK_M, 0.0]] * sum(shown == 0))
        np.testing.assert_allclose(env.view[f"{thing}.half_size"], half_m)
        np.testing.assert_array_equal(env.view[f"{thing}.is_round"][:, 0], shown == 1)
        np.testing.assert_allclose(field_of(env, "body_mass", thing)[:, 0], mass_kg)
        inertia = inertias(declared.shapes, shown, mass_kg, half_m)
        np.testing.assert_allclose(field_of(env, "body_inertia", thing), inertia)


def test_a_larger_cube_weighs_more() -> None:
    env, declared = make("pick_cube", "varied", 128), declared_by("pick_cube")
    levels = declared.levels[env.reset(seed=0)[1]["variant"]]
    mass_kg = field_of(env, "body_mass", "cube")[:, 0]
    # Of 50 g: 50 g * 1.3 * 1.3 * 1.0 = 84.5 g, and 50 g * 0.75 * 1.0 * 1.0 = 37.5 g.
    # A cylinder as wide and as high as the cube: 50 g * pi / 4 * 1.3 * 1.3 = 66.4 g.
    wanted = {(0, 2, 2, 1): 0.0845, (0, 0, 1, 1): 0.0375, (1, 2, 2, 1): 0.066366}
    for form, kg in wanted.items():
        found = mass_kg[(levels[:, :4] == form).all(axis=1)]
        assert len(found) > 0
        assert found == pytest.approx(kg, rel=1e-5)


def test_inertia_by_hand() -> None:
    # 3 kg, half sizes 1, 2, 3 m: 3 / 3 * (4 + 9), (1 + 9), (1 + 4).
    mass_kg, half_m = np.array([3.0, 12.0]), np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 3.0]])
    # 12 kg, radius 2 m, half height 3 m: 12 * (4 / 4 + 9 / 3) = 48 across, 12 * 4 / 2 = 24 about the axis.
    found = inertias(("box", "cylinder"), np.array([0, 1]), mass_kg, half_m)
    np.testing.assert_allclose(found, [[13, 10, 5], [48, 48, 24]])


@pytest.mark.parametrize("task", DECLARING)
def test_a_simulation_is_that_of_a_scene_written_with_these_sizes(task: str) -> None:
    """MuJoCo's compiler, given a variant's sizes and masses, makes the same constants."""
    env, declared = make(task, "varied", 6), declared_by(task)
    variant = env.reset(seed=0)[1]["variant"]
    assert set(declared.shown()[variant].ravel().tolist()) == {0, 1}
    described: Task = resolve("task", task)()
    for sim in range(6):
        robot = load_robot(described.default_robot)
        spec = build_scene(described, robot)
        for thing in declared.things:
            x, _, z = env.view[f"{thing}.half_size"][sim]
            is_round = bool(env.view[f"{thing}.is_round"][sim, 0])
            spec.geom(thing).type = mujoco.mjtGeom.mjGEOM_CYLINDER if is_round else mujoco.mjtGeom.mjGEOM_BOX
            spec.geom(thing).size = [x, z, 0.0] if is_round else env.view[f"{thing}.half_size"][sim]
            spec.geom(thing).mass = field_of(env, "body_mass", thing)[sim, 0]
        model, ours = spec.compile(), on_cpu(env.backend).batch.get_model(sim)
        for thing in declared.things:
            theirs, body = model.body(thing), ours.body(thing)
            # The compiler sorts the axes of inertia, and may turn them.
            assert sorted(body.inertia) == pytest.approx(sorted(theirs.inertia))
            assert body.invweight0 == pytest.approx(theirs.invweight0, rel=1e-6)
            shown = f"{thing}_cylinder" if env.view[f"{thing}.is_round"][sim, 0] else thing
            assert ours.geom(shown).rbound >= model.geom(thing).rbound - 1e-12
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
def test_obstacles_stand_away_from_the_path_and_absent_ones_touch_nothing(task: str) -> None:
    env, declared = make(task, "varied", 256), declared_by(task)
    variant = env.reset(seed=0)[1]["variant"]
    boxes, count = obstacles_of(env), declared.counts()[variant]
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
    # On the table: four corners of a box, three points of a cylinder's rim.
    is_round = declared.shown()[variant] == 1
    assert contacts == np.where(is_round, 3, 4).sum(axis=1).tolist()


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
        for name in ("red.half_size", "red.is_round"):
            np.testing.assert_allclose(ours.view[name], to_numpy(theirs.view[name]))


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
    np.testing.assert_allclose(env.view["cube.half_size"], 0.025 * scales)
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
    env, other = (make("pick_cube", "varied", 6, randomize=True) for _ in range(2))
    env.reset(seed=3)
    other.reset(seed=40)
    other.load_state_dict(env.state_dict())
    for field in ("geom_size", "body_mass", "body_inertia"):
        np.testing.assert_array_equal(field_of(env, field, "cube"), field_of(other, field, "cube"))
    assert set(env.view["cube.is_round"][:, 0].tolist()) == {True, False}
    for name in ("cube.half_size", "cube.is_round"):
        np.testing.assert_array_equal(env.view[name], other.view[name])
    env.set_state(env.get_state())  # both: safety starts afresh
    for step in range(3):
        action = np.random.default_rng(step).uniform(-1, 1, (6, 5)).astype(np.float32)
        got, expected = other.step(action), env.step(action)
        np.testing.assert_array_equal(got[0]["state"], expected[0]["state"])
        np.testing.assert_array_equal(got[4]["variant"], expected[4]["variant"])


def test_randomised_masses_are_scaled() -> None:
    env, plain = (make("pick_cube", kind, 32, randomize=True) for kind in ("varied", "fixed"))
    for _ in range(2):  # the second episode too: nothing adds up
        variant = env.reset()[1]["variant"]
        plain.reset()
        declared = declared_by("pick_cube")
        ratio = declared.scales()[variant, 0].prod(axis=1)
        ratio[declared.shown()[variant, 0] == 1] *= np.pi / 4
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
    assert env.variants.fields == ()


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
    assert solved.mean() >= 0.95  # of 256 episodes: docs/variation.md


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
