"""Peers of policies that see: their programs by hand, finished rows stay, and one of each in earnest."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robot_rl.bench import pixels_peers
from robot_rl.bench.pixels_peers import LEROBOT
from robot_rl.config import dump, load
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.train.config import RunConfig

TINY = (
    *("demos.episodes=2", "bc.updates=1", "bc.batch=4", "method.env_steps=4", "method.batch=4", "num_envs=2"),
    *("evaluate.episodes=2", "evaluate.num_envs=2", "evaluate.quick_episodes=2"),
)


def run(out: Path, **how: Any) -> dict[str, Any]:
    how = {"task": "reach", "seeds": (4,), "settings": TINY, **how}
    return pixels_peers.run(out=str(out), **how)


@pytest.fixture
def our_run(tmp_path: Path) -> Path:
    """A run of ours that has ended: 2 of 8 episodes solved at first, 6 after 3 processor minutes."""
    trial = pixels_peers.pixels.Trial("reach", 4, tmp_path, TINY)
    folder = trial.training().folder / "1-run"
    folder.mkdir(parents=True)
    words = [*trial.words, f"out={trial.training().folder}"]
    (folder / "config.yaml").write_text(dump(load(RunConfig, words, config_name="train")))
    summary = {
        "base_success": 0.25,
        "final_success": 0.75,
        "episodes": 8,
        "demo_env_steps": 40,
        "env_steps": 60,
        "spent": {name: {"minutes": 9.0, "cpu_minutes": at} for name, at in (("base", 1.0), ("final", 3.0))},
        "versions": {},
        "machine": {"cores": "2", "processor": "abacus"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class Programs:
    """Stands in for processes: one costs 12 processor seconds and another for each step; all are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, returncode: int = 0) -> None:
        self.begun: list[list[str]] = []
        self._spent_s, self._returncode = 0.0, returncode
        monkeypatch.setattr(pixels_peers.subprocess, "run", self.run)
        monkeypatch.setattr(pixels_peers.os, "times", lambda: (0.0, 0.0, self._spent_s, 0.0, 0.0))
        monkeypatch.setattr(pixels_peers, "_weights", lambda policy: 7)
        monkeypatch.setattr(pixels_peers, "find_spec", lambda name: name)
        monkeypatch.setattr(pixels_peers, "commit", lambda: "abc")
        monkeypatch.setattr(pixels_peers, "machine", lambda device: {"cores": "2", "processor": "abacus"})
        monkeypatch.setattr(pixels_peers, "version", lambda name: "1.0")

    def run(self, command: list[str], **how: Any) -> SimpleNamespace:
        assert how["env"]["OMP_NUM_THREADS"] == "1"
        self.begun.append(command)
        steps = [int(word.split("=")[1]) for word in command if word.startswith("--steps=")]
        self._spent_s += 12.0 + sum(steps)
        if command[2] == "robot_rl.bench.pixels_peer":
            asked = json.loads(command[3])
            found = {"success": 0.0, "episodes": 8, "env_steps": 500, "updates": 125, "weights": 9}
            found |= {"minutes": 5.0, "cpu_minutes": asked["cpu_minutes"]}
            Path(asked["result"]).write_text(json.dumps(found))
        said = b'LeRobot says something\n{"success": 0.5, "episodes": 8}\n'
        return SimpleNamespace(returncode=self._returncode, stdout=said)


