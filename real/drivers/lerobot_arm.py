"""Arms that LeRobot drives: SO-101, Koch, and every other robot of `lerobot.robots`.

One thread owns the bus: it sends the newest target and reads the arm's state. n arm joints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import pkgutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.hal.arm import ArmState
from robot_rl.real.claim import keep_others_out
from robot_rl.real.drivers.estimate import VelocityEstimate
from robot_rl.real.drivers.rest import HoldTarget
from robot_rl.real.messages import Array, Command, Frame, Plan
from robot_rl.real.station import LeRobotConfig, StationConfig

_VELOCITY_WINDOW_S = 0.05
"""One step of an STS3215 (1.5 mrad) over it is 0.03 rad/s."""
_CONNECT_TRIES = 3
_END_S = 2.0
"""Longest time for the bus to finish what it does: it may hang."""
_LIMP = "disable_torque_on_disconnect"
"""LeRobot's option, True by default: the servos go limp when the connection ends."""
_HEALTH_EVERY_S = 0.2
_HEALTH_REGISTERS = ("Status", "Hardware_Error_Status")
"""Of Feetech and of Dynamixel servos: 0 while all is well."""
_FLAGS = {
    "Status": ("voltage", "angle sensor", "temperature", "current", "", "overload"),
    "Hardware_Error_Status": ("voltage", "", "temperature", "encoder", "electrical shock", "overload"),
}
Robot = Any
"""lerobot.robots.Robot."""


