"""Whole runs in which a policy and a world model learn in one loop: the bill, trust that lapses, a kill."""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from robot_rl.cli.main import main
from robot_rl.config import build, load
from robot_rl.core.errors import ConfigError
from robot_rl.hal.device import DeviceSpec
from robot_rl.hal.leased import EnvDevice, LeasedEnv
from robot_rl.hal.vector import VectorEnv
from robot_rl.real.claim import device_of
from robot_rl.real.station import load_station
from robot_rl.rollout.envs import make_env
from robot_rl.sched.leases import HeldLease, Lease, LeaseStore
from robot_rl.sim.tasks import reach
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import imagined
from robot_rl.worlds.saved import load_world
from tests.runs import TINY, folder_of, killed_after, patient_station

pytestmark = pytest.mark.usefixtures("whole_runs")

TRUSTING = {
    "coverage_within": 1.0,
    "min_rank": -1.0,
    "max_false_success": 1.0,
    "max_bias": 1.0,
    "max_shift": 99.0,
}
WORLD: dict[str, Any] = {
    "model": {"members": 2, "width": 16, "depth": 1, "stride": 2},
    "fit": {"updates": 20, "batch": 16, "ahead": 2, "select_every": 10},
    "trust": TRUSTING,
}
RUN: dict[str, Any] = {
    **TINY,
    "num_envs": 8,
    "demos": {"episodes": 40, "bias_m": 0.02},
    "method": {
        "kind": "imagined",
        "env_steps": 4000,
        "decisions": 3,
        "strides": 4,
        "first_episodes": 20,
        "more_episodes": 10,
        "refit_updates": 10,
        "rollouts": 2,
        "probes": 2,
        "probe_episodes": 5,
        "exploration": {"process": "flow_noise"},
        "algorithm": {"batch": 12, "epochs": 2, "width": 16, "depth": 1, "reduction": "joint"},
        "world": WORLD,
    },
}


@pytest.fixture(autouse=True)
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "GOAL_RADIUS_M", 0.2)  # a policy that knows nothing sometimes gets there
    monkeypatch.setattr("robot_rl.worlds.fit.MIN_WINDOWS", 20)
    monkeypatch.setattr("robot_rl.worlds.calibration.MIN_WINDOWS", 20)


def run_of(out: Path, **method: Any) -> RunConfig:
    world = {**WORLD, "trust": {**TRUSTING, **method.pop("trust", {})}}
    return build(RunConfig, {**RUN, "out": str(out), "method": {**RUN["method"], "world": world, **method}})


def until(found: Callable[[], Any]) -> Any:
    """Waits for something, and returns it."""
    until_s = time.monotonic() + 60.0
    while not (it := found()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return it


def real_steps(summary: phases.Summary) -> int:
    return summary.control_steps["demo"] + summary.control_steps["sim"]


def column(folder: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(folder / "metrics.jsonl") if name in row]


def test_the_policy_learns_in_the_model_and_real_steps_are_billed_apart(tmp_path: Path) -> None:
    summary = phases.run(run_of(tmp_path, smooth=0.5))
    folder = folder_of(tmp_path)
    world = load_world(folder / "world")
    # 2 probes after 2 rollouts each, of 8 envs, 3 decisions and 4 control steps or less in each.
    assert 0 < summary.control_steps["world"] <= 2 * 2 * 8 * 3 * 4
    assert real_steps(summary) == column(folder, "probe/real_steps")[-1]
    assert world.report.episodes == 40 + 20  # probes come later, and were not fitted again
    assert len(column(folder, "probe/real")) == 2
    assert all(column(folder, "probe/trusted"))
    assert summary.final_success > 0


@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_model_learns_and_imagines_where_the_policy_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    devices = set[str]()

    def spied(function: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, device: str, **more: Any) -> Any:
            devices.add(f"{function.__name__} {device}")
            return function(*args, device=device, **more)

        return spy

    monkeypatch.setattr("robot_rl.worlds.env.load_world", spied(load_world))
    monkeypatch.setattr(imagined, "ModelFit", spied(imagined.ModelFit))
    summary = phases.run(replace(run_of(tmp_path), device=device))
    assert summary.control_steps["world"] > 0
    assert devices == {f"load_world {device}", f"ModelFit {device}"}


def test_probes_without_a_failure_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = imagined.CoEvolution.fitted

    def then_easier(conductor: imagined.CoEvolution) -> None:
        fitted(conductor)
        if conductor.version:
            monkeypatch.setattr(reach, "GOAL_RADIUS_M", 2.0)

    monkeypatch.setattr(imagined.CoEvolution, "fitted", then_easier)
    phases.run(run_of(tmp_path, probes=5))
    assert column(folder_of(tmp_path), "probe/real") == [1.0, 1.0]


def test_where_the_model_is_never_believed_nothing_is_imagined(tmp_path: Path) -> None:
    summary = phases.run(run_of(tmp_path, trust={"min_rank": 1.0}, real_steps=1000))
    folder = folder_of(tmp_path)
    assert "world" not in summary.control_steps
    assert not column(folder, "probe/real")
    assert not any(column(folder, "world/trusted"))
    assert column(folder, "world/version")[-1] >= 2  # it was fitted again with more episodes
    assert load_world(folder / "world").report.reasons
    assert summary.final_success == summary.base_success


@pytest.mark.parametrize("turn", ["rollout", "last rollout", "probe"])
def test_a_model_that_somebody_else_finds_wanting_is_refitted_with_more_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    audits_after(monkeypatch, turn)
    phases.run(run_of(tmp_path, probes=2 if turn != "rollout" else 1))
    folder = folder_of(tmp_path)
    assert column(folder, "world/version") == [1.0, 2.0]
    # 5 of a probe that was played between, with which trust did not come back.
    assert column(folder, "world/episodes") == [60.0, 70.0 if turn == "rollout" else 75.0]
    assert column(folder, "probe/trusted") == ([1.0] if turn == "rollout" else [0.0, 1.0])
    assert load_world(folder / "world").report.is_trusted


def test_where_the_gate_by_samples_is_blind_nothing_is_imagined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagined, "samples_blind", lambda *how: "its members state no noise")
    summary = phases.run(run_of(tmp_path, gate="samples", real_steps=1))
    assert "world" not in summary.control_steps
    assert column(folder_of(tmp_path), "world/trusted") == [1.0]  # by disagreement it may be


