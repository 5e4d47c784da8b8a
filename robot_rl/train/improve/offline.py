"""Learning from the demonstrations alone, before the first control step: a loop without sources."""

from __future__ import annotations

import numpy as np

from robot_rl.core.algorithm import Algorithm
from robot_rl.core.seeding import train_seed
from robot_rl.data.replay import ReplayBuffer
from robot_rl.train.experience import ReplayExperience
from robot_rl.train.hooks import checkpoint_hooks, show_progress, updates, write_metrics
from robot_rl.train.improve.method import Module, Start, quick_evaluation
from robot_rl.train.improve.off_policy import Draw
from robot_rl.train.loop import Hook, Pacer, Run
from robot_rl.train.meter import Meter
from robot_rl.train.schedule import Always, Every
from robot_rl.train.session import Session, learn
from robot_rl.train.sources import PolicyHandle


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
    """Takes `budget` updates, in a loop with checkpoints of its own, and looks at what came of them.

    In a run that is resumed after its first control step nothing is done: the checkpoint of the loop
    that collects holds what was learned here.

    Args:
        session: the run's session.
        start: what the method starts from; failed demonstrations stay in.
        policy: what is looked at.
        algorithm: learns from what `draw` returns.
        draw: returns a batch.
        budget: updates.
        phase: its name in the metrics and checkpoints; empty: `<method> offline`.
    """
    config = session.config
    if budget == 0 or session.loop_state(config.method) is not None:
        return
    phase, actions = phase or f"{config.method} offline", start.episodes.action
    finals = np.zeros((start.episodes.num_episodes, actions.shape[1]), np.float32)
    demos = ReplayBuffer.from_episodes(  # without a base: its proposals are not read
        start.episodes, base_action=np.zeros_like(actions), final_base_action=finals
    )
    session.counters.updates = 0
    run = Run(
        sources=[],
        experience=ReplayExperience(
            demos,
            draw=lambda rng: draw(demos, rng),
            seed=train_seed(config.seed, f"{phase} batches"),
            device=config.device,
        ),
        algorithm=algorithm,
        handle=PolicyHandle(),
        pacer=Pacer(finished=lambda at: at.updates >= budget, updates=Always()),
        meter=Meter(),
        stage=session.timer.stage,
        counters=session.counters,
    )
    run.pacer.hooks = [
        Hook("leases", Every(100), updates, lambda at: session.check_leases()),
        Hook("progress", Every(10), updates, lambda at: show_progress(session, at.updates)),
        Hook(
            "metrics",
            Every(max(1, budget // config.metrics_rows)),
            updates,
            lambda at: write_metrics(session, run, phase),
        ),
        *checkpoint_hooks(session, run, phase, config.checkpoint, updates),
    ]
    learn(session, run, phase, budget, unit="updates")
    quick_evaluation(session, policy, start.eval_env)
