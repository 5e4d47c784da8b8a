"""Opening nodes: which transport, what is missing, and what DDS refuses."""

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robot_rl.real.ros2 import service, types
from robot_rl.real.ros2.api import DEFAULT, LATCHED, SENSOR, Ros2Error
from robot_rl.real.ros2.node import DdsNode, open_node
from robot_rl.real.ros2.parameters import Parameter, Parameters

STRING = "std_msgs/msg/String"
TRIGGER = "std_srvs/srv/Trigger"
LIMIT_S = 20.0


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_an_unknown_transport_is_refused():
    misspelt: Any = "rclp"
    with pytest.raises(Ros2Error, match=r"transport 'rclp'. Did you mean 'rclpy'"):
        open_node("a", transport=misspelt)


def test_without_rosbags_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rosbags.typesys", None)
    with pytest.raises(Ros2Error, match=r"rosbags is not installed.* pip install -e '.\[ros2\]'"):
        types.Types("jazzy")


def test_without_rclpy_and_cyclonedds_both_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cyclonedds", None)
    monkeypatch.delitem(sys.modules, "robot_rl.real.ros2.dds", raising=False)
    with pytest.raises(Ros2Error, match=r"neither rclpy nor cyclonedds.* pip install -e '.\[ros2\]'"):
        importlib.import_module("robot_rl.real.ros2.dds")


