"""Films and failure pictures of an evaluation, drawn while it runs; none where nothing can draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import RenderError
from robot_rl.hal.vector import VectorEnv
from robot_rl.rollout.stepping import Moment
from robot_rl.sim.cameras import Camera, Renderer
from robot_rl.telemetry.video import write_video
from robot_rl.train.config import VideoConfig

Array = NDArray[Any]

HEIGHT, WIDTH = 360, 480
_CAMERA_SHADOWS = False  # a shadow map costs ten times the picture


class Photographer:
    """Watches an evaluation: films its first episodes and takes the last picture of failed ones.

    It only reads the simulations, so an evaluation with it gives the same actions as without.
    """

    def __init__(self, env: VectorEnv, seeds: NDArray[np.uint64], config: VideoConfig) -> None:
        """Opens a renderer.

        Raises:
            RenderError: this machine, or this env, cannot draw.
        """
        backend = getattr(env, "backend", None)
        if "render" not in env.caps or backend is None:
            raise RenderError(f"videos: {env.task!r} on {env.robot!r} cannot draw")
        self._batch, self._seeds, self._config = backend.batch, seeds, config
        self._fps = env.control_hz
        camera = Camera(name=config.camera, height=HEIGHT, width=WIDTH, shadows=_CAMERA_SHADOWS)
        self._renderer = Renderer(backend.model, [camera])
        self._films: dict[int, list[Array]] = {}
        self._failures: dict[int, Array] = {}

    def __call__(self, where: slice, moment: Moment) -> None:
        """Draws what is wanted of one control step; `where` are the seeds of the rows."""
        kept = where.stop - where.start
        live = np.flatnonzero(moment.live[:kept]).tolist()
        filmed = [row for row in live if where.start + row < self._config.episodes]
        ended = moment.terminated | moment.truncated
        failed = [row for row in live if ended[row] and not moment.infos["success"][row]]
        failed = failed[: self._config.failures - len(self._failures)]
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

    def close(self) -> None:
        self._renderer.close()

    def _draw(self, row: int) -> Array:
        return self._renderer.render_batch(self._batch, np.array([row]), self._config.camera)[0]


def _write_png(path: Path, image: Array) -> None:
    from matplotlib.image import imsave

    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, image)
