"""The configuration of a run: defaults that build, and messages for every value out of range."""

from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import build, dump, load, plain, read
from robot_rl.core.errors import ConfigError
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import RunConfig
from robot_rl.train.record import load_config, new_folder


def test_a_written_config_is_read_back_equal(tmp_path: Path) -> None:
    config = load(RunConfig, ["recipe=pick_cube", "seed=3", "env.cameras=[front]"], config_name="train")
    (tmp_path / "config.yaml").write_text(dump(config))
    assert read(RunConfig, tmp_path / "config.yaml") == config
    assert (config.recipe, config.seed, config.env.cameras) == ("pick_cube", 3, ("front",))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed: got -1, allowed: 0 to 2147483647"),
        ({"out": ""}, "out: got '', allowed: a folder: out=runs, or out=. for this one"),
        ({"num_envs": 0}, "num_envs: got 0, allowed: 1 or more"),
        (
            {"policy": {"kind": "token", "steps": 1, "guess_weight": 0.5}},
            "policy.guess_weight: got 0.5, allowed: 0 without env.privileged=true, which shows the truth",
        ),
        ({"n_exec": 17}, "n_exec: got 17, allowed: 1 to policy.horizon, which is 16"),
        ({"torch_threads": 0}, "torch_threads: got 0, allowed: 1 or more"),
        ({"metrics_rows": 0}, "metrics_rows: got 0, allowed: 1 or more"),
        ({"env": {"task": "pick_cub"}}, "env.task: no task named 'pick_cub'. Did you mean 'pick_cube'?"),
        ({"demos": {"episodes": 0}}, "demos.episodes: got 0, allowed: 1 or more"),
        ({"demos": {"bias_m": 2.0}}, "demos.bias_m: got 2.0, allowed: -0.2 to 0.2 metres"),
        ({"demos": {"noise_m": -0.1}}, "demos.noise_m: got -0.1, allowed: 0 to 0.2 metres"),
        (
            {"demos": {"path": "/no/such"}},
            "demos.path: no folder '/no/such'. Make one with `robot-rl collect",
        ),
        ({"bc": {"updates": -1}}, "bc.updates: got -1, allowed: 0 or more"),
        ({"bc": {"algorithm": {"lr": 0.0}}}, "bc.algorithm.lr: got 0.0, allowed: above 0"),
        ({"method": {"utd": 0.0}}, "method.utd: got 0.0, allowed: above 0, at most 64"),
        ({"method": {"demo_ratio": 1.0}}, "method.demo_ratio: got 1.0, allowed: 0 to below 1, or null"),
        ({"evaluate": {"every_updates": -1}}, "evaluate.every_updates: got -1, allowed: 0 or more"),
        ({"method": {"scale": 0.0}}, "method.scale: got 0.0, allowed: above 0, at most 1"),
        (
            {"method": {"publish_every": 10, "max_staleness": 5}},
            "method.publish_every: got 10, allowed: 1 to max_staleness, 5",
        ),
        (
            {"replay": {"reuse": ["/no/such"]}},
            "replay.reuse: no folder '/no/such'. Give the folder of an earlier run",
        ),
        ({"replay": {"reuse_ratio": 1.0}}, "replay.reuse_ratio: got 1.0, allowed: above 0, below 1"),
        (
            {"replay": {"reuse": ["/"], "reuse_ratio": 0.5}},
            "replay.reuse_ratio: got 0.5 with method.demo_ratio 0.5, allowed: a sum below 1",
        ),
        (
            {"method": {"kind": "ppo"}, "replay": {"reuse": ["/"]}},
            "replay.reuse: got ['/'], allowed: none with method=ppo, which has no replay",
        ),
        ({"evaluate": {"episodes": 0}}, "evaluate.episodes: got 0, allowed: 1 to 10000"),
        ({"evaluate": {"quick_episodes": 0}}, "evaluate.quick_episodes: got 0, allowed: 1 to 10000"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep: got 0, allowed: 1 or more"),
        ({"video": {"episodes": -1}}, "video.episodes: got -1, allowed: 0 or more"),
        ({"method": {"utf": 1}}, "method.utf: no such key. Did you mean 'method.utd'?"),
    ],
)
def test_every_mistake_says_where_what_and_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, values)
    assert str(caught.value).startswith(message)


