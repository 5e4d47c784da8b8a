"""The settings of every method of improving a base; `RunConfig` has a section for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from robot_rl.algos.actor_critic import ActorCriticConfig
from robot_rl.algos.residual import ResidualConfig
from robot_rl.core.errors import require
from robot_rl.policies.residual import ResidualHeadConfig


@dataclass(frozen=True, kw_only=True)
class ImprovePhase:
    """What every method of improving the base has."""

    name: ClassVar[str]
    """The method's name, and its section's in the configuration."""
    env_steps: int = 100_000
    """Control steps over all envs; 0 leaves the base as it is."""

    def __post_init__(self) -> None:
        self._require("env_steps", self.env_steps >= 0, "0 or more")

    def _require(self, field: str, holds: bool, allowed: str) -> None:
        require(holds, f"{self.name}.{field}", getattr(self, field), allowed)


@dataclass(frozen=True, kw_only=True)
class OffPolicyPhase(ImprovePhase):
    """What methods that learn from replayed steps have."""

    utd: float = 1.0
    """Learner updates per control step."""
    batch: int = 256
    demo_ratio: float = 0.5
    """Share of each batch that comes from the demonstrations."""
    explore_steps: int = 2000
    """Control steps of the first policy with exploration noise before the learner starts."""
    capacity: int = 200_000
    """Control steps the replay holds; the oldest go first."""
    publish_every: int = 1
    """Learner updates between two hand-overs of weights to those who act."""
    max_staleness: int = 1000
    """Learner updates by which acting weights may lag behind before the run stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("utd", 0 < self.utd <= 64, "above 0, at most 64")
        self._require("batch", self.batch >= 2, "2 or more")
        self._require("demo_ratio", 0 <= self.demo_ratio < 1, "0 to below 1")
        self._require("explore_steps", self.explore_steps >= 0, "0 or more")
        self._require("capacity", self.capacity >= 1000, "1000 or more")
        bound = self.max_staleness
        self._require("publish_every", 1 <= self.publish_every <= bound, f"1 to max_staleness, {bound}")

    @property
    def n_step(self) -> int:
        """Longest window of rewards before the bootstrap, in control steps."""
        raise NotImplementedError

    @property
    def gamma_step(self) -> float:
        """Discount per control step."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ResidualPhase(OffPolicyPhase):
    """Residual RL on the frozen base."""

    name: ClassVar[str] = "residual"
    scale: float = 0.2
    """Largest correction, as a share of the env's [-1, 1]."""
    head: ResidualHeadConfig = field(default_factory=ResidualHeadConfig)
    algorithm: ResidualConfig = field(default_factory=ResidualConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("scale", 0 < self.scale <= 1, "above 0, at most 1")

    @property
    def n_step(self) -> int:
        return self.algorithm.n_step

    @property
    def gamma_step(self) -> float:
        return self.algorithm.gamma_step


@dataclass(frozen=True, kw_only=True)
class DirectPhase(OffPolicyPhase):
    """An actor of its own, without the base (RLPD, WSRL, FastTD3, FastSAC)."""

    name: ClassVar[str] = "direct"
    pretrain_updates: int = 0
    """Updates on the demonstrations before the first control step: the actor clones them, the critics
    learn the clone's values; then `explore_steps` of the clone come before any other update (WSRL)."""
    explore_std: tuple[float, float] = (0.1, 0.1)
    """Noise of a deterministic actor: that of the first env and of the last; those between step evenly."""
    algorithm: ActorCriticConfig = field(default_factory=ActorCriticConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("pretrain_updates", self.pretrain_updates >= 0, "0 or more")
        self._require("explore_std", min(self.explore_std) >= 0, "0 or more, each")

    @property
    def n_step(self) -> int:
        return self.algorithm.n_step

    @property
    def gamma_step(self) -> float:
        return self.algorithm.gamma_step
