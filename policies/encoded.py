"""The base of policies with an observation encoder: sizes, features, spec, demonstrations.

B envs, H chunk length, A action dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Self

from torch import Generator, Tensor, nn

from robot_rl.core.names import PRIVILEGED
from robot_rl.core.policy import DemoBatch, Encoded
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.config import PictureSettings
from robot_rl.policies.networks import ObservationEncoder
from robot_rl.policies.spec import Unrefined, check_demonstration, read_config, read_size


class EncodedPolicy(Unrefined, nn.Module):
    """An encoder of state and cameras, whose normaliser travels in the checkpoint."""

    kind: ClassVar[str]
    config_class: ClassVar[type[Any]]

    def __init__(
        self, config: Any, *, state_dim: int, action_dim: int, normaliser: Normaliser | None = None
    ) -> None:
        """Builds the encoder; a policy without a normaliser gets an identity, to be loaded later.

        Raises:
            ValueError: the normaliser is of other sizes.
        """
        super().__init__()
        self.config = config
        self.horizon: int = config.horizon
        self.state_dim = state_dim
        self.action_dim = action_dim
        normaliser = _checked(normaliser, state_dim=state_dim, action_dim=action_dim)
        self.encoder = _encoder(config, normaliser) if config.cameras else ObservationEncoder(normaliser)
        self.feature_dim = self.encoder.dim

    @property
    def normaliser(self) -> Normaliser:
        return self.encoder.normaliser

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the normalised state, then the features of each camera, as `features` (B, F)."""
        return Encoded({"features": self.encoder(obs)})

    def shifted(self, obs: Mapping[str, Tensor], generator: Generator | None) -> dict[str, Tensor]:
        """Returns observations whose pictures are shifted at random, as the encoder learns from them."""
        return self.encoder.augment(obs, pad_px=self.config.random_shift_px, generator=generator)

    def guess_loss(self, features: Tensor, obs: Mapping[str, Tensor]) -> Tensor | float:
        """Returns the weighted error of the guessed privileged state; 0 of a policy that guesses none."""
        if self.encoder.guess is None:
            return 0.0
        return self.config.guess_weight * self.encoder.guess_error(features, obs)

    def spec(self) -> dict[str, Any]:
        sizes = {"state_dim": self.state_dim, "action_dim": self.action_dim}
        if PRIVILEGED in self.normaliser.feature_dims:
            sizes["privileged_dim"] = self.normaliser.feature_dims[PRIVILEGED]
        return {**sizes, "config": asdict(self.config)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        config = read_config(cls.config_class, spec["config"], at=at)
        state_dim, action_dim = (read_size(spec, n, at=at) for n in ("state_dim", "action_dim"))
        sizes = {"state": state_dim}
        if "privileged_dim" in spec:
            sizes[PRIVILEGED] = read_size(spec, "privileged_dim", at=at)
        identity = Normaliser(sizes, action_dim)
        return cls(config, state_dim=state_dim, action_dim=action_dim, normaliser=identity)

    def _demonstration(self, batch: DemoBatch, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Returns features (B, F), of shifted images while training, and normalised actions (B, H, A)."""
        check_demonstration(batch, self.horizon, self.action_dim)
        obs: Mapping[str, Tensor] = batch.obs
        if self.training and self.config.cameras:
            obs = self.shifted(obs, generator)
        return self.encoder(obs), self.normaliser.action(batch.actions)


def _encoder(config: PictureSettings, normaliser: Normaliser) -> ObservationEncoder:
    return ObservationEncoder(
        normaliser,
        cameras=config.cameras,
        image_features=config.image_features,
        image_encoder=config.image_encoder,
        frozen_graph=config.frozen_graph,
        predicts=normaliser.feature_dims.get(PRIVILEGED, 0) if config.guess_weight else 0,
    )


def _checked(normaliser: Normaliser | None, *, state_dim: int, action_dim: int) -> Normaliser:
    """Returns the normaliser, or an identity one for None.

    Raises:
        ValueError: it was fitted on other sizes.
    """
    if normaliser is None:
        return Normaliser({"state": state_dim}, action_dim)
    fitted = (normaliser.feature_dims.get("state"), normaliser.action_dim)
    if fitted != (state_dim, action_dim):
        raise ValueError(
            f"policy: the normaliser has state and action dims {fitted}, the policy "
            f"{(state_dim, action_dim)}. Fit it on data of this task and robot."
        )
    return normaliser


def valid_mean(error: Tensor, valid: Tensor) -> Tensor:
    """Averages `error` (B, H, A) over the control steps where `valid` (B, H)."""
    weight = valid.to(error.dtype)
    return (error.mean(dim=-1) * weight).sum() / weight.sum().clamp_min(1.0)
