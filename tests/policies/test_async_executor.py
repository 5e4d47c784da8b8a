"""The asynchronous executor: equal to the synchronous one at a known delay, late chunks, holding, latency."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.core.clock import ManualClock
from robot_rl.core.policy import ChunkSample
from robot_rl.policies import async_executor
from robot_rl.policies.async_executor import Answer, AsyncExecutor
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.real_time import RealTimeChunks
from tests.plain import Plain

HZ = 20.0


class CountingPolicy(Plain):
    """Plans what it saw: action h of a chunk is the observed number + h / 100; refine adds nothing."""

    action_dim = 1

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.planned: list[float] = []

    def sample(self, obs: dict[str, Tensor], **_: Any) -> ChunkSample:
        self.planned.append(obs["state"].item())
        return ChunkSample((obs["state"] + torch.arange(self.horizon) / 100)[..., None])


class Worker:
    """Computes when told to: each answer is there a given number of control steps after its question."""

    def __init__(self, clock: ManualClock, steps: Callable[[int], int]) -> None:
        self._clock, self._steps = clock, steps
        self._waiting: list[tuple[int, Callable[[], Answer], Future[Answer]]] = []
        self._asked = self._now = 0

    def submit(self, compute: Callable[[], Answer]) -> Future[Answer]:
        future: Future[Answer] = Future()
        takes = self._steps(self._asked)
        if self._asked == 0 or takes == 0:  # the first is waited for
            future.set_result(compute())
        else:
            self._waiting.append((self._now + takes, compute, future))
        self._asked += 1
        return future

    def step(self) -> None:
        """A control period passes."""
        self._clock.advance(1 / HZ - 1e-6)  # an answer after n periods takes just less than n
        self._now += 1
        for due, compute, future in self._waiting:
            if due == self._now:
                future.set_result(compute())


def seen(number: float) -> dict[str, NDArray[np.float32]]:
    return {"state": np.array([[number]], np.float32)}


def make(policy: Any, steps: Callable[[int], int], **options: Any) -> tuple[AsyncExecutor, Worker]:
    clock = ManualClock()
    worker = Worker(clock, steps)
    return threaded(
        policy, patience_s=0.0, clock=clock, submit=worker.submit, control_hz=HZ, **options
    ), worker


def threaded(policy: Any, **options: Any) -> AsyncExecutor:
    return AsyncExecutor(policy, **options)


def acts(executor: AsyncExecutor, worker: Worker, steps: int) -> list[float]:
    taken: list[float] = []
    for t in range(steps):
        taken.append(round(executor.act(seen(t)).action[0, 0].item(), 4))
        worker.step()
    return taken


def test_as_in_the_figure_of_the_module() -> None:
    # n_exec 4; the second plan takes two steps, the third one: begun at 4 and 8, followed from 6 and 9 on.
    policy = CountingPolicy(8)
    executor, worker = make(policy, lambda plan: (0, 2, 1)[plan], n_exec=4)
    assert acts(executor, worker, 6) == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    taken: list[float] = []
    for t in range(6, 10):
        taken.append(round(executor.act(seen(t)).action[0, 0].item(), 4))
        worker.step()
    # The third was expected after two steps, so two of the old chunk are kept although it came after one.
    assert taken == [4.02, 4.03, 4.04, 4.05]
    assert policy.planned == [0, 4, 8]
    assert executor.late_chunks == 1  # nothing was known of the second when it was begun
    assert round(executor.act(seen(10)).action[0, 0].item(), 4) == 8.02


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("ensemble", [None, 0.1])
@pytest.mark.parametrize("rtc", [False, True])
def test_at_a_steady_delay_it_is_the_synchronous_executor(
    delay: int, ensemble: float | None, rtc: bool
) -> None:
    config = ChunkPolicyConfig(horizon=8, width=16, depth=1, time_dim=8)
    flow = FlowPolicy(config, state_dim=1, action_dim=1, generator=torch.Generator().manual_seed(1))
    policy = RealTimeChunks(flow) if rtc else flow
    executor, worker = make(policy, lambda plan: delay, n_exec=4, ensemble=ensemble)
    executor._latency_s.extend([max(0.0, delay - 0.5) / HZ] * 50)  # as measured in earlier episodes
    known = ChunkExecutor(policy, 1, n_exec=4, delay=delay, ensemble=ensemble)
    for run in (executor, known):
        run.reset(seeds=np.array([5], np.uint64))
    for t in range(20):
        assert executor.act(seen(t)).action == pytest.approx(known.act(seen(t)).action, abs=1e-6), t
        worker.step()
    assert executor.late_chunks == executor.held_steps == 0


def test_a_late_chunk_is_joined_where_it_is_and_its_delay_is_learnt() -> None:
    # The second plan takes three steps: followed from its action 3 on. The third is expected to.
    executor, worker = make(CountingPolicy(8), lambda plan: 3 if plan else 0, n_exec=3)
    taken = acts(executor, worker, 10)
    assert taken == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 3.03, 3.04, 3.05, 6.03]
    assert executor.late_chunks == 1
    assert executor.latency_s == pytest.approx(3 / HZ, rel=1e-3)


def test_with_a_slow_policy_planning_begins_earlier() -> None:
    # Chunks of 6; planning takes 4 steps, so a chunk may be followed for 2 before the next is begun.
    policy = CountingPolicy(6)
    executor, worker = make(policy, lambda plan: 4 if plan else 0, n_exec=4)
    executor._latency_s.extend([3.9 / HZ] * 50)
    taken = acts(executor, worker, 12)
    assert taken[:6] == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert policy.planned[1] == 2
    assert taken[6:8] == [2.04, 2.05]
    assert executor.held_steps == 2  # plans 4 steps apart, of which 2 are left: half of the time it holds


def test_at_the_end_of_its_chunk_the_arm_holds_and_the_gripper_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Two(CountingPolicy):
        action_dim = 2

        def sample(self, obs: dict[str, Tensor], **_: Any) -> ChunkSample:
            return ChunkSample(torch.full((1, self.horizon, 2), 0.5))

    executor, worker = make(Two(3), lambda plan: 4 if plan else 0, n_exec=2, is_step=(True, False))
    taken: list[list[float]] = []
    with caplog.at_level(logging.WARNING):
        for t in range(7):
            taken.append(executor.act(seen(t)).action[0].tolist())
            worker.step()
    # Begun at step 2, there at step 6; but a chunk of three steps that is four late has nothing left.
    assert taken == [[0.5, 0.5]] * 3 + [[0.0, 0.5]] * 4
    assert executor.held_steps == 4
    assert "the chunk of 3 steps has ended and the next is not there: the arm holds" in caplog.text


def test_a_reset_drops_what_is_being_computed() -> None:
    executor, worker = make(CountingPolicy(4), lambda plan: (0, 1, 0)[plan], n_exec=2)
    acts(executor, worker, 3)
    executor.reset()
    assert executor.act(seen(50)).action.item() == pytest.approx(50)


def test_a_failing_policy_says_so_in_act() -> None:
    class Broken(CountingPolicy):
        def sample(self, obs: dict[str, Tensor], **_: Any) -> ChunkSample:
            raise RuntimeError("out of memory")

    executor = threaded(Broken(4), n_exec=2, control_hz=HZ)
    with pytest.raises(RuntimeError, match="out of memory"):
        executor.act(seen(0))
    executor.close()


def test_in_a_thread_an_injected_delay_is_measured_and_a_fast_policy_is_not_delayed() -> None:
    fast = threaded(CountingPolicy(8), n_exec=2, control_hz=1.0)  # patience 0.2 s
    assert [round(fast.act(seen(t)).action.item(), 2) for t in range(4)] == [0.0, 0.01, 2.0, 2.01]
    fast.close()
    slow = threaded(CountingPolicy(8), n_exec=2, control_hz=50.0, delay_s=0.05)
    slow.act(seen(0))
    assert 0.05 <= slow.latency_s < 1.0
    assert slow.expected_delay >= 3  # 50 ms less 4 ms of patience, at 20 ms a step
    slow.close()


@pytest.mark.parametrize(("takes_s", "patience_s", "held"), [(0.39, None, 0), (0.41, None, 1), (0.3, 0.2, 1)])
def test_a_chunk_is_waited_for_longer_where_the_arm_would_hold_without_it(
    takes_s: float, patience_s: float | None, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A period of 1 s: 0.2 s of patience, 0.4 s at the end of the chunk before."""
    computes: list[Callable[[], Answer]] = []

    def submit(compute: Callable[[], Answer]) -> Future[Answer]:
        computes.append(compute)
        return Future()

    def waiting(answers: list[Future[Answer]], timeout_s: float | None) -> Any:
        (answer,) = answers
        if timeout_s is None or timeout_s >= takes_s:
            answer.set_result(computes[-1]())
        return wait(answers, 0.0)

    monkeypatch.setattr(async_executor, "wait", waiting)
    settings: dict[str, Any] = {"n_exec": 1, "control_hz": 1.0, "patience_s": patience_s, "submit": submit}
    executor = threaded(CountingPolicy(1), **settings)
    taken = [round(executor.act(seen(t)).action.item(), 2) for t in (1, 2)]
    assert taken == [1.0, 2.0 if held == 0 else 0.0]  # the first of an episode is waited for
    assert executor.held_steps == held
    following = threaded(CountingPolicy(2), **settings)
    assert [round(following.act(seen(t)).action.item(), 2) for t in (1, 2)] == [1.0, 1.01]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="got control_hz 0"):
        threaded(CountingPolicy(4), n_exec=2, control_hz=0)
