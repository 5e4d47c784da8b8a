"""CrossQ against SAC on gymnasium's Walker2d and Hopper: an outside check of the actor-critic core.

Both learners are `algos.actor_critic` with other settings, on the same steps, one update each.
Published returns at 100,000 steps (SimbaV2's tables of both, on the -v4 envs, means of several
seeds): Walker2d CrossQ 3914, SAC 690; Hopper CrossQ 2764, SAC 1103. CrossQ's critics are 2048 wide
there; the width here is a setting, and its cost is in the rows.

Every run has a folder with its checkpoints and its row; a repeated call goes on exactly where the last one
ended, whether it was cut short or ran out of `minutes`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.algos.actor_critic import ActorConfig, ActorCritic, ActorCriticConfig, CriticConfig
from robot_rl.bench.trials import check_plan, over_seeds
from robot_rl.core.errors import require
from robot_rl.core.files import write_json
from robot_rl.core.seeding import train_seed
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.transitions import StepBatch
from robot_rl.envs.gym import GymVectorEnv
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.telemetry.progress import PhaseProgress, ProgressDisplay
from robot_rl.train.checkpoint import CheckpointStore

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
_SAVE_EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run is of."""

    env: str
    learner: Name
    width: int
    seed: int
    steps: int
    evaluate_every: int
    episodes: int

    @property
    def name(self) -> str:
        return f"{self.env}-{self.learner}-{self.width}-seed{self.seed}"


@dataclass
class Spent:
    """What has been done, and what it cost."""

    steps: int = 0
    episode: int = 0
    """Episodes begun."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Both of the steps with an update, without evaluations."""
    curve: list[dict[str, Any]] = field(default_factory=lambda: list[dict[str, Any]]())
    """Every evaluation."""


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
    evaluate_every: int = 25_000,
    episodes: int = 10,
    minutes: float = math.inf,
    out: str = "runs/crossq",
) -> dict[str, Any]:
    """Trains every learner in every env for every seed, and returns what came of it so far.

    Args:
        envs: gymnasium's names.
        learners: `crossq`, `sac`.
        seeds: of the runs.
        steps: env steps of each, and learner updates but for the first 5,000, which are random.
        width: of CrossQ's critics (2048 in the paper).
        sac_width: of SAC's critics.
        evaluate_every: steps between evaluations; the last one is at the end.
        episodes: of the mean action, played at each.
        minutes: of wall-clock that this call may take; the next one goes on.
        out: folder of the rows and checkpoints.
    """
    require(steps > _RANDOM_STEPS, "bench crossq: steps", steps, f"above {_RANDOM_STEPS}")
    require(evaluate_every >= 1, "bench crossq: evaluate_every", evaluate_every, "1 or more")
    deadline_s = time.perf_counter() + 60.0 * minutes
    same: dict[str, Any] = {"steps": steps, "evaluate_every": evaluate_every, "episodes": episodes}
    rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ProgressDisplay() as display:
            for env, seed, learner in itertools.product(envs, seeds, learners):
                wide = width if learner == "crossq" else sac_width
                plan = Plan(env=env, learner=learner, width=wide, seed=seed, **same)
                with closing(Trial(plan, Path(out) / plan.name)) as trial:
                    with display.phase(plan.name, steps, unit="steps", start=trial.spent.steps) as progress:
                        trial.go_on(deadline_s, progress)
                    rows.append(trial.row())
    finally:
        torch.set_num_threads(threads)
    return {
        "title": "CrossQ and SAC, one update per step: return of the mean action",
        "rows": summary([row for row in rows if row["done"]]),
        "runs": rows,
        "trivial": [row for env in envs for row in trivial(env, seeds, episodes)],
        "notes": [
            "published: at 100,000 steps on the -v4 envs, CrossQ with critics 2048 wide.",
            "ci: Student's 95 % interval of the mean over seeds; low, high: of single seeds.",
            "trivial: zeros and uniform noise for actions, on the same episodes.",
            "a run that is not done goes on when the command is repeated.",
        ],
    }


