"""Fits a model to real experience, by likelihood, and keeps what predicts held-out episodes best.

First single strides, of which any number of control steps may be asked; then, in the last part of the
updates, several strides at a time, in which a member goes on from its own prediction (RWM, arXiv 2501.10100).
The likelihood is beta-NLL (Seitzer et al. 2022, equation 9, beta 0.5), in which errors of sure predictions do
not hide those of unsure ones. `Diffusion` learns single strides, by its own loss.
B rows, M members, k control steps of a stride.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robot_rl.core.errors import DatasetError
from robot_rl.worlds.config import EnsembleConfig, FitConfig
from robot_rl.worlds.diffusion import Diffusion, Learned, untrained
from robot_rl.worlds.dynamics import Dynamics, tensors_of
from robot_rl.worlds.ensemble import Ensemble
from robot_rl.worlds.history import AUDIT, CALIBRATION, TRAIN, Array, History, Window, Windows, split_of

BETA = 0.5
MIN_EPISODES = 20
"""Fewer leave three or less to judge the model."""
MIN_SPLIT = 2
"""Episodes that each part needs."""
MIN_WINDOWS = 200
"""Windows that a depth needs for its calibration: a quantile of fewer is noise."""
_MOST = 10_000
"""Episodes of which so few have a window that longer ones are needed."""
_STRAIGHT = 4096
"""Windows of each member behind its linear map."""
_TESTED = 1024
"""Held-out windows behind a choice of weights."""


class Fitter:
    """Takes updates of a model; `state_dict` and `load_state_dict` go on exactly."""

    def __init__(
        self, model: Learned, history: History, config: FitConfig, *, seed: int, train: Array | None = None
    ) -> None:
        """Measures the scales of a model that has not learned yet, and finds the windows.

        Args:
            model: on the device where it is to learn.
            history: real experience, which is split by episode.
            config: how.
            seed: of the batches.
            train: numbers of the episodes to learn from, however few; the first split if None.

        Raises:
            DatasetError: too few episodes, or too short ones.
        """
        if train is None:
            check_enough(history, model.config.stride)
        self.model, self.config = model, config
        self._rng = np.random.default_rng(seed)
        k = model.config.stride
        train = history.split(TRAIN) if train is None else train
        self._one = Windows(history, train, stride=k)
        self._many = Windows(history, train, stride=k, strides=config.ahead)
        held_out = history.split(CALIBRATION)
        test = Windows(history, held_out, stride=k, strides=config.ahead)
        self._tests = test, np.random.default_rng(0).choice(test.rows, min(_TESTED, len(test)), replace=False)
        if float(model.spread_of_states.sum()) == model.state_dim:  # as it was made
            model.fit_scales(history, train)
            self._fit_straight()
        self._optimiser = torch.optim.AdamW(
            model.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        self._best = {name: value.clone() for name, value in model.layers.state_dict().items()}
        self._best_error = np.full(model.config.members, np.inf)
        self.updates = 0

    def run(self, shown: Callable[[int, Mapping[str, float]], None] | None = None) -> dict[str, float]:
        """Takes all updates that are left; returns the held-out error of the members that were kept.

        Args: shown: called with updates and metrics after each look at held-out episodes.
        """
        while self.updates < self.config.updates:
            self.update()
            if shown is not None and self._is_due:
                shown(self.updates, {"held_out_error": float(self._best_error.mean())})
        self.model.layers.load_state_dict(self._best)
        return {"held_out_error": float(self._best_error.mean())}

    def update(self) -> Tensor:
        """Takes one update of all members; returns the loss."""
        config, at = self.config, self.updates / self.config.updates
        is_long = at >= config.ahead_from and not isinstance(self.model, Diffusion)
        for group in self._optimiser.param_groups:
            group["lr"] = config.lr * rate_left(at)
        windows = self._many if is_long else self._one
        shape = (self.model.config.members, config.batch)
        rows = drawn_windows(windows, self._rng, shape, config.recent)
        if isinstance(self.model, Diffusion):
            loss = self._flow_loss(self.model, rows)
        else:
            loss = self._loss(self.model, windows, rows, config.ahead if is_long else 1)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self._optimiser.step()
        self.updates += 1
        if self._is_due:
            self._select()
        return loss.detach()

    @property
    def _is_due(self) -> bool:
        """Whether this is an update after which held-out episodes are looked at."""
        return self.updates % self.config.select_every == 0 or self.updates == self.config.updates

    def _fit_straight(self) -> None:
        """Begins with the linear maps that fit each member's own draw of windows best."""
        model, k = self.model, self.model.config.stride
        shape = (model.config.members, _STRAIGHT)
        rows = self._one.rows[self._rng.integers(0, len(self._one), shape)].reshape(-1)
        window, actions, changes = self._strides(rows)
        if isinstance(model, Diffusion):
            model.fit_straight(window, actions, changes)
            return
        steps = torch.from_numpy(self._rng.integers(1, k + 1, len(rows))).to(model.device)
        x = model.inputs(window, actions, steps)
        change = changes[torch.arange(len(rows), device=model.device), steps - 1]
        model.fit_straight(x.view(*shape, -1), change.view(*shape, -1))

    def _flow_loss(self, model: Diffusion, rows: Array) -> Tensor:
        """Returns the loss of single strides; half of the rows know all actions, the others the first m."""
        (members, batch), k, flat = rows.shape, model.config.stride, rows.reshape(-1)
        steps = self._rng.integers(1, k + 1, len(flat))
        m = torch.from_numpy(np.where(self._rng.random(len(flat)) < 0.5, k, steps)).to(model.device)
        window, actions, changes = self._strides(flat)
        window["state"] = window["state"] + self._noise(window["state"])
        x = model.inputs(window, actions, m).view(members, batch, -1)
        drawn = self._rng.standard_normal((members, batch, k * model.state_dim)).astype(np.float32)
        t = self._rng.random((members, batch, 1)).astype(np.float32)
        noise, share = (torch.from_numpy(part).to(model.device) for part in (drawn, t))
        return model.loss(x, m.view(members, batch), changes.view(members, batch, k, -1), noise, share)

    def _strides(self, rows: Array) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Returns windows, actions (n, k, A), and changes (n, k, S) after 1 to k control steps."""
        model, k = self.model, self.model.config.stride
        window = tensors_of(self._one.at(rows), model.device)
        actions = torch.from_numpy(self._one.actions(rows)).to(model.device)
        later = np.stack([self._one.states(rows, step) for step in range(1, k + 1)], axis=1)
        changes = (torch.from_numpy(later).to(model.device) - window["state"][:, None]) / model.scale
        return window, actions, changes

    def _loss(self, model: Ensemble, windows: Windows, rows: Array, strides: int) -> Tensor:
        k = model.config.stride
        members, batch = rows.shape
        flat = rows.reshape(-1)
        window = tensors_of(windows.at(flat), model.device)
        window["state"] = window["state"] + self._noise(window["state"])
        loss = torch.zeros((), device=model.device)
        for number in range(strides):
            is_last = number == strides - 1
            steps = self._rng.integers(1, k + 1, len(flat)) if is_last else np.full(len(flat), k)
            m = torch.from_numpy(steps).to(model.device)
            actions = torch.from_numpy(windows.actions(flat, number)).to(model.device)
            x = model.inputs(window, actions, m).view(members, batch, -1)
            change, log_std = model.outputs(x, m.view(members, batch))
            target = torch.from_numpy(windows.states(flat, number * k + steps)).to(model.device)
            state = window["state"].view(members, batch, -1)
            needed = (target.view(members, batch, -1) - state) / model.scale
            loss = loss + beta_nll(change, log_std, needed, model.moves) / strides
            after = (state + change * model.scale).flatten(0, 1)
            window = {
                "state": after,
                "past_state": window["state"],
                "past_action": actions,
                "has_past": torch.ones_like(window["has_past"]),
            }
        return loss

    def _noise(self, state: Tensor) -> Tensor:
        drawn = self._rng.standard_normal(tuple(state.shape)).astype(np.float32)
        return (
            torch.from_numpy(drawn).to(state.device) * self.model.scale * self.model.moves * self.config.noise
        )

    @torch.no_grad()
    def _select(self) -> None:
        """Keeps each member's weights if their error on held-out episodes is its least."""
        windows, rows = self._tests
        error = np.sqrt((open_loop(self.model, windows, rows)[0][-1] ** 2).mean(axis=(1, 2)))
        better = error < self._best_error
        now = self.model.layers.state_dict()
        for name, kept in self._best.items():
            mask = torch.from_numpy(better).to(kept.device).view(-1, *[1] * (kept.dim() - 1))
            self._best[name] = torch.where(mask, now[name], kept)
        self._best_error = np.where(better, error, self._best_error)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "rng": self._rng.bit_generator.state,
            "best": self._best,
            "best_error": self._best_error,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._rng.bit_generator.state = state["rng"]
        self._best, self._best_error = dict(state["best"]), np.array(state["best_error"])
        self.updates = int(state["updates"])


