"""The learned baseline: LeRobot's ACT of similar size, from random weights, for as much time.

It reads the same pictures from the same loader, predicts chunks of the same length, and has the
schedule and the average of the policy. Learning rate and batch size are chosen for it by short
trials on validation episodes among the training ones; LeRobot's own values are among them.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from robot_rl.algos.bc import BCConfig
from robot_rl.train.finetune.data import stream_seed
from robot_rl.train.finetune.learn import (
    Finetuning,
    TrainingJob,
    assemble_job,
    policy_errors,
    prepare,
    updates_in,
)
from robot_rl.train.finetune.policies import Module, new_lerobot, recipe_of
from robot_rl.train.loop import train


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One choice of settings, and its error on the validation episodes."""

    lr: float
    batch: int
    error: float
    updates: int
    updates_per_minute: float


def why_no_act(work: Finetuning) -> str | None:
    """Returns why there is no ACT to compare with, or None if there is."""
    if not work.config.baselines:
        return "baselines=false"
    if work.config.policy == "act":
        return "the policy is ACT itself"
    if not work.data.dataset.cameras:
        return "the dataset has no camera, which ACT needs"
    if find_spec("lerobot") is None:
        return "the extra is not installed: pip install -e '.[lerobot]', on Python 3.12 or later"
    return None


def make_act(work: Finetuning, episodes: tuple[int, ...]) -> Module:
    """Builds ACT for the statistics of these episodes; the same first weights every time."""
    seed = stream_seed(work.config, "act")
    generator = torch.Generator().manual_seed(seed)
    policy = new_lerobot(work.config, "act", work.data.facts(episodes), generator)
    return prepare(work, policy, episodes)


def try_settings(work: Finetuning, *, minutes: float) -> list[Trial]:
    """Trains for so many minutes with every learning rate and batch size, on training episodes alone."""
    act = work.config.act
    settings = [(batch, lr) for batch, lr in itertools.product(act.batches, act.lrs)]
    trials: list[Trial] = []
    with work.session.phase("act settings", len(settings), unit="trials") as progress:
        for batch, lr in settings:
            work.session.check_leases()
            trials.append(_try(work, lr=lr, batch=batch, minutes=minutes))
            progress.update(len(trials))
    return trials


def act_job(work: Finetuning, policy: Module, best: Trial, *, minutes: float) -> TrainingJob:
    """Returns what ACT is given for its whole time."""
    updates = max(1, round(minutes * best.updates_per_minute))
    learning = _learning(work, policy, lr=best.lr, updates=updates)
    return TrainingJob(
        name="act",
        episodes=work.data.split.train,
        learning=learning,
        batch=best.batch,
        updates=updates,
        minutes=minutes,
    )


def _try(work: Finetuning, *, lr: float, batch: int, minutes: float) -> Trial:
    inner, name = work.data.split.inner(), "act trial"

    def job(policy: Module, updates: int) -> TrainingJob:
        learning = _learning(work, policy, lr=lr, updates=updates)
        return TrainingJob(name=name, episodes=inner.train, learning=learning, batch=batch, updates=updates)

    policy = make_act(work, inner.train)
    by = time.process_time if work.config.device == "cpu" else time.perf_counter  # as `work.minutes`
    updates = updates_in(work, job(policy, 1), policy, minutes=minutes, by=by)
    policy = make_act(work, inner.train)  # the first has learned while it was timed
    before = work.minutes(name)
    run, algorithm = assemble_job(work, job(policy, updates), policy)
    train(run)
    with algorithm.acting():
        error = policy_errors(work, policy, inner.heldout).normalised
    pace = updates / max(work.minutes(name) - before, 1e-9)
    return Trial(lr=lr, batch=batch, error=error, updates=updates, updates_per_minute=pace)


def _learning(work: Finetuning, policy: Module, *, lr: float, updates: int) -> BCConfig:
    """Returns LeRobot's weight decay and clipping for ACT, with the schedule and average of the policy."""
    own: Any = recipe_of(policy)
    common = work.config.learning(own, updates=updates)
    return replace(common, lr=lr, weight_decay=own.weight_decay, grad_clip=own.grad_clip, accumulate=1)
