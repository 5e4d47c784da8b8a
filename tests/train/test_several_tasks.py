"""Several tasks in one run: one action for all, what is told, what is padded, and what a run leaves."""

import json
import shutil
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.cli.train import _plan as first_line
from robot_rl.config import build, load
from robot_rl.core.errors import ConfigError
from robot_rl.core.language import INSTRUCTION, decode_text
from robot_rl.core.names import PRIVILEGED
from robot_rl.data.demos import load_episodes
from robot_rl.data.episodes import together
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.transitions import StepBatch
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.residual import ResidualPolicy
from robot_rl.rollout.envs import make_env, make_expert
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.collect import open_policy
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import collect_episodes
from robot_rl.train.improve.dagger import LabelledSteps
from robot_rl.train.phases import Summary, resume, run
from tests.runs import TINY, folder_of, killed_after, rows_of, undisturbed, weights

FOUR = ("reach", "push_cube", "pick_cube", "open_drawer")
STATE = ["joint", "finger", "tool.pos", "tool.xaxis"]
ENV: dict[str, Any] = {
    "horizon_s": 0.5,
    "num_threads": 1,
    "state": STATE,
    "privileged": True,
    "instruction": "task",
    "common_actions": True,
}
SOURCES: dict[str, Any] = {
    "reach": {"task": "reach", "num_envs": 2, "env_steps": 20},
    "drawer": {"task": "open_drawer", "num_envs": 3, "env_steps": 30},
}
VLA: dict[str, Any] = {
    "kind": "small_vla",
    "horizon": 1,
    "width": 16,
    "depth": 1,
    "heads": 2,
    "context_depth": 1,
    "decodes": "regression",
}


def two(**changes: Any) -> RunConfig:
    """Returns a tiny run of two tasks."""
    words = {key: value for key, value in TINY.items() if key not in ("num_envs", "env", "policy")}
    learning = {"kind": "dagger", "utd": 0.2, "batch": 8}
    made = {**words, "n_exec": 1, "env": ENV, "sources": SOURCES, "policy": VLA, "method": learning}
    return build(RunConfig, {**made, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Path, Summary]]:
    """Returns the folder and the summary of a run of both tasks."""
    out = tmp_path_factory.mktemp("two")
    with undisturbed(out / "state"):
        summary = run(two(out=str(out)))
        yield folder_of(out), summary


def shown(task: str, **changes: Any) -> EnvConfig:
    values: dict[str, Any] = {**ENV, "task": task, "state": tuple(STATE), **changes}
    return EnvConfig(**values)


def episodes_of(task: str, count: int = 2) -> Any:
    with closing(make_env(shown(task), count, autoreset="disabled")) as env:
        expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
        return collect_episodes(env, expert, np.arange(count, dtype=np.uint64))


def test_common_actions_are_the_same_in_every_task_and_the_experts_take_them() -> None:
    firsts = {}
    for task in FOUR:
        with closing(make_env(shown(task), 2)) as env:
            obs, _ = env.reset(seed=0)
            assert env.action_names == ("tool.dx", "tool.dy", "tool.dz", "tool.yaw", "gripper")
            assert decode_text(obs[INSTRUCTION]) == [env.instruction] * 2
            assert env.observation_space.contains(obs)
            firsts[task] = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0).act()
    assert (firsts["reach"][:, 3] == 0.0).all()  # it does not turn,
    assert (firsts["reach"][:, 4] == 1.0).all()  # and its gripper stays open
    assert (firsts["push_cube"][:, 4] == -1.0).all()  # this one pushes with the gripper shut
    assert (firsts["pick_cube"][:, 4] == 1.0).all()


def test_an_expert_with_common_actions_still_does_its_task() -> None:
    for task in ("reach", "push_cube"):
        config = shown(task, horizon_s=None)
        with closing(make_env(config, 8, autoreset="disabled")) as env:
            expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
            episodes = collect_episodes(env, expert, np.arange(8, dtype=np.uint64))
        assert episodes.episode_success().mean() >= 7 / 8


