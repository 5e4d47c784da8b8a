"""Two arms that their owner describes: one model of both, two that are placed, and what does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mujoco import MjData, mj_kinematics

from robot_rl.core.errors import ModelError
from robot_rl.sim.conformance import ROBOT_RULES, ConformanceError, check_robot
from robot_rl.sim.robots.draft import Draft, draft_robot
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.robot_rules import StandingRobot
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from tests.arms import HOME_RAD, write_arm
from tests.sim.test_bodies import SIDES, moved, success

LIMITS = ("position_low_rad", "position_high_rad", "velocity_rad_s", "acceleration_rad_s2", "effort_n_m")
APART_M, HIGH_M = 0.6, 0.5
"""Between the arms' first joints along y, and their height above the table."""
_FINGER = (
    '<body name="{side}_{name}" pos="0 {y} -.1"><joint name="{side}_{name}" axis="0 {sign} 0" range="0 .04"/>'
    '<geom type="box" size=".01 .004 .02" mass=".05"/></body>'
)
_ARM = """
<body name="{side}_x" pos="{x} {y} {z}"><joint name="{side}_x" axis="1 0 0" range="-.1 1"/>
 <geom type="box" size=".03 .03 .03" mass="1"/>
 <body name="{side}_y"><joint name="{side}_y" axis="0 1 0" range="-.5 .5"/>
  <geom type="box" size=".02 .02 .02" mass="1"/>
  <body name="{side}_z"><joint name="{side}_z" axis="0 0 1" range="-.5 .3"/>
   <geom type="box" size=".02 .02 .02" mass="1"/>
   {fingers}
</body></body></body>
"""


def arm(side: str, y: float, *, z: float = HIGH_M, x: float = 0.0) -> str:
    """Returns three slides along x, y and z, and two fingers, whose boxes end 0.12 m below the last slide."""
    fingers = "".join(
        _FINGER.format(side=side, name=name, y=0.004 * sign, sign=sign)
        for name, sign in (("a", 1), ("b", -1))
    )
    return _ARM.format(side=side, x=x, y=y, z=z, fingers=fingers)


def on_torso(*parts: str) -> str:
    shape = '<geom type="box" size=".05 .4 .05" mass="5"/>'
    return f'<body name="torso" pos=".2 0 0">{shape}{"".join(parts)}</body>'


BOTH = on_torso(arm("right", -APART_M / 2), arm("left", APART_M / 2))


def write_model(folder: Path, bodies: str) -> Path:
    path = folder / "both.xml"
    path.write_text(
        '<mujoco><compiler angle="radian"/><default><joint type="slide"/></default>'
        f'<worldbody><light pos="0 0 2"/>{bodies}</worldbody></mujoco>'
    )
    return path


def drafted(folder: Path, bodies: str = BOTH, **settings: Any) -> Draft:
    return draft_robot(write_model(folder, bodies), folder / "both.yaml", name="both", **settings)


@pytest.fixture(name="both_file")
def _both_file(tmp_path: Path) -> Callable[..., str]:
    """Returns a writer of the drafted file, with numbers replaced by their dotted path."""
    content = yaml.safe_load(drafted(tmp_path).text)

    def write(**values: Any) -> str:
        changed = yaml.safe_load(yaml.safe_dump(content))
        for path, value in values.items():
            *way, last = path.split("__")
            inner = changed
            for key in way:
                inner = inner[key]
            inner[last] = value
        (tmp_path / "both.yaml").write_text(yaml.safe_dump(changed))
        return str(tmp_path / "both.yaml")

    return write


def tools_of(robot: Robot) -> list[np.ndarray]:
    """Returns where the tools are at home, each (3,)."""
    model = robot.build().compile()
    state = MjData(model)
    for joint, position in zip(robot.arm_joints, robot.home_rad, strict=True):
        state.joint(joint).qpos = position
    mj_kinematics(model, state)
    return [state.site(one.tool_site).xpos.copy() for one in robot.all_arms]


