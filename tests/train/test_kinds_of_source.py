"""Arms, simulations and world models in one run: what is refused, billed and kept, and who goes on."""

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from robot_rl.cli.main import main
from robot_rl.cli.train import _outcome as last_line
from robot_rl.cli.train import _plan as first_line
from robot_rl.config import build, dump, load, read
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.core.files import write_json
from robot_rl.data.store.reader import open_source
from robot_rl.real.claim import device_of
from robot_rl.real.station import load_station
from robot_rl.rollout.booked import BookedSource
from robot_rl.rollout.process import ProcessSource
from robot_rl.rollout.revival import LostActorError
from robot_rl.sched.leases import LeaseStore
from robot_rl.sim.robots.catalog import ROBOT_FILES
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.telemetry.runs import load_run
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.deploy.human import Intervening
from robot_rl.train.deploy.online import make_arm
from robot_rl.train.devices import devices_of_training
from robot_rl.train.improve.acting import act_alone, in_process
from tests.hal.test_device import Ticket
from tests.runs import SMALL, folder_of, patient_station
from tests.train.test_imagined import TRUSTING

KINDS: dict[str, Any] = {
    "simulations": {"num_envs": 2, "env_steps": 40},
    "watched": {"real_time": True, "human": True, "env_steps": 20},
    "arm": {"real_time": True, "env_steps": 20},
}


def run_of(sources: dict[str, Any] = KINDS, **changes: Any) -> RunConfig:
    words = {key: value for key, value in SMALL.items() if key != "num_envs"}
    learning = {key: value for key, value in SMALL["method"].items() if key != "env_steps"}
    human = {"human": {"input": "scripted"}} if any(one.get("human") for one in sources.values()) else {}
    return build(RunConfig, {**words, "method": learning, "sources": sources, **human, **changes})


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"real_time": True, "num_envs": 3}, "sources.one.num_envs: got 3, allowed: 1 with an arm"),
        ({"real_time": True, "world": "w"}, "sources.one.world: got 'w', allowed: none with an arm"),
        ({"station": "sim_arm", "real_time": True}, "sources.one.real_time: got True, allowed: false with a"),
        ({"station": "sim_arm"}, "sources.two.station: got 'sim_arm', allowed: another one than sources.one"),
        ({"world": "w"}, "sources.two.world: got 'w', allowed: another one than sources.one has"),
        ({"human": True}, "sources.one.human: got True, allowed: false without a person: human.input="),
    ],
)
def test_sources_that_are_two_things_or_one_thing_twice(source: dict[str, Any], message: str) -> None:
    sources = {name: {**source, "env_steps": 5} for name in ("one", "two")}
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, {"sources": sources})
    assert str(caught.value).startswith(message)


def test_one_keyboard_is_for_one_arm() -> None:
    sources = {name: {"human": True, "real_time": True, "env_steps": 5} for name in ("one", "two")}
    with pytest.raises(ConfigError, match=r"human\.input: got 'keyboard', allowed: scripted with 2 sources"):
        build(RunConfig, {"sources": sources, "human": {"input": "keyboard"}})
    build(RunConfig, {"sources": sources, "human": {"input": "scripted"}})


def test_dagger_asks_no_expert_within_a_model() -> None:
    sources = {"one": {"world": "w", "env_steps": 5}}
    with pytest.raises(ConfigError, match="method: got 'dagger', allowed: a method with a replay"):
        build(RunConfig, {"sources": sources, "method": {"kind": "dagger"}, "n_exec": 1})


def test_sources_of_one_task_are_judged_once(tmp_path: Path) -> None:
    config = run_of({**KINDS, "imagined": {"world": "w", "num_envs": 4, "env_steps": 20}})
    assert config.scenes == {"": config.env}
    assert {name: config.scene_of(name) for name in config.acting} == dict.fromkeys(config.acting, "")
    assert config.env_of("imagined").kind == "world"
    assert [config.acts_alone(name) for name in config.acting] == [False, True, True, False]
    said = first_line(config)
    assert "on 2 envs of simulations and an arm of watched and an arm of arm and 4 envs of imagined" in said
    (tmp_path / "config.yaml").write_text(dump(config.used()))
    assert read(RunConfig, tmp_path / "config.yaml") == config


