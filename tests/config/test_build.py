"""Plain data becomes frozen dataclasses; every refusal names the key, the value and the way out."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from robot_rl.config import build, plain
from robot_rl.core.errors import ConfigError


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    layers: tuple[int, ...] = (64, 64)
    kind: Literal["flow", "token"] = "flow"

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    steps: int = 10
    size: tuple[int, int] = (96, 96)
    out: Path | None = None
    colour: Colour = Colour.RED
    weights: dict[str, float] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    spare: Inner | None = None
    fast: bool = False


def test_fills_nested_fields_and_keeps_defaults() -> None:
    built = build(
        Outer,
        {
            "name": "a",
            "size": [4, 8],
            "out": "runs",
            "colour": "BLUE",
            "weights": {"reach": 2},
            "inner": {"layers": [32]},
            "spare": {"rate": 1},
        },
    )
    assert built == Outer(
        name="a",
        size=(4, 8),
        out=Path("runs"),
        colour=Colour.BLUE,
        weights={"reach": 2.0},
        inner=Inner(layers=(32,)),
        spare=Inner(rate=1.0),
    )
    assert isinstance(built.weights["reach"], float)


def test_plain_and_build_are_inverse() -> None:
    config = Outer(name="a", out=Path("x"), colour=Colour.BLUE, spare=Inner(rate=0.25))
    assert build(Outer, plain(config)) == config


def test_whole_floats_are_accepted_as_integers() -> None:
    assert build(Outer, {"name": "a", "steps": 1e5}).steps == 100_000


PAIR = "a list of 2: a whole number, a whole number"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nme": "a"}, "nme: no such key. Did you mean 'name'?"),
        ({"name": "a", "inner": {"ratee": 1}}, "inner.ratee: no such key. Did you mean 'inner.rate'?"),
        ({"name": "a", "layers": [1]}, "layers: no such key. Did you mean 'inner.layers'?"),
        ({"name": "a", "inner": {"xyz": 1}}, "inner.xyz: no such key. Known in inner: rate, layers, kind."),
        ({}, "name: missing. Give it as `name=<text>`."),
        ({"name": 3}, "name: got 3, allowed: text. Quote it to make it text: 'name=\"3\"'."),
        ({"name": None}, "name: got None, allowed: text."),
        ({"name": "a", "steps": "ten"}, "steps: got 'ten', allowed: a whole number."),
        ({"name": "a", "steps": 1.5}, "steps: got 1.5, allowed: a whole number."),
        ({"name": "a", "steps": True}, "steps: got True, allowed: a whole number."),
        ({"name": "a", "fast": 1}, "fast: got 1, allowed: true or false."),
        ({"name": "a", "size": [1, 2, 3]}, f"size: got [1, 2, 3], allowed: {PAIR}."),
        ({"name": "a", "size": 3}, f"size: got 3, allowed: {PAIR}. Write a list: size=3,3"),
        (
            {"name": "a", "inner": {"layers": "[4,]"}},
            "inner.layers: got '[4,]', allowed: a list, each a whole number. Write a list: inner.layers=[4]",
        ),
        ({"name": "a", "inner": {"layers": ["x"]}}, "inner.layers[0]: got 'x', allowed: a whole number."),
        (
            {"name": "a", "inner": {"kind": "flo"}},
            "inner.kind: got 'flo', allowed: one of 'flow', 'token'. Did you mean 'flow'?",
        ),
        (
            {"name": "a", "colour": "REDD"},
            "colour: got 'REDD', allowed: one of 'RED', 'BLUE'. Did you mean 'RED'?",
        ),
        ({"name": "a", "out": 3}, "out: got 3, allowed: a path or null."),
        ({"name": "a", "inner": 3}, "inner: got 3, allowed: keys and values."),
        ({"name": "a", "weights": {"reach": "x"}}, "weights.reach: got 'x', allowed: a number."),
        ({"name": "a", "weights": 1}, "weights: got 1, allowed: keys and values."),
        ({"name": "a", "inner": {"rate": 2.0}}, "inner: rate must be in (0, 1], got 2.0"),
        ({"name": "a", "spare": {"rate": "x"}}, "spare.rate: got 'x', allowed: a number."),
    ],
)
def test_refusals_say_where_what_and_what_instead(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Outer, values)
    assert str(caught.value) == message
