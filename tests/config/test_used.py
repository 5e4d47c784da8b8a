"""What a run does not read is left out, whatever it is set to; what it reads is not."""

from typing import Any

from robot_rl.config import build, plain
from robot_rl.config.used import renewed, used
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import PPOSettings


def test_a_run_has_the_settings_of_its_method_alone() -> None:
    config = RunConfig(method=PPOSettings(decisions=7))
    found = used(plain(config))
    assert (found["method"]["kind"], found["method"]["decisions"]) == ("ppo", 7)
    assert "utd" not in found["method"]
    assert "human" not in found
    assert found["demos"].keys() == {"episodes", "bias_m", "noise_m", "disturb", "path", "mirror"}
    assert build(RunConfig, found) == config


def test_settings_of_earlier_versions_have_the_keys_of_today() -> None:
    sections = {"residual": {"scale": 0.2}, "ppo": {"decisions": 7}, "settings": {}}
    assert renewed({"seed": 1, "method": "ppo", **sections}) == {
        "seed": 1,
        "method": {"kind": "ppo", "decisions": 7},
    }
    brought = renewed({"method": "scaled", "settings": {"reward_scale": 2.0}, "residual": {"scale": 0.2}})
    assert brought == {"method": {"kind": "scaled", "reward_scale": 2.0}}
    today = plain(RunConfig())
    assert renewed(today) == today


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
    odd: dict[str, Any] = {"method": "ppo", "demos": None, "human": "none", "residual": 1, "ppo": "no"}
    assert used(odd) == {"method": {"kind": "ppo"}, "demos": None, "human": "none"}
