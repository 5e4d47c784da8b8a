"""Choosing among N sampled chunks by a scorer: a pseudo-count of the data (TACO), or a critic (Q-chunking).

B envs, N candidates, H chunk length, A action dim, F feature dim, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import ChunkSample, Encoded, Mode, rows_of
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import EpisodeRng
from robot_rl.policies.adapter import PolicyAdapter, refuse_continuing
from robot_rl.policies.chain import initial_noise
from robot_rl.policies.spec import SavedPolicy, build_module, check_mode, full_spec, read_size


class Scorer(Protocol):
    """Says which chunk is best; it is a `torch.nn.Module` as well."""

    kind: ClassVar[str]
    """Its name in the registry."""

    def score(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns how good each row is, (R,), of features (R, F) and chunks (R, H, A)."""
        ...

    def spec(self) -> dict[str, Any]:
        """Returns what `for_policy` needs, as JSON values, without the weights."""
        ...

    @classmethod
    def for_policy(cls, spec: Mapping[str, Any], policy: SavedPolicy, *, at: str) -> Self:
        """Builds the scorer of a policy's chunks, with weights still to be loaded."""
        ...


class BestOfN(PolicyAdapter):
    """Samples N chunks of its base and returns the one that `scorer` finds best.

    The noise of the other candidates is computed from a row's own `z`, so the choice depends neither
    on the other rows nor on a generator. Candidate 0 is the chunk of the base alone. In mode `mean` there
    is one candidate. The log-probability is that of the chosen chain under the base; it does not count
    that the best of N was chosen.
    """

    kind: ClassVar[str] = "best_of_n"

    def __init__(self, base: nn.Module, scorer: nn.Module, n: int) -> None:
        """Puts the choice on top of `base`; neither is frozen, and the scorer learns elsewhere.

        Args:
            base: a policy (`SavedPolicy`) that is a module as well.
            scorer: a `Scorer` of the base's features and chunks.
            n: N, at least 1.
        """
        if n < 1:
            raise ValueError(f"best_of_n: n must be at least 1, got {n}")
        refuse_continuing(base, self.kind, "Choose among the chunks of its base.")
        super().__init__(base)
        self.scorer = scorer.requires_grad_(False)
        self.n = n

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the chosen chunk (B, H, A), and its chain if recorded."""
        check_mode(mode)
        if self.n == 1 or mode == "mean":
            return self.policy.sample(encoded, z=z, mode=mode, record=record, generator=generator)
        features = encoded["features"]
        batch = len(features)
        z = initial_noise(self, features, z, mode, generator)
        candidates = rows_of(encoded, torch.arange(batch, device=features.device).repeat_interleave(self.n))
        z = candidate_noise(z, self.n)
        found = self.policy.sample(candidates, z=z, mode=mode, record=record, generator=generator)
        score = cast("Scorer", self.scorer).score(candidates["features"], found.actions)
        best = score.view(batch, self.n).argmax(dim=1)
        rows = torch.arange(batch, device=best.device) * self.n + best
        chain = None if found.chain is None else found.chain.rows(rows)
        return ChunkSample(found.actions[rows], chain, None if found.n_exec is None else found.n_exec[rows])

    def spec(self) -> dict[str, Any]:
        scorer = cast("Scorer", self.scorer)
        described = {"kind": scorer.kind, **scorer.spec()}
        return {"base": full_spec(self.policy), "scorer": described, "n": self.n}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        base = build_module(spec, "base", at=at)
        scorer = dict(spec["scorer"])
        kind = scorer.pop("kind", "coin_flips")  # the only one there was when none was written
        scorer_class: type[Scorer] = resolve("scorer", kind, at=at)
        module = cast("nn.Module", scorer_class.for_policy(scorer, cast("SavedPolicy", base), at=at))
        return cls(base, module, read_size(spec, "n", at=at))


def candidate_noise(z: Tensor, n: int) -> Tensor:
    """Returns the noise of N candidates for every row of `z` (B, H, A), row after row: (B N, H, A).

    Candidate 0 is `z` itself; the others are independent draws, seeded by the bits of the row.
    """
    batch = len(z)
    flat = np.ascontiguousarray(z.detach().to("cpu", torch.float32).numpy()).reshape(batch, -1)
    odd = EpisodeRng(np.arange(flat.shape[1]), 0).key | np.uint64(1)
    seeds = (flat.view(np.uint32) * odd).sum(axis=1, dtype=np.uint64)  # modulo 2^64
    rng = EpisodeRng(np.repeat(seeds, n - 1), np.tile(np.arange(1, n, dtype=np.uint64), batch))
    others = rng.normal(flat.shape[1]).astype(np.float32).reshape(batch, n - 1, *z.shape[1:])
    return torch.cat([z[:, None], torch.from_numpy(others).to(z)], dim=1).flatten(0, 1)
