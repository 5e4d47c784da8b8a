"""The outside check: rows that are finished are not done again; an unknown env is said to be unknown."""

import json
from pathlib import Path
from typing import Any

import pytest

from robot_rl.bench import crossq
from robot_rl.core.errors import ConfigError, RobotRLError


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def train(env: str, cfg: Any, seed: int, steps: int, episodes: int, progress: Any) -> dict[str, Any]:
        calls.append((env, cfg.critic.norm, cfg.critic.width, seed))
        return {"return": 10.0 * len(calls), "return_std": 1.0, "s_per_1000_steps": 2.0, "minutes": 3.0}

    monkeypatch.setattr(crossq, "train", train)
    return calls


def test_finished_rows_stay(tmp_path: Path, counted: list[tuple[Any, ...]]) -> None:
    out = tmp_path / "some" / "rows.json"
    how: dict[str, Any] = {"envs": ("Hopper-v5",), "steps": 6000, "width": 64, "out": str(out)}
    crossq.run(seeds=(4,), **how)
    assert counted == [("Hopper-v5", "batch", 64, 4), ("Hopper-v5", "none", 256, 4)]
    result = crossq.run(seeds=(4, 5), **how)
    assert [call[3] for call in counted] == [4, 4, 5, 5]
    assert len(json.loads(out.read_text())) == 4
    (ours, sac) = result["rows"]
    assert (ours["return"], ours["low"], ours["high"], ours["seeds"]) == (20.0, 10.0, 30.0, 2)
    assert (ours["published"], sac["published"]) == (2764.0, 1103.0)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="steps: got 5000, allowed: above 5000"):
        crossq.run(steps=5000)
    with pytest.raises(RobotRLError, match="Hoper-v5"):
        crossq.make("Hoper-v5")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[")
    with pytest.raises(RobotRLError, match="not a list of rows"):
        crossq.run(out=str(path))


def test_a_short_run_learns_and_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossq, "_RANDOM_STEPS", 260)
    row = crossq.train("Pendulum-v1", crossq.settings("crossq", 16), 0, 290, 2)
    # An episode of Pendulum earns between -2000 and 0.
    assert -2000 < row["return"] <= 0
    assert row["s_per_1000_steps"] > 0
