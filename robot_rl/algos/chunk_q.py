"""Q-learning over action chunks, offline and online (Li et al. 2025, Q-chunking).

    y = sum_{i<h} gamma^i r_{t+i} + gamma^h Q'(s_{t+h}, a'),   Q on (features, h executed actions)

A flow policy clones all data, failures included. The acting policy, which also proposes a', is one of two.
`best_of_n` (QC): of n chunks of the flow, the one the critics value most. `fql` (QC-FQL, flow Q-learning
of Park et al. 2025): a one-step student, held near the flow's chunk from the same noise, that follows the
critics' gradient:

    L = alpha |student(z) - flow(z)|^2 - Q(s, student(z))

With h = 1 these are best-of-n and FQL with an ordinary Q. Deviations: narrower networks; an exponential
average of the flow's weights proposes and teaches; targets of chunks that a success or failure cut short
are used (the paper leaves them out), those that stop at the newest step are not.
B batch, H chunk length, h of it that is executed, A action dim, P lengths that have a value, R rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from robot_rl.algos.chunk_critics import ChunkCritics
from robot_rl.algos.config.off_policy import ChunkQConfig
from robot_rl.algos.learner import Learner, PolicyModule
from robot_rl.algos.optim import METRICS_EVERY, Optimiser, follow, matmul_precision
from robot_rl.algos.returns import td_target
from robot_rl.core.policy import DemoBatch, Encoded, rows_of
from robot_rl.data.transitions import ChunkBatch

Module = Any
"""A policy that is a `torch.nn.Module` as well; Python has no type for both."""


class Actor(Protocol):
    """The acting policy, which also proposes the actions of targets."""

    modules: dict[str, Module]
    """Its modules, by their names in the saved policy."""
    parts: dict[str, Any]
    """What of it is saved, see `learner.saved`."""

    def propose(self, obs: dict[str, Tensor], encoded: Encoded, generator: Generator) -> Tensor:
        """Returns chunks (R, H, A) of observations (R, ...), which the flow has `encoded`."""
        ...

    def update(self, obs: dict[str, Tensor], encoded: Encoded, generator: Generator) -> dict[str, Tensor]:
        """Takes a step towards what the critics value; returns metrics."""
        ...


class BestOf:
    """Of n chunks of the flow, the one that the critics value most: it has nothing to learn."""

    def __init__(self, flow: PolicyModule, critics: ChunkCritics, n: int) -> None:
        self._flow, self._critics, self._n = flow, critics, n
        self.modules: dict[str, Module] = {"base": flow, "scorer": critics}
        self.parts: dict[str, Any] = {}

    def propose(self, obs: dict[str, Tensor], encoded: Encoded, generator: Generator) -> Tensor:
        n, features = self._n, encoded["features"]
        rows = len(features)
        candidates = rows_of(encoded, torch.arange(rows, device=features.device).repeat_interleave(n))
        chunks = self._flow.sample(candidates, z=_noise(self._flow, n * rows, features, generator)).actions
        score = self._critics.score(candidates["features"], chunks)
        best = score.view(rows, n).argmax(dim=1)
        return chunks[torch.arange(rows, device=best.device) * n + best]

    def update(self, obs: dict[str, Tensor], encoded: Encoded, generator: Generator) -> dict[str, Tensor]:
        return {}


class Distilled:
    """A one-step student of the flow that follows the critics' gradient."""

    def __init__(self, student: Module, flow: PolicyModule, critics: ChunkCritics, cfg: ChunkQConfig) -> None:
        self._student, self._flow, self._critics, self._cfg = student, flow, critics, cfg
        self._optimiser = Optimiser(student.parameters(), lr=cfg.student_lr, grad_clip=cfg.grad_clip)
        self.modules: dict[str, Module] = {"": student}
        self.parts: dict[str, Any] = {"student": student, "optimiser": self._optimiser}

    def propose(self, obs: dict[str, Tensor], encoded: Encoded, generator: Generator) -> Tensor:
        own, features = self._student.encode(obs), encoded["features"]
        return self._student.sample(own, z=_noise(self._flow, len(features), features, generator)).actions

    def update(self, obs: dict[str, Tensor], encoded: Encoded, generator: Generator) -> dict[str, Tensor]:
        features = encoded["features"]
        z = _noise(self._flow, len(features), features, generator)
        with matmul_precision(self._cfg.critics.matmul), torch.enable_grad():
            own = self._student.encode(obs)
            with torch.no_grad():
                aim = self._student.to_chain(self._flow.sample(encoded, z=z).actions, own)
            x = self._student.decode(own["features"], z)
            actions = self._student.from_chain(x, own)
            value, by_actions = self._critics.action_gradient(features, actions.detach())
            distance = (x - aim).square().mean()
            # Its derivative by the actions is that of -mean Q.
            surrogate = -(actions * by_actions).sum() / len(actions)
            self._optimiser.step(self._cfg.alpha * distance + surrogate)
        return {"distance": distance.detach(), "student_q": value.mean()}


