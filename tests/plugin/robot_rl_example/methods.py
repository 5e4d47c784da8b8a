"""A method of its own: SAC whose rewards are scaled, with a setting for the scale."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from robot_rl.algos.actor_critic import ActorCritic
from robot_rl.core.seeding import train_seed
from robot_rl.data.transitions import TransitionBatch
from robot_rl.train.improve import off_policy
from robot_rl.train.improve.config import DirectSettings
from robot_rl.train.improve.direct import make_policy
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.loop import Run
from robot_rl.train.session import Session


@dataclass(frozen=True, kw_only=True)
class ScaledSettings(DirectSettings):
    """Settings: those of `direct`, and the scale."""

    kind: ClassVar[str] = "scaled"
    reward_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("reward_scale", self.reward_scale > 0, "above 0")


class ScaledActorCritic(ActorCritic):
    """Learns `scale` times the reward."""

    scale = 1.0

    def update(self, batch: TransitionBatch) -> Mapping[str, Tensor]:
        return super().update(replace(batch, reward=self.scale * batch.reward))


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop, and the policy that it trains."""
    config, cfg = session.config, settings_of(session.config, ScaledSettings)
    policy: Any = make_policy(config, start.base).to(config.device)
    sizes = (policy.feature_dim, policy.action_dim)
    learner = ScaledActorCritic(
        *sizes, cfg.algorithm, train_seed(config.seed, "scaled"), encode=policy.encode
    )
    learner.scale = cfg.reward_scale
    return off_policy.assemble(session, start, policy, learner, off_policy.steps(cfg)), policy


SCALED = Method(make_policy=make_policy, assemble=assemble, settings=ScaledSettings)
