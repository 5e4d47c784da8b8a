"""PPO through the denoising chain of a copy of the base, or of a new policy: pi_RL, DPPO, ReinFlow, FPO."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.spec import SavedPolicy
from robot_rl.rollout.chunks import RolloutSource
from robot_rl.rollout.weights import Publisher
from robot_rl.train.assemble import generator, new_policy
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.acting import sources_of
from robot_rl.train.improve.config import NOISE, ChainSettings, PPOSettings
from robot_rl.train.improve.method import (
    Method,
    Module,
    Start,
    add_hooks,
    privileged_scale,
    settings_of,
)
from robot_rl.train.loop import Experience, Learner, Pacer, Run
from robot_rl.train.rollouts import RolloutExperience
from robot_rl.train.schedule import Always
from robot_rl.train.session import Session


def make_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns what explores by the method's process: a copy of the base, or a new policy if it is noise."""
    module: Any = new_policy(config, base) if base.kind == NOISE else copy.deepcopy(base)
    own = getattr(module, "explorable", None) or module.config
    process = settings_of(config, ChainSettings).explored(own, config.n_exec)
    return module.with_process(process, generator=generator(config.seed, "exploration"))


def make_source(config: RunConfig, policy: Module, env: VectorEnv, name: str) -> RolloutSource:
    """Returns a source of rollouts; RunConfig refuses those of an arm."""
    return RolloutSource(
        env,
        acting_copy(config, policy),
        decisions=settings_of(config, PPOSettings).decisions,
        travels=config.acts_alone(name),
        **chunk_options(config, name),
    )


def acting_copy(config: RunConfig, policy: Module) -> Module:
    """Returns a copy of the learner's policy that acts on the learner's device."""
    return copy.deepcopy(policy).to(config.device).eval()


def chunk_options(config: RunConfig, name: str) -> dict[str, Any]:
    """Returns the arguments that sources of chunks share, for the source of that name; see `ChunkSource`."""
    return {
        "n_exec": config.n_exec,
        "gamma_step": settings_of(config, ChainSettings).algorithm.gamma_step,
        "seed": train_seed(config.seed, f"collect {name}".strip()) // 2,
        "device": config.device,
    }


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop that trains a copy of the base on its own rollouts, and that copy."""
    policy = make_policy(session.config, start.base).to(session.config.device)
    return assemble_online(session, start, policy), policy


def assemble_online(session: Session, start: Start, policy: Module) -> Run:
    """Returns the loop that trains `policy` on its own rollouts."""
    config, cfg = session.config, settings_of(session.config, PPOSettings)
    session.counters.updates = 0
    algorithm = resolve("algorithm", "chain_ppo", at="ppo")(
        policy,
        cfg.algorithm,
        train_seed(config.seed, "ppo"),
        privileged=privileged_scale(config, start.episodes),
    )
    rollouts = RolloutExperience(algorithm, **rollout_options(session, "ppo batches"))
    learner = Learner(algorithm, rollouts, Always(rollouts.owed), publisher_of(config))
    return on_policy(session, start, policy, learner, rollouts, rollouts.metrics)


def rollout_options(session: Session, stream: str) -> dict[str, Any]:
    """Returns the arguments of a `RolloutExperience` whose sources may act elsewhere.

    Args:
        session: of the run.
        stream: of the seed.
    """
    config, cfg = session.config, settings_of(session.config, ChainSettings)
    return {
        "batch": cfg.algorithm.batch,
        "epochs": cfg.algorithm.epochs,
        "seed": train_seed(config.seed, stream),
        "updates": lambda: session.counters.updates,
        "max_staleness": cfg.max_staleness,
    }


def publisher_of(config: RunConfig) -> Publisher:
    """Returns the publisher of the weights, which leave the device only for sources in other processes."""
    return Publisher(stays=not any(config.acts_alone(name) for name in config.acting))


def on_policy(
    session: Session,
    start: Start,
    policy: Module,
    learner: Learner,
    rollouts: Experience,
    more: Callable[[], dict[str, float]],
) -> Run:
    """Returns the loop in which a learner trains `policy` on its newest rollouts; `more` adds metrics."""
    config = session.config
    run = Run(
        sources=sources_of(session, start, policy),
        experience=rollouts,
        learners=[learner],
        pacer=_pacer(config),
        stage=session.timer.stage,
        counters=session.counters,
    )
    add_hooks(session, run, policy, start.eval_envs, more)
    return run


def _pacer(config: RunConfig) -> Pacer:
    """Returns when the run ends: each of several sources has a budget; alone it has what a gate leaves."""
    if config.sources:
        return Pacer.of_budgets([source.env_steps for source in config.sources.values()])
    return Pacer(finished=lambda at: at.env_steps >= config.method.env_steps)


PPO = Method(
    make_policy=make_policy, assemble=assemble, make_source=make_source, takes_tensors=True, records=False
)