class ChunkQ(Learner):
    """Learns critics of chunks, the flow, and the acting policy."""

    def __init__(
        self,
        flow: PolicyModule,
        critics: ChunkCritics,
        cfg: ChunkQConfig,
        seed: int,
        *,
        student: Module = None,
    ) -> None:
        """Starts from the present weights, which the updates change in place.

        Args:
            flow: proposes and teaches, with the average of the weights that learn.
            critics: of the flow's features and chunks.
            cfg: rates, and which policy acts.
            seed: of all noise.
            student: a `OneStepPolicy`, for `fql`.
        """
        super().__init__()
        self._flow, self._critics, self._cfg = flow, critics, cfg
        self._target_critics = copy.deepcopy(critics).requires_grad_(False)
        self._learner: Module = copy.deepcopy(flow)
        self._learner.requires_grad_(True).train()
        self._actor: Actor = (
            BestOf(flow, critics, cfg.candidates)
            if cfg.actor == "best_of_n"
            else Distilled(student, flow, critics, cfg)
        )
        self._critic_optimiser = Optimiser(critics.parameters(), lr=cfg.critic_lr, grad_clip=cfg.grad_clip)
        self._flow_optimiser = Optimiser(self._learner.parameters(), lr=cfg.flow_lr, grad_clip=cfg.grad_clip)
        self._generator = Generator(next(flow.parameters()).device).manual_seed(seed)

    @torch.no_grad()
    def update(self, batch: ChunkBatch) -> Mapping[str, Tensor]:
        """Takes one step of the critics, of the flow, and of the acting policy."""
        encoded = self._flow.encode(batch.obs)
        target_BP, counts_BP = self._target(batch)
        error, gradients = self._critics.td_gradients(encoded["features"], batch.action, target_BP, counts_BP)
        self._critic_optimiser.apply(gradients)
        follow(self._target_critics.parameters(), self._critics.parameters(), self._cfg.tau)
        flow_loss = self._follow_data(batch)
        metrics = self._actor.update(batch.obs, encoded, self._generator)
        self._updates += 1
        if self._updates % METRICS_EVERY:
            return {}
        found = {"critic_loss": error.square().mean(dim=1).sum(), "flow_loss": flow_loss}
        return metrics | found | {"target": target_BP[counts_BP].mean()}

    def _target(self, batch: ChunkBatch) -> tuple[Tensor, Tensor]:
        """Returns the targets (B, P), and which of them count."""
        ends = batch.prefix
        assert ends is not None, "draw with prefixes=critics.lengths"
        next_obs = {key: value.flatten(0, 1) for key, value in ends.next_obs.items()}
        encoded = self._flow.encode(next_obs)
        with matmul_precision(self._cfg.critics.matmul):
            chunks = self._actor.propose(next_obs, encoded, self._generator)
        next_value = self._target_critics.score(encoded["features"], chunks)
        return td_target(ends.reward, ends.bootstrap, next_value.view_as(ends.reward)), ends.is_whole

    def _follow_data(self, batch: ChunkBatch) -> Tensor:
        """Takes a step of the flow's imitation loss."""
        with torch.enable_grad(), matmul_precision(self._cfg.critics.matmul):
            loss = self._learner.bc_loss(DemoBatch(batch.obs, batch.action, batch.valid), self._generator)
            self._flow_optimiser.step(loss)
        follow(self._flow.parameters(), self._learner.parameters(), 1.0 - self._cfg.flow_ema)
        return loss.detach()

    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns the weights of the acting policy."""
        return {
            f"{name}.{key}" if name else key: value
            for name, module in self._actor.modules.items()
            for key, value in module.state_dict().items()
        }

    def _parts(self) -> Mapping[str, Any]:
        return {
            "flow": self._flow,
            "learner": self._learner,
            "critics": self._critics,
            "target_critics": self._target_critics,
            "actor": self._actor.parts,
            "critic_optimiser": self._critic_optimiser,
            "flow_optimiser": self._flow_optimiser,
            "generator": self._generator,
        }


def _noise(flow: PolicyModule, rows: int, like: Tensor, generator: Generator) -> Tensor:
    """Returns the noise of `rows` chunks, (rows, H, A)."""
    return torch.empty(rows, flow.horizon, flow.action_dim, device=like.device).normal_(generator=generator)
