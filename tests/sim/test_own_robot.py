"""Arms as their owners have them: a URDF, a hand in a file of its own, degrees, motors, no home yet."""

import re
from collections.abc import Callable
from pathlib import Path

import mujoco
import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.sim.checkup import check_robot
from robot_rl.sim.robots.home import PLACES_M, find_home
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.servo_check import ServoCheck
from robot_rl.sim.tasks.catalogue import expert_success
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from tests.arms import JOINTS, write_arm

HALF_M = 0.02
OBJ = "v 0 0 0\nv 0.1 0 0\nv 0 0.1 0\nv 0 0 0.1\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"


def link(name: str, shapes: str = "", mass_kg: float = 0.5) -> str:
    inertia = '<inertia ixx="0.002" iyy="0.002" izz="0.002" ixy="0" ixz="0" iyz="0"/>'
    return f'<link name="{name}"><inertial><mass value="{mass_kg}"/>{inertia}</inertial>{shapes}</link>'


def joint(name: str, kind: str, parent: str, child: str, xyz: str, axis: str, more: str = "") -> str:
    return (
        f'<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>'
        f'<origin xyz="{xyz}"/><axis xyz="{axis}"/>{more}</joint>'
    )


def limit(low: float, high: float, effort: float = 40.0) -> str:
    return f'<limit lower="{low}" upper="{high}" effort="{effort}" velocity="3"/>'


def shape(tag: str, geometry: str) -> str:
    return f"<{tag}><geometry>{geometry}</geometry></{tag}>"


FINGER = shape("collision", '<box size="0.02 0.008 0.04"/>')
URDF = "".join(
    [
        '<robot name="mine">',
        '<link name="world"/>',
        joint("bolted", "fixed", "world", "base", "0 0 0", "0 0 1"),
        link(
            "base",
            shape("visual", '<mesh filename="package://my_arm/meshes/link.obj"/>')
            + shape("collision", '<mesh filename="package://my_arm/touch/link.obj"/>'),
        ),
        # `continuous` has no limits; the arm stands still on it.
        joint("pan", "continuous", "base", "turret", "0 0 0.1", "0 0 1"),
        link(
            "turret",
            shape("visual", '<mesh filename="package://my_arm/meshes/pretty.dae"/>')
            + shape("collision", '<cylinder radius="0.04" length="0.1"/>'),
        ),
        joint("lift", "revolute", "turret", "upper", "0 0 0.2", "0 1 0", limit(-2.5, 2.5)),
        link("upper"),
        joint("elbow", "revolute", "upper", "fore", "0 0 0.4", "0 1 0", limit(-2.9, 2.9)),
        link("fore"),
        joint("bend", "revolute", "fore", "wrist", "0 0 0.3", "0 1 0", limit(-2.5, 2.5, 20.0)),
        link("wrist"),
        joint(
            "roll", "revolute", "wrist", "palm", "0 0 0.05", "0 0 1",
            limit(-3.0, 3.0, 20.0) + '<dynamics damping="5" friction="1"/>',
        ),
        link("palm"),
        joint("left", "prismatic", "palm", "finger_l", "0 0.004 0.1", "0 1 0", limit(0, 0.04, 5.0)),
        link("finger_l", FINGER, 0.05),
        joint(
            "right", "prismatic", "palm", "finger_r", "0 -0.004 0.1", "0 -1 0",
            limit(0, 0.04, 5.0) + '<mimic joint="left"/>',
        ),
        link("finger_r", FINGER, 0.05),
        '<link name="tcp"/>',
        joint("tip", "fixed", "palm", "tcp", "0 0 0.11", "0 0 1"),
        "</robot>",
    ]
)  # fmt: skip
SERVOS = """  servos:
    kp: [300, 300, 200, 80, 50]
    kd: [30, 30, 20, 8, 0.5]
    armature_kg_m2: [0.1, 0.1, 0.1, 0.05, 0.02]
    gripper_kp: 1000
    gripper_kd: 100
    gripper_effort: 60
    gripper_armature: 0.1
"""
YAML = f"""
name: mine
model:
  file: my_arm/urdf/arm.urdf
  tool: {{body: tcp, pos_m: [0, 0, 0], approach_axis: [0, 0, 1], opening_axis: [0, -1, 0]}}
{SERVOS}arm_joints: [pan, lift, elbow, bend, roll]
arm_actuators: [pan, lift, elbow, bend, roll]
gripper_actuator: grip
gripper_open: 0.04
gripper_closed: 0
gripper_home: 0.04
finger_joints: [left, right]
tool_site: tool
home_rad: [0, 0, 0, 0, 0]
limits:
  position_low_rad: [-3.1, -2.5, -2.9, -2.5, -3.0]
  position_high_rad: [3.1, 2.5, 2.9, 2.5, 3.0]
  velocity_rad_s: [3, 3, 3, 3, 3]
  acceleration_rad_s2: [15, 15, 15, 15, 15]
  effort_n_m: [40, 40, 40, 20, 20]
"""
Writer = Callable[..., str]


