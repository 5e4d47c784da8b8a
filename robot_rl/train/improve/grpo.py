"""Groups of episodes from the same start, compared with each other: SimpleVLA-RL, SRPO; VLA-RL's reward."""

from __future__ import annotations

from robot_rl.algos.episode_rewards import ProcessReward, ProgressReward
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.hal.vector import VectorEnv
from robot_rl.rollout.chunks import GroupSource
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import GRPOSettings
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.improve.ppo import (
    acting_copy,
    chunk_options,
    make_policy,
    on_policy,
    publisher_of,
    rollout_options,
)
from robot_rl.train.loop import Learner, Run
from robot_rl.train.rollouts import EpisodeReward, GroupExperience
from robot_rl.train.schedule import Always
from robot_rl.train.session import Session


def make_source(config: RunConfig, policy: Module, env: VectorEnv, name: str) -> GroupSource:
    """Returns a source of groups of episodes; RunConfig refuses those of an arm, and several sources."""
    group = settings_of(config, GRPOSettings).group
    return GroupSource(env, acting_copy(config, policy), group=group, **chunk_options(config, name))


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop that trains a copy of the base on its own episodes, and that copy."""
    config, cfg = session.config, settings_of(session.config, GRPOSettings)
    session.counters.updates = 0
    policy = make_policy(config, start.base).to(config.device)
    algorithm = resolve("algorithm", "chain_ppo", at="grpo")(
        policy,
        cfg.algorithm,
        train_seed(config.seed, "grpo"),
        group=0 if cfg.reward == "process" else cfg.group,
    )
    experience = GroupExperience(
        algorithm,
        reward=_reward(config, policy),
        group=cfg.group,
        keep=cfg.keep,
        **rollout_options(session, "grpo batches"),
    )
    learner = Learner(algorithm, experience, Always(experience.owed), publisher_of(config))
    return on_policy(session, start, policy, learner, experience, experience.metrics), policy


def _reward(config: RunConfig, policy: Module) -> EpisodeReward | None:
    cfg = settings_of(config, GRPOSettings)
    if cfg.reward == "progress":
        return ProgressReward(policy)
    if cfg.reward == "process":
        seed = train_seed(config.seed, "grpo reward")
        return ProcessReward(policy, cfg.algorithm, seed, device=config.device)
    return None


GRPO = Method(
    make_policy=make_policy, assemble=assemble, make_source=make_source, autoreset="disabled", records=False
)
