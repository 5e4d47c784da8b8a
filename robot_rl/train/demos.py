"""Demonstrations for a run: collected from the scripted expert, and relabelled by the base policy.

T control steps in all, E episodes, F = T + E frames (final observations included), H chunk length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.core.names import GRIPPERS
from robot_rl.core.policy import Policy
from robot_rl.core.seeding import EpisodeRng, train_seed
from robot_rl.data.demos import Episodes, load_episodes
from robot_rl.data.episodes import episodes_meta, together
from robot_rl.data.replay import Keep, ReplayBuffer
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.rollout.envs import Expert, make_expert
from robot_rl.rollout.stepping import Moment, lockstep, seed_batches
from robot_rl.sim.reflection import reflection_of
from robot_rl.train.config import RunConfig
from robot_rl.train.recorded import DemosConfig

Array = NDArray[Any]
Columns = dict[str, Array]
"""One episode: (T, ...) each by its name, and the last observation."""

_BATCH = 1024
"""Decisions relabelled at once."""
_PUSHED_SHARE, _PUSH_STAYS = 0.7, 0.8
"""Share of episodes with a push, and what is left of it a control step later."""
_PUSHES = np.uint64(0x6461727400000000)
"""Separates the draws of pushes from those of env and policy with the same episode seed."""


def collect_demonstrations(
    env: VectorEnv, config: DemosConfig, run_seed: int, *, on_batch: Callable[[int], None] | None = None
) -> Episodes:
    """Records the episodes that a configuration asks for; the same for the same run seed."""
    expert, first = expert_of(env, bias_m=config.bias_m, noise_m=config.noise_m, run_seed=run_seed)
    seeds = np.arange(first, first + config.episodes, dtype=np.uint64)
    return collect_episodes(env, expert, seeds, disturb=config.disturb, on_batch=on_batch)


def expert_of(env: VectorEnv, *, bias_m: float, noise_m: float, run_seed: int) -> tuple[Expert, int]:
    """Returns the expert of a run's demonstrations, and the seed of their first episode."""
    expert = make_expert(env, bias_m=bias_m, noise_m=noise_m, noise_seed=train_seed(run_seed, "expert"))
    return expert, first_seed(run_seed)


def first_seed(run_seed: int) -> int:
    """Returns the seed of the first episode that a run plays before it learns."""
    # Half the range of training seeds: the episodes' own seeds follow the first and stay in it.
    return train_seed(run_seed, "demos") // 2


def load_demonstrations(
    folder: Path, config: RunConfig, *, mirrored: bool = True, as_executed: bool = False
) -> Episodes:
    """Reads the demonstrations of all scenes; their mirror images stand behind them if the run wants them.

    Args:
        folder: of the demonstrations.
        config: the run's.
        mirrored: False leaves the mirror images out.
        as_executed: with the actions that were executed, not those that an expert wanted.

    Raises:
        ConfigError: there are no mirror images of this task, or of pictures.
    """
    how: dict[str, Any] = {"read": config.demos.read, "as_executed": as_executed}
    parts = [load_episodes(folder / name, **how) for name in config.scenes]
    if as_executed:
        parts = [executed(part, config.demos, config.seed) for part in parts]
    episodes = together(parts)
    if not (config.demos.mirror and mirrored):
        return episodes
    return reflection_of(config.env, at="demos.mirror").with_images(episodes)


def collect_episodes(
    env: VectorEnv,
    expert: Expert,
    seeds: NDArray[np.uint64],
    *,
    disturb: float = 0.0,
    on_batch: Callable[[int], None] | None = None,
) -> Episodes:
    """Records one episode of the expert for every seed, failures included.

    Args:
        env: autoreset DISABLED.
        expert: acts in all envs from their present state.
        seeds: of the episodes, in the order they are recorded.
        disturb: standard deviation of the push of `Disturbed`; recorded is what the expert wanted.
        on_batch: called with the number of recorded episodes after every batch of envs.
    """
    rows: list[Columns] = []
    for where, batch in seed_batches(seeds, env.num_envs):
        pushed = Disturbed(env, expert, batch, disturb) if disturb else None
        found = played(env, batch, pushed.act if pushed else lambda obs: expert.act())
        rows += (pushed.relabelled(found) if pushed else found)[: where.stop - where.start]
        if on_batch is not None:
            on_batch(where.stop)
    return joined(env, rows)