@pytest.fixture(name="urdf")
def _urdf(tmp_path: Path) -> Writer:
    """Returns a writer of a ROS package with a URDF, and of its robot file, with text replaced."""

    def write(*replacements: tuple[str, str], name: str = "arm.urdf") -> str:
        texts = {f"my_arm/urdf/{name}": URDF, "mine.yaml": YAML}
        for old, new in replacements:
            assert any(old in text for text in texts.values()), old
            texts = {path: text.replace(old, new) for path, text in texts.items()}
        texts |= {"my_arm/meshes/link.obj": OBJ, "my_arm/touch/link.obj": OBJ.replace("0.1", "0.2")}
        for path, text in texts.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


def test_a_urdf_becomes_a_robot(urdf: Writer) -> None:
    model = load_robot(urdf()).build().compile()
    names = ["pan", "lift", "elbow", "bend", "roll"]
    assert [model.joint(i).name for i in range(model.njnt)] == [*names, "left", "right"]
    assert [model.actuator(i).name for i in range(model.nu)] == [*names, "grip"]
    # The endless joint has the file's limits; the link on a fixed joint carries the tool.
    np.testing.assert_allclose(model.joint("pan").range, [-3.1, 3.1])
    assert model.body(model.site("tool").bodyid[0]).name == "tcp"
    # Upright: 0.1 + 0.2 + 0.4 + 0.3 + 0.05 + 0.11.
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(data.site("tool").xpos, [0, 0, 1.16], atol=1e-9)
    # The servo's limit alone holds, 60 N, and no longer that of the URDF, 5.
    assert not model.jnt_actfrclimited.any()


def test_meshes_of_packages_are_found_and_pictures_show_the_pretty_ones(urdf: Writer) -> None:
    model = load_robot(urdf()).build().compile()
    bodies = [model.body(i).name for i in model.geom_bodyid]
    shapes = [(bodies[i], int(model.geom_group[i]), bool(model.geom_conaffinity[i]))
              for i in range(model.ngeom)]  # fmt: skip
    # base: drawn and not touching, touching and not drawn (group 3); the mesh of the turret is Collada, so
    # its cylinder is drawn.
    assert shapes[:3] == [("base", 1, False), ("base", 3, True), ("turret", 0, True)]
    assert model.nmesh == 2  # both are called link.obj


@pytest.mark.parametrize("renamed", ["my_arm", "checkout_of_my_arm"])
def test_the_folder_of_a_package_may_have_another_name(urdf: Writer, tmp_path: Path, renamed: str) -> None:
    path = urdf(("my_arm/urdf", f"{renamed}/urdf"))
    if renamed != "my_arm":
        (tmp_path / "my_arm").rename(tmp_path / renamed)
    assert load_robot(path).build().compile().nmesh == 2


