"""RL on the noise that a frozen policy decodes (DSRL).

Wagenmaker et al. 2025, "Steering your diffusion policy with latent space reinforcement learning".

`sac`: soft actor-critic whose action is the noise w. `na`, noise-aliased: critics Q_A of executed
chunks learn by TD, from demonstrations too, whose noise is unknown, and critics Q_W of the noise
learn Q_A(s, decode(s, w)) at w ~ N(0, I). In both, the actor maximises Q_W + temperature * entropy.

Deviations: networks of 256 units and not 2048, fewer updates per step, discount per control step
(gamma^m for a chunk that executed m), and one draw of w per row and update for Q_W, not ten.
B batch, F features, L latent dim, m executed actions, A action dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.actors import squashed_log_prob
from robot_rl.algos.config.off_policy import LatentConfig
from robot_rl.algos.critics import Critics
from robot_rl.algos.learner import Learner, PolicyModule
from robot_rl.algos.optim import METRICS_EVERY, Optimiser, matmul_precision
from robot_rl.algos.returns import td_target
from robot_rl.algos.seen import Seen
from robot_rl.core.policy import Encoded
from robot_rl.data.normalize import Normaliser
from robot_rl.data.transitions import ChunkBatch


class SteeringPolicy(PolicyModule, Protocol):
    """A module with a frozen base and an `actor` (a module) that chooses the noise it decodes."""

    latent_dim: int
    config: Any
    """Its `bound` is the largest element of the noise."""
    actor: Any
    steers: Tensor
    """Bool: whether the actor acts, or the base alone."""

    def choose(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the share of the bound and log std, (B, L) each; gradients reach the actor."""
        ...

    def decode(self, encoded: Encoded, flat: Tensor) -> Tensor:
        """Returns the chunks (B, H, A) of latents (B, L), without gradient."""
        ...

    def flat(self, z: Tensor) -> Tensor:
        """Returns the latents (B, L) of noise (B, H, A)."""
        ...

    def unflat(self, flat: Tensor) -> Tensor:
        """Returns the noise (B, H, A) of latents (B, L)."""
        ...


