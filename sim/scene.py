"""Parts that tasks build scenes from: table, cubes, goals, cameras.

World frame: z up, the robot's base at the origin, the table top at z = 0.
"""

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
from mujoco import mjtBuiltin, mjtGeom, mjtOrientation, mjtTexture
from numpy.typing import NDArray

from robot_rl.sim.poses import rotate

Array = NDArray[Any]
Rgba = tuple[float, float, float, float]
WOOD: Rgba = (0.80, 0.72, 0.62, 1.0)
RED: Rgba = (0.85, 0.22, 0.18, 1.0)
BLUE: Rgba = (0.20, 0.42, 0.80, 1.0)
GREEN: Rgba = (0.20, 0.70, 0.35, 0.45)

_WRIST_M = (0.07, 0.0, -0.0834)
"""Position of the camera `wrist` in the tool's frame, whose z points out of the hand."""
_WRIST_FORWARD = (-0.35, 0.0, 1.0)
"""Where it looks, in the tool's frame."""


def add_world(spec: mujoco.MjSpec) -> None:
    """Adds a floor plane as the table top, lights, and cameras.

    `front`, `side` and `overhead` show the scene to people. `left` and `right` show the workspace from two
    sides, closely enough for a policy: a pixel of a 64 x 64 picture is some 8 mm on the table.
    """
    spec.add_material(name="matt", rgba=WOOD, specular=0.0, shininess=0.0)
    spec.worldbody.add_geom(
        name="table",
        type=mjtGeom.mjGEOM_PLANE,
        size=[1.5, 1.5, 0.05],
        material="matt",
        friction=[0.8, 0.005, 0.0001],
    )
    spec.worldbody.add_light(
        pos=[0.3, -0.8, 2.0], dir=[0.1, 0.4, -1.0], diffuse=[0.4, 0.4, 0.4], castshadow=True
    )
    spec.worldbody.add_light(
        pos=[1.5, 1.0, 1.5], dir=[-0.8, -0.6, -1.0], diffuse=[0.25, 0.25, 0.25], castshadow=False
    )
    sky = spec.add_texture(
        name="sky", type=mjtTexture.mjTEXTURE_SKYBOX, builtin=mjtBuiltin.mjBUILTIN_GRADIENT
    )
    sky.rgb1, sky.rgb2, sky.width, sky.height = (0.80, 0.86, 0.93), (0.97, 0.98, 1.0), 64, 384
    spec.visual.headlight.ambient = [0.25, 0.25, 0.25]
    spec.visual.headlight.diffuse = [0.20, 0.20, 0.20]
    spec.visual.global_.offwidth, spec.visual.global_.offheight = 1280, 960
    add_camera(spec, "front", position_m=(1.35, -0.85, 0.80), target_m=(0.36, 0.0, 0.22))
    add_camera(spec, "side", position_m=(0.05, -0.75, 0.55), target_m=(0.52, 0.0, 0.12))
    add_camera(spec, "overhead", position_m=(0.50, 0.0, 1.05), target_m=(0.5001, 0.0, 0.0))
    for name, y_m in (("left", 0.45), ("right", -0.45)):
        add_camera(spec, name, position_m=(1.05, y_m, 0.60), target_m=(0.48, 0.0, 0.10), fovy_deg=38.0)


def add_camera(
    spec: mujoco.MjSpec,
    name: str,
    *,
    position_m: Sequence[float],
    target_m: Sequence[float],
    fovy_deg: float = 45.0,
) -> None:
    """Adds a fixed camera that looks at a point."""
    camera = spec.worldbody.add_camera(name=name, pos=list(position_m), fovy=fovy_deg)
    _look(camera, np.subtract(target_m, position_m), up=np.array([0.0, 0.0, 1.0]))


def add_wrist_camera(spec: mujoco.MjSpec, tool_site: str, *, fovy_deg: float = 75.0) -> None:
    """Adds the camera `wrist` on the body of the tool: behind the fingers, looking past their tips."""
    site = spec.site(tool_site)

    def in_body(vector: Sequence[float]) -> Array:
        return rotate(np.asarray(site.quat, float)[None], np.asarray(vector, float)[None])[0]

    position_m = np.add(site.pos, in_body(_WRIST_M))
    camera = site.parent.add_camera(name="wrist", pos=position_m.tolist(), fovy=fovy_deg)
    _look(camera, in_body(_WRIST_FORWARD), up=in_body((1.0, 0.0, 0.0)))


def _look(camera: Any, forward: Array, *, up: Array) -> None:
    """Turns a camera into a direction of its body's frame; `up` is upright in the picture."""
    forward = np.asarray(forward) / np.linalg.norm(forward)
    right = np.cross(forward, up)
    right = right / np.linalg.norm(right)
    camera.alt.type = mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = [*right, *np.cross(right, forward)]


def add_free_box(
    spec: mujoco.MjSpec,
    name: str,
    *,
    half_size_m: Sequence[float],
    mass_kg: float,
    rgba: Rgba = RED,
    friction: float = 1.0,
) -> mujoco.MjsBody:
    """Adds a box that moves freely; its joint and geom carry the body's name."""
    body = spec.worldbody.add_body(name=name, pos=[0.5, 0.0, half_size_m[2]])
    body.add_freejoint(name=name)
    body.add_geom(
        name=name,
        type=mjtGeom.mjGEOM_BOX,
        size=list(half_size_m),
        mass=mass_kg,
        rgba=rgba,
        friction=[friction, 0.005, 0.0001],
        condim=3,
    )
    return body


def add_goal(spec: mujoco.MjSpec, name: str = "goal", *, radius_m: float = 0.02, rgba: Rgba = GREEN) -> None:
    """Adds a mocap body that marks where something should go; it touches nothing."""
    body = spec.worldbody.add_body(name=name, mocap=True, pos=[0.5, 0.0, 0.2])
    body.add_geom(
        type=mjtGeom.mjGEOM_SPHERE, size=[radius_m, 0, 0], rgba=rgba, contype=0, conaffinity=0, group=1
    )


def add_mark(spec: mujoco.MjSpec, name: str = "goal", *, radius_m: float, rgba: Rgba = GREEN) -> None:
    """Adds a mocap body with a disc on the table; it touches nothing."""
    body = spec.worldbody.add_body(name=name, mocap=True, pos=[0.5, 0.0, 0.0])
    body.add_geom(
        type=mjtGeom.mjGEOM_CYLINDER,
        size=[radius_m, 0.001, 0.0],
        rgba=(*rgba[:3], 1.0),
        contype=0,
        conaffinity=0,
        group=1,
    )


def add_hole_block(
    spec: mujoco.MjSpec,
    name: str,
    *,
    hole_half_m: float,
    height_m: float,
    wall_m: float = 0.03,
    rgba: Rgba = BLUE,
) -> None:
    """Adds a mocap body of four smooth walls around a square hole; its origin is the hole's floor.

    The walls' friction counts, whatever touches them (priority): a peg slides there, although the fingers
    hold it well.
    """
    body = spec.worldbody.add_body(name=name, mocap=True, pos=[0.5, 0.0, 0.0])
    outer, middle = hole_half_m + wall_m, hole_half_m + 0.5 * wall_m
    for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        body.add_geom(
            type=mjtGeom.mjGEOM_BOX,
            pos=[x * middle, y * middle, 0.5 * height_m],
            size=[0.5 * wall_m if x else outer, 0.5 * wall_m if y else hole_half_m, 0.5 * height_m],
            rgba=rgba,
            friction=[0.2, 0.005, 0.0001],
            priority=1,
        )
