"""What off-policy methods share: sources, replay and the pace of the learner.

B envs, A action dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from robot_rl.core.algorithm import Algorithm
from robot_rl.core.errors import require
from robot_rl.core.seeding import train_seed
from robot_rl.data.demos import Episodes
from robot_rl.data.episode import feature_of
from robot_rl.data.parts import OfSource
from robot_rl.data.replay import Keep, Mixture, ReplayBuffer, shapes_of
from robot_rl.data.transitions import ChunkBatch, StepSource, TransitionBatch
from robot_rl.policies.adapter import FrozenBaseAdapter
from robot_rl.rollout.weights import Publisher
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import relabelled
from robot_rl.train.earlier import open_earlier
from robot_rl.train.experience import Draws, OneForEach, ReplayExperience, SourceReplay, StaleSteps
from robot_rl.train.improve.acting import sources_of
from robot_rl.train.improve.config import OffPolicySettings
from robot_rl.train.improve.method import Module, Start, add_hooks, settings_of
from robot_rl.train.improve.stay import encoder
from robot_rl.train.loop import Learner, Pacer, Run
from robot_rl.train.recording import pool_of
from robot_rl.train.robots import shares
from robot_rl.train.schedule import Ratio
from robot_rl.train.session import Session

Draw = Callable[[Any, np.random.Generator], TransitionBatch | ChunkBatch]
"""Returns a learner's batch from the online replay, or from the mixture that holds it."""


def steps(phase: OffPolicySettings) -> Draw:
    """Draws windows of control steps."""
    how = {"n_step": phase.n_step, "gamma_step": phase.gamma_step}
    return lambda sampler, rng: sampler.sample(phase.batch, **how, rng=rng)


def chunks(phase: OffPolicySettings, horizon: int, prefixes: Sequence[int] = ()) -> Draw:
    """Draws chunks of `horizon` actions that begin anywhere, and returns of their `prefixes`."""
    how: dict[str, Any] = {"horizon": horizon, "gamma_step": phase.gamma_step, "prefixes": prefixes}
    return lambda sampler, rng: sampler.sample_chunks(phase.batch, **how, rng=rng)


def assemble(
    session: Session,
    start: Start,
    policy: Module,
    algorithm: Algorithm,
    draw: Draw,
    *,
    latent_dim: int = 0,
    online: Callable[[ReplayBuffer], Any] = lambda replay: replay,
    reads: Collection[str] = (),
) -> Run:
    """Returns the loop in which `algorithm` trains `policy` on what it replays.

    Args:
        session: the run's session.
        start: what the method starts from.
        policy: acts, as a copy.
        algorithm: learns from what `draw` returns.
        draw: returns a batch.
        latent_dim: elements of the noise behind each chunk, if the replay is to keep it.
        online: returns what is drawn from of a source's replay.
        reads: the few names in a frozen policy's encoding that the algorithm reads: the replay keeps these in
            the place of pictures. Empty: it keeps pictures, which the algorithm encodes.
    """
    config, phase = session.config, settings_of(session.config, OffPolicySettings)
    session.counters.updates = 0
    keep = _encodings(config, policy, reads)
    sources = sources_of(session, start, policy, reads)
    experience, sampler = _replay(config, start, latent_dim, online, lambda: session.counters.updates, keep)
    seed = train_seed(config.seed, f"{config.method.kind} batches")
    learner = Learner(
        algorithm,
        Draws(partial(draw, sampler), seed=seed, device=config.device),
        Ratio(
            phase.utd,
            after_steps=phase.explore_steps,
            is_late=lambda: any(source.is_ahead for source in sources),
        ),
        Publisher(publish_every=phase.publish_every),
    )
    run = Run(
        sources=sources,
        experience=experience,
        learners=[learner],
        pacer=Pacer.of_budgets([source.env_steps for source in config.acting.values()]),
        stage=session.timer.stage,
        counters=session.counters,
    )
    add_hooks(session, run, policy, start.eval_envs, experience.metrics)
    return run


