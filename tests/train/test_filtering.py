"""Runs that filter and mirror their demonstrations: the phases, what is cloned, exact resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from robot_rl.algos import progress
from robot_rl.algos.progress import ProgressCritic
from robot_rl.config import build
from robot_rl.core.errors import DatasetError
from robot_rl.data.demos import each, load_episodes, save_episodes
from robot_rl.data.episode import SOURCES, feature_of
from robot_rl.data.lerobot.edit import write_new
from robot_rl.telemetry.metrics import FILE_NAME, read_metrics
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import load_demonstrations
from robot_rl.train.recorded import DemosConfig

pytestmark = pytest.mark.usefixtures("whole_runs")

TINY: dict[str, Any] = {
    "recipe": "tiny",
    "method": {"kind": "latent", "env_steps": 0},
    "num_envs": 2,
    "n_exec": 4,
    "metrics_rows": 10,
    "env": {"task": "reach", "horizon_s": 0.7, "num_threads": 1},
    "demos": {
        "episodes": 4,
        "bias_m": 0.02,
        "mirror": True,
        "filter": {
            "updates": 20,
            "batch": 8,
            "max_fall": 0.02,
            "algorithm": {"width": 16, "depth": 1, "lr": 1e-2},
        },
    },
    "policy": {"horizon": 8, "width": 16, "depth": 1, "time_dim": 8, "steps": 2},
    "bc": {"updates": 10, "batch": 16},
    "evaluate": {"episodes": 4, "num_envs": 4, "every_env_steps": 0, "quick_episodes": 4},
    "checkpoint": {"every_s": 0.0, "every_steps": 1},
    "video": {"episodes": 0, "failures": 0},
}


def tiny(out: Path) -> RunConfig:
    return replace(build(RunConfig, TINY), out=str(out))


def test_a_run_values_filters_and_mirrors_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = phases.run(tiny(tmp_path / "whole"))
    folder = Path(whole.run)
    found = np.load(folder / "progress.npz")
    demos, config = load_episodes(folder / "demos"), tiny(tmp_path)
    assert found["progress"].shape == found["kept"].shape == demos.reward.shape
    kept = progress.kept(config.demos.filter, found["progress"], demos.episode_index, 8)
    np.testing.assert_array_equal(found["kept"], kept)
    assert len(load_demonstrations(folder / "demos", config).reward) == 2 * len(demos.reward)
    (row,) = [row for row in read_metrics(folder / FILE_NAME) if "progress/kept_of_failures" in row]
    assert row["phase"] == "progress"

    update, calls = ProgressCritic.update, 0

    def cut_short(self: ProgressCritic, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt
        return update(self, batch)

    monkeypatch.setattr(ProgressCritic, "update", cut_short)
    with pytest.raises(KeyboardInterrupt):
        phases.run(tiny(tmp_path / "cut"))
    monkeypatch.setattr(ProgressCritic, "update", update)
    (cut,) = (tmp_path / "cut").iterdir()
    resumed = phases.resume(cut)
    np.testing.assert_array_equal(np.load(cut / "progress.npz")["progress"], found["progress"])
    assert resumed.base_digest == whole.base_digest


def test_a_filter_that_keeps_nothing_says_what_to_change(tmp_path: Path) -> None:
    demos = {**TINY["demos"], "filter": {**TINY["demos"]["filter"], "updates": 1, "min_progress": 0.999}}
    config = replace(build(RunConfig, {**TINY, "demos": demos}), out=str(tmp_path))
    with pytest.raises(DatasetError, match=r"none of .* min_progress=0.999.*lower min_progress"):
        phases.run(config)


def test_the_steps_that_a_person_made_are_cloned_alone(tmp_path: Path) -> None:
    def cloned(path: Path, *by: str) -> str | None:
        demos = {**TINY["demos"], "filter": {}, "path": str(path), "by": by}
        return phases.run(replace(build(RunConfig, {**TINY, "demos": demos}), out=str(tmp_path))).base_digest

    demos = load_episodes(Path(phases.run(tiny(tmp_path)).run) / "demos")
    corrected = list(each(demos, "sim"))
    for episode in corrected:
        episode.source[3:] = SOURCES.index("human")
    features = {key: feature_of(values) for key, values in demos.obs.items()}
    folder = write_new(tmp_path / "corrected", demos.meta, features, corrected, images="png")

    assert cloned(folder, "human", "sim") == cloned(folder) != cloned(folder, "human")
    with pytest.raises(DatasetError, match=r"was made by real: \d+ by sim, \d+ by human\. Choose"):
        cloned(folder, "real")
    nobody = save_episodes(tmp_path / "demonstrated", demos)
    assert cloned(nobody, "demo") == cloned(folder)


def test_whoever_can_be_named_is_whoever_is_noted() -> None:
    (named, _) = get_args(get_type_hints(DemosConfig)["by"])
    assert get_args(named) == SOURCES
