"""The arm's controller_manager, as its client: switches to our controller, and finds rivals by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from robot_rl.core.errors import DeviceError, nearest
from robot_rl.real.drivers.ros2_commands import CALL_S, duration
from robot_rl.real.ros2.api import Message, Node, call_once
from robot_rl.real.ros2.parameters import get_remote
from robot_rl.real.station import Ros2Config

logger = logging.getLogger(__name__)

_STRICT = 2
"""controller_manager_msgs/srv/SwitchController: all of it or nothing."""
_SWITCH_S = 1.0
_LIST = "controller_manager_msgs/srv/ListControllers"
_LOOK_S = 0.25
"""From an answer to the next request: shorter than `supervisor.tracking_s`, after which the arm stops."""
_TIMEOUTS = {
    "velocity": ("command_timeout", "cmd_timeout", "cmd_vel_timeout", "watchdog_timeout"),
    "servo": ("moveit_servo.incoming_command_timeout", "incoming_command_timeout"),
}
"""Names of that parameter in controllers and in MoveIt Servo."""
_FIND_S = 0.5
_ANSWER_S = 3.0
"""A manager that takes longer is named in the log."""


def controllers_of(node: Node, manager: str, timeout_s: float = CALL_S) -> list[Message]:
    """Returns the ControllerState of each controller of a controller_manager.

    Raises:
        DeviceError: it does not answer.
    """
    return list(call_once(node, _LIST, f"{manager}/list_controllers", timeout_s).controller)


class ControllerSwitch:
    """Gives one controller the arm's joints, and takes them away again."""

    def __init__(
        self, node: Node, manager: str, wanted: str, joints: Sequence[str], ours: Sequence[str]
    ) -> None:
        """Takes the controller_manager's name, the controller to switch to, and the arm's joints.

        The controllers `ours` may be deactivated for it; any other that holds a joint is a rival.
        """
        self._node, self._manager, self._wanted = node, manager, wanted
        self._joints, self._ours = set(joints), set(ours)

    def check(self) -> None:
        """Passes if the controller is loaded.

        Raises:
            DeviceError: it is not; names those that are.
        """
        known = {controller.name: controller.state for controller in self._list()}
        if self._wanted not in known:
            raise DeviceError(
                f"ros2: {self._manager} has no controller {self._wanted!r}.{nearest(self._wanted, known)} "
                f"Load it with `ros2 control load_controller --set-state inactive {self._wanted}`, or "
                "correct the station file."
            )

    def activate(self) -> None:
        """Makes the controller active, and those of ours that hold its joints inactive.

        Raises:
            DeviceError: a controller that is not ours commands these joints, or the switch failed.
        """
        listed = self._list()
        holders = self._holders(listed)
        rivals = [name for name in holders if name not in self._ours]
        if rivals:
            raise DeviceError(
                f"ros2: {', '.join(rivals)} commands joints of this arm already. {_remedy(rivals)}"
            )
        if self._state(listed) == "active" and not holders:
            return
        self._switch([self._wanted], holders)

    def deactivate(self) -> None:
        """Makes the controller inactive, if it is not.

        Raises:
            DeviceError: no answer, or the switch failed: the arm may still be under control.
        """
        if self._state(self._list()) == "active":
            self._switch([], [self._wanted])

    def lost(self, listed: Sequence[Message]) -> str:
        """Returns what took our controller's joints away; empty if it has them alone."""
        rivals, state = self._holders(listed), self._state(listed)
        if rivals:
            others = f", and {self._wanted} is {state}" if state != "active" else ""
            return f"{', '.join(rivals)} commands joints of this arm too{others}. {_remedy(rivals)}"
        if state != "active":
            return (
                f"{self._wanted} is {state}: somebody switched it off, or it failed. Look at the log of "
                f"{self._manager}."
            )
        return ""

    def _list(self) -> list[Message]:
        return controllers_of(self._node, self._manager)

    def _state(self, listed: Sequence[Message]) -> str:
        """Returns the state of our controller."""
        return next((str(one.state) for one in listed if one.name == self._wanted), "not loaded")

    def _holders(self, listed: Sequence[Message]) -> list[str]:
        """Returns the other active controllers that command a joint of the arm."""
        return [
            controller.name
            for controller in listed
            if controller.state == "active" and controller.name != self._wanted and self._claims(controller)
        ]

    def _claims(self, controller: Message) -> bool:
        return any(name.partition("/")[0] in self._joints for name in controller.claimed_interfaces)

    def _switch(self, activate: list[str], deactivate: list[str]) -> None:
        response = call_once(
            self._node,
            "controller_manager_msgs/srv/SwitchController",
            f"{self._manager}/switch_controller",
            CALL_S,
            activate_controllers=activate,
            deactivate_controllers=deactivate,
            strictness=_STRICT,
            activate_asap=True,
            timeout=duration(self._node, _SWITCH_S),
        )
        if not response.ok:
            why = getattr(response, "message", "") or "it says no more; look at its log"
            raise DeviceError(
                f"ros2: {self._manager} did not switch (activate {activate}, deactivate {deactivate}): {why}"
            )


