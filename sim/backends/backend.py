"""What a physics engine must offer to run a task: batched fields, masked stepping, state rows."""

from typing import Any, Protocol

import mujoco
from numpy.typing import NDArray

Array = NDArray[Any]


class Backend(Protocol):
    """Many simulations of one MuJoCo model; the leading axis of every array is the simulation."""

    caps: frozenset[str]
    model: mujoco.MjModel
    state: Array
    """One row a simulation that determines its future, (sims, n) float64; writable."""

    def bind(self, field: str) -> Array: ...

    def expand(self, field: str) -> Array: ...

    def recompute_constants(self, ids: Array) -> None: ...

    def step(self, num_substeps: int, mask: Array | None = None) -> Array: ...

    def clear(self, ids: Array) -> None: ...

    def forward(self, ids: Array | None = None) -> None: ...

    def materialise(self, sim: int) -> tuple[mujoco.MjModel, mujoco.MjData]: ...
