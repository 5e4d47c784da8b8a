"""Chunked critics on OGBench's cube tasks: h = 5 against h = 1, offline and then online.

The published comparison (Li et al. 2025, Q-chunking; 1M offline updates, 4 x 512, 1M steps of play data):
cube-double QC-FQL .42 offline and .99 after .5M control steps, FQL (h = 1) .32 and .72; best of 32 chunks
.66, of 32 actions .67 offline. Deviations: data from the same oracle but fewer steps of it, networks and
budgets as set, the default task of the environment.

Every (h, seed) has a folder with its checkpoints and its row; a repeated call goes on where the last one
ended, whether it was cut short or ran out of `minutes`. A checkpoint holds all but the simulation: after a
cut the episode that was under way is begun anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.algos.chunk_critics import ChunkCriticConfig, ChunkCritics
from robot_rl.algos.chunk_q import ChunkQ, ChunkQConfig
from robot_rl.bench.ogbench_env import ACTIONS, Cubes
from robot_rl.bench.trials import check_plan, over_seeds
from robot_rl.core.errors import require
from robot_rl.core.files import make_folder, write_json
from robot_rl.core.seeding import eval_seeds, train_seed
from robot_rl.data.episodes import Episodes
from robot_rl.data.normalize import Normaliser
from robot_rl.data.replay import Mixture, ReplayBuffer, StepBatch
from robot_rl.data.transitions import ChunkBatch
from robot_rl.policies.best_of_n import BestOfN
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.one_step import OneStepPolicy
from robot_rl.train.checkpoint import CheckpointStore

Module = Any
"""A policy that is a `torch.nn.Module` as well; Python has no type for both."""

Act = Callable[[NDArray[Any]], NDArray[Any]]
"""Returns the action (A,) for an observation."""

_SAVE_EVERY_S = 120.0
_GAMMA = 0.99


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one row is of."""

    task: str
    actor: str
    horizon: int
    seed: int
    offline_updates: int
    online_steps: int
    evaluate_every: int
    episodes: int
    data_steps: int
    width: int
    depth: int
    batch: int
    flow_steps: int
    candidates: int
    alpha: float

    @property
    def name(self) -> str:
        return f"{self.task}-{self.actor}-h{self.horizon}-seed{self.seed}"


@dataclass
class Spent:
    """What has been done, and what it cost."""

    updates: int = 0
    env_steps: int = 0
    update_s: float = 0.0
    env_s: float = 0.0
    evaluate_s: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=lambda: list[dict[str, Any]]())
    """Every evaluation."""


