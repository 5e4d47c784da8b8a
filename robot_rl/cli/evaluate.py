"""`robot-rl evaluate`: repeats the evaluation of a run, action for action, or evaluates any saved policy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import CheckpointError, ConfigError, require
from robot_rl.core.files import at_home, read_json
from robot_rl.policies.saved import policy_folder, read_head
from robot_rl.policies.vla.lerobot_saved import lerobot_folder, read_lerobot_folder
from robot_rl.sim.config import EnvConfig, Looks, Scenes, check_names
from robot_rl.train.record import check_kind
from robot_rl.worlds.config import SearchConfig

if TYPE_CHECKING:
    from robot_rl.hal.leased import EnvDevice
    from robot_rl.hal.vector import VectorEnv
    from robot_rl.rollout.evaluate import EvalResult
    from robot_rl.train.pictures import Photographer

SUMMARY = "measure the success of a policy on held-out seeds"

_HELP = """\
Usage: robot-rl evaluate run=<folder> [which=final|base] [robot=<name>] [episodes=200] [disturb=0.0]
                         [adversary=false] [looks=fixed|varied|held_out] [instruction=<text>] [--json]
       robot-rl evaluate policy=<folder> [robot=<name>] [seed=0] [n_exec=<steps>] [device=cpu]
                         [torch_threads=1] [episodes=200] [disturb=0.0] [looks=...]
                         [instruction=<text>] [dataset=<folder>] [--json]
       ... [search.world=<folder>] [search.candidates=16] [search.strides=0]
       ... [variation=fixed|varied|held_out] [resets.bank=<folder>] [resets.evaluate=<class>]
           [video=<file>.mp4] [video_episodes=9]

lease_wait_s=600 waits up to 600 s if other programs hold all slots of the simulator.

run=: repeats the evaluation that training made, with the same held-out seeds and batches, and compares
the SHA-256 of all actions with the one of training. Exit code 1: they differ.

