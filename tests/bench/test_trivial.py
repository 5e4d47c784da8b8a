"""What needs no learning: counts by hand, what each policy sends, and that the expert is one."""

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robot_rl.bench import trivial
from robot_rl.bench.trivial import actor_of
from robot_rl.core.errors import ConfigError
from robot_rl.hal.vector import VectorEnv
from robot_rl.rollout.envs import make_env
from robot_rl.sim.vector import EnvConfig


@pytest.fixture
def env() -> Iterator[VectorEnv]:
    with closing(make_env(EnvConfig(task="pick_cube"), 2, autoreset="disabled")) as env:
        env.reset(seed=[5, 6])
        yield env


def test_counts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def collect(env: Any, actor: Any, seeds: Any) -> Any:
        seen.append((env.num_envs, seeds.tolist()))
        solved = [True, True, True, False] if len(seen) == 1 else [True, False, False, False]
        return SimpleNamespace(episode_success=lambda: np.array(solved))

    monkeypatch.setattr(trivial, "collect_episodes", collect)
    result = trivial.run(tasks=("pick_cube",), policies=("hold",), seeds=(0, 1), episodes=4)
    # The held-out episodes of the run seeds: from 2^31, and 10,000 further on for the next.
    assert seen == [(4, [2**31 + i for i in range(4)]), (4, [2**31 + 10_000 + i for i in range(4)])]
    # 3 and 1 of 4. Wilson, 4 of 8: 0.5 +- 1.96 sqrt(0.25 / 8 + 3.84 / 256) / (1 + 3.84 / 8), half 0.2848.
    (row,) = result["rows"]
    assert (row["task"], row["policy"], row["episodes"]) == ("pick_cube", "hold", 8)
    assert (row["success"], row["low"], row["high"]) == (0.5, 0.25, 0.75)
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((0.2152, 0.7848), abs=1e-4)


def test_what_each_sends(env: VectorEnv) -> None:
    assert actor_of(env, "hold", 0).act().tolist() == [[0.0] * 5] * 2
    random, repeat = actor_of(env, "random", 0), actor_of(env, "repeat", 0)
    first, kept = random.act(), repeat.act()
    assert len(np.unique([first, random.act()])) == 2 * 2 * 5  # other numbers in every env and at every step
    assert (np.abs([first, kept]) <= 1.0).all()
    env.step_masked(kept, None)
    assert repeat.act().tolist() == kept.tolist()
    assert len(np.unique(kept)) == 2 * 5
    env.reset(seed=[7, 6])  # another episode in the first env alone
    again = repeat.act()
    assert (again[0] != kept[0]).all()
    assert again[1].tolist() == kept[1].tolist()


def test_the_demonstrator_aims_beside_the_target(env: VectorEnv) -> None:
    # Both are told to go to the cube, from where the arm begins: 2.9 cm further along x is a faster step.
    demonstrator, expert = (actor_of(env, name, 0).act() for name in ("demonstrator", "expert"))
    assert (demonstrator[:, 0] >= expert[:, 0]).all()
    assert (demonstrator != expert).any()


def test_the_expert_solves_what_standing_still_does_not() -> None:
    rows = trivial.run(tasks=("reach",), policies=("hold", "expert"), seeds=(3,), episodes=4)["rows"]
    assert [(row["policy"], row["success"]) for row in rows] == [("hold", 0.0), ("expert", 1.0)]


def test_a_task_without_a_base_has_no_demonstrator(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = SimpleNamespace(episode_success=lambda: np.array([True]))
    monkeypatch.setattr(trivial, "collect_episodes", lambda env, actor, seeds: solved)
    how: dict[str, Any] = {"policies": ("demonstrator",), "seeds": (0,), "episodes": 1}
    rows = trivial.run(tasks=("push_cube", "reach"), **how)["rows"]
    assert [row["task"] for row in rows] == ["reach"]


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"policies: got 'rnd', allowed: random, hold, repeat, "):
        trivial.run(policies=("rnd",))
    with pytest.raises(ConfigError, match=r"episodes: got 0, allowed: 1 to 10000"):
        trivial.run(episodes=0)
