"""Made-up episodes whose numbers and pictures say which step they belong to."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from robot_rl.data.episode import Episode
from robot_rl.data.episodes import EpisodesMeta

META = EpisodesMeta(
    task="pick_cube",
    robot="panda",
    control_hz=20.0,
    instruction="pick up the cube",
    state_names=("joint_1", "joint_2", "joint_3"),
    action_names=("x", "gripper"),
)


def _picture(step: int, size: tuple[int, int], seed: int) -> Any:
    """A smooth picture whose brightness says the step: 5 of 255 more for each, from 40 to 215."""
    rows, columns = np.mgrid[0 : size[0], 0 : size[1]]
    wave = 15 * np.sin(rows / 9 + seed) + 15 * np.cos(columns / 7 - seed)
    level = 40 + 5 * (step % 36)
    return np.stack([level + wave, level + wave / 2, np.full(size, level)], axis=-1).astype(np.uint8)


def _made(
    steps: int = 6,
    *,
    seed: int = 0,
    instruction: str = META.instruction,
    cameras: Sequence[str] = ("front.rgb", "wrist.rgb"),
    size: tuple[int, int] = (32, 48),
    depth: bool = False,
    success: bool = True,
) -> Episode:
    rng = np.random.default_rng(seed)
    last = np.arange(steps) == steps - 1
    obs: dict[str, Any] = {"state": rng.normal(size=(steps + 1, 3)).astype(np.float32)}
    for number, camera in enumerate(cameras):
        obs[camera] = np.stack([_picture(t, size, seed + 10 * number) for t in range(steps + 1)])
    if depth:
        obs["front.depth"] = rng.random((steps + 1, *size), dtype=np.float32)
    stamps = 10**15 + np.cumsum(rng.integers(45, 60, steps)) * 1_000_000
    return Episode(
        meta=dataclasses.replace(META, instruction=instruction),
        obs={key: values[:-1] for key, values in obs.items()},
        final_obs={key: values[-1] for key, values in obs.items()},
        action=rng.normal(size=(steps, 2)).astype(np.float32),
        base_action=rng.normal(size=(steps, 2)).astype(np.float32),
        reward=last.astype(np.float32),
        terminated=last & success,
        truncated=last & (not success),
        success=last & success,
        source=rng.integers(0, 4, steps).astype(np.uint8),
        policy_version=rng.integers(0, 100, steps),
        stamp_ns=stamps,
        picture_stamp_ns={camera: stamps - 7_000_000 for camera in cameras},
        device="arm_2",
    )


@pytest.fixture(scope="session")
def made() -> Callable[..., Episode]:
    """Makes episodes: steps, seed, instruction, cameras, size, depth, success."""
    return _made


@pytest.fixture(scope="session")
def lerobot_datasets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the package `lerobot.datasets` (10 s to import), offline and with a cache of its own."""
    cache = str(tmp_path_factory.mktemp("hf"))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for name in ("HF_HOME", "HF_DATASETS_CACHE", "HF_LEROBOT_HOME"):
            patch.setenv(name, cache)
        patch.setenv("HF_HUB_OFFLINE", "1")
        warnings.simplefilter("ignore")  # of whatever the package imports
        yield pytest.importorskip("lerobot.datasets", reason="wants the extra `lerobot` (Python 3.12)")


make_episode = _made
"""`made`, for tests that lie elsewhere."""
