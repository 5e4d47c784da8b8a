"""A node in a process of its own that serves actions, parameters and a life cycle, until stdin ends.

Action `follow` (FollowJointTrajectory): the first point's time_from_start says what becomes of a goal. A name
on stdin opens another such node, with its action at `~/follow`; an empty line closes that.
"""

import sys
import time

from robot_rl.real.ros2.action import DdsActionServer
from robot_rl.real.ros2.api import GoalCallbacks
from robot_rl.real.ros2.lifecycle import Lifecycle
from robot_rl.real.ros2.node import DdsNode
from robot_rl.real.ros2.parameters import Parameter, Parameters

KIND = "control_msgs/action/FollowJointTrajectory"
RUN, FAIL, CRASH, STUBBORN, REJECT = range(5)
"""What a goal asks for: run its points, abort, raise, refuse to be cancelled; reject it."""
POINT_S = 0.05


def script(goal) -> int:
    points = goal.trajectory.points
    return points[0].time_from_start.sec if points else REJECT


def serve_follow(node: DdsNode, name: str) -> None:
    def execute(handle) -> None:
        asked = script(handle.goal)
        if asked == CRASH:
            raise RuntimeError("on purpose")
        names = handle.goal.trajectory.joint_names
        for point in handle.goal.trajectory.points:
            if handle.cancel_requested:
                return handle.cancel(node.message(f"{KIND}_Result", error_string="cancelled"))
            handle.feedback(node.message(f"{KIND}_Feedback", joint_names=list(names), desired=point))
            time.sleep(POINT_S)
        if asked == FAIL:
            return handle.abort(node.message(f"{KIND}_Result", error_code=-5))
        return handle.succeed(node.message(f"{KIND}_Result", error_string="done"))

    DdsActionServer(
        node,
        KIND,
        name,
        GoalCallbacks(
            execute=execute,
            accept=lambda goal: script(goal) != REJECT,
            cancel=lambda handle: script(handle.goal) != STUBBORN,
        ),
        result_kept_s=1.0,
    )


def open_managed(name: str, action: str) -> DdsNode:
    node = DdsNode(name, namespace="arm")
    serve_follow(node, action)
    Parameters(
        node,
        [
            Parameter(name="speed", value=0.5, minimum=0.0, maximum=1.0, description="share of the limit"),
            Parameter(name="serial", value="A7", read_only=True),
            Parameter(name="gains.p", value=(1.0, 2.0)),
            Parameter(name="gains.names", value=(), element=str),
            Parameter(name="episode_seed", value=0),
        ],
        check=lambda values: "13 is unlucky" if values.get("episode_seed") == 13 else None,
    )
    worked = {"activate": True}

    def activate() -> bool:
        worked["activate"] = not worked["activate"]
        return worked["activate"]

    def deactivate() -> bool:
        raise RuntimeError("on purpose")

    Lifecycle(node, {"activate": activate, "deactivate": deactivate, "error": lambda: True})
    return node


def say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def main() -> None:
    nodes = [open_managed("peer", "follow")]
    say_ready()
    for line in sys.stdin:
        if line.strip():
            nodes.append(open_managed(line.strip(), "~/follow"))
        else:
            nodes.pop().close()
        say_ready()
    for node in nodes:
        node.close()


if __name__ == "__main__":
    main()
