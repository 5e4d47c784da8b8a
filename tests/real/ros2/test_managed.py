"""Actions, parameters and life cycle of a node in another process, seen by a client of ours."""

import itertools
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest.importorskip("cyclonedds")

from robot_rl.real.ros2.action_client import DdsActionClient
from robot_rl.real.ros2.api import GoalStatus, Node, Ros2Error
from robot_rl.real.ros2.node import DdsNode, open_node
from robot_rl.real.ros2.parameters import decode, get_remote, set_remote
from tests.real.ros2.conftest import own_domain, start_peer, stop_peer

PEER = "managed_peer.py"
KIND = "control_msgs/action/FollowJointTrajectory"
RUN, FAIL, CRASH, STUBBORN, REJECT = range(5)
"""As in the peer."""
LIMIT_S = 20.0
SHORT_LEASE = (
    "<CycloneDDS><Domain><Discovery><LeaseDuration>1s</LeaseDuration></Discovery></Domain></CycloneDDS>"
)


@pytest.fixture(
    scope="module",
    params=[
        "dds",
        pytest.param("rclpy", marks=pytest.mark.skipif(find_spec("rclpy") is None, reason="no ROS 2 here")),
    ],
)
def transport(request) -> str:
    """The tester's; the peer is always on the pip transport."""
    return request.param


@pytest.fixture(scope="module")
def peer(transport) -> Iterator["subprocess.Popen[str]"]:
    """A peer for each transport, in a domain of its own."""
    with pytest.MonkeyPatch.context() as patch:
        own_domain(patch)
        patch.setenv("RMW_IMPLEMENTATION", "rmw_cyclonedds_cpp")  # the peer's servers answer no other
        process = start_peer(script=PEER)
        yield process
        stop_peer(process)


@pytest.fixture
def node(transport, peer) -> Iterator[Node]:
    own = open_node("tester", transport=transport)
    yield own
    own.close()


_NUMBERS = itertools.count()


@pytest.fixture
def managed(peer) -> Iterator[str]:
    """The name of a node in the peer that is this test's alone: what other tests did does not matter."""
    name = f"one{next(_NUMBERS)}"
    tell(peer, name)
    yield f"/arm/{name}"
    tell(peer, "")


def tell(peer: "subprocess.Popen[str]", word: str) -> None:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(f"{word}\n")
    peer.stdin.flush()
    assert peer.stdout.readline() == "ready\n"


@pytest.fixture
def follow(node: Node, managed: str):
    client = node.create_action_client(KIND, f"{managed}/follow")
    assert client.wait(LIMIT_S)
    return client


def goal(node: Node, asked: int, points: int = 3):
    message = node.message(f"{KIND}_Goal")
    message.trajectory.joint_names = ["a", "b"]
    for k in range(points):
        point = node.message("trajectory_msgs/msg/JointTrajectoryPoint", positions=[0.1 * k, -0.1 * k])
        point.time_from_start.sec = asked
        message.trajectory.points.append(point)
    return message


def until(condition) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_goal_succeeds_with_feedback_for_each_point(node, follow) -> None:
    seen = []
    sent = follow.send(goal(node, RUN), LIMIT_S, seen.append)
    assert sent.accepted
    status, result = sent.result(LIMIT_S)
    assert status == GoalStatus.SUCCEEDED
    assert result.error_string == "done"
    assert [list(one.desired.positions) for one in seen] == [[0.1 * k, -0.1 * k] for k in range(3)]
    # It may be asked again while it is kept.
    assert sent.result(LIMIT_S)[1].error_string == "done"


def test_a_rejected_goal_has_no_result(node, follow) -> None:
    sent = follow.send(goal(node, REJECT), LIMIT_S)
    assert not sent.accepted
    with pytest.raises(Ros2Error, match=r"/arm/one\d+/follow: the goal was rejected"):
        sent.result(LIMIT_S)


def test_a_goal_is_cancelled_once(node, follow) -> None:
    sent = follow.send(goal(node, RUN, points=400), LIMIT_S)
    with pytest.raises(
        Ros2Error, match=r"has not ended within 0.2 s \(it is executing\). Wait longer, or can"
    ):
        sent.result(0.2)
    assert sent.cancel(LIMIT_S)
    assert sent.result(LIMIT_S)[0] == GoalStatus.CANCELED
    assert not sent.cancel(LIMIT_S)


