"""Residual off-policy RL on a frozen base (ResFiT, Ankile et al. 2025), sized for a CPU.

    action = clip(base + correction(features, base), -1, 1),  critic on (features, action)

The critics may read the privileged state of a simulation as well: it takes no part in acting.
TD3 with an ensemble: layer norm in the critics, the target over two of N critics (REDQ), the
policy's gradient through the mean of all. Deviations: narrower networks, fewer critics, and an
actor learning rate 300 times larger, because the features are states and not a vision network's.
B batch, A action dim, F features, N critics.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.config.off_policy import ResidualConfig
from robot_rl.algos.critics import Critics
from robot_rl.algos.learner import Learner, PolicyModule
from robot_rl.algos.optim import METRICS_EVERY, Optimiser, follow, matmul_precision
from robot_rl.algos.returns import td_target
from robot_rl.algos.seen import Seen
from robot_rl.data.episode import SOURCES
from robot_rl.data.normalize import Normaliser
from robot_rl.data.replay import TransitionBatch

_HUMAN = SOURCES.index("human")


class CorrectingPolicy(PolicyModule, Protocol):
    """A module with a frozen base and a `head` (a module) that corrects it."""

    head: Any

    def residual(self, obs_features: Tensor, base_action: Tensor) -> Tensor:
        """Returns the correction (B, A); gradients reach the head."""
        ...


class ResidualTD(Learner):
    """Learns critics of the combined action, and the head that corrects the base."""

    def __init__(
        self,
        policy: CorrectingPolicy,
        cfg: ResidualConfig,
        seed: int,
        *,
        privileged: Normaliser | None = None,
    ) -> None:
        """Starts from the policy's present head, which the updates change in place.

        Args:
            policy: what learns.
            cfg: settings.
            seed: of the parameters and of all noise.
            privileged: scales the privileged state, where the critics read it.
        """
        super().__init__()
        self._policy, self._cfg = policy, cfg
        self._acting_target = _with_own_head(policy)
        self._target_head = list(self._acting_target.head.parameters())
        # Parameters are drawn on the CPU, so that a seed means the same on every device.
        device = next(policy.parameters()).device
        self._seen = Seen(privileged, device)
        self._critics = Critics(
            policy.feature_dim + self._seen.more,
            policy.action_dim,
            num=cfg.num_critics,
            width=cfg.width,
            depth=cfg.depth,
            layernorm=cfg.layernorm,
            matmul=cfg.matmul,
            generator=Generator().manual_seed(seed),
        ).to(device)
        self._target_critics = self._critics.target()
        rates = {"weight_decay": cfg.weight_decay, "grad_clip": cfg.grad_clip}
        self._actor_optimiser = Optimiser(policy.head.parameters(), lr=cfg.actor_lr, **rates)
        self._critic_optimiser = Optimiser(self._critics.parameters(), lr=cfg.critic_lr, **rates)
        self._generator = Generator(device).manual_seed(seed)
        self._draws = Generator().manual_seed(seed + 1)  # of critics: on the CPU, wherever they are

    @torch.no_grad()
    def update(self, batch: TransitionBatch) -> Mapping[str, Tensor]:
        """Takes one step of the critics and, every `actor_every` after the warm-up, of the head."""
        cfg = self._cfg
        features = self._policy.encode(batch.obs)["features"]
        target = self._target(batch)
        seen = self._seen(features, batch.obs)
        error, gradients = self._critics.td_gradients(seen, batch.action, target)
        self._critic_optimiser.apply(gradients)
        self._updates += 1
        metrics: dict[str, Tensor] = {}
        reports = self._updates % METRICS_EVERY == 0
        if self._updates > cfg.critic_warmup and self._updates % cfg.actor_every == 0:
            value, correction = self._update_actor(features, seen, batch)
            if reports:
                metrics = {"value": value.mean(), "residual_rms": correction.square().mean().sqrt()}
        self._target_critics.follow_online(self._critics, cfg.tau)
        if reports:
            metrics |= {"critic_loss": error.square().mean(dim=1).sum(), "target": target.mean()}
        return metrics

    def _update_actor(self, features: Tensor, seen: Tensor, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Returns the value (B,) and the correction (B, A) before the step."""
        base_action = batch.base_action
        with matmul_precision(self._cfg.matmul), torch.enable_grad():
            correction = self._policy.residual(features, base_action)
            action = (base_action + correction).clamp(-1.0, 1.0)
        value, by_action = self._critics.action_gradient(seen, action.detach(), "mean")
        # Loss: mean over the batch of l2 |correction|^2 / A - value; its derivative by the action
        # comes from the critics, and autograd does the rest.
        outputs, towards = [action], [by_action * (-1.0 / len(value))]
        if self._cfg.human_weight > 0:
            towards[0] += self._cfg.human_weight * _away_from_person(action.detach(), batch)
        if self._cfg.residual_l2 > 0:
            outputs.append(correction)
            towards.append(correction.detach() * (2.0 * self._cfg.residual_l2 / correction.numel()))
        with matmul_precision(self._cfg.matmul):
            gradients = torch.autograd.grad(outputs, self._actor_optimiser.parameters, towards)
        self._actor_optimiser.apply(gradients)
        follow(self._target_head, self._actor_optimiser.parameters, self._cfg.tau)
        return value, correction.detach()

    def _target(self, batch: TransitionBatch) -> Tensor:
        """Returns reward + bootstrap * value of the target's action in the next observation."""
        cfg, base_action = self._cfg, batch.next_base_action
        features = self._policy.encode(batch.next_obs)["features"]
        noise = torch.empty_like(base_action).normal_(0.0, cfg.target_noise_std, generator=self._generator)
        noise.clamp_(-cfg.target_noise_clip, cfg.target_noise_clip)
        with matmul_precision(cfg.matmul):
            correction = self._acting_target.residual(features, base_action)
        action = (base_action + correction + noise).clamp_(-1.0, 1.0)
        seen = self._seen(features, batch.next_obs)
        next_value = self._target_critics.pessimistic(seen, action, self._draws)
        return td_target(batch.reward, batch.bootstrap, next_value)

    @property
    def critics(self) -> Critics:
        """The critics that learn, for telemetry and for choosing among actions."""
        return self._critics

    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns the head: the rest of the policy is frozen."""
        return {f"head.{name}": value for name, value in self._policy.head.state_dict().items()}

    def _parts(self) -> Mapping[str, Any]:
        return {
            "head": self._policy.head,
            "target_head": self._acting_target.head,
            "critics": self._critics,
            "target_critics": self._target_critics,
            "actor_optimiser": self._actor_optimiser,
            "critic_optimiser": self._critic_optimiser,
            "generator": self._generator,
            "draws": self._draws,
        }


def _with_own_head(policy: CorrectingPolicy) -> CorrectingPolicy:
    """Returns a policy with a frozen copy of the head that shares everything else."""
    twin = copy.copy(policy)
    if isinstance(twin, nn.Module):
        twin._modules = dict(twin._modules)
    twin.head = copy.deepcopy(policy.head).requires_grad_(False)
    return twin


def _away_from_person(action: Tensor, batch: TransitionBatch) -> Tensor:
    """Returns the gradient (B, A) of the mean |action - person's|^2 / A over the steps a person drove."""
    by_person = batch.source == _HUMAN
    scale = 2.0 / max(1, int(by_person.sum())) / action.shape[1]
    return torch.where(by_person[:, None], action - batch.action, 0.0) * scale
