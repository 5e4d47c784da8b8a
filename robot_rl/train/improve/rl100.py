"""RL-100: PPO inside the denoising chain, offline behind a gate, then online, then distilled into one step.

    demonstrations -> critics (IQL) -> gated PPO on their states -> PPO on rollouts -> distillation

The distillation is a phase of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from robot_rl.algos.chain_ppo import ChainPPOConfig
from robot_rl.algos.config.on_policy import GateConfig
from robot_rl.algos.gate import CriticScore, Gate
from robot_rl.algos.iql import IQL
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.data.episodes import episodes_meta
from robot_rl.hal.vector import VectorEnv
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.evaluate import evaluate_in
from robot_rl.sched.opened import opened
from robot_rl.sim.config import EnvConfig
from robot_rl.train.assemble import generator
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import ppo
from robot_rl.train.improve.config import RL100Settings
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.improve.offline import learn_offline
from robot_rl.train.loop import Run
from robot_rl.train.session import Session
from robot_rl.worlds.inventory import check_fits


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop of the online phase, after the offline one, and the policy that it trains."""
    policy = ppo.make_policy(session.config, start.base).to(session.config.device)
    _learn_offline(session, start, policy)
    return ppo.assemble_online(session, start, policy), policy


def _learn_offline(session: Session, start: Start, policy: Module) -> None:
    config, method = session.config, settings_of(session.config, RL100Settings)
    cfg = method.offline
    iql = IQL(
        cfg.iql,
        feature_dim=policy.feature_dim,
        action_dim=policy.action_dim,
        steps=config.n_exec,
        seed=train_seed(config.seed, "iql"),
        device=config.device,
    )
    learner = resolve("algorithm", "chain_ppo", at="rl100")(
        policy,
        offline_rates(method),
        train_seed(config.seed, "offline ppo"),
    )
    if cfg.gate.scorer == "critics":
        score: Callable[[], float] = critic_score(config, start, policy, iql)
    else:
        score = episode_score(session, start, policy, cfg.gate)
    algorithm = resolve("algorithm", "offline_ppo", at="rl100")(
        policy,
        learner,
        iql,
        Gate({"policy": policy, "optimiser": learner.actor_optimiser}, score, margin=cfg.gate.margin),
        cfg,
        train_seed(config.seed, "offline chains"),
    )
    how = {"horizon": policy.horizon, "gamma_step": cfg.iql.gamma_step, "prefixes": iql.critics.lengths}
    learn_offline(
        session,
        start,
        policy,
        algorithm,
        lambda sampler, rng: sampler.sample_chunks(cfg.batch, rng=rng, **how),
        cfg.total_updates,
    )


def offline_rates(method: RL100Settings) -> ChainPPOConfig:
    """Returns the settings of the offline steps: rate, range and KL are their own."""
    own = {name: getattr(method.offline, name) for name in ("actor_lr", "clip", "target_kl")}
    return replace(method.algorithm, clip_first=None, clip_high=None, **own)


def critic_score(config: RunConfig, start: Start, policy: Module, iql: IQL) -> CriticScore:
    """Returns the gate's score by the critics, in states of the demonstrations."""
    rng = np.random.default_rng(train_seed(config.seed, "gate"))
    states = settings_of(config, RL100Settings).offline.gate.states
    rows = rng.choice(len(start.episodes.reward), states)
    obs = {key: torch.from_numpy(value[rows]).to(config.device) for key, value in start.episodes.obs.items()}
    shape = (states, policy.horizon, policy.action_dim)
    z = torch.randn(shape, generator=generator(config.seed, "gate noise")).to(config.device)
    with torch.no_grad():
        features = policy.encode(obs)["features"]
    return CriticScore(policy, iql.target_critics, obs, features, z)


def episode_score(session: Session, start: Start, policy: Module, gate: GateConfig) -> Callable[[], float]:
    """Returns the gate's score by the success of episodes, simulated or imagined; their steps are counted.

    Their seeds are the training's: neither quick evaluations nor the held-out episodes have them.

    Raises:
        CheckpointError: the world model is of another task, robot, rate or state.
    """
    config, source = session.config, "world" if gate.world else "sim"
    first = train_seed(config.seed, "gate") // 2
    seeds = np.arange(first, first + gate.episodes, dtype=np.uint64)
    (real,) = start.eval_envs.values()
    if gate.world is not None:
        check_fits(gate.world, episodes_meta(real), at="method.offline.gate.world")

    @contextmanager
    def playground() -> Generator[VectorEnv]:
        if gate.world is None:
            yield real
            return
        settings = {"starts": {"initial": 1.0, "keyframe": 0.0, "replay": 0.0}}
        imagined = EnvConfig(kind="world", id=gate.world, task=config.env.task, settings=settings)
        device, holder = simulation(imagined, gate.episodes), f"train {config.recipe}: gate"
        with opened(device, holder=holder, wait_s=config.lease_wait_s) as env:
            yield env

    def score() -> float:
        acting = copy.deepcopy(policy).eval()
        with session.timer.stage("gate"), playground() as env:
            found = evaluate_in(env, acting, seeds=seeds, n_exec=config.n_exec, device=config.device)
        session.counters.env_steps += int(found.steps.sum())
        session.counters.bill(source, int(found.steps.sum()))
        return found.rate

    return score


RL100 = Method(make_policy=ppo.make_policy, assemble=assemble, make_source=ppo.make_source, records=False)
