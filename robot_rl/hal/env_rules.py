"""The rules of `VectorEnv`, one function each; `robot_rl.hal.conformance` runs them.

Random numbers come from the case's seed. Envs are compared byte for byte: a row among many
with the same row alone, chunks with single steps, and what follows a restored state with what
followed the first time, each across the end of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from robot_rl.core.arrays import is_array, namespace
from robot_rl.core.errors import RobotRLError
from robot_rl.hal.device import CAPS
from robot_rl.hal.host import HostEnv
from robot_rl.hal.vector import Array, Obs, VectorEnv

MakeEnv = Callable[[int], VectorEnv]
_ROUNDING_RAD = 1e-6


class ConformanceError(AssertionError):
    """An env or a device that breaks a rule of its contract."""


@dataclass(frozen=True)
class Case:
    """The env to check, and the number of envs and steps."""

    make_env: MakeEnv
    num_envs: int
    seed: int
    max_steps: int

    @contextmanager
    def env(self, num_envs: int | None = None) -> Generator[VectorEnv]:
        """Yields a fresh env in numpy arrays, and closes it."""
        env = self.make_env(self.num_envs if num_envs is None else num_envs)
        try:
            yield env if env.xp is np else HostEnv(env)
        finally:
            env.close()

    def actions(self, env: VectorEnv, steps: int) -> Array:
        """Returns (steps, num_envs of the case, A) actions, the same for every env of the case."""
        shape = (steps, self.num_envs, len(env.action_names))
        return np.random.default_rng(self.seed).uniform(-1.0, 1.0, shape).astype(np.float32)


def require(condition: bool, rule: str, got: Any, need: Any) -> None:
    """Raises ConformanceError unless the condition holds."""
    if not condition:
        raise ConformanceError(f"{rule}: got {got}, need {need}.")


def require_same(rule: str, got: Obs, need: Obs) -> None:
    """Requires two dicts of arrays to be the same bytes."""
    require(set(got) == set(need), rule, sorted(got), f"the keys {sorted(need)}")
    for key, value in need.items():
        if not np.array_equal(got[key], value, equal_nan=True):
            require(False, f"{rule}: {key!r} differs", got[key].tolist(), value.tolist())


def require_near(rule: str, got: Obs, need: Obs) -> None:
    """Requires the same observation but for rounding: it may be computed again from the state."""
    for key, value in need.items():
        is_near = np.allclose(got[key].astype(float), value.astype(float), atol=1e-4)
        require(is_near, f"{rule}: {key}", got[key].tolist(), value.tolist())


def refusal(call: Callable[[], Any], kind: type[Exception]) -> str | None:
    """Returns the message of the expected error, or None if there was none."""
    try:
        call()
    except kind as error:
        return str(error)
    return None


# One look at everything


def check_description(case: Case) -> None:
    """Checks the attributes that describe the env."""
    with case.env() as env:
        for name in ("task", "robot", "instruction"):
            value: object = getattr(env, name, None)
            require(isinstance(value, str) and value != "", name, value, "words")
        require(env.num_envs == case.num_envs, "num_envs", env.num_envs, case.num_envs)
        require(env.control_hz > 0, "control_hz", env.control_hz, "above 0")
        require(env.caps <= CAPS, "caps", sorted(env.caps), f"some of {sorted(CAPS)}")
        mode = env.metadata.get("autoreset_mode")
        modes = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
        require(mode in modes, "metadata['autoreset_mode']", mode, "SAME_STEP or DISABLED")
        single = env.single_observation_space
        require(isinstance(single, gymnasium.spaces.Dict), "single_observation_space", single, "a Dict")
        batched = gymnasium.vector.utils.batch_space(single, env.num_envs)
        require(env.observation_space == batched, "observation_space", env.observation_space, batched)
        action = gymnasium.spaces.Box(-1.0, 1.0, (len(env.action_names),), np.float32)
        require(env.single_action_space == action, "single_action_space", env.single_action_space, action)
        shape, names = _spaces(env)["state"].shape, len(env.state_names)
        require(shape == (env.num_envs, names), "state_names", f"{names} names", f"one each of {shape}")


def check_reset(case: Case) -> None:
    """Checks what a reset returns."""
    with case.env() as env:
        obs, infos = env.reset(seed=case.seed)
        _check_obs("reset", env, obs)
        require(type(infos) is dict, "reset: infos", type(infos), "a dict")


def check_step(case: Case) -> None:
    """Checks what a step returns."""
    with case.env() as env:
        env.reset(seed=case.seed)
        obs, reward, terminated, truncated, infos = env.step(case.actions(env, 1)[0])
        _check_obs("step", env, obs)
        rows = (env.num_envs,)
        is_reward = reward.shape == rows and reward.dtype.kind == "f"
        require(is_reward, "step: reward", f"{reward.shape} {reward.dtype}", f"{rows} floats")
        require(_is_finite(reward), "step: reward", reward.tolist(), "finite numbers")
        flags = {"terminated": terminated, "truncated": truncated, "infos['success']": infos.get("success")}
        for name, flag in flags.items():
            is_flag = getattr(flag, "shape", None) == rows and getattr(flag, "dtype", None) == np.bool_
            require(is_flag, f"step: {name}", flag, f"{rows} bool")
        commanded = np.asarray(infos.get("commanded_action"), np.float32)
        is_action = env.action_space.contains(commanded)
        require(is_action, "step: infos['commanded_action']", commanded, env.action_space)


def check_arrays(case: Case) -> None:
    """Checks that every array is of the env's kind and on its device."""
    env = case.make_env(case.num_envs)
    try:
        begun = env.reset(seed=case.seed)
        stepped = env.step(env.xp.asarray(case.actions(env, 1)[0], device=env.device))
    finally:
        env.close()
    for rule, shown in (("reset", begun), ("step", stepped)):
        for at, array in _arrays(shown, rule):
            got, need = (namespace(array).__name__, str(array.device)), (env.xp.__name__, str(env.device))
            require(got == need, at, f"an array of {got[0]} on {got[1]}", f"one of {need[0]} on {need[1]}")


