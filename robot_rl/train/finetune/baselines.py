"""Baselines without pictures and gradients: a policy that is worth its training beats them.

    mean action      the mean of all training actions
    present joints   the arm stays where it is
    last action      the last command is repeated
    ridge            a linear map of state, velocities and last action

All are fitted on the training episodes. The settings of the ridge regression are chosen by leaving out a
part of the training episodes at a time. Each is a linear map, and a policy that `robot-rl evaluate` can play.
N remembered moments, B queries, F features, H chunk length, A action dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.data.episodes import EpisodesMeta
from robot_rl.policies.linear import LinearPolicy
from robot_rl.train.finetune.data import DemoData
from robot_rl.train.finetune.errors import Predict
from robot_rl.train.finetune.neighbour import MAX_MOMENTS
from robot_rl.train.finetune.past import Known, Past, names_of

Array = NDArray[Any]
Origin = Literal["nothing", "present joints", "last action"]

LAGS = (1, 4)
"""Control steps over which velocities are differences."""
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Of the ridge, against features of variance 1."""
MAX_PARTS = 8
"""Parts that the training episodes are divided into, to leave out each in turn."""
MAX_QUERIES = 2000
"""Training moments that the choice is made on, evenly spread."""


@dataclass(frozen=True, kw_only=True)
class RidgeChoice:
    """How the regression is done."""

    strength: float
    sees_action: bool
    """The last action and its velocities are features, in addition to the state and its velocities."""
    origin: Origin
    """What the predicted distances are from."""
    error: float
    """Of this choice on the training episodes, a part of them left out in turn; normalised."""


def past_of(data: DemoData) -> Past:
    """Returns what the baselines may know; the mean action stands for one before the first."""
    return Past(data.dataset, lags=LAGS, first_action=mean_action(data))


def mean_action(data: DemoData) -> Array:
    """Returns the mean over all steps of the training episodes, (A,)."""
    starts, ends = data.dataset.episode_starts, data.dataset.episode_ends
    actions = data.dataset.columns["action"]
    parts = [actions[starts[episode] : ends[episode]] for episode in data.split.train]
    return np.concatenate(parts).mean(axis=0, dtype=np.float64)


def seen_meta(data: DemoData) -> EpisodesMeta:
    """Returns what the baselines are for: their state is `Known.inputs`, name by name."""
    meta = data.dataset.meta
    names = names_of(meta.state_names, meta.action_names, lags=LAGS, last_action=True)
    return replace(meta, state_names=names)


def simple_baselines(data: DemoData, past: Past, *, horizon: int) -> dict[str, LinearPolicy]:
    """Returns the policies that hold one action for the whole chunk."""
    size, num_actions = past.width(last_action=True), past.action.shape[1]
    nothing = np.zeros((size, horizon, num_actions))
    found = {
        "mean action": _policy(nothing, np.tile(mean_action(data), (horizon, 1))),
        "last action": _policy(_held(past.width(last_action=False), nothing.shape)),
    }
    if past.same_names:
        found["present joints"] = _policy(_held(0, nothing.shape))
    return found


def predictor(policy: LinearPolicy, past: Past) -> Predict:
    """Returns a policy's predictions of chunks of the dataset."""
    return lambda batch: _chunks(policy, past.of(batch))


