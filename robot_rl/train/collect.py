"""Plays episodes of a policy or an expert and keeps the good ones: data for the next policy.

A policy that reinforcement learning improved makes the demonstrations that a VLA learns from (Yang et al.
2025, Beyond Human Demonstrations; there a diffusion policy, smoother and more uniform than people). Here
it may be any policy, and what counts as good is a setting. B envs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError
from robot_rl.core.names import PRESENT
from robot_rl.core.registry import resolve, table
from robot_rl.core.seeding import train_seed
from robot_rl.data.collecting import UnfinishedCollection
from robot_rl.data.demos import each
from robot_rl.data.episode import Episode
from robot_rl.data.keep import Facts, KeepConfig, describe_refused, roughness, sift, together
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.policies.checkpoint import PolicyMeta, check_meta, load_policy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.saved import policy_folder
from robot_rl.policies.spec import SavedPolicy
from robot_rl.policies.vla.lerobot_saved import GivenFolder, lerobot_folder, read_lerobot_folder
from robot_rl.rollout.envs import Array
from robot_rl.rollout.stepping import seed_batches
from robot_rl.sim.bodies import layouts_of
from robot_rl.sim.config import OWN_WORDS
from robot_rl.sim.control import action_names
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.task import control_of
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import Columns, expert_of, joined, played
from robot_rl.train.given import meta_of, open_given
from robot_rl.train.record import load_config_here


@dataclass(frozen=True)
class Actor:
    """What acts in all envs."""

    begin: Callable[[NDArray[np.uint64]], None]
    """Receives the seeds (B,) of the episodes that begin now."""
    act: Callable[[Obs], Array]
    """Returns actions (B, A)."""
    first_seed: int
    """Of its episodes; the others' follow."""


@dataclass(frozen=True)
class Collection:
    """The episodes that were kept, and all that were played."""

    started: Facts
    """Of all episodes that were begun, in the order of their seeds."""
    kept: NDArray[np.int64]
    """Which of these."""
    places: NDArray[np.int64]
    """Where they are among the episodes within the limits."""
    seeds: list[int]
    """From which these began."""
    refused: dict[str, int]
    """Setting of `KeepConfig` -> episodes that it refused."""

    @property
    def spare(self) -> int:
        """Episodes that passed when there were enough."""
        return len(self.started) - sum(self.refused.values()) - len(self.kept)


def collect(
    env: VectorEnv,
    actor: Actor,
    keep: KeepConfig,
    into: UnfinishedCollection,
    *,
    episodes: int,
    attempts: int,
    state: Sequence[str] = (),
    source: Literal["demo", "sim"] = "sim",
    on_batch: Callable[[int, str], None] | None = None,
) -> Collection:
    """Plays episodes, a batch of envs at a time, until enough of them pass; each batch is kept as it ends.

    Args:
        env: autoreset DISABLED.
        actor: acts.
        keep: which episodes pass; its shares are of all that were played.
        into: where they are kept; batches that it has are not played again.
        episodes: how many are wanted: the first that pass, in the order of their seeds.
        attempts: how many are begun at most.
        state: elements of the state that are recorded; see `Episodes.with_state`.
        source: `demo` for an expert, `sim` for a policy.
        on_batch: called with the number of episodes that pass so far, and what was refused in words.

    Raises:
        DatasetError: too few passed; the message counts the refusals of each setting.
    """
    seeds = np.arange(actor.first_seed, actor.first_seed + attempts, dtype=np.uint64)
    parts, passed, refused = list[Facts](), np.arange(0), dict[str, int]()
    for number, (where, batch) in enumerate(seed_batches(seeds, env.num_envs)):
        count = where.stop - where.start
        if number >= len(into.batches) or len(into.batches[number]) != count:
            into.forget(number)
            actor.begin(batch)
            rows = played(env, batch, actor.act)[:count]
            facts = _facts(rows)
            within = [rows[int(index)] for index in sift(facts, _limits(keep))[0]]
            into.add(facts, _recorded(env, within, state, source, f"{into.out}, batch {number}"))
        parts.append(into.batches[number])
        started = together(parts)
        passed, refused = sift(started, keep)
        if on_batch is not None:
            on_batch(min(len(passed), episodes), describe_refused(refused, len(started)))
        if len(passed) >= episodes:
            kept = passed[:episodes]
            places = np.searchsorted(sift(started, _limits(keep))[0], kept)
            return Collection(started, kept, places, seeds[kept].tolist(), refused)
    raise DatasetError(
        f"collect: {len(passed)} of {episodes} episodes passed; {describe_refused(refused, attempts)}. "
        f"Loosen that setting of keep, allow more attempts than {attempts}, or ask for fewer episodes."
    )


