"""Control steps per second of PPO, learning included: ours, Stable-Baselines3's, and rsl_rl's if asked.

All do the same work on simulations of the same task: rollouts of the same length, as many epochs and
minibatches, networks of the same size for policy and value, a running scale of the observations, gradients
clipped to a norm. They take turns in one process, so that other load on the machine affects all; ratios are
those of neighbouring rounds. What is not the simulation's is in columns of its own.

The peers have ReLU, the cheapest; ours has SiLU in the policy. Stable-Baselines3 gets our env through
`StableBaselinesEnv`; rsl_rl its tensors, and neither its runner nor its logger is in the way. As its users
run it, Stable-Baselines3 is measured too: with `make_vec_env` of our `SingleEnv`, whose simulations take
turns.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robot_rl.algos.config.on_policy import PlainPPOConfig
from robot_rl.algos.plain_ppo import PlainPPO
from robot_rl.bench.learner import alternate, ratios
from robot_rl.bench.trials import Rate
from robot_rl.core.errors import RobotRLError, require
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.vector import Array
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.rollout.steps import StepRolloutSource
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.single import SingleEnv
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

RSL_RL = "rsl-rl-lib==5.5.1"
"""What was measured; `rsl_rl` is its import name."""
ALONE = "stable_baselines3_alone"
"""Stable-Baselines3 with its own vector env in the place of our batch of simulations."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One iteration: a rollout and its updates."""

    task: str
    num_envs: int
    steps: int
    """Control steps of each env in a rollout."""
    epochs: int
    minibatches: int
    width: int
    """Units of both hidden layers, of the policy and of the value."""

    @property
    def cost(self) -> int:
        return self.num_envs * self.steps


class TimedEnv(SimVectorEnv):
    """Notes how long its steps take."""

    spent_s = 0.0

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        began = time.perf_counter()
        found = super().step_masked(actions, active)
        self.spent_s += time.perf_counter() - began
        return found


def run(
    *,
    task: str = "gantry_peg",
    num_envs: tuple[int, ...] = (256, 16),
    steps: tuple[int, ...] = (32, 128),
    epochs: tuple[int, ...] = (5, 10),
    minibatches: tuple[int, ...] = (4, 32),
    width: int = 128,
    threads: int = 2,
    seconds_per_round: float = 6.0,
    rounds: int = 4,
    rsl_rl: bool = True,
) -> dict[str, Any]:
    """Measures and returns rows and ratios, of one kind of work after the other.

    Args:
        task: one of ours.
        num_envs: simulations at once, of each kind of work: many envs and large minibatches, as rsl_rl has
            them, then few envs and minibatches of 64, as Stable-Baselines3 has them.
        steps: control steps of each env in a rollout.
        epochs: passes over a rollout.
        minibatches: of a rollout.
        width: units of the two hidden layers of each network.
        threads: that simulate, and that learn.
        seconds_per_round: least length of each turn.
        rounds: turns of each.
        rsl_rl: also measures rsl_rl, which has to be installed.
    """
    require(rounds >= 1, "bench ppo: rounds", rounds, "1 or more")
    require(seconds_per_round > 0, "bench ppo: seconds_per_round", seconds_per_round, "above 0")
    sizes = {len(one) for one in (num_envs, steps, epochs, minibatches)}
    same = "as many as num_envs has, of each of steps, epochs and minibatches"
    require(len(sizes) == 1, "bench ppo: steps", steps, same)
    makers: dict[str, Callable[[Work, Any], Callable[[], int]]] = {
        "robot_rl": ours,
        "stable_baselines3": of_stable_baselines3,
        ALONE: _of_vec_env,
        **({"rsl_rl": of_rsl_rl} if rsl_rl else {}),
    }
    rows: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for envs, length, passes, parts in zip(num_envs, steps, epochs, minibatches, strict=True):
            work = Work(task=task, num_envs=envs, steps=length, epochs=passes, minibatches=parts, width=width)
            more, compared = _measured(work, makers, threads, seconds_per_round, rounds)
            rows += more
            found.append(compared)
    finally:
        torch.set_num_threads(before)
    return {
        "title": f"PPO on {task}, 2 x {width}, {threads} threads: control steps per second, with learning",
        "rows": rows,
        "ratios": found,
        "notes": [
            "rates are medians over rounds, ratios medians over neighbouring rounds (wall-clock)",
            "us_simulated, us_else: of a control step, microseconds in the env and in everything else",
            "stable_baselines3_alone: with its own make_vec_env in the place of our batch of simulations",
        ],
    }


