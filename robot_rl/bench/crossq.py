"""CrossQ against SAC on gymnasium's Walker2d and Hopper: an outside check of the actor-critic core.

Both learners are `algos.actor_critic` with other settings, on the same steps, one update each.
Published returns at 100,000 steps (SimbaV2's tables of both, on the -v4 envs, means of several
seeds): Walker2d CrossQ 3914, SAC 690; Hopper CrossQ 2764, SAC 1103. CrossQ's critics are 2048 wide
there; the width here is a setting, and its cost is in the rows.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.algos.actor_critic import ActorConfig, ActorCritic, ActorCriticConfig, CriticConfig
from robot_rl.core.errors import CheckpointError, ConfigError, RobotRLError
from robot_rl.core.files import write_synced
from robot_rl.core.seeding import train_seed
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.transitions import StepBatch
from robot_rl.telemetry.progress import PhaseProgress, ProgressDisplay

Array = NDArray[Any]
Name = Literal["crossq", "sac"]

PUBLISHED: dict[tuple[str, str], float] = {
    ("Walker2d-v5", "crossq"): 3914.0,
    ("Walker2d-v5", "sac"): 690.0,
    ("Hopper-v5", "crossq"): 2764.0,
    ("Hopper-v5", "sac"): 1103.0,
}
"""Mean return at 100,000 steps."""

_BATCH, _RANDOM_STEPS = 256, 5000


def settings(learner: Name, width: int) -> ActorCriticConfig:
    """Returns the papers' settings; `width` is that of the critics."""
    if learner == "sac":
        return ActorCriticConfig(critic=CriticConfig(width=width))
    return ActorCriticConfig(
        actor=ActorConfig(norm="batch"),
        critic=CriticConfig(norm="batch", target="none", width=width),
        actor_lr=1e-3,
        critic_lr=1e-3,
        temperature_lr=1e-3,
        beta1=0.5,
        actor_every=3,
    )