def num_passed(batches: Sequence[Facts], keep: KeepConfig) -> int:
    """Returns how many episodes of an earlier collection pass."""
    return len(sift(together(batches), keep)[0]) if batches else 0


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
    check_fits(meta, env)
    module: Any = policy
    executor = ChunkExecutor(module.to(device), env.num_envs, n_exec=meta.n_exec, mode="ode", device=device)
    # Half the range of training seeds: the episodes that follow the first stay in it.
    first = train_seed(seed, "collect") // 2
    return Actor(
        lambda seeds: executor.reset(np.ones(env.num_envs, bool), seeds),
        lambda obs: executor.act(obs).action,
        first,
    )


def check_fits(meta: PolicyMeta, env: VectorEnv) -> None:
    """Refuses a policy that was made for another task, robot, rate or state than those of an env.

    Raises:
        CheckpointError: names what differs.
    """
    here = ("task", "robot", "control_hz", "state_names", "action_names")
    check_meta("policy", meta, replace(meta, **{name: getattr(env, name) for name in here}))


def open_policy(given: str, dataset: str | None = None) -> tuple[SavedPolicy, PolicyMeta, EnvConfig]:
    """Returns a policy, and the env in which it acts: its run's, or one that shows what it reads.

    Args:
        given: a run folder, for its final policy, the folder of a saved policy, or what LeRobot saved.
        dataset: of LeRobot's training; None for the one that its folder names.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    theirs = lerobot_folder(given)
    if theirs is not None:
        return open_theirs(read_lerobot_folder(theirs), None if dataset is None else Path(dataset))
    folder = policy_folder(given)
    policy, meta = load_policy(folder)
    config = _run_of(folder)
    if config is not None:
        return policy, meta, next(iter(config.scenes.values()))
    own: Any = vars(policy).get("config")
    words = getattr(own, "instruction", meta.instruction)
    env = EnvConfig(
        task=meta.task,
        robot=meta.robot,
        robots=_robots_of(meta, at=str(folder)),
        state=meta.state_names,
        cameras=getattr(own, "cameras", ()),
        image_size=getattr(own, "picture", EnvConfig().image_size),
        instruction=OWN_WORDS if meta.tasks else "" if words == meta.instruction else meta.instruction,
    )
    return policy, meta, _with_actions_of(meta, _at_rate(env, meta.control_hz))


def sources_of(given: str, meta: PolicyMeta, shown: EnvConfig) -> dict[str, EnvConfig]:
    """Returns the env of every source of a policy, by name; the name is empty where there is one.

    Args:
        given: its folder, or that of its run. Without its run, its tasks or its robots are the sources.
        meta: what it was made for.
        shown: the env of the first.
    """
    config = None if lerobot_folder(given) else _run_of(policy_folder(given))
    if config is not None:
        return dict(config.scenes)
    if meta.tasks:
        robot = shown.robot if len(meta.robots) == 1 else None
        return {task: replace(shown, task=task, robot=robot) for task in meta.tasks}
    if len(meta.robots) > 1:
        return {robot: _at_rate(replace(shown, robot=robot), meta.rate_of(robot)) for robot in meta.robots}
    return {"": shown}


def env_of_robot(given: str, meta: PolicyMeta, shown: EnvConfig, robot: str) -> EnvConfig:
    """Returns the env of a policy's source that has a robot, or the first's with that robot."""
    for env in sources_of(given, meta, shown).values():
        if (env.robot or resolve("task", env.task).default_robot) == robot:
            return env
    return replace(shown, robot=robot)


def _at_rate(env: EnvConfig, hz: float) -> EnvConfig:
    """Returns the env at a control rate; one of others' tasks is as it is."""
    if env.task not in table("task"):
        return env
    usual = replace(env, control_hz=None)
    return usual if usual.rate_hz == hz else replace(env, control_hz=hz)


