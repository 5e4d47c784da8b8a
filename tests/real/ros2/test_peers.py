"""What a node and a peer in another process make of each other, over the wire."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from robot_rl.real.ros2 import dds
from robot_rl.real.ros2.api import LATCHED, QoS, Ros2Error
from robot_rl.real.ros2.node import DdsNode, open_node

JOINT_STATE = "sensor_msgs/msg/JointState"
LIST = "rcl_interfaces/srv/ListParameters"
SET_BOOL = "std_srvs/srv/SetBool"
TRIGGER = "std_srvs/srv/Trigger"
SHORT_LEASE = (
    "<CycloneDDS><Domain><Discovery><LeaseDuration>1s</LeaseDuration></Discovery></Domain></CycloneDDS>"
)


@pytest.fixture
def node(peer: "subprocess.Popen[str]") -> Iterator[DdsNode]:
    near = DdsNode("near")
    yield near
    near.close()


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def ask(node: DdsNode, name: str) -> Callable[[int], int]:
    """Returns a function that calls a service with a number and returns the number answered."""
    client = node.create_client(LIST, name)

    def call(number: int) -> int:
        response = client.call(node.message(f"{LIST}_Request", depth=number), 20.0)
        return int(response.result.names[0])

    return call


def test_messages_travel_both_ways_unchanged(node: DdsNode):
    got: list[Any] = []
    node.create_subscription(JOINT_STATE, "/far/back", got.append)
    publisher = node.create_publisher(JOINT_STATE, "there")
    sent = node.message(
        JOINT_STATE, name=["a", "bc"], position=[1.5, -2.0], effort=np.array([3, 4], np.float32)
    )
    sent.header.frame_id = "base"
    sent.header.stamp.sec = -7
    wait_for(lambda: publisher.num_subscriptions)

    def arrived() -> bool:
        publisher.publish(sent)  # the way back may not be open yet
        return bool(got)

    wait_for(arrived)
    back = got[0]
    assert (back.name, back.header.frame_id, back.header.stamp.sec) == (["a", "bc"], "base", -7)
    assert (list(back.position), list(back.velocity), list(back.effort)) == ([1.5, -2.0], [], [3.0, 4.0])
    assert back.position.dtype == np.float64


def test_a_late_subscriber_gets_what_was_latched(node: DdsNode):
    got: list[Any] = []
    subscription = node.create_subscription("std_msgs/msg/String", "/robot_description", got.append, LATCHED)
    wait_for(lambda: got)
    assert got[0].data == "<robot/>"
    assert subscription.num_publishers == 1
    volatile: list[Any] = []
    node.create_subscription("std_msgs/msg/String", "/robot_description", volatile.append)
    wait_for(lambda: node.publishers_of("/robot_description") == ["/far/peer"])
    assert volatile == []


def test_a_service_answers_at_once_or_later(node: DdsNode):
    assert ask(node, "/far/peer/count")(7) == 7
    assert ask(node, "/far/peer/later")(8) == 8


def test_clients_that_call_at_the_same_time_get_their_own_answers(node: DdsNode):
    first, second = ask(node, "/far/peer/later"), ask(node, "/far/peer/later")
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(call, n) for n in range(16) for call in (first, second)]
    assert [answer.result() for answer in answers] == [n for n in range(16) for _ in range(2)]


def test_bytes_that_are_no_request_are_ignored_and_counted(node: DdsNode, caplog: pytest.LogCaptureFixture):
    node.create_service(LIST, "own", lambda request: node.message(f"{LIST}_Response"))
    foreign = DdsNode("foreign")
    writer = foreign.participant.writer("rq/ownRequest", f"{LIST}_Request", QoS(), opaque=True)
    wait_for(lambda: writer.matched())
    with caplog.at_level(logging.ERROR):
        for garbage in (b"\0\1\0\0\x09\0\0\0", b"\0\1\0\0" + b"\xff" * 40):
            writer.write(bytearray(garbage))
        wait_for(lambda: node.participant.bad_samples.get("rq/ownRequest") == 2)
    assert len([line for line in caplog.messages if "a sample is ignored" in line]) == 1
    assert ask(foreign, "/far/peer/count")(1) == 1
    client = foreign.create_client(LIST, "/own")
    assert client.call(foreign.message(f"{LIST}_Request"), 20.0).result.names == []
    foreign.close()


def test_a_response_of_another_definition_says_so(node: DdsNode):
    other = DdsNode("other")
    request, response = (other.types.codec(f"{TRIGGER}_{part}").kind for part in ("Request", "Response"))
    writer = other.participant.writer("rr/oddReply", response, QoS(), opaque=True)

    def answer(octets: bytes, _: Any) -> None:
        writer.write(bytearray(octets[:20] + b"\1\0\0\0" + b"\xff" * 8))

    other.participant.reader("rq/oddRequest", request, QoS(), answer, opaque=True)
    client = node.create_client(TRIGGER, "/odd")
    with pytest.raises(Ros2Error, match=r"/odd .* sent an answer that cannot be read: .* Set ROS_DISTRO"):
        client.call(node.message(f"{TRIGGER}_Request"), 20.0)
    wait_for(lambda: node.participant.bad_samples.get("rr/oddReply") == 1)
    other.close()


def test_nobody_serves_and_calls_from_callbacks_say_so(node: DdsNode):
    client = node.create_client(TRIGGER, "nowhere")
    with pytest.raises(Ros2Error, match=r"nobody serves /nowhere .* Start the server"):
        client.call(node.message(f"{TRIGGER}_Request"), 0.05)
    said: list[str] = []

    def call_inside(_: Any) -> None:
        try:
            client.call(node.message(f"{TRIGGER}_Request"), 1.0)
        except Ros2Error as error:
            said.append(str(error))

    node.create_subscription("rosgraph_msgs/msg/Clock", "/clock", call_inside)
    wait_for(lambda: said)
    assert "called from within a callback" in said[0]


def test_a_callback_that_fails_is_counted_and_said_once(node: DdsNode, caplog: pytest.LogCaptureFixture):
    def fail(_: Any) -> None:
        raise KeyError("joint9")

    with caplog.at_level(logging.ERROR):
        node.create_subscription("rosgraph_msgs/msg/Clock", "/clock", fail)
        wait_for(lambda: node.participant.failures.get("rt/clock", 0) > 2)
    assert caplog.text.count("the callback of rt/clock failed") == 1
    assert "joint9" in caplog.text
    assert ask(node, "/far/peer/count")(5) == 5


def test_a_closed_service_refuses_nobody(
    node: DdsNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    service = node.create_service(TRIGGER, "gone", lambda request: node.message(f"{TRIGGER}_Response"))
    service.close()
    monkeypatch.setattr(dds, "CYCLONE", b"\x01\x11")
    other = DdsNode("other")
    other.create_client(TRIGGER, "/gone")
    wait_for(lambda: node.publishers_of("/clock") and "/other" in node.node_names())
    assert node.topics_of("rosgraph_msgs/msg/Clock") == ["/clock"]
    assert node.topics_of("std_msgs/msg/String") == ["/robot_description"]
    other.close()
    assert "cannot answer" not in caplog.text


def test_time_is_that_of_the_simulation(peer: "subprocess.Popen[str]"):
    simulated = open_node("simulated", transport="dds", use_sim_time=True)
    wait_for(lambda: simulated.now_ns() == 12_500_000_000)
    simulated.close()


def test_remapping_reaches_the_wire(peer: "subprocess.Popen[str]"):
    renamed = DdsNode("x", remap={"__node": "renamed", "__ns": "/left", "ask": "/far/peer/count"})
    assert ask(renamed, "ask")(3) == 3
    wait_for(lambda: {"/left/renamed", "/far/peer"} <= set(renamed.node_names()))
    renamed.close()


def test_the_graph_loses_a_node_that_closes(node: DdsNode, peer: "subprocess.Popen[str]"):
    assert peer.stdin is not None
    peer.stdin.write("short\n")
    peer.stdin.flush()
    wait_for(lambda: "/far/short" in node.node_names())
    wait_for(lambda: node.publishers_of("/clock") == ["/far/peer", "/far/short"])
    peer.stdin.write("\n")
    peer.stdin.flush()
    wait_for(lambda: "/far/short" not in node.node_names())
    assert node.publishers_of("/clock") == ["/far/peer"]


@pytest.mark.slow  # another process
def test_the_graph_loses_a_node_that_is_killed(
    node: DdsNode, start: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CYCLONEDDS_URI", SHORT_LEASE)  # 10 s otherwise
    other = start("killed")
    wait_for(lambda: "/far/killed" in node.node_names())
    other.kill()
    other.communicate()
    wait_for(lambda: "/far/killed" not in node.node_names(), 40.0)


def test_a_client_on_another_middleware_is_refused_aloud(
    node: DdsNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    # The peer, which has a client of /near/go, seems to be on Fast DDS: ours is not.
    monkeypatch.setattr(dds, "CYCLONE", b"\x01\x11")
    monkeypatch.setitem(dds.VENDORS, b"\x01\x10", "Fast DDS")
    with caplog.at_level(logging.ERROR):
        node.create_service(TRIGGER, "go", lambda request: node.message(f"{TRIGGER}_Response"))
        node.create_service(TRIGGER, "/near/go", lambda request: node.message(f"{TRIGGER}_Response"))
        wait_for(lambda: caplog.messages)
    (line,) = caplog.messages
    assert "service /near/go: a client on Fast DDS is there" in line
    assert "RMW_IMPLEMENTATION=rmw_cyclonedds_cpp" in line
    assert "rclpy" in line


def test_a_server_without_headers_is_called_one_by_one(node: DdsNode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dds, "CYCLONE", b"\x01\x11")
    client = node.create_client(SET_BOOL, "/bare")

    def call(number: int) -> bool:
        response = client.call(node.message(f"{SET_BOOL}_Request", data=bool(number % 2)), 20.0)
        assert response.message == "bare"
        return response.success

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, range(12))) == [bool(number % 2) for number in range(12)]


@pytest.mark.slow  # a process of its own
def test_a_process_that_forgets_to_close_ends_at_once_and_in_order(ros_domain: int):
    program = (
        "from robot_rl.real.ros2.node import DdsNode\n"
        "node = DdsNode('forgetful')\n"
        "node.create_publisher('std_msgs/msg/String', 'a')\n"
        "node.create_service('std_srvs/srv/Trigger', 'b', print)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_closed_node_says_so_and_its_thread_has_ended(ros_domain: int):
    node = DdsNode("closed")
    publisher = node.create_publisher("std_msgs/msg/String", "a")
    node.close()
    node.close()
    assert not any(thread.name == "ros2 /closed" for thread in threading.enumerate())
    with pytest.raises(Ros2Error, match=r"Is the node closed\?"):
        publisher.publish(node.message("std_msgs/msg/String"))


def test_a_host_full_of_ros_processes_says_so(peer: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(
        "CYCLONEDDS_URI",
        "<CycloneDDS><Domain><Discovery><MaxAutoParticipantIndex>0</MaxAutoParticipantIndex></Discovery>"
        "</Domain></CycloneDDS>",
    )
    with pytest.raises(Ros2Error, match=r"room for 33 ROS processes .* use another ROS_DOMAIN_ID"):
        DdsNode("one_too_many")
    monkeypatch.delenv("CYCLONEDDS_URI")
    DdsNode("after_that").close()


def test_without_a_clock_simulated_time_stands_at_zero(ros_domain: int):
    node = DdsNode("simulated", use_sim_time=True)
    assert node.now_ns() == 0
    node.close()


def test_one_domain_has_one_discovery(ros_domain: int, monkeypatch: pytest.MonkeyPatch):
    first = DdsNode("first")
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "SUBNET")
    with pytest.raises(Ros2Error, match="open in this process with other discovery settings"):
        DdsNode("second")
    first.close()
