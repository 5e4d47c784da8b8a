"""Films and failure pictures of an evaluation, drawn while it runs; none where nothing can draw."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import RenderError
from robot_rl.hal.vector import VectorEnv
from robot_rl.rollout.stepping import Moment
from robot_rl.sim.cameras import Camera
from robot_rl.sim.gl import find_backend
from robot_rl.telemetry.video import write_video
from robot_rl.train.config import VideoConfig

Array = NDArray[Any]

HEIGHT, WIDTH = 360, 480
_MOST_FPS = 30.0
"""Frames of a second; at a higher control rate some steps are left out."""
_CAMERA_SHADOWS = False  # a shadow map costs ten times the picture


class Photographer:
    """Watches an evaluation: films its first episodes and takes the last picture of failed ones.

    It only reads the simulations, so an evaluation with it gives the same actions as without. Where the env
    never says success no episode has failed.
    """

    def __init__(self, env: VectorEnv, seeds: NDArray[np.uint64], config: VideoConfig) -> None:
        """Opens a renderer.

        Raises:
            RenderError: this machine, or this env, cannot draw.
        """
        self._env, self._seeds, self._config = env, seeds, config
        self._every = max(1, math.ceil(env.control_hz / _MOST_FPS))
        self._fps = env.control_hz / self._every
        self._draw, self.close = _pencil(env, config.camera)
        self._batch, self._step = slice(0, 0), 0
        self._films: dict[int, list[Array]] = {}
        self._failures: dict[int, Array] = {}

    def __call__(self, where: slice, moment: Moment) -> None:
        """Draws what is wanted of one control step; `where` are the seeds of the rows."""
        self._step = self._step + 1 if where == self._batch else 0
        self._batch = where
        kept = where.stop - where.start
        live = np.flatnonzero(moment.live[:kept]).tolist()
        ended = moment.terminated | moment.truncated
        filmed = [row for row in live if where.start + row < self._config.episodes]
        filmed = [row for row in filmed if ended[row] or self._step % self._every == 0]
        failed = [row for row in live if ended[row] and not moment.infos["success"][row]]
        failed = failed[: self._env.says_success * (self._config.failures - len(self._failures))]
        for row in filmed:
            self._films.setdefault(where.start + row, []).append(self._draw(row))
        for row in failed:
            self._failures[where.start + row] = self._draw(row)

    def save(self, folder: Path, phase: str) -> list[dict[str, Any]]:
        """Writes `videos/` and `failures/` of a run folder; returns the entries of the gallery."""
        for index, frames in self._films.items():
            name = f"{phase}-seed{self._seeds[index]}.mp4"
            write_video(folder / "videos" / name, np.stack(frames), self._fps)
        entries = []
        for index, image in sorted(self._failures.items()):
            name = f"{phase}-seed{self._seeds[index]}.png"
            _write_png(folder / "failures" / name, image)
            entries.append({"file": name, "phase": phase, "seed": int(self._seeds[index])})
        return entries

    def save_grid(self, path: Path) -> Path:
        """Writes all films as one, side by side; an episode that has ended keeps its last picture."""
        films = [self._films[index] for index in sorted(self._films)]
        length, columns = max(map(len, films)), math.ceil(math.sqrt(len(films)))
        rows = math.ceil(len(films) / columns)
        height, width = films[0][0].shape[:2]
        grid = np.zeros((length, rows * height, columns * width, 3), np.uint8)
        for place, film in enumerate(films):
            top, left = height * (place // columns), width * (place % columns)
            shown = np.stack([*film, *film[-1:] * (length - len(film))])
            grid[:, top : top + height, left : left + width] = shown
        return write_video(path, grid, self._fps)


def _pencil(env: VectorEnv, camera: str) -> tuple[Callable[[int], Array], Callable[[], None]]:
    """Returns what draws a row of an env, and what frees it.

    Raises:
        RenderError: as `Photographer`.
    """
    backend, picture = getattr(env, "backend", None), getattr(env, "picture", None)
    if "render" in env.caps and backend is not None:
        view = Camera(name=camera, height=HEIGHT, width=WIDTH, shadows=_CAMERA_SHADOWS)
        renderer = backend.renderer([view])
        return lambda row: renderer.render_batch(np.array([row]), camera)[0], renderer.close
    if picture is None:
        raise RenderError(f"videos: {env.task!r} on {env.robot!r} cannot draw")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a display, and prints nothing
    with contextlib.suppress(RenderError):  # MuJoCo's envs use this backend; others need none
        os.environ["MUJOCO_GL"] = find_backend()
    env.reset(seed=0)
    picture(0)
    return picture, lambda: None


def _write_png(path: Path, image: Array) -> None:
    from matplotlib.image import imsave

    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, image)
