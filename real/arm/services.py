"""Services and actions of the simulated arm: controller manager, safety, trajectories, gripper."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from robot_rl.real.arm.arm import SimArm
from robot_rl.real.arm.controllers import Execution, Grip
from robot_rl.real.arm.manager import Answer
from robot_rl.real.arm.servo import PoseTarget, Twist
from robot_rl.real.arm.topics import points, where_known
from robot_rl.real.arm.trajectory import Code, Verdict, refusal, tolerances
from robot_rl.real.ros2.api import GoalCallbacks, GoalHandle, Message, Node
from robot_rl.real.ros2.parameters import Parameter, Parameters

logger = logging.getLogger(__name__)

_MANAGER = "controller_manager"
_SRV = "controller_manager_msgs/srv"
_MSG = "controller_manager_msgs/msg"
_STATES = ("position", "velocity", "effort")
_BEST_EFFORT = 1
_INACTIVE, _ACTIVE = 2, 3
"""lifecycle_msgs/State."""
_FEEDBACK_S = 0.05
"""Period of feedback and of checks for cancels: action_monitor_rate is 20 Hz by default."""
_CLOSE_S = 1.0
_SERVO = "servo_node"
_SERVO_KINDS: dict[int, type[Twist | PoseTarget]] = {1: Twist, 2: PoseTarget}
"""moveit_msgs/srv/ServoCommandType, without joint jogs."""


class ManagerServices:
    """The services of `controller_manager`."""

    def __init__(self, node: Node, arm: SimArm) -> None:
        self._node, self._arm, manager = node, arm, arm.manager
        for name, callback in (
            ("ListControllers", self._list),
            ("ListControllerTypes", self._list_types),
            ("ListHardwareInterfaces", self._list_interfaces),
            ("ListHardwareComponents", self._list_components),
            ("SetHardwareComponentState", self._set_component),
            ("SwitchController", self._switch),
            ("LoadController", self._named("LoadController", manager.load)),
            ("ConfigureController", self._named("ConfigureController", manager.configure)),
            ("UnloadController", self._named("UnloadController", manager.unload)),
        ):
            node.create_service(f"{_SRV}/{name}", f"{_MANAGER}/{_snake(name)}", callback)

    def _named(self, service: str, change: Callable[[str], Answer]) -> Callable[[Message], Message]:
        def callback(request: Message) -> Message:
            with self._arm.lock:
                done, text = change(request.name)
            if not done:
                logger.error("controller_manager: %s", text)
            return self._response(service, ok=done)

        return callback

    def _list(self, _: Message) -> Message:
        with self._arm.lock:
            return self._response(
                "ListControllers", controller=[self._state(name) for name in self._arm.manager.states]
            )

    def _state(self, name: str) -> Message:
        manager, arm = self._arm.manager, self._arm
        controller = manager.controller(name)
        joints = arm.plant.joint_names
        states = [f"{joint}/{what}" for joint in joints for what in _STATES]
        message = self._node.message(
            f"{_MSG}/ControllerState",
            name=name,
            state=manager.states[name],
            type=controller.kind,
            claimed_interfaces=list(controller.interfaces) if manager.is_active(name) else [],
            required_command_interfaces=list(controller.interfaces),
            required_state_interfaces=states,
        )
        return where_known(message, update_rate=round(arm.config.rate_hz))

    def _list_types(self, _: Message) -> Message:
        kinds = list(self._arm.manager.kinds)
        bases = ["controller_interface::ControllerInterface"] * len(kinds)
        return self._response("ListControllerTypes", types=kinds, base_classes=bases)

    def _interfaces(self) -> tuple[list[Message], list[Message]]:
        """Returns command and state interfaces."""
        arm, claimed = self._arm, self._arm.manager.claimed()
        known = dict.fromkeys(
            interface for name in arm.manager.states for interface in arm.manager.controller(name).interfaces
        )
        kind = f"{_MSG}/HardwareInterface"
        states = [f"{joint}/{what}" for joint in arm.plant.joint_names for what in _STATES]
        offered, read = (
            [
                where_known(
                    self._node.message(kind, name=name, is_available=True, is_claimed=name in claimed),
                    data_type="double",
                )
                for name in names
            ]
            for names in (known, states)
        )
        return offered, read

    def _list_interfaces(self, _: Message) -> Message:
        with self._arm.lock:
            commands, states = self._interfaces()
        return self._response("ListHardwareInterfaces", command_interfaces=commands, state_interfaces=states)

    def _list_components(self, _: Message) -> Message:
        with self._arm.lock:
            commands, states = self._interfaces()
            component = self._node.message(
                f"{_MSG}/HardwareComponentState",
                name="sim_arm",
                type="system",
                state=self._lifecycle_state(),
                command_interfaces=commands,
                state_interfaces=states,
            )
        plugin, rate = f"robot_rl/{self._arm.config.plant}", round(self._arm.config.rate_hz)
        where_known(component, rw_rate=rate, class_type=plugin, plugin_name=plugin)
        return self._response("ListHardwareComponents", component=[component])

    def _set_component(self, request: Message) -> Message:
        """Active is power on, inactive is power off; the arm has no other states."""
        wanted = {_ACTIVE: "active", _INACTIVE: "inactive"}.get(
            request.target_state.id, request.target_state.label
        )
        done = request.name == "sim_arm" and wanted in ("active", "inactive")
        if done:
            done, _ = self._arm.power(on=wanted == "active")
        return self._response("SetHardwareComponentState", ok=done, state=self._lifecycle_state())

    def _lifecycle_state(self) -> Message:
        is_on = not self._arm.body.is_off
        return self._node.message(
            "lifecycle_msgs/msg/State",
            id=_ACTIVE if is_on else _INACTIVE,
            label="active" if is_on else "inactive",
        )

    def _switch(self, request: Message) -> Message:
        strict = request.strictness != _BEST_EFFORT
        with self._arm.lock:
            done, text = self._arm.manager.switch(
                request.activate_controllers, request.deactivate_controllers, strict=strict
            )
        if text:
            logger.error("controller_manager: switch_controller: %s", text)
        return where_known(self._response("SwitchController", ok=done), message=text)

    def _response(self, service: str, **fields: Any) -> Message:
        return self._node.message(f"{_SRV}/{service}_Response", **fields)


class ArmServices:
    """The services of node `sim_arm`: its scene, its safety, its power."""

    def __init__(self, node: Node, arm: SimArm) -> None:
        self._node, self._arm = node, arm
        self._parameters = Parameters(
            node,
            [
                Parameter(
                    name="episode_seed",
                    value=arm.config.seed,
                    minimum=0,
                    description="Which episode `~/reset` begins: that of env.reset(seed=[episode_seed]).",
                )
            ],
        )
        for name, answer in (
            ("reset", self._reset),
            ("protective_stop", lambda: arm.stop("asked for by ~/protective_stop")),
            ("clear_protective_stop", arm.clear),
            ("power_off", lambda: arm.power(on=False)),
            ("power_on", lambda: arm.power(on=True)),
        ):
            node.create_service("std_srvs/srv/Trigger", f"~/{name}", self._trigger(answer))

    def _reset(self) -> Answer:
        """Puts the scene back; the answer comes when no message or picture of the old one is on its way."""
        seed = self._parameters["episode_seed"]
        assert isinstance(seed, int), "a parameter's type never changes"
        self._arm.set_episode(seed)
        time.sleep(self._arm.config.in_flight_s)
        return True, f"episode {seed}"

    def _trigger(self, answer: Callable[[], Answer]) -> Callable[[Message], Message]:
        def callback(_: Message) -> Message:
            done, text = answer()
            return self._node.message("std_srvs/srv/Trigger_Response", success=done, message=text)

        return callback


class ServoServices:
    """The services of MoveIt Servo's node: the type of commands it takes, and a pause."""

    def __init__(self, node: Node, arm: SimArm) -> None:
        self._node, self._arm = node, arm
        node.create_service("moveit_msgs/srv/ServoCommandType", f"{_SERVO}/switch_command_type", self._switch)
        node.create_service("std_srvs/srv/SetBool", f"{_SERVO}/pause_servo", self._pause)

    def _switch(self, request: Message) -> Message:
        kind = _SERVO_KINDS.get(int(request.command_type))
        if kind is None:
            logger.error("%s: command type %d, allowed: 1 (TWIST), 2 (POSE)", _SERVO, request.command_type)
        else:
            with self._arm.lock:
                self._arm.servo.switch(kind)
        return self._node.message("moveit_msgs/srv/ServoCommandType_Response", success=kind is not None)

    def _pause(self, request: Message) -> Message:
        with self._arm.lock:
            self._arm.servo.pause(is_on=bool(request.data))
        text = "paused" if request.data else "running"
        return self._node.message("std_srvs/srv/SetBool_Response", success=True, message=text)


