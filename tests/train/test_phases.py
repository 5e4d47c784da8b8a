"""Whole runs: what is written when, what a full disk costs, what a machine that cannot draw says."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.algos.config.cloning import FilterConfig
from robot_rl.cli.main import main
from robot_rl.config import build
from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError, RenderError
from robot_rl.core.files import read_checked_text, with_checksum_line
from robot_rl.data.store.reader import open_source
from robot_rl.hal.vector import Array
from robot_rl.policies.checkpoint import load_policy
from robot_rl.rollout.envs import make_env
from robot_rl.rollout.stepping import Moment
from robot_rl.sim.backends import mujoco_cpu
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.testing.devices import FakeEnv
from robot_rl.train import base, checkpoint, pictures
from robot_rl.train.config import RunConfig, VideoConfig
from robot_rl.train.phases import resume, run
from robot_rl.train.pictures import Photographer
from robot_rl.train.record import load_config, load_config_here, new_folder
from robot_rl.train.recorded import CloningSettings, DemosConfig, ReplayConfig
from tests.arms import write_arm
from tests.runs import SMALL, folder_of

pytestmark = pytest.mark.usefixtures("whole_runs")


def small(out: Path, **changes: Any) -> RunConfig:
    return replace(build(RunConfig, SMALL), out=str(out), **changes)


def test_an_arm_without_a_gripper_goes_through_every_phase(tmp_path: Path) -> None:
    env = EnvConfig(task="reach", robot=str(write_arm(tmp_path)), horizon_s=0.5, num_threads=1)
    summary = run(small(tmp_path / "runs", env=env))
    assert (summary.task, summary.env_steps, summary.episodes) == ("reach", 40, 4)
    _, meta = load_policy(folder_of(tmp_path / "runs") / "policy" / "final")
    assert meta.action_names == ("tool.dx", "tool.dy", "tool.dz")


def test_a_run_leaves_rows_of_every_phase_and_a_bill(tmp_path: Path) -> None:
    summary = run(small(tmp_path))
    folder = folder_of(tmp_path)
    rows = read_metrics(folder / "metrics.jsonl")
    assert summary.rows == len(rows)
    assert list(dict.fromkeys(row["phase"] for row in rows)) == ["demos", "bc", "base", "residual", "final"]
    # 2 envs: 40 control steps exactly; quick evaluations at 20 and 40, base and final beside them.
    assert summary.env_steps == 40
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 20, 40, 40]
    assert summary.episodes == 4
    assert summary.demo_env_steps == next(row["demos/env_steps"] for row in rows if "demos/env_steps" in row)
    assert json.loads((folder / "evaluation-final.json").read_text())["digest"] == summary.final_digest
    assert {"update", "collect", "evaluate", "checkpoint", "other"} <= set(summary.timing)


def test_the_config_is_written_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the builder failed")

    monkeypatch.setattr(base, "evaluators", broken)
    with pytest.raises(RuntimeError, match="the builder failed"):
        run(small(tmp_path))
    assert load_config(folder_of(tmp_path)) == small(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_what_learned_on_a_gpu_acts_on_a_machine_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(tmp_path))
    folder = folder_of(tmp_path)
    settings = read_checked_text(folder / "config.yaml", ConfigError, "").replace(
        "device: cpu", "device: cuda:3"
    )
    (folder / "config.yaml").write_text(with_checksum_line(settings))
    assert load_config_here(folder, at="run") == (small(tmp_path), "cuda:3")
    film = tmp_path / "grid.mp4"
    assert main(["evaluate", f"run={folder}", f"video={film}", "video_episodes=2"]) == 0
    assert film.stat().st_size > 1000
    assert "not compared with those of training: there the policy acted on cuda:3" in capsys.readouterr().out
    assert main(["evaluate", f"run={folder}", f"video={film}"]) != 0
    assert f"video: got '{film}', allowed: a file that does not exist yet" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="device: got 'cuda:3', allowed on this machine: cpu"):
        resume(folder)  # what goes on with the training needs the device


def test_a_full_disk_stops_the_run_and_space_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = checkpoint.write_synced, [40]

    def fills_up(path: Path, blob: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    monkeypatch.setattr(checkpoint, "write_synced", fills_up)
    with pytest.raises(CheckpointError) as caught:
        run(small(tmp_path))
    folder = folder_of(tmp_path)
    assert "No space left on device" in str(caught.value)
    assert f"robot-rl train resume={folder}" in str(caught.value)
    monkeypatch.setattr(checkpoint, "write_synced", write)
    assert resume(folder).env_steps == 40


def test_without_control_steps_the_base_is_the_result(tmp_path: Path) -> None:
    config = small(tmp_path)
    summary = run(replace(config, method=replace(config.method, env_steps=0)))
    assert summary.env_steps == 0
    assert summary.final_digest == summary.base_digest


def test_a_run_takes_from_what_an_earlier_one_experienced(tmp_path: Path) -> None:
    run(small(tmp_path / "first"))
    experience = folder_of(tmp_path / "first") / "experience"
    assert open_source(experience).lengths().sum() == 40
    reusing = ReplayConfig(record=False, reuse=(str(experience.parent),), reuse_ratio=0.25)
    summary = run(small(tmp_path / "second", replay=reusing))
    folder = folder_of(tmp_path / "second")
    assert summary.env_steps == 40
    assert not (folder / "experience").exists()
    (row, *_) = [row for row in read_metrics(folder / "metrics.jsonl") if "replay/steps" in row]
    assert row["replay/steps"] == 40  # four episodes of ten steps, ended by the clock
    other = small(tmp_path / "third", replay=reusing)
    with pytest.raises(DatasetError, match="does not fit this run: its"):
        run(replace(other, env=replace(other.env, task="pick_cube")))
    (segment, *_) = sorted((experience / "journal").glob("*"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    with pytest.raises(DatasetError, match=r"replay\.reuse: .* is damaged: "):
        run(other)
    without = replace(reusing, reuse=(str(folder),))
    with pytest.raises(DatasetError, match=r"replay\.reuse: the run .* left no experience/: it had"):
        run(replace(other, replay=without))
    assert not (tmp_path / "third").exists()  # refused before there was a folder


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path) -> None:
    folders = {new_folder(str(tmp_path), "small-seed0") for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.is_dir() for folder in folders)


def test_demonstrations_of_another_task_are_refused(tmp_path: Path) -> None:
    run(small(tmp_path))
    config = small(tmp_path / "other")
    demos = replace(config.demos, path=str(folder_of(tmp_path) / "demos"))
    with pytest.raises(DatasetError, match="recorded with task 'reach', not 'pick_cube'"):
        run(replace(config, env=replace(config.env, task="pick_cube"), demos=demos))


def test_a_machine_that_cannot_draw_says_so_and_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def blind(*_: Any) -> None:
        raise RenderError("no renderer: install libegl1")

    monkeypatch.setattr(mujoco_cpu, "Renderer", blind)
    run(small(tmp_path, video=VideoConfig(episodes=1)))
    assert "no video: no renderer: install libegl1" in capsys.readouterr().err
    assert not (folder_of(tmp_path) / "videos").exists()


class Chalk:
    """A renderer that draws the number of the simulation."""

    def __init__(self, model: Any, cameras: Any, batch: Any) -> None:
        self.is_closed = False

    def render_batch(self, rows: Array, camera: str, *, depth: bool, states: Array | None) -> Array:
        return np.full((1, 32, 32, 3), rows[0], np.uint8)

    def close(self) -> None:
        self.is_closed = True


def test_the_photographer_films_the_first_and_keeps_the_last_picture_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mujoco_cpu, "Renderer", Chalk)
    env = make_env(EnvConfig(task="reach", num_threads=1), 3, autoreset="disabled")
    seeds = np.arange(100, 105, dtype=np.uint64)
    photographer = Photographer(env, seeds, VideoConfig(episodes=1, failures=2))
    alive, over = np.ones(3, bool), np.zeros(3, bool)

    def moment(live: Array, ended: Array, success: Array) -> Moment:
        return Moment({}, over, {}, over, success, ended & ~success, {"success": success}, live)

    # Seeds 100 to 102: row 0 fails at the second step, row 1 succeeds, row 2 fails.
    photographer(slice(0, 3), moment(alive, np.array([False, True, False]), np.array([False, True, False])))
    photographer(slice(0, 3), moment(np.array([True, False, True]), np.array([True, False, True]), over))
    # Seeds 103 and 104 and a row that fills up the batch: the gallery has its two already.
    photographer(slice(3, 5), moment(alive, alive, over))
    entries = photographer.save(tmp_path, "final")
    assert [entry["seed"] for entry in entries] == [100, 102]
    assert sorted(path.name for path in (tmp_path / "failures").iterdir()) == [
        "final-seed100.png",
        "final-seed102.png",
    ]
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["final-seed100.mp4"]


def test_films_side_by_side_last_as_long_as_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three episodes of 1, 2 and 3 pictures, in shades of their number: two columns, and a black place."""
    written: dict[str, Any] = {}
    monkeypatch.setattr(mujoco_cpu, "Renderer", Chalk)
    monkeypatch.setattr(
        pictures, "write_video", lambda path, frames, fps: written.update(frames=frames, fps=fps)
    )
    env = make_env(EnvConfig(task="reach", num_threads=1), 3, autoreset="disabled")
    photographer = Photographer(env, np.zeros(0, np.uint64), VideoConfig(episodes=3, failures=0))
    photographer._films = {
        row: [np.full((2, 4, 3), 10 * row + step, np.uint8) for step in range(1, row + 2)] for row in range(3)
    }
    photographer.save_grid(tmp_path / "grid.mp4")
    assert (written["frames"].shape, written["fps"]) == ((3, 4, 8, 3), 20.0)
    shades = written["frames"][:, ::2, ::4, 0].reshape(3, 4)
    assert shades.tolist() == [[1, 11, 21, 0], [1, 12, 22, 0], [1, 12, 23, 0]]


