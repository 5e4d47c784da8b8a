"""PPO of a Gaussian policy from nothing: one action a control step, thousands of envs at once.

Schulman et al. 2017, as rsl_rl does it (Schwarke et al. 2025; Rudin et al. 2021): large rollouts, few
epochs, a learning rate that follows the KL, a value that may read more than the policy (asymmetric
actor-critic, Pinto et al. 2018), and a scale of the observations that goes on with the rollouts.
Deviations: a time limit bootstraps from the value of the final observation (rsl_rl: of the one before), every
epoch has its own order, and the scale stays as it is within an update, so that the first ratio is 1.

Derivatives of the surrogate are written out; autograd goes through the policy's network alone. Nothing is
read back from the device: the learning rate and all metrics are tensors.
N envs, T control steps, B = T N rows, F features, P elements of the privileged state, A action dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Generator, Tensor

from robot_rl.algos.config.on_policy import PlainPPOConfig
from robot_rl.algos.critics import value_net
from robot_rl.algos.learner import GaussianModule, Learner
from robot_rl.algos.losses import value_error
from robot_rl.algos.optim import Optimiser
from robot_rl.algos.returns import ReturnScale, gae
from robot_rl.algos.seen import Seen
from robot_rl.core.policy import Encoded
from robot_rl.data.rollout import StepRollout

_REWARD_LIMIT = 10.0  # of a scaled reward
_RATE_STEP = 1.5  # of the rule for the learning rate (rsl_rl)
_METRICS = ("loss", "kl", "clipped", "value", "value_loss", "lr")


@dataclass
class Steps:
    """Rows of a rollout with what they were worth."""

    features: Tensor
    """(B, F)"""
    seen: Tensor
    """(B, F + P): what the value reads; the features themselves where P is 0."""
    drawn: Tensor
    """(B, A)"""
    mean: Tensor
    """(B, A): of the policy that acted."""
    log_prob: Tensor
    """(B,): of what was drawn, by that policy."""
    advantage: Tensor
    """(B,): standardised over the rollout."""
    value: Tensor
    """(B,): before the updates."""
    target: Tensor
    """(B,): of the value."""

    def __len__(self) -> int:
        return len(self.advantage)

    def rows(self, index: Tensor | slice) -> Self:
        """Returns some rows."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        picked = {name: value[index] for name, value in found.items() if name != "seen"}
        is_same = self.seen is self.features
        return type(self)(**picked, seen=picked["features"] if is_same else self.seen[index])

    def shuffled(self, minibatches: int, generator: Generator) -> Iterator[Self]:
        """Yields all rows in a new order: they are moved once, and the minibatches are slices."""
        order = torch.randperm(len(self), generator=generator, device=self.advantage.device)
        moved = self.rows(order)
        edges = [len(self) * i // minibatches for i in range(minibatches + 1)]
        for first, last in itertools.pairwise(edges):
            yield moved.rows(slice(first, last))


class PlainPPO(Learner):
    """Learns a Gaussian policy, its scale of observations, and a value; each rollout is used once."""

    def __init__(
        self, policy: GaussianModule, cfg: PlainPPOConfig, seed: int, *, num_envs: int, observed: int
    ) -> None:
        """Starts from the policy's present weights and scale, which the updates change in place.

        Args:
            policy: acts; its normaliser has the privileged state, too, where the value reads it.
            cfg: how.
            seed: of the value's first weights, and of the order of the rows.
            num_envs: N.
            observed: rows behind the normaliser's present scale.
        """
        super().__init__()
        self._policy, self._cfg = policy, cfg
        self._network = [weight for weight in policy.parameters() if weight is not policy.log_std]
        device = self._network[0].device
        self._seen = Seen(policy.normaliser if cfg.privileged else None, device)
        self._value = value_net(policy.feature_dim + self._seen.more, cfg, seed).to(device)
        learned = [*self._network, *([policy.log_std] if cfg.learns_std else ())]
        self._actor_optimiser, self._critic_optimiser = (
            Optimiser(part, lr=cfg.lr, weight_decay=cfg.weight_decay, grad_clip=cfg.grad_clip)
            for part in (learned, self._value.in_order)
        )
        self._lr = torch.tensor(cfg.lr, device=device)
        self._generator = Generator(device).manual_seed(seed)
        self._scale = ReturnScale(num_envs, device=device)
        self._moments = policy.normaliser.moments(observed)

    @torch.no_grad()
    def update(self, rollout: StepRollout) -> Mapping[str, Tensor]:
        """Takes all epochs over a rollout; then the scale of the observations goes on with it."""
        cfg = self._cfg
        steps = self.prepare(rollout)
        rows = [
            self.update_rows(part, rollout.std)
            for _ in range(cfg.epochs)
            for part in steps.shuffled(cfg.minibatches, self._generator)
        ]
        for name, moments in self._moments.items():
            if name in rollout.obs:
                moments.add(rollout.obs[name][:-1].flatten(0, 1))
        self._policy.normaliser.follow(self._moments)
        metrics = dict(zip(_METRICS, torch.stack(rows).mean(dim=0), strict=True))
        unexplained = (steps.target - steps.value).var() / steps.target.var().clamp_min(1e-8)
        self._updates += 1
        return {**metrics, "std": self._policy.log_std.exp().mean(), "unexplained": unexplained}

    @torch.no_grad()
    def prepare(self, rollout: StepRollout) -> Steps:
        """Returns the rows of a rollout with their advantages and targets."""
        cfg = self._cfg
        features, seen = self._read(rollout.obs)
        value = self._values(seen)
        advantage, target = self._worth(rollout, value)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        deviation = (rollout.drawn - rollout.mean) / rollout.std
        log_prob = _log_density(deviation, rollout.std)
        features = features[:-1].flatten(0, 1)
        return Steps(
            features=features,
            seen=seen[:-1].flatten(0, 1) if cfg.privileged else features,
            drawn=rollout.drawn.flatten(0, 1),
            mean=rollout.mean.flatten(0, 1),
            log_prob=log_prob.flatten(),
            advantage=advantage.flatten(),
            value=value[:-1].flatten(),
            target=target.flatten(),
        )

    def _worth(self, rollout: StepRollout, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns advantages and targets (T, N), given the values (T + 1, N) of what was observed."""
        cfg, reward = self._cfg, rollout.reward
        ended = rollout.terminated | rollout.truncated
        next_value = value[1:].clone()
        count = rollout.num_final
        if count:
            _, final = self._read({name: part[:count] for name, part in rollout.final_obs.items()})
            next_value.view(-1).index_copy_(0, rollout.final_row[:count], self._values(final))
        if cfg.scale_reward:
            discount = torch.full_like(reward, cfg.gamma_step)
            std = self._scale.add(reward.T, discount.T, ended.T)
            reward = (reward / std).clamp(-_REWARD_LIMIT, _REWARD_LIMIT)
        advantage, target = gae(
            reward.T,
            cfg.gamma_step * ~rollout.terminated.T,
            value[:-1].T,
            next_value.T,
            ended.T,
            lam=cfg.lam,
            gamma_step=cfg.gamma_step,
        )
        return advantage.T, target.T

    def _read(self, obs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the features, and what the value reads."""
        features = self._policy.encode(dict(obs))["features"]
        return features, self._seen(features, obs)

    def _values(self, seen: Tensor) -> Tensor:
        return self._value.answer(seen.flatten(0, -2))[0].view(seen.shape[:-1])

    @torch.no_grad()
    def update_rows(self, steps: Steps, old_std: Tensor) -> Tensor:
        """Takes one step of policy and value along a minibatch; returns `_METRICS`."""
        cfg, policy = self._cfg, self._policy
        with torch.enable_grad():
            chunk, std = policy.moments(Encoded({"features": steps.features}))
        mean, std = chunk.detach()[:, 0], std.detach()
        deviation = (steps.drawn - mean) / std
        ratio = (_log_density(deviation, std) - steps.log_prob).exp()
        gain, limit = steps.advantage * ratio, cfg.clip
        # The surrogate is the smaller of the gain and the clipped one: where that is clipped, it is flat.
        is_clipped = torch.where(steps.advantage > 0, ratio > 1.0 + limit, ratio < 1.0 - limit)
        to_log_prob = torch.where(is_clipped, 0.0, gain).mul_(-1.0 / len(steps)).unsqueeze(1)
        to_mean = (to_log_prob * deviation / std).unsqueeze(1)
        gradients = [*torch.autograd.grad(chunk, self._network, grad_outputs=to_mean)]
        if cfg.learns_std:
            # The entropy of a Gaussian is the sum of log std, and a constant.
            gradients.append((to_log_prob * (deviation.square() - 1.0)).sum(dim=0) - cfg.entropy_weight)
        out_NBO, path = self._value.answer(steps.seen)
        value = out_NBO.flatten()
        error, towards = value_error(value, steps.value, steps.target, cfg.value_clip)
        to_value = self._value.gradients(towards.view_as(out_NBO), path)
        kl = _kl(steps.mean, old_std, mean, std)
        if cfg.target_kl is not None:
            self._lr.copy_(followed_lr(self._lr, kl, cfg.target_kl, cfg.lr_range))
        self._actor_optimiser.apply(gradients, lr=self._lr)
        self._critic_optimiser.apply(to_value, lr=self._lr)
        surrogate = torch.where(is_clipped, steps.advantage * ratio.clamp(1.0 - limit, 1.0 + limit), gain)
        clipped, squared = is_clipped.float().mean(), error.square().mean()
        return torch.stack([-surrogate.mean(), kl, clipped, value.mean(), squared, self._lr])

    def policy_weights(self) -> Mapping[str, Tensor]:
        return self._policy.state_dict()

    def _parts(self) -> Mapping[str, Any]:
        return {
            "policy": self._policy,
            "value": self._value,
            "actor_optimiser": self._actor_optimiser,
            "critic_optimiser": self._critic_optimiser,
            "lr": self._lr,
            "generator": self._generator,
            "scale": self._scale,
            "moments": self._moments,
        }


def followed_lr(lr: Tensor, kl: Tensor, target_kl: float, lr_range: tuple[float, float]) -> Tensor:
    """Returns the learning rate after a minibatch of that KL (rsl_rl): all are tensors of the device.

    Divided by 1.5 where the KL is above twice the target, multiplied by 1.5 where it is below half of it, but
    not at 0: there the policy has not moved yet.
    """
    is_slow = (kl < 0.5 * target_kl) & (kl > 0.0)
    slower, faster = lr / _RATE_STEP, lr * _RATE_STEP
    return torch.where(kl > 2.0 * target_kl, slower, torch.where(is_slow, faster, lr)).clamp(*lr_range)


def _log_density(deviation: Tensor, std: Tensor) -> Tensor:
    """Returns the log-density (...) of draws, given (drawn - mean) / std (..., A)."""
    constant = std.log().sum() + 0.5 * len(std) * math.log(2.0 * math.pi)
    return -0.5 * deviation.square().sum(dim=-1) - constant


def _kl(old_mean: Tensor, old_std: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns the mean over rows of KL(old || new) of Gaussians (B, A)."""
    moved = ((old_mean - mean) / std).square().mean(dim=0)
    return ((std / old_std).log() + 0.5 * ((old_std / std).square() + moved - 1.0)).sum()
