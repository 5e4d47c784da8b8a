"""Several robots in one run: what is refused, who collects how much, what is mixed, and what a run leaves."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from robot_rl.cli.main import main
from robot_rl.cli.train import _outcome as last_line
from robot_rl.cli.train import _plan as first_line
from robot_rl.config import build, dump, load, read
from robot_rl.core.algorithm import Algorithm
from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError
from robot_rl.data.demos import load_episodes
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta, together
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.store.reader import open_source
from robot_rl.data.transitions import StepBatch
from robot_rl.policies.checkpoint import check_meta, load_policy
from robot_rl.rollout.envs import make_env
from robot_rl.rollout.sources import Here, Source
from robot_rl.rollout.weights import Publisher
from robot_rl.telemetry import figures
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.telemetry.runs import Outcome, load_run
from robot_rl.telemetry.settings import Setting
from robot_rl.train.collect import open_policy
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import load_demonstrations
from robot_rl.train.devices import devices_of_training
from robot_rl.train.earlier import check_spaces, experience_of
from robot_rl.train.experience import OneForEach
from robot_rl.train.improve.config import OffPolicySettings
from robot_rl.train.improve.method import Start, settings_of
from robot_rl.train.improve.off_policy import _replay as replay_of
from robot_rl.train.improve.off_policy import steps
from robot_rl.train.loop import Batches, Experience, Learner, Pacer, Run, train
from robot_rl.train.phases import Summary, resume, run
from robot_rl.train.record import write_report
from robot_rl.train.schedule import Counters, Ratio
from tests.runs import SMALL, folder_of, killed_after, rows_of, undisturbed, weights

ROBOTS: dict[str, Any] = {
    "panda": {"robot": "panda", "num_envs": 2, "env_steps": 20, "share": 0.75},
    "gantry": {"robot": "gantry", "num_envs": 3, "env_steps": 30, "share": 0.25},
}


def two(**changes: Any) -> RunConfig:
    """Returns a tiny run of a Panda and a gantry."""
    words = {key: value for key, value in SMALL.items() if key != "num_envs"}
    learning = {key: value for key, value in SMALL["method"].items() if key != "env_steps"}
    env = {**SMALL["env"], "state": ["tool", "goal"]}
    return build(RunConfig, {**words, "method": learning, "env": env, "sources": ROBOTS, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Path, Summary]]:
    """Returns the folder and the summary of a run of both."""
    out = tmp_path_factory.mktemp("two")
    with undisturbed(out / "state"):
        summary = run(two(out=str(out)))
        yield folder_of(out), summary


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"env": {"robot": "panda"}},
            "env.robot: got 'panda', allowed: None, as if left out: with sources",
        ),
        ({"num_envs": 4}, "num_envs: got 4, allowed: 16, as if left out: with sources each has its own"),
        ({"method": {"env_steps": 7}}, "method.env_steps: got 7, allowed: 100000, as if left out"),
        ({"method": {"kind": "grpo"}}, "method: got 'grpo', allowed: a method with a replay for sources"),
        ({"real_time": True}, "real_time: got True, allowed: False, as if left out: with sources each has"),
        ({"station": "sim_arm"}, "station: got 'sim_arm', allowed: None, as if left out: with sources each"),
        ({"human": {"input": "scripted"}}, "human.input: got 'scripted' with sources, allowed: none, unless"),
        ({"env": {"kind": "gym", "id": "Hopper-v5"}, "stages": ["look", "evaluate"]}, "env.kind: got 'gym'"),
        ({"demos": {"path": "/"}}, "demos.path: got '/', allowed: one robot alone, for now"),
        ({"demos": {"mirror": True}}, "demos.mirror: got True, allowed: one robot alone, for now"),
        ({"replay": {"reuse": ["/"]}}, "replay.reuse: got ['/'], allowed: one robot alone, for now"),
    ],
)
def test_settings_that_do_not_go_with_several_robots(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, {"sources": ROBOTS, **changes})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"robot": "gantri"}, "sources.gantry.robot: no robot and no file named 'gantri'. Did you mean 'gan"),
        ({"robot": "panda"}, "sources.gantry.robot: got 'panda', which sources.panda has, allowed: a robot"),
        ({"env_steps": 0}, "sources.gantry.env_steps: got 0, allowed: 1 or more"),
        ({"num_envs": 0}, "sources.gantry.num_envs: got 0, allowed: 1 or more"),
        ({"share": 0.5}, "sources: got the shares {'panda': 0.75, 'gantry': 0.5}, allowed: one for each of"),
        ({"share": None}, "sources: got the shares {'panda': 0.75}, allowed: one for each of panda, gantry"),
        ({"step": 5}, "sources.gantry.step: no such key."),
        ({"cameras": ["front"]}, "sources.gantry.cameras: got ('front',), allowed: names of env.cameras, []"),
        (
            {"world": "here", "control_hz": 10.0},
            "sources.gantry.control_hz: got 10.0, allowed: none with a world",
        ),
        ({"control_hz": 0.0}, "sources.gantry.control_hz: got 0.0, allowed: above 0"),
    ],
)
def test_sources_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, {"sources": {**ROBOTS, "gantry": {**ROBOTS["gantry"], **changes}}})
    assert str(caught.value).startswith(message)


def test_a_source_without_a_budget_or_with_a_name_that_is_no_folder() -> None:
    with pytest.raises(ConfigError, match=r"sources\.one\.env_steps: missing"):
        build(RunConfig, {"sources": {"one": {"robot": "panda"}}})
    with pytest.raises(ConfigError, match=r"got the name '\.\./one', allowed: small letters, digits"):
        build(RunConfig, {"sources": {"../one": {"robot": "panda", "env_steps": 5}}})


def test_one_robot_is_a_source_without_a_name() -> None:
    config = build(RunConfig, SMALL)
    assert list(config.acting) == [""]
    assert (config.acting[""].num_envs, config.env_steps) == (2, 40)
    assert config.env_of("") is config.env
    assert "sources" not in config.used()


def test_the_settings_of_several_are_written_and_read_back(tmp_path: Path) -> None:
    config = two()
    assert [config.env_of(name).robot for name in config.acting] == ["panda", "gantry"]
    assert config.env_steps == 50
    assert "num_envs" not in config.used()
    (tmp_path / "config.yaml").write_text(dump(config.used()))
    assert read(RunConfig, tmp_path / "config.yaml") == config


def test_the_recipe_and_its_sources_from_the_command_line() -> None:
    words = ["recipe=two_robots", "sources.gantry.env_steps=500"]
    config = load(RunConfig, words, config_name="train")
    assert list(config.sources) == ["panda", "gantry"]
    assert config.sources["gantry"].env_steps == 500
    assert config.env_steps == config.sources["panda"].env_steps + 500
    said = first_line(config)
    assert "demonstrations of each robot" in said
    assert "RL on 16 envs of panda and 16 envs of gantry" in said


@pytest.mark.usefixtures("whole_runs")
def test_robots_that_show_other_elements_are_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    config = two(out=str(tmp_path / "runs"), env={**SMALL["env"]})
    with pytest.raises(ConfigError) as caught:
        run(config)
    assert str(caught.value) == (
        "sources: one policy cannot serve panda and gantry. gantry with panda: its state elements differ: "
        "it has x.pos, y.pos, z.pos, yaw.pos and lacks joint1.pos, joint2.pos, joint3.pos, joint4.pos, "
        "joint5.pos, joint6.pos, joint7.pos. "
        "Show what all of them have: env.state=finger_joint1,finger_joint2,tool,goal,goal_in_tool. "
        "Or list all robots: env.robots=panda,gantry."
    )
    assert not (tmp_path / "runs").exists()


META = EpisodesMeta(
    task="reach",
    robot="a",
    control_hz=20.0,
    instruction="",
    state_names=("tool.x", "go.x"),
    action_names=("dx",),
)
STATE = {"state": Feature("float32", (2,))}


@pytest.mark.parametrize(
    ("other", "features", "message"),
    [
        (
            {"action_names": ("dx", "dy")},
            STATE,
            r"joints \(action\) differ: it has dy\. Train them in a run each",
        ),
        (
            {"control_hz": 10.0},
            STATE,
            r"b\.control_hz: got 10\.0, allowed: 20, that of sources\.a: a robot has one rate",
        ),
        ({"state_names": ("go.x", "tool.x")}, STATE, r"state elements are in another order: go\.x, tool\.x"),
        ({"state_names": ("a.x", "b.x")}, STATE, r"lacks tool\.x, go\.x\. Train them in a run each"),
        (
            {"state_names": ("tool.x", "b.x")},
            STATE,
            r"lacks go\.x\. Show what all of them have: env\.state=tool\.",
        ),
        ({}, {"state": Feature("float32", (3,))}, r"it observes .*\(3,\).*, not .*\(2,\)"),
        (
            {"action_names": ("dx", "dy"), "robot": "b"},
            STATE,
            r"has dy\. List all robots: env\.robots=a,b\.$",
        ),
        (
            {"state_names": ("b.x",), "robot": "b", "task": "push"},
            STATE,
            r"go\.x\. List all robots: env\.robots=reach:a,push:b\.$",
        ),
    ],
)
def test_spaces_that_differ(other: dict[str, Any], features: Mapping[str, Feature], message: str) -> None:
    check_spaces({"a": META, "b": META}, {"a": STATE, "b": STATE})
    with pytest.raises(ConfigError, match=message):
        check_spaces({"a": META, "b": replace(META, **other)}, {"a": STATE, "b": features})


# --- budgets, replays, batches -------------------------------------------------------------------


def test_counters_know_who_collected_and_old_checkpoints_do_not() -> None:
    counters = Counters()
    counters.add(batch(1, 3))
    counters.add(batch(0, 2))
    assert (counters.env_steps, counters.by_source, counters.of_source(7)) == (5, [2, 3], 0)
    later = Counters()
    later.load_state_dict(counters.state_dict())
    assert later == counters
    later.load_state_dict({"env_steps": 40, "updates": 4})  # one source, then
    assert later.of_source(0) == 40


def batch(actor: int, rows: int, value: float = 0.0) -> StepBatch:
    """Returns a step of `rows` envs that observe `value`."""
    ones, off = np.ones((rows, 2), np.float32), np.zeros(rows, bool)
    return StepBatch(
        obs={"state": value * ones},
        base_action=ones,
        action=ones,
        reward=np.zeros(rows, np.float32),
        terminated=off,
        truncated=off,
        next_obs={"state": value * ones},
        next_base_action=ones,
        actor=actor,
    )


class Collector(Here):
    """A source that says how often it was asked."""

    def __init__(self, rows: int) -> None:
        self.rows, self.asked = rows, 0

    def collect(self, handle: Publisher) -> StepBatch:
        self.asked += 1
        return batch(0, self.rows)


class Counting:
    """Counts its updates."""

    def __init__(self) -> None:
        self.updates = 0

    def update(self, batch: object) -> dict[str, float]:
        self.updates += 1
        return {}


class Tally:
    """Experience that counts the steps of each actor."""

    def __init__(self) -> None:
        self.by_actor = [0, 0]

    def add(self, steps: StepBatch) -> None:
        self.by_actor[steps.actor] += len(steps.reward)

    def sample(self) -> None:
        return None


def test_a_source_collects_no_more_than_its_budget_and_the_learner_is_paid_for_all_steps() -> None:
    sources, tally, learner = [Collector(2), Collector(1)], Tally(), Counting()
    budgets = (4, 7)
    loop = Run(
        sources=cast("list[Source]", sources),
        experience=cast(Experience, tally),
        learners=[Learner(cast(Algorithm, learner), cast(Batches, tally), Ratio(2.0), Publisher())],
        pacer=Pacer(
            finished=lambda at: all(at.of_source(i) >= budget for i, budget in enumerate(budgets)),
            budgets=budgets,
        ),
        stage=lambda name: nullcontext(),
    )
    train(loop)
    # Two steps a turn spend 4 in two turns, one step a turn spends 7 in seven.
    assert [source.asked for source in sources] == [2, 7]
    assert tally.by_actor == loop.counters.by_source == [4, 7]
    assert (loop.counters.env_steps, learner.updates) == (11, 22)


def test_the_steps_of_each_source_have_a_buffer_of_their_own() -> None:
    def buffers() -> list[ReplayBuffer]:
        return [ReplayBuffer(100, lanes, {"state": ((2,), np.float32)}, 2) for lanes in (2, 3)]

    mine = buffers()
    keeper = OneForEach(mine)
    for one in (batch(0, 2), batch(1, 3), batch(1, 3)):
        keeper.add(one)
    assert [len(buffer) for buffer in mine] == [2, 6]
    with pytest.raises(IndexError):
        keeper.add(batch(2, 2))
    others = buffers()
    OneForEach(others).load_state_dict(keeper.state_dict())
    assert [len(buffer) for buffer in others] == [2, 6]


def test_batches_mix_demonstrations_and_sources_in_their_shares(finished: tuple[Path, Summary]) -> None:
    folder, _ = finished
    config = two(evaluate={"num_envs": 2})
    episodes = load_demonstrations(folder / "demos", config)
    base, _ = load_policy(folder / "policy/base")
    start = Start(episodes=episodes, base=base, envs={}, eval_envs={})
    experience, sampler = replay_of(config, start, 0, lambda replay: replay, lambda: 0)
    draw = steps(settings_of(config, OffPolicySettings))
    width, actions = episodes.obs["state"].shape[1], episodes.action.shape[1]
    for actor, (rows, value) in enumerate(((2, 7.0), (3, 9.0))):
        one = batch(actor, rows, value)
        ones, action = np.ones((rows, width), np.float32), np.ones((rows, actions), np.float32)
        one.obs = one.next_obs = {"state": value * ones}
        one.action = one.base_action = one.next_base_action = action
        experience.add(one)
    found: Any = draw(sampler, np.random.default_rng(0))
    # 8 rows: half demonstrations, and of the other 4 three quarters of the Panda, one of the gantry.
    assert torch.bincount(found.origin.pool).tolist() == [4, 3, 1]
    assert (found.obs["state"][4:7] == 7.0).all()
    assert (found.obs["state"][7] == 9.0).all()


def test_episodes_of_two_robots_stand_one_after_the_other(finished: tuple[Path, Summary]) -> None:
    folder, _ = finished
    parts = [load_episodes(folder / "demos" / name) for name in ("panda", "gantry")]
    both = together(parts)
    both.check()
    assert both.meta.robot == "panda, gantry"
    assert (both.num_episodes, len(both.reward)) == (6, sum(len(part.reward) for part in parts))
    np.testing.assert_array_equal(both.bounds()[0][3:], parts[1].bounds()[0] + len(parts[0].reward))
    np.testing.assert_array_equal(both.final_obs["state"][3:], parts[1].final_obs["state"])
    assert together(parts[:1]) is parts[0]


# --- a whole run ---------------------------------------------------------------------------------


def test_each_robot_has_its_demonstrations_its_budget_and_its_experience(
    finished: tuple[Path, Summary],
) -> None:
    folder, summary = finished
    for name, env_steps in (("panda", 20), ("gantry", 30)):
        assert load_episodes(folder / "demos" / name).meta.robot == name
        kept = open_source(folder / "experience" / name)
        assert (kept.meta.robot, kept.lengths().sum()) == (name, env_steps)
        assert summary.sources[name]["env_steps"] == env_steps
    assert summary.env_steps == 50
    rows = read_metrics(folder / "metrics.jsonl")
    (demos,) = (row for row in rows if "demos/episodes" in row)
    assert [demos[f"{group}/episodes"] for group in ("demos", "demos.panda", "demos.gantry")] == [6, 3, 3]
    last = [row for row in rows if "collect.panda/env_steps" in row][-1]
    assert [last[f"collect.{name}/env_steps"] for name in ROBOTS] == [20, 30]
    assert devices_of_training(two()) == devices_of_training(build(RunConfig, SMALL))


def test_the_base_is_cloned_from_both_with_one_normaliser(finished: tuple[Path, Summary]) -> None:
    folder, _ = finished
    policy: Any = load_policy(folder / "policy/base")[0]
    both = np.concatenate([load_episodes(folder / "demos" / name).obs["state"] for name in ROBOTS])
    mean = policy.normaliser.get_buffer("mean_state")
    np.testing.assert_allclose(mean, both.mean(axis=0), rtol=1e-4, atol=1e-5)


def test_success_is_told_for_each_robot_and_for_both(finished: tuple[Path, Summary]) -> None:
    folder, summary = finished
    assert summary.episodes == 8  # 4 held-out episodes of each
    for which, success in (("base", summary.base_success), ("final", summary.final_success)):
        found = json.loads((folder / f"evaluation-{which}.json").read_text())
        each = {name: found["sources"][name] for name in ROBOTS}
        assert {name: summary.sources[name][which] for name in ROBOTS} == each
        assert found["success"] == success == (each["panda"]["success"] + each["gantry"]["success"]) / 2
        assert len({each["panda"]["digest"], each["gantry"]["digest"], found["digest"]}) == 3
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "eval/success" in row]
    assert [row["eval/episodes"] for row in rows][-1] == 8
    assert all(row["eval.panda/episodes"] == row["eval/episodes"] / 2 for row in rows)
    shown = replace(
        summary,
        base_success=0.25,
        final_success=0.75,
        sources={
            "panda": {"base": {"success": 0.5}, "final": {"success": 1.0}},
            "gantry": {"base": {"success": 0.0}, "final": {"success": 0.5}},
        },
    )
    assert last_line(shown) == (
        "success 25.0% before, 75.0% (panda 50.0% before, 100.0%; gantry 0.0% before, 50.0%)"
    )


def test_the_saved_policy_serves_its_robots_and_no_other(finished: tuple[Path, Summary]) -> None:
    folder, _ = finished
    _, meta, env = open_policy(str(folder))
    assert (meta.robot, meta.robots, env.robot) == ("panda", ("panda", "gantry"), "panda")
    for robot in meta.robots:
        load_policy(folder / "policy/final", expect=replace(meta, robot=robot, robots=()))
    with pytest.raises(CheckpointError, match=r"robot = \(2\) panda, gantry, here it is 'viperx'"):
        check_meta("policy", meta, replace(meta, robot="viperx", robots=()))
    with closing(make_env(replace(env, robot="gantry"), 1)) as gantry:
        assert gantry.state_names == meta.state_names


def test_evaluate_repeats_the_run_on_all_its_robots_or_on_one(
    finished: tuple[Path, Summary], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, summary = finished
    assert main(["evaluate", f"run={folder}", "--json"]) == 0
    *lines, told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].rsplit(", ")[-1] for line in lines[:2]] == ["panda", "gantry"]
    assert all("the same as in training" in line for line in lines)
    assert len(lines) == 3
    assert json.loads(told)["digest"] == summary.final_digest
    assert main(["evaluate", f"run={folder}", "robot=gantry", "which=base"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "gantry" in line
    assert summary.sources["gantry"]["base"]["digest"][:16] in line
    assert "the same as in training" in line
    assert main(["evaluate", f"run={folder}", "robot=viperx"]) == 2
    assert "robot: got 'viperx', the run" in capsys.readouterr().err
    assert main(["evaluate", f"policy={folder}", "robot=viperx", "episodes=1"]) == 2
    assert "here it is 'viperx'" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["evaluate", f"policy={folder}", "robot=gantry", "episodes=4"]) == 0
    (gantry,) = capsys.readouterr().out.splitlines()
    assert main(["evaluate", f"policy={folder}", "episodes=4"]) == 0
    *each, _ = capsys.readouterr().out.splitlines()
    assert len(each) == 2
    assert each[1] == gantry


def test_the_report_shows_both_curves(
    finished: tuple[Path, Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, summary = finished
    record = load_run(folder)
    assert record.sources == ["panda", "gantry"]
    steps_of, outcomes = record.of_source("gantry").evaluations()
    assert [outcome.episodes for outcome in outcomes][-1] == 4
    assert list(steps_of) == list(record.evaluations()[0])
    final = record.of_source("gantry").outcome("final")
    assert final is not None
    assert final.share == summary.sources["gantry"]["final"]["success"]
    drawn: dict[str, list[tuple[str, Outcome | None]]] = {}

    def draw(figure: str) -> Callable[[Sequence[Setting]], str]:
        def note(settings: Sequence[Setting]) -> str:
            drawn[figure] = [(setting.label, setting.outcome("final")) for setting in settings]
            return "<svg></svg>"

        return note

    for figure in ("learning_curves", "before_after"):
        monkeypatch.setattr(figures, figure, draw(figure))
    for figure in ("metric_grid", "stage_bars"):
        monkeypatch.setattr(figures, figure, lambda *_: None)
    page = write_report(folder).read_text()
    assert "Success of each robot over the control steps of all robots" in page
    each = [(name, record.of_source(name).outcome("final")) for name in ROBOTS]
    assert drawn["learning_curves"] == each
    assert drawn["before_after"] == [*each, ("together", record.outcome("final"))]


def test_experience_of_several_robots_is_not_taken_as_that_of_one(finished: tuple[Path, Summary]) -> None:
    folder, _ = finished
    with pytest.raises(
        DatasetError, match=r"has experience of gantry and panda\. Give that of one: .*/gantry"
    ):
        experience_of(str(folder))
    assert experience_of(str(folder / "experience/panda")) == folder / "experience/panda"


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("saves", [9, 16])
def test_a_run_that_was_cut_short_goes_on_to_the_same_result(
    finished: tuple[Path, Summary], tmp_path: Path, saves: int
) -> None:
    folder, whole = finished
    with killed_after(saves):
        run(two(out=str(tmp_path)))
    resumed = resume(folder_of(tmp_path))
    assert (resumed.base_digest, resumed.final_digest) == (whole.base_digest, whole.final_digest)
    assert weights(folder_of(tmp_path), "final") == weights(folder, "final")
    assert rows_of(folder_of(tmp_path)) == rows_of(folder)
    for name in ROBOTS:
        assert (
            open_source(folder_of(tmp_path) / "experience" / name).lengths().sum()
            == ROBOTS[name]["env_steps"]
        )


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("latent", {"algorithm": {"width": 16}}),
        ("chunked", {"offline_updates": 2}),
        ("direct", {"pretrain_updates": 2}),
    ],
)
def test_every_method_with_a_replay_learns_from_both(
    tmp_path: Path, method: str, own: dict[str, Any]
) -> None:
    learning = {"batch": 8, "explore_steps": 30, "capacity": 1000, **own}
    config = two(out=str(tmp_path), method={"kind": method, **learning})
    summary = run(config)
    assert summary.env_steps == 50
    assert set(summary.sources) == {"panda", "gantry"}


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
def test_two_robots_learn_from_nothing(tmp_path: Path) -> None:
    learning = {"batch": 8, "explore_steps": 10, "capacity": 1000, "demo_ratio": 0.0}
    stages = ("look", "evaluate", "online", "evaluate")
    summary = run(two(out=str(tmp_path), method={"kind": "direct", **learning}, stages=stages, n_exec=1))
    assert summary.env_steps == 50
    assert load_episodes(folder_of(tmp_path) / "look" / "gantry").num_episodes == 3
