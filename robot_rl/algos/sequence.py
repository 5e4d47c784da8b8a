"""Several actions from one observation, each valued where it is executed (SRL, Patel & Siegelmann 2025).

    s_0 = features,  (a_0 .. a_J-1) = actor(s_0),  s_j+1 = s_j + model(s_j, a_j)
    loss of the actor = mean over the batch of sum over j of [temperature log pi(a_j) - critics(s_j, a_j)]

The critics learn on single control steps, as SAC's do: the action that follows is the first of a new
sequence. The model is learned at the same time. It serves the actor's loss alone and gets no gradient from
it; acting needs neither model nor critics. Deviations: the actor gives the sequence at once, without a
recurrent cell and without the action before; the model predicts the change of the normalised state,
and no slow copy of it is kept.
B batch, J actions of a sequence, A action dim, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from robot_rl.algos.actor_critic import ActorCritic, Encode, Steps, state_of
from robot_rl.algos.actors import Squashed, squashed_log_prob
from robot_rl.algos.config.off_policy import SequenceConfig
from robot_rl.algos.critics import EnsembleMLP
from robot_rl.algos.optim import METRICS_EVERY, Optimiser
from robot_rl.data.transitions import ChunkBatch


class SequenceActorCritic(ActorCritic):
    """Learns an actor of sequences, critics of actions, and a model of one step."""

    def __init__(
        self,
        feature_dim: int,
        action_dim: int,
        cfg: SequenceConfig,
        seed: int,
        *,
        decides: int,
        encode: Encode = state_of,
        device: str = "cpu",
    ) -> None:
        """Args: decides: J."""
        super().__init__(feature_dim, action_dim, cfg, seed, encode=encode, device=device, decides=decides)
        self._decides, self._action_dim = decides, action_dim
        self.model = EnsembleMLP(
            feature_dim + action_dim,
            feature_dim,
            width=cfg.model_width,
            depth=cfg.model_depth,
            matmul=cfg.matmul,
            generator=Generator().manual_seed(seed + 2),
        ).to(device)
        self._optimisers["model"] = Optimiser(self.model.parameters(), lr=cfg.model_lr)

    @torch.no_grad()
    def update(self, batch: Any) -> Mapping[str, Tensor]:
        """Takes a step of the model, then those of `ActorCritic.update`.

        Args: batch: `ChunkBatch` of the critics' windows, with what the first step alone led to (`prefix`).
        """
        loss = self._learn_model(batch)
        metrics = super().update(batch)
        return {**metrics, "model_loss": loss} if self._updates % METRICS_EVERY == 0 else metrics

    def _read(self, batch: Any) -> Steps:
        features, following = (self._encode(obs)["features"] for obs in (batch.obs, batch.next_obs))
        return Steps(features, batch.action[:, 0], batch.reward, batch.bootstrap, following)

    def _learn_model(self, batch: ChunkBatch) -> Tensor:
        """Takes a step down the squared error of the predicted change; returns it, a mean."""
        assert batch.prefix is not None, "no prefix of one step"
        next_obs = {name: value[:, 0] for name, value in batch.prefix.next_obs.items()}
        features, following = (self._encode(obs)["features"] for obs in (batch.obs, next_obs))
        out_NBO, path = self.model.answer(torch.cat([features, batch.action[:, 0]], dim=-1))
        error = out_NBO - (following - features)
        self._optimisers["model"].apply(self.model.gradients(error * (2.0 / error.numel()), path))
        return error.square().mean()

    def imagined(self, features: Tensor, action: Tensor) -> Tensor:
        """Returns the states (B, J, F) that the actions (B, J A) of a sequence meet."""
        states = [features]
        for taken in action.split(self._action_dim, dim=1)[:-1]:
            states.append(states[-1] + self.model.answer(torch.cat([states[-1], taken], dim=-1))[0][0])
        return torch.stack(states, dim=1)

    def _action_value(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum (B,) of the values of a sequence's actions, and its derivative (B, J A) by them."""
        shape = (len(features), self._decides)
        value, by_action = super()._action_value(
            self.imagined(features, action).flatten(0, 1), action.reshape(-1, self._action_dim)
        )
        return value.view(shape).sum(dim=1), by_action.reshape(shape[0], -1)

    def _next_action(self, after: Squashed) -> tuple[Tensor, Tensor]:
        """Returns the first action of the sequence and its log-probability."""
        action, std, noise = (x[:, : self._action_dim] for x in (after.action, after.std, after.noise))
        return action, squashed_log_prob(action, std.log(), noise)

    def _target_action(self, features: Tensor) -> Tensor:
        return super()._target_action(features)[:, : self._action_dim]

    def _parts(self) -> Mapping[str, Any]:
        return {**super()._parts(), "model": self.model}
