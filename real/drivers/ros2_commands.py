"""How targets become messages: forward controllers, JointTrajectory, MoveIt Servo, and grippers.

Joint targets have one meaning everywhere: soft servos close the distance with a time constant of
`limits.lookahead_s` (`robot_rl.hal.safety`). Velocities, without such servos, close it in the same
way here; twists close it more slowly. n arm joints, H points of a plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from robot_rl.core.errors import DeviceError
from robot_rl.hal.arm import ArmState
from robot_rl.real.drivers.rest import STILL_SHARE, HoldTarget
from robot_rl.real.messages import Array, Plan
from robot_rl.real.ros2.api import ActionClient, Message, Node, call_once
from robot_rl.real.station import Ros2Config, StationConfig

_POINT_S = 0.05
"""Time to a single target that is sent to a trajectory controller."""
_SOONEST_S = 0.075
"""First point of a plan that is sent, if there is a later one.

A controller begins a message when it arrives, at the measured position. With a point 50 ms away and a line
of 20 ms it loses 20 of 50 ms of its way, brakes for that, and then speeds up: the simulated arm swung between
a fifth of its speed and 1.2 times its limit, and ran away on a line of 30 ms. With one 100 ms away it does
not."""
_BRAKE_S = 0.1
_STEP_S = 0.03
"""From a hold until joints at rest are at their target again; three periods of a slow controller.

With less, a moving arm brakes in jerks on a late line. On a line of 20 ms, 20 ms take away 0.73 of the speed
limit within 10 ms, 30 ms 0.43, and the arm rests as soon; from 40 ms on it rests later."""
_SAME = 0.9
"""A joint that still has this share of the speed at which it was held did not get the hold."""
_MAX_RAMPS = 4
"""Most ramps in a row: a joint that swings for long does not get new ones for ever."""
_KNOWN_NS = 50_000_000
"""After this time without a measurement the arm may be elsewhere."""
_FARTHEST_S = 0.25
"""After this time without a measurement the arm's own controllers have stopped it."""
CALL_S = 2.0
_SERVO_S = 0.5
_TWIST_LOOKAHEADS = 3.0
"""Time constant of twists. An arm that Servo moves lags by a lookahead, and by its line: at one lookahead and
50 ms of line the simulated arm swings by 5 cm for ever, at three it settles in a second."""
_MIN_GRIP_CHANGE = 0.005
"""Share of the gripper's range: smaller changes make no goal."""
_GRIP_TICK_S = 0.01
_MAX_STEP_S = 0.1

Clock = Callable[[], int]


class Kinematics(Protocol):
    """The kinematics of Cartesian commands; in the registry under the kind `kinematics`."""

    def tool_pose(self, position_rad: Array) -> Array:
        """Returns the tool's pose (7,) in the base frame: metres, quaternion (w, x, y, z)."""
        ...

    def jacobian(self, position_rad: Array) -> Array:
        """Returns (6, n): the tool's linear and angular velocity per joint velocity."""
        ...


class Stream(Protocol):
    """One way of commanding the arm."""

    topic: str
    """Where commands go; no other node may publish there."""

    def send(self, target_rad: Array, state: ArmState) -> None: ...

    def hold(self, state: ArmState) -> None:
        """Stays where the arm is; a repeated hold, without a command between, at the same place."""

    def forget(self) -> None:
        """Forgets the last command: others may have moved the arm since."""


class PositionStream:
    """Targets for a forward_command_controller over position interfaces."""

    def __init__(
        self, node: Node, controller: str, station: StationConfig, clock_ns: Clock = time.monotonic_ns
    ) -> None:
        self.topic = f"{controller}/commands"
        self._node, self._clock_ns = node, clock_ns
        self._publisher = node.create_publisher("std_msgs/msg/Float64MultiArray", self.topic)
        self._held = HoldTarget(station.limits)

    def send(self, target_rad: Array, state: ArmState) -> None:
        self._held.note(target_rad)
        self._publish(target_rad)

    def hold(self, state: ArmState) -> None:
        """Stays at the last target, or where the arm is if that is not near.

        An arm whose place is unknown comes to rest at its last target, a lead away at most; a target where
        it was before would be a jerk.
        """
        if self._clock_ns() - state.stamp_ns <= _KNOWN_NS:
            self._publish(self._held.choose(state.position_rad))

    def forget(self) -> None:
        self._held.forget()

    def _publish(self, values: Array) -> None:
        self._publisher.publish(self._node.message("std_msgs/msg/Float64MultiArray", data=values))


