"""Things that are boxes or cylinders: where they touch, what pictures show, what their geoms share."""

from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.registry import resolve
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.cameras import Camera, Renderer
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.shapes import SPECK_M, geom_sizes, inscribed, shown_half_m, shows_cylinder, volumes
from robot_rl.sim.task import build_scene
from robot_rl.sim.vector import SimVectorEnv

Array = NDArray[Any]
BOTH = ("box", "cylinder")
PAD_RADIUS_M = 0.004
"""Of the panda's finger pads, `sim/robots/panda.py`."""


def make(task: str, num_envs: int, **settings: Any) -> SimVectorEnv:
    env = SimVectorEnv(EnvConfig(task=task, variation="varied", num_threads=1, **settings), num_envs)
    env.reset(seed=0)
    return env


def of_shape(env: SimVectorEnv, *, is_round: bool, square: bool = True) -> int:
    """Returns a simulation whose cube has a shape, as wide along x as along y."""
    half_m = env.view["cube.half_size"]
    fits = (env.view["cube.is_round"][:, 0] == is_round) & ((half_m[:, 0] == half_m[:, 1]) | (not square))
    return int(np.flatnonzero(fits)[0])


def contacts_of(env: SimVectorEnv, sim: int, one: str, other: str) -> list[float]:
    """Returns the distances of all contacts between two geoms, metres; below 0 where they overlap."""
    backend = on_cpu(env.backend)
    pair = {backend.model.geom(name).id for name in (one, other)}
    return [c.dist for c in backend.batch.get_data(sim).contact if set(c.geom.tolist()) == pair]


def put(env: SimVectorEnv, sim: int, thing: str, at_m: Array, matrix: Array) -> None:
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, matrix.reshape(-1))
    first = env.index.qpos_of[thing]
    env.backend.bind("qpos")[sim, first : first + 7] = [*at_m, *quat]
    env.backend.forward(np.array([sim]))


def turned(yaw_rad: float) -> Array:
    cos, sin = np.cos(yaw_rad), np.sin(yaw_rad)
    return np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])


def test_sizes_by_hand() -> None:
    # In a box of 6 x 4 x 10 cm: itself, or a cylinder of radius 2 cm and half height 5 cm.
    shown, box_m = np.array([0, 1]), np.array([[0.03, 0.02, 0.05]] * 2)
    half_m = inscribed(BOTH, shown, box_m)
    np.testing.assert_array_equal(half_m, [[0.03, 0.02, 0.05], [0.02, 0.02, 0.05]])
    # 240 cm^3, and pi * 4 * 10 = 125.66 cm^3.
    np.testing.assert_allclose(1e6 * volumes(BOTH, shown, half_m), [240.0, 125.6637], rtol=1e-6)
    sizes = geom_sizes(BOTH, shown, half_m)
    speck = SPECK_M
    np.testing.assert_array_equal(
        sizes, [[0.03, 0.02, 0.05, speck, speck, 0.0], [speck, speck, speck, 0.02, 0.05, 0.0]]
    )
    geoms = [sizes[:, :3], sizes[:, 3:]]
    np.testing.assert_array_equal(shown_half_m(BOTH, geoms), half_m)
    np.testing.assert_array_equal(shows_cylinder(BOTH, geoms), [[False], [True]])


@pytest.mark.parametrize("yaw_rad", [0.0, np.pi / 4])
@pytest.mark.parametrize("is_round", [False, True])
def test_a_finger_touches_a_cylinder_at_its_radius_and_a_box_where_its_side_or_edge_is(
    is_round: bool, yaw_rad: float
) -> None:
    env = make("pick_cube", 64)
    sim = of_shape(env, is_round=is_round)
    backend = on_cpu(env.backend)
    posed, model = backend.batch.get_data(sim), backend.model
    pad_m, other_m = (posed.geom_xpos[model.geom(f"{side}_pad").id].copy() for side in ("left", "right"))
    assert model.geom("left_pad").size[0] == PAD_RADIUS_M
    inwards = (other_m - pad_m) / np.linalg.norm(other_m - pad_m)
    finger = posed.xmat[model.geom("left_pad").bodyid[0]].reshape(3, 3).copy()
    half_m = float(env.view["cube.half_size"][sim, 0])
    # A square that is turned by an angle reaches half its side times (cos + sin).
    reach_m = half_m if is_round else half_m * (np.cos(yaw_rad) + np.sin(yaw_rad))
    shown, hidden = ("cube_cylinder", "cube") if is_round else ("cube", "cube_cylinder")
    for gap_m in (-1e-3, 1e-3):
        away_m = reach_m + PAD_RADIUS_M + gap_m
        put(env, sim, "cube", pad_m + away_m * inwards, finger @ turned(yaw_rad))
        found = contacts_of(env, sim, "left_pad", shown)
        assert bool(found) == (gap_m < 0)
        assert not found or min(found) == pytest.approx(gap_m, abs=1e-6)
        assert not contacts_of(env, sim, "left_pad", hidden)


