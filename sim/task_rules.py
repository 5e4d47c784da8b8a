"""The rules of tasks, one function each; `robot_rl.sim.conformance` runs them.

B envs. Envs are compared byte for byte, as in `robot_rl.hal.env_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.registry import resolve, table
from robot_rl.hal.env_rules import require
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.task import Task
from robot_rl.sim.vector import SimVectorEnv

Array = NDArray[Any]
Rule = Callable[[str, str | None], None]
"""Takes the name of a task, and of a robot or None for the task's own."""

SOLVED = 0.9
"""Least share of its episodes that a scripted expert solves."""
EPISODES = 64
_STEPS = 8


def make(
    task: str, num_envs: int, num_threads: int = 1, *, robot: str | None = None, randomize: bool = False
) -> SimVectorEnv:
    """Returns envs of a task that the caller resets."""
    config = EnvConfig(task=task, robot=robot, num_threads=num_threads, randomize=randomize)
    return SimVectorEnv(config, num_envs, autoreset="disabled")


def actions_of(env: SimVectorEnv, steps: int = _STEPS, seed: int = 0) -> Iterator[Array]:
    """Yields random actions whose first rows do not depend on the number of envs."""
    for step in range(steps):
        rows = [
            np.random.default_rng([seed, step, i]).uniform(-1, 1, len(env.action_names))
            for i in range(env.num_envs)
        ]
        yield np.array(rows, np.float32)


def states_of(env: SimVectorEnv, seed: int | list[int]) -> list[Array]:
    """Returns the state rows after a reset and after each of a few random steps."""
    env.reset(seed=seed)
    return [env.get_state(), *(advance(env, action) for action in actions_of(env))]


def advance(env: SimVectorEnv, action: Array) -> Array:
    """Returns the state rows after a step."""
    env.step(action)
    return env.get_state()


def success_of_expert(
    task: str, episodes: int, bias_m: float = 0.0, noise_m: float = 0.0, *, robot: str | None = None
) -> float:
    """Returns in what share of its episodes the scripted expert succeeds."""
    env = make(task, episodes, robot=robot)
    env.reset(seed=0)
    expert = env.expert(bias_m, noise_m)
    solved, live = np.zeros(episodes, bool), np.ones(episodes, bool)
    for _ in range(env.horizon):
        _, _, terminated, truncated, infos = env.step_masked(expert.act(), live)
        solved |= infos["success"]
        live &= ~(terminated | truncated)
        if not live.any():
            break
    return float(solved.mean())


def has_words(task: str, robot: str | None) -> None:
    """It has its registered name, an instruction, and says what is random and what success is."""
    described: Task = resolve("task", task)()
    require(described.name == task, f"task {task}: name", described.name, "the registered one")
    words = described.instruction
    require(len(words.split()) >= 3, f"task {task}: instruction", repr(words), "three words or more")
    text = type(described).__doc__ or ""
    for part in ("Randomised:", "Success:"):
        require(part in text, f"task {task}: docstring of the class", f"no {part}", f"a sentence {part} ...")
    known = described.default_robot in table("robot")
    require(known, f"task {task}: default_robot", described.default_robot, "a registered robot")


def begins_unsolved_and_inside_the_space(task: str, robot: str | None) -> None:
    """Episodes begin unsolved and unlike each other, and what is observed is in the space."""
    env, at = make(task, 128, robot=robot), f"task {task}"
    obs, infos = env.reset(seed=5)
    begun = float(infos["success"].mean())
    require(begun <= 0.01, f"{at}: episodes that begin solved", f"{begun:.0%}", "1 % or less")
    different = len(np.unique(obs["state"], axis=0))
    require(
        different == 128, f"{at}: different beginnings of 128", different, "128: `start` draws from `rng`"
    )
    for action in (None, *actions_of(env, 3)):
        obs = obs if action is None else env.step(action)[0]
        require(bool(np.isfinite(obs["state"]).all()), f"{at}: state", "not finite", "numbers")
        require(env.observation_space.contains(obs), f"{at}: observation", "outside its space", "inside")


def is_the_same_at_any_number_of_envs_and_threads(task: str, robot: str | None) -> None:
    """An episode depends on its seed alone."""
    runs = [
        states_of(make(task, 16, 2, robot=robot), 3),
        states_of(make(task, 3, 1, robot=robot), 3),
        states_of(make(task, 1, 1, robot=robot), [3]),
    ]
    for at_16, at_3, at_1 in zip(*runs, strict=True):
        same = np.array_equal(at_16[:3], at_3) and np.array_equal(at_16[:1], at_1)
        require(same, f"task {task}: the first rows of 16, 3 and 1 envs", "different bytes", "the same")


def a_masked_reset_touches_only_the_masked_rows(task: str, robot: str | None) -> None:
    """`reset_mask` begins the episodes of its rows, and changes nothing else."""
    env = make(task, 4, robot=robot)
    states_of(env, 0)
    before, mask = env.get_state(), np.array([False, True, False, True])
    env.reset(options={"reset_mask": mask})
    after, at = env.get_state(), f"task {task}: a masked reset"
    require(np.array_equal(after[~mask], before[~mask]), at, "other rows changed", "only those of the mask")
    require(bool((after[mask] != before[mask]).any(axis=1).all()), at, "a row that it left", "new rows")


def a_state_row_determines_the_future(task: str, robot: str | None) -> None:
    """What follows `set_state` depends on the row alone: a task keeps nothing of its own."""
    env, other = make(task, 3, robot=robot), make(task, 3, robot=robot)
    states_of(env, 0)
    rows = env.get_state()
    other.reset(seed=99)
    other.set_state(rows)
    env.set_state(rows)  # both: safety starts afresh from the servos' set-points
    for action in actions_of(env, 4, seed=1):
        same = np.array_equal(advance(env, action), advance(other, action))
        require(same, f"task {task}: steps after set_state", "different bytes", "the same")