class VelocityStream:
    """Speeds towards the target for a forward controller over velocity interfaces."""

    def __init__(
        self, node: Node, controller: str, station: StationConfig, clock_ns: Clock = time.monotonic_ns
    ) -> None:
        self.topic = f"{controller}/commands"
        self._node, self._clock_ns = node, clock_ns
        self._publisher = node.create_publisher("std_msgs/msg/Float64MultiArray", self.topic)
        limits = station.limits
        self._limit = np.asarray(limits.velocity_rad_s)
        self._acceleration = np.asarray(limits.acceleration_rad_s2)
        self._lookahead_s = limits.lookahead_s
        self._sent = np.zeros(limits.num_joints)
        self._sent_ns = clock_ns()

    def send(self, target_rad: Array, state: ArmState) -> None:
        now_ns = self._clock_ns()
        step_s = min(1e-9 * (now_ns - self._sent_ns), _MAX_STEP_S)
        wanted = (target_rad - _soon_rad(state, now_ns)) / self._lookahead_s
        change = self._acceleration * step_s
        speed = np.clip(wanted, self._sent - change, self._sent + change)
        self._publish(np.clip(speed, -self._limit, self._limit))

    def hold(self, state: ArmState) -> None:
        self._publish(np.zeros_like(self._sent))

    def forget(self) -> None:
        self._sent = np.zeros_like(self._sent)

    def _publish(self, speed_rad_s: Array) -> None:
        self._publisher.publish(self._node.message("std_msgs/msg/Float64MultiArray", data=speed_rad_s))
        # The time after sending: if the machine stood still before it, the next change is not larger.
        self._sent, self._sent_ns = speed_rad_s, self._clock_ns()


@dataclass(frozen=True)
class _Ramp:
    """To rest at constant deceleration in `_BRAKE_S`; joints that were held again began later."""

    start_rad: Array
    """(n,)"""
    speed_rad_s: Array
    """(n,)"""
    begun_ns: Array
    """(n,)"""
    tries: int = _MAX_RAMPS
    """Ramps that are left for joints that go on."""

    def left(self, now_ns: int, speed_rad_s: Array) -> Array:
        """Returns the share (n,) that is left, by the clock or by the speed of the joints (n,).

        The larger one counts: a ramp that was just sent has not reached the arm yet.
        """
        by_clock = 1.0 - 1e-9 * (now_ns - self.begun_ns) / _BRAKE_S
        with np.errstate(divide="ignore", invalid="ignore"):
            by_speed = np.nan_to_num(speed_rad_s / self.speed_rad_s, posinf=0.0, neginf=0.0)
        return np.clip(np.maximum(by_clock, by_speed), 0.0, 1.0)

    def at(self, left: Array) -> tuple[Array, Array]:
        """Returns positions and speeds (n,) where a share (n,) is left."""
        way_rad = 0.5 * _BRAKE_S * self.speed_rad_s * (1.0 - left**2)
        return self.start_rad + way_rad, self.speed_rad_s * left