class Actions:
    """FollowJointTrajectory and GripperCommand; each goal runs on its own thread."""

    def __init__(self, node: Node, arm: SimArm, ros_ns: Callable[[], int]) -> None:
        self._node, self._arm, self._ros_ns = node, arm, ros_ns
        self._running: set[threading.Thread] = set()
        self._follow = "control_msgs/action/FollowJointTrajectory"
        self._grip = "control_msgs/action/GripperCommand"
        node.create_action_server(
            self._follow,
            f"{arm.trajectory.name}/follow_joint_trajectory",
            GoalCallbacks(
                execute=self._tracked(self._execute_trajectory),
                accept=self._accepts_trajectory,
                cancel=lambda _: True,
            ),
        )
        node.create_action_server(
            self._grip,
            f"{arm.gripper.name}/gripper_cmd",
            GoalCallbacks(
                execute=self._tracked(self._execute_grip),
                accept=lambda _: self._arm.listens(self._arm.gripper.name),
                cancel=lambda _: True,
            ),
        )

    def close(self) -> None:
        """Ends all goals and waits until their clients have the results."""
        with self._arm.lock:
            self._arm.manager.halt("The arm was shut down.")
        for thread in tuple(self._running):
            thread.join(_CLOSE_S)

    def _tracked(self, execute: Callable[[GoalHandle], None]) -> Callable[[GoalHandle], None]:
        def run(handle: GoalHandle) -> None:
            self._running.add(threading.current_thread())
            try:
                execute(handle)
            finally:
                self._running.discard(threading.current_thread())

        return run

    def _accepts_trajectory(self, goal: Message) -> bool:
        """Rejects a bad goal and logs the reason, as in ros2_controllers."""
        controller = self._arm.trajectory
        why: Verdict | None = None
        if not self._arm.listens(controller.name):
            stopped = self._arm.body.stop_reason or "Controller is not running."
            why = Verdict(Code.INVALID_GOAL, f"Can't accept new action goals. {stopped}")
        why = why or refusal(goal.trajectory, controller.joints, self._ros_ns(), controller.rules)
        if why is None:
            allowed = tolerances(goal, controller.joints, controller.rules)
            why = allowed if isinstance(allowed, Verdict) else None
        if why is not None:
            logger.error("%s: goal rejected (%s): %s", controller.name, why.code.name, why.text)
        return why is None

    def _execute_trajectory(self, handle: GoalHandle) -> None:
        arm, controller = self._arm, self._arm.trajectory
        allowed = tolerances(handle.goal, controller.joints, controller.rules)
        assert not isinstance(allowed, Verdict), "it was accepted"
        execution = Execution(handle.goal.trajectory, allowed)
        with arm.lock:
            if arm.listens(controller.name):
                controller.follow(execution)
            else:
                execution.end(Code.INVALID_GOAL, arm.body.stop_reason or "Controller is not running.")
        while not execution.done.wait(_FEEDBACK_S):
            if handle.cancel_requested:
                with arm.lock:
                    controller.cancel(execution, arm.body)
            else:
                handle.feedback(self._feedback())
        verdict = execution.verdict
        assert verdict is not None
        result = self._node.message(
            f"{self._follow}_Result", error_code=int(verdict.code), error_string=verdict.text
        )
        _end(handle, result, done=verdict.code == Code.SUCCESSFUL)

    def _feedback(self) -> Message:
        with self._arm.lock:
            wanted, state = self._arm.trajectory.reference, self._arm.body.state
        return self._node.message(
            f"{self._follow}_Feedback",
            joint_names=list(self._arm.plant.joint_names),
            **points(
                self._node,
                ("desired", "actual", "error"),
                (wanted.position_rad, wanted.velocity_rad_s),
                (state.position_rad, state.velocity_rad_s),
            ),
        )

    def _execute_grip(self, handle: GoalHandle) -> None:
        arm = self._arm
        grip = Grip(float(handle.goal.command.position))
        with arm.lock:
            arm.gripper.go(grip)
        while not grip.done.wait(_FEEDBACK_S):
            if handle.cancel_requested:
                break
            handle.feedback(self._gripped("Feedback", grip))
        # A gripper that holds an object stalls: that is a success, with `stalled`.
        _end(handle, self._gripped("Result", grip), done=grip.reached or grip.stalled)

    def _gripped(self, what: str, grip: Grip) -> Message:
        return self._node.message(
            f"{self._grip}_{what}",
            position=self._arm.body.state.gripper,
            stalled=grip.stalled,
            reached_goal=grip.reached,
        )


def _end(handle: GoalHandle, result: Message, *, done: bool) -> None:
    if handle.cancel_requested:
        handle.cancel(result)
    elif done:
        handle.succeed(result)
    else:
        handle.abort(result)


def _snake(name: str) -> str:
    """Returns `list_controllers` for `ListControllers`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