def test_a_model_of_two_arms_is_drafted(tmp_path: Path) -> None:
    draft = drafted(tmp_path)
    content = yaml.safe_load(draft.text)
    assert list(content) == ["name", "model", "left", "right"]
    assert content["model"] == {"file": "both.xml", "keep": "torso"}
    for side, y in zip(SIDES, (0.3, -0.3), strict=True):
        found = content[side]
        assert found["arm_joints"] == [f"{side}_x", f"{side}_y", f"{side}_z"]
        assert found["finger_joints"] == [f"{side}_a", f"{side}_b"]
        assert (found["gripper_actuator"], found["tool_site"]) == (f"{side}_gripper", f"{side}_tool")
        # Boxes 8 mm thick at +-4 mm touch where they are shut; the tool is 1 cm short of their ends.
        assert (found["gripper_open"], found["gripper_closed"]) == (0.04, 0.0)
        tool = found["model"]["tool"]
        assert tool["body"] == f"{side}_z"
        np.testing.assert_allclose(tool["pos_m"], [0, 0, -0.11], atol=1e-9)
        # Down, and x = y cross z forward: y is -y.
        assert (tool["approach_axis"], tool["opening_axis"]) == ([0, 0, -1], [0, -1, 0])
        # The usual place for a tool, (0.48, 0, 0.28), from this arm's first joint: 0.5 - 0.11 - 0.11 = 0.28.
        np.testing.assert_allclose(found["home_rad"], [0.48, 0, -0.11], atol=1e-3)
        (joints,) = [each for each in draft.decided if each.field == f"{side}.arm_joints"]
        assert joints.why == f"the 3 joints in a row on '{side}_x'"
        assert y == pytest.approx(tools_of(draft.robot)[SIDES.index(side)][1], abs=1e-3)
    assert "  # CHOSEN: " in draft.text
    (tmp_path / "both.yaml").write_text(draft.text)
    check_robot(str(tmp_path / "both.yaml"))


def test_a_file_of_two_arms_does_the_task_as_the_shipped_ones(both_file: Callable[..., str]) -> None:
    def made(robot: str | None) -> SimVectorEnv:
        env = SimVectorEnv(
            EnvConfig(task="bimanual_reach", robot=robot, num_threads=1), 16, autoreset="disabled"
        )
        env.reset(seed=0)
        return env

    def act(view: Any) -> np.ndarray:
        ways = [view[f"{side}_goal.pos"] - view[f"{side}_tool.pos"] for side in SIDES]
        return np.clip(20 * np.concatenate(ways, axis=1), -1, 1)

    env = made(both_file())
    assert env.action_names == made(None).action_names
    other = env.view["left_tool.pos"].copy()
    assert (moved(env, [0, 0, 0, 0, 0, 1], 8, "right_tool.pos")[:, 2] > 0.05).all()
    assert np.abs(env.view["left_tool.pos"] - other).max() < 0.02  # its posture comes home
    env.reset(seed=0)
    assert success(env, act) >= 0.9
    env.reset(seed=0)
    assert success(env, lambda view: act(view) * [1, 1, 1, 0, 0, 0]) == 0.0


def test_each_gripper_begins_where_its_arm_says(both_file: Callable[..., str]) -> None:
    robot = both_file(right__gripper_home=0.01)
    env = SimVectorEnv(EnvConfig(task="bimanual_reach", robot=robot, num_threads=1), 2, autoreset="disabled")
    env.reset(seed=0)
    np.testing.assert_allclose(env.view["left_a.pos"], 0.04)
    np.testing.assert_allclose(env.view["right_b.pos"], 0.01)


def test_each_arm_has_a_hand_from_a_file_of_its_own(both_file: Callable[..., str], tmp_path: Path) -> None:
    fingers = "".join(
        _FINGER.format(side="f", name=name, y=0.004 * s, sign=s) for name, s in (("a", 1), ("b", -1))
    )
    (tmp_path / "hand.xml").write_text(
        '<mujoco><compiler angle="radian"/><default><joint type="slide"/></default><worldbody>'
        f'<body name="palm"><geom size=".02"/>{fingers}</body></worldbody></mujoco>'
    )
    bare = write_model(tmp_path, BOTH)
    text = bare.read_text()
    for side in SIDES:  # the arms without fingers
        start = text.index(f'<body name="{side}_a"')
        text = text[:start] + text[text.index("</body></body></body>", start) :]
    values: dict[str, Any] = {}
    for side in SIDES:
        hand = {"file": "hand.xml", "body": f"{side}_z", "pos_m": [0, 0, -0.05]}
        values[f"{side}__model__hand"] = hand
        values[f"{side}__finger_joints"] = [f"{side}_hand/f_a", f"{side}_hand/f_b"]
    path = both_file(**values)
    bare.write_text(text)
    model = load_robot(path).build().compile()
    assert model.njnt == 10
    # 5 cm below the last slide, and 10 cm more to the finger.
    state = MjData(model)
    mj_kinematics(model, state)
    np.testing.assert_allclose(state.body("right_hand/f_a").xpos, [0, -0.3 + 0.004, 0.5 - 0.15], atol=1e-9)


