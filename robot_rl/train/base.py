"""The base of a run: demonstrations, which of their frames to clone, cloning; or noise.

demos -> [progress ->] bc, or look
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from robot_rl.algos.progress import ProgressCritic, kept
from robot_rl.core.errors import ConfigError, DatasetError, require
from robot_rl.core.files import replace_file
from robot_rl.core.seeding import train_seed
from robot_rl.data.demos import Episodes, load_episodes, save_episodes
from robot_rl.data.episode import SOURCES, observed
from robot_rl.data.episodes import episodes_meta, together
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.noise import NoisePolicy, NoisePolicyConfig
from robot_rl.policies.spec import SavedPolicy
from robot_rl.policies.vla.config import SmallVLAConfig
from robot_rl.sim.config import OWN_WORDS
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.assemble import assemble_cloning, assemble_progress, demonstrator, evaluators, policy_meta
from robot_rl.train.before import check_pictures
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import (
    collect_demonstrations,
    collect_episodes,
    first_seed,
    load_demonstrations,
)
from robot_rl.train.given import check_adapters, check_given, find_given, given_policy
from robot_rl.train.hooks import group_of
from robot_rl.train.improve.config import (
    DENOISING,
    ChainSettings,
    DaggerSettings,
    OffPolicySettings,
    ResidualSettings,
)
from robot_rl.train.session import Session, learn

LOOK = "look"
"""The phase that plays noise, and the folder of its episodes."""
PROGRESS = "progress"
"""The phase of `demos.filter`, its metrics and its file."""


def collect(session: Session) -> None:
    """Collects the demonstrations, or checks those that were given."""
    if session.config.demos.path is None:
        shutil.rmtree(session.folder / "demos", ignore_errors=True)
    with evaluators(session, demonstrator) as envs:
        parts = {name: _demonstrations(session, env, name) for name, env in envs.items()}
    _note(session, "demos", parts)


def _demonstrations(session: Session, env: VectorEnv, source: str) -> Episodes:
    """Collects the demonstrations of one source if none are given, and reads them."""
    config = session.config
    if config.demos.path is None:
        total, shown = config.demos.episodes, f"demos {source}".strip()
        with session.phase(shown, total, unit="episodes") as progress, session.timer.stage("demos"):
            episodes = collect_demonstrations(env, config.demos, config.seed, on_batch=progress.update)
        save_episodes(session.folder / "demos" / source, episodes)
    episodes = load_episodes(
        demo_folder(session) / source,
        expect=episodes_meta(env),
        read=config.demos.read,
        say=session.display.message,
    )
    if config.demos.path is not None:
        number, steps = episodes.num_episodes, len(episodes.reward)
        session.display.message(f"demonstrations: {number:,} episodes, {steps:,} control steps")
    if isinstance(config.method, OffPolicySettings):
        shapes = {key: values.shape[1:] for key, values in episodes.obs.items()}
        check_pictures(config.env, demo_folder(session), shapes)
    return episodes


def _note(session: Session, phase: str, parts: Mapping[str, Episodes]) -> None:
    """Notes how many episodes there are, of all sources together and of each of several."""

    def found(episodes: Episodes) -> dict[str, float]:
        success = {} if phase == LOOK else {"success": float(episodes.episode_success().mean())}
        return {"episodes": episodes.num_episodes, **success, "env_steps": len(episodes.reward)}

    each = {name: found(episodes) for name, episodes in parts.items()}
    session.results[phase] = found(together(list(parts.values()))) | (
        {"sources": each} if len(each) > 1 else {}
    )
    session.counters.bill("sim" if phase == LOOK else "demo", session.results[phase]["env_steps"])
    rows = {"": session.results[phase], **each}
    session.write(
        phase,
        {
            f"{group_of(phase, name)}/{key}": value
            for name, row in rows.items()
            for key, value in row.items()
            if key != "sources"
        },
    )


def look(session: Session) -> None:
    """Plays noise, whose observations give the scale of all later ones. No learner sees it.

    The base is that noise: a policy learned from nothing is compared with it.
    """
    config = session.config
    shutil.rmtree(session.folder / LOOK, ignore_errors=True)
    with evaluators(session, demonstrator) as envs:
        parts = {name: _played_by_noise(session, env, name) for name, env in envs.items()}
        episodes = together(list(parts.values()))
        base = NoisePolicy(
            NoisePolicyConfig(horizon=config.n_exec),
            state_dim=len(episodes.meta.state_names),
            action_dim=len(episodes.meta.action_names),
            normaliser=Normaliser.of(episodes),
        )
        save_policy(session.folder / "policy" / "base", base, meta=policy_meta(config, *envs.values()))
    _note(session, LOOK, parts)


def _played_by_noise(session: Session, env: VectorEnv, source: str) -> Episodes:
    config = session.config
    noise, first = _Noise(env, train_seed(config.seed, "noise")), first_seed(config.seed)
    seeds = np.arange(first, first + config.demos.episodes, dtype=np.uint64)
    shown = f"{LOOK} {source}".strip()
    with session.phase(shown, len(seeds), unit="episodes") as progress, session.timer.stage(LOOK):
        episodes = collect_episodes(env, noise, seeds, on_batch=progress.update)
    save_episodes(session.folder / LOOK / source, episodes)
    return episodes


class _Noise:
    """An expert that draws random actions."""

    def __init__(self, env: VectorEnv, seed: int) -> None:
        self._shape, self._rng = (env.num_envs, len(env.action_names)), np.random.default_rng(seed)

    def act(self) -> NDArray[Any]:
        return self._rng.uniform(-1.0, 1.0, self._shape).astype(np.float32)


def value_progress(session: Session) -> None:
    """Values every frame of the demonstrations, and notes which are to be cloned."""
    config, cfg = session.config, session.config.demos.filter
    episodes = load_demonstrations(demo_folder(session), config, mirrored=False, as_executed=True)
    with session.timer.stage("build"):
        loop = assemble_progress(session, episodes)
    learn(session, loop, PROGRESS, cfg.updates, unit="updates")
    progress = cast(ProgressCritic, loop.leader.algorithm).progress(episodes)
    cloned = kept(cfg, progress, episodes.episode_index, config.policy.horizon)
    if not cloned.any():
        raise DatasetError(
            f"demos.filter: none of {len(cloned)} frames is kept with max_fall={cfg.max_fall:g} and "
            f"min_progress={cfg.min_progress:g}, where the progress is at most {progress.max():.3g}. Raise "
            "max_fall, lower min_progress, or give demos.filter.updates more updates."
        )
    found = io.BytesIO()
    np.savez(found, progress=progress, kept=cloned)
    replace_file(session.folder / f"{PROGRESS}.npz", found.getvalue())
    good = episodes.episode_success()[episodes.episode_index]
    session.results[PROGRESS] = {
        name: float(cloned[rows].mean()) if rows.any() else 0.0
        for name, rows in (("kept_of_successes", good), ("kept_of_failures", ~good))
    }
    found = {f"{PROGRESS}/{name}": value for name, value in session.results[PROGRESS].items()}
    session.write(PROGRESS, found)
    session.counters.updates = 0


def clone(session: Session) -> None:
    """Clones the demonstrations, or takes the base that was given."""
    config = session.config
    if config.bc.policy is not None:
        with evaluators(session) as envs:
            policy, *_ = [given_base(config, env) for env in envs.values()]
            save_policy(session.folder / "policy" / "base", policy, meta=policy_meta(config, *envs.values()))
        return
    episodes = load_demonstrations(demo_folder(session), session.config)
    kept = None
    if session.config.demos.filter.updates:
        with np.load(session.folder / f"{PROGRESS}.npz") as found:
            kept = found["kept"]
        assert len(episodes.reward) % len(kept) == 0  # a mirror image is kept where its original is
        kept = np.tile(kept, len(episodes.reward) // len(kept))
    by = made_by(episodes, config.demos.by, at=demo_folder(session)) if config.demos.by else None
    with session.timer.stage("build"):
        loop, policy = assemble_cloning(session, episodes, kept, by)
    learn(session, loop, "bc", session.config.bc.updates, unit="updates")
    loop.hand_over(policy)
    with evaluators(session) as envs:
        save_policy(session.folder / "policy" / "base", policy, meta=policy_meta(config, *envs.values()))
    session.counters.updates = 0


def made_by(episodes: Episodes, by: Sequence[str], *, at: Path) -> NDArray[np.bool_]:
    """Returns (T,): which steps were made by these sources.

    Raises:
        DatasetError: they made none; the message counts the steps of each source.
    """
    assert episodes.source is not None  # the reader fills it
    found = np.isin(episodes.source, [SOURCES.index(name) for name in by])
    if not found.any():
        counts = np.bincount(episodes.source, minlength=len(SOURCES))
        made = ", ".join(f"{count:,} by {name}" for name, count in zip(SOURCES, counts, strict=True) if count)
        raise DatasetError(
            f"demos.by: no step of {at} was made by {' or '.join(by)}: {made}. Choose among these, or give "
            "demos.path the `experience` of a run in which a person took over."
        )
    return found


def given_base(config: RunConfig, env: VectorEnv) -> SavedPolicy:
    """Returns the base of `bc.policy`.

    Raises:
        CheckpointError: its files are damaged, or it is of another task or robot.
        ConfigError: the run's method cannot improve it, or the run does not give it what it needs.
    """
    at = f"bc.policy: {config.bc.policy}"
    given = find_given(config)
    if given is not None:
        check_given(config, given, episodes_meta(env), observed(env))
        policy = given_policy(config, given, env.instruction)
        if "online" in config.plan and isinstance(config.method, ChainSettings):
            _check_chain(config, policy.kind, cast(Any, policy).explorable)
        return policy
    policy, meta = load_policy(str(config.bc.policy), expect=policy_meta(config, env))
    allowed = (
        f"{OWN_WORDS} with {at}: only the words say which of its tasks is wanted: {', '.join(meta.tasks)}"
    )
    require(not meta.tasks or bool(config.env.instruction), "env.instruction", "", allowed)
    check_adapters(config, policy.kind)
    check_base(config, at, policy.kind, policy.horizon, vars(policy)["config"])
    return policy


def check_base(config: RunConfig, at: str, kind: str, horizon: int, own: Any) -> None:
    """Refuses a base that was not cloned by this run, and that it cannot improve.

    Args:
        config: of the run.
        at: begins the messages.
        kind: of the base.
        horizon: of its chunks.
        own: its configuration.

    Raises:
        ConfigError: the run's method cannot improve it, or the run does not give it what it needs.
    """
    require(config.n_exec <= horizon, "n_exec", config.n_exec, f"1 to the base's {horizon}")
    if "online" in config.plan:
        _check_improvable(config, at, kind, own)
    picture = own.picture if isinstance(own, SmallVLAConfig) else None
    _check_cameras(at, own.cameras, picture, config.env.evaluated())  # of a world model what it imitates
    config.check_imagined(own, f"{at}: cameras")


def _check_improvable(config: RunConfig, at: str, kind: str, own: Any) -> None:
    """Refuses a base that the run's method cannot improve."""
    config.method.check_base(at, kind)
    if isinstance(config.method, DaggerSettings):
        config.check_guess(own, f"{at}: guess_weight")
    if isinstance(config.method, ChainSettings):
        _check_chain(config, kind, own)
    if isinstance(own, SmallVLAConfig):
        allowed = f"() with method={config.method.kind}, all of whose chunks have n_exec steps"
        is_fine = not own.horizons or isinstance(config.method, ResidualSettings)
        require(is_fine, f"{at}: horizons", own.horizons, allowed)


