"""An arm behind ros2_control, with genuine ROS 2 or without it (`robot_rl.real.ros2`).

n arm joints. The time of a state is that of its arrival. The arm's own stamps are ROS time: a state with
the same stamp as before is no new measurement. Wall-clock steps do no harm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.core.registry import resolve
from robot_rl.hal.arm import ArmState
from robot_rl.real.drivers.estimate import VelocityEstimate
from robot_rl.real.drivers.ros2_commands import (
    CALL_S,
    Gripper,
    ServoStream,
    Stream,
    TrajectoryStream,
    make_stream,
)
from robot_rl.real.drivers.ros2_estop import EstopButton
from robot_rl.real.drivers.ros2_manager import ControllerSwitch, ControllerWatch, check_command_timeout
from robot_rl.real.drivers.ros2_presence import Phase, PresenceBeat
from robot_rl.real.messages import Array, Command, Frame, Plan
from robot_rl.real.ros2.api import LATCHED, SENSOR, Message, Node, call_once, nanoseconds
from robot_rl.real.ros2.parameters import set_remote
from robot_rl.real.sensors import open_station_node
from robot_rl.real.station import Ros2Config, StationConfig

_FIRST_STATE_S = 10.0
_VELOCITY_WINDOW_S = 0.02
_RIVALS_EVERY_S = 0.5
_GAP_NS = 250_000_000
"""After this time without a state this process, or the line, stood still."""
_DOUBT_NS = 100_000_000
"""The first states after that may have waited in a queue: they show where the arm was before."""
_LONG_AGO_NS = 10_000_000_000


class Ros2Arm:
    """Joint states in, commands out, controllers switched; e-stop inputs at `~/estop`.

    It listens for other drivers of the arm (`ros2_presence`) before it takes the arm, and while it has it.
    """

    def __init__(
        self,
        station: StationConfig,
        open_node: Callable[[], Node] | None = None,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Makes the driver; `connect` opens the node, in the station's namespace by default."""
        if station.ros2 is None:
            raise ConfigError("ros2: missing. An arm behind ros2_control needs it.")
        self._station, self._config = station, station.ros2
        self._open_node = open_node or (lambda: open_station_node(station, "driver"))
        self._clock_ns = clock_ns
        self._node: Any = None
        self._joints = _JointStates(station.joints, station.ros2.finger_joints)
        self._news = threading.Condition()
        self._heard_ns = self._doubted_until_ns = clock_ns()
        self._is_new = self._is_active = False
        self._state: ArmState | None = None
        self._safety = ""
        self._estop = ""
        self._rivals_s = 0.0

    @property
    def joint_names(self) -> tuple[str, ...]:
        return self._station.joints

    def connect(self) -> None:
        config = self._config
        self._node = self._open_node()
        self._presence = PresenceBeat(
            self._node, config.controller_manager, self._station.name, self._clock_ns
        )
        # Best effort matches reliable and best-effort publishers.
        self._node.create_subscription(
            "sensor_msgs/msg/JointState", config.joint_states, self._on_joints, SENSOR
        )
        with self._news:
            if not self._news.wait_for(lambda: self._state is not None, _FIRST_STATE_S):
                raise DeviceError(self._silence())
        # A node that receives the arm's states would receive another driver's messages, too.
        self._presence.take()
        self._subscribe(config)
        kinematics = None
        if config.command in ("twist", "pose"):
            kinematics = resolve("kinematics", "mujoco", at="ros2.command")(self._station.robot)
        self._stream: Stream = make_stream(self._node, self._station, config, kinematics, self._clock_ns)
        self._gripper = Gripper(self._node, self._station, self._clock_ns)
        ours = config.position_controller, config.velocity_controller, config.trajectory_controller
        self._switch = ControllerSwitch(
            self._node, config.controller_manager, config.controller, self._station.joints, ours
        )
        self._watch = ControllerWatch(self._node, config.controller_manager, self._switch.lost)
        self._switch.check()
        check_command_timeout(self._node, config)

    def wait(self, timeout_s: float) -> bool:
        self._look_for_rivals()
        if self._is_active and not self._estop:
            self._check_button()
            timeout_s = min(timeout_s, self._button.left_s())
        with self._news:
            self._news.wait_for(lambda: self._is_new, timeout_s)
            is_new, self._is_new = self._is_new, False
            return is_new

    def read(self) -> ArmState | None:
        return self._state

    def frames(self) -> Sequence[Frame]:
        """Returns nothing: the policy subscribes to cameras itself (`robot_rl.real.sensors`)."""
        return []

    def start(self) -> None:
        self._refuse_rivals()
        reason = self._estop or self._button.silence()
        if reason:
            raise DeviceError(f"ros2: {reason}")
        self._stream.forget()
        self._is_active = True  # from here on a stop is needed
        self._presence.set_phase(Phase.DRIVING)
        self._watch.end()
        self._switch.activate()
        if isinstance(self._stream, ServoStream):
            self._stream.start()
        self._watch.begin()

    def send(self, command: Command) -> None:
        self._stream.send(self._checked(command.target_rad, command.number), self._measured())
        self._gripper.send(command.gripper)
        self._check_gripper()

    def send_plan(self, plan: Plan) -> None:
        if not isinstance(self._stream, TrajectoryStream):
            raise DeviceError(
                f"ros2: plan {plan.number}: `ros2.command: {self._config.command}` takes targets one by one. "
                "Only `trajectory` takes plans."
            )
        for target_rad in plan.targets_rad:
            self._checked(target_rad, plan.number)
        self._stream.send_plan(plan, self._measured())
        self._gripper.follow(plan)
        self._check_gripper()

    def hold(self) -> None:
        """Overrides the last command; does nothing while the controller is not ours."""
        if self._is_active:
            state = self._measured()
            if self._clock_ns() < self._doubted_until_ns:
                state = replace(state, stamp_ns=self._doubted_until_ns - _LONG_AGO_NS)
            self._stream.hold(state)
            self._gripper.hold()

    def stop(self, reason: str) -> None:
        """Takes our controller away.

        Raises:
            DeviceError: the controller_manager does not answer: the arm's own watchdogs have to hold it.
        """
        if not self._is_active:
            return
        self._watch.end()
        try:
            self.hold()
        finally:
            self._switch.deactivate()
        self._is_active = False
        self._presence.set_phase(Phase.CONNECTED)
        if isinstance(self._stream, ServoStream):
            self._stream.stop()

    def clear(self, by: str) -> None:
        self._estop = ""
        if self._safety and not self._config.clear_service:
            raise DeviceError(
                f"ros2: the arm has stopped itself: {self._safety}. Lift that at the arm; the station "
                "names no `ros2.clear_service`."
            )
        if self._safety:
            self._trigger(self._config.clear_service)
            self._safety = ""
        self._renew()

    def reset(self, seed: int) -> None:
        config = self._config
        if not config.reset_service:
            raise DeviceError(
                "ros2: the station names no `ros2.reset_service`: a person puts the scene back."
            )
        if config.scene_node:
            set_remote(self._node, config.scene_node, {"episode_seed": seed}, CALL_S)
        self._trigger(config.reset_service)

    def close(self) -> None:
        if self._node is not None:
            if hasattr(self, "_presence"):
                self._presence.close()
            if hasattr(self, "_watch"):
                self._gripper.close()
                self._watch.close()
            self._node.close()

    # In

    def _subscribe(self, config: Ros2Config) -> None:
        node = self._node
        if config.safety_status:
            # A latched publisher repeats its last message to latched subscribers only; others match SENSOR.
            for qos in (SENSOR, LATCHED):
                node.create_subscription("std_msgs/msg/String", config.safety_status, self._on_safety, qos)
        self._button = EstopButton(node, config.estop_max_age_s, self._press, self._clock_ns)

    def _on_joints(self, message: Message) -> None:
        now_ns = self._clock_ns()
        if now_ns - self._heard_ns > _GAP_NS:
            self._doubted_until_ns = now_ns + _DOUBT_NS
        self._heard_ns = now_ns
        state = self._joints.take(message, now_ns)
        if state is not None:
            with self._news:
                self._state = replace(state, stop_reason=self._estop or self._safety)
                self._is_new = True
                self._news.notify_all()

    def _on_safety(self, message: Message) -> None:
        self._safety = str(message.data)
        self._renew()

    def _press(self, reason: str) -> None:
        self._estop = self._estop or reason
        self._renew()

    def _check_button(self) -> None:
        silence = self._button.silence()
        if silence:
            self._press(f"e-stop: {silence}")

    def _renew(self) -> None:
        """Publishes a new stop reason at once, with the last measurement."""
        with self._news:
            if self._state is not None:
                self._state = replace(self._state, stop_reason=self._estop or self._safety)
                self._is_new = True
                self._news.notify_all()

    def _silence(self) -> str:
        config, joints = self._config, self._joints
        topic = config.joint_states
        if joints.missing:
            return (
                f"ros2: {topic} has no joint {', '.join(joints.missing)}; it has {', '.join(joints.others)}. "
                "Correct `joints` in the station file."
            )
        publishers = ", ".join(sorted(set(self._node.publishers_of(topic)))) or "nobody"
        return (
            f"ros2: no joint states on {topic!r} for {_FIRST_STATE_S:g} s; {publishers} publishes there. "
            "Start the arm's bring-up (or `robot-rl serve-sim-arm`), and compare namespace and "
            f"ROS_DOMAIN_ID. Nodes seen: {', '.join(self._node.node_names())}."
        )

    # Out

    def _checked(self, target_rad: Array, number: int) -> Array:
        count = len(self._station.joints)
        if target_rad.shape != (count,) or not np.isfinite(target_rad).all():
            raise DeviceError(
                f"ros2: command {number}: got target {target_rad.tolist()}, allowed: {count} finite numbers."
            )
        return target_rad

    def _measured(self) -> ArmState:
        if self._state is None:
            raise DeviceError("ros2: no joint state has come yet.")
        return self._state

    def _check_gripper(self) -> None:
        if self._gripper.error:
            raise DeviceError(f"ros2: {self._gripper.error}")

    def _trigger(self, name: str) -> None:
        response = call_once(self._node, "std_srvs/srv/Trigger", name, CALL_S)
        if not response.success:
            raise DeviceError(f"ros2: {name}: {response.message or 'refused'}")

    # Rivals

    def _look_for_rivals(self) -> None:
        lost = self._watch.take()
        if lost:
            raise DeviceError(f"ros2: {lost}")
        self._refuse_drivers()
        now_s = 1e-9 * self._clock_ns()
        if self._is_active and now_s - self._rivals_s > _RIVALS_EVERY_S:
            self._rivals_s = now_s
            self._refuse_rivals()

    def _refuse_drivers(self) -> None:
        rival = self._presence.rival()
        if rival is None:
            return
        if self._presence.is_lost:
            self._is_active = False  # the arm is no longer ours to stop
        raise DeviceError(f"ros2: {rival} has this arm, too. End it first.")

    def _refuse_rivals(self) -> None:
        self._refuse_drivers()
        own = f"{self._node.namespace.rstrip('/')}/{self._node.name}"
        publishers = self._node.publishers_of(self._stream.topic)
        rivals = sorted(name for name in publishers if name != own)
        if publishers.count(own) > 1:
            rivals.append(f"a second {own}")
        if rivals:
            raise DeviceError(
                f"ros2: {', '.join(rivals)} commands this arm too, on {self._stream.topic!r}. End it first."
            )