def _arrays(tree: Any, at: str) -> Iterator[tuple[str, Array]]:
    """Yields the arrays of nested tuples and dicts, and where they are."""
    if is_array(tree):
        yield at, tree
    elif isinstance(tree, tuple | dict):
        branches: Any = cast("dict[str, Any]", tree).items() if isinstance(tree, dict) else enumerate(tree)
        for key, branch in branches:
            yield from _arrays(branch, f"{at}[{key!r}]")


def check_what_is_executed(case: Case, steps: int = 8) -> None:
    """Checks that an env reports the commanded action and the targets after safety.

    The actions leave their range and change sign, faster than an arm may follow. The reported targets
    must be within the arm's limits all the same.
    """
    with case.env() as env:
        env.reset(seed=case.seed)
        before: Array | None = None
        for action in case.actions(env, steps):
            asked = 1.5 * np.sign(action)
            obs, _, terminated, truncated, infos = env.step(asked)
            commanded, clipped = infos["commanded_action"], np.clip(asked, -1.0, 1.0)
            is_clipped = np.array_equal(commanded, clipped)
            require(is_clipped, "step: infos['commanded_action']", commanded.tolist(), clipped.tolist())
            if env.limits is None:
                continue
            target_rad = np.asarray(infos.get("executed_target_rad", ()), float)
            _check_target(env, target_rad, before)
            ended = terminated | truncated
            _reset_ended(env, ended, obs)
            before = np.where(ended[:, None], np.nan, target_rad)


def _check_target(env: VectorEnv, target_rad: Array, before: Array | None) -> None:
    limits, at = env.limits, "step: infos['executed_target_rad']"
    assert limits is not None
    shape = (env.num_envs, limits.num_joints)
    require(target_rad.shape == shape, at, target_rad.shape, f"{shape}, a target for each joint")
    require(_is_finite(target_rad), at, "NaN or infinity", "finite numbers")
    low, high = np.asarray(limits.position_low_rad), np.asarray(limits.position_high_rad)
    is_inside = (target_rad >= low - _ROUNDING_RAD) & (target_rad <= high + _ROUNDING_RAD)
    require(bool(is_inside.all()), at, target_rad.tolist(), f"positions from {low} to {high}")
    if before is not None:
        most = limits.target_rate_rad_s / env.control_hz
        change = np.nan_to_num(np.abs(target_rad - before))
        rule = f"{at}: change within a control step"
        require(bool((change <= most + _ROUNDING_RAD).all()), rule, change.tolist(), f"at most {most}")


