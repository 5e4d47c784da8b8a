"""A robot file drafted from a model: what shipped robots declare is found, what does not fit is named."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mujoco import MjData, MjModel, mj_kinematics, mju_quat2Mat

from robot_rl.core.errors import ModelError
from robot_rl.sim.conformance import check_robot
from robot_rl.sim.robots.anatomy import find_anatomies
from robot_rl.sim.robots.catalog import ROBOT_FILES
from robot_rl.sim.robots.draft import Draft, draft_robot
from robot_rl.sim.robots.loading import load_robot
from tests.arms import EFFORT_N_M, JOINTS, write_arm
from tests.sim.test_own_robot import OBJ, URDF, joint, limit


def model_of(name: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Returns the model that a shipped robot is made from, and which arm of it."""
    content = yaml.safe_load((ROBOT_FILES / f"{name}.yaml").read_text())
    source = content["model"]
    if "builder" in source:
        spec = load_robot(name).build()
        spec.compile()
        (folder / f"{name}.xml").write_text(spec.to_xml())
        return folder / f"{name}.xml", ()
    found = find_spec(source["package"])
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))) / source["file"], (source["keep"],)


def tool_of(robot: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """Returns the body of the tool, its place there, and its axes in the body's frame."""
    model = robot.build().compile()
    site = model.site(robot.tool_site)
    rotation = np.zeros(9)
    mju_quat2Mat(rotation, site.quat)
    return model.body(int(site.bodyid[0])).name, site.pos, rotation.reshape(3, 3)


@pytest.mark.parametrize("name", ["panda", "gantry", "viperx", "so_arm100"])
def test_what_the_shipped_robots_declare_is_found(name: str, tmp_path: Path) -> None:
    shipped, (path, keep) = load_robot(name), model_of(name, tmp_path)
    found = draft_robot(path, tmp_path / "new.yaml", name="new", keep=keep).robot
    assert found.arm_joints == shipped.arm_joints
    assert found.finger_joints == shipped.finger_joints
    np.testing.assert_allclose(found.limits.position_low_rad, shipped.limits.position_low_rad)
    np.testing.assert_allclose(found.limits.position_high_rad, shipped.limits.position_high_rad)
    if name != "so_arm100":  # its jaw opens by up to 2.2 rad; 1.2 is declared, and 10 cm at the tip are 1.28
        assert found.gripper_open == pytest.approx(shipped.gripper_open, abs=1e-4)
    assert found.gripper_open == pytest.approx(shipped.gripper_open, abs=0.1)
    assert found.gripper_closed == pytest.approx(shipped.gripper_closed, abs=1e-4)
    (body, pos_m, axes), (wanted_body, wanted_m, wanted_axes) = tool_of(found), tool_of(shipped)
    assert body == wanted_body
    np.testing.assert_allclose(pos_m, wanted_m, atol=0.01)
    np.testing.assert_allclose(axes, wanted_axes, atol=1e-9)
    check_robot(found)


Writer = Callable[..., Path]


@pytest.fixture(name="urdf")
def _urdf(tmp_path: Path) -> Writer:
    """Returns a writer of a ROS package with the URDF of test_own_robot, with text replaced."""

    def write(*replacements: tuple[str, str]) -> Path:
        text = URDF
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new)
        files = {"urdf/arm.urdf": text, "meshes/link.obj": OBJ, "touch/link.obj": OBJ}
        for name, content in files.items():
            path = tmp_path / "my_arm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path / "my_arm/urdf/arm.urdf"

    return write


def drafted(path: Path, **settings: Any) -> Draft:
    return draft_robot(path, path.parent / "mine.yaml", name="mine", **settings)


