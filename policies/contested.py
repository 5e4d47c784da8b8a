"""A policy and the adversary that it was trained against (QARL, `algos.qarl`).

    executed action = clip(a + bound d),  a = actor's,  d = adversary's

B envs, H chunk length, A action dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import ChunkSample, Encoded, Mode
from robot_rl.policies.adapter import PolicyAdapter
from robot_rl.policies.spec import SavedPolicy, build_module, full_spec


class ContestedPolicy(PolicyAdapter):
    """Base and adversary act in mode `explore`, the base alone in the others unless `is_contested`."""

    kind: ClassVar[str] = "contested"

    def __init__(self, base: nn.Module, adversary: nn.Module, bound: float) -> None:
        """Args: base, adversary: policies of the same sizes. bound: largest push, a share of [-1, 1]."""
        super().__init__(base)
        self.adversary = adversary
        self.bound = bound
        self.is_contested = False
        """Whether the adversary acts in every mode: for evaluation, in no checkpoint."""

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the base's chunk (B, H, A), pushed where the adversary acts too."""
        found = super().sample(encoded, z=z, mode=mode, record=record, generator=generator)
        if mode != "explore" and not self.is_contested:
            return found
        adversary = cast("SavedPolicy", self.adversary)
        push = adversary.sample(encoded, mode=mode, generator=generator).actions
        return replace(found, actions=torch.add(found.actions, push, alpha=self.bound).clamp(-1.0, 1.0))

    def spec(self) -> dict[str, Any]:
        adversary = full_spec(cast("SavedPolicy", self.adversary))
        return {"base": full_spec(self.policy), "adversary": adversary, "bound": self.bound}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        base, adversary = (build_module(spec, name, at=at) for name in ("base", "adversary"))
        return cls(base, adversary, float(spec["bound"]))