def drawn_windows(windows: Windows, rng: np.random.Generator, shape: tuple[int, ...], recent: float) -> Array:
    """Returns rows of that shape in which windows begin; a share, `recent`, is of the newest quarter."""
    rows = windows.rows[rng.integers(0, len(windows), shape)]
    if recent:
        newest = windows.rows[rng.integers(int(len(windows) * 0.75), len(windows), shape)]
        rows = np.where(rng.random(shape) < recent, newest, rows)
    return rows


def rate_left(share: float) -> float:
    """Returns the share of the learning rate after a share of the updates: a cosine, to a hundredth."""
    return 0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * share))


def new_model(config: EnsembleConfig, history: History, *, marks: Sequence[str] = (), seed: int) -> Learned:
    """Returns a model for a history, before it learned anything; `marks` are those that a scene has."""
    marks = marks if config.marks is None else config.marks
    aside = [i for i, name in enumerate(history.meta.state_names) if bodies_in(name) & set(marks)]
    return untrained(config, history.state.shape[1], history.action.shape[1], aside=aside, seed=seed)


def bodies_in(name: str) -> set[str]:
    """Returns the bodies that an element of the state is about: goal and tool of `goal_in_tool.pos.0`."""
    return set(name.partition(".")[0].split("_in_"))


def check_enough(history: History, stride: int, *, curve: str | None = None) -> None:
    """Refuses too few episodes to learn from and to judge by.

    Args:
        history: the episodes.
        stride: control steps of a window.
        curve: what a curve of the error against their number says, if one was drawn.

    Raises:
        DatasetError: says how many there are, and how many are enough.
    """
    counts = {name: len(history.split(name)) for name in (TRAIN, CALIBRATION, AUDIT)}
    lengths = np.maximum(0, history.last - history.first - stride + 1)
    held_out = lengths[history.split(CALIBRATION)]
    windows = int(held_out.sum())
    is_enough = history.num_episodes >= MIN_EPISODES and min(counts.values()) >= MIN_SPLIT
    if is_enough and windows >= MIN_WINDOWS:
        return
    least = fewest(float((held_out if windows else lengths).mean()))
    need = (
        f"{max(least, history.num_episodes + 1)} or more like these"
        if least
        else f"longer ones: few have the {stride} steps of a stride"
    )
    raise DatasetError(
        f"world model: got {history.num_episodes} episodes ({counts[TRAIN]} to learn from, "
        f"{counts[CALIBRATION]} for calibration, {counts[AUDIT]} to judge), need {need}: {MIN_EPISODES} with "
        f"{MIN_SPLIT} in each part, and {MIN_WINDOWS} windows for calibration, got {windows}. Collect more: "
        + (curve or "curve=true draws the error against their number and says how many an error needs")
        + "."
    )


