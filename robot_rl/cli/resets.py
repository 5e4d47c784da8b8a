"""`robot-rl resets`: makes a bank of states in which episodes begin, and shows what is in one."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import ConfigError, DatasetError, nearest, require
from robot_rl.core.files import at_home
from robot_rl.core.registry import resolve
from robot_rl.core.room import check_room
from robot_rl.sim.bank_files import Bank, ClassBill, load_bank
from robot_rl.sim.config import EnvConfig, check_names, check_num_envs

if TYPE_CHECKING:
    from robot_rl.resets.accept import NoStartsError
    from robot_rl.resets.workbench import Workbench

SUMMARY = "make a bank of diverse starts for a task, and show what is in it"

_HELP = """\
Usage: robot-rl resets generate task=<task> [robot=<name>] [out=<folder>] [rows=1000] [classes=...] [seed=0]
                                [randomize=false] [num_envs=256] [num_threads=0]
                                [lease_wait_s=0] [--json]
       robot-rl resets info bank=<folder> [--json]
       robot-rl resets view bank=<folder> [camera=<name>] [--json]

generate  makes `rows` starts of each class that the task declares (docs/resets.md): reaching, near_object,
          grasped, near_goal. Each start is simulated until it is at rest. Those that fail a test are left
          out and counted; the bank's folder (default banks/<task>-<robot>) gets coverage.png and, where
          this machine can draw, pictures.png. randomize=true is for runs with env.randomize=true. A class
          that accepts nothing is an error, which says which test rejected how many; rejected.png shows some.
info      prints what a bank is of, how many starts each class has, and what they cost.
view      draws coverage.png and pictures.png of a bank again; camera= is one of the scene's.

Training begins its episodes there with env.resets.bank=<folder>; evaluations begin as the task says.

Examples:
  robot-rl resets generate task=gantry_peg
  robot-rl resets generate task=pick_cube rows=4000 randomize=true out=banks/pick
  robot-rl resets info bank=banks/gantry_peg-gantry
  robot-rl train recipe=fast_sac env.task=gantry_peg env.resets.bank=banks/gantry_peg-gantry
"""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Settings of `resets generate`."""

    task: str
    robot: str | None = None
    """The task's own if None."""
    out: str | None = None
    """New folder; banks/<task>-<robot> if None."""
    rows: int = 1000
    """Starts of each class."""
    classes: tuple[str, ...] = ()
    """All that the task declares, and the robot can do, if empty."""
    seed: int = 0
    randomize: bool = False
    """Whether each start draws the task's randomisation terms, as env.randomize does."""
    num_envs: int = 256
    """Simulations at once; the bank depends on it."""
    num_threads: int = 0
    """All cores if 0; the bank does not depend on it."""
    lease_wait_s: float = 0.0
    """Longest wait for a free slot of the simulator."""

    def __post_init__(self) -> None:
        require(1 <= self.rows <= 1_000_000, "rows", self.rows, "1 to 1000000")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2147483647")
        require(self.lease_wait_s >= 0, "lease_wait_s", self.lease_wait_s, "0 or more")
        require(self.num_envs >= 2, "num_envs", self.num_envs, "2 or more")
        check_num_envs(self.num_envs)
        check_names(self.task, self.robot, at="")


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Settings of `resets info` and `resets view`."""

    bank: str
    """Folder of the bank."""
    camera: str | None = None
    """Of `view`: a camera of the scene; the task's own if None."""


def run(argv: list[str]) -> int:
    """Runs a sub-command and prints what it found."""
    return run_command(argv or ["--help"], _HELP, _run)


def _run(words: list[str]) -> Outcome:
    commands = {"generate": _generate, "info": _info, "view": _view}
    if not words or words[0] not in commands:
        got = words[0] if words else ""
        raise ConfigError(f"resets: no sub-command {got!r}.{nearest(got, commands)} `robot-rl resets --help`")
    return commands[words[0]](words[1:])


