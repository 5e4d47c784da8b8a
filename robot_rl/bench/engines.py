"""Control steps per second of the engines: MuJoCo Warp on a GPU, MuJoCo on the CPU, and MJX.

Random actions with a new episode wherever one ends, as at the beginning of learning. Rows take turns in one
process; MJX, which is no dependency, has one of its own. What is bare takes the same physics steps of the
same scene without actions, observations, rewards or resets; bare MuJoCo Warp, with our buffers and as CUDA
graphs, is the limit of ours.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import mujoco
import numpy as np
import torch

from robot_rl.bench.mjx_peer import INSTALL, Mjx
from robot_rl.core.arrays import Array
from robot_rl.sim.backends.mujoco_cpu import MujocoCpu
from robot_rl.sim.backends.mujoco_warp import MujocoWarp
from robot_rl.sim.vector import EnvConfig, SimVectorEnv


def run(
    num_envs: tuple[int, ...] = (1024, 4096, 16384),
    cpu_envs: int = 512,
    rounds: int = 3,
    steps: int = 20,
    task: str = "pick_cube",
    device: str | None = None,
    mjx: str | None = None,
) -> dict[str, Any]:
    """Measures everything in one process and returns the table of `robot-rl bench engines`.

    Args:
        num_envs: simulations at once on the GPU.
        cpu_envs: simulations at once on the CPU, on all cores.
        rounds: turns of each; the result is their median.
        steps: control steps of a turn.
        task: name of the task.
        device: of MuJoCo Warp; the first GPU, or the CPU without one, if null.
        mjx: folder of MJX and JAX, which are installed for this alone; no MJX if null. It steps on the GPU
            where its JAX has one, else on all cores.
    """
    notes = list[str]()
    reference = _Ours(EnvConfig(task=task), cpu_envs)
    rows: list[dict[str, Any]] = []
    for n in num_envs:
        began = time.perf_counter()
        ours = _Ours(EnvConfig(task=task, engine="mujoco_warp", engine_device=device), n)
        ours.turn(2)  # compiles and captures
        ready_s = time.perf_counter() - began
        with _opened(mjx, reference, n, notes) as peer:
            arms: dict[str, tuple[int, Callable[[int], float]]] = {
                "robot_rl": (n, ours.turn),
                "bare MuJoCo Warp": (n, ours.bare),
                "robot_rl on the CPU": (cpu_envs, reference.turn),
                "bare MuJoCo on the CPU": (cpu_envs, reference.bare),
            }
            if peer is not None:
                arms["bare MJX"] = n, peer.turn
            rates: dict[str, list[float]] = {name: [] for name in arms}
            for _ in range(rounds):
                for name, (_, turn) in arms.items():
                    rates[name].append(turn(steps))
            of = {name: (envs, rates[name]) for name, (envs, _) in arms.items()}
            found = {row["what"]: row for row in _rows(of)}
            overflows = ours.backend.num_overflows
            found["robot_rl"] |= {"ready_s": round(ready_s, 1), "overflows": overflows}
            found["robot_rl"] |= {"diverged": ours.env.num_diverged}
            if peer is not None:
                found["bare MJX"]["ready_s"] = round(peer.about["ready_s"], 1)
            rows += found.values()
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return {
        "title": f"Engines, {task}: {where}, {os.cpu_count()} CPU cores",
        "rows": rows,
        "notes": [
            f"median of {rounds} alternating turns of {steps} control steps, each of "
            f"{reference.env.num_substeps} physics steps; random actions, with few contacts",
            "ready_s: compiling or loading the kernels, and capturing the graphs",
            *notes,
        ],
    }


def _rows(found: dict[str, tuple[int, list[float]]]) -> Iterator[dict[str, Any]]:
    """Yields a row of the table for each arm, from its number of simulations and its rates."""
    limit = statistics.median(found["bare MuJoCo Warp"][1])
    cpu = statistics.median(found["robot_rl on the CPU"][1])
    for name, (envs, rates) in found.items():
        rate = statistics.median(rates)
        yield {
            "what": name,
            "envs": envs,
            "control_steps_per_s": round(rate),
            "lowest": round(min(rates)),
            "highest": round(max(rates)),
            "of_limit": round(rate / limit, 3),
            "of_cpu": round(rate / cpu, 2),
        }


@contextmanager
def _opened(folder: str | None, cpu: _Ours, num_sims: int, notes: list[str]) -> Generator[Mjx | None]:
    """Yields MJX with as many simulations, which begin as those on the CPU do; None if it is left out."""
    install = INSTALL.format(version=mujoco.__version__)
    if folder is None:
        if not notes:
            notes.append(f"MJX is left out. To measure it: {install}, then mjx=/tmp/mjx")
        yield None
        return
    try:
        peer = Mjx(folder, cpu.model, cpu.states(num_sims), cpu.env.num_substeps)
    except RuntimeError as error:
        notes.append(f"MJX is left out: {error}. How to install it: {install}")
        yield None
        return
    about, other = peer.about, "" if peer.has_own_integrator else " with implicitfast, it lacks `discrete`"
    notes.append(
        f"MJX of {num_sims} simulations: JAX {about['jax']} on {about['device']}{other}; single precision; "
        f"positions differ from MuJoCo's by at most {about['difference']:.1e} after a control step"
    )
    with closing(peer):
        yield peer


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
    def model(self) -> mujoco.MjModel:
        assert isinstance(self.env.backend, MujocoCpu), "of a CPU row"
        return self.env.backend.model

    @property
    def backend(self) -> MujocoWarp:
        assert isinstance(self.env.backend, MujocoWarp), "of a GPU row"
        return self.env.backend

    def turn(self, steps: int) -> float:
        """Returns control steps per second of the env."""
        return self._timed(steps, lambda step: self.env.step(self._actions[step % 8]))

    def bare(self, steps: int) -> float:
        """Returns control steps per second of the physics alone."""
        backend, substeps = self.env.backend, self.env.num_substeps
        advance = backend.advance if isinstance(backend, MujocoWarp) else backend.step
        return self._timed(steps, lambda _: advance(substeps))

    def states(self, num_sims: int) -> dict[str, Array]:
        """Returns what determines physics, (num_sims, ...) each, of its simulations again and again."""
        names = ("qpos", "qvel", "ctrl", "mocap_pos", "mocap_quat")
        rows = np.arange(num_sims) % self.env.num_envs
        return {name: np.array(self.env.backend.bind(name))[rows] for name in names}

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
