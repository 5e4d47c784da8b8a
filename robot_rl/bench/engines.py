"""Control steps per second of the engines: MuJoCo Warp on a GPU, the same without our env, MuJoCo on the CPU.

Random actions with a new episode wherever one ends, as at the beginning of learning. Rows take turns in one
process. The limit of ours is bare MuJoCo Warp: the same model, buffers and physics steps as CUDA graphs,
without actions, observations, rewards or resets.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np
import torch

from robot_rl.core.arrays import Array
from robot_rl.sim.backends.mujoco_warp import MujocoWarp
from robot_rl.sim.vector import EnvConfig, SimVectorEnv


def run(
    num_envs: tuple[int, ...] = (1024, 4096, 16384),
    cpu_envs: int = 512,
    rounds: int = 3,
    steps: int = 20,
    task: str = "pick_cube",
    device: str | None = None,
) -> dict[str, Any]:
    """Measures everything in one process and returns the table of `robot-rl bench engines`.

    Args:
        num_envs: simulations at once on the GPU.
        cpu_envs: simulations at once on the CPU, on all cores.
        rounds: turns of each; the result is their median.
        steps: control steps of a turn.
        task: name of the task.
        device: of MuJoCo Warp; the first GPU, or the CPU without one, if null.
    """
    reference = _Ours(EnvConfig(task=task), cpu_envs)
    rows: list[dict[str, Any]] = []
    for n in num_envs:
        began = time.perf_counter()
        ours = _Ours(EnvConfig(task=task, engine="mujoco_warp", engine_device=device), n)
        ours.turn(2)  # compiles and captures
        ready_s = time.perf_counter() - began
        arms = {"robot_rl": ours.turn, "bare MuJoCo Warp": ours.bare, "robot_rl on the CPU": reference.turn}
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, arm in arms.items():
                rates[name].append(arm(steps))
        limit = statistics.median(rates["bare MuJoCo Warp"])
        cpu = statistics.median(rates["robot_rl on the CPU"])
        for name, found in rates.items():
            rate = statistics.median(found)
            rows.append(
                {
                    "what": name,
                    "envs": cpu_envs if arms[name] == reference.turn else n,
                    "control_steps_per_s": round(rate),
                    "lowest": round(min(found)),
                    "highest": round(max(found)),
                    "of_limit": round(rate / limit, 3),
                    "of_cpu": round(rate / cpu, 2),
                }
            )
        rows[-3] |= {"ready_s": round(ready_s, 1), "overflows": ours.backend.num_overflows}
        rows[-3] |= {"diverged": ours.env.num_diverged}
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return {
        "title": f"Engines, {task}: {where}, {os.cpu_count()} CPU cores",
        "rows": rows,
        "notes": [
            f"median of {rounds} alternating turns of {steps} control steps, each of "
            f"{reference.env.num_substeps} physics steps; random actions, with few contacts",
            "ready_s: compiling or loading the kernels, and capturing the graphs",
        ],
    }


class _Ours:
    """An env with random actions drawn beforehand."""

    def __init__(self, config: EnvConfig, num_envs: int) -> None:
        self.env = SimVectorEnv(config, num_envs)
        self.env.reset(seed=0)
        rng = np.random.default_rng(0)
        shape = (8, num_envs, len(self.env.action_names))
        drawn = rng.uniform(-1.0, 1.0, shape).astype(np.float32)
        self._actions: Array = self.env.xp.asarray(drawn, device=self.env.device)

    @property
    def backend(self) -> MujocoWarp:
        assert isinstance(self.env.backend, MujocoWarp), "of a GPU row"
        return self.env.backend

    def turn(self, steps: int) -> float:
        """Returns control steps per second of the env."""
        return self._timed(steps, lambda step: self.env.step(self._actions[step % 8]))

    def bare(self, steps: int) -> float:
        """Returns control steps per second of the physics alone."""
        backend, substeps = self.backend, self.env.num_substeps
        return self._timed(steps, lambda _: backend.advance(substeps))

    def _timed(self, steps: int, act: Any) -> float:
        self._wait()
        began = time.perf_counter()
        for step in range(steps):
            act(step)
        self._wait()
        return self.env.num_envs * steps / (time.perf_counter() - began)

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