def test_a_server_may_refuse_to_cancel(node, follow) -> None:
    sent = follow.send(goal(node, STUBBORN), LIMIT_S)
    assert not sent.cancel(LIMIT_S)
    assert sent.result(LIMIT_S)[0] == GoalStatus.SUCCEEDED


def test_failure_and_exception_abort(node, follow) -> None:
    failed, crashed = (follow.send(goal(node, asked, points=1), LIMIT_S) for asked in (FAIL, CRASH))
    assert failed.result(LIMIT_S)[0] == GoalStatus.ABORTED
    assert failed.result(LIMIT_S)[1].error_code == -5
    assert crashed.result(LIMIT_S)[0] == GoalStatus.ABORTED


def test_two_goals_run_side_by_side_and_keep_their_feedback_apart(node, follow) -> None:
    seen = {2: [], 4: []}
    sent = {points: follow.send(goal(node, RUN, points), LIMIT_S, seen[points].append) for points in seen}
    assert all(one.result(LIMIT_S)[0] == GoalStatus.SUCCEEDED for one in sent.values())
    assert {points: len(feedback) for points, feedback in seen.items()} == {2: 2, 4: 4}


@pytest.fixture
def cancel(node: Node, managed: str):
    """Sends a CancelGoal request: the id of a goal and a time in ns, zero for none."""
    client = node.create_client("action_msgs/srv/CancelGoal", f"{managed}/follow/_action/cancel_goal")

    def call(goal_id: bytes = bytes(16), stamp_ns: int = 0):
        request = node.message("action_msgs/srv/CancelGoal_Request")
        request.goal_info.goal_id.uuid = goal_id
        request.goal_info.stamp.sec, request.goal_info.stamp.nanosec = divmod(stamp_ns, 1_000_000_000)
        response = client.call(request, LIMIT_S)
        named = [bytes(one.goal_id.uuid) for one in response.goals_canceling]
        assert len(set(named)) == len(named), "a goal is in the answer twice"
        return response.return_code, set(named)

    return call


def test_cancel_by_zero_id_means_all_or_those_up_to_a_time(node, follow, cancel) -> None:
    assert cancel() == (0, set())
    early = [follow.send(goal(node, RUN, points=400), LIMIT_S) for _ in range(2)]
    now_ns = node.now_ns()
    late = follow.send(goal(node, RUN, points=400), LIMIT_S)
    assert cancel(stamp_ns=now_ns) == (0, {one.id for one in early})
    assert cancel() == (0, {late.id})
    assert cancel() == (0, set())  # a second answer names no goal again
    assert all(one.result(LIMIT_S)[0] == GoalStatus.CANCELED for one in (*early, late))


def test_cancel_says_why_not(node, follow, cancel) -> None:
    assert cancel(b"\1" * 16) == (2, set())  # ERROR_UNKNOWN_GOAL_ID
    done = follow.send(goal(node, RUN, points=1), LIMIT_S)
    done.result(LIMIT_S)
    assert cancel(done.id) == (3, set())  # ERROR_GOAL_TERMINATED
    stubborn = follow.send(goal(node, STUBBORN), LIMIT_S)
    assert cancel(stubborn.id) == (1, set())  # ERROR_REJECTED
    stubborn.result(LIMIT_S)


def test_result_of_an_unknown_goal_is_unknown_and_old_ones_are_forgotten(node, managed, follow) -> None:
    if not isinstance(node, DdsNode):
        pytest.skip("rclpy hides the services of an action")
    client = node.create_client(f"{KIND}_GetResult", f"{managed}/follow/_action/get_result")
    request = node.message(f"{KIND}_GetResult_Request")
    request.goal_id.uuid = b"\1" * 16
    assert client.call(request, LIMIT_S).status == GoalStatus.UNKNOWN
    sent = follow.send(goal(node, RUN, points=1), LIMIT_S)
    sent.result(LIMIT_S)
    request.goal_id.uuid = sent.id
    # Kept for a second.
    until(lambda: client.call(request, LIMIT_S).status == GoalStatus.UNKNOWN)


