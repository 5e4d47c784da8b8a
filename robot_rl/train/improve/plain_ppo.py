"""PPO of a Gaussian policy from nothing, one action a control step, in many simulations at once.

The stage `look` plays noise, whose observations give the first scale of the state; the scale then goes on
with the rollouts. `policy` says what the network is.
"""

from __future__ import annotations

import torch

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.spec import SavedPolicy
from robot_rl.rollout.steps import StepRolloutSource
from robot_rl.train.assemble import new_policy
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import PlainPPOSettings
from robot_rl.train.improve.method import Method, Module, Start, check_privileged, settings_of
from robot_rl.train.improve.ppo import acting_copy, on_policy, publisher_of
from robot_rl.train.loop import Learner, Run
from robot_rl.train.rollouts import NewestRollouts
from robot_rl.train.schedule import Always
from robot_rl.train.session import Session

_FIRST_MEAN = 0.01
"""By which the last layer is scaled: at first all actions are near the middle (Andrychowicz et al. 2021)."""


def make_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns a Gaussian policy with drawn weights, in the scale of what the base observed."""
    policy = new_policy(config, base)
    with torch.no_grad():
        policy.net.trunk.out.weight.mul_(_FIRST_MEAN)
        policy.net.trunk.out.bias.zero_()
    return policy


def make_source(config: RunConfig, policy: Module, env: VectorEnv, name: str) -> StepRolloutSource:
    """Returns a source of rollouts; RunConfig refuses those of an arm."""
    return StepRolloutSource(
        env,
        acting_copy(config, policy),
        steps=settings_of(config, PlainPPOSettings).steps,
        seed=train_seed(config.seed, f"collect {name}".strip()) // 2,
        device=config.device,
        correlation=settings_of(config, PlainPPOSettings).noise_correlation,
    )


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop that trains a policy on its own rollouts, and that policy."""
    config, cfg = session.config, settings_of(session.config, PlainPPOSettings)
    session.counters.updates = 0
    if config.method.reads_privileged:
        check_privileged(start.episodes)
    policy = make_policy(config, start.base).to(config.device)
    algorithm = resolve("algorithm", "plain_ppo", at="plain_ppo")(
        policy,
        cfg.algorithm,
        train_seed(config.seed, "plain_ppo"),
        observed=len(start.episodes.action),
    )
    rollouts = NewestRollouts()
    learner = Learner(algorithm, rollouts, Always(rollouts.owed), publisher_of(config))
    return on_policy(session, start, policy, learner, rollouts, dict), policy


PLAIN_PPO = Method(
    make_policy=make_policy, assemble=assemble, make_source=make_source, takes_tensors=True, records=False
)
