"""Residual RL: a small correction, at every control step, of what the frozen base does (ResFiT)."""

from __future__ import annotations

from typing import Any

from robot_rl.core.errors import ConfigError
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.spec import SavedPolicy
from robot_rl.train.assemble import generator
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import off_policy
from robot_rl.train.improve.config import ResidualSettings
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.loop import Run
from robot_rl.train.session import Session


def make_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns the base with a head that does nothing yet."""
    cfg = settings_of(config, ResidualSettings)
    return resolve("policy", "residual", at="residual")(
        base, cfg.head, cfg.scale, generator=generator(config.seed, "head")
    )


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop of residual RL on a frozen base, and the policy whose head it trains."""
    config, cfg = session.config, settings_of(session.config, ResidualSettings)
    policy = make_policy(config, start.base).to(config.device)
    how: dict[str, Any] = {}
    if cfg.algorithm.privileged:
        if PRIVILEGED not in start.episodes.obs:
            raise ConfigError(
                "method.algorithm.privileged: got True, allowed: false where the policy sees the whole "
                "state. Leave elements out by env.state."
            )
        shown = {PRIVILEGED: start.episodes.obs[PRIVILEGED]}
        how = {"privileged": Normaliser.fit(shown, start.episodes.action)}
    algorithm = resolve("algorithm", "residual", at="residual")(
        policy, cfg.algorithm, train_seed(config.seed, "residual"), **how
    )
    draw = off_policy.steps(cfg)
    return off_policy.assemble(session, start, policy, algorithm, draw, reads=["features"]), policy


RESIDUAL = Method(make_policy=make_policy, assemble=assemble)
