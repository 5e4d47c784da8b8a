"""The CPU back end: `mujoco.batch.Batch`, threads over simulations, results equal at any thread count.

Its arrays are numpy's, or torch tensors in the same memory.
"""

import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch

from robot_rl.core.arrays import Array, Kind, copied, namespace_of
from robot_rl.sim.backends.backend import Backend, View
from robot_rl.sim.backends.inspect_model import marks, model_hash, penetration_m
from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.backends.scene_model import (
    compile_scene,
    locate,
    sensor_columns,
    servo_time_s,
    tool_orientation,
)
from robot_rl.sim.cameras import Camera, Renderer, Renderers
from robot_rl.sim.config import MANY_SIMS
from robot_rl.sim.robots.robot import RobotNames

_POSITION_AND_VELOCITY = int(mujoco.mjtStage.mjSTAGE_VEL.value)
_ALL = int(mujoco.mjtStage.mjSTAGE_ACC.value)


class MujocoCpu:
    """Steps many copies of one model; `robot_rl.sim.backends.backend.Backend` documents the methods.

    The batch is persistent (one MjData a simulation), so that sensors current at the end of a
    control step cost nothing extra: the next step continues from them.
    """

    caps = frozenset({"set_state", "fork", "render", "batch"})

    device = "cpu"
    largest_state = mujoco.mjMAXVAL
    overflows: Array | None = None

    def __init__(
        self,
        spec: mujoco.MjSpec,
        robot: RobotNames,
        quantities: Sequence[str],
        num_sims: int,
        num_threads: int = 0,
        *,
        array: Kind = "numpy",
    ) -> None:
        """Compiles a scene, with a sensor for each quantity.

        Raises:
            ModelError: the scene lacks what a quantity names.
        """
        self.model = model = compile_scene(spec, robot, quantities)
        self.xp, self._robot = namespace_of(array), robot
        # Sensors of actuators that have a state of their own are current only after the last stage.
        self._stage = _ALL if model.na else _POSITION_AND_VELOCITY
        self.timestep_s = float(model.opt.timestep)
        self.cameras = tuple(model.camera(i).name for i in range(model.ncam))
        self.batch = _batch(model, num_sims, num_threads)
        self.state = self.asarray(self.batch.state)
        """Live: one row a simulation."""
        self.num_sims, self.state_size = self.state.shape
        self._default_row = copied(self.state[0])
        self._warnings = self.batch.warning[:, :, 1]
        """(sims, kinds), live: how often MuJoCo has warned since the end of the last step."""
        self._warnings[:] = 0
        self.index = ModelIndex(model, robot, self.asarray)
        fingers = [f"{joint}.pos" for joint in robot.finger_joints]
        self.view = View(self.bind("sensordata"), sensor_columns(model), fingers)

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Returns values as an array of the back end; a numpy array shares its memory where it can."""
        return self.xp.asarray(values, dtype=dtype, device=self.device)

    def bind(self, field: str) -> Array:
        """Returns a live (sims, ...) view of an MjData field."""
        with warnings.catch_warnings():
            # A tensor cannot be read-only.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return self.asarray(self.batch.bind(field))

    def expand(self, field: str) -> Array:
        return self.asarray(self.batch.expand(field))

    def locate(self, field: str, element: str) -> tuple[int, Array]:
        row, nominal = locate(self.model, field, element)
        return row, self.asarray(nominal)

    def recompute_constants(self, ids: Array) -> None:
        self.batch.set_const(np.asarray(ids))

    def step(self, num_substeps: int, mask: Array | None = None) -> Array:
        """Advances all or the masked simulations; returns which of them diverged, (sims,) bool.

        A simulation diverges when MuJoCo warns: of a bad state, control or acceleration, or that it
        ran out of contact or constraint memory.
        """
        self.batch.step(None if mask is None else np.asarray(mask), num_substeps, self._stage)
        diverged = self._warnings.any(axis=1)
        # From zero each time: MuJoCo puts a bad state back itself, and its counters with it.
        self._warnings[:] = 0
        return self.asarray(diverged)

    def read_states(self) -> Array:
        return self.state

    def write_states(self, ids: Array, rows: Array) -> None:
        self.state[ids] = rows

    def clear(self, ids: Array) -> None:
        self.state[ids] = self._default_row

    def forward(self, ids: Array | None = None) -> None:
        self.batch.forward(None if ids is None else np.asarray(ids), self._stage)

    def tool_orientation(self, posture_rad: Sequence[float]) -> Array:
        return self.asarray(tool_orientation(self.model, self._robot, posture_rad))

    def servo_time_s(self) -> Array:
        return servo_time_s(self.model, self._robot)

    def model_hash(self) -> str:
        return model_hash(self.model)

    def penetration_m(self, ids: Array) -> Array:
        return self.asarray(penetration_m(self.model, np.asarray(self.state[ids])))

    def marks(self) -> tuple[str, ...]:
        return marks(self.model)

    def renderer(self, cameras: Sequence[Camera], num_threads: int = 1) -> Renderers:
        return Renderers(lambda: Renderer(self.model, cameras, self.batch), num_threads)


def on_cpu(backend: Backend) -> MujocoCpu:
    """Returns a back end that is this one, for what reads MuJoCo's own objects."""
    assert isinstance(backend, MujocoCpu), "the env was made with env.engine=mujoco"
    return backend


def _batch(model: mujoco.MjModel, num_sims: int, num_threads: int) -> Batch:
    """Makes the simulations; many of them in another thread, since this one gets no Ctrl-C within C."""
    if num_sims < MANY_SIMS:
        return Batch(model, num_sims, num_threads, persistent=True)
    made: Future[Batch] = Future()

    def make() -> None:
        try:
            made.set_result(Batch(model, num_sims, num_threads, persistent=True))
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, daemon=True).start()  # after an interrupt nothing waits for it
    return made.result()
