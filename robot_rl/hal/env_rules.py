"""The rules of `VectorEnv`, one function each; `robot_rl.hal.conformance` runs them.

What is random here comes from the case's seed. Envs are compared byte for byte: a row among many
with the same row alone, chunks with single steps, and what follows a restored state with what
followed the first time, each across the end of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from robot_rl.core.errors import RobotRLError
from robot_rl.hal.device import CAPS
from robot_rl.hal.vector import Array, Obs, VectorEnv

MakeEnv = Callable[[int], VectorEnv]


class ConformanceError(AssertionError):
    """An env or a device that breaks a rule of its contract."""


@dataclass(frozen=True)
class Case:
    make_env: MakeEnv
    num_envs: int
    seed: int
    max_steps: int

    @contextmanager
    def env(self, num_envs: int | None = None) -> Iterator[VectorEnv]:
        env = self.make_env(self.num_envs if num_envs is None else num_envs)
        try:
            yield env
        finally:
            env.close()

    def actions(self, env: VectorEnv, steps: int, salt: int = 0) -> Array:
        """Returns (steps, num_envs of the case, A) actions, the same for every env of the case."""
        rng = np.random.default_rng([self.seed, salt])
        shape = (steps, self.num_envs, len(env.action_names))
        return rng.uniform(-1.0, 1.0, shape).astype(np.float32)


def require(condition: bool, rule: str, got: Any, need: str) -> None:
    if not condition:
        raise ConformanceError(f"{rule}: got {got}, need {need}.")


def require_same(rule: str, got: Obs, need: Obs) -> None:
    """Requires two dicts of arrays to be the same bytes."""
    require(set(got) == set(need), rule, sorted(got), f"the keys {sorted(need)}")
    for key, value in need.items():
        if not np.array_equal(got[key], value, equal_nan=True):
            raise ConformanceError(
                f"{rule}: {key!r} differs: got {got[key].tolist()}, need {value.tolist()}."
            )


def _is_same_step(env: VectorEnv) -> bool:
    return env.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP


def _check_obs(rule: str, env: VectorEnv, obs: Any) -> None:
    require(
        isinstance(obs, dict) and "state" in obs, f"{rule}: observation", type(obs), "a dict with 'state'"
    )
    space = env.observation_space
    assert isinstance(space, gymnasium.spaces.Dict)
    require(
        set(obs) == set(space.keys()), f"{rule}: observation keys", sorted(obs), f"{sorted(space.keys())}"
    )
    for key, box in space.items():
        value = obs[key]
        shape = f"{box.shape} {box.dtype}"
        require(
            (value.shape, value.dtype) == (box.shape, box.dtype),
            f"{rule}: {key}",
            f"{value.shape} {value.dtype}",
            shape,
        )
        require(bool(np.isfinite(value).all()), f"{rule}: {key}", "NaN or infinity", "finite numbers")
        require(box.contains(value), f"{rule}: {key}", "values outside of the space", str(box))


def _rows_of(values: dict[str, Array], row: int) -> dict[str, Array]:
    return {key: value[row] for key, value in values.items()}


def _advance(env: VectorEnv, actions: Array) -> dict[str, Array]:
    """Takes one step, resets what ended if nobody else does, and returns all that was seen."""
    obs, reward, terminated, truncated, infos = env.step(actions)
    ended = terminated | truncated
    seen = {f"obs.{key}": value for key, value in obs.items()}
    seen |= {"reward": reward, "terminated": terminated, "truncated": truncated}
    seen |= {name: infos[name] for name in ("success", "executed_action")}
    if ended.any() and not _is_same_step(env):
        after, _ = env.reset(options={"reset_mask": ended})
        seen |= {f"after_reset.{key}": value for key, value in after.items()}
    else:
        seen |= {f"after_reset.{key}": value for key, value in obs.items()}
    return seen


# The rules of an env


def check_description(case: Case) -> None:
    with case.env() as env:
        for name in ("task", "robot", "instruction"):
            value = getattr(env, name, None)
            require(isinstance(value, str) and bool(value), f"{name}", value, "words")
        require(env.num_envs == case.num_envs, "num_envs", env.num_envs, str(case.num_envs))
        require(env.control_hz > 0, "control_hz", env.control_hz, "above 0")
        require(env.caps <= CAPS, "caps", sorted(env.caps), f"some of {sorted(CAPS)}")
        mode = env.metadata.get("autoreset_mode")
        modes = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
        require(mode in modes, "metadata['autoreset_mode']", mode, "SAME_STEP or DISABLED")
        require(
            isinstance(env.single_observation_space, gymnasium.spaces.Dict),
            "single_observation_space",
            env.single_observation_space,
            "a Dict",
        )
        need = gymnasium.spaces.Box(-1.0, 1.0, (len(env.action_names),), np.float32)
        require(env.single_action_space == need, "single_action_space", env.single_action_space, str(need))
        batched = gymnasium.vector.utils.batch_space(env.single_observation_space, env.num_envs)
        require(env.observation_space == batched, "observation_space", env.observation_space, f"{batched}")
        size = env.single_observation_space["state"].shape
        require(
            size == (len(env.state_names),),
            "state_names",
            f"{len(env.state_names)} names",
            f"{size}, one each",
        )


def check_reset(case: Case) -> None:
    with case.env() as env:
        obs, infos = env.reset(seed=case.seed)
        _check_obs("reset", env, obs)
        require(isinstance(infos, dict), "reset: infos", type(infos), "a dict")


def check_step(case: Case) -> None:
    with case.env() as env:
        env.reset(seed=case.seed)
        obs, reward, terminated, truncated, infos = env.step(case.actions(env, 1)[0])
        _check_obs("step", env, obs)
        rows = (env.num_envs,)
        require(
            reward.shape == rows and reward.dtype.kind == "f",
            "step: reward",
            f"{reward.shape} {reward.dtype}",
            f"{rows} floats",
        )
        require(bool(np.isfinite(reward).all()), "step: reward", reward.tolist(), "finite numbers")
        flags = {"terminated": terminated, "truncated": truncated, "infos['success']": infos.get("success")}
        for name, value in flags.items():
            is_flag = isinstance(value, np.ndarray) and value.shape == rows and value.dtype == bool
            require(is_flag, f"step: {name}", value, f"{rows} bool")
        executed = infos.get("executed_action")
        require(
            isinstance(executed, np.ndarray) and env.action_space.contains(executed.astype(np.float32)),
            "step: infos['executed_action']",
            executed,
            str(env.action_space),
        )


def check_bad_actions(case: Case) -> None:
    with case.env() as env:
        env.reset(seed=case.seed)
        need = (env.num_envs, len(env.action_names))
        wrong = np.zeros((env.num_envs, need[1] + 1), np.float32)
        calls = {"step": lambda: env.step(wrong), "step_chunk": lambda: env.step_chunk(wrong[:, None], 1)}
        for name, call in calls.items():
            message = refusal(call, RobotRLError)
            require(message is not None, f"{name} with one action too many", "no error", "a RobotRLError")
            require(
                str(need[1]) in str(message) and str(wrong.shape[1]) in str(message),
                f"{name} with one action too many",
                f"the message {message!r}",
                f"one that names {wrong.shape[1]} and {need[1]}",
            )
        poisoned = case.actions(env, 1)[0]
        poisoned[0, 0] = np.nan
        try:
            obs, reward, *_ = env.step(poisoned)
        except RobotRLError:
            return
        _check_obs("step with a NaN action", env, obs)
        require(
            bool(np.isfinite(reward).all()),
            "step with a NaN action: reward",
            reward.tolist(),
            "finite numbers",
        )


def refusal(call: Callable[[], Any], kind: type[Exception]) -> str | None:
    """Returns the message of the expected error, or None if there was none."""
    try:
        call()
    except kind as error:
        return str(error)
    return None


def check_fresh_arrays(case: Case) -> None:
    with case.env() as env:
        first, _ = env.reset(seed=case.seed)
        actions = case.actions(env, 2)
        for when, action in zip(("reset", "step"), actions, strict=True):
            kept = {key: value.copy() for key, value in first.items()}
            second = env.step(action)[0]
            require_same(f"an observation returned by {when} changed in the next step", first, kept)
            first = second


def check_episode_end(case: Case) -> int:
    """Checks the first end of an episode and returns after how many steps it came."""
    with case.env() as env:
        env.reset(seed=case.seed)
        for step, action in enumerate(case.actions(env, case.max_steps), start=1):
            obs, _, terminated, truncated, infos = env.step(action)
            ended = terminated | truncated
            if not ended.any():
                require(
                    not np.any(infos.get("_final_obs", False)),
                    "final_obs",
                    "some",
                    "none where no episode ended",
                )
                continue
            if _is_same_step(env):
                _check_final_obs(env, obs, ended, infos)
            else:
                _check_masked_reset(env, obs, ended)
            return step
    raise ConformanceError(
        f"no episode ended in {case.max_steps} steps: give make_env a shorter horizon, or max_steps a larger number."
    )


def _check_final_obs(env: VectorEnv, obs: Obs, ended: Array, infos: dict[str, Any]) -> None:
    final, mask = infos.get("final_obs"), infos.get("_final_obs")
    require(isinstance(final, dict), "SAME_STEP: infos['final_obs']", type(final), "a dict of batched arrays")
    require(
        isinstance(mask, np.ndarray) and np.array_equal(mask, ended),
        "SAME_STEP: infos['_final_obs']",
        mask,
        f"terminated | truncated = {ended.tolist()}",
    )
    _check_obs("final_obs", env, final)
    for row in np.flatnonzero(ended):
        is_old = all(np.array_equal(obs[key][row], final[key][row]) for key in final)
        require(
            not is_old,
            f"SAME_STEP: observation of env {row} after its end",
            "final_obs again",
            "the first of the next episode",
        )


def _check_masked_reset(env: VectorEnv, obs: Obs, ended: Array) -> None:
    mask = ended.copy()
    if len(mask) > 1:
        mask[:] = False
        mask[int(np.flatnonzero(ended)[0])] = True
    after, _ = env.reset(options={"reset_mask": mask})
    _check_obs("reset with a mask", env, after)
    for key, value in after.items():
        require(
            np.array_equal(value[~mask], obs[key][~mask]),
            f"reset with a mask: {key} of the other envs",
            "a change",
            "none",
        )


def check_same_seed(case: Case, length: int) -> None:
    with case.env() as first, case.env() as second:
        begin = first.reset(seed=case.seed)[0]
        require_same("the same seed twice: reset", second.reset(seed=case.seed)[0], begin)
        for step, action in enumerate(case.actions(first, length)):
            require_same(
                f"the same seed twice: step {step}", _advance(second, action), _advance(first, action)
            )


def check_rows_alone(case: Case, length: int) -> None:
    with case.env() as env:
        begin = env.reset(seed=case.seed)[0]
        actions = case.actions(env, length)
        together = [_advance(env, action) for action in actions]
    for row in range(case.num_envs):
        with case.env(1) as alone:
            obs = alone.reset(seed=[case.seed + row])[0]
            rule = f"env {row} of {case.num_envs}, and alone with its seed"
            require_same(f"{rule}: reset", _rows_of(begin, row), _rows_of(obs, 0))
            for step, action in enumerate(actions):
                seen = _rows_of(_advance(alone, action[row : row + 1]), 0)
                require_same(f"{rule}: step {step}", _rows_of(together[step], row), seen)


def check_chunk(case: Case, length: int) -> None:
    """Compares chunks of all envs with single steps of each env alone, over the end of an episode."""
    n_exec, chunk_length = 3, 4
    num_chunks = -(-length // n_exec)
    chunks: list[dict[str, Array]] = []
    with case.env() as env:
        env.reset(seed=case.seed)
        actions = case.actions(env, num_chunks * chunk_length)
        actions = actions.reshape(num_chunks, chunk_length, *actions.shape[1:])
        for chunk in actions:
            chunks.append(_advance_chunk(env, chunk.swapaxes(0, 1), n_exec))
    for row in range(case.num_envs):
        with case.env(1) as alone:
            alone.reset(seed=[case.seed + row])
            for index, chunk in enumerate(actions):
                seen = _repeat_step(alone, chunk[:n_exec, row : row + 1])
                require_same(
                    f"step_chunk and repeated step: env {row}, chunk {index}",
                    _rows_of(chunks[index], row),
                    seen,
                )


def _advance_chunk(env: VectorEnv, actions: Array, n_exec: int) -> dict[str, Array]:
    done = env.step_chunk(actions, n_exec)
    ended = done.terminated | done.truncated
    final = done.infos.get("final_obs", done.obs) if _is_same_step(env) else done.obs
    seen = {f"obs.{key}": value for key, value in done.obs.items()}
    for key, value in final.items():
        rows = ended.reshape(-1, *[1] * (value.ndim - 1))
        seen[f"final.{key}"] = np.where(rows, value, 0)
    seen |= {
        "reward": done.reward,
        "valid": done.valid,
        "terminated": done.terminated,
        "truncated": done.truncated,
    }
    seen |= {name: done.infos[name] for name in ("success", "executed_action")}
    if ended.any() and not _is_same_step(env):
        env.reset(options={"reset_mask": ended})
    return seen


def _repeat_step(env: VectorEnv, actions: Array) -> dict[str, Array]:
    """Does with `step` in one env what `_advance_chunk` does in many; rows without the leading axis."""
    n_exec, _, action_dim = actions.shape
    reward, valid = np.zeros(n_exec), np.zeros(n_exec, bool)
    executed = np.zeros((n_exec, action_dim), np.float32)
    success = ended = np.zeros(1, bool)
    obs: Obs = {}
    final: Obs = {}
    terminated = truncated = ended
    for k in range(n_exec):
        obs, step_reward, terminated, truncated, infos = env.step(actions[k])
        reward[k], valid[k], executed[k] = step_reward[0], True, infos["executed_action"][0]
        success = success | infos["success"]
        ended = terminated | truncated
        if ended[0]:
            final = infos["final_obs"] if _is_same_step(env) else obs
            break
    seen = {f"obs.{key}": value[0] for key, value in obs.items()}
    seen |= {
        f"final.{key}": (final[key][0] if ended[0] else np.zeros_like(value[0])) for key, value in obs.items()
    }
    seen |= {"reward": reward, "valid": valid, "terminated": terminated[0], "truncated": truncated[0]}
    seen |= {"success": success[0], "executed_action": executed}
    if ended[0] and not _is_same_step(env):
        env.reset(options={"reset_mask": ended})
    return seen


def check_state_rows(case: Case) -> None:
    with case.env() as env:
        if "set_state" not in env.caps:
            return
        env.reset(seed=case.seed)
        actions = case.actions(env, 6)
        obs = [env.step(action)[0] for action in actions[:2]][-1]
        rows = env.get_state()
        is_rows = rows.ndim == 2 and len(rows) == env.num_envs and rows.dtype == np.float64
        require(is_rows, "get_state", f"{rows.shape} {rows.dtype}", f"({env.num_envs}, n) float64")
        kept = rows.copy()
        moved = env.step(actions[2])[0]
        require(np.array_equal(rows, kept), "get_state: rows after the next step", "a change", "a copy")
        if env.num_envs > 1:
            mask = np.arange(env.num_envs) == 0
            partly = env.set_state(rows, mask)
            require(
                np.array_equal(partly["state"][1:], moved["state"][1:]),
                "set_state with a mask: the other envs",
                "a change",
                "none",
            )
        futures = []
        for _ in range(2):
            back = env.set_state(rows)
            require_near("set_state: observation", back, obs)
            futures.append([env.step(action)[0] for action in actions[3:5]])
        for first, second in zip(*futures, strict=True):
            require_same("set_state twice: what follows", second, first)


def require_near(rule: str, got: Obs, need: Obs) -> None:
    """Requires the same observation but for rounding: it may have been computed from the state anew."""
    for key, value in need.items():
        is_near = np.allclose(got[key].astype(float), value.astype(float), atol=1e-4)
        require(is_near, f"{rule}: {key}", got[key].tolist(), f"{value.tolist()}")


def check_resume(case: Case, length: int) -> None:
    with case.env() as env, case.env() as fresh:
        env.reset(seed=case.seed)
        actions = case.actions(env, 3 + length)
        seen = [_advance(env, action) for action in actions[:3]][-1]
        now = {key.removeprefix("after_reset."): seen[key] for key in seen if key.startswith("after_reset.")}
        state = env.state_dict()
        fresh.reset(seed=case.seed + 1000)
        if "set_state" not in env.caps:
            require_near("load_state_dict: observation", fresh.load_state_dict(state), now)
            return
        future = [_advance(env, action) for action in actions[3:]]
        require_near("load_state_dict: observation", fresh.load_state_dict(state), now)
        for step, action in enumerate(actions[3:]):
            require_same(f"after load_state_dict: step {step}", _advance(fresh, action), future[step])