@pytest.mark.slow
def test_a_server_that_dies_is_noticed(ros_domain, start, monkeypatch) -> None:
    monkeypatch.setenv("CYCLONEDDS_URI", SHORT_LEASE)  # its death shows when its lease ends
    server = start(script=PEER)
    own = DdsNode("lonely")
    client = DdsActionClient(own, KIND, "arm/follow")
    sent = client.send(goal(own, RUN, points=400), LIMIT_S)
    until(lambda: sent.status == GoalStatus.EXECUTING)
    server.kill()
    with pytest.raises(Ros2Error, match=r"/arm/follow: no result; the goal was executing"):
        sent.result(LIMIT_S)
    with pytest.raises(Ros2Error, match=r"/arm/follow: no server \(waited 0.1 s\)"):
        client.send(goal(own, RUN), 0.1)
    own.close()
    server.communicate()


def test_parameters_are_read_and_set_from_afar(node, managed) -> None:
    names = ["speed", "serial", "gains.p", "gains.names", "episode_seed"]
    assert get_remote(node, managed, names) == {
        "speed": 0.5,
        "serial": "A7",
        "gains.p": (1.0, 2.0),
        "gains.names": (),
        "episode_seed": 0,
    }
    set_remote(node, managed, {"episode_seed": 7, "gains.names": ("x", "y")})
    assert get_remote(node, managed, ["episode_seed", "gains.names"]) == {
        "episode_seed": 7,
        "gains.names": ("x", "y"),
    }
    # ROS's answer to both at once is empty.
    assert get_remote(node, managed, ["speed", "no_such", "serial"]) == {
        "speed": 0.5,
        "no_such": None,
        "serial": "A7",
    }


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"episode_seed": 1, "speed": 1.5}, "'speed' must be within 0 and 1, got 1.5"),
        ({"episode_seed": 1, "speed": 1}, "'speed' is double, got integer"),
        ({"episode_seed": 1, "serial": "A8"}, "'serial' is read-only"),
        ({"episode_seed": 1, "no_such": 1}, "'no_such' is not declared"),
        ({"episode_seed": 13}, "13 is unlucky"),
    ],
)
def test_a_refused_parameter_changes_nothing(node, managed, values, reason) -> None:
    before = get_remote(node, managed, ["episode_seed"])
    with pytest.raises(Ros2Error, match=rf"^parameter of {managed}: {reason}\.$"):
        set_remote(node, managed, values)
    assert get_remote(node, managed, ["episode_seed"]) == before


def ask(node: Node, managed: str, kind: str, name: str, **fields):
    client = node.create_client(kind, f"{managed}/{name}")
    try:
        return client.call(node.message(f"{kind}_Request", **fields), LIMIT_S)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("prefixes", "depth", "names"),
    [
        ([], 0, ["episode_seed", "gains.names", "gains.p", "serial", "speed", "use_sim_time"]),
        ([], 1, ["episode_seed", "serial", "speed", "use_sim_time"]),
        (["gains"], 0, ["gains.names", "gains.p"]),
        (["speed"], 1, ["speed"]),
    ],
)
def test_parameters_are_listed_by_prefix_and_depth(node, managed, prefixes, depth, names) -> None:
    result = ask(
        node, managed, "rcl_interfaces/srv/ListParameters", "list_parameters", prefixes=prefixes, depth=depth
    ).result
    assert result.names == names
    assert result.prefixes == (["gains"] if any("." in name for name in names) else [])


def test_every_node_has_use_sim_time_and_it_takes_effect(node, managed) -> None:
    assert get_remote(node, managed, ["use_sim_time"]) == {"use_sim_time": False}
    ticks = node.create_publisher("rosgraph_msgs/msg/Clock", "/clock")
    events = []
    node.create_subscription("rcl_interfaces/msg/ParameterEvent", "/parameter_events", events.append)
    set_remote(node, managed, {"use_sim_time": True})
    assert get_remote(node, managed, ["use_sim_time"]) == {"use_sim_time": True}
    until(lambda: ticks.num_subscriptions)
    seconds = node.message("builtin_interfaces/msg/Time", sec=12)

    def is_followed() -> bool:
        ticks.publish(node.message("rosgraph_msgs/msg/Clock", clock=seconds))
        set_remote(node, managed, {"speed": 0.25})
        return any(one.stamp.sec == 12 and one.node == managed for one in events)

    until(is_followed)
    set_remote(node, managed, {"use_sim_time": False})
    until(lambda: ticks.num_subscriptions == 0)


