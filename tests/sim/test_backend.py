"""Names of quantities: what the back end compiles them to, and tasks on a view that no simulator made."""

import mujoco
import numpy as np
import pytest

from robot_rl.core.errors import ModelError
from robot_rl.sim.backends.backend import View
from robot_rl.sim.backends.mujoco_cpu import MujocoCpu
from robot_rl.sim.robots.gantry import GANTRY
from robot_rl.sim.scene import add_free_box
from robot_rl.sim.tasks.pick_cube import PickCube


def backend_of(*quantities: str, touch: bool = False) -> MujocoCpu:
    """Returns two gantries, each with a box at (0.5, 0, 0.1) that has a site 0.2 m along its x axis."""
    spec = GANTRY.build()
    box = add_free_box(spec, "box", half_size_m=(0.1, 0.1, 0.1), mass_kg=1.0)
    box.add_site(name="corner", pos=[0.2, 0.0, 0.0])
    if touch:
        pad = mujoco.mjtObj.mjOBJ_SITE
        spec.add_sensor(
            name="corner.touch", type=mujoco.mjtSensor.mjSENS_TOUCH, objtype=pad, objname="corner"
        )
    backend = MujocoCpu(spec, GANTRY, quantities, 2, 1)
    # The second box is turned by 90 degrees about z: its x axis is the world's y axis.
    half = np.sqrt(0.5)
    first = backend.index.qpos_of["box"]
    backend.bind("qpos")[1, first : first + 7] = [0.5, 0.3, 0.1, half, 0.0, 0.0, half]
    backend.bind("qpos")[:, backend.index.arm_qpos] = [0.4, 0.0, 0.2, 0.0]
    backend.forward()
    return backend


def test_a_thing_is_a_joint_a_site_or_a_body_and_tool_is_the_robots_tool_site() -> None:
    view = backend_of("z.pos", "box.pos", "corner.pos", "corner.yaxis", "tool.pos", "box.linvel").view
    np.testing.assert_allclose(view["z.pos"], [[0.2], [0.2]], atol=1e-12)  # the slide, not a body
    np.testing.assert_allclose(view["box.pos"], [[0.5, 0.0, 0.1], [0.5, 0.3, 0.1]], atol=1e-12)
    np.testing.assert_allclose(view["corner.pos"], [[0.7, 0.0, 0.1], [0.5, 0.5, 0.1]], atol=1e-12)
    np.testing.assert_allclose(view["corner.yaxis"], [[0, 1, 0], [-1, 0, 0]], atol=1e-12)
    np.testing.assert_allclose(view["tool.pos"], [[0.4, 0.0, 0.2]] * 2, atol=1e-12)
    assert view["box.linvel"].shape == (2, 3)


def test_a_thing_may_be_seen_from_another() -> None:
    view = backend_of("tool_in_box.pos", "box_in_corner.pos").view
    # From the box at (0.5, 0.3, 0.1), turned by 90 degrees, (-0.1, -0.3, 0.1) is (-0.3, 0.1, 0.1).
    np.testing.assert_allclose(view["tool_in_box.pos"], [[-0.1, 0.0, 0.1], [-0.3, 0.1, 0.1]], atol=1e-12)
    np.testing.assert_allclose(view["box_in_corner.pos"], [[-0.2, 0.0, 0.0]] * 2, atol=1e-12)


def test_a_sensor_of_the_scene_keeps_its_name() -> None:
    assert backend_of("corner.touch", touch=True).view["corner.touch"].shape == (2, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bux.pos", "quantity 'bux.pos': the scene has no joint, site or body 'bux'. Did you mean 'box'"),
        ("box_in_bux.pos", "quantity 'box_in_bux.pos': the scene has no joint, site or body 'bux'."),
        ("box.linvelo", "quantity 'box.linvelo': no kind 'linvelo' of this thing. Did you mean 'linvel'"),
        ("corner.touch", "quantity 'corner.touch': no kind 'touch' of this thing. Known: angvel"),
        ("box.vel", "quantity 'box.vel': no kind 'vel' of this thing."),  # a free joint has six
    ],
)
def test_a_name_that_the_scene_does_not_have_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        backend_of(name)


def test_a_joint_may_not_take_the_name_of_the_tool_site() -> None:
    spec = GANTRY.build()
    drawer = spec.worldbody.add_body(name="drawer", mass=1.0, inertia=[1.0, 1.0, 1.0])
    drawer.add_joint(name="tool", type=mujoco.mjtJoint.mjJNT_SLIDE)
    with pytest.raises(ModelError, match=r"quantity 'tool.pos': a joint is named 'tool'.*Rename it"):
        MujocoCpu(spec, GANTRY, ["tool.pos"], 1, 1)


def test_a_task_runs_on_arrays_from_anywhere() -> None:
    names = ("cube.pos", "cube_in_tool.pos", "goal.pos")
    columns = {name: slice(3 * i, 3 * i + 3) for i, name in enumerate(names)}
    values = np.zeros((2, 9))
    values[:, 6:] = [0.0, 0.0, 0.2]
    values[1, 2] = 0.18  # 2 cm below the goal, which is within 2.5 cm
    view, task = View(values, columns, []), PickCube()
    assert task.evaluate(view)["success"].tolist() == [False, True]
    # In the tool: 0.3. Carried: 0.7 (1 - tanh(0.2 / 0.1)) and 0.7 (1 - tanh(0.02 / 0.1)).
    np.testing.assert_allclose(task.dense_reward(view), 0.3 + 0.7 * (1 - np.tanh([2.0, 0.2])))
    values[0, :3] = values[0, 6:]
    assert task.evaluate(view)["success"].tolist() == [True, True]  # the view is live


def test_a_view_names_its_elements_and_refuses_what_the_task_does_not_name() -> None:
    view = View(
        np.arange(8.0)[None], {"cube.pos": slice(1, 4), "a.pos": slice(4, 5), "b.pos": slice(6, 7)}, []
    )
    columns, names = view.elements(["a.pos", "cube.pos"])
    assert (columns.tolist(), names) == ([4, 1, 2, 3], ("a.pos", "cube.pos.0", "cube.pos.1", "cube.pos.2"))
    with pytest.raises(ModelError, match=r"no quantity 'cube.pot'. Did you mean 'cube.pos'.*`privileged`"):
        view["cube.pot"]


def test_the_width_of_the_fingers_is_the_sum_of_their_positions() -> None:
    columns = {"left.pos": slice(0, 1), "right.pos": slice(2, 3)}
    view = View(np.array([[0.01, 5.0, 0.02]]), columns, ["left.pos", "right.pos"])
    np.testing.assert_allclose(view["fingers.width"], [[0.03]])