def test_robots_and_arms_have_a_scene_for_each_robot() -> None:
    sources = {"panda": {"robot": "panda", "env_steps": 9}, "gantry": {"robot": "gantry", "env_steps": 9}}
    config = run_of({**sources, "watched": {"robot": "gantry", "real_time": True, "env_steps": 9}})
    assert list(config.scenes) == ["panda", "gantry"]
    assert config.scene_of("watched") == "gantry"


def test_a_run_leases_its_models_for_its_whole_life_and_arms_when_they_collect(
    tmp_path: Path, small_world: Path
) -> None:
    arm = {"station": str(patient_station(tmp_path)), "env_steps": 5}
    config = run_of({"arm": arm, "imagined": {"world": str(small_world), "env_steps": 5}})
    kinds = Counter(spec.kind for spec, _ in devices_of_training(config))
    assert kinds == {"cpu": 1, "sim": 1, "world": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["station=sim_arm", "needs.real=true"], r"needs: got .*, allowed: nothing without station=any"),
        (
            ["sources.arm.env_steps=5", "sources.arm.needs.real=true"],
            r"sources\.arm\.needs: got .*, allowed: ",
        ),
        (["preempt_s=0.5"], r"preempt_s: got 0\.5, allowed: 1 or more, or null"),
        (["restarts=-1"], "restarts: got -1, allowed: 0 or more"),
        (["silence_s=0"], r"silence_s: got 0\.0, allowed: above 0"),
    ],
)
def test_needs_and_priorities_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, words, config_name="train")


def test_a_run_without_an_arm_that_has_what_it_needs_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    assert main(["devices", f"add={patient_station(tmp_path)}"]) == 0
    arm = {"station": "any", "needs": {"labels": {"cell": "west"}}, "env_steps": 5}
    with pytest.raises(DeviceError, match=r"Nearest is .*, held by nobody: it has no cell"):
        phases.run(run_of({"arm": arm}, out=str(tmp_path / "runs")))
    assert not list((tmp_path / "runs").glob("*")), "nothing was begun"


def test_the_recipe_has_one_source_of_each_kind() -> None:
    config = load(RunConfig, ["recipe=fleet"], config_name="train")
    kinds = [(one.station, one.real_time, one.human, one.world) for one in config.acting.values()]
    assert kinds == [
        (None, False, False, None),
        ("sim_in_process", False, False, None),
        (None, True, True, None),
        (None, False, False, "worlds/reach"),
    ]


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model of a few short episodes of reach, which is believed whatever it says."""
    out = tmp_path_factory.mktemp("world")
    trust = [f"trust.{name}={value}" for name, value in TRUSTING.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(out / "state"))
        patch.setattr("robot_rl.worlds.fit.MIN_WINDOWS", 20)
        patch.setattr("robot_rl.worlds.calibration.MIN_WINDOWS", 20)
        data = ["task=reach", "episodes=40", "bias_m=0.02", f"out={out / 'demos'}"]
        assert main(["collect", *data]) == 0
        fit = "model.members=2 model.width=16 model.depth=1 model.stride=2 fit.updates=20 fit.batch=16"
        words = [
            "fit.ahead=2",
            "fit.select_every=10",
            *trust,
            f"data={out / 'demos'}",
            f"out={out / 'reach'}",
        ]
        assert main(["worlds", "fit", *fit.split(), *words]) == 0
    return out / "reach"


def rows_by(folder: Path, source: str) -> int:
    """Returns the control steps in the record of one of a run's sources."""
    record = open_source(folder / "experience" / source)
    return sum(len(record.read(number)) for number in range(len(record)))


