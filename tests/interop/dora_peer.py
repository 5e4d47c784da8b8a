"""An independent ROS 2 peer: dora-rs (RustDDS and ros2-client), another code base again.

    python dora_peer.py PREFIX

PREFIX holds the message definitions (`ros_share.write_share`). It echoes /joint_states as /pong,
serves /enable (std_srvs/SetBool: the answer is what was asked) and /follow (FollowJointTrajectory:
one feedback for each point, a tenth of a second each; error_code is the number of points), says
`ready`, and ends when standard input does.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import dora
import pyarrow as pa

POLL_S = 0.1
WAIT_S = 60.0
RESULT = pa.struct({"error_code": pa.int32(), "error_string": pa.string()})


def qos() -> dora.Ros2QosPolicies:
    return dora.Ros2QosPolicies(reliable=True, keep_last=10)


def echo(node: dora.Ros2Node) -> Callable[[], None]:
    """Returns what hands on one joint state."""
    kind = "sensor_msgs/JointState"
    states = node.create_subscription(node.create_topic("/joint_states", kind, qos()), qos())
    pong = node.create_publisher(node.create_topic("/pong", kind, qos()), qos())

    def step() -> None:
        state = states.next()
        if state is None:
            threading.Event().wait(0.002)  # `next` does not wait
        else:
            pong.publish(state)

    return step


def enable(node: dora.Ros2Node) -> Callable[[], None]:
    """Returns what answers one request."""
    server = node.create_service_server("/enable", "std_srvs/SetBool", qos())

    def step() -> None:
        asked = server.take_request(WAIT_S)
        if asked is not None:
            request_id, request = asked
            answer = {"success": request[0].as_py()["data"], "message": "dora"}
            server.send_response(request_id, pa.array([answer]))

    return step


def follow(node: dora.Ros2Node) -> Callable[[], None]:
    """Returns what follows one goal."""
    server = node.create_action_server("/follow", "control_msgs/FollowJointTrajectory", qos())

    def step() -> None:
        taken = server.take_goal(WAIT_S)
        if taken is None:
            return
        goal_id, goals = taken
        trajectory = goals.field("trajectory")
        points = trajectory[0].as_py()["points"]
        status = "succeeded"
        for point in points:
            server.send_feedback(goal_id, feedback(trajectory, point))
            if server.take_cancel(POLL_S):
                status = "canceled"
                break
        result = pa.array([{"error_code": len(points), "error_string": status}], type=RESULT)
        server.send_result(goal_id, result, status, 10.0)

    return step


def feedback(trajectory: pa.StructArray, point: dict[str, Any]) -> pa.StructArray:
    """Returns a feedback message: the arm is where it should be; what is left out is zero."""
    columns = {name: trajectory.type[name].type for name in ("header", "joint_names")}
    columns |= dict.fromkeys(("desired", "actual", "error"), trajectory.type["points"].type.value_type)
    message = trajectory[0].as_py() | dict.fromkeys(("desired", "actual", "error"), point)
    return pa.array([message], type=pa.struct(columns))


def repeat(step: Callable[[], None]) -> None:
    while True:
        step()


def main(prefix: str) -> None:
    os.environ["ROS_DISTRO"] = "jazzy"  # else its participants announce themselves as Humble's do
    node = dora.Ros2Context([prefix]).new_node("dora", "/", dora.Ros2NodeOptions(rosout=False))
    for serve in (echo, enable, follow):
        threading.Thread(target=repeat, args=(serve(node),), daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # its threads are within Rust


if __name__ == "__main__":
    main(sys.argv[1])