class Trial:
    """One learner in one env, and how far it is; steps are single, updates one each."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Builds it, and restores its last checkpoint."""
        self.plan, self._folder, self.spent = plan, folder, Spent()
        self._env, self._test_env = make(plan.env), make(plan.env)
        obs_dim, self._action_dim = len(self._env.state_names), len(self._env.action_names)
        self._cfg = settings(plan.learner, plan.width)
        self._rng = np.random.default_rng(train_seed(plan.seed, "crossq"))
        self._learner = ActorCritic(obs_dim, self._action_dim, self._cfg, train_seed(plan.seed, "learner"))
        self._explore = torch.Generator().manual_seed(train_seed(plan.seed, "explore"))
        shapes = {"state": ((obs_dim,), np.float32)}
        # An episode takes a frame more than it has steps, and may be as short as one step.
        self._replay = ReplayBuffer(2 * plan.steps, 1, shapes, self._action_dim)
        self._obs: Obs | None = None
        self._store = CheckpointStore(folder / "checkpoints", keep=1, command="bench crossq")
        self._saved_s = time.perf_counter()
        state = self._store.load()
        if state is not None:
            self._restore(state)

    @property
    def is_done(self) -> bool:
        return self.spent.steps >= self.plan.steps

    def go_on(self, deadline_s: float, progress: PhaseProgress | None = None) -> None:
        """Learns until it is done or out of time, and saves where it is."""
        if self.is_done:
            return
        plan, spent = self.plan, self.spent
        while not self.is_done and time.perf_counter() < deadline_s:
            self._step()
            if spent.steps % plan.evaluate_every == 0 or self.is_done:
                self._evaluate()
            if time.perf_counter() - self._saved_s > _SAVE_EVERY_S:
                self._save()
            if progress is not None and spent.steps % 100 == 0:
                progress.update(spent.steps)
        self._save()

    def close(self) -> None:
        self._env.close()
        self._test_env.close()

    def row(self) -> dict[str, Any]:
        """Returns where it is, what it reached and what that cost."""
        plan, spent = self.plan, self.spent
        learned = max(1, spent.steps - _RANDOM_STEPS)
        return {
            "env": plan.env,
            "learner": plan.learner,
            "width": plan.width,
            "seed": plan.seed,
            "steps": spent.steps,
            "return": spent.curve[-1]["return"] if spent.curve else None,
            "s_per_1000_steps": 1e3 * spent.wall_s / learned,
            "cpu_s_per_1000_steps": 1e3 * spent.cpu_s / learned,
            "done": self.is_done,
        }

    def _step(self) -> None:
        """Takes a step, and an update if the random ones are over."""
        wall_s, cpu_s, spent = time.perf_counter(), time.process_time(), self.spent
        is_random = spent.steps < _RANDOM_STEPS
        obs, begins = self._obs, self._obs is None
        if obs is None:
            first = train_seed(self.plan.seed, "env") // 2
            obs = self._env.reset(seed=[first + spent.episode])[0]
            spent.episode += 1
        if is_random:
            action = self._rng.uniform(-1.0, 1.0, (1, self._action_dim)).astype(np.float32)
        else:
            state = torch.from_numpy(obs["state"])
            action = self._learner.act(state, explore=True, generator=self._explore).numpy()
        after, reward, terminated, truncated, _ = self._env.step(action)
        self._replay.add(
            StepBatch(
                obs=obs,
                base_action=action,
                action=action,
                reward=reward.astype(np.float32),
                terminated=terminated,
                truncated=truncated,
                next_obs=after,
                next_base_action=action,
                begins=begins,
            )
        )
        self._obs = None if terminated[0] or truncated[0] else after
        spent.steps += 1
        if is_random:
            return
        how: dict[str, Any] = {"n_step": self._cfg.n_step, "gamma_step": self._cfg.gamma_step}
        self._learner.update(self._replay.sample(_BATCH, **how, rng=self._rng))
        spent.wall_s += time.perf_counter() - wall_s
        spent.cpu_s += time.process_time() - cpu_s

    def _evaluate(self) -> None:
        """Plays the mean action in an env of its own."""

        def act(state: Array) -> Array:
            return self._learner.act(torch.from_numpy(state), explore=False).numpy()

        returns = returns_of(self._test_env, act, self.plan.seed, self.plan.episodes)
        point = {"steps": self.spent.steps, "return": float(np.mean(returns)), "std": float(np.std(returns))}
        self.spent.curve.append(point)

    def _save(self) -> None:
        state = {
            "plan": vars(self.plan),
            "spent": vars(self.spent),
            "rng": self._rng.bit_generator.state,
            "explore": self._explore.get_state(),
            "learner": self._learner.state_dict(),
            "replay": self._replay.state_dict(),
            "env": None if self._obs is None else self._env.state_dict(),
        }
        self._store.save(state, "trial")
        row = {"plan": vars(self.plan), "row": self.row(), "curve": self.spent.curve}
        write_json(self._folder / "row.json", row)
        self._saved_s = time.perf_counter()

    def _restore(self, state: dict[str, Any]) -> None:
        check_plan("bench crossq", self._folder, state["plan"], vars(self.plan))
        self.spent = Spent(**state["spent"])
        self._rng.bit_generator.state = state["rng"]
        self._explore.set_state(state["explore"])
        self._learner.load_state_dict(state["learner"])
        self._replay.load_state_dict(state["replay"])
        if state.get("env") is not None:  # none between two episodes, nor in older files, which begin one
            self._obs = self._env.load_state_dict(state["env"])


def make(name: str) -> GymVectorEnv:
    """Returns one of gymnasium's envs, which waits for a reset at the end of an episode."""
    return GymVectorEnv(name, autoreset="disabled")


def returns_of(env: VectorEnv, act: Callable[[Array], Array], seed: int, episodes: int) -> list[float]:
    """Returns what the episodes of every evaluation of a run's seed earn; `act` maps (1, D) to (1, A)."""
    returns: list[float] = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=[train_seed(seed, f"test {episode}")])
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(act(obs["state"]))
            total += float(reward[0])
            ended = bool(terminated[0] or truncated[0])
        returns.append(total)
    return returns


def trivial(name: str, seeds: Sequence[int], episodes: int) -> list[dict[str, Any]]:
    """Returns what the middle of their ranges and uniform noise earn: what any learner is to be above."""
    rows: list[dict[str, Any]] = []
    with closing(make(name)) as env:
        shape, rng = (1, len(env.action_names)), np.random.default_rng(0)
        acts: dict[str, Callable[[Array], Array]] = {
            "zero": lambda state: np.zeros(shape, np.float32),
            "random": lambda state: rng.uniform(-1.0, 1.0, shape).astype(np.float32),
        }
        for policy, act in acts.items():
            means = [float(np.mean(returns_of(env, act, seed, episodes))) for seed in seeds]
            row = {"env": name, "policy": policy, "return": float(np.mean(means))}
            rows.append({**row, "low": min(means), "high": max(means)})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each env, learner, width and number of steps, over its seeds."""
    times = ("s_per_1000_steps", "cpu_s_per_1000_steps")
    found = over_seeds(rows, ("env", "learner", "width", "steps"), "return", means=times)
    return [{**row, "published": PUBLISHED.get((row["env"], row["learner"]))} for row in found]