def test_a_lapse_after_the_last_real_step_books_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr(imagined.CoEvolution, "say", lambda conductor, line: lines.append(line))
    audits_after(monkeypatch, "rollout")
    phases.run(run_of(tmp_path, real_steps=1))
    assert "it was wrong" in lines[-1]
    assert lines[-1].endswith("The real steps are spent: the run ends")


def audits_after(monkeypatch: pytest.MonkeyPatch, turn: str) -> None:
    """Has another find the first model wanting after the first or last rollout, or during the probe."""
    in_probe, stage, audited = turn == "probe", "imagine" if turn == "rollout" else "probe", list[int]()
    owner, name = (
        (imagined.Experience, "_imagined_success") if in_probe else (imagined.CoEvolution, "imagined_rollout")
    )
    before = getattr(owner, name)

    def then_audited(it: Any, *how: Any) -> Any:
        found = before(it, *how)
        conductor = it._conductor if in_probe else it
        if conductor.stage == stage and not audited:
            audited.append(conductor.version)
            world = load_world(conductor.folder)
            world.save_report(conductor.folder, replace(world.report, reasons=("it was wrong",)))
        return found

    monkeypatch.setattr(owner, name, then_audited)


def test_trust_lapses_at_a_probe_and_returns_after_a_refit(tmp_path: Path) -> None:
    phases.run(run_of(tmp_path, trust={"max_shift": 1e-9}, probes=3))
    folder = folder_of(tmp_path)
    assert column(folder, "probe/trusted") == [0.0, 0.0, 0.0]  # every probe is a surprise here
    assert column(folder, "world/trusted") == [1.0, 1.0, 1.0]  # each refit is believed until the next probe
    episodes = column(folder, "world/episodes")
    assert [later - before for before, later in itertools.pairwise(episodes)] == [15.0, 15.0]


