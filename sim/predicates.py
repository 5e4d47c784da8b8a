"""What can be named in `env.formula`, by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from robot_rl.core.arrays import Array, norm
from robot_rl.core.errors import require
from robot_rl.sim.backends.backend import View
from robot_rl.sim.formula import Formula, parse
from robot_rl.sim.task import Task

NEAR_M = 0.05
"""Distance of the tool from a thing within which `tool_near_<thing>` holds."""
STILL_M_S = 0.05
"""Speed of the tool below which `tool_still` holds."""


def predicates_of(task: Task) -> Mapping[str, Callable[[View], Array]]:
    """Returns the predicates of a task by name, functions of the view to (B,) bool.

    Every task has `solved`, its own success; those of robots with one tool have `tool_near_<thing>` for each
    thing whose `<thing>.pos` they name; `tool_still` where `tool.linvel` is named. `Task.predicates` adds
    others.
    """
    quantities = (*task.observation, *task.privileged)
    found: dict[str, Callable[[View], Array]] = {"solved": lambda view: task.evaluate(view)["success"]}
    for quantity in quantities:
        thing, _, kind = quantity.rpartition(".")
        if kind == "pos" and "_in_" not in thing and task.body not in ("two_arms", "hand"):
            found[f"tool_near_{thing}"] = _near(quantity)
    if "tool.linvel" in quantities:
        found["tool_still"] = lambda view: norm(view["tool.linvel"]) < STILL_M_S
    return found | task.predicates()


def check_formula(text: str, task: Task, control_hz: float, horizon_s: float | None = None) -> Formula:
    """Returns the formula of a text for a task, at a control rate.

    Raises:
        ConfigError: it is none, names what the task does not have, or takes longer than an episode.
    """
    formula = parse(text)
    formula.check_names(tuple(predicates_of(task)), task=task.name)
    horizon_s = horizon_s or task.horizon_s
    needed_s = sum(stage.steps(control_hz) for stage in formula.stages) / control_hz
    allowed = f"what takes at most env.horizon_s={horizon_s:g}; this takes at least {needed_s:g} s"
    require(needed_s <= horizon_s, "env.formula", text, allowed)
    return formula


def _near(quantity: str) -> Callable[[View], Array]:
    return lambda view: norm(view["tool.pos"] - view[quantity]) < NEAR_M
