"""The tests start where a ROS 2 is sourced, whose pytest plugins are older than our pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As in Jazzy: launch_testing's setup.py, launch_testing_ros's and launch_pytest's.
PLUGINS = {"launch_testing": "old_hooks", "launch_ros": "new_hook", "launch_pytest": "old_hooks"}
OLD_HOOKS = "def pytest_pycollect_makemodule(path, parent): pass\n"
NEW_HOOK = "def pytest_launch_collect_makemodule(path, parent, entrypoint): pass\n"


@pytest.mark.slow  # a pytest of its own
@pytest.mark.parametrize("plugin", PLUGINS)
def test_pytest_starts_with_the_plugins_of_a_sourced_ros_2(plugin: str, tmp_path: Path) -> None:
    dist = tmp_path / f"{plugin}-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text(f"[pytest11]\n{plugin} = {PLUGINS[plugin]}\n")
    (tmp_path / "old_hooks.py").write_text(OLD_HOOKS)
    (tmp_path / "new_hook.py").write_text(NEW_HOOK)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/real/ros2/test_names.py"]

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(
            [*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    assert run("-o", "addopts=").returncode != 0  # such a plugin ends pytest
    done = run()
    assert done.returncode == 0, done.stderr
