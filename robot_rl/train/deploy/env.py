"""One arm behind its supervisor, as an env: training and evaluation use it as they use simulation.

    measured --Mirror--> observation -> policy -> action --Mirror--> joint targets -> supervisor -> arm

A control step is a period of the task's rate at absolute deadlines. Joint targets are made from the
newest measurement by the code of simulation, and hold for one period; the targets of the policy's
planned actions follow them in the same plan, so that a late step does not jerk. n arm joints, A action dim.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from robot_rl.core.clock import Clock
from robot_rl.core.errors import (
    ConfigError,
    DeviceError,
    DriverGoneError,
    SafetyStopError,
    StaleObservationError,
)
from robot_rl.core.seeding import EVAL_SEED_START, EpisodeRng
from robot_rl.hal.vector import Array, Obs, VectorEnv, given_seeds
from robot_rl.real.client import ArmClient
from robot_rl.real.drivers.rest import STILL_SHARE
from robot_rl.real.messages import DRIVER_GONE, Plan, Status
from robot_rl.real.sensors import Sensors
from robot_rl.real.station import StationConfig
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.spaces import observation_spaces
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.deploy.measured import Measured, Scene
from robot_rl.train.deploy.pace import Pace, RunningMedian, Sleep

BY = "robot-rl"
"""Name of this client in the supervisor's journal."""
_SETTLE_S = 5.0
"""Longest wait for the first measurements of an episode, and for an arm to rest before it."""
_REST_S = 0.2
"""So long a simulated arm on the ROS graph rests before its scene is put back: holds are repeated every 0.1 s
until it does, and one that is still on its way then would pull the arm back to where it was before."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How one control step went."""

    latency_s: float
    """From the measurement behind the observation to the supervisor following the plan; NaN if it did
    not say so within the step."""
    act_s: float
    """From the observation to the plan: what the policy took."""
    state_age_s: float
    """How old the joint state was when it was observed."""
    picture_age_s: float
    """The same of the oldest picture, since it arrived; NaN without pictures."""
    late: bool


