"""Hold a quadrotor at a point in the air."""

import math

import mujoco

from robot_rl.core.arrays import namespace, norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.robots.crazyflie import HOVER_THRUST_N, MAX_THRUST_N
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import add_camera, add_goal
from robot_rl.sim.task import Array, Control, Start, Task, View

GOAL_M = (0.0, 0.0, 1.5)
NEAR_M, SLOW_M_S = 0.05, 0.1
BOX_M = 1.0
"""Half the edge of the box about the goal that the robot may not leave."""
_START_M, _START_M_S, _START_RAD_S, _START_TILT_RAD = 0.2, 1.0, 1.0, math.pi / 2
_ALIVE = 2.0
_POSITION, _ORIENTATION, _VELOCITY, _ACTION = 2.0, 0.5, 0.05, 0.1
_ROTORS = tuple(f"rotor{number}.thrust" for number in range(1, 5))


class QuadrotorHover(Task):
    """Fly the quadrotor to the goal point and hold it there.

    Randomised: position (20 cm along each axis from the goal), orientation (up to 90 degrees about any
    axis), velocity (1 m/s and 1 rad/s along each axis). Success: within 5 cm of the goal and slower than
    10 cm/s for half a second. It fails where it is more than 1 m from the goal along an axis.

    An episode goes on after success, up to its horizon. The dense reward has the terms of Learning to Fly in
    Seconds (arXiv 2311.13081, section IV): a constant for being alive, less the costs of the distance p
    from the goal, of the angle a from upright and forward, of the velocity v and of the action, which is 0 in
    a hover; over the constant, 2:

        max(0, 1 - (2 |p| + 0.5 sin^2(a/2) + 0.05 |v|^2 + 0.1 |action|^2) / 2)

    Deviations: the paper has |p|^2, whose slope at the goal is zero (a policy of 400,000 steps then
    stopped 24 cm short of it), and a curriculum on the weights; the action here is that of the thrusts which
    the rotors have, not of the commanded ones; no reward is negative.
    """

    name = "quadrotor_hover"
    instruction = "hold the quadrotor at the green point"
    horizon_s = 4.0
    control = Control(hz=50.0)
    default_robot = "crazyflie"
    body = "rotors"
    camera = "flight"
    hold_s = 0.5
    ends_at_success = False
    observation = ("tool.zaxis", "tool_in_goal.pos", "tool.linvel", "gyro", *_ROTORS)
    privileged = ("tool.quat",)

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        add_goal(spec)
        add_camera(spec, "flight", position_m=(1.1, -1.1, GOAL_M[2] + 0.6), target_m=GOAL_M)

    def start(self, rng: EpisodeRng) -> Start:
        xp = namespace(rng.key)
        place = rng.uniform([at - _START_M for at in GOAL_M], [at + _START_M for at in GOAL_M], size=3)
        axis = rng.normal(size=3)
        axis = axis / norm(axis)[:, None]
        half = 0.5 * rng.uniform(0.0, _START_TILT_RAD)
        velocity = rng.uniform(-_START_M_S, _START_M_S, size=3)
        spin = rng.uniform(-_START_RAD_S, _START_RAD_S, size=3)
        pose = xp.concat([place, xp.cos(half), xp.sin(half) * axis], axis=1)
        goal = xp.zeros_like(place) + rng.uniform(GOAL_M, GOAL_M, size=3)
        return Start(
            joints={"frame": pose},
            velocities={"frame": xp.concat([velocity, spin], axis=1)},
            mocap={"goal": goal},
        )

    def evaluate(self, view: View) -> dict[str, Array]:
        away = view["tool_in_goal.pos"]
        is_there = (norm(away) < NEAR_M) & (norm(view["tool.linvel"]) < SLOW_M_S)
        return {"success": is_there, "fail": (namespace(away).abs(away) > BOX_M).any(axis=1)}

    def dense_reward(self, view: View) -> Array:
        away, velocity = view["tool_in_goal.pos"], view["tool.linvel"]
        action = 0.0
        for rotor in _ROTORS:
            action = action + (2.0 * (view[rotor][:, 0] - HOVER_THRUST_N) / MAX_THRUST_N) ** 2
        cost = (
            _POSITION * norm(away)
            + _ORIENTATION * (1.0 - view["tool.quat"][:, 0] ** 2)
            + _VELOCITY * (velocity * velocity).sum(axis=1)
            + _ACTION * action
        )
        return namespace(away).clip(1.0 - cost / _ALIVE, 0.0, None)
