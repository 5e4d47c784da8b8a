"""The rules of `VectorEnv` and `Device` as checks for envs and devices of any package.

    from robot_rl.hal.conformance import check_vector_env
    check_vector_env(lambda num_envs: MyEnv(num_envs, horizon=20))

A broken rule raises `ConformanceError`, which says what it got and what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robot_rl.core.errors import DeviceError, LeaseError, RobotRLError
from robot_rl.hal import env_rules as rules
from robot_rl.hal.device import Device, DeviceSpec
from robot_rl.hal.env_rules import Case, ConformanceError, MakeEnv, refusal, require
from robot_rl.hal.health import Health
from robot_rl.hal.vector import Array, VectorEnv

__all__ = ["ConformanceError", "check_device", "check_vector_env"]

_MORE_STEPS = 3
"""Steps of comparisons after the first end of an episode."""


def check_vector_env(
    make_env: MakeEnv, *, num_envs: int = 3, seed: int = 7, max_steps: int = 400, deterministic: bool = True
) -> None:
    """Checks every rule of `robot_rl.hal.vector.VectorEnv`.

    Args:
        make_env: returns a fresh env with the given number of envs, all of one kind.
        num_envs: 1 for a device that exists only once.
        max_steps: an episode must end within as many control steps of random actions.
        deterministic: False for real arms; then nothing is run twice and compared.

    Raises:
        ConformanceError: names the rule.
    """
    _check_env(Case(make_env, num_envs, seed, max_steps), repeats=deterministic, compares_rows=deterministic)


def check_device(
    make_device: Callable[[], Device], *, max_steps: int = 400, deterministic: bool = True
) -> None:
    """Checks every rule of `robot_rl.hal.device.Device`, and those of the env it opens.

    A robot must also refuse NaN.

    Args:
        make_device: returns a fresh device, at rest and healthy.
        max_steps: as in `check_vector_env`.
        deterministic: as in `check_vector_env`; False for everything real.
    """
    device = make_device()
    spec = device.spec
    require(type(spec) is DeviceSpec, "device: spec", spec, "a DeviceSpec")
    health = device.health()
    require(
        type(health) is Health and health.usable,
        f"{spec.name}: health of a fresh device",
        health,
        "usable",
    )
    _check_fencing(device)
    _check_park(device)
    _check_safe_stop(device)
    device.close()
    device.close()
    if spec.kind == "robot":
        _check_refuses_nan(make_device())

    def open_env(num_envs: int) -> VectorEnv:
        return make_device().open(_all_slots(spec, 1))

    num_envs = open_env(1).num_envs
    # A row cannot be compared with itself alone where the device decides the number of rows.
    _check_env(
        Case(open_env, num_envs, 7, max_steps),
        repeats=deterministic and not spec.real,
        compares_rows=num_envs == 1,
    )


def _check_env(case: Case, *, repeats: bool, compares_rows: bool) -> None:
    rules.check_description(case)
    rules.check_reset(case)
    rules.check_some_seeds(case)
    rules.check_step(case)
    rules.check_arrays(case)
    rules.check_what_is_executed(case)
    rules.check_bad_actions(case)
    rules.check_fresh_arrays(case)
    length = rules.check_episode_end(case) + _MORE_STEPS
    if repeats:
        rules.check_same_seed(case, length)
        rules.check_next_episodes(case)
        rules.check_state_rows(case)
        rules.check_resume(case, length)
    if repeats and compares_rows:
        rules.check_rows_alone(case, length)
        rules.check_chunk(case, length)


# The rules of a device


@dataclass(frozen=True)
class _Lease:
    device: str
    token: int
    slot_ids: tuple[int, ...]
    holder: str = "conformance"


def _all_slots(spec: DeviceSpec, token: int) -> _Lease:
    return _Lease(spec.name, token, tuple(range(spec.slots)))


def _zeros(env: VectorEnv) -> Array:
    return np.zeros((env.num_envs, len(env.action_names)), np.float32)


def _check_fencing(device: Device) -> None:
    name, slots = device.spec.name, tuple(range(device.spec.slots))
    old = device.open(_all_slots(device.spec, 5))
    require(
        old.caps == device.spec.caps,
        f"{name}: caps of the env",
        sorted(old.caps),
        f"{sorted(device.spec.caps)}",
    )
    old.reset(seed=0)
    action = _zeros(old)
    old.step(action)
    other = refusal(lambda: device.open(_Lease(f"not_{name}", 9, slots)), LeaseError)
    require(other is not None, f"{name}: open with a lease of another device", "no error", "a LeaseError")
    stale = refusal(lambda: device.open(_all_slots(device.spec, 4)), LeaseError)
    require(
        stale is not None and "4" in stale and "5" in stale,
        f"{name}: open under token 4 after token 5",
        stale or "no error",
        "a LeaseError that names both",
    )
    new = device.open(_all_slots(device.spec, 6))
    new.reset(seed=0)
    overtaken = refusal(lambda: old.step(action), LeaseError)
    require(
        overtaken is not None and "5" in overtaken and "6" in overtaken,
        f"{name}: step under token 5 after token 6",
        overtaken or "no error",
        "a LeaseError that names both",
    )
    new.step(action)


def _check_park(device: Device) -> None:
    env = device.open(_all_slots(device.spec, 6))
    env.reset(seed=0)
    env.step(_zeros(env))
    env.park()
    require(device.health().usable, f"{device.spec.name}: health after park", "not usable", "usable")
    env.reset(seed=0)
    env.step(_zeros(env))


def _check_safe_stop(device: Device) -> None:
    name = device.spec.name
    env = device.open(_all_slots(device.spec, 7))
    env.reset(seed=0)
    device.safe_stop()
    device.safe_stop()
    require(not device.health().usable, f"{name}: health after safe_stop", "usable", "not usable")
    action = _zeros(env)
    message = refusal(lambda: env.step(action), DeviceError)
    require(message is not None, f"{name}: step after safe_stop", "no error", "a SafetyStopError")


def _check_refuses_nan(device: Device) -> None:
    name = device.spec.name
    env = device.open(_all_slots(device.spec, 1))
    env.reset(seed=0)
    action = _zeros(env) + np.float32(np.nan)
    message = refusal(lambda: env.step(action), RobotRLError)
    require(message is not None, f"{name}: step with a NaN action", "no error", "a SafetyStopError")
    device.close()
