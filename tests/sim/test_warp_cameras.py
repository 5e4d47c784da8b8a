"""Pictures that MuJoCo Warp draws: near OpenGL's, of each simulation as it is, and tensors on the device.

On the CPU device of Warp, and on a GPU (`pytest -m gpu`). The first run compiles for a minute.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.sim.backends.mujoco_warp import MujocoWarp
from robot_rl.sim.backends.warp_cameras import WarpCameras, check_own_fields
from robot_rl.sim.cameras import Camera, Renderers
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.robots.gantry import GANTRY
from robot_rl.sim.vector import SimVectorEnv
from tests.sim.test_cameras import can_draw

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = EnvConfig(task="pick_cube", cameras=("front", "overhead"), image_size=(32, 24), num_threads=1)
NUM_ENVS = 3


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("mujoco_warp", reason="pip install -e '.[warp]'")
    return request.param


def warp_env(device: str, **changes: Any) -> Any:
    config = replace(CONFIG, engine="mujoco_warp", engine_device=device, **changes)
    return SimVectorEnv(config, NUM_ENVS)


def move_cube(env: Any, sim: int, by_m: float) -> None:
    env.backend.bind("qpos")[sim, env.index.qpos_of["cube"]] += by_m
    env.backend.forward()


def drawn(env: Any, camera: str, **how: Any) -> Any:
    """Returns the pictures of all simulations as numpy arrays of signed numbers."""
    renderer = env.backend.renderer([Camera(name=camera, width=64, height=64, by_engine=True)])
    pictures = renderer.render_batch(np.arange(NUM_ENVS), camera, **how)
    renderer.close()
    return np.asarray(pictures.cpu() if isinstance(pictures, torch.Tensor) else pictures).astype(float)


# Of OpenGL's pictures of 64 x 64: facets of round shapes move edges, and the hand before the wrist camera.
@pytest.mark.parametrize(
    ("camera", "most_mean", "least_depth"),
    [("front", 1.0, 0.99), ("overhead", 2.0, 0.99), ("wrist", 3.5, 0.94)],
)
def test_pictures_are_those_of_opengl(device: str, camera: str, most_mean: float, least_depth: float) -> None:
    if not can_draw():
        return  # test_cameras has checked the error
    ours, theirs = SimVectorEnv(CONFIG, NUM_ENVS), warp_env(device)
    ours.reset(seed=0)
    theirs.reset(seed=0)
    theirs.set_state(torch.as_tensor(ours.get_state()))
    need, got = drawn(ours, camera), drawn(theirs, camera)
    assert np.abs(got - need).mean() < most_mean
    assert np.median(np.abs(got - need)) == 0
    need, got = drawn(ours, camera, depth=True), drawn(theirs, camera, depth=True)
    assert (np.abs(got - need) <= 0.01 * need).mean() > least_depth
    for env in (ours, theirs):
        env.close()


def test_a_cube_that_moves_does_so_in_the_same_place_and_in_its_simulation_alone(device: str) -> None:
    changed = []
    for env in (warp_env(device), SimVectorEnv(CONFIG, NUM_ENVS))[: 1 + can_draw()]:
        env.reset(seed=0)
        before = drawn(env, "wrist")
        move_cube(env, 1, 0.03)
        after = drawn(env, "wrist")
        np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
        changed.append((np.abs(after - before).max(axis=-1) > 20)[1])
        assert changed[-1].sum() > 4
        env.close()
    if len(changed) == 2:
        both, either = changed[0] & changed[1], changed[0] | changed[1]
        assert both.sum() / either.sum() > 0.5


def test_observations_are_tensors_on_the_device(device: str) -> None:
    env = warp_env(device, depth=True)
    obs, _ = env.reset(seed=0)
    assert env.single_observation_space["front.rgb"].shape == (32, 24, 3)
    for name in CONFIG.cameras:
        rgb, depth_m = obs[f"{name}.rgb"], obs[f"{name}.depth"]
        assert (rgb.shape, rgb.dtype) == ((NUM_ENVS, 32, 24, 3), torch.uint8)
        assert (depth_m.shape, depth_m.dtype) == ((NUM_ENVS, 32, 24), torch.float32)
        assert rgb.device.type == depth_m.device.type == device
        assert bool((rgb[0] != rgb[1]).any())  # the cubes are not in the same place
    # A camera at 1.05 m above the table, and nothing lower: the plane of the table is the farthest.
    assert float(obs["overhead.depth"].max()) == pytest.approx(1.05, abs=0.01)
    action = torch.ones((NUM_ENVS, len(env.action_names)), device=env.device)
    after = env.step(action)[0]
    assert bool((after["front.rgb"] != obs["front.rgb"]).any())


@pytest.mark.parametrize("depth", [False, True])
def test_some_simulations_and_given_states_are_drawn_as_all_and_present_ones(
    device: str, depth: bool
) -> None:
    env = warp_env(device, looks="varied", randomize=True)
    env.reset(seed=0)
    renderer = env.backend.renderer([Camera(name="front", width=32, height=32, by_engine=True)])
    assert isinstance(renderer, WarpCameras)
    all_of_them: Any = renderer.render_batch(np.arange(NUM_ENVS), "front", depth=depth)
    chosen = np.array([2, 0])
    some: Any = renderer.render_batch(chosen, "front", depth=depth)
    assert torch.equal(some, all_of_them[torch.as_tensor(chosen)])
    assert bool((some[0] != some[1]).any())
    states = env.backend.read_states()[[2, 0]].cpu().numpy().astype(float)
    move_cube(env, 0, 0.1)
    move_cube(env, 2, 0.1)
    moved = renderer.render_batch(chosen, "front", depth=depth)
    past: Any = renderer.render_batch(chosen, "front", depth=depth, states=states)
    assert torch.equal(past, some)
    assert bool((moved != past).any())


def test_late_pictures_are_those_of_the_step_before(device: str) -> None:
    """A delay of 50 ms is one control step at 20 Hz."""
    plain, late = warp_env(device), warp_env(device, camera_delay_s=(0.05,))
    before, obs = plain.reset(seed=0)[0], late.reset(seed=0)[0]
    action = torch.full((NUM_ENVS, len(plain.action_names)), 0.7, device=plain.device)
    tolerance = 0 if device == "cpu" else 8  # no two runs on a GPU are equal
    for _ in range(3):
        now, obs = plain.step(action)[0], late.step(action)[0]
        difference = (obs["front.rgb"].int() - before["front.rgb"].int()).abs().float()
        assert float(difference.quantile(0.99)) <= tolerance
        assert bool((now["front.rgb"] != obs["front.rgb"]).any())
        before = now


def test_what_is_behind_a_translucent_shape_is_mixed_in(device: str) -> None:
    """A ball of alpha 0.4 hides 1 - 0.6 * 0.6 = 0.64 of the wall behind it: by its front and its back."""
    spec = GANTRY.build()
    spec.worldbody.add_geom(name="wall", type=6, size=[1, 0.01, 1], pos=[0, 6, 0], rgba=[0, 0, 1, 1])
    spec.worldbody.add_geom(name="ball", type=2, size=[0.5, 0, 0], pos=[0, 5, 0], rgba=[1, 0, 0, 1])
    spec.worldbody.add_camera(name="eye", pos=[0, 3, 0], quat=[0.7071068, 0.7071068, 0, 0])
    backend = MujocoWarp(spec, GANTRY, [], 3, device=device)
    row, _ = backend.locate("geom_rgba", "ball")
    backend.expand("geom_rgba")[:, row, 3] = backend.asarray([1.0, 0.0, 0.4])
    renderer = backend.renderer([Camera(name="eye", width=9, height=9, by_engine=True)])
    pictures: Any = renderer.render_batch(np.arange(3), "eye")
    front, wall, mixed = pictures[:, 4, 4].float()
    assert front[0] > 2 * front[2]
    assert wall[2] > 2 * wall[0]
    torch.testing.assert_close(mixed, 0.64 * front + 0.36 * wall, atol=1.0, rtol=0.0)


def test_opengl_draws_where_it_is_asked_for(device: str) -> None:
    if not can_draw():
        return
    env = warp_env(device, renderer="opengl")
    obs, _ = env.reset(seed=0)
    renderer = env.backend.renderer([Camera(name="front", height=32, width=24)])
    assert isinstance(renderer, Renderers)
    np.testing.assert_array_equal(obs["front.rgb"].cpu(), renderer.render_batch(np.arange(NUM_ENVS), "front"))
    assert env.picture(1).shape == (480, 640, 3)


def test_a_camera_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(ModelError, match=r"no camera 'frnt'.*front"):
        warp_env(device, cameras=("frnt",))
    renderer = warp_env(device).backend.renderer([Camera(name="front", by_engine=True)])
    with pytest.raises(ConfigError, match=r"was not made with a camera 'wrist'"):
        renderer.render_batch(np.arange(1), "wrist")


def test_fields_that_the_renderer_ignores_are_refused_by_name() -> None:
    check_own_fields(["geom_rgba", "mat_rgba", "light_diffuse", "light_pos", "cam_fovy", "body_mass"])
    with pytest.raises(
        ConfigError, match=r"env.renderer: got engine.* same light_attenuation, site_rgba; .*=opengl"
    ):
        check_own_fields(["site_rgba", "light_attenuation", "geom_rgba", "geom_friction"])
