"""Normalisation as part of the policy: its statistics are buffers of the checkpoint.

State-like features are standardised, actions are scaled from their range in the data to [-1, 1],
uint8 images become floats in [0, 1]; depth in metres passes unchanged.
N rows of data, D feature elements, A action dim, B envs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robot_rl.core.errors import DatasetError, nearest
from robot_rl.core.names import PRESENT
from robot_rl.data.episodes import Episodes
from robot_rl.data.moments import RunningMoments

STD_FLOOR = 0.01
"""Smallest divisor of a state element: one that never moved stays near zero."""
RANGE_FLOOR = 0.1
"""Smallest half-range of an action element, in the env's [-1, 1]."""
_ACTION_BUFFERS = ("action_centre", "action_half_range")


class Normaliser(nn.Module):
    """Standardises state-like features and maps actions from the data's range to [-1, 1].

    Before `fit` it is the identity on states and actions.
    """

    def __init__(self, feature_dims: Mapping[str, int], action_dim: int) -> None:
        super().__init__()
        self.feature_dims = dict(feature_dims)
        self.action_dim = action_dim
        for name, dim in self.feature_dims.items():
            self.register_buffer(_mean(name), torch.zeros(dim))
            self.register_buffer(_std(name), torch.ones(dim))
        self.register_buffer("action_centre", torch.zeros(action_dim))
        self.register_buffer("action_half_range", torch.ones(action_dim))
        self.action_centre: Tensor
        self.action_half_range: Tensor
        self._buffer_names = {name: (_mean(name), _std(name)) for name in self.feature_dims}

    @classmethod
    def fit(
        cls,
        obs: Mapping[str, NDArray[Any]],
        actions: NDArray[Any],
        *,
        std_floor: float = STD_FLOOR,
        range_floor: float = RANGE_FLOOR,
    ) -> Normaliser:
        """Measures the data: every float feature (N, D) of `obs`, and `actions` (N, A).

        Images and depth need no statistics and are skipped.

        Raises:
            DatasetError: no rows, a feature of other length or shape, NaN or infinity.
        """
        features = {name: values for name, values in obs.items() if _has_statistics(name, values)}
        _check_table("action", actions, num_rows=len(actions))
        for name, values in features.items():
            _check_table(name, values, num_rows=len(actions))
        fitted = cls({name: values.shape[1] for name, values in features.items()}, actions.shape[1])
        for name, values in features.items():
            table = np.asarray(values, np.float64)
            fitted._set(_mean(name), table.mean(axis=0))
            fitted._set(_std(name), np.maximum(table.std(axis=0), std_floor))
        low, high = actions.min(axis=0).astype(np.float64), actions.max(axis=0).astype(np.float64)
        fitted._set("action_centre", (low + high) / 2)
        fitted._set("action_half_range", np.maximum((high - low) / 2, range_floor))
        return fitted

    @classmethod
    def of(cls, episodes: Episodes) -> Normaliser:
        """Measures episodes: elements that one robot of several has to itself in the steps of that robot.

        Where it is not, its elements are at rest (`sim/bodies.py`): constants, in that scale.

        Raises:
            DatasetError: as `fit`.
        """
        fitted = cls.fit(episodes.obs, episodes.action)
        names, actions = episodes.meta.state_names, episodes.meta.action_names
        for flag in (name for name in names if name.endswith(PRESENT)):
            steps = episodes.obs["state"][:, names.index(flag)] > 0.0
            if not steps.any():
                continue
            alone = cls.fit({"state": episodes.obs["state"][steps]}, episodes.action[steps])
            prefix = flag.removesuffix(PRESENT) + "."
            for of, buffers in ((names, (_mean("state"), _std("state"))), (actions, _ACTION_BUFFERS)):
                own = [index for index, name in enumerate(of) if name.startswith(prefix) and name != flag]
                for buffer in buffers:
                    getattr(fitted, buffer)[own] = getattr(alone, buffer)[own]
        return fitted

    def moments(self, count: float) -> dict[str, RunningMoments]:
        """Returns the moments of every feature, as if they were of `count` rows; see `follow`."""
        return {
            name: RunningMoments(getattr(self, mean), getattr(self, std).square(), count)
            for name, (mean, std) in self._buffer_names.items()
        }

    @torch.no_grad()
    def follow(self, moments: Mapping[str, RunningMoments], *, std_floor: float = STD_FLOOR) -> None:
        """Takes the scale of features from moments that go on, in place."""
        for name, of in moments.items():
            mean, std = self._buffer_names[name]
            getattr(self, mean).copy_(of.mean)
            getattr(self, std).copy_(of.std.clamp_min(std_floor))

    def obs(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the observation (leading B) with features standardised and images in [0, 1]."""
        return {name: self._feature(name, value) for name, value in obs.items()}

    def action(self, action: Tensor) -> Tensor:
        """Maps env actions (..., A) to the policy's scale."""
        return (action - self.action_centre) / self.action_half_range

    def unaction(self, scaled: Tensor) -> Tensor:
        """Maps the policy's scale (..., A) back to env actions."""
        return torch.addcmul(self.action_centre, scaled, self.action_half_range)

    def _feature(self, name: str, value: Tensor) -> Tensor:
        names = self._buffer_names.get(name)
        if names is not None:
            mean: Tensor = getattr(self, names[0])
            if value.shape[-1] != mean.shape[0]:
                raise DatasetError(
                    f"observation {name!r}: {value.shape[-1]} elements, normalised with "
                    f"{mean.shape[0]}. Use the task and robot that the policy was trained on."
                )
            return (value.to(mean.dtype) - mean) / getattr(self, names[1])
        if value.dtype == torch.uint8:
            return value.to(self.action_centre.dtype) / 255.0
        if name.endswith(".depth"):
            return value
        raise DatasetError(
            f"observation {name!r}: the normaliser has no statistics for it."
            f"{nearest(name, self.feature_dims)} Fit it on data that holds this feature."
        )

    def _set(self, buffer: str, values: NDArray[np.float64]) -> None:
        tensor: Tensor = getattr(self, buffer)
        tensor.copy_(torch.as_tensor(values))


def _mean(name: str) -> str:
    return f"mean_{name.replace('.', '__')}"


def _std(name: str) -> str:
    return f"std_{name.replace('.', '__')}"


def _has_statistics(name: str, values: NDArray[Any]) -> bool:
    return values.dtype != np.uint8 and not name.endswith(".depth")


def _check_table(name: str, values: NDArray[Any], *, num_rows: int) -> None:
    if values.ndim != 2 or len(values) != num_rows or num_rows == 0:
        raise DatasetError(
            f"feature {name!r}: shape {values.shape}, allowed ({num_rows or 'at least 1'}, elements), "
            "one row per action. Check that the episodes were read to their end."
        )
    bad = ~np.isfinite(values)
    if bad.any():
        first = int(np.flatnonzero(bad.any(axis=1))[0])
        raise DatasetError(
            f"feature {name!r}: {int(bad.sum())} values are NaN or infinite, the first in row {first}, "
            f"element {int(np.flatnonzero(bad[first])[0])}. "
            "Drop or record again the episode that holds this row."
        )
