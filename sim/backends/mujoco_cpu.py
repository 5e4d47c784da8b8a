"""The CPU back end: `mujoco.batch.Batch`, threads over simulations, results equal at any thread count.

Its arrays are numpy's, or torch tensors in the same memory.
"""

import threading
import warnings
from concurrent.futures import Future
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch

from robot_rl.core.arrays import Array, Kind, copied, namespace_of
from robot_rl.sim.config import MANY_SIMS

_POSITION_AND_VELOCITY = int(mujoco.mjtStage.mjSTAGE_VEL.value)


class MujocoCpu:
    """Steps many copies of one model; see `robot_rl.sim.backends.backend.Backend`.

    The batch is persistent (one MjData a simulation), so that sensors current at the end of a
    control step cost nothing extra: the next step continues from them.
    """

    caps = frozenset({"set_state", "fork", "render", "batch"})

    device = "cpu"

    def __init__(
        self, model: mujoco.MjModel, num_sims: int, num_threads: int = 0, *, array: Kind = "numpy"
    ) -> None:
        self.xp, self.model = namespace_of(array), model
        self.batch = _batch(model, num_sims, num_threads)
        self.state = self.asarray(self.batch.state)
        self._default_row = copied(self.state[0])
        self._warnings = self.batch.warning[:, :, 1]
        """(sims, kinds), live: how often MuJoCo has warned since the end of the last step."""
        self._warnings[:] = 0

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Returns values as an array of the back end; a numpy array shares its memory where it can."""
        return self.xp.asarray(values, dtype=dtype, device=self.device)

    def bind(self, field: str) -> Array:
        """Returns a live (sims, ...) view of an MjData field."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The given NumPy array is not writable"
            )  # a tensor cannot say it
            return self.asarray(self.batch.bind(field))

    def expand(self, field: str) -> Array:
        """Gives a model field per-simulation values and returns them, (sims, ...)."""
        return self.asarray(self.batch.expand(field))

    def recompute_constants(self, ids: Array) -> None:
        """Derives what depends on expanded fields (masses, inertias) for the given simulations."""
        self.batch.set_const(np.asarray(ids))

    def step(self, num_substeps: int, mask: Array | None = None) -> Array:
        """Advances all or the masked simulations; returns which of them diverged, (sims,) bool.

        A simulation diverges when MuJoCo warns: of a bad state, control or acceleration, or that it
        ran out of contact or constraint memory.
        """
        self.batch.step(None if mask is None else np.asarray(mask), num_substeps, _POSITION_AND_VELOCITY)
        diverged = self._warnings.any(axis=1)
        # From zero each time: MuJoCo puts a bad state back itself, and its counters with it.
        self._warnings[:] = 0
        return self.asarray(diverged)

    def clear(self, ids: Array) -> None:
        """Puts simulations into the model's default state, without computing anything."""
        self.state[ids] = self._default_row

    def forward(self, ids: Array | None = None) -> None:
        """Makes positions, velocities and sensors current after a write to the state."""
        self.batch.forward(None if ids is None else np.asarray(ids), _POSITION_AND_VELOCITY)

    def materialise(self, sim: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Returns one simulation's own model and data, forwarded, to draw it or to inspect it."""
        model, data = self.batch.get_model(sim), self.batch.get_data(sim)
        mujoco.mj_forward(model, data)
        return model, data


def _batch(model: mujoco.MjModel, num_sims: int, num_threads: int) -> Batch:
    """Makes the simulations; many of them in another thread, since this one hears no Ctrl-C within C."""
    if num_sims < MANY_SIMS:
        return Batch(model, num_sims, num_threads, persistent=True)
    made: Future[Batch] = Future()

    def make() -> None:
        try:
            made.set_result(Batch(model, num_sims, num_threads, persistent=True))
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, daemon=True).start()  # who is interrupted does not wait for it
    return made.result()
