"""Fake envs and robots that misbehave on purpose: for tests, loops without a simulator, and conformance.

`FakeEnv` counts: an observation and a reward show their env, episode and step, so that tests see any leak
across the end of an episode. `FakeRobot` follows its script: it answers late, drops the connection, measures
NaN, stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AutoresetMode

from robot_rl.core.clock import Clock, ManualClock
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.hal.device import DeviceSpec, Fence, LeaseLike
from robot_rl.hal.health import Health, HealthConfig, HealthMonitor
from robot_rl.hal.leased import LeasedEnv
from robot_rl.hal.safety import SafetyEnvelope, SafetyLimits
from robot_rl.hal.vector import Array, Obs, VectorEnv, next_episodes, row_mask, set_spaces

STEP_M = 0.1
"""How far a full-scale action moves the point of `FakeEnv`."""

Lengths = int | Sequence[int | None] | None


class FakeEnv(VectorEnv):
    """A point that follows its actions, and counts; deterministic to the bit.

    `state` is (step, episode, seed, x0, x1, ...): control steps since the episode began, episodes
    since the seed was given, the seed, and the position, which starts at a draw of (seed,
    episode) in [-1, 1). The reward of step k is k. An episode that terminates is a success.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        action_dim: int = 2,
        terminate_after: Lengths = None,
        truncate_after: Lengths = 10,
        autoreset: Literal["same_step", "disabled"] = "same_step",
        control_hz: float = 20.0,
    ) -> None:
        """Makes `num_envs` points; episode lengths in control steps are for all envs or one for each."""
        self.num_envs = num_envs
        self.task, self.robot, self.instruction = "count", "point", "Count to the end."
        self.control_hz = control_hz
        self.caps = frozenset({"set_state", "fork", "batch"})
        self.action_names = tuple(f"d{i}" for i in range(action_dim))
        self.state_names = ("step", "episode", "seed", *(f"x{i}" for i in range(action_dim)))
        set_spaces(self)
        mode = AutoresetMode.SAME_STEP if autoreset == "same_step" else AutoresetMode.DISABLED
        self.metadata = {"autoreset_mode": mode, "render_modes": []}
        self._autoreset = autoreset == "same_step"
        self._terminate_after = _lengths(terminate_after, num_envs, "terminate_after")
        self._truncate_after = _lengths(truncate_after, num_envs, "truncate_after")
        self._seed = np.arange(num_envs, dtype=np.uint64)
        self._episode = np.zeros(num_envs, dtype=np.uint64)
        self._step = np.zeros(num_envs, dtype=np.int64)
        self._x = np.zeros((num_envs, action_dim))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Begins an episode in all envs, or in those of `options["reset_mask"]`."""
        options = options or {}
        unknown = set(options) - {"reset_mask"}
        if unknown:
            raise ConfigError(f"{self.task}.reset: unknown options {sorted(unknown)}; allowed: reset_mask")
        mask = row_mask(options.get("reset_mask"), self.num_envs)
        self._seed, episodes = next_episodes(seed, mask, self._seed, self._episode, at=self.task)
        self._begin(mask, episodes)
        return self._observe(), {"success": np.zeros(self.num_envs, bool)}

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Moves and counts the active rows; see `VectorEnv.step_masked`."""
        commanded = _checked_actions(self, actions)
        if not np.isfinite(commanded).all():
            raise ConfigError(f"{self.task}: got actions that are not finite: {commanded.tolist()}")
        rows = row_mask(active, self.num_envs)
        self._x = np.where(rows[:, None], self._x + STEP_M * commanded, self._x)
        self._step = self._step + rows
        terminated = rows & (self._step == self._terminate_after)
        truncated = rows & (self._step == self._truncate_after) & ~terminated
        reward = np.where(rows, self._step, 0).astype(np.float64)
        infos: dict[str, Any] = {"success": terminated.copy(), "commanded_action": commanded}
        obs, ended = self._observe(), terminated | truncated
        if self._autoreset and ended.any():
            infos["final_obs"], infos["_final_obs"] = obs, ended
            self._begin(ended, self._episode + np.uint64(1))
            obs = self._observe()
        return obs, reward, terminated, truncated, infos

    def _begin(self, mask: Array, episode: Array) -> None:
        self._episode = np.where(mask, episode, self._episode)
        self._step = np.where(mask, 0, self._step)
        start = EpisodeRng(self._seed, self._episode).uniform(-1.0, 1.0, size=self._x.shape[1])
        self._x = np.where(mask[:, None], start, self._x)

    def _observe(self) -> Obs:
        count = np.stack([self._step, self._episode, self._seed], axis=1).astype(np.float64)
        return {"state": np.concatenate([count, self._x], axis=1).astype(np.float32)}

    def get_state(self) -> Array:
        """Returns (B, 2 + A): step, episode, position; the seed is the env's own."""
        return np.column_stack([self._step, self._episode, self._x]).astype(np.float64)

    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        need = (self.num_envs, 2 + self._x.shape[1])
        if np.shape(rows) != need:
            raise ConfigError(f"{self.task}.set_state: got rows of shape {np.shape(rows)}, need {need}")
        chosen = row_mask(mask, self.num_envs)
        self._step = np.where(chosen, rows[:, 0], self._step).astype(np.int64)
        self._episode = np.where(chosen, rows[:, 1], self._episode).astype(np.uint64)
        self._x = np.where(chosen[:, None], rows[:, 2:], self._x)
        return self._observe()

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.get_state(), "seed": self._seed.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        self._seed = np.asarray(state["seed"], np.uint64).copy()
        return self.set_state(state["state"])


