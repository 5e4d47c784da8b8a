"""A policy that decides at every control step, as actor-critic methods learn it.

    action = tanh(mean), or with exploration tanh(mean + std noise), or clip(tanh(mean) + sigma noise)

Its chunk is the J actions that it decides at once (usually one), then the last again; its `n_exec` is J,
so an executor plans again after them. B envs, H chunk length, A action dim, F features.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import require_fields
from robot_rl.core.policy import ChunkSample, DemoBatch, Mode
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.config import PictureSettings
from robot_rl.policies.encoded import EncodedPolicy, valid_mean
from robot_rl.policies.networks import initialise
from robot_rl.policies.processes import normal_like
from robot_rl.policies.spec import Chainless


@dataclass(frozen=True, kw_only=True)
class ActorPolicyConfig(PictureSettings):
    """What it sees, the acting network, which is the learner's, and how it explores."""

    horizon: int = 1
    """H, as the executor of the run expects it."""
    decides: int = 1
    """J, actions decided from one observation."""
    width: int = 256
    """Units of a hidden layer."""
    depth: int = 2
    """Number of hidden layers."""
    layernorm: bool = False
    """Normalises the hidden layers."""
    is_gaussian: bool = True
    """Whether the network gives a log standard deviation too, and explores with it."""
    log_std_range: tuple[float, float] = (-20.0, 2.0)
    """Of the Gaussian, before it is squashed."""
    explore_std: tuple[float, float] = (0.1, 0.1)
    """Noise of a deterministic actor: that of the first env and of the last; those between step evenly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fields(self, "actor ", "1 or more", "horizon", "decides", "width", "depth")
        if self.decides > self.horizon:
            raise ValueError(f"actor decides must be at most horizon, {self.horizon}, got {self.decides}")
        if not self.log_std_range[0] < self.log_std_range[1]:
            raise ValueError(f"actor log_std_range must have the smaller first, got {self.log_std_range}")
        if not min(self.explore_std) >= 0:
            raise ValueError(f"actor explore_std must be at least 0, got {self.explore_std}")


class ActorPolicy(Chainless, EncodedPolicy):
    """A multilayer perceptron over the features; its weights come from an actor-critic."""

    kind: ClassVar[str] = "actor"
    name: ClassVar[str] = "an actor"
    config_class: ClassVar[type[Any]] = ActorPolicyConfig

    def __init__(
        self,
        config: ActorPolicyConfig,
        *,
        state_dim: int,
        action_dim: int,
        normaliser: Normaliser | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Starts from zero weights: the learner's take their place before anything acts.

        Those of the encoder of pictures are drawn from `generator`; None keeps torch's.
        """
        super().__init__(config, state_dim=state_dim, action_dim=action_dim, normaliser=normaliser)
        initialise(self.encoder, generator)
        self._decided = config.decides * action_dim
        outputs = self._decided * (2 if config.is_gaussian else 1)
        sizes = [self.feature_dim, *[config.width] * config.depth, outputs]
        self.layers = nn.ParameterList(
            nn.Parameter(torch.zeros(shape))
            for fan_in, fan_out in itertools.pairwise(sizes)
            for shape in ((fan_in, fan_out), (fan_out,))
        )

    def _decide(
        self, features: Tensor, z: Tensor | None, mode: Mode, generator: Generator | None
    ) -> ChunkSample:
        """Returns a chunk whose first J actions count; there is noise in mode `explore` alone."""
        out = self._net(features)
        decided = self._explore(out, generator) if mode == "explore" else self._mean(out).tanh()
        actions, decides = self._in_order(decided), self.config.decides
        chunk = torch.cat([actions, actions[:, -1:].expand(-1, self.horizon - decides, -1)], dim=1)
        return ChunkSample(chunk, n_exec=torch.full((len(chunk),), decides, dtype=torch.int64))

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the squared error of the mean to the first J actions of each chunk."""
        features, _ = self._demonstration(batch, generator)
        mean, decides = self._mean(self._net(features)).tanh(), self.config.decides
        error = (self._in_order(mean) - batch.actions[:, :decides]).square()
        return valid_mean(error, batch.valid[:, :decides]) + self.guess_loss(features, batch.obs)

    def _net(self, features: Tensor) -> Tensor:
        hidden, layers = features, list(self.layers)
        for weight, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
            hidden = torch.addmm(bias, hidden, weight)
            if self.config.layernorm:
                hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:])
            hidden = hidden.relu()
        return torch.addmm(layers[-1], hidden, layers[-2])

    def _mean(self, out: Tensor) -> Tensor:
        return out[:, : self._decided]

    def _in_order(self, decided: Tensor) -> Tensor:
        """Returns the actions (B, J, A) of the network's (B, J A)."""
        return decided.unflatten(1, (self.config.decides, self.action_dim))

    def _explore(self, out: Tensor, generator: Generator | None) -> Tensor:
        mean = self._mean(out)
        noise = normal_like(mean, generator)
        if self.config.is_gaussian:
            std = out[:, self._decided :].clamp(*self.config.log_std_range).exp()
            return (mean + std * noise).tanh()
        first, last = self.config.explore_std
        std = torch.linspace(first, last, len(mean), device=mean.device)
        return (mean.tanh() + std[:, None] * noise).clamp(-1.0, 1.0)