def test_a_urdf_is_read_and_measured(urdf: Writer) -> None:
    draft = drafted(urdf())
    content = yaml.safe_load(draft.text)
    assert content["arm_joints"] == ["pan", "lift", "elbow", "bend", "roll"]
    assert content["finger_joints"] == ["left", "right"]
    assert content["model"]["file"] == "arm.urdf"  # below the robot file's folder
    # Boxes 40 mm long in the middle of fingers at 0.1 m: their ends are at 0.12, the tool 1 cm short of them.
    assert content["model"]["tool"]["body"] == "palm"
    np.testing.assert_allclose(content["model"]["tool"]["pos_m"], [0, 0, 0.11], atol=1e-9)
    assert content["model"]["tool"]["approach_axis"] == [0, 0, 1]
    # Boxes 8 mm thick at +-4 mm touch where they are shut.
    assert (content["gripper_open"], content["gripper_closed"]) == (0.04, 0.0)
    limits = content["limits"]
    assert limits["position_low_rad"] == [-3.14159, -2.5, -2.9, -2.5, -3.0]
    # `pan` is continuous: it has no <limit>, so neither speed nor effort.
    assert limits["velocity_rad_s"] == [2.0, 3.0, 3.0, 3.0, 3.0]
    assert limits["acceleration_rad_s2"] == [6.7, 10.0, 10.0, 10.0, 10.0]  # full speed in 0.3 s
    assert limits["effort_n_m"][1:] == [40, 40, 20, 20]
    assert content["model"]["servos"]["gripper_effort"] == 5
    assert {finding.field for finding in draft.chosen} == {
        *("limits.position_low_rad", "limits.velocity_rad_s", "limits.acceleration_rad_s2"),
        "limits.effort_n_m",
    }
    (speed,) = [each for each in draft.chosen if each.field == "limits.velocity_rad_s"]
    assert speed.why.startswith("pan: the model has none")
    assert "  # CHOSEN: pan: the model has none" in draft.text
    check_robot(draft.robot)


def test_fingers_that_do_not_touch_have_a_gap(urdf: Writer) -> None:
    # 10 mm further apart: they stop 10 mm from each other, so each counts from 5 mm.
    content = yaml.safe_load(
        drafted(urdf(("0 0.004 0.1", "0 0.009 0.1"), ("0 -0.004 0.1", "0 -0.009 0.1"))).text
    )
    assert content["model"]["servos"]["gripper_gap_m"] == pytest.approx(0.01)
    assert (content["gripper_open"], content["gripper_closed"]) == (0.045, 0.005)


def test_a_finger_that_mirrors_the_other_is_coupled_once(urdf: Writer) -> None:
    # right = -left on the same axis: after both count from closed, right = left.
    mirrored = (
        joint("right", "prismatic", "palm", "finger_r", "0 -0.004 0.1", "0 1 0",
              limit(-0.04, 0, 5.0) + '<mimic joint="left" multiplier="-1"/>'),
    )  # fmt: skip
    own = joint("right", "prismatic", "palm", "finger_r", "0 -0.004 0.1", "0 -1 0",
                limit(0, 0.04, 5.0) + '<mimic joint="left"/>')  # fmt: skip
    draft = drafted(urdf((own, mirrored[0])))
    assert draft.robot.build().compile().neq == 1
    check_robot(draft.robot)


def test_an_arm_without_fingers_ends_at_the_frame_with_the_tools_name(urdf: Writer) -> None:
    start, end = URDF.index('<joint name="left"'), URDF.index('<link name="tcp"/>')
    draft = drafted(
        urdf(
            (
                URDF[start:end],
                '<link name="camera"/>' + joint("eye", "fixed", "palm", "camera", "0.1 0 0", "0 0 1"),
            )
        )
    )
    content = yaml.safe_load(draft.text)
    assert "gripper_actuator" not in content
    assert content["model"]["tool"]["body"] == "tcp"
    # 11 cm along the axis of the last joint, which points out.
    assert content["model"]["tool"]["approach_axis"] == [0, 0, 1]
    assert [each.value for each in draft.findings if each.field == "gripper_actuator"] == ["none"]
    check_robot(draft.robot)


def test_an_mjcf_with_servos_of_its_own(tmp_path: Path) -> None:
    write_arm(tmp_path, fingers=True)
    draft = draft_robot(tmp_path / "ur.xml", tmp_path / "robots/new.yaml", name="new")
    content = yaml.safe_load(draft.text)
    assert content["model"]["file"] == str(tmp_path / "ur.xml")  # not below the robot file's folder
    assert content["arm_joints"] == list(JOINTS)
    assert content["limits"]["effort_n_m"] == list(EFFORT_N_M)  # of the actuators
    # The fingers' capsules end at 0.14 + 0.06 + 0.004 m along y.
    np.testing.assert_allclose(content["model"]["tool"]["pos_m"], [0, 0.194, 0], atol=1e-9)
    assert content["model"]["tool"]["approach_axis"] == [0, 1, 0]
    chosen = {finding.field for finding in draft.chosen}
    assert "model.servos.gripper_effort" in chosen  # its MJCF limits no finger
    check_robot(draft.robot)


