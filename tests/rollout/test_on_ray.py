"""Sources on Ray, on this machine: the numbers of inline, a source that dies, a label that no node has."""

import os
import signal
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import build, load, plain
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.data.transitions import Segment
from robot_rl.hal.device import DeviceSpec, LeaseLike
from robot_rl.rollout.on_ray import RaySource
from robot_rl.rollout.ray_config import RayConfig
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.sources import InlineSource
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.rollout.test_process import build as act_here
from tests.rollout.test_process import offered
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


def acting(leases: Sequence[LeaseLike]) -> InlineSource:
    assert [lease.device for lease in leases] == ["fake"]
    return act_here()


class Busy:
    def is_there(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("cluster")
def test_a_loop_that_has_more_to_do_does_not_wait_for_room() -> None:
    import ray

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", num_cpus=1, namespace="robot_rl", **quiet)
    busy: Any = ray.remote(Busy).options(num_cpus=1).remote()
    assert ray.get(busy.is_there.remote())

    def source(place_s: float) -> RaySource:
        spec = DeviceSpec(name="fake", kind="sim")
        how: dict[str, Any] = {"lease_wait_s": 0.0, "wait_s": 0.05, "holds_up": False}
        return RaySource(acting, RayConfig(place_s=place_s), spec=spec, holder="test", ahead=1, **how)

    def first(collects: RaySource) -> Segment:
        while (segment := collects.collect(handle)) is None:
            pass  # until `place_s` is over
        return segment

    handle, without_room, patient = offered(), source(place_s=0.1), source(place_s=600.0)
    with pytest.raises(ActorError, match=r"ray.cpus: asked for 1; after 0.1 s .* 0 are free on 1 nodes"):
        first(without_room)
    assert [patient.collect(handle) for _ in range(4)] == [None] * 4
    leaving = source(place_s=600.0)
    assert leaving.collect(handle) is None
    leaving.close()
    ray.kill(busy)
    assert first(patient).begins
    assert patient.node
    patient.close()
    without_room.close()


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
