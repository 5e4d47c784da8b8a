"""A simulated arm in the driver's own process: no ROS, physics in real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.core.registry import resolve
from robot_rl.hal.arm import ArmState
from robot_rl.real.drivers.rest import HoldTarget
from robot_rl.real.messages import Command, Frame, Plan
from robot_rl.real.plant import Plant
from robot_rl.real.station import StationConfig

TASK = "pick_cube"
"""The scene where neither the station file nor a policy names one."""
_LATEST_S = 0.1
"""A thread that was away for longer loses the rest of that time: an arm must not catch up in a jump."""


class SimArm:
    """A plant that a thread advances with the monotonic clock; it moves only while it is started."""

    def __init__(self, station: StationConfig, make_plant: Callable[[], Plant] | None = None) -> None:
        """Makes the driver; `connect` makes the plant, the registry's `station.sim.plant` by default."""
        if station.sim is None:
            raise ConfigError("sim: missing. A simulated arm within the driver needs it.")
        self._config, self._cameras = station.sim, [name for name in station.cameras if "." not in name]
        self._make_plant = make_plant or self._registered
        self._plant: Plant | None = None
        self._eye: Plant | None = None
        self._lock = threading.Condition()
        self._state: ArmState | None = None
        self._is_new = self._is_started = False
        self._error: DeviceError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulated arm", daemon=True)
        self._gripper, self._held = 0.0, HoldTarget(station.limits)
        self._objects_ns = self._pictures_ns = 0

    @property
    def joint_names(self) -> tuple[str, ...]:
        return self._body().joint_names

    def connect(self) -> None:
        self._plant = self._make_plant()
        self._gripper = self._plant.measure().gripper
        self._still()
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._is_new or self._error is not None, timeout_s)
            is_new, self._is_new = self._is_new, False
            if self._error is not None:
                raise self._error
            return is_new

    def read(self) -> ArmState | None:
        return self._state

    def frames(self) -> Sequence[Frame]:
        """Returns poses of every new state, and pictures at `camera_hz`.

        A second plant draws the pictures at the state of the first, which goes on meanwhile.
        """
        state = self._state
        if state is None or state.stamp_ns == self._objects_ns:
            return []
        with self._lock:
            stamp_ns = time.monotonic_ns()
            poses = {name: pose.copy() for name, pose in self._body().objects().items()}
            is_due = bool(self._cameras) and stamp_ns - self._pictures_ns >= 1e9 / self._config.camera_hz
            scene = self._body().state() if is_due else None
        self._objects_ns = state.stamp_ns
        found = [Frame(name=name, stamp_ns=stamp_ns, array=pose) for name, pose in poses.items()]
        if scene is None:
            return found
        self._pictures_ns = stamp_ns
        self._eye = self._eye or self._make_plant()
        self._eye.set_state(scene)
        pictures = {name: self._eye.picture(name) for name in self._cameras}
        return found + [
            Frame(name=f"{name}.rgb", stamp_ns=stamp_ns, array=array) for name, array in pictures.items()
        ]

    def start(self) -> None:
        self._still()
        self._is_started = True

    def send(self, command: Command) -> None:
        if not self._is_started:
            raise DeviceError("sim: the arm is not started.")
        if not np.isfinite(command.target_rad).all():
            raise DeviceError(f"sim: target {command.target_rad.tolist()} is not finite.")
        with self._lock:
            self._gripper = command.gripper
            self._held.note(command.target_rad)
            self._body().command(command.target_rad, command.gripper)

    def send_plan(self, plan: Plan) -> None:
        raise DeviceError(
            f"sim: plan {plan.number}: this arm takes targets one by one. Whole plans need a ROS 2 arm "
            "with `ros2.command: trajectory`."
        )

    def hold(self) -> None:
        self._still()

    def stop(self, reason: str) -> None:
        self._is_started = False
        self._still()

    def clear(self, by: str) -> None:
        with self._lock:
            self._error = None

    def reset(self, seed: int) -> None:
        with self._lock:
            self._body().reset(seed)
            self._gripper = self._body().measure().gripper
            self._held.forget()
        self._still()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for plant in (self._plant, self._eye):
            if plant is not None:
                plant.close()

    def _registered(self) -> Plant:
        config = self._config
        plant = resolve("plant", config.plant, at="station.sim.plant")
        return plant(config.task or TASK, config.robot, image_size=config.image_size)

    def _body(self) -> Plant:
        if self._plant is None:
            raise DeviceError("sim: the arm is not connected.")
        return self._plant

    def _still(self) -> None:
        """Stays at the last target, or where the arm is; the gripper goes on gripping."""
        with self._lock:
            plant = self._body()
            target_rad = self._held.choose(plant.measure().position_rad)
            plant.command(np.clip(target_rad, *plant.position_limits_rad), self._gripper)

    def _run(self) -> None:
        period_s = 1.0 / self._config.state_hz
        last_s = due_s = time.monotonic()
        while not self._closing.wait(max(0.0, due_s - time.monotonic())):
            now_s = time.monotonic()
            try:
                self._advance(min(now_s - last_s, _LATEST_S))
            except Exception as error:  # `wait` raises it: the host stops the arm
                with self._lock:
                    self._error = self._error or DeviceError(f"sim: the plant failed: {error}")
                    self._lock.notify_all()
            last_s = now_s
            due_s = max(due_s + period_s, now_s)

    def _advance(self, dt_s: float) -> None:
        with self._lock:
            plant = self._body()
            plant.step(dt_s)
            stamp_ns = time.monotonic_ns()
            self._state = replace(plant.measure(), stamp_ns=stamp_ns, device_stamp_ns=stamp_ns)
            self._is_new = True
            self._lock.notify_all()