class Ridge:
    """Predicts chunks by a linear map, fitted to the training episodes with a penalty on its squares."""

    def __init__(
        self, known: Known, chunks: Array, valid: Array, episode: Array, action_std: Array, *, joints: bool
    ) -> None:
        """Fits every choice without each part in turn, and the best one to all episodes.

        Args:
            known: at N moments of the training episodes.
            chunks: (N, H, A), that followed; the last action held beyond the end of an episode.
            valid: (N, H), False beyond the end.
            episode: (N,)
            action_std: (A,), what errors are divided by.
            joints: the state begins with the joints of the action.
        """
        self._std = action_std
        origins: tuple[Origin, ...] = ("nothing", "last action", "present joints")
        origins = origins if joints else origins[:2]
        found: list[RidgeChoice] = []
        for sees_action, origin in itertools.product((False, True), origins):
            features = _standardised(known.inputs(last_action=sees_action))[0]
            targets = chunks - _origin(known, origin, chunks.shape[-1])
            errors = self._left_out(features, targets.reshape(len(targets), -1), valid, episode)
            found += [
                RidgeChoice(strength=strength, sees_action=sees_action, origin=origin, error=error)
                for strength, error in zip(STRENGTHS, errors, strict=True)
            ]
        self.choice = min(found, key=lambda choice: choice.error)
        self.policy = self._fitted(known, chunks)
        """It sees all of `Known.inputs`, the last action included."""

    def predict(self, known: Known) -> Array:
        """Returns chunks (B, H, A)."""
        return _chunks(self.policy, known)

    def _fitted(self, known: Known, chunks: Array) -> LinearPolicy:
        """Solves for the weights of the choice, for features that are not standardised."""
        choice, shape = self.choice, chunks.shape[1:]
        features, centre, scale = _standardised(known.inputs(last_action=choice.sees_action))
        targets = chunks - _origin(known, choice.origin, shape[-1])
        moments = _moments(features, targets.reshape(len(targets), -1))
        weights = _solved(*moments, strength=choice.strength)
        scaled = weights[:-1] / scale[:, None]
        offset = (weights[-1] - centre @ scaled).reshape(shape)
        weight = scaled.reshape(-1, *shape)
        behind = shape[-1] * (1 + len(LAGS))  # the last action and its changes
        if not choice.sees_action:
            weight = np.concatenate([weight, np.zeros((behind, *shape))])
        starts = {"present joints": 0, "last action": len(weight) - behind}
        if choice.origin in starts:
            weight = weight + _held(starts[choice.origin], weight.shape)
        return _policy(weight, offset)

    def _left_out(self, features: Array, targets: Array, valid: Array, episode: Array) -> list[float]:
        """Returns the error for every strength, each part of the episodes predicted from the others."""
        place = np.unique(episode, return_inverse=True)[1] % MAX_PARTS
        folds = [np.flatnonzero(place == part) for part in np.unique(place)]
        parts = [_moments(features[fold], targets[fold]) for fold in folds]
        squares, products = (np.sum(sums, axis=0) for sums in zip(*parts, strict=True))
        every = max(1, len(features) // MAX_QUERIES)
        totals, steps = np.zeros(len(STRENGTHS)), 0
        for fold, (own_squares, own_products) in zip(folds, parts, strict=True):
            asked = fold[::every]
            steps += int(valid[asked].sum())
            for at, strength in enumerate(STRENGTHS):
                weights = _solved(squares - own_squares, products - own_products, strength=strength)
                apart = np.abs(_with_one(features[asked]) @ weights - targets[asked])
                scaled = apart.reshape(*valid[asked].shape, -1) / self._std
                totals[at] += (scaled.mean(axis=-1) * valid[asked]).sum()
        return (totals / max(1, steps)).tolist()


def fit_ridge(data: DemoData, past: Past, action_std: Array, *, horizon: int) -> Ridge:
    """Reads the training episodes, of many every so many steps, and fits the regression to them."""
    episodes = data.split.train
    stride = max(1, int(data.dataset.lengths()[list(episodes)].sum()) // MAX_MOMENTS)
    batches = [
        batch
        for number in episodes
        for batch in data.batches([number], horizon=horizon, stride=stride, pictures=False)
    ]
    found = [past.of(batch) for batch in batches]
    return Ridge(
        Known(**{name: np.concatenate([vars(one)[name] for one in found]) for name in vars(found[0])}),
        np.concatenate([batch.actions.cpu().numpy() for batch in batches]),
        np.concatenate([batch.valid.cpu().numpy() for batch in batches]),
        np.concatenate([np.asarray(batch.source["episode"]) for batch in batches]),
        action_std,
        joints=past.same_names,
    )


def _chunks(policy: LinearPolicy, known: Known) -> Array:
    seen = torch.from_numpy(known.inputs(last_action=True))
    return policy.sample(policy.encode({"state": seen})).actions.numpy()


def _policy(weight: Array, offset: Array | None = None) -> LinearPolicy:
    offset = np.zeros(weight.shape[1:]) if offset is None else offset
    return LinearPolicy(torch.from_numpy(weight), torch.from_numpy(offset))


def _held(start: int, shape: tuple[int, ...]) -> Array:
    """Returns weights (S, H, A) that repeat the A elements of the state from `start` on."""
    weight, number = np.zeros(shape), np.arange(shape[-1])
    weight[start + number, :, number] = 1.0
    return weight


def _origin(known: Known, origin: Origin, num_actions: int) -> Array:
    """Returns what distances are from, (B, 1, A)."""
    if origin == "last action":
        return known.last_action[:, None]
    joints = known.state[:, None, :num_actions]
    return joints if origin == "present joints" else np.zeros((1, 1, num_actions))


def _standardised(features: Array) -> tuple[Array, Array, Array]:
    """Returns features of mean 0 and variance 1, their means and their scales; constant ones stay 0."""
    centre, spread = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
    scale = np.where(spread > 1e-6, spread, 1.0)
    return (features - centre) / scale, centre, scale


def _with_one(features: Array) -> Array:
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def _moments(features: Array, targets: Array) -> tuple[Array, Array]:
    """Returns the sums that a fit needs: (F + 1, F + 1) and (F + 1, H A)."""
    inputs = _with_one(features)
    return inputs.T @ inputs, inputs.T @ targets


def _solved(squares: Array, products: Array, *, strength: float) -> Array:
    """Returns the weights (F + 1, H A); the offset, which is last, is not penalised."""
    count = squares[-1, -1]
    penalty = np.full(len(squares), strength * count)
    penalty[-1] = 0.0
    return np.linalg.solve(squares + np.diag(penalty), products)
