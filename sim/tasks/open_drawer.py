"""Open a drawer by its handle."""

import mujoco
import numpy as np
from mujoco import mjtGeom, mjtJoint

from robot_rl.core.arrays import copied, like, namespace, norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import BLUE, Rgba
from robot_rl.sim.start_classes import Resets
from robot_rl.sim.task import Aim, Array, Start, Task, View, closeness
from robot_rl.sim.tasks.grasping import half_turn, heading

OPEN_M = 0.12
_TRAVEL_M = 0.18
_GAP_M = 0.055
"""From the bar of the handle to the drawer's front: the fingers go between."""
_BAR_X_M = -0.012 - _GAP_M
"""Of the bar, in the drawer's frame."""
_BAR_RADIUS_M = 0.007
_BAR_HALF_M = 0.055
_HANDLE_Z_M = 0.10
_HALF_WIDTH_M, _HALF_DEPTH_M, _HEIGHT_M = 0.15, 0.10, 0.125
_HOOK_M = (0.028, 0.0, -0.008)
"""From the bar to the tool when the fingers stand behind it."""
_ABOVE_M = 0.07
_GREY: Rgba = (0.62, 0.64, 0.67, 1.0)
_STEEL: Rgba = (0.30, 0.32, 0.35, 1.0)


class OpenDrawer(Task):
    """Pull the drawer open by the bar on its front.

    Randomised: where the chest stands, how far the drawer is open already (0 to 2 cm), arm posture;
    with `randomize`, the drawer's damping and friction. Success: the drawer open by 12 cm or more.
    The expert hooks shut fingers behind the bar; grasping the bar is as good.
    """

    name = "open_drawer"
    instruction = "open the drawer"
    horizon_s = 5.0
    camera = "side"
    needs_gripper = False
    symmetric = True
    observation = ("tool.linvel", "drawer.pos", "drawer.vel", "handle.pos", "handle_in_tool.pos")
    resets = Resets(
        thing="drawer",
        slide_goal_m=OPEN_M,
        near_goal_m=(0.08, 0.0, 0.0),
        grip_m=(_BAR_X_M, 0.0, _HANDLE_Z_M),
        grip_half_m=(_BAR_RADIUS_M, 0.8 * _BAR_HALF_M, _BAR_RADIUS_M),
        rests_at_goal=True,
    )
    vary = (
        Vary(field="dof_damping", element="drawer", low=0.5, high=2.0),
        Vary(field="dof_frictionloss", element="drawer", low=0.5, high=2.0),
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        add_chest(spec)

    def start(self, rng: EpisodeRng) -> Start:
        chest = rng.uniform((0.66, -0.12, 0.0), (0.72, 0.12, 0.0), size=3)
        return Start(joints={"drawer": rng.uniform(0.0, 0.02)}, mocap={"chest": chest})

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": view["drawer.pos"][:, 0] >= OPEN_M}

    def dense_reward(self, view: View) -> Array:
        handle = view["handle.pos"]
        reach = closeness(norm(handle + like(_HOOK_M, handle) - view["tool.pos"]), 0.1)
        return 0.3 * reach + 0.7 * namespace(handle).clip(view["drawer.pos"][:, 0] / OPEN_M, 0.0, 1.0)

    def expert(self, view: View, offset_m: Array) -> Aim:
        """Goes above the gap behind the bar, down into it, and back."""
        tool = view["tool.pos"]
        hook = view["handle.pos"] + like(_HOOK_M, tool) + offset_m
        error = tool - hook
        sideways = norm(error[:, :2])
        low = error[:, 2] < 0.012
        hooked = low & (sideways < 0.04)
        aligned = (sideways < 0.01) | ((sideways < 0.02) & (error[:, 2] < 0.5 * _ABOVE_M))
        position = copied(hook)
        position[~(aligned | hooked), 2] += _ABOVE_M
        position[hooked, 0] = tool[hooked, 0] - 0.06
        return Aim(
            position_m=position,
            yaw_rad=half_turn(-heading(view["tool.xaxis"])),
            closed=namespace(low).full_like(low, view.has_fingers),
        )


def add_chest(spec: mujoco.MjSpec) -> None:
    """Adds a chest that a mocap body carries, a drawer on the slide joint `drawer`, and its handle.

    Chest and drawer touch the robot and nothing else: contact affinity 0.
    """
    chest = spec.worldbody.add_body(name="chest", mocap=True, pos=[0.7, 0.0, 0.0])
    depth, width, height = _HALF_DEPTH_M, _HALF_WIDTH_M, _HEIGHT_M
    _box(chest, (depth, 0.0, height - 0.008), (depth, width, 0.008), _GREY)
    _box(chest, (2 * depth - 0.008, 0.0, 0.5 * height), (0.008, width, 0.5 * height), _GREY)
    for side in (-1.0, 1.0):
        _box(chest, (depth, side * (width - 0.008), 0.5 * height), (depth, 0.008, 0.5 * height), _GREY)
    drawer = chest.add_body(name="drawer")
    drawer.add_joint(
        name="drawer",
        type=mjtJoint.mjJNT_SLIDE,
        axis=[-1.0, 0.0, 0.0],
        range=[0.0, _TRAVEL_M],
        damping=np.array([10.0, 0.0, 0.0]),
        frictionloss=1.0,
    )
    drawer.explicitinertial, drawer.mass = True, 1.0
    drawer.ipos, drawer.inertia = [0.08, 0.0, 0.06], [5e-3, 5e-3, 5e-3]
    inner = width - 0.02
    _box(drawer, (-0.006, 0.0, 0.5 * height - 0.006), (0.006, inner, 0.5 * height - 0.012), BLUE)
    _box(drawer, (depth - 0.01, 0.0, 0.012), (depth - 0.012, inner, 0.004), BLUE, touches=False)
    for side in (-1.0, 1.0):
        at = (depth - 0.01, side * (inner - 0.004), 0.04)
        _box(drawer, at, (depth - 0.012, 0.004, 0.03), BLUE, touches=False)
    bar_x = _BAR_X_M
    _bar(drawer, (bar_x, -_BAR_HALF_M, _HANDLE_Z_M), (bar_x, _BAR_HALF_M, _HANDLE_Z_M))
    for side in (-1.0, 1.0):
        y = side * _BAR_HALF_M
        _bar(drawer, (bar_x, y, _HANDLE_Z_M), (-0.012, y, _HANDLE_Z_M))
    drawer.add_site(name="handle", pos=[bar_x, 0.0, _HANDLE_Z_M], group=4)


def _box(
    body: mujoco.MjsBody,
    at: tuple[float, float, float],
    half_size_m: tuple[float, float, float],
    rgba: Rgba,
    *,
    touches: bool = True,
) -> None:
    body.add_geom(
        type=mjtGeom.mjGEOM_BOX, pos=at, size=half_size_m, rgba=rgba, contype=int(touches), conaffinity=0
    )


def _bar(body: mujoco.MjsBody, start: tuple[float, float, float], end: tuple[float, float, float]) -> None:
    body.add_geom(
        type=mjtGeom.mjGEOM_CAPSULE,
        fromto=(*start, *end),
        size=(_BAR_RADIUS_M, 0.0, 0.0),
        rgba=_STEEL,
        contype=1,
        conaffinity=0,
    )
