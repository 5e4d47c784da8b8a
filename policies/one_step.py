"""A chunk in one network call: the student of a policy that takes several.

Noise to chunk in a single step of a flow, x = z - net(z, features): the same network as its teacher's,
so a flow's weights are a start (its one Euler step is the mean of what it would generate). It learns by
distillation, the teacher's chunk from the same noise being the aim: flow Q-learning (Park et al. 2025),
and the consistency distillation of RL-100.
R rows, H chunk length, A action dim, F feature dim.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import ClassVar, Self

from torch import Generator, Tensor

from robot_rl.core.policy import DemoBatch
from robot_rl.policies.chunk import ChunkPolicy, FlowPolicy
from robot_rl.policies.encoded import valid_mean
from robot_rl.policies.processes import normal_like


class OneStepPolicy(ChunkPolicy):
    """Maps noise to a chunk in one call; `sample`, saving and loading are those of every chunk policy."""

    kind: ClassVar[str] = "one_step"

    @classmethod
    def student_of(cls, teacher: ChunkPolicy, *, generator: Generator | None = None) -> Self:
        """Returns a student with the teacher's sizes, normaliser and encoder, whose weights are copies.

        Args:
            teacher: a flow, whose weights the student starts from, or a diffusion policy.
            generator: draws the network's first weights, where they are no flow's (None: torch's own).
        """
        config = replace(teacher.config, kind=cls.kind, process=None, steps=1, tuned_steps=0)
        student = cls(
            config,
            state_dim=teacher.state_dim,
            action_dim=teacher.action_dim,
            normaliser=copy.deepcopy(teacher.normaliser),
            generator=generator,
        )
        student.encoder.load_state_dict(teacher.encoder.state_dict())
        if isinstance(teacher, FlowPolicy):
            student.net.load_state_dict(teacher.net.state_dict())
        return student.to(next(teacher.parameters()).device)

    def decode(self, features: Tensor, z: Tensor) -> Tensor:
        """Returns chunks (R, H, A) in the chain's scale, not clamped: what is distilled.

        Args:
            features: what `encode` returns as `features`, (R, F).
            z: noise, (R, H, A).
        """
        return z - self._net(features)(z, 0)

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the squared error to the demonstrated chunk, whatever the noise.

        Its minimum is the mean of the demonstrations. Distil a teacher to keep their spread.
        """
        features, actions = self._demonstration(batch, generator)
        error = (self.decode(features, normal_like(actions, generator)) - actions).square()
        return valid_mean(error, batch.valid)