def _run_of(policy: Path) -> RunConfig | None:
    """Returns the settings of the run that a saved policy is in; None if it is in none."""
    run = policy.resolve().parents[1]
    return load_config_here(run, at="policy")[0] if (run / "config.yaml").is_file() else None


def _robots_of(meta: PolicyMeta, *, at: str) -> tuple[str, ...]:
    """Returns `env.robots` as a policy has it, from the names of what it reads.

    Raises:
        CheckpointError: its robots do different tasks, which the names do not say.
    """
    robots = tuple(name.removesuffix(PRESENT) for name in meta.state_names if name.endswith(PRESENT))
    if robots and meta.tasks:
        raise CheckpointError(f"{at}: it is of several robots and tasks. Name it within its run folder.")
    return robots


def _with_actions_of(meta: PolicyMeta, env: EnvConfig) -> EnvConfig:
    """Returns the env whose actions are those of a policy, by their names; as it is if none is."""
    if meta.task not in table("task"):
        return env  # of others
    for common, gripper_steps in itertools.product((False, True), repeat=2):
        found = replace(env, common_actions=common, gripper_steps=gripper_steps)
        with suppress(ConfigError):  # of a robot without grippers
            if _action_names(found) == meta.action_names:
                return found
    return env


def _action_names(env: EnvConfig) -> tuple[str, ...]:
    if env.robots:
        return layouts_of(env.without_past())[1].names
    task, robot = resolve("task", env.task)(), load_robot(env.robot or "")
    control = control_of(task, robot, common=env.common_actions, gripper_steps=env.gripper_steps)
    return action_names(control, robot)


def open_theirs(given: GivenFolder, dataset: Path | None) -> tuple[SavedPolicy, PolicyMeta, EnvConfig]:
    """Returns a policy that LeRobot saved, and an env that shows what it reads; see `open_policy`."""
    found, apart = meta_of(given, dataset)
    meta = PolicyMeta(**vars(found), n_exec=given.n_exec)
    sizes = set(given.cameras.values())
    if len(sizes) > 1:
        raise CheckpointError(
            f"policy: {given.folder} reads pictures of {len(sizes)} sizes, an env here shows one size."
        )
    size = sizes.pop() if sizes else EnvConfig().image_size
    env = EnvConfig(task=meta.task, robot=meta.robot, state=meta.state_names, environment_state=apart)
    shown = _at_rate(replace(env, cameras=tuple(given.cameras), image_size=size), meta.control_hz)
    return open_given(given, instruction=meta.instruction), meta, _with_actions_of(meta, shown)


def _limits(keep: KeepConfig) -> KeepConfig:
    """Returns the limits alone: what these refuse, no share can bring back."""
    return replace(keep, fastest=1.0, smoothest=1.0)


def _recorded(
    env: VectorEnv, rows: list[Columns], state: Sequence[str], source: Literal["demo", "sim"], at: str
) -> list[Episode]:
    """Returns episodes as a dataset takes them, checked."""
    if not rows:
        return []
    episodes = joined(env, rows).with_state(state, at="state")
    episodes.check(at)
    return list(each(episodes, source))


def _facts(rows: list[Columns]) -> Facts:
    return Facts(
        success=np.array([row["success"].any() for row in rows], bool),
        steps=np.array([len(row["action"]) for row in rows], np.int64),
        roughness=np.array([roughness(row["action"]) for row in rows], np.float64),
    )
