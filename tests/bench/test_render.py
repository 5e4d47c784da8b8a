"""The bench of pictures: every way draws, and the ratios are those of the rates."""

import pytest

from robot_rl.bench import render
from robot_rl.core.errors import ConfigError, RenderError
from robot_rl.sim.cameras import find_backend


def test_all_ways_draw() -> None:
    try:
        find_backend()
    except RenderError:
        pytest.skip("nothing here can draw")
    result = render.run(task="reach", cameras=("left",), pixels=16, num_envs=2, rounds=1)
    one, threads, bare = result["rows"]
    assert (one["way"], one["of_one_thread"], bare["of_bare"]) == ("one thread", 1.0, 1.0)
    assert threads["of_bare"] == pytest.approx(threads["pictures_per_s"] / bare["pictures_per_s"], rel=0.05)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="bench render: rounds: got 0"):
        render.run(rounds=0)
