"""A pool over a store that is written, and sealed, while it is drawn from."""

from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.pool import EpisodePool
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.writer import StoreWriter

META = EpisodesMeta(
    task="t", robot="r", control_hz=10.0, instruction="go", state_names=("x",), action_names=("a",)
)
FEATURES = {"state": Feature("float32", (1,)), "cam.rgb": Feature("uint8", (16, 16, 3))}


def observation(value: int) -> dict[str, Any]:
    """State v, and a picture all of whose pixels are 2 v: flat, so that compressing keeps it."""
    return {"state": np.array([value], np.float32), "cam.rgb": np.full((16, 16, 3), 2 * value, np.uint8)}


def append(writer: StoreWriter, lane: int, value: int, *, ends: bool = False) -> None:
    writer.append(
        lane=lane,
        obs=observation(value),
        action=np.array([value], np.float32),
        reward=float(value),
        truncated=ends,
        final_obs=observation(value + 1),
        stamp_ns=value * 100_000_000,
    )


def drawn(pool: EpisodePool) -> set[int]:
    """Samples until every step was met; its pictures must be those of its state."""
    batch = pool.sample(400, n_step=2, gamma_step=0.9, rng=np.random.default_rng(0))
    for obs in (batch.obs, batch.next_obs):
        shown = obs["cam.rgb"].float().mean(dim=(1, 2, 3)) / 2
        np.testing.assert_allclose(shown, obs["state"][:, 0], atol=0.6)
    return set(batch.obs["state"][:, 0].long().tolist())


def test_what_two_lanes_flush_is_drawn_and_stays_when_it_is_sealed(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", META, FEATURES, flush_s=3600.0) as writer:
        for step in range(4):
            append(writer, 0, 10 + step)
            append(writer, 1, 50 + step, ends=step == 3)
        writer.flush()
        pool = EpisodePool([StoreReader(tmp_path / "store")], capacity=60)
        assert drawn(pool) == {10, 11, 12, 50, 51, 52, 53}  # where 13 led to is not known yet
        append(writer, 0, 14)
        append(writer, 1, 90)
        append(writer, 1, 91)
        assert pool.refresh() == 7  # not flushed
        writer.flush()
        assert pool.refresh() == 9
        assert drawn(pool) == {10, 11, 12, 13, 50, 51, 52, 53, 90}
        append(writer, 0, 15, ends=True)
        assert writer.seal().episodes == 2
        assert pool.refresh() == 11
        assert drawn(pool) == {10, 11, 12, 13, 14, 15, 50, 51, 52, 53, 90}