class _JointStates:
    """Reads one arm from JointState messages: in any order, among other joints, with fields missing."""

    def __init__(self, joints: Sequence[str], fingers: Sequence[str]) -> None:
        self._names, self._fingers = tuple(joints), tuple(fingers)
        self._velocity = VelocityEstimate(_VELOCITY_WINDOW_S)
        self._order: list[str] = []
        self._arm: Array | None = None
        self._hand: Array | None = None
        self._opening = 0.0
        self._stamp_ns = 0
        self.missing: tuple[str, ...] = ()
        """Joints that the newest message lacks, if it has any of the arm's."""
        self.others: tuple[str, ...] = ()

    def take(self, message: Message, now_ns: int) -> ArmState | None:
        """Returns the arm's state, or None if a message has nothing new about it; `now_ns` is monotonic."""
        if message.name != self._order:
            self._index(list(message.name))
        position = np.asarray(message.position, np.float64)
        if len(position) != len(self._order):
            return None
        if self._hand is not None:
            self._opening = float(position[self._hand].mean())
        if self._arm is None:
            return None
        stamp_ns = nanoseconds(message.header.stamp)
        if stamp_ns and stamp_ns == self._stamp_ns:
            return None
        self._stamp_ns = stamp_ns
        arm_rad = position[self._arm]
        estimated = self._velocity.update(now_ns, arm_rad)
        return ArmState(
            stamp_ns=now_ns,
            device_stamp_ns=stamp_ns or now_ns,
            position_rad=arm_rad,
            velocity_rad_s=_finite(message.velocity, self._arm, estimated),
            effort_n_m=_finite(message.effort, self._arm, None),
            gripper=self._opening,
        )

    def _index(self, names: list[str]) -> None:
        place = {name: index for index, name in enumerate(names)}
        self._order = names
        self.others = tuple(names)
        self.missing = tuple(name for name in self._names if name not in place)
        self._arm = None if self.missing else np.array([place[name] for name in self._names])
        has_hand = bool(self._fingers) and all(name in place for name in self._fingers)
        self._hand = np.array([place[name] for name in self._fingers]) if has_hand else None


def _finite(values: Any, rows: Array, instead: Any) -> Any:
    """Returns the rows of an optional field; a broadcaster leaves it empty or fills it with NaN."""
    if len(values) <= int(rows.max()):
        return instead
    chosen = np.asarray(values, np.float64)[rows]
    return chosen if np.isfinite(chosen).all() else instead
