"""The rules of robots, one function each; `robot_rl.sim.conformance` runs them. n arm joints.

Those of tool, fingers and single joints are of every arm that a robot has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.hal.env_rules import require
from robot_rl.sim.robots.robot import Arm, Effector, Robot
from robot_rl.sim.scene import add_free_box

Array = NDArray[Any]

ALIGNED = 0.02
"""Largest error of a direction at home: one degree."""
APART_M = 0.1
"""Least distance along y between the tools of two arms at home, about the width of a gripper. Goals of the
left arm and the right one are twice as far apart."""
_STILL_M = 1e-3
_STEP = 0.1
"""Of one joint, in rad or m: it moves the tool by a tenth of that, in m or as a component of its axes."""
_TRAVEL = 0.02
"""Largest error of a finger, as a share of its way."""
_BOX_KG, _BOX_HALF_M, _OVERLAP_M = 0.1, 0.02, 2e-4
"""Of the box that a suction cup must hold: twice a cube of the shipped tasks, a little in the lip."""
_FALLEN_M, _FALL_S = 0.005, 0.5


class StandingRobot:
    """A robot alone at home, its servos holding it."""

    def __init__(self, robot: Robot, aligned: float = ALIGNED, *, spec: mujoco.MjSpec | None = None) -> None:
        """Compiles it; `spec` may hold more than the robot."""
        self.robot, self.aligned = robot, aligned
        self.at = f"robot {robot.name}"
        self.model = (spec or robot.build()).compile()
        self.state = mujoco.MjData(self.model)
        for joint, actuator, home in zip(robot.arm_joints, robot.arm_actuators, robot.home_rad, strict=True):
            self.state.joint(joint).qpos = home
            self.state.actuator(actuator).ctrl = home
        for effector in robot.all_effectors:  # fingers are on their way: the arm stands nevertheless
            number = self.model.actuator(effector.actuator).id
            self.state.ctrl[number] = effector.home
            if self.model.actuator_actnum[number]:
                self.state.act[self.model.actuator_actadr[number]] = effector.home
        mujoco.mj_forward(self.model, self.state)

    def simulate(self, duration_s: float) -> None:
        for _ in range(round(duration_s / self.model.opt.timestep)):
            mujoco.mj_step(self.model, self.state)

    def tool(self, arm: Arm | None = None) -> tuple[Array, Array]:
        """Returns position (3,) and orientation (3, 3) of an arm's tool in the world; the robot's if None."""
        site = self.state.site(self.robot.tool_site if arm is None else arm.tool_site)
        return site.xpos.copy(), site.xmat.reshape(3, 3).copy()

    def effectors_of(self, arm: Arm) -> list[Effector]:
        """Returns the end effectors of an arm."""
        return [each for each in self.robot.all_effectors if each.name.startswith(arm.name)]


def stands_at_home(standing: StandingRobot) -> None:
    """The servos hold the tools where they are."""
    arms = standing.robot.all_arms or (None,)
    before = [standing.tool(arm)[0] for arm in arms]
    standing.simulate(1.0)
    require(bool(np.isfinite(standing.state.qpos).all()), f"{standing.at}: simulated", "NaN", "numbers")
    for arm, begun in zip(arms, before, strict=True):
        moved, tool = float(np.abs(standing.tool(arm)[0] - begun).max()), _name(arm)
        at = f"{standing.at}: a second at home moves the {tool}"
        require(moved <= _STILL_M, at, f"{moved:.4f} m", "1 mm or less")


def _name(arm: Arm | None) -> str:
    """Returns what the arm's tool is called."""
    return "tool" if arm is None else f"{arm.name}tool"


