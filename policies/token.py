"""A policy of action tokens: each element of a chunk is one of `bins` intervals.

As OpenVLA-OFT decodes them (Kim et al. 2025) and SimpleVLA-RL improves them (Li et al. 2025): all tokens of a
chunk at once, each from the observation alone, so that a chunk can mix two ways to act, element by element.
RT-2 and OpenVLA decode one token after another instead; that is not here. The chain has one step, and
every executed token is a scored transition, so the ratio that PPO clips is that of one token.
B envs, H chunk length, A action dim, V bins, S = h A scored tokens of the first h actions.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import log_softmax

from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chain import check_chain
from robot_rl.policies.chunk import ChunkPolicyConfig, ProcessConfig
from robot_rl.policies.encoded import EncodedPolicy, valid_mean
from robot_rl.policies.networks import MLP, initialise
from robot_rl.policies.processes import TimeGrid
from robot_rl.policies.spec import check_chunk, check_mode

EMBEDDING = 32
"""Features of a token, which one matrix turns into the logits of all bins, the same for every element."""


class TokenPolicy(EncodedPolicy):
    """Classifies every element of a chunk; acts by the most likely bins, explores by drawing them."""

    kind: ClassVar[str] = "token"
    config_class: ClassVar[type[Any]] = ChunkPolicyConfig

    def __init__(
        self,
        config: ChunkPolicyConfig,
        *,
        state_dim: int,
        action_dim: int,
        normaliser: Normaliser | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Builds the networks; `generator` draws their first weights (None: torch's own)."""
        if config.kind != self.kind:
            raise ValueError(f"TokenPolicy: needs kind {self.kind!r}, got {config.kind!r}")
        super().__init__(config, state_dim=state_dim, action_dim=action_dim, normaliser=normaliser)
        self.grid = _grid(config)
        self.net = MLP(
            self.encoder.dim,
            config.horizon * action_dim * EMBEDDING,
            width=config.width,
            depth=config.depth,
            layernorm=config.layernorm,
            residual=config.residual,
        )
        self.logits = nn.Linear(EMBEDDING, config.bins)
        initialise(self, generator)

    def with_process(self, options: ProcessConfig, *, generator: Generator | None = None) -> Self:
        """Returns a policy that shares this one's weights, and draws at another temperature.

        `generator` has nothing to draw: the process adds no weights.

        Raises:
            ValueError: a process that is not `token`.
        """
        twin = copy.copy(self)
        twin.config = self.config.exploring(options)
        twin.grid = _grid(twin.config)
        return twin

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A) of bin middles: drawn in mode `explore`, otherwise the most likely.

        There is no initial noise: `z` changes nothing.
        """
        check_mode(mode)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not record):
            log_probs = self._log_probs(encoded["features"])
            if z is not None:
                check_chunk("sample", "z", z, tuple(log_probs.shape[:-1]))
            tokens = _drawn(log_probs, generator) if mode == "explore" else log_probs.argmax(dim=-1)
            x = self._middles(tokens)
            chain = self._chain(x, tokens, log_probs, explored=mode == "explore") if record else None
            return ChunkSample(self.normaliser.unaction(x).clamp(-1.0, 1.0), chain)

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns log-probability and entropy of the scored tokens, (B, S) each.

        Raises:
            ValueError: the chain is of another policy, or was not sampled in mode `explore`.
        """
        check_chain(chain, self.grid)
        log_probs = self._log_probs(encoded["features"])
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return self._scored(_chosen(log_probs, self._tokens(chain.x[:, 1]))), self._scored(entropy)

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the mean cross-entropy of the demonstrated tokens over valid steps."""
        features, actions = self._demonstration(batch, generator)
        log_probs = log_softmax(self._logits(features), dim=-1)
        error = valid_mean(-_chosen(log_probs, self._tokens(actions)), batch.valid)
        return error + self.guess_loss(features, batch.obs)

    def _logits(self, features: Tensor) -> Tensor:
        """Returns the logits (B, H, A, V)."""
        embedded = self.net(features).view(-1, self.horizon, self.action_dim, EMBEDDING)
        return self.logits(embedded)

    def _log_probs(self, features: Tensor) -> Tensor:
        """Returns log-probabilities (B, H, A, V) at the temperature of exploration."""
        return log_softmax(self._logits(features) / self.config.temperature, dim=-1)

    def _tokens(self, x: Tensor) -> Tensor:
        """Returns the bins of values in [-1, 1]; those beyond are in the outermost."""
        bins = self.config.bins
        return ((x + 1.0) * (0.5 * bins)).floor().long().clamp(0, bins - 1)

    def _middles(self, tokens: Tensor) -> Tensor:
        return (tokens + 0.5) * (2.0 / self.config.bins) - 1.0

    def _scored(self, values: Tensor) -> Tensor:
        """Returns what is of the scored actions of (B, H, A), as (B, S)."""
        return values[:, : self.config.scored].flatten(1)

    def _chain(self, x: Tensor, tokens: Tensor, log_probs: Tensor, *, explored: bool) -> Chain:
        log_prob = self._scored(_chosen(log_probs, tokens))
        log_prob = log_prob if explored else log_prob[:, :0]
        index = torch.zeros_like(log_prob, dtype=torch.long)
        return Chain(
            x=torch.stack([torch.zeros_like(x), x], dim=1), index=index, log_prob=log_prob, grid=self.grid
        )


def _grid(config: ChunkPolicyConfig) -> TimeGrid:
    """Returns a grid of one step; its name differs where chains are scored in another way."""
    scored = config.scored or config.horizon
    name = f"Token(bins={config.bins}, temperature={config.temperature}) of {scored} actions"
    return TimeGrid(name, (1.0, 0.0), {})


def _drawn(log_probs: Tensor, generator: Generator | None) -> Tensor:
    """Draws bins (B, H, A) by the Gumbel-max trick."""
    device = log_probs.device if generator is None else generator.device
    uniform = torch.rand(log_probs.shape, generator=generator, device=device).to(log_probs.device)
    return (log_probs - (-uniform.clamp_min(1e-30).log()).log()).argmax(dim=-1)


def _chosen(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens[..., None]).squeeze(-1)
