"""Settings of simulated tasks, without MuJoCo: a mistake is reported before MuJoCo is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from robot_rl.config.used import FOREIGN_ENV, OTHER_PYTHON
from robot_rl.core.errors import ConfigError, nearest, require, require_fields
from robot_rl.core.names import without_past
from robot_rl.core.registry import resolve, table
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.formula import parse

Looks = Literal["fixed", "varied", "held_out"]
"""How a scene looks, see `sim/looks.py`."""
Scenes = Literal["fixed", "varied", "held_out"]
"""What scenes are like, see `sim/variation.py`."""
Engine = Literal["mujoco", "mujoco_warp", "genesis"]
"""What simulates, see `sim/backends/`."""
Drawing = Literal["engine", "opengl"]
"""What draws observations, see docs/engines.md."""
OWN_WORDS = "task"
"""The `instruction` that is the task's own."""
MANY_SIMS = 2000
"""Making this many takes half a second or more: 0.3 ms each were measured on an idle core."""
MOST_DELAY_S = 1.0
"""Longest delay of a picture."""
_BYTES_PER_SIM = 2**18
"""Memory of one simulation and of what a learner keeps of it; 190 kB were measured for pick_cube alone."""
_OTHER_MAPS = 8000
"""Memory maps of a process, in addition to one of each simulation; Linux allows 65530 in all."""

_FINGERS = re.compile(rb"finger_joints:(\s*\[\s*[^\]\s]|\s*\n)")
"""In a robot file with fingers."""