def test_one_rule_is_broken_by_one_arm(both_file: Callable[..., str]) -> None:
    tool = {"body": "right_z", "pos_m": [0, 0, -0.11], "approach_axis": [0, 0, 1], "opening_axis": [0, 1, 0]}
    with pytest.raises(
        Exception, match=r"robot both: z axis of the right_tool at home: got \[0\.0, 0\.0, 1\.0\]"
    ):
        check_robot(both_file(right__model__tool=tool))


def test_a_left_arm_that_is_right_of_the_other_is_refused(both_file: Callable[..., str]) -> None:
    rule = ROBOT_RULES["left_is_towards_y"]
    content = yaml.safe_load(Path(both_file()).read_text())
    exchanged = load_robot(both_file(left=content["right"], right=content["left"]))
    with pytest.raises(
        ConformanceError,
        match=r"robot both: way along y from right_tool to left_tool at home: got -0\.600 m, from y = 0\.300 "
        r"to -0\.300, need 0\.1 m or more, since left is towards y; exchange left: and right: in the robot ",
    ):
        rule(StandingRobot(exchanged))
    # The slides along y bring the left tool to 0.3 - 0.26 m, and the right one stays at -0.3 + 0.25 m.
    near = (-0.26, 0.25)
    homes = {
        f"{side}__home_rad": [content[side]["home_rad"][0], y, content[side]["home_rad"][2]]
        for side, y in zip(SIDES, near, strict=True)
    }
    with pytest.raises(ConformanceError, match=r"got 0\.090 m, from y = -0\.050 to 0\.040, .*; move the"):
        rule(StandingRobot(load_robot(both_file(**homes))))
    homes["left__home_rad"][1] = -0.24  # 0.06 + 0.05 = 0.11 m
    rule(StandingRobot(load_robot(both_file(**homes))))


def test_two_arms_that_stand_apart_are_drafted_one_by_one_and_placed(tmp_path: Path) -> None:
    cube = '<body name="cube" pos="1 1 1"><freejoint/><geom size=".02"/></body>'
    bodies = arm("one", 0.0, x=1.0) + arm("two", 0.8, x=1.0) + cube
    with pytest.raises(
        ModelError, match=r"it holds 2 arms, on one_x, two_x\. Choose one: keep=one_x\. Two that s"
    ):
        drafted(tmp_path, bodies)
    with pytest.raises(
        ModelError, match=r"keep: got one_x, two_x, allowed: one arm, or two on one base of which"
    ):
        drafted(tmp_path, bodies, keep=("one_x", "two_x"))
    (tmp_path / "one.yaml").write_text(drafted(tmp_path, bodies, keep=("one_x",)).text)
    robot = placed(
        tmp_path, "{robot: one.yaml, pos_m: [0, 0.4, 0]}", "{robot: one.yaml, pos_m: [0, -0.4, 0]}"
    )
    # `keep` brings the first slide down to the table. The highest that the tool gets is 0.3 - 0.11 = 0.19 m,
    # so of the places for it (0.24, 0, 0.15) is the first in reach.
    np.testing.assert_allclose(tools_of(robot)[0][:2], [0.24, 0.4], atol=1e-3)
    check_robot(robot)


# Two arms that are placed


def placed(folder: Path, left: str, right: str) -> Robot:
    (folder / "pair.yaml").write_text(f"name: pair\nleft: {left}\nright: {right}\n")
    return load_robot(str(folder / "pair.yaml"))


def test_arms_of_files_stand_where_the_file_says(tmp_path: Path) -> None:
    write_arm(tmp_path, fingers=True)
    robot = placed(
        tmp_path,
        "{robot: ur.yaml, pos_m: [0, 0.35, 0]}",
        "{robot: ur.yaml, pos_m: [0.1, -0.35, 0.2], rotation_deg: [0, 0, 90]}",
    )
    assert robot.home_rad == (*HOME_RAD, *HOME_RAD)
    assert robot.arm_joints[5:7] == ("left_wrist_3", "right_pan")
    assert [each.name for each in robot.all_effectors] == ["left_gripper", "right_gripper"]
    # An arm alone has its tool at (0.48, 0, 0.28); a quarter turn about z puts that at (0, 0.48, 0.28).
    np.testing.assert_allclose(tools_of(robot), [[0.48, 0.35, 0.28], [0.1, 0.13, 0.48]], atol=1e-3)


