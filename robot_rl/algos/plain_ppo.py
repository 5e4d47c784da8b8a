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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

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
    """(B,): standardised over all rollouts of an update."""
    value: Tensor
    """(B,): before the updates."""
    target: Tensor
    """(B,): of the value."""

    def __len__(self) -> int:
        return len(self.advantage)

    @property
    def unexplained(self) -> Tensor:
        """Share of the variance of the targets that the value before the updates does not explain."""
        return (self.target - self.value).var() / self.target.var().clamp_min(1e-8)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Returns the rows of several, one after another."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(cls) if field.name != "seen"]
        whole = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        is_same = parts[0].seen is parts[0].features
        seen = whole["features"] if is_same else torch.cat([part.seen for part in parts])
        return cls(**whole, seen=seen)

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


class Measured(NamedTuple):
    """What an update shows of a minibatch of B rows."""

    kl: Tensor
    """() of the policy before the step from the one that acted."""
    gain: Tensor
    """(B,): advantage times ratio, before it is clipped."""
    is_clipped: Tensor
    """(B,) bool"""
    error: Tensor
    """(B,): of the value."""


class PlainPPO(Learner):
    """Learns a Gaussian policy, its scale of observations, and a value; each rollout is used once."""

    def __init__(self, policy: GaussianModule, cfg: PlainPPOConfig, seed: int, *, observed: int) -> None:
        """Starts from the policy's present weights and scale, which the updates change in place.

        Args:
            policy: acts; its normaliser has the privileged state, too, where the value reads it.
            cfg: how.
            seed: of the value's first weights, and of the order of the rows.
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
        self._scale = ReturnScale(device=device)
        self._moments = policy.normaliser.moments(observed)

    @torch.no_grad()
    def update(self, rollouts: Sequence[StepRollout]) -> Mapping[str, Tensor]:
        """Takes all epochs over rollouts; then the scale of the observations goes on with them.

        Args: rollouts: of the present weights, one of each source.
        """
        cfg, std = self._cfg, rollouts[0].std
        steps = self.prepare(rollouts)
        for _ in range(cfg.epochs - 1):
            for part in steps.shuffled(cfg.minibatches, self._generator):
                self.update_rows(part, std)
        last = steps.shuffled(cfg.minibatches, self._generator)
        rows = [self.update_rows(part, std) for part in last]
        for name, moments in self._moments.items():
            for rollout in rollouts:
                if name in rollout.obs:
                    moments.add(rollout.obs[name][:-1].flatten(0, 1))
        self._policy.normaliser.follow(self._moments)
        self._updates += 1
        return {**self._metrics(rows), "value": steps.value.mean(), "unexplained": steps.unexplained}

    def _metrics(self, last: Sequence[Measured]) -> dict[str, Tensor]:
        """Returns the metrics of the minibatches of the last epoch."""
        return {
            "kl": torch.stack([part.kl for part in last]).mean(),
            "gain": torch.cat([part.gain for part in last]).mean(),
            "clipped": torch.cat([part.is_clipped for part in last]).float().mean(),
            "value_loss": torch.cat([part.error for part in last]).square().mean(),
            "lr": self._lr.clone(),
            "std": self._policy.log_std.exp().mean(),
        }

    @torch.no_grad()
    def prepare(self, rollouts: Sequence[StepRollout]) -> Steps:
        """Returns the rows of rollouts, one after another, with their advantages and targets."""
        steps = Steps.joined([self._steps_of(rollout) for rollout in rollouts])
        steps.advantage = (steps.advantage - steps.advantage.mean()) / (steps.advantage.std() + 1e-8)
        return steps

    def _steps_of(self, rollout: StepRollout) -> Steps:
        """Returns the rows of a rollout; advantages are not standardised yet."""
        features, seen = self._read(rollout.obs)
        value = self._values(seen)
        advantage, target = self._worth(rollout, value)
        deviation = (rollout.drawn - rollout.mean) / rollout.std
        log_prob = _log_density(deviation.square(), rollout.std)
        features = features[:-1].flatten(0, 1)
        return Steps(
            features=features,
            seen=seen[:-1].flatten(0, 1) if self._cfg.privileged else features,
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
            std = self._scale.add(reward.T, discount.T, ended.T, actor=rollout.actor)
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
    def update_rows(self, steps: Steps, old_std: Tensor) -> Measured:
        """Takes one step of policy and value along a minibatch."""
        cfg, policy = self._cfg, self._policy
        with torch.enable_grad():
            chunk, std = policy.moments(Encoded({"features": steps.features}))
        mean, std = chunk.detach()[:, 0], std.detach()
        deviation = (steps.drawn - mean) / std
        squared = deviation.square()
        ratio = (_log_density(squared, std) - steps.log_prob).exp()
        gain, limit = steps.advantage * ratio, cfg.clip
        # The surrogate is the smaller of the gain and the clipped one: where that is clipped, it is flat.
        is_clipped = torch.where(steps.advantage > 0, ratio > 1.0 + limit, ratio < 1.0 - limit)
        to_log_prob = torch.where(is_clipped, 0.0, gain).mul_(-1.0 / len(steps)).unsqueeze(1)
        to_mean = (deviation * to_log_prob).div_(std).unsqueeze(1)
        gradients = [*torch.autograd.grad(chunk, self._network, grad_outputs=to_mean)]
        if cfg.learns_std:
            # The entropy of a Gaussian is the sum of log std, and a constant.
            gradients.append((to_log_prob.T @ (squared - 1.0))[0] - cfg.entropy_weight)
        out_NBO, path = self._value.answer(steps.seen)
        error, towards = value_error(out_NBO.flatten(), steps.value, steps.target, cfg.value_clip)
        to_value = self._value.gradients(towards.view_as(out_NBO), path)
        kl = _kl(steps.mean, old_std, mean, std)
        if cfg.target_kl is not None:
            self._lr.copy_(followed_lr(self._lr, kl, cfg.target_kl, cfg.lr_range))
        self._actor_optimiser.apply(gradients, lr=self._lr)
        self._critic_optimiser.apply(to_value, lr=self._lr)
        return Measured(kl, gain, is_clipped, error)

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


def _log_density(squared: Tensor, std: Tensor) -> Tensor:
    """Returns the log-density (...) of draws, given the squares (..., A) of (drawn - mean) / std."""
    constant = std.log().sum() + 0.5 * len(std) * math.log(2.0 * math.pi)
    return torch.sub(-constant, squared.sum(dim=-1), alpha=0.5)


def _kl(old_mean: Tensor, old_std: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns the mean over rows of KL(old || new) of Gaussians (B, A)."""
    moved, wider = (old_mean - mean).square_().mean(dim=0), old_std.square()
    return ((std / old_std).log() + 0.5 * ((wider + moved) / std.square() - 1.0)).sum()