def is_one_body_without_a_scene(standing: StandingRobot) -> None:
    """Tasks bring scene, lights and cameras; every actuator and every joint has an owner."""
    model, robot = standing.model, standing.robot
    others = (int(model.ncam), int(model.nlight), int(model.nkey))
    require(others == (0, 0, 0), f"{standing.at}: cameras, lights, keyframes", others, "none: set model.keep")
    require(
        model.nu == len(robot.arm_actuators) + len(robot.effector_actuators),
        f"{standing.at}: actuators",
        [model.actuator(i).name for i in range(model.nu)],
        "those that the robot names",
    )
    couples = model.eq_type == mujoco.mjtEq.mjEQ_JOINT
    flies = robot.kind == "rotors"
    named = {*robot.arm_joints, *robot.finger_joints}
    led = {*model.eq_obj1id[couples].tolist()}
    loose = [
        model.joint(i).name
        for i in range(model.njnt)
        if i not in led
        and model.joint(i).name not in named
        and not (flies and model.jnt_type[i] == mujoco.mjtJoint.mjJNT_FREE)
    ]
    require(
        not loose, f"{standing.at}: joints that nothing moves", loose, "none: name them, or take them out"
    )
    roots = {int(model.body_rootid[body]) for body in model.jnt_bodyid}
    require(len(roots) == 1, f"{standing.at}: bodies that arms hang on", len(roots), "1: set model.keep")
    require(
        not model.geom_contype.any(),
        f"{standing.at}: contype of a geom",
        "1",
        "0: a robot's shapes do not collide",
    )


def tool_points_down_at_home(standing: StandingRobot) -> None:
    """Actions hold the orientation of home: z down, x forward."""
    remedy = "; robot-rl doctor proposes a home_rad" if standing.robot.kind == "arm" else ""
    axes = (("z", 2, (0.0, 0.0, -1.0)), ("x", 0, (1.0, 0.0, 0.0)))
    for arm, (axis, column, need) in itertools.product(standing.robot.all_arms, axes):
        got = standing.tool(arm)[1][:, column]
        require(
            float(np.abs(got - need).max()) <= standing.aligned,
            f"{standing.at}: {axis} axis of the {_name(arm)} at home",
            got.round(4).tolist(),
            f"{need} within {standing.aligned:g}{remedy}",
        )


def left_is_towards_y(standing: StandingRobot) -> None:
    """Tasks of two arms put what is for the left tool farther along y."""
    sides = {arm.name: arm for arm in standing.robot.all_arms}
    if not {"left_", "right_"} <= sides.keys():
        return
    y_m = [float(standing.tool(sides[name])[0][1]) for name in ("left_", "right_")]
    apart_m = y_m[0] - y_m[1]
    move = "move the arms, or what home_rad makes of them, apart"
    left, right, apart = (f"{round(value, 3) + 0.0:.3f}" for value in (*y_m, apart_m))  # no minus zero
    require(
        apart_m >= APART_M,
        f"{standing.at}: way along y from right_tool to left_tool at home",
        f"{apart} m, from y = {right} to {left}",
        f"{APART_M:g} m or more, since left is towards y; "
        + ("exchange left: and right: in the robot file" if apart_m <= -APART_M else move),
    )


def fingers_open_along_y(standing: StandingRobot) -> None:
    """The tool's y axis is the line on which the fingers open."""
    for arm in standing.robot.all_arms:
        for gripper in standing.effectors_of(arm):
            if not gripper.fingers:
                continue
            closed, opened = (_finger_m(standing, gripper, end) for end in (gripper.low, gripper.high))
            moved, along = opened - closed, standing.tool(arm)[1][:, 1]
            length = float(np.linalg.norm(moved))
            at = f"{standing.at}: opening the {gripper.name} moves a finger"
            require(length > 0.005, at, f"{1e3 * length:.1f} mm", "5 mm or more")
            share = abs(float(moved @ along)) / length
            at = f"{standing.at}: share of that along the {_name(arm)}'s y axis"
            require(share > 0.6, at, f"{share:.2f}", "0.6 or more")


def _finger_m(standing: StandingRobot, gripper: Effector, position: float) -> Array:
    """Returns where the first shape of the first finger is (3,), or its body if it has none."""
    body = int(standing.model.joint(gripper.fingers[0]).bodyid[0])
    for joint in gripper.fingers:
        standing.state.joint(joint).qpos = position
    mujoco.mj_forward(standing.model, standing.state)
    first = int(standing.model.body_geomadr[body])
    return (standing.state.xipos[body] if first < 0 else standing.state.geom_xpos[first]).copy()