# A robot with a script


@dataclass(frozen=True)
class Behaviour:
    """The behaviour of the fake robot in one control step."""

    kind: Literal["ok", "late", "drop", "faulty", "freeze", "protective_stop"] = "ok"
    age_s: float = 0.0
    """Age of the observation when it arrives."""


ok = Behaviour()
"""Answers at once."""


def late(ms: float) -> Behaviour:
    """Answers with an observation that is `ms` milliseconds old."""
    return Behaviour("late", ms / 1e3)


def drop() -> Behaviour:
    """Loses the connection, until `FakeRobot.reconnect`."""
    return Behaviour("drop")


def faulty() -> Behaviour:
    """Measures NaN in joint 0."""
    return Behaviour("faulty")


def freeze() -> Behaviour:
    """Measures the same as before, and does not move."""
    return Behaviour("freeze")


def protective_stop() -> Behaviour:
    """Stops by itself and latches, as an arm does after a collision."""
    return Behaviour("protective_stop")


FAKE_LIMITS = SafetyLimits(
    position_low_rad=(-1.0, -1.0, -1.0),
    position_high_rad=(1.0, 1.0, 1.0),
    velocity_rad_s=(2.0, 2.0, 2.0),
    acceleration_rad_s2=(10.0, 10.0, 10.0),
    effort_n_m=(10.0, 10.0, 10.0),
    max_observation_age_s=0.03,
)
FAKE_DELTA_RAD = 0.1
"""Joint step of a full-scale action."""


