"""Numpy arrays for an env whose arrays are torch tensors: actions and observations are converted."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from robot_rl.core.arrays import Array, is_array, to_numpy
from robot_rl.hal.vector import ChunkStep, Obs, VectorEnv

_ANSWERS = ("progress", "shown_state", "true_state")
"""Methods without arguments that return arrays, which not every env has."""


class HostEnv(VectorEnv):
    """The env inside, in numpy arrays; memory of a CPU is shared, memory of a GPU is copied.

    Attributes that are not named here are those of the env inside. Of them, `expert` and what a policy that
    demonstrates reads are in numpy arrays, too.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        for name, value in vars(env).items():
            if hasattr(VectorEnv, name) and name not in ("xp", "device"):
                setattr(self, name, value)  # the others are asked for when they are needed

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        found = getattr(self.env, name)
        if name == "expert":
            return lambda *args, **how: _HostExpert(found(*args, **how))
        return (lambda: on_host(found())) if name in _ANSWERS else found

    def episode_seeds(self) -> Array:
        """Returns uint64, whose bits a tensor has as int64."""
        return on_host(cast("Any", self.env).episode_seeds()).view(np.uint64)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        return on_host(self.env.reset(seed=seed, options=options))

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        return on_host(self.env.step_masked(actions, active))

    def step_unseen(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        return on_host(self.env.step_unseen(actions, active))

    def step_chunk(self, actions: Array, n_exec: int, active: Array | None = None) -> ChunkStep:
        return ChunkStep(**on_host(vars(self.env.step_chunk(actions, n_exec, active))))

    def get_state(self) -> Array:
        return on_host(self.env.get_state())

    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        return on_host(self.env.set_state(rows, mask))

    def state_dict(self) -> dict[str, Any]:
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        return on_host(self.env.load_state_dict(state))

    def park(self) -> None:
        self.env.park()

    def safe_stop(self) -> None:
        self.env.safe_stop()

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close(**kwargs)


class _HostExpert:
    """An expert of the env inside, whose actions are numpy arrays."""

    def __init__(self, expert: Any) -> None:
        self._expert = expert

    def __getattr__(self, name: str) -> Any:
        if name == "_expert":
            raise AttributeError(name)
        return getattr(self._expert, name)

    def act(self) -> Array:
        return on_host(self._expert.act())


def on_host(tree: Any) -> Any:
    """Returns a tree of tuples and dicts with its arrays as numpy's."""
    if isinstance(tree, dict):
        leaves = cast("dict[str, Any]", tree)
        return {key: on_host(leaf) for key, leaf in leaves.items()}
    if isinstance(tree, tuple):
        return tuple(on_host(leaf) for leaf in cast("tuple[Any, ...]", tree))
    return to_numpy(tree) if is_array(tree) else tree