def every_arm_joint_moves_the_tool(standing: StandingRobot) -> None:
    """A joint that moves nothing is not of the arm."""
    pairs = [(arm, name) for arm in standing.robot.all_arms for name in arm.joints]
    for arm, name in pairs:
        before = np.concatenate([each.ravel() for each in standing.tool(arm)])
        joint = standing.state.joint(name)
        position = float(joint.qpos[0])
        joint.qpos = position + _STEP
        mujoco.mj_forward(standing.model, standing.state)
        moved = float(np.abs(np.concatenate([each.ravel() for each in standing.tool(arm)]) - before).max())
        require(
            moved > 0.1 * _STEP,
            f"{standing.at}: {name} by {_STEP:g} moves the {_name(arm)}",
            f"{moved:.4f}",
            "0.01 or more",
        )
        joint.qpos = position
        mujoco.mj_forward(standing.model, standing.state)


def one_command_closes_all_fingers(standing: StandingRobot) -> None:
    """The gripper's one servo brings every finger to both ends."""
    state, grippers = standing.state, [each for each in standing.robot.all_effectors if each.fingers]
    if grippers:
        standing.simulate(1.0)
    ends = [(gripper, value) for gripper in grippers for value in (gripper.low, gripper.high)]
    for gripper, value in ends:
        travel = abs(gripper.high - gripper.low)
        state.actuator(gripper.actuator).ctrl = value
        standing.simulate(1.5)
        for name in gripper.fingers:
            got = float(state.joint(name).qpos[0])
            require(
                abs(got - value) <= _TRAVEL * travel,
                f"{standing.at}: {name} after 1.5 s of the command {value:g}",
                f"{got:.4g}",
                f"within {_TRAVEL * travel:.2g} of it; see model.servos",
            )


def cup_holds(robot: Robot, control: float, *, number: int = 0) -> bool:
    """Returns whether a suction cup keeps a box whose upper face is at the tool.

    Args:
        robot: has it.
        control: value of the cup's actuator.
        number: of the arm that carries it.
    """
    spec = robot.build()
    add_free_box(spec, "box", half_size_m=[_BOX_HALF_M] * 3, mass_kg=_BOX_KG)
    standing = StandingRobot(robot, spec=spec)
    arm = robot.all_arms[number]
    (cup,) = standing.effectors_of(arm)
    box, (at, world_from_tool) = standing.state.joint("box"), standing.tool(arm)
    box.qpos[:3] = at + (_BOX_HALF_M - _OVERLAP_M) * world_from_tool[:, 2]
    mujoco.mju_mat2Quat(box.qpos[3:], world_from_tool.ravel())
    begun = box.qpos[:3].copy()
    standing.state.actuator(cup.actuator).ctrl = control
    standing.simulate(_FALL_S)
    return float(np.linalg.norm(box.qpos[:3] - begun)) < _FALLEN_M


def a_suction_cup_holds_and_lets_go(standing: StandingRobot) -> None:
    """A box that touches the lip stays there while the cup is closed, and falls when it is open."""
    robot, words = standing.robot, ("falls", "stays")
    for number, arm in enumerate(robot.all_arms):
        cups = [each for each in standing.effectors_of(arm) if each.is_cup]
        for cup, wanted in itertools.product(cups, (True, False)):
            control = cup.low if wanted else cup.high
            require(
                cup_holds(robot, control, number=number) == wanted,
                f"{standing.at}: a box of {_BOX_KG:g} kg at the {_name(arm)}, {cup.actuator} at {control:g}",
                words[not wanted],
                f"{words[wanted]}; the tool is in the middle of the lip",
            )


ROBOT_RULES: dict[str, Callable[[StandingRobot], None]] = {
    rule.__name__: rule
    for rule in (
        stands_at_home,
        is_one_body_without_a_scene,
        tool_points_down_at_home,
        left_is_towards_y,
        fingers_open_along_y,
        every_arm_joint_moves_the_tool,
        one_command_closes_all_fingers,
        a_suction_cup_holds_and_lets_go,
    )
}