def test_placed_pandas_are_the_shipped_two(tmp_path: Path) -> None:
    robot, shipped = (
        placed(tmp_path, "{robot: panda, pos_m: [0, 0.35, 0]}", "{robot: panda, pos_m: [0, -0.35, 0]}"),
        load_robot("two_pandas"),
    )
    for field in ("arm_joints", "arm_actuators", "arms", "effectors", "finger_joints", "home_rad", "limits"):
        assert getattr(robot, field) == getattr(shipped, field), field
    model, other = robot.build().compile(), shipped.build().compile()
    np.testing.assert_array_equal(model.body_pos, other.body_pos)
    assert [model.site(i).name for i in range(model.nsite)] == [
        other.site(i).name for i in range(other.nsite)
    ]


@pytest.mark.parametrize(
    ("left_m", "right_m", "message"),
    [
        (-0.35, 0.35, r"got -0\.700 m, from y = 0\.350 to -0\.350, .*; exchange left: and right:"),
        (0.0, 0.0, r"got 0\.000 m, from y = 0\.000 to 0\.000, .*; move the arms"),
    ],
)
def test_arms_that_are_placed_the_wrong_way_are_refused(
    left_m: float, right_m: float, message: str, tmp_path: Path
) -> None:
    robot = placed(tmp_path, *(f"{{robot: panda, pos_m: [0, {y_m}, 0]}}" for y_m in (left_m, right_m)))
    with pytest.raises(ConformanceError, match=message):
        check_robot(robot)


