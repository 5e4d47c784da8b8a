"""One episode, which stores, datasets and replays exchange.

Numbers are arrays with one row per control step. Pictures may be compressed until they are indexed.
T control steps, A action dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.names import EXECUTED_ACTION
from robot_rl.data.episodes import EpisodesMeta

if TYPE_CHECKING:
    from robot_rl.hal.vector import VectorEnv

Array = NDArray[Any]

SOURCES = ("demo", "sim", "real", "human", "world")
"""Who made a step: a demonstrator, a policy in simulation, on a robot, a person who took over, a policy in a
world model. Files store the index into this table."""
POLICY_ACTION = "policy_action"
"""Group of a recording: the action of the policy, where another `action` was sent."""
EXECUTED = "executed_target_rad"
"""Group of a recording: the joint targets of `action` after the safety envelope."""
RESET_ROW = "reset_row"
"""Group of a recording: the class of the start (of `Starts.classes`) and its row in the bank."""


@dataclass(frozen=True)
class Feature:
    """Type and shape of one element of an observation, without the leading T."""

    dtype: str
    """A numpy name: `float32`, `uint8`."""
    shape: tuple[int, ...]

    @property
    def is_picture(self) -> bool:
        """Whether it is an RGB picture, (h, w, 3) uint8, which is stored compressed."""
        return self.dtype == "uint8" and len(self.shape) == 3 and self.shape[2] == 3


@dataclass(frozen=True, kw_only=True)
class Starts:
    """In which starts the episodes of a recording begin: what the numbers of its group `reset_row` mean."""

    classes: tuple[str, ...]
    """Names of the classes."""
    bank: dict[str, Any] | None
    """The bank whose rows are counted, as JSON has it: the `digest` of its states, and its `key`, what they
    are of; None: the task begins all episodes."""

    def __str__(self) -> str:
        which = "no bank" if self.bank is None else f"bank {self.bank['digest']}"
        return f"{which} with {', '.join(self.classes)}"

    def of(self, reset_row: Array) -> tuple[str, int]:
        """Returns class and row of the start of an episode with `reset_row` (T, 2); -1 where it is no row."""
        kind, row = reset_row[0].tolist()
        return self.classes[kind], row


class Frames(Protocol):
    """T pictures, decoded on demand; an array (T, h, w, 3) is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, step: Any) -> Any:
        """Returns (h, w, 3) uint8 for an int, (n, h, w, 3) for an integer array."""
        ...


@dataclass(kw_only=True)
class Episode:
    """One episode, or a recovered part of one."""

    meta: EpisodesMeta
    """`meta.instruction` is that of this episode."""
    obs: dict[str, Any]
    """Key -> (T, ...) array, or `Frames` for pictures: at the beginning of each step."""
    final_obs: dict[str, Any]
    """Key -> (...): after the last step; empty if unknown."""
    action: Array
    """(T, A): commanded actions, clipped to [-1, 1], before safety; an expert's labels where `obs` has the
    group `EXECUTED_ACTION`."""
    base_action: Array
    """(T, A): actions of the base policy; equal to `action` where there was none."""
    reward: Array
    """(T,) float32"""
    terminated: Array
    """(T,) bool"""
    truncated: Array
    """(T,) bool; an episode that was cut short ends with neither."""
    success: Array
    """(T,) bool"""
    source: Array
    """(T,) uint8: index into `SOURCES`."""
    policy_version: Array
    """(T,) int64: number of learner updates of the weights that acted."""
    stamp_ns: Array
    """(T,) int64: measured monotonic time of the observation; k / control_hz if not measured."""
    picture_stamp_ns: dict[str, Array] = field(default_factory=dict)
    """Key -> (T,) int64: time of the picture that this step saw."""
    device: str = ""
    """Name of the device that acted."""

    def __len__(self) -> int:
        return len(self.action)

    @property
    def is_complete(self) -> bool:
        return bool(len(self) and (self.terminated[-1] or self.truncated[-1]))

    def as_executed(self) -> Episode:
        """Returns the episode with the actions that were executed, where `action` is an expert's label."""
        if EXECUTED_ACTION not in self.obs:
            return self
        return replace(self, action=self.obs[EXECUTED_ACTION])

    def features(self) -> dict[str, Feature]:
        """Returns type and shape of every element of the observation."""
        return {key: feature_of(value) for key, value in self.obs.items()}


class EpisodeSource(Protocol):
    """A store or a dataset that episodes are read from; opening it reads metadata alone."""

    @property
    def meta(self) -> EpisodesMeta:
        """Meta of all episodes; `instruction` is that of the first."""
        ...

    @property
    def features(self) -> Mapping[str, Feature]:
        """Type and shape of every element of the observation."""
        ...

    def __len__(self) -> int:
        """Returns the number of episodes that can be read, unfinished ones of a store included."""
        ...

    def lengths(self) -> NDArray[np.int64]:
        """Returns the control steps of every episode, (E,)."""
        ...

    def read(self, episode: int) -> Episode:
        """Returns an episode; pictures stay compressed until they are indexed."""
        ...

    def refresh(self) -> None:
        """Reads what a writer flushed since; lengths may only grow."""
        ...


def observed(env: VectorEnv) -> dict[str, Feature]:
    """Returns type and shape of every element of one env's observation."""
    spaces: Any = env.single_observation_space
    return {key: Feature(str(space.dtype), space.shape) for key, space in spaces.items()}


def feature_of(values: Any) -> Feature:
    """Returns the feature of an array, or of frames, with leading T."""
    if isinstance(values, np.ndarray):
        return Feature(str(values.dtype), values.shape[1:])
    return Feature("uint8", values[0].shape)


def refuse_imagined(source: Array | None, *, at: str) -> None:
    """Refuses steps (T,) of a world model: nothing learns from what never happened as if it had.

    Raises:
        DatasetError: `at` begins its message.
    """
    if source is not None and (source == SOURCES.index("world")).any():
        raise DatasetError(
            f"{at}: it has imagined steps, of a world model, allowed: real ones. Leave it out."
        )
