"""Runs a simulated arm in real time on the ROS graph."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from robot_rl.real.arm.arm import SimArm
from robot_rl.real.arm.cameras import Cameras
from robot_rl.real.arm.config import SimArmConfig
from robot_rl.real.arm.controllers import Cycle
from robot_rl.real.arm.services import Actions, ArmServices, ManagerServices, ServoServices
from robot_rl.real.arm.topics import Commands, States
from robot_rl.real.ros2.node import open_node
from robot_rl.real.supervisor.pace import Pace, raise_priority

_SWITCH_S = 5e-4
"""How long a callback may keep the interpreter from the loop; ten times less than by default."""


def serve(
    config: SimArmConfig, stop: threading.Event, on_ready: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Serves until `stop` is set or `config.seconds` are over; returns statistics.

    It calls `on_ready` with the node's name when the arm is on the graph.

    Raises:
        RobotRLError: no ROS transport, no such scene, or nothing to draw cameras with.
    """
    with ExitStack() as stack:
        cameras = Cameras(config) if config.cameras else None
        if cameras is not None:
            stack.callback(cameras.close)
        # After the cameras' process has started. For this thread only, as in ros2_control: the thread that
        # receives commands has normal priority.
        scheduling = raise_priority()
        arm = SimArm(config)
        stack.callback(arm.close)
        node = open_node(
            "sim_arm",
            namespace=config.namespace,
            transport=config.transport,
            domain_id=config.domain_id,
            use_sim_time=config.use_sim_time,
        )
        stack.callback(node.close)

        def ros_ns() -> int:
            return arm.sim_ns if config.use_sim_time else node.now_ns()

        Commands(node, arm, ros_ns)
        states = States(node, arm)
        ManagerServices(node, arm)
        ArmServices(node, arm)
        ServoServices(node, arm)
        stack.callback(Actions(node, arm, ros_ns).close)
        on_ready(node.name)
        begun_s, begun_cpu_s = time.monotonic(), _cpu_s()
        try:
            pace = _run(arm, states, cameras, ros_ns, stop)
        finally:
            path = arm.save_log()
        wall_s = max(1e-9, time.monotonic() - begun_s)
        return {
            "task": config.task,
            "rate_hz": config.rate_hz,
            "seconds": round(wall_s, 3),
            **pace.statistics(),
            "cpu_share": round((_cpu_s() - begun_cpu_s) / wall_s, 4),
            "scheduling": scheduling,
            **_counts(arm),
            **({} if cameras is None else _of_cameras(cameras)),
            "log": None if path is None else str(path),
        }


def _run(
    arm: SimArm, states: States, cameras: Cameras | None, ros_ns: Callable[[], int], stop: threading.Event
) -> Pace:
    """Runs the loop: one cycle a period, at absolute times."""
    config = arm.config
    period_s, seconds = 1.0 / config.rate_hz, config.seconds
    pictures_a_cycle = config.camera_hz / config.rate_hz
    sys.setswitchinterval(_SWITCH_S)
    now_ns = time.monotonic_ns()
    # Once before the clock runs: the first message of a type takes milliseconds.
    states.publish(Cycle(now_ns=now_ns, ros_ns=ros_ns(), dt_s=period_s, state=arm.body.read(now_ns)))
    pace = Pace(config.rate_hz)
    begun_ns = time.monotonic_ns()
    passed = num_shown = 0
    while not stop.is_set():
        pace.wait()
        now_ns = time.monotonic_ns()
        # Whole periods since the beginning, so that late cycles do not slow the simulation down.
        due = round(1e-9 * (now_ns - begun_ns) / period_s)
        states.publish(arm.cycle(now_ns, ros_ns(), max(1, due - passed) * period_s))
        passed = max(due, passed + 1)
        if cameras is not None and (num_due := int(passed * pictures_a_cycle)) > num_shown:
            num_shown = num_due
            cameras.show(arm.plant.state(), ros_ns())
        if seconds is not None and 1e-9 * (now_ns - begun_ns) >= seconds:
            break
    return pace


def _counts(arm: SimArm) -> dict[str, Any]:
    return {
        "commands": arm.commands.sent,
        "commands_lost": arm.commands.lost,
        "commands_ignored": arm.num_ignored,
        "states": arm.states.sent,
        "states_lost": arm.states.lost,
        "beyond_limits": arm.body.num_beyond_limits,
        "stops": arm.body.num_stops,
        "stop_reason": arm.body.stop_reason,
    }


def _of_cameras(cameras: Cameras) -> dict[str, Any]:
    seconds = max(1e-9, cameras.seconds)
    return {
        "pictures": cameras.num_published,
        "pictures_hz": round(cameras.num_published / seconds, 2),
        "cameras_cpu_share": round(cameras.cpu_s / seconds, 4),
    }


def _cpu_s() -> float:
    """Processor seconds of this process, without the cameras."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
