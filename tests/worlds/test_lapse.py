"""Trust that lapses while others hold the model: they lose it at their next look, not inside of a chunk."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_rl.core.errors import CheckpointError, DeviceError
from robot_rl.rollout.envs import simulation
from robot_rl.sched import held
from robot_rl.sched.leases import LeaseStore
from robot_rl.sched.opened import opened
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds import inventory
from robot_rl.worlds.inventory import world_spec
from robot_rl.worlds.saved import World, load_world


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


def test_a_report_of_one_version_is_not_put_on_another(world: World, folder: Path) -> None:
    audited = load_world(folder)
    report = replace(audited.report, imagined_success=0.9, real_success=0.1, reasons=("it was wrong",))
    replace(world, report=replace(world.report, version=2)).save(folder)  # while the first was played
    with pytest.raises(
        CheckpointError, match=r"has version 2 of the model by now; the report is of version 1"
    ):
        audited.save_report(folder, report)
    found = load_world(folder).report
    assert (found.version, found.real_success, found.reasons) == (2, None, ())
    assert audited.report.reasons == ()


def test_a_refusal_names_the_device_that_is_listed(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save_report(folder, replace(world.report, reasons=("it was wrong",)))
    monkeypatch.chdir(folder.parent)
    assert inventory.refusal_of("model").startswith(f"device {world_spec(folder).name}: quarantined")


def test_one_process_at_a_time_changes_a_model(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "_CHANGES_S", 0.0)
    with inventory.changing(folder):
        with pytest.raises(CheckpointError, match=r"process \d+ on \S+ changes the world model"):
            world.save_report(folder, world.report)
        with pytest.raises(CheckpointError, match="changes the world model"):
            world.save(folder)
    world.save_report(folder, world.report)


def test_an_env_of_the_model_ends_its_episode_and_begins_no_other(world: World, folder: Path) -> None:
    device = simulation(EnvConfig(kind="world", id=str(folder)), 2)
    with opened(device, holder="a") as env:
        env.reset(seed=0)
        world.save_report(folder, replace(world.report, reasons=("it was wrong",)))
        env.step_masked(np.zeros((2, 2)), None)
        with pytest.raises(DeviceError, match="it was wrong"):
            env.reset(seed=1)