# What does not fit


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"right__arm_joints": ["left_x", "right_y", "right_z"]},
         r"robot both: joint 'left_x' is named 2 times; each belongs to one arm or to one end effector"),
        ({"right__arm_joints": []}, r"robot both right: arm_actuators has 3 entries for 0 arm joints"),
        ({"right__arm_joints": [], "right__arm_actuators": [], "right__home_rad": [],
          "right__limits": {name: [] for name in LIMITS}},
         r"robot both right: got 0 arm_joints, kind arm has at least one"),
        ({"right__finger_joints": ["left_a", "right_b"]}, r"joint 'left_a' is named 2 times"),
        ({"right__gripper_actuator": "left_gripper"}, r"actuator 'left_gripper' is named 2 times"),
        ({"right__tool_site": "left_tool"}, r"tool site 'left_tool' is named 2 times"),
        ({"name": None}, r"robot file .*both\.yaml: name: got None, allowed: text\.$"),
        ({"name": 7}, r"robot file .*both\.yaml: name: got 7, allowed: text\. Quote it"),
        ({"right": None}, r"robot file .*both\.yaml: right: got None, allowed: keys and values"),
        ({"right__limit": 1}, r"robot file .*: right: limit: no such key\. Did you mean 'limits'"),
        ({"kind": "two_arms"}, r"unknown keys kind, allowed: name, model, left, right"),
        ({"model__servos": {}}, r"model\.servos: is of one arm\. Write it under left\.model and right"),
        ({"left__model__file": "x.xml"}, r"left\.model\.file: is of both arms"),
        ({"left__name": "x"}, r"left\.name: is of both arms"),
        ({"model": "both.xml"}, r"robot file .*: model: got 'both\.xml', allowed: keys and values\.$"),
        ({"model": None}, r"model: missing\. Give the file of both arms, or left\.robot and right\.robot"),
        ({"left__model": 5}, r"robot file .*: left\.model: got 5, allowed: keys and values"),
        ({"model": {"builder": "my_arms:build"}},
         r"robot file .*both\.yaml: model\.builder: got 'my_arms:build', allowed: none, .* Give model"),
        ({"model": {"keep": "torso"}}, r"robot file .*: model\.file: missing\. Give the path of an MJCF or "),
        ({"left": {"robot": "panda", "pos_m": [0, 0, 0]}}, r"robot: stands under left alone\. Give both"),
        ({"right__limits__lookahead_s": 0.2}, r"limits\.lookahead_s: got 0\.1 of the left arm and 0\.2 of"),
        ({"right__limits__effort_n_m": [1, 1, 1], "right__model__servos": None},
         r"robot both right: the model has no actuators\. Put servos into the file, under `right\.model:`"),
        ({"left__model__servos": None},
         r"^robot both left: the model has no actuators\. Put servos into the file, under `left\.model:`"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(
    both_file: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    path = both_file(**values)
    with pytest.raises(ModelError, match=message):
        load_robot(path).build()


def test_servos_of_one_arm_alone_are_refused_with_those_of_the_other(
    both_file: Callable[..., str], tmp_path: Path
) -> None:
    path = both_file(right__model__servos=None)
    model = tmp_path / "both.xml"
    own = "".join(f'<position name="right_{axis}" joint="right_{axis}" forcerange="-9 9"/>' for axis in "xyz")
    model.write_text(model.read_text().replace("</mujoco>", f"<actuator>{own}</actuator></mujoco>"))
    with pytest.raises(ModelError) as refused:
        load_robot(path).build()
    head, block = str(refused.value).split("home_rad:\n")
    assert head == (
        "robot both right: servos of the other arm replace all actuators of the model. Put servos into the "
        "file, under `right.model:`. For its masses, and this "
    )
    lines = Path(path).read_text().splitlines()
    lines[lines.index("    servos: null")] = block  # as it is
    Path(path).write_text("\n".join(lines))
    assert load_robot(path).build().compile().nu == 8


def test_servos_of_both_arms_are_given_at_once(both_file: Callable[..., str]) -> None:
    with pytest.raises(ModelError) as refused:
        load_robot(both_file(left__model__servos=None, right__model__servos=None)).build()
    lines = str(refused.value).splitlines()
    heads = [line for line in lines if line.startswith("robot ")]
    assert [head.partition("under ")[2][:14] for head in heads] == ["`left.model:`.", "`right.model:`"]
    assert lines.count("    servos:") == 2


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ("{robot: two_pandas, pos_m: [0, 0, 0]}", "{robot: panda, pos_m: [0, 0, 0]}",
         r"robot pair: left: got two_pandas, of kind two_arms; allowed: kind arm"),
        ("{robot: panda, pos_m: [0, 0]}", "{robot: panda, pos_m: [0, 0, 0]}",
         r"pos_m: got \[0\.0, 0\.0\], allowed: three numbers"),
        ("{robot: panda}", "{robot: panda}", r"left\.pos_m: missing"),
        ("{robot: pair.yaml, pos_m: [0, 0, 0]}", "{robot: panda, pos_m: [0, 0, 0]}",
         r"^robot file \S*/pair\.yaml: left: names a file that leads back here"),
        ("{robot: panda, pos_m: [0, 0, 0]}", "{robot: pandaa, pos_m: [0, 0, 0]}",
         r"robot file .*/pair\.yaml: right\.robot: robot: no robot named 'pandaa'\. Did you mean 'panda'"),
        ("{robot: gone.yaml, pos_m: [0, 0, 0]}", "{robot: panda, pos_m: [0, 0, 0]}",
         r"robot file .*/pair\.yaml: left\.robot: robot file gone\.yaml: cannot be read: No such file"),
    ],
)  # fmt: skip
def test_arms_that_cannot_be_placed_are_refused(left: str, right: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        placed(tmp_path, left, right)


HEAD = '<body name="head"><joint name="pan" type="hinge"/><geom size=".02"/></body>'


@pytest.mark.parametrize(
    ("bodies", "settings", "message"),
    [
        (on_torso(arm("right", -0.3), arm("left", 0.3), HEAD), {},
         r"pan is of neither of the arms at right_x, left_x, and nothing would move it\. Take it out"),
        (on_torso(arm("a", -0.3), arm("b", 0.3), arm("c", 0.6)), {}, r"3 arms, .* on 'torso': a_x, b_x, c_x"),
        (on_torso(arm("a", 0.0), arm("b", 0.0, z=0.9)), {},
         r"two arms begin at a_x, b_x, and neither is farther to the left, .* first: keep=a_x,b_x"),
        (BOTH, {"keep": ("left_x", "left_y")}, r"keep: got left_x, left_y, allowed: one arm, or two on one"),
        (BOTH, {"keep": ("left_x", "head")}, r"keep: no arm hangs on 'head'"),
        (BOTH, {"tool": ("left_z",)}, r"tool: got 1 bodies for 2 arms\. Give one for each arm"),
        (on_torso(arm("a", -0.3), arm("b", 0.3)).replace(' name="b_y" axis', " axis"), {},
         r"the joint of body 'b_y' has no name"),
    ],
)  # fmt: skip
def test_a_model_that_is_no_two_arms_is_refused(
    bodies: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        drafted(tmp_path, bodies, **settings)


def test_which_is_left_can_be_said(tmp_path: Path) -> None:
    robot = drafted(tmp_path, on_torso(arm("a", 0.0), arm("b", 0.0, z=0.9)), keep=("b_x", "a_x")).robot
    assert [one.joints[0] for one in robot.all_arms] == ["b_x", "a_x"]