@dataclass(frozen=True, kw_only=True)
class ResetsConfig:
    """In which states episodes begin: those that the task draws, or rows of a bank."""

    bank: str | None = None
    """Folder of `robot-rl resets generate`; None: the task draws every start itself."""
    mix: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """Class -> weight; equal weights of all classes of the bank if empty. The class `own` is the task's own
    starts."""
    rows: Literal["train", "held_out"] = "train"
    """Of each class the last tenth of the rows is held out: evaluations draw it, and nothing else."""
    retry: float = 0.0
    """Share of the episodes after one that failed which begin as it did, in its row or in the same start of
    the task's own, until that is solved."""
    learnability: float = 0.0
    """How far the weights follow what is being learned: a class with success p, over about its last 50
    episodes, has its weight times 1 - l + 4 l p (1 - p). 0 keeps the weights. (Rutherford et al. 2024 call
    p (1 - p) learnability; deviation: of classes, not of levels.)"""
    evaluate: str = "own"
    """The one class that evaluations begin in: the task's own starts, or held-out rows of a class."""

    def __post_init__(self) -> None:
        at = "env.resets.mix"
        for name, weight in self.mix.items():
            require(0 <= weight < math.inf, f"{at}.{name}", weight, "0 or more")
        require(not self.mix or max(self.mix.values()) > 0, at, self.mix, "a weight above 0, or no weights")
        require(0 <= self.retry < 1, "env.resets.retry", self.retry, "0 or more, below 1")
        require(
            0 <= self.learnability < 1, "env.resets.learnability", self.learnability, "0 or more, below 1"
        )
        for name in ("retry", "learnability"):
            is_read, given = self.bank is not None, getattr(self, name)
            require(not given or is_read, f"env.resets.{name}", given, "0 without env.resets.bank")
        if self.bank is None:
            others = sorted({*self.mix, self.evaluate} - {"own"})
            require(
                not others,
                "env.resets",
                ", ".join(others),
                "own without a bank: give env.resets.bank=<folder>",
            )

    def weights(self, classes: Iterable[str]) -> dict[str, float]:
        """Returns the weight of each class that is drawn, the task's own starts first if they are.

        Args: classes: of the bank.

        Raises:
            ConfigError: `mix` names another one.
        """
        known = ("own", *classes)
        for name in self.mix:
            if name not in known:
                raise ConfigError(f"env.resets.mix: no class {name!r}.{nearest(name, known)}")
        given = self.mix or dict.fromkeys(known[1:], 1.0)
        return {name: given[name] for name in known if given.get(name, 0.0) > 0}

    def evaluated(self) -> ResetsConfig:
        """Returns what evaluations begin in: one class, and no row that training draws."""
        if self.evaluate == "own":
            return ResetsConfig()
        return replace(self, mix={self.evaluate: 1.0}, rows="held_out", retry=0.0, learnability=0.0)


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Which task on which robot, and how it is shown to the learner; or an environment of others."""

    kind: str = "sim"
    """`sim`: a task of ours. `gym`: whatever `gymnasium.make` makes. `process`: the same in processes, of
    another Python if wanted. `world`: a world model, whose folder is `id`. Or the name of a plug-in's
    simulator."""
    id: str | None = None
    """But for kind=sim: `Hopper-v5`, or `package:Name-v0`. Read too: `settings`."""
    settings: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """But for kind=sim: keyword arguments of `gymnasium.make`, or of the plug-in."""
    expert: str | None = None
    """Who demonstrates and labels. Of our tasks: a run folder or a saved policy that reads the state, in the
    place of the scripted expert. Of kind=gym and kind=process: `module:function`, from the environment's own
    observation to its action; or `module:class`, whose objects have `get_action`."""
    python: str | None = None
    """Of kind=process: the Python that has the environment's packages; this one if None."""
    workers: int = 0
    """Of kind=process: number of processes; one for each core if 0."""
    timeout_s: float = 60.0
    """Of kind=process: a process that takes longer for a step or a reset is started again."""
    task: str = "pick_cube"
    robot: str | None = None
    """A name of `robot-rl doctor --list robot`, or the path of a robot file; the task's own if None."""
    robots: tuple[str, ...] = ()
    """All robots that one policy moves, this one too, as `robot` or `task:robot`: state and action then have
    the elements of all, see docs/improve.md. Of this robot alone if empty."""
    reward: Literal["sparse", "dense"] = "sparse"
    formula: str | None = None
    """What an episode has to do, such as `lifted then hold(solved, 0.5)`: success, failure and reward come
    from it, see docs/formula.md. None: they are the task's own."""
    horizon_s: float | None = None
    """Episode length; the task's own if None."""
    control_hz: float | None = None
    """Control steps per second; the task's own if None. An action is how far ahead of the joints the servos'
    targets are, at any rate: at half of it the Panda moves 0.8 times as far in the same time."""
    state: tuple[str, ...] = ()
    """Elements of the state that are shown, by the beginnings of their names; all if empty. `joint` and
    `finger` are those of any robot. What it measures itself is [joint,finger,tool]: the rest, such as the
    pose of a cube, pictures show. And the past, in simulation: `last_action`, `<name>.change_3`; see
    docs/tasks.md."""
    cameras: tuple[str, ...] = ()
    """Cameras whose images join the observation as `<camera>.rgb`."""
    missing_cameras: tuple[str, ...] = ()
    """Those of `cameras` that this robot does not have: black, for a policy of several robots."""
    depth: bool = False
    """Add `<camera>.depth` in metres."""
    privileged: bool = False
    """Add `privileged.state`: the elements that `state` leaves out. A learner may predict them in simulation;
    a policy never reads them."""
    environment_state: tuple[str, ...] = ()
    """Add `environment_state`: the elements of the state whose names begin so. LeRobot's ACT and Diffusion
    read them as `observation.environment_state`, and then need no camera."""
    image_size: tuple[int, int] = (96, 96)
    """Height and width in pixels."""
    camera_hz: tuple[float, ...] = ()
    """Pictures per second of simulated time: one number for all cameras, or one for each; at most the control
    rate. A picture at each control step if empty."""
    camera_delay_s: tuple[float, ...] = ()
    """How long after it is taken a picture is shown, likewise; the first of an episode is shown at once."""
    instruction: str = ""
    """Add `instruction`: this text in bytes, or with `task` the task in its own words. Empty: not shown."""
    common_actions: bool = False
    """Actions move the tool, turn it about z and work the gripper, where there is one, in every task: one
    policy can then do tasks that differ in what they need of these."""
    gripper_steps: bool = False
    """Actions change the commands of grippers, by up to a stroke per second, and do not give them: a hand
    that holds a thing goes on holding it at action 0. See docs/tasks.md."""
    randomize: bool = False
    """Apply the task's randomisation terms at every reset."""
    domain: DomainConfig = field(default_factory=DomainConfig)
    """What each episode draws of the arm, of what is sensed and of the line; nothing by default."""
    looks: Looks = "fixed"
    """`varied`: every episode draws colours, lights, camera poses and the places of things in the background;
    `held_out`: from beyond those ranges, for evaluation."""
    variation: Scenes = "fixed"
    """`varied`: every episode draws shapes and sizes of things, the region of the goal, and obstacles;
    `held_out`: from variants that `varied` never draws, for evaluation."""
    engine: Engine = "mujoco"
    """What simulates: `mujoco` on the CPU in double precision; `mujoco_warp` in single precision, thousands
    of simulations on a GPU; `genesis` likewise, without pictures. Evaluations are made on the CPU."""
    engine_device: str | None = None
    """But for mujoco: `cuda`, `cuda:1`, or `cpu` for tests; if null the first GPU, or the CPU without one.
    Of genesis `cuda` is the first GPU."""
    renderer: Drawing = "engine"
    """What draws `cameras`: `engine` is OpenGL for mujoco, and for mujoco_warp its own ray caster on its
    device; `opengl` draws copies of the simulations on the CPU, as evaluations do."""
    resets: ResetsConfig = field(default_factory=ResetsConfig)
    num_threads: int = 0
    """Threads that simulate, and threads that draw; all cores if 0."""
    dump_diverged: str | None = None
    """Folder for the states of simulations that diverged; not kept if None."""

    def __post_init__(self) -> None:
        given = self.horizon_s
        require(given is None or given > 0, "env.horizon_s", given, "above 0, or null for the task's")
        if self.formula is not None:
            parse(self.formula)
        if self.kind != "process":
            self._require_defaults(OTHER_PYTHON, "left out but with env.kind=process")
        if self.kind not in ("sim", "gym", "process"):
            self._require_defaults(("expert",), "left out but with env.kind=sim, gym or process")
        elif self.kind != "sim" and self.expert is not None:
            given = all(self.expert.partition(":"))
            require(given, "env.expert", self.expert, "module:function or module:class")
        hz = self.control_hz
        require(hz is None or 0 < hz < math.inf, "env.control_hz", hz, "above 0")
        unknown = set(self.missing_cameras) - set(self.cameras)
        require(not unknown, "env.missing_cameras", self.missing_cameras, "names of env.cameras")
        self._require_for_cameras("camera_hz", "above 0", lambda hz: hz > 0)
        most = MOST_DELAY_S
        self._require_for_cameras("camera_delay_s", f"0 to {most:g}", lambda delay_s: 0 <= delay_s <= most)
        require_fields(self, "env.", "0 or more", "workers")
        require(self.timeout_s > 0, "env.timeout_s", self.timeout_s, "above 0")
        is_on_cpu, device = self.engine == "mujoco", self.engine_device
        require(device is None or not is_on_cpu, "env.engine_device", device, "null with env.engine=mujoco")
        if self.variation != "fixed":
            allowed = "none with env.variation: its states are of one scene, and sizes differ"
            require(self.resets.bank is None, "env.resets.bank", self.resets.bank, allowed)
        if self.kind == "sim":
            require(self.id is None, "env.id", self.id, "none with env.kind=sim")
            require(not self.settings, "env.settings", self.settings, "none with env.kind=sim")
            return
        others = sorted({"sim", *table("simulator")} - {"mujoco"})
        if self.kind not in others:
            raise ConfigError(f"env.kind: got {self.kind!r}.{nearest(self.kind, others)}")
        if self.id is None:
            raise ConfigError(f"env.id: missing, env.kind={self.kind} needs it, such as env.id=Hopper-v5.")
        read = (*FOREIGN_ENV, *OTHER_PYTHON, "task")  # recipes have a task
        rest = (setting.name for setting in fields(self) if setting.name not in read)
        self._require_defaults(rest, f"left out with env.kind={self.kind}")

    def _require_defaults(self, names: Iterable[str], allowed: str) -> None:
        defaults = {
            setting.name: setting.default_factory() if callable(setting.default_factory) else setting.default
            for setting in fields(self)
        }
        for name in names:
            require(getattr(self, name) == defaults[name], f"env.{name}", getattr(self, name), allowed)

    def _require_for_cameras(self, name: str, words: str, holds: Callable[[float], bool]) -> None:
        """Refuses numbers out of range, and as many as are neither one nor one for each camera."""
        given: tuple[float, ...] = getattr(self, name)
        require(all(map(holds, given)), f"env.{name}", given, words)
        allowed = "one number, or one for each of env.cameras"
        require(len(given) in (0, 1, len(self.cameras)), f"env.{name}", given, allowed)

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the task and the robot of each of `robots`.

        Raises:
            ConfigError: there is no such task or robot, or the robot cannot do it.
        """
        found = list[tuple[str, str]]()
        for entry in self.robots:
            task, colon, robot = entry.partition(":")
            found.append((task, robot) if colon else (self.task, entry))
            check_names(*found[-1], at="env.robots: ")
        return found

    def evaluated(self) -> EnvConfig:
        """Returns the same with the starts of evaluations, and on the CPU engine, whose numbers repeat.

        Of a world model it is the env that the model imitates: the real one alone judges.
        """
        if self.kind in table("imitated"):
            return resolve("imitated", self.kind, at="env.kind")(self.id).evaluated()
        return replace(self, resets=self.resets.evaluated(), engine="mujoco", engine_device=None)

    def demonstrated(self) -> EnvConfig:
        """Returns the same with the task's own starts, and on the CPU engine: for demonstrations and arms."""
        return replace(self, resets=ResetsConfig()).evaluated()

    def unseen(self) -> EnvConfig:
        """Returns the same without cameras."""
        return replace(self, cameras=(), missing_cameras=(), camera_hz=(), camera_delay_s=(), depth=False)

    def without_past(self) -> EnvConfig:
        """Returns the same without the past in its state: the elements that a simulation itself has."""
        return replace(self, state=without_past(self.state))

    @property
    def own_cameras(self) -> tuple[str, ...]:
        """Cameras that this robot has."""
        return tuple(name for name in self.cameras if name not in self.missing_cameras)

    @property
    def rate_hz(self) -> float:
        """Control steps per second, of a task of ours."""
        return self.control_hz or resolve("task", self.task).control.hz

    def with_instruction(self, instruction: str | None) -> EnvConfig:
        """Returns the same with other words as the instruction; unchanged if None.

        Raises:
            ConfigError: the policy gets no words, or there are none.
        """
        if instruction is None:
            return self
        allowed = "left out where the policy gets no instruction: env.instruction is empty"
        require(bool(self.instruction), "instruction", instruction, allowed)
        require(bool(instruction), "instruction", "", "a text")
        return replace(self, instruction=instruction)

    @property
    def name(self) -> str:
        """The task's name, or the environment's id."""
        return self.task if self.id is None else self.id

    @property
    def has_expert(self) -> bool:
        """Whether somebody demonstrates: tasks of ours have a scripted expert."""
        return self.kind == "sim" or self.expert is not None