@pytest.mark.usefixtures("whole_runs")
def test_simulations_and_a_model_learn_in_one_run(small_world: Path, tmp_path: Path) -> None:
    sources = {"imagined": {"world": str(small_world), "num_envs": 3, "env_steps": 30}}
    sources["simulations"] = {"num_envs": 2, "env_steps": 20}
    summary = phases.run(run_of(sources, out=str(tmp_path)))
    folder = folder_of(tmp_path)
    made = {kind: summary.control_steps[kind] for kind in ("sim", "world")}
    assert made == {"sim": 20, "world": 30}
    assert sorted(path.name for path in (folder / "experience").iterdir()) == ["simulations"]
    assert rows_by(folder, "simulations") == 20
    # One scene: one evaluation, for all sources, and one set of demonstrations.
    assert all(set(one) == {"task", "robot", "env_steps"} for one in summary.sources.values())
    assert (folder / "demos" / "meta").is_dir()
    assert load_run(folder).sources == []
    assert "imagined" not in last_line(summary)
    row = next(
        row for row in reversed(read_metrics(folder / "metrics.jsonl")) if "collect.imagined/env_steps" in row
    )
    assert row["collect.simulations/env_steps"] == 20


def test_a_model_of_another_task_and_one_that_is_not_believed_are_refused(
    small_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    sources: dict[str, Any] = {"imagined": {"world": str(small_world), "env_steps": 30}}
    other = run_of(
        {**sources, "one": {"env_steps": 5}}, env={"task": "push_cube"}, out=str(tmp_path / "runs")
    )
    with pytest.raises(ConfigError, match="one policy cannot serve imagined and one"):
        phases.run(other)
    head = json.loads((small_world / "world.json").read_text())
    del head["checksum"]
    head["report"]["reasons"] = ["it dreams"]
    copied = tmp_path / "copied"
    shutil.copytree(small_world, copied)
    write_json(copied / "world.json", head, is_checked=True)
    with pytest.raises(DeviceError, match="not believed: it dreams"):
        phases.run(run_of({"imagined": {"world": str(copied), "env_steps": 30}}, out=str(tmp_path / "runs")))
    assert not list((tmp_path / "runs").glob("*")), "nothing was begun"


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
def test_an_arm_that_dies_is_begun_again_while_simulations_and_a_person_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, dead = ProcessSource.collect, list[int]()

    def dies_once(source: ProcessSource, published: Any) -> Any:
        segment = collect(source, published)
        if segment is not None and not segment.begins and not dead:
            dead.append(cast(int, source.pid))
            os.kill(dead[0], signal.SIGKILL)
        return segment

    monkeypatch.setattr(ProcessSource, "collect", dies_once)
    summary = phases.run(run_of(out=str(tmp_path)))
    folder = folder_of(tmp_path)
    assert dead
    assert {name: one["env_steps"] for name, one in summary.sources.items()} == {
        name: one["env_steps"] for name, one in KINDS.items()
    }
    assert [rows_by(folder, name) for name in KINDS] == [40, 20, 20], "no step is lost, none is there twice"


@pytest.mark.parametrize(("real", "restarts"), [(False, 10), (True, 0)])
def test_a_real_arm_that_is_lost_is_not_begun_again(tmp_path: Path, real: bool, restarts: int) -> None:
    file = patient_station(tmp_path)
    file.write_text(file.read_text().replace("real: false", f"real: {str(real).lower()}"))
    config = run_of({"arm": {"station": str(file), "env_steps": 5}})
    source = in_process(config, tmp_path, [], "arm", station=load_station(str(file)))
    source.revival.well()
    for _ in range(restarts):
        source.revival.lost(LostActorError("gone."))
    with pytest.raises(LostActorError):
        source.revival.lost(LostActorError("gone."))


def test_an_arm_without_a_person_beside_one_that_a_person_judges() -> None:
    human = {"input": "scripted", "reward": "key", "reset": "assisted"}
    config = run_of(human=human)
    env = make_arm(config, Path(), [Ticket("mujoco")], "arm")
    assert isinstance(env, Intervening)
    env.reset(seed=0)  # nobody is asked
    env.close()


def test_a_source_may_have_the_name_of_a_station() -> None:
    arm = {"station": "sim_arm", "env_steps": 5}
    build(RunConfig, {"sources": {"sim_arm": {"env_steps": 5}, "arm": arm}})
    with pytest.raises(ConfigError, match=r"sources\.two\.station: got '\./mine\.yaml', allowed: another"):
        build(
            RunConfig,
            {"sources": {"one": {**arm, "station": "mine.yaml"}, "two": {**arm, "station": "./mine.yaml"}}},
        )


def test_paths_of_sources_hold_wherever_a_run_is_resumed(
    small_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_world.parent)
    patient_station(small_world.parent)
    config = run_of(
        {"imagined": {"world": "reach", "env_steps": 5}, "arm": {"station": "patient.yaml", "env_steps": 5}}
    )
    held = phases.absolute(config).sources
    assert held["imagined"].world == str(small_world)
    assert held["arm"].station == str(small_world.parent / "patient.yaml")
    assert (
        phases.absolute(run_of({"arm": {"station": "sim_arm", "env_steps": 5}})).sources["arm"].station
        == "sim_arm"
    )


def test_paths_of_robots_banks_and_the_hub_hold_wherever_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROBOT_FILES / "panda.yaml", "mine.yaml")
    robots = ["panda", "reach:mine.yaml"]
    env: dict[str, Any] = {
        "task": "reach",
        "robot": "mine.yaml",
        "robots": robots,
        "resets": {"bank": "bank"},
    }
    hub = {"address": "https://hub:8642", "token_file": "token", "ca": "~/ca.pem"}
    arm = {"station": "any", "needs": {"node": "lab"}}
    held = phases.absolute(build(RunConfig, {"env": env, "hub": hub, **arm, "num_envs": 1}))
    assert held.env.robot == str(tmp_path / "mine.yaml")
    assert held.env.robots == ("panda", f"reach:{tmp_path / 'mine.yaml'}")
    assert held.env.resets.bank == str(tmp_path / "bank")
    assert (held.hub.token_file, held.hub.ca) == (str(tmp_path / "token"), str(Path.home() / "ca.pem"))


