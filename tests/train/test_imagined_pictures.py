"""A policy that sees learns in a model of pictures: one that learns in the same loop, and a fixed one."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.cli.main import main
from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.data.rollout import Rollout
from robot_rl.sim.tasks import reach
from robot_rl.train import checkpoint, phases
from robot_rl.train.base import check_base
from robot_rl.train.config import RunConfig
from robot_rl.train.rollouts import RolloutExperience
from robot_rl.worlds import audit
from robot_rl.worlds.history import AUDIT
from robot_rl.worlds.outcome import ClassifierOutcome
from robot_rl.worlds.saved import World, load_world
from robot_rl.worlds.trust import TrustReport
from tests.runs import Killed, folder_of, rows_of, weights
from tests.train.test_imagined import RUN, TRUSTING, WORLD, column, easy, real_steps

__all__ = ["easy"]
pytestmark = pytest.mark.usefixtures("whole_runs")

IMAGES: dict[str, Any] = {
    "cameras": ["left"],
    "channels": 2,
    "codec_width": 8,
    "width": 8,
    "codec_updates": 10,
    "updates": 10,
    "batch": 4,
}
SHOWN: dict[str, Any] = {**RUN["env"], "cameras": ["left"], "image_size": [32, 32]}
SEES: dict[str, Any] = {**RUN["policy"], "cameras": ["left"], "image_features": 8}


@pytest.fixture(autouse=True)
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten updates draw no picture that is better than the last real one; the other limits are settings."""
    reasons = audit.reasons_against

    def others(report: TrustReport, limits: Any) -> tuple[str, ...]:
        return tuple(reason for reason in reasons(report, limits) if "no better" not in reason)

    monkeypatch.setattr(audit, "reasons_against", others)
    monkeypatch.setattr("robot_rl.worlds.images.play.MIN_WINDOWS", 20)
    monkeypatch.setattr(ClassifierOutcome, "fit", partialmethod(ClassifierOutcome.fit, updates=20))


def run_of(out: Path, *, env: Mapping[str, Any] | None = None, **method: Any) -> RunConfig:
    """Returns a run whose trust lapses at its first probe: it is fitted twice, and probed twice."""
    world = {**WORLD, "images": IMAGES, "trust": {**TRUSTING, "max_shift": 1e-9}}
    own = {**RUN["method"], "world": world, **method}
    how = {"env": {**SHOWN, **(env or {})}, "policy": SEES, "checkpoint": {"every_s": 1e-9}}
    return build(RunConfig, {**RUN, **how, "out": str(out), "method": own})


@contextmanager
def killed_at(version: int, updates: int) -> Generator[None]:
    """Kills a run while it saves what it has after so many updates of pictures behind a model's version."""
    write = checkpoint.write_state

    def write_until_killed(state: Any, folder: Path) -> None:
        write(state, folder)
        conductor = conductor_of(state) or {"fitter": None}
        fit = conductor["fitter"]
        if fit is not None and (conductor["version"], fit["pictures"]["updates"]) == (version, updates):
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_state", write_until_killed)
        with pytest.raises(Killed):
            yield


def conductor_of(state: Any) -> Any:
    """Returns the state of the loop in that of a checkpoint; None in other phases."""
    experience = None if state["loop"] is None else state["loop"]["experience"]
    return None if experience is None else experience.get("conductor")


def test_a_policy_that_sees_and_a_model_of_pictures_learn_in_one_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The goal is in the pictures alone; what is left of pictures is what judges the model."""
    rolled, models, kept = list[Rollout](), list[dict[str, torch.Tensor]](), list[Any]()
    adds, saves, writes = RolloutExperience.add, World.save, checkpoint.write_state

    def adding(experience: RolloutExperience, segment: Rollout) -> None:
        rolled.append(deepcopy(segment))  # the next one is written over it
        adds(experience, segment)

    def saving(world: World, folder: Path) -> None:
        assert world.images is not None
        weights = world.images.state_dict()
        models.append({name: value.clone() for name, value in weights.items()})
        saves(world, folder)

    def writing(state: Any, folder: Path) -> None:
        kept.append(conductor_of(state))
        writes(state, folder)

    monkeypatch.setattr(RolloutExperience, "add", adding)
    monkeypatch.setattr(World, "save", saving)
    monkeypatch.setattr(checkpoint, "write_state", writing)
    summary = phases.run(run_of(tmp_path, env={"state": ["joint", "tool"]}))
    folder = folder_of(tmp_path)
    assert real_steps(summary) == column(folder, "probe/real_steps")[-1]
    assert summary.control_steps["world"] > 0
    assert all(one.obs["left.rgb"].shape[-3:] == (32, 32, 3) for one in rolled)
    assert len({one.obs["left.rgb"].numpy().tobytes() for one in rolled}) == len(rolled)

    first, second = models  # after each fit
    changed = {name.split(".")[0] for name in first if not torch.equal(first[name], second[name])}
    assert changed == {"members"}  # the codec is kept, with all scales
    assert len(column(folder, "world/pictures_psnr")) == 2

    world = load_world(folder / "world")
    assert world.images is not None
    assert len(world.images.codes) == len(world.history.state)
    last = [one for one in kept if one is not None][-1]
    history = replace(world.history, **last["history"])
    judging_rows = np.flatnonzero(np.isin(history.episode, history.split(AUDIT)))
    assert history.pictured is not None
    assert history.pictured.tolist() == judging_rows.tolist()
    assert len(history.pictures["left"]) == len(judging_rows)
    assert len(last["codes"]) == len(history.state)
    shown = world.images.kept_codes({"left": history.shown("left", judging_rows[-3:])})
    assert np.array_equal(shown, last["codes"][judging_rows[-3:]])  # of the second probe, by the first codec


@pytest.mark.slow
def test_a_fit_of_pictures_that_was_killed_goes_on_exactly(tmp_path: Path) -> None:
    """Killed while the codec learns, while the networks learn, and in the refit."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    phases.run(run_of(undisturbed, refit_updates=20))
    with killed_at(version=0, updates=10):
        phases.run(run_of(killed, refit_updates=20))
    for version, updates in ((0, 15), (1, 15)):
        with killed_at(version, updates):
            phases.resume(folder_of(killed))
    phases.resume(folder_of(killed))
    assert rows_of(folder_of(killed)) == rows_of(folder_of(undisturbed))
    assert weights(folder_of(killed), "final") == weights(folder_of(undisturbed), "final")


