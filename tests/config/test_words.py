"""The words of a configuration give it back."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import load, shell, words
from robot_rl.train.config import RunConfig
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.settings import ActConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 1e-3
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    on: bool = True
    limit: float | None = 5.0
    inner: Inner = field(default_factory=Inner)
    options: dict[str, Any] = field(default_factory=dict)


def test_what_is_as_usual_is_left_out() -> None:
    assert words(Outer(name="a")) == ["name=a"]
    changed = Outer(name="a", on=False, limit=None, inner=Inner(rate=2e-4), options={"a": {"b": [1, "x"]}})
    assert words(changed) == ["name=a", "on=false", "limit=null", "inner.rate=0.0002", "options.a.b=[1,x]"]
    assert words(changed, replace(changed, limit=1.0)) == ["limit=null"]


@pytest.mark.parametrize(
    "text", ["/tmp/a b", "true", "12", "3e4", "", "it's", 'say "x"', "a,b", "[x]", "${y}", "k=v", "a:b", "#"]
)
def test_any_text_goes_through_shell_and_hydra(text: str) -> None:
    config = Outer(name=text, options={"word": text}, inner=Inner(sizes=()))
    assert load(Outer, shlex.split(shell(words(config))), config_name="none") == config


def test_the_words_of_a_fine_tuning_run_give_it_back(tmp_path: Path) -> None:
    config = FinetuneConfig(
        dataset=str(tmp_path),
        baselines=False,
        horizon=8,
        stride=32,
        picture=(24, 32),
        updates=7,
        act=ActConfig(lrs=(1e-5, 3e-4)),
        options={"depth": 4, "horizons": [4, 8]},
    )
    found = shlex.split(shell(words(config)))
    assert {"baselines=false", "horizon=8", "stride=32", "options.depth=4"} <= set(found)
    assert load(FinetuneConfig, found, config_name="finetune") == config


def test_the_words_of_a_training_run_are_beside_its_recipe() -> None:
    given = ["recipe=reach", "demos.episodes=11", "method.algorithm.width=64", "seed=3"]
    config = load(RunConfig, given, config_name="train")
    found = words(config, load(RunConfig, given[:1], config_name="train"))
    assert sorted(found) == sorted(given[1:])
