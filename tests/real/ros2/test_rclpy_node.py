"""The node on rclpy, against a stand-in for rclpy: what it asks of it, and what it makes of messages."""

import importlib.util
import time
from collections.abc import Iterator

import numpy as np
import pytest

from robot_rl.real.ros2.api import LATCHED, GoalStatus, Ros2Error
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
    near.create_publisher("demo/msg/All", "latched", LATCHED)
    profile = world.publishers[-1].profile
    assert (profile.depth, profile.reliability.name, profile.durability.name) == (
        1,
        "RELIABLE",
        "TRANSIENT_LOCAL",
    )
    assert far.node_names() == ["/far/far", "/near"]
    assert far.publishers_of("/latched") == ["/near"]
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
        kind, "count", execute=execute, accept=lambda goal: goal.order >= 0, cancel=lambda handle: True
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
    with pytest.raises(Ros2Error, match=r"/far/count: the goal has not ended within 0.05 s"):
        waits.result(0.05)
    assert waits.cancel(LIMIT_S)
    assert waits.result(LIMIT_S)[0] == GoalStatus.CANCELED
    rejected = send(-1)
    assert not rejected.accepted
    with pytest.raises(Ros2Error, match="the goal was rejected"):
        rejected.result(LIMIT_S)


def test_an_action_server_that_goes_is_noticed(count) -> None:
    server, send = count
    sent = send(99)
    server.close()
    with pytest.raises(Ros2Error, match="no result; what became of the goal is not known"):
        sent.result(LIMIT_S)
    with pytest.raises(Ros2Error, match=r"/far/count: no server \(waited 10 s\)"):
        send(1)
    assert sent.cancel(LIMIT_S)
    until(sent._result.done)  # its thread has ended


@pytest.mark.skipif(importlib.util.find_spec("rclpy") is not None, reason="rclpy is installed")
def test_without_rclpy_one_message_says_what_to_do() -> None:
    with pytest.raises(
        Ros2Error, match=r"rclpy cannot be imported .* Source your ROS 2.* or use transport=dds"
    ):
        open_node("near", transport="rclpy")
