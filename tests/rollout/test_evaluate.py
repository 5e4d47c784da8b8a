"""Evaluation: every started episode once, the same actions every time, nothing disturbed."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robot_rl.core.policy import ChunkSample, Encoded, Policy
from robot_rl.core.seeding import (
    EVAL_SEED_START,
    QUICK_EVAL_SEED_START,
    eval_seeds,
    quick_eval_seeds,
    train_seed,
)
from robot_rl.rollout.evaluate import EvalResult, evaluate_in
from robot_rl.rollout.stepping import Moment, lockstep, seed_batches
from robot_rl.testing.devices import FakeEnv
from tests.plain import Plain


class NoisePolicy(Plain, nn.Module):
    """Acts by its initial noise, so that actions show which seed they came from."""

    horizon, action_dim = 3, 2

    def sample(self, obs: dict[str, Tensor], *, z: Tensor | None = None, **_: Any) -> ChunkSample:
        assert z is not None
        return ChunkSample(z.clamp(-1, 1))

    def refine(self, encoded: Encoded, action: Tensor, **how: Any) -> Tensor:
        assert how["mode"] == "ode"  # an evaluation never explores
        return action


POLICY = cast(Policy, NoisePolicy())


def evaluate(num_envs: int, seeds: np.ndarray[Any, Any], **lengths: Any) -> EvalResult:
    env = FakeEnv(num_envs, autoreset="disabled", **lengths)
    return evaluate_in(env, POLICY, seeds=seeds, n_exec=2)


def test_every_started_episode_counts_once() -> None:
    # Envs 0 and 2 succeed after 4 and 6 steps, env 1 runs out of time after 9. Seeds 10 to 14 take
    # them in turn (0, 1, 2, 0, 1), the batch of the last two is filled up with a row that does not count.
    result = evaluate(
        3,
        np.arange(10, 15, dtype=np.uint64),
        terminate_after=[4, None, 6],
        truncate_after=[None, 9, None],
    )
    assert result.success.tolist() == [True, False, True, True, False]
    assert result.steps.tolist() == [4, 9, 6, 4, 9]
    # The reward of step k is k: 1 + 2 + 3 + 4 = 10, 45, 21.
    assert result.returns.tolist() == [10, 45, 21, 10, 45]
    assert result.rate == 0.6
    assert result.seeds.tolist() == [10, 11, 12, 13, 14]
    assert result.solved_at_reset.tolist() == [False] * 5
    # Wilson, 3 of 5: centre (0.6 + 0.384) / 1.768 = 0.557, half 0.326.
    assert result.interval == pytest.approx((0.231, 0.882), abs=1e-3)


def test_the_same_seeds_give_the_same_digest_and_others_do_not() -> None:
    seeds = np.arange(7, dtype=np.uint64)
    assert evaluate(3, seeds).action_digest == evaluate(3, seeds).action_digest
    assert evaluate(3, seeds).action_digest != evaluate(3, seeds + np.uint64(1)).action_digest


def test_rows_that_fill_up_a_batch_leave_no_trace() -> None:
    # 4 seeds in batches of 3: the second batch is seed 3 three times, of which one counts.
    found: list[int] = []
    env = FakeEnv(3, autoreset="disabled")
    result = evaluate_in(env, POLICY, seeds=np.arange(4, dtype=np.uint64), n_exec=2, on_batch=found.append)
    assert len(result.success) == 4
    assert found == [3, 4]
    assert [batch.tolist() for _, batch in seed_batches(np.arange(4, dtype=np.uint64), 3)] == [
        [0, 1, 2],
        [3, 3, 3],
    ]


def test_an_evaluation_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    evaluate(2, np.arange(4, dtype=np.uint64))
    assert torch.equal(before, torch.get_rng_state())


def test_rows_that_ended_stand_still() -> None:
    env = FakeEnv(2, terminate_after=[2, 4], truncate_after=None, autoreset="disabled")
    moments = list(
        lockstep(
            env,
            np.arange(2, dtype=np.uint64),
            lambda obs, infos: None,
            lambda obs: np.zeros((2, 2), np.float32),
        )
    )
    assert [moment.live.tolist() for moment in moments] == [[True, True]] * 2 + [[False, True]] * 2
    assert [moment.next_obs["state"][0, 0] for moment in moments] == [1, 2, 2, 2]


def test_the_three_kinds_of_seeds_never_meet() -> None:
    runs = (0, 1, 99_999, 2**31 - 1)
    for run in runs:
        assert train_seed(run, "collect") < EVAL_SEED_START
        held_out, quick = eval_seeds(run, 10_000), quick_eval_seeds(run, 10_000)
        assert EVAL_SEED_START <= held_out.min() <= held_out.max() < QUICK_EVAL_SEED_START
        assert quick.min() >= QUICK_EVAL_SEED_START
        assert len(np.unique(quick)) == 10_000


class Still(NoisePolicy):
    """Gives the same action everywhere."""

    def sample(self, obs: dict[str, Tensor], *, z: Tensor | None = None, **_: Any) -> ChunkSample:
        assert z is not None
        return ChunkSample(torch.full_like(z, 0.9))


def test_each_episode_has_a_push_of_its_own() -> None:
    env, seeds, seen = FakeEnv(2, autoreset="disabled"), np.arange(3, dtype=np.uint64), list[Any]()
    for disturb in (0.0, 0.5, 0.5):
        pushes: dict[int, Any] = {}

        def watch(where: slice, moment: Moment, pushes: dict[int, Any] = pushes) -> None:
            for row in range(where.stop - where.start):
                pushes.setdefault(where.start + row, []).append(moment.action[row])

        evaluate_in(env, cast(Policy, Still()), seeds=seeds, n_exec=2, disturb=disturb, watch=watch)
        seen.append(np.stack([np.unique(pushes[episode], axis=0) for episode in range(3)]))
    still, pushed, again = (actions[:, 0] for actions in seen)  # one action an episode, (3, 2)
    np.testing.assert_array_equal(still, np.full((3, 2), 0.9, np.float32))
    np.testing.assert_array_equal(pushed, again)
    assert len(np.unique(pushed)) >= 4
    assert (np.abs(pushed - 0.9) <= 0.5).all()
    assert (pushed <= 1.0).all()
