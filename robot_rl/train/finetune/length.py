"""How long to train, if not given: until validation episodes among the training ones get no better.

Few demonstrations are soon memorised, many are not. The policy is trained once without the
validation episodes and looked at twice in every pass over its data; the run then takes as many
passes over all its training episodes as that one had taken at its best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from robot_rl.train.finetune.config import MINUTES
from robot_rl.train.finetune.learn import Finetuning, assemble_job, job_of_policy, policy_errors
from robot_rl.train.finetune.policies import Module
from robot_rl.train.hooks import updates
from robot_rl.train.loop import Hook, train
from robot_rl.train.schedule import Counters, Every

LOOKS_PER_PASS = 2
MAX_LOOKS = 60
PATIENCE = 5
"""Looks in a row that were no better than the best one, before it is over."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long to train, and what that was read from."""

    updates: int
    """On all training episodes."""
    validation: tuple[int, ...]
    """Training episodes that the choice was made on."""
    curve: tuple[tuple[int, float], ...]
    """Updates without the validation episodes, and the error on them."""


def choose_length(work: Finetuning, build: Callable[[tuple[int, ...]], Module]) -> Length:
    """Trains a policy, built for the episodes it is given, until it gets no better or `MINUTES` are over."""
    config, split = work.config, work.data.split
    inner = split.inner()
    policy = build(inner.train)
    lengths = work.data.dataset.lengths()
    rows = int(lengths[list(inner.train)].sum())
    every = max(1, round(rows / config.batch / LOOKS_PER_PASS))
    job = job_of_policy(work, policy, name="length", episodes=inner.train, updates=every * MAX_LOOKS)
    run, algorithm = assemble_job(work, job, policy)
    curve: list[tuple[int, float]] = []
    with work.session.phase("length", MAX_LOOKS, unit="looks") as progress:

        def look(at: Counters) -> None:
            work.session.check_leases()
            with algorithm.acting():
                error = policy_errors(work, policy, inner.heldout).normalised
            curve.append((at.updates, error))
            progress.update(len(curve))

        run.pacer.hooks = [Hook("look", Every(every), updates, look)]
        run.pacer.finished = lambda at: (
            len(curve) == MAX_LOOKS
            or is_past_best([error for _, error in curve])
            or (bool(curve) and work.minutes("length") >= MINUTES)
        )
        train(run)
    work.session.counters.updates = 0
    best, _ = min(curve, key=lambda point: point[1])
    scaled = best * int(lengths[list(split.train)].sum()) / rows
    return Length(updates=max(1, round(scaled)), validation=inner.heldout, curve=tuple(curve))


def is_past_best(errors: list[float]) -> bool:
    """Returns whether the last `PATIENCE` errors were all above the least one before them."""
    return len(errors) > PATIENCE and min(errors[-PATIENCE:]) > min(errors[:-PATIENCE])