def a_state_dict_resumes_exactly(task: str, robot: str | None) -> None:
    """Another env goes on from a `state_dict` as this one does, across the end of the episode."""
    env, other = (make(task, 3, robot=robot, randomize=True) for _ in range(2))
    states_of(env, 0)
    kept = env.state_dict()
    expected = [advance(env, action) for action in actions_of(env, 4, seed=1)]
    expected.append(env.reset()[0]["state"])  # the next episode is drawn from the restored counters
    other.reset(seed=99)
    other.load_state_dict(kept)
    got = [advance(other, action) for action in actions_of(other, 4, seed=1)]
    got.append(other.reset()[0]["state"])
    for mine, theirs in zip(got, expected, strict=True):
        require(
            np.array_equal(mine, theirs), f"task {task}: steps after a resume", "different bytes", "the same"
        )


def the_expert_solves_it(task: str, robot: str | None) -> None:
    """A task with a scripted expert can be done, in its own time."""
    if not _has(task, "expert"):
        return
    solved = success_of_expert(task, EPISODES, robot=robot)
    require(solved >= SOLVED, f"task {task}: success of the expert", f"{solved:.0%}", f"{SOLVED:.0%} or more")


def the_dense_reward_lies_between_zero_and_one(task: str, robot: str | None) -> None:
    """Shaping is in [0, 1] at every step, and an expert's way is paid in every episode."""
    if not (_has(task, "dense_reward") and _has(task, "expert")):
        return
    config = EnvConfig(task=task, robot=robot, reward="dense", num_threads=1)
    env, at = SimVectorEnv(config, 16, autoreset="disabled"), f"task {task}: dense reward"
    env.reset(seed=0)
    expert, described = env.expert(noise_m=0.01), resolve("task", task)()
    first, best = described.dense_reward(env.view), np.zeros(16)
    for _ in range(40):
        _, reward, _, _, infos = env.step(expert.act())
        shaped, solved = described.dense_reward(env.view), infos["success"]
        inside = bool(((shaped >= 0) & (shaped <= 1)).all())
        require(inside, at, f"{shaped.min():.3g} to {shaped.max():.3g}", "0 to 1")
        require(bool((reward[solved] == 1.0).all()), f"{at} with success", reward[solved].tolist(), "1")
        half = np.allclose(reward[~solved], 0.5 * shaped[~solved], rtol=1e-7, atol=0.0)
        require(half, f"{at} without success", reward[~solved].tolist(), "half of `dense_reward`")
        best = np.maximum(best, shaped)
    grows = bool((best > first).all())
    require(grows, at, "no more than at the beginning, on an expert's way", "more in every episode")


def the_dense_reward_follows_what_happens(task: str, robot: str | None) -> None:
    """Without an expert to follow: on random ways, shaping is in [0, 1], is paid by half, and changes."""
    if not _has(task, "dense_reward") or _has(task, "expert"):
        return
    config = EnvConfig(task=task, robot=robot, reward="dense", num_threads=1)
    env, at = SimVectorEnv(config, 16, autoreset="disabled"), f"task {task}: dense reward"
    env.reset(seed=0)
    described, seen = resolve("task", task)(), list[Array]()
    for action in actions_of(env, 40):
        _, reward, _, _, infos = env.step(action)
        shaped, solved = described.dense_reward(env.view), infos["success"]
        inside = bool(((shaped >= 0) & (shaped <= 1)).all())
        require(inside, at, f"{shaped.min():.3g} to {shaped.max():.3g}", "0 to 1")
        half = np.allclose(reward[~solved], 0.5 * shaped[~solved], rtol=1e-7, atol=0.0)
        require(half, f"{at} without success", reward[~solved].tolist(), "half of `dense_reward`")
        seen.append(shaped)
    change = float(np.ptp(seen, axis=0).max())
    require(change > 0.01, f"{at}, change within an episode", f"{change:.3g}", "more than 0.01")


def randomisation_changes_only_rows_that_begin(task: str, robot: str | None) -> None:
    """Terms of `vary` are drawn for each simulation, at its resets."""
    terms = resolve("task", task).vary
    if not terms:
        return
    env, at = make(task, 4, robot=robot, randomize=True), f"task {task}: randomisation of"
    env.reset(seed=0)
    fields = {term.field for term in terms}
    before = {field: env.backend.expand(field).copy() for field in fields}
    mask = np.array([False, True, False, False])
    env.reset(options={"reset_mask": mask})
    for field in sorted(fields):
        after, old = env.backend.expand(field), before[field]
        require(np.array_equal(after[~mask], old[~mask]), f"{at} {field}", "other rows changed", "the mask's")
        require(bool((after[mask] != old[mask]).any()), f"{at} {field}", "the same again", "a new draw")
        require(not np.array_equal(old[0], old[2]), f"{at} {field}", "two rows alike", "one draw for each")


def _has(task: str, function: str) -> bool:
    """Returns whether a task has one of the optional functions."""
    return getattr(resolve("task", task), function) is not getattr(Task, function)


TASK_RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        has_words,
        begins_unsolved_and_inside_the_space,
        is_the_same_at_any_number_of_envs_and_threads,
        a_masked_reset_touches_only_the_masked_rows,
        a_state_row_determines_the_future,
        a_state_dict_resumes_exactly,
        the_expert_solves_it,
        the_dense_reward_lies_between_zero_and_one,
        the_dense_reward_follows_what_happens,
        randomisation_changes_only_rows_that_begin,
    )
}
