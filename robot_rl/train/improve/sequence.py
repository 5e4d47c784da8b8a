"""Sequence RL: a new actor decides on `n_exec` control steps at once (SRL).

With `credit=steps` the critics know single steps and a model says where the later actions act; with
`credit=decisions` the learner is the plain actor-critic, whose action is the whole sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from robot_rl.core.errors import DatasetError
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.data.transitions import ChunkBatch, TransitionBatch
from robot_rl.policies.spec import SavedPolicy
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import direct, off_policy
from robot_rl.train.improve.config import SequenceSettings
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.loop import Run
from robot_rl.train.session import Session

_TRIES = 100
"""Draws in which every chunk may be cut short."""


def make_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns an actor of `n_exec` actions; see `direct.make_policy`."""
    return direct.make_policy(config, base, decides=config.n_exec)


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop of sequence RL, and the policy that acts with the learner's actor."""
    config, cfg = session.config, settings_of(session.config, SequenceSettings)
    policy = make_policy(config, start.base).to(config.device)
    seed, decides = train_seed(config.seed, "sequence"), config.n_exec
    how: dict[str, Any] = {"encode": policy.encode, "device": config.device}
    sizes = policy.feature_dim, policy.action_dim
    if cfg.algorithm.credit == "steps":
        learner = resolve("algorithm", "sequence", at="sequence")(
            *sizes, cfg.algorithm, seed, decides=decides, **how
        )
        draw = off_policy.chunks(cfg, cfg.n_step, prefixes=(1,))
    else:
        learner = resolve("algorithm", "actor_critic", at="sequence")(
            sizes[0], decides * sizes[1], cfg.algorithm, seed, **how
        )
        draw = decisions(off_policy.chunks(cfg, decides))
    return off_policy.assemble(session, start, policy, learner, draw), policy


def decisions(chunks: off_policy.Draw) -> off_policy.Draw:
    """Draws whole chunks (B, J, A) as transitions whose action is the chunk, (B, J A)."""

    def draw(sampler: Any, rng: np.random.Generator) -> TransitionBatch:
        for _ in range(_TRIES):
            found = chunks(sampler, rng)
            assert isinstance(found, ChunkBatch)
            found = found.whole_rows()
            if len(found):
                break
        else:
            raise DatasetError(
                "sequence: the newest steps cut all chunks short that were drawn. "
                "Let the learner begin later: raise method.explore_steps."
            )
        action = found.action.flatten(1)
        return TransitionBatch(
            obs=found.obs,
            base_action=action,
            action=action,
            reward=found.reward,
            bootstrap=found.bootstrap,
            next_obs=found.next_obs,
            next_base_action=action,
            source=found.source,
        )

    return draw


SEQUENCE = Method(make_policy=make_policy, assemble=assemble)
