"""A policy of several tasks at a station: which one, in which words, and with which actions."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.config import dump
from robot_rl.core.errors import ConfigError
from robot_rl.core.language import INSTRUCTION, decode_text
from robot_rl.core.registry import resolve
from robot_rl.data.store.reader import open_source
from robot_rl.hal.device import LeaseLike
from robot_rl.hal.leased import EnvDevice
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.real.claim import device_of
from robot_rl.real.station import StationConfig, load_station
from robot_rl.rollout.envs import make_env
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.train.assemble import policy_meta
from robot_rl.train.config import RunConfig
from robot_rl.train.deploy import run as deployment
from robot_rl.train.deploy.config import DeployConfig
from robot_rl.train.deploy.fit import check_fit, env_at, in_scene_of
from robot_rl.train.deploy.journal import Journal
from robot_rl.train.deploy.run import deploy
from tests.train.deploy.conftest import MakeStationEnv
from tests.train.test_several_tasks import episodes_of, shown, two

WORDS = {"reach": "move the gripper to the green point", "drawer": "open the drawer"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes what `deploy` needs of a run of two tasks; its policy has learned nothing."""
    folder, config = tmp_path_factory.mktemp("two") / "run", two()
    policy: Any = resolve("policy", "small_vla").of_episodes(
        config.policy, episodes_of("reach"), generator=torch.Generator().manual_seed(0)
    )
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(config))
    with closing(make_env(shown("reach"), 1)) as reach, closing(make_env(shown("open_drawer"), 1)) as drawer:
        save_policy(folder / "policy" / "final", policy, meta=policy_meta(config, reach, drawer))
    return folder


@pytest.fixture
def opened(station_env: MakeStationEnv, monkeypatch: pytest.MonkeyPatch) -> list[EnvConfig]:
    """Puts arms in the test in the place of driver and supervisor; returns for which envs there were some."""
    envs: list[EnvConfig] = []

    def device(station: StationConfig, config: DeployConfig, env: EnvConfig, *_: object) -> EnvDevice:
        def make(lease: LeaseLike) -> Any:
            envs.append(env)
            return station_env(config=env, station=station)[0]

        return EnvDevice(device_of(station), make)

    monkeypatch.setattr(deployment, "station_device", device)
    return envs


def deployed(run: Path, out: Path, **options: Any) -> Journal:
    usual: dict[str, Any] = {"run": str(run), "station": "sim_in_process", "out": str(out)}
    config = DeployConfig(**{**usual, **options}, episodes=1, video=False)
    return deploy(config, ProgressDisplay(), None)


@pytest.mark.parametrize("task", ["reach", "push_cube", "open_drawer"])
def test_an_arm_gets_the_words_and_the_actions_of_training(station_env: MakeStationEnv, task: str) -> None:
    config = shown(task, horizon_s=None)
    station = in_scene_of(config, load_station("sim_in_process"))
    env, arm, _ = station_env(config=config, station=station)
    with closing(make_env(config, 1)) as simulated:
        assert env.action_names == simulated.action_names
        assert env.instruction == simulated.instruction
        wanted, _ = simulated.reset(seed=[3])
    obs, _ = env.reset(seed=3)
    assert env.observation_space.contains(obs)
    assert set(obs) == {"state", INSTRUCTION}  # an arm measures nothing privileged
    np.testing.assert_array_equal(obs[INSTRUCTION], wanted[INSTRUCTION])
    np.testing.assert_allclose(obs["state"], wanted["state"], atol=2e-3)
    env.step(np.array([[0.0, 0.0, 0.0, 0.0, -1.0]], np.float32))
    assert arm.plans[-1].gripper[0] == pytest.approx(0.0)  # in reach, too, the last action shuts the gripper
    env.step(np.array([[0.0, 0.0, 0.0, 1.0, 1.0]], np.float32))
    assert arm.plans[-1].gripper[0] == pytest.approx(0.04)
    assert (
        abs(arm.plans[-1].targets_rad[0, 6] - arm.plans[-2].targets_rad[0, 6]) > 0.01
    )  # and the fourth turns it


@pytest.mark.parametrize("source", ["reach", "drawer"])
def test_the_named_task_is_deployed_in_its_own_words(
    run: Path, opened: list[EnvConfig], tmp_path: Path, source: str
) -> None:
    journal = deployed(run, tmp_path, robot=source)
    task = {"reach": "reach", "drawer": "open_drawer"}[source]
    assert [env.task for env in opened] == [task]
    report = json.loads((journal.folder / "deploy.json").read_text())
    assert (report["ended"], report["task"], report["instruction"]) == ("complete", task, WORDS[source])
    assert (report["rtc"], report["control_steps"]) == (False, 10)  # 0.5 s at 20 Hz
    episode = open_source(journal.folder / "experience").read(0)
    assert episode.meta.instruction == WORDS[source]
    assert set(decode_text(np.asarray(episode.obs[INSTRUCTION]))) == {WORDS[source]}


def test_other_words_reach_the_policy_and_the_record(
    run: Path, opened: list[EnvConfig], tmp_path: Path
) -> None:
    journal = deployed(run, tmp_path, robot="reach", instruction="open the drawer")
    assert (opened[0].task, journal.task, journal.instruction) == ("reach", "reach", "open the drawer")
    episode = open_source(journal.folder / "experience").read(0)
    assert set(decode_text(np.asarray(episode.obs[INSTRUCTION]))) == {"open the drawer"}
    assert episode.meta.instruction == "open the drawer"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "robot: got None, allowed: reach or drawer, the sources of the run. Name the one that stands at",
        ),
        ({"robot": "push_cube"}, "robot: got 'push_cube', allowed: reach or drawer, the sources of the run"),
        ({"robot": "reach", "instruction": ""}, "instruction: got '', allowed: a text"),
        (
            {"robot": "drawer", "station": "sim_arm"},
            "tracked objects: .chest, drawer. in training, .cube, goal. there",
        ),
    ],
)
def test_what_cannot_be_deployed(
    run: Path, opened: list[EnvConfig], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        deployed(run, tmp_path, **options)
    assert opened == []
    assert list(tmp_path.iterdir()) == []


def test_the_source_of_the_stations_robot_needs_no_name() -> None:
    station = load_station("sim_arm")
    both = {"task": "reach", "env_steps": 1}
    of_robots = two(
        env={"task": "reach"}, sources={"a": {**both, "robot": "gantry"}, "b": {**both, "robot": "panda"}}
    )
    assert env_at(station, of_robots, None).robot == "panda"
    assert env_at(station, of_robots, "a").robot == "gantry"
    with pytest.raises(
        ConfigError, match="robot: got 'b', allowed: left out: the run has one robot and one task"
    ):
        env_at(station, RunConfig(), "b")


def test_a_policy_that_needs_words_is_refused_where_there_are_none(run: Path) -> None:
    _, meta = load_policy(run / "policy" / "final")
    station, words = load_station("sim_arm"), shown("reach")
    check_fit(meta, words, station)
    with pytest.raises(
        ConfigError,
        match=r"instruction: the words of one of \[reach, open_drawer\] in training, none there",
    ):
        check_fit(meta, replace(words, instruction=""), station)
    with pytest.raises(ConfigError, match=r"task: \[reach, open_drawer\] in training, push_cube there"):
        check_fit(meta, shown("push_cube"), station)
    with pytest.raises(
        ConfigError, match=r"allowed: left out where the policy gets no instruction: env\.instr"
    ):
        EnvConfig(task="reach").with_instruction("open the drawer")