def test_an_rclpy_that_does_not_import_is_passed_over_aloud(
    ros_domain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    # As where a ROS 2 of another Python is sourced.
    (tmp_path / "rclpy").mkdir()
    (tmp_path / "rclpy" / "__init__.py").write_text(
        "raise ImportError('no _rclpy_pybind11 for cpython-312')\n"
    )
    monkeypatch.delitem(sys.modules, "rclpy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    node = open_node("a")
    assert isinstance(node, DdsNode)
    node.close()
    (line,) = caplog.messages
    assert line.startswith(
        "ros2: rclpy cannot be imported (no _rclpy_pybind11 for cpython-312). Source your ROS"
    )
    assert line.endswith("Going on without it, on CycloneDDS.")
    with pytest.raises(Ros2Error, match="rclpy cannot be imported"):
        open_node("a", transport="rclpy")


def test_a_graph_that_is_to_be_secure_is_not_joined_in_the_clear(
    ros_domain: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROS_SECURITY_ENABLE", "true")
    with pytest.raises(Ros2Error, match=r"ROS_SECURITY_ENABLE is 'true'.* join in the clear.* or unset it"):
        DdsNode("a")
    monkeypatch.setenv("ROS_SECURITY_ENABLE", "false")
    DdsNode("a").close()


def test_a_publisher_that_nothing_hears_is_named(ros_domain: int, caplog: pytest.LogCaptureFixture):
    node, far = DdsNode("a"), DdsNode("far")
    deaf = node.create_subscription(STRING, "deaf", print)
    for qos in (SENSOR, DEFAULT, LATCHED):  # the first hears all
        node.create_subscription(STRING, "heard", print, qos)
    for topic in ("heard", "deaf"):
        far.create_publisher(STRING, topic, SENSOR)
    until(lambda: caplog.messages)
    assert caplog.messages == [
        "ros2: /deaf: there is a publisher of which nothing is heard: its reliability is less than our "
        "subscription asks for. Compare them with `ros2 topic info -v /deaf`, and change the publisher's."
    ]
    deaf.close()
    far.create_publisher(STRING, "deaf", SENSOR)
    until(lambda: node.publishers_of("deaf") == ["/far", "/far"])
    assert len(caplog.messages) == 1
    node.close()
    far.close()


def test_ones_own_publishers_do_not_count(ros_domain: int):
    node, far = DdsNode("a"), DdsNode("a")  # a second program of the same name, as a second deployment is
    subscription = node.create_subscription(STRING, "x", print)
    node.create_publisher(STRING, "x")
    until(lambda: subscription.is_matched)
    assert subscription.num_publishers == 0
    far.create_publisher(STRING, "x")
    until(lambda: subscription.num_publishers == 1)
    until(lambda: node.publishers_of("x") == ["/a", "/a"])
    node.close()
    far.close()


def test_simulated_time_is_switched_on_and_off(ros_domain: int):
    node, clock = DdsNode("a"), DdsNode("clock")
    ticks = clock.create_publisher("rosgraph_msgs/msg/Clock", "/clock")
    assert abs(node.now_ns() - time.time_ns()) < 60e9
    node.use_sim_time = True
    assert (node.use_sim_time, node.now_ns()) == (True, 0)
    seconds = clock.message("builtin_interfaces/msg/Time", sec=12)

    def arrived() -> bool:
        ticks.publish(clock.message("rosgraph_msgs/msg/Clock", clock=seconds))
        return node.now_ns() == 12_000_000_000

    until(arrived)
    node.use_sim_time = False
    assert abs(node.now_ns() - time.time_ns()) < 60e9
    node.close()
    clock.close()


def test_nodes_of_several_threads_share_their_types(ros_domain: int, monkeypatch: pytest.MonkeyPatch):
    fresh = cache(types.Types)  # nothing is made yet
    monkeypatch.setattr("robot_rl.real.ros2.node.types_of", fresh)
    fresh("jazzy")
    start, errors = threading.Barrier(4), list[BaseException]()

    def work(name: str) -> None:
        start.wait()
        try:
            node = DdsNode(name)
            Parameters(node, [Parameter(name="speed", value=0.5)])
            node.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"node{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_what_a_closed_node_is_asked(ros_domain: int):
    node = DdsNode("a")
    publisher, client = node.create_publisher(STRING, "x"), node.create_client("std_srvs/srv/Trigger", "y")
    node.close()
    assert publisher.num_subscriptions == 0
    assert not client.wait(0.0)
    with pytest.raises(Ros2Error, match="Is the node closed"):
        node.create_publisher(STRING, "z")


def test_a_peer_that_comes_while_peers_are_counted_is_no_error(
    ros_domain: int, monkeypatch: pytest.MonkeyPatch
):
    # cyclonedds-python asks for the number first and for so many handles then: one more is an IndexError.
    node = DdsNode("a")
    publisher = node.create_publisher(STRING, "x")
    answers: list[Any] = [IndexError("invalid index"), [1, 2]]

    def look_up(_: Any) -> list[int]:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("cyclonedds.pub.DataWriter.get_matched_subscriptions", look_up)
    assert publisher.num_subscriptions == 2
    node.close()


def test_a_reply_waits_for_the_reader_of_this_client_and_no_other_of_its_node(
    ros_domain: int, monkeypatch: pytest.MonkeyPatch
):
    server, node = open_node("server", transport="dds"), open_node("client", transport="dds")
    with contextlib.closing(server), contextlib.closing(node):
        service: Any = server.create_service(TRIGGER, "go", lambda _: server.message(f"{TRIGGER}_Response"))
        heard: list[str] = []
        server.create_subscription(STRING, "talk", lambda message: heard.append(message.data))
        talker = node.create_publisher(STRING, "talk")
        until(lambda: talker.num_subscriptions)
        before = node.create_client(TRIGGER, "go")
        before.call(node.message(f"{TRIGGER}_Request"), LIMIT_S)
        known, find = service._writer.matched(), service._writer.matched
        found = threading.Event()  # the server finds the reader of the next client late, as on a busy machine
        monkeypatch.setattr(service._writer, "matched", lambda: find() if found.is_set() else known)
        answered = threading.Event()

        def call() -> None:
            node.create_client(TRIGGER, "go").call(node.message(f"{TRIGGER}_Request"), LIMIT_S)
            answered.set()

        thread = threading.Thread(target=call)
        thread.start()
        assert not answered.wait(0.3)
        begun_s = time.monotonic()
        talker.publish(node.message(STRING, data="meanwhile"))
        until(lambda: heard)
        # It waits a second for the reader; the other callbacks of the node do not.
        assert time.monotonic() - begun_s < 0.4
        assert not answered.is_set()
        found.set()
        assert answered.wait(LIMIT_S)
        thread.join()


def test_policies_of_endpoints_are_read_by_one_thread_at_a_time():
    dds = pytest.importorskip("robot_rl.real.ros2.dds")
    # cyclonedds-python reads them into variables of its class: two threads get each other's.
    readers, most = [0], [0]

    def look_up(_: int) -> Any:
        readers[0] += 1
        most[0] = max(most[0], readers[0])
        time.sleep(0.005)
        readers[0] -= 1

    own = SimpleNamespace(guid=SimpleNamespace(bytes=b"own"))
    threads = [
        threading.Thread(target=dds._Endpoint(own, list, look_up).participant_of, args=(handle,))
        for handle in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_handles_of_peers_are_as_samples_have_them():
    dds = pytest.importorskip("robot_rl.real.ros2.dds")
    own = SimpleNamespace(guid=SimpleNamespace(bytes=b"own"))
    assert dds._Endpoint(own, lambda: [-1, 5], dict).matched() == [2**64 - 1, 5]


def test_a_reply_to_others_that_comes_before_a_client_is_complete_is_none_of_its_business(
    monkeypatch,
) -> None:
    """Found in a log of the fault campaign: clients of one service share a topic for replies."""
    monkeypatch.setattr(service, "_identity", lambda participant, role: b"")

    class Eager:
        def writer(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(entity=SimpleNamespace(instance_handle=7), guid=b"writer")

        def reader(self, topic: str, kind: str, qos: Any, callback: Any, *_: Any, **__: Any) -> Any:
            callback(bytes(28), SimpleNamespace(publication_handle=3))
            return SimpleNamespace(guid=b"reader")

    participant: Any = Eager()
    graph: Any = SimpleNamespace(add=lambda **_: None)
    codecs: Any = SimpleNamespace(codec=lambda kind: None)
    service.DdsClient(participant, graph, codecs, TRIGGER, "go")
