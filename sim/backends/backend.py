"""What a physics engine must offer to run a task: batched fields, masked stepping, state rows."""

from typing import Any, Protocol

import mujoco

from robot_rl.core.arrays import Array


class Backend(Protocol):
    """Many simulations of one MuJoCo model; the leading axis of every array is the simulation."""

    xp: Any
    """The array API functions of its arrays."""
    device: Any
    """Where its arrays are, as `xp.asarray` takes it."""
    caps: frozenset[str]
    model: mujoco.MjModel
    state: Array
    """One row a simulation that determines its future, (sims, n) float64; writable."""

    def asarray(self, values: Any, dtype: Any = None) -> Array: ...

    def bind(self, field: str) -> Array: ...

    def expand(self, field: str) -> Array: ...

    def recompute_constants(self, ids: Array) -> None: ...

    def step(self, num_substeps: int, mask: Array | None = None) -> Array: ...

    def clear(self, ids: Array) -> None: ...

    def forward(self, ids: Array | None = None) -> None: ...

    def materialise(self, sim: int) -> tuple[mujoco.MjModel, mujoco.MjData]: ...