def run(
    *,
    envs: tuple[str, ...] = ("Walker2d-v5", "Hopper-v5"),
    learners: tuple[Name, ...] = ("crossq", "sac"),
    seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 100_000,
    width: int = 512,
    sac_width: int = 256,
    episodes: int = 10,
    out: str | None = None,
) -> dict[str, Any]:
    """Trains every learner in every env for every seed, and returns their returns at the end.

    Args:
        envs: gymnasium's names.
        learners: `crossq`, `sac`.
        seeds: of the runs.
        steps: env steps of each, and learner updates but for the first 5,000, which are random.
        width: of CrossQ's critics (2048 in the paper).
        sac_width: of SAC's critics.
        episodes: of the mean action, played at the end.
        out: a JSON file of finished rows: it is added to after each, and what it holds is not done again.
    """
    if steps <= _RANDOM_STEPS:
        raise ConfigError(f"bench crossq: steps: got {steps}, allowed: above {_RANDOM_STEPS}")
    path = None if out is None else Path(out)
    rows = _kept(path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ProgressDisplay() as display:
            for env, seed, learner in itertools.product(envs, seeds, learners):
                wide = width if learner == "crossq" else sac_width
                key: dict[str, Any] = {"env": env, "learner": learner, "width": wide, "steps": steps}
                key["seed"] = seed
                if any(key.items() <= row.items() for row in rows):
                    continue
                with display.phase(f"{learner} {env} {seed}", steps, unit="steps") as progress:
                    rows.append(key | train(env, settings(learner, wide), seed, steps, episodes, progress))
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    temporary = path.with_name(f".writing-{path.name}")
                    write_synced(temporary, json.dumps(rows, indent=1).encode())
                    temporary.replace(path)
    finally:
        torch.set_num_threads(threads)
    return {
        "title": "CrossQ and SAC, one update per step: return of the mean action",
        "rows": summary(rows),
        "runs": rows,
        "notes": ["published: at 100,000 steps on the -v4 envs, CrossQ with critics 2048 wide."],
    }


def train(
    name: str,
    cfg: ActorCriticConfig,
    seed: int,
    steps: int,
    episodes: int,
    progress: PhaseProgress | None = None,
) -> dict[str, Any]:
    """Trains one learner in one env, and plays its mean action; steps are single, updates one each."""
    env, test_env = make(name), make(name)
    space = env.action_space
    assert isinstance(space, gymnasium.spaces.Box)

    def to_env(action: Array) -> Array:  # the replay and the learner act in [-1, 1]
        return space.low + (action + 1) / 2 * (space.high - space.low)

    obs_dim, action_dim = int(np.prod(env.observation_space.shape or ())), int(np.prod(space.shape))
    rng = np.random.default_rng(train_seed(seed, "crossq"))
    learner = ActorCritic(obs_dim, action_dim, cfg, train_seed(seed, "learner"))
    generator = torch.Generator().manual_seed(train_seed(seed, "explore"))
    replay = ReplayBuffer(2 * steps, 1, {"state": ((obs_dim,), np.float32)}, action_dim)
    obs, _ = env.reset(seed=train_seed(seed, "env"))
    began = learned = time.perf_counter()
    for step in range(steps):
        if step == _RANDOM_STEPS:
            learned = time.perf_counter()
        if step < _RANDOM_STEPS:
            action = rng.uniform(-1.0, 1.0, (1, action_dim)).astype(np.float32)
        else:
            action = learner.act(_state(obs), explore=True, generator=generator).numpy()
        after, reward, terminated, truncated, _ = env.step(to_env(action[0]))
        replay.add(_step(obs, action, float(reward), terminated, truncated, after))
        obs = env.reset()[0] if terminated or truncated else after
        if step >= _RANDOM_STEPS:
            learner.update(replay.sample(_BATCH, n_step=cfg.n_step, gamma_step=cfg.gamma_step, rng=rng))
        if progress is not None and step % 100 == 99:
            progress.update(step + 1)
    learning_s = time.perf_counter() - learned
    returns = [
        play(test_env, learner, to_env, train_seed(seed, f"test {episode}")) for episode in range(episodes)
    ]
    return {
        "return": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "s_per_1000_steps": learning_s / (steps - _RANDOM_STEPS) * 1000,
        "minutes": (time.perf_counter() - began) / 60,
    }


def play(
    env: gymnasium.Env[Any, Any], learner: ActorCritic, to_env: Callable[[Array], Array], seed: int
) -> float:
    """Returns the return of one episode of the mean action."""
    obs, _ = env.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        action = learner.act(_state(obs), explore=False).numpy()
        obs, reward, terminated, truncated, _ = env.step(to_env(action[0]))
        total += float(reward)
        ended = terminated or truncated
    return total


def make(name: str) -> gymnasium.Env[Any, Any]:
    """Returns one of gymnasium's envs.

    Raises:
        RobotRLError: it is unknown, or lacks a package.
    """
    try:
        return gymnasium.make(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise RobotRLError(
            f"bench crossq: env {name!r}: {error}. `uv pip install 'gymnasium[mujoco]'` brings MuJoCo's."
        ) from error


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each env, learner, width and number of steps, over its seeds."""
    keys = ("env", "learner", "width", "steps")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {
            **dict(zip(keys, group, strict=True)),
            "seeds": len(members),
            "return": float(np.mean([row["return"] for row in members])),
            "low": min(row["return"] for row in members),
            "high": max(row["return"] for row in members),
            "published": PUBLISHED.get((group[0], group[1])),
            "s_per_1000_steps": float(np.mean([row["s_per_1000_steps"] for row in members])),
        }
        for group, members in groups.items()
    ]


def _kept(path: Path | None) -> list[dict[str, Any]]:
    """Returns the rows of earlier calls."""
    if path is None or not path.exists():
        return []
    try:
        return list(json.loads(path.read_text()))
    except ValueError as error:
        raise CheckpointError(
            f"bench crossq: {path}: not a list of rows: {error}. Name another file, or delete it."
        ) from error


def _state(obs: Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(obs, np.float32)[None])


def _step(
    obs: Array, action: Array, reward: float, terminated: bool, truncated: bool, after: Array
) -> StepBatch:
    return StepBatch(
        obs={"state": np.asarray(obs, np.float32)[None]},
        base_action=action,
        action=action,
        reward=np.array([reward], np.float32),
        terminated=np.array([terminated]),
        truncated=np.array([truncated]),
        next_obs={"state": np.asarray(after, np.float32)[None]},
        next_base_action=action,
    )
