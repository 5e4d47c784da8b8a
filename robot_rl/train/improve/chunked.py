"""Chunked critics: Q-learning over the executed chunks, offline and then online (QC, QC-FQL, CO-RFT)."""

from __future__ import annotations

import copy
from typing import cast

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.policies.chunk import FlowPolicy
from robot_rl.policies.one_step import OneStepPolicy
from robot_rl.policies.spec import SavedPolicy
from robot_rl.train.assemble import generator
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import off_policy
from robot_rl.train.improve.config import ChunkedSettings
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.improve.offline import learn_offline
from robot_rl.train.loop import Run
from robot_rl.train.session import Session


def make_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns the best of the base's chunks by untrained critics, or a student that starts as the base."""
    flow = cast("FlowPolicy", copy.deepcopy(base))
    cfg = settings_of(config, ChunkedSettings)
    if cfg.algorithm.actor == "fql":
        return OneStepPolicy.student_of(flow)
    critics = make_critics(config, flow)
    return resolve("policy", "best_of_n", at="chunked")(flow, critics, cfg.algorithm.candidates)


def make_critics(config: RunConfig, flow: SavedPolicy) -> Module:
    """Returns untrained critics of the actions that are executed of the flow's chunks."""
    return resolve("scorer", "critic", at="chunked")(
        settings_of(config, ChunkedSettings).algorithm.critics,
        feature_dim=flow.feature_dim,
        action_dim=flow.action_dim,
        steps=config.n_exec,
        generator=generator(config.seed, "critics"),
    )


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop of chunked Q-learning, after its updates on the demonstrations, and the policy."""
    config, cfg = session.config, settings_of(session.config, ChunkedSettings)
    policy = make_policy(config, start.base).to(config.device)
    if cfg.algorithm.actor == "fql":
        flow = copy.deepcopy(cast("FlowPolicy", start.base)).to(config.device)
        critics, student = make_critics(config, flow).to(config.device), policy
    else:
        flow, critics, student = policy.base, policy.scorer, None
    algorithm = resolve("algorithm", "chunked", at="chunked")(
        flow, critics, cfg.algorithm, train_seed(config.seed, "chunked"), student=student
    )
    draw = off_policy.chunks(cfg, policy.horizon, critics.lengths)
    learn_offline(session, start, policy, algorithm, draw, cfg.offline_updates)
    return off_policy.assemble(session, start, policy, algorithm, draw), policy


CHUNKED = Method(make_policy=make_policy, assemble=assemble)
