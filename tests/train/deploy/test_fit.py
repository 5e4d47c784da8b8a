"""A policy that does not fit a station is refused with everything that differs."""

from contextlib import closing
from dataclasses import replace

import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.real.station import CameraConfig, StationConfig, load_station
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.deploy.fit import check_fit

CONFIG = EnvConfig(task="pick_cube")


@pytest.fixture(scope="module")
def meta() -> PolicyMeta:
    with closing(Mirror(CONFIG)) as mirror:
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
    assert message.endswith("mend the station file, or train for this one.")