class TrajectoryStream:
    """Whole chunks for a joint_trajectory_controller.

    Points carry `time_from_start` and velocities and the last one rests, so that old and new
    controllers take the same message; header.stamp 0 means from now on.
    """

    def __init__(
        self, node: Node, controller: str, station: StationConfig, clock_ns: Clock = time.monotonic_ns
    ) -> None:
        self.topic = f"{controller}/joint_trajectory"
        self._node, self._joints, self._clock_ns = node, list(station.joints), clock_ns
        limits, offset_rad = station.limits, _offset_rad(station)
        self._limits = np.asarray(limits.position_low_rad) - offset_rad, limits.position_high_rad - offset_rad
        self._fastest_rad_s = np.asarray(limits.velocity_rad_s)
        self._still_rad_s = STILL_SHARE * self._fastest_rad_s
        self._near = HoldTarget(limits)
        self._held: _Ramp | None = None
        self._path: tuple[Array, Array] | None = None  # times (s) and positions of what was sent last
        self._publisher = node.create_publisher("trajectory_msgs/msg/JointTrajectory", self.topic)

    def send(self, target_rad: Array, state: ArmState) -> None:
        self._follow(target_rad[None], [_POINT_S], state)

    def send_plan(self, plan: Plan, state: ArmState) -> None:
        """Sends the targets from `_SOONEST_S` on, and the last one if its time has not passed.

        Target i is reached at its period's end.
        """
        ends_ns = plan.start_ns + plan.period_ns * np.arange(1, len(plan.targets_rad) + 1) - self._clock_ns()
        ahead = ends_ns > 1e9 * _SOONEST_S
        ahead[-1] = ends_ns[-1] > 0
        if ahead.any():
            self._follow(plan.targets_rad[ahead], list(1e-9 * ends_ns[ahead]), state)

    def hold(self, state: ArmState) -> None:
        """Comes to rest at constant deceleration; a target where the arm is now would jerk it back.

        Joints at rest stay at their last target. In a repeated hold, joints go on with the ramp before,
        except those that kept their speed as if they got no hold: to call them back would be a jerk too.
        """
        now_ns, speed_rad_s = self._clock_ns(), state.velocity_rad_s
        here_rad = self._here_rad(now_ns, state)
        if now_ns - state.stamp_ns > _KNOWN_NS:  # it follows the last message, if there is one
            if self._path is None or self._held is not None:
                return
            speed_rad_s = (self._wanted_rad(now_ns + round(1e9 * _STEP_S), state) - here_rad) / _STEP_S
        ramp = self._ramp(now_ns, here_rad, speed_rad_s, state)
        left = ramp.left(now_ns, speed_rad_s)
        # A controller begins at the measured position, below the target of a loaded arm. If the way to the
        # target took as long as the ramp, the arm would sink on it, with every hold.
        soon, rest = ramp.at(np.maximum(left - _STEP_S / _BRAKE_S, 0.0)), ramp.at(np.zeros_like(left))
        points_rad, speeds = np.clip([soon[0], rest[0]], *self._limits), np.array([soon[1], rest[1]])
        if not self._publish(points_rad, [_STEP_S, _BRAKE_S], speeds, now_ns):
            return
        self._held = ramp
        times_s = 1e-9 * now_ns + np.array([0.0, _STEP_S, _BRAKE_S])
        self._path = times_s, np.vstack([ramp.at(left)[0], points_rad])

    def _ramp(self, now_ns: int, here_rad: Array, speed_rad_s: Array, state: ArmState) -> _Ramp:
        """Returns the ramp (n,) of a hold of joints that are here at a speed (n,)."""
        before, size = self._held, np.abs(speed_rad_s)
        stays = size < self._still_rad_s
        if before is None:
            last_rad = self._wanted_rad(now_ns, state)
            before = _Ramp(last_rad, np.zeros_like(last_rad), np.full(len(last_rad), now_ns))
        else:
            last_rad, _ = before.at(np.zeros_like(here_rad))
            held_rad_s = before.speed_rad_s
            stays |= ~((speed_rad_s * held_rad_s > 0) & (size >= _SAME * np.abs(held_rad_s)))
        stays &= ~self._near.is_far(last_rad, here_rad)
        stays |= not before.tries
        return _Ramp(
            np.where(stays, before.start_rad, here_rad),
            np.where(stays, before.speed_rad_s, speed_rad_s),
            np.where(stays, before.begun_ns, now_ns),
            before.tries - (not stays.all()),
        )

    def forget(self) -> None:
        self._path = self._held = None

    def _here_rad(self, now_ns: int, state: ArmState) -> Array:
        """Returns where the arm is now (n,): without a fresh state, where the last message has it."""
        age_ns = now_ns - state.stamp_ns
        if age_ns > _KNOWN_NS:
            return self._wanted_rad(now_ns, state)
        return _soon_rad(state, now_ns)

    def _wanted_rad(self, now_ns: int, state: ArmState) -> Array:
        """Returns where the arm should be now (n,), on straight lines through the last message."""
        if self._path is None:
            return state.position_rad
        times_s, points_rad = self._path
        return np.array([np.interp(1e-9 * now_ns, times_s, joint) for joint in points_rad.T])

    def _follow(self, targets_rad: Array, times_s: list[float], state: ArmState) -> None:
        now_ns = self._clock_ns()
        here_rad = self._here_rad(now_ns, state)
        speeds = _speeds(targets_rad, np.asarray(times_s), here_rad)
        # An arm that lags behind the message before must not catch up faster than its limits.
        speeds = np.clip(speeds, -self._fastest_rad_s, self._fastest_rad_s)
        if not self._publish(targets_rad, times_s, speeds, now_ns):
            return
        self._held = None
        self._path = 1e-9 * now_ns + np.array([0.0, *times_s]), np.vstack([here_rad, targets_rad])

    def _publish(self, targets_rad: Array, times_s: list[float], speeds: Array, now_ns: int) -> bool:
        """Sends a message that begins at `now_ns`, unless this process stood still since."""
        points = [
            self._node.message(
                "trajectory_msgs/msg/JointTrajectoryPoint",
                positions=target,
                velocities=speed,
                time_from_start=duration(self._node, at_s),
            )
            for target, speed, at_s in zip(targets_rad, speeds, times_s, strict=True)
        ]
        message = self._node.message(
            "trajectory_msgs/msg/JointTrajectory", joint_names=self._joints, points=points
        )
        if self._clock_ns() - now_ns > _KNOWN_NS:
            return False
        self._publisher.publish(message)
        return True


