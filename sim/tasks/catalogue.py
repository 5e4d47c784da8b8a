"""The table of tasks in docs/tasks.md, written from the tasks themselves."""

import inspect
import re
from pathlib import Path

import numpy as np

from robot_rl.core.registry import TABLE, resolve
from robot_rl.sim.registration import env_id
from robot_rl.sim.task import Task
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

EPISODES = 64
"""Episodes behind each number of the column `expert`."""

_HEAD = "| task | what | randomised | success | horizon | expert | state, action |"
_BEGIN, _END = "<!-- tasks: written by robot_rl.sim.tasks.catalogue.update -->", "<!-- end of tasks -->"


def update(document: Path) -> None:
    """Writes the new table between its two marks."""
    text = document.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    rows = [_HEAD, "|" + " --- |" * _HEAD.count(" | ") + " --- |", *(row(task) for task in TABLE["task"])]
    document.write_text("\n".join([before + _BEGIN, *rows, _END + rest.split(_END)[1]]), encoding="utf-8")


def row(name: str) -> str:
    """Returns a task's line of the table; runs its expert, if it has one, for `EPISODES` episodes."""
    task: Task = resolve("task", name)()
    env = SimVectorEnv(EnvConfig(task=name), EPISODES, autoreset="disabled")
    what, randomised, success = described(task)
    share = f"{100 * expert_success(env):.0f} %" if task.has_expert() else "none"
    sizes = f"{len(env.state_names)}, {len(env.action_names)}"
    robot = "" if task.default_robot == Task.default_robot else f" (on `{task.default_robot}`)"
    horizon = f"{task.horizon_s:g} s"
    cells = (f"`{name}`{robot}<br>`{env_id(name)}`", what, randomised, success, horizon, share, sizes)
    return f"| {' | '.join(cells)} |"


def described(task: Task) -> tuple[str, str, str]:
    """Returns what, what is randomised, and success, from the docstring of the task's class."""
    text = " ".join((inspect.getdoc(type(task)) or "").split())
    match = re.match(r"(.*?[.;].*?)Randomised: (.*?)\. Success: (.*?)\.(?= [A-Z]|$)", text)
    assert match is not None, f"{type(task).__name__}: its docstring needs `Randomised:` and `Success:`"
    what, randomised, success = (part.strip() for part in match.groups())
    return what, randomised, success


def expert_success(env: SimVectorEnv) -> float:
    """Returns in what share of one episode an env the unbiased expert succeeds."""
    env.reset(seed=0)
    expert, live = env.expert(), np.ones(env.num_envs, bool)
    solved = np.zeros(env.num_envs, bool)
    while live.any():
        _, _, terminated, truncated, infos = env.step_masked(expert.act(), live)
        solved |= infos["success"]
        live &= ~(terminated | truncated)
    return float(solved.mean())
