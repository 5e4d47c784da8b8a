"""`robot-rl`: runs a command, and prints each mistake of the user as one line."""

from __future__ import annotations

import ast
import importlib
import json
import os
import select
import sys
from collections.abc import Sequence
from types import ModuleType

from robot_rl import __version__
from robot_rl.cli import interrupts
from robot_rl.cli.command import source_of
from robot_rl.cli.interrupts import EXIT_INTERRUPTED, Interrupts
from robot_rl.core.errors import ConfigError, RobotRLError, StorageError, UnknownComponentError, nearest
from robot_rl.core.refusal import is_refusal, refusal

EXIT_PIPE = 141
"""128 + SIGPIPE, as shells count."""

COMMANDS: dict[str, str] = {
    "train": "robot_rl.cli.train",
    "finetune": "robot_rl.cli.finetune",
    "evaluate": "robot_rl.cli.evaluate",
    "collect": "robot_rl.cli.collect",
    "replay": "robot_rl.cli.replay",
    "report": "robot_rl.cli.report",
    "reward": "robot_rl.cli.reward",
    "resets": "robot_rl.cli.resets",
    "worlds": "robot_rl.cli.worlds",
    "new": "robot_rl.cli.new",
    "deploy": "robot_rl.cli.deploy",
    "arm": "robot_rl.cli.arm",
    "sysid": "robot_rl.cli.sysid",
    "serve-sim-arm": "robot_rl.cli.serve_sim_arm",
    "serve-policy": "robot_rl.cli.serve_policy",
    "bench": "robot_rl.cli.bench",
    "devices": "robot_rl.cli.devices",
    "fleet": "robot_rl.cli.fleet",
    "agent": "robot_rl.cli.agent",
    "doctor": "robot_rl.cli.doctor",
}
"""Command -> its module, which is imported when the command runs, with `SUMMARY: str` and `run(argv) -> int`.

A module may have more: `config(words)` returns the checked settings, `result(words)` runs the command and
returns what --json prints, and `devices(config)` returns the devices of a run, so that sweeps can run several
jobs at once.
"""

EXIT_MISTAKE = 2

_HELP = """\
robot-rl {version}: trains robot policies in simulation and on real arms

Usage: robot-rl <command> [key=value ...] [-m] [--json]

Commands:
{commands}

Type first:
  robot-rl doctor                        checks this machine
  robot-rl train recipe=smoke            runs all stages in under a minute
  robot-rl train recipe=pick_cube        trains a Panda arm to lift a cube
  robot-rl evaluate run=runs/<folder>    measures its success on new episodes
  robot-rl finetune dataset=<folder>     fine-tunes a policy on a LeRobot dataset

Results go to runs/<date-time>-<recipe>-seed<k>/: config.yaml, metrics.jsonl, checkpoints/, videos/,
report.html (open it in a browser) and summary.json.

A setting is key=value, with dots between groups: robot-rl train recipe=pick_cube method.utd=2
Quote a path only where the shell needs it. A list has no brackets: robot-rl bench sim num_envs=64,512
-m runs every combination of comma lists, several at once where there is room:
  robot-rl train -m recipe=smoke seed=0,1,2
--cfg job prints all settings of a command and runs nothing.
--json makes the last line of output one JSON object.
robot-rl <command> --help explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; a closed output, as of `head`, ends it quietly."""
    try:
        code = _answer(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_left():
            raise  # another pipe: a bug of ours
        return EXIT_PIPE


def _reader_left() -> bool:
    """Returns whether the reader of stdout has gone; if so, later output is discarded."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _answer(words: list[str]) -> int:
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"robot-rl {__version__}")
        return 0
    try:
        with Interrupts(_answer.__code__):
            return _dispatch(words[0], words[1:])
    except RobotRLError as error:
        return _mistake(error, words)
    except (OSError, MemoryError) as error:
        if not is_refusal(error):
            raise  # a bug of ours: show the traceback
        return _mistake(refusal(error, StorageError, f"robot-rl {words[0]}"), words)
    except RuntimeError as error:
        if "environment variable MUJOCO_GL" not in str(error):
            raise
        from robot_rl.sim.gl import mistaken_environment  # raised by `import mujoco`

        return _mistake(mistaken_environment(), words)
    except KeyboardInterrupt as error:
        print(" ".join(["interrupted.", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return EXIT_INTERRUPTED


def _mistake(error: RobotRLError, words: Sequence[str]) -> int:
    message = " ".join([str(error), *getattr(error, "__notes__", ())])
    print(f"error: {message}", file=sys.stderr)
    if "--json" in words:
        print(json.dumps({"error": message}))
    return EXIT_MISTAKE


def _dispatch(name: str, words: list[str]) -> int:
    """Runs a command once, or once per job of a sweep (`-m`), or shows its settings (`--cfg job`)."""
    if name not in COMMANDS:
        raise UnknownComponentError(
            f"robot-rl: no command {name!r}.{nearest(name, COMMANDS)} `robot-rl --help` explains them."
        )
    command = importlib.import_module(COMMANDS[name])
    rest = [word for word in words if word not in {"-m", "--multirun"}]
    if "--cfg" in rest or any(word.startswith("--cfg=") for word in rest):
        return _show_settings(command, name, rest)
    if len(rest) == len(words):
        return int(command.run(words))
    from robot_rl.cli.sweep import run_jobs  # Hydra

    return run_jobs(command, name, rest)


def _show_settings(command: ModuleType, name: str, words: list[str]) -> int:
    """Prints the resolved settings of a command and runs nothing, as Hydra programs do."""
    if not hasattr(command, "config"):
        raise ConfigError(f"--cfg: robot-rl {name} has no configuration. See `robot-rl {name} --help`.")
    at = next(i for i, word in enumerate(words) if word.partition("=")[0] == "--cfg")
    joined = "=" in words[at]
    what = words[at].partition("=")[2] if joined else (words[at + 1 : at + 2] or [""])[0]
    if what != "job":
        raise ConfigError(f"--cfg: got {what!r}, allowed: job.")
    from robot_rl.config import dump

    rest = words[:at] + words[at + (1 if joined else 2) :]
    print(dump(command.config([word for word in rest if word != "--json"])), end="")
    return 0


def summary(name: str) -> str:
    """Returns the `SUMMARY` of a command without importing it, so that help stays quick."""
    source = source_of(COMMANDS[name])
    assert source is not None, f"{COMMANDS[name]} is missing"
    for node in source.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUMMARY":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{COMMANDS[name]} has no SUMMARY")


def _help() -> str:
    commands = "\n".join(f"  {name:<15}{summary(name)}" for name in COMMANDS)
    return _HELP.format(version=__version__, commands=commands)


interrupts.end()

if __name__ == "__main__":
    sys.exit(main())
