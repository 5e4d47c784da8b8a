"""The node on rclpy, against a stand-in for rclpy: what it asks of it, and what it makes of messages."""

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from robot_rl.real.ros2.api import DEFAULT, LATCHED, SENSOR, GoalCallbacks, GoalStatus, Ros2Error
from robot_rl.real.ros2.node import open_node
from robot_rl.real.ros2.rclpy_node import RclpyNode
from tests.real.ros2 import fake_rclpy

LIMIT_S = 10.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> fake_rclpy.World:
    found = fake_rclpy.World()
    found.install(monkeypatch)
    return found


@pytest.fixture
def pair(world) -> Iterator[tuple[RclpyNode, RclpyNode]]:
    near = RclpyNode("near", remap={"there": "/far/here"})
    far = RclpyNode("far", namespace="far", use_sim_time=True)
    yield near, far
    far.close()
    near.close()


def until(condition) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_every_kind_of_field_arrives_as_it_was_sent(pair) -> None:
    near, far = pair
    got = []
    far.create_subscription("demo/msg/All", "here", got.append)
    publisher = near.create_publisher("demo/msg/All", "/far/here", LATCHED)
    sent = near.message(
        "demo/msg/All",
        name="arm",
        names=["a", "b"],
        flag=np.bool_(True),
        flags=[True, False],
        byte=7,
        bytes=np.array([1, 255], np.uint8),
        number=3,  # rosidl would refuse an int
        numbers=np.array([0.5, 1], np.float32),  # and an array of numpy
        pixels=b"\0\1\2",
        uuid=range(16),
        stamps=[near.message("demo/msg/Time", sec=5)],
    )
    sent.stamp.sec = -1
    publisher.publish(sent)
    until(lambda: got)
    back = got[0]
    assert (back.stamp.sec, back.stamps[0].sec, back.name, back.names) == (-1, 5, "arm", ["a", "b"])
    assert (back.flag, back.byte, back.number) == (True, 7, 3.0)
    for name, dtype, values in (
        ("flags", np.bool_, [True, False]),
        ("bytes", np.uint8, [1, 255]),
        ("numbers", np.float64, [0.5, 1.0]),
        ("pixels", np.uint8, [0, 1, 2]),
        ("uuid", np.uint8, list(range(16))),
    ):
        assert getattr(back, name).dtype == dtype
        assert getattr(back, name).tolist() == values
    assert publisher.num_subscriptions == 1


def test_messages_and_types_that_do_not_fit_are_named(pair) -> None:
    near, _ = pair
    with pytest.raises(Ros2Error, match=r"demo/msg/All has no field 'nmae'\. Did you mean 'name'\?"):
        near.message("demo/msg/All", nmae="x")
    with pytest.raises(Ros2Error, match=r"demo has no msg 'Al'\. Did you mean 'All'\?"):
        near.message("demo/msg/Al")
    with pytest.raises(Ros2Error, match=r"no Python module nowhere\.msg .* Install the ROS package nowhere"):
        near.message("nowhere/msg/Thing")
    publisher = near.create_publisher("demo/msg/All", "there")
    with pytest.raises(Ros2Error, match=r"All\.number cannot be sent"):
        publisher.publish(near.message("demo/msg/All", number="three"))


def test_what_rclpy_is_asked_for(world, pair) -> None:
    near, far = pair
    asked = {node.get_name(): node.keys for node in world.nodes}
    assert asked["near"]["cli_args"] == ["--ros-args", "-r", "there:=/far/here"]
    assert asked["far"]["cli_args"] is None
    assert asked["far"]["parameter_overrides"] == [("use_sim_time", True)]
    assert asked["far"]["start_parameter_services"] is False
    assert (near.use_sim_time, far.use_sim_time) == (False, True)
    far.use_sim_time = False
    assert not far.use_sim_time
    near.create_publisher("demo/msg/All", "latched", LATCHED)
    profile = world.publishers[-1].profile
    assert (profile.depth, profile.reliability.name, profile.durability.name) == (
        1,
        "RELIABLE",
        "TRANSIENT_LOCAL",
    )
    assert far.node_names() == ["/far/far", "/near"]
    assert far.publishers_of("/latched") == ["/near"]
    far.create_subscription("demo/msg/All", "only_heard", lambda message: None)
    assert near.topics_of("demo/msg/All") == ["/latched"]
    assert near.topics_of("demo/msg/Time") == []
    assert abs(near.now_ns() - time.time_ns()) < 60e9


