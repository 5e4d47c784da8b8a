"""Control steps per second of the simulator, compared with the C limit and with other simulators.

Ours and the C limit take turns in one process. The C limit is `mujoco.rollout` over the same model, states,
controls and substeps, with the same threads, in one call without a barrier. Then follows Gymnasium's
AsyncVectorEnv over the same task. Ours includes control, observations, reward and autoreset. The actions are
recorded from the scripted expert with noise, so that the load includes grasping and carrying, as in training.
"""

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import gymnasium
import mujoco
import mujoco.rollout
import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.peers import PEERS, peer_steps_per_s
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]

_SEGMENT_STEPS = 40
"""Control steps between two readings of the clock; the limit repeats exactly these."""


def run(
    num_envs: tuple[int, ...] = (64, 512),
    rounds: int = 9,
    task: str = "pick_cube",
    async_envs: tuple[int, ...] = (4, 16),
    peers: bool = True,
) -> dict[str, Any]:
    """Measures everything in one process and returns the tables of `robot-rl bench sim`.

    Args:
        num_envs: simulations at once.
        rounds: turns of each; the result is the median ratio of the rounds.
        task: name of the task.
        async_envs: sizes of AsyncVectorEnv (a process for each env), of which the best counts; empty: no row.
        peers: also measure other projects' environments, each in a virtual environment that is installed
            on first use.
    """
    rows, ratio_to_limit, ratio_to_async, layers = [], {}, {}, []
    best_async = max((_async_rate(task, n) for n in async_envs), default=None)
    ours_best = 0.0
    for n in num_envs:
        measured = [_against_limit(task, n, seed) for seed in range(rounds)]
        ours = statistics.median(m["ours"] for m in measured)
        limit = statistics.median(m["limit"] for m in measured)
        ratio_to_limit[str(n)] = round(statistics.median(m["ours"] / m["limit"] for m in measured), 3)
        if best_async is not None:
            ratio_to_async[str(n)] = round(ours / best_async, 2)
        ours_best = max(ours_best, ours)
        rows.append(_row(f"robot_rl {task}", n, ours, ratio_to_limit[str(n)]))
        rows.append(_row("mujoco.rollout (C limit)", n, limit, 1.0))
        layers += _layers(task, n)
    if best_async is not None:
        rows.append(_row("gymnasium AsyncVectorEnv, same task", max(async_envs), best_async, None))
    result = {
        "title": f"Simulation: control steps per second, {os.cpu_count()} cores",
        "rows": rows,
        "layers": layers,
        "ratio_to_limit": ratio_to_limit,
        "ratio_to_async": ratio_to_async,
        "ratio_to_peer": {},
        "notes": [
            f"median of {rounds} alternating rounds of {_SEGMENT_STEPS} control steps; a control step is "
            "10 physics steps of 5 ms; the limit writes the state of every substep, as mujoco.rollout does",
            f"AsyncVectorEnv: the best of {async_envs} processes",
        ],
    }
    if peers:
        _add_peers(result, ours_best)
    return result


def _row(name: str, num_envs: int, rate: float, ratio: float | None) -> dict[str, Any]:
    return {"what": name, "envs": num_envs, "control_steps_per_s": round(rate), "of_limit": ratio}


def _against_limit(task: str, num_envs: int, seed: int) -> dict[str, float]:
    """Times one segment of ours, and `mujoco.rollout` over the same physics."""
    env = SimVectorEnv(EnvConfig(task=task), num_envs)
    actions, load = _record(env, seed)
    env.reset(seed=seed)
    _replay(env, actions[:_SEGMENT_STEPS])  # to where the recording of the limit begins
    began = time.perf_counter()
    _replay(env, actions[_SEGMENT_STEPS:])
    ours_s = time.perf_counter() - began
    steps = num_envs * _SEGMENT_STEPS
    return {"ours": steps / ours_s, "limit": steps / _rollout_s(env, load)}


@dataclass
class _Load:
    """The inputs of MuJoCo in a segment: a row for every control step of every simulation."""

    state: Array
    """Physics state before the step, (rows, n)."""
    warmstart: Array
    """The solver's first guess, (rows, nv)."""
    control: Array
    """Actuator commands during the step, (rows, nu)."""