def check_bad_actions(case: Case) -> None:
    """Checks that wrong shapes are refused with both numbers, and that NaN has no effect."""
    with case.env() as env:
        env.reset(seed=case.seed)
        need = len(env.action_names)
        wrong = np.zeros((env.num_envs, need + 1), np.float32)
        calls = {"step": lambda: env.step(wrong), "step_chunk": lambda: env.step_chunk(wrong[:, None], 1)}
        for name, call in calls.items():
            message, rule = refusal(call, RobotRLError), f"{name} with one action too many"
            require(message is not None, rule, "no error", "a RobotRLError")
            names_both = str(need) in str(message) and str(need + 1) in str(message)
            require(names_both, rule, f"the message {message!r}", f"one that names {need + 1} and {need}")
        with_nan = case.actions(env, 1)[0]
        with_nan[0, 0] = np.nan
        try:
            obs, reward, *_ = env.step(with_nan)
        except RobotRLError:
            return
        _check_obs("step with a NaN action", env, obs)
        require(_is_finite(reward), "step with a NaN action: reward", reward.tolist(), "finite numbers")


def check_fresh_arrays(case: Case) -> None:
    """Checks that returned arrays belong to the caller: they do not change later."""
    with case.env() as env:
        first, _ = env.reset(seed=case.seed)
        for when, action in zip(("reset", "step"), case.actions(env, 2), strict=True):
            kept = {key: value.copy() for key, value in first.items()}
            second = env.step(action)[0]
            require_same(f"an observation returned by {when} changed in the next step", first, kept)
            first = second


# Ends of episodes


def check_episode_end(case: Case) -> int:
    """Checks the first end of an episode and returns the number of its step."""
    with case.env() as env:
        env.reset(seed=case.seed)
        for step, action in enumerate(case.actions(env, case.max_steps), start=1):
            obs, _, terminated, truncated, infos = env.step(action)
            ended = terminated | truncated
            if not ended.any():
                early = bool(np.any(infos.get("_final_obs", False)))
                require(not early, "final_obs", "some", "none where no episode ended")
            elif _is_same_step(env):
                _check_final_obs(env, obs, ended, infos)
                return step
            else:
                _check_masked_reset(env, obs, ended)
                return step
    raise ConformanceError(
        f"no episode ended in {case.max_steps} steps: give make_env a shorter horizon, "
        "or max_steps a larger number."
    )


def _check_final_obs(env: VectorEnv, obs: Obs, ended: Array, infos: dict[str, Any]) -> None:
    final, mask = infos.get("final_obs"), infos.get("_final_obs")
    is_mask = mask is not None and np.array_equal(mask, ended)
    require(is_mask, "SAME_STEP: infos['_final_obs']", mask, f"terminated | truncated = {ended.tolist()}")
    require(type(final) is dict, "SAME_STEP: infos['final_obs']", type(final), "a dict of batched arrays")
    assert final is not None
    _check_obs("final_obs", env, final)
    for row in np.flatnonzero(ended):
        is_old = all(np.array_equal(obs[key][row], final[key][row]) for key in obs)
        rule = f"SAME_STEP: observation of env {row} after its end"
        require(not is_old, rule, "final_obs again", "the first of the next episode")


def _check_masked_reset(env: VectorEnv, obs: Obs, ended: Array) -> None:
    mask = np.zeros_like(ended)
    mask[np.flatnonzero(ended)[0]] = True
    after, _ = env.reset(options={"reset_mask": mask})
    _check_obs("reset with a mask", env, after)
    for key, value in after.items():
        is_kept = np.array_equal(value[~mask], obs[key][~mask])
        require(is_kept, f"reset with a mask: {key} of the other envs", "a change", "none")


# Twice the same


def check_same_seed(case: Case, length: int) -> None:
    """Checks that the same seed and actions give the same bytes."""
    rule = "the same seed twice"
    with case.env() as first, case.env() as second:
        begin = first.reset(seed=case.seed)[0]
        require_same(f"{rule}: reset", second.reset(seed=case.seed)[0], begin)
        for step, action in enumerate(case.actions(first, length)):
            need = _advance(first, action)
            require_same(f"{rule}: step {step}", _advance(second, action), need)


