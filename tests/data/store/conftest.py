"""Small stores with numbers that say where they belong."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.writer import StoreWriter

META = EpisodesMeta(
    task="Reach",
    robot="gantry",
    control_hz=100.0,
    instruction="reach the ball",
    state_names=("x", "y", "z"),
    action_names=("dx", "dy"),
)
NUMBERS = {"state": Feature("float32", (3,)), "force": Feature("float64", (2, 2))}
CAMERAS = {"front.rgb": Feature("uint8", (16, 24, 3)), "wrist.rgb": Feature("uint8", (16, 16, 3))}


class Bench:
    """Opens writers of one store, and appends steps that say which they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = META
        self.features: dict[str, Feature] = dict(NUMBERS)
        self.opened: list[StoreWriter] = []

    def with_cameras(self) -> None:
        """Adds two cameras to what the store holds."""
        self.features |= CAMERAS

    def writer(self, **options: Any) -> StoreWriter:
        """Opens a writer that flushes when it is asked to."""
        options = {"flush_s": 1e6, "picture": "png", **options}
        self.opened.append(StoreWriter(self.folder, self.meta, self.features, **options))
        return self.opened[-1]

    def obs(self, episode: int, step: int) -> dict[str, Any]:
        """Returns an observation that names its episode and step."""
        return {
            "state": np.array([episode, step, 0.5], np.float32),
            "force": np.full((2, 2), 1000.0 * episode + step),
        }

    def picture(self, camera: str, value: int) -> Any:
        """Returns a picture of one grey."""
        return np.full(CAMERAS[camera].shape, value, np.uint8)

    def append(self, writer: StoreWriter, episode: int, step: int, **words: Any) -> None:
        """Appends one step, 10 ms after the one before."""
        pictures = words.pop("pictures", {})
        words = {"reward": float(step), "stamp_ns": 10_000_000 * step, "policy_version": step // 2, **words}
        writer.append(
            obs=self.obs(episode, step) | pictures,
            action=np.array([step, -step], np.float32),
            base_action=np.array([step, 1], np.float32),
            **words,
        )

    def episode(self, writer: StoreWriter, episode: int, steps: int, **words: Any) -> None:
        """Appends an episode that the last step truncates, with success."""
        for step in range(steps - 1):
            self.append(writer, episode, step, **words)
        final = self.obs(episode, steps)
        self.append(writer, episode, steps - 1, truncated=True, success=True, final_obs=final, **words)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A folder to keep a store in."""
    bench = Bench(tmp_path / "store")
    yield bench
    for writer in bench.opened:
        writer.close()


@pytest.fixture
def flip(bench: Bench) -> Callable[[int, int], None]:
    """Turns one bit of a segment over."""

    def turn(segment: int, byte: int) -> None:
        path = bench.folder / f"journal/{segment:06d}.log"
        content = bytearray(path.read_bytes())
        content[byte] ^= 4
        path.write_bytes(content)

    return turn