def test_the_text_may_be_another_and_must_fit() -> None:
    config = EnvConfig(task="reach", instruction="open the drawer")
    with closing(make_env(config, 2)) as env:
        obs, _ = env.reset(seed=0)
        assert env.instruction == "open the drawer"
        assert decode_text(obs[INSTRUCTION]) == ["open the drawer"] * 2
    with pytest.raises(ValueError, match="193 bytes, allowed 192"):
        make_env(EnvConfig(task="reach", instruction="x" * 193), 1)


def test_what_a_task_does_not_hide_is_nan_among_others() -> None:
    reach, drawer = episodes_of("reach"), episodes_of("open_drawer")
    less, more = (one.obs[PRIVILEGED].shape[1] for one in (reach, drawer))
    assert (less, more) == (9, 11)  # of reach: speed, goal, goal in the tool; of the drawer two more
    both = together([reach, drawer])
    hidden, rows = both.obs[PRIVILEGED], len(reach.action)
    assert np.isnan(hidden[:rows, less:]).all()
    np.testing.assert_array_equal(hidden[:rows, :less], reach.obs[PRIVILEGED])
    np.testing.assert_array_equal(hidden[rows:], drawer.obs[PRIVILEGED])
    assert both.meta.task == "reach, open_drawer"
    assert both.meta.robot == "panda"
    assert both.meta.instruction == f"{reach.meta.instruction}, {drawer.meta.instruction}"
    assert set(decode_text(both.obs[INSTRUCTION])) == {reach.meta.instruction, drawer.meta.instruction}


def test_labels_of_a_task_that_hides_less_are_kept_with_nan(tmp_path: Path) -> None:
    reach, drawer = episodes_of("reach"), episodes_of("open_drawer")
    both = together([reach, drawer])
    steps = LabelledSteps(both, tmp_path, capacity=4, horizon=1, batch=200, seed=0, device="cpu")
    obs = {key: value[:2] for key, value in reach.obs.items()}
    action = np.full((2, 5), 0.75, np.float32)
    zeros, no = np.zeros(2), np.zeros(2, bool)
    steps.add(
        StepBatch(
            obs=obs,
            action=action,
            base_action=action,
            reward=zeros,
            terminated=no,
            truncated=no,
            next_obs=obs,
            next_base_action=action,
            expert_action=action,
        )
    )
    found = steps.sample()
    labels = (found.actions[:, 0] == 0.75).all(dim=1)
    assert bool(labels.any())
    hidden = found.obs[PRIVILEGED][labels].numpy()
    assert hidden.shape[1] == 11
    assert np.isnan(hidden[:, 9:]).all()
    assert np.isfinite(hidden[:, :9]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"env": {**ENV, "instruction": ""}},
            "env.instruction: got '', allowed: task, and policy.kind=small_vla, with sources",
        ),
        (
            {"policy": {"kind": "gaussian"}},
            "env.instruction: got 'task', allowed: task, and policy.kind=small_vla, with sources of several",
        ),
        (
            {"env": {**ENV, "image_size": [32, 32]}, "policy": {**VLA, "cameras": ["wrist"]}},
            "policy.picture: got [96, 128], allowed: env.image_size, [32, 32], the size of the pictures",
        ),
        (
            {"sources": {**SOURCES, "again": SOURCES["reach"]}},
            "sources.again.robot: got None, which sources.reach has, allowed: a robot once with a task and",
        ),
        (
            {"sources": {"reach": {**SOURCES["reach"], "task": "reech"}}},
            "sources.reach.task: no task named 'reech'. Did you mean 'reach'",
        ),
    ],
)
def test_what_does_not_go_with_several_tasks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        two(**changes)
    assert str(caught.value).startswith(message)


def test_the_recipe() -> None:
    config = load(RunConfig, ["recipe=four_tasks"], config_name="train")
    assert config.task == ", ".join(FOUR)
    assert [config.env_of(name).task for name in config.acting] == list(FOUR)
    assert config.env_steps == sum(source.env_steps for source in config.sources.values())
    assert "150 demonstrations of each task" in first_line(config)