def test_parameters_are_described(node, managed) -> None:
    kind = "rcl_interfaces/srv/DescribeParameters"
    speed, serial = ask(node, managed, kind, "describe_parameters", names=["speed", "serial"]).descriptors
    assert (speed.type, speed.description, speed.read_only) == (3, "share of the limit", False)
    assert (speed.floating_point_range[0].from_value, speed.floating_point_range[0].to_value) == (0.0, 1.0)
    assert (serial.type, serial.read_only, serial.floating_point_range) == (4, True, [])
    types = ask(
        node, managed, "rcl_interfaces/srv/GetParameterTypes", "get_parameter_types", names=["gains.names"]
    ).types
    assert list(types) == [9]


def test_a_change_is_an_event(node, managed) -> None:
    events = []
    subscription = node.create_subscription(
        "rcl_interfaces/msg/ParameterEvent", "/parameter_events", events.append
    )
    until(lambda: subscription.num_publishers == 2)  # of both nodes of the peer; one's own does not count
    set_remote(node, managed, {"speed": 0.75})
    until(lambda: events)
    subscription.close()
    (event,) = [one for one in events if one.node == managed]
    assert [(one.name, decode(one.value)) for one in event.changed_parameters] == [("speed", 0.75)]


def test_life_cycle_from_unconfigured_to_the_end(node, managed) -> None:
    events = []
    subscription = node.create_subscription(
        "lifecycle_msgs/msg/TransitionEvent", f"{managed}/transition_event", events.append
    )
    until(lambda: subscription.num_publishers == 1)

    def change(label: str = "", number: int = 0) -> bool:
        transition = node.message("lifecycle_msgs/msg/Transition", id=number, label=label)
        return ask(
            node, managed, "lifecycle_msgs/srv/ChangeState", "change_state", transition=transition
        ).success

    def state() -> tuple[int, str]:
        found = ask(node, managed, "lifecycle_msgs/srv/GetState", "get_state").current_state
        return found.id, found.label

    assert state() == (1, "unconfigured")
    assert not change("activate")
    assert change(number=1)
    assert state() == (2, "inactive")
    assert not change("activate")  # the callback fails the first time
    assert state() == (2, "inactive")
    assert change("activate")
    assert state() == (3, "active")
    available = ask(node, managed, "lifecycle_msgs/srv/GetAvailableTransitions", "get_available_transitions")
    offered = [(one.transition.id, one.transition.label) for one in available.available_transitions]
    assert offered == [(4, "deactivate"), (7, "shutdown")]
    assert not change("deactivate")  # raises; "error" mends it
    assert state() == (1, "unconfigured")
    assert change("shutdown")
    assert state() == (4, "finalized")
    until(lambda: len(events) == 11)
    subscription.close()
    passed = [(one.start_state.label, one.transition.label, one.goal_state.label) for one in events]
    assert passed[:2] == [
        ("unconfigured", "configure", "configuring"),
        ("configuring", "transition_success", "inactive"),
    ]
    assert [event[1] for event in passed[6:9]] == ["deactivate", "transition_error", "transition_success"]
    assert passed[-1] == ("shuttingdown", "transition_success", "finalized")


def test_the_whole_life_cycle_is_on_offer(node, managed) -> None:
    states = ask(
        node, managed, "lifecycle_msgs/srv/GetAvailableStates", "get_available_states"
    ).available_states
    assert [one.id for one in states] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15]
    kind = "lifecycle_msgs/srv/GetAvailableTransitions"
    graph = ask(node, managed, kind, "get_transition_graph").available_transitions
    # 4 transitions and shutdown from 3 states; 3 outcomes of each of 6 callbacks.
    assert len(graph) == 7 + 18
