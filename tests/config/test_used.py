"""What a run does not read is left out, whatever it is set to; what it reads is not."""

from typing import Any

from robot_rl.config import build, plain
from robot_rl.config.used import used
from robot_rl.train.config import RunConfig


def test_a_run_has_the_section_of_its_method_alone() -> None:
    found = used(plain(RunConfig(method="ppo")))
    assert "ppo" in found
    assert not {"residual", "grpo", "human", "settings"} & found.keys()
    assert found["demos"].keys() == {"episodes", "bias_m", "noise_m", "path", "mirror"}
    assert build(RunConfig, found) == RunConfig(method="ppo")


def test_what_is_read_stays() -> None:
    run = plain(RunConfig())
    run["human"]["input"], run["demos"]["path"], run["demos"]["filter"]["updates"] = "keyboard", "demos/a", 10
    found = used(run)
    assert found["human"] == run["human"]
    assert found["demos"] == run["demos"]
    run = plain(RunConfig()) | {"station": "sim_arm"}
    assert used(run)["human"] == run["human"]


def test_settings_of_anything_else_are_as_they_are() -> None:
    for settings in ({}, {"dataset": "d", "demos": 3}, {"method": None, "ppo": {}}):
        assert used(settings) == settings
    odd: dict[str, Any] = {"method": "ppo", "demos": None, "human": "none", "residual": 1}
    assert used(odd) == {"method": "ppo", "demos": None, "human": "none"}