def check_names(task: str | None, robot: str | None, *, at: str) -> None:
    """Refuses an unknown task or robot, and a task that needs a gripper where the robot has none.

    `at` begins the keys of the message.
    """
    if task is not None and task not in table("task"):
        raise ConfigError(f"{at}task: no task named {task!r}.{nearest(task, table('task'))}")
    if robot is not None and robot not in table("robot") and not Path(robot).is_file():
        raise ConfigError(
            f"{at}robot: no robot and no file named {robot!r}.{nearest(robot, table('robot'))} "
            f"A robot file of your own is given by its path, such as {at}robot=path/to/robot.yaml."
        )
    if task is not None and robot is not None and _may_lack_fingers(robot):
        from robot_rl.sim.robots.loading import load_robot  # mujoco
        from robot_rl.sim.task import control_of

        control_of(resolve("task", task)(), load_robot(robot), at=at)


def _may_lack_fingers(robot: str) -> bool:
    """Returns whether a robot file may have no gripper, or a suction cup; that of the registry is known."""
    try:
        return robot not in table("robot") and _FINGERS.search(Path(robot).read_bytes()) is None
    except OSError:
        return True  # reading it as a robot file says why not


def check_num_envs(num_envs: int, *, at: str = "num_envs") -> None:
    """Refuses more simulations than memory holds: MuJoCo itself fails after a minute without Ctrl-C."""
    memory, maps = Path("/proc/meminfo"), Path("/proc/sys/vm/max_map_count")
    if not (memory.is_file() and maps.is_file()):
        return  # not Linux
    free = next(
        int(line.split()[1]) * 1024 for line in memory.read_text().splitlines() if "MemAvailable" in line
    )
    allowed = min(free // _BYTES_PER_SIM, int(maps.read_text()) - _OTHER_MAPS)
    require(num_envs <= allowed, at, num_envs, f"at most {allowed} with the memory that is free here")


def making(num_envs: int) -> str:
    """Returns the message to show while many simulations are made; empty for a few."""
    return "" if num_envs < MANY_SIMS else f"making {num_envs:,} simulations first (Ctrl-C ends it)"


def check_reward(config: EnvConfig) -> None:
    """Refuses a formula that does not fit the task, and a dense reward where there is none."""
    if config.formula is not None:
        from robot_rl.sim.predicates import check_formula  # mujoco

        task = resolve("task", config.task, at="env.task")()
        check_formula(config.formula, task, config.rate_hz, config.horizon_s)
    elif config.reward == "dense":
        from robot_rl.sim.task import Task  # mujoco

        task = resolve("task", config.task, at="env.task")
        has_dense = task.dense_reward is not Task.dense_reward
        require(has_dense, "env.reward", "dense", f"sparse: {config.task!r} has no `dense_reward`")
