"""System identification: what the joints of an arm are like, from what they were sent and did.

The arm is simulated with the targets that it was sent, and friction, damping and armature of each joint, and
one delay, are fitted so that the simulated positions are the measured ones. The optimiser is MuJoCo's own
toolbox (`mujoco.sysid`: least squares with bounds, derivatives by finite differences in parallel roll-outs),
an extra of its package. The parameters and the chirp are those of PACE (Bjelonic et al. 2025), as OmniReset
uses them. Deviations: least squares in the place of CMA-ES, since the residual is smooth in these parameters
and a roll-out of a position servo forgets its start; no bias of the encoders.

The damping of a joint and that of its servo act alike: what is found is the sum, less the servo's gain of
the model. T times, n arm joints, P parameters.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.core.machine import usable_cores
from robot_rl.sim.joint_log import JointLog
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.measured import Measured, joints_of, write_joints
from robot_rl.sim.robots.robot import Robot

Array = NDArray[Any]
KINDS = ("friction_n_m", "damping_n_m_s", "armature_kg_m2")
MOST_DELAY_S = 0.25
_SETTLE_S = 0.3
"""Of the start, that is not compared: the first targets come from before the recording."""
_COMPARED_S = 0.01
"""Between two positions that are compared."""
_FEWEST = 100
_MOST_ITERATIONS = 50
_PRECISE = 1e-5
"""Relative step that ends the fit."""
_FIRST_DELAY_S = 0.01
_FRICTION_SHARE = 0.5
"""Most dry friction, as a share of the joint's largest effort."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was found."""

    measured: Measured
    delay_s: float
    """From a target's sending to the measurement of its effect, in addition to the servo's own lag."""
    interval: dict[str, tuple[float, ...]]
    """Half width of the 95 % interval of each number, by the names of `Measured`, and `delay_s`: of the
    linearised fit, with residuals taken for independent noise; too small where the model is wrong."""
    rmse_deg: tuple[float, ...]
    """Of each joint's position, simulated with what was found (T,)."""
    rmse_before_deg: tuple[float, ...]
    """Likewise with the model as it was, and no delay."""
    times_s: Array
    """(T,), from the beginning"""
    measured_rad: Array
    """(T, n)"""
    before_rad: Array
    after_rad: Array


