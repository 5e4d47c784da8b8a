"""Episodes of a policy or an expert, of which the good ones are kept: data for the policy that comes next.

A policy that reinforcement learning improved makes the demonstrations that a VLA learns from (Yang et al.
2025, Beyond Human Demonstrations; there a diffusion policy, smoother and more uniform than people). Here
it may be any policy, and what counts as good is a setting. B envs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.core.seeding import train_seed
from robot_rl.data.episodes import Episodes
from robot_rl.data.keep import Facts, KeepConfig, roughness, said, sift, together
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.policies.checkpoint import PolicyMeta, check_meta, load_policy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.spec import SavedPolicy
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.demos import Columns, expert_of, joined, played
from robot_rl.train.envs import Array, seed_batches
from robot_rl.train.phases import load_config


@dataclass(frozen=True)
class Actor:
    """Who acts in all envs."""

    begin: Callable[[NDArray[np.uint64]], None]
    """Told the seeds (B,) of the episodes that begin now."""
    act: Callable[[Obs], Array]
    """Returns actions (B, A)."""
    first_seed: int
    """Of its episodes; the others' follow."""


@dataclass(frozen=True)
class Collection:
    """What was kept, and what it was chosen from."""

    episodes: Episodes
    started: Facts
    """Of all episodes that were begun, in the order of their seeds."""
    refused: dict[str, int]
    """Setting of `KeepConfig` -> episodes that it refused."""

    @property
    def spare(self) -> int:
        """Episodes that passed when there were enough."""
        return len(self.started) - sum(self.refused.values()) - self.episodes.num_episodes


def collect(
    env: VectorEnv,
    actor: Actor,
    keep: KeepConfig,
    *,
    episodes: int,
    attempts: int,
    on_batch: Callable[[int, str], None] | None = None,
) -> Collection:
    """Plays episodes, a batch of envs at a time, until enough of them pass.

    Args:
        env: autoreset DISABLED.
        actor: who acts.
        keep: which episodes pass; its shares are of all that were played.
        episodes: how many are kept: the first that pass, in the order of their seeds.
        attempts: how many are begun at most.
        on_batch: called with the number of episodes that pass so far, and what was refused in words.

    Raises:
        DatasetError: too few passed; says which setting refused how many.
    """
    seeds = np.arange(actor.first_seed, actor.first_seed + attempts, dtype=np.uint64)
    limits = replace(keep, fastest=1.0, smoothest=1.0)
    rows, parts = dict[int, Columns](), list[Facts]()
    passed, refused = np.arange(0), dict[str, int]()
    for where, batch in seed_batches(seeds, env.num_envs):
        actor.begin(batch)
        new = played(env, batch, actor.act)[: where.stop - where.start]
        parts.append(_facts(new))
        # Pictures take memory: what no share can bring back is let go.
        rows |= {where.start + int(index): new[index] for index in sift(parts[-1], limits)[0]}
        started = together(parts)
        passed, refused = sift(started, keep)
        if on_batch is not None:
            on_batch(min(len(passed), episodes), said(refused, len(started)))
        if len(passed) >= episodes:
            chosen = joined(env, [rows[int(index)] for index in passed[:episodes]])
            return Collection(chosen, started, refused)
    raise DatasetError(
        f"collect: {len(passed)} of {episodes} episodes passed; {said(refused, attempts)}. Loosen that "
        f"setting of keep, allow more attempts than {attempts}, or ask for fewer episodes."
    )


def expert_actor(env: VectorEnv, *, bias_m: float, noise_m: float, seed: int) -> Actor:
    """Returns the scripted expert, with the seeds and the noise of a run's own demonstrations."""
    expert, first = expert_of(env, bias_m=bias_m, noise_m=noise_m, run_seed=seed)
    return Actor(lambda seeds: None, lambda obs: expert.act(), first)


def policy_actor(
    env: VectorEnv, policy: SavedPolicy, meta: PolicyMeta, *, seed: int, device: str = "cpu"
) -> Actor:
    """Returns a policy that acts as in an evaluation, without exploration.

    Raises:
        CheckpointError: it was made for another task, robot, rate or state.
    """
    here = ("task", "robot", "control_hz", "state_names", "action_names")
    check_meta("policy", meta, replace(meta, **{name: getattr(env, name) for name in here}))
    module: Any = policy
    executor = ChunkExecutor(module.to(device), env.num_envs, n_exec=meta.n_exec, mode="ode", device=device)
    # Half the range of training seeds: the episodes that follow the first stay in it.
    first = train_seed(seed, "collect") // 2
    return Actor(
        lambda seeds: executor.reset(np.ones(env.num_envs, bool), seeds),
        lambda obs: executor.act(obs).action,
        first,
    )


def open_policy(given: str) -> tuple[SavedPolicy, PolicyMeta, EnvConfig]:
    """Opens a policy, and says in which env it acts: its run's, or one that shows what it reads.

    Args:
        given: a run folder, whose final policy is meant, or the folder of a saved policy.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = Path(given).expanduser()
    for folder in (path, path / "policy" / "final", path / "policy"):
        if (folder / "policy.json").is_file():
            break
    else:
        raise CheckpointError(
            f"policy: {given!r} holds no policy. Give the folder of a run that has ended, a policy of one "
            "(runs/<folder>/policy/base), or any folder with a policy.json."
        )
    policy, meta = load_policy(folder)
    run = folder.resolve().parents[1]
    if (run / "config.yaml").is_file():
        return policy, meta, load_config(run, at="policy").env
    env = EnvConfig(task=meta.task, robot=meta.robot, state=meta.state_names)
    own: Any = vars(policy).get("config")
    cameras, size = getattr(own, "cameras", ()), getattr(own, "picture", env.image_size)
    return policy, meta, replace(env, cameras=cameras, image_size=size)


def _facts(rows: list[Columns]) -> Facts:
    return Facts(
        success=np.array([row["success"].any() for row in rows], bool),
        steps=np.array([len(row["action"]) for row in rows], np.int64),
        roughness=np.array([roughness(row["action"]) for row in rows], np.float64),
    )
