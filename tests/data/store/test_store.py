"""What was appended is what is read: numbers, pictures with their stamps, lanes, ends."""

import dataclasses
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import SOURCES, EpisodeSource
from robot_rl.data.store import flusher
from robot_rl.data.store.lock import WriterLock
from robot_rl.data.store.reader import StoreReader, open_source
from robot_rl.data.store.writer import StoreWriter

ROOT = Path(__file__).resolve().parents[3]


def test_every_field_comes_back(bench: Any) -> None:
    with bench.writer(device="arm-1") as writer:
        bench.episode(writer, 0, 5, source="human")
        writer.begin_episode(instruction="now the cube", device="arm-2")
        bench.append(writer, 1, 0, source="sim")
    reader: EpisodeSource = open_source(bench.folder)
    assert reader.lengths().tolist() == [5, 1]
    first, second = reader.read(0), reader.read(1)
    assert first.obs["state"].tolist() == [[0, step, 0.5] for step in range(5)]
    assert first.obs["state"].dtype == np.float32
    assert first.obs["force"][:, 1, 1].tolist() == [0, 1, 2, 3, 4]
    assert first.obs["force"].dtype == np.float64
    assert first.action.tolist() == [[step, -step] for step in range(5)]
    assert first.base_action[:, 1].tolist() == [1] * 5
    assert first.reward.tolist() == [0, 1, 2, 3, 4]
    assert first.truncated.tolist() == [False] * 4 + [True]
    assert not first.terminated.any()
    assert first.success.tolist() == [False] * 4 + [True]
    assert {SOURCES[i] for i in first.source} == {"human"}
    assert first.policy_version.tolist() == [0, 0, 1, 1, 2]
    assert first.stamp_ns.tolist() == [0, 10_000_000, 20_000_000, 30_000_000, 40_000_000]
    assert first.final_obs["state"].tolist() == [0, 5, 0.5]
    assert (first.device, first.meta.instruction, first.is_complete) == ("arm-1", "reach the ball", True)
    assert (second.device, second.meta.instruction) == ("arm-2", "now the cube")
    assert not second.is_complete
    assert second.final_obs == {}


