"""How long new weights take to act in other processes, and what their arrival does to control there.

    learner: offer -> memory -> N actors, each at 20 Hz: the first control step with the new version

Actors simulate an arm, in real time. Choosing an action costs nothing here, and all weights are 0: no time
depends on their values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from robot_rl.bench.trials import one_torch_thread
from robot_rl.core.errors import require
from robot_rl.core.policy import ChunkSample, Encoded, Policy
from robot_rl.data.transitions import StepBatch
from robot_rl.hal.vector import Array
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.process import ProcessSource
from robot_rl.rollout.sources import InlineSource
from robot_rl.rollout.weights import Published, Publisher
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig

HZ = 20.0
LAYER = 1_000_000
"""Parameters in one tensor."""


class Ballast(nn.Module):
    """A policy that wants nothing, with as many parameters as wanted."""

    horizon, refines = 1, False

    def __init__(self, parameters: int, action_dim: int = 1) -> None:
        super().__init__()
        self.action_dim = action_dim
        sizes = [LAYER] * (parameters // LAYER) + [parameters % LAYER] * (parameters % LAYER > 0)
        self.layers = nn.ParameterList([torch.zeros(size) for size in sizes])

    def sample(self, obs: Mapping[str, Tensor], **_: Any) -> ChunkSample:
        return ChunkSample(torch.zeros(len(obs["state"]), 1, self.action_dim))

    def encode(self, obs: Mapping[str, Tensor]) -> Encoded:
        return Encoded({**obs})

    def refine(self, encoded: Encoded, action: Tensor, **_: Any) -> Tensor:
        return action


class Acting(InlineSource):
    """Acts in a simulation, and says when each control step ended."""

    def __init__(self, parameters: int) -> None:
        torch.set_num_threads(1)
        self._device = ExitStack()
        device = simulation(EnvConfig(task="reach", num_threads=1), 1, autoreset="same_step")
        env = self._device.enter_context(opened(device, holder="bench weights", wait_s=60.0))
        policy = Ballast(parameters, len(env.action_names))
        executor = ChunkExecutor(cast("Policy", policy), 1, n_exec=1)
        super().__init__(env, policy, executor, seed=0)

    def collect(self, published: Published) -> StepBatch:
        return replace(super().collect(published), stamp_ns=time.monotonic_ns())

    def close(self) -> None:
        self._device.close()


def run(
    *,
    parameters: tuple[float, ...] = (0.5, 5.0, 50.0),
    actors: tuple[int, ...] = (1, 4, 16),
    versions: int = 10,
    every_s: float = 1.0,
) -> dict[str, Any]:
    """Publishes versions one after another; returns rows.

    Args:
        parameters: of the policies, in millions.
        actors: numbers of processes that act.
        versions: how many are published.
        every_s: time between two of them.
    """
    require(min(parameters) > 0, "parameters", list(parameters), "above 0")
    require(min(actors) >= 1, "actors", list(actors), "1 or more")
    require(versions >= 1, "versions", versions, "1 or more")
    with one_torch_thread():
        rows = [
            measured(round(1e6 * size), many, versions, every_s) for size in parameters for many in actors
        ]
    note = (
        f"latency: from the learner's offer to the end of the first control step with it, at {HZ:g} Hz, so "
        "up to 50 ms of it is the wait for that step. Longest period: between two control steps of an actor, "
        "as a share of 50 ms; in the time before, with nothing published, and while versions arrive."
    )
    return {"title": "new weights in other processes", "rows": rows, "notes": [note]}


def measured(parameters: int, actors: int, versions: int, every_s: float) -> dict[str, Any]:
    """Returns the row of one size and number."""
    policy, publisher = Ballast(parameters), Publisher()
    publisher.offer(0, policy.state_dict)
    offered_s, offer_s = {0: 0.0}, list[float]()
    with ExitStack() as stack:
        sources = [
            stack.enter_context(
                closing(ProcessSource(partial(Acting, parameters), wait_s=0.0, period_s=1 / HZ))
            )
            for _ in range(actors)
        ]
        steps: list[list[tuple[float, int]]] = [[] for _ in sources]

        def collect(until_s: float) -> None:
            while time.monotonic() < until_s:
                for source, seen in zip(sources, steps, strict=True):
                    while (segment := source.collect(publisher)) is not None:
                        stamp_ns: Any = segment.stamp_ns
                        seen.append((1e-9 * stamp_ns, segment.policy_version))
                time.sleep(0.002)

        while not all(steps):
            collect(time.monotonic() + 0.1)
        quiet_s = time.monotonic() + 1.0  # the last process has settled
        collect(quiet_s + every_s * versions)
        began_s = time.monotonic()
        for version in range(1, versions + 1):
            due_s = time.monotonic() + every_s
            offered_s[version] = time.monotonic()
            publisher.offer(version, policy.state_dict)
            offer_s.append(time.monotonic() - offered_s[version])
            collect(due_s)
        collect(time.monotonic() + 2.0)
        ended_s = time.monotonic() - 2.0
    latency_s = [
        next((at for at, acted in seen if acted >= version), np.nan) - offered_s[version]
        for seen in steps
        for version in range(1, versions + 1)
    ]
    return {
        "parameters": f"{1e-6 * parameters:g} M",
        "actors": actors,
        "offer ms": 1e3 * float(np.median(offer_s)),
        "latency ms, median": 1e3 * float(np.median(latency_s)),
        "latency ms, longest": 1e3 * float(np.max(latency_s)),
        "longest period before": _longest(steps, quiet_s, began_s),
        "longest period": _longest(steps, began_s, ended_s),
        "periods above 2": _above(steps, began_s, ended_s),
    }


def _periods(seen: Sequence[tuple[float, int]], since_s: float, until_s: float) -> Array:
    """Returns the times between control steps, in periods."""
    return HZ * np.diff([at for at, _ in seen if since_s <= at <= until_s])


def _longest(steps: Sequence[Sequence[tuple[float, int]]], since_s: float, until_s: float) -> float:
    return max(float(_periods(seen, since_s, until_s).max(initial=0.0)) for seen in steps)


def _above(steps: Sequence[Sequence[tuple[float, int]]], since_s: float, until_s: float) -> str:
    periods = np.concatenate([_periods(seen, since_s, until_s) for seen in steps])
    return f"{int((periods > 2).sum())} of {len(periods)}"
