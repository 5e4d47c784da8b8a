"""Decision-time search: of several chunks that a policy would draw, the one that does best in a world model.

Nothing is trained on the model's word, so an error of the model costs one decision and teaches nothing wrong:
the safe way to use it (QWM, see docs/worlds.md; deviation: imagined success alone scores, no critic). Every
candidate is imagined to its end with the policy behind it; the score is the discounted success before the
gate cuts. Ties, and all that is without success, are the policy's own first chunk: without a model that sees
success ahead nothing changes.
B rows that plan, N candidates, H chunk length, A action dim.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.arrays import Array
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode, Policy
from robot_rl.hal.vector import VectorEnv
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.config import SearchConfig

_STATE = "search.state"
"""Name of the observed state in an encoding."""


class SearchPolicy(nn.Module):
    """A policy that looks ahead; everything but `sample` is the policy's."""

    def __init__(self, policy: Policy, world: VectorEnv, config: SearchConfig, *, n_exec: int) -> None:
        """Wraps a policy.

        Args:
            policy: draws the candidates.
            world: an env of the model with N times as many rows as ever plan at once; autoreset DISABLED.
            config: how to search.
            n_exec: control steps that are executed of each chunk, imagined ones too.
        """
        super().__init__()
        self._policy, self._world, self._config, self._n_exec = policy, world, config, n_exec
        self.horizon, self.action_dim = policy.horizon, policy.action_dim

    @property
    def refines(self) -> bool:
        return self._policy.refines

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        encoded = dict(self._policy.encode(obs))
        return cast("Encoded", {**encoded, _STATE: obs["state"]})

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the best candidate of each row."""
        states = encoded[_STATE]
        if z is None:
            z = torch.randn((len(states), self.horizon, self.action_dim), generator=generator)
        inner, number = cast("Encoded", self._inner(encoded)), self._config.candidates
        drawn = [
            self._policy.sample(inner, z=_noise_of(each, z), mode=mode, generator=generator).actions
            for each in range(number)
        ]
        chunks = torch.stack(drawn, dim=1)  # (B, N, H, A)
        scores = self._imagined(states.cpu().numpy(), chunks.detach().cpu().numpy(), z)
        best = torch.from_numpy(scores.argmax(axis=1)).to(chunks.device)  # the first of equals
        return ChunkSample(actions=chunks[torch.arange(len(chunks), device=chunks.device), best])

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        return self._policy.log_prob(cast("Encoded", self._inner(encoded)), chain)

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        return self._policy.bc_loss(batch, generator)

    def refine(
        self, encoded: Encoded, action: Tensor, *, mode: Mode = "ode", generator: Generator | None = None
    ) -> Tensor:
        return self._policy.refine(
            cast("Encoded", self._inner(encoded)), action, mode=mode, generator=generator
        )

    def _inner(self, encoded: Encoded) -> dict[str, Tensor]:
        """Returns the encoding as the policy inside made it."""
        return {name: value for name, value in encoded.items() if name != _STATE}

    @torch.no_grad()
    def _imagined(self, states: Array, chunks: Array, z: Tensor) -> Array:
        """Returns the scores (B, N) of chunks (B, N, H, A) from states (B, S)."""
        rows, number = chunks.shape[:2]
        env, device = self._world, z.device
        wide = np.resize(np.arange(rows * number), env.num_envs)  # rows beyond are repeated, and not read
        env.reset(seed=0, options={"observed": np.repeat(states, number, axis=0)[wide]})
        live, score = np.arange(env.num_envs) < rows * number, np.zeros(env.num_envs)
        plan, noise = chunks.reshape(-1, *chunks.shape[2:])[wide], z.repeat_interleave(number, dim=0)
        noise, steps = noise[torch.from_numpy(wide).to(device)], 0
        while live.any():
            done = env.step_chunk(plan, self._n_exec, live)
            spent = steps + done.valid.sum(axis=1)
            score = np.where(live & np.asarray(done.infos["success"]), self._config.gamma_step**spent, score)
            live &= ~(done.terminated | done.truncated)
            steps += self._n_exec
            if live.any():
                obs: dict[str, Any] = {
                    name: torch.from_numpy(np.asarray(value)).to(device) for name, value in done.obs.items()
                }
                plan = self._policy.sample(self._policy.encode(obs), z=noise).actions.cpu().numpy()
        return score[: rows * number].reshape(rows, number)


def _noise_of(number: int, z: Tensor) -> Tensor:
    """Returns the noise of a candidate: of the first `z` itself, of another its own, the same in all rows."""
    if number == 0:
        return z
    own = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(number))
    return own.to(z.device).expand(z.shape)


def imagining(config: SearchConfig, task: str | None) -> EnvConfig:
    """Returns the env of the model in which candidates are imagined: one member goes on, most must agree."""
    settings = {"strides": config.strides, "member": 0}
    return EnvConfig(kind="world", id=config.world, task=task or "", settings=settings)
