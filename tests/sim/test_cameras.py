import functools
import gc
import os
import subprocess
import sys
from typing import Any

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from robot_rl.core.errors import ConfigError, ModelError, RenderError
from robot_rl.core.names import ENVIRONMENT, PRIVILEGED
from robot_rl.core.registry import TABLE, resolve
from robot_rl.hal import env_rules
from robot_rl.sim.cameras import Camera, Renderer, Renderers, find_backend
from robot_rl.sim.gl import BACKENDS, no_renderer_message
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.task import build_scene
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

# Two cameras 2 m above a grey floor look straight down. The red cube, 0.4 m wide, stands 0.5 m
# along +x. A field of view of 53.13 degrees (2 atan 0.5) sees 2 m x 2 m of the floor, so in 96
# pixels one is 20.8 mm wide.
SCENE = """
<mujoco>
  <statistic extent="2"/>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 0.1" rgba="0.5 0.5 0.5 1"/>
    <geom name="lid" type="box" size="0.01 0.01 0.01" pos="50 0 0"/>
    <camera name="top" pos="0 0 2" fovy="53.13010235415598"/>
    <camera name="flat" pos="0 0 2" fovy="2" projection="orthographic"/>
    <body name="cube" pos="0.5 0 0.2">
      <joint name="slide" type="slide" axis="0 1 0"/>
      <geom name="cube" type="box" size="0.2 0.2 0.2" rgba="1 0 0 1" mass="1"/>
    </body>
  </worldbody>
</mujoco>
"""


def can_draw() -> bool:
    try:
        find_backend()
    except RenderError:
        return False
    return True


@pytest.fixture(scope="module")
def model():
    return mujoco.MjModel.from_xml_string(SCENE)


@pytest.fixture
def data(model):
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return data


@pytest.fixture
def renderer(model):
    """A renderer; None, once the error is checked, on a machine that cannot draw."""
    cameras = [Camera(name="top"), Camera(name="flat", width=64, height=32)]
    if not can_draw():
        with pytest.raises(RenderError, match="libegl1 and libgl1-mesa-dri; OSMesa by libosmesa6"):
            Renderer(model, cameras)
        yield None
        return
    renderer = Renderer(model, cameras)
    yield renderer
    renderer.close()


def drawing(test):
    """Runs the test where something can be drawn; elsewhere the fixture has checked the error."""

    @functools.wraps(test)
    def run(renderer, **others):
        if renderer is not None:
            test(renderer=renderer, **others)

    return run


def is_red(image):
    return (image[..., 0] > 120) & (image[..., 1] < 60)


@drawing
def test_colours_are_where_the_geometry_says(renderer, data):
    image = renderer.rgb(data, "top")
    assert image.shape == (96, 96, 3)
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous
    rows, columns = np.nonzero(is_red(image))
    # x = 0.5 m on the cube's top, 1.6 m away, where 96 pixels are 1.6 m: 48 + 0.5 * 60 = 78.
    assert columns[rows == 48].mean() == pytest.approx(77.5 - 3, abs=4)
    assert rows.mean() == pytest.approx(47.5, abs=1)
    assert not is_red(image)[:, :48].any()


@drawing
def test_the_first_row_is_the_upper_one(renderer, model, data):
    data.qpos[0] = 0.5  # towards +y, which is up in the picture
    mujoco.mj_forward(model, data)
    rows, _ = np.nonzero(is_red(renderer.rgb(data, "top")))
    assert rows.max() < 48


@drawing
def test_depth_is_in_metres_along_the_viewing_axis(renderer, data):
    depth = renderer.depth(data, "top")
    assert depth.shape == (96, 96)
    assert depth.dtype == np.float32
    # The floor is 2 m below the camera everywhere, corners included; the cube's top 2 - 0.4.
    assert depth[48, 10] == pytest.approx(2.0, abs=1e-3)
    assert depth[0, 0] == pytest.approx(2.0, abs=1e-3)
    assert depth[48, 78] == pytest.approx(1.6, abs=1e-3)


@drawing
def test_depth_of_an_orthographic_camera(renderer, data):
    depth = renderer.depth(data, "flat")
    assert depth.shape == (32, 64)
    # 2 m are 32 pixels high, so x = 0.5 m is column 32 + 8.
    assert depth[16, 40] == pytest.approx(1.6, abs=1e-3)
    assert depth[16, 4] == pytest.approx(2.0, abs=1e-3)


@drawing
def test_a_batch_is_drawn_with_each_simulations_own_state_and_colours(renderer, model):
    batch = Batch(model, 3, 1, persistent=True)
    batch.bind("qpos")[:, 0] = [0.0, 0.5, -0.5]
    cube = model.geom("cube").id
    batch.expand("geom_rgba")[2, cube] = [0, 0, 1, 1]
    renderer = Renderer(model, [Camera(name="top")], batch)
    images = renderer.render_batch(np.array([2, 1]), "top")
    assert images.shape == (2, 96, 96, 3)
    blue = (images[0, ..., 2] > 120) & (images[0, ..., 0] < 60)
    assert np.nonzero(blue)[0].min() > 47
    assert not is_red(images[0]).any()
    assert np.nonzero(is_red(images[1]))[0].max() < 48
    depth = renderer.render_batch(np.array([0]), "top", depth=True)
    assert depth.shape == (1, 96, 96)
    assert depth[0, 48, 78] == pytest.approx(1.6, abs=1e-3)


