"""What a replay does with steps whose policy is older than a bound."""

from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import pytest

from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.transitions import StepBatch
from robot_rl.train.experience import ReplayExperience, SourceReplay, StaleSteps


def step(number: int, version: int) -> StepBatch:
    zeros = np.zeros((1, 2), np.float32)
    return StepBatch(
        obs={"state": np.full((1, 1), number, np.float32)},
        action=zeros,
        base_action=zeros,
        reward=np.ones(1),
        terminated=np.zeros(1, bool),
        truncated=np.zeros(1, bool),
        next_obs={"state": np.full((1, 1), number + 1, np.float32)},
        next_base_action=zeros,
        policy_version=version,
    )


def experience(
    then: Literal["drop", "keep"], learner: list[int]
) -> tuple[ReplayExperience, ReplayBuffer, list[Any]]:
    replay, recorded = ReplayBuffer(100, 1, {"state": ((1,), np.float32)}, 2), list[Any]()

    class Recorder:
        def add(self, steps: StepBatch) -> None:
            recorded.append(steps)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    stale = StaleSteps(5, then, lambda: learner[0])
    keeper = SourceReplay(replay, recorder=cast(Any, Recorder()), stale=stale)
    return ReplayExperience(keeper, stale=stale), replay, recorded


@pytest.mark.parametrize(("then", "kept"), [("drop", 4), ("keep", 6)])
def test_stale_steps_are_counted_recorded_and_paid_for(then: Literal["drop", "keep"], kept: int) -> None:
    learner = [0]
    found, replay, recorded = experience(then, learner)
    for number in range(6):
        learner[0] = 6 if number in (2, 3) else 5  # 5 updates behind are allowed, 6 are not
        found.add(step(number, 0))
    assert len(recorded) == 6
    assert len(replay) == kept
    assert found.metrics() == {"collect/stale_steps": 2.0}
    assert found.metrics() == {}


def test_no_window_spans_what_was_dropped() -> None:
    learner = [0]
    found, replay, _ = experience("drop", learner)
    for number in range(6):
        found.add(replace(step(number, 0), policy_version=-9 if number == 2 else 0))
    batch = replay.sample(64, n_step=3, gamma_step=0.5, rng=np.random.default_rng(0))
    # Of steps 0 1 (2) 3 4 5, windows of up to three rewards, discount 1/2, that end where step 2 is missing.
    worth = {0.0: 1.5, 1.0: 1.0, 3.0: 1.75, 4.0: 1.5, 5.0: 1.0}
    states, rewards = batch.obs["state"][:, 0].tolist(), batch.reward.tolist()
    assert set(states) == set(worth)
    assert rewards == [worth[state] for state in states]


def test_a_replay_that_dropped_steps_is_saved_whole() -> None:
    found, replay, _ = experience("drop", [0])
    for number in range(6):
        found.add(replace(step(number, 0), policy_version=-9 if number == 2 else 0))
    assert "replay" in found.state_dict()["replay"], "the record has a step more than the replay"
    again, other, _ = experience("drop", [0])
    again.load_state_dict(found.state_dict())
    assert len(other) == len(replay) == 5
