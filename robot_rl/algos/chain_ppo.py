"""PPO through the denoising chain, on chunks of actions: one loss, four published methods.

    pi_RL     flow_sde, one stochastic step    `single`    one ratio for each chunk
    DPPO      ddpm or ddim, the last K' steps  `per_step`  a ratio for each step, discounted and clipped
                                                           by how noisy it is
    ReinFlow  flow_noise                       `joint`     one ratio, of the mean over the steps
    FPO       flow_cfm                         `joint`     the loss of flow matching for a likelihood
    GRPO      any of them                      any         no value: episodes from the same start are compared

(Chen et al. 2025; Ren et al. 2024; Zhang et al. 2025; McAllister et al. 2025; Li et al. 2025.) The
policy's process scores a chain; this file does not depend on which. The value is one of features
alone, learned apart from the policy. Deviations: log-probabilities are not clamped, and truncation
bootstraps from the final observation, which DPPO and ReinFlow leave out.
B decisions, T of them in each of the envs, H chunk length, A action dim, S scored transitions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from robot_rl.algos.config.on_policy import ChainPPOConfig
from robot_rl.algos.critics import value_net
from robot_rl.algos.learner import PolicyModule, restore, saved
from robot_rl.algos.losses import chain_ratio, clip_schedule, ppo_loss, value_error
from robot_rl.algos.optim import Optimiser, keep_freed_memory
from robot_rl.algos.returns import ReturnScale, episode_weight, gae, group_advantage
from robot_rl.algos.seen import Seen
from robot_rl.core.policy import Chain, DemoBatch, Encoded
from robot_rl.data.normalize import Normaliser
from robot_rl.data.rollout import EpisodeRollout, PPOBatch, Rollout

_REWARD_LIMIT = 10.0  # of a scaled reward (DPPO)


class ChainPPO:
    """Learns the policy and a value of its observations from rollouts; each rollout is used once."""

    def __init__(
        self,
        policy: PolicyModule,
        cfg: ChainPPOConfig,
        seed: int,
        *,
        group: int = 0,
        privileged: Normaliser | None = None,
    ) -> None:
        """Starts from the policy's present weights, which the updates change in place.

        Args:
            policy: acts in mode `explore`; its parameters that require a gradient learn.
            cfg: how.
            seed: of the value's first weights, and of the regulariser's noise.
            group: so many episodes of an `EpisodeRollout`, one after another, began in the same state, and
                are compared with each other instead of with a value; 0: with the value.
            privileged: scales the privileged state, where the value reads it.
        """
        keep_freed_memory()
        self._policy, self._cfg, self._group = policy, cfg, group
        self._origin = None if cfg.regulariser == "none" else copy.deepcopy(policy)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        device = trained[0].device
        self._seen = Seen(privileged, device)
        self._value = value_net(policy.feature_dim + self._seen.more, cfg, seed).to(device)
        rates = {"weight_decay": cfg.weight_decay, "grad_clip": cfg.grad_clip}
        self.actor_optimiser = Optimiser(trained, lr=cfg.actor_lr, **rates)
        self._critic_optimiser = Optimiser(self._value.parameters(), lr=cfg.critic_lr, **rates)
        self._generator = Generator(device).manual_seed(seed)
        self._scale = ReturnScale(device=device)
        self._clips: Tensor | None = None
        self._turns = 0
        """In which rollouts came, of one source or of several."""
        self._is_open = False
        """Whether rollouts have come since the last update."""
        self._waits = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the policy waits for the next rollout: it has moved by `target_kl`."""
        self._reads = device.type == "cpu"
        """Whether values are read where that saves work. Another device would have to be waited for: there
        every row is encoded, and the kernel of a step looks whether the policy waits."""

    @torch.no_grad()
    def prepare(self, rollout: Rollout, *, is_stale: bool = False) -> PPOBatch:
        """Returns the decisions with their advantages; the next updates take these.

        Args:
            rollout: of one source.
            is_stale: whether the weights that acted are older than these. Then ratios are those of these
                weights, and each decision is weighed by how probable these make it (decoupled PPO).
        """
        if not self._is_open:
            self._is_open, self._turns = True, self._turns + 1
        self.begin()
        obs, chain = _flat(rollout.obs), rollout.chain
        worth = self._compared(rollout) if self._group else self._valued(rollout, obs)
        present = self._scored(obs, chain) if is_stale else chain.log_prob
        weight = chain_ratio(present, chain.log_prob, self._cfg.reduction).clamp_max(self._cfg.stale_limit)
        batch = PPOBatch(obs, replace(chain, log_prob=present), *worth, weight=weight)
        if isinstance(rollout, EpisodeRollout):
            batch = batch.rows(rollout.valid.flatten().nonzero().squeeze(1))
        return batch

    def _scored(self, obs: dict[str, Tensor], chain: Chain) -> Tensor:
        """Returns the log-probabilities (N T, S) of a chain under the present weights."""
        found = list[Tensor]()
        for rows in torch.arange(len(chain.log_prob), device=chain.log_prob.device).split(self._cfg.batch):
            encoded = self._policy.encode({name: value[rows] for name, value in obs.items()})
            found.append(self._policy.log_prob(encoded, chain.rows(rows))[0])
        return torch.cat(found)

    def _compared(self, rollout: Rollout) -> tuple[Tensor, ...]:
        """Returns what `_valued` does; only the advantage is used."""
        assert isinstance(rollout, EpisodeRollout), "groups are of whole episodes"
        advantage = group_advantage(rollout.score.view(-1, self._group)).view(-1, 1)
        advantage = (advantage * episode_weight(rollout.valid)).flatten()
        return advantage.new_zeros(len(advantage), 0), advantage, *[torch.zeros_like(advantage)] * 2

    def _valued(self, rollout: Rollout, obs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns what the value reads (N T, F), then advantage, value and target, (N T,) each."""
        cfg, shape = self._cfg, rollout.reward.shape
        seen = self._read(obs)
        value, next_value = (self._values(of).view(shape) for of in (seen, self._read_next(rollout, seen)))
        reward = rollout.reward
        if cfg.scale_reward:
            std = self._scale.add(
                reward,
                cfg.gamma_step**rollout.steps,
                rollout.ended,
                actor=rollout.actor,
                begins=rollout.begins,
            )
            reward = (reward / std).clamp(-_REWARD_LIMIT, _REWARD_LIMIT)
        advantage, target = gae(
            reward,
            rollout.bootstrap,
            value,
            next_value,
            rollout.ended,
            lam=cfg.lam,
            gamma_step=cfg.gamma_step,
            steps_BT=rollout.steps,
        )
        return seen, *(part.flatten() for part in (advantage, value, target))

    def _read(self, obs: dict[str, Tensor]) -> Tensor:
        return self._seen(self._policy.encode(obs)["features"], obs)

    def _read_next(self, rollout: Rollout, seen: Tensor) -> Tensor:
        """Returns what it reads (N T, F) where chunks led, which is mostly where the next was decided."""
        if not self._reads:
            return self._read(_flat(rollout.next_obs))
        leads_elsewhere = rollout.ended.clone()
        leads_elsewhere[:, -1] = True
        found = seen.view(*rollout.ended.shape, -1).roll(-1, dims=1)
        elsewhere = {name: value[leads_elsewhere] for name, value in rollout.next_obs.items()}
        found[leads_elsewhere] = self._read(elsewhere)
        return found.flatten(0, 1)

    def update(self, batch: PPOBatch) -> Mapping[str, Tensor | float]:
        """Takes a step of the value, and one of the policy if it is not to wait."""
        self._is_open = False
        metrics = {} if self._group else self._update_value(batch)
        is_learning = self._group > 0 or self._turns > self._cfg.critic_warmup
        if is_learning:
            metrics |= self.update_policy(batch.obs, batch.chain, batch.advantage, batch.weight)
            metrics["waits"] = self._waits.float()
        return metrics

    @torch.no_grad()
    def _update_value(self, batch: PPOBatch) -> dict[str, Tensor | float]:
        """Follows the squared error; with a clip, the larger of that of the value and of the clipped one."""
        out_NBO, path = self._value.answer(batch.features)
        value = out_NBO.flatten()
        error, towards = value_error(value, batch.value, batch.target, self._cfg.value_clip)
        self._critic_optimiser.apply(self._value.gradients(towards.view_as(out_NBO), path))
        metrics: dict[str, Tensor | float] = {"value": value.mean(), "value_loss": error.square().mean()}
        if len(error) > 1:
            metrics["unexplained"] = error.var() / batch.target.var().clamp_min(1e-8)
        return metrics

    def begin(self) -> None:
        """Notes that ratios count from the present policy."""
        self._waits.zero_()

    def update_policy(
        self, obs: dict[str, Tensor], chain: Chain, advantage: Tensor, weight: Tensor | None = None
    ) -> dict[str, Tensor | float]:
        """Takes a step of the policy alone, unless it has to wait.

        Metrics of a policy that waits are left out where that costs nothing, on a CPU.

        Args:
            obs: (B, ...)
            chain: what was decided there, under the weights from which ratios count.
            advantage: (B,), of whole chunks.
            weight: see `PPOBatch`; None: 1.
        """
        if self._reads and self._waits:
            return {}
        cfg, old = self._cfg, chain.log_prob
        if not self._group and len(advantage) > 1:  # a single one has no spread
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        encoded = self._policy.encode(obs)
        log_prob, entropy = self._policy.log_prob(encoded, chain)
        clip = self._clip(old.shape[1])
        loss = ppo_loss(
            log_prob,
            old,
            advantage,
            clip_low=clip,
            clip_high=cfg.clip_high,
            reduction=cfg.reduction,
            denoising_discount=cfg.denoising_discount,
            weight_BS=weight,
        )
        with torch.no_grad():
            ratio = chain_ratio(log_prob, old, cfg.reduction)
            kl = (ratio - 1.0 - ratio.log()).mean()
            metrics: dict[str, Tensor | float] = {
                "loss": loss.detach(),
                "kl": kl,
                "clipped": ((ratio < 1.0 - clip) | (ratio > 1.0 + (cfg.clip_high or clip))).float().mean(),
                "entropy": entropy.mean(),
            }
        skips: Tensor | None = None
        if cfg.target_kl is not None:
            skips = self._waits.logical_or_(kl.double() > cfg.target_kl)
            if self._reads and skips:
                return metrics
        if cfg.entropy_weight > 0:
            loss = loss - cfg.entropy_weight * entropy.mean()
        if self._origin is not None:
            distance = self._distance(self._origin, obs, encoded)
            metrics["distance"] = distance.detach()
            loss = loss + cfg.regulariser_weight * distance
        self.actor_optimiser.step(loss, skips=None if self._reads else skips)
        return metrics

    def _clip(self, scored: int) -> float | Tensor:
        """Returns the clip range, or that of each scored transition, on the policy's device."""
        cfg = self._cfg
        if cfg.clip_first is None:
            return cfg.clip
        if self._clips is None or len(self._clips) != scored:
            schedule = clip_schedule(cfg.clip_first, cfg.clip, scored, rate=cfg.clip_rate)
            self._clips = schedule.to(self._generator.device)
        return self._clips

    def _distance(self, origin: PolicyModule, obs: dict[str, Tensor], encoded: Encoded) -> Tensor:
        """Returns how far the policy is from the one it began as, in these observations."""
        rows = len(next(iter(obs.values())))
        shape = (rows, self._policy.horizon, self._policy.action_dim)
        device = self._generator.device
        z = torch.randn(shape, generator=self._generator, device=device)
        with torch.no_grad():
            chunks = origin.sample(origin.encode(obs), z=z).actions
        if self._cfg.regulariser == "w2":
            return (self._policy.sample(encoded, z=z).actions - chunks).square().mean()
        valid = torch.ones(shape[:2], dtype=torch.bool, device=device)
        return self._policy.bc_loss(DemoBatch(obs, chunks, valid), self._generator)

    def _values(self, features: Tensor) -> Tensor:
        return self._value.answer(features)[0].flatten()

    def policy_weights(self) -> Mapping[str, Tensor]:
        return self._policy.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return {**saved(self._parts()), "rollouts": self._turns, "waits": bool(self._waits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self._parts(), state)
        self._turns = int(state["rollouts"])
        self._waits.fill_(bool(state["waits"]))

    def _parts(self) -> Mapping[str, Any]:
        """Returns everything, the regulariser's origin too: it may be no base of the run."""
        return {
            "policy": self._policy,
            "origin": self._origin,
            "value": self._value,
            "actor_optimiser": self.actor_optimiser,
            "critic_optimiser": self._critic_optimiser,
            "generator": self._generator,
            "scale": self._scale,
        }


def _flat(obs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.flatten(0, 1) for key, value in obs.items()}