def test_a_slow_camera_never_shifts_pictures_against_states(bench: Any) -> None:
    """Control at 100 Hz, one camera every third step, one every fifth: each step names what it saw."""
    bench.with_cameras()
    with bench.writer() as writer:
        for step in range(12):
            pictures: dict[str, Any] = {}
            if step % 3 == 0:
                pictures["front.rgb"] = bench.picture("front.rgb", 10 + step)
            if step % 5 == 0:
                pictures["wrist.rgb"] = bench.picture("wrist.rgb", 100 + step)
            stamps = {"front.rgb": 10_000_000 * step - 4_000_000}  # taken 4 ms before the step
            bench.append(writer, 0, step, pictures=pictures, picture_stamp_ns=stamps)
        assert (writer.stats.pictures, writer.stats.repeated_pictures) == (4 + 3, 24 - 7)
    episode = StoreReader(bench.folder).read(0)
    front, wrist = episode.obs["front.rgb"], episode.obs["wrist.rgb"]
    assert len(front) == 12
    assert front[np.arange(12)][:, 0, 0, 0].tolist() == [10 + step // 3 * 3 for step in range(12)]
    assert [int(wrist[step][5, 5, 1]) for step in range(12)] == [100 + step // 5 * 5 for step in range(12)]
    assert front[2:4].shape == (2, 16, 24, 3)
    assert front[-1][0, 0, 0] == 19
    assert episode.picture_stamp_ns["front.rgb"].tolist() == [
        10_000_000 * (step // 3 * 3) - 4_000_000 for step in range(12)
    ]
    assert episode.picture_stamp_ns["wrist.rgb"].tolist() == [10_000_000 * (s // 5 * 5) for s in range(12)]


def test_a_picture_that_repeats_its_stamp_is_kept_once(bench: Any) -> None:
    bench.with_cameras()
    with bench.writer() as writer:
        for step in range(6):
            pictures = {key: bench.picture(key, step // 3) for key in ("front.rgb", "wrist.rgb")}
            stamps = {key: 7 + step // 3 for key in pictures}
            bench.append(writer, 0, step, pictures=pictures, picture_stamp_ns=stamps)
        assert writer.stats.pictures == 4
    assert StoreReader(bench.folder).read(0).obs["front.rgb"][np.arange(6)][:, 0, 0, 0].tolist() == [
        0, 0, 0, 1, 1, 1,
    ]  # fmt: skip


def test_the_final_picture_is_not_the_last_steps(bench: Any) -> None:
    bench.with_cameras()
    both = {key: bench.picture(key, 1) for key in ("front.rgb", "wrist.rgb")}
    with bench.writer() as writer:
        final = bench.obs(0, 1) | {key: picture + 1 for key, picture in both.items()}
        bench.append(writer, 0, 0, pictures=both, truncated=True, final_obs=final)
        bench.append(writer, 1, 0, pictures=both)
        writer.end_episode(final_obs=bench.obs(1, 1) | {"front.rgb": both["front.rgb"] + 2})
    reader = StoreReader(bench.folder)
    for episode, front, wrist in ((reader.read(0), 2, 2), (reader.read(1), 3, 1)):
        assert episode.obs["front.rgb"][0][0, 0, 0] == 1
        assert episode.final_obs["front.rgb"][0, 0, 0] == front
        assert episode.final_obs["wrist.rgb"][0, 0, 0] == wrist  # no new one: the last that there was
    assert [reader.read(i).is_complete for i in range(2)] == [True, False]


def test_jpeg_is_near_and_png_is_equal(bench: Any) -> None:
    bench.with_cameras()
    ramp = np.linspace(0, 255, 24)[None, :, None] + np.zeros((16, 24, 3))
    pictures = {"front.rgb": ramp.astype(np.uint8), "wrist.rgb": bench.picture("wrist.rgb", 3)}
    for picture, largest in (("png", 0), ("jpeg", 6)):
        with bench.writer(picture=picture) as writer:
            bench.append(writer, 0, 0, pictures=pictures)
        got = StoreReader(bench.folder).read(-1).obs["front.rgb"][0].astype(int)
        assert np.abs(got - pictures["front.rgb"]).max() <= largest


def test_pictures_beyond_the_queue_are_dropped_and_counted(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held up at the first picture: the second still fits, the third does not."""
    bench.with_cameras()
    slow = threading.Event()
    encode = flusher.encode_picture
    monkeypatch.setattr(flusher, "encode_picture", lambda *words: slow.wait(10) and encode(*words))
    size = 16 * 24 * 3
    with bench.writer(queue_bytes=size + 16 * 16 * 3 + size) as writer:
        for step in range(3):
            pictures = {"front.rgb": bench.picture("front.rgb", step + 1)}
            pictures |= {"wrist.rgb": bench.picture("wrist.rgb", 9)} if step == 0 else {}
            bench.append(writer, 0, step, pictures=pictures)
        assert (writer.stats.steps, writer.stats.pictures, writer.stats.dropped_pictures) == (3, 3, 1)
        slow.set()
    episode = StoreReader(bench.folder).read(0)
    assert episode.obs["front.rgb"][np.arange(3)][:, 0, 0, 0].tolist() == [1, 2, 2]
    assert episode.picture_stamp_ns["front.rgb"].tolist() == [0, 10_000_000, 10_000_000]


def test_the_first_picture_of_an_episode_is_not_dropped(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is before it that its steps could show, and what comes later is another's."""
    bench.with_cameras()
    slow = threading.Event()
    encode = flusher.encode_picture
    monkeypatch.setattr(flusher, "encode_picture", lambda *words: slow.wait(10) and encode(*words))
    with bench.writer(queue_bytes=1) as writer:
        for episode in range(2):
            for step in range(2):
                grey = 10 * episode + step + 1
                pictures = {key: bench.picture(key, grey) for key in ("front.rgb", "wrist.rgb")}
                bench.append(writer, episode, step, pictures=pictures, truncated=step == 1)
        assert (writer.stats.pictures, writer.stats.dropped_pictures) == (4, 4)
        slow.set()
    for episode in range(2):
        front = StoreReader(bench.folder).read(episode).obs["front.rgb"]
        assert front[np.arange(2)][:, 0, 0, 0].tolist() == [10 * episode + 1] * 2


def test_a_simulator_waits_instead(bench: Any) -> None:
    bench.with_cameras()
    with bench.writer(queue_bytes=3000, when_behind="wait", queue_steps=4) as writer:
        for step in range(40):
            pictures = {key: bench.picture(key, step) for key in ("front.rgb", "wrist.rgb")}
            bench.append(writer, 0, step, pictures=pictures)
        assert writer.stats.dropped_pictures == 0
        assert writer.stats.waits > 0
        assert writer.stats.waited_s > 0
    episode = StoreReader(bench.folder).read(0)
    assert episode.obs["front.rgb"][np.arange(40)][:, 0, 0, 0].tolist() == list(range(40))


def test_lanes_write_side_by_side(bench: Any) -> None:
    """Three envs in one call; the second ends after two steps and begins anew."""
    with bench.writer() as writer:
        for step in range(5):
            local = np.array([step, step % 2, step])
            obs = {
                "state": np.stack([[lane, local[lane], 0] for lane in range(3)]).astype(np.float32),
                "force": np.zeros((3, 2, 2)),
            }
            ends = np.array([False, step % 2 == 1, False])
            final = {"state": obs["state"] + 100, "force": obs["force"]}
            writer.append_lanes(
                np.arange(3),
                obs=obs,
                action=np.zeros((3, 2)),
                terminated=ends,
                stamp_ns=step,
                final_obs=final,
            )
        writer.flush()
        reader = StoreReader(bench.folder)
        assert reader.lengths().tolist() == [5, 2, 5, 2, 1]
        assert [reader.read(i).obs["state"][0, 0] for i in range(5)] == [0, 1, 2, 1, 1]
        assert reader.read(1).obs["state"][:, 1].tolist() == [0, 1]
        assert reader.read(1).final_obs["state"].tolist() == [101, 101, 100]
        assert reader.read(0).final_obs == {}


def test_a_live_store_grows_and_numbers_stay(bench: Any) -> None:
    writer = bench.writer()
    bench.append(writer, 0, 0, lane=0)
    bench.append(writer, 1, 0, lane=1)
    reader = StoreReader(bench.folder)
    assert len(reader) == 0  # nothing was flushed
    assert writer.flush() == 2
    reader.refresh()
    assert reader.lengths().tolist() == [1, 1]
    bench.append(writer, 0, 1, lane=0, terminated=True)
    bench.append(writer, 2, 0, lane=0)
    writer.flush()
    reader.refresh()
    assert reader.lengths().tolist() == [2, 1, 1]
    assert reader.read(0).is_complete
    assert reader.read(2).obs["state"][0, 0] == 2


def _write(bench: Any, done: Any) -> None:
    with bench.writer(segment_bytes=20_000) as writer:
        for episode in range(10):
            bench.episode(writer, episode, 30)
            writer.flush()
    done.send(None)


def test_a_reader_samples_while_another_process_writes(bench: Any) -> None:
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_write, args=(bench, there))
    child.start()
    while not (bench.folder / "meta/store.json").exists():
        time.sleep(0.001)
    reader, seen = StoreReader(bench.folder), 0
    while seen < 300:
        reader.refresh()
        lengths = reader.lengths()
        assert lengths.sum() >= seen
        seen = int(lengths.sum())
        for i in range(len(lengths)):
            state = reader.read(i).obs["state"]
            assert state[:, 0].tolist() == [i] * lengths[i]
            assert state[:, 1].tolist() == list(range(lengths[i]))
    here.recv()
    child.join()


def test_steps_reach_the_disk_without_flush(bench: Any) -> None:
    writer = bench.writer(flush_s=0.02)
    bench.append(writer, 0, 0)
    reader = StoreReader(bench.folder)
    for _ in range(100):
        reader.refresh()
        if len(reader):
            break
        time.sleep(0.01)
    assert reader.lengths().tolist() == [1]


def test_columns_in_bulk(bench: Any) -> None:
    with bench.writer(segment_bytes=2000) as writer:
        for episode in range(4):
            bench.episode(writer, episode, 6)
            writer.flush()
    reader = StoreReader(bench.folder)
    found = reader.columns(["reward", "obs.state"], [1, 3])
    assert found["obs.state"][:, 0].tolist() == [1] * 6 + [3] * 6
    assert found["reward"].tolist() == [0, 1, 2, 3, 4, 5] * 2
    with pytest.raises(DatasetError, match=r"no column 'rewards'; there are \['action', "):
        reader.columns(["rewards"])


# --- one writer ------------------------------------------------------------------------------------


FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@FORKS
def test_a_second_writer_is_told_who_has_the_store(bench: Any) -> None:
    holder = rf"process {os.getpid()} on \S+ is writing to this store"
    bench.writer()
    with pytest.raises(DatasetError, match=holder):
        bench.writer()
    assert re.search(holder, in_child(_error_of_lock, bench.folder))
    bench.opened.pop().close()
    assert in_child(_error_of_lock, bench.folder) == ""
    bench.writer()


@FORKS
def test_a_forked_child_has_neither_lock_nor_writer(bench: Any) -> None:
    writer = bench.writer()
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_use, args=(writer, there))
    child.start()
    assert "belongs to the process that this one was forked from" in here.recv()
    writer.close()
    bench.writer()  # the child lives on, and does not hold the lock
    here.send(None)
    child.join()


def in_child(work: Any, *words: Any) -> Any:
    """Returns what a function returns in a forked process."""
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: there.send(work(*words)))
    child.start()
    answer = here.recv()
    child.join()
    return answer


def _error_of_lock(folder: Path) -> str:
    try:
        WriterLock(folder)
    except DatasetError as error:
        return str(error)
    return ""


def _use(writer: StoreWriter, connection: Any) -> None:
    try:
        writer.flush()
    except DatasetError as error:
        connection.send(str(error))
    connection.recv()


def test_an_import_loads_neither_torch_nor_mujoco() -> None:
    code = """
import importlib, pkgutil, sys
import robot_rl.data.store as store
for module in pkgutil.iter_modules(store.__path__):
    importlib.import_module(f"robot_rl.data.store.{module.name}")
print(sorted({"torch", "mujoco", "pyarrow", "av", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# --- mistakes --------------------------------------------------------------------------------------


def test_mistakes_are_named(bench: Any) -> None:
    writer = bench.writer()
    obs, action = bench.obs(0, 0), np.zeros(2)
    with pytest.raises(DatasetError, match=r"obs has no 'force'; it has \['state'\]"):
        writer.append(obs={"state": obs["state"]}, action=action)
    with pytest.raises(DatasetError, match=r"obs 'state' is float32 \(1,\), the store holds float32 \(3,\)"):
        writer.append(obs=obs | {"state": np.zeros(1, np.float32)}, action=action)
    with pytest.raises(DatasetError, match=r"'torque', which the store does not hold\. Known: force, state"):
        writer.append(obs=obs | {"torque": action}, action=action)
    with pytest.raises(DatasetError, match=r"action has shape \(3,\), its 2 names need \(2,\)"):
        writer.append(obs=obs, action=np.zeros(3))
    with pytest.raises(DatasetError, match=r"source 'humans' is unknown\. Did you mean 'human'"):
        writer.append(obs=obs, action=action, source="humans")
    with pytest.raises(DatasetError, match=r"reward has shape \(2,\), allowed: one number, or \(1,\)"):
        bench.append(writer, 0, 0, reward=np.zeros(2))
    with pytest.raises(DatasetError, match=r"got lanes \[-1\], allowed: different numbers from 0 on"):
        writer.append(obs=obs, action=action, lane=-1)
    assert writer.stats.steps == 0
    writer.begin_episode()
    with pytest.raises(DatasetError, match=r"lane 0 is inside episode 0\. End it first"):
        writer.begin_episode()
    writer.close()
    with pytest.raises(DatasetError, match="this writer is closed"):
        writer.append(obs=obs, action=action)


def test_an_episode_needs_a_first_picture(bench: Any) -> None:
    bench.with_cameras()
    writer = bench.writer()
    with pytest.raises(DatasetError, match=r"the first step of an episode has no 'front\.rgb'"):
        bench.append(writer, 0, 0)
    both = {key: bench.picture(key, 1) for key in ("front.rgb", "wrist.rgb")}
    bench.append(writer, 0, 0, pictures=both, terminated=True)
    with pytest.raises(DatasetError, match=r"the first step of an episode has no 'wrist\.rgb'"):
        bench.append(writer, 1, 0, pictures={"front.rgb": both["front.rgb"]})
    with pytest.raises(DatasetError, match=r"'front\.rgb' is float64 \(16, 24, 3\), the store holds uint8"):
        bench.append(writer, 1, 0, pictures=both | {"front.rgb": both["front.rgb"] / 255})


def test_a_store_of_something_else_is_refused(bench: Any, tmp_path: Path) -> None:
    bench.writer().close()
    other = dataclasses.replace(bench.meta, robot="panda")
    with pytest.raises(DatasetError, match="does not fit: it was recorded with robot 'gantry', not 'panda'"):
        StoreWriter(bench.folder, other, bench.features)
    bench.with_cameras()
    with pytest.raises(DatasetError, match=r"'front\.rgb' is missing, not uint8 \(16, 24, 3\)\. Record"):
        bench.writer()
    with pytest.raises(DatasetError, match=r"no meta/store\.json in it, so it is no store"):
        StoreReader(tmp_path / "nothing")
    with pytest.raises(ValueError, match="got picture format 'webp', allowed: jpeg, png"):
        bench.writer(picture="webp")
    with pytest.raises(ValueError, match="got flush_s 0, allowed: more than 0"):
        bench.writer(flush_s=0)
