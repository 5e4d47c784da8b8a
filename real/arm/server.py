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
from robot_rl.real.supervisor.pace import Pace, be_punctual

_SWITCH_S = 5e-4
"""How long a callback may keep Python from the loop; ten times less than usual."""


def serve(
    config: SimArmConfig,
    stop: threading.Event,
    on_ready: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Serves until `stop` is set or `config.seconds` are over; returns how it went.

    Args:
        config: the arm.
        stop: ends it at the next cycle.
        on_ready: called with the node's name once the arm can be found.

    Raises:
        RobotRLError: no ROS transport, no such scene, or nothing to draw cameras with.
    """
    with ExitStack() as stack:
        cameras = Cameras(config) if config.cameras else None
        if cameras is not None:
            stack.callback(cameras.close)
        # After the cameras, which have processes of their own. For this thread alone, as in ros2_control:
        # what hears commands has the priority of others.
        scheduling = be_punctual()
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
            "log": None if path is None else str(path),
        }


def _run(
    arm: SimArm, states: States, cameras: Cameras | None, ros_ns: Callable[[], int], stop: threading.Event
) -> Pace:
    """Turns the loop: one cycle a period, at absolute times."""
    config = arm.config
    period_s, seconds = 1.0 / config.rate_hz, config.seconds
    picture_every = max(1, round(config.rate_hz / config.camera_hz))
    sys.setswitchinterval(_SWITCH_S)
    now_ns = time.monotonic_ns()
    # Once before the clock runs: the first message of a type takes milliseconds to make.
    states.publish(Cycle(now_ns=now_ns, ros_ns=ros_ns(), dt_s=period_s, state=arm.body.read(now_ns)))
    pace = Pace(config.rate_hz)
    begun_ns = time.monotonic_ns()
    passed = 0
    while not stop.is_set():
        pace.wait()
        now_ns = time.monotonic_ns()
        # Whole periods since the beginning, so that lateness never makes the simulation run slower.
        due = round(1e-9 * (now_ns - begun_ns) / period_s)
        states.publish(arm.cycle(now_ns, ros_ns(), max(1, due - passed) * period_s))
        passed = max(due, passed + 1)
        if cameras is not None and arm.num_cycles % picture_every == 0:
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


def _cpu_s() -> float:
    """Processor seconds of this process; cameras have their own."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
