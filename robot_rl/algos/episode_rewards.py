"""Rewards beyond success, computed from the episodes themselves.

    ProgressReward  a score of the whole episode   SRPO (Fei et al. 2025)
    ProcessReward   a reward of every decision     VLA-RL (Lu et al. 2025)

Both read the policy's own features of the observation (the normalised state, then those of cameras)
where the papers have pretrained models of video and language. N episodes, T decisions, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robot_rl.algos.chain_ppo import ChainPPOConfig
from robot_rl.algos.critics import value_net
from robot_rl.algos.learner import PolicyModule, restore, saved
from robot_rl.algos.optim import Optimiser
from robot_rl.algos.returns import progress_score, td_target
from robot_rl.data.rollout import EpisodeRollout

_FITS = 20  # steps of the classifier for each rollout, on all of its observations


class ProgressReward:
    """Scores a failure by how near its end is to the end of a success of the same rollout.

    See `returns.progress_score`. Deviation: SRPO embeds the film of the whole episode by V-JEPA 2; here
    it is the features of the last observation. Its reward coefficient has no meaning after the
    normalisation over a group.
    """

    def __init__(self, policy: PolicyModule) -> None:
        self._policy = policy

    @torch.no_grad()
    def judge(self, rollout: EpisodeRollout) -> EpisodeRollout:
        """Returns the episodes with their scores."""
        last = rollout.valid.sum(dim=1) - 1
        rows = torch.arange(len(last), device=last.device)
        final = {key: value[rows, last] for key, value in rollout.next_obs.items()}
        features = self._policy.encode(final)["features"]
        return replace(rollout, score=progress_score(rollout.success, features))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class ProcessReward:
    """Adds to each decision what it did for the chance of success: bootstrap * p(s') - p(s).

    p is a classifier of observations, trained to tell those of successes from those of failures in
    the rollouts that came before; a potential, so that the best policy stays the best (Ng et al. 1999).
    Deviation: VLA-RL finetunes a vision-language model on milestones that are cut from demonstrations.
    """

    def __init__(self, policy: PolicyModule, cfg: ChainPPOConfig, seed: int, *, device: str = "cpu") -> None:
        """Args: cfg: whose sizes and rate are those of the value, and of this net too."""
        self._policy = policy
        self._net = value_net(policy.feature_dim, cfg, seed).to(device)
        self._optimiser = Optimiser(self._net.parameters(), lr=cfg.critic_lr, grad_clip=cfg.grad_clip)

    @torch.no_grad()
    def judge(self, rollout: EpisodeRollout) -> EpisodeRollout:
        """Returns the episodes with their rewards by what was learned so far, then learns from them."""
        shape = rollout.valid.shape
        features, next_features = (
            self._policy.encode({key: value.flatten(0, 1) for key, value in of.items()})["features"]
            for of in (rollout.obs, rollout.next_obs)
        )
        now, then = (self.chance(of).view(shape) for of in (features, next_features))
        reward = (td_target(rollout.reward, rollout.bootstrap, then) - now) * rollout.valid
        made = rollout.valid.flatten()
        label = rollout.success.to(reward.dtype).unsqueeze(1).expand(shape).flatten()
        for _ in range(_FITS):
            self._fit(features[made], label[made])
        return replace(rollout, reward=reward, score=reward.sum(dim=1))

    def chance(self, features: Tensor) -> Tensor:
        """Returns p, (B,), of features (B, F)."""
        return self._net.answer(features)[0].flatten().sigmoid()

    def _fit(self, features: Tensor, label: Tensor) -> None:
        """Takes a step down the cross entropy, whose derivative by the logit is p - label."""
        logit_NBO, path = self._net.answer(features)
        towards = (logit_NBO.flatten().sigmoid() - label) / len(label)
        self._optimiser.apply(self._net.gradients(towards.view_as(logit_NBO), path))

    def state_dict(self) -> dict[str, Any]:
        return saved({"net": self._net, "optimiser": self._optimiser})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore({"net": self._net, "optimiser": self._optimiser}, state)
