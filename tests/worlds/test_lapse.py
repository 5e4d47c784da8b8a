"""Trust that lapses while others hold the model: they lose it at their next look, not inside of a chunk."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_rl.core.errors import DeviceError
from robot_rl.rollout.envs import simulation
from robot_rl.sched import held
from robot_rl.sched.leases import LeaseStore
from robot_rl.sched.opened import opened
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.inventory import world_spec
from robot_rl.worlds.saved import World


@pytest.fixture(name="folder")
def _folder(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(held, "_TRUST_S", 0.0)
    world.report = replace(world.report, reasons=())
    world.save(tmp_path / "model")
    return tmp_path / "model"


def test_two_holders_lose_a_model_that_somebody_found_wanting(world: World, folder: Path) -> None:
    store, spec = LeaseStore(), world_spec(folder)
    trusted = world.report
    with store.hold(spec, holder="a", slots=1) as a, store.hold_all([(spec, 1)], holder="b") as (b,):
        a.check()
        b.check()
        world.save_report(folder, replace(trusted, reasons=("it was wrong",)))
        for lease in (a, b):
            with pytest.raises(
                DeviceError, match=r"quarantined, its version 1 is not believed: it was wrong"
            ):
                lease.check()
        world.save_report(folder, trusted)
        a.check()  # it may be held on: the lease itself was never given back
    assert not store.active()


def test_trust_is_asked_for_once_a_second(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "_TRUST_S", 3600.0)
    with LeaseStore().hold(world_spec(folder), holder="a", slots=1) as lease:
        world.save_report(folder, replace(world.report, reasons=("it was wrong",)))
        lease.check()


def test_an_env_of_the_model_ends_its_episode_and_begins_no_other(world: World, folder: Path) -> None:
    device = simulation(EnvConfig(kind="world", id=str(folder)), 2)
    with opened(device, holder="a") as env:
        env.reset(seed=0)
        world.save_report(folder, replace(world.report, reasons=("it was wrong",)))
        env.step_masked(np.zeros((2, 2)), None)
        with pytest.raises(DeviceError, match="it was wrong"):
            env.reset(seed=1)
