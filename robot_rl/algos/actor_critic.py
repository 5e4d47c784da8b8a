"""Off-policy actor-critic: one learner, whose actor and critics are settings.

    target = reward + bootstrap * (critics(next, a') + bonus),  a' = actor(next) [+ clipped noise]

A squashed Gaussian with automatic temperature is SAC (Haarnoja et al. 2018), a deterministic actor
with noise on the target's action TD3 (Fujimoto et al. 2018); with layer norm and the smallest of two
drawn critics RLPD (Ball et al. 2023); with batch norm and no target critics CrossQ (Bhatt et al. 2024).

XQC (Palenicek et al. 2025): batch norm, weight normalisation and cross-entropy over atoms. Here the weights
of each hidden unit of the critics are scaled to norm 1, at first and after each update; Adam's moments stay.
Own choices, made without the paper's details: batch norm stands behind the ReLU as in `crossq`, so a unit has
a bias, which is scaled along; the last layer and the actor keep their weights; there are no target critics;
rewards are not normalised, so the atoms have to hold the env's returns.

Pictures: an encoder learns from the critics' loss alone, on randomly shifted pictures. The actor reads the
features without gradient, and the target reads those of the same encoder (DrQ-v2, Yarats et al. 2022,
section 3.1): there is no slow copy of it. Deviations: one frame and the measured state instead of three
stacked ones, shifts by whole pixels, and no layer between features and networks that is the actor's own.
B batch, A action dim, F features, N critics.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.actors import Deterministic, Squashed, TanhGaussian
from robot_rl.algos.config.off_policy import ActorCriticConfig, Norm
from robot_rl.algos.critics import Critics
from robot_rl.algos.heads import make_head
from robot_rl.algos.learner import Learner
from robot_rl.algos.optim import METRICS_EVERY, Optimiser
from robot_rl.core.policy import Encoded
from robot_rl.data.transitions import TransitionBatch

Encode = Callable[[dict[str, Tensor]], Encoded]
"""Encodes observations; actor and critics read the `features` (B, F)."""


class SeeingPolicy(Protocol):
    """A policy whose encoder of pictures can learn."""

    @property
    def encoder(self) -> nn.Module: ...

    def shifted(self, obs: Mapping[str, Tensor], generator: Generator | None) -> dict[str, Tensor]:
        """Returns observations whose pictures are shifted at random."""
        ...

    def guess_loss(self, features: Tensor, obs: Mapping[str, Tensor]) -> Tensor | float:
        """Returns what the encoder's guess of the privileged state adds to its loss."""
        ...


def state_of(obs: dict[str, Tensor]) -> Encoded:
    """Returns the state as it is."""
    return Encoded({"features": obs["state"]})


class Steps(NamedTuple):
    """What an update reads of a batch."""

    features: Tensor
    """(B, F), with their graph where an encoder learns."""
    action: Tensor
    """(B, A)"""
    reward: Tensor
    """(B,), discounted, of the window."""
    bootstrap: Tensor
    """(B,): gamma^m, or 0 where the task ended."""
    next_features: Tensor
    """(B, F)"""
    guess_loss: Tensor | float = 0.0
    """Of the encoder's guess, see `SeeingPolicy`."""