@drawing
def test_drawing_leaves_the_models_settings_alone(renderer, model):
    assert model.vis.quality.shadowsize == mujoco.MjModel.from_xml_string(SCENE).vis.quality.shadowsize
    assert model.vis.global_.offwidth == 640


@drawing
def test_two_renderers_do_not_disturb_each_other(renderer, model, data):
    before = renderer.rgb(data, "top")
    other = Renderer(model, [Camera(name="top", width=200, height=100, shadows=True)])
    assert other.rgb(data, "top").shape == (100, 200, 3)
    np.testing.assert_array_equal(renderer.rgb(data, "top"), before)
    other.close()
    other.close()
    np.testing.assert_array_equal(renderer.rgb(data, "top"), before)
    with pytest.raises(RuntimeError, match="renderer: it is closed"):
        other.rgb(data, "top")


@drawing
def test_a_forgotten_renderer_takes_nothing_from_another(renderer, model, data):
    before = renderer.rgb(data, "top")
    forgotten = Renderer(model, [Camera(name="top", shadows=True)])
    forgotten.rgb(data, "top")
    renderer.rgb(data, "top")  # its context is the current one when the other goes
    del forgotten
    gc.collect()
    np.testing.assert_array_equal(renderer.rgb(data, "top"), before)


@drawing
@pytest.mark.parametrize("depth", [False, True])
def test_threads_draw_the_pictures_of_one(renderer, model, depth):
    batch = Batch(model, 5, 1, persistent=True)
    batch.bind("qpos")[:, 0] = np.linspace(-0.2, 0.2, 5)

    def make():
        return Renderer(model, [Camera(name="top")], batch)

    one, three = Renderers(make, 1), Renderers(make, 3)
    for ids in (np.arange(5), np.array([3]), np.array([4, 0])):
        pictures = one.render_batch(ids, "top", depth=depth)
        np.testing.assert_array_equal(three.render_batch(ids, "top", depth=depth), pictures)
    assert len(np.unique(one.render_batch(np.arange(5), "top"), axis=0)) == 5
    three.close()
    three.close()
    with pytest.raises(RuntimeError, match="renderer: it is closed"):
        three.render_batch(np.array([0]), "top")
    forgotten = Renderers(make, 2)
    forgotten.render_batch(np.arange(5), "top")
    del forgotten  # without close
    gc.collect()
    np.testing.assert_array_equal(one.render_batch(np.array([4, 0]), "top", depth=depth), pictures)
    one.close()


def env_with_a_camera(num_envs, autoreset="same_step"):
    """Twelve control steps of 50 ms are an episode."""
    config = EnvConfig(
        task="reach", cameras=("front",), image_size=(8, 12), depth=True, horizon_s=0.6, num_threads=1
    )
    return SimVectorEnv(config, num_envs, autoreset="disabled" if autoreset == "disabled" else "same_step")


@drawing
@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_chunks_show_what_single_steps_show(renderer, autoreset):
    case = env_rules.Case(lambda num_envs: env_with_a_camera(num_envs, autoreset), 3, seed=7, max_steps=20)
    env_rules.check_chunk(case, length=15)


@drawing
def test_a_chunk_draws_its_last_step_and_the_ends_of_episodes(renderer, monkeypatch):
    drawn, draw = [], Renderer.render_batch
    monkeypatch.setattr(
        Renderer,
        "render_batch",
        lambda self, ids, camera, **how: drawn.append(len(ids)) or draw(self, ids, camera, **how),
    )
    env = env_with_a_camera(2)
    env.reset(seed=0)
    drawn.clear()
    still = np.zeros((2, 8, len(env.action_names)), np.float32)
    assert env.step_chunk(still, 8).valid.all()
    assert drawn == [2, 2]  # colours and depth of two envs, once
    done = env.step_chunk(still, 8)
    # Both episodes end at step 12, the fourth of this chunk: the last observation, and two beginnings.
    assert done.valid.sum(axis=1).tolist() == [4, 4]
    assert drawn == [2] * 6
    assert (done.infos["final_obs"]["front.depth"] != done.obs["front.depth"]).any()
    assert env.step_unseen(still[:, 0], None)[0] == {}
    env.close()


@drawing
def test_a_camera_that_was_not_asked_for_is_refused(renderer, data):
    with pytest.raises(ConfigError, match=r"not made with a camera 'topp'\. Did you mean 'top'\?"):
        renderer.rgb(data, "topp")


def test_a_camera_that_the_model_lacks_is_refused_before_anything_is_opened(model):
    with pytest.raises(ModelError, match=r"the model has no camera 'tip'\. Did you mean 'top'\?"):
        Renderer(model, [Camera(name="tip")])


