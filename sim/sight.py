"""Whether cameras are turned towards what the state leaves out. B simulations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.arrays import to_numpy
from robot_rl.core.errors import ConfigError
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.vector import SimVectorEnv

_STARTS, _LEAST = 64, 0.5


def check_sight(config: EnvConfig) -> None:
    """Refuses cameras that rarely show a thing whose position the state leaves out.

    A thing counts as shown where its position is within the picture of a camera, whatever stands before it;
    `robot-rl bench cameras` measures what pictures tell. Nothing is drawn.

    Raises:
        ConfigError: at most of 64 starts of episodes, no camera shows it.
    """
    hidden = replace(config.unseen().without_past(), privileged=True, num_threads=1)
    with closing(SimVectorEnv(hidden, _STARTS, autoreset="disabled")) as env:
        unknown = [name for name in config.own_cameras if name not in env.backend.cameras]
        if unknown:
            return  # the renderer says which cameras there are
        env.reset(seed=list(range(_STARTS)))
        for thing in _things(env.privileged_names):
            point_m = to_numpy(env.view[f"{thing}.pos"])
            shown = {
                name: _shown(env.backend, name, point_m, config.image_size) for name in env.backend.cameras
            }
            share = float(np.any([shown[name] for name in config.own_cameras], axis=0).mean())
            if share >= _LEAST:
                continue
            others = [name for name, rows in shown.items() if rows.mean() >= _LEAST]
            mine = ", ".join(config.own_cameras) or "none of its own"
            raise ConfigError(
                f"env.cameras: got {mine}, which show {thing!r} at {share:.0%} of "
                f"{_STARTS} starts, and env.state leaves it out; allowed: {_LEAST:.0%} or more. "
                f"Add one that shows it: {', '.join(others) or 'none of this scene does'}."
            )


def _things(names: Sequence[str]) -> list[str]:
    """Returns whose position in the world is among the elements: `cube` of `cube.pos.0`."""
    places = [name.removesuffix(".pos.0") for name in names if name.endswith(".pos.0")]
    return [thing for thing in places if "_in_" not in thing]


def _shown(
    backend: Backend, camera: str, point_m: NDArray[np.float64], size: tuple[int, int]
) -> NDArray[np.bool_]:
    """Returns whether points (B, 3) of the world are within the picture of a camera, (B,)."""
    row, fovy_deg = backend.locate("cam_fovy", camera)
    position_m = to_numpy(backend.bind("cam_xpos"))[:, row]
    world_from_camera = to_numpy(backend.bind("cam_xmat"))[:, row].reshape(-1, 3, 3)
    right, up, back = np.einsum("bij,bi->jb", world_from_camera, point_m - position_m)
    half_up = math.tan(math.radians(float(fovy_deg[0])) / 2) * -back  # a camera looks along its -z
    half_right = half_up * size[1] / size[0]
    return (back < 0) & (abs(up) < half_up) & (abs(right) < half_right)
