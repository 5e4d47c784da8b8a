"""Benchmarks of acting: roughness by hand, and a run of each that is too short to say anything."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robot_rl.bench import chunking, taco
from robot_rl.bench.chunking import Roughness


def moment(*actions: float, live: tuple[bool, ...]) -> Any:
    return SimpleNamespace(action=np.array(actions)[:, None], live=np.array(live))


def test_roughness_by_hand() -> None:
    # A plan every 2 steps that takes 1: new chunks take over at steps 3, 5. Row 0 goes 0 1 3 0, row 1 ends
    # after two steps, row 2 only fills the batch up. Second differences: 3 - 2 + 0 = 1, 0 - 6 + 1 = -5;
    # the jump at step 3 is 3. In the next batch the rows begin anew.
    rough = Roughness(n_exec=2, delay=1)
    for row_0, live_1 in ((0.0, True), (1.0, True), (3.0, False), (0.0, False)):
        rough(slice(0, 2), moment(row_0, 7.0, 99.0, live=(True, live_1, True)))
    assert rough.jerk == pytest.approx(3.0)
    assert rough.jump == pytest.approx(3.0)
    for row_0 in (5.0, 5.0, 5.0):
        rough(slice(2, 3), moment(row_0, 7.0, 99.0, live=(True, True, True)))
    assert rough.jerk == pytest.approx(2.0)  # (1 + 5 + 0) / 3
    assert rough.jump == pytest.approx(3.0)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Names one clone for all tests: the first trains it, in a process, and the others take it."""
    options: dict[str, Any] = {"task": "reach", "seeds": (3,), "episodes": 4, "horizon": 8, "n_exec": 4}
    clone: dict[str, Any] = {"updates": 5, "demos": 20, "noise_m": 0.01}
    return options | clone | {"out": str(tmp_path_factory.mktemp("clone"))}


def test_every_method_at_every_delay(options: dict[str, Any]) -> None:
    result = chunking.run(**options, delays=(0, 2))
    assert [(row["delay"], row["method"]) for row in result["rows"]] == [
        (delay, method) for delay in (0, 2) for method in ("naive", "ensemble", "rtc")
    ]
    assert all(row["episodes"] == 4 for row in result["rows"])
    rough = {row["method"]: row["jump"] for row in result["rows"] if row["delay"] == 2}
    assert rough["rtc"] != rough["naive"] != rough["ensemble"]


def test_one_candidate_is_the_policy_itself(options: dict[str, Any]) -> None:
    result = taco.run(**options, candidates=(1, 3))
    assert [row["n"] for row in result["rows"]] == [1, 3]
    naive = chunking.run(**options, delays=(0,))["rows"][0]
    assert result["rows"][0]["success"] == naive["success"]
    assert result["rows"][0]["steps"] == naive["steps"]
