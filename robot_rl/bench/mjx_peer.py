"""Physics steps of one scene in MJX, in a process that has it: the program behind `Mjx`.

    python mjx_peer.py scene.mjb states.npz <physics steps of a control step>

It imports nothing of robot_rl. It says what it is once it has compiled; then each line in is a number of
control steps, and each line out how many control steps per second it took them with.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

COMPARED = 8
"""Simulations that MuJoCo steps too, from the same states, to see whether it is the same scene."""
INSTALL = "uv pip install --target /tmp/mjx mujoco-mjx jax mujoco=={version}"
"""How to get it, for the bench alone; then `mjx=/tmp/mjx`. With a GPU: 'jax[cuda12]'."""


class Mjx:
    """A process that steps simulations in MJX, of packages in a folder of their own."""

    def __init__(self, folder: str, model: Any, states: dict[str, Any], num_substeps: int) -> None:
        """Starts it and waits until MJX has compiled the scene.

        Args:
            folder: where its packages are; see `INSTALL`.
            model: MuJoCo's model of the scene.
            states: `qpos`, `qvel`, `ctrl`, `mocap_pos` and `mocap_quat`, (B, ...) each.
            num_substeps: physics steps of a control step.

        Raises:
            RuntimeError: what it printed last: MJX is missing, or refuses the scene.
        """
        mujoco: Any = importlib.import_module("mujoco")
        self._scene = tempfile.TemporaryDirectory()
        path = Path(self._scene.name)
        model = copy.copy(model)
        self.has_own_integrator = model.opt.integrator != mujoco.mjtIntegrator.mjINT_DISCRETE
        """Whether MJX has the scene's; else `implicitfast` takes its place, with the same time step."""
        if not self.has_own_integrator:
            model.opt.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
        mujoco.mj_saveModel(model, str(path / "scene.mjb"))
        np.savez(path / "states.npz", **states)
        self.num_sims = len(states["qpos"])
        command = [sys.executable, __file__, path / "scene.mjb", path / "states.npz", str(num_substeps)]
        self._errors = (path / "errors").open("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**_environment(), "PYTHONPATH": folder},
        )
        self.about: dict[str, Any] = json.loads(self._line())
        """`device`, `cores`, `jax`, `mujoco`, `ready_s`, and the largest `difference` of a position."""

    def turn(self, steps: int) -> float:
        """Returns control steps per second, over all simulations."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            lines = [text.strip() for text in self._errors.read().splitlines() if text.strip()]
            self.close()
            raise RuntimeError(lines[-1] if lines else "it ended without a word")
        return line

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()
        self._scene.cleanup()


def _environment() -> dict[str, str]:
    quiet = {"JAX_TRACEBACK_FILTERING": "off"}  # so that the error is the last line
    return {**os.environ, **quiet, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # other rows need the GPU too


def _main(scene: str, states: str, num_substeps: int) -> None:
    began = time.perf_counter()
    jax: Any = importlib.import_module("jax")
    mujoco: Any = importlib.import_module("mujoco")
    mjx: Any = importlib.import_module("mujoco.mjx")
    model = mujoco.MjModel.from_binary_path(scene)
    with np.load(states) as found:
        given = {name: found[name] for name in found.files}
    on_device = mjx.put_model(model)
    data = jax.vmap(lambda one: mjx.make_data(on_device).replace(**one))(
        {name: jax.numpy.asarray(value) for name, value in given.items()}
    )

    def advance(data: Any) -> Any:
        return jax.lax.scan(lambda d, _: (mjx.step(on_device, d), None), data, None, num_substeps)[0]

    step = jax.jit(jax.vmap(advance))
    data = jax.block_until_ready(step(data))
    after = np.asarray(data.qpos)
    data = jax.block_until_ready(step(data))  # of a step's own result it is compiled once more
    about = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "mujoco": mujoco.__version__,
        "ready_s": time.perf_counter() - began,
        "difference": _difference(mujoco, model, given, after, num_substeps),
    }
    _reply(json.dumps(about))
    for line in sys.stdin:
        steps, began = int(line), time.perf_counter()
        for _ in range(steps):
            data = step(data)
        jax.block_until_ready(data)
        _reply(str(len(given["qpos"]) * steps / (time.perf_counter() - began)))


def _reply(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _difference(mujoco: Any, model: Any, states: dict[str, Any], after: Any, num_substeps: int) -> float:
    """Returns the largest difference of a position (m, rad) from MuJoCo's after a control step."""
    largest = 0.0
    for row in range(min(COMPARED, len(after))):
        one = mujoco.MjData(model)
        for name, value in states.items():
            getattr(one, name)[:] = value[row]
        mujoco.mj_step(model, one, num_substeps)
        largest = max(largest, float(np.abs(one.qpos - after[row]).max()))
    return largest


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
