"""Makes a bank: grasps and walks first, then each class until it has its rows.

N rows of a class, B simulations.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import train_seed
from robot_rl.resets.accept import NoStartsError, Tolerances, counted, settle
from robot_rl.resets.classes import GENERATORS, Materials
from robot_rl.resets.grasps import find_grasps
from robot_rl.resets.walk import walk_out
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.bank_files import Bank, ClassBill, StartSet
from robot_rl.sim.poses import compose, inverse
from robot_rl.sim.start_classes import CLASSES

Array = NDArray[Any]

_GRASPS = 200
_PATIENCE = 20
"""Rounds for each in which as many as wanted would fit: a class gives up after that."""
_HOPELESS = 4
"""Rounds without a single row."""


@dataclass(frozen=True)
class GenerateSettings:
    """How a bank is made."""

    rows: int
    """Of each class."""
    seed: int
    classes: tuple[str, ...]
    limits: Tolerances = field(default_factory=Tolerances)


def classes_of(bench: Workbench, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the classes to make: those asked for, or all that the task declares and the robot can do.

    Raises:
        ConfigError: one that is asked for is none of these.
    """
    declared = [name for name in CLASSES if name in bench.declared.classes]
    possible = [name for name in declared if name not in ("grasped", "carried") or bench.hold != "none"]
    for name in asked:
        if name not in possible:
            raise ConfigError(
                f"classes: got {name!r}, {bench.task.name} on {bench.robot.name} has {', '.join(possible)}"
            )
    return asked or tuple(possible)


def generate(
    bench: Workbench, settings: GenerateSettings, watch: Callable[[str, int], None] | None = None
) -> Bank:
    """Returns a bank; the same seed gives the same one, at any number of threads.

    Args:
        bench: where.
        settings: what.
        watch: called with the class that is being made, and the number of rows of all so far.

    Raises:
        NoStartsError: a class accepts nothing, or no grasp holds, or there is no way out of the goal; the
            message says which test rejected how many.
    """
    sets, bills = dict[str, StartSet](), dict[str, ClassBill]()
    wanted = classes_of(bench, settings.classes)
    began, steps = time.perf_counter(), bench.control_steps
    use = _materials(bench, settings, wanted)
    before = time.perf_counter() - began, bench.control_steps - steps
    for name in wanted:
        bench.reseed(train_seed(settings.seed, f"resets {name}"))
        use.rng = np.random.default_rng(train_seed(settings.seed, f"places {name}"))
        sets[name], bills[name] = _make(bench, name, use, settings, before, settings.rows * len(sets), watch)
        before = 0.0, 0  # grasps and walks are on the bill of the first class
    used = {
        "robot": bench.env.config.robot,
        "num_envs": bench.num,
        "rows": settings.rows,
        "seed": settings.seed,
        "limits": asdict(settings.limits),
    }
    return Bank(key=bench.env.bank_key(), sets=sets, bills=bills, settings=used)


def _materials(bench: Workbench, settings: GenerateSettings, classes: tuple[str, ...]) -> Materials:
    rng = np.random.default_rng(train_seed(settings.seed, "materials"))
    bench.reseed(train_seed(settings.seed, "resets materials"))
    needs = set(classes) - {"reaching"}
    grasps = None
    if needs and bench.hold != "none":
        grasps = find_grasps(bench, rng, min(_GRASPS, 2 * settings.rows), settings.limits)
    is_walk = bench.declared.way == "walk" and "near_goal" in needs
    return Materials(rng=rng, grasps=grasps, walk=walk_out(bench, rng, settings.limits) if is_walk else None)


def _make(
    bench: Workbench,
    name: str,
    use: Materials,
    settings: GenerateSettings,
    before: tuple[float, int],
    done: int,
    watch: Callable[[str, int], None] | None,
) -> tuple[StartSet, ClassBill]:
    """Puts, settles and takes starts of one class until there are enough."""
    began, steps = time.perf_counter() - before[0], bench.control_steps - before[1]
    rejected, parts, num, tried = Counter[str](), list[StartSet](), 0, 0
    while num < settings.rows:
        put = GENERATORS[name](bench, use)
        taken, reasons = settle(bench, put, settings.limits)
        rejected.update(reasons)
        tried += bench.num
        parts.append(_taken(bench, np.nonzero(taken)[0]))
        num += len(parts[-1])
        is_hopeless = not num and tried >= _HOPELESS * bench.num
        is_slow = num < settings.rows and tried > _PATIENCE * max(settings.rows, bench.num)
        if is_hopeless or is_slow:
            raise _no_starts(bench, name, num, tried, rejected, taken)
        if watch is not None:
            watch(name, min(num, settings.rows) + done)
    columns = {
        part: np.concatenate([getattr(each, part) for each in parts]) for part in StartSet.__annotations__
    }
    bill = ClassBill(
        tried=tried,
        rejected={test: count for test, count in rejected.items() if count},
        control_steps=bench.control_steps - steps,
        physics_steps=(bench.control_steps - steps) * bench.env.num_substeps,
        seconds=round(time.perf_counter() - began, 2),
    )
    return StartSet(**{part: column[: settings.rows] for part, column in columns.items()}), bill


def _taken(bench: Workbench, ids: Array) -> StartSet:
    states, varied = bench.rows(ids)
    success, _, _ = bench.env.judge()
    return StartSet(states=states, varied=varied, solved=success[ids], coords=coordinates(bench)[ids])


def coordinates(bench: Workbench) -> Array:
    """Returns where the thing is from its place and the tool from the thing, (B, 6) float32; see `COORDS`."""
    thing = bench.thing_pose()
    place = compose(inverse(bench.goal_pose()), thing)[:, :3]
    if bench.is_slide:
        place = np.stack([bench.slide() - bench.declared.slide_goal_m, *(np.zeros(bench.num),) * 2], axis=1)
    tool = bench.tool_pose()[:, :3] - (thing if bench.thing is None else bench.grip_pose())[:, :3]
    return np.concatenate([place, tool], axis=1).astype(np.float32)


def _no_starts(
    bench: Workbench, name: str, num: int, tried: int, rejected: Counter[str], taken: Array
) -> NoStartsError:
    return NoStartsError(
        f"resets of {bench.task.name} on {bench.robot.name}: class {name!r} has accepted {num} of {tried} "
        f"starts; rejected first by: {counted(rejected)}. Check the task's `resets`: "
        f"{_HINTS[rejected.most_common(1)[0][0]]}.",
        bench.backend.read_states()[np.nonzero(~taken)[0]].copy(),
    )


_HINTS = {
    "unreachable": "workspace_m and yaw_rad: the arm does not come there",
    "diverged": "grip_m and at_goal_m: things overlap",
    "lost": "grip_m and grip_half_m: the hand drops the thing",
    "moved": "near_goal_m, at_goal_m and rests_at_goal: the thing does not stay there",
    "moving": "rests_at_goal: the thing is not at rest",
    "penetrating": "workspace_m and near_goal_m: things overlap",
    "solved": "near_goal_m: all starts are within the goal",
    "failed": "workspace_m: the task counts these starts as lost",
}
"""Test -> what to look at."""
