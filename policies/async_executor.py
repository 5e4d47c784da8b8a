"""Execution of chunks in real time: one arm follows its chunk while the next is computed elsewhere.

`ChunkExecutor` knows how many control steps planning takes and waits for it. Here the policy plans
in its own thread, and the time that it takes is measured:

    step             0  1  2  3  4  5  6  7  8  9     n_exec 4, planning takes up to two steps
    first chunk      0  1  2  3  4  5                 the first of an episode is waited for
    second chunk                (0  1) 2  3  4        begun at step 4, there before step 6
    third chunk                             (0) 1     begun at step 8, there before step 9

Execution of a chunk begins when it has been computed, and skips the actions that are late by then. A policy
with `sample_after` (real-time chunking) gets the number of steps of the old chunk that will be executed
first, a high quantile of the measured delays; that many are kept even if planning ends sooner. If planning
takes longer, the arm follows the old chunk, and holds at its end.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.core.clock import Clock, MonotonicClock
from robot_rl.core.policy import ChunkSample, Mode, Policy
from robot_rl.policies.executor import Act, Array, ChunkExecutor, Question

logger = logging.getLogger(__name__)

Answer: TypeAlias = "tuple[ChunkSample, float]"
"""A chunk, and how many seconds it took."""
Submit: TypeAlias = "Callable[[Callable[[], Answer]], Future[Answer]]"
"""Starts a computation in another thread, as `ThreadPoolExecutor.submit` does."""

_ROW = np.zeros(1, np.int64)
_WINDOW = 50
"""Chunks over which the quantile of the latency runs."""
_QUANTILE = 0.9
_AT_END = 0.4
"""Share of a period for which a due chunk is waited for when the one before has ended: an arm that holds for
a whole step loses more. With half a period the step would be a late one."""


@dataclass
class _Pending:
    """A chunk that is being computed."""

    answer: Future[Answer]
    ago: int = 0
    """Control steps since it was begun."""


class AsyncExecutor(ChunkExecutor):
    """A `ChunkExecutor` for one env whose `act` does not wait for the policy."""

    def __init__(
        self,
        policy: Policy,
        *,
        n_exec: int,
        control_hz: float,
        patience_s: float | None = None,
        delay_s: float = 0.0,
        is_step: Sequence[bool] | None = None,
        ensemble: float | None = None,
        mode: Mode = "ode",
        seed: int = 0,
        device: torch.device | str = "cpu",
        submit: Submit | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Starts with an empty queue.

        Args:
            policy: a policy with `sample_after` continues the old chunk.
            n_exec: control steps between the beginnings of two plans, at most.
            control_hz: how often `act` is called.
            patience_s: how long `act` waits for a chunk that is due now; if None, a fifth of a period, and
                twice as long where the chunk before has ended. A policy that is faster is followed without
                delay, as in simulation.
            delay_s: planning takes at least so long; for experiments.
            is_step: (A,) which parts of an action move the arm by so much: they are 0 when it holds,
                while the others (a gripper) keep their value. All of them if None.
            ensemble, mode, seed, device: as in `ChunkExecutor`.
            submit: starts the computations; None makes a thread for this executor.
            clock: monotonic.
        """
        super().__init__(policy, 1, n_exec=n_exec, ensemble=ensemble, mode=mode, seed=seed, device=device)
        if not control_hz > 0 or delay_s < 0 or not (patience_s is None or patience_s >= 0):
            raise ValueError(
                f"executor: got control_hz {control_hz}, delay_s {delay_s}, patience_s {patience_s}; "
                "allowed: above 0, 0 or more, and 0 or more or None"
            )
        self._period_s = 1.0 / control_hz
        self.patience_s = 0.2 * self._period_s if patience_s is None else patience_s
        self._at_end_s = _AT_END * self._period_s if patience_s is None else patience_s
        self._delay_s = delay_s
        self._is_step = np.ones(policy.action_dim, bool) if is_step is None else np.asarray(is_step, bool)
        # The worker draws while `refine` draws here: each has its own generator.
        self._sampling = torch.Generator().manual_seed(seed)
        self._clock = clock or MonotonicClock()
        self._pool: ThreadPoolExecutor | None = None
        if submit is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="policy")
            submit = self._pool.submit
        self._submit: Submit = submit
        self._pending: _Pending | None = None
        self._is_fresh = True
        self._last = np.zeros((1, policy.action_dim), np.float32)
        self._latency_s: deque[float] = deque(maxlen=_WINDOW)
        self.late_chunks = 0
        """How many came later than they were expected."""
        self.held_steps = 0
        """Control steps in which the arm held because its chunk had ended."""

    @property
    def latency_s(self) -> float:
        """How long planning takes, a running quantile; 0 before the first chunk."""
        return float(np.quantile(self._latency_s, _QUANTILE)) if self._latency_s else 0.0

    @property
    def expected_delay(self) -> int:
        """How many control steps planning is expected to take."""
        steps = math.ceil((self.latency_s - self.patience_s) / self._period_s)
        return min(max(steps, 0), self.policy.horizon - 1)

    def expect(self, latency_s: float) -> None:
        """Notes how long planning will take, before any plan of this executor was measured."""
        self._latency_s.append(latency_s)

    def reset(self, mask: Array | None = None, seeds: Array | None = None) -> None:
        """As in `ChunkExecutor`; a chunk that is being computed belongs to the old episode and is dropped."""
        super().reset(mask, seeds)
        if len(self._rows(mask)):
            self._pending, self._is_fresh = None, True
            self._last[:] = 0.0

    def act(self, obs: Mapping[str, Array]) -> Act:
        """Returns the next action; waits only for the first chunk of an episode."""
        self._check_rows(obs)
        with torch.inference_mode():
            shown = self._read(self._tensors(obs))
            self._collect()
            if self._pending is None and self._left[0] <= 0:
                self.delay = 0 if self._is_fresh else self.expected_delay
                question = self._question(shown, _ROW)
                began_s = self._clock.now_s()
                self._pending = _Pending(self._submit(lambda: self._compute(question, began_s)))
                self._collect()
            if self._pending is not None:
                self._pending.ago += 1
            at = int(self._next[0])
            self._next += 1
            self._left -= 1
            if at >= self.policy.horizon:
                return self._hold(is_first=at == self.policy.horizon)
            base_action = self._plan[:, at].copy()
            action = self._refined(shown, base_action)
            self._last = action.copy()
            return Act(action, base_action)

    def close(self) -> None:
        """Ends the worker after its present computation."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _compute(self, question: Question, began_s: float) -> Answer:
        """Runs in the worker."""
        with torch.inference_mode():
            sample = self._answer(question)
        rest_s = self._delay_s - (self._clock.now_s() - began_s)
        if rest_s > 0:
            time.sleep(rest_s)
        return sample, self._clock.now_s() - began_s

    def _collect(self) -> None:
        """Takes the chunk into the queue if it is computed now, or within `patience_s`."""
        pending = self._pending
        if pending is None:
            return
        is_due = pending.ago >= self.delay
        patience_s = self._at_end_s if self._next[0] >= self.policy.horizon else self.patience_s
        timeout_s = None if self._is_fresh else patience_s if is_due else 0.0
        if not wait([pending.answer], timeout_s).done:
            return
        sample, latency_s = pending.answer.result()
        self._latency_s.append(latency_s)
        self.late_chunks += pending.ago > self.delay
        self._pending, self._is_fresh = None, False
        self._take(_ROW, sample, pending.ago)

    def _span(self, sample: ChunkSample) -> int | NDArray[Any]:
        """As in `ChunkExecutor`, but planning begins so early that the old chunk lasts until the new one."""
        return np.minimum(super()._span(sample), max(1, self.policy.horizon - self.expected_delay))

    def _hold(self, *, is_first: bool) -> Act:
        self.held_steps += 1
        if is_first:
            logger.warning(
                "executor: the chunk of %d steps has ended and the next is not there: the arm holds. "
                "Planning takes %.0f ms, a step %.0f ms; "
                "use fewer denoising steps, longer chunks or a faster device.",
                self.policy.horizon,
                1e3 * self.latency_s,
                1e3 * self._period_s,
            )
        held = np.where(self._is_step, 0.0, self._last).astype(np.float32)
        return Act(held, held.copy())
