"""Distillation: one network call in place of K, from the same noise (RL-100's last phase).

    L = |student(z, s) - teacher_K(z, s)|^2        in the scale of the chain, over states of the data

The teacher adds no noise when it decodes, so it is a function of z, and the student learns that
function, not its mean. Deviation: the teacher's own end of the path is the aim; RL-100's consistency loss
compares steps of it, with an average of the student. R rows, H chunk length, A action dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from robot_rl.algos.config.cloning import DistilConfig
from robot_rl.algos.learner import Learner, PolicyModule
from robot_rl.algos.optim import Optimiser, cosine_lr
from robot_rl.core.policy import Encoded, Policy
from robot_rl.data.transitions import ChunkBatch


class Student(PolicyModule, Protocol):
    """Generates chunks from noise in one network call."""

    def decode(self, features: Tensor, z: Tensor) -> Tensor: ...

    def to_chain(self, actions: Tensor, encoded: Encoded) -> Tensor: ...


def distance(student: Student, teacher: Policy, obs: dict[str, Tensor], z: Tensor) -> Tensor:
    """Returns the mean squared distance of their chunks from the same noise, in the scale of the chain.

    Args:
        student: gets the gradient, if gradients are enabled.
        teacher: gets none.
        obs: R states.
        z: noise, (R, H, A).
    """
    encoded = student.encode(obs)
    with torch.no_grad():
        aim = student.to_chain(teacher.sample(teacher.encode(obs), z=z).actions, encoded)
    return (student.decode(encoded["features"], z) - aim).square().mean()


class Distillation(Learner):
    """Learns the student."""

    def __init__(self, student: Student, teacher: Policy, cfg: DistilConfig, seed: int) -> None:
        """Starts from the student's present weights; `seed` is of the noise."""
        super().__init__()
        self._student, self._teacher, self._cfg = student, teacher, cfg
        self._optimiser = Optimiser(student.parameters(), lr=cfg.lr, grad_clip=1.0)
        self._generator = Generator(next(student.parameters()).device).manual_seed(seed)

    def update(self, batch: ChunkBatch) -> Mapping[str, Tensor]:
        """Takes a step in the states of the batch; what was done in them is not read."""
        rows = len(next(iter(batch.obs.values())))
        z = torch.empty(rows, self._student.horizon, self._student.action_dim, device=self._generator.device)
        loss = distance(self._student, self._teacher, batch.obs, z.normal_(generator=self._generator))
        lr = cosine_lr(self._updates, peak=self._cfg.lr, warmup=0, total=self._cfg.updates, floor=0.0)
        self._optimiser.step(loss, lr=lr)
        self._updates += 1
        return {"distance": loss.detach()}

    def policy_weights(self) -> Mapping[str, Tensor]:
        return self._student.state_dict()

    def _parts(self) -> Mapping[str, Any]:
        return {"student": self._student, "optimiser": self._optimiser, "generator": self._generator}
