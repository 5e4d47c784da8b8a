"""Latent-noise RL: which noise the frozen base decodes is learned, the base stays as it is (DSRL)."""

from __future__ import annotations

from functools import partial
from typing import Any

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.data.parts import AtDecisions
from robot_rl.policies.spec import SavedPolicy
from robot_rl.train.assemble import generator
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import off_policy
from robot_rl.train.improve.config import LatentSettings
from robot_rl.train.improve.method import Method, Module, Start, privileged_scale, settings_of
from robot_rl.train.loop import Run
from robot_rl.train.session import Session


def make_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns the base with an actor that does not steer yet."""
    return resolve("policy", "latent", at="latent")(
        base, settings_of(config, LatentSettings).actor, generator=generator(config.seed, "actor")
    )


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop of latent RL on a frozen base, and the policy whose actor it trains."""
    config, cfg = session.config, settings_of(session.config, LatentSettings)
    policy = make_policy(config, start.base).to(config.device)
    privileged = privileged_scale(config, start.episodes)
    algorithm = resolve("algorithm", "latent", at="latent")(
        policy,
        cfg.algorithm,
        train_seed(config.seed, "latent"),
        n_exec=config.n_exec,
        privileged=privileged,
    )
    draw = off_policy.chunks(cfg, config.n_exec)
    how: dict[str, Any] = {"reads": off_policy.small_encoding(policy, start.episodes)}
    if cfg.algorithm.variant == "sac":  # learns where chunks began, and from nothing but new steps
        how |= {
            "latent_dim": policy.horizon * policy.action_dim,
            "online": partial(AtDecisions, horizon=config.n_exec),
        }
    return off_policy.assemble(session, start, policy, algorithm, draw, **how), policy


LATENT = Method(make_policy=make_policy, assemble=assemble)
