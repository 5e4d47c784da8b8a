"""Our side of the test against dora-rs: uses all that `dora_peer.py` offers; prints what it got as JSON."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from robot_rl.real.ros2.node import DdsNode

LIMIT_S = 15.0
JOINT_STATE = "sensor_msgs/msg/JointState"
FOLLOW = "control_msgs/action/FollowJointTrajectory"


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"nothing within {LIMIT_S} s")
        time.sleep(0.01)


def echoed(node: DdsNode, count: int) -> int:
    """Returns how many joint states came back as they went."""
    got: list[Any] = []
    pong = node.create_subscription(JOINT_STATE, "/pong", got.append)
    publisher = node.create_publisher(JOINT_STATE, "/joint_states")
    until(lambda: publisher.num_subscriptions and pong.num_publishers)
    for k in range(count):
        publisher.publish(node.message(JOINT_STATE, name=["a", "b"], position=[k, -0.5]))
        until(lambda sent=k + 1: len(got) == sent)
    return sum(list(one.position) == [k, -0.5] and one.name == ["a", "b"] for k, one in enumerate(got))


def enabled(node: DdsNode) -> list[tuple[bool, str]]:
    kind = "std_srvs/srv/SetBool"
    client = node.create_client(kind, "/enable")
    answers = [client.call(node.message(f"{kind}_Request", data=on), LIMIT_S) for on in (True, False)]
    return [(answer.success, answer.message) for answer in answers]


def followed(node: DdsNode) -> dict[str, Any]:
    """Returns what came of a goal that ran and of one that was cancelled."""
    client = node.create_action_client(FOLLOW, "/follow")

    def goal(points: int) -> Any:
        message = node.message(f"{FOLLOW}_Goal")
        message.trajectory.joint_names = ["a", "b"]
        message.trajectory.points = [
            node.message("trajectory_msgs/msg/JointTrajectoryPoint", positions=[0.1 * k, 0.0])
            for k in range(points)
        ]
        return message

    seen: list[float] = []
    sent = client.send(goal(4), LIMIT_S, lambda feedback: seen.append(feedback.actual.positions[0]))
    status, result = sent.result(LIMIT_S)
    long = client.send(goal(300), LIMIT_S)
    time.sleep(0.5)
    agreed = long.cancel(LIMIT_S)
    return {
        "accepted": sent.accepted,
        "feedback": seen,
        "status": status,
        "result": [result.error_code, result.error_string],
        "cancel": [agreed, *long.result(LIMIT_S)[:1]],
    }


def main() -> None:
    node = DdsNode("ours")
    report = {"echoed": echoed(node, 100), "enabled": enabled(node), "followed": followed(node)}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    node.close()


if __name__ == "__main__":
    main()
