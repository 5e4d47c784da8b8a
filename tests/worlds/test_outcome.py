"""Who sees success in a predicted state."""

from dataclasses import replace

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.vector import SimVectorEnv
from robot_rl.worlds.history import History
from robot_rl.worlds.outcome import ClassifierOutcome, PredicateOutcome, agreement, outcome_of


@pytest.mark.parametrize("task", ["reach", "push_cube", "gantry_peg"])
def test_the_predicate_says_of_an_observed_state_what_the_task_says(task: str) -> None:
    env = SimVectorEnv(EnvConfig(task=task), 8, autoreset="disabled")
    predicate = PredicateOutcome(env.task, env.robot, env.state_names)
    env.reset(seed=0)
    expert, found = env.expert(), 0
    live = np.ones(8, bool)
    for _ in range(env.horizon):
        obs, _, terminated, truncated, infos = env.step_masked(expert.act(), live)
        said, _ = predicate.judge(obs["state"])
        assert (said[live] == infos["success"][live]).all()
        found += int(infos["success"].sum())
        live &= ~(terminated | truncated)
        if not live.any():
            break
    env.close()
    assert found > 0


def test_a_state_without_what_success_reads_has_no_predicate() -> None:
    env = SimVectorEnv(EnvConfig(task="push_cube", state=("joint", "tool")), 1)
    with pytest.raises(ConfigError, match="needs what is not observed"):
        PredicateOutcome(env.task, env.robot, env.state_names)
    with pytest.raises(ConfigError, match="no task of ours"):
        PredicateOutcome("Hopper-v5", "Hopper-v5", ("x",))
    env.close()


def test_classifiers_learn_success_from_recorded_states(history: History) -> None:
    found = outcome_of(history, None)  # the point is no task of ours
    assert found.kind == "classifier"
    judged = agreement(found, history)
    assert judged["precision"] > 0.8
    assert judged["recall"] > 0.9


def test_without_a_success_there_is_nothing_to_learn(history: History) -> None:
    never = replace(history, success=np.zeros_like(history.success))
    with pytest.raises(ConfigError, match=r"of \d+ recorded states 0 are successes"):
        ClassifierOutcome(4).fit(never, updates=1)
