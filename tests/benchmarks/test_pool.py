"""Pools at their full size: what they hold in memory, and how fast they draw.

Each test logs what it measured: `pytest -m benchmark tests/benchmarks/test_pool.py --log-cli-level=info`.
"""

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.data.episode import Episode, Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.pool import EpisodePool, PoolBudget, Prioritised, Stratified, Uniform

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.benchmark

GIB = 1 << 30
STATE, ACTION, STEPS = 32, 8, 200
META = EpisodesMeta(
    task="t",
    robot="r",
    control_hz=50.0,
    instruction="i",
    state_names=tuple(f"s{i}" for i in range(STATE)),
    action_names=tuple(f"a{i}" for i in range(ACTION)),
)


class Pictures:
    """Pictures that cost as much as a copy: each tells which one it is."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count
        self._picture = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: Any) -> Any:
        which = self._first + np.asarray(step)
        pictures = np.repeat(self._picture[None], which.size, axis=0).reshape(*which.shape, 96, 96, 3)
        pictures[..., 0, 0, :] = np.stack([which % 256, which // 256 % 256, which // 65536], axis=-1)
        return pictures


class Synthetic:
    """Episodes of 200 steps that take no memory."""

    def __init__(self, episodes: int, cameras: tuple[str, ...] = ()) -> None:
        self._episodes, self._cameras = episodes, cameras
        self.meta = META
        self.features = {"state": Feature("float32", (STATE,))}
        self.features |= {key: Feature("uint8", (96, 96, 3)) for key in cameras}
        rng = np.random.default_rng(0)
        self._state = rng.standard_normal((STEPS + 1, STATE), np.float32)
        self._action = rng.standard_normal((STEPS, ACTION), np.float32)

    def __len__(self) -> int:
        return self._episodes

    def lengths(self) -> Any:
        return np.full(self._episodes, STEPS)

    def refresh(self) -> None:
        pass

    def read(self, episode: int) -> Episode:
        last = np.arange(STEPS) == STEPS - 1
        state = self._state.copy()
        state[:, 0] = (STEPS + 1) * episode + np.arange(STEPS + 1)
        shots = {key: Pictures((STEPS + 1) * episode, STEPS + 1) for key in self._cameras}
        return Episode(
            meta=META,
            obs={"state": state[:-1], **shots},
            final_obs={"state": state[-1], **{key: shot[STEPS] for key, shot in shots.items()}},
            action=self._action,
            base_action=self._action,
            reward=last.astype(np.float32),
            terminated=last & (episode % 2 == 0),
            truncated=last & (episode % 2 == 1),
            success=last & (episode % 2 == 0),
            source=np.full(STEPS, episode % 4, np.uint8),
            policy_version=np.full(STEPS, episode),
            stamp_ns=np.arange(STEPS) * 20_000_000,
        )


def resident() -> int:
    """Returns the bytes of memory that this process occupies now, as the system counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def rate(draw: Any, rows: int, *, batches: int = 300) -> float:
    """Returns rows per second of CPU time, the best of five."""
    best = 0.0
    for _ in range(5):
        began = time.process_time()
        for _ in range(batches):
            draw()
        best = max(best, batches * rows / (time.process_time() - began))
    return best


@pytest.mark.parametrize(
    "draw", [Uniform(), Prioritised(), Stratified(by="source")], ids=lambda d: type(d).__name__
)
def test_ten_million_transitions_in_8_gib(draw: Any) -> None:
    """Batch 256, chunk 8, state 32, action 8: 300,000 transitions a second on one core are asked for."""
    pool = EpisodePool([Synthetic(50_000)], capacity=50_000 * (STEPS + 1), draw=draw)
    assert len(pool) == 10_000_000
    rng = np.random.default_rng(0)
    chunks = rate(lambda: pool.sample_chunks(256, horizon=8, gamma_step=0.99, rng=rng), 256)
    steps = rate(lambda: pool.sample(256, n_step=3, gamma_step=0.99, rng=rng), 256)
    booked, got = pool.metrics()["ram_bytes"], resident()
    logger.info(
        f"10 M transitions, {type(draw).__name__}: {booked / GIB:.2f} GiB booked, {got / GIB:.2f} GiB "
        f"resident (whole process); chunks of 8: {chunks:,.0f}/s, 3 steps: {steps:,.0f}/s"
    )
    assert booked < 4 * GIB
    assert got < 8 * GIB
    assert chunks > 300_000
    assert steps > 300_000


def test_two_hundred_thousand_frames_of_two_cameras_in_8_gib() -> None:
    """2 x 96 x 96 RGB; decoded they would take 10.3 GiB, of which 5 GiB of memory hold 48 %."""
    cameras = ("front.rgb", "wrist.rgb")
    budget = PoolBudget(ram_bytes=5 * GIB)
    pool = EpisodePool([Synthetic(1000, cameras)], capacity=1000 * (STEPS + 1), budget=budget)
    assert len(pool) == 200_000
    rng = np.random.default_rng(0)
    began, rows = time.process_time(), 0
    while rows < 120_000:
        batch = pool.sample_chunks(256, horizon=8, gamma_step=0.99, rng=rng)
        rows += 256
        if rows % 25_600 == 0:
            for obs in (batch.obs, batch.next_obs):
                shown = np.asarray(obs["wrist.rgb"][:, 0, 0]).astype(np.int64) @ [1, 256, 65536]
                assert shown.tolist() == obs["state"][:, 0].long().tolist()
    seconds = time.process_time() - began
    metrics, got = pool.metrics(), resident()
    logger.info(
        f"200k x 2 frames: {metrics['ram_bytes'] / GIB:.2f} GiB booked, {got / GIB:.2f} GiB resident "
        f"(whole process), hit rate from the first batch on {metrics['hit_rate']:.1%}, "
        f"{metrics['evictions']:,.0f} evictions; {rows / seconds:,.0f} rows/s of 4 pictures"
    )
    assert metrics["ram_bytes"] <= 5 * GIB
    assert got < 8 * GIB
    assert metrics["evictions"] > 0  # the cache is full
    assert metrics["hit_rate"] > 0.25
