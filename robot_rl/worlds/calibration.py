"""What the disagreement of members is worth, by depth: when to stop, and how wide the errors are.

Disagreement ranks errors, and is too small as a width, by a factor that grows with depth (RWM-U's numbers
are 8 to 33 times too small). So a gate is a quantile of the disagreement itself at each depth, and widths are
scaled by quantiles of error / width at each depth and for each element (split conformal: Vovk et al. 2005;
Romano et al. 2019), found on episodes that were not learned from. Coverage is measured on a third set of
episodes.
Depth d: strides since the imagined episode began. P elements that are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from robot_rl.core.errors import DatasetError, require
from robot_rl.worlds.dynamics import Dynamics
from robot_rl.worlds.fit import MIN_WINDOWS, open_loop
from robot_rl.worlds.history import Array, Windows

DEPTHS = (1, 2, 4, 8, 16)
"""Strides after which scales are measured; between them they are interpolated."""
LEVELS = (0.68, 0.90)
"""Of the intervals whose coverage is measured."""
_MOST_WINDOWS = 2000
_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Scales by depth."""

    depths: Array
    """(D,) ascending."""
    gate: Array
    """(D,): the largest disagreement that is believed."""
    widths: Array
    """(D, L, P): half-width of an interval over the width that the model states, for each of `LEVELS`."""
    quantile: float
    """Of the gate."""

    @classmethod
    def fit(cls, model: Dynamics, windows: Windows, *, quantile: float, seed: int = 0) -> Calibration:
        """Measures scales on windows that reach the largest depth, of episodes that were not learned from.

        Raises:
            DatasetError: too few windows for a quantile at the first depth.
        """
        require(0.5 < quantile <= 1, "gate", quantile, "above 0.5, up to 1")
        played = played_by_depth(model, windows, seed)
        if not played:
            raise DatasetError(
                f"calibration: no depth has {MIN_WINDOWS} windows of held-out episodes. Collect more."
            )
        gate = [np.quantile(found.uncertainty, quantile) for found in played]
        widths = [
            np.stack([np.quantile(np.abs(f.error) / f.width, level, axis=0) for level in LEVELS])
            for f in played
        ]
        return cls(
            depths=np.array([found.depth for found in played]),
            gate=np.maximum.accumulate(np.array(gate)),
            widths=np.stack(widths),
            quantile=quantile,
        )

    def limit(self, depth: Array) -> Array:
        """Returns the largest disagreement that is believed at each depth (B,)."""
        return gate_at(depth, self.depths, self.gate)

    def coverage(self, played: list[Played]) -> list[dict[str, float]]:
        """Returns for each depth which share of errors the intervals of `LEVELS` hold."""
        rows = list[dict[str, float]]()
        for found in played:
            at = int(np.flatnonzero(self.depths == found.depth)[0]) if found.depth in self.depths else -1
            if at < 0:
                continue
            inside = [
                np.abs(found.error) <= self.widths[at, level] * found.width for level in range(len(LEVELS))
            ]
            shares = {
                f"coverage_{level:.0%}": float(held.mean())
                for level, held in zip(LEVELS, inside, strict=True)
            }
            rows.append({"depth": float(found.depth), **shares})
        return rows

    def arrays(self) -> dict[str, Array]:
        return {
            "depths": self.depths,
            "gate": self.gate,
            "widths": self.widths,
            "quantile": np.array(self.quantile),
        }

    @classmethod
    def of(cls, arrays: dict[str, Any]) -> Calibration:
        rest = {name: np.asarray(arrays[name]) for name in ("depths", "gate", "widths")}
        return cls(quantile=float(arrays["quantile"]), **rest)


def gate_at(depth: Array, depths: Array, gate: Array) -> Array:
    """Returns a gate (D,), measured at `depths` (D,), at each depth (B,) in strides, by its logarithm."""
    return np.interp(np.log(np.maximum(depth, 1)), np.log(depths), gate)


@dataclass(frozen=True)
class Played:
    """What open-loop play found at one depth, over members and windows (N,)."""

    depth: int
    error: Array
    """(N, P), in units of the model's scale."""
    width: Array
    """(N, P): deviation that the model states, of the members' disagreement and a member's own noise."""
    uncertainty: Array
    """(N,): disagreement."""
    stated: Array
    """(N,): root of the mean square of a member's own noise, what two samples of one member differ by."""
    moved: Array
    """(N,): how far the state has moved since the beginning, in the same units: what a guess has for free."""


def played_by_depth(model: Dynamics, windows: Windows, seed: int) -> list[Played]:
    """Plays windows open loop and returns what was found at each of `DEPTHS` that has enough of them."""
    rng, k, played = np.random.default_rng(seed), model.config.stride, list[Played]()
    moving = model.moves.bool().cpu().numpy()
    scale = model.scale.cpu().numpy()
    for depth in DEPTHS:
        try:
            long = Windows(
                windows.history, np.unique(windows.history.episode[windows.rows]), stride=k, strides=depth
            )
        except DatasetError:
            break
        if len(long) < MIN_WINDOWS:
            break
        rows = rng.choice(long.rows, min(_MOST_WINDOWS, len(long)), replace=False)
        errors, spreads, stds = (part[-1] for part in open_loop(model, long, rows))
        moved = ((long.states(rows, depth * k) - long.states(rows, 0)) / scale)[:, moving]
        members = len(errors)
        played.append(
            Played(
                depth,
                errors.reshape(-1, errors.shape[-1]),
                np.sqrt(spreads**2 + stds**2).reshape(-1, errors.shape[-1]) + _FLOOR,
                _size(spreads).reshape(-1),
                _size(stds).reshape(-1),
                np.tile(_size(moved), members),
            )
        )
    return played


def _size(values: Array) -> Array:
    """Returns the root of the mean square over the last axis."""
    return np.sqrt((values**2).mean(axis=-1))