class StationEnv(VectorEnv):
    """A station with one arm; autoreset DISABLED."""

    def __init__(
        self,
        station: StationConfig,
        config: EnvConfig,
        arm: ArmClient,
        sensors: Sensors,
        *,
        compensate: bool = True,
        ask: Callable[[str], None] | None = None,
        clock: Clock | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        """Takes an arm that is at rest.

        Args:
            station: where it stands.
            config: the task, as in training.
            arm: its supervisor.
            sensors: its cameras and trackers.
            compensate: show and command what will be so when the command takes effect, by what
                latency was measured and how fast things move.
            ask: has a person put back the scene of a real arm, and returns when they have.
            clock: monotonic.
            sleep: of the same clock.
        """
        self.mirror = Mirror(config)
        """The task in the terms of simulation: what was observed last."""
        env = self.mirror.env
        self.num_envs = 1
        self.task, self.robot, self.instruction = env.task, station.robot, env.instruction
        self.control_hz, self.caps, self.horizon = env.control_hz, frozenset[str](), env.horizon
        self.state_names, self.action_names = env.state_names, env.action_names
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.DISABLED}
        self.single_action_space, self.action_space = env.single_action_space, env.action_space
        self.single_observation_space, self.observation_space = observation_spaces(
            config, len(self.state_names), 1
        )
        self.station = station
        self._arm, self._sensors, self._ask, self._compensate = arm, sensors, ask, compensate
        self.on_close: Callable[[], None] = lambda: None
        """Ends what the arm runs in, once it is let go."""
        self._scene = Scene(station, config, self.mirror)
        self._pace = Pace(self.control_hz, clock, sleep)
        self._act_ns, self._way_ns = RunningMedian(), RunningMedian()
        self._measured: Measured | None = None
        self._obs: Obs = {}
        self._picture_stamp_ns: dict[str, int] = {}
        self._observed_ns = self._elapsed = 0
        self._seed, self._episode = 0, 0
        self._number = -1
        self._is_running = self._is_late = self._has_followed = False
        self._verdict = (False, False, 0.0)
        self._planned: Array = np.zeros((0, len(self.action_names)), np.float32)
        self.limits = station.limits
        self._still_rad_s = STILL_SHARE * np.asarray(station.limits.velocity_rad_s)
        self._executed_rad: Array = np.asarray(station.home_rad)
        self.target_rad: Array = np.full(len(station.joints), np.nan)
        """(n,) what the last action asked of the joints, before safety."""
        self.timing: list[Timing] = []
        """Of the steps of this episode."""

    @property
    def late(self) -> int:
        """Control steps that began too late, since the env was made."""
        return self._pace.late

    @property
    def measured(self) -> Measured:
        """What the last observation was made of."""
        assert self._measured is not None, "reset comes first"
        return self._measured

    def show(self, measured: Measured) -> Obs:
        """Shows the mirror a measurement of before, for pictures; returns its observation."""
        return self._scene.show(measured)

    def set_planned_actions(self, actions: Array) -> None:
        """Sets the actions (k, A) after the next one: the tail of a plan, if no other action comes."""
        self._planned = np.asarray(actions, np.float32)

    # Episodes

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Puts arm and scene back, and observes; a person puts back what a program cannot.

        Args:
            seed: of the episode, for simulated stations; None begins another one of the same seed.
            options: `reset_mask` only: matter cannot be put into a state.
        """
        options = options or {}
        if set(options) - {"reset_mask"}:
            raise ConfigError(f"{self.task}.reset: unknown options {sorted(options)}; allowed: reset_mask")
        if not np.all(options.get("reset_mask", True)):
            return dict(self._obs), {"success": np.zeros(1, bool)}
        self._seed, self._episode = self._next_episode(seed)
        self.pause()
        self._put_back(self._episode_seed())
        self._scene.begin()
        self._elapsed, self._measured = 0, None
        self._planned, self.timing = self._planned[:0], []
        self._settle()
        obs = self._observe()
        return obs, {"success": np.array([self._verdict[0]])}

    def _next_episode(self, seed: int | Sequence[int | None] | None) -> tuple[int, int]:
        (given,), (is_given,) = given_seeds(seed, 1, at=self.task)
        return (int(given), 0) if is_given else (self._seed, self._episode + 1)

    def _episode_seed(self) -> int:
        """Returns the seed itself for its first episode, and others from it for the next."""
        if self._episode == 0:
            return self._seed
        return int(EpisodeRng(self._seed, self._episode).key[0]) % EVAL_SEED_START

    def _put_back(self, seed: int) -> None:
        if self.station.real:
            self._arm.control("home", by=BY)
            if self._ask is not None:
                self._ask(
                    f"Put the scene of {self.task} back, step away, and confirm: episode {seed} begins."
                )
        else:
            if self.station.driver != "sim":  # that one takes holds and resets in the order they are sent
                self._await_rest()
            self._arm.control("reset", by=BY, seed=seed)
        self.mirror.begin(seed)

    def _await_rest(self) -> None:
        """Waits until the arm has rested for a while; the supervisor stops one that keeps moving."""
        began_ns = still_since_ns = self._pace.now_ns()
        while (now_ns := self._pace.now_ns()) - began_ns <= 1e9 * _SETTLE_S:
            status = self._arm.wait(now_ns)
            state = status.state
            if status.phase == "stopped":
                return
            if state is None or not (np.abs(state.velocity_rad_s) < self._still_rad_s).all():
                still_since_ns = status.stamp_ns
            elif state.stamp_ns - still_since_ns >= 1e9 * _REST_S:
                return

    def _settle(self) -> None:
        """Waits for new measurements of everything."""
        began_ns = self._pace.now_ns()
        while True:
            status = self._arm.wait(self._pace.now_ns())
            frames = self._sensors.read()
            stamps = [frames[name].stamp_ns if name in frames else 0 for name in self._scene.needed]
            stamps.append(status.state.stamp_ns if status.state else 0)
            if min(stamps) > began_ns:
                return
            if self._pace.now_ns() - began_ns > 1e9 * _SETTLE_S:
                missing = [name for name in self._scene.needed if name not in frames] or ["something new"]
                known = self._sensors.mistakes
                why = "".join(f" {known[name]}." for name in missing if name in known)
                raise DeviceError(
                    f"station {self.station.name}: nothing of {', '.join(missing)} came in {_SETTLE_S:g} s."
                    f"{why} Start its camera or tracker, and compare its name with the station file."
                )

    # Control steps

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Sends the action's targets and returns what is so a control period later.

        An episode that is over stands still.
        """
        action = self._checked(actions)
        nothing = np.zeros(1, bool)
        if active is not None and not active[0]:
            infos = {"success": nothing, "limited": nothing, "commanded_action": action}
            infos["executed_target_rad"] = self._executed_rad[None].copy()
            return dict(self._obs), np.zeros(1), nothing, nothing, infos
        if not self._is_running:
            self._start()
        observed_ns, state, pictures_ns = self._observed_ns, self.measured.state, self._picture_stamp_ns
        self._is_late = self._pace.step()
        sent_ns = self._send(action)
        self._act_ns.add(sent_ns - observed_ns)
        followed_ns, limited = self._follow(sent_ns)
        obs = self._observe()
        success, failed, reward = self._verdict
        self._elapsed += 1
        terminated = success or failed
        truncated = self._elapsed >= self.horizon and not terminated
        if terminated or truncated:
            self.pause()
        self.timing.append(
            Timing(
                latency_s=1e-9 * (followed_ns - state.stamp_ns) if followed_ns else math.nan,
                act_s=1e-9 * (sent_ns - observed_ns),
                state_age_s=1e-9 * (observed_ns - state.stamp_ns),
                picture_age_s=1e-9 * (observed_ns - min(pictures_ns.values())) if pictures_ns else math.nan,
                late=self._is_late,
            )
        )
        infos: dict[str, Any] = {
            "success": np.array([success]),
            "limited": np.array([limited]),
            "commanded_action": action,
            "executed_target_rad": self._executed_rad[None].copy(),
            "latency_s": np.array([self.timing[-1].latency_s]),
            "stamp_ns": observed_ns,
            "picture_stamp_ns": pictures_ns,
        }
        return obs, np.array([reward]), np.array([terminated]), np.array([truncated]), infos

    def _checked(self, actions: Array) -> Array:
        actions = np.asarray(actions, np.float32)
        if actions.shape != (1, len(self.action_names)):
            raise ConfigError(
                f"{self.task}: got actions of shape {actions.shape}, need (1, {len(self.action_names)}): "
                f"{', '.join(self.action_names)}"
            )
        if not np.isfinite(actions).all():
            self.pause()
            raise SafetyStopError(
                f"station {self.station.name}: the policy gave {actions[0].tolist()}, allowed: finite "
                "numbers. The arm holds. Look at the observation and the weights."
            )
        return np.clip(actions, -1.0, 1.0)

    def _start(self) -> None:
        """Has the arm listen, at the first step of an episode; the clock of steps begins here.

        Not at the reset: the first chunk is waited for, and an arm that listens wants plans. It was at
        rest until now, so the observation still holds.
        """
        self._arm.control("start", by=BY)
        self._is_running, self._number, self._has_followed = True, -1, False
        self._observed_ns = self._measure()
        self._pace.begin()

    def _send(self, action: Array) -> int:
        """Makes targets from the newest measurement and sends them; returns when."""
        now_ns = self._measure()
        self._scene.show(self.measured, now_ns + round(self._way_ns.value) if self._compensate else None)
        targets, gripper = self.mirror.targets(
            np.concatenate([action, np.clip(self._planned, -1.0, 1.0)]),
            servo_s=self.station.limits.lookahead_s,
        )
        self._planned, self.target_rad = self._planned[:0], targets[0]
        self._number += 1
        sent_ns = self._pace.now_ns()
        self._arm.send(
            Plan(
                number=self._number,
                start_ns=sent_ns,
                period_ns=self._pace.period_ns,
                targets_rad=targets,
                gripper=self._scene.to_station(gripper),
            )
        )
        return sent_ns

    def _follow(self, sent_ns: int) -> tuple[int, bool]:
        """Waits for the end of the step; returns when the supervisor followed (0: unknown), if it limited.

        The target that it has sent then is the one that was executed; if it sent none, the arm is held.
        """
        cycle_ns = round(1e9 / self.station.supervisor.command_hz)
        followed_ns, limited, stamp_ns, is_over = 0, False, sent_ns - 1, False
        while not is_over:
            is_over = self._pace.due_ns - self._pace.now_ns() <= 1.5 * cycle_ns
            if is_over:
                self._pace.wait()
            status = self._arm.status if is_over else self._arm.wait(stamp_ns)
            stamp_ns = status.stamp_ns
            self._require_running(status)
            limited |= status.limited
            if np.isfinite(status.sent_rad).all():
                self._executed_rad = status.sent_rad
            elif status.state is not None:
                self._executed_rad = status.state.position_rad
            if not followed_ns and status.plan >= self._number:
                followed_ns = stamp_ns
                self._way_ns.add(followed_ns - sent_ns)
        return followed_ns, limited

    def _observe(self) -> Obs:
        """Judges what is, and returns what the policy acts on: what will be when its action takes effect."""
        now_ns = self._measure()
        self._scene.note(self.measured)
        self._obs = self._scene.show(self.measured)
        self._verdict = self.mirror.judge()
        if self._compensate:
            ahead_ns = round(self._act_ns.value + self._way_ns.value)
            self._obs = self._scene.show(self.measured, now_ns + ahead_ns)
        self._picture_stamp_ns = {name: self.measured.frames[name].stamp_ns for name in self._scene.pictures}
        self._observed_ns = now_ns
        return dict(self._obs)

    def _measure(self) -> int:
        """Takes the newest measurement; returns the present time.

        Raises:
            SafetyStopError: the arm was stopped.
            StaleObservationError: something is too old; the arm holds then.
            ConfigError: a picture is not what the policy sees; the arm holds then.
        """
        status, frames = self._arm.status, self._sensors.read()
        self._require_running(status)
        assert status.state is not None, "an arm that runs has been measured"
        self._has_followed |= status.plan >= 0  # else what was sent is of an earlier episode
        gripper = status.sent_gripper if self._has_followed else status.state.gripper
        self.mirror.commanded(self._scene.from_station(gripper))
        measured, now_ns = Measured(state=status.state, frames=dict(frames)), self._pace.now_ns()
        try:
            self._scene.check(measured, now_ns)
        except (StaleObservationError, ConfigError):
            self.pause()
            raise
        self._measured = measured
        return now_ns

    def _require_running(self, status: Status) -> None:
        if status.phase == "stopped":
            self._is_running = False
            if status.reason.startswith(DRIVER_GONE):
                raise DriverGoneError(
                    f"station {self.station.name}: stopped: {status.reason}. Look at the arm and at its "
                    "driver.log, then start again."
                )
            raise SafetyStopError(
                f"station {self.station.name}: stopped: {status.reason}. Look at the arm, then "
                "`robot-rl arm clear by=<your name>`, and deploy again."
            )
        if self._is_running and status.phase not in ("running", "holding"):
            self._is_running = False
            raise DeviceError(
                f"station {self.station.name}: somebody paused the arm ({status.phase}). Deploy again."
            )

    # Rest

    def pause(self) -> None:
        """Makes the arm hold where it is, and forgets the plan."""
        self._is_running = False
        self._arm.control("pause", by=BY)

    def park(self) -> None:
        """Moves the arm to the station's safe pose, where it rests."""
        self.pause()
        self._arm.control("park", by=BY)

    def safe_stop(self) -> None:
        """Brings the arm to rest and latches; a person clears it."""
        self._is_running = False
        self._arm.control("stop", by=BY)

    def progress(self) -> Array:
        """Returns (1,) how far the episode is, in [0, 1], by the task's shaped reward."""
        return self.mirror.env.progress()

    def action_towards(self, target_rad: Array, opening: Array) -> Array:
        """Returns actions (1, A) towards joint targets (1, n), for a person's leader arm."""
        return self.mirror.env.action_towards(target_rad, opening)

    def expert(self, bias_m: float = 0.0, noise_m: float = 0.0, noise_seed: int = 0) -> Any:
        """Returns the task's scripted expert, who acts on what was observed last."""
        return self.mirror.expert(bias_m, noise_m, noise_seed)

    def state_dict(self) -> dict[str, Any]:
        """Returns which episode it is; an arm stays where it is, whatever is loaded."""
        return {"seed": self._seed, "episode": self._episode, "elapsed": self._elapsed}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        self._seed, self._episode = int(state["seed"]), int(state["episode"])
        self._elapsed = int(state["elapsed"])
        return self._observe()

    def close_extras(self, **kwargs: Any) -> None:
        """Leaves the arm at rest."""
        with contextlib.ExitStack() as stack:
            for close in (self.on_close, self.mirror.close, self._arm.close, self._sensors.close):
                stack.callback(close)  # the last one first, and all of them
            with contextlib.suppress(DeviceError):  # without its supervisor the driver has stopped it already
                self.pause()
