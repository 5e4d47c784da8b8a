"""A made-up dataset: two joints that are told where to go by a coloured square in the picture."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_rl.data.episode import Episode
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.writer import DatasetWriter

STEPS = 20
NAMES = ("left_shoulder", "right_shoulder")
META = EpisodesMeta(
    task="follow",
    robot="arm",
    control_hz=10.0,
    instruction="follow the square",
    state_names=NAMES,
    action_names=NAMES,
)


def episode_of(seed: int, meta: EpisodesMeta = META, steps: int = STEPS) -> Episode:
    """The state runs towards a goal; the action is the next state; the picture shows the goal."""
    random = np.random.default_rng(seed)
    goal = random.uniform(-1, 1, 2)
    state = np.zeros((steps + 1, 2), np.float32)
    for step in range(steps):
        state[step + 1] = state[step] + 0.2 * (goal - state[step])
    pictures = np.zeros((steps, 24, 32, 3), np.uint8)
    row, column = (np.array([16, 24]) * (goal + 1) / 2).astype(int)
    pictures[:, row : row + 8, column : column + 8] = (255, 128, 0)
    last = np.arange(steps) == steps - 1
    return Episode(
        meta=meta,
        obs={"state": state[:-1], "front.rgb": pictures},
        final_obs={"state": state[-1], "front.rgb": pictures[-1]},
        action=state[1:],
        base_action=state[1:],
        reward=np.zeros(steps, np.float32),
        terminated=last,
        truncated=np.zeros(steps, bool),
        success=last,
        source=np.zeros(steps, np.uint8),
        policy_version=np.zeros(steps, np.int64),
        stamp_ns=np.arange(steps) * 100_000_000,
    )


def write_dataset(folder: Path, seeds: list[int], meta: EpisodesMeta = META) -> Path:
    episodes = [episode_of(seed, meta) for seed in seeds]
    with DatasetWriter(folder, meta, episodes[0].features(), images="png") as writer:
        for episode in episodes:
            writer.write(episode)
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven episodes."""
    return write_dataset(tmp_path_factory.mktemp("data") / "follow", list(range(7)))


@pytest.fixture(scope="session")
def make_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a dataset of the episodes with these seeds, of joints with these names."""

    def make(seeds: list[int], names: tuple[str, str] = NAMES) -> Path:
        meta = replace(META, state_names=names, action_names=names)
        return write_dataset(tmp_path_factory.mktemp("data") / "follow", seeds, meta)

    return make