def test_an_env_that_cannot_draw_is_refused() -> None:
    with pytest.raises(RenderError, match="'count' on 'point' cannot draw"):
        Photographer(FakeEnv(1), np.zeros(1, np.uint64), VideoConfig())


def test_a_base_that_was_cloned_earlier_is_taken_as_it_is(tmp_path: Path) -> None:
    first = run(small(tmp_path / "first"))
    folder = folder_of(tmp_path / "first")
    given: dict[str, Any] = {
        "demos": DemosConfig(path=str(folder / "demos")),
        "bc": CloningSettings(policy=str(folder / "policy/base")),
    }
    again = run(small(tmp_path / "again", **given))
    phases_of = {row["phase"] for row in read_metrics(folder_of(tmp_path / "again") / "metrics.jsonl")}
    assert phases_of == {"demos", "base", "residual", "final"}
    assert (again.base_digest, again.final_digest) == (first.base_digest, first.final_digest)
    shorter = replace(small(tmp_path).policy, horizon=2)  # of what would be cloned; the base has 8
    other = run(small(tmp_path / "other", **given, policy=shorter))
    assert other.final_digest == first.final_digest
    with pytest.raises(ConfigError, match=r"n_exec: got 9, allowed: 1 to the base's 8"):
        run(small(tmp_path / "long", **given, n_exec=9))
    with pytest.raises(ConfigError, match=r"bc\.policy: no folder '/nowhere'"):
        small(tmp_path, bc=CloningSettings(policy="/nowhere"))
    with pytest.raises(ConfigError, match=r"demos\.filter\.updates: got 5, allowed: 0 with bc\.policy"):
        small(tmp_path, bc=given["bc"], demos=replace(given["demos"], filter=FilterConfig(updates=5)))