def _generate(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra: not for --help

    options = load(GenerateConfig, words, config_name="resets")
    robot = options.robot or resolve("task", options.task).default_robot
    out = Path(at_home(options.out or f"banks/{options.task}-{Path(robot).stem}"))
    if out.exists():
        raise DatasetError(f"out: {str(out)!r} exists already. Choose another folder, or remove it first.")
    check_room(out, at="out")
    from robot_rl.resets.accept import NoStartsError
    from robot_rl.resets.workbench import Workbench  # mujoco

    config = EnvConfig(
        task=options.task,
        robot=options.robot,
        randomize=options.randomize,
        num_threads=options.num_threads,
    )
    try:
        with _simulations(config, options.num_envs, options.lease_wait_s) as env:
            bank = _made(Workbench(env), options)
    except NoStartsError as error:
        _show_rejected(config, error, out)
        raise
    bank.save(out)
    _draw(out, bank, None)
    facts = _facts(out, bank)
    _print(bank, facts)
    return 0, facts


def _made(bench: Workbench, options: GenerateConfig) -> Bank:
    from robot_rl.resets.generate import GenerateSettings, classes_of, generate
    from robot_rl.telemetry.progress import ProgressDisplay

    settings = GenerateSettings(rows=options.rows, seed=options.seed, classes=options.classes)
    total = options.rows * len(classes_of(bench, options.classes))
    with ProgressDisplay() as display, display.phase("generate", total, unit="starts") as progress:
        return generate(bench, settings, lambda name, rows: progress.update(rows, note=name))


def _show_rejected(config: EnvConfig, error: NoStartsError, out: Path) -> None:
    """Draws some starts that were rejected, and notes where."""
    from robot_rl.resets.plots import COLUMNS, REJECTED, draw_pictures

    out.mkdir(parents=True, exist_ok=True)
    path, camera = out / REJECTED, resolve("task", config.task).camera
    with _simulations(config, COLUMNS) as env:
        if draw_pictures(env.backend, {"rejected": error.rejected}, path, camera):
            error.add_note(f"{path} shows some of them.")
        else:
            out.rmdir()


@contextmanager
def _simulations(config: EnvConfig, num_envs: int, wait_s: float = 0.0) -> Generator[Any]:
    """Opens simulations under a lease, and returns what is inside: starts are made of their very states."""
    from robot_rl.rollout.envs import simulation
    from robot_rl.sched.opened import opened

    with opened(simulation(config, num_envs), holder=f"resets {config.task}", wait_s=wait_s) as env:
        yield env.env


def _draw(folder: Path, bank: Bank, camera: str | None) -> None:
    """Writes the figures of a bank next to it."""
    from robot_rl.resets.plots import COLUMNS, COVERAGE, PICTURES, draw_coverage, draw_pictures

    key = bank.key
    config = EnvConfig(task=key.task, robot=bank.settings.get("robot"), randomize=bool(key.varied))
    chosen = camera or resolve("task", key.task).camera
    states = {name: found.states for name, found in bank.sets.items()}
    with _simulations(config, COLUMNS) as env:
        key.check(env.bank_key(), at=f"bank={folder}")
        if chosen not in env.backend.cameras:
            raise ConfigError(f"camera: got {chosen!r}.{nearest(chosen, env.backend.cameras)}")
        draw_coverage(bank.sets, folder / COVERAGE, f"{key.task} on {key.robot}: {folder}")
        if not draw_pictures(env.backend, states, folder / PICTURES, chosen):
            print("no pictures: this machine cannot draw. robot-rl doctor says why", file=sys.stderr)


def _info(words: list[str]) -> Outcome:
    from robot_rl.config import load

    options = load(ShowConfig, words, config_name="resets")
    bank = load_bank(options.bank, at="bank")
    facts = _facts(Path(options.bank), bank)
    _print(bank, facts)
    return 0, facts


def _view(words: list[str]) -> Outcome:
    from robot_rl.config import load

    options = load(ShowConfig, words, config_name="resets")
    folder, bank = Path(at_home(options.bank)), load_bank(options.bank, at="bank")
    _draw(folder, bank, options.camera)
    drawn = sorted(str(path) for path in folder.glob("*.png"))
    print("\n".join(drawn))
    return 0, {"bank": str(folder), "pictures": drawn}


def _facts(folder: Path, bank: Bank) -> dict[str, Any]:
    """Returns what a bank is of and what it cost, for --json."""
    return {
        "bank": str(folder),
        "key": asdict(bank.key),
        "digest": bank.digest,
        "settings": bank.settings,
        "classes": {
            name: {"rows": len(found), "solved": int(found.solved.sum()), **asdict(bank.bills[name])}
            for name, found in bank.sets.items()
        },
        "control_steps": sum(bill.control_steps for bill in bank.bills.values()),
        "physics_steps": sum(bill.physics_steps for bill in bank.bills.values()),
        "seconds": round(sum(bill.seconds for bill in bank.bills.values()), 1),
    }


def _print(bank: Bank, facts: Mapping[str, Any]) -> None:
    from rich.console import Console

    from robot_rl.cli.tables import table_of
    from robot_rl.resets.accept import TESTS

    tests = [test for test in TESTS if any(test in bill.rejected for bill in bank.bills.values())]
    rows = [_row(name, len(bank.sets[name]), bill, tests) for name, bill in bank.bills.items()]
    key = bank.key
    Console(width=None if sys.stdout.isatty() else 180).print(
        table_of(rows, f"{facts['bank']}: {key.task} on {key.robot}, starts that each test rejected first")
    )
    print(
        f"model {key.model_hash}, MuJoCo {key.mujoco}, {key.num_state} numbers a state, "
        f"varied: {', '.join(key.varied) or 'nothing'}; seed {bank.settings.get('seed')}, "
        f"digest {facts['digest']}\n"
        f"cost: {facts['control_steps']:,} control steps ({facts['physics_steps']:,} physics steps), "
        f"{facts['seconds']} s"
    )


def _row(name: str, rows: int, bill: ClassBill, tests: list[str]) -> dict[str, Any]:
    accepted = bill.tried - sum(bill.rejected.values())
    return {
        "class": name,
        "rows": rows,
        "tried": bill.tried,
        "accepted %": round(100 * accepted / bill.tried, 1),
        **{test: bill.rejected.get(test, 0) for test in tests},
        "control steps": bill.control_steps,
        "seconds": bill.seconds,
    }