def identify(
    log: JointLog,
    robot: Robot | None = None,
    *,
    delay: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Fit:
    """Fits a robot's joints to a recording.

    Args:
        log: targets and positions of an arm that touched nothing.
        robot: the model to begin with; the recording's own if None.
        delay: whether to fit the delay; it is 0 otherwise.
        progress: gets the number of roll-outs so far.

    Raises:
        ConfigError: the toolbox is not installed.
        ModelError: the recording is of other joints.
    """
    robot = robot or load_robot(log.robot)
    if len(log.joints) != robot.num_arm_joints:
        raise ModelError(
            f"sysid: the recording has {len(log.joints)} joints ({', '.join(log.joints)}), robot "
            f"{robot.name} has {robot.num_arm_joints}. Give the robot that was recorded."
        )
    problem = _Problem(log, robot, delay)
    measured, delay_s, interval = problem.solve(progress)
    before, after = problem.positions(problem.start, 0.0), problem.positions(measured, delay_s)
    return Fit(
        measured=measured,
        delay_s=delay_s,
        interval=interval,
        rmse_deg=_rmse_deg(after - problem.measured_rad),
        rmse_before_deg=_rmse_deg(before - problem.measured_rad),
        times_s=problem.times_s,
        measured_rad=problem.measured_rad,
        before_rad=before,
        after_rad=after,
    )


class _Problem:
    """The simulation of a recording, as `mujoco.sysid` takes it."""

    def __init__(self, log: JointLog, robot: Robot, delay: bool) -> None:
        self._sysid, self._robot, self._log = toolbox(), robot, log
        self._spec = robot.build()
        for joint in robot.arm_joints:
            self._spec.add_sensor(
                name=f"{joint}.pos",
                type=mujoco.mjtSensor.mjSENS_JOINTPOS,
                objtype=mujoco.mjtObj.mjOBJ_JOINT,
                objname=joint,
            )
        self._model = model = self._spec.compile()
        self.start = joints_of(robot)
        self._has_delay = delay
        self._arm_qpos = [int(model.joint(name).qposadr[0]) for name in robot.arm_joints]
        timestep_s, begin_s = float(model.opt.timestep), log.begin_s
        self._step_s = np.arange(0.0, log.seconds, timestep_s)
        """When each physics step begins."""
        settled = (self._step_s >= _SETTLE_S) & (self._step_s <= log.seconds - MOST_DELAY_S)
        self.times_s = self._step_s[settled][:: max(1, round(_COMPARED_S / timestep_s))]
        if len(self.times_s) < _FEWEST:
            raise ModelError(
                f"sysid: the recording has {log.seconds:.1f} s with targets and positions, needs "
                f"{_SETTLE_S + MOST_DELAY_S + _FEWEST * _COMPARED_S:.1f} s or more. Record again, for 20 s."
            )
        self.measured_rad = _interpolated(self.times_s, log.measured_s - begin_s, log.position_rad)
        self._qpos = self._first_qpos()
        self._sequences = self._measured_sequences(timestep_s)
        self._num_rollouts = 0

    def solve(
        self, progress: Callable[[int], None] | None
    ) -> tuple[Measured, float, dict[str, tuple[float, ...]]]:
        """Returns what joints are like, the delay, and half widths of their 95 % intervals."""
        parameters, fitted = self._parameters(), self._residual_of(progress)
        found, result = self._sysid.optimize(
            parameters,
            fitted,
            optimizer="mujoco",
            x_scale="jac",
            max_iters=_MOST_ITERATIONS,
            xtol=_PRECISE,
            output=io.StringIO(),  # it prints each step
            verbose=False,
        )
        residuals, _, _ = fitted(found.as_vector(), found)
        _, half = self._sysid.calculate_intervals(residuals, result.jac)
        numbers, interval, first = dict[str, tuple[float, ...]](), dict[str, tuple[float, ...]](), 0
        for name, parameter in found.items():
            numbers[name] = tuple(map(float, parameter.value))
            interval[name] = tuple(map(float, half[first : first + parameter.size]))
            first += parameter.size
        delay_s = numbers.pop("delay_s", (0.0,))[0]
        return Measured(**numbers), delay_s, interval

    def positions(self, joints: Measured, delay_s: float) -> Array:
        """Returns the simulated positions at `times_s` (T, n)."""
        spec = self._spec.copy()
        write_joints(spec, self._robot, joints.given())
        model = spec.compile()
        trajectory = self._sysid.sysid_rollout(
            model, mujoco.MjData(model), self._sequences.control, self._sequences.initial_state
        )[0]
        return self._seen(trajectory.state.data, delay_s)

    def _residual_of(self, progress: Callable[[int], None] | None) -> Callable[..., Any]:
        def compare(
            parameters: Any, _: Any, sensors: Any, *rest: Any, state: Array
        ) -> tuple[Array, Any, Any]:
            delay_s = float(parameters["delay_s"].value[0]) if self._has_delay else 0.0
            self._num_rollouts += 1
            if progress is not None:
                progress(self._num_rollouts)
            return self._seen(state, delay_s) - self.measured_rad, sensors, sensors

        return self._sysid.build_residual_fn(
            models_sequences=[self._sequences],
            modify_residual=compare,
            resample_true=False,
            n_threads=usable_cores(),
        )

    def _seen(self, state: Array, delay_s: float) -> Array:
        """Returns positions at `times_s`, of roll-out states that begin with their time."""
        times_s = np.concatenate([[0.0], state[:, 0]])
        qpos = np.concatenate([self._qpos[None], state[:, 1 : 1 + self._model.nq]])
        return _interpolated(self.times_s - delay_s, times_s, qpos[:, self._arm_qpos])

    def _first_qpos(self) -> Array:
        qpos = mujoco.MjData(self._model).qpos.copy()
        for name in self._robot.finger_joints:
            qpos[self._model.joint(name).qposadr[0]] = self._log.gripper
        first = self._log.measured_s >= self._log.begin_s
        qpos[self._arm_qpos] = self._log.position_rad[first][0]
        return qpos

    def _measured_sequences(self, timestep_s: float) -> Any:
        """Returns the recording in the toolbox's form; each step has the mean of the targets in it."""
        log, model, series = self._log, self._model, self._sysid.TimeSeries
        servos = [model.actuator(name).id for name in self._robot.arm_actuators]
        controls = np.zeros((len(self._step_s), model.nu))
        controls[:, servos] = _mean_held(self._step_s, timestep_s, log.target_s - log.begin_s, log.target_rad)
        for name in self._robot.effector_actuators:
            controls[:, model.actuator(name).id] = log.gripper
        names = [f"{joint}.pos" for joint in self._robot.arm_joints]
        measured = series.from_names(self.times_s, self.measured_rad, model, names=names)
        return self._sysid.ModelSequences(
            "arm",
            self._spec,
            "recording",
            self._sysid.create_initial_state(model, self._qpos),
            series.from_control_names(self._step_s, controls, model),
            measured,
        )

    def _parameters(self) -> Any:
        robot, parameter = self._robot, self._sysid.Parameter
        limits = robot.limits
        effort = np.array(limits.effort_n_m)
        # An arm that reaches its speed and its acceleration has no more damping and inertia than that.
        most = {
            "friction_n_m": _FRICTION_SHARE * effort,
            "damping_n_m_s": effort / limits.velocity_rad_s,
            "armature_kg_m2": effort / limits.acceleration_rad_s2,
        }
        # From inside: at a bound, such as no friction, a derivative to one side says too little.
        first = {
            name: np.clip(self.start.given()[name], 0.01 * high, 0.9 * high) for name, high in most.items()
        }
        parameters = self._sysid.ParameterDict()
        for name, high in most.items():
            parameters.add(
                parameter(name, first[name], np.zeros(len(high)), high, modifier=self._writer(name))
            )
        if self._has_delay:
            parameters.add(parameter("delay_s", _FIRST_DELAY_S, 0.0, MOST_DELAY_S))
        return parameters

    def _writer(self, name: str) -> Callable[[mujoco.MjSpec, Any], None]:
        return lambda spec, parameter: write_joints(spec, self._robot, {name: parameter.value})


def toolbox() -> Any:
    """Returns `mujoco.sysid`; its own package is part of MuJoCo, what it needs is an extra.

    Raises:
        ConfigError: the extra is missing.
    """
    found = importlib.import_module("mujoco.sysid")
    if not hasattr(found, "optimize"):
        raise ConfigError("sysid: MuJoCo's toolbox needs more packages: pip install -e '.[sysid]'")
    return found


def _interpolated(at_s: Array, times_s: Array, rows: Array) -> Array:
    return np.stack([np.interp(at_s, times_s, column) for column in rows.T], axis=1)


def _mean_held(begins_s: Array, step_s: float, times_s: Array, rows: Array) -> Array:
    """Returns the mean over each step of values that hold from their time to the next, (steps, n)."""
    lengths = np.diff(times_s, append=times_s[-1] + 1.0)
    sums = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows * lengths[:, None], axis=0)])
    edges = np.append(times_s, times_s[-1] + 1.0)
    integral = _interpolated(np.append(begins_s, begins_s[-1] + step_s), edges, sums)
    return np.diff(integral, axis=0) / step_s


def _rmse_deg(error_rad: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in np.degrees(np.sqrt((error_rad**2).mean(axis=0))))
