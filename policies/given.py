"""A policy of others as a base: of LeRobot, or a graph of ONNX. It is frozen, and asked where it decides.

What learns next to it reads the state: `features` (B, S) are the state in standard deviations of the data
that the policy was trained on. Its own encoders are run for a decision, not for every control step and
replayed one, so a base that sees costs a replay nothing. Its actions are clipped to the env's [-1, 1].
B envs, H chunk length, A action dim, S state dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import CheckpointError
from robot_rl.core.language import INSTRUCTION
from robot_rl.core.policy import Chain, ChunkSample, Encoded, Mode
from robot_rl.policies.adapter import FrozenBaseAdapter
from robot_rl.policies.spec import SavedPolicy, build_module, full_spec

_OBS = "obs."
"""Begins the names of what was observed itself."""


class ForeignPolicy(SavedPolicy, Protocol):
    """A policy of others."""

    state_dim: int
    observed: tuple[str, ...]
    """Observations that it reads."""
    takes_noise: bool
    """Whether its chunk is decoded from noise."""

    def state_scale(self) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation (S,) of the state."""
        ...


class GivenPolicy(FrozenBaseAdapter):
    """Acts as its base does, and has the scaled state for `features`."""

    kind: ClassVar[str] = "given"

    def __init__(self, base: nn.Module, scale: tuple[Tensor, Tensor]) -> None:
        """Freezes `base`, a `ForeignPolicy`; `scale` is mean and standard deviation (S,) of the state."""
        super().__init__(base)
        self.feature_dim = self.foreign.state_dim
        self.state_mean: Tensor = nn.Buffer(scale[0].clone())
        self.state_std: Tensor = nn.Buffer(scale[1].clone())

    @property
    def foreign(self) -> ForeignPolicy:
        """The base, seen as a policy of others."""
        return cast("ForeignPolicy", self.base)

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the `features`, and what the base reads as it is.

        Raises:
            ValueError: the observation lacks something that the base reads.
        """
        read = self.foreign.observed
        missing = [key for key in read if key not in obs]
        if missing:
            raise ValueError(
                f"{self.foreign.kind}: the observation lacks {', '.join(missing)}; it has {', '.join(obs)}."
            )
        features = (obs["state"].to(self.state_mean.dtype) - self.state_mean) / self.state_std
        shown = {_OBS + key: obs[key] for key in (*read, INSTRUCTION) if key in obs}
        return Encoded({"features": features, **shown})

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the base's chunk (B, H, A), clipped; a base that decodes no noise ignores `z`."""
        noise = z if self.foreign.takes_noise else None
        how: dict[str, Any] = {"z": noise, "mode": mode, "record": record, "generator": generator}
        found = self.policy.sample(self._seen(encoded), **how)
        return replace(found, actions=found.actions.clamp(-1.0, 1.0))

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        return self.policy.log_prob(self._seen(encoded), chain)

    def _seen(self, encoded: Encoded) -> Encoded:
        """Returns the base's own encoding of what was observed."""
        obs = {name.removeprefix(_OBS): value for name, value in encoded.items() if name.startswith(_OBS)}
        with torch.no_grad():
            return self.policy.encode(obs)

    def spec(self) -> dict[str, Any]:
        return {"base": full_spec(self.policy)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        base = build_module(spec, "base", at=at)
        size = getattr(base, "state_dim", None)
        if not isinstance(size, int):
            raise CheckpointError(f"{at}: base {type(base).__name__} is no policy of others. Save it again.")
        return cls(base, (torch.zeros(size), torch.ones(size)))
