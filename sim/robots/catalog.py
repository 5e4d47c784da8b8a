"""The robots that come with a robot file; their MJCF is looked up only when they are built."""

from pathlib import Path

import robot_rl
from robot_rl.sim.robots.robot_file import read_robot_file

ROBOT_FILES = Path(robot_rl.__file__).parent / "configs" / "robots"
"""Folder of the shipped robot files."""

VIPERX = read_robot_file(ROBOT_FILES / "viperx.yaml")
SO_ARM100 = read_robot_file(ROBOT_FILES / "so_arm100.yaml")
