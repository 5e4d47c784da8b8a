"""A saved policy that reads the true state, as the expert of envs that show less of it.

B envs, S state dim of the policy, A action dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.core.names import PRESENT
from robot_rl.hal.vector import Array
from robot_rl.policies.checkpoint import check_meta, load_policy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.saved import policy_folder


class TrueEnvs(Protocol):
    """Simulations of a task of ours, which tell their whole state, whatever they show."""

    num_envs: int
    task: str
    robot: str
    control_hz: float
    action_names: tuple[str, ...]
    true_names: tuple[str, ...]

    def true_state(self) -> Array: ...

    def episode_seeds(self) -> Array: ...


class PolicyExpert:
    """Acts in all envs of a task of ours from their present state: the first action of a new chunk each time.

    The teacher of Chen et al. 2020, "Learning by Cheating", section 3: it reads what its student must find in
    pictures. It acts without exploration noise; a flow begins with the same noise in all of an episode.
    """

    def __init__(self, env: TrueEnvs, folder: str, *, seed: int = 0) -> None:
        """Opens the policy.

        Args:
            env: simulations of the policy's task on its robot.
            folder: of a run that has ended, or of a saved policy.
            seed: of that noise.

        Raises:
            CheckpointError: no policy there; one of another task, robot, rate or state; or one that reads
                more than the state.
        """
        saved = policy_folder(folder, at="env.expert")
        (policy, meta), at = load_policy(saved), f"env.expert: {saved}"
        if any(name.endswith(PRESENT) for name in meta.state_names):
            raise CheckpointError(f"{at}: it is of several robots (env.robots), allowed: a policy of one.")
        here = {name: getattr(env, name) for name in ("task", "robot", "control_hz", "action_names")}
        elements = tuple(name for name in meta.state_names if name in env.true_names)
        check_meta(at, meta, replace(meta, state_names=elements, **here))
        self._columns = [env.true_names.index(name) for name in elements]
        self._env, self._seed = env, np.uint64(seed)
        self._executor = ChunkExecutor(policy, env.num_envs, n_exec=1, mode="ode")
        try:
            self._executor.base_action({"state": np.zeros((env.num_envs, len(elements)), np.float32)})
        except DatasetError as error:
            raise CheckpointError(
                f"{at}: allowed: a policy that reads the state alone. {error.args[0].partition(', ')[0]}."
            ) from error

    def act(self) -> Array:
        """Returns actions (B, A) float32 in [-1, 1] for the present state of every env."""
        state = self._env.true_state()[:, self._columns]
        self._executor.reset(seeds=self._env.episode_seeds() ^ self._seed)
        return np.clip(self._executor.act({"state": state}).action, -1.0, 1.0)
