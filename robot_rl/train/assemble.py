"""The only place that builds runs: names to classes, seeds to streams, parts to a `Run`.

A run's seed gives every random stream a seed of its own by name, so a part that draws more or
less never shifts another.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import quick_eval_seeds, train_seed
from robot_rl.data.demos import ChunkSampler, Episodes
from robot_rl.data.episode import feature_of
from robot_rl.data.normalize import Normaliser
from robot_rl.data.replay import Mixture, OfSource, ReplayBuffer
from robot_rl.data.transitions import StepSource
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import PolicyMeta, load_policy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.spec import SavedPolicy
from robot_rl.train.async_source import AsyncSource
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import relabelled
from robot_rl.train.deploy.online import make_arm
from robot_rl.train.envs import make_env
from robot_rl.train.evaluate import EvalResult, evaluate_in
from robot_rl.train.experience import DemoExperience, ReplayExperience
from robot_rl.train.hooks import checkpoint_hooks, env_steps, show_progress, updates, write_metrics
from robot_rl.train.loop import Hook, Pacer, Run
from robot_rl.train.meter import Meter
from robot_rl.train.recording import Recorder, open_earlier, pool_of
from robot_rl.train.schedule import Always, Counters, Every, Ratio
from robot_rl.train.session import Session
from robot_rl.train.sources import PolicyHandle, SimSource

Module = Any
"""A policy that is a `torch.nn.Module` as well; Python has no type for both."""


def policy_meta(config: RunConfig, env: VectorEnv) -> PolicyMeta:
    """Returns what the run's policies are made for."""
    return PolicyMeta(
        task=env.task,
        robot=env.robot,
        control_hz=env.control_hz,
        state_names=env.state_names,
        action_names=env.action_names,
        instruction=env.instruction,
        n_exec=config.n_exec,
    )


def assemble_cloning(session: Session, episodes: Episodes) -> tuple[Run, Module]:
    """Returns the loop of behaviour cloning and the policy that it trains."""
    config, seed = session.config, session.config.seed
    policy = resolve("policy", config.policy.kind, at="policy.kind")(
        config.policy,
        state_dim=len(episodes.meta.state_names),
        action_dim=len(episodes.meta.action_names),
        normaliser=Normaliser.fit(episodes.obs, episodes.action),
        generator=_generator(seed, "policy"),
    ).to(config.device)
    algorithm = resolve("algorithm", "bc", at="bc")(
        policy, config.bc.algorithm, train_seed(seed, "bc"), total_updates=config.bc.updates
    )
    sampler = ChunkSampler(episodes, config.policy.horizon)
    budget, counters = config.bc.updates, session.counters
    counters.updates = 0
    run = Run(
        sources=[],
        experience=DemoExperience(
            sampler, batch=config.bc.batch, seed=train_seed(seed, "bc batches"), device=config.device
        ),
        algorithm=algorithm,
        handle=PolicyHandle(),
        pacer=Pacer(finished=lambda at: at.updates >= budget, updates=Always()),
        meter=Meter(),
        stage=session.timer.stage,
        counters=counters,
    )
    run.pacer.hooks = [
        Hook("progress", Every(10), updates, lambda at: show_progress(session, at.updates)),
        Hook(
            "metrics", Every(_interval(config, budget)), updates, lambda at: write_metrics(session, run, "bc")
        ),
        *checkpoint_hooks(session, run, "bc", config.checkpoint, updates),
    ]
    return run, policy


def assemble_residual(
    session: Session,
    episodes: Episodes,
    base: SavedPolicy,
    env: VectorEnv | None,
    eval_env: VectorEnv,
    recorder: Recorder | None = None,
) -> tuple[Run, Module]:
    """Returns the loop of residual RL on a frozen base, and the policy whose head it trains.

    Args:
        session: the run's session.
        episodes: demonstrations for the learner's offline half.
        base: the cloned policy.
        env: what collects, SAME_STEP autoreset; None where it lives in a process of its own.
        eval_env: simulations of the quick evaluations, autoreset DISABLED.
        recorder: keeps what is experienced.
    """
    config, phase, seed = session.config, session.config.residual, session.config.seed
    policy = make_residual(config, base).to(config.device)
    algorithm = resolve("algorithm", "residual", at="residual")(
        policy, phase.algorithm, train_seed(seed, "residual")
    )
    session.counters.updates = 0
    handle = PolicyHandle(publish_every=phase.publish_every, max_staleness=phase.max_staleness)
    source = make_async(config, session.folder) if env is None else make_source(config, policy, env)
    experience = _replay(config, episodes, base, recorder)
    run = Run(
        sources=[source],
        experience=experience,
        algorithm=algorithm,
        handle=handle,
        pacer=Pacer(
            finished=lambda at: at.env_steps >= phase.env_steps,
            updates=Ratio(phase.utd, after_steps=phase.explore_steps, is_late=lambda: source.is_ahead),
        ),
        meter=Meter(),
        stage=session.timer.stage,
        counters=session.counters,
    )

    def offer(at: Counters) -> None:
        session.check_leases()
        handle.offer(at.updates, algorithm.policy_weights)

    offer(session.counters)
    run.pacer.hooks = [
        Hook("offer", Every(1), env_steps, offer),
        Hook("progress", Every(1), env_steps, lambda at: show_progress(session, at.env_steps, at.updates)),
        Hook(
            "metrics",
            Every(_interval(config, phase.env_steps)),
            env_steps,
            lambda at: write_metrics(session, run, "residual", source, experience.metrics() | forgone(run)),
        ),
        Hook(
            "evaluate",
            Every(config.evaluate.every_env_steps),
            env_steps,
            lambda at: _quick_evaluation(session, policy, eval_env),
        ),
        *checkpoint_hooks(session, run, "residual", config.checkpoint, env_steps),
    ]
    return run, policy