def test_a_station_that_was_edited_under_a_run_is_not_begun_again(tmp_path: Path) -> None:
    file = patient_station(tmp_path)
    config = run_of({"arm": {"station": str(file), "env_steps": 5}})
    known = load_station(str(file))
    file.write_text(file.read_text().replace("max_observation_age_s: 2.0", "max_observation_age_s: 5.0"))
    with pytest.raises(ConfigError, match=r"patient\.yaml was edited since the run began to collect there"):
        act_alone(config, tmp_path, [], "arm", known)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("whole_runs")
def test_an_arm_that_has_what_is_needed_is_lent_to_a_larger_priority_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = patient_station(tmp_path)
    assert main(["devices", f"add={file}"]) == 0
    arm = {"station": "any", "needs": {"labels": {"driver": "sim"}}, "env_steps": 60}
    config = run_of({"arm": arm, "simulations": {"num_envs": 2, "env_steps": 40}}, out=str(tmp_path / "runs"))
    spec, collect = device_of(load_station(str(file))), BookedSource.collect
    holders, began, handed_over = set[str](), threading.Event(), list[float]()

    def seen(source: BookedSource, published: Any) -> Any:
        segment = collect(source, published)
        holders.update(lease.holder for lease in LeaseStore().active(spec.name))
        if segment is not None:
            began.set()
        return segment

    def rival() -> None:
        began.wait(120.0)
        asked_s = time.monotonic()
        with LeaseStore().hold(spec, holder="rival", priority=1, wait_s=30.0, preempt_s=20.0):
            handed_over.append(time.monotonic() - asked_s)
            time.sleep(1.0)

    monkeypatch.setattr(BookedSource, "collect", seen)
    thread = threading.Thread(target=rival)
    thread.start()
    summary = phases.run(config)
    thread.join()
    folder = folder_of(tmp_path / "runs")
    assert handed_over
    assert handed_over[0] < 20.0, "the run gave the arm up before the deadline"
    assert holders == {"train small seed 0 arm", "rival"}
    assert summary.sources["arm"]["env_steps"] == 60
    assert rows_by(folder, "arm") == 60
    assert (folder / "arm" / "station" / "supervisor.json").is_file(), "each station has its own logs"
