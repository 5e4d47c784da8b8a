"""Evaluation: every started episode counts once, on held-out seeds, with the same actions every time.

Training and `robot-rl evaluate` call `evaluate_in` with the same batch size, so identical
(checkpoint, seeds) give identical actions; the digest over all actions shows that they did.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.policy import Policy
from robot_rl.core.seeding import EpisodeRng
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.rollout.stepping import Moment, lockstep, seed_batches
from robot_rl.telemetry.intervals import wilson_interval

Array = NDArray[Any]
_PUSHES = np.uint64(0x7075736865730000)
"""Separates the draws of pushes from those of env and policy with the same episode seed."""


@dataclass(frozen=True)
class EvalResult:
    """What happened in n episodes, in the order of their seeds."""

    success: NDArray[np.bool_]
    """(n,) solved at any step of the episode, or already at reset."""
    solved_at_reset: NDArray[np.bool_]
    """(n,) solved before the policy did anything: reported in addition to the success."""
    steps: NDArray[np.int64]
    """(n,) control steps until the episode ended."""
    returns: NDArray[np.float64]
    """(n,) undiscounted sum of rewards."""
    seeds: NDArray[np.uint64]
    action_digest: str
    """SHA-256 over every action of every live row, in order."""
    nan_resets: int
    """Episodes cut short because their simulation diverged; they count as failures."""
    says_success: bool = True
    """Whether the env reports successes."""

    @property
    def rate(self) -> float:
        """Share of solved episodes among all started ones; `solved_at_reset` is reported too."""
        return float(self.success.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of `rate`."""
        return wilson_interval(int(self.success.sum()), len(self.success))

    def shown(self) -> dict[str, Any]:
        """Returns its part of a progress line."""
        if self.says_success:
            return {"success": self.rate}
        return {"note": f"return {self.returns.mean():.0f}"}

    def to_json(self) -> dict[str, Any]:
        return {
            "success": self.rate,
            "ci": list(self.interval),
            "episodes": len(self.seeds),
            "solved_at_reset": int(self.solved_at_reset.sum()),
            "return": float(self.returns.mean()),
            "says_success": self.says_success,
            "mean_steps": float(self.steps.mean()),
            "nan_resets": self.nan_resets,
            "first_seed": int(self.seeds[0]),
            "digest": self.action_digest,
        }


def of_all(results: Mapping[str, EvalResult]) -> EvalResult:
    """Returns the episodes of all sources together; the digest of several is that of their digests."""
    found = list(results.values())
    if len(found) == 1:
        return found[0]
    digests = "".join(one.action_digest for one in found)
    columns = ("success", "solved_at_reset", "steps", "returns", "seeds")
    return EvalResult(
        **{name: np.concatenate([getattr(one, name) for one in found]) for name in columns},
        action_digest=hashlib.sha256(digests.encode()).hexdigest(),
        nan_resets=sum(one.nan_resets for one in found),
        says_success=any(one.says_success for one in found),
    )


def to_json(results: Mapping[str, EvalResult]) -> dict[str, Any]:
    """Returns the JSON form of an evaluation: of all sources together, and of each of several."""
    each = {name: one.to_json() for name, one in results.items()}
    return of_all(results).to_json() | ({"sources": each} if len(each) > 1 else {})


def evaluate_in(
    env: VectorEnv,
    policy: Policy,
    *,
    seeds: NDArray[np.uint64],
    n_exec: int,
    delay: int = 0,
    ensemble: float | None = None,
    device: str = "cpu",
    disturb: float = 0.0,
    on_batch: Callable[[int], None] | None = None,
    watch: Callable[[slice, Moment], None] | None = None,
) -> EvalResult:
    """Plays one episode for every seed with the deterministic policy and nothing else.

    Args:
        env: autoreset DISABLED; its number of envs is the batch size of the policy.
        n_exec: control steps executed of each chunk.
        delay: control steps that planning a chunk takes; see `ChunkExecutor`.
        ensemble: m of the temporal ensemble; None executes each chunk as it is.
        device: where the policy's parameters are.
        disturb: largest push, a share of [-1, 1]; each episode has one, from its seed, in every action.
        on_batch: called with the number of finished episodes after every batch.
        watch: sees every control step, with which of the seeds the rows are; for films.
    """
    executor = ChunkExecutor(
        policy, env.num_envs, n_exec=n_exec, delay=delay, ensemble=ensemble, mode="ode", device=device
    )
    digest = hashlib.sha256()
    parts: list[dict[str, Array]] = []
    for where, batch in seed_batches(seeds, env.num_envs):
        kept = where.stop - where.start
        pushed = functools.partial(_pushed, batch, disturb) if disturb else lambda action: action
        seen = functools.partial(watch, where) if watch else None
        played = _play(env, executor, batch, kept, digest, pushed, seen)
        parts.append({name: values[:kept] for name, values in played.items()})
        if on_batch is not None:
            on_batch(where.stop)
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return EvalResult(
        success=found["success"],
        solved_at_reset=found["solved"],
        steps=found["steps"],
        returns=found["returns"],
        seeds=seeds.copy(),
        action_digest=digest.hexdigest(),
        nan_resets=int(found["diverged"].sum()),
        says_success=env.says_success,
    )


def _play(
    env: VectorEnv,
    executor: ChunkExecutor,
    seeds: Array,
    kept: int,
    digest: hashlib._Hash,
    pushed: Callable[[Array], Array],
    watch: Callable[[Moment], None] | None,
) -> dict[str, Array]:
    """Plays one batch; the rows from `kept` on only fill it up and leave no trace in the digest."""
    num_envs = env.num_envs
    solved, success, diverged = (np.zeros(num_envs, bool) for _ in range(3))
    steps, returns = np.zeros(num_envs, np.int64), np.zeros(num_envs)

    def begin(obs: Obs, infos: dict[str, Any]) -> None:
        executor.reset(np.ones(num_envs, bool), seeds)
        solved[:] = infos.get("success", False)

    for moment in lockstep(env, seeds, begin, lambda obs: pushed(executor.act(obs).action)):
        live = moment.live
        digest.update(moment.action[:kept][live[:kept]].astype("<f4").tobytes())
        success |= live & moment.infos["success"]
        diverged |= live & moment.infos.get("diverged", False)
        steps += live
        returns += np.where(live, moment.reward, 0.0)
        if watch is not None:
            watch(moment)
    return {
        "success": success | solved,
        "solved": solved,
        "steps": steps,
        "returns": returns,
        "diverged": diverged,
    }


def _pushed(seeds: Array, disturb: float, action: Array) -> Array:
    """Returns the actions (B, A), each with the push of its episode."""
    draws = EpisodeRng(seeds ^ _PUSHES, np.zeros_like(seeds))
    push = draws.uniform(-disturb, disturb, action.shape[1]).astype(action.dtype)
    return np.clip(action + push, -1.0, 1.0)
