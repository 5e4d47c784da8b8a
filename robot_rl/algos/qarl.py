"""An adversary of bounded rationality against the actor (QARL, Reddi et al. 2024).

    executed action = clip(a + bound d),  a = actor(s),  d = adversary(s)
    actor:      mean of temperature log pi(a) - critics(s, executed)
    adversary:  mean of its temperature log pi(d) + critics(s, executed)

A zero-sum game between two maximum-entropy players. The hotter the adversary, the more its pushes are
random: its temperature falls from `first` to `last` while it learns, so that the actor meets noise
first and an opponent later. Both share the critics, because only the executed action matters to the task:
replay and demonstrations are the same as without the game. Deviations: in the paper the adversary has
forces and its own critic, the players learn in turns, and the temperature is drawn from a
distribution that moves on when the return allows it; here it follows a schedule.
B batch, A action dim, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from robot_rl.algos.actor_critic import ActorCritic, Encode, Steps, state_of
from robot_rl.algos.actors import Squashed, TanhGaussian
from robot_rl.algos.config.off_policy import LOG_STD_RANGE, QARLConfig
from robot_rl.algos.optim import METRICS_EVERY, Optimiser
from robot_rl.data.transitions import TransitionBatch


class QARL(ActorCritic):
    """Learns an actor, its adversary, and critics of their combined actions."""

    def __init__(
        self,
        feature_dim: int,
        action_dim: int,
        cfg: QARLConfig,
        seed: int,
        *,
        encode: Encode = state_of,
        device: str = "cpu",
    ) -> None:
        super().__init__(feature_dim, action_dim, cfg, seed, encode=encode, device=device)
        self._opponent = opponent = cfg.adversary
        self.adversary = TanhGaussian(
            feature_dim,
            action_dim,
            log_std_range=LOG_STD_RANGE,
            width=opponent.width,
            depth=opponent.depth,
            matmul=cfg.matmul,
            generator=Generator().manual_seed(seed + 2),
        ).to(device)
        self._optimisers["adversary"] = Optimiser(self.adversary.parameters(), lr=opponent.lr)
        self._pushes = Generator(device).manual_seed(seed + 3)

    @torch.no_grad()
    def update(self, batch: TransitionBatch) -> Mapping[str, Tensor]:
        """Takes one step of the critics and, every `actor_every`, of both players."""
        metrics = super().update(batch)
        if self._updates % METRICS_EVERY:
            return metrics
        return {**metrics, "adversary_temperature": torch.tensor(self._temperature())}

    def _actions(self, steps: Steps, *, with_present: bool) -> tuple[Squashed | None, Tensor, Tensor]:
        """Returns what `ActorCritic` does, for the combined actions of both players."""
        present, after, bonus = super()._actions(steps, with_present=with_present)
        push = self.adversary.sample(steps.next_features, self._pushes)
        if self._cfg.entropy_backup and self._opponent.bound > 0:
            bonus = bonus + self._temperature() * push.log_prob
        return present, self._executed(after, push), bonus

    def _action_value(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Returns value and derivative as `ActorCritic` does; the adversary takes its step down the same."""
        push = self.adversary.sample(features, self._pushes)
        value, by_executed = super()._action_value(features, self._executed(action, push))
        moves = (action + self._opponent.bound * push.action).abs() <= 1.0  # what is clipped does not
        by_action, share = by_executed * moves, 1.0 / len(features)
        gradients = self.adversary.gradients(
            push, by_action * (self._opponent.bound * share), torch.tensor(self._temperature() * share)
        )
        self._optimisers["adversary"].apply(gradients)
        return value, by_action

    def _executed(self, action: Tensor, push: Squashed) -> Tensor:
        return (action + self._opponent.bound * push.action).clamp_(-1.0, 1.0)

    def _temperature(self) -> float:
        return self._opponent.temperature(self._updates)

    @torch.no_grad()
    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns the weights of both players; see `ActorCritic.policy_weights`."""
        pushes = {f"adversary.layers.{i}": layer[0] for i, layer in enumerate(self.adversary.net.plain())}
        return {**{f"base.{name}": layer for name, layer in super().policy_weights().items()}, **pushes}

    def _parts(self) -> Mapping[str, Any]:
        return {**super()._parts(), "adversary": self.adversary, "pushes": self._pushes}