class Pushes:
    """Slow random pushes on the actions of episodes, which depend on the episodes' seeds alone.

    A push is a first-order autoregression of a given size that begins at zero; 3 of 10 episodes have none,
    and a gripper, the last element, is never pushed.
    """

    def __init__(self, seeds: NDArray[np.uint64], action_names: Sequence[str], disturb: float) -> None:
        """Args: seeds: of the B episodes. action_names: of the A elements. disturb: standard deviation."""
        self._draws = EpisodeRng(seeds ^ _PUSHES, np.zeros_like(seeds))
        self._std = disturb * (self._draws.uniform() < _PUSHED_SHARE)
        if action_names[-1] in GRIPPERS:
            self._std = self._std * (np.arange(len(action_names)) < len(action_names) - 1)
        self._push: Array = np.zeros((len(seeds), len(action_names)))

    def on(self, wanted: Array) -> Array:
        """Returns the actions (B, A) of the next step, pushed."""
        fresh = np.sqrt(1.0 - _PUSH_STAYS**2) * self._draws.normal(wanted.shape[1])
        self._push = _PUSH_STAYS * self._push + self._std * fresh
        return np.clip(wanted + self._push, -1.0, 1.0).astype(np.float32)


class Disturbed:
    """An expert that is pushed, so that it shows how to come back (DART: Laskey et al. 2017).

    Deviation: the push is slow and has a given size, see `Pushes`.
    """

    def __init__(self, env: VectorEnv, expert: Expert, seeds: NDArray[np.uint64], disturb: float) -> None:
        """Args: seeds: of the episodes. disturb: standard deviation."""
        self._expert = expert
        self._pushes = Pushes(seeds, env.action_names, disturb)
        self._wanted: list[Array] = []

    def act(self, obs: Obs) -> Array:
        """Returns the actions (B, A) that the envs get."""
        wanted = self._expert.act()
        self._wanted.append(wanted)
        return self._pushes.on(wanted)

    def relabelled(self, rows: list[Columns]) -> list[Columns]:
        """Returns the episodes with the actions that the expert wanted."""
        wanted = np.stack(self._wanted, axis=1)
        return [
            row | {"action": own[: len(row["reward"])].astype(row["action"].dtype)}
            for row, own in zip(rows, wanted, strict=True)
        ]


def executed(episodes: Episodes, config: DemosConfig, run_seed: int) -> Episodes:
    """Returns the demonstrations of one env with the actions that were executed, where it was pushed.

    What is kept is what the expert wanted; the pushes on it are drawn again from the episodes' seeds.
    """
    if config.disturb == 0:
        return episodes
    starts, ends = episodes.bounds()
    seeds = first_seed(run_seed) + np.arange(episodes.num_episodes, dtype=np.uint64)
    pushes, action = Pushes(seeds, episodes.meta.action_names, config.disturb), episodes.action.copy()
    for step in range(int((ends - starts).max())):
        live = step < ends - starts
        wanted = np.zeros((len(seeds), action.shape[1]), action.dtype)
        wanted[live] = action[starts[live] + step]
        action[starts[live] + step] = pushes.on(wanted)[live]
    return replace(episodes, action=action)


def played(env: VectorEnv, seeds: NDArray[np.uint64], act: Callable[[Obs], Array]) -> list[Columns]:
    """Returns one episode of every env, each from its own seed; see `lockstep`."""
    moments = list(lockstep(env, seeds, _nothing, act))
    return [_episode(moments, row) for row in range(env.num_envs)]


