"""Sources on Ray, on this machine: the numbers of inline, a source that dies, a label that no node has."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import build, load, plain
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.rollout.on_ray import RaySource
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.runs import SMALL

RAY = {"transport": "ray", "ahead": 0, "ray": {"cpus": 0.5}}


@pytest.fixture
def cluster() -> Generator[None]:
    """Ends what a run has begun."""
    ray = pytest.importorskip("ray")
    yield
    ray.shutdown()


def run(out: Path, **more: Any) -> phases.Summary:
    return phases.run(build(RunConfig, {**SMALL, "out": str(out), **more}))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own processes and sockets
@pytest.mark.usefixtures("cluster", "whole_runs")
def test_what_acts_on_ray_when_it_is_asked_is_what_would_act_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run(tmp_path / "inline")
    there = run(tmp_path / "ray", **RAY)
    assert there.final_digest == here.final_digest
    assert there.control_steps == here.control_steps
    # A source that dies is begun again, and the run goes on to its end.
    collect, lost = RaySource.collect, list[RaySource]()

    def dying(source: RaySource, published: Any) -> Any:
        segment = collect(source, published)
        if not lost:
            lost.append(source)
            os.kill(source.pid, signal.SIGKILL)
        return segment

    monkeypatch.setattr(RaySource, "collect", dying)
    again = run(tmp_path / "again", **RAY)
    assert again.control_steps == here.control_steps
    assert lost[0].revival.count == 1
    with pytest.raises(DeviceError, match=r"ray.labels: none of 1 nodes has room=lab"):
        run(tmp_path / "label", **{**RAY, "ray": {"labels": {"room": "lab"}, "place_s": 5.0}})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ray.cpus=2"], "ray: got .* left out without transport=ray"),
        (["transport=ray", "ray.cpus=0"], "ray.cpus: got 0"),
        (["transport=ray", "restarts=-1"], "restarts: got -1"),
        (
            ["transport=ray", "num_envs=1", "real_time=true"],
            "transport: got 'ray', allowed: inline or process",
        ),
    ],
)
def test_mistakes_are_refused_before_ray_begins(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, ["recipe=smoke", *words], config_name="train")


def test_a_run_without_ray_has_no_section_of_it() -> None:
    config = load(RunConfig, ["recipe=smoke"], config_name="train")
    assert "ray" not in config.used()
    assert "ray" in plain(config)