def small_encoding(policy: Module, episodes: Episodes) -> Collection[str]:
    """Returns the names in a policy's encoding if it is smaller than the pictures it is of, else none."""
    pictures = sum(value[0].nbytes for key, value in episodes.obs.items() if key.endswith(".rgb"))
    if not pictures:
        return ()
    device = next(policy.parameters()).device
    encoded = policy.encode(
        {key: torch.tensor(value[:1], device=device) for key, value in episodes.obs.items()}
    )
    return list(encoded) if sum(value.nbytes for value in encoded.values()) < pictures else ()


def _encodings(config: RunConfig, policy: Module, reads: Collection[str]) -> Keep | None:
    """Returns what encodes pictures for the replay, once, where the policy's encoder does not learn.

    None where the replay keeps observations: without pictures, or mixed with those of earlier runs.
    """
    is_frozen = isinstance(policy, FrozenBaseAdapter)
    if not (reads and is_frozen and config.env.cameras) or config.replay.reuse:
        allowed = "send with this base, whose encoding is larger than its pictures"
        require(config.hub.pictures == "send", "hub.pictures", "stay", allowed)
        return None
    return encoder(policy, reads, config.device)


def _replay(
    config: RunConfig,
    start: Start,
    latent_dim: int,
    drawn_from: Callable[[ReplayBuffer], Any],
    learner: Callable[[], int],
    keep: Keep | None = None,
) -> tuple[ReplayExperience, Any]:
    """Returns the sources' replays, and their mixture in exact shares with what was recorded before."""
    phase, seed = settings_of(config, OffPolicySettings), config.seed
    episodes, base = start.episodes, start.base
    shapes, action_dim = shapes_of(episodes, keep), episodes.action.shape[1]
    buffers = {
        name: ReplayBuffer(
            phase.capacity,
            source.batch,
            shapes,
            action_dim,
            latent_dim=latent_dim,
            imagined=config.env_of(name).kind == "world",
            keep=None if config.keeps_pictures_there(name) else keep,
        )
        for name, source in config.acting.items()
    }
    how: dict[str, Any] = {"n_exec": config.n_exec, "device": config.device}
    parts: dict[str, tuple[StepSource, float | None]] = {}
    earlier = None
    if phase.demo_ratio != 0:
        demos = relabelled(episodes, base, **how, seed=train_seed(seed, "relabel"), keep=keep)
        parts["demo"] = (demos, phase.demo_ratio)
    if config.replay.reuse:
        features = {key: feature_of(value) for key, value in episodes.obs.items()}
        sources = open_earlier(config.replay, episodes.meta, features)
        earlier = pool_of(sources, features, base, **how, seed=train_seed(seed, "relabel earlier"))
        parts["earlier"] = (earlier, config.replay.reuse_ratio)
    watched = [name for name, source in config.acting.items() if source.human]
    for name in watched if config.human.ratio > 0 else ():
        share = config.human.ratio / len(watched)
        parts[f"human {name}".strip()] = (OfSource(buffers[name], "human"), share)
    new = 1.0 - sum(share or 0.0 for _, share in parts.values())
    for name, share in shares(config.acting).items():
        parts[f"online {name}".strip()] = (
            drawn_from(buffers[name]),
            None if phase.demo_ratio is None else new * share,
        )
    stale = StaleSteps(phase.max_staleness, phase.stale, learner)
    replays = [
        SourceReplay(buffer, recorder=start.recorders.get(name), stale=stale)
        for name, buffer in buffers.items()
    ]
    experience = ReplayExperience(
        replays[0] if len(replays) == 1 else OneForEach(replays),
        earlier=earlier,
        stale=stale,
        has_person=config.human.input != "none",
    )
    return experience, Mixture(parts) if len(parts) > 1 else parts["online"][0]
