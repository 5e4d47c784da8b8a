"""The bench of PPO: which simulations it opens for whom, and that it closes all of them."""

from typing import Any

import pytest

from robot_rl.bench import ppo
from robot_rl.sim.single import SingleEnv


def test_each_learner_gets_its_own_simulations_and_all_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two learners take our batch; the third makes 2 simulations of its own."""
    opened, closed = list[Any](), list[Any]()

    def noted(kind: Any) -> Any:
        class Noted(kind):
            def __init__(self, *args: Any, **config: Any) -> None:
                super().__init__(*args, **config)
                opened.append(self)

            def close(self, **how: Any) -> None:
                closed.append(self)
                super().close(**how)

        return Noted

    batches, singles = noted(ppo.TimedEnv), noted(SingleEnv)
    monkeypatch.setattr(ppo, "TimedEnv", batches)
    monkeypatch.setattr(ppo, "SingleEnv", singles)
    few: dict[str, Any] = {"num_envs": (2,), "steps": (4,), "epochs": (1,), "minibatches": (2,), "width": 8}
    found = ppo.run(task="reach", **few, threads=1, seconds_per_round=0.01, rounds=2, rsl_rl=False)
    kinds = [type(env) for env in opened]
    assert (kinds.count(batches), kinds.count(singles)) == (2, 2)
    assert {id(env) for env in closed} == {id(env) for env in opened}
    simulated = {row["learner"]: row["us_simulated"] for row in found["rows"]}
    assert simulated["robot_rl"] > 0
    assert simulated["stable_baselines3"] > 0
    assert simulated[ppo.ALONE] is None
