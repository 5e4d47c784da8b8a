"""Writing episodes beside LeRobot's fastest way (streaming encoder), same pictures, same encoder settings."""

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from robot_rl.data.episode import Episode
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.encode import VideoCodec
from robot_rl.data.lerobot.writer import DatasetWriter

pytestmark = pytest.mark.benchmark

EPISODES, STEPS, SIZE, DIM = 20, 200, 96, 7
CAMERAS = ("front.rgb", "wrist.rgb")
META = EpisodesMeta(
    task="bench",
    robot="panda",
    control_hz=20.0,
    instruction="pick up the cube",
    state_names=tuple(f"joint_{i}" for i in range(DIM)),
    action_names=tuple(f"joint_{i}" for i in range(DIM)),
)


def _pictures(rng: np.random.Generator) -> Any:
    """A textured scene under a moving square, with the noise of a camera: neither empty nor all noise."""
    scene = np.kron(rng.integers(40, 200, (SIZE // 8, SIZE // 8, 3)), np.ones((8, 8, 1)))
    pictures = np.repeat(scene[None], STEPS, axis=0)
    for step, picture in enumerate(pictures):
        at = int((SIZE - 16) * (0.5 + 0.5 * np.sin(step / 15)))
        picture[at : at + 16, 30:46] = (220, 60, 40)
    return (pictures + rng.normal(0, 2, pictures.shape)).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    rng = np.random.default_rng(0)
    last = np.arange(STEPS) == STEPS - 1
    cameras = [{camera: _pictures(rng) for camera in CAMERAS} for _ in range(4)]

    def one(number: int) -> Episode:
        obs = {"state": rng.normal(size=(STEPS, DIM)).astype(np.float32), **cameras[number % 4]}
        action = rng.normal(size=(STEPS, DIM)).astype(np.float32)
        return Episode(
            meta=dataclasses.replace(META, instruction=f"task {number % 2}"),
            obs=obs,
            final_obs={key: values[-1] for key, values in obs.items()},
            action=action,
            base_action=action,
            reward=last.astype(np.float32),
            terminated=last,
            truncated=~last & last,
            success=last,
            source=np.zeros(STEPS, np.uint8),
            policy_version=np.zeros(STEPS, np.int64),
            stamp_ns=np.arange(STEPS) * 50_000_000,
        )

    return [one(number) for number in range(EPISODES)]


def ours(
    folder: Path, episodes: list[Episode], images: Literal["video", "png"], codec: Any
) -> dict[str, float]:
    """Returns frames/s of wall time and of CPU time, and the seconds of an episode."""
    spent: list[float] = []
    wall, cpu = time.perf_counter(), time.process_time()
    with DatasetWriter(folder, META, episodes[0].features(), images=images, codec=codec) as writer:
        for episode in episodes:
            before = time.perf_counter()
            writer.write(episode)
            spent.append(time.perf_counter() - before)
    return _rates(wall, cpu, len(episodes), spent)


def lerobots(folder: Path, episodes: list[Episode], codec: VideoCodec | None) -> dict[str, float]:
    """The same through LeRobotDataset: add_frame and save_episode, streaming encoder or PNG."""
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets import LeRobotDataset

    picture = {"shape": (SIZE, SIZE, 3), "names": ["height", "width", "channels"]}
    vector = {"dtype": "float32", "shape": (DIM,), "names": list(META.state_names)}
    features: dict[str, Any] = {"observation.state": vector, "action": vector}
    for camera in CAMERAS:
        dtype = "video" if codec else "image"
        features[f"observation.images.{camera.removesuffix('.rgb')}"] = {"dtype": dtype, **picture}
    options: dict[str, Any] = {}
    if codec:
        said = codec.options()
        preset: Any = int(said["preset"]) if codec.name == "av1" else said["preset"]
        name = "libsvtav1" if codec.name == "av1" else "h264"
        options["rgb_encoder"] = RGBEncoderConfig(vcodec=name, crf=int(said["crf"]), preset=preset)
        options |= {"streaming_encoding": True, "encoder_queue_maxsize": STEPS}
    spent: list[float] = []
    wall, cpu = time.perf_counter(), time.process_time()
    dataset = LeRobotDataset.create(
        "bench/peer", 20, features, root=folder, robot_type="panda", use_videos=codec is not None, **options
    )
    for episode in episodes:
        for step in range(len(episode)):
            frame: dict[str, Any] = {"task": episode.meta.instruction, "action": episode.action[step]}
            frame["observation.state"] = episode.obs["state"][step]
            for camera in CAMERAS:
                frame[f"observation.images.{camera.removesuffix('.rgb')}"] = episode.obs[camera][step]
            dataset.add_frame(frame)
        before = time.perf_counter()
        dataset.save_episode()
        spent.append(time.perf_counter() - before)
    dataset.finalize()
    return _rates(wall, cpu, len(episodes), spent)


def _rates(wall: float, cpu: float, episodes: int, spent: list[float]) -> dict[str, float]:
    steps = episodes * STEPS
    return {
        "frames_per_s": steps / (time.perf_counter() - wall),
        "frames_per_cpu_s": steps / (time.process_time() - cpu),
        "median_episode_s": float(np.median(spent)),
        "worst_episode_s": max(spent),
    }


@pytest.mark.filterwarnings("ignore")  # of lerobot and datasets
@pytest.mark.parametrize(
    ("images", "codec", "at_least"),
    [
        ("video", VideoCodec(name="h264"), 3.0),
        ("video", VideoCodec(name="av1"), 1.5),
        ("png", None, 2.0),
    ],
)
def test_writing_costs_less_than_lerobots_streaming(
    tmp_path: Path,
    episodes: list[Episode],
    record_property: Any,
    images: Literal["video", "png"],
    codec: VideoCodec | None,
    at_least: float,
) -> None:
    pytest.importorskip("lerobot", reason="the peer: extra `lerobot`")
    lerobots(tmp_path / "warm", episodes[:1], codec)
    mine, peer = (
        ours(tmp_path / "ours", episodes, images, codec or "h264"),
        lerobots(tmp_path / "peer", episodes, codec),
    )
    size_mb = {
        name: sum(p.stat().st_size for p in (tmp_path / name).rglob("*") if p.is_file()) / 1e6
        for name in ("ours", "peer")
    }
    record_property("rates", {"ours": mine, "peer": peer, "size_mb": size_mb})
    ratio = mine["frames_per_cpu_s"] / peer["frames_per_cpu_s"]
    assert ratio >= at_least, (mine, peer, size_mb)


def test_the_thousandth_episode_costs_what_the_first_did(tmp_path: Path, episodes: list[Episode]) -> None:
    short = dataclasses.replace(
        episodes[0], obs={"state": episodes[0].obs["state"]}, final_obs={}, picture_stamp_ns={}
    )
    spent: list[float] = []
    with DatasetWriter(tmp_path, META, short.features()) as writer:
        for _ in range(1000):
            before = time.process_time()
            writer.write(short)
            spent.append(time.process_time() - before)
    first, last = np.median(spent[10:110]), np.median(spent[-100:])
    before = time.process_time()
    with DatasetWriter(tmp_path, META, short.features()) as writer:
        opened_s = time.process_time() - before
        assert len(writer) == 1000
    assert last < 1.5 * first, (first, last)
    assert opened_s < 20 * first, (opened_s, first)
