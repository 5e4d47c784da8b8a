"""The bill of a model: imagined control steps by version and by who made them, by numbers by hand."""

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.core.errors import CheckpointError
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds import bill, inventory
from robot_rl.worlds.audit import replayed
from robot_rl.worlds.bill import add_imagined, bills_of
from robot_rl.worlds.env import WorldEnv
from robot_rl.worlds.history import AUDIT, Array
from robot_rl.worlds.saved import World, load_world

FIRST = {"version": 1, "episodes": 4, "real_steps": 100}


@pytest.fixture(name="folder")
def _folder(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    world.report = replace(world.report, reasons=())
    world.save(tmp_path / "model")
    return tmp_path / "model"


def in_processes(*tasks: Callable[[], None]) -> list[int | None]:
    """Returns how processes ended that each did one thing at the same time."""
    processes = [multiprocessing.get_context("fork").Process(target=task) for task in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_steps_are_billed_to_who_holds_the_lease(folder: Path, world: World) -> None:
    real = {"episodes": world.history.num_episodes, "real_steps": world.history.steps}
    (own,) = bills_of(folder)
    assert (own.version, own.episodes, own.real_steps, own.imagined) == (1, *real.values(), {})
    config = EnvConfig(kind="world", id=str(folder), settings={"gate": False})
    with opened(simulation(config, 3), holder="train a seed 0") as env:
        env.reset(seed=0)
        env.step_masked(np.zeros((3, 2)), None)
        env.step_masked(np.zeros((3, 2)), np.array([True, False, True]))
    assert bills_of(folder)[0].imagined == {"train a seed 0": 3 + 2}
    with opened(simulation(config, 2), holder="evaluate b: search") as env:
        env.reset(seed=0)
        env.step_masked(np.zeros((2, 2)), None)
    assert bills_of(folder)[0].imagined == {"train a seed 0": 5, "evaluate b: search": 2}


class Never:
    """An outcome that nobody reaches."""

    kind = "never"

    def judge(self, states: Array, codes: Array | None = None) -> tuple[Array, Array]:
        return np.zeros(len(states), bool), np.zeros(len(states), bool)


def test_an_audit_bills_the_strides_that_it_replays(folder: Path) -> None:
    world = load_world(folder)
    world.outcome = Never()
    (one,) = world.history.split(AUDIT)[:1]
    replayed(world, np.repeat(one, 3))  # 3 episodes of 24 control steps, which nobody sees succeed
    assert bills_of(folder)[0].imagined == {"audit": 3 * 24}


def test_each_version_has_a_bill_of_its_own(folder: Path, world: World) -> None:
    add_imagined(folder, 40, **FIRST, by="a")
    replace(world, report=replace(world.report, version=2, real_steps=9000)).save(folder)
    with closing(WorldEnv(str(folder), 4)) as env:
        env.reset(seed=0)
        env.step_masked(np.zeros((4, 2)), None)
    first, second = bills_of(folder)
    assert (first.imagined, first.real_steps) == ({"a": 40}, world.history.steps)
    assert (second.imagined, second.real_steps) == ({"without a lease": 4}, 9000)


def test_processes_that_imagine_at_once_lose_nothing(tmp_path: Path) -> None:
    def adds() -> None:
        for _ in range(20):
            add_imagined(tmp_path, 3, **FIRST, by="both")

    assert in_processes(adds, adds) == [0, 0]
    assert bills_of(tmp_path)[0].imagined == {"both": 2 * 20 * 3}


def test_a_process_that_is_killed_has_billed_what_it_imagined(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bill, "_EVERY_S", 0.0)

    def dies() -> None:
        env = WorldEnv(world, 2, by="killed")
        env.reset(seed=0)
        env.step_unseen(np.zeros((2, 2)), None)  # shows nothing, so that torch does nothing in a fork
        os._exit(9)

    assert in_processes(dies) == [9]
    assert bills_of(folder)[0].imagined == {"killed": 2}


def test_a_folder_where_nothing_can_be_written_costs_a_warning(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(bill, "write_json", refuses)
    with closing(WorldEnv(world, 2)) as env:
        env.reset(seed=0)
        env.step_masked(np.zeros((2, 2)), None)
    assert "2 imagined steps are not in its bill: read-only" in caplog.text
    assert bills_of(folder)[0].imagined == {}


def test_a_bill_that_cannot_be_read_loses_no_steps(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bill, "_EVERY_S", 0.0)
    with closing(WorldEnv(world, 2, by="a")) as env:
        env.reset(seed=0)
        kept = (folder / "bill.json").read_bytes()
        (folder / "bill.json").write_text("{}")
        for _ in range(2):  # 2 steps, then 4 of which nothing is billed
            env.step_masked(np.zeros((2, 2)), None)
        assert "4 imagined steps are not in its bill" in caplog.text
        (folder / "bill.json").write_bytes(kept)
        env.step_masked(np.zeros((2, 2)), None)
        assert bills_of(folder)[0].imagined == {"a": 6}
    assert bills_of(folder)[0].imagined == {"a": 6}


def test_a_model_that_another_process_changes_for_long_costs_a_warning(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bill, "_EVERY_S", 0.0)
    monkeypatch.setattr(inventory, "_CHANGES_S", 0.0)
    with closing(WorldEnv(world, 2, by="a")) as env:
        env.reset(seed=0)
        with inventory.changing(folder):
            env.step_masked(np.zeros((2, 2)), None)
        assert "2 imagined steps are not in its bill" in caplog.text
        assert "changes the world model" in caplog.text
    assert bills_of(folder)[0].imagined == {"a": 2}


def test_each_failure_doubles_the_time_until_the_bill_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # At 5, 10 and 20 seconds after the one before: seconds 5, 15 and 35 of 40.
    now_s = 0.0
    monkeypatch.setattr(bill.time, "monotonic", lambda: now_s)
    meter = bill.Meter(folder, **FIRST, by="a")
    (folder / "bill.json").write_text("{}")
    for second in range(1, 41):
        now_s = float(second)
        meter.add(1)
    found = [record.getMessage().split(": ")[1].split()[0] for record in caplog.records]
    assert found == ["5", "15", "35"]


def test_a_model_is_saved_over_a_damaged_bill(
    folder: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "bill.json").write_text("{}")
    newer = replace(world, report=replace(world.report, version=2), folder=None)
    newer.save(folder)
    assert newer.folder == folder
    assert load_world(folder).report.version == 2
    assert "version 2 is not in its bill" in caplog.text


def test_the_folder_of_a_model_that_was_deleted_is_not_made_again(
    folder: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(WorldEnv(world, 2)) as env:
        env.reset(seed=0)
        shutil.rmtree(folder)
        env.step_masked(np.zeros((2, 2)), None)
    assert "2 imagined steps are not in its bill" in caplog.text
    assert not folder.exists()
    with pytest.raises(CheckpointError, match="there is no such folder"):
        world.save_report(folder, world.report)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting"),
        ("{}", "versions: missing"),
        ('{"versions": [{"version": 1}]}', "episodes: missing"),
        ('{"versions": [{"version": 1, "episodes": 4, "real_steps": 9, "more": 1}]}', "no such key"),
        ('{"versions": [{"version": 1, "episodes": 4, "real_steps": 9, "imagined": null}]}', "imagined"),
    ],
)
def test_a_damaged_bill_says_what_to_do(folder: Path, content: str, words: str) -> None:
    (folder / "bill.json").write_text(content)
    what = rf"bill\.json: damaged: .*{words}.* counting begins at 0 again"
    with pytest.raises(CheckpointError, match=what):
        bills_of(folder)


def test_the_report_shows_the_bill(folder: Path, capsys: pytest.CaptureFixture[str], world: World) -> None:
    add_imagined(folder, 1200, **FIRST, by="train a seed 0")
    add_imagined(folder, 34, **FIRST, by="evaluate b")
    assert main(["worlds", "report", f"world={folder}", "--json"]) == 0
    shown = capsys.readouterr().out
    real = f"version 1: {world.history.steps:,} real control steps behind it"
    assert f"{real}, 1,234 imagined (evaluate b 34, train a seed 0 1,200)" in shown
    failed = world.report.replayed[0]
    assert re.search(rf"failures that succeed: \d+% of {failed} \(95 % interval \d+% to \d+%\)", shown)
    (own,) = json.loads(shown.splitlines()[-1])["bills"]
    assert own["imagined"] == {"evaluate b": 34, "train a seed 0": 1200}
