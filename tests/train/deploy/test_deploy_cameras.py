"""A policy that sees: the simulated arm's camera over ROS 2, a deployment, and what it leaves on the disk."""

import json
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

pytest.importorskip("cyclonedds")

from robot_rl.cli.main import main
from robot_rl.data.store.reader import open_source
from robot_rl.real.station import STATIONS
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.train.deploy.env import StationEnv
from tests.real.arm.conftest import WAIT_S, start
from tests.real.ros2.conftest import own_domain
from tests.train.deploy.test_deploy_run import SMALL, make_run

pytestmark = pytest.mark.slow

SEEING = EnvConfig(task="pick_cube", horizon_s=2.0, num_threads=1, cameras=("front",), image_size=(48, 64))
POLICY = replace(SMALL["flow"], steps=2, cameras=("front",), image_features=8)
MAX_AGE_S = 2.0
"""Of pictures: a loaded test machine is late, and that is not what is tested."""
RESEMBLES = 4.0
"""Mean absolute difference in grey levels that JPEG may make: it makes 1.9. Red for blue makes 17, left for
right 21, upside down 78."""

Picture = NDArray[Any]


@pytest.fixture(scope="module")
def arm() -> Generator[int]:
    """An arm with a camera in another process, in a domain of its own; the process id of the camera's."""
    with pytest.MonkeyPatch.context() as patch:
        own_domain(patch)
        process = start("rate_hz=100", "cameras=[front]", "image_size=[48,64]", "camera_hz=10")
        try:
            (camera,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield int(camera)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=WAIT_S)


@pytest.fixture
def deploys(arm: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Returns what deploys one episode; it returns the exit status, and the last lines of out and err."""
    make_run(tmp_path / "run", env=SEEING, policy=POLICY)

    def run(max_age_s: float = MAX_AGE_S) -> tuple[int, str, str]:
        settings = yaml.safe_load((STATIONS / "sim_arm.yaml").read_text())
        settings["cameras"] = {"front": {"topic": "front/image_raw/compressed", "max_age_s": max_age_s}}
        settings["limits"]["max_observation_age_s"] = 2.0
        settings["supervisor"] |= {"max_state_age_s": 2.0, "stop_after_s": 10.0}
        station = tmp_path / "seeing.yaml"
        station.write_text(yaml.safe_dump(settings))
        words = [f"run={tmp_path / 'run'}", f"station={station}", f"out={tmp_path / 'out'}", "episodes=1"]
        status = main(["deploy", *words, "video=false", "record=true", "--json"])
        said = capsys.readouterr()
        out, errors = said.out.strip().splitlines(), said.err.strip().splitlines()
        return status, out[-1] if out else "", errors[-1] if errors else ""

    return run


@pytest.fixture
def freeze(arm: int) -> Generator[Callable[[], None]]:
    """Returns what stops the camera's process until the end of the test."""
    yield lambda: os.kill(arm, signal.SIGSTOP)
    os.kill(arm, signal.SIGCONT)


def before_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Has something happen before a control step of the deployment."""
    step, done = StationEnv.step_masked, iter(range(10_000))

    def stepped(env: StationEnv, *arguments: Any) -> Any:
        if next(done) == number:
            act()
        return step(env, *arguments)

    monkeypatch.setattr(StationEnv, "step_masked", stepped)


def difference(one: Picture, other: Picture) -> float:
    """Returns the mean absolute difference in grey levels."""
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


def test_pictures_reach_the_policy_and_the_record(
    deploys: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_step(monkeypatch, 5, lambda: time.sleep(0.2))
    status, out, errors = deploys()
    assert status == 0, errors
    report = json.loads(out)
    assert (report["ended"], report["episodes"], report["control_steps"]) == ("complete", 1, 40)
    assert 1 <= report["late_steps"] < 40  # one of them the test's

    episode = open_source(Path(report["folder"]) / "experience").read(0)
    pictures = np.asarray(episode.obs["front.rgb"][np.arange(40)])
    assert (pictures.shape, pictures.dtype) == ((40, 48, 64, 3), np.uint8)
    assert pictures.reshape(40, -1).std(axis=1).min() > 10

    stamps, taken = np.asarray(episode.stamp_ns), np.asarray(episode.picture_stamp_ns["front.rgb"])
    assert (np.diff(stamps) > 0).all()
    assert (np.diff(taken) >= 0).all()
    age_s = 1e-9 * (stamps - taken)
    assert 0 <= age_s.min() <= age_s.max() < MAX_AGE_S
    # A picture is kept once, however many of the 20 steps a second see it: 10 a second are taken.
    num_taken = len(np.unique(taken))
    assert 1 < num_taken <= 10 * 1e-9 * (taken[-1] - taken[0]) + 4
    same = taken[1:] == taken[:-1]
    assert (pictures[1:] == pictures[:-1]).all(axis=(1, 2, 3))[same].all()

    first, last = drawn(report, np.asarray(episode.obs["state"])[[0, -1], :7])
    assert difference(pictures[0], first) < RESEMBLES
    for wrong in (first[::-1], first[:, ::-1], first[..., ::-1]):
        assert difference(pictures[0], wrong) > 2 * RESEMBLES  # the bound tells them apart
    # The arm moved, and was seen to.
    assert difference(last, first) > 1
    assert difference(pictures[-1], last) < 0.8 * difference(pictures[-1], first)


def drawn(report: dict[str, Any], rows_rad: Picture) -> list[Picture]:
    """Returns what training would have seen in that episode with the arm's joints there, (n, 7)."""
    seed = json.loads((Path(report["folder"]) / "deploy.json").read_text())["by_episode"][0]["seed"]
    pictures: list[Picture] = []
    with closing(SimVectorEnv(SEEING, 1, autoreset="disabled")) as env:
        env.reset(seed=[seed])
        for row_rad in rows_rad:
            env.backend.bind("qpos")[0][:7] = row_rad
            pictures.append(env.set_state(on_cpu(env.backend).state)["front.rgb"][0].copy())
    return pictures


def test_a_camera_that_freezes_ends_the_run_by_name(
    deploys: Callable[..., Any], freeze: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_step(monkeypatch, 4, freeze)
    status, _, error = deploys(max_age_s=0.5)
    assert status != 0
    assert "front.rgb is " in error
    assert "allowed is 500 ms" in error


def test_a_camera_that_is_silent_from_the_start_ends_the_run_by_name(
    deploys: Callable[..., Any], freeze: Callable[[], None]
) -> None:
    freeze()
    status, _, error = deploys()
    assert status != 0
    assert "nothing of front.rgb came in 5 s" in error