@pytest.mark.parametrize(
    ("env", "images", "message"),
    [
        (
            {},
            {"cameras": ["front"]},
            r"method\.world\.images\.cameras: got \['front'\], allowed: names of env\.cameras, \['left'\]",
        ),
        (
            {},
            {"cameras": []},
            r"policy\.cameras: got \['left'\], allowed: names of method\.world\.images\.cameras, \[\]",
        ),
        (
            {"image_size": [40, 40]},
            {},
            r"images\.cameras: got pictures of 40 x 40 pixels, allowed: multiples of 16 from 32 up\. Say env",
        ),
        (
            {"camera_delay_s": [0.05]},
            {},
            r"env\.camera_delay_s: got \[0\.05\], allowed: left out with method\.world\.images\.cameras",
        ),
    ],
)
def test_pictures_that_do_not_fit_are_refused(
    tmp_path: Path, env: dict[str, Any], images: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path, env=env, world={**WORLD, "images": {**IMAGES, **images}})


def test_a_given_base_that_sees_more_than_the_model_shows_is_refused(tmp_path: Path) -> None:
    seeing = run_of(tmp_path)
    blind = build(RunConfig, {**RUN, "env": SHOWN})
    with pytest.raises(
        ConfigError, match=r"bc\.policy: x: cameras: got \['left'\], allowed: names of method"
    ):
        check_base(blind, "bc.policy: x", "flow", 8, seeing.policy)


def test_a_base_that_sees_learns_inside_a_fixed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cloned by the run, and given to another one."""
    monkeypatch.setattr(reach, "GOAL_RADIUS_M", 0.03)  # episodes of some steps
    demos, world = tmp_path / "demos", tmp_path / "world"
    shown = ["cameras=[left]", "image_size=[32,32]", "state=[joint,tool]"]
    assert main(["collect", "task=reach", "episodes=40", "bias_m=0.02", *shown, f"out={demos}"]) == 0
    sizes = {"model": WORLD["model"], "fit": WORLD["fit"], "images": IMAGES, "trust": TRUSTING}
    words = [
        f"{group}.{name}={str(value).replace(' ', '')}"
        for group, own in sizes.items()
        for name, value in own.items()
    ]
    fit = ["env.state=[joint,tool]", f"data={demos}", f"out={world}"]
    assert main(["worlds", "fit", *words, *fit]) == 0
    rolled, adds = list[Rollout](), RolloutExperience.add

    def adding(experience: RolloutExperience, segment: Rollout) -> None:
        rolled.append(deepcopy(segment))  # the next one is written over it
        adds(experience, segment)

    monkeypatch.setattr(RolloutExperience, "add", adding)
    names = ("decisions", "exploration", "algorithm")
    config: dict[str, Any] = {
        **RUN,
        "env": {"kind": "world", "id": str(world), "task": "reach", "settings": {"strides": 4}},
        "policy": SEES,
        "demos": {"path": str(demos)},
        "method": {"kind": "ppo", "env_steps": 100, **{name: RUN["method"][name] for name in names}},
    }
    summary = phases.run(build(RunConfig, {**config, "out": str(tmp_path / "cloned")}))
    first = folder_of(tmp_path / "cloned")
    base = str(first / "policy" / "base")
    given = {**config, "policy": RUN["policy"], "bc": {"policy": base}, "out": str(tmp_path / "given")}
    again = phases.run(build(RunConfig, given))
    assert min(summary.control_steps["world"], again.control_steps["world"]) >= 100
    assert {one.obs["left.rgb"].shape[-3:] for one in rolled} == {(32, 32, 3)}
    for folder in (first, folder_of(tmp_path / "given")):
        assert weights(folder, "base") == weights(first, "base") != weights(folder, "final")
