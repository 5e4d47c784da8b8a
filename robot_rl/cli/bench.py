"""`robot-rl bench`: measures one part of the platform on this machine and prints the table."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from robot_rl.cli.tables import table_of
from robot_rl.config import load
from robot_rl.core.errors import UnknownComponentError, nearest

SUMMARY = "measure this machine, or a method on a task"

BENCHES: dict[str, str] = {
    "sim": "control steps per second against the C limit, other vector envs and other simulators",
    "policy": "time of one action chunk, median and 99th percentile",
    "learner": "learner updates per second against Stable-Baselines3",
    "data": "samples per second of our data loader against LeRobot's, replay, recording",
    "chunking": "success and jerk with a planning delay: naive, temporal ensemble, real-time chunking",
    "improve": "one frozen base and every method that improves it: success against steps and minutes",
    "trivial": "success of what needs no learning: noise, standing still, the experts themselves",
    "taco": "success of the best of N chunks by a pseudo-count, against the policy itself",
    "ogbench": "success of chunked critics on OGBench's cube tasks, offline and online, h = 5 against h = 1",
    "control": "punctuality and latency of control over ROS 2, at 100 and 500 Hz",
    "her": "time to 95 % on push_cube with demonstrations, against SAC with hindsight replay",
    "crossq": "CrossQ against SAC on Walker2d and Hopper, beside their published returns",
    "physics": "integrators, time steps and contact models: speed, and whether a grasp holds",
}


def run(argv: list[str]) -> int:
    """Measures, prints the table, and with `--json` ends on one JSON object."""
    if {"-h", "--help"} & set(argv) and (named := [word for word in argv if word in BENCHES]):
        print(_help_of(named[0]), end="")
        return 0
    parser = argparse.ArgumentParser(
        prog="robot-rl bench",
        description=SUMMARY,
        epilog="robot-rl bench <name> --help lists the settings of one.\n\n"
        + "\n".join(f"{name:<10}{text}" for name, text in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="which benchmark, of the list below")
    parser.add_argument("options", nargs="*", metavar="key=value", help="settings of the benchmark")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    words = parser.parse_intermixed_args(argv)
    if words.name not in BENCHES:
        raise UnknownComponentError(f"bench: no benchmark {words.name!r}.{nearest(words.name, BENCHES)}")
    measure = importlib.import_module(f"robot_rl.bench.{words.name}").run
    result = measure(**options(measure, words.options, name=words.name))
    console = Console(width=None if sys.stdout.isatty() else 180)  # a log has room for every column
    for title, rows in _sections(result).items():
        console.print(table_of(rows, title))
    for note in result.get("notes", []):
        console.print(note, style="dim", markup=False)
    if words.json:
        print(json.dumps(result, default=_to_json))
    return 0


def _help_of(name: str) -> str:
    """Returns the settings of a benchmark with their defaults, from its source: nothing is imported."""
    spec = find_spec(f"robot_rl.bench.{name}")
    assert spec is not None, f"robot_rl.bench.{name} is missing"
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    measure = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "run")
    named = [*measure.args.args, *measure.args.kwonlyargs]
    values = [*measure.args.defaults, *(value for value in measure.args.kw_defaults if value is not None)]
    lines = [f"Usage: robot-rl bench {name} [key=value ...] [--json]", "", BENCHES[name], "", "Settings:"]
    for argument, value in zip(named, [None] * (len(named) - len(values)) + values, strict=True):
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        default = "needed" if value is None else _typed(ast.unparse(value))
        lines.append(f"  {argument.arg}={default:<{max(1, 28 - len(argument.arg))}} {kind}".rstrip())
    about = (ast.get_docstring(measure) or "").partition("Args:")[2].partition("\n\n")[0].strip("\n")
    return "\n".join([*lines, *(["", textwrap.dedent(about)] if about else [])]) + "\n"


def _typed(value: str) -> str:
    """Returns a Python value as it is typed."""
    words = {"True": "true", "False": "false", "None": "null"}
    return words.get(value, value.strip("()'").rstrip(",").replace(", ", ","))


def options(measure: Callable[..., Any], words: Sequence[str], *, name: str) -> dict[str, Any]:
    """Returns keyword arguments for `measure`, checked against its signature like any other config."""
    hints = typing.get_type_hints(measure)
    fields: list[Any] = []
    for key, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        spec = dataclasses.field() if default is parameter.empty else dataclasses.field(default=default)
        fields.append((key, hints[key], spec))
    schema = dataclasses.make_dataclass(f"{name}_options", fields, frozen=True, kw_only=True)
    config: Any = load(schema, words, config_name=f"bench_{name}")
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


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