class LatentSAC(Learner):
    """Learns which noise a frozen policy should decode."""

    def __init__(
        self,
        policy: SteeringPolicy,
        cfg: LatentConfig,
        seed: int,
        *,
        n_exec: int,
        privileged: Normaliser | None = None,
    ) -> None:
        """Starts from the policy's present actor, which the updates change in place.

        Args:
            policy: learns; it begins to steer at the first update of its actor.
            cfg: how.
            seed: of the critics' weights and of the draws.
            n_exec: m, the actions of a chunk that are executed: what `na` has critics of.
            privileged: scales the privileged state, where the critics read it.
        """
        super().__init__()
        self._policy, self._cfg, self._n_exec = policy, cfg, n_exec
        device = policy.steers.device
        self._seen = Seen(privileged, device)
        seen_dim = policy.feature_dim + self._seen.more
        size: dict[str, Any] = {
            "num": cfg.num_critics,
            "width": cfg.width,
            "depth": cfg.depth,
            "layernorm": cfg.layernorm,
            "matmul": cfg.matmul,
            # Drawn on the CPU, so that a seed means the same on every device.
            "generator": Generator().manual_seed(seed),
        }
        self._of_noise = Critics(seen_dim, policy.latent_dim, **size).to(device)
        chunk_dim = n_exec * policy.action_dim
        self._of_chunks = Critics(seen_dim, chunk_dim, **size).to(device) if self._aliased else None
        self._targets = self._learns_by_td.target()
        self._log_temperature = nn.Parameter(torch.tensor(math.log(cfg.initial_temperature), device=device))
        clip = {"grad_clip": cfg.grad_clip}
        self._optimisers = {
            "actor": Optimiser(policy.actor.parameters(), lr=cfg.actor_lr, **clip),
            "of_noise": Optimiser(self._of_noise.parameters(), lr=cfg.critic_lr, **clip),
            "temperature": Optimiser([self._log_temperature], lr=cfg.temperature_lr),
        }
        if self._of_chunks is not None:
            self._optimisers["of_chunks"] = Optimiser(self._of_chunks.parameters(), lr=cfg.critic_lr, **clip)
        self._generator = Generator(device).manual_seed(seed)

    @torch.no_grad()
    def update(self, batch: ChunkBatch) -> Mapping[str, Tensor]:
        """Takes one step of the critics and, after the warm-up, of the actor and the temperature.

        `sac` needs chunks as they were decided, with their noise; `na` chunks from anywhere, of which it
        learns the values of those that are whole.
        """
        encoded = self._policy.encode(batch.obs)
        features = encoded["features"]
        seen = self._seen(features, batch.obs)
        noise = self._noise_of(batch) if self._of_chunks is None else self._normal(features)
        target, chunk = self._target(batch, encoded, noise)
        if self._of_chunks is None:
            error = self._learn("of_noise", self._of_noise, seen, noise, target)
        else:
            error = self._learn_chunks(self._of_chunks, batch, seen, target)
            # The critics of noise learn what those of chunks say of the decoded chunk.
            targets = self._of_chunks.q(seen, chunk).amin(dim=0)
            self._learn("of_noise", self._of_noise, seen, noise, targets)
        self._updates += 1
        metrics: dict[str, Tensor] = {}
        if self._updates > self._cfg.actor_warmup:
            metrics = self._improve_actor(features, seen)
        self._targets.follow_online(self._learns_by_td, self._cfg.tau)
        if self._updates % METRICS_EVERY:
            return {}
        return {"critic_loss": error.square().mean(dim=1).sum(), "target": target.mean(), **metrics}

    def _target(self, batch: ChunkBatch, now: Encoded, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns reward + bootstrap * next value, and the present action of `noise` (B, L).

        The action is the noise itself, and its entropy counts; with `na` the executed part of its chunk.
        """
        then = self._policy.encode(batch.next_obs)
        features = then["features"]
        following, log_prob = self._next_noise(features)
        if self._aliased:
            noise, following = self._executed(now, noise, then, following)
        value = self._targets.q(self._seen(features, batch.next_obs), following).amin(dim=0)
        if not self._aliased:
            value = value - self._log_temperature.exp() * log_prob
        return td_target(batch.reward, batch.bootstrap, value), noise

    def _next_noise(self, features: Tensor) -> tuple[Tensor, Tensor | float]:
        """Returns noise of the policy that acts (B, L), and its log-probability; 0 for the base's own."""
        chance = self._normal(features)
        if not self._steers:
            return chance, 0.0
        with matmul_precision(self._cfg.matmul):
            share, log_std = self._policy.choose(features, chance)
        return self._policy.config.bound * share, squashed_log_prob(share, log_std, chance)

    def _improve_actor(self, features: Tensor, seen: Tensor) -> dict[str, Tensor]:
        """Takes a step of actor and temperature; returns metrics from before it."""
        self._policy.steers.fill_(True)
        chance, temperature = self._normal(features), self._log_temperature.exp()
        with matmul_precision(self._cfg.matmul), torch.enable_grad():
            share, log_std = self._policy.choose(features, chance)
            log_prob = squashed_log_prob(share, log_std, chance)
        bound = self._policy.config.bound
        value, by_noise = self._of_noise.action_gradient(seen, bound * share.detach(), "min")
        # Loss: mean of temperature * log_prob - value. The critics give its derivative by the noise,
        # and autograd does the rest.
        rows, optimiser = len(value), self._optimisers["actor"]
        towards = [by_noise * (-bound / rows), (temperature / rows).expand(rows)]
        with matmul_precision(self._cfg.matmul):
            gradients = torch.autograd.grad([share, log_prob], optimiser.parameters, towards)
        optimiser.apply(gradients)
        entropy = -log_prob.detach().mean()
        # Loss of the temperature: log temperature * (entropy - target entropy).
        self._optimisers["temperature"].apply([entropy - self._cfg.target_entropy])
        return {
            "q": value.mean(),
            "entropy": entropy,
            "temperature": temperature,
            "latent_rms": share.detach().square().mean().sqrt() * bound,
        }

    def _learn(self, name: str, critics: Critics, seen: Tensor, action: Tensor, target: Tensor) -> Tensor:
        """Takes a step of critics towards a target (B,); returns their errors (N, B)."""
        error, gradients = critics.td_gradients(seen, action, target)
        self._optimisers[name].apply(gradients)
        return error

    def _learn_chunks(self, critics: Critics, batch: ChunkBatch, seen: Tensor, target: Tensor) -> Tensor:
        """Takes a step of the critics of chunks; one that the newest step cuts short is no action yet."""
        action, whole = batch.action.flatten(1), batch.whole
        if whole is not None and not whole.all():
            seen, action, target = seen[whole], action[whole], target[whole]
            if not len(target):
                return seen.new_zeros(1, 1)
        return self._learn("of_chunks", critics, seen, action, target)

    def _noise_of(self, batch: ChunkBatch) -> Tensor:
        """Returns the noise (B, L) behind the batch's chunks."""
        assert batch.latent is not None, "a replay without latents: give it latent_dim"
        return self._policy.flat(batch.latent.unflatten(1, (-1, self._policy.action_dim)))

    def _executed(
        self, now: Encoded, noise: Tensor, then: Encoded, following: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns what would be executed, (B, m A) each, of noise (B, L) decoded now and next.

        One call decodes both: 256 rows take 3.7 ms, 128 rows 3.0 ms.
        """
        both = Encoded({name: torch.cat([value, then[name]]) for name, value in now.items()})
        with matmul_precision(self._cfg.matmul):
            chunks = self._policy.decode(both, torch.cat([noise, following]))
        first, second = chunks[:, : self._n_exec].flatten(1).chunk(2)
        return first, second

    def _normal(self, features: Tensor) -> Tensor:
        """Returns standard normal noise (B, L)."""
        noise = features.new_empty(len(features), self._policy.latent_dim)
        return noise.normal_(generator=self._generator)

    @property
    def _aliased(self) -> bool:
        return self._cfg.variant == "na"

    @property
    def _steers(self) -> bool:
        """Whether the actor acts, which it does from its first update on."""
        return self._updates > self._cfg.actor_warmup

    @property
    def _learns_by_td(self) -> Critics:
        return self._of_noise if self._of_chunks is None else self._of_chunks

    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns the actor, and whether it steers: the rest of the policy is frozen."""
        actor = {f"actor.{name}": value for name, value in self._policy.actor.state_dict().items()}
        return {**actor, "steers": self._policy.steers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._policy.steers.fill_(self._steers)

    def _parts(self) -> Mapping[str, Any]:
        return {
            "actor": self._policy.actor,
            "of_noise": self._of_noise,
            "targets": self._targets,
            "of_chunks": self._of_chunks,
            "log_temperature": self._log_temperature,
            "optimisers": self._optimisers,
            "generator": self._generator,
        }
