"""Chunks drawn where they were decided: with their noise, whole, and ended where the episode ended."""

from typing import Any

import numpy as np

from robot_rl.data.parts import AtDecisions
from robot_rl.data.replay import ReplayBuffer, StepBatch


def step(value: float, *, decides: bool, terminated: bool = False, truncated: bool = False) -> StepBatch:
    """One step of one env: it earns its value, and its chunk's noise is ten times as much."""
    row, flag = np.full((1, 1), value, np.float32), np.array
    return StepBatch(
        obs={"state": row},
        base_action=row,
        action=row,
        reward=np.array([value]),
        terminated=flag([terminated]),
        truncated=flag([truncated]),
        next_obs={"state": row + 1},
        next_base_action=row,
        latent=10 * row,
        decides=flag([decides]),
    )


def chunks(part: AtDecisions) -> dict[float, tuple[Any, ...]]:
    """Returns noise, reward, bootstrap, what it led to, and length of each chunk, by its first step."""
    batch = part.sample_chunks(200, horizon=2, gamma_step=0.5, rng=np.random.default_rng(0))
    assert batch.latent is not None
    rows = zip(
        batch.obs["state"][:, 0].tolist(),
        batch.latent[:, 0].tolist(),
        batch.reward.tolist(),
        batch.bootstrap.tolist(),
        batch.next_obs["state"][:, 0].tolist(),
        batch.valid.sum(dim=1).tolist(),
        strict=True,
    )
    return {row[0]: row[1:] for row in rows}


def buffer_of(capacity: int = 40) -> ReplayBuffer:
    return ReplayBuffer(capacity, 1, {"state": ((1,), np.float32)}, 1, latent_dim=1)


def test_chunks_by_hand() -> None:
    buffer = buffer_of()
    for value in (1, 2, 3):
        buffer.add(step(value, decides=value != 2, truncated=value == 3))
    for value in (11, 12, 13, 14):
        buffer.add(step(value, decides=value in (11, 13), terminated=value == 14))
    buffer.add(step(21, decides=True, terminated=True))
    buffer.add(step(31, decides=True))
    buffer.add(step(32, decides=False))
    buffer.add(step(33, decides=True))  # under way: what becomes of it is not known
    assert chunks(AtDecisions(buffer)) == {
        1.0: (10.0, 1 + 2 / 2, 0.25, 3.0, 2),
        3.0: (30.0, 3.0, 0.5, 4.0, 1),  # the time limit after one step: half of the value at the final 4
        11.0: (110.0, 11 + 12 / 2, 0.25, 13.0, 2),
        13.0: (130.0, 13 + 14 / 2, 0.0, 15.0, 2),
        21.0: (210.0, 21.0, 0.0, 22.0, 1),
        31.0: (310.0, 31 + 32 / 2, 0.25, 33.0, 2),
    }
    buffer.add(step(34, decides=False))
    assert chunks(AtDecisions(buffer))[33.0] == (330.0, 33 + 34 / 2, 0.25, 35.0, 2)


def test_the_ring_forgets_and_the_newest_chunk_stays_out() -> None:
    buffer = buffer_of(6)  # frames: 7
    for value in range(1, 12):
        buffer.add(step(value, decides=value % 2 == 1))
        complete = [v for v in range(1, value + 1, 2) if v >= value - 5 and v < value]
        assert decided(buffer, 2) == complete
    assert len(AtDecisions(buffer)) == len(decided(buffer, 1)) == 3


def decided(buffer: ReplayBuffer, n_exec: int) -> list[float]:
    """Returns the values of the steps at which chunks of `n_exec` steps began."""
    return sorted(buffer._obs["state"][buffer.decisions(n_exec), 0].tolist())
