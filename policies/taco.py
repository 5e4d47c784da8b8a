"""Choosing among sampled chunks by a pseudo-count: what looks most like the data that succeeded.

TACO (Yang et al. 2025, "Steering vision-language-action models as anti-exploration") with coin-flip
networks (Lobel, Bagaria, Konidaris 2023, "Flipping coins to estimate pseudocounts for exploration in
reinforcement learning"): each row of the data is given d random signs, a network f regresses them, and
where a row occurs n times the best it can do is the mean of n signs, so |f|^2 / d estimates 1 / n.
A frozen random prior of variance 1, which the network has to cancel, keeps the count of rows
unlike the data near 1. `best_of_n` executes the chunk with the highest count.

Deviation: TACO counts the penultimate features of a VLA, which see observation and action candidate
both. The contract's `features` see the observation alone, so what is counted is [features, chunk].
B envs, H chunk length, A action dim, F feature dim, d coins, R rows of data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import DatasetError, require_fields
from robot_rl.core.policy import DemoBatch
from robot_rl.data.episodes import Episodes
from robot_rl.policies.networks import MLP, initialise
from robot_rl.policies.spec import SavedPolicy, read_config

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
        require_fields(self, "coin flips ", "1 or more", "coins", "width", "depth", "epochs", "batch")
        require_fields(self, "coin flips ", "1 or more, or null", "prefix")
        require_fields(self, "coin flips ", "above 0", "scale", "lr")


class CoinFlips(nn.Module):
    """Counts how often the data held something like (features, chunk): a scorer of `best_of_n`."""

    kind: ClassVar[str] = "coin_flips"

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

    def score(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns minus that estimate: what the data holds often is best."""
        return -self.inverse_count(features, actions)

    def spec(self) -> dict[str, Any]:
        return asdict(self.config)

    @classmethod
    def for_policy(cls, spec: Mapping[str, Any], policy: SavedPolicy, *, at: str) -> Self:
        config = read_config(CoinFlipConfig, spec, at=at)
        sizes = {name: getattr(policy, name) for name in ("feature_dim", "action_dim", "horizon")}
        return cls(config, **sizes)

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
    sizes = {name: getattr(policy, name) for name in ("feature_dim", "action_dim", "horizon")}
    coin_flips = CoinFlips(config, **sizes, generator=generator)
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
                parts.append(coin_flips.rows(policy.encode(obs)["features"], batch.actions[whole].to(device)))
    module.train(was_training)
    if not parts:
        raise DatasetError(
            f"coin flips: no demonstration has {coin_flips.steps} actions to count. Give episodes that "
            "succeed, or count fewer actions: prefix."
        )
    return torch.cat(parts)
