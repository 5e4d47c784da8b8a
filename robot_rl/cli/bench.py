"""`robot-rl bench`: measures one part of the platform on this machine and prints a table."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import sys
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from robot_rl.cli.command import parser_of, source_of
from robot_rl.cli.tables import table_of
from robot_rl.config import load
from robot_rl.config.build import allowed
from robot_rl.core.errors import UnknownComponentError, nearest

SUMMARY = "measure this machine, or a method on a task"

BENCHES: dict[str, str] = {
    "sim": "control steps per second, compared with MuJoCo in C, other vector envs, other simulators",
    "engines": "control steps per second of MuJoCo Warp on a GPU, compared with the CPU and with MJX",
    "render": "pictures per second, in one thread, on all cores, and by MuJoCo's calls alone",
    "policy": "time to sample one action chunk: median and 99th percentile",
    "learner": "learner updates per second, compared with Stable-Baselines3",
    "ppo": "control steps per second of PPO with its learning, compared with Stable-Baselines3 and rsl_rl",
    "data": "samples per second of our data loader, compared with LeRobot's; replay and recording",
    "chunking": "success and jerk with a planning delay: naive, temporal ensemble, real-time chunking",
    "improve": "all methods that improve a frozen base: success over control steps and minutes",
    "resets": "what diverse starts are worth: PPO from a bank, from the task's own, without each class",
    "world": "how far a world model can be believed: calibration, agreement, replayed failures",
    "world_curve": "success over real control steps: with a world model, without one, with a perfect one",
    "pixels": "policies that see, by task: cloning, DAgger, and the expert that reads the state",
    "pixels_peers": "policies that see, compared with LeRobot's ACT and Diffusion and SAC with a CNN",
    "cameras": "which cameras say where the things of a task are: errors in mm of a learned encoder",
    "trivial": "success without learning: random actions, no motion, the scripted experts",
    "taco": "success of the best of N chunks by a pseudo-count (TACO), compared with the policy alone",
    "ogbench": "success of chunked critics on OGBench's cube tasks, offline and online, h = 5 and h = 1",
    "arm_time": "how much of its time an arm moves while a policy learns, waiting for the learner or not",
    "weights": "time until new weights act in other processes, and what control notices of it there",
    "control": "jitter and latency of control over ROS 2, at 100 and 500 Hz",
    "her": "time to 95 % success on push_cube with demonstrations, compared with SAC and hindsight replay",
    "crossq": "CrossQ, SAC and XQC on Walker2d and Hopper, with their published returns",
    "physics": "integrators, time steps and contact models: speed, and whether a grasp holds",
}


def run(argv: list[str]) -> int:
    """Runs a benchmark and prints its tables; with `--json` the last line is one JSON object."""
    if {"-h", "--help"} & set(argv) and (named := [word for word in argv if word in BENCHES]):
        print(_help_of(named[0]), end="")
        return 0
    listed = "\n".join(f"{name:<13}{text}" for name, text in BENCHES.items())
    about = f"`robot-rl bench <name> --help` lists the settings of a benchmark.\n\n{listed}"
    parser = parser_of("bench", SUMMARY, about)
    parser.add_argument("name", help="one of the list below")
    parser.add_argument("options", nargs="*", metavar="key=value", help="settings of the benchmark")
    words = parser.parse_intermixed_args(argv or ["--help"])
    if words.name not in BENCHES:
        raise UnknownComponentError(f"bench: no benchmark {words.name!r}.{nearest(words.name, BENCHES)}")
    settings = settings_of(words.name, words.options)  # mistakes are answered before the learner is loaded
    result = importlib.import_module(f"robot_rl.bench.{words.name}").run(**settings)
    console = Console(width=None if sys.stdout.isatty() else 180)  # a log has room for every column
    for title, rows in _sections(result).items():
        console.print(table_of(rows, title))
    for note in result.get("notes", []):
        console.print(note, style="dim", markup=False)
    if words.json:
        print(json.dumps(result, default=_to_json))
    return 0


def settings_of(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of a benchmark's `run`, checked as any other configuration."""
    return vars(load(_schema_of(name), words, config_name=f"bench_{name}"))


def _source_of(name: str) -> ast.Module:
    """Returns the source of a benchmark. An import could load the learner, which takes seconds."""
    source = source_of(f"robot_rl.bench.{name}")
    assert source is not None, f"robot_rl.bench.{name} is missing"
    return source


def _run_of(source: ast.Module) -> tuple[ast.FunctionDef, list[tuple[ast.arg, ast.expr | None]]]:
    """Returns a benchmark's `run`, and its arguments with their defaults."""
    run = next(node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    named = [*run.args.args, *run.args.kwonlyargs]
    values = [*run.args.defaults, *(value for value in run.args.kw_defaults if value is not None)]
    missing: list[ast.expr | None] = [None] * (len(named) - len(values))
    return run, list(zip(named, missing + values, strict=True))


def _help_of(name: str) -> str:
    """Returns the settings of a benchmark with their defaults."""
    measure, _ = _run_of(_source_of(name))
    schema = _schema_of(name)
    lines = [f"Usage: robot-rl bench {name} [key=value ...] [--json]", "", BENCHES[name], "", "Settings:"]
    for field in dataclasses.fields(schema):
        default = "needed" if field.default is dataclasses.MISSING else _typed(field.default)
        lines.append(f"  {f'{field.name}={default}':<28}  {allowed(field.type)}")
    about = (ast.get_docstring(measure) or "").partition("Args:")[2].partition("\n\n")[0].strip("\n")
    return "\n".join([*lines, *(["", textwrap.dedent(about)] if about else [])]) + "\n"


def _schema_of(name: str) -> type[Any]:
    """Returns a dataclass with the arguments of a benchmark's `run`: their types and defaults."""
    source = _source_of(name)
    run, arguments = _run_of(source)
    named = {node.id for node in ast.walk(run.args) if isinstance(node, ast.Name)}
    known: dict[str, Any] = {"Any": Any, "Literal": typing.Literal}
    for node in source.body:  # constants of the module that types and defaults name
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=constant)], value=value)
                | ast.AnnAssign(target=ast.Name(id=constant), value=ast.expr() as value)
            ) if constant in named:
                known[constant] = _value_of(value, known)
            case _:
                pass
    fields: list[Any] = []
    for argument, value in arguments:
        assert argument.annotation is not None, f"{name}: {argument.arg} has no type"
        spec = dataclasses.field() if value is None else dataclasses.field(default=_value_of(value, known))
        fields.append((argument.arg, _value_of(argument.annotation, known), spec))
    return dataclasses.make_dataclass(f"{name}_options", fields, frozen=True, kw_only=True)


def _value_of(expression: ast.expr, known: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(expression), "<bench>", "eval"), known)


def _typed(value: Any) -> str:
    """Returns a default as a person types it: `64,512`, `true`, `null`."""
    if isinstance(value, tuple):
        return ",".join(map(_typed, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _sections(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns title -> rows: `rows` first, then every other list of rows under its own name."""
    others = {
        key: value
        for key, value in result.items()
        if key != "rows" and isinstance(value, list) and value and isinstance(value[0], dict)
    }
    return {result["title"]: result["rows"], **others}


def _to_json(value: Any) -> Any:
    """Turns array scalars and arrays into numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