def of_method(*words: str) -> tuple[str, int, float]:
    """Returns the kind, the control steps and the share of demonstrations that the words lead to."""
    method: Any = load(RunConfig, words, config_name="train").method
    return method.kind, method.env_steps, method.demo_ratio


def test_the_settings_of_a_recipe_belong_to_its_method() -> None:
    assert of_method("recipe=fast_sac") == ("direct", 200_000, 0.25)
    assert of_method("recipe=fast_sac", "method=direct", "method.env_steps=7") == ("direct", 7, 0.25)
    assert of_method("recipe=scratch") == ("direct", 200_000, 0.0)  # what it changes of fast_sac, no more
    assert of_method("recipe=fast_sac", "method=latent") == ("latent", 100_000, 0.0)  # all as usual
    assert of_method("recipe=fast_sac", "method.kind=latent", "method.env_steps=7") == ("latent", 7, 0.0)
    assert of_method("recipe=reach", "method={kind: latent, env_steps: 7}") == ("latent", 7, 0.0)


def test_settings_of_a_method_are_typed_as_theirs_are() -> None:
    kept: Any = load(RunConfig, ["recipe=grpo", "method.keep=0.2,0.8"], config_name="train").method
    assert kept.keep == (0.2, 0.8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=pppo"], "method: got 'pppo'. Did you mean 'ppo'?"),
        (["method=ppo,grpo"], "got several values for one run"),
        (["method=ppo", "method.utd=2"], "method.utd: no such key. Known in method: env_steps"),
        (["residual.utd=2"], "What 'residual' sets is in 'method': method.kind=residual method."),
        (["utd=2"], "utd: no such key. Did you mean 'method.utd'?"),
    ],
)
def test_mistakes_about_the_method(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, words, config_name="train")
    assert message in str(caught.value)


def test_a_config_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    sections = "residual: {scale: 0.3}\nppo: {decisions: 7}\ngrpo: {group: 4}\nsettings: {}\n"
    for method in ("residual", "ppo"):
        (tmp_path / "config.yaml").write_text(f"seed: 3\nmethod: {method}\n{sections}")
        config = load_config(tmp_path)
        assert (config.seed, config.method.kind) == (3, method)
        assert plain(config.method) | ({"scale": 0.3} if method == "residual" else {"decisions": 7}) == plain(
            config.method
        )


def test_what_an_env_of_others_does_not_read_is_left_out() -> None:
    config = load(RunConfig, ["recipe=crossq"], config_name="train")
    assert config.used()["env"].keys() == {"kind", "id", "settings", "expert", "num_threads"}
    assert build(RunConfig, config.used()) == config
    words = ["recipe=residual", "env.kind=gym", "env.id=Hopper-v5", "env.expert=mine:hops"]
    demos = load(RunConfig, words, config_name="train").used()["demos"]
    assert demos.keys() == {"episodes", "disturb", "path", "mirror"}  # and no aim of our experts


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no recipe named 'pick_cub'\. Did you mean 'pick_cube'\?"):
        load(RunConfig, ["recipe=pick_cub"], config_name="train")


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"device: got '{device}', allowed on this machine: cpu.* Use device=cpu"
    ):
        RunConfig(device=device)


def test_an_unknown_robot_is_refused_before_anything_is_built() -> None:
    with pytest.raises(
        ConfigError, match=r"env.robot: no robot and no file named 'pandda'\. Did you mean 'panda'"
    ):
        RunConfig(env=EnvConfig(robot="pandda"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out: cannot make .*Give a folder that you may write to"):
        new_folder(str(tmp_path / "file"), "reach-seed0")
