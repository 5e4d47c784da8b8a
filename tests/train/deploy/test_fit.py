"""A policy that does not fit a station is refused with everything that differs."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve, table
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.real.station import CameraConfig, SimConfig, StationConfig, load_station
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.deploy.fit import check_fit, in_scene_of
from tests.arms import write_arm

CONFIG = EnvConfig(task="pick_cube")


@pytest.fixture(scope="module")
def meta() -> PolicyMeta:
    return meta_of(CONFIG)


def meta_of(config: EnvConfig) -> PolicyMeta:
    """Returns what a policy trained in an env says of itself."""
    with closing(Mirror(config)) as mirror:
        env = mirror.env
        return PolicyMeta(
            task=env.task,
            robot=env.robot,
            control_hz=env.control_hz,
            state_names=env.state_names,
            action_names=env.action_names,
            instruction=env.instruction,
            n_exec=4,
        )


@pytest.mark.parametrize("name", ["sim_arm", "sim_in_process"])
def test_the_shipped_stations_fit_their_task(name: str, meta: PolicyMeta) -> None:
    check_fit(meta, CONFIG, load_station(name))


@pytest.mark.parametrize(
    "task", [name for name in sorted(table("task")) if resolve("task", name).body == "arm"]
)
def test_the_station_in_process_takes_every_task_its_robot_can_do(task: str) -> None:
    config = EnvConfig(task=task, robot="panda")
    station = in_scene_of(config, load_station("sim_in_process"))
    check_fit(meta_of(config), config, station)
    assert station.sim is not None
    assert (station.sim.task, station.sim.robot) == (task, "panda")


def test_a_policy_for_several_robots_fits_the_stations_of_each(meta: PolicyMeta) -> None:
    both = replace(meta, robot="gantry", robots=("gantry", meta.robot))
    check_fit(both, CONFIG, load_station("sim_arm"))
    with pytest.raises(ConfigError, match="robot: gantry in training, panda there"):
        check_fit(replace(both, robots=("gantry", "viperx")), CONFIG, load_station("sim_arm"))


def test_a_task_on_another_robot_is_refused_there() -> None:
    config = EnvConfig(task="gantry_peg")  # on the gantry, whose task it is
    station = in_scene_of(config, load_station("sim_in_process"))
    with pytest.raises(ConfigError, match="robot: gantry in training, panda there"):
        check_fit(meta_of(config), config, station)


def test_a_scene_that_is_named_stays_and_a_real_arm_has_its_own() -> None:
    station = load_station("sim_in_process")
    named = replace(station, sim=SimConfig(task="pick_cube"))
    for each in (named, load_station("sim_arm"), load_station("panda_ros2")):
        assert in_scene_of(EnvConfig(task="reach"), each) is each


def test_an_arm_without_a_gripper_has_no_station(tmp_path: Path) -> None:
    config = EnvConfig(task="reach", robot=str(write_arm(tmp_path)))
    station = in_scene_of(config, load_station("sim_in_process"))
    with pytest.raises(ConfigError, match="gripper: ur has none, and a station's arm has one"):
        check_fit(meta_of(config), config, station)


def shifted(station: StationConfig) -> StationConfig:
    return replace(station, home_rad=(0.3, *station.home_rad[1:]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: replace(s, joints=("a", *s.joints[1:])), r"joints: \[joint1, joint2, .* there"),
        (shifted, r"home_rad: \[0\.0, .* in training, \[0\.3, "),
        (lambda s: replace(s, robot="gantry"), "robot: panda in training, gantry there"),
        (lambda s: replace(s, objects={}), r"tracked objects: \[goal, cube\] in training, \[\] there"),
        (lambda s: replace(s, sim=replace(s.sim, task="reach")), "task: pick_cube in training, reach there"),
    ],
)
def test_what_differs_at_the_station_is_named(change, says: str, meta: PolicyMeta) -> None:
    with pytest.raises(ConfigError, match=f"station sim_in_process does not fit the policy: .*{says}"):
        check_fit(meta, CONFIG, change(load_station("sim_in_process")))


def test_all_differences_are_said_at_once(meta: PolicyMeta) -> None:
    config = replace(CONFIG, cameras=("front",), depth=True)
    station = replace(load_station("sim_in_process"), cameras={"side": CameraConfig()})
    with pytest.raises(ConfigError) as caught:
        check_fit(replace(meta, control_hz=30.0), config, station)
    message = str(caught.value)
    assert "control rate: 30.0 in training, 20.0 there" in message
    assert "cameras: [front] in training, [side] there" in message
    assert "depth" in message
    assert message.endswith("correct the station file, or train for this one.")
