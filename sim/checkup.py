"""The checks of `robot-rl doctor robot=...`: servos, gripper, home, and every task that the arm can do.

Of a robot that is no single arm they are the rules of robots.

Everything is measured, on the robot alone or in the task's own scene; docs/tasks.md, "A robot of your own",
lists the limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.check import Check, State
from robot_rl.core.errors import require
from robot_rl.core.registry import TABLE, resolve
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.conformance import ROBOT_RULES, broken_rules
from robot_rl.sim.experts import action_for
from robot_rl.sim.robots.home import find_home
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.robot_rules import cup_holds
from robot_rl.sim.robots.servo_check import LOAD_KG, WATCHED_S, JointReport, ServoCheck
from robot_rl.sim.task import Aim, Task, can_grip, control_of
from robot_rl.sim.vector import SimVectorEnv

Array = NDArray[Any]

EPISODES = 16
"""Episodes of the scripted expert for each task."""
_LAG_S = (0.3, 0.5)
"""Slower joints are noted, or fail: a step of the tool then takes longer than the tasks allow."""
_OVERSHOOT, _SETTLE_S = 0.6, 1.0
"""More is noted; a joint that does not settle within `WATCHED_S` fails."""
_SAG_M = (0.003, 0.01)
"""A tool that hangs lower is noted, or fails: the tasks' tolerances are 1 to 2.5 cm."""
_POINTS_DOWN, _FACES_FORWARD = math.cos(math.radians(15.0)), math.cos(math.radians(30.0))
_REACHED_M = 0.02
_REACHED = (0.98, 0.8)
"""Shares of a task's places; fewer are noted, or fail."""
_SOLVED = (0.95, 0.8)
"""Shares of the expert's episodes; fewer are noted, or fail."""
_APPROACH, _REACH_S = 0.4, 5.0
"""Share of its lead that a good servo closes in a control step of 20 Hz, and the time limit."""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """The results of a checkup."""

    robot: str
    joints: list[JointReport]
    checks: list[Check]
    servos: str
    """A block for the robot file that repairs its servos or its gripper; empty if both are well."""


def check_robot(name_or_path: str, tasks: Sequence[str] = ()) -> Checkup:
    """Measures an arm; of a robot of another kind, checks the rules of robots.

    Args:
        name_or_path: of the registry, or of a robot file.
        tasks: to check; if empty, all shipped ones that the arm can do.

    Raises:
        RobotRLError: the robot cannot be built, or a named task is not for it, or it needs a gripper and
            there is none, or the robot is no single arm.
    """
    robot = load_robot(name_or_path)
    for task in tasks:
        control_of(resolve("task", task, at="task")(), robot, at="")
    if robot.kind != "arm":
        allowed = f"none: of a robot of kind {robot.kind} the rules are checked, in no task. Leave task= out"
        require(not tasks, "task", ",".join(tasks), allowed)
        return Checkup(robot=robot.name, joints=[], checks=_rules(robot), servos="")
    bench = ServoCheck(robot)
    joints = bench.joints()
    checks = [_actuators(bench), _servos(joints, bench), _gripper(robot, bench), _home(robot, bench)]
    needs_servos = bool(bench.unlike_servos()) or any(check.state != "ok" for check in checks[1:3])
    possible = [
        name
        for name in TABLE["task"]
        if resolve("task", name).body == "arm" and can_grip(resolve("task", name), robot)
    ]
    for task in tasks or possible:
        checks += task_checks(task, name_or_path)
    block = bench.servos_block() if needs_servos else ""
    return Checkup(robot=robot.name, joints=joints, checks=checks, servos=block)


def _rules(robot: Robot) -> list[Check]:
    """Judges each rule of robots."""
    broken = broken_rules(robot)
    return [
        Check(
            name.replace("_", " "),
            "fail" if name in broken else "ok",
            broken.get(name, str(rule.__doc__)).rstrip("."),
        )
        for name, rule in ROBOT_RULES.items()
    ]


def _actuators(bench: ServoCheck) -> Check:
    unlike, unnamed = bench.unlike_servos(), bench.unnamed_joints()
    if unlike:
        detail = f"{', '.join(unlike)}: no position servo, so a target would be taken for a torque"
        return Check("actuators", "fail", detail, "Add the block below to the robot file.")
    if unnamed:
        detail = f"the robot file does not name {', '.join(unnamed)}"
        return Check(
            "actuators", "fail", detail, "Name it in arm_joints or finger_joints, or take it out of the MJCF."
        )
    return Check("actuators", "ok", "a position servo for every joint")