class FakeRobot:
    """A `Device`: a three-joint arm that reaches its target one control step later.

    Each control step takes one entry of the script; after the script all is ok. A failure is an exception for
    the caller, and the env (`LeasedEnv`) counts it in `health`.
    """

    def __init__(
        self,
        script: Sequence[Behaviour] = (),
        *,
        name: str = "fake_arm",
        clock: Clock | None = None,
        limits: SafetyLimits = FAKE_LIMITS,
        control_hz: float = 20.0,
        max_episode_steps: int = 20,
        health: HealthConfig | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.script = list(script)
        self.limits = limits
        self.max_episode_steps = max_episode_steps
        self.connected = True
        self.position_rad = np.zeros(limits.num_joints)
        self.sent: list[Array] = []
        """Joint targets (n,) that reached the arm."""
        self.safety = SafetyEnvelope(limits, control_dt_s=1.0 / control_hz, real=True, clock=self.clock)
        self.spec = DeviceSpec(name=name, kind="robot", control_hz=control_hz, labels={"model": "fake"})
        self.monitor = HealthMonitor(name, health, self.clock)
        self._fence = Fence(name)

    def open(self, lease: LeaseLike) -> VectorEnv:
        self.require_ready()
        self._fence.admit(lease)
        return LeasedEnv(FakeRobotEnv(self), self._fence, lease, self.monitor)

    def health(self) -> Health:
        return self.monitor.health()

    def safe_stop(self) -> None:
        if self.safety.stopped is None:
            self.safety.trip("asked to", by="safe_stop")
            self.monitor.stop("safe_stop")

    def clear(self, by: str) -> None:
        """Lets a person lift the stop and the quarantine; the arm is then tried, not yet trusted."""
        self.safety.clear(by)
        self.monitor.recover(by)

    def close(self) -> None:
        self.connected = False

    def reconnect(self) -> None:
        self.connected = True

    def require_ready(self) -> None:
        """Passes if the arm can be commanded.

        Raises:
            DeviceError: disconnected, quarantined or stopped.
        """
        if not self.connected:
            raise DeviceError(f"device {self.spec.name}: disconnected; check the cable, then reconnect().")
        self.safety.require_clear()
        self.monitor.require_usable()

    def act(self, target_rad: Array) -> tuple[Array, Array]:
        """Sends one target (n,), as far as safety allows; returns the sent target and the measured state."""
        self.require_ready()
        behaviour = self.script.pop(0) if self.script else ok
        self._disturb(behaviour)
        sent, _ = self.safety.filter(
            target_rad[None], self.position_rad[None], np.zeros((1, len(target_rad)))
        )
        self.sent.append(sent[0])
        reached = self.position_rad if behaviour.kind == "freeze" else sent[0]
        velocity = (reached - self.position_rad) * float(self.spec.control_hz or 1.0)
        self.position_rad = reached.copy()
        self.safety.observe(behaviour.age_s)
        return sent[0], np.concatenate([self.position_rad, velocity])

    def _disturb(self, behaviour: Behaviour) -> None:
        """Fails as the script says, before the target reaches the arm."""
        name = self.spec.name
        if behaviour.kind == "drop":
            self.connected = False
            raise DeviceError(
                f"device {name}: connection lost in the middle of a step; check it, then reconnect()."
            )
        if behaviour.kind == "faulty":
            raise DeviceError(
                f"device {name}: joint 0 measures nan; the observation is refused, the target not sent."
            )
        if behaviour.kind == "protective_stop":
            self.safety.trip("protective stop of the arm", by=name)
            self.safety.require_clear()


class FakeRobotEnv(VectorEnv):
    """One env on a `FakeRobot`; no autoreset, as on every arm.

    `state` is joint positions, then velocities; an action is a joint step in units of
    `FAKE_DELTA_RAD`. A row ends by truncation only.
    """

    def __init__(self, robot: FakeRobot) -> None:
        self._robot = robot
        joints = range(robot.limits.num_joints)
        self.num_envs = 1
        self.task, self.robot, self.instruction = "move", robot.spec.name, "Move."
        self.control_hz, self.limits = float(robot.spec.control_hz or 1.0), robot.limits
        self.caps = robot.spec.caps
        self.action_names = tuple(f"joint{i}.delta" for i in joints)
        self.state_names = (*(f"joint{i}.pos" for i in joints), *(f"joint{i}.vel" for i in joints))
        set_spaces(self)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}
        self._step = 0
        self._state = np.zeros(2 * len(joints), np.float32)
        self._target_rad = np.zeros(len(joints))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Puts the arm at zero; a seed changes nothing, for a real arm has none."""
        if row_mask((options or {}).get("reset_mask"), 1)[0]:
            self._robot.require_ready()
            self._robot.safety.reset()
            self._robot.position_rad[:] = self._target_rad[:] = 0.0
            self._state, self._step = np.zeros_like(self._state), 0
        return self._observe(), {"success": np.zeros(1, bool)}

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Commands the arm; `executed_target_rad` is what safety let through."""
        commanded = _checked_actions(self, actions)
        is_active = bool(row_mask(active, 1)[0])
        if is_active:
            step_rad = FAKE_DELTA_RAD * commanded[0].astype(np.float64)
            self._target_rad, measured = self._robot.act(self._robot.position_rad + step_rad)
            self._state = measured.astype(np.float32)
            self._step += 1
        truncated = np.array([is_active and self._step >= self._robot.max_episode_steps])
        infos = {
            "success": np.zeros(1, bool),
            "commanded_action": commanded,
            "executed_target_rad": self._target_rad[None].copy(),
        }
        return self._observe(), np.zeros(1), np.zeros(1, bool), truncated, infos

    def _observe(self) -> Obs:
        return {"state": self._state[None].copy()}

    def park(self) -> None:
        """Sends the arm to zero, as far as safety allows in one step."""
        self._robot.act(np.zeros_like(self._robot.position_rad))

    def safe_stop(self) -> None:
        self._robot.safe_stop()

    def state_dict(self) -> dict[str, Any]:
        """Returns the step and the last measured state; only the arm knows its true position."""
        return {"step": self._step, "state": self._state.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        self._step, self._state = int(state["step"]), state["state"].copy()
        return self._observe()


def _checked_actions(env: VectorEnv, actions: Array) -> Array:
    actions = np.asarray(actions, np.float32)
    need = (env.num_envs, len(env.action_names))
    if actions.shape != need:
        raise ConfigError(
            f"{env.task}: got actions of shape {actions.shape}, need {need}: {', '.join(env.action_names)}"
        )
    return np.clip(actions, -1.0, 1.0)


def _lengths(given: Lengths, num_envs: int, name: str) -> Array:
    """Returns (B,) lengths, -1 where the episode never ends that way."""
    each = [given] * num_envs if given is None or isinstance(given, int) else list(given)
    if len(each) != num_envs:
        raise ConfigError(f"FakeEnv.{name}: got {len(each)} lengths, need {num_envs}, one an env")
    if any(length is not None and length < 1 for length in each):
        raise ConfigError(f"FakeEnv.{name}: got {each}, allowed: 1 or more, or None")
    return np.array([-1 if length is None else length for length in each])