def _record(env: SimVectorEnv, seed: int) -> tuple[list[Array], _Load]:
    """Returns expert actions over two segments, and the inputs of the physics in the second."""
    env.reset(seed=seed)
    expert, rng = env.expert(noise_m=0.01), np.random.default_rng(seed)
    physics = _physics_columns(env)
    fields = {name: env.backend.bind(name) for name in ("qacc_warmstart", "ctrl")}
    actions: list[Array] = []
    states, warmstarts, controls = [], [], []
    for step in range(2 * _SEGMENT_STEPS):
        noise = rng.normal(0.0, 0.1, (env.num_envs, len(env.action_names)))
        actions.append(np.clip(expert.act() + noise, -1.0, 1.0).astype(np.float32))
        if step >= _SEGMENT_STEPS:
            states.append(on_cpu(env.backend).state[:, physics].copy())
            warmstarts.append(fields["qacc_warmstart"].copy())
        commands = _commands(env, actions[-1])
        if step >= _SEGMENT_STEPS:
            controls.append(commands)
    return actions, _Load(np.concatenate(states), np.concatenate(warmstarts), np.concatenate(controls))


def _commands(env: SimVectorEnv, action: Array) -> Array:
    """Steps the env and returns its actuator commands (envs, nu) before a reset overwrites them."""
    commands: list[Array] = []
    backend: Any = env.backend
    step = backend.step

    def recording_step(*args: Any) -> Array:
        commands.append(env.backend.bind("ctrl").copy())
        return step(*args)

    backend.step = recording_step
    env.step(action)
    backend.step = step
    return commands[0]


def _physics_columns(env: SimVectorEnv) -> slice:
    """Returns the columns of the state rows that `mujoco.rollout` uses: the first ones."""
    model, spec = on_cpu(env.backend).model, int(mujoco.mjtState.mjSTATE_FULLPHYSICS)
    row = np.empty(mujoco.mj_stateSize(model, spec))
    mujoco.mj_getState(model, on_cpu(env.backend).batch.get_data(0), row, spec)
    assert np.array_equal(row, on_cpu(env.backend).state[0, : len(row)]), "MuJoCo has another order of states"
    return slice(0, len(row))


def _replay(env: SimVectorEnv, actions: list[Array]) -> None:
    for action in actions:
        env.step(action)


def _rollout_s(env: SimVectorEnv, load: _Load) -> float:
    """Returns the seconds of the same physics in C: one call, all cores, preallocated outputs."""
    model, num_substeps = on_cpu(env.backend).model, env.num_substeps
    control = np.repeat(load.control[:, None], num_substeps, axis=1)
    datas = [mujoco.MjData(model) for _ in range(os.cpu_count() or 1)]
    state = np.zeros((len(control), num_substeps, load.state.shape[1]))
    sensors = np.zeros((len(control), num_substeps, model.nsensordata))
    with mujoco.rollout.Rollout(nthread=len(datas)) as pool:
        began = time.perf_counter()
        pool.rollout(
            model,
            datas,
            load.state,
            control,
            initial_warmstart=load.warmstart,
            state=state,
            sensordata=sensors,
        )
        return time.perf_counter() - began


def _async_rate(task: str, num_envs: int) -> float:
    """Returns control steps per second of AsyncVectorEnv over the single env, one process each."""

    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(f"robot_rl/{''.join(w.title() for w in task.split('_'))}-v0", num_threads=1)

    env = gymnasium.vector.AsyncVectorEnv(
        [make] * num_envs, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(8)]
    for action in actions:
        env.step(action)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < 3.0:
        env.step(actions[steps % 8])
        steps += 1
    rate = num_envs * steps / (time.perf_counter() - began)
    env.close()
    return rate


def _layers(task: str, num_envs: int) -> list[dict[str, Any]]:
    """Returns microseconds per control step of one env, layer by layer, over one segment."""
    env = SimVectorEnv(EnvConfig(task=task), num_envs)
    spent: dict[str, float] = {}
    for layer, owner, name in (
        ("control and safety", env, "_command"),
        ("physics (MuJoCo)", env.backend, "step"),
        ("success", env._task, "evaluate"),
        ("observation", env, "_observe"),
        ("autoreset", env, "_begin"),
    ):
        _clocked(owner, name, layer, spent)
    actions, _ = _record(env, 0)
    env.reset(seed=0)
    spent.clear()
    began = time.perf_counter()
    _replay(env, actions)
    total = time.perf_counter() - began
    spent["rest of step"] = total - sum(spent.values())
    steps = num_envs * len(actions)
    return [
        {
            "envs": num_envs,
            "layer": layer,
            "us_per_control_step": round(1e6 * s / steps, 3),
            "share": round(s / total, 3),
        }
        for layer, s in spent.items()
    ]


def _clocked(owner: Any, name: str, layer: str, spent: dict[str, float]) -> None:
    """Adds a stopwatch to a method of one object."""
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[layer] = spent.get(layer, 0.0) + time.perf_counter() - began

    setattr(owner, name, timed)


def _add_peers(result: dict[str, Any], ours: float) -> None:
    for name in PEERS:
        rate = peer_steps_per_s(name)
        result["rows"].append(_row(name, PEERS[name].num_envs, rate, None))
        result["ratio_to_peer"][name] = round(ours / rate, 2)
