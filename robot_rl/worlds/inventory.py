"""World models among the devices of this machine; without torch.

A table in the state folder has the folder of each model that was fitted here. Its trust is read from there
each time.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from robot_rl.config.build import build
from robot_rl.core.errors import CheckpointError, DeviceError, RobotRLError
from robot_rl.core.files import at_home, read_json
from robot_rl.core.lock import HeldError, locked
from robot_rl.core.machine import usable_cores
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.fit import misfit
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.entered import Entered
from robot_rl.sched.inventory import PER_CORE, simulator_of
from robot_rl.sim.config import EnvConfig

CAPS = frozenset({"set_state", "fork", "batch"})
_ENTERED = Entered("worlds.json", "folders")
HEAD = "world.json"
_LOCK, _CHANGES_S = ".lock", 30.0
REMEDY = "Fit a new one: robot-rl worlds fit data=<dataset> out=<folder>."


def world_spec(folder: str | Path) -> DeviceSpec:
    """Returns the device that a world model is; its labels say what it is of, and whether it is trusted.

    Raises:
        CheckpointError: no world model is there.
    """
    path = Path(at_home(str(folder))).resolve()
    head = head_of(path)
    report: dict[str, Any] = head["report"]
    reasons = report["reasons"]
    return DeviceSpec(
        name=name_of(path),
        kind="world",
        caps=CAPS,
        slots=PER_CORE * usable_cores(),
        control_hz=head["meta"]["control_hz"],
        labels={
            "task": head["meta"]["task"],
            "robot": head["meta"]["robot"],
            "version": str(report["version"]),
            "real_steps": str(report["real_steps"]),
            "trust": "ok" if not reasons else f"quarantined: {reasons[0]}",
        },
        refusal=lambda: refusal_of(path),
    )


def device_spec(env: EnvConfig) -> DeviceSpec:
    """Returns the device to lease for simulated, foreign or imagined envs."""
    return world_spec(str(env.id)) if env.kind == "world" else simulator_of(env.kind, env.engine)


def env_of(folder: str | Path) -> EnvConfig:
    """Returns the env that a world model imitates."""
    return build(EnvConfig, head_of(Path(at_home(str(folder))).resolve())["env"])


def check_fits(folder: str | Path, meta: EpisodesMeta, *, at: str) -> None:
    """Refuses a world model of another task, robot, rate or state; it is not loaded.

    Raises:
        CheckpointError: it is of something else, or none is there; `at` begins the message.
    """
    check_same(build(EpisodesMeta, head_of(Path(at_home(str(folder))))["meta"]), meta, at=at)


def check_same(modelled: EpisodesMeta, meta: EpisodesMeta, *, at: str) -> None:
    """Refuses other episodes than those that a world model was made of.

    Raises:
        CheckpointError: `at` begins its message.
    """
    problem = misfit(modelled, meta, also=("robot", "task"))
    if problem is not None:
        raise CheckpointError(f"{at}: the world model is of something else: {problem}. {REMEDY}")


def name_of(folder: Path) -> str:
    """Returns the name of the device: that of its folder, and four letters of the path."""
    word = re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name)
    return f"world-{word}-{zlib.crc32(str(folder).encode()) & 0xFFFF:04x}"


def refusal_of(folder: str | Path) -> str:
    """Returns why the scheduler gives no lease of the model now; empty if it does."""
    path = Path(at_home(str(folder))).resolve()
    report = head_of(path)["report"]
    if not report["reasons"]:
        return ""
    return (
        f"device {name_of(path)}: quarantined, its version {report['version']} is not believed: "
        f"{'; '.join(report['reasons'])}. Collect real episodes of the present policy and fit it again: "
        "robot-rl worlds fit."
    )


def head_of(folder: Path) -> dict[str, Any]:
    """Returns what world.json says.

    Raises:
        CheckpointError: no world model is there.
    """
    if not (folder / HEAD).is_file():
        raise CheckpointError(f"{folder}: no world model ({HEAD}) is there. {REMEDY}")
    return read_json(folder / HEAD, CheckpointError, REMEDY)


@contextmanager
def changing(folder: Path) -> Generator[None]:
    """Lets one process at a time change the files of a model.

    Raises:
        CheckpointError: there is no such folder, and none is made; or another process still changes its files
            after half a minute.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder. {REMEDY}")
    try:
        with locked(folder / _LOCK, wait_s=_CHANGES_S):
            yield
    except HeldError as error:
        raise CheckpointError(
            f"{folder}: {error} changes the world model. Try again, or end that process."
        ) from error


def enter(folder: str | Path) -> None:
    """Notes that a world model is in a folder, for `robot-rl devices`."""
    _ENTERED.enter(folder)


def specs() -> list[DeviceSpec]:
    """Returns the world models of this machine that are still there."""
    found = list[DeviceSpec]()
    for folder in _ENTERED.paths():
        if (Path(folder) / HEAD).is_file():
            try:
                found.append(world_spec(folder))
            except (RobotRLError, KeyError) as error:
                raise DeviceError(f"world model {folder}: {error}") from error
    return found