def run(
    *,
    task: str = "cube-double",
    actor: str = "fql",
    horizons: tuple[int, ...] = (5, 1),
    seeds: tuple[int, ...] = (0,),
    offline_updates: int = 100_000,
    online_steps: int = 0,
    evaluate_every: int = 25_000,
    episodes: int = 50,
    data_steps: int = 200_000,
    width: int = 256,
    depth: int = 3,
    batch: int = 256,
    flow_steps: int = 5,
    candidates: int = 8,
    alpha: float = 100.0,
    minutes: float = 60.0,
    out: str = "runs/ogbench",
) -> dict[str, Any]:
    """Learns with every h and seed, and returns what came of it so far.

    Args:
        task: `cube-single` or `cube-double`; its data are those of the play oracle.
        actor: `fql` or `best_of_n`, see `ChunkQConfig`.
        horizons: h; 1 is FQL, or best-of-n, with an ordinary Q.
        seeds: of the learners; the data are the same for all.
        offline_updates: before the first control step.
        online_steps: control steps, with one update each.
        evaluate_every: updates between evaluations.
        episodes: of each evaluation.
        data_steps: control steps of play data.
        width: of all networks, as are depth, batch and flow_steps (the paper: 512, 4, 256 and 10).
        candidates: of `best_of_n` (the paper: 32).
        alpha: of `fql`; set it for the task (FQL: 300 for cubes).
        minutes: of wall-clock that this call may learn; the next one goes on. What needs no learning is
            played once for each seed, and comes to it.
        out: folder of the rows and checkpoints.
    """
    require(task in ("cube-single", "cube-double"), "bench ogbench: task", task, "cube-single, cube-double")
    require(actor in ("fql", "best_of_n"), "bench ogbench: actor", actor, "fql, best_of_n")
    deadline_s = time.perf_counter() + 60.0 * minutes
    same: dict[str, Any] = {
        "task": task,
        "actor": actor,
        "offline_updates": offline_updates,
        "online_steps": online_steps,
        "evaluate_every": evaluate_every,
        "episodes": episodes,
        "data_steps": data_steps,
        "width": width,
        "depth": depth,
        "batch": batch,
        "flow_steps": flow_steps,
        "candidates": candidates,
        "alpha": alpha,
    }
    plans = [Plan(**same, horizon=h, seed=seed) for seed in seeds for h in horizons]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    try:
        with Cubes(task) as cubes:
            play = cubes.play(data_steps, seed=0)
            for plan in plans:
                trial = Trial(plan, play, cubes, Path(out) / plan.name)
                trial.go_on(deadline_s)
                rows.append(trial.row())
            beside = [row for seed in seeds for row in trivial(cubes, task, seed, episodes, Path(out))]
    finally:
        torch.set_num_threads(threads)
    return {
        "title": f"{task}, {actor}: chunks of h actions, success of {episodes} episodes",
        "rows": rows,
        "means": means([row for row in rows if row["done"]]),
        "trivial": over_seeds(beside, ("policy",), "success"),
        "notes": [
            "means: of the runs that are done; ci: Student's 95 % interval of the mean over seeds",
            "trivial: zeros and noise for actions, and the play data's own oracle, on the same episodes",
            f"play data: {data_steps:,} steps in {play.num_episodes:,} episodes, of which "
            f"{play.episode_success().sum():,.0f} end in the task's goal",
            "a row that is not done goes on when the command is repeated",
        ],
    }


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each h, over its seeds."""
    return over_seeds(rows, ("h",), "success")


def trivial(cubes: Cubes, task: str, seed: int, episodes: int, out: Path) -> list[dict[str, Any]]:
    """Returns what needs no learning, on the episodes of a seed; what is in its file is not played again."""
    path = out / f"{task}-trivial-{episodes}-seed{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    rng = np.random.default_rng(seed)
    acts: dict[str, Act] = {
        "zero": lambda obs: np.zeros(len(ACTIONS), np.float32),
        "random": lambda obs: rng.uniform(-1.0, 1.0, len(ACTIONS)).astype(np.float32),
        "oracle": cubes.oracle,
    }
    rows: list[dict[str, Any]] = [
        {"policy": name, "seed": seed, "success": success_of(cubes, act, seed, episodes)}
        for name, act in acts.items()
    ]
    make_folder(out)
    write_json(path, rows)
    return rows


def success_of(
    cubes: Cubes, act: Act, seed: int, episodes: int, *, begin: Callable[[int], None] = lambda seed: None
) -> float:
    """Returns the share of a run's held-out episodes that are solved; `begin` is told each one's seed."""
    solved = 0
    for episode in eval_seeds(seed, episodes):
        obs, over, found = cubes.reset(int(episode) % 2**31), False, {}
        begin(int(episode))
        while not over:
            found = cubes.step(act(obs))
            obs, over = found["obs"], found["terminated"] or found["truncated"]
        solved += found["success"]
    return solved / episodes


class Trial:
    """One learner: its data, its simulation, and how far it is."""

    def __init__(self, plan: Plan, play: Episodes, cubes: Cubes, folder: Path) -> None:
        """Builds it, and restores its last checkpoint."""
        self._plan, self._cubes, self._folder = plan, cubes, folder
        self._policy, self._learner, self._lengths = _learner(plan, play)
        zeros = np.zeros_like(play.action)
        self._offline = ReplayBuffer.from_episodes(
            play, base_action=zeros, final_base_action=zeros[: play.num_episodes]
        )
        shapes = {"state": (play.obs["state"].shape[1:], np.float32)}
        # An episode takes a frame more than it has steps, and may be as short as one step.
        self._online = ReplayBuffer(2 * plan.online_steps + 2, 1, shapes, play.action.shape[1])
        self._rng = np.random.default_rng(train_seed(plan.seed, "batches"))
        self._executor = ChunkExecutor(
            self._policy, 1, n_exec=plan.horizon, mode="explore", seed=train_seed(plan.seed, "explore")
        )
        self._spent, self._episode = Spent(), 0
        self._obs: Any = None
        self._store = CheckpointStore(folder / "checkpoints", keep=1, command="bench ogbench")
        self._saved_s = time.perf_counter()
        state = self._store.load()
        if state is not None:
            self._restore(state)

    @property
    def is_done(self) -> bool:
        plan, spent = self._plan, self._spent
        total = plan.offline_updates + plan.online_steps
        return spent.env_steps >= plan.online_steps and spent.updates >= total

    def go_on(self, deadline_s: float) -> None:
        """Learns until it is done or out of time, and saves where it is."""
        plan, spent = self._plan, self._spent
        while not self.is_done and time.perf_counter() < deadline_s:
            if spent.updates >= plan.offline_updates:
                self._step()
            self._update()
            is_due = spent.updates % plan.evaluate_every == 0 or spent.updates == plan.offline_updates
            if is_due or self.is_done:
                self._evaluate()
            if time.perf_counter() - self._saved_s > _SAVE_EVERY_S:
                self._save()
        self._save()

    def row(self) -> dict[str, Any]:
        """Returns where it is, what it reached and what that cost."""
        plan, spent = self._plan, self._spent
        offline = [point["success"] for point in spent.curve if point["updates"] == plan.offline_updates]
        return {
            "h": plan.horizon,
            "seed": plan.seed,
            "updates": spent.updates,
            "env_steps": spent.env_steps,
            "offline": offline[0] if offline else None,
            "success": spent.curve[-1]["success"] if spent.curve else None,
            "s_per_1000_updates": 1e3 * spent.update_s / max(1, spent.updates),
            "s_per_1000_env_steps": 1e3 * spent.env_s / max(1, spent.env_steps) if spent.env_steps else None,
            "evaluate_s": spent.evaluate_s / max(1, len(spent.curve)),
            "done": self.is_done,
        }

    def _update(self) -> None:
        began_s = time.perf_counter()
        self._learner.update(self._batch())
        self._spent.updates += 1
        self._spent.update_s += time.perf_counter() - began_s

    def _batch(self) -> ChunkBatch:
        """Returns a batch in which every step, offline or online, is as likely as any other."""
        plan, share = self._plan, len(self._online) / (len(self._online) + len(self._offline))
        sampler = Mixture({"offline": (self._offline, 1.0 - share), "online": (self._online, share)})
        return sampler.sample_chunks(
            plan.batch, horizon=plan.horizon, gamma_step=_GAMMA, rng=self._rng, prefixes=self._lengths
        )

    def _step(self) -> None:
        """Takes a control step with the policy that learns."""
        began_s = time.perf_counter()
        begins = self._obs is None
        if begins:
            self._obs = self._cubes.reset(train_seed(self._plan.seed, "collect") // 2 + self._episode)
            self._executor.reset()
            self._episode += 1
        action = self._executor.act({"state": self._obs[None]}).action
        found = self._cubes.step(action[0])
        self._online.add(
            StepBatch(
                obs={"state": self._obs[None]},
                base_action=action,
                action=action,
                reward=np.array([found["reward"]], np.float32),
                terminated=np.array([found["terminated"]]),
                truncated=np.array([found["truncated"]]),
                next_obs={"state": found["obs"][None]},
                next_base_action=action,
                begins=begins,
            )
        )
        self._obs = None if found["terminated"] or found["truncated"] else found["obs"]
        self._spent.env_steps += 1
        self._spent.env_s += time.perf_counter() - began_s

    def _evaluate(self) -> None:
        """Plays held-out episodes; the one that was under way for learning is over."""
        began_s, plan, spent = time.perf_counter(), self._plan, self._spent
        executor = ChunkExecutor(self._policy, 1, n_exec=plan.horizon)

        def begin(seed: int) -> None:
            executor.reset(np.ones(1, bool), np.array([seed], np.uint64))

        def act(obs: NDArray[Any]) -> NDArray[Any]:
            return executor.act({"state": obs[None]}).action[0]

        success = success_of(self._cubes, act, plan.seed, plan.episodes, begin=begin)
        self._obs = None
        spent.evaluate_s += time.perf_counter() - began_s
        point = {"updates": spent.updates, "env_steps": spent.env_steps, "success": success}
        spent.curve.append(point)

    def _save(self) -> None:
        spent = vars(self._spent)
        state = {
            "plan": vars(self._plan),
            "spent": spent,
            "episode": self._episode,
            "rng": self._rng.bit_generator.state,
            "learner": self._learner.state_dict(),
            "executor": self._executor.state_dict(),
            "online": self._online.state_dict(),
        }
        self._store.save(state, "trial")
        row = {"plan": vars(self._plan), "row": self.row(), "curve": self._spent.curve}
        write_json(self._folder / "row.json", row)
        self._saved_s = time.perf_counter()

    def _restore(self, state: dict[str, Any]) -> None:
        check_plan("bench ogbench", self._folder, state["plan"], vars(self._plan))
        self._spent, self._episode = Spent(**state["spent"]), int(state["episode"])
        self._rng.bit_generator.state = state["rng"]
        self._learner.load_state_dict(state["learner"])
        self._executor.load_state_dict(state["executor"])
        self._online.load_state_dict(state["online"])


def _learner(plan: Plan, play: Episodes) -> tuple[Module, ChunkQ, tuple[int, ...]]:
    """Returns what acts, what learns, and the lengths that its critics value."""
    size: dict[str, Any] = {"width": plan.width, "depth": plan.depth}
    flow = FlowPolicy(
        ChunkPolicyConfig(horizon=plan.horizon, steps=plan.flow_steps, **size),
        state_dim=play.obs["state"].shape[1],
        action_dim=play.action.shape[1],
        normaliser=Normaliser.fit(play.obs, play.action),
        generator=torch.Generator().manual_seed(train_seed(plan.seed, "policy")),
    ).eval()
    cfg = ChunkQConfig(
        actor="fql" if plan.actor == "fql" else "best_of_n",
        candidates=plan.candidates,
        alpha=plan.alpha,
        gamma_step=_GAMMA,
        critics=ChunkCriticConfig(**size),
    )
    critics = ChunkCritics(
        cfg.critics,
        feature_dim=flow.feature_dim,
        action_dim=flow.action_dim,
        steps=plan.horizon,
        generator=torch.Generator().manual_seed(train_seed(plan.seed, "critics")),
    )
    student = OneStepPolicy.student_of(flow) if cfg.actor == "fql" else None
    learner = ChunkQ(flow, critics, cfg, train_seed(plan.seed, "chunked"), student=student)
    policy = BestOfN(flow, critics, plan.candidates) if student is None else student
    return policy.eval(), learner, critics.lengths
