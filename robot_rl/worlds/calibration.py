"""What the disagreement of members is worth, by depth: when to stop, and how wide the errors are.

Disagreement ranks errors, and is too small as a width, by a factor that grows with depth (RWM-U's numbers
are 8 to 33 times too small). So a gate is a quantile of the disagreement itself at each depth, and widths are
scaled by quantiles of error / width at each depth and for each element (split conformal: Vovk et al. 2005;
Romano et al. 2019), found on episodes that were not learned from. Coverage is measured on a third set of
episodes.

Two next states that one member draws from its own noise are another measure, for another gate (RAW-Dream,
arXiv 2605.12334), which needs no second member. It is calibrated and stated as disagreement is.
Depth d: strides since the imagined episode began. P elements that are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from robot_rl.core.errors import ConfigError, DatasetError, require
from robot_rl.worlds.config import Measure
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
    """Of the gates."""
    samples: Array | None = None
    """(D,): the largest distance of two samples that is believed; None: it was not measured."""

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
        widths = [
            np.stack([np.quantile(np.abs(f.error) / f.width, level, axis=0) for level in LEVELS])
            for f in played
        ]
        return cls(
            depths=np.array([found.depth for found in played]),
            gate=_gate([found.uncertainty for found in played], quantile),
            widths=np.stack(widths),
            quantile=quantile,
            samples=_gate([found.samples for found in played], quantile),
        )

    def limit(self, depth: Array, measure: Measure = "disagreement") -> Array:
        """Returns the largest disagreement, or distance of samples, that is believed at each depth (B,).

        Raises:
            ConfigError: samples were not measured.
        """
        gate = self.gate if measure == "disagreement" else self.samples
        if gate is None:
            raise ConfigError(
                "env.settings.gate: got samples, but this world model has no limit for them: it was fitted "
                "before that was measured. Use gate=disagreement, or robot-rl worlds fit again."
            )
        return gate_at(depth, self.depths, gate)

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
        found = {
            "depths": self.depths,
            "gate": self.gate,
            "widths": self.widths,
            "quantile": np.array(self.quantile),
        }
        return found if self.samples is None else {**found, "samples": self.samples}

    @classmethod
    def of(cls, arrays: dict[str, Any]) -> Calibration:
        rest = {name: np.asarray(arrays[name]) for name in ("depths", "gate", "widths")}
        return cls(quantile=float(arrays["quantile"]), samples=arrays.get("samples"), **rest)


def _gate(measured: list[Array], quantile: float) -> Array:
    """Returns a quantile (D,) of what was measured at each depth; it never falls with depth."""
    return np.maximum.accumulate([np.quantile(values, quantile) for values in measured])


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
    samples: Array
    """(N,): distance of two next states that are drawn from a member's own noise; see `samples_apart`."""
    moved: Array
    """(N,): how far the state has moved since the beginning, in the same units: what a guess has for free."""


def played_by_depth(model: Dynamics, windows: Windows, seed: int) -> list[Played]:
    """Plays windows open loop and returns what was found at each of `DEPTHS` that has enough of them."""
    rng, noise, played = np.random.default_rng(seed), np.random.default_rng((seed, 1)), list[Played]()
    k = model.config.stride
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
        members, stds = len(errors), stds.reshape(-1, stds.shape[-1])
        drawn = noise.standard_normal((len(stds), 2, stds.shape[-1]))
        played.append(
            Played(
                depth,
                errors.reshape(-1, errors.shape[-1]),
                np.sqrt(spreads.reshape(stds.shape) ** 2 + stds**2) + _FLOOR,
                _size(spreads).reshape(-1),
                samples_apart(stds, drawn),
                np.tile(_size(moved), members),
            )
        )
    return played


def samples_apart(std: Array, noise: Array) -> Array:
    """Returns how far two samples of a Gaussian are apart (N,), as disagreement is stated of two members.

    That is the root of the mean square, over elements, of the two samples' deviation from one another: as
    large as the stated one on average.

    Args:
        std: (N, P), in units of the model's scale.
        noise: (N, 2, P), of deviation 1, of either sample.
    """
    return _size(std * (noise[:, 0] - noise[:, 1]) / np.sqrt(2.0))


def _size(values: Array) -> Array:
    """Returns the root of the mean square over the last axis."""
    return np.sqrt((values**2).mean(axis=-1))