def _servos(joints: Sequence[JointReport], bench: ServoCheck) -> Check:
    """Judges how the joints follow, and how the arm stands under its own weight and under a load."""
    own_m, load_m = bench.tool_sag_m(), bench.load_sag_m()
    findings: list[tuple[State, str]] = []
    for joint in joints:
        if not math.isfinite(joint.settle_s):
            findings.append(("fail", f"{joint.joint} does not settle within {WATCHED_S:g} s of a step"))
        elif joint.settle_s > _SETTLE_S or joint.overshoot > _OVERSHOOT:
            swings = f"overshoots a step by {joint.overshoot:.0%} and settles after {joint.settle_s:.2f} s"
            findings.append(("note", f"{joint.joint} {swings}"))
        slow = _graded(joint.lag_s, _LAG_S)
        if slow != "ok":
            findings.append((slow, f"{joint.joint} takes {joint.lag_s:.2f} s for 63 % of a step"))
    for sag_m, why in ((own_m, "its own weight"), (load_m, f"{LOAD_KG:g} kg")):
        state = _graded(sag_m, _SAG_M)
        if state != "ok":
            findings.append((state, f"under {why} the tool sinks by {1e3 * sag_m:.1f} mm"))
    if not findings:
        lag_s = max(joint.lag_s for joint in joints)
        detail = f"the slowest joint takes {lag_s:.2f} s for 63 % of a step, all settle; "
        return Check("servos", "ok", f"{detail}under {LOAD_KG:g} kg the tool sinks by {1e3 * load_m:.1f} mm")
    state: State = "fail" if any(state == "fail" for state, _ in findings) else "note"
    return Check(
        "servos", state, "; ".join(text for _, text in findings), "Put the block below into the file."
    )


def _gripper(robot: Robot, bench: ServoCheck) -> Check:
    if not robot.gripper_actuator:
        return Check("gripper", "ok", "none: tasks that need one refuse this robot")
    if robot.has_cup:
        holds, sticks = (cup_holds(robot, at) for at in (robot.gripper_closed, robot.gripper_open))
        found = "holds" if holds else "does not hold"
        detail = f"{robot.gripper_actuator}, a suction cup, {found} a box of {LOAD_KG:g} kg"
        if holds and not sticks:
            return Check("gripper", "ok", f"{detail}, and lets it go")
        remedy = "Put model.tool into the middle of the lip; see model.collide and model.suction.force_n."
        return Check("gripper", "fail", f"{detail}{', and keeps it when open' if sticks else ''}", remedy)
    idle = bench.idle_fingers()
    if idle:
        detail = f"{', '.join(idle)} does not follow {robot.gripper_actuator}: nothing is grasped like that"
        remedy = "The block below couples the fingers; an <equality> of the MJCF does it, too."
        return Check("gripper", "fail", detail, remedy)
    return Check("gripper", "ok", f"{robot.gripper_actuator} moves {', '.join(robot.finger_joints)}")


def _home(robot: Robot, bench: ServoCheck) -> Check:
    """Judges where and how the tool stands at home, and how near to their limits the joints are."""
    position, rotation = bench.home_tool()
    at = f"at home the tool is at {_metres(position)} m"
    down, forward = -rotation[2, 2], rotation[0, 0]
    if down < _POINTS_DOWN or forward < _FACES_FORWARD:
        detail = (
            f"{at}, its z axis points to {_metres(rotation[:, 2])}, its x axis to {_metres(rotation[:, 0])}; "
            "needed: z down, (0, 0, -1), and x forward, (1, 0, 0)"
        )
        home = find_home(robot)
        better = (
            f"this one is good: home_rad: {list(home)}" if home else "none was found; try the opposite ones"
        )
        remedy = f"Correct home_rad, or the axes of model.tool. With those axes, {better}"
        return Check("home", "fail", detail, remedy)
    limits, noise = robot.limits, Task.joint_noise_rad
    rows = zip(
        robot.arm_joints, limits.position_low_rad, robot.home_rad, limits.position_high_rad, strict=True
    )
    tight = [name for name, low, home, high in rows if min(home - low, high - home) < noise]
    if tight:
        detail = f"{at}; {', '.join(tight)} is nearer than {noise:g} to a limit: episodes may begin beyond"
        return Check("home", "note", detail, "Move home_rad inwards.")
    return Check("home", "ok", f"{at}, pointing down, every joint within its limits")


# Tasks


def task_checks(task: str, robot: str) -> Iterator[Check]:
    """Yields whether the arm reaches the places of a task, how fast, and whether the expert solves the task.

    An arm that reaches none of the places is not tested further.
    """
    made_for, env = (
        SimVectorEnv(EnvConfig(task=task, robot=each), EPISODES, autoreset="disabled")
        for each in (None, robot)
    )
    # The places are those of the robot that the task is made for: a robot that drops things chases them.
    places, _ = _expert(made_for)
    error_m, took_s = reach(env, load_robot(robot), places)
    reached = error_m < _REACHED_M
    state = _graded(-float(reached.mean()), tuple(-share for share in _REACHED))
    detail = f"{reached.mean():.0%} of {len(places)} places within reach"
    remedy = ""
    if not reached.all():
        worst = int(error_m.argmax())
        detail += f", {_metres(places[worst])} m not by {100 * error_m[worst]:.0f} cm"
        remedy = "Place the arm, or choose its home, so that it reaches there; or leave the task."
    yield Check(f"{task}: reach", state, detail, remedy if state != "ok" else "")
    if not reached.any():
        return
    yield _in_time(task, float(took_s[reached].max()), env.horizon / env.control_hz)
    _, solved = _expert(env)
    state = _graded(-solved, tuple(-share for share in _SOLVED))
    grip = (
        ", and raise gripper_kp: fingers that press too little lose things"
        if resolve("task", task).needs_gripper
        else ""
    )
    remedy = (
        f"Mend the lines above; if all is good there, look at the shapes that touch: fingers, hand{grip}."
    )
    remedy = "" if state == "ok" else remedy
    yield Check(f"{task}: expert", state, f"solves {solved:.0%} of {EPISODES} episodes", remedy)