def test_lerobot_learns_as_long_as_our_run(
    tmp_path: Path, our_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(monkeypatch)
    first = run(tmp_path, arms=("clone", "dagger", "act"), lerobot=("--batch_size=16",))["rows"]
    *trained, evaluated = programs.begun
    # Three processor minutes at a second for a step, whatever the start of the program costs.
    assert [next(word for word in words if "--steps" in word) for words in trained] == [
        "--steps=5",
        "--steps=45",
        "--steps=180",
    ]
    assert f"--dataset.root={our_run / 'demos'}" in trained[2]
    assert trained[2][-3] == "--batch_size=16"  # behind our own, so that it is the one that counts
    assert set(LEROBOT["act"]) < set(trained[2])
    policy = tmp_path / "reach-act-seed4" / "policy"
    assert evaluated[-5:-1] == [f"policy={policy}", "seed=4", "episodes=2", "lease_wait_s=1e6"]
    found = [(row["arm"], row["success"], row["cpu_minutes"], row["labels"]) for row in first]
    assert found == [("clone", 0.25, 1.0, 40), ("dagger", 0.75, 3.0, 100), ("act", 0.5, 3.0, 40)]
    act = first[2]
    assert (act["updates"], act["weights"], act["peer"]) == (180, 7, "lerobot 1.0")
    assert (act["ci_low"], act["ci_high"]) == wilson_interval(4, 8)
    assert json.loads((tmp_path / "pixels_peers.json").read_text())["rows"] == first
    # The same once more, and with one more arm: what is finished stays.
    again = run(tmp_path, arms=("act", "dagger"), lerobot=("--batch_size=16",))["rows"]
    assert (again, len(programs.begun)) == ([first[2], first[1]], 4)
    with pytest.raises(ConfigError, match=r"pixels_peers: .*reach-act-seed4 was begun with words=.*out="):
        run(tmp_path, arms=("act",))


def test_sac_learns_as_long_and_three_times_as_long(
    tmp_path: Path, our_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(monkeypatch)
    rows = run(tmp_path, arms=("sac", "sac_long"))["rows"]
    asked = [json.loads(command[3]) for command in programs.begun]
    assert [words["cpu_minutes"] for words in asked] == [3.0, 9.0]
    recipe = load(RunConfig, ["recipe=pick_cube_pixels"], config_name="train")
    assert asked[0]["env"]["cameras"] == list(recipe.env.cameras)
    assert asked[0]["env"]["image_size"] == list(recipe.env.image_size)
    assert "cube" not in " ".join(asked[0]["env"]["state"])
    assert [(row["cpu_minutes"], row["env_steps"], row["labels"]) for row in rows] == [
        (3.0, 500, None),
        (9.0, 500, None),
    ]
    assert rows[0]["peer"] == "stable-baselines3 1.0"


def test_mistakes(tmp_path: Path, our_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"bench pixels_peers: task: no task named 'reech'"):
        run(tmp_path, task="reech")
    with pytest.raises(ConfigError, match=r"cpu_minutes: got -1.*0 or more"):
        run(tmp_path, cpu_minutes=-1.0)
    Programs(monkeypatch, returncode=1)
    with pytest.raises(
        DeviceError, match=r"pixels_peers: reach, act, seed 4: see .*seed4/calibration-5\.log"
    ):
        run(tmp_path, arms=("act",))
    monkeypatch.setattr(pixels_peers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"arm 'act' needs lerobot: pip install .*leave the arm out"):
        run(tmp_path, arms=("clone", "act"))
    with pytest.raises(ConfigError, match=r"arm 'sac' needs stable_baselines3: pip install"):
        run(tmp_path, arms=("sac",))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run of ours, for the peers' tests in earnest."""
    folder = tmp_path_factory.mktemp("peers")
    assert [row["arm"] for row in run(folder, arms=("clone",))["rows"]] == ["clone"]
    return folder


@pytest.mark.slow  # half a minute: four programs that import torch
@pytest.mark.parametrize("arm", ["act", "diffusion"])
def test_lerobot_in_earnest(arm: str, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lerobot")
    monkeypatch.setattr(pixels_peers, "CALIBRATION", (1, 2))
    (row,) = run(begun, arms=(arm,), cpu_minutes=0.01)["rows"]
    assert (row["arm"], row["episodes"]) == (arm, 2)
    assert row["success"] in (0.0, 0.5, 1.0)
    assert row["weights"] > 11e6  # a ResNet-18
    assert row["updates"] >= 1


@pytest.mark.slow  # ten seconds
def test_sac_in_earnest(begun: Path) -> None:
    (row,) = run(begun, arms=("sac",), cpu_minutes=0.02)["rows"]
    assert (row["arm"], row["episodes"], row["labels"]) == ("sac", 2, None)
    assert row["success"] in (0.0, 0.5, 1.0)
    assert row["env_steps"] > 0
    assert row["cpu_minutes"] >= 0.02
