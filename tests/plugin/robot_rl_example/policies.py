"""A policy of its own: a regression from the state to a chunk, and the shortest that the contract allows."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Generator, Tensor
from torch.nn.functional import huber_loss

from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.config import PolicyConfig
from robot_rl.policies.encoded import EncodedPolicy, valid_mean
from robot_rl.policies.networks import MLP, initialise


@dataclass(frozen=True, kw_only=True)
class RegressionConfig(PolicyConfig):
    """Settings: `policy.kind=regression policy.width=64`."""

    kind: ClassVar[str] = "regression"
    width: int = 64
    cameras: ClassVar[tuple[str, ...]] = ()
    image_features: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"policy width must be at least 1, got {self.width}")


class Regression(EncodedPolicy):
    """Does what the demonstrations do on average."""

    kind: ClassVar[str] = "regression"
    config_class: ClassVar[type[Any]] = RegressionConfig

    def __init__(
        self,
        config: RegressionConfig,
        *,
        state_dim: int,
        action_dim: int,
        normaliser: Normaliser | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(config, state_dim=state_dim, action_dim=action_dim, normaliser=normaliser)
        self.net = MLP(state_dim, config.horizon * action_dim, width=config.width, depth=2)
        initialise(self, generator)

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        if record:
            raise ValueError("sample: a regression has no chain to record. Improve it by method=residual.")
        chunk = self.normaliser.unaction(self._chunk(encoded["features"]))
        return ChunkSample(chunk.clamp(-1.0, 1.0))

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        raise ValueError("log_prob: a regression has no chains. Improve it by method=residual.")

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        features, actions = self._demonstration(batch, generator)
        return valid_mean(huber_loss(self._chunk(features), actions, reduction="none"), batch.valid)

    def _chunk(self, features: Tensor) -> Tensor:
        return self.net(features).unflatten(1, (self.horizon, self.action_dim))