def test_a_package_that_ros_has_installed_is_found(
    urdf: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = urdf()
    (tmp_path / "opt/share/my_arm").mkdir(parents=True)
    for folder in ("meshes", "touch"):
        (tmp_path / "my_arm" / folder).rename(tmp_path / "opt/share/my_arm" / folder)
    monkeypatch.setenv("AMENT_PREFIX_PATH", f"/nowhere:{tmp_path / 'opt'}")
    assert load_robot(path).build().compile().nmesh == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("my_arm/meshes/link.obj", "my_arm/meshes/gone.obj",
         r"link 'base': no mesh package://my_arm/meshes/gone.obj; looked for .*/my_arm/meshes/gone.obj, .*"
         r" Put the URDF into its package's folder, or write paths relative to the URDF\."),
        ("my_arm/touch/link.obj", "my_arm/touch/link.dae",
         r"link 'base': the collision mesh package://my_arm/touch/link.dae must be one of \.stl, \.obj, \.msh"
         r"\. Convert it, or put a box, cylinder or sphere in its place"),
        ("</robot>", "", "arm.urdf: not XML: no element found"),
        ("<link name=\"world\"/>", "<link name=\"world\"/><x:macro xmlns:x='http://www.ros.org/wiki/xacro'/>",
         r"has xacro's macros\. Expand them: xacro arm\.urdf > "),
        ('<parent link="wrist"/>', '<parent link="wrst"/>', "arm.urdf: MuJoCo cannot read it: "),
        (SERVOS, "", r"robot mine: the model has no actuators\. Put servos into the file, under `model:`\. "
         r"For its masses, and this home_rad:\n  servos:\n    kp: \["),
    ],
)  # fmt: skip
def test_a_urdf_that_does_not_fit_is_refused(urdf: Writer, old: str, new: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_robot(urdf((old, new))).build()


def test_joint_and_finger_are_those_of_any_robot(urdf: Writer, tmp_path: Path) -> None:
    asked = ("joint", "finger", "tool.pos")
    tool = tuple(f"tool.pos.{axis}" for axis in range(3))
    env = SimVectorEnv(EnvConfig(task="reach", robot=urdf(), state=asked, num_threads=1), 1)
    assert env.state_names == (
        "pan.pos",
        "lift.pos",
        "elbow.pos",
        "bend.pos",
        "roll.pos",
        "left.pos",
        "right.pos",
        *tool,
    )
    bare = str(write_arm(tmp_path))
    env = SimVectorEnv(EnvConfig(task="reach", robot=bare, state=asked, num_threads=1), 1)
    assert env.state_names == (*(f"{joint}.pos" for joint in JOINTS), *tool)
    with pytest.raises(
        ConfigError, match=r"env.state: got .finger., with which no element of the state begins"
    ):
        SimVectorEnv(EnvConfig(task="reach", robot=bare, state=("finger",), num_threads=1), 1)


def test_a_model_is_no_robot_file(urdf: Writer, tmp_path: Path) -> None:
    urdf()
    with pytest.raises(
        ModelError, match=r"arm\.urdf is a model; a robot file \(\.yaml\) .* `robot-rl new robot file="
    ):
        load_robot(str(tmp_path / "my_arm/urdf/arm.urdf"))


def test_the_message_holds_servos_that_are_good(urdf: Writer) -> None:
    with pytest.raises(ModelError) as caught:
        load_robot(urdf((SERVOS, ""))).build()
    block = str(caught.value).split("home_rad:\n")[1] + "\n"
    assert "gripper_effort: 5\n" in block  # the URDF's
    robot = load_robot(urdf((SERVOS, block)))
    rows = ServoCheck(robot).joints()
    # The roll joint has a damping of 5 N m s / rad: a part of kd, and kp follows it.
    assert (rows[-1].kp, rows[-1].kd) == (pytest.approx(50.0), pytest.approx(5.5))
    assert all(row.lag_s < 0.15 and row.settle_s < 0.4 and row.overshoot < 0.1 for row in rows)


def test_a_home_is_proposed_and_good(urdf: Writer) -> None:
    found = check_robot(urdf(), ["reach"])
    (home,) = [check for check in found.checks if check.name == "home"]
    assert home.state == "fail"
    proposed = re.search(r"With those axes, this one is good: (home_rad: \[.*\])", home.remedy)
    assert proposed is not None
    robot = load_robot(urdf(("home_rad: [0, 0, 0, 0, 0]", proposed[1])))
    position_m, rotation = ServoCheck(robot).home_tool()
    np.testing.assert_allclose(position_m, PLACES_M[0], atol=0.006)
    np.testing.assert_allclose(rotation, np.diag([1, -1, -1]), atol=0.04)


def test_no_home_is_proposed_where_there_is_none(urdf: Writer) -> None:
    low = ("-2.5, -2.9, -2.5, -3.0]", "-0.1, -0.1, -0.1, -3.0]")
    high = ("2.5, 2.9, 2.5, 3.0]", "0.1, 0.1, 0.1, 3.0]")
    old, new = limit(-2.5, 2.5), limit(-0.1, 0.1)
    path = urdf(low, high, (old, new), (limit(-2.9, 2.9), new), (limit(-2.5, 2.5, 20.0), new))
    assert find_home(load_robot(path)) is None


def test_a_urdf_picks_cubes(urdf: Writer) -> None:
    path = urdf()
    home = find_home(load_robot(path))
    assert home is not None
    path = urdf(("home_rad: [0, 0, 0, 0, 0]", f"home_rad: {list(home)}"))
    env = SimVectorEnv(EnvConfig(task="pick_cube", robot=path, num_threads=1), 8, autoreset="disabled")
    assert expert_success(env) >= 0.8


HAND = """
<mujoco><compiler angle="radian"/><worldbody><light name="lamp"/><body name="palm">
 <geom type="cylinder" size="0.03 0.02" pos="0 0 0.02" mass="0.3"/>
 <site name="mark" size="0.01 5" type="cylinder"/>
 <body name="l" pos="0 0.01 0.1">
  <joint name="l" type="slide" axis="0 1 0" range="-0.0115 0.0208" damping="100"/>
  <geom type="box" size="0.01 0.004 0.02" pos="0 0.0125 0" mass="0.05"/></body>
 <body name="r" pos="0 -0.01 0.1">
  <joint name="r" type="slide" axis="0 1 0" range="-0.0208 0.0115" damping="100"/>
  <geom type="box" size="0.01 0.004 0.02" pos="0 -0.0125 0" mass="0.05"/></body>
</body></worldbody></mujoco>
"""
GRIPPER = """gripper_actuator: grip
gripper_open: 0.0393
gripper_closed: 0.007
gripper_home: 0.0393
finger_joints: [hand/l, hand/r]
"""


def with_hand(folder: Path, *replacements: tuple[str, str]) -> str:
    """Writes the bare arm of tests.arms with a gripper of another file on its last link."""
    path = write_arm(folder)
    xml = path.with_suffix(".xml")
    without_rod = re.sub(r"<geom [^>]*mass=.0\.1./>", "", xml.read_text())
    xml.write_text(without_rod)
    (folder / "hand.xml").write_text(HAND)
    text = path.read_text().replace(
        "  tool: {body: wrist_3, pos_m: [0, 0.2, 0], approach_axis: [0, 1, 0]",
        "  hand: {file: hand.xml, body: wrist_3, pos_m: [0, 0.08, 0], rotation_deg: [-90, -90, 0]}\n"
        "  tool: {body: hand/palm, pos_m: [0, 0, 0.11], approach_axis: [0, 0, 1]",
    )
    text = text.replace("opening_axis: [1, 0, 0]", "opening_axis: [0, 1, 0]")
    text = text.replace("tool_site: tool", GRIPPER + "tool_site: tool")
    text = text.replace(
        "    kp:", "    gripper_kp: 3000\n    gripper_kd: 200\n    gripper_effort: 100\n"
        "    gripper_armature: 0.1\n    gripper_gap_m: 0.014\n    kp:",
    )  # fmt: skip
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return str(path)


def test_a_hand_of_another_file_is_mounted(tmp_path: Path) -> None:
    robot = load_robot(with_hand(tmp_path))
    model = robot.build().compile()
    assert [model.joint(i).name for i in range(6, model.njnt)] == ["hand/l", "hand/r"]
    assert (model.nlight, int(model.site("hand/mark").group[0])) == (0, 4)  # 10 m of it are not drawn
    # Fingers count from where they would touch, so that their sum is the opening: they are 14 mm apart where
    # they stop, and 14 + 2 x 32.3 mm wide open.
    np.testing.assert_allclose(model.joint("hand/l").range, [0.007, 0.0393])
    np.testing.assert_allclose(model.joint("hand/r").range, [0.007, 0.0393])
    data = mujoco.MjData(model)
    data.joint("hand/l").qpos = data.joint("hand/r").qpos = HALF_M
    mujoco.mj_forward(model, data)
    between_m = np.linalg.norm(data.body("hand/l").xipos - data.body("hand/r").xipos)
    # 40 mm between the faces of boxes whose half thickness is 4 mm. HAND's faces stop at
    # 2 x (10 + 12.5 - 11.5 - 4) = 14 mm.
    assert between_m == pytest.approx(2 * HALF_M + 2 * 0.004, abs=1e-9)


def test_it_picks_with_the_mounted_hand(tmp_path: Path) -> None:
    config = EnvConfig(task="pick_cube", robot=with_hand(tmp_path), num_threads=1)
    assert expert_success(SimVectorEnv(config, 8, autoreset="disabled")) >= 0.9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("body: wrist_3", "body: wrist_4",
         r"model.hand.body: no body 'wrist_4'\. Did you mean 'wrist_3'\? It has: base, shoulder,"),
        ("body: hand/palm", "body: palm", r"model.tool.body: no body 'palm'\. .* It has: .*hand/palm"),
        ("file: hand.xml", "file: han.xml", "no MJCF or URDF at .*han.xml"),
    ],
)  # fmt: skip
def test_a_hand_that_does_not_fit_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_robot(with_hand(tmp_path, (old, new))).build()


