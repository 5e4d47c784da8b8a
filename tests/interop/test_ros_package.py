"""The ROS 2 package, as far as it can be checked where no ROS is: manifest, set-up, launch description."""

import configparser
import re
import runpy
import sys
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from robot_rl import __version__

PACKAGE = Path(__file__).parents[2] / "ros" / "robot_rl_deploy"
MANIFEST = ElementTree.parse(PACKAGE / "package.xml").getroot()
TAGS = {"name", "version", "description", "maintainer", "license", "exec_depend", "export"}


def test_manifest_is_of_rep_149() -> None:
    assert MANIFEST.tag == "package"
    assert MANIFEST.get("format") == "3"
    assert {child.tag for child in MANIFEST} == TAGS
    name = MANIFEST.findtext("name") or ""
    # "lowercase alphanumerics and underscores, starts with a letter, no two underscores in a row"
    assert re.fullmatch(r"[a-z]+(_?[a-z0-9]+)*", name)
    assert name == PACKAGE.name
    assert re.fullmatch(r"\d+\.\d+\.\d+", MANIFEST.findtext("version") or "")
    assert MANIFEST.findtext("version") == __version__
    maintainer = MANIFEST.find("maintainer")
    assert maintainer is not None
    assert re.fullmatch(r"[^@\s]+@[^@\s]+", maintainer.get("email", ""))
    assert MANIFEST.findtext("export/build_type") == "ament_python"
    depends = [child.text or "" for child in MANIFEST.findall("exec_depend")]
    assert depends == sorted(set(depends))


def test_manifest_has_the_packages_of_all_messages() -> None:
    kind = re.compile(r"\b([a-z]+(?:_[a-z]+)*)/(?:msg|srv|action)/[A-Z]")
    sources = (PACKAGE.parents[1] / "real").rglob("*.py")
    used = {package for source in sources for package in kind.findall(source.read_text("utf-8"))}
    # An example in a message, and what only the transport without rclpy needs itself.
    used -= {"package", "rmw_dds_common", "service_msgs", "unique_identifier_msgs"}
    assert used <= {child.text for child in MANIFEST.findall("exec_depend")}


def test_setup_installs_what_ament_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict = {}
    monkeypatch.chdir(PACKAGE)
    monkeypatch.setattr("setuptools.setup", lambda **keys: got.update(keys))
    runpy.run_path("setup.py")
    assert got["name"] == PACKAGE.name
    assert got["version"] == __version__
    installed = {(folder, Path(file).name) for folder, files in got["data_files"] for file in files}
    assert installed == {
        ("share/ament_index/resource_index/packages", "robot_rl_deploy"),
        ("share/robot_rl_deploy", "package.xml"),
        ("share/robot_rl_deploy/launch", "deploy.launch.py"),
    }
    assert all(Path(file).is_file() for _, files in got["data_files"] for file in files)
    config = configparser.ConfigParser()
    config.read("setup.cfg")
    # `ros2 run` looks in lib/<package>, not in bin.
    assert config["install"]["install_scripts"] == "$base/lib/robot_rl_deploy"
    assert got["entry_points"]["console_scripts"] == ["robot_rl = robot_rl_deploy.main:main"]


class Described:
    """Keeps what a launch description is made of."""

    def __init__(self, *values: object, **keys: object) -> None:
        self.values: tuple = values
        self.keys: dict = keys


def test_launch_starts_deploy_and_waits_for_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "launch": ["LaunchDescription"],
        "launch.actions": ["DeclareLaunchArgument", "ExecuteProcess", "Shutdown"],
        "launch.conditions": ["IfCondition"],
        "launch.substitutions": ["LaunchConfiguration"],
    }
    made = {name: type(name, (Described,), {}) for names in kinds.values() for name in names}
    for module, names in kinds.items():
        fake = types.ModuleType(module)
        vars(fake).update({name: made[name] for name in names})
        monkeypatch.setitem(sys.modules, module, fake)

    (entities,) = runpy.run_path(str(PACKAGE / "launch" / "deploy.launch.py"))[
        "generate_launch_description"
    ]().values

    arguments = [entity for entity in entities if isinstance(entity, made["DeclareLaunchArgument"])]
    declared = {entity.values[0]: entity.keys.get("default_value") for entity in arguments}
    assert declared == {"run": None, "station": "sim_arm", "sim_arm": "false", "robot_rl": "robot-rl"}
    sim_arm, deploy = (entity for entity in entities if isinstance(entity, made["ExecuteProcess"]))

    def words(command: list) -> list:
        return [
            "".join(part if isinstance(part, str) else f"<{part.values[0]}>" for part in word)
            for word in (word if isinstance(word, list) else [word] for word in command)
        ]

    assert words(sim_arm.keys["cmd"]) == ["<robot_rl>", "serve-sim-arm"]
    assert words(deploy.keys["cmd"]) == ["<robot_rl>", "deploy", "run=<run>", "station=<station>"]
    assert isinstance(deploy.keys["on_exit"], made["Shutdown"])
    # SIGTERM and SIGKILL come late enough for the supervisor to bring the arm to rest.
    assert float(deploy.keys["sigterm_timeout"]) >= 10


def test_executable_leaves_out_what_ros_adds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["robot_rl", "--version", "--ros-args", "-r", "__ns:=/arm"])
    assert runpy.run_path(str(PACKAGE / "robot_rl_deploy" / "main.py"))["main"]() == 0
    said = capsys.readouterr()
    assert __version__ in said.out
    assert said.err == (
        "robot_rl_deploy: no effect: --ros-args -r __ns:=/arm. Names are in the station file: "
        "ros2.namespace, ros2.remap and ros2.use_sim_time.\n"
    )


def test_executable_says_where_robot_rl_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "robot_rl.cli.main", None)
    assert runpy.run_path(str(PACKAGE / "robot_rl_deploy" / "main.py"))["main"]() == 1
    assert "pip install robot-rl" in capsys.readouterr().err
