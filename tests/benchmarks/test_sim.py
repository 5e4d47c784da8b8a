"""The simulator stays near the C limit and ahead of process-per-env, in one run."""

import pytest

from robot_rl.bench import peers
from robot_rl.bench.sim import run
from robot_rl.core.errors import RobotRLError


def test_the_table_has_every_row() -> None:
    result = run(num_envs=(2,), rounds=1, task="reach", async_envs=(), peers=False)
    assert [row["what"] for row in result["rows"]] == ["robot_rl reach", "mujoco.rollout (C limit)"]
    assert result["ratio_to_limit"].keys() == {"2"}
    layers = [row["layer"] for row in result["layers"]]
    assert layers[:2] == ["control and safety", "physics (MuJoCo)"]
    assert sum(row["share"] for row in result["layers"]) == pytest.approx(1.0, abs=0.01)


def test_a_peer_that_cannot_be_installed_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peers.sys, "prefix", str(tmp_path))
    with pytest.raises(RobotRLError, match=r"cannot install the peer robosuite_lift .* Use peers=false"):
        peers.peer_steps_per_s("robosuite_lift")


@pytest.mark.benchmark
def test_simulation_is_near_the_limit_and_ahead_of_the_peers() -> None:
    result = run()
    assert min(result["ratio_to_limit"].values()) >= 0.85, result["ratio_to_limit"]
    assert min(result["ratio_to_async"].values()) >= 2.5, result["ratio_to_async"]
    assert result["ratio_to_peer"]["robosuite_lift"] >= 10, result["ratio_to_peer"]
    assert result["ratio_to_peer"]["gymnasium_robotics_fetch_pick_and_place"] >= 3, result["ratio_to_peer"]