def joined(env: VectorEnv, rows: Sequence[Columns]) -> Episodes:
    """Returns the episodes one after the other."""
    lengths = [len(row["reward"]) for row in rows]
    keys = [name for name in rows[0] if name.startswith("obs.")]
    columns = ("action", "reward", "terminated", "truncated", "success")
    return Episodes(
        meta=episodes_meta(env),
        obs={key.removeprefix("obs."): np.concatenate([row[key] for row in rows]) for key in keys},
        **{name: np.concatenate([row[name] for row in rows]) for name in columns},
        episode_index=np.repeat(np.arange(len(rows)), lengths),
        final_obs={key.removeprefix("obs."): np.stack([row[f"final.{key}"] for row in rows]) for key in keys},
        start=np.array([env.reset_classes[row["start"]] for row in rows]) if "start" in rows[0] else None,
    )


def relabelled(
    episodes: Episodes,
    policy: Policy,
    *,
    n_exec: int,
    seed: int,
    device: str = "cpu",
    keep: Keep | None = None,
) -> ReplayBuffer:
    """Returns a replay of the episodes with what the base policy would have proposed at each frame.

    As when acting, the base plans at every `n_exec`-th frame of an episode and its chunk is followed
    in between, so that the critic meets the same base actions in both halves of its batch.
    """
    starts, ends = episodes.bounds()
    step_rows = np.arange(len(episodes.reward)) + episodes.episode_index  # row of each step among the frames
    final_rows = ends + np.arange(len(ends))
    frame = np.empty(len(step_rows) + len(final_rows), np.int64)
    frame[step_rows] = np.arange(len(step_rows)) - starts[episodes.episode_index]
    frame[final_rows] = ends - starts
    decisions = np.flatnonzero(frame % n_exec == 0)
    chunks = chunks_of(_frames(episodes, step_rows, final_rows, decisions), policy, seed, device)
    decision_of = np.searchsorted(decisions, np.arange(len(frame)), side="right") - 1
    base_action = chunks[decision_of, frame % n_exec]
    proposed: dict[str, Any] = {
        "base_action": base_action[step_rows],
        "final_base_action": base_action[final_rows],
    }
    return ReplayBuffer.from_episodes(episodes, **proposed, keep=keep)


def _episode(moments: list[Moment], row: int) -> Columns:
    """Returns one env's episode."""
    live = [moment for moment in moments if moment.live[row]]
    columns: Columns = {
        "action": np.stack([moment.infos["commanded_action"][row] for moment in live]),
        "reward": np.array([moment.reward[row] for moment in live], np.float32),
        "terminated": np.array([moment.terminated[row] for moment in live]),
        "truncated": np.array([moment.truncated[row] for moment in live]),
        "success": np.array([moment.infos["success"][row] for moment in live]),
    }
    if "reset_class" in live[0].infos:
        columns["start"] = live[0].infos["reset_class"][row]
    for key in live[0].obs:
        columns[f"obs.{key}"] = np.stack([moment.obs[key][row] for moment in live])
        columns[f"final.obs.{key}"] = live[-1].next_obs[key][row]
    return columns


def _frames(episodes: Episodes, step_rows: Array, final_rows: Array, decisions: Array) -> Obs:
    """Returns the observations of the frames at which the base decides."""
    chosen: Obs = {}
    for key, values in episodes.obs.items():
        frames = np.empty((len(step_rows) + len(final_rows), *values.shape[1:]), values.dtype)
        frames[step_rows], frames[final_rows] = values, episodes.final_obs[key]
        chosen[key] = frames[decisions]
    return chosen


def chunks_of(obs: Obs, policy: Policy, seed: int, device: str) -> Array:
    """Returns one chunk (n, H, A) for each observation."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[Array] = []
    with torch.no_grad():
        for start in range(0, len(next(iter(obs.values()))), _BATCH):
            part = {
                key: torch.from_numpy(value[start : start + _BATCH]).to(device) for key, value in obs.items()
            }
            rows = len(next(iter(part.values())))
            z = torch.randn(rows, policy.horizon, policy.action_dim, generator=generator).to(device)
            how: dict[str, Any] = {"z": z, "mode": "ode", "generator": generator}  # DDPM draws more than z
            parts.append(policy.sample(policy.encode(part), **how).actions.cpu().numpy())
    return np.concatenate(parts)


def _nothing(obs: Obs, infos: dict[str, Any]) -> None:
    """Prepares nothing: the expert reads the state itself."""
