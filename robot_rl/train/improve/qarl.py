"""Robust RL against an adversary of bounded rationality, without the base (QARL)."""

from __future__ import annotations

import copy

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.policies.spec import SavedPolicy
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import direct, off_policy
from robot_rl.train.improve.config import QARLSettings
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.loop import Run
from robot_rl.train.session import Session


def make_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns an actor and its adversary: both explore, the actor alone is evaluated."""
    actor, opponent = direct.make_policy(config, base), settings_of(config, QARLSettings).algorithm.adversary
    adversary = resolve("policy", "actor", at="qarl")(
        actor.config_class(horizon=actor.horizon, width=opponent.width, depth=opponent.depth),
        state_dim=actor.state_dim,
        action_dim=actor.action_dim,
        normaliser=copy.deepcopy(actor.normaliser),
    )
    return resolve("policy", "contested", at="qarl")(actor, adversary, opponent.bound)


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop of the game, and the policy that holds both players."""
    config, cfg = session.config, settings_of(session.config, QARLSettings)
    policy = make_policy(config, start.base).to(config.device)
    learner = resolve("algorithm", "qarl", at="qarl")(
        policy.feature_dim,
        policy.action_dim,
        cfg.algorithm,
        train_seed(config.seed, "qarl"),
        encode=policy.encode,
        device=config.device,
    )
    draw = off_policy.steps(cfg)
    return off_policy.assemble(session, start, policy, learner, draw), policy


QARL = Method(make_policy=make_policy, assemble=assemble)
