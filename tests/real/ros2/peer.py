"""The other side of test_peers: a node in a process of its own, until its input ends.

A name on its input opens one more node of that name, an empty line closes it.
"""

import sys
import threading
from typing import Any

from robot_rl.real.ros2.api import LATCHED, QoS
from robot_rl.real.ros2.node import DdsNode
from robot_rl.real.ros2.service import Deferred

LIST = "rcl_interfaces/srv/ListParameters"
SET_BOOL = "std_srvs/srv/SetBool"


def main(name: str = "peer") -> None:
    node = DdsNode(name, namespace="far")
    back = node.create_publisher("sensor_msgs/msg/JointState", "back")
    node.create_subscription("sensor_msgs/msg/JointState", "/there", back.publish)
    node.create_publisher("std_msgs/msg/String", "/robot_description", LATCHED).publish(
        node.message("std_msgs/msg/String", data="<robot/>")
    )
    node.create_service(LIST, "~/count", lambda request: counted(node, request))
    node.create_service(LIST, "~/later", lambda request: later(node, request))
    node.create_client("std_srvs/srv/Trigger", "/near/go")
    bare_service(node)
    stop = threading.Event()
    ticker = threading.Thread(target=tick, args=(node, stop))
    ticker.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    second: DdsNode | None = None
    for line in sys.stdin:
        if line.strip():
            second = DdsNode(line.strip(), namespace="far")
            second.create_publisher("rosgraph_msgs/msg/Clock", "/clock")
        elif second is not None:
            second.close()
    stop.set()
    ticker.join()
    node.close()


def counted(node: DdsNode, request: Any) -> Any:
    """Answers with the number asked, so that a client can tell its own answer."""
    result = node.message("rcl_interfaces/msg/ListParametersResult", names=[str(request.depth)])
    return node.message(f"{LIST}_Response", result=result)


def later(node: DdsNode, request: Any) -> Deferred:
    deferred = Deferred()
    threading.Timer(0.05, deferred.complete, (counted(node, request),)).start()
    return deferred


def bare_service(node: DdsNode) -> None:
    """Serves as Fast DDS does: requests and replies without a header."""
    quality = QoS()
    request, response = (node.types.codec(f"{SET_BOOL}_{part}") for part in ("Request", "Response"))
    writer = node.participant.writer("rr/bareReply", response.kind, quality, opaque=True)

    def on_request(octets: bytes, _: Any) -> None:
        asked = request.decode(octets)
        writer.write(response.encode(response.cls(success=asked.data, message="bare")))

    node.participant.reader("rq/bareRequest", request.kind, quality, on_request, opaque=True)


def tick(node: DdsNode, stop: threading.Event) -> None:
    clock = node.create_publisher("rosgraph_msgs/msg/Clock", "/clock")
    time = node.message("builtin_interfaces/msg/Time", sec=12, nanosec=500_000_000)
    while not stop.wait(0.05):
        clock.publish(node.message("rosgraph_msgs/msg/Clock", clock=time))


if __name__ == "__main__":
    main(*sys.argv[1:])
