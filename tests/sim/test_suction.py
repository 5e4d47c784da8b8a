"""A suction cup as the end effector: its force by hand, what closed means, its tasks and its file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.hal.conformance import check_vector_env
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.backends.genesis_scene import check_scene
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.checkup import check_robot
from robot_rl.sim.config import check_names
from robot_rl.sim.conformance import ROBOT_RULES, ConformanceError
from robot_rl.sim.plant import MujocoPlant
from robot_rl.sim.reflection import reflection_of
from robot_rl.sim.robots.gantry import SUCTION_GANTRY
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.physics import physics_options
from robot_rl.sim.robots.robot_rules import StandingRobot
from robot_rl.sim.robots.servo import add_suction
from robot_rl.sim.scene import add_free_box
from robot_rl.sim.tasks.catalogue import expert_success
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from tests.arms import JOINTS, write_arm

Array = NDArray[Any]
HALF_M = 0.02


def make(task: str, num_envs: int = 32, **config: Any) -> SimVectorEnv:
    settings: dict[str, Any] = {"robot": "suction_gantry", "num_threads": 1, **config}
    return SimVectorEnv(EnvConfig(task=task, **settings), num_envs, autoreset="disabled")


FORCE_N = 20.0


def fall_m(mass_kg: float, control: float) -> float:
    """Returns how far a box that touches a fixed cup falls in a second; below 0 it is drawn in."""
    spec = mujoco.MjSpec()
    physics_options(spec)
    cup = spec.worldbody.add_body(name="cup", pos=(0.0, 0.0, 1.0))
    for x, y in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        cup.add_geom(pos=(0.006 * x, 0.006 * y, 0.004), size=(0.004, 0.0, 0.0))
    add_suction(spec, name="suction", body=cup, force_n=FORCE_N)
    add_free_box(spec, "box", half_size_m=[HALF_M] * 3, mass_kg=mass_kg)
    model = spec.compile()
    state = mujoco.MjData(model)
    state.joint("box").qpos[:3] = (0.0, 0.0, 1.0 - HALF_M + 1e-5)
    state.ctrl[0] = control
    for _ in range(round(1.0 / model.opt.timestep)):
        mujoco.mj_step(model, state)
    return float(1.0 - HALF_M - state.body("box").xpos[2])


@pytest.mark.parametrize(
    ("mass_kg", "control", "holds"),
    [
        # 20 N are the weight of 20 / 9.81 = 2.039 kg, half of them of 1.019 kg.
        (2.03, 1.0, True),
        (2.05, 1.0, False),
        (1.01, 0.5, True),
        (1.03, 0.5, False),
        (0.05, 0.0, False),
    ],
)
def test_a_cup_holds_what_weighs_less_than_its_force(mass_kg: float, control: float, holds: bool) -> None:
    # What loses contact falls freely: 9.81 / 2 = 4.9 m in a second, less what the pull slows it at first.
    fallen_m = fall_m(mass_kg, control)
    assert abs(fallen_m) < 1e-4 if holds else 4.5 < fallen_m < 4.95


def test_a_light_cube_is_not_drawn_into_the_lip() -> None:
    assert -6e-4 < fall_m(0.025, 1.0) < 0.0  # 0.5 mm; 4 mm by the usual contacts


def test_the_shipped_cup_pulls_by_its_vacuum() -> None:
    # 60 kPa on a circle of 12 mm: 60e3 * pi * 0.012^2 = 27.143 N
    model = SUCTION_GANTRY.build().compile()
    assert model.actuator("suction").gainprm[0] == pytest.approx(27.143, abs=1e-3)
    standing = StandingRobot(SUCTION_GANTRY)
    tool_m, _ = standing.tool()
    balls = model.geom_bodyid == model.body("cup").id
    low_m = standing.state.geom_xpos[balls, 2] - model.geom_size[balls, 0]
    np.testing.assert_allclose(low_m, tool_m[2], atol=1e-12)


def test_closed_pulls_and_open_lets_go() -> None:
    env = make("pick_cube", 3)
    env.reset(seed=0)
    assert env.action_names == ("tool.dx", "tool.dy", "tool.dz", "tool.yaw", "gripper")
    assert env.state_names[:5] == ("x.pos", "y.pos", "z.pos", "yaw.pos", "tool.pos.0")  # no fingers
    control = env.backend.bind("ctrl")[:, env.index.effector_ctrl]
    assert control.tolist() == [[0.0]] * 3  # an episode begins with the cup off
    action = np.zeros((3, 5), np.float32)
    action[:, -1] = -1.0, 0.0, 1.0
    env.step(action)
    assert env.backend.bind("ctrl")[:, -1].tolist() == [1.0, 0.5, 0.0]
    towards = env.action_towards(env.controller.joint_positions(), np.array([-1.0, 1.0, 1.0]))
    assert towards[:, -1].tolist() == [-1.0, 1.0, 1.0]  # a leader arm: its opening


def test_what_is_let_go_falls() -> None:
    env = make("pick_cube", 8, horizon_s=10.0)
    env.reset(seed=0)
    expert = env.expert()
    for _ in range(60):
        env.step(expert.act())
    height_m = env.view["cube.pos"][:, 2].copy()
    assert (height_m > 0.09).all()  # goals are 12 cm above the table or more, and a success is 2.5 cm away
    held, opened = (np.tile(np.array([0, 0, 0, 0, grip], np.float32), (8, 1)) for grip in (-1, 1))
    for _ in range(20):
        env.step(held)
    # The servos yield to nothing but the weight, which is 0.5 N on 2000 N/m: 0.2 mm.
    np.testing.assert_allclose(env.view["cube.pos"][:, 2], height_m, atol=0.01)
    for _ in range(20):
        env.step(opened)
    np.testing.assert_allclose(env.view["cube.pos"][:, 2], HALF_M, atol=0.001)


@pytest.mark.parametrize(
    "task", ["pick_cube", "pick_red_cube", "pick_blue_cube", "stack_cube", "peg_insert", "reach", "push_cube"]
)
def test_the_expert_does_with_it(task: str) -> None:
    assert expert_success(make(task)) >= 0.9  # measured: all of 64


def test_the_expert_picks_cubes_of_other_sizes_and_weights() -> None:
    assert expert_success(make("pick_cube", variation="varied")) >= 0.9
    assert expert_success(make("pick_cube", randomize=True)) >= 0.9


@pytest.mark.parametrize("task", ["push_cube", "open_drawer"])
def test_where_no_gripper_is_needed_the_cup_stays_off(task: str) -> None:
    env = make(task)
    assert expert_success(env) >= 0.9
    assert not env.backend.bind("ctrl")[:, -1].any()
    common = make(task, common_actions=True)
    assert common.action_names[-1] == "gripper"
    assert expert_success(common) >= 0.9  # measured, with a cup that pulls: 34 % of push_cube


def test_it_keeps_the_contract_of_envs() -> None:
    check_vector_env(lambda count: make("pick_cube", count, horizon_s=0.5))


def test_it_has_a_mirror_image() -> None:
    mirrored = reflection_of(EnvConfig(task="pick_cube", robot="suction_gantry"))
    action = np.array([[0.1, 0.2, 0.3, 0.4, -1.0]])
    np.testing.assert_array_equal(mirrored.action(action), [[0.1, -0.2, 0.3, -0.4, -1.0]])


def test_a_plant_holds_with_it() -> None:
    plant = MujocoPlant("pick_cube", "suction_gantry")
    try:
        assert (plant.finger_names, plant.gripper_range) == ((), (1.0, 0.0))  # closed, open
        target, _ = plant.targets()
        plant.command(target, 1.0)
        assert plant.measure().gripper == 1.0  # of a cup what it is commanded
    finally:
        plant.close()


NEEDS_FINGERS = (
    r"robot: {robot} has a suction cup, and gantry_peg needs fingers\. Tasks for it: reach, push_cube, "
    r"pick_cube, pick_red_cube, pick_blue_cube, stack_cube, peg_insert, open_drawer\."
)


def test_what_needs_fingers_is_refused() -> None:
    with pytest.raises(ConfigError, match="^env." + NEEDS_FINGERS.format(robot="suction_gantry")):
        make("gantry_peg")
    env = make("pick_cube", 1, formula="grasped")
    env.reset(seed=0)
    with pytest.raises(ModelError, match=r"view: the robot has no fingers, and so no 'fingers\.width'"):
        env.step(np.zeros((1, 5), np.float32))
    with pytest.raises(ConfigError, match=r"banks of starts .* suction_gantry has a suction cup"):
        Workbench(make("pick_cube"))


def test_genesis_refuses_it_by_name() -> None:
    model = on_cpu(make("pick_cube", 1).backend).model
    with pytest.raises(ModelError, match=r"lacks what this scene has: suction cups \(adhesion\)\. Use"):
        check_scene(model, "scene")


def test_the_doctor_tries_it() -> None:
    found = check_robot("suction_gantry", ["pick_cube"])
    assert {check.state for check in found.checks} == {"ok"}
    (gripper,) = [check for check in found.checks if check.name == "gripper"]
    assert gripper.detail == "suction, a suction cup, holds a box of 0.1 kg, and lets it go"


# Of a user's own file

CUP = """<body name="cup" pos="0 0.2 0">
{balls}
</body>"""
BALL = '<geom type="sphere" pos="{x} -0.004 {z}" size="0.004" mass="0.01" margin="0.01" gap="0.01"/>'
BALLS = "\n".join(BALL.format(x=x, z=z) for x in (0.006, -0.006) for z in (0.006, -0.006))
ADHESION = '<adhesion name="vacuum" body="cup" ctrlrange="0 1" gain="20"/>'
GRIPPER = """gripper_actuator: vacuum
gripper_open: 0
gripper_closed: 1
gripper_home: 0
finger_joints: []
"""
BLOCK = "model:\n  suction: {body: cup, force_n: 20}\n"


@pytest.fixture(name="arm_file")
def _arm_file(tmp_path: Path) -> Callable[..., str]:
    """Returns a writer of a six-joint arm with a cup, of the MJCF's own adhesion or of the file's block."""

    def write(*replacements: tuple[str, str], own: bool = False, **settings: Any) -> str:
        path = write_arm(tmp_path, **settings)
        model = path.with_suffix(".xml")
        tip = '<geom type="capsule" fromto="0 0.1 0 0 0.192 0" size="0.008" mass="0.1"/>'
        stem = tip.replace("0.192", "0.18")
        mjcf = model.read_text().replace(tip, stem + CUP.format(balls=BALLS))
        text = path.read_text() + GRIPPER
        if own:
            mjcf = mjcf.replace("</actuator>", f"{ADHESION}</actuator>")
        else:
            text = text.replace("model:\n", BLOCK)
        for old, new in replacements:
            assert (old in text) != (old in mjcf)
            text, mjcf = text.replace(old, new), mjcf.replace(old, new)
        model.write_text(mjcf)
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("settings", [{}, {"own": True}, {"own": True, "servos": None}])
def test_a_robot_file_names_a_cup(arm_file: Callable[..., str], settings: dict[str, Any]) -> None:
    robot = load_robot(arm_file(**settings))
    assert (robot.has_cup, robot.finger_joints, len(robot.arm_joints)) == (True, (), len(JOINTS))
    model = robot.build().compile()
    assert model.nu == 7
    assert model.actuator("vacuum").trntype == mujoco.mjtTrn.mjTRN_BODY
    assert model.actuator("vacuum").gainprm[0] == 20.0
    cup = model.geom_bodyid == model.body("cup").id
    assert (cup.sum(), model.geom_gap[cup].any(), model.geom_margin[cup].any()) == (4, False, False)
    for rule in ROBOT_RULES.values():
        rule(StandingRobot(robot))
    assert expert_success(make("pick_cube", 20, robot=arm_file(**settings))) >= 0.9


def test_a_file_with_a_cup_is_refused_early_where_fingers_are_needed(arm_file: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="^" + NEEDS_FINGERS.format(robot="ur")):
        check_names("gantry_peg", arm_file(), at="")
    check_names("pick_cube", arm_file(), at="")


READING = [
    (
        ("gripper_closed: 1", "gripper_closed: 2"),
        {},
        r"\[0\.0, 2\.0, 0\.0\] of a gripper without finger_joints",
    ),
    (
        ("gripper_open: 0", "gripper_open: 0.04"),
        {},
        "which is a suction cup; allowed: 0, a share of its force",
    ),
    (("finger_joints: []\n", ""), {}, r"ur\.yaml: missing finger_joints\."),
    (("gripper_actuator: vacuum", "gripper_actuator: ''"), {}, "a suction cup has the first and none of"),
    (("force_n: 20", "force_n: 0"), {}, r"suction\.force_n: got 0\.0, allowed: a number above 0"),
    (("force_n: 20", "force: 20"), {}, r"model\.suction\.force: no such key. Did you mean"),
    (("  servos:", "  servos:\n    gripper_kp: 5"), {}, "but the file names no gripper"),
]
BUILDING = [
    (("body: cup", "body: cop"), {}, r"model\.suction\.body: no body 'cop'. Did you mean 'cup'\?"),
    (
        ("model:", "model:\n  collide: [wrist_3]"),
        {},
        "body 'cup' of the suction cup has no geom of its own that",
    ),
    ((ADHESION, ""), {"own": True}, "no actuator 'vacuum'"),
    (('ctrlrange="0 1"', 'ctrlrange="0 5"'), {"own": True}, r"is no <adhesion> of ctrlrange \[0, 1\]"),
    (
        (ADHESION, '<motor name="vacuum" joint="pan" ctrlrange="0 1"/>'),
        {"own": True},
        "is no <adhesion>",
    ),
]


@pytest.mark.parametrize(("replacement", "settings", "message"), READING)
def test_a_wrong_file_is_refused_when_read(
    arm_file: Callable[..., str], replacement: tuple[str, str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_robot(arm_file(replacement, **settings))


@pytest.mark.parametrize(("replacement", "settings", "message"), BUILDING)
def test_a_file_that_does_not_fit_its_model_is_refused_when_built(
    arm_file: Callable[..., str], replacement: tuple[str, str], settings: dict[str, Any], message: str
) -> None:
    robot = load_robot(arm_file(replacement, **settings))
    with pytest.raises(ModelError, match=message):
        robot.build()


def test_a_tool_that_is_not_at_the_lip_is_found(arm_file: Callable[..., str]) -> None:
    path = arm_file(("pos_m: [0, 0.2, 0]", "pos_m: [0, 0.21, 0]"))
    with pytest.raises(
        ConformanceError, match=r"a box of 0\.1 kg at the tool, vacuum at 1: got falls, need st"
    ):
        ROBOT_RULES["a_suction_cup_holds_and_lets_go"](StandingRobot(load_robot(path)))
    checks = {check.name: check for check in check_robot(path, ["reach"]).checks}
    assert checks["gripper"].state == "fail"
    assert checks["gripper"].detail == "vacuum, a suction cup, does not hold a box of 0.1 kg"
