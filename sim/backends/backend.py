"""What a physics engine must offer to run a task; this module is free of MuJoCo.

Three engines do: `mujoco_cpu.py` in double precision, `mujoco_warp.py` in single precision on a GPU, and
`genesis.py`, whose formulas are MuJoCo's and whose contacts are its own.

A scene is an MJCF file, which every engine loads. The back end compiles the names of what a task observes
(docs/tasks.md, "Names of quantities") and hands out arrays. B simulations, the leading axis of every array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from robot_rl.core.arrays import Array
from robot_rl.core.errors import ModelError, nearest

if TYPE_CHECKING:
    from robot_rl.sim.backends.model_index import ModelIndex
    from robot_rl.sim.cameras import BatchRenderer, Camera


class View:
    """Named, live, read-only arrays over all simulations: the quantities of a task, and `fingers.width`."""

    def __init__(self, values: Array, columns: Mapping[str, slice], fingers: Sequence[str]) -> None:
        """Names the columns of `values` (B, N); `fingers` are the names whose sum is `fingers.width`."""
        self.values = values
        self._columns, self._fingers = columns, fingers
        self._arrays = {name: values[:, where] for name, where in columns.items()}

    def __getitem__(self, name: str) -> Array:
        """Returns (B, dim), current as of the end of the last control step.

        Raises:
            ModelError: the task does not name the quantity, or the robot has no fingers.
        """
        if name == "fingers.width":
            if not self.has_fingers:
                raise ModelError(
                    "view: the robot has no fingers, and so no 'fingers.width'. Name one that has."
                )
            width: Any = sum(self._arrays[finger] for finger in self._fingers)
            return width
        if name not in self._arrays:
            raise ModelError(
                f"view: the task has no quantity {name!r}.{nearest(name, self._arrays)} Name it in the "
                "task's `observation`, or in `privileged` if the policy does not observe it."
            )
        return self._arrays[name]

    @property
    def has_fingers(self) -> bool:
        """Whether the robot has joints that grippers move."""
        return bool(self._fingers)

    def name(self, name: str, array: Array) -> None:
        """Adds a live array (B, k) that is no quantity of the engine, such as the sizes of things."""
        self._arrays[name] = array

    def elements(self, names: Sequence[str]) -> tuple[Array, tuple[str, ...]]:
        """Returns the columns of `values` that the quantities have, and a name for each column."""
        columns: list[int] = []
        elements: list[str] = []
        for name in names:
            where = range(*self._columns[name].indices(self.values.shape[1]))
            columns += where
            elements += [name] if len(where) == 1 else [f"{name}.{i}" for i in range(len(where))]
        return np.array(columns), tuple(elements)


class Backend(Protocol):
    """Many simulations of one robot in one scene."""

    xp: Any
    """The array API functions of its arrays."""
    device: Any
    """Where its arrays are, as `xp.asarray` takes it."""
    caps: frozenset[str]
    timestep_s: float
    """Of one substep."""
    largest_state: float
    """A state with a larger number than this has diverged."""
    cameras: tuple[str, ...]
    """Names of the scene's cameras."""
    num_sims: int
    """B."""
    state_size: int
    """n, columns of a state: MuJoCo's mjSTATE_INTEGRATION of the same model, on every engine."""
    overflows: Array | None
    """(B,) int64: how often each simulation ran out of room for contacts or constraint rows; None of an
    engine whose room is not limited."""
    view: View
    """The quantities that the task names."""
    index: ModelIndex
    """Which columns of the fields of `bind` belong to which joint, servo or body."""

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Returns values as an array of the back end."""
        ...

    def bind(self, field: str) -> Array:
        """Returns a live (B, ...) array of a field of the state, named and ordered as MuJoCo's MjData.

        `qpos`, `qvel`, `ctrl`, `mocap_pos` and `mocap_quat` may be written; `forward` or `step` reads them.
        """
        ...

    def expand(self, field: str) -> Array:
        """Gives a field of the model, named as MuJoCo's, a value for each simulation, and returns it."""
        ...

    def locate(self, field: str, element: str) -> tuple[int, Array]:
        """Returns the row of a named object in a field of the model, and its nominal value (k,).

        Raises:
            ModelError: there is no such field, or no such object.
        """
        ...

    def recompute_constants(self, ids: Array) -> None:
        """Derives again what depends on expanded masses and inertias."""
        ...

    def step(self, num_substeps: int, mask: Array | None = None) -> Array:
        """Advances all or the masked simulations; returns which of them diverged, (B,) bool."""
        ...

    def read_states(self) -> Array:
        """Returns one row a simulation that determines its future, (B, n); copy it to keep it."""
        ...

    def write_states(self, ids: Array, rows: Array) -> None:
        """Puts simulations (k,) into rows (k, n) of `read_states`; `forward` makes the view current."""
        ...

    def clear(self, ids: Array) -> None:
        """Puts simulations into the default state, without computing anything."""
        ...

    def forward(self, ids: Array | None = None) -> None:
        """Makes poses, velocities and the view current after a write to the state."""
        ...

    def tool_orientation(self, posture_rad: Sequence[float]) -> Array:
        """Returns the tool's orientation at a posture of the arm, (3, 3), world from tool."""
        ...

    def servo_time_s(self) -> Array:
        """Returns the time constants of the arm's servos, (n,) numpy."""
        ...

    def model_hash(self) -> str:
        """Returns a digest of the compiled model; names and what is only drawn do not change it."""
        ...

    def penetration_m(self, ids: Array) -> Array:
        """Returns the depth (n,) of the deepest contact of some simulations, metres; 0: none."""
        ...

    def marks(self) -> tuple[str, ...]:
        """Returns the bodies that are seen and cannot be touched, such as a goal."""
        ...

    def renderer(self, cameras: Sequence[Camera], num_threads: int = 1) -> BatchRenderer:
        """Returns what draws these simulations, in this thread and `num_threads` - 1 others.

        An engine that draws itself does so for cameras with `by_engine`; OpenGL draws all others.

        Raises:
            RenderError: this machine cannot draw.
            ModelError: the scene has no camera of a given name.
        """
        ...
