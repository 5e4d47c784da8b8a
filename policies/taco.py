"""Choosing among sampled chunks by a pseudo-count: what looks most like the data that succeeded.

TACO (Yang et al. 2025, "Steering vision-language-action models as anti-exploration") with coin-flip
networks (Lobel, Bagaria, Konidaris 2023, "Flipping coins to estimate pseudocounts for exploration in
reinforcement learning"): each row of the data is given d random signs, a network f regresses them, and
where a row occurs n times the best it can do is the mean of n signs, so |f|^2 / d estimates 1 / n.
A frozen random prior of variance 1, which the network has to cancel, keeps the count of rows
unlike the data near 1. The chunk with the highest count is executed.

Deviation: TACO counts the penultimate features of a VLA, which see observation and action candidate
both. The contract's `features` see the observation alone, so what is counted is [features, chunk].
B envs, N candidates, H chunk length, A action dim, F feature dim, d coins, R rows of data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import DatasetError
from robot_rl.core.policy import Chain, ChunkSample, ContinuingPolicy, DemoBatch, Mode
from robot_rl.core.seeding import EpisodeRng
from robot_rl.data.episodes import Episodes
from robot_rl.policies.adapter import PolicyAdapter
from robot_rl.policies.networks import MLP, initialise
from robot_rl.policies.processes import normal_like
from robot_rl.policies.spec import (
    SavedPolicy,
    build,
    check_chunk,
    check_mode,
    full_spec,
    read_config,
    read_size,
)

_STD_FLOOR = 1e-3
"""An element that never moved in the data would otherwise decide every choice."""


@dataclass(frozen=True, kw_only=True)
class CoinFlipConfig:
    """The network that counts, and how it is trained."""

    prefix: int | None = None
    """Actions of a chunk that are counted, best those that are executed; None counts all."""
    coins: int = 20
    """d, the signs of each row: the count of one row has a relative spread of sqrt(2 / d)."""
    width: int = 256
    """Units of a hidden layer (the paper's 1536 are for features of a VLA)."""
    depth: int = 4
    """Hidden layers, each adding to the one before after the first."""
    scale: float = 3.0
    """Factor on the standardised input; larger tells more alike chunks apart (TACO: 10, not standardised)."""
    epochs: int = 16
    batch: int = 512
    lr: float = 1e-3
    """Highest learning rate of the one-cycle schedule."""

    def __post_init__(self) -> None:
        for name in ("coins", "width", "depth", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"coin flips {name} must be at least 1, got {getattr(self, name)}")
        if self.prefix is not None and self.prefix < 1:
            raise ValueError(f"coin flips prefix must be None or at least 1, got {self.prefix}")
        for name in ("scale", "lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"coin flips {name} must be above 0, got {getattr(self, name)}")


class CoinFlips(nn.Module):
    """Counts how often the data held something like (features, chunk)."""

    def __init__(
        self,
        config: CoinFlipConfig,
        *,
        feature_dim: int,
        action_dim: int,
        horizon: int,
        generator: Generator | None = None,
    ) -> None:
        """Builds an untrained network; `fit_coin_flips` trains one.

        Raises:
            ValueError: the prefix is longer than the chunk.
        """
        super().__init__()
        self.config = config
        self.steps = config.prefix or horizon
        if self.steps > horizon:
            raise ValueError(f"coin flips prefix must be at most the horizon {horizon}, got {self.steps}")
        inputs = feature_dim + self.steps * action_dim
        sizes: dict[str, Any] = {"width": config.width, "depth": config.depth, "residual": True}
        self.net = MLP(inputs, config.coins, **sizes)
        self.prior = MLP(inputs, config.coins, **sizes).requires_grad_(False)
        initialise(self, generator)
        for name, size in (("input", inputs), ("prior", config.coins)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        self.input_mean: Tensor
        self.input_std: Tensor
        self.prior_mean: Tensor
        self.prior_std: Tensor

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns the predicted signs (R, d) of rows with features (R, F) and chunks (R, H, A)."""
        return self.predict(self.rows(features, actions))

    def inverse_count(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns an estimate of one over the number of such rows in the data, (R,)."""
        return self(features, actions).square().mean(dim=-1)

    def rows(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns what is counted, before it is standardised."""
        return torch.cat([features, actions[:, : self.steps].flatten(1)], dim=-1)

    def predict(self, rows: Tensor) -> Tensor:
        x = self.config.scale * (rows - self.input_mean) / self.input_std
        return self.net(x) + (self.prior(x) - self.prior_mean) / self.prior_std

    def standardise(self, rows: Tensor) -> None:
        """Measures the data: inputs and the prior's outputs get mean 0 and variance 1 over it."""
        self.input_mean.copy_(rows.mean(dim=0))
        self.input_std.copy_(rows.std(dim=0, correction=0).clamp_min(_STD_FLOOR))
        prior = self.prior(self.config.scale * (rows - self.input_mean) / self.input_std)
        self.prior_mean.copy_(prior.mean(dim=0))
        self.prior_std.copy_(prior.std(dim=0, correction=0).clamp_min(_STD_FLOOR))


class BestOfN(PolicyAdapter):
    """Samples N chunks of its base and returns the one that the data of `scorer` holds most often.

    The noise of the other candidates follows from a row's own `z`, so the choice depends neither
    on the rows beside it nor on a generator; candidate 0 is what the base alone would do. Mode
    `mean` has nothing to choose from. The log-probability is that of the chosen chain under the
    base: that the best was chosen is not in it.
    """

    kind: ClassVar[str] = "best_of_n"

    def __init__(self, base: nn.Module, scorer: CoinFlips, n: int) -> None:
        """Puts the choice on top of `base`; neither is frozen, and the scorer learns elsewhere.

        Args:
            base: a policy (`SavedPolicy`) that is a module as well.
            scorer: fitted on the base's features.
            n: N, at least 1.
        """
        if n < 1:
            raise ValueError(f"best_of_n: n must be at least 1, got {n}")
        if isinstance(base, ContinuingPolicy):
            raise ValueError(
                f"best_of_n: the base is {type(base).__name__}, whose chunks would no longer continue each "
                "other. Choose among the chunks of its base."
            )
        super().__init__(base)
        self.scorer = scorer.requires_grad_(False)
        self.n = n

    def sample(
        self,
        obs: dict[str, Tensor],
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the chosen chunk (B, H, A), and its chain if recorded."""
        check_mode(mode)
        if self.n == 1 or mode == "mean":
            return self.policy.sample(obs, z=z, mode=mode, record=record, generator=generator)
        features = self.policy.features(obs)
        batch = len(features)
        shape = (batch, self.horizon, self.action_dim)
        z = normal_like(features.new_zeros(shape), generator) if z is None else z
        check_chunk("sample", "z", z, shape)
        repeated = {name: value.repeat_interleave(self.n, dim=0) for name, value in obs.items()}
        found = self.policy.sample(
            repeated,
            z=candidate_noise(z, self.n),
            mode=mode,
            record=record,
            generator=generator,
        )
        rarity = self.scorer.inverse_count(features.repeat_interleave(self.n, dim=0), found.actions)
        best = rarity.view(batch, self.n).argmin(dim=1)
        return _rows(found, torch.arange(batch, device=best.device) * self.n + best)

    def spec(self) -> dict[str, Any]:
        return {"base": full_spec(self.policy), "scorer": asdict(self.scorer.config), "n": self.n}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        base = build(spec["base"], at=f"{at}: base")
        config = read_config(CoinFlipConfig, spec["scorer"], at=at)
        return cls(cast("nn.Module", base), _coin_flips(base, config, None), read_size(spec, "n", at=at))


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


def fit_coin_flips(
    policy: SavedPolicy,
    demonstrations: Iterable[DemoBatch],
    config: CoinFlipConfig | None = None,
    *,
    seed: int = 0,
) -> CoinFlips:
    """Trains a counter of (features, chunk) on demonstrations that succeeded.

    Rows whose counted actions reach beyond the end of an episode are left out.

    Args:
        policy: whose frozen features are counted, on its own device.
        demonstrations: every row once, such as `successes` yields.
        config: network and training; None for the defaults.
        seed: of signs, weights and batches.

    Raises:
        DatasetError: no row is left.
    """
    config = config or CoinFlipConfig()
    generator = Generator().manual_seed(seed)
    coin_flips = _coin_flips(policy, config, generator)
    rows = _counted(policy, coin_flips, demonstrations)
    signs = torch.randint(2, (len(rows), config.coins), generator=generator) * 2.0 - 1.0
    coin_flips.to(rows.device).standardise(rows)
    signs = signs.to(rows)
    batches = -(-len(rows) // config.batch)
    optimiser = torch.optim.AdamW(coin_flips.net.parameters(), lr=config.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=config.lr, total_steps=config.epochs * batches
    )
    for _ in range(config.epochs):
        order = torch.randperm(len(rows), generator=generator).to(rows.device)
        for chosen in order.tensor_split(batches):
            loss = (coin_flips.predict(rows[chosen]) - signs[chosen]).square().mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return coin_flips.eval()


def successes(episodes: Episodes, horizon: int, *, batch: int = 1024) -> Iterator[DemoBatch]:
    """Yields a window of H actions from every step of the episodes that succeed, in order."""
    kept = np.flatnonzero(episodes.episode_success()[episodes.episode_index])
    last = episodes.bounds()[1][episodes.episode_index] - 1
    for start in range(0, len(kept), batch):
        first = kept[start : start + batch]
        rows = first[:, None] + np.arange(horizon)
        end = last[first][:, None]
        yield DemoBatch(
            obs={key: torch.from_numpy(value[first]) for key, value in episodes.obs.items()},
            actions=torch.from_numpy(episodes.action[np.minimum(rows, end)]),
            valid=torch.from_numpy(rows <= end),
        )


def _counted(policy: SavedPolicy, coin_flips: CoinFlips, demonstrations: Iterable[DemoBatch]) -> Tensor:
    """Returns all rows to count, (R, F + prefix A), on the policy's device."""
    module = cast("nn.Module", policy)
    device = next(module.parameters()).device
    was_training = module.training
    module.eval()  # features as they are when acting
    parts: list[Tensor] = []
    with torch.no_grad():
        for batch in demonstrations:
            whole = batch.valid[:, : coin_flips.steps].all(dim=1)
            if whole.any():
                obs = {name: value[whole].to(device) for name, value in batch.obs.items()}
                parts.append(coin_flips.rows(policy.features(obs), batch.actions[whole].to(device)))
    module.train(was_training)
    if not parts:
        raise DatasetError(
            f"coin flips: no demonstration has {coin_flips.steps} actions to count. Give episodes that "
            "succeed, or count fewer actions: prefix."
        )
    return torch.cat(parts)


def _coin_flips(policy: SavedPolicy, config: CoinFlipConfig, generator: Generator | None) -> CoinFlips:
    return CoinFlips(
        config,
        feature_dim=policy.feature_dim,
        action_dim=policy.action_dim,
        horizon=policy.horizon,
        generator=generator,
    )


def _rows(sample: ChunkSample, rows: Tensor) -> ChunkSample:
    chain = sample.chain
    if chain is not None:
        chain = Chain(chain.x[rows], chain.index[rows], chain.log_prob[rows], chain.grid)
    n_exec = None if sample.n_exec is None else sample.n_exec[rows]
    return ChunkSample(sample.actions[rows], chain, n_exec)