def test_a_service_answers_and_a_failing_one_does_not_end_its_node(pair, caplog) -> None:
    near, far = pair

    def answer(request):
        if not answers:
            raise RuntimeError("on purpose")
        return answers.pop()

    answers = [far.message("demo/srv/Trigger_Response", success=True, message="done")]
    service = far.create_service("demo/srv/Trigger", "~/go", answer)
    client = near.create_client("demo/srv/Trigger", "/far/far/go")
    request = near.message("demo/srv/Trigger_Request")
    assert client.call(request, LIMIT_S).message == "done"
    assert not client.call(request, LIMIT_S).success
    assert "service ~/go failed" in caplog.text
    service.close()
    with pytest.raises(Ros2Error, match=r"nobody serves /far/far/go \(waited 0.1 s\)"):
        client.call(request, 0.1)


def test_a_call_from_within_a_callback_is_refused(pair) -> None:
    near, far = pair
    far.create_service("demo/srv/Trigger", "go", lambda _: far.message("demo/srv/Trigger_Response"))
    client = near.create_client("demo/srv/Trigger", "/far/go")
    said = []

    def call(_) -> None:
        try:
            client.call(near.message("demo/srv/Trigger_Request"), 1.0)
        except Ros2Error as error:
            said.append(str(error))

    near.create_subscription("demo/msg/Time", "/tick", call)
    far.create_publisher("demo/msg/Time", "/tick").publish(far.message("demo/msg/Time"))
    until(lambda: said)
    assert said == ["ros2: service /far/go called from within a callback: call from another thread."]


@pytest.fixture
def count(pair):
    """An action that counts to its order; negative ones are rejected, 13 fails, 99 waits to be cancelled."""
    near, far = pair
    kind = "demo/action/Count"

    def execute(handle) -> None:
        if handle.goal.order == 13:
            raise RuntimeError("on purpose")
        for k in range(handle.goal.order if handle.goal.order != 99 else 0):
            handle.feedback(far.message(f"{kind}_Feedback", last=k))
        while handle.goal.order == 99:
            if handle.cancel_requested:
                return handle.cancel(far.message(f"{kind}_Result"))
            time.sleep(0.005)
        return handle.succeed(far.message(f"{kind}_Result", sequence=range(handle.goal.order)))

    server = far.create_action_server(
        kind,
        "count",
        GoalCallbacks(execute=execute, accept=lambda goal: goal.order >= 0, cancel=lambda handle: True),
    )
    client = near.create_action_client(kind, "/far/count")
    return server, lambda order, hear=None: client.send(
        near.message(f"{kind}_Goal", order=order), LIMIT_S, hear
    )


def test_goals_succeed_fail_are_cancelled_and_rejected(count) -> None:
    _, send = count
    heard = []
    sent = send(3, heard.append)
    status, result = sent.result(LIMIT_S)
    assert (sent.accepted, status, result.sequence.tolist()) == (True, GoalStatus.SUCCEEDED, [0, 1, 2])
    until(lambda: [one.last for one in heard] == [0, 1, 2])
    assert send(13).result(LIMIT_S)[0] == GoalStatus.ABORTED
    waits = send(99)
    with pytest.raises(
        Ros2Error, match=r"/far/count: the goal has not ended within 0.05 s \(it is executing\). Wait longer"
    ):
        waits.result(0.05)
    assert waits.cancel(LIMIT_S)
    assert waits.result(LIMIT_S)[0] == GoalStatus.CANCELED
    assert not waits.cancel(LIMIT_S)  # of a goal that has ended nothing is left to cancel
    rejected = send(-1)
    assert not rejected.accepted
    with pytest.raises(Ros2Error, match="the goal was rejected"):
        rejected.result(LIMIT_S)


