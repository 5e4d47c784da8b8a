"""Decision-time search: of several chunks that a policy would draw, the one that does best in a world model.

Nothing is trained on the model's word, so an error of the model costs one decision and teaches nothing wrong:
the safe way to use it (QWM, see docs/worlds.md; deviation: imagined success alone scores, no critic). Every
candidate is imagined to its end with the policy behind it; the score is the discounted success before the
gate cuts. Ties, and all that is without success, are the policy's own first chunk: without a model that sees
success ahead nothing changes.
B rows that plan, N candidates, H chunk length, A action dim.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from robot_rl.core.arrays import Array
from robot_rl.core.errors import require
from robot_rl.core.policy import ChunkSample, Encoded, Mode, rows_of
from robot_rl.data.episodes import episodes_meta
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.adapter import PolicyAdapter, refuse_continuing
from robot_rl.policies.best_of_n import candidate_noise
from robot_rl.policies.chain import initial_noise
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.config import SearchConfig
from robot_rl.worlds.env import begun_as
from robot_rl.worlds.inventory import check_fits

_BEGUN = "search."
"""Before the names of a reset's options in an encoding: where imagined episodes begin."""


class SearchPolicy(PolicyAdapter):
    """A policy that looks ahead; everything but `sample` is its base's."""

    def __init__(self, base: nn.Module, world: VectorEnv, config: SearchConfig, *, n_exec: int) -> None:
        """Wraps a policy.

        Args:
            base: draws the candidates.
            world: an env of the model with N times as many rows as ever plan at once; autoreset DISABLED.
            config: how to search.
            n_exec: control steps that are executed of each chunk, imagined ones too.

        Raises:
            ConfigError: the policy cannot be searched.
        """
        refuse_continuing(base, "search", "Search among the chunks of its base.")
        super().__init__(base)
        self._world: Any = world
        self._config, self._n_exec = config, n_exec

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        begun = begun_as(self._world.world, {name: value.cpu().numpy() for name, value in obs.items()})
        device = obs["state"].device
        options = {_BEGUN + name: torch.from_numpy(value).to(device) for name, value in begun.items()}
        return cast("Encoded", {**super().encode(obs), **options})

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: torch.Generator | None = None,
    ) -> ChunkSample:
        """Returns the best candidate of each row; the first is the base's own."""
        begun = {
            name.removeprefix(_BEGUN): value for name, value in encoded.items() if name.startswith(_BEGUN)
        }
        states, number = begun["observed"], self._config.candidates
        rows = torch.arange(len(states), device=states.device)
        z = initial_noise(self, states, z, mode, generator)
        wide = rows_of(encoded, rows.repeat_interleave(number))
        found = self.policy.sample(wide, z=candidate_noise(z, number), mode=mode, generator=generator)
        chunks = found.actions.unflatten(0, (len(states), number))  # (B, N, H, A)
        scores = self._imagined(begun, chunks.detach().cpu().numpy(), z)
        best = torch.from_numpy(scores.argmax(axis=1)).to(rows.device)  # the first of equals
        return ChunkSample(chunks[rows, best])

    @torch.no_grad()
    def _imagined(self, begun: Mapping[str, Tensor], chunks: Array, z: Tensor) -> Array:
        """Returns the scores (B, N) of chunks (B, N, H, A); `begun` has a reset's options, (B, ...) each."""
        rows, number = chunks.shape[:2]
        env, device = self._world, z.device
        wide = np.resize(np.arange(rows * number), env.num_envs)  # rows beyond are repeated, and not read
        repeated = {name: value.cpu().numpy()[wide // number] for name, value in begun.items()}
        env.reset(seed=0, options=repeated)
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
                plan = self.policy.sample(self.policy.encode(obs), z=noise).actions.cpu().numpy()
        return score[: rows * number].reshape(rows, number)


def check_pictures(policy: Any, model: Any, real: Any) -> None:
    """Refuses a model that lacks pictures which a policy sees, or has others than are observed.

    Args: policy, model, real: with `cameras` in its settings, if it has any; two envs.

    Raises:
        ConfigError: names them.
    """
    own = getattr(getattr(policy, "config", policy), "cameras", ())
    shown, seen = (_pictures(env.single_observation_space) for env in (model, real))
    lacks = [name for name in own if name not in shown]
    allowed = "a model of what the policy sees"
    require(not lacks, "search.world", f"no pictures of {', '.join(lacks)}", allowed)
    other = [
        f"{name} {size}, not {seen.get(name, 'observed')}"
        for name, size in shown.items()
        if size != seen.get(name)
    ]
    require(not other, "search.world", f"pictures of {', '.join(other)}", "a model of pictures as observed")


def _pictures(space: Mapping[str, Any]) -> dict[str, str]:
    """Returns camera -> its size, of the pictures in a space of observations."""
    return {
        key.removesuffix(".rgb"): f"{each.shape[0]} x {each.shape[1]}"
        for key, each in space.items()
        if key.endswith(".rgb")
    }


@contextmanager
def looking_ahead(
    policy: nn.Module, config: SearchConfig, *, real: VectorEnv, n_exec: int, **held: Any
) -> Generator[Any]:
    """Yields a policy that looks ahead, under a lease of its world model; without one, the policy itself.

    Args:
        policy: draws the candidates; the model computes where it does.
        config: how to search; `world` may be None.
        real: where the policy acts, and which the model must imitate; all its rows may plan at once.
        n_exec: control steps that are executed of each chunk.
        held: `holder` and `wait_s` of the lease.

    Raises:
        CheckpointError: the model is of another task, robot, rate or state.
    """
    if config.world is None:
        yield policy
        return
    check_fits(config.world, episodes_meta(real), at="search.world")
    # one member goes on, most must agree
    device = next((str(weight.device) for weight in policy.parameters()), "cpu")
    settings = {"strides": config.strides, "member": 0, "device": device}
    env = EnvConfig(kind="world", id=config.world, task=real.task, settings=settings)
    with opened(simulation(env, real.num_envs * config.candidates), **held) as world:
        check_pictures(policy, world, real)
        yield SearchPolicy(policy, world, config, n_exec=n_exec)
