"""How a run comes to its base: demonstrations, which of their frames to clone, cloning.

demos -> [progress ->] bc
"""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from robot_rl.algos.progress import ProgressCritic
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.data.demos import load_episodes, save_episodes
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig
from robot_rl.train.assemble import assemble_cloning, assemble_progress, make_eval_env, policy_meta
from robot_rl.train.demos import collect_demonstrations, episodes_meta, load_demonstrations
from robot_rl.train.session import Session, learn

PROGRESS = "progress"
"""The phase of `demos.filter`, its metrics and its file."""


def collect(session: Session) -> None:
    """Collects the demonstrations, or checks those that were given."""
    config = session.config
    with closing(make_eval_env(config)) as env:
        if config.demos.path is None:
            folder = session.folder / "demos"
            shutil.rmtree(folder, ignore_errors=True)
            total = config.demos.episodes
            with session.phase("demos", total, unit="episodes") as progress, session.timer.stage("demos"):
                episodes = collect_demonstrations(env, config.demos, config.seed, on_batch=progress.update)
            save_episodes(folder, episodes)
        episodes = load_episodes(demo_folder(session), expect=episodes_meta(env))
    session.results["demos"] = {
        "episodes": episodes.num_episodes,
        "success": float(episodes.episode_success().mean()),
        "env_steps": len(episodes.reward),
    }
    session.write("demos", {f"demos/{name}": value for name, value in session.results["demos"].items()})


def value_progress(session: Session) -> None:
    """Values every frame of the demonstrations, and notes which are to be cloned."""
    config, cfg = session.config, session.config.demos.filter
    episodes = load_episodes(demo_folder(session))
    with session.timer.stage("build"):
        loop = assemble_progress(session, episodes)
    learn(session, loop, PROGRESS, cfg.updates, unit="updates")
    progress = cast(ProgressCritic, loop.algorithm).progress(episodes)
    kept = cfg.kept(progress, episodes.episode_index, config.policy.horizon)
    if not kept.any():
        raise DatasetError(
            f"demos.filter: none of {len(kept)} frames is kept with max_fall={cfg.max_fall:g} and "
            f"min_progress={cfg.min_progress:g}, where the progress is at most {progress.max():.3g}. Raise "
            "max_fall, lower min_progress, or give demos.filter.updates more updates."
        )
    np.savez(session.folder / f"{PROGRESS}.npz", progress=progress, kept=kept)
    good = episodes.episode_success()[episodes.episode_index]
    session.results[PROGRESS] = {
        name: float(kept[rows].mean()) if rows.any() else 0.0
        for name, rows in (("kept_of_successes", good), ("kept_of_failures", ~good))
    }
    found = {f"{PROGRESS}/{name}": value for name, value in session.results[PROGRESS].items()}
    session.write(PROGRESS, found)
    session.counters.updates = 0


def clone(session: Session) -> None:
    """Clones the demonstrations, or takes the base that was given."""
    if session.config.bc.policy is not None:
        _take_base(session, Path(session.config.bc.policy))
        return
    episodes = load_demonstrations(demo_folder(session), session.config)
    kept = None
    if session.config.demos.filter.updates:
        with np.load(session.folder / f"{PROGRESS}.npz") as found:
            kept = found["kept"]
        assert len(episodes.reward) % len(kept) == 0  # a mirror image is kept where its original is
        kept = np.tile(kept, len(episodes.reward) // len(kept))
    with session.timer.stage("build"):
        loop, policy = assemble_cloning(session, episodes, kept)
    learn(session, loop, "bc", session.config.bc.updates, unit="updates")
    policy.load_state_dict(loop.algorithm.policy_weights())
    with closing(make_eval_env(session.config)) as env:
        save_policy(session.folder / "policy" / "base", policy, meta=policy_meta(session.config, env))
    session.counters.updates = 0


def _take_base(session: Session, folder: Path) -> None:
    config = session.config
    with closing(make_eval_env(config)) as env:
        policy, meta = load_policy(folder, expect=policy_meta(config, env))
    own = vars(policy).get("config")
    if not isinstance(own, ChunkPolicyConfig):
        raise ConfigError(f"bc.policy: {folder} holds a {policy.kind} policy, allowed: flow, diffusion")
    has = [
        f"policy.{name}={value}" for name, value in vars(own).items() if value != vars(config.policy)[name]
    ]
    if has:
        raise ConfigError(f"bc.policy: the run's policy differs from that of {folder}. Say {' '.join(has)}.")
    save_policy(session.folder / "policy" / "base", policy, meta=replace(meta, n_exec=config.n_exec))


def demo_folder(session: Session) -> Path:
    """Returns where the run's demonstrations are."""
    path = session.config.demos.path
    return session.folder / "demos" if path is None else Path(path)
