"""What the real LeRobot records, we read: the same pixels, actions, padding and instructions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.data.lerobot.damage import check
from robot_rl.data.lerobot.pictures import PictureReader
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.upgrade import upgrade
from robot_rl.data.lerobot.windows import Windows
from robot_rl.data.loader import ChunkLoader

pytestmark = [
    pytest.mark.slow,  # LeRobot and what it imports take many seconds to load
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LENGTHS = (11, 8, 14)
DELTAS = [-2, 0, 1, 5]
PICTURES = [-1, 0]


@pytest.fixture(scope="module", params=["image", "video"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes with two cameras and two instructions, recorded by LeRobot itself."""
    datasets = pytest.importorskip("lerobot.datasets", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("lerobot") / request.param
    numbers = {"dtype": "float32", "shape": (7,), "names": [f"joint_{i}" for i in range(7)]}
    picture = {"dtype": request.param, "shape": (64, 96, 3), "names": ["height", "width", "channels"]}
    cameras = {f"observation.images.{name}": picture for name in ("front", "wrist")}
    features = {"observation.state": numbers, "action": numbers, **cameras}
    dataset: Any = datasets.LeRobotDataset.create(
        "robot-rl/test", fps=20, features=features, root=folder, use_videos=request.param == "video"
    )
    rng = np.random.default_rng(0)
    for number, steps in enumerate(LENGTHS):
        for _ in range(steps):
            frame = {name: rng.normal(size=7).astype(np.float32) for name in ("observation.state", "action")}
            frame |= {name: rng.integers(0, 256, (64, 96, 3), dtype=np.uint8) for name in cameras}
            dataset.add_frame({**frame, "task": f"put cube {number % 2} down"})
        dataset.save_episode()
    dataset.finalize()
    return folder


def theirs(folder: Path, fps: float, camera: str) -> Any:
    from lerobot.datasets import LeRobotDataset

    deltas = {"action": [d / fps for d in DELTAS], camera: [d / fps for d in PICTURES]}
    return LeRobotDataset("robot-rl/test", root=folder, delta_timestamps=deltas, video_backend="pyav")


def assert_same(folder: Path, dataset: Dataset, rows: list[int]) -> None:
    """Compares rows with those of LeRobot's own reader."""
    front = dataset.cameras[0]
    windows = Windows(dataset, {"action": DELTAS, front: PICTURES})
    batch = windows.read(np.asarray(rows), PictureReader(dataset).read)
    name = f"observation.images.{front.removesuffix('.rgb')}"
    reference = theirs(folder, dataset.index.fps, name)
    for place, row in enumerate(rows):
        item = reference[row]
        pictures = (item[name] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(batch[front][place], pictures)
        np.testing.assert_array_equal(batch["action"][place], item["action"].numpy())
        np.testing.assert_array_equal(batch["action_is_pad"][place], item["action_is_pad"].numpy())
        np.testing.assert_array_equal(batch["state"][place], item["observation.state"].numpy())
        assert dataset.index.tasks[int(batch["task_index"][place])] == item["task"]


def test_every_item_is_lerobots(recorded: Path) -> None:
    dataset = Dataset(recorded)
    assert check(recorded) == []
    assert dataset.lengths().tolist() == list(LENGTHS)
    rng = np.random.default_rng(1)
    assert_same(recorded, dataset, [0, 10, 11, 18, 32, *rng.integers(0, sum(LENGTHS), 12).tolist()])


def test_statistics_are_lerobots(recorded: Path) -> None:
    dataset = Dataset(recorded)
    for key in ("state", "action"):
        for stat in ("min", "max", "mean", "std"):
            found = dataset.facts().stats[key][stat]
            np.testing.assert_allclose(found, dataset.stats[key][stat], rtol=1e-4, atol=1e-5)


def test_batches_of_it_train(recorded: Path) -> None:
    draws = ChunkLoader(Dataset(recorded), horizon=4, batch=8, seed=0, resize=(32, 48))
    model = torch.nn.Linear(7, 28)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses: list[float] = []
    for _ in range(60):
        batch = draws.sample()
        error = (model(batch.obs["state"]).view(-1, 4, 7) - batch.actions)[batch.valid]
        loss = error.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])


def test_lerobot_opens_the_upgraded_real_dataset(g1_bottle: Path, tmp_path: Path) -> None:
    pytest.importorskip("lerobot.datasets", exc_type=ImportError)
    folder = upgrade(g1_bottle, tmp_path / "v3")
    assert check(folder) == []
    assert_same(folder, Dataset(folder), [0, 296, 297, 3000, 6451])