def test_a_home_that_is_not_found_is_said(urdf: Writer) -> None:
    narrow = limit(-0.1, 0.1)
    draft = drafted(
        urdf((limit(-2.5, 2.5), narrow), (limit(-2.9, 2.9), narrow), (limit(-2.5, 2.5, 20.0), narrow))
    )
    (home,) = [finding for finding in draft.chosen if finding.field == "home_rad"]
    assert home.why.startswith("none was found with the tool pointing down")
    assert "# CHOSEN: none was found with the tool pointing down" in draft.text


def test_home_keeps_the_arm_above_the_table(tmp_path: Path) -> None:
    write_arm(tmp_path)
    robot = draft_robot(tmp_path / "ur.xml", tmp_path / "new.yaml", name="new").robot
    model = robot.build().compile()
    data = MjData(model)
    for name, position in zip(robot.arm_joints, robot.home_rad, strict=True):
        data.joint(name).qpos = position
    mj_kinematics(model, data)
    assert data.body("forearm").xpos[2] > 0.3  # elbow up; the other solution has it in the table


def test_prefixes_that_nobody_declares_are_read(urdf: Writer) -> None:
    drafted(urdf(('<limit lower="-2.9"', '<limit drake:acceleration="2.5" lower="-2.9"')))


# What does not fit


def test_a_limit_that_is_no_number_is_named(urdf: Writer) -> None:
    """As xacro leaves it; MuJoCo does not read speeds."""
    path = urdf(('velocity="3"', 'velocity="${fast}"'))
    with pytest.raises(ModelError, match=r"joint 'lift': <limit velocity='\$\{fast\}'> is no number"):
        drafted(path)


TWO = (
    '<body name="a{0}"><joint name="a{0}" axis="0 0 1"/>{1}'
    '<body name="b{0}" pos="0 0 .3"><joint name="b{0}" axis="0 1 0"/>{1}{2}</body></body>'
)
BALL = '<geom size=".02"/>'


def arm(end: str = "", number: int = 1) -> str:
    """Returns two hinges in a row with something at their end."""
    return TWO.format(number, BALL, end)


def slide(name: str, inner: str = "") -> str:
    return f'<body name="{name}"><joint name="{name}" type="slide" range="0 .04"/>{BALL}{inner}</body>'


def fixed(name: str, inner: str = "") -> str:
    return f'<body name="{name}">{BALL}{inner}</body>'


def inward(name: str, side: int) -> str:
    """Returns a finger that is 5 cm from the middle at 0, and 1 cm at 0.04."""
    joint = f'<joint name="{name}" type="slide" axis="0 {-side} 0" range="0 .04"/>'
    return f'<body name="{name}" pos="0 {0.05 * side} .1">{joint}{BALL}</body>'


def jaw(name: str, span: str, side: int) -> str:
    joint = f'<joint name="{name}" axis="1 0 0" range="{span}"/><geom size=".01" pos="0 0 .1"/>'
    return f'<body name="{name}" pos="0 {0.05 * side} .1">{joint}{BALL}</body>'