def test_the_recipe_of_two_cubes_clones_the_same_policy() -> None:
    two, four = (
        load(RunConfig, [f"recipe={name}"], config_name="train") for name in ("two_cubes", "four_tasks")
    )
    assert two.task == "pick_red_cube, pick_blue_cube"
    assert (two.plan, two.policy, two.bc) == (four.plan, four.policy, four.bc)
    red, blue = (two.env_of(name) for name in ("red", "blue"))
    assert replace(red, task="") == replace(blue, task="")  # what they show differs in the words alone


def test_a_run_leaves_one_policy_for_both_tasks(finished: tuple[Path, Summary]) -> None:
    folder, summary = finished
    assert (summary.task, summary.env_steps) == ("reach, open_drawer", 50)
    assert {name: one["task"] for name, one in summary.sources.items()} == {
        "reach": "reach",
        "drawer": "open_drawer",
    }
    assert [summary.sources[name]["env_steps"] for name in SOURCES] == [20, 30]
    labelled = [StoreReader(folder / "experience" / name) for name in SOURCES]
    assert [int(source.lengths().sum()) for source in labelled] == [20, 30]
    assert all(source.read(i).is_complete for source in labelled for i in range(len(source)))
    assert load_episodes(folder / "demos/drawer").meta.task == "open_drawer"
    _, meta = load_policy(folder / "policy/final")
    assert (meta.tasks, meta.robots) == (("reach", "open_drawer"), ("panda",))
    assert weights(folder, "base") != weights(folder, "final")