def test_a_cylinder_stands_on_its_rim() -> None:
    env = make("pick_cube", 64)
    sim = of_shape(env, is_round=True)
    for _ in range(5):
        env.step(np.zeros((64, len(env.action_names)), np.float32))
    data, (radius_m, _, half_height_m) = (
        on_cpu(env.backend).batch.get_data(sim),
        env.view["cube.half_size"][sim],
    )
    points = np.array([c.pos for c in data.contact]) - env.view["cube.pos"][sim]
    assert len(points) == 3
    np.testing.assert_allclose(np.linalg.norm(points[:, :2], axis=1), radius_m, rtol=1e-3)
    np.testing.assert_allclose(points[:, 2], -half_height_m, atol=2e-4)


def test_pictures_show_the_shape_and_no_speck() -> None:
    """They are those of a scene that has the shape alone."""
    env = make("pick_cube", 64)
    counts = env.backend.bind("mocap_pos")[:, [env.index.mocap_of[f"clutter_{i}"] for i in range(3)], 2] > 0
    is_round = env.view["cube.is_round"][:, 0]
    task, robot = resolve("task", "pick_cube")(), load_robot("panda")
    for kind, other in ((True, mujoco.mjtGeom.mjGEOM_BOX), (False, mujoco.mjtGeom.mjGEOM_CYLINDER)):
        sim = int(np.flatnonzero((is_round == kind) & ~counts.any(axis=1))[0])
        x, y, z = env.view["cube.half_size"][sim]
        seen = env.picture(sim, camera="side", height=240, width=320).astype(int)
        sizes = {mujoco.mjtGeom.mjGEOM_BOX: [x, y, z], mujoco.mjtGeom.mjGEOM_CYLINDER: [x, z, 0.0]}
        differences: dict[bool, int] = {}
        for shape, size in sizes.items():
            spec = build_scene(task, robot)
            spec.geom("cube").type, spec.geom("cube").size = shape, size
            model = spec.compile()
            data = mujoco.MjData(model)
            data.qpos[:] = env.backend.bind("qpos")[sim]
            data.mocap_pos[0] = env.view["goal.pos"][sim]
            mujoco.mj_forward(model, data)
            renderer = Renderer(model, [Camera(name="side", height=240, width=320)])
            drawn = renderer.rgb(data, "side").astype(int)
            renderer.close()
            differences[shape == other] = int((abs(drawn - seen).max(axis=2) > 8).sum())
        assert differences[False] == 0  # of 76800 pixels
        assert differences[True] > 20


def test_obstacles_are_drawn_in_both_shapes() -> None:
    env = make("pick_cube", 256)
    row, _ = env.backend.locate("geom_size", "clutter_1")
    other, _ = env.backend.locate("geom_size", "clutter_1_cylinder")
    boxes, cylinders = (env.backend.expand("geom_size")[:, each] for each in (row, other))
    is_round = cylinders[:, 0] > SPECK_M
    # Its box is 6 x 3 x 3 cm: a cylinder has a radius and half a height of 1.5 cm.
    np.testing.assert_allclose(cylinders[is_round], [[0.015, 0.015, 0.0]] * int(is_round.sum()))
    np.testing.assert_allclose(boxes[~is_round], [[0.030, 0.015, 0.015]] * int((~is_round).sum()))
    assert (boxes[is_round] == SPECK_M).all()
    assert 0.4 < is_round.mean() < 0.6  # of 256 fair draws: 0.5 +- 0.03


def test_a_thing_keeps_what_is_drawn_of_it_whatever_its_shape() -> None:
    env = make("pick_cube", 16, randomize=True, looks="varied")
    for field in ("geom_friction", "geom_rgba"):
        values = env.backend.expand(field).reshape(16, -1, 3 if field == "geom_friction" else 4)
        box, cylinder = (values[:, env.backend.locate(field, name)[0]] for name in ("cube", "cube_cylinder"))
        np.testing.assert_array_equal(box, cylinder)
        assert len(np.unique(box[:, 0])) == 16


def test_a_fixed_scene_has_boxes_alone() -> None:
    env = SimVectorEnv(EnvConfig(task="pick_cube", num_threads=1), 2)
    model = on_cpu(env.backend).model
    assert not [i for i in range(model.ngeom) if model.geom(i).name.endswith("_cylinder")]
    assert env.view["cube.is_round"].tolist() == [[False], [False]]
