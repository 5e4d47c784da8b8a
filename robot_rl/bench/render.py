"""Pictures per second: one thread, all cores, and MuJoCo's drawing bare in as many processes.

Bare is the least that a picture costs: the calls of MuJoCo (update the scene, draw, read the pixels) with
the same model, cameras, size and quality, and a state that stands still. Ours also copy each simulation and
compute its poses.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import mujoco
import numpy as np

from robot_rl.core.errors import require
from robot_rl.core.machine import usable_cores
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.cameras import Camera, Renderer
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.telemetry.progress import ProgressDisplay


def run(
    *,
    task: str = "pick_cube",
    cameras: tuple[str, ...] = ("left", "right", "wrist"),
    pixels: int = 64,
    num_envs: int = 32,
    rounds: int = 7,
) -> dict[str, Any]:
    """Draws by turns, and returns a row for each way.

    Args:
        task: name of the task.
        cameras: of its scene.
        pixels: height and width of a picture.
        num_envs: simulations.
        rounds: turns of each; the results are medians.
    """
    require(num_envs >= 1, "bench render: num_envs", num_envs, "1 or more")
    require(rounds >= 1, "bench render: rounds", rounds, "1 or more")
    cores, ids = usable_cores(), np.arange(num_envs)
    env = SimVectorEnv(EnvConfig(task=task), num_envs)
    env.reset(seed=0)
    views = [Camera(name=name, width=pixels, height=pixels) for name in cameras]
    ours = [env.backend.renderer(views, threads) for threads in (1, cores)]
    bare = [_Bare(on_cpu(env.backend).model, views) for _ in range(cores)]

    def drawn(renderer: Any) -> Callable[[], int]:
        def draw() -> int:
            return sum(len(renderer.render_batch(ids, name)) for name in cameras)

        return draw

    def drawn_bare() -> int:
        for process in bare:
            process.ask(num_envs)
        return sum(process.answer() for process in bare)

    ways = {
        "one thread": drawn(ours[0]),
        f"{cores} threads": drawn(ours[1]),
        f"bare, {cores} processes": drawn_bare,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with ProgressDisplay() as display, display.phase("draw", rounds, unit="rounds") as progress:
        for draw in ways.values():
            draw()
        for number in range(rounds):
            for name, draw in ways.items():
                began = time.perf_counter()
                rates[name].append(draw() / (time.perf_counter() - began))
            progress.update(number + 1)
    for each in (*ours, *bare, env):
        each.close()
    of_one, of_bare = (np.array(rates[name]) for name in (next(iter(ways)), [*ways][-1]))
    return {
        "title": f"Pictures per second: {task}, {len(cameras)} cameras, {pixels} x {pixels}, {cores} cores",
        "rows": [
            {
                "way": name,
                "pictures_per_s": round(float(np.median(rate))),
                "of_one_thread": round(float(np.median(rate / of_one)), 2),
                "of_bare": round(float(np.median(rate / of_bare)), 2),
            }
            for name, rate in rates.items()
        ],
        "notes": ["ratios are medians over the rounds"],
    }


class _Bare:
    """A process that draws one state again and again."""

    def __init__(self, model: mujoco.MjModel, cameras: list[Camera]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_draw_bare, args=(theirs, model, cameras), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, times: int) -> None:
        self._pipe.send(times)

    def answer(self) -> int:
        """Returns the number of pictures that it has drawn."""
        return int(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(0)
        self._process.join()


def _draw_bare(pipe: Connection, model: mujoco.MjModel, cameras: list[Camera]) -> None:
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = Renderer(model, cameras)
    while times := pipe.recv():
        for _ in range(times):
            for camera in cameras:
                renderer.rgb(data, camera.name)
        pipe.send(times * len(cameras))
    renderer.close()
