"""Settings as a person types them: paths without quotes, lists without brackets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import load, words
from robot_rl.config.typed import split
from robot_rl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int = 0
    out: str = "runs"
    path: Path | None = None
    sizes: tuple[int, ...] = ()
    image: tuple[int, int] | None = None
    names: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())


def read(word: str) -> Settings:
    return load(Settings, [word], config_name="settings")


@pytest.mark.parametrize(
    "text",
    [
        "l\u00e4ufe/m\u00fcller",
        "runs (new)/a=b,c",
        "it's",
        '"half',
        "C:\\runs\\",
        "a[1]{2}",
        "2024",
        "1e3",
        "true",
        "#1 @home!",
        "a~b",
        "[a",
    ],
)
def test_text_is_taken_as_it_is_typed(text: str) -> None:
    assert read(f"out={text}").out == text
    assert read(f"path={text}").path == Path(text)
    assert read(f"names={text}").names == tuple(text.split(","))
    found = Settings(out=text)
    assert load(Settings, words(found), config_name="settings") == found


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("out=~/runs", Settings(out=str(Path.home() / "runs"))),
        ("names=~/a,b", Settings(names=(str(Path.home() / "a"), "b"))),
        ("out='a b'", Settings(out="a b")),
        ('out="a\\"b"', Settings(out='a"b')),
        ("out=", Settings(out="")),
        ("out=${seed}/x", Settings(out="0/x")),
        ("path=null", Settings()),
        ("sizes=64,512", Settings(sizes=(64, 512))),
        ("sizes=[64,512]", Settings(sizes=(64, 512))),
        ("sizes=64", Settings(sizes=(64,))),
        ("sizes=[]", Settings()),
        ("image=96,128", Settings(image=(96, 128))),
        ("names=front,side", Settings(names=("front", "side"))),
        ("names='a,b',c", Settings(names=("a,b", "c"))),
        ("options.path=l\u00e4ufe", Settings(options={"path": "l\u00e4ufe"})),
        ("options.sizes=[1,2]", Settings(options={"sizes": [1, 2]})),
    ],
)
def test_what_a_setting_is_decides_how_it_is_read(word: str, expected: Settings) -> None:
    assert read(word) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "image=64",
            "image: got [64], allowed: a list of 2: a whole number, a whole number or null. "
            "Write a list: image=64,64",
        ),
        (
            "image=1,2,3",
            "image: got [1, 2, 3], allowed: a list of 2: a whole number, a whole number or null.",
        ),
        ("sizes=a,2", "sizes[0]: got 'a', allowed: a whole number."),
        (
            "sizes=range(1,3)",
            "sizes=range(1,3): got several values for one run, allowed: one. Add -m to run them all.",
        ),
        ("oud=l\u00e4ufe", "oud: no such key. Did you mean 'out'?"),
    ],
)
def test_refusals_are_of_the_schema_and_not_of_a_lexer(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(word)
    assert str(caught.value) == message


def test_commas_within_quotes_and_brackets_part_nothing() -> None:
    assert split("a,(b,c),'d,e',[f,{g,h}],") == ["a", "(b,c)", "'d,e'", "[f,{g,h}]", ""]