class ServoStream:
    """Cartesian commands for MoveIt Servo: the target's tool pose, or the twist towards it."""

    def __init__(
        self,
        node: Node,
        config: Ros2Config,
        kinematics: Kinematics,
        station: StationConfig,
        clock_ns: Clock = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._is_pose = config.command == "pose"
        self.topic = f"{config.servo_node}/{'pose_target_cmds' if self._is_pose else 'delta_twist_cmds'}"
        self._node, self._config, self._kinematics = node, config, kinematics
        self._offset_rad = _offset_rad(station)  # of the model's joints, which the kinematics know
        self._close_s = _TWIST_LOOKAHEADS * station.limits.lookahead_s
        self._held, self._sent_ns = HoldTarget(station.limits), 0
        kind = "geometry_msgs/msg/PoseStamped" if self._is_pose else "geometry_msgs/msg/TwistStamped"
        self._publisher = node.create_publisher(kind, self.topic)

    def start(self) -> None:
        """Switches Servo to our kind of commands, and unpauses it."""
        kind = 2 if self._is_pose else 1  # moveit_msgs/srv/ServoCommandType: POSE, TWIST
        self._ask("moveit_msgs/srv/ServoCommandType", "switch_command_type", command_type=kind)
        self._ask("std_srvs/srv/SetBool", "pause_servo", data=False)

    def stop(self) -> None:
        self._ask("std_srvs/srv/SetBool", "pause_servo", data=True)

    def send(self, target_rad: Array, state: ArmState) -> None:
        self._held.note(target_rad)
        if self._is_pose:
            return self._publish_pose(target_rad)
        jacobian = self._kinematics.jacobian(state.position_rad + self._offset_rad)
        way = target_rad - _soon_rad(state, self._clock_ns())
        return self._publish_twist(jacobian @ way / self._close_s)

    def hold(self, state: ArmState) -> None:
        """Stays at the last target.

        Where Servo got no pose for long, or there is no fresh state, Servo has stopped the arm by itself: a
        pose would move it once more.
        """
        if not self._is_pose:
            self._publish_twist(np.zeros(6))
        elif 1e-9 * (self._clock_ns() - min(self._sent_ns, state.stamp_ns)) <= _FARTHEST_S:
            self._publish_pose(self._held.choose(state.position_rad))

    def forget(self) -> None:
        self._held.forget()

    def _publish_pose(self, target_rad: Array) -> None:
        pose = self._kinematics.tool_pose(target_rad + self._offset_rad)
        fields = _xyz(pose[:3]), {"w": float(pose[3]), **_xyz(pose[4:])}
        place = self._node.message("geometry_msgs/msg/Point", **fields[0])
        turn = self._node.message("geometry_msgs/msg/Quaternion", **fields[1])
        body = self._node.message("geometry_msgs/msg/Pose", position=place, orientation=turn)
        self._publish("geometry_msgs/msg/PoseStamped", pose=body)

    def _publish_twist(self, twist: Array) -> None:
        if self._config.servo_scale is not None:  # shares of Servo's scales; it refuses more than 1
            twist = twist / np.repeat(self._config.servo_scale, 3)
            twist = twist / max(1.0, np.abs(twist).max())
        linear = self._node.message("geometry_msgs/msg/Vector3", **_xyz(twist[:3]))
        angular = self._node.message("geometry_msgs/msg/Vector3", **_xyz(twist[3:]))
        body = self._node.message("geometry_msgs/msg/Twist", linear=linear, angular=angular)
        self._publish("geometry_msgs/msg/TwistStamped", twist=body)

    def _publish(self, kind: str, **body: Message) -> None:
        # Servo drops commands whose stamp is older than incoming_command_timeout.
        self._sent_ns = self._clock_ns()
        seconds, nanoseconds = divmod(self._node.now_ns(), 1_000_000_000)
        stamp = self._node.message("builtin_interfaces/msg/Time", sec=seconds, nanosec=nanoseconds)
        header = self._node.message("std_msgs/msg/Header", stamp=stamp, frame_id=self._config.base_frame)
        self._publisher.publish(self._node.message(kind, header=header, **body))

    def _ask(self, kind: str, service: str, **fields: object) -> None:
        """Calls a service of Servo, if there is one: older Servos listen to every topic at once."""
        name = f"{self._config.servo_node}/{service}"
        client = self._node.create_client(kind, name)
        is_there = client.wait(_SERVO_S)
        client.close()
        if is_there and not call_once(self._node, kind, name, CALL_S, **fields).success:
            raise DeviceError(f"ros2: {name} refused {fields}. Look at the log of {self._config.servo_node}.")


class Gripper:
    """Commands the gripper's controller, each opening at its time, on a thread: goals take a while."""

    def __init__(self, node: Node, station: StationConfig, clock_ns: Clock = time.monotonic_ns) -> None:
        config = station.ros2 or Ros2Config()
        self._node, self._config, self._clock_ns = node, config, clock_ns
        self._least = _MIN_GRIP_CHANGE * abs(station.gripper.open - station.gripper.closed)
        self._news = threading.Condition()
        self._due: list[tuple[int, float]] = []
        self._sent: float | None = None
        self._is_closing = False
        self.error = ""
        """Why the last goal did not reach the controller."""
        self._send = self._make_sender(config.gripper_controller)
        self._thread = threading.Thread(target=self._run, name="gripper", daemon=True)
        self._thread.start()

    def send(self, opening: float) -> None:
        """Commands an opening now."""
        self._schedule([(0, opening)])

    def follow(self, plan: Plan) -> None:
        """Commands every opening of a plan when it is due."""
        starts_ns = [plan.start_ns + row * plan.period_ns for row in range(len(plan.gripper))]
        self._schedule(list(zip(starts_ns, map(float, plan.gripper), strict=True)))

    def hold(self) -> None:
        """Forgets the openings to come; what is gripped stays gripped."""
        self._schedule([])

    def close(self) -> None:
        with self._news:
            self._is_closing = True
            self._news.notify()
        self._thread.join()

    def _schedule(self, due: list[tuple[int, float]]) -> None:
        with self._news:
            self._due = due
            self._news.notify()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(self._has_work, timeout=_GRIP_TICK_S if self._due else None)
                if self._is_closing:
                    return
                passed = [entry for entry in self._due if entry[0] <= self._clock_ns()]
                self._due = self._due[len(passed) :]
            if passed and self._is_worth(passed[-1][1]):
                self._sent = passed[-1][1]
                try:
                    self.error = self._send(self._sent)
                except DeviceError as error:
                    self.error = f"gripper: {error}"

    def _is_worth(self, opening: float) -> bool:
        """Whether to send it: streams to a topic repeat themselves, so a lost message does no harm."""
        is_stream = self._config.gripper_command == "position"
        return is_stream or self._sent is None or abs(opening - self._sent) >= self._least

    def _has_work(self) -> bool:
        return self._is_closing or bool(self._due and self._due[0][0] <= self._clock_ns())

    def _make_sender(self, controller: str) -> Callable[[float], str]:
        """Returns the function that sends one opening, and returns why it could not."""
        node, fingers = self._node, list(self._config.finger_joints)
        match self._config.gripper_command:
            case "action":
                kind = "control_msgs/action/GripperCommand"
                client = node.create_action_client(kind, f"{controller}/gripper_cmd")
                return lambda opening: self._send_goal(client, opening)
            case "position":
                return self._sender(
                    "std_msgs/msg/Float64MultiArray",
                    f"{controller}/commands",
                    lambda opening: {"data": [opening]},
                )
            case "trajectory":
                return self._sender(
                    "trajectory_msgs/msg/JointTrajectory",
                    f"{controller}/joint_trajectory",
                    lambda opening: {"joint_names": fingers, "points": [self._point(opening, len(fingers))]},
                )
            case "none":
                return lambda opening: ""

    def _sender(
        self, kind: str, topic: str, fields: Callable[[float], dict[str, Any]]
    ) -> Callable[[float], str]:
        publisher = self._node.create_publisher(kind, topic)

        def send(opening: float) -> str:
            publisher.publish(self._node.message(kind, **fields(opening)))
            return ""

        return send

    def _send_goal(self, client: ActionClient, opening: float) -> str:
        command = self._node.message(
            "control_msgs/msg/GripperCommand", position=opening, max_effort=self._config.gripper_effort_n
        )
        goal = self._node.message("control_msgs/action/GripperCommand_Goal", command=command)
        accepted = client.send(goal, CALL_S).accepted
        return "" if accepted else f"{self._config.gripper_controller} refused opening {opening:g}"

    def _point(self, opening: float, num_fingers: int) -> Message:
        return self._node.message(
            "trajectory_msgs/msg/JointTrajectoryPoint",
            positions=[opening] * num_fingers,
            time_from_start=duration(self._node, _BRAKE_S),
        )


def make_stream(
    node: Node,
    station: StationConfig,
    config: Ros2Config,
    kinematics: Kinematics | None,
    clock_ns: Clock = time.monotonic_ns,
) -> Stream:
    """Returns the stream of `ros2.command`."""
    kinds = {"position": PositionStream, "velocity": VelocityStream, "trajectory": TrajectoryStream}
    if config.command in kinds:
        return kinds[config.command](node, config.controller, station, clock_ns)
    assert kinematics is not None
    return ServoStream(node, config, kinematics, station, clock_ns)


def duration(node: Node, seconds: float) -> Message:
    """Returns a builtin_interfaces/Duration."""
    whole, rest = divmod(round(1e9 * seconds), 1_000_000_000)
    return node.message("builtin_interfaces/msg/Duration", sec=whole, nanosec=rest)


def _soon_rad(state: ArmState, now_ns: int) -> Array:
    """Returns where an arm is (n,) shortly after it was measured; a loop without this swings longer."""
    return state.position_at(min(max(now_ns, state.stamp_ns), state.stamp_ns + _KNOWN_NS))


def _offset_rad(station: StationConfig) -> Array:
    """Returns what to add to the arm's joint positions (n,) to get the robot model's."""
    return np.asarray(station.joint_offset_rad or np.zeros(len(station.joints)))


def _speeds(targets_rad: Array, times_s: Array, position_rad: Array) -> Array:
    """Returns (H, n): central differences through the points; the last one rests."""
    points = np.concatenate([position_rad[None], targets_rad])
    times = np.concatenate([[0.0], times_s])
    speeds = np.zeros_like(targets_rad)
    speeds[:-1] = (points[2:] - points[:-2]) / (times[2:] - times[:-2])[:, None]
    return speeds


def _xyz(values: Array) -> dict[str, float]:
    return dict(zip("xyz", map(float, values), strict=True))