class LeRobotArm:
    """A LeRobot robot. Its units become radians by the station's `lerobot.rad_per_unit`."""

    def __init__(
        self, station: StationConfig, make_robot: Callable[[LeRobotConfig], Robot] | None = None
    ) -> None:
        """Makes the driver; `connect` makes the robot, by LeRobot's own factory if `make_robot` is None."""
        if station.lerobot is None:
            raise ConfigError("lerobot: missing. An arm that LeRobot drives needs it.")
        self._config, self._joints, self._name = station.lerobot, station.joints, station.name
        self._make_robot = make_robot or open_robot
        units = station.lerobot.rad_per_unit or [math.pi / 180] * len(station.joints)
        self._rad_per_unit = np.asarray(units)
        self._grip = (station.gripper.closed, station.gripper.open)
        self._grip_units = station.lerobot.gripper_units
        self._robot: Robot = None
        self._velocity = VelocityEstimate(_VELOCITY_WINDOW_S)
        self._held = HoldTarget(station.limits)
        self._lock = threading.Condition()
        self._state: ArmState | None = None
        self._seen: ArmState | None = None
        self._error: str = ""
        self._stop_reason = ""
        self._target: dict[str, float] | None = None
        self._gripper_unit: float | None = None
        self._pictures: dict[str, Any] = {}
        self._checked_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lerobot bus", daemon=True)

    @property
    def joint_names(self) -> tuple[str, ...]:
        """The station's; `connect` has checked that the robot has them all."""
        return self._joints

    def connect(self) -> None:
        self._open()
        self._keep_others_out()
        self._check()
        self._read()
        self.hold()  # the servos may still have old goals
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._state is not self._seen or bool(self._error), timeout_s)
            is_new, self._seen = self._state is not self._seen, self._state
            if self._error:
                raise DeviceError(self._error)
            return is_new

    def read(self) -> ArmState | None:
        return self._state

    def frames(self) -> Sequence[Frame]:
        found: list[Frame] = []
        for name, camera in getattr(self._robot, "cameras", {}).items():
            picture = camera.read_latest()
            if picture is not self._pictures.get(name):
                self._pictures[name] = picture
                found.append(Frame(name=f"{name}.rgb", stamp_ns=_captured_ns(camera), array=picture))
        return found

    def start(self) -> None:
        self.hold()

    def send(self, command: Command) -> None:
        if not np.isfinite(command.target_rad).all() or command.target_rad.shape != (len(self._joints),):
            raise DeviceError(
                f"{self._name}: got target {command.target_rad.tolist()}, need {len(self._joints)} finite."
            )
        self._held.note(command.target_rad)
        self._aim(command.target_rad, self._to_unit(command.gripper))

    def send_plan(self, plan: Plan) -> None:
        raise DeviceError(
            f"{self._name}: plan {plan.number}: LeRobot's robots take targets one by one. Whole plans need "
            "a ROS 2 arm with `ros2.command: trajectory`."
        )

    def hold(self) -> None:
        state = self._state
        if state is not None:
            unit = self._gripper_unit  # what is gripped stays gripped
            target_rad = self._held.choose(state.position_rad)
            self._aim(target_rad, self._to_unit(state.gripper) if unit is None else unit)

    def stop(self, reason: str) -> None:
        """Holds with stiff servos: an arm without torque would fall."""
        self.hold()

    def clear(self, by: str) -> None:
        with self._lock:
            self._error = self._stop_reason = ""

    def reset(self, seed: int) -> None:
        raise DeviceError(f"{self._name}: a real scene is put back by a person.")

    def close(self) -> None:
        """Ends the connection; the servos stay stiff at their last target."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        if self._robot is not None:
            _let_go(self._robot)

    def _open(self) -> None:
        """Connects; again with a new robot, as the first packet after power-up may be lost."""
        error: Exception | None = None
        for _ in range(_CONNECT_TRIES):
            self._robot = self._make_robot(self._config)
            _stay_stiff(getattr(self._robot, "config", None))
            try:
                return self._robot.connect(calibrate=False)
            except Exception as refusal:  # LeRobot and the vendor's library raise all kinds
                error = refusal
                _let_go(self._robot)
        why = " ".join(str(error).split()).rstrip(" .")  # LeRobot's have several lines
        raise DeviceError(
            f"{self._name}: LeRobot cannot connect {self._config.type}: {why}. Look at the power, "
            "the cable and `lerobot.options.port` (`lerobot-find-port` finds it)."
        ) from error

    def _keep_others_out(self) -> None:
        port: Any = getattr(getattr(getattr(self._robot, "bus", None), "port_handler", None), "ser", None)
        if port is None:
            return
        try:
            keep_others_out(port.fileno())
        except BlockingIOError as error:
            raise DeviceError(
                f"{self._name}: another program has locked {port.name}. End it: two programs on one bus "
                "disturb each other."
            ) from error

    # The bus, on its own thread

    def _run(self) -> None:
        period_s = 1.0 / self._config.state_hz
        due_s = time.monotonic()
        while not self._closing.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + period_s, time.monotonic())
            try:
                self._write()
                self._read()
                self._check_health()
            except Exception as error:  # `wait` raises it: the host stops the arm
                self._note(f"{self._name}: {self._explain(error)}")
        with contextlib.suppress(Exception):
            self._write()  # where it is held from now on

    def _drain(self) -> None:
        # A late answer would count as that of the next question, and so on for ever: neither LeRobot nor
        # the SDK discards it.
        port: Any = getattr(getattr(self._robot, "bus", None), "port_handler", None)
        if port is not None and hasattr(port, "ser"):
            port.ser.reset_input_buffer()

    def _write(self) -> None:
        with self._lock:
            target, self._target = self._target, None
        if target is None:
            return
        try:
            self._robot.send_action(target)
        except Exception:
            with self._lock:
                self._target = self._target or target  # the arm did not get it: sent again
            raise

    def _read(self) -> None:
        self._drain()
        before_ns = time.monotonic_ns()
        seen = self._robot.get_observation()
        stamp_ns = (before_ns + time.monotonic_ns()) // 2
        position_rad = self._rad_per_unit * [float(seen[f"{joint}.pos"]) for joint in self._joints]
        state = ArmState(
            stamp_ns=stamp_ns,
            device_stamp_ns=stamp_ns,
            position_rad=position_rad,
            velocity_rad_s=self._velocity.update(stamp_ns, position_rad),
            gripper=self._from_unit(float(seen[f"{self._config.gripper}.pos"])),
            stop_reason=self._stop_reason,
        )
        with self._lock:
            self._state = state
            self._lock.notify_all()

    def _check_health(self) -> None:
        """Reads the servos' error flags, which LeRobot does not, where the bus has such a register."""
        now_s = time.monotonic()
        register = _health_register(self._robot)
        if not register or now_s - self._checked_s < _HEALTH_EVERY_S:
            return
        self._checked_s = now_s
        self._drain()
        flags = self._robot.bus.sync_read(register, normalize=False, num_retry=2)
        bad = [f"{motor}: {_in_words(register, int(bits))}" for motor, bits in flags.items() if bits]
        if bad and not self._stop_reason:
            self._stop_reason = f"{self._name}: {', '.join(bad)}. Free the arm, then clear."

    def _explain(self, error: Exception) -> str:
        """Returns the error with the motors that do not answer, where the bus still works."""
        bus: Any = getattr(self._robot, "bus", None)
        silent: list[str] = []
        with contextlib.suppress(Exception):  # the bus itself may be what is gone
            silent = [motor for motor in getattr(bus, "motors", {}) if bus.ping(motor, num_retry=1) is None]
        names = f"no answer from {', '.join(silent)}. Look at cables and power. " if silent else ""
        return f"{names}LeRobot says: {error}"

    def _note(self, error: str) -> None:
        with self._lock:
            self._error = self._error or error
            self._lock.notify_all()

    # Units

    def _aim(self, target_rad: Array, gripper_unit: float) -> None:
        units = target_rad / self._rad_per_unit
        target = {f"{joint}.pos": float(unit) for joint, unit in zip(self._joints, units, strict=True)}
        with self._lock:
            self._gripper_unit = gripper_unit
            self._target = {**target, f"{self._config.gripper}.pos": gripper_unit}

    def _to_unit(self, gripper: float) -> float:
        (closed, opened), (closed_unit, open_unit) = self._grip, self._grip_units
        return closed_unit + (gripper - closed) / (opened - closed) * (open_unit - closed_unit)

    def _from_unit(self, unit: float) -> float:
        (closed, opened), (closed_unit, open_unit) = self._grip, self._grip_units
        return closed + (unit - closed_unit) / (open_unit - closed_unit) * (opened - closed)

    def _check(self) -> None:
        wanted = [f"{name}.pos" for name in (*self._joints, self._config.gripper)]
        has = sorted(name for name in self._robot.action_features if name.endswith(".pos"))
        if sorted(wanted) != has:
            raise DeviceError(
                f"{self._name}: LeRobot's {self._config.type} has {has}, the station file says "
                f"{sorted(wanted)}. Correct `joints` and `lerobot.gripper` there."
            )
        if not self._robot.is_calibrated:
            raise DeviceError(
                f"{self._name}: {self._config.type} is not calibrated, or its motors hold another "
                f"calibration. Run `lerobot-calibrate --robot.type={self._config.type}` with the same id "
                "and port."
            )


