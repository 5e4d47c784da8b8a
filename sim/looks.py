"""How a scene looks, drawn for each episode: colours, lights, camera poses, and things in the background.

`varied` draws within a range of what the scene is, `held_out` beyond that range and up to twice as far, with
things of another shape: what a policy has learned to ignore is measured where it has not looked. Neither
changes how the scene moves, nor where an episode begins. The robot's own colours stay.
(Domain randomisation: Tobin et al. 2017.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mujoco
from mujoco import mjtGeom

from robot_rl.core.arrays import Array, like, namespace
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.config import Looks
from robot_rl.sim.poses import quaternion_product
from robot_rl.sim.randomize import Term
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.task import Task, build_scene

_COLOUR = 0.25
"""Largest change of red, green and blue in `varied`, as a share of each."""
_LIGHT = 0.3
"""Of a light's brightness, as a share."""
_LIGHT_M = 0.3
"""Of a light's place, along each axis."""
_CAMERA_M = 0.015
_WRIST_CAMERA_M = 0.003
"""Of a camera on a robot."""
_CAMERA_RAD = 0.015
"""Of a camera's direction, about each axis."""
_THINGS = 4
_THING_M = (0.012, 0.03)
"""Smallest and largest half size of a thing in the background."""
_PLACES = ((0.30, 0.24), (0.45, -0.34), (0.60, 0.34), (0.68, -0.24))
"""Middles of their places on the table, x and y, in metres: around what the tasks use."""
_PLACE_M = 0.05
_GREY = (0.45, 0.45, 0.45, 1.0)


@dataclass(frozen=True, kw_only=True)
class Look(Term):
    """Draws how far one object's look is from the scene's own; see `Term` for `field` and `element`."""

    most: tuple[float, ...]
    """Largest change of each component in `varied`."""
    how: Literal["scale", "add", "turn"] = "add"
    """`turn` turns a quaternion (w, x, y, z) about the three axes, by angles in radians."""
    beyond: bool = False
    """Whether changes are between `most` and twice that."""

    def draw(self, nominal: Array, rng: EpisodeRng, scale: float = 1.0) -> Array:
        xp, rows = namespace(rng.key), rng.uniform(-1.0, 1.0, size=len(self.most))
        if self.beyond:
            rows = xp.where(rows < 0, rows - 1.0, rows + 1.0)
        change = scale * rows * like(self.most, rows)
        if self.how == "turn":
            half = xp.concat([xp.ones_like(change[:, :1]), 0.5 * change], axis=1)
            half = half / xp.sqrt((half * half).sum(axis=1))[:, None]
            return quaternion_product(xp.broadcast_to(nominal, half.shape), half)
        return nominal + change if self.how == "add" else xp.clip(nominal * (1.0 + change), 0.0, None)


def scene_and_looks(task: Task, robot: Robot, looks: Looks) -> tuple[mujoco.MjSpec, tuple[Look, ...]]:
    """Returns the scene of a task, with what is only to be seen, and what varies of how it looks."""
    spec = build_scene(task, robot)
    if looks == "fixed":
        return spec, ()
    ours = _of_robot(robot)
    _add_things(spec, looks)
    beyond, terms = looks == "held_out", list[Look]()

    def vary(field: str, thing: Any, most: tuple[float, ...], how: Any = "add") -> None:
        terms.append(Look(field=field, element=thing.name, most=most, how=how, beyond=beyond))

    for i, light in enumerate(spec.lights):
        light.name = light.name or f"light_{i}"
        vary("light_pos", light, (_LIGHT_M,) * 3)
        vary("light_diffuse", light, (_LIGHT,) * 3, "scale")
    for camera in spec.cameras:
        is_fixed = camera.parent.name == "world"
        vary("cam_pos", camera, (_CAMERA_M if is_fixed else _WRIST_CAMERA_M,) * 3)
        vary("cam_quat", camera, (_CAMERA_RAD,) * 3, "turn")
    vary("mat_rgba", spec.material("matt"), (*(_COLOUR,) * 3, 0.0), "scale")
    for i, geom in enumerate(spec.geoms):
        if geom.parent.name in ours or geom.material:
            continue
        geom.name = geom.name or f"geom_{i}"
        vary("geom_rgba", geom, (*(_COLOUR,) * 3, 0.0), "scale")
    for i in range(_THINGS):
        thing = spec.geom(f"background_{i}")
        vary("geom_pos", thing, (_PLACE_M, _PLACE_M, 0.0))
    return spec, tuple(terms)


def _of_robot(robot: Robot) -> set[str]:
    """Returns the names of the robot's bodies."""
    return {body.name for body in robot.build().bodies} - {"world"}


def _add_things(spec: mujoco.MjSpec, looks: Looks) -> None:
    """Adds grey things that stand around the workspace and touch nothing."""
    smallest, largest = _THING_M
    for i, (x, y) in enumerate(_PLACES):
        half_m = smallest + (largest - smallest) * i / (_THINGS - 1)
        spec.worldbody.add_geom(
            name=f"background_{i}",
            type=mjtGeom.mjGEOM_BOX if looks == "varied" else mjtGeom.mjGEOM_CYLINDER,
            size=[half_m, half_m, half_m],
            pos=[x, y, half_m],
            rgba=_GREY,
            contype=0,
            conaffinity=0,
            group=1,
        )
