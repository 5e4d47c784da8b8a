"""The units of the small VLA: states standardised, chunks of actions scaled, absolute or relative.

A relative action is the distance from the state that the chunk starts at: on real arms the next half
second lies much closer to the present pose than to the mean of all poses. Where the state has the last
action, it is the distance from that, which lies closer still. A ridge regression can remove the part
of the distance that is linear in the state. The statistics of the rest differ from step to step of the chunk,
so they are measured on chunks.
B rows, H chunk length, A action dim, S state dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.policy import DemoBatch

FLOOR = 1e-3
"""Smallest spread divided by, in the data's units (1 mrad, 1 mm): what never moved stays near zero."""
STATE_LIMIT = 5.0
"""Standardised states are clipped to this: a joint that hardly moved in the data may differ later."""
CHUNKS = 50_000
"""Chunks that are measured at most."""


class ChunkScale(nn.Module):
    """Maps states and chunks of actions between the dataset's units and the network's."""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        horizon: int,
        *,
        relative_to: Sequence[int],
        linear: float = 0.0,
    ) -> None:
        """Starts as the identity without limits, to be fitted or loaded.

        Args:
            state_dim: S.
            action_dim: A.
            horizon: H.
            relative_to: per action, the element of the state it is relative to; -1: absolute.
            linear: strength of the ridge regression from the state to the chunk; 0: none.
        """
        super().__init__()
        self.relative_to, self._strength = tuple(relative_to), linear
        if len(self.relative_to) != action_dim or not all(-1 <= i < state_dim for i in self.relative_to):
            raise ValueError(
                f"relative_to: got {self.relative_to}, "
                f"allowed: {action_dim} indices from -1 to {state_dim - 1}"
            )
        self.state_mean = nn.Buffer(torch.zeros(state_dim))
        self.state_std = nn.Buffer(torch.ones(state_dim))
        self.centre = nn.Buffer(torch.zeros(horizon, action_dim))
        self.half_range = nn.Buffer(torch.ones(horizon, action_dim))
        self.low = nn.Buffer(torch.full((action_dim,), -torch.inf))
        self.high = nn.Buffer(torch.full((action_dim,), torch.inf))
        self.is_measured = nn.Buffer(torch.tensor(not self.needs_chunks))
        if linear > 0:
            self.weights = nn.Buffer(torch.zeros(state_dim + 1, horizon, action_dim))
        index = torch.tensor(self.relative_to)
        self._index = nn.Buffer(index.clamp_min(0), persistent=False)
        self._relative = nn.Buffer((index >= 0).float(), persistent=False)

    @property
    def needs_chunks(self) -> bool:
        """Whether any action is relative to the state, so that chunks have to be measured."""
        return self._strength > 0 or any(index >= 0 for index in self.relative_to)

    def fit(self, stats: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Takes the dataset's statistics; `measure` has to follow where it `needs_chunks`.

        Raises:
            DatasetError: a statistic is missing or not finite.
        """
        self.state_mean.copy_(_stat(stats, "state", "mean"))
        self.state_std.copy_(_stat(stats, "state", "std").clamp_min(FLOOR))
        self.low.copy_(_stat(stats, "action", "min"))
        self.high.copy_(_stat(stats, "action", "max"))
        self._set_range(_stat(stats, "action", "q01"), _stat(stats, "action", "q99"))

    def measure(self, batches: Iterable[DemoBatch]) -> None:
        """Measures relative actions on chunks of the training data; does nothing for absolute ones.

        Raises:
            DatasetError: there are no chunks.
        """
        if not self.needs_chunks:
            return
        read: list[DemoBatch] = []
        count = 0
        for batch in batches:
            read.append(DemoBatch({"state": batch.obs["state"]}, batch.actions, batch.valid))
            count += len(batch.actions)
            if count >= CHUNKS:
                break
        if not read:
            raise DatasetError("small_vla: no chunks to measure relative actions on. Pass training data.")
        if self._strength > 0:
            self._solve(read)
        table = torch.cat(
            [
                torch.where(
                    batch.valid[..., None], batch.actions - self.origin(batch.obs["state"]), torch.nan
                )
                for batch in read
            ]
        )
        # Step by step: torch refuses quantiles of more than 16 million numbers at once.
        low, high = (
            torch.stack([table[:, step].nanquantile(share, dim=0) for step in range(table.shape[1])])
            for share in (0.01, 0.99)
        )
        self._set_range(low, high)
        self.is_measured.fill_(True)

    def check(self) -> None:
        """Refuses to learn relative actions of unknown size."""
        if not self.is_measured:
            raise ConfigError(
                "small_vla: relative actions were never measured. Call "
                "`policy.measure(loader.batches())` on the training data first, or set "
                "relative_actions to false."
            )

    def state(self, state: Tensor) -> Tensor:
        """Standardises states (..., S)."""
        return ((state - self.state_mean) / self.state_std).clamp(-STATE_LIMIT, STATE_LIMIT)

    def origin(self, state: Tensor) -> Tensor:
        """Returns what the actions of a chunk are relative to, (B, 1 or H, A), for states (B, S)."""
        if self._strength == 0:
            return self._start(state)
        return self._start(state) + torch.einsum("bs,sha->bha", self._inputs(state), self.weights)

    def action(self, actions: Tensor, state: Tensor) -> Tensor:
        """Maps chunks (B, H, A) in the dataset's units to the network's, [-1, 1] for nearly all."""
        return (actions - self.origin(state) - self.centre) / self.half_range

    def unaction(self, scaled: Tensor, state: Tensor) -> Tensor:
        """Maps chunks back to the dataset's units, inside the dataset's range.

        A joint outside the range may stay where it is, but not move further out. A jump into the range
        would be a motion that the data does not have.
        """
        actions = torch.addcmul(self.centre, scaled, self.half_range) + self.origin(state)
        is_relative, start = self._relative > 0, self._start(state)
        low = torch.where(is_relative, start.minimum(self.low), self.low)
        high = torch.where(is_relative, start.maximum(self.high), self.high)
        return actions.clamp(low, high)

    def _start(self, state: Tensor) -> Tensor:
        """Returns the elements of states (B, S) that actions are relative to, (B, 1, A); 0 for others."""
        return (state[:, self._index] * self._relative)[:, None]

    def _inputs(self, state: Tensor) -> Tensor:
        """Returns what the regression sees: states without limits, and a one, (B, S + 1)."""
        scaled = (state - self.state_mean) / self.state_std
        return torch.cat([scaled, torch.ones_like(scaled[:, :1])], dim=1)

    def _solve(self, read: Sequence[DemoBatch]) -> None:
        """Fits the ridge regression; beyond the end of an episode the last action is held."""
        size = len(self.weights)
        squares = torch.zeros(size, size, dtype=torch.float64)
        products = torch.zeros(size, self.weights[0].numel(), dtype=torch.float64)
        for batch in read:
            state = batch.obs["state"]
            inputs = self._inputs(state).double().cpu()
            distance = (batch.actions - self._start(state)).flatten(1).double().cpu()
            squares += inputs.T @ inputs
            products += inputs.T @ distance
        penalty = squares[-1, -1] * self._strength * torch.ones(size, dtype=torch.float64)
        penalty[-1] = 0.0  # not of the offset
        solved = torch.linalg.solve(squares + penalty.diag(), products)
        self.weights.copy_(solved.view_as(self.weights))

    def _set_range(self, low: Tensor, high: Tensor) -> None:
        self.centre.copy_((low + high) / 2)
        self.half_range.copy_(((high - low) / 2).clamp_min(FLOOR))


def relative_indices(state_names: Sequence[str], action_names: Sequence[str]) -> tuple[int, ...]:
    """Returns, per action, the state element of the last action, or else of the same name, or else -1."""
    place = {name: index for index, name in enumerate(state_names)}
    return tuple(place.get(f"{name}.last_action", place.get(name, -1)) for name in action_names)


def _stat(stats: Mapping[str, Mapping[str, NDArray[Any]]], feature: str, name: str) -> Tensor:
    try:
        values = torch.as_tensor(stats[feature][name], dtype=torch.float32).flatten()
    except KeyError as error:
        raise DatasetError(
            f"dataset statistics: no {name!r} of {feature!r}, which small_vla needs. "
            "Compute the statistics of the dataset again."
        ) from error
    if not values.isfinite().all():
        raise DatasetError(
            f"dataset statistics: {name!r} of {feature!r} is not finite: {values.tolist()}. "
            "Find the damaged episode and compute the statistics again."
        )
    return values
