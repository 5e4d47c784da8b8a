"""Turn an object on a vertical axle between the fingers of a hand."""

import math

import mujoco
import numpy as np
from mujoco import mjtGeom, mjtJoint

from robot_rl.core.arrays import namespace
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.robots.claw import PALM_M
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import RED, add_camera, add_goal
from robot_rl.sim.task import Array, Control, Start, Task, View, closeness

NEAR_RAD = 0.1
_HALF_M, _MASS_KG = (0.025, 0.025, 0.03), 0.1
_HEIGHT_M = PALM_M + 0.095
"""Of the object's middle: at the finger tips."""
_MARK_M = 0.09
"""Distance of the goal's mark from the axle."""
_LEAST_RAD, _MOST_RAD = 0.4, 1.0


class HandTurn(Task):
    """Turn the square object about its vertical axle until its nose points at the goal's mark; hold it.

    Randomised: angle of the object, goal angle (0.4 to 1 rad away from it to either side), posture of the
    fingers. Success: within 0.1 rad of the goal angle for a quarter of a second.
    """

    name = "hand_turn"
    instruction = "turn the red object until its nose points at the green mark"
    horizon_s = 5.0
    control = Control()
    default_robot = "claw"
    body = "hand"
    camera = "close"
    needs_gripper = False
    hold_s = 0.25
    observation = ("object.xaxis", "object.vel", "goal.pos", "goal_in_object.pos")

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        body = spec.worldbody.add_body(name="object", pos=(0.0, 0.0, _HEIGHT_M))
        body.add_joint(
            name="object",
            type=mjtJoint.mjJNT_HINGE,
            axis=(0.0, 0.0, 1.0),
            damping=np.array([0.002, 0.0, 0.0]),
            frictionloss=0.005,
            armature=0.0001,
        )
        body.add_geom(
            name="object",
            type=mjtGeom.mjGEOM_BOX,
            size=_HALF_M,
            mass=_MASS_KG,
            rgba=RED,
            condim=4,
            friction=(1.0, 0.005, 0.0001),
        )
        nose = {"pos": (_HALF_M[0] + 0.006, 0.0, 0.026), "size": (0.006, 0.004, 0.004)}
        body.add_geom(type=mjtGeom.mjGEOM_BOX, **nose, mass=0.0, rgba=RED, contype=0, conaffinity=0)
        add_goal(spec, radius_m=0.01)
        add_camera(spec, "close", position_m=(0.32, -0.25, 0.46), target_m=(0.0, 0.0, 0.15))

    def start(self, rng: EpisodeRng) -> Start:
        xp = namespace(rng.key)
        angle = rng.uniform(-math.pi, math.pi)
        side, away = rng.uniform(-1.0, 1.0), rng.uniform(_LEAST_RAD, _MOST_RAD)
        goal = angle + xp.where(side < 0.0, -away, away)
        height = xp.zeros_like(goal) + _HEIGHT_M
        mark = xp.concat([_MARK_M * xp.cos(goal), _MARK_M * xp.sin(goal), height], axis=1)
        return Start(joints={"object": angle}, mocap={"goal": mark})

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": self.error_rad(view) < NEAR_RAD}

    def dense_reward(self, view: View) -> Array:
        return closeness(self.error_rad(view), 0.5)

    @staticmethod
    def error_rad(view: View) -> Array:
        """Returns the angle (B,) between the object and its goal, 0 or more."""
        mark = view["goal_in_object.pos"]
        xp = namespace(mark)
        return xp.abs(xp.atan2(mark[:, 1], mark[:, 0]))