def test_each_task_is_evaluated_with_its_instruction_or_another(
    finished: tuple[Path, Summary], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, summary = finished
    assert main(["evaluate", f"run={folder}", "--json"]) == 0
    *lines, told = capsys.readouterr().out.splitlines()
    assert json.loads(told)["digest"] == summary.final_digest
    assert all("the same as in training" in line for line in lines)
    assert main(["evaluate", f"run={folder}", "robot=reach", "instruction=open the drawer"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert summary.sources["reach"]["final"]["digest"][:16] not in line
    assert "not compared with those of training: the instruction was 'open the drawer'" in line


def test_a_policy_of_several_tasks_plays_all_of_them_or_the_named_one_with_or_without_its_run(
    finished: tuple[Path, Summary], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    shutil.copytree(folder / "policy/final", tmp_path / "alone")
    task_of = {"reach": "reach", "drawer": "open_drawer"}
    digests: list[list[str]] = []
    # Without its run, a policy has its tasks for names, and episodes as long as theirs: the run's last 0.5 s.
    for policy, names in ((folder, list(task_of)), (tmp_path / "alone", list(task_of.values()))):
        assert main(["evaluate", f"policy={policy}", "episodes=2", "--json"]) == 0
        *lines, told = capsys.readouterr().out.splitlines()
        tasks = [*task_of.values(), "reach, open_drawer"]
        assert [line.split(",")[0].split(":")[0] for line in lines[:2]] == tasks[:2]
        assert lines[2].startswith(f"{tasks[2]}, {policy}: success")
        result = json.loads(told)
        assert (result["task"], result["episodes"], list(result["sources"])) == (tasks[2], 4, names)
        digests.append([one["digest"] for one in result["sources"].values()])
        alone = ["evaluate", f"policy={policy}", f"robot={names[1]}", "episodes=2", "--json"]
        assert main(alone) == 0
        one = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (one["task"], one["digest"]) == ("open_drawer", digests[-1][1])
        assert main([*alone, "instruction=move the gripper to the green point"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["digest"] != one["digest"]
    assert main(["evaluate", f"policy={folder}", "robot=panda", "episodes=2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])  # a robot is that of the first source
    assert (first["task"], first["digest"]) == ("reach", digests[0][0])
    assert main(["evaluate", f"policy={folder}", "robot=push_cube"]) == 2
    assert "robot: no robot and no file named 'push_cube'." in capsys.readouterr().err


def test_a_policy_that_was_saved_alone_is_shown_what_it_reads(
    finished: tuple[Path, Summary], tmp_path: Path
) -> None:
    folder, _ = finished
    shutil.copytree(folder / "policy/final", tmp_path / "alone")
    _, meta, env = open_policy(str(tmp_path / "alone"))
    assert (env.task, env.instruction, env.common_actions) == ("reach", "task", True)
    policy, meta = load_policy(tmp_path / "alone")
    stepped = (*meta.action_names[:-1], "gripper.step")
    save_policy(tmp_path / "stepped", policy, meta=replace(meta, action_names=stepped))
    assert open_policy(str(tmp_path / "stepped"))[2].gripper_steps
    assert not env.gripper_steps
    of_one = replace(
        meta, tasks=(), robots=()
    )  # as after fine-tuning it on its first task: the words are that task's
    save_policy(tmp_path / "tuned", policy, meta=of_one)
    assert open_policy(str(tmp_path / "tuned"))[2].instruction == "move the gripper to the green point"


def test_a_run_that_is_told_nothing_cannot_be_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("recipe: custom\n")
    assert main(["evaluate", f"run={tmp_path}", "instruction=open the drawer"]) == 2
    allowed = "instruction: got 'open the drawer', allowed: left out where the policy gets no instruction"
    assert allowed in capsys.readouterr().err


@pytest.mark.usefixtures("whole_runs")
def test_learning_goes_on_in_all_tasks_from_a_policy_that_is_there(
    finished: tuple[Path, Summary], tmp_path: Path
) -> None:
    given = finished[0] / "policy/final"
    more = run(
        two(out=str(tmp_path), bc={"policy": str(given)}, stages=["demos", "clone", "online", "evaluate"])
    )
    folder = Path(more.run)
    assert weights(folder, "base") == weights(finished[0], "final")
    assert weights(folder, "final") != weights(folder, "base")
    assert load_policy(folder / "policy/final")[1].tasks == ("reach", "open_drawer")
    assert list(more.sources) == ["reach", "drawer"]


@pytest.mark.usefixtures("whole_runs")
def test_rl_improves_a_policy_of_several_tasks_in_one_of_them(
    finished: tuple[Path, Summary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    make = ReplayBuffer.__init__

    def noted(self: ReplayBuffer, *args: Any, **how: Any) -> None:
        make(self, *args, **how)
        made.append(self)

    monkeypatch.setattr(ReplayBuffer, "__init__", noted)
    given = finished[0] / "policy/final"
    words = {**ENV, "task": "open_drawer"}
    learning = {
        "kind": "residual",
        "env_steps": 40,
        "batch": 8,
        "explore_steps": 10,
        "capacity": 1000,
        "head": {"width": 16},
        "algorithm": {"width": 16, "critic_warmup": 2, "privileged": True, "residual_l2": 1.0},
    }
    alone: dict[str, Any] = {**TINY, "n_exec": 1, "num_envs": 2, "policy": VLA, "bc": {"policy": str(given)}}
    summary = run(build(RunConfig, {**alone, "env": words, "method": learning, "out": str(tmp_path)}))
    folder = Path(summary.run)
    # The words are in what the frozen VLA makes of an observation: the critics read that and the true state.
    assert all(set(buffer._obs) >= {PRIVILEGED} and len(buffer) for buffer in made)
    policy, meta = load_policy(folder / "policy/final")
    assert isinstance(policy, ResidualPolicy)
    assert (meta.task, meta.tasks) == ("open_drawer", ())
    base: Any = load_policy(given)[0]
    for name, value in base.state_dict().items():
        assert value.equal(policy.base.state_dict()[name]), name
    assert summary.base_digest != summary.final_digest
    assert main(["evaluate", f"policy={folder}", "episodes=2"]) == 0
    with pytest.raises(
        ConfigError, match=r"env\.instruction: got '', allowed: task with bc\.policy.*reach, open_drawer"
    ):
        run(
            build(
                RunConfig,
                {**alone, "env": {**words, "instruction": ""}, "method": learning, "out": str(tmp_path)},
            )
        )


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
def test_a_run_that_was_cut_short_goes_on_to_the_same_result(
    finished: tuple[Path, Summary], tmp_path: Path
) -> None:
    folder, whole = finished
    with killed_after(14):
        run(two(out=str(tmp_path)))
    resumed = resume(folder_of(tmp_path))
    assert (resumed.base_digest, resumed.final_digest) == (whole.base_digest, whole.final_digest)
    assert rows_of(folder_of(tmp_path)) == rows_of(folder)