def check_some_seeds(case: Case) -> None:
    """Checks that a list of seeds may have None, for envs that go on to their next episode."""
    with case.env() as env:
        for first in (case.seed, None):
            seeds = [first, *[None] * (env.num_envs - 1)]
            _check_obs(f"reset(seed={seeds})", env, env.reset(seed=seeds)[0])


def check_next_episodes(case: Case) -> None:
    """Checks that with such a list env 0 begins at its seed, and the others go on as without seeds."""
    first = case.seed + 1000
    with case.env() as some, case.env() as others, case.env() as seeded:
        some.reset(seed=case.seed)
        others.reset(seed=case.seed)
        seeds = [first, *[None] * (case.num_envs - 1)]
        begin, after = some.reset(seed=seeds)[0], others.reset()[0]
        need = seeded.reset(seed=first)[0]
        for row in range(case.num_envs):
            rule = f"reset(seed={seeds}): env {row}"
            require_same(rule, _rows_of(begin, row), _rows_of(after if row else need, row))


def check_rows_alone(case: Case, length: int) -> None:
    """Checks that env i of many is env i alone, reset with its seed."""
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
    """Compares chunks of all envs with single steps of each env alone, over the end of an episode.

    Env i is i steps ahead, so that episodes end at different steps of a chunk and rows wait.
    """
    n_exec, chunk_length = 3, 4
    num_chunks = -(-length // n_exec)
    with case.env() as env:
        env.reset(seed=case.seed)
        ahead = case.actions(env, case.num_envs - 1)
        for k, action in enumerate(ahead):
            obs, _, terminated, truncated, _ = env.step_masked(action, np.arange(case.num_envs) > k)
            _reset_ended(env, terminated | truncated, obs)
        actions = case.actions(env, num_chunks * chunk_length)
        actions = actions.reshape(num_chunks, chunk_length, *actions.shape[1:])
        chunks = [_advance_chunk(env, chunk.swapaxes(0, 1), n_exec) for chunk in actions]
    for row in range(case.num_envs):
        with case.env(1) as alone:
            alone.reset(seed=[case.seed + row])
            for action in ahead[:row]:
                _advance(alone, action[row : row + 1])
            for index, chunk in enumerate(actions):
                seen = _repeat_step(alone, chunk[:n_exec, row : row + 1])
                rule = f"step_chunk and repeated step: env {row}, chunk {index}"
                require_same(rule, _rows_of(chunks[index], row), seen)


def check_state_rows(case: Case) -> None:
    """Checks that a state row, put back, determines what follows."""
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
        partly = env.set_state(rows, np.arange(env.num_envs) == 0)
        is_kept = np.array_equal(partly["state"][1:], moved["state"][1:])
        require(is_kept, "set_state with a mask: the other envs", "a change", "none")
        futures: list[list[Obs]] = []
        for _ in range(2):
            require_near("set_state: observation", env.set_state(rows), obs)
            futures.append([env.step(action)[0] for action in actions[3:5]])
        for first, second in zip(*futures, strict=True):
            require_same("set_state twice: what follows", second, first)


def check_resume(case: Case, length: int) -> None:
    """Checks that a state dict, loaded into a fresh env, goes on to the same bytes."""
    with case.env() as env, case.env() as fresh:
        env.reset(seed=case.seed)
        actions = case.actions(env, 3 + length)
        seen = [_advance(env, action) for action in actions[:3]][-1]
        now = {key.removeprefix("now."): value for key, value in seen.items() if key.startswith("now.")}
        state = env.state_dict()
        future = [_advance(env, action) for action in actions[3:]]
        fresh.reset(seed=case.seed + 1000)
        require_near("load_state_dict: observation", fresh.load_state_dict(state), now)
        if "set_state" not in env.caps:
            return  # an arm stays where it is, whatever is loaded
        for step, action in enumerate(actions[3:]):
            require_same(f"after load_state_dict: step {step}", _advance(fresh, action), future[step])


# The results of one step or one chunk, in comparable form


def _is_same_step(env: VectorEnv) -> bool:
    return env.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP


def _is_finite(value: Array) -> bool:
    return bool(np.isfinite(value).all())


def _spaces(env: VectorEnv) -> dict[str, gymnasium.spaces.Box]:
    space = env.observation_space
    assert isinstance(space, gymnasium.spaces.Dict)
    return {key: box for key, box in space.spaces.items() if isinstance(box, gymnasium.spaces.Box)}


def _check_obs(rule: str, env: VectorEnv, obs: Any) -> None:
    require(type(obs) is dict, f"{rule}: observation", type(obs), "a dict of arrays")
    spaces = _spaces(env)
    require(set(obs) == set(spaces), f"{rule}: observation keys", sorted(obs), sorted(spaces))
    for key, box in spaces.items():
        value, at = obs[key], f"{rule}: {key}"
        got, need = f"{value.shape} {value.dtype}", f"{box.shape} {box.dtype}"
        require(got == need, at, got, need)
        require(_is_finite(value), at, "NaN or infinity", "finite numbers")
        require(box.contains(value), at, "values outside of the space", box)


def _rows_of(values: dict[str, Array], row: int) -> dict[str, Array]:
    return {key: value[row] for key, value in values.items()}


def _reset_ended(env: VectorEnv, ended: Array, obs: Obs) -> Obs:
    """Returns the present observation, after resetting what ended if the env does not do it."""
    if ended.any() and not _is_same_step(env):
        return env.reset(options={"reset_mask": ended})[0]
    return obs


def _advance(env: VectorEnv, actions: Array) -> dict[str, Array]:
    """Takes one step and returns all that was seen; `now.*` is after the reset of what ended."""
    obs, reward, terminated, truncated, infos = env.step(actions)
    now = _reset_ended(env, terminated | truncated, obs)
    seen = {"reward": reward, "terminated": terminated, "truncated": truncated}
    seen |= {name: infos[name] for name in ("success", "commanded_action")}
    if "executed_target_rad" in infos:
        seen["executed_target_rad"] = infos["executed_target_rad"]
    seen |= {f"obs.{key}": value for key, value in obs.items()}
    return seen | {f"now.{key}": value for key, value in now.items()}


def _advance_chunk(env: VectorEnv, actions: Array, n_exec: int) -> dict[str, Array]:
    done = env.step_chunk(actions, n_exec)
    ended = done.terminated | done.truncated
    seen = {"reward": done.reward, "valid": done.valid}
    seen |= {"terminated": done.terminated, "truncated": done.truncated}
    seen |= {name: done.infos[name] for name in ("success", "commanded_action")}
    seen |= {f"obs.{key}": value for key, value in done.obs.items()}
    for key, value in done.infos.get("final_obs", done.obs).items():
        rows = ended.reshape(-1, *[1] * (value.ndim - 1))
        seen[f"final.{key}"] = np.where(rows, value, 0)
    _reset_ended(env, ended, done.obs)
    return seen


def _repeat_step(env: VectorEnv, actions: Array) -> dict[str, Array]:
    """Does `_advance_chunk` by `step` in one env; the results have no leading axis."""
    n_exec, _, action_dim = actions.shape
    reward, valid = np.zeros(n_exec), np.zeros(n_exec, bool)
    commanded = np.zeros((n_exec, action_dim), np.float32)
    success = terminated = truncated = ended = np.zeros(1, bool)
    obs: Obs = {}
    final: Obs = {}
    for k in range(n_exec):
        obs, step_reward, terminated, truncated, infos = env.step(actions[k])
        reward[k], valid[k], commanded[k] = step_reward[0], True, infos["commanded_action"][0]
        success = success | infos["success"]
        ended, final = terminated | truncated, infos.get("final_obs", obs)
        if ended[0]:
            break
    seen = {"reward": reward, "valid": valid, "commanded_action": commanded}
    seen |= {"success": success[0], "terminated": terminated[0], "truncated": truncated[0]}
    seen |= {f"obs.{key}": value[0] for key, value in obs.items()}
    seen |= {f"final.{key}": value[0] * ended[0] for key, value in final.items()}
    _reset_ended(env, ended, obs)
    return seen