def _measured(
    work: Work, makers: dict[str, Any], threads: int, seconds: float, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the rows and the ratios of one kind of work."""
    config = EnvConfig(task=work.task, num_threads=threads)

    def opened(name: str) -> Any:
        return turn_by_turn(work) if name == ALONE else TimedEnv(config, work.num_envs)

    with contextlib.ExitStack() as stack:
        envs = {name: stack.enter_context(closing(opened(name))) for name in makers}
        clocks = {name: _Clock(make(work, envs[name]), envs[name]) for name, make in makers.items()}
        rates = alternate({name: clock.turn for name, clock in clocks.items()}, seconds, rounds)
    batch = work.cost // work.minibatches
    what = {"envs": work.num_envs, "steps": work.steps, "epochs": work.epochs, "batch": batch}
    rows = [{"learner": name, **what, **_row(rates[name], clocks[name])} for name in makers]
    mine, elsewhere = rates["robot_rl"], clocks["robot_rl"].us[1]
    compared = dict[str, float]()
    for name in makers:
        if name != "robot_rl":
            found = ratios(mine, rates[name])
            compared |= {f"to_{name}_{of}": found[of] for of in ("wall", "cpu")}
            if clocks[name].us[0]:
                compared[f"to_{name}_else"] = clocks[name].us[1] / elsewhere
    return rows, {**what, **compared}


def _row(rates: list[Rate], clock: _Clock) -> dict[str, Any]:
    simulated, elsewhere = clock.us
    return {
        "steps_per_s": statistics.median(rate.wall for rate in rates),
        "steps_per_cpu_s": statistics.median(rate.cpu for rate in rates),
        "us_simulated": simulated or None,
        "us_else": elsewhere if simulated else None,
    }


class _Clock:
    """Counts control steps, the seconds that they take, and the env's share."""

    def __init__(self, iterate: Callable[[], int], env: Any) -> None:
        """Counts nothing yet; `env`: one that is no `TimedEnv` has no share of its own."""
        self._iterate, self._env = iterate, env if isinstance(env, TimedEnv) else None
        self._turns = self._count = 0
        self._spent_s = self._simulated_s = 0.0

    def turn(self) -> int:
        """Takes an iteration; the first one is not counted."""
        if self._env is not None:
            self._env.spent_s = 0.0
        began = time.perf_counter()
        count = self._iterate()
        self._turns += 1
        if self._turns > 1:
            self._count += count
            self._spent_s += time.perf_counter() - began
            self._simulated_s += 0.0 if self._env is None else self._env.spent_s
        return count

    @property
    def us(self) -> tuple[float, float]:
        """Microseconds of a control step in the env, and elsewhere."""
        each = 1e6 / self._count
        return self._simulated_s * each, (self._spent_s - self._simulated_s) * each


def ours(work: Work, env: SimVectorEnv) -> Callable[[], int]:
    """Returns a function that takes an iteration of `plain_ppo`, and returns its control steps."""
    dims = {"state": len(env.state_names)}
    sizes: dict[str, Any] = {"state_dim": dims["state"], "action_dim": len(env.action_names)}
    policies = [
        GaussianPolicy(
            GaussianPolicyConfig(width=work.width, depth=2, initial_std=1.0),
            **sizes,
            normaliser=Normaliser(dims, sizes["action_dim"]),
        )
        for _ in range(2)
    ]
    cfg = PlainPPOConfig(epochs=work.epochs, minibatches=work.minibatches, width=work.width, depth=2)
    learner = PlainPPO(policies[0], cfg, 0, observed=0)
    source, publisher = StepRolloutSource(env, policies[1], steps=work.steps, seed=0), Publisher()
    turns = 0

    def iterate() -> int:
        nonlocal turns
        publisher.offer(turns, learner.policy_weights)
        learner.update([source.collect(publisher)])
        turns += 1
        return work.cost

    return iterate


def of_stable_baselines3(work: Work, env: SimVectorEnv) -> Callable[[], int]:
    """Returns a function that takes an iteration of Stable-Baselines3's PPO.

    Raises:
        RobotRLError: it is not installed.
    """
    _imported("stable_baselines3", "stable-baselines3")
    adapter: Any = importlib.import_module("robot_rl.sim.stable_baselines")
    return _of_vec_env(work, adapter.StableBaselinesEnv(env))


def turn_by_turn(work: Work) -> Any:
    """Returns simulations that Stable-Baselines3 makes and steps, one after another; the caller closes them.

    Raises:
        RobotRLError: it is not installed.
    """
    _imported("stable_baselines3", "stable-baselines3")
    tools: Any = importlib.import_module("stable_baselines3.common.env_util")
    return tools.make_vec_env(lambda: SingleEnv(task=work.task), work.num_envs)


def _of_vec_env(work: Work, envs: Any) -> Callable[[], int]:
    peer: Any = importlib.import_module("stable_baselines3")
    vectors: Any = importlib.import_module("stable_baselines3.common.vec_env")
    scaled = vectors.VecNormalize(envs, norm_reward=False)
    model = peer.PPO(
        "MultiInputPolicy",
        scaled,
        n_steps=work.steps,
        batch_size=work.cost // work.minibatches,
        n_epochs=work.epochs,
        clip_range_vf=0.2,
        max_grad_norm=1.0,
        policy_kwargs={"net_arch": [work.width] * 2, "activation_fn": torch.nn.ReLU},
        device="cpu",
    )
    _, callback = model._setup_learn(1 << 40)
    callback.on_training_start({}, {})

    def iterate() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=work.steps)
        model.train()
        return work.cost

    return iterate