def open_robot(config: LeRobotConfig) -> Robot:
    """Returns LeRobot's robot, not connected.

    Raises:
        DeviceError: LeRobot is not installed.
        ConfigError: no such type or option.
    """
    try:
        import draccus
        import lerobot.cameras
        import lerobot.robots
    except ImportError as error:
        raise DeviceError(
            f"lerobot: {error}. Arms of LeRobot need `pip install -e '.[lerobot]'` (Python >= 3.12)."
        ) from error
    # Configs register at import; robots without their libraries are left out.
    for package in (lerobot.robots, lerobot.cameras):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    known = lerobot.robots.RobotConfig.get_known_choices()
    if config.type not in known:
        raise ConfigError(f"lerobot.type: got {config.type!r}, allowed: {', '.join(sorted(known))}.")
    try:
        options = draccus.decode(lerobot.robots.RobotConfig, {"type": config.type, **config.options})
        _stay_stiff(options)  # before the robot is made: a robot of two arms copies its options
        return lerobot.robots.make_robot_from_config(options)
    except (draccus.utils.DecodingError, ValueError, TypeError, ImportError) as error:
        raise ConfigError(
            f"lerobot.options: {error}. They are the fields of LeRobot's {config.type}."
        ) from error


def _stay_stiff(options: Any) -> None:
    """Sets LeRobot's options so that no end of the connection, wanted or not, takes the servos' torque away.

    `Robot.__del__` disconnects too, also a robot that is only half connected.
    """
    if hasattr(options, _LIMP):
        setattr(options, _LIMP, False)
    if dataclasses.is_dataclass(options):
        for field in dataclasses.fields(options):
            part = getattr(options, field.name)
            if dataclasses.is_dataclass(part):
                _stay_stiff(part)


def _let_go(robot: Robot) -> None:
    """Ends a connection, also a half-made one; errors of devices that are gone are ignored."""
    with contextlib.suppress(Exception):
        robot.disconnect()
    arms = [robot, *(getattr(robot, side, None) for side in ("left_arm", "right_arm"))]
    buses: list[Any] = [getattr(arm, "bus", None) for arm in arms]
    for bus in buses:
        if getattr(bus, "is_connected", False):
            with contextlib.suppress(Exception):
                bus.disconnect(disable_torque=False)
    for camera in getattr(robot, "cameras", {}).values():
        if getattr(camera, "is_connected", False):
            with contextlib.suppress(Exception):
                camera.disconnect()


def _health_register(robot: Robot) -> str:
    """Returns the name of the servos' error register, or an empty text."""
    bus = getattr(robot, "bus", None)
    tables = getattr(bus, "model_ctrl_table", {})
    models = [tables.get(motor.model, {}) for motor in getattr(bus, "motors", {}).values()]
    return next((name for name in _HEALTH_REGISTERS if models and all(name in table for table in models)), "")


def _in_words(register: str, bits: int) -> str:
    names = [name for place, name in enumerate(_FLAGS[register]) if bits >> place & 1 and name]
    return " and ".join(names) or f"error {bits:#04x}"


def _captured_ns(camera: Any) -> int:
    """Returns when the camera's newest picture was taken: LeRobot stamps with perf_counter."""
    taken_s = getattr(camera, "latest_timestamp", None)
    age_s = 0.0 if taken_s is None else time.perf_counter() - taken_s
    return time.monotonic_ns() - round(1e9 * age_s)