def test_a_lapse_is_seen_among_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    seen, plays = list[tuple[str, list[str]]](), imagined.played

    def looking(*how: Any) -> Any:
        capsys.readouterr()
        assert main(["devices", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        trust = [one["labels"]["trust"] for one in shown["devices"] if one["kind"] == "world"]
        holders = [
            one["holder"] for one in shown["leases"] if "imag" in one["holder"] or "real" in one["holder"]
        ]
        seen.append((trust[0][:11] if trust else "no model", holders))
        return plays(*how)

    monkeypatch.setattr(imagined, "played", looking)
    phases.run(run_of(tmp_path, trust={"max_shift": 1e-9}, probes=2, first_episodes=10, probe_episodes=10))
    booked = "train tiny: real episodes"
    assert seen == [
        ("no model", [booked]),  # before the first fit
        ("ok", ["train tiny: imagination", booked]),  # the first probe
        ("quarantined", [booked]),  # trust has lapsed: the lease of the model is over, the real env is booked
        ("ok", ["train tiny: imagination", booked]),  # after the refit
    ]


@pytest.mark.slow
def test_real_episodes_are_booked_on_an_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver and supervisor begin with each booking, and are gone while the run imagines."""
    leased = dict[str, list[int]](collect=[], probe=[], imagine=[])
    station = patient_station(tmp_path)
    arm = device_of(load_station(str(station))).name
    plays, imagines = imagined.played, imagined.ImaginedSource.collect

    def playing(env: VectorEnv, *how: Any) -> Any:
        leased["probe" if len(leased["imagine"]) else "collect"].append(len(LeaseStore().active(arm)))
        return plays(env, *how)

    def imagining(source: Any, published: Any) -> Any:
        found = imagines(source, published)
        leased["imagine"] += [len(LeaseStore().active(arm))] * (found is not None)
        return found

    monkeypatch.setattr(imagined, "played", playing)
    monkeypatch.setattr(imagined.ImaginedSource, "collect", imagining)
    config = run_of(tmp_path, first_episodes=14, probe_episodes=2, probes=1)
    summary = phases.run(replace(config, station=str(station)))
    assert real_steps(summary) == column(folder_of(tmp_path), "probe/real_steps")[-1]
    assert leased == {"collect": [1] * 14, "probe": [1] * 2, "imagine": [0] * 2}


def test_an_arm_is_asked_for_and_given_up_at_the_end_of_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, had = LeaseStore(), list[str]()
    play, config = imagined.RealSource._play, run_of(tmp_path, first_episodes=14, probe_episodes=2, probes=1)
    arm = EnvDevice(
        DeviceSpec(name="arm", kind="robot"), lambda _: make_env(config.env, 1, autoreset="disabled")
    )

    def playing(source: imagined.RealSource, env: LeasedEnv, lease: HeldLease, *how: Any) -> None:
        had.append("run")
        if len(had) == 2:
            rival.start()
            until(lambda: lease.preemption)
        play(source, env, lease, *how)

    def lets_go_when_asked(held: Lease) -> None:
        had.append(until(lambda: store.preemption(held)).by)
        store.release(held)

    def has_a_turn() -> None:
        with store.hold(arm.spec, holder="rival", priority=1, wait_s=60.0, preempt_s=60.0):
            had.append("rival")

    monkeypatch.setattr(imagined.RealSource, "_device", lambda source, wanted, *, is_probe: arm)
    monkeypatch.setattr(imagined.RealSource, "_play", playing)
    another = store.acquire(arm.spec, holder="another", ttl_s=600.0, preemptible=True)
    first, rival = Thread(target=lets_go_when_asked, args=[another]), Thread(target=has_a_turn)
    first.start()
    phases.run(replace(config, priority=1, preempt_s=60.0, turn_s=1.0))
    for thread in (first, rival):
        thread.join()
    assert had == ["train tiny: real episodes", "run", "rival", "run", "run"]  # 14 episodes, and a probe


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["human.input=scripted"], "real_time: got False, allowed: with station="),
        (["station=sim_arm", "human.input=scripted"], "human.input: got 'scripted', allowed: none"),
        (
            ["station=sim_arm", "human.reward=classifier", "human.classifier=x"],
            "human.reward: got 'classifier'",
        ),
    ],
)
def test_an_arm_is_booked_without_a_person(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, ["recipe=imagined", *words], config_name="train")


@pytest.mark.parametrize("saves", [3, 6])
def test_a_run_that_was_killed_goes_on(tmp_path: Path, saves: int) -> None:
    config = run_of(tmp_path)
    with killed_after(saves):
        phases.run(config)
    folder = folder_of(tmp_path)
    summary = phases.resume(folder)
    assert len(column(folder, "probe/real")) == 2
    assert real_steps(summary) == column(folder, "probe/real_steps")[-1]


def test_the_recipe_and_what_it_refuses() -> None:
    assert load(RunConfig, ["recipe=imagined"], config_name="train").method.kind == "imagined"
    with pytest.raises(ConfigError, match=r"method.vote: got 0"):
        load(RunConfig, ["recipe=imagined", "method.vote=0"], config_name="train")
    with pytest.raises(ConfigError, match=r"model.members: got 1"):
        load(RunConfig, ["recipe=imagined", "method.world.model.members=1"], config_name="train")
    with pytest.raises(ConfigError, match="needs demonstrations"):
        load(RunConfig, ["recipe=imagined", "stages=[look,evaluate,online,evaluate]"], config_name="train")