def _check_chain(config: RunConfig, kind: str, own: Any) -> None:
    """Refuses a base that cannot explore as the method says; `own` is what says how it denoises."""
    method = config.method
    assert isinstance(method, ChainSettings)
    method.explored(own, config.n_exec)
    distils = method.distil.updates
    if kind not in DENOISING:
        require(distils == 0, "method.distil.updates", distils, f"0 with a {kind} for a base")


def _check_cameras(
    at: str, cameras: Sequence[str], picture: tuple[int, int] | None, shown: EnvConfig
) -> None:
    """Refuses a base that the run shows other cameras, or pictures of another size if it says one."""
    size = shown.image_size if picture is None else picture
    if not cameras or (set(cameras) <= set(shown.cameras) and size == shown.image_size):
        return
    words = f"env.cameras=[{','.join(cameras)}] env.image_size=[{size[0]},{size[1]}]"
    raise ConfigError(
        f"{at}: reads cameras {', '.join(cameras)} at {size}, the run shows "
        f"{', '.join(shown.cameras) or 'none'} at {shown.image_size}. Say {words}."
    )


def demo_folder(session: Session) -> Path:
    """Returns where the run's demonstrations are, or the episodes of noise.

    Each of several sources has its own folder in it.
    """
    path = session.config.demos.path
    if path is not None:
        return Path(path)
    return session.folder / (LOOK if LOOK in session.config.plan else "demos")
