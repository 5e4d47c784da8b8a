"""The executor: queues per env, ensembling by hand, noise per episode, exact resume, messages."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.core.errors import CheckpointError
from robot_rl.core.policy import ChunkSample, Encoded
from robot_rl.core.seeding import EpisodeRng
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.executor import ChunkExecutor
from tests.plain import Plain


class CountingPolicy(Plain):
    """Plans what it saw: action h of a chunk is the observed number + h / 100; refine adds 10."""

    action_dim = 1

    def __init__(self, horizon: int = 4, *, refined: float = 0.0) -> None:
        self.horizon = horizon
        self.refined = refined
        self.planned: list[list[float]] = []
        self.noise: list[Tensor] = []

    def sample(self, obs: dict[str, Tensor], *, z: Tensor, **_: Any) -> ChunkSample:
        seen = obs["state"][:, 0]
        self.planned.append(seen.tolist())
        self.noise.append(z.clone())
        step = torch.arange(self.horizon) / 100
        return ChunkSample((seen[:, None] + step)[..., None])

    def refine(self, encoded: Encoded, action: Tensor, **how: Any) -> Tensor:
        noise = torch.rand(action.shape, generator=how["generator"]) if how["mode"] == "explore" else 0.0
        return action + self.refined + noise


def seen(*numbers: float) -> dict[str, NDArray[np.float32]]:
    return {"state": np.array(numbers, np.float32)[:, None]}


def make(policy: Any, num_envs: int, **options: Any) -> ChunkExecutor:
    return ChunkExecutor(policy, num_envs, **options)


def test_a_chunk_is_executed_for_n_exec_steps() -> None:
    policy = CountingPolicy(4)
    executor = make(policy, 2, n_exec=2)
    actions = [executor.act(seen(t, 10 + t)).action[:, 0].tolist() for t in range(5)]
    assert actions == [
        pytest.approx([0.0, 10.0]),
        pytest.approx([0.01, 10.01]),
        pytest.approx([2.0, 12.0]),
        pytest.approx([2.01, 12.01]),
        pytest.approx([4.0, 14.0]),
    ]
    assert policy.planned == [[0, 10], [2, 12], [4, 14]]


def test_reset_empties_one_queue_only() -> None:
    policy = CountingPolicy(4)
    executor = make(policy, 3, n_exec=4)
    executor.act(seen(0, 10, 20))
    executor.reset(np.array([False, True, False]))
    action = executor.act(seen(1, 11, 21)).action[:, 0]
    assert action.tolist() == pytest.approx([0.01, 11.0, 20.01])
    assert policy.planned == [[0, 10, 20], [11]]


def test_base_action_is_before_and_action_after_refine() -> None:
    act = make(CountingPolicy(refined=0.5), 2, n_exec=1).act(seen(0.1, 0.2))
    assert act.base_action[:, 0].tolist() == pytest.approx([0.1, 0.2])
    assert act.action[:, 0].tolist() == pytest.approx([0.6, 0.7])
    assert act.action.dtype == act.base_action.dtype == np.float32


def test_returned_arrays_are_copies() -> None:
    executor = make(CountingPolicy(), 1, n_exec=2)
    act = executor.act(seen(0.3))
    act.action[:] = 99
    act.base_action[:] = 99
    assert executor.act(seen(0.0)).action.item() == pytest.approx(0.31)


def test_ensemble_by_hand() -> None:
    # m = ln 2: weights 1, 1/2, 1/4 from the oldest chunk on; each chunk is constant.
    # t0: 0. t1: (0 + 0.3 / 2) / 1.5 = 0.1. t2: (0 + 0.15 + 0.6 / 4) / 1.75 = 0.1714286.
    # t3, the first chunk is over: (0.3 + 0.6 / 2 + 0.9 / 4) / 1.75 = 0.4714286.
    class Constant(CountingPolicy):
        def sample(self, obs: dict[str, Tensor], *, z: Tensor, **_: Any) -> ChunkSample:
            return ChunkSample(obs["state"][:, None].expand(-1, self.horizon, 1))

    executor = make(Constant(3), 1, n_exec=1, ensemble=float(np.log(2)))
    got = [executor.act(seen(number)).action.item() for number in (0.0, 0.3, 0.6, 0.9)]
    assert got == pytest.approx([0.0, 0.1, 0.1714286, 0.4714286])
    executor.reset()
    assert executor.act(seen(0.8)).action.item() == pytest.approx(0.8)  # nothing leaks over a reset
    # Two steps per plan, m = 0: t2 averages the first chunk's 0.0 and the second's 0.6.
    pairs = make(Constant(3), 1, n_exec=2, ensemble=0.0)
    got = [pairs.act(seen(number)).action.item() for number in (0.0, 0.3, 0.6, 0.9)]
    assert got == pytest.approx([0.0, 0.0, 0.3, 0.6])


def test_ensemble_with_whole_chunks_is_plain_execution() -> None:
    plain, ensembled = (make(CountingPolicy(2), 1, n_exec=2, ensemble=m) for m in (None, 0.1))
    for t in range(5):
        assert plain.act(seen(t)).action == pytest.approx(ensembled.act(seen(t)).action)


def test_noise_depends_on_seed_and_decision_only() -> None:
    many, alone = CountingPolicy(), CountingPolicy()
    wide, narrow = make(many, 3, n_exec=1), make(alone, 1, n_exec=1, seed=9)
    wide.reset(seeds=np.array([5, 77, 5], np.uint64))
    narrow.reset(seeds=np.array([77], np.uint64))
    for _ in range(3):
        wide.act(seen(0, 0, 0))
        narrow.act(seen(0))
    for t in range(3):
        assert torch.equal(many.noise[t][1], alone.noise[t][0])
        assert torch.equal(many.noise[t][0], many.noise[t][2])
        assert not torch.equal(many.noise[t][0], many.noise[t][1])
    assert not torch.equal(many.noise[0][0], many.noise[1][0])
    noise = torch.cat([n.flatten() for n in many.noise])
    assert noise.dtype == torch.float32


def test_reset_with_a_seed_restarts_the_noise_and_without_one_goes_on() -> None:
    policy = CountingPolicy()
    executor = make(policy, 1, n_exec=1)
    for seeds in (np.array([3], np.uint64), None, np.array([3], np.uint64)):
        executor.reset(seeds=seeds)
        executor.act(seen(0))
    assert torch.equal(policy.noise[0], policy.noise[2])
    assert not torch.equal(policy.noise[0], policy.noise[1])


def test_fresh_base_action_leaves_the_queues_alone() -> None:
    policy = CountingPolicy(4)
    executor = make(policy, 3, n_exec=4)
    executor.act(seen(0, 10, 20))
    before = executor.state_dict()
    action = executor.base_action(seen(1, 11, 21), np.array([True, False, True]))
    assert action[:, 0].tolist() == pytest.approx([1.0, 0.0, 21.0])
    after = executor.state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    nothing = executor.base_action(seen(1, 11, 21), np.zeros(3, bool))
    assert (nothing == 0).all()
    assert len(policy.planned) == 2
    # The noise is that of the env's next decision.
    executor.reset()
    executor.act(seen(1, 11, 21))
    assert torch.equal(policy.noise[1], policy.noise[2][[0, 2]])


def test_state_restores_exactly() -> None:
    def build() -> ChunkExecutor:
        config = ChunkPolicyConfig(horizon=4, width=16, depth=1, time_dim=8, process="flow_sde")
        policy = FlowPolicy(config, state_dim=1, action_dim=2, generator=torch.Generator().manual_seed(1))
        return make(policy, 2, n_exec=3, ensemble=0.1, mode="explore", seed=4)

    running = build()
    running.reset(seeds=np.array([11, 12], np.uint64))
    for t in range(4):
        running.act(seen(t, -t))
    state = running.state_dict()
    resumed = build()
    resumed.load_state_dict(state)
    for t in range(4, 9):
        assert np.array_equal(running.act(seen(t, -t)).action, resumed.act(seen(t, -t)).action)


def test_exploration_noise_is_seeded() -> None:
    a, b, c = (make(CountingPolicy(), 2, n_exec=1, mode="explore", seed=s) for s in (1, 1, 2))
    first = a.act(seen(0, 0)).action
    assert np.array_equal(first, b.act(seen(0, 0)).action)
    assert not np.array_equal(first, c.act(seen(0, 0)).action)


def test_weights_may_change_between_calls() -> None:
    config = ChunkPolicyConfig(horizon=1, width=8, depth=1, time_dim=4)
    policy = FlowPolicy(config, state_dim=1, action_dim=1)
    executor = make(policy, 1, n_exec=1)
    executor.act(seen(0))
    loss = policy.sample(policy.encode({"state": torch.zeros(1, 1)}), z=torch.zeros(1, 1, 1)).actions.sum()
    loss.backward()  # acting must not leave inference tensors in the policy
    assert policy.net.chunk_in.weight.grad is not None


class Vouching(CountingPolicy):
    """Vouches for as many actions as the observation says in its second number."""

    def sample(self, obs: dict[str, Tensor], *, z: Tensor, **options: Any) -> ChunkSample:
        chunk = super().sample(obs, z=z, **options)
        return ChunkSample(chunk.actions, n_exec=obs["state"][:, 1].long())


def vouched(numbers: list[float], spans: list[int]) -> dict[str, NDArray[np.float32]]:
    return {"state": np.stack([numbers, spans], axis=1).astype(np.float32)}


def test_a_row_plans_again_after_as_many_actions_as_the_policy_vouches_for() -> None:
    # Rows vouch for 1, 3 and 9 of 4 actions; the executor allows 3, and 0 counts as 1.
    policy = Vouching(4)
    executor = make(policy, 4, n_exec=3)
    actions = [
        executor.act(vouched([t, 10 + t, 20 + t, 30 + t], [1, 3, 9, 0])).action[:, 0] for t in range(4)
    ]
    assert actions == [
        pytest.approx([0.0, 10.0, 20.0, 30.0]),
        pytest.approx([1.0, 10.01, 20.01, 31.0]),
        pytest.approx([2.0, 10.02, 20.02, 32.0]),
        pytest.approx([3.0, 13.0, 23.0, 33.0]),
    ]
    assert policy.planned == [[0, 10, 20, 30], [1, 31], [2, 32], [3, 13, 23, 33]]


def test_rows_of_unequal_spans_do_not_meet() -> None:
    # Each row alone acts as it does beside the others, its queue is emptied alone, and its noise is its own.
    spans, seeds = [1, 2, 4], np.array([5, 6, 7], np.uint64)

    def played(rows: list[int]) -> list[list[float]]:
        policy = Vouching(4)
        executor = make(policy, len(rows), n_exec=4)
        executor.reset(seeds=seeds[rows])
        found: list[list[float]] = []
        for t in range(7):
            if t == 3:  # row 1 begins an episode
                executor.reset(np.array([row == 1 for row in rows]))
            act = executor.act(vouched([10.0 * row + t for row in rows], [spans[row] for row in rows]))
            found.append(act.action[:, 0].tolist())
        return np.array(found).T.tolist()

    together = played([0, 1, 2])
    assert together[1] == pytest.approx([10.0, 10.01, 12.0, 13.0, 13.01, 15.0, 15.01])
    for row in range(3):
        assert played([row]) == [pytest.approx(together[row])]


def test_ensemble_of_unequal_spans_by_hand() -> None:
    # m = 0: a step is the mean of all chunks that cover it. Chunks are constant: 0 planned at t0 for
    # two steps, then 0.3 for one, then 0.6 and 0.9; a chunk covers three steps.
    class Constant(Vouching):
        def sample(self, obs: dict[str, Tensor], *, z: Tensor, **_: Any) -> ChunkSample:
            actions = obs["state"][:, :1, None].expand(-1, self.horizon, 1)
            return ChunkSample(actions, n_exec=obs["state"][:, 1].long())

    executor = make(Constant(3), 1, n_exec=2, ensemble=0.0)
    steps = [(0.0, 2), (9.0, 9), (0.3, 1), (0.6, 2), (9.0, 9), (0.9, 2)]
    got = [executor.act(vouched([number], [span])).action.item() for number, span in steps]
    # t2: chunks 0 and 0.3. t3, t4: 0.3 and 0.6. t5: 0.6 and 0.9.
    assert got == pytest.approx([0.0, 0.0, 0.15, 0.45, 0.45, 0.75])


def test_with_a_delay_the_chunk_before_is_followed_until_the_next_is_there() -> None:
    # n_exec 2, delay 1, as in the module's figure: plans are begun at 0, 2, 4, followed from 0, 3, 5 on.
    policy = CountingPolicy(4)
    executor = make(policy, 1, n_exec=2, delay=1)
    got = [executor.act(seen(t)).action.item() for t in range(6)]
    assert policy.planned == [[0], [2], [4]]
    assert got == pytest.approx([0.0, 0.01, 0.02, 2.01, 2.02, 4.01])
    executor.reset()  # the first chunk of an episode is waited for
    assert executor.act(seen(9)).action.item() == pytest.approx(9.0)


def test_delay_ensemble_and_vouching_together() -> None:
    # Three steps of the second chunk are vouched for: two after its delay of one.
    policy = Vouching(6)
    executor = make(policy, 1, n_exec=4, delay=1)
    got = [executor.act(vouched([t], [3])).action.item() for t in range(6)]
    assert policy.planned == [[0], [2], [4]]
    assert got == pytest.approx([0.0, 0.01, 0.02, 2.01, 2.02, 4.01])
    # What is executed during the delay was fixed before the new chunk: it has no vote of it.
    averaging = make(CountingPolicy(4), 1, n_exec=2, delay=1, ensemble=0.0)
    got = [averaging.act(seen(t)).action.item() for t in range(5)]
    # t3 is covered by 0.03 and 2.01, their mean is 1.02; t4 by 2.02 alone, planned before t4.
    assert got == pytest.approx([0.0, 0.01, 0.02, 1.02, 2.02])


def test_delay_zero_and_no_vouching_change_nothing() -> None:
    config = ChunkPolicyConfig(horizon=4, width=16, depth=1, time_dim=8)
    policy = FlowPolicy(config, state_dim=1, action_dim=2, generator=torch.Generator().manual_seed(1))
    executor = make(policy, 2, n_exec=3)
    executor.reset(seeds=np.array([11, 12], np.uint64))
    with torch.no_grad():
        for start in (0, 3):
            obs = seen(start, -start)
            actions = np.stack([executor.act(obs).action for _ in range(3)], axis=1)
            rng = EpisodeRng(np.array([11, 12], np.uint64) ^ np.uint64(0x706F6C6963790000), [start // 3] * 2)
            z = torch.from_numpy(rng.normal(8).astype(np.float32).reshape(2, 4, 2))
            chunk = policy.sample(
                policy.encode({"state": torch.from_numpy(obs["state"])}), z=z
            ).actions.numpy()
            assert np.array_equal(actions, chunk[:, :3])


class Continuing(CountingPolicy):
    """Keeps what it was told of the chunk before."""

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.told: list[tuple[list[float], list[int], int]] = []

    def sample_after(
        self, obs: dict[str, Tensor], before: Tensor, known: Tensor, *, frozen: int, **options: Any
    ) -> ChunkSample:
        self.told.append((before[:, :, 0].flatten().tolist(), known.tolist(), frozen))
        return self.sample(obs, **options)


def test_a_continuing_policy_is_told_what_is_left_of_the_chunk_before() -> None:
    policy = Continuing(4)
    executor = make(policy, 1, n_exec=2, delay=1)
    for t in range(3):
        executor.act(seen(t))
    executor.base_action(seen(7))
    executor.reset()
    executor.act(seen(8))
    (_, first, _), second, asked, (_, fresh, _) = policy.told
    assert first == [0]
    assert second == (pytest.approx([0.02, 0.03, 0.03, 0.03]), [2], 1)
    assert asked == (pytest.approx([2.01, 2.02, 2.03, 2.03]), [3], 1)  # after step 2's 0.02
    assert fresh == [0]


def test_base_action_with_a_delay_is_the_old_chunks_next() -> None:
    executor = make(CountingPolicy(4), 2, n_exec=2, delay=1)
    executor.act(seen(0, 10))
    executor.reset(np.array([False, True]))
    assert executor.base_action(seen(5, 15))[:, 0].tolist() == pytest.approx([0.01, 15.0])


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"ensemble": 0.1}, {"delay": 1, "ensemble": 0.1}])
def test_state_restores_exactly_within_unequal_spans(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    observations = [vouched(rng.normal(size=3).tolist(), [1 + t % 2, 2, 3]) for t in range(12)]
    for cut in range(1, 6):
        running, resumed = (make(Vouching(5), 3, n_exec=3, **options) for _ in range(2))
        running.reset(seeds=np.arange(3, dtype=np.uint64))
        for obs in observations[:cut]:
            running.act(obs)
        resumed.load_state_dict(running.state_dict())
        for obs in observations[cut:]:
            assert np.array_equal(running.act(obs).action, resumed.act(obs).action)


def test_bad_inputs_are_named() -> None:
    policy = CountingPolicy(4)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 2: .* n_exec = 1.* horizon = 4"):
        make(policy, 1, n_exec=1, delay=2)
    with pytest.raises(ValueError, match=r"delay must be between 0 and 1, got 2: "):
        make(policy, 1, n_exec=3, delay=2)
    for n_exec in (0, 5):
        with pytest.raises(ValueError, match=f"between 1 and the policy's horizon 4, got {n_exec}"):
            make(policy, 1, n_exec=n_exec)
    with pytest.raises(ValueError, match=r"num_envs must be at least 1, got 0"):
        make(policy, 0, n_exec=1)
    with pytest.raises(ValueError, match=r"ensemble must be None or at least 0, got -1"):
        make(policy, 1, n_exec=1, ensemble=-1.0)
    with pytest.raises(ValueError, match=r"no mode 'best'"):
        make(policy, 1, n_exec=1, mode="best")
    executor = make(policy, 2, n_exec=1)
    with pytest.raises(ValueError, match=r"observation 'state' has 3 rows, allowed 2"):
        executor.act(seen(0, 1, 2))
    with pytest.raises(ValueError, match=r"the mask is bool \(3,\), allowed bool \(2,\)"):
        executor.reset(np.zeros(3, bool))
    with pytest.raises(ValueError, match=r"the mask is int64 \(2,\), allowed bool \(2,\)"):
        executor.base_action(seen(0, 1), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"seeds are float64 \(2,\), allowed integers \(2,\)"):
        executor.reset(seeds=np.zeros(2))
    with pytest.raises(CheckpointError, match=r"'plan' has shape \(3, 4, 1\), allowed \(2, 4, 1\)"):
        executor.load_state_dict(make(policy, 3, n_exec=1).state_dict())
    with pytest.raises(CheckpointError, match=r"'plan' has shape nothing"):
        executor.load_state_dict({})
