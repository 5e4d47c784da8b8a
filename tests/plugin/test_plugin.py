"""A package of somebody else adds a task, a robot, a policy, a method and an environment; we know none."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from robot_rl.config import build, load
from robot_rl.config.build import plain
from robot_rl.core import registry
from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import plugins, resolve, table
from robot_rl.hal.conformance import check_device, check_vector_env
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.conformance import check_policy
from robot_rl.rollout.envs import simulation
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.conformance import check_robot, check_task
from robot_rl.sim.vector import SimVectorEnv
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import direct
from robot_rl.train.improve.config import DirectSettings
from robot_rl.train.improve.method import Method
from tests.kinds import META, normaliser, observe, seeded

HERE = Path(__file__).parent
LEARNS = (
    *("stages=look,online,evaluate", "n_exec=1", "num_envs=8", "evaluate.num_envs=20"),
    *("evaluate.episodes=40", "demos.episodes=20", "evaluate.every_env_steps=500"),
    *("video.episodes=0", "video.failures=0"),
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a path on which Python finds the package as pip would have installed it."""
    facts = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site")
    (folder / "robot_rl_example").symlink_to(HERE / "robot_rl_example")
    info = folder / "robot_rl_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {facts['name']}\nVersion: 1.0\n")
    ((group, points),) = facts["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.fixture
def plugin(installed: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has this process find it."""
    monkeypatch.syspath_prepend(installed)
    plugins.cache_clear()
    yield
    plugins.cache_clear()


@pytest.mark.usefixtures("plugin")
def test_its_parts_stand_beside_ours() -> None:
    found = {kind: set(table(kind)) - set(registry.TABLE[kind]) for kind in registry.TABLE}
    assert {kind: names for kind, names in found.items() if names} == {
        "task": {"reach_high"},
        "robot": {"slow_panda"},
        "policy": {"regression"},
        "method": {"scaled"},
        "simulator": {"points"},
    }


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_its_environment_conforms(autoreset: Literal["same_step", "disabled"]) -> None:
    points = resolve("simulator", "points")

    def make(num_envs: int) -> VectorEnv:
        return points("line", num_envs, autoreset=autoreset, settings={"speed": 0.2})

    check_vector_env(make)
    config = EnvConfig(kind="points", id="line")
    check_device(lambda: simulation(config, 2, autoreset=autoreset))


@pytest.mark.usefixtures("plugin")
def test_its_task_and_robot_conform() -> None:
    check_robot("slow_panda")
    check_task("reach_high", robot="slow_panda")
    config = EnvConfig(task="reach_high", robot="slow_panda", horizon_s=0.5, num_threads=1)
    env = SimVectorEnv(config, 64)
    height = env.state_names.index("goal.pos.2")
    assert (env.reset(seed=0)[0]["state"][:, height] >= 0.35).all()
    assert env.limits is not None
    np.testing.assert_allclose(env.limits.velocity_rad_s[0], 0.5 * 2.175)


@pytest.mark.usefixtures("plugin")
def test_its_policy_conforms(tmp_path: Path) -> None:
    kind: Any = resolve("policy", "regression")
    config = kind.config_class(horizon=8)
    sizes: dict[str, Any] = {"state_dim": 4, "action_dim": 3, "normaliser": normaliser()}
    check_policy(lambda: kind(config, **sizes, generator=seeded()), observe, save=(tmp_path / "policy", META))


@pytest.mark.usefixtures("plugin")
def test_its_policy_is_chosen_as_ours_are() -> None:
    words = ["recipe=reach", "policy.kind=regression", "policy.width=32"]
    config = load(RunConfig, words, config_name="train")
    assert plain(config.policy) == {"kind": "regression", "horizon": 16, "width": 32}
    assert build(RunConfig, config.used()) == config
    with pytest.raises(ConfigError, match=r"policy.steps: no such key"):  # of a flow
        load(RunConfig, [*words, "policy.steps=4"], config_name="train")
    with pytest.raises(ConfigError, match=r"^policy width must be at least 1, got 0"):
        load(RunConfig, [*words[:2], "policy.width=0"], config_name="train")
    improve = "residual, dagger, direct, sequence or qarl"
    with pytest.raises(
        ConfigError, match=rf"policy.kind: got 'regression', .* method=ppo\. Use method={improve}"
    ):
        load(RunConfig, [*words, "method=ppo"], config_name="train")
    with pytest.raises(ConfigError, match=r"policy: got 'regresion'.* Did you mean 'regression'"):
        load(RunConfig, ["policy=regresion"], config_name="train")


@pytest.mark.usefixtures("plugin")
def test_its_settings_are_checked_as_ours_are() -> None:
    words = ["method=scaled", "method.env_steps=100", "method.reward_scale=2.0"]
    config = load(RunConfig, words, config_name="train")
    assert config.method.env_steps == 100
    assert build(RunConfig, config.used()) == config
    section = config.used()["method"]
    assert (section["kind"], section["reward_scale"]) == ("scaled", 2.0)
    for settings, message in (
        ({"reward_scale": 0.0}, "method.reward_scale: got 0.0, allowed: above 0"),
        ({"reward_skale": 2.0}, "method.reward_skale: no such key. Did you mean 'method.reward_scale'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(RunConfig, {"method": {"kind": "scaled", **settings}})
    with pytest.raises(ConfigError, match=r"method.reward_scale: no such key"):
        build(RunConfig, {"method": {"reward_scale": 2.0}})
    with pytest.raises(ConfigError, match=r"env.kind: got 'point'. Did you mean 'points'"):
        EnvConfig(kind="point", id="line")
    with pytest.raises(ConfigError, match=r"env.id: missing, env.kind=points needs it"):
        EnvConfig(kind="points")


def robot_rl(installed: str, *words: str) -> dict[str, Any]:
    """Runs the command with the package installed; returns its JSON object."""
    paths = os.pathsep.join([installed, os.environ.get("PYTHONPATH", "")])
    code = "import sys; from robot_rl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--json"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_its_environment_is_solved_by_its_method(installed: str, tmp_path: Path) -> None:
    learns = (*LEARNS, "method=scaled", "method.env_steps=1000", "method.reward_scale=2.0")
    fast = ("method.demo_ratio=0.0", "method.explore_steps=200", "method.batch=64")
    cool = ("method.algorithm.initial_temperature=0.01",)
    where = ("env.kind=points", "env.id=line", f"out={tmp_path}")
    done = robot_rl(installed, "train", *where, *learns, *fast, *cool)
    assert done["task"] == "line"
    assert done["final_success"] > 0.9
    again = robot_rl(installed, "evaluate", f"run={done['run']}")
    assert again["matches"]


@pytest.mark.slow
def test_its_policy_is_cloned_and_improved(installed: str, tmp_path: Path) -> None:
    words = ("recipe=smoke", "policy=regression", "policy.horizon=8", f"out={tmp_path}")
    done = robot_rl(installed, "train", *words)
    assert done["final_success"] > done["base_success"] + 0.1  # 0.20 and 0.53 when it was written
    assert robot_rl(installed, "evaluate", f"run={done['run']}")["matches"]


@pytest.mark.slow
def test_its_task_and_robot_are_learned_by_a_recipe_of_ours(installed: str, tmp_path: Path) -> None:
    where = ("env.task=reach_high", "env.robot=slow_panda", f"out={tmp_path}")
    done = robot_rl(installed, "train", "recipe=smoke", *where, "method.env_steps=800")
    assert (done["task"], done["episodes"]) == ("reach_high", 40)


# Packages that are not as they should be


class Point:
    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            [Point("task.reach", "theirs.tasks:Reach")],
            r"plug-in theirs.tasks:Reach: the task 'reach' is robot_rl.sim.tasks.reach:Reach already. Give",
        ),
        (
            [Point("task.lift", "one:Lift"), Point("task.lift", "two:Lift")],
            "plug-in two:Lift: the task 'lift' is one:Lift already",
        ),
    ],
)
def test_a_name_that_is_taken_is_an_error(
    points: list[Point], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    plugins.cache_clear()
    try:
        with pytest.raises(ConfigError, match=message):
            table("task")
        assert "panda" in table("robot")
    finally:
        plugins.cache_clear()


def test_one_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise OSError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point("task.lift", "raises_at_import:Lift")])
    plugins.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"env.task: the task 'lift' of a plug-in .* OSError"):
            resolve("task", "lift", at="env.task")
    finally:
        plugins.cache_clear()


@dataclass(frozen=True, kw_only=True)
class Copied(DirectSettings):
    """Settings that still have the kind of those they extend."""


COPIED = Method(make_policy=direct.make_policy, assemble=direct.assemble, settings=Copied)


def test_settings_that_do_not_say_their_own_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point("method.mine", f"{__name__}:COPIED")])
    plugins.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"method: .* 'mine' say 'direct', .* kind: ClassVar"):
            build(RunConfig, {"method": {"kind": "mine"}})
    finally:
        plugins.cache_clear()
