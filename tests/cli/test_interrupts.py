"""Ctrl-C while modules load: real children, which a real signal reaches inside an import."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from robot_rl.cli.interrupts import asked_for_import

CHILD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(1000))
            except BaseException:  # what the start of a C extension may make of it
                pass
sys.meta_path.insert(0, Interrupting())
import robot_rl
from robot_rl.cli.main import main
sys.exit(main({words!r}))
"""


def interrupted(module: str, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command to which Ctrl-C comes while it imports a module."""
    program = [sys.executable, "-c", CHILD.format(module=module, words=words)]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("robot_rl.core.refusal", ["--help"]),
        ("robot_rl.cli.train", ["train"]),
        ("hydra.core", ["train", "recipe=smoke"]),
        ("numpy", ["replay", "info", "x"]),
        ("gymnasium", ["bench", "sim"]),
    ],
)
def test_it_is_one_line_wherever_the_import_stands(module: str, words: list[str], tmp_path: Path) -> None:
    done = interrupted(module, words, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("", "interrupted.\n", 130)


@pytest.mark.slow
def test_it_is_one_line_while_the_learner_is_loaded(tmp_path: Path) -> None:
    for module in ("torch", "numpy", "torch._C", "mujoco", "robot_rl.train.phases"):
        done = interrupted(module, ["train", "recipe=smoke"], tmp_path)
        said = done.stderr.splitlines()
        assert said[-1] == "interrupted."
        # The environment is checked before the line that says what will be done; the learner loads later.
        assert len(said) == (1 if module in ("numpy", "mujoco") else 2)
        assert done.returncode == 130
    assert not list(tmp_path.iterdir())


WORK = """
import sys
from robot_rl.cli import main as cli
class Command:
    def run(self, words):
        import work
        try:
            work.begin()
        except KeyboardInterrupt as error:
            error.add_note("Continue with: more.")
            assert sys.modules["needed"].whole, "an import was cut short"
            raise
sys.modules["command"] = Command()
cli.COMMANDS["train"] = "command"
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main(["train"]))
"""


@pytest.mark.parametrize("presses", [1, 3])
def test_an_import_that_the_work_asks_for_is_let_to_its_end(presses: int, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import time\ndef begin():\n    import needed\n    try:\n        time.sleep(30)\n"
        "    finally:\n        time.sleep(0.3)\n        open('tidied', 'x').close()\n"
    )
    (tmp_path / "needed.py").write_text(
        f"import os, signal, time\nfor _ in range({presses}):\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(0.1)\nwhole = True\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", WORK], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.returncode) == ("interrupted. Continue with: more.\n", 130)
    assert (tmp_path / "tidied").is_file()  # it is raised once, however often it was pressed


def test_an_import_that_fails_leaves_no_interrupt_behind(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import atexit, time\natexit.register(time.sleep, 0.2)\ndef begin():\n    import needed\n"
    )
    (tmp_path / "needed.py").write_text(
        "import os, signal\nfrom robot_rl.core.errors import ConfigError\n"
        "os.kill(os.getpid(), signal.SIGINT)\nraise ConfigError('needed: an extra is missing')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", WORK], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.returncode) == ("error: needed: an extra is missing\n", 2)


def test_who_takes_a_command_for_its_own_use_tidies_up() -> None:
    program = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from robot_rl.cli.sweep import run_jobs\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nfinally:\n    print('tidied up')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "tidied up\n"


def test_who_asks_for_an_import_is_found_in_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "robot_rl_tests_outer.py").write_text("import robot_rl_tests_inner\n")
    (tmp_path / "robot_rl_tests_inner.py").write_text("import sys\nframe = sys._getframe()\n")

    def main() -> None:
        importlib.import_module("robot_rl_tests_outer")

    main()
    frame = sys.modules["robot_rl_tests_inner"].frame
    assert asked_for_import(frame, main.__code__) == __file__
    assert asked_for_import(sys._getframe(), main.__code__) is None
