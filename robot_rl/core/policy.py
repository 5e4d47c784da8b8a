"""The policy contract: encode an observation once, sample a chunk, score it, learn from demonstrations.

B envs, H chunk length, A action dim, K denoising steps, S scored transitions.
Actions are normalised to [-1, 1]; observations are dicts of tensors with a leading B.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol, TypeVar, cast, runtime_checkable

if TYPE_CHECKING:
    from torch import Generator, Tensor

Mode = Literal["ode", "explore", "mean"]
Encoded = NewType("Encoded", "dict[str, Tensor]")
"""The encoding of B observations by a policy: tensors with a leading B, by name.

All other methods of the policy read it, so a picture is encoded once. Other objects, such as critics and
novelty counts, read only `features`, (B, F).
"""
Tensors = TypeVar("Tensors", bound="dict[str, Tensor]")


def rows_of(tensors: Tensors, index: Tensor) -> Tensors:
    """Returns the rows `index` (N,) of observations or encodings; a row may be repeated."""
    return cast("Tensors", {name: value[index] for name, value in tensors.items()})


@dataclass
class Chain:
    """The stochastic path of a chunk, which a likelihood-based learner scores."""

    x: Tensor
    """Latent path, (B, K + 1, H, A); never clamped, so that its density is the sampler's."""
    index: Tensor
    """Which transitions were stochastic, (B, S)."""
    log_prob: Tensor
    """Their behaviour log-probability, (B, S), averaged over H and A."""
    grid: Any
    """The TimeGrid of the sampler."""
    noise: Tensor | None = None
    """(B, S, H, A): of the pairs that replace a likelihood; None where there is a likelihood."""
    time: Tensor | None = None
    """(B, S), of the pairs."""

    def rows(self, index: Tensor) -> Chain:
        """Returns some rows: a minibatch."""
        pairs = [None if part is None else part[index] for part in (self.noise, self.time)]
        return Chain(self.x[index], self.index[index], self.log_prob[index], self.grid, *pairs)


@dataclass
class ChunkSample:
    """A chunk of actions, and its chain if it was recorded."""

    actions: Tensor
    """(B, H, A) in [-1, 1]."""
    chain: Chain | None = None
    n_exec: Tensor | None = None
    """(B,) int64: how many of the actions to execute; None leaves it to the executor."""
    latent: Tensor | None = None
    """(B, H, A): the noise that the actions were decoded from, by a policy that steers it."""


@dataclass
class DemoBatch:
    """A batch for behaviour cloning."""

    obs: dict[str, Tensor]
    actions: Tensor
    """(B, H, A)"""
    valid: Tensor
    """(B, H), False beyond the end of the episode."""
    source: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> DemoBatch:
        """Returns the batch on another device."""
        obs = {key: value.to(device) for key, value in self.obs.items()}
        return DemoBatch(obs, self.actions.to(device), self.valid.to(device), self.source)


class Policy(Protocol):
    """Anything that acts. Adapters (residual, latent steering, best of n) are policies too."""

    horizon: int
    action_dim: int

    @property
    def refines(self) -> bool:
        """Whether `refine` changes actions: then every control step is encoded, else only decisions are."""
        ...

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the encoding of observations; the one method that reads their pictures."""
        ...

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A); `z` (B, H, A) is the initial noise, drawn if None."""
        ...

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns the log-probability and entropy of the scored transitions, (B, S) each."""
        ...

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the scalar imitation loss of the family (flow matching, denoising, likelihood)."""
        ...

    def refine(
        self,
        encoded: Encoded,
        action: Tensor,
        *,
        mode: Mode = "ode",
        generator: Generator | None = None,
    ) -> Tensor:
        """Returns the action (B, A) to execute now, given the chunk's; a residual corrects here."""
        ...


@runtime_checkable
class ContinuingPolicy(Protocol):
    """A policy whose next chunk can continue the one that is being executed."""

    def sample_after(
        self,
        encoded: Encoded,
        before: Tensor,
        known: Tensor,
        *,
        frozen: int,
        z: Tensor,
        mode: Mode = "ode",
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A) that continues the one before.

        Args:
            encoded: of the observation that the chunk is planned from.
            before: (B, H, A), the rest of the previous chunk, beginning now.
            known: (B,) int64, how many of these actions there are; 0 at the start of an episode.
            frozen: how many of them are executed before the new chunk is ready.
            z: (B, H, A), the initial noise.
            mode: as in `sample`.
            generator: as in `sample`.
        """
        ...