def fewest(windows: float) -> int | None:
    """Returns the smallest number of episodes that is enough, if each has as many windows on average.

    None: not even `_MOST` are.
    """
    parts = [split_of(_MOST, name) for name in (TRAIN, CALIBRATION, AUDIT)]
    of_windows = max(MIN_SPLIT, math.ceil(MIN_WINDOWS / max(windows, 1e-9)))
    wanted = (MIN_SPLIT, of_windows, MIN_SPLIT)
    if any(len(part) < count for part, count in zip(parts, wanted, strict=True)):
        return None
    last = max(part[count - 1] for part, count in zip(parts, wanted, strict=True))
    return max(MIN_EPISODES, int(last) + 1)


def beta_nll(change: Tensor, log_std: Tensor, needed: Tensor, moves: Tensor) -> Tensor:
    """Returns the mean over rows, and over what is predicted, summed over members (M, B, S) -> ()."""
    var = (2.0 * log_std).exp()
    nll = 0.5 * ((needed - change).square() / var + 2.0 * log_std)
    weighted = nll * var.detach() ** BETA * moves
    return weighted.sum(dim=-1).mean(dim=-1).sum() / moves.sum().clamp(min=1.0)


def open_loop(model: Dynamics, windows: Windows, rows: Array) -> tuple[Array, Array, Array]:
    """Plays the windows' actions in every member, from the state in which they begin to the last stride.

    Returns:
        (n, M, B, P) each, after each of n strides, of the P elements that are predicted, in units of `scale`:
        each member's errors; the members' disagreement about what follows that member's state; the deviation
        that it states itself.
    """
    k, members, count = model.config.stride, model.config.members, len(rows)
    moving = model.moves.bool().cpu().numpy()
    scale = model.scale.cpu().numpy()[moving]
    errors, spreads, stds = [], [], []
    first, own = windows.at(rows), np.arange(members)
    window = Window(**{name: np.concatenate([value] * members) for name, value in vars(first).items()})
    m = np.full(members * count, k, np.int64)
    for number in range(windows.strides):
        actions = np.tile(windows.actions(rows, number), (members, 1, 1))
        # Every member sees every member's state, so that the disagreement is that about one state.
        found = model.predict(window, actions, m)
        mean, std, spread = (part.cpu().numpy() for part in (found.mean, found.std, found.spread))
        after = mean.reshape(members, members, count, -1)[own, own]
        std = std.reshape(members, members, count, -1)[own, own]
        target = windows.states(rows, (number + 1) * k)
        errors.append((after - target)[..., moving] / scale)
        spreads.append(spread.reshape(members, count, -1)[..., moving])
        stds.append(std[..., moving] / scale)
        window = Window(
            state=after.reshape(members * count, -1),
            past_state=window.state,
            past_action=actions,
            has_past=np.ones_like(window.has_past),
        )
    return np.stack(errors), np.stack(spreads), np.stack(stds)
