"""Residual RL: a small correction, at every control step, of what the frozen base does (ResFiT)."""

from __future__ import annotations

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.policies.spec import SavedPolicy
from robot_rl.train.assemble import generator
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import off_policy
from robot_rl.train.improve.config import ResidualSettings
from robot_rl.train.improve.method import Method, Module, Start, privileged_scale, settings_of
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
    privileged = privileged_scale(config, start.episodes)
    algorithm = resolve("algorithm", "residual", at="residual")(
        policy, cfg.algorithm, train_seed(config.seed, "residual"), privileged=privileged
    )
    draw = off_policy.steps(cfg)
    return off_policy.assemble(session, start, policy, algorithm, draw, reads=["features"]), policy


RESIDUAL = Method(make_policy=make_policy, assemble=assemble)
