"""What a leased robot, simulator or world model looks like to the training loop.

B envs, H chunk length, A action dim. Observations are dicts of batched arrays: always
`state`, float32 (B, D); cameras add `<camera>.rgb`, uint8 (B, h, w, 3), and `<camera>.depth`,
float32 (B, h, w) in metres. Actions are float32 (B, A) in [-1, 1].
"""

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Obs = dict[str, Array]


@dataclass
class ChunkStep:
    """What happened while a chunk was executed; a row stops at the end of its episode."""

    obs: Obs
    """After the chunk; the first observation of the next episode where one ended."""
    reward: Array
    """(B, n_exec), zero where not valid."""
    terminated: Array
    """(B,)"""
    truncated: Array
    """(B,)"""
    valid: Array
    """(B, n_exec): which control steps were executed."""
    infos: dict[str, Any]
    """`final_obs` and `success` as in `step`, merged over the chunk."""


class VectorEnv(gymnasium.vector.VectorEnv):
    """A `gymnasium.vector.VectorEnv` (1.4 conventions) with chunks and, where possible, states.

    `step` returns in `infos`, for every env: `success` (B,) bool, `executed_action` (B, A), the
    action after safety. With SAME_STEP autoreset it returns `final_obs`, a dict of batched
    arrays whose rows hold where `_final_obs` (B,) is True, and the returned observation of those
    rows is already the next episode's. With DISABLED autoreset the caller resets by
    `reset(options={"reset_mask": mask})`.

    `reset(seed=s)` gives env i the seed s + i; a list gives each its own.
    """

    task: str
    robot: str
    instruction: str
    control_hz: float
    state_names: tuple[str, ...]
    """One name for each element of `state`: a dataset with other names is refused."""
    action_names: tuple[str, ...]
    caps: frozenset[str]
    """Of `set_state`, `fork`, `render`, `batch`: code asks these, never the type."""

    def step_chunk(self, actions: Array, n_exec: int) -> ChunkStep:
        """Executes the first `n_exec` of (B, H, A); an env whose episode ends waits for the rest."""
        raise NotImplementedError

    def get_state(self) -> Array:
        """Returns one state row per env, (B, n) float64. Needs the cap `set_state`."""
        raise NotImplementedError

    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        """Puts the masked envs into the given states and returns the observations."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns all that an exact resume needs (states, seeds, episode counters), as arrays."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        """Restores `state_dict` and returns the current observation."""
        raise NotImplementedError


def row_mask(mask: Array | None, num_envs: int) -> Array:
    """Returns a bool mask (B,), all True for None."""
    return np.ones(num_envs, bool) if mask is None else np.asarray(mask, bool)