def make_residual(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns the base with a head that does nothing yet."""
    phase = config.residual
    return resolve("policy", "residual", at="residual")(
        base, phase.head, phase.scale, generator=_generator(config.seed, "head")
    )


def make_source(config: RunConfig, policy: Module, env: VectorEnv) -> SimSource:
    """Returns what collects, with an acting copy of the policy, which the learner never touches."""
    acting = copy.deepcopy(policy).to("cpu").eval()
    executor = ChunkExecutor(
        acting,
        config.num_envs,
        n_exec=config.n_exec,
        mode="explore",
        seed=train_seed(config.seed, "explore"),
    )
    return SimSource(env, acting, executor, seed=train_seed(config.seed, "collect") // 2)


def make_async(config: RunConfig, folder: Path) -> AsyncSource:
    """Returns an arm that moves in a process of its own; a station keeps time itself."""
    period_s = 0.0 if config.station is not None else 1.0 / resolve("task", config.env.task).control.hz
    return AsyncSource(partial(act_alone, config, folder), period_s=period_s)


def act_alone(config: RunConfig, folder: Path) -> SimSource:
    """Returns what collects; called in the actor's process."""
    torch.set_num_threads(1)
    base, _ = load_policy(folder / "policy" / "base")
    return make_source(config, make_residual(config, base), make_arm(config, folder))


def _replay(
    config: RunConfig, episodes: Episodes, base: SavedPolicy, recorder: Recorder | None
) -> ReplayExperience:
    """Returns the online buffer, mixed in exact shares with demonstrations and earlier experience."""
    phase, seed = config.residual, config.seed
    shapes = {key: (value.shape[1:], value.dtype) for key, value in episodes.obs.items()}
    online = ReplayBuffer(phase.capacity, config.num_envs, shapes, episodes.action.shape[1])
    how: dict[str, Any] = {"n_exec": config.n_exec, "device": config.device}
    parts: dict[str, tuple[StepSource, float]] = {}
    earlier = None
    if phase.demo_ratio > 0:
        demos = relabelled(episodes, base, **how, seed=train_seed(seed, "relabel"))
        parts["demo"] = (demos, phase.demo_ratio)
    if config.replay.reuse:
        features = {key: feature_of(value) for key, value in episodes.obs.items()}
        sources = open_earlier(config.replay.reuse, episodes.meta, features)
        earlier = pool_of(sources, features, base, **how, seed=train_seed(seed, "relabel earlier"))
        parts["earlier"] = (earlier, config.replay.reuse_ratio)
    if config.human.input != "none" and config.human.ratio > 0:
        parts["human"] = (OfSource(online, "human"), config.human.ratio)
    share = 1.0 - sum(share for _, share in parts.values())
    return ReplayExperience(
        online,
        sampler=Mixture({**parts, "online": (online, share)}) if parts else online,
        batch=phase.batch,
        n_step=phase.algorithm.n_step,
        gamma_step=phase.algorithm.gamma_step,
        seed=train_seed(seed, "residual batches"),
        device=config.device,
        recorder=recorder,
        earlier=earlier,
        has_person=config.human.input != "none",
    )


def _quick_evaluation(session: Session, policy: Module, eval_env: VectorEnv) -> None:
    """Looks on, on seeds that neither training nor the final evaluation uses."""
    config = session.config
    seeds = quick_eval_seeds(config.seed, config.evaluate.quick_episodes)
    with session.timer.stage("evaluate"):
        result = evaluate_in(eval_env, policy, seeds=seeds, n_exec=config.n_exec, device=config.device)
    session.write("residual", eval_metrics(result))
    if session.progress is not None:
        session.progress.update(session.counters.env_steps, success=result.rate)


def eval_metrics(result: EvalResult) -> dict[str, float]:
    """Returns the row of an evaluation."""
    return {
        "eval/success": result.rate,
        "eval/episodes": float(len(result.seeds)),
        "eval/solved_at_reset": float(result.solved_at_reset.sum()),
        "eval/steps": float(result.steps.mean()),
        "eval/return": float(result.returns.mean()),
    }


def forgone(run: Run) -> dict[str, float]:
    """Returns how many updates there was no time for, beside an arm that does not wait."""
    updates = run.pacer.updates
    if not isinstance(updates, Ratio) or not updates.forgone:
        return {}
    return {"collect/updates_forgone": float(updates.forgone)}


def _interval(config: RunConfig, budget: int) -> int:
    return max(1, budget // config.metrics_rows)


def _generator(seed: int, stream: str) -> torch.Generator:
    return torch.Generator().manual_seed(train_seed(seed, stream))


def make_eval_env(config: RunConfig) -> VectorEnv:
    """Returns the simulations of evaluations: their number is part of what is repeated exactly."""
    return make_env(config.env, config.evaluate.num_envs, autoreset="disabled")
