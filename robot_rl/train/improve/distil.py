"""The phase after PPO: a student of the improved policy acts in one network call (`method.distil`)."""

from __future__ import annotations

from typing import cast

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.policies.chunk import ChunkPolicy
from robot_rl.policies.one_step import OneStepPolicy
from robot_rl.train.assemble import generator
from robot_rl.train.improve.config import ChainSettings
from robot_rl.train.improve.method import Module, Start, settings_of
from robot_rl.train.improve.offline import learn_offline
from robot_rl.train.session import Session

PHASE = "distil"


def distil(session: Session, start: Start) -> Module:
    """Returns a student of `start.base`, which has learned in the states of the demonstrations."""
    config, cfg = session.config, settings_of(session.config, ChainSettings).distil
    teacher = cast("ChunkPolicy", start.base).to(config.device)
    student = OneStepPolicy.student_of(teacher, generator=generator(config.seed, "student"))
    algorithm = resolve("algorithm", "distil", at=PHASE)(
        student, teacher, cfg, train_seed(config.seed, PHASE)
    )
    horizon = student.horizon
    learn_offline(
        session,
        start,
        student,
        algorithm,
        lambda sampler, rng: sampler.sample_chunks(cfg.batch, horizon=horizon, gamma_step=1.0, rng=rng),
        cfg.updates,
        phase=PHASE,
    )
    return student
