"""What the curve of success against real steps claims, from numbers by hand; and the commands behind it."""

import json
from pathlib import Path
from typing import Any

import pytest

from robot_rl.bench.world_curve import _claims, _draw, _reached, run
from robot_rl.core.errors import ConfigError


def _row(
    arm: str, seed: int, steps: int, success: float, budget: int = 0, quick: bool = False
) -> dict[str, Any]:
    of = {"task": "push_cube", "arm": arm, "seed": seed, "budget": budget, "quick": quick}
    return {**of, "real_steps": steps, "success": success}


ROWS = [
    *(_row("on_policy", 0, steps, share, quick=True) for steps, share in ((0, 0.2), (40, 0.8), (80, 0.7))),
    *(_row("on_policy", 1, steps, share, quick=True) for steps, share in ((0, 0.2), (40, 0.7), (80, 0.9))),
    *(_row("grpo", seed, 160, share) for seed, share in ((0, 0.9), (1, 0.7))),
    *(_row("imagined", seed, 10, 0.85, budget=150) for seed in (0, 1)),
    *(_row("imagined", seed, 5, 0.95, quick=True, budget=150) for seed in (0, 1)),
]
MEANS = [
    {"task": "push_cube", "arm": "imagined", "budget": 150, "success": 0.85},
    {"task": "push_cube", "arm": "filtered", "budget": 150, "success": 0.78},
]


def test_the_target_is_reached_where_every_seed_got_there() -> None:
    assert _reached(ROWS, "push_cube", "on_policy") == 60  # 40 and 80
    assert _reached(ROWS, "push_cube", "grpo") is None
    assert _reached(ROWS, "push_cube", "imagined") == 10  # probes choose a policy, they do not measure it


def test_each_claim_is_held_against_its_threshold() -> None:
    claims = {row["claim"].split(": ")[1]: row for row in _claims("push_cube", ROWS, MEANS)}
    assert claims["times fewer real steps to 80% than on_policy"]["found"] == 6.0
    assert claims["times fewer real steps to 80% than on_policy"]["holds"]
    assert claims["times fewer real steps to 80% than grpo"]["holds"]  # it never got there
    assert claims["above filtered clones of 150 episodes"]["found"] == 0.07
    assert not claims["above filtered clones of 150 episodes"]["holds"]


def test_without_success_of_ours_nothing_is_claimed() -> None:
    rows = [row for row in ROWS if row["arm"] != "imagined"] + [_row("imagined", 0, 10, 0.5, budget=150)]
    assert not any(row["holds"] for row in _claims("push_cube", rows, []))


def test_an_arm_that_a_task_lacks_is_not_drawn(tmp_path: Path) -> None:
    rows = [{**row, "point": 0} for row in ROWS]
    other = [{**row, "task": "gantry_peg"} for row in rows if row["arm"] == "imagined"]
    _draw(tmp_path / "curve.png", rows + other)
    assert (tmp_path / "curve.png").stat().st_size > 5_000


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no 'fitlered'\. Did you mean"):
        run(arms=("fitlered",))


@pytest.mark.slow
def test_clones_of_what_succeeded_with_and_without_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    how: dict[str, Any] = {
        "tasks": ("gantry_peg",),
        "seeds": (10,),
        "episodes": (8,),
        "updates": 10,
        "jobs": 1,
    }
    short = (
        "demos.episodes=80",
        "bc.updates=20",
        "policy.width=16",
        "evaluate.episodes=4",
        "evaluate.num_envs=4",
    )
    how |= {
        "settings": short,
        "arms": ("filtered", "search"),
        "out": str(tmp_path),
        "figure": str(tmp_path / "curve.png"),
    }
    found = run(**how)
    assert [row["arm"] for row in found["rows"]] == ["filtered", "search"]
    demos = json.loads(next(tmp_path.glob("*/base/*/summary.json")).read_text())["demo_env_steps"]
    assert all(row["real_steps"] > demos for row in found["rows"])
    assert (tmp_path / "curve.png").stat().st_size > 5_000
    assert run(**how)["rows"] == found["rows"]  # nothing is done again