def test_an_action_server_that_goes_is_noticed(count) -> None:
    server, send = count
    sent = send(99)
    server.close()
    with pytest.raises(Ros2Error, match="no result; the goal was executing, what became of it is not known"):
        sent.result(LIMIT_S)
    with pytest.raises(Ros2Error, match=r"/far/count: no server \(waited 10 s\)"):
        send(1)
    assert sent.cancel(LIMIT_S)
    until(sent._result.done)  # its thread has ended


def test_a_goal_that_ends_wrongly_is_aborted(pair, caplog) -> None:
    near, far = pair
    far.create_action_server(
        "demo/action/Count",
        "count",
        GoalCallbacks(
            execute=lambda handle: handle.cancel(far.message("demo/action/Count_Result")),  # nobody asked
            accept=lambda goal: True,
            cancel=lambda handle: True,
        ),
    )
    client = near.create_action_client("demo/action/Count", "/far/count")
    sent = client.send(near.message("demo/action/Count_Goal"), LIMIT_S)
    assert sent.result(LIMIT_S)[0] == GoalStatus.ABORTED
    assert "the end of a goal: RCLError: Failed to update goal state" in caplog.text


def test_actions_are_remapped_though_rclpy_does_not(world) -> None:
    near = RclpyNode("near", remap={"gripper/grip": "hand/squeeze"})
    far = RclpyNode("far", remap={"serve": "/hand/squeeze"})
    kind = "demo/action/Count"
    far.create_action_server(
        kind,
        "serve",
        GoalCallbacks(
            execute=lambda handle: handle.succeed(far.message(f"{kind}_Result")),
            accept=lambda goal: True,
            cancel=lambda handle: True,
        ),
    )
    assert list(world.servers) == ["/hand/squeeze"]
    sent = near.create_action_client(kind, "gripper/grip").send(near.message(f"{kind}_Goal"), LIMIT_S)
    assert sent.result(LIMIT_S)[0] == GoalStatus.SUCCEEDED
    near.close()
    far.close()


def test_the_result_of_a_goal_that_ends_with_its_node_arrives(world) -> None:
    near, far = RclpyNode("near"), RclpyNode("far")
    kind, go = "demo/action/Count", threading.Event()

    def execute(handle) -> None:
        assert go.wait(LIMIT_S)
        handle.abort(far.message(f"{kind}_Result", sequence=[7]))

    callbacks = GoalCallbacks(execute=execute, accept=lambda goal: True, cancel=lambda handle: True)
    far.create_action_server(kind, "count", callbacks)
    sent = near.create_action_client(kind, "count").send(near.message(f"{kind}_Goal"), LIMIT_S)
    go.set()
    far.close()
    status, result = sent.result(1.0)
    assert (status, result.sequence.tolist()) == (GoalStatus.ABORTED, [7])
    near.close()


def test_the_arguments_of_the_program_are_not_the_nodes(world, monkeypatch) -> None:
    # They would move one process of a station, and not its others.
    monkeypatch.setattr(sys, "argv", ["robot-rl", "deploy", "--ros-args", "-r", "there:=/elsewhere"])
    node = RclpyNode("near")
    assert node.resolve("there") == "/there"
    node.close()


