"""The only place that builds runs: names to classes, seeds to streams, parts to a `Run`.

A run's seed gives every random stream a seed of its own by name, so a part that draws more or
less never shifts another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.algos.progress import ProgressSampler
from robot_rl.core.algorithm import Algorithm
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.data.demos import ChunkSampler, Episodes
from robot_rl.data.episodes import episodes_meta
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.leased import EnvDevice
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.policies.config import SMALL_VLA
from robot_rl.policies.given_encoder import load_image_encoders
from robot_rl.policies.onnx_pictures import SUFFIX, read_encoder_graph
from robot_rl.policies.spec import SavedPolicy
from robot_rl.rollout.envs import simulation
from robot_rl.train.config import RunConfig
from robot_rl.train.experience import Draws
from robot_rl.train.hooks import checkpoint_hooks, show_progress, updates, write_metrics
from robot_rl.train.loop import Batches, Hook, Learner, Pacer, Run
from robot_rl.train.schedule import Always, Every
from robot_rl.train.session import Session

Module = Any
"""A policy that is a `torch.nn.Module` as well; Python has no type for both."""


def policy_meta(config: RunConfig, env: VectorEnv, *others: VectorEnv) -> PolicyMeta:
    """Returns what the run's policies are made for; `others` are those of its further scenes."""
    robots, tasks = (
        tuple(dict.fromkeys(getattr(one, name) for one in (env, *others))) if others else ()
        for name in ("robot", "task")
    )
    rates = {one.robot: one.control_hz for one in (env, *others)}
    return PolicyMeta(
        **vars(episodes_meta(env)),
        n_exec=config.n_exec,
        robots=robots,
        tasks=tasks if len(tasks) > 1 else (),
        rates=tuple(rates.values()) if len(set(rates.values())) > 1 else (),
    )


def assemble_cloning(
    session: Session,
    episodes: Episodes,
    kept: NDArray[np.bool_] | None = None,
    by: NDArray[np.bool_] | None = None,
) -> tuple[Run, Module]:
    """Returns the loop of cloning and the policy that it trains; of `kept` and `by` see `ChunkSampler`."""
    config, seed = session.config, session.config.seed
    policy = cloned_policy(session, episodes)
    policy = policy.to(config.device)
    algorithm = resolve("algorithm", "bc", at="bc")(
        policy, config.bc.algorithm, train_seed(seed, "bc"), total_updates=config.bc.updates
    )
    sampler = ChunkSampler(episodes, config.policy.horizon, kept, by)
    batches = Draws(
        partial(sampler.sample, config.bc.batch), seed=train_seed(seed, "bc batches"), device=config.device
    )
    return assemble_offline(session, "bc", batches, algorithm, config.bc.updates), policy


def cloned_policy(session: Session, episodes: Episodes) -> Module:
    """Returns the policy that is to be cloned, with the image encoders that the run gives it."""
    config, settings, given = session.config, session.config.policy, session.config.bc.encoder
    if settings.chosen == SMALL_VLA:
        vla = resolve("policy", SMALL_VLA, at="policy.kind")
        return vla.of_episodes(settings, episodes, generator=generator(config.seed, "policy"))
    graph = None
    if given is not None and given.endswith(SUFFIX):
        seen: Any = settings
        height, width = episodes.obs[f"{seen.cameras[0]}.rgb"].shape[1:3]
        graph = read_encoder_graph(Path(given), (height, width))
        settings = replace(seen, frozen_graph=(len(graph.content), graph.features))
    policy = resolve("policy", settings.chosen, at="policy.kind")(
        settings,
        state_dim=len(episodes.meta.state_names),
        action_dim=len(episodes.meta.action_names),
        normaliser=Normaliser.of(episodes),
        generator=generator(config.seed, "policy"),
    )
    if graph is not None:
        policy.encoder.frozen.put(graph.content)
        what = f"frozen image encoder of {graph.features} features: {given}, SHA-256 {graph.sha256}"
        session.display.message(what)
    elif given is not None:
        digest = load_image_encoders(policy.encoder, Path(given))
        session.display.message(f"image encoders: {given}, SHA-256 {digest}")
    return policy


def new_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns the run's `policy` with drawn weights; its scale is that of what the base, noise, observed."""
    given: Any = base
    return resolve("policy", config.policy.chosen, at="policy.kind")(
        config.policy,
        state_dim=given.state_dim,
        action_dim=base.action_dim,
        normaliser=copy.deepcopy(given.normaliser),
        generator=generator(config.seed, "policy"),
    )


def assemble_progress(session: Session, episodes: Episodes) -> Run:
    """Returns the loop of the critics that say how far each frame of the demonstrations is."""
    config, seed, cfg = session.config, session.config.seed, session.config.demos.filter
    algorithm = resolve("algorithm", "progress", at="demos.filter")(
        cfg.algorithm,
        normaliser=Normaliser.of(episodes),
        horizon=config.policy.horizon,
        seed=train_seed(seed, "progress"),
        device=config.device,
    )
    sampler = ProgressSampler(episodes, config.policy.horizon, cfg.algorithm)
    batches = Draws(
        partial(sampler.sample, cfg.batch), seed=train_seed(seed, "progress batches"), device=config.device
    )
    return assemble_offline(session, "progress", batches, algorithm, cfg.updates)


def assemble_offline(
    session: Session, phase: str, batches: Batches, algorithm: Algorithm, budget: int
) -> Run:
    """Returns the loop of a phase that takes `budget` updates on demonstrations alone."""
    config, counters = session.config, session.counters
    counters.updates = 0
    run = Run(
        learners=[Learner(algorithm, batches, Always())],
        pacer=Pacer(finished=lambda at: at.updates >= budget),
        stage=session.timer.stage,
        counters=counters,
    )
    run.pacer.hooks = [
        Hook("progress", Every(10), updates, lambda at: show_progress(session, at.updates)),
        Hook(
            "metrics",
            Every(max(1, budget // config.metrics_rows)),
            updates,
            lambda at: write_metrics(session, run, phase),
        ),
        *checkpoint_hooks(session, run, phase, config.checkpoint, updates),
    ]
    return run


def generator(seed: int, stream: str) -> torch.Generator:
    """Returns the generator of one of a run's streams."""
    return torch.Generator().manual_seed(train_seed(seed, stream))


def evaluator(config: RunConfig, scene: str = "", *, draws: bool = False) -> EnvDevice:
    """Returns the simulations of evaluations: their number is part of what is repeated exactly."""
    return simulation(config.scenes[scene].evaluated(), config.evaluate.num_envs, draws=draws)


def demonstrator(config: RunConfig, scene: str = "") -> EnvDevice:
    """Returns the simulations that play before a run learns, never from starts held out for evaluation."""
    return simulation(config.scenes[scene].demonstrated(), config.evaluate.num_envs)


@contextmanager
def evaluators(
    session: Session, make: Callable[[RunConfig, str], EnvDevice] = evaluator
) -> Generator[Mapping[str, VectorEnv]]:
    """Opens the simulations of evaluations of every scene, or those that `make` returns, by its name."""
    config = session.config
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(session.open(make(config, name)))) for name in config.scenes}
