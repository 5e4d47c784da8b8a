"""Q as progress: a critic of the demonstrations, and which of their frames to clone (GR-RL, Li et al. 2025).

    y = sum_{i<m} gamma^i r_{t+i} + gamma^m Q'(s_{t+m}, a_{t+m}, ...)    nothing after the episode's end

with r = 1 at the last step of an episode that succeeds and 0 elsewhere, so that the value of a chunk is
gamma^(steps to go) times the chance of success, in [0, 1], and rises along an episode that goes well. The
critics are distributional. Frames whose chunk loses more than a threshold of it are not cloned.
Deviations: an episode is valued by critics that did not learn from it, as others remember how each of a
few hundred episodes ended, and see no fall; the next chunk is the demonstrator's own, not that of an actor
learned by TD3+BC; retries in the demonstrations are not marked, failures are kept as they are; the end of a
failure is worth 0, whatever ended it; frames of little progress can be left out as well.
N critics, B batch, H chunk length, A action dim, T frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from robot_rl.algos.config.cloning import FilterConfig, ProgressConfig
from robot_rl.algos.critics import Critics
from robot_rl.algos.heads import make_head
from robot_rl.algos.learner import Learner
from robot_rl.algos.optim import METRICS_EVERY, Optimiser
from robot_rl.core.errors import DatasetError
from robot_rl.data.demos import ChunkSampler, Episodes
from robot_rl.data.normalize import Normaliser

Array = NDArray[Any]

_ROWS = 4096
"""Chunks valued at once."""


@dataclass
class ProgressBatch:
    """Chunks of demonstrations, and those that followed them."""

    obs: Tensor
    """(B, D), the state."""
    action: Tensor
    """(B, H, A); beyond the end of the episode its last action repeats."""
    reward: Tensor
    """(B,): gamma^i of the step i of the chunk at which the episode succeeded, or 0."""
    bootstrap: Tensor
    """(B,): gamma^H, or 0 where the episode ended in the chunk."""
    next_obs: Tensor
    next_action: Tensor
    fold: int
    """The part of the episodes that these are not of."""

    def to(self, device: str) -> ProgressBatch:
        tensors = {name: value.to(device) for name, value in vars(self).items() if name != "fold"}
        return ProgressBatch(**tensors, fold=self.fold)


class ProgressSampler:
    """Draws chunks that begin at any step of the demonstrations but for those of one part, drawn too."""

    def __init__(self, episodes: Episodes, horizon: int, cfg: ProgressConfig) -> None:
        """Args: horizon: H.

        Raises:
            DatasetError: fewer episodes than parts.
        """
        if episodes.num_episodes < cfg.folds:
            raise DatasetError(
                f"demos.filter: got {episodes.num_episodes} episodes for algorithm.folds={cfg.folds}, "
                "allowed: as many episodes as folds, or more"
            )
        self._chunks = ChunkSampler(episodes, horizon)
        part = episodes.episode_index % cfg.folds
        self._rows = [np.flatnonzero(part != fold) for fold in range(cfg.folds)]
        to_go = episodes.bounds()[1][episodes.episode_index] - np.arange(len(part))
        ends, success = to_go <= horizon, episodes.episode_success()[episodes.episode_index]
        self._next = np.where(ends, 0, np.arange(len(part)) + horizon)
        reward = cfg.gamma_step ** (to_go - 1.0) * (ends & success)
        self._reward = torch.from_numpy(reward.astype(np.float32))
        self._bootstrap = torch.from_numpy((cfg.gamma_step**horizon * ~ends).astype(np.float32))

    def sample(self, batch: int, rng: np.random.Generator) -> ProgressBatch:
        """Returns B chunks."""
        fold = int(rng.integers(len(self._rows)))
        return self.rows(rng.choice(self._rows[fold], batch), fold)

    def rows(self, rows: Array, fold: int) -> ProgressBatch:
        """Returns the chunks that begin at the given steps."""
        now, after = self._chunks.rows(rows), self._chunks.rows(self._next[rows])
        return ProgressBatch(
            obs=now.obs["state"],
            action=now.actions,
            reward=self._reward[rows],
            bootstrap=self._bootstrap[rows],
            next_obs=after.obs["state"],
            next_action=after.actions,
            fold=fold,
        )


class ProgressCritic(Learner):
    """Learns the value of the demonstrator's chunks by TD, once without each part of the episodes."""

    def __init__(
        self, cfg: ProgressConfig, *, normaliser: Normaliser, horizon: int, seed: int, device: str = "cpu"
    ) -> None:
        """Args: normaliser: of the demonstrations' state and actions. horizon: H. seed: of the weights."""
        super().__init__()
        self._cfg, self._normaliser, self._horizon = cfg, normaliser.to(device), horizon
        self._generator = Generator().manual_seed(seed)
        self._critics = [
            Critics(
                normaliser.feature_dims["state"],
                horizon * normaliser.action_dim,
                num=cfg.num,
                width=cfg.width,
                depth=cfg.depth,
                head=make_head("c51", num=cfg.num, atoms=cfg.atoms, low=0.0, high=1.0),
                matmul=cfg.matmul,
                generator=self._generator,
            ).to(device)
            for _ in range(cfg.folds)
        ]
        self._targets = [critics.target() for critics in self._critics]
        self._optimisers = [
            Optimiser(critics.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay, grad_clip=1.0)
            for critics in self._critics
        ]

    @torch.no_grad()
    def update(self, batch: ProgressBatch) -> Mapping[str, Tensor]:
        """Takes one step of the batch's critics; the target is the mixture of their targets' answers."""
        critics, slow = self._critics[batch.fold], self._targets[batch.fold]
        following = self._inputs(batch.next_obs, batch.next_action)
        next_BD = slow.distribution(*following, list(range(self._cfg.num)), "mean")
        target = critics.head.target(
            batch.reward, batch.bootstrap, next_BD, torch.zeros_like(batch.reward), self._generator
        )
        value_NB, gradients = critics.td_gradients(*self._inputs(batch.obs, batch.action), target)
        self._optimisers[batch.fold].apply(gradients)
        slow.follow_online(critics, self._cfg.tau)
        self._updates += 1
        if self._updates % METRICS_EVERY:
            return {}
        mean_B = critics.head.mean(target)
        return {"value": mean_B.mean(), "td_error": (value_NB - mean_B).square().mean().sqrt()}

    @torch.no_grad()
    def progress(self, episodes: Episodes) -> Array:
        """Returns the value (T,) of the chunk at every frame, by critics that have not seen its episode."""
        chunks, device = ChunkSampler(episodes, self._horizon), self._normaliser.action_centre.device
        part, found = episodes.episode_index % self._cfg.folds, np.empty(len(chunks), np.float32)
        for fold, critics in enumerate(self._critics):
            rows = np.flatnonzero(part == fold)
            for start in range(0, len(rows), _ROWS):
                some = rows[start : start + _ROWS]
                batch = chunks.rows(some)
                inputs = self._inputs(batch.obs["state"].to(device), batch.actions.to(device))
                found[some] = critics.q(*inputs).mean(dim=0).cpu().numpy()
        return found

    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns nothing: it has no policy."""
        return {}

    def _parts(self) -> Mapping[str, Any]:
        return {"critics": self._critics, "targets": self._targets, "optimisers": self._optimisers}

    def _inputs(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return self._normaliser.obs({"state": state})["state"], self._normaliser.action(action).flatten(1)


def kept(config: FilterConfig, progress: Array, episode_index: Array, horizon: int) -> Array:
    """Returns which frames (T,) are cloned; see `largest_fall`."""
    fall = largest_fall(progress, episode_index, horizon)
    return (fall <= config.max_fall) & (progress >= config.min_progress)


def largest_fall(progress: Array, episode_index: Array, horizon: int) -> Array:
    """Returns by how much (T,) the progress falls, from any frame to a later one, within H frames after each.

    Args:
        progress: (T,), along whole episodes.
        episode_index: (T,), ascending; the frames after an end do not count.
        horizon: H; the frames t to t + H are looked at.
    """
    last = np.searchsorted(episode_index, episode_index, side="right") - 1
    highest, fall = progress.copy(), np.zeros_like(progress)
    for ahead in range(1, horizon + 1):
        later = progress[np.minimum(np.arange(len(progress)) + ahead, last)]
        fall = np.maximum(fall, highest - later)
        highest = np.maximum(highest, later)
    return fall