class ActorCritic(Learner):
    """Learns an actor and critics over features (B, F)."""

    def __init__(
        self,
        feature_dim: int,
        action_dim: int,
        cfg: ActorCriticConfig,
        seed: int,
        *,
        encode: Encode = state_of,
        seeing: SeeingPolicy | None = None,
        device: str = "cpu",
        decides: int = 1,
    ) -> None:
        """Draws parameters on the CPU, so that a seed means the same on every device.

        Args:
            feature_dim: F.
            action_dim: A.
            cfg: settings.
            seed: of the parameters and of all noise.
            encode: gives the features.
            seeing: the policy behind `encode`, if its encoder learns, in place; None: it stays as it is.
            device: where everything is computed.
            decides: actions (B, A) that the actor gives at once, side by side; critics judge one.
        """
        super().__init__()
        self._cfg, self._encode, self._seeing = cfg, encode, seeing
        draws = Generator().manual_seed(seed)
        common: dict[str, Any] = {
            "matmul": cfg.matmul,
            "generator": draws,
            "renorm_warmup": cfg.critic.renorm_warmup,
        }
        size: dict[str, Any] = {"width": cfg.actor.width, "depth": cfg.actor.depth, **_norms(cfg.actor.norm)}
        outputs, log_std_range = decides * action_dim, cfg.actor.log_std_range
        self.actor = (
            Deterministic(feature_dim, outputs, **size, **common)
            if cfg.actor.kind == "deterministic"
            else TanhGaussian(feature_dim, outputs, log_std_range=log_std_range, **size, **common)
        ).to(device)
        critic = cfg.critic
        head = make_head(critic.value, num=critic.num, atoms=critic.atoms, low=critic.low, high=critic.high)
        size = {"num": critic.num, "width": critic.width, "depth": critic.depth, **_norms(critic.norm)}
        self.critics = Critics(feature_dim, action_dim, head=head, **size, **common).to(device)
        if critic.unit_weights:
            self.critics.scale_to_unit_weights()
        self._targets = self.critics.target() if cfg.critic.target == "ema" else None
        # TD3's target acts as well; SAC's next action is the actor's own.
        self._target_actor = (
            copy.deepcopy(self.actor).requires_grad_(False)
            if isinstance(self.actor, Deterministic) and self._targets is not None
            else None
        )
        self._log_temperature = nn.Parameter(torch.tensor(math.log(cfg.initial_temperature), device=device))
        self._target_entropy = cfg.target_entropy_per_action * decides * action_dim
        how = {"weight_decay": cfg.weight_decay, "grad_clip": cfg.grad_clip, "beta1": cfg.beta1}
        self._optimisers = {
            "actor": Optimiser(self.actor.parameters(), lr=cfg.actor_lr, **how),
            "critics": Optimiser(self.critics.parameters(), lr=cfg.critic_lr, **how),
            "temperature": Optimiser([self._log_temperature], lr=cfg.temperature_lr, beta1=cfg.beta1),
        }
        if seeing is not None:
            self._optimisers["encoder"] = Optimiser(seeing.encoder.parameters(), lr=cfg.encoder_lr, **how)
        self._generator = Generator(device).manual_seed(seed + 1)
        self._draws = draws
        """Of critics: on the CPU, wherever they are."""

    @torch.no_grad()
    def update(self, batch: TransitionBatch) -> Mapping[str, Tensor]:
        """Takes one step of the critics and, every `actor_every`, of the actor and the temperature."""
        steps = self._read(batch)
        self._updates += 1
        is_actors = self._updates % self._cfg.actor_every == 0
        sample, after, bonus = self._actions(steps, with_present=is_actors)
        error = self._update_critics(steps, after, bonus)
        metrics = self._update_actor(steps.features, sample) if is_actors else {}
        if self._updates % METRICS_EVERY:
            return {}
        return metrics | {"critic_loss": error.square().mean(dim=1).sum()}

    @torch.no_grad()
    def pretrain(self, batch: TransitionBatch) -> Mapping[str, Tensor]:
        """Clones the batch's actions, and learns the values of the clone: no step of the actor up them."""
        steps = self._read(batch)
        loss, gradients = self.actor.cloning_gradients(steps.features, steps.action)
        self._optimisers["actor"].apply(gradients)
        self._follow_actor()
        _, after, bonus = self._actions(steps, with_present=False)
        error = self._update_critics(steps, after, bonus)
        return {"cloning_loss": loss, "critic_loss": error.square().mean(dim=1).sum()}

    def _read(self, batch: TransitionBatch) -> Steps:
        obs, next_obs, loss = batch.obs, batch.next_obs, 0.0
        if self._seeing is None:
            features = self._encode(obs)["features"]
        else:
            obs, next_obs = (self._seeing.shifted(each, self._generator) for each in (obs, next_obs))
            with torch.enable_grad():
                features = self._encode(obs)["features"]
                loss = self._seeing.guess_loss(features, obs)
        following = self._encode(next_obs)["features"]
        return Steps(features, batch.action, batch.reward, batch.bootstrap, following, loss)

    def _actions(self, steps: Steps, *, with_present: bool) -> tuple[Squashed | None, Tensor, Tensor]:
        """Returns a sample for the actor's step, the target's action (B, A), and its bonus (B,)."""
        actor, following, present = self.actor, steps.next_features, None
        if isinstance(actor, Deterministic):
            return None, self._target_action(following), torch.zeros_like(steps.reward)
        if with_present and not actor.net.renorms:
            # The actor does not move before its own step: both samples in one go.
            both, rows = actor.sample(torch.cat([steps.features, following]), self._generator), len(following)
            present, after = both.rows(slice(rows)), both.rows(slice(rows, None))
        else:
            after = actor.sample(following, self._generator)
        action, log_prob = self._next_action(after)
        if not self._cfg.entropy_backup:
            return present, action, torch.zeros_like(log_prob)
        return present, action, log_prob * -self._log_temperature.exp()

    def _next_action(self, after: Squashed) -> tuple[Tensor, Tensor]:
        """Returns what of the actor's sample the target is about: action (B, A), log-probability (B,)."""
        return after.action, after.log_prob

    def _target_action(self, features: Tensor) -> Tensor:
        """Returns the deterministic target's action with clipped noise (TD3)."""
        action = (self._target_actor or self.actor).mean(features)
        limit = self._cfg.target_noise_clip
        noise = torch.empty_like(action).normal_(0.0, self._cfg.target_noise_std, generator=self._generator)
        return action.add_(noise.clamp_(-limit, limit)).clamp_(-1.0, 1.0)

    def _update_critics(self, steps: Steps, after: Tensor, bonus: Tensor) -> Tensor:
        """Takes a step of the critics and their targets; returns the errors (N, B) before it."""
        cfg, critics, targets = self._cfg.critic, self.critics, self._targets
        drawn, to_x = critics.draw(cfg.drawn, self._draws), None
        rows, dim = steps.features.shape
        if self._seeing is not None:
            in_pass = 2 * rows if targets is None else rows
            to_x = steps.action.new_zeros(in_pass, dim + steps.action.shape[1])

        def target(following: Tensor) -> Tensor:
            return critics.head.target(steps.reward, steps.bootstrap, following, bonus, self._generator)

        if targets is None:
            error, gradients = critics.joint_td_gradients(
                (steps.features, steps.action),
                (steps.next_features, after),
                lambda out: target(critics.aggregate(out[drawn], cfg.aggregate)),
                to_x,
            )
        else:
            following = targets.distribution(steps.next_features, after, drawn, cfg.aggregate)
            error, gradients = critics.td_gradients(steps.features, steps.action, target(following), to_x)
        self._optimisers["critics"].apply(gradients)
        if cfg.unit_weights:
            critics.scale_to_unit_weights()
        if to_x is not None:
            self._update_encoder(steps, to_x[:rows, :dim])
        if targets is not None:
            targets.follow_online(critics, cfg.tau)
        return error

    def _update_encoder(self, steps: Steps, to_features: Tensor) -> None:
        """Takes a step of the encoder, given the gradient (B, F) of the critics' loss by the features."""
        with torch.enable_grad():
            # By the chain rule this sum has the gradient of the critics' loss.
            loss = (steps.features * to_features).sum() + steps.guess_loss
        self._optimisers["encoder"].step(loss)

    def _update_actor(self, features: Tensor, sample: Squashed | None) -> dict[str, Tensor]:
        """Takes a step of the actor up the critics' value, and of the temperature."""
        actor, share = self.actor, 1.0 / len(features)
        if isinstance(actor, Deterministic):
            point = actor.sample(features, trains=True)
            value, by_action = self._action_value(features, point.action)
            self._optimisers["actor"].apply(actor.gradients(point, by_action * -share))
            self._follow_actor()
            return {"q": value.mean()}
        if sample is None:
            sample = actor.sample(features, self._generator, trains=True)
        temperature = self._log_temperature.exp()
        value, by_action = self._action_value(features, sample.action)
        # Loss of the actor: mean of temperature * log_prob - value.
        self._optimisers["actor"].apply(actor.gradients(sample, by_action * -share, temperature * share))
        entropy = -sample.log_prob.mean()
        if self._cfg.temperature_lr > 0:
            # Loss of the temperature: log temperature * (entropy - target entropy).
            self._optimisers["temperature"].apply([entropy - self._target_entropy])
        return {"q": value.mean(), "entropy": entropy, "temperature": temperature}

    def _action_value(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the value (B,) that the actor climbs, and its derivative by the actor's action."""
        return self.critics.action_gradient(features, action, self._cfg.critic.actor_aggregate)

    def _follow_actor(self) -> None:
        if self._target_actor is not None:
            self._target_actor.net.follow_online(self.actor.net, self._cfg.critic.tau)

    @torch.no_grad()
    def act(self, features: Tensor, *, explore: bool, generator: Generator | None = None) -> Tensor:
        """Returns actions (B, A); a deterministic actor explores without noise.

        Args: generator: of the noise; None takes the learner's own, never torch's global one.
        """
        if explore and isinstance(self.actor, TanhGaussian):
            return self.actor.sample(features, generator or self._generator).action
        return self.actor.mean(features)

    @torch.no_grad()
    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns the actor's weights (in, out) and biases (out,) as it acts, batch norm folded in.

        Those of an encoder that learns are among them, as `encoder.<name>`.
        """
        weights = {f"layers.{i}": layer[0] for i, layer in enumerate(self.actor.net.plain())}
        if self._seeing is not None:
            weights |= {f"encoder.{name}": each for name, each in self._seeing.encoder.named_parameters()}
        return weights

    def _parts(self) -> Mapping[str, Any]:
        return {
            "actor": self.actor,
            "critics": self.critics,
            "encoder": None if self._seeing is None else self._seeing.encoder,
            "targets": self._targets,
            "target_actor": self._target_actor,
            "log_temperature": self._log_temperature,
            "optimisers": self._optimisers,
            "generator": self._generator,
            "draws": self._draws,
        }


def _norms(norm: Norm) -> dict[str, bool]:
    return {"layernorm": norm == "layer", "batchnorm": norm == "batch"}