class ControllerWatch:
    """Asks again and again which controllers have the joints, on a separate thread: the arm never waits."""

    def __init__(self, node: Node, manager: str, lost: Callable[[Sequence[Message]], str]) -> None:
        """Asks nothing before `begin`; `lost` judges the answer (`ControllerSwitch.lost`)."""
        self._node, self._manager, self._lost = node, manager, lost
        self._news = threading.Condition()
        self._is_on = self._is_closing = self._is_silent = False
        self._turn = 0  # answers to requests from before the last begin or end do not count
        self._found = ""
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Watches from now on: our controller was activated."""
        self._set(is_on=True)

    def end(self) -> None:
        """Ends the watch, and forgets what was found: the caller is about to switch controllers."""
        self._set(is_on=False)

    def take(self) -> str:
        """Returns what is wrong, once; empty if nothing is."""
        with self._news:
            found, self._found = self._found, ""
            return found

    def close(self) -> None:
        with self._news:
            self._is_closing = True
            self._news.notify()
        self._thread.join()

    def _set(self, *, is_on: bool) -> None:
        with self._news:
            self._is_on, self._found = is_on, ""
            self._turn += 1
            self._news.notify()

    def _run(self) -> None:
        client = None
        while (turn := self._due()) is not None:
            client = client or self._node.create_client(_LIST, f"{self._manager}/list_controllers")
            try:
                response = client.call(self._node.message(f"{_LIST}_Request"), _ANSWER_S)
            except DeviceError as error:
                self._note_silence(str(error))
                continue
            self._note_silence("")
            found = self._lost(response.controller)
            with self._news:
                if found and turn == self._turn:
                    self._found = found
        if client is not None:
            client.close()

    def _due(self) -> int | None:
        """Waits until it is time to ask; returns the turn, or None at the end."""
        with self._news:
            while not self._is_closing:
                turn = self._turn
                # Woken by nothing but a new turn and the end.
                if not self._news.wait(_LOOK_S if self._is_on else None) and turn == self._turn:
                    return turn
            return None

    def _note_silence(self, why: str) -> None:
        if why and not self._is_silent:
            logger.warning("%s Who has the arm's joints is not known until it answers.", why)
        elif self._is_silent and not why:
            logger.info("ros2: %s answers again", self._manager)
        self._is_silent = bool(why)


def check_command_timeout(node: Node, config: Ros2Config) -> None:
    """Checks that the controller, or Servo, stops when commands stop, where it has a parameter for that.

    Raises:
        DeviceError: the parameter says that it does not stop, or later than the station file says.
    """
    if config.coasts_s is None:
        return
    is_velocity = config.command == "velocity"
    of = config.velocity_controller if is_velocity else config.servo_node
    client = node.create_client("rcl_interfaces/srv/GetParameters", f"{of}/get_parameters")
    is_there = client.wait(_FIND_S)
    client.close()
    if not is_there:
        logger.warning("ros2: %s has no parameters: that it stops by itself is not checked", of)
        return
    # One by one: a node that lacks one of several names answers none.
    for name in _TIMEOUTS["velocity" if is_velocity else "servo"]:
        given = get_remote(node, of, [name], CALL_S)[name]
        if not isinstance(given, int | float):
            continue
        if not 0 < given <= config.coasts_s:
            raise DeviceError(
                f"ros2: {of} has {name} = {given:g}, the station file says that it stops "
                f"{config.coasts_s:g} s after the last command (ros2.command_timeout_s). Set the parameter "
                "to that or less; 0 or below switches it off, and the arm would move on for ever."
            )
        return
    logger.warning("ros2: %s has no parameter for it: that it stops by itself is not checked", of)


def _remedy(rivals: Sequence[str]) -> str:
    return (
        f"Deactivate it with `ros2 control switch_controllers --deactivate {' '.join(rivals)}`, and end what "
        "started it."
    )
