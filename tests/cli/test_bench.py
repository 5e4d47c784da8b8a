"""The bench command: options checked against the benchmark, tables for people, JSON for machines."""

import ast
import dataclasses
import inspect
import json
import re
import sys
import typing
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest

from robot_rl.cli import bench, tables
from robot_rl.config.build import hints_of
from robot_rl.core.errors import ConfigError, UnknownComponentError


def measure(
    num_envs: tuple[int, ...] = (64,), rounds: int = 5, kind: Literal["fast", "slow"] = "fast"
) -> dict[str, Any]:
    """A benchmark that measures nothing and returns what it was given."""
    return {
        "title": "demonstration",
        "rows": [{"name": kind, "envs": n, "rate": 1234.56 * n} for n in num_envs],
        "layers": [{"layer": "physics", "share": 0.91234}],
        "notes": ["rounds [n]: " + str(rounds)],
        "ratio": np.float64(0.5),
    }


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("robot_rl.bench.sim")
    monkeypatch.setattr(module, "run", measure, raising=False)
    monkeypatch.setitem(sys.modules, "robot_rl.bench.sim", module)
    source = inspect.getsource(measure).replace("def measure", "def run")
    monkeypatch.setattr(bench, "_source_of", lambda name: ast.parse(source))


@pytest.mark.usefixtures("stand_in")
def test_prints_tables_and_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["sim", "num_envs=[2,3]", "--json", "rounds=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    answer = json.loads(lines[-1])
    assert answer["ratio"] == 0.5
    assert [row["envs"] for row in answer["rows"]] == [2, 3]
    text = "\n".join(lines[:-1])
    assert "demonstration" in text
    assert "2,469" in text  # 2 * 1234.56 = 2469.12
    assert "0.9123" in text
    assert "rounds [n]: 7" in text


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("round=3", "round: no such key. Did you mean 'rounds'?"),
        ("rounds=many", "rounds: got 'many', allowed: a whole number."),
        ("kind=fest", "kind: got 'fest', allowed: one of 'fast', 'slow'. Did you mean 'fast'?"),
        ("num_envs=64,many", "num_envs[1]: got 'many', allowed: a whole number."),
    ],
)
def test_options_are_checked(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.run(["sim", word])
    assert str(caught.value) == message


def test_an_unknown_benchmark_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownComponentError, match=r"bench: no benchmark 'simm'\. Did you mean 'sim'\?"):
        bench.run(["simm"])


def test_cells_compare() -> None:
    values = [None, True, False, 12345, 12345.6, 0.123456, "x"]
    assert [tables._cell(v) for v in values] == ["-", "yes", "no", "12,345", "12,346", "0.1235", "x"]


def test_help_of_a_benchmark_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["sim", "--help"]) == 0
    text = capsys.readouterr().out
    assert "  num_envs=64,512 " in text
    assert "a list, each a whole number" in text
    assert "rounds: turns of each; the result is the median ratio of the rounds." in text


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_benchmark_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert bench.BENCHES[name] in text
    defaults = re.findall(r"^  \w+=(\S*) ", text, re.MULTILINE)
    assert not [value for value in defaults if re.search(r"['()]|[A-Z]{3}", value)]  # as typed, no constant


@pytest.mark.parametrize("name", bench.BENCHES)
def test_settings_are_read_from_the_source_as_python_reads_them(name: str) -> None:
    """What is checked before a benchmark is imported is what it takes."""
    module = pytest.importorskip(f"robot_rl.bench.{name}")
    assert hints_of(bench._schema_of(name)) == {
        key: hint for key, hint in typing.get_type_hints(module.run).items() if key != "return"
    }
    defaults = {key: parameter.default for key, parameter in inspect.signature(module.run).parameters.items()}
    assert {field.name: field.default for field in dataclasses.fields(bench._schema_of(name))} == defaults
