"""The watch over our controller: on a thread of its own, over a graph in this process."""

import threading
import time

import pytest

from robot_rl.real.drivers import ros2_manager
from robot_rl.real.drivers.ros2_manager import ControllerSwitch, ControllerWatch
from robot_rl.real.ros2.api import Ros2Error
from tests.real.drivers.ros_graph import FakeNode, manager

LIST, FORWARD = "controller_manager/list_controllers", "forward_position_controller"
WAIT_S = 10.0


class Watched:
    """A controller_manager that answers when the test lets it, and the watch over it."""

    def __init__(self) -> None:
        self.controllers = {FORWARD: ("inactive", ["a/position"])}
        self.node = FakeNode(manager(self.controllers))
        self.asked, self.may_answer = threading.Semaphore(0), threading.Semaphore(0)
        self.error = ""
        self.switch = ControllerSwitch(self.node, "controller_manager", FORWARD, ["a"], [FORWARD])
        self.switch.activate()
        self._list = self.node.services[LIST]
        self.node.services[LIST] = self._answer
        self.watch = ControllerWatch(self.node, "controller_manager", self.switch.lost)

    def _answer(self, request):
        self.asked.release()
        assert self.may_answer.acquire(timeout=WAIT_S)
        if self.error:
            raise Ros2Error(self.error)
        return self._list(request)

    def is_asked(self):
        assert self.asked.acquire(timeout=WAIT_S)

    def answer(self):
        """Answers the question that waits, and returns what the watch says when it asks the next one."""
        self.may_answer.release()
        self.is_asked()
        return self.watch.take()


@pytest.fixture(name="watched")
def provide_watched(monkeypatch):
    monkeypatch.setattr(ros2_manager, "_LOOK_S", 0.01)
    watched = Watched()
    yield watched
    watched.may_answer.release(1000)
    watched.watch.close()
    assert watched.node.clients == 0


def test_an_answer_from_before_the_driver_itself_switched_counts_for_nothing(watched):
    watched.watch.begin()
    watched.is_asked()
    watched.watch.end()
    watched.controllers[FORWARD] = ("inactive", ["a/position"])  # by the driver
    watched.watch.begin()
    assert watched.answer() == ""
    assert watched.answer().startswith(f"{FORWARD} is inactive")  # true of what was asked after `begin`
    watched.controllers[FORWARD] = ("active", ["a/position"])
    assert watched.answer() == ""


def test_what_was_found_is_forgotten_when_the_driver_switches(watched):
    watched.controllers.clear()
    watched.watch.begin()
    watched.is_asked()
    watched.may_answer.release()
    watched.is_asked()  # so the answer before was taken in
    watched.watch.end()
    assert watched.watch.take() == ""
    watched.watch.begin()
    assert watched.answer() == ""
    assert watched.answer() == (
        f"{FORWARD} is not loaded: somebody switched it off, or it failed. Look at the log of "
        "controller_manager."
    )


def test_a_silent_manager_is_told_once_in_the_log_only(watched, caplog):
    caplog.set_level("INFO", logger=ros2_manager.logger.name)
    watched.watch.begin()
    watched.is_asked()
    begun_s = time.monotonic()
    assert watched.watch.take() == ""
    assert time.monotonic() - begun_s < 1.0  # while the question is unanswered
    watched.error = "ros2: service list_controllers did not answer within 3 s."
    assert watched.answer() == ""
    assert watched.answer() == ""
    watched.error = ""
    assert watched.answer() == ""
    assert watched.answer() == ""
    assert caplog.messages == [
        "ros2: service list_controllers did not answer within 3 s. Who has the arm's joints is not known "
        "until it answers.",
        "ros2: controller_manager answers again",
    ]
