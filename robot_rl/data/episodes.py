"""Episodes in memory: flat arrays, one row per control step, and checks of them.

T control steps in all, E episodes, A action dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.names import chosen

if TYPE_CHECKING:
    from robot_rl.hal.vector import VectorEnv

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class EpisodesMeta:
    """Robot, task, rate and names of elements: other data is refused by these."""

    task: str
    robot: str
    control_hz: float
    instruction: str
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]


def episodes_meta(env: VectorEnv) -> EpisodesMeta:
    """Returns the metadata of episodes of this env."""
    return EpisodesMeta(
        task=env.task,
        robot=env.robot,
        control_hz=env.control_hz,
        instruction=env.instruction,
        state_names=env.state_names,
        action_names=env.action_names,
    )


@dataclass(kw_only=True)
class Episodes:
    """Complete episodes, one after the other."""

    meta: EpisodesMeta
    obs: dict[str, Array]
    """(T, ...): at the beginning of each step."""
    action: Array
    """(T, A): executed actions, in [-1, 1]."""
    reward: Array
    """(T,)"""
    terminated: Array
    """(T,): the task ended here."""
    truncated: Array
    """(T,): a time limit, or the person who recorded, ended it here."""
    success: Array
    """(T,): the task's success predicate after the step."""
    episode_index: Array
    """(T,): 0 to E - 1, ascending."""
    final_obs: dict[str, Array]
    """(E, ...): after the last step of each episode."""
    source: Array | None = None
    """(T,) uint8: source of each step, an index into `SOURCES`; None: not recorded."""
    start: Array | None = None
    """(E,) text: the class of a start bank in which each episode began; None: not recorded."""

    @property
    def num_episodes(self) -> int:
        return int(self.episode_index[-1]) + 1 if len(self.episode_index) else 0

    def bounds(self) -> tuple[Array, Array]:
        """Returns the first row of every episode, and the row after its last, (E,) each."""
        lengths = np.bincount(self.episode_index, minlength=self.num_episodes)
        ends = np.cumsum(lengths)
        return ends - lengths, ends

    def episode_success(self) -> Array:
        """Returns (E,): whether success was reached at any step."""
        reached = np.zeros(self.num_episodes, bool)
        reached[self.episode_index[self.success.astype(bool)]] = True
        return reached

    def with_state(self, beginnings: Sequence[str], *, at: str) -> Episodes:
        """Returns the episodes with the elements of the state whose names begin so, or with all.

        Raises:
            ConfigError: no name begins so; `at` begins the message.
        """
        kept = chosen(self.meta.state_names, beginnings, at=at)
        return replace(
            self,
            meta=replace(self.meta, state_names=tuple(self.meta.state_names[i] for i in kept)),
            obs={**self.obs, "state": self.obs["state"][:, kept]},
            final_obs={**self.final_obs, "state": self.final_obs["state"][:, kept]},
        )

    def check(self, at: str = "episodes") -> None:
        """Verifies shapes, order, ends and numbers.

        Raises:
            DatasetError: the first problem, with feature, row and episode.
        """
        self._check_shapes(at)
        self._check_order(at)
        for name, values in self._features().items():
            if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
                raise DatasetError(self._not_finite(at, name, values))

    def _features(self) -> dict[str, Array]:
        obs = {f"observation.{key}": value for key, value in self.obs.items()}
        final = {f"final observation.{key}": value for key, value in self.final_obs.items()}
        return {**obs, "action": self.action, "next.reward": self.reward, **final}

    def _check_shapes(self, at: str) -> None:
        steps = len(self.action)
        if steps == 0:
            raise DatasetError(f"{at}: no steps. Collect at least one episode.")
        for name, values in self._features().items():
            rows = self.num_episodes if name.startswith("final ") else steps
            if len(values) != rows:
                raise DatasetError(f"{at}: feature {name!r} has {len(values)} rows, needs {rows}.")
        for name, values, names in (
            ("observation.state", self.obs.get("state"), self.meta.state_names),
            ("action", self.action, self.meta.action_names),
        ):
            if values is None:
                raise DatasetError(f"{at}: feature {name!r} is missing; there are {sorted(self.obs)}.")
            if values.ndim != 2 or values.shape[1] != len(names):
                raise DatasetError(
                    f"{at}: feature {name!r} has shape {values.shape[1:]}, "
                    f"its {len(names)} names need ({len(names)},)."
                )

    def _check_order(self, at: str) -> None:
        ended = (self.terminated | self.truncated).astype(bool)
        last = np.r_[np.diff(self.episode_index) != 0, True]
        if self.episode_index[0] != 0 or not np.isin(np.diff(self.episode_index), (0, 1)).all():
            raise DatasetError(f"{at}: feature 'episode_index' must count 0, 1, 2, ... without gaps.")
        if (ended != last).any():
            row = int(np.flatnonzero(ended != last)[0])
            problem = "ends inside" if ended[row] else "is the last row but does not end"
            raise DatasetError(
                f"{at}: row {row} (episode {self.episode_index[row]}) {problem} the episode. "
                "Set terminated or truncated on the last step of each episode, and there only."
            )

    def _not_finite(self, at: str, name: str, values: Array) -> str:
        row = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0])
        if name.startswith("final "):
            where = f"of episode {row}"
        else:
            episode = int(self.episode_index[row])
            where = f"in row {row} (episode {episode}, step {row - int(self.bounds()[0][episode])})"
        return (
            f"{at}: feature {name!r} is NaN or infinite {where}. Drop or record again that episode: "
            "a policy trained on it would be NaN everywhere."
        )


def together(parts: Sequence[Episodes]) -> Episodes:
    """Returns the episodes of several robots or tasks with equal observations and actions, in this order.

    Only the privileged state may differ: where a task has less of it than another, the rest is NaN.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    begun = np.cumsum([0, *(part.num_episodes for part in parts)])
    made = [part.source for part in parts if part.source is not None]
    begun_in = [part.start for part in parts if part.start is not None]
    columns = ("action", "reward", "terminated", "truncated", "success")
    return Episodes(
        meta=replace(first.meta, **{name: _joined(parts, name) for name in ("task", "robot", "instruction")}),
        obs={key: _stacked([part.obs[key] for part in parts]) for key in first.obs},
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns},
        episode_index=np.concatenate(
            [part.episode_index + at for part, at in zip(parts, begun, strict=False)]
        ),
        final_obs={key: _stacked([part.final_obs[key] for part in parts]) for key in first.final_obs},
        source=np.concatenate(made) if len(made) == len(parts) else None,
        start=np.concatenate(begun_in) if len(begun_in) == len(parts) else None,
    )


def padded(values: Array, width: int) -> Array:
    """Returns rows (T, D) as (T, width), with NaN behind what they have; other arrays as they are."""
    if values.ndim != 2 or values.shape[1] == width:
        return values
    lacking = np.full((len(values), width - values.shape[1]), np.nan, values.dtype)
    return np.concatenate([values, lacking], axis=1)


def _stacked(parts: Sequence[Array]) -> Array:
    width = max(part.shape[1] for part in parts)
    return np.concatenate([padded(part, width) for part in parts])


def _joined(parts: Sequence[Episodes], name: str) -> str:
    return ", ".join(dict.fromkeys(getattr(part.meta, name) for part in parts))
