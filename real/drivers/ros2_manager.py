"""The arm's controller_manager, as its client: switches to our controller, and finds rivals by name."""

from __future__ import annotations

from collections.abc import Sequence

from robot_rl.core.errors import DeviceError, nearest
from robot_rl.real.drivers.ros2_commands import CALL_S, duration
from robot_rl.real.ros2.api import Message, Node, call_once

_STRICT = 2
"""controller_manager_msgs/srv/SwitchController: all of it or nothing."""
_SWITCH_S = 1.0


class ControllerSwitch:
    """Gives one controller the arm's joints, and takes them away again."""

    def __init__(
        self, node: Node, manager: str, wanted: str, joints: Sequence[str], ours: Sequence[str]
    ) -> None:
        """Looks at nothing yet.

        Args:
            node: of the driver.
            manager: name of the controller_manager node.
            wanted: the controller to switch to.
            joints: of the arm.
            ours: controllers that may be deactivated for it; any other that holds a joint is a rival.
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
        holders = [
            controller.name
            for controller in listed
            if controller.state == "active" and controller.name != self._wanted and self._claims(controller)
        ]
        rivals = [name for name in holders if name not in self._ours]
        if rivals:
            raise DeviceError(
                f"ros2: {', '.join(rivals)} commands joints of this arm already. Deactivate it with "
                f"`ros2 control switch_controllers --deactivate {' '.join(rivals)}`, and end what started it."
            )
        if any(one.name == self._wanted and one.state == "active" for one in listed) and not holders:
            return
        self._switch([self._wanted], holders)

    def deactivate(self) -> None:
        """Makes the controller inactive, if it is not.

        Raises:
            DeviceError: nobody answers, or the switch failed: the arm may still be under control.
        """
        if any(one.name == self._wanted and one.state == "active" for one in self._list()):
            self._switch([], [self._wanted])

    def _list(self) -> list[Message]:
        kind = "controller_manager_msgs/srv/ListControllers"
        return list(call_once(self._node, kind, f"{self._manager}/list_controllers", CALL_S).controller)

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
