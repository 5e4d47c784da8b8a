"""`robot-rl bench`: measures one part of the platform on this machine and prints the table."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import math
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
    module = f"robot_rl.bench.{words.name}"
    if module not in sys.modules:
        load(_schema_of(words.name), words.options, config_name=f"bench_{words.name}")  # refuses mistakes
    measure = importlib.import_module(module).run
    result = measure(**options(measure, words.options, name=words.name))
    console = Console(width=None if sys.stdout.isatty() else 180)  # a log has room for every column
    for title, rows in _sections(result).items():
        console.print(table_of(rows, title))
    for note in result.get("notes", []):
        console.print(note, style="dim", markup=False)
    if words.json:
        print(json.dumps(result, default=_to_json))
    return 0


def _source_of(name: str) -> ast.Module:
    """Returns the source of a benchmark: to import it may load the learner, which takes seconds."""
    spec = find_spec(f"robot_rl.bench.{name}")
    assert spec is not None, f"robot_rl.bench.{name} is missing"
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _run_of(source: ast.Module) -> tuple[ast.FunctionDef, list[tuple[ast.arg, ast.expr | None]]]:
    """Returns a benchmark's `run`, and its arguments with their defaults."""
    run = next(node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    named = [*run.args.args, *run.args.kwonlyargs]
    values = [*run.args.defaults, *(value for value in run.args.kw_defaults if value is not None)]
    missing: list[ast.expr | None] = [None] * (len(named) - len(values))
    return run, list(zip(named, missing + values, strict=True))


def _help_of(name: str) -> str:
    """Returns the settings of a benchmark with their defaults."""
    measure, arguments = _run_of(_source_of(name))
    lines = [f"Usage: robot-rl bench {name} [key=value ...] [--json]", "", BENCHES[name], "", "Settings:"]
    for argument, value in arguments:
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        default = "needed" if value is None else _typed(ast.unparse(value))
        lines.append(f"  {argument.arg}={default:<{max(1, 28 - len(argument.arg))}} {kind}".rstrip())
    about = (ast.get_docstring(measure) or "").partition("Args:")[2].partition("\n\n")[0].strip("\n")
    return "\n".join([*lines, *(["", textwrap.dedent(about)] if about else [])]) + "\n"


def _schema_of(name: str) -> type[Any]:
    """Returns the settings of a benchmark: types, defaults and the constants that they name."""
    source = _source_of(name)
    run, arguments = _run_of(source)
    named = {node.id for node in ast.walk(run.args) if isinstance(node, ast.Name)}
    known: dict[str, Any] = {"Any": Any, "Literal": typing.Literal, "math": math}
    for node in source.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=constant)], value=value) if constant in named:
                known[constant] = _value_of(value, known)
            case ast.AnnAssign(target=ast.Name(id=constant), value=ast.expr() as value) if constant in named:
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


def _typed(value: str) -> str:
    """Returns a Python value as it is typed."""
    words = {"True": "true", "False": "false", "None": "null"}
    return words.get(value, value.replace("'", "").strip("()").rstrip(",").replace(", ", ","))


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