@pytest.mark.parametrize(("side", "pixels"), [("width", 0), ("height", 5000)])
def test_impossible_sizes_are_refused(side, pixels):
    with pytest.raises(ConfigError, match=f"camera top: {side} is {pixels}, allowed is 1 to 4096 pixels"):
        Camera(name="top", **{side: pixels})


def test_the_back_end_is_one_of_the_known_or_the_error_says_what_to_install():
    if can_draw():
        assert find_backend() in BACKENDS
    else:
        with pytest.raises(RenderError, match="Training from states needs none of them"):
            find_backend()


def test_a_machine_without_egl_is_told_what_to_install():
    # No driver in the given list, and MUJOCO_GL asks for EGL alone: as on a bare server.
    absent = {"MUJOCO_GL": "egl", "__EGL_VENDOR_LIBRARY_FILENAMES": "/nonexistent.json"}
    code = "from robot_rl.sim.cameras import find_backend; find_backend()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **absent}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "RenderError: cameras: nothing here can draw without a display. Tried egl (" in last
    assert "Debian packages libegl1 and libgl1-mesa-dri; OSMesa by libosmesa6;" in last
    assert "pip install --no-deps lavavu-osmesa" in last
    assert "osmesa (" not in last


def test_the_error_lists_every_back_end_with_its_reason():
    text = no_renderer_message({"egl": "no device", "osmesa": "libOSMesa is not installed"})
    assert "Tried egl (no device); osmesa (libOSMesa is not installed). Install one of" in text


@pytest.mark.parametrize("robot", sorted(name for name in TABLE["robot"] if load_robot(name).kind == "arm"))
def test_every_robot_has_the_cameras_that_policies_see(robot):
    model = build_scene(resolve("task", "reach")(), load_robot(robot)).compile()
    assert {"left", "right", "wrist"} <= {model.camera(i).name for i in range(model.ncam)}
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    tool, wrist = data.site("tool"), data.camera("wrist")
    # Behind the finger tips by 8.3 cm, beside them by 7 cm; a camera looks along its own -z.
    assert np.linalg.norm(tool.xpos - wrist.xpos) == pytest.approx(np.hypot(0.07, 0.0834), abs=1e-6)
    towards = (tool.xpos - wrist.xpos) / np.linalg.norm(tool.xpos - wrist.xpos)
    assert -wrist.xmat.reshape(3, 3)[:, 2] @ towards > np.cos(np.radians(37.5))  # within the field of view


@drawing
def test_what_stands_still_is_not_drawn_again(renderer, monkeypatch):
    drawn, draw = [], Renderer.render_batch
    monkeypatch.setattr(
        Renderer,
        "render_batch",
        lambda self, ids, camera, **how: drawn.append(list(ids)) or draw(self, ids, camera, **how),
    )
    config = EnvConfig(task="reach", cameras=("left",), image_size=(16, 16), num_threads=1)
    env = SimVectorEnv(config, 3, autoreset="disabled")
    before, _ = env.reset(seed=0)
    up = np.tile(np.array([0.0, 0.0, 1.0, 0.0], np.float32)[: len(env.action_names)], (3, 1))
    only = np.array([False, True, False])
    after = before
    for _ in range(8):
        after, *_ = env.step_masked(up, only)
    assert drawn == [[0, 1, 2], *[[1]] * 8]
    assert np.array_equal(after["left.rgb"][[0, 2]], before["left.rgb"][[0, 2]])
    assert not np.array_equal(after["left.rgb"][1], before["left.rgb"][1])
    drawn.clear()
    env.step_unseen(up, None)  # all moved, nobody looked
    after, *_ = env.step_masked(up, only)
    assert drawn == [[0, 1, 2]]
    env.close()


def test_what_a_policy_does_not_see_is_shown_apart():
    config = EnvConfig(task="pick_cube", state=("joint", "finger", "tool.pos", "tool.xaxis"), privileged=True)
    env, whole = SimVectorEnv(config, 2), SimVectorEnv(EnvConfig(task="pick_cube"), 2)
    assert set(env.state_names) | set(env.privileged_names) == set(whole.state_names)
    (obs, _), (full, _) = env.reset(seed=0), whole.reset(seed=0)
    for names, key in ((env.state_names, "state"), (env.privileged_names, PRIVILEGED)):
        assert np.array_equal(obs[key], full["state"][:, [whole.state_names.index(name) for name in names]])
    assert obs[PRIVILEGED].shape == (2, 18)  # the speed of the tool, and five of 3 elements
    env.close()
    whole.close()


def test_elements_are_shown_once_more():
    env = SimVectorEnv(EnvConfig(task="pick_cube", environment_state=("cube.pos", "goal")), 2)
    obs, _ = env.reset(seed=0)
    names = [name for name in env.state_names if name.startswith(("cube.pos", "goal"))]
    space: Any = env.observation_space
    assert obs[ENVIRONMENT].shape == space[ENVIRONMENT].shape == (2, 6)
    assert np.array_equal(obs[ENVIRONMENT], obs["state"][:, [env.state_names.index(name) for name in names]])
    env.close()
    with pytest.raises(ConfigError, match=r"env\.environment_state: got 'cup', with which no element"):
        SimVectorEnv(EnvConfig(task="pick_cube", environment_state=("cup",)), 1)