def _in_time(task: str, longest_s: float, horizon_s: float) -> Check:
    state = _graded(longest_s / horizon_s, (0.5, 1.0))
    takes = f"{longest_s:.1f} s" if math.isfinite(longest_s) else f"more than {2 * horizon_s:g} s"
    detail = f"the longest way takes {takes} of {horizon_s:g} s at the joints' speed limits"
    remedy = "" if state == "ok" else "Raise limits.velocity_rad_s, if the arm allows it, or env.horizon_s."
    return Check(f"{task}: speed", state, detail, remedy)


def _expert(env: SimVectorEnv) -> tuple[Array, float]:
    """Plays the scripted expert; returns its targets for the tool (P, 3), and its share of success."""
    env.reset(seed=0)
    expert, live = env.expert(), np.ones(env.num_envs, bool)
    solved, wanted = np.zeros(env.num_envs, bool), list[Array]()
    for step in range(env.horizon):
        action = expert.act()
        if step % 5 == 0 and expert.aim is not None:
            wanted.append(expert.aim.position_m[live])
        _, _, terminated, truncated, infos = env.step_masked(action, live)
        solved |= infos["success"]
        live &= ~(terminated | truncated)
        if not live.any():
            break
    # Places within a centimetre of each other count as one.
    return np.unique(np.concatenate(wanted).round(2), axis=0), float(solved.mean())


def reach(env: SimVectorEnv, robot: Robot, places_m: Array) -> tuple[Array, Array]:
    """Returns how far the tool stays from places (P, 3), and after how many seconds it is there.

    From home, by the inverse kinematics of the tasks' actions, with perfect servos. The distance is for
    joints of any speed, so a place that is not reached is out of reach. The time is for joints at their
    speed limits; it is infinite after twice the time of an episode.
    """
    error_m = np.full(len(places_m), np.inf)
    took_s = np.full(len(places_m), np.inf)
    longest_s = 2 * env.horizon / env.control_hz
    for first in range(0, len(places_m), env.num_envs):
        rows = np.arange(first, min(first + env.num_envs, len(places_m)))
        goal = places_m[np.resize(rows, env.num_envs)]
        for distance in _distances(env, robot, goal, _REACH_S, fastest=math.inf):
            error_m[rows] = distance[: len(rows)]
        for step, distance in enumerate(_distances(env, robot, goal, longest_s)):
            arrived = rows[distance[: len(rows)] < _REACHED_M]
            took_s[arrived] = np.minimum(took_s[arrived], step / env.control_hz)
    return error_m, took_s


def _distances(
    env: SimVectorEnv, robot: Robot, goal_m: Array, seconds: float, *, fastest: float = 1.0
) -> Iterator[Array]:
    """Yields the distances (B,) of the tools from their goals after each control step.

    Args: fastest: share of the joints' speed limits.
    """
    low, high = np.asarray(robot.limits.position_low_rad), np.asarray(robot.limits.position_high_rad)
    most = fastest * np.asarray(robot.limits.velocity_rad_s) / env.control_hz
    qpos, control = env.backend.bind("qpos"), env.controller.control
    still = np.zeros(env.num_envs)
    aim = Aim(position_m=goal_m, yaw_rad=still, closed=still > 0)
    position = np.tile(np.asarray(robot.home_rad), (env.num_envs, 1))
    for _ in range(round(seconds * env.control_hz)):
        qpos[:, env.index.arm_qpos] = position
        env.backend.forward()
        tool = env.view["tool.pos"]
        yield np.linalg.norm(tool - goal_m, axis=1)
        lead = env.controller.targets(action_for(aim, control, tool), position) - position
        position = np.clip(position + np.clip(_APPROACH * lead, -most, most), low, high)


def _graded(value: float, limits: Sequence[float]) -> State:
    """Returns the state of a number that is better the smaller it is."""
    noted, failed = limits
    return "ok" if value <= noted else "note" if value <= failed else "fail"


def _metres(values: Array) -> str:
    return f"({', '.join(f'{round(float(value), 2) + 0.0:.2f}' for value in values)})"
