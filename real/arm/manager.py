"""The controller manager: switches controllers so that no two command the same joint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from robot_rl.core.errors import ConfigError
from robot_rl.real.arm.body import Body
from robot_rl.real.arm.controllers import Controller, Cycle

State = Literal["unconfigured", "inactive", "active"]
Answer = tuple[bool, str]
"""Whether it was done, and a text: the reason if not, else the result."""


class ControllerManager:
    """Switches controllers as ros2_control does; the caller holds the arm's lock."""

    def __init__(self, controllers: Sequence[Controller], body: Body, active: Sequence[str]) -> None:
        self._known = {controller.name: controller for controller in controllers}
        self._states: dict[str, State] = dict.fromkeys(self._known, "inactive")
        self._body = body
        done, why_not = self.switch(active, (), strict=True)
        if not done:
            raise ConfigError(f"active: {why_not}")

    @property
    def states(self) -> Mapping[str, State]:
        """State of every loaded controller."""
        return self._states

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(controller.kind for controller in self._known.values()))

    def controller(self, name: str) -> Controller:
        return self._known[name]

    def is_active(self, name: str) -> bool:
        return self._states.get(name) == "active"

    def claimed(self) -> dict[str, str]:
        """Returns the active controller of every claimed interface."""
        return {
            interface: name
            for name, controller in self._known.items()
            if self.is_active(name)
            for interface in controller.interfaces
        }

    def update(self, cycle: Cycle) -> None:
        """Updates every active controller."""
        for name, controller in self._known.items():
            if self.is_active(name):
                controller.update(cycle, self._body)

    def halt(self, why: str) -> None:
        """Ends the work of active controllers; they stay active and hold."""
        for name, controller in self._known.items():
            if self.is_active(name):
                controller.halt(why, self._body)

    def switch(self, activate: Sequence[str], deactivate: Sequence[str], *, strict: bool) -> Answer:
        """Deactivates, then activates.

        With `strict` it does all or nothing; without, all that is possible.
        """
        problems: list[str] = []
        leaving = [
            name for name in dict.fromkeys(deactivate) if self._may(name, "deactivate", "active", problems)
        ]
        left = {name: state for name, state in self._states.items() if name not in leaving}
        owners = {
            interface.partition("/")[0]: name
            for name, state in left.items()
            if state == "active"
            for interface in self._known[name].interfaces
        }
        entering: list[str] = []
        for name in dict.fromkeys(activate):
            is_back = name in leaving  # deactivated and activated: a restart
            if (is_back or self._may(name, "activate", "inactive", problems)) and self._claim(
                name, owners, problems
            ):
                entering.append(name)
        if problems and strict:
            return False, " ".join(problems)
        self._change(leaving, entering)
        return True, " ".join(problems)

    def configure(self, name: str) -> Answer:
        if self._states.get(name) != "unconfigured":
            return False, f"controller {name!r} is {self._states.get(name, 'not loaded')}, not unconfigured."
        self._states[name] = "inactive"
        return True, ""

    def load(self, name: str) -> Answer:
        if name not in self._known:
            return False, f"no controller {name!r}. This arm has: {', '.join(self._known)}."
        if name in self._states:
            return False, f"a controller named {name!r} was already loaded."
        self._states[name] = "unconfigured"
        return True, ""

    def unload(self, name: str) -> Answer:
        state = self._states.get(name)
        if state is None or state == "active":
            why = "is active: deactivate it first." if state else "is not loaded."
            return False, f"controller {name!r} {why}"
        del self._states[name]
        return True, ""

    def _may(self, name: str, what: str, needed: State, problems: list[str]) -> bool:
        state = self._states.get(name)
        if state == needed:
            return True
        problems.append(f"Could not {what} controller {name!r}: it is {state or 'not loaded'}.")
        return False

    def _claim(self, name: str, owners: dict[str, str], problems: list[str]) -> bool:
        """Takes a controller's joints, unless another has one of them."""
        joints = [interface.partition("/")[0] for interface in self._known[name].interfaces]
        for interface, joint in zip(self._known[name].interfaces, joints, strict=True):
            if joint in owners:
                problems.append(
                    f"Resource conflict for controller {name!r}. Command interface {interface!r} is already "
                    f"claimed by {owners[joint]!r}: deactivate it in the same request."
                )
                return False
        owners.update(dict.fromkeys(joints, name))
        return True

    def _change(self, leaving: Sequence[str], entering: Sequence[str]) -> None:
        for name in leaving:
            self._known[name].halt("Current goal cancelled during deactivate transition.", self._body)
            self._states[name] = "inactive"
        for name in entering:
            self._known[name].activate(self._body)
            self._states[name] = "active"
