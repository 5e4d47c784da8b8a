"""The pip-only transport and Fast DDS, the default middleware of ROS 2: topics, services, the refusal."""

import os
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("cyclonedds")

from robot_rl.real.ros2.api import Ros2Error
from robot_rl.real.ros2.node import DdsNode

pytestmark = pytest.mark.slow
LIMIT_S = 30.0
JOINT_STATE = "sensor_msgs/msg/JointState"
TRIGGER = "std_srvs/srv/Trigger"


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> str:
    found = str(os.getpid() % 100)
    monkeypatch.setenv("ROS_DOMAIN_ID", found)
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    return found


@pytest.fixture
def node(domain: str) -> Iterator[DdsNode]:
    own = DdsNode("ours")
    yield own
    own.close()


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_joint_states_go_to_fast_dds_and_come_back_the_same(fastdds, start, node, domain) -> None:
    start(fastdds, "echo", domain).expect("ready")
    got = []
    pong = node.create_subscription(JOINT_STATE, "/pong", got.append)
    publisher = node.create_publisher(JOINT_STATE, "/joint_states")
    until(lambda: publisher.num_subscriptions and pong.num_publishers)
    sent = []
    for k in range(200):
        message = node.message(JOINT_STATE, name=["shoulder", "wrist"], position=[k, -0.5], effort=[1e300])
        message.header.stamp.nanosec = k
        publisher.publish(message)
        sent.append(message)
        # "Reliable" with a queue of ten is not lossless: here, nobody outruns it.
        until(lambda: len(got) > len(sent) - 5)
    until(lambda: len(got) == len(sent))
    for there, back in zip(sent, got, strict=True):
        assert back.header.stamp.nanosec == there.header.stamp.nanosec
        assert back.name == there.name
        assert back.velocity.shape == (0,)
        assert (back.position == there.position).all()
        assert (back.effort == there.effort).all()


def test_a_service_on_fast_dds_answers_us(fastdds, start, node, domain) -> None:
    server = start(fastdds, "server", domain, "power_on")
    client = node.create_client(TRIGGER, "/power_on")
    responses = [client.call(node.message(f"{TRIGGER}_Request"), LIMIT_S) for _ in range(3)]
    assert [(one.success, one.message) for one in responses] == [(True, "served by Fast DDS")] * 3
    server.expect("served")


def test_fast_dds_answers_itself(fastdds, start, domain) -> None:
    """What it does with us is not the peer's own fault."""
    start(fastdds, "server", domain, "power_on").expect("ready")
    start(fastdds, "client", domain, "power_on").expect("reply served by Fast DDS")


def test_a_fast_dds_client_of_ours_is_refused_loudly(fastdds, start, node, domain, caplog) -> None:
    asked = []
    node.create_service(TRIGGER, "/power_on", asked.append)
    client = start(fastdds, "client", domain, "power_on")
    client.expect("no reply")
    until(lambda: "service /power_on: a client on Fast DDS is there" in caplog.text)
    assert "RMW_IMPLEMENTATION=rmw_cyclonedds_cpp" in caplog.text
    assert asked == []
    assert not any(line.startswith("reply") for line in client.lines)


def test_a_server_on_fast_dds_that_goes_is_missed(fastdds, start, node, domain) -> None:
    server = start(fastdds, "server", domain, "power_on")
    client = node.create_client(TRIGGER, "/power_on")
    assert client.wait(LIMIT_S)
    server.close()
    until(lambda: not client.wait(0.0))
    with pytest.raises(Ros2Error, match="nobody serves /power_on"):
        client.call(node.message(f"{TRIGGER}_Request"), 0.1)
