"""A policy that sees with three cameras at 30 Hz, over ROS 2 and a line of 20 ms: station sim_arm_cameras."""

import json
import signal
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("cyclonedds")

from robot_rl.cli.main import main
from robot_rl.data.store.reader import open_source
from robot_rl.real.station import STATIONS
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from tests.real.arm.conftest import WAIT_S, start
from tests.real.ros2.conftest import own_domain
from tests.train.deploy.test_deploy_cameras import RESEMBLES, difference
from tests.train.deploy.test_deploy_run import SMALL, make_run

pytestmark = pytest.mark.slow

CAMERAS = ("left", "right", "wrist")
SEEING = EnvConfig(
    task="pick_cube", horizon_s=2.0, num_threads=1, cameras=CAMERAS, image_size=(64, 64), state=("joint",)
)
POLICY = replace(SMALL["flow"], steps=2, cameras=CAMERAS, image_features=8)


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    own_domain(monkeypatch)
    words = ("cameras=[left,right,wrist]", "image_size=[64,64]", "camera_hz=30", "delay_ms=20")
    process = start(*words)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)


def patient(folder: Path) -> Path:
    """Writes the shipped station with more time for a test machine that is busy."""
    settings = yaml.safe_load((STATIONS / "sim_arm_cameras.yaml").read_text())
    settings["limits"]["max_observation_age_s"] = 2.0
    settings["supervisor"] |= {"max_state_age_s": 2.0, "stop_after_s": 10.0}
    for camera in settings["cameras"].values():
        camera["max_age_s"] = 2.0
    path = folder / "patient.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_each_camera_shows_what_it_showed_in_training(
    arm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", env=SEEING, policy=POLICY)
    words = [f"run={tmp_path / 'run'}", f"station={patient(tmp_path)}", f"out={tmp_path / 'out'}"]
    status = main(["deploy", *words, "episodes=2", "video=false", "--json"])
    said = capsys.readouterr()
    assert status == 0, said.err
    report = json.loads(said.out.strip().splitlines()[-1])
    assert (report["ended"], report["episodes"], report["control_steps"]) == ("complete", 2, 80)
    ages_ms = report["latency_ms"]["picture_age"]
    # New pictures come each 33 ms; without any the newest would be 4 s old at the end.
    assert 0 < ages_ms["p50"] < 1000

    folder = Path(report["folder"])
    seeds = [episode["seed"] for episode in json.loads((folder / "deploy.json").read_text())["by_episode"]]
    with closing(SimVectorEnv(SEEING, 1, autoreset="disabled")) as env:
        for number, seed in enumerate(seeds):
            episode = open_source(folder / "experience").read(number)
            env.reset(seed=[seed])
            env.backend.bind("qpos")[0][:7] = np.asarray(episode.obs["state"])[0, :7]
            drawn = env.set_state(on_cpu(env.backend).state)
            first = {name: np.asarray(episode.obs[name][[0]])[0] for name in drawn if name != "state"}
            assert set(first) == {"left.rgb", "right.rgb", "wrist.rgb"}
            for name, picture in first.items():
                # Of this episode and not of the one before, though pictures are 20 ms on their way.
                assert difference(picture, drawn[name][0]) < RESEMBLES
                for other in set(first) - {name}:
                    assert difference(picture, drawn[other][0]) > 2 * RESEMBLES


def test_a_camera_that_the_station_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", env=SEEING, policy=POLICY)
    words = [f"run={tmp_path / 'run'}", "station=sim_arm", f"out={tmp_path / 'out'}"]
    assert main(["deploy", *words, "episodes=1"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        "station sim_arm does not fit the policy: cameras: [left, right, wrist] in training, [] there"
        in error
    )
    assert not (tmp_path / "out").exists()