policy=: evaluates any saved policy, for example the VLA of a `robot-rl finetune` run, on the held-out
seeds of `seed`, in the simulation of its task, with the cameras that it needs. n_exec is the number of
control steps that it executes of each chunk. The default is the policy's own number; for a VLA that is
the whole chunk. A folder that LeRobot saved (lerobot-train's output_dir) does not say for which task and
robot it is: that is read from the dataset of its training, if `robot-rl collect` recorded it. dataset=
names the dataset where it has been moved.

A policy of several robots or tasks (sources) is evaluated on each of them, or only on the source that
robot= names. Sources have the names of the policy's run, or without it those of the policy's tasks or
robots. For a policy of one source, robot= names the robot that it controls.

instruction= gives a policy other words than those of its task. With the words of another task this
measures how much the policy listens: it should then fail.

disturb adds a constant push to all actions of an episode, another in each episode. adversary lets the
adversary push that the policy was trained against (method=qarl).

search.world= looks ahead in a world model: of search.candidates chunks that the policy would draw it executes
the one that succeeds soonest there. Nothing is trained. A model that is not believed is refused
(docs/worlds.md).

looks=held_out draws colours, lights, camera poses and things in the background for each episode, beyond
the ranges that a run with env.looks=varied has seen; looks=varied draws within them. camera_hz=10 and
camera_delay_s=0.02 show rarer or later pictures than the run has seen (env.camera_hz, env.camera_delay_s).

variation=held_out draws sizes of things, goals and boxes that stand around for each episode, with shapes that
a run with env.variation=varied never sees; variation=varied draws the others (docs/variation.md).

resets.evaluate=grasped begins the episodes in that class of the start bank of the run, or of the one that
resets.bank= names, in rows that training never draws (docs/resets.md). Without it they begin as the task
says, whatever training began in.

Examples:
  robot-rl evaluate run=runs/20261121-101500-pick_cube-seed3
  robot-rl evaluate run=runs/20261121-101500-pick_cube-seed3 which=base
  robot-rl evaluate run=runs/20261121-101500-qarl-seed3 disturb=0.3
  robot-rl evaluate run=runs/20261121-101500-pick_cube-seed3 episodes=1000 --json
  robot-rl evaluate run=runs/20261121-101500-pick_cube_pixels-seed3 looks=held_out
  robot-rl evaluate run=runs/20261121-101500-pick_cube-seed3 variation=held_out
  robot-rl evaluate run=runs/20261121-101500-pick_cube-seed3 video=grid.mp4 video_episodes=16
  robot-rl evaluate run=runs/20261121-101500-two_robots-seed3 robot=gantry
  robot-rl evaluate run=runs/20261125-101500-four_tasks-seed3 robot=reach instruction="open the drawer"
  robot-rl evaluate policy=runs/20261125-101500-four_tasks-seed3 robot=push_cube episodes=50
  robot-rl evaluate policy=runs/20261121-101500-finetune-small_vla-seed0 n_exec=4
"""


_NO_SEARCH = SearchConfig()


@dataclass(frozen=True, kw_only=True)
class EvaluateStarts:
    """A class of a start bank."""

    bank: str | None = None
    """Folder; that of the run if None."""
    evaluate: str | None = None
    """The class (`env.resets.evaluate`); that of the run if None."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommandConfig:
    """The policy and the episodes."""

    run: str | None = None
    """Run folder."""
    policy: str | None = None
    """Folder of a saved policy, or of a run that holds one."""
    which: Literal["final", "base"] = "final"
    """The policy after reinforcement learning, or the cloned one."""
    robot: str | None = None
    """One source of several, all if None. For a `policy` of one source: the robot that it controls."""
    episodes: int | None = None
    """Held-out episodes for each robot; as many as in the run's own evaluation if None."""
    disturb: float = 0.0
    """Largest push, as a share of the env's [-1, 1], the same in all actions of an episode."""
    adversary: bool = False
    """Whether the adversary of training pushes the robot."""
    looks: Looks | None = None
    """How the simulated scene looks (`env.looks`); as in the run, or as it is, if None."""
    variation: Scenes | None = None
    """How scenes differ (`env.variation`); as in the run, or not at all, if None."""
    camera_hz: tuple[float, ...] = ()
    """Pictures per second (`env.camera_hz`); as in the run, or one at each control step, if empty."""
    camera_delay_s: tuple[float, ...] = ()
    """How late pictures are (`env.camera_delay_s`); as in the run, or not at all, if empty."""
    resets: EvaluateStarts = field(default_factory=lambda: EvaluateStarts())
    """In which states the episodes begin; in the task's own if empty."""
    instruction: str | None = None
    """The instruction that the policy gets; the task's own words if None."""
    seed: int = 0
    """Selects the held-out episodes of a `policy`."""
    n_exec: int | None = None
    """Control steps that a `policy` executes of each chunk; its own number if None."""
    dataset: str | None = None
    """What LeRobot trained a `policy` on; the one that the policy's folder names if None."""
    device: str = "cpu"
    """Device of a `policy`."""
    torch_threads: int = 1
    """Threads of a `policy` on the CPU."""
    lease_wait_s: float = 0.0
    """Longest wait for a free slot of the simulator."""
    search: SearchConfig = _NO_SEARCH
    """Of a `policy`: looks ahead in a world model."""
    video: str | None = None
    """New file .mp4: the first `video_episodes` episodes of each robot side by side; no film if None."""
    video_episodes: int = 9

    def __post_init__(self) -> None:
        require(0 <= self.disturb <= 1, "disturb", self.disturb, "0 to 1")
        given = self.episodes
        require(given is None or 1 <= given <= 10_000, "episodes", given, "1 to 10000")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2147483647")
        require(self.n_exec is None or self.n_exec >= 1, "n_exec", self.n_exec, "1 or more")
        if (self.run is None) == (self.policy is None):
            raise ConfigError(
                "run: give either run=runs/<folder>, to repeat its evaluation, or policy=<folder>, a saved "
                "policy."
            )
        film, shown = self.video, self.video_episodes
        require(film is None or film.endswith(".mp4"), "video", film, "a file name that ends in .mp4")
        require(1 <= shown <= 36, "video_episodes", shown, "1 to 36")
        require(self.torch_threads >= 1, "torch_threads", self.torch_threads, "1 or more")
        require(self.lease_wait_s >= 0, "lease_wait_s", self.lease_wait_s, "0 or more")
        given_by, others = "run", ("seed", "n_exec", "device", "torch_threads", "dataset", "search")
        if self.run is None:
            given_by, others = "policy", ("which", "adversary")
        for setting in fields(self):
            got = getattr(self, setting.name)
            is_own = setting.name not in others or got == setting.default
            require(is_own, setting.name, got, f"left out with {given_by}=")
        searches = self.search.world is not None
        require(searches or self.search == _NO_SEARCH, "search", self.search, "nothing without search.world")


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A policy to evaluate, and its simulations."""

    who: str
    episodes: int
    devices: dict[str, EnvDevice]
    """By the name of the source; the empty name where there is one."""
    play: Callable[..., EvalResult]
    """Takes the env, and the `disturb` and `on_batch` of `evaluate_in`."""
    recorded: dict[str, Any] | None
    """The result of the same evaluation in training."""
    facts: dict[str, Any]
    """Names the policy, for --json."""
    differs: str = ""
    """In what acting differs from that in training, if in something."""

    def recorded_of(self, source: str) -> dict[str, Any] | None:
        """Returns the result in training of one robot, or of all if the name is empty."""
        if self.recorded is None or not source:
            return self.recorded
        return self.recorded["sources"][source]


def run(argv: list[str]) -> int:
    """Evaluates and prints success, interval and digest."""
    return run_command(argv, _HELP, _evaluate)


def _evaluate(words: list[str]) -> Outcome:
    options = config(words)
    from robot_rl.rollout.evaluate import to_json
    from robot_rl.sched.opened import opened
    from robot_rl.telemetry.progress import ProgressDisplay

    case = _of_policy(options) if options.run is None else _of_run(options)
    films = _new_films(options, case.devices)
    print(f"policy {case.who}, {case.episodes} held-out episodes", file=sys.stderr)
    results: dict[str, EvalResult] = {}
    tasks: dict[str, str] = {}
    for name, device in case.devices.items():
        with (
            opened(device, holder=f"evaluate {case.who}", wait_s=options.lease_wait_s) as env,
            ProgressDisplay() as display,
            display.phase(f"evaluate {name}".strip(), case.episodes, unit="episodes") as progress,
            _film(env, films.get(name), options) as watch,
        ):
            how: dict[str, Any] = {"disturb": options.disturb, "on_batch": progress.update}
            results[name] = case.play(env, **how, watch=watch)
            tasks[name] = env.task
    task, differs = ", ".join(dict.fromkeys(tasks.values())), case.differs or _difference(options)
    found = to_json(results)
    parts = {**found.get("sources", {}), next(iter(results)) if len(results) == 1 else "": found}
    matches: bool | None = None
    for name, part in parts.items():
        recorded = case.recorded_of(name)
        matches = _matches(None if differs else recorded, part)
        who = f"{case.who}, {name}" if name else case.who
        compared = "" if options.run is None else f", {_compared(matches, recorded, differs)}"
        print(f"{tasks.get(name, task)}, {who}: {_outcome(part)}; actions {part['digest'][:16]}{compared}")
    return int(matches is False), {"task": task, **case.facts, "matches": matches, **found}


def _new_films(options: EvaluateCommandConfig, names: Iterable[str]) -> dict[str, Path]:
    """Returns the file of each robot's film, if films are wanted; refuses one that exists."""
    if options.video is None:
        return {}
    path = Path(at_home(options.video))
    films = {name: path.with_stem(f"{path.stem}-{name}") if name else path for name in names}
    for film in films.values():
        require(not film.exists(), "video", str(film), "a file that does not exist yet")
    return films


@contextmanager
def _film(
    env: VectorEnv, film: Path | None, options: EvaluateCommandConfig
) -> Generator[Photographer | None]:
    """Yields what films the first episodes, if a film is wanted, and writes it after the block."""
    if film is None:
        yield None
        return
    import numpy as np

    from robot_rl.train.config import VideoConfig
    from robot_rl.train.pictures import Photographer

    config = VideoConfig(episodes=options.video_episodes, failures=0)
    with closing(Photographer(env, np.zeros(0, np.uint64), config)) as photographer:
        yield photographer
        print(f"film: {photographer.save_grid(film)}", file=sys.stderr)


def _matches(recorded: Mapping[str, Any] | None, found: Mapping[str, Any]) -> bool | None:
    """Returns whether the actions are those of training; None if training evaluated other episodes."""
    if recorded is None or recorded["episodes"] != found["episodes"]:
        return None
    return recorded["digest"] == found["digest"]


def config(words: list[str]) -> EvaluateCommandConfig:
    """Returns the settings, checked as far as possible without the learner."""
    from robot_rl.config import load  # Hydra: not for --help

    options = load(EvaluateCommandConfig, words, config_name="evaluate")
    if options.run is not None:
        check_kind(Path(options.run), "train", at="run")
    if options.policy is not None:
        theirs = lerobot_folder(options.policy)
        if theirs is None:
            read_head(policy_folder(options.policy))
            require(options.dataset is None, "dataset", options.dataset, "none but for a policy of LeRobot")
        else:
            read_lerobot_folder(theirs)
    return options


def _of_run(options: EvaluateCommandConfig) -> _Case:
    import torch  # the learner: not for --help

    from robot_rl.rollout.envs import simulation
    from robot_rl.train.phases import evaluate_folder
    from robot_rl.train.record import load_config_here

    folder, which = Path(str(options.run)), options.which
    config, learned_on = load_config_here(folder, at="run")
    config = replace(config, env=env_asked_for(config.env, options))
    torch.set_num_threads(config.torch_threads)
    total = options.episodes or config.evaluate.episodes
    names = [options.robot] if options.robot else list(config.scenes)
    if options.robot and options.robot not in config.scenes:
        raise ConfigError(
            f"robot: got {options.robot!r}, the run {folder} has "
            f"{' and '.join(filter(None, config.scenes)) or 'one robot and one task: leave it out'}."
        )
    how: dict[str, Any] = {"episodes": total, "adversary": options.adversary}
    return _Case(
        who=f"{which} of {folder}",
        episodes=total,
        devices={
            name: simulation(
                config.scenes[name].evaluated().with_instruction(options.instruction),
                config.evaluate.num_envs,
                draws=options.video is not None,
            )
            for name in names
        },
        play=lambda env, **seen: evaluate_folder(folder, which, config, env, **how, **seen),
        recorded=_recorded(folder, which),
        facts={"run": str(folder), "which": which},
        differs="" if config.device == learned_on else f"there the policy acted on {learned_on}",
    )


def _of_policy(options: EvaluateCommandConfig) -> _Case:
    import torch

    from robot_rl.core.machine import check_device
    from robot_rl.core.seeding import eval_seeds
    from robot_rl.rollout.envs import simulation
    from robot_rl.rollout.evaluate import evaluate_in
    from robot_rl.train.collect import check_fits, env_of_robot, open_policy, sources_of
    from robot_rl.train.config import EvaluateConfig
    from robot_rl.train.search import looking_ahead

    check_device(options.device)
    torch.set_num_threads(options.torch_threads)
    usual = EvaluateConfig()
    total = options.episodes or usual.episodes
    policy, meta, shown = open_policy(str(options.policy), options.dataset)
    envs = sources_of(str(options.policy), meta, shown)
    if options.robot in envs:
        envs = {options.robot: envs[options.robot]}
    elif options.robot is not None:
        check_names(None, options.robot, at="")
        envs = {"": env_of_robot(str(options.policy), meta, shown, options.robot)}
    n_exec = options.n_exec or meta.n_exec
    require(n_exec <= policy.horizon, "n_exec", n_exec, f"1 to the policy's chunks of {policy.horizon}")
    module: Any = policy
    seeds = eval_seeds(options.seed, total)
    how: dict[str, Any] = {"seeds": seeds, "n_exec": n_exec, "device": options.device}

    def play(env: VectorEnv, **seen: Any) -> EvalResult:
        if list(envs) != [""] or options.robot is not None:
            check_fits(meta, env)
        ahead: dict[str, Any] = {
            "real": env,
            "n_exec": n_exec,
            "holder": f"evaluate {options.policy}: search",
            "wait_s": options.lease_wait_s,
        }
        with looking_ahead(module.to(options.device), options.search, **ahead) as acting:
            return evaluate_in(env, acting, **how, **seen)

    return _Case(
        who=str(options.policy),
        episodes=total,
        devices={
            name: simulation(
                env_asked_for(env, options).with_instruction(options.instruction),
                min(usual.num_envs, total),
                draws=options.video is not None,
            )
            for name, env in envs.items()
        },
        play=play,
        recorded=None,
        facts={"policy": str(options.policy), "seed": options.seed, "n_exec": n_exec},
    )


def env_asked_for(env: EnvConfig, options: EvaluateCommandConfig) -> EnvConfig:
    """Returns the settings of an env that looks, and whose cameras are, as the command says."""
    asked = _asked(options)
    for name, value in asked.items():
        require(env.kind == "sim", name, value, f"left out with an env of kind={env.kind}")
    starts = {name: value for name, value in asdict(options.resets).items() if value is not None}
    require(not starts or env.kind == "sim", "resets", starts, f"left out with an env of kind={env.kind}")
    return replace(env, **asked, resets=replace(env.resets, **starts).evaluated()).evaluated()


def _asked(options: EvaluateCommandConfig) -> dict[str, Any]:
    """Returns what the command says of the env."""
    given = {name: getattr(options, name) for name in ("looks", "variation", "camera_hz", "camera_delay_s")}
    return {name: value for name, value in given.items() if value}


def _outcome(result: Mapping[str, Any]) -> str:
    """Describes the result: success, or the return if the env reports no success."""
    episodes, (low, high) = result["episodes"], result["ci"]
    if not result["says_success"]:
        return f"return {result['return']:.1f} over {episodes} episodes"
    interval = f"95 % interval {low:.1%} to {high:.1%}"
    return f"success {result['success']:.1%} of {episodes} episodes ({interval})"


def _recorded(folder: Path, which: str) -> dict[str, Any] | None:
    """Returns the evaluation that training wrote, if it got that far."""
    path = folder / f"evaluation-{which}.json"
    remedy = "Move the file away to evaluate without comparing."
    return read_json(path, CheckpointError, remedy) if path.is_file() else None


def _difference(options: EvaluateCommandConfig) -> str:
    """Says in what the episodes differ from those of training's evaluation; empty if in nothing."""
    if options.resets != EvaluateStarts():
        return "these began in other states than those of training's evaluation"
    if options.disturb > 0 or options.adversary:
        return "nothing pushed the robot in training's evaluation"
    if options.camera_hz or options.camera_delay_s:
        return "these were asked for cameras of another rate or delay"
    if options.instruction is not None:
        return f"the instruction was {options.instruction!r}"
    if options.variation is not None:
        return f"these were asked for scenes with variation={options.variation}"
    return "" if options.looks is None else f"these were asked to look {options.looks}"


def _compared(matches: bool | None, recorded: Mapping[str, Any] | None, differs: str) -> str:
    """Says whether the actions are those of training, or why they cannot be compared."""
    if matches is not None:
        return "the same as in training" if matches else "NOT those of training (other code or processor?)"
    why = differs or f"training has evaluated {'nothing yet' if recorded is None else 'other episodes'}"
    return f"not compared with those of training: {why}"