def test_degrees_of_an_mjcf_become_radians(tmp_path: Path) -> None:
    def model_of(angle: str, range_: str, euler: str) -> mujoco.MjModel:
        path = write_arm(tmp_path, name=angle)
        xml = path.with_suffix(".xml")
        text = xml.read_text().replace('angle="radian"', f'angle="{angle}"')
        text = text.replace('range="-3.2 3.2"', f'range="{range_}"')
        xml.write_text(text.replace('<body name="forearm"', f'<body name="forearm" euler="{euler}"'))
        return load_robot(str(path)).build().compile()

    low, high = (f"{np.degrees(value):.12f}" for value in (-3.2, 3.2))
    ours, theirs = (
        model_of("radian", "-3.2 3.2", "0.5 0 0"),
        model_of("degree", f"{low} {high}", "28.6478897565 0 0"),
    )
    np.testing.assert_allclose(theirs.jnt_range, ours.jnt_range)
    np.testing.assert_allclose(theirs.actuator_ctrlrange, ours.actuator_ctrlrange)
    np.testing.assert_allclose(theirs.body_quat, ours.body_quat, atol=1e-9)


def test_motors_are_refused_with_servos(tmp_path: Path) -> None:
    path = write_arm(tmp_path, servos=None)
    xml = path.with_suffix(".xml")
    xml.write_text(re.sub(r'<position name="(\w+)"[^>]*>', r'<motor name="\1" joint="\1"/>', xml.read_text()))
    with pytest.raises(
        ModelError, match=r"no forcerange limits the force of pan, lift, .*\n  servos:\n    kp:"
    ):
        load_robot(str(path)).build()
    path.write_text(re.sub("arm_actuators: .*", "arm_actuators: [a, b, c, d, e, f]", path.read_text()))
    with pytest.raises(ModelError, match="none of arm_actuators is among the model's actuators, pan, lift, "):
        load_robot(str(path)).build()