LONG = slide("x", slide("y", slide("z")))
PAIR = arm(slide("f1") + slide("f2"))
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (fixed("post"), {}, r"no serial chain: an arm has 2 hinges or slides or more in a row, .* joints: none"),
    (slide("drawer"), {}, r"no serial chain: .* The model's joints: drawer"),
    (arm() + arm(number=2), {}, r"it holds 2 arms, on a1, a2\. Choose one: keep=a1"),
    (arm(), {"keep": ("a2",)}, r"keep: no arm hangs on 'a2'\. Known: a1"),
    (f'<body name="float"><freejoint name="free"/>{BALL}{arm()}</body>', {},
     r"joint 'free' of body 'float' moves freely, and an arm has hinges and slides on a base that stands"),
    (arm(f'<body name="c"><joint name="c" type="ball"/>{BALL}</body>'), {}, r"joint 'c' of body 'c' is a b"),
    (arm(f'<body name="c"><joint/>{BALL}</body>'), {}, r"the joint of body 'c' has no name\. Give it one"),
    (arm(LONG + slide("w")), {}, r"the chain divides at 'b1' into x, w, and x has more than 2 joints in a r"),
    (arm(fixed("h1", slide("l1") + slide("r1")) + fixed("h2", slide("l2") + slide("r2"))), {},
     r"several hands: fingers hang on h1, h2\. One servo moves one gripper\. Take the other hands out"),
    (arm(slide("f1") + slide("f2") + slide("f3")), {},
     r"joints at the end of the arm that nothing couples: f1, f2, f3\. A gripper has one or two of a kind"),
    (PAIR, {"fingers": ("f3",)}, r"fingers: no joint 'f3'\. Known: a1, b1, f1, f2"),
    (PAIR, {"fingers": ()}, r"fingers: got none, but f1, f2 hang on the end of the arm"),
    (PAIR, {"tool": ("f1",)}, r"tool: no body 'f1' on the end of the arm\. Known: b1\."),
    (arm(fixed("one") + fixed("two")), {}, r"several places for the tool: one, two\. .* tool=one"),
    (arm(inward("l", 1) + inward("r", -1)), {},
     r"l, r: the fingers are nearer to each other at \[0\.04, 0\.04\] than at \[0\.0, 0\.0\], and rob"),
    (arm(jaw("l", "0 .8", 1) + jaw("r", "-.8 0", -1)), {},
     r"l, r: their ranges differ, from \[0\.0, -0\.8\] to \[0\.8, 0\.0\], and one servo gives both the same"),
    (arm('<body name="h"><joint name="finger" type="slide" range="0 .04"/><inertial pos="0 0 0" mass="1" '
         'diaginertia="1 1 1"/></body>'), {}, r"finger: a finger without shapes: nothing can be measured"),
    (arm('<body name="c"><geom type="mesh" mesh="m"/></body>'), {}, r"MuJoCo cannot (read|compile) it: "),
]  # fmt: skip


@pytest.mark.parametrize(("bodies", "settings", "message"), REFUSED)
def test_a_model_that_is_no_arm_is_refused(
    bodies: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    asset = '<asset><mesh name="m" file="gone.stl"/></asset>' if 'mesh="m"' in bodies else ""
    (tmp_path / "x.xml").write_text(
        f"<mujoco><compiler angle='radian'/>{asset}<worldbody>{bodies}</worldbody></mujoco>"
    )
    with pytest.raises(ModelError, match=rf"^robot mine: .*x\.xml: {message}"):
        drafted(tmp_path / "x.xml", **settings)


def anatomy(bodies: str, **settings: Any) -> tuple[list[str], list[str], str]:
    """Returns joints of the arm, those of the fingers, and the body of the tool."""
    model = MjModel.from_xml_string(f"<mujoco><worldbody>{bodies}</worldbody></mujoco>")
    (found,) = find_anatomies(model, "x.xml", **settings)
    joints, fingers = ([model.joint(joint).name for joint in each] for each in (found.arm, found.fingers))
    return joints, fingers, model.body(found.hand).name


def test_the_settings_that_messages_name_decide() -> None:
    frames = arm(fixed("one") + fixed("two"))
    assert anatomy(frames, tool=("two",)) == (["a1", "b1"], [], "two")
    assert anatomy(arm() + arm(number=2), keep=("a2",)) == (["a2", "b2"], [], "b2")
    jaw = arm(f'<body name="wrist"><joint name="wrist" axis="0 0 1"/>{BALL}{slide("jaw")}</body>')
    assert anatomy(jaw) == (["a1", "b1", "wrist"], ["jaw"], "wrist")  # by its name
    assert anatomy(jaw, fingers=()) == (["a1", "b1", "wrist", "jaw"], [], "jaw")
    quill = jaw.replace("jaw", "quill")
    assert anatomy(quill) == (["a1", "b1", "wrist", "quill"], [], "quill")
    assert anatomy(quill, fingers=("quill",)) == (["a1", "b1", "wrist"], ["quill"], "wrist")


def test_all_meshes_that_are_missing_are_named_once(urdf: Writer, tmp_path: Path) -> None:
    path = urdf(
        ("my_arm/meshes/link.obj", "my_arm/gone/a.obj"), ("my_arm/touch/link.obj", "my_arm/gone/b.obj")
    )
    message = (
        rf"link 'base': no mesh package://my_arm/gone/a\.obj; looked for .*{tmp_path}/my_arm/gone/a\.obj.* "
        r"Missing too: package://my_arm/gone/b\.obj\. Put the URDF into its package's folder"
    )
    with pytest.raises(ModelError, match=message):
        drafted(path)