def test_what_rclpy_raises_says_where(world, pair) -> None:
    near, _ = pair
    with pytest.raises(Ros2Error, match=r"^ros2: node 'a b' in namespace 'x', remapping {}: InvalidNodeName"):
        RclpyNode("a b", namespace="x")
    assert [node.get_name() for node in world.nodes] == ["near", "far"]
    with pytest.raises(Ros2Error, match=r"publisher of 'a//b' \(demo/msg/All\): InvalidTopicNameException"):
        near.create_publisher("demo/msg/All", "a//b")
    with pytest.raises(Ros2Error, match="name 'a//b': InvalidTopicName"):
        near.create_subscription("demo/msg/All", "a//b", print)
    publisher = near.create_publisher("demo/msg/All", "there")
    client = near.create_client("demo/srv/Trigger", "go")
    near.close()
    with pytest.raises(Ros2Error, match=r"publishing on /far/here: InvalidHandle: .* Is the node closed\?"):
        publisher.publish(near.message("demo/msg/All"))
    for ask in (
        near.node_names,
        lambda: near.publishers_of("x"),
        lambda: near.create_client("demo/srv/Trigger", "x"),
    ):
        with pytest.raises(Ros2Error, match="InvalidHandle"):
            ask()
    world.servers["/go"] = object()
    with pytest.raises(Ros2Error, match=r"service /go: the node is closed"):
        client.call(near.message("demo/srv/Trigger_Request"), 0.1)


def test_a_silent_server_may_want_another_middleware(world, pair) -> None:
    near, far = pair
    go = threading.Event()

    def answer(_):
        go.wait(LIMIT_S)
        return far.message("demo/srv/Trigger_Response")

    far.create_service("demo/srv/Trigger", "go", answer)
    client, request = (
        near.create_client("demo/srv/Trigger", "/far/go"),
        near.message("demo/srv/Trigger_Request"),
    )
    with pytest.raises(Ros2Error) as error:
        client.call(request, 0.05)
    assert str(error.value) == (
        "ros2: service /far/go did not answer within 0.05 s. Is its node busy? This node is on "
        "rmw_fastrtps_cpp; a server without rclpy (robot_rl's pip transport) answers CycloneDDS only: set "
        "RMW_IMPLEMENTATION=rmw_cyclonedds_cpp here."
    )
    world.middleware = "rmw_cyclonedds_cpp"
    with pytest.raises(Ros2Error, match=r"Is its node busy\?$"):
        client.call(request, 0.05)
    go.set()


def test_every_publisher_is_an_entry_and_ones_own_do_not_count(world, pair) -> None:
    near, _ = pair
    subscription = near.create_subscription("demo/msg/All", "/x", print)
    near.create_publisher("demo/msg/All", "/x")
    assert (subscription.num_publishers, near.publishers_of("/x")) == (0, ["/near"])
    second = RclpyNode("near")  # as a second deployment is called, on another computer
    second.create_publisher("demo/msg/All", "/x")
    assert (subscription.num_publishers, near.publishers_of("/x")) == (1, ["/near", "/near"])
    second.close()


def test_a_publisher_that_nothing_hears_is_named(pair, caplog) -> None:
    near, far = pair
    near.create_subscription("demo/msg/All", "/deaf", print)
    for qos in (SENSOR, DEFAULT, LATCHED):  # the first hears all
        near.create_subscription("demo/msg/All", "/heard", print, qos)
    for topic in ("/heard", "/deaf"):
        far.create_publisher("demo/msg/All", topic, SENSOR)
    until(lambda: caplog.messages)
    assert caplog.messages == [
        "ros2: /deaf: there is a publisher of which nothing is heard: its reliability is less than our "
        "subscription asks for. Compare them with `ros2 topic info -v /deaf`, and change the publisher's."
    ]


@pytest.mark.skipif(importlib.util.find_spec("rclpy") is not None, reason="rclpy is installed")
def test_without_rclpy_one_message_says_what_to_do() -> None:
    with pytest.raises(
        Ros2Error, match=r"rclpy cannot be imported .* Source your ROS 2.* or use transport=dds"
    ):
        open_node("near", transport="rclpy")