def of_rsl_rl(work: Work, env: SimVectorEnv) -> Callable[[], int]:
    """Returns a function that takes an iteration of rsl_rl's PPO.

    Raises:
        RobotRLError: it is not installed.
    """
    _imported("rsl_rl", RSL_RL, more=" Or leave it out, rsl_rl=false.")
    algorithms: Any = importlib.import_module("rsl_rl.algorithms")
    tensors: Any = importlib.import_module("tensordict")

    def shown(obs: dict[str, Array]) -> Any:
        return tensors.TensorDict({"policy": torch.from_numpy(obs["state"])}, batch_size=[work.num_envs])

    network: dict[str, Any] = {
        "class_name": "rsl_rl.models:MLPModel",
        "hidden_dims": [work.width] * 2,
        "activation": "relu",
        "obs_normalization": True,
    }
    drawn = {"class_name": "rsl_rl.modules:GaussianDistribution", "init_std": 1.0}
    settings: dict[str, Any] = {
        "num_steps_per_env": work.steps,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": drawn},
        "critic": network,
        "algorithm": {
            "class_name": "rsl_rl.algorithms:PPO",
            "num_learning_epochs": work.epochs,
            "num_mini_batches": work.minibatches,
            "entropy_coef": 0.0,
        },
        "multi_gpu": None,
    }
    first, _ = env.reset(seed=0)
    obs = shown(first)
    with contextlib.redirect_stdout(io.StringIO()):
        learner = algorithms.PPO.construct_algorithm(obs, _Sizes(env), settings, "cpu")
    learner.train_mode()

    def iterate() -> int:
        nonlocal obs
        with torch.inference_mode():
            for _ in range(work.steps):
                actions: Tensor = learner.act(obs)
                state, reward, terminated, truncated, _ = env.step(actions.numpy())
                obs = shown(state)
                rewards = torch.from_numpy(reward).float()
                limits = {"time_outs": torch.from_numpy(truncated)}
                learner.process_env_step(obs, rewards, torch.from_numpy(terminated | truncated), limits)
            learner.compute_returns(obs)
        learner.update()
        return work.cost

    return iterate


class _Sizes:
    """What rsl_rl asks an env for."""

    def __init__(self, env: SimVectorEnv) -> None:
        self.num_envs, self.num_actions = env.num_envs, len(env.action_names)


def _imported(name: str, package: str, more: str = "") -> Any:
    if importlib.util.find_spec(name) is None:
        raise RobotRLError(f"bench ppo: {name} is not installed. `uv pip install {package}` brings it.{more}")
    return importlib.import_module(name)
