"""Learning from the demonstrations alone, before the first control step: a loop without sources."""

from __future__ import annotations

from functools import partial

import numpy as np

from robot_rl.core.algorithm import Algorithm
from robot_rl.core.seeding import train_seed
from robot_rl.data.replay import ReplayBuffer
from robot_rl.train.assemble import assemble_offline
from robot_rl.train.experience import Draws
from robot_rl.train.hooks import updates
from robot_rl.train.improve.method import Module, Start, quick_evaluation
from robot_rl.train.improve.off_policy import Draw
from robot_rl.train.loop import Hook
from robot_rl.train.schedule import Counters, Every
from robot_rl.train.session import Session, learn


def learn_offline(
    session: Session,
    start: Start,
    policy: Module,
    algorithm: Algorithm,
    draw: Draw,
    budget: int,
    *,
    phase: str = "",
) -> None:
    """Takes `budget` updates, in a loop with its own checkpoints, and evaluates the result.

    A run that is resumed after its first control step skips this: the checkpoint of the loop that
    collects holds what was learned here.

    Args:
        session: the run's session.
        start: what the method starts from; failed demonstrations stay in.
        policy: what is evaluated.
        algorithm: learns from what `draw` returns.
        draw: returns a batch.
        budget: updates.
        phase: its name in the metrics and checkpoints; empty: `<method> offline`.
    """
    config = session.config
    if budget == 0 or session.loop_state(config.method.kind) is not None:
        return
    phase, actions = phase or f"{config.method.kind} offline", start.episodes.action
    finals = np.zeros((start.episodes.num_episodes, actions.shape[1]), np.float32)
    demos = ReplayBuffer.from_episodes(  # without a base: its proposals are not read
        start.episodes, base_action=np.zeros_like(actions), final_base_action=finals
    )
    batches = Draws(
        partial(draw, demos), seed=train_seed(config.seed, f"{phase} batches"), device=config.device
    )
    run = assemble_offline(session, phase, batches, algorithm, budget)
    run.pacer.hooks = [*_hooks(session, policy, start, budget), *run.pacer.hooks]
    learn(session, run, phase, budget, unit="updates")
    quick_evaluation(session, policy, start.eval_envs)


def _hooks(session: Session, policy: Module, start: Start, budget: int) -> list[Hook]:
    """Returns the hooks other than metrics and checkpoints; the last evaluation comes after the loop."""
    every = session.config.evaluate.every_updates

    def look(at: Counters) -> None:
        if at.updates < budget:
            quick_evaluation(session, policy, start.eval_envs)

    leases = Hook("leases", Every(100), updates, lambda at: session.check_leases())
    return [leases, Hook("evaluate", Every(every), updates, look)] if every else [leases]
