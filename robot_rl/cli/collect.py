"""`robot-rl collect`: records episodes of a scripted expert or of a policy as a LeRobot dataset."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import ConfigError, DatasetError, require
from robot_rl.core.files import read_json
from robot_rl.core.names import chosen
from robot_rl.core.room import check_room
from robot_rl.data.collecting import COLLECTED, as_json, check_settings, collecting, is_published, remove
from robot_rl.data.keep import KeepConfig, describe_refused
from robot_rl.policies.saved import policy_folder, read_head
from robot_rl.sim.config import EnvConfig, check_names, check_num_envs, making
from robot_rl.worlds.config import SearchConfig
from robot_rl.worlds.inventory import head_of

if TYPE_CHECKING:
    from robot_rl.hal.vector import VectorEnv
    from robot_rl.train.collect import Actor
    from robot_rl.train.collect import Collection as Collected

SUMMARY = "record episodes of a scripted expert or of a policy, as a LeRobot dataset"

_HELP = """\
Usage: robot-rl collect task=<name> out=<folder> [episodes=100] [bias_m=0] [noise_m=0.01] [key=value ...]
       robot-rl collect policy=<run> out=<folder> [episodes=100] [keep.<setting>=...] [key=value ...]
                        [search.world=<folder>] [search.candidates=16] [search.strides=0]
       robot-rl collect label=<recording> [policy=<teacher>] out=<folder> [images=png|video]
       robot-rl collect env.kind=process env.id=<id> env.expert=<module:function> out=<folder>
                        [env.python=...] [env.settings.<key>=...] [env.workers=...] [env.timeout_s=...]

Runs the task's scripted expert, or a policy, and writes its episodes as a LeRobotDataset v3.
`robot-rl train demos.path=<folder>` and `robot-rl finetune dataset=<folder>` learn from it. The seeds of
the episodes differ from those of all evaluations.

The expert aims bias_m away from the target, with a deviation of noise_m that varies between episodes. So the
demonstrations can be as good or as bad as you like. All episodes are kept, failures too, unless keep.*
says otherwise.

policy=  a run folder (its final policy), its policy folder such as runs/<folder>/policy/base, or any
         folder with a policy.json. Task, robot and env settings are those of the run. The policy acts
         without exploration. Only successful episodes are kept, unless keep.success=false.

search.world=  the policy looks ahead in a world model, as in `robot-rl evaluate` (docs/worlds.md). A policy
         that is cloned from what succeeds needs no model any more.

label=   the episodes of a recording, with what the task's expert would have done at each step for its action
         (DAgger offline). They are played again from their seeds, with the recorded actions: experience/ of a
         run in simulation, or a dataset of collect. policy= is then a teacher that reads the true state, in
         the place of that expert. See docs/improve/dagger.md.

env.*    an environment of others, of kind gym or process, and who demonstrates there: a function of its
         own observation, or a class with get_action. See docs/suites.md.

Which episodes are kept (until there are `episodes` of them, or `attempts` were begun):
  keep.success=true|false     only successful episodes
  keep.max_steps=40           at most 40 control steps
  keep.max_roughness=0.05     roughness is the mean squared change of the action from one control step
                              to the next; actions are in [-1, 1]
  keep.fastest=0.5            of the rest, the half with the fewest control steps
  keep.smoothest=0.5          of the rest after that, the half with the least roughness
Each refused episode is counted for the first setting that refused it. The command prints the 10, 50 and
90 % quantiles of steps and roughness of all episodes: a small collection is enough to choose limits.

After every num_envs episodes they are saved in .collecting-<name> next to out; the dataset appears when it
is complete. After a kill, a full disk or Ctrl-C the same command continues and ends with the same
dataset. episodes, attempts, keep.fastest and keep.smoothest may change then. To give up a collection,
remove that folder; its episodes/ is a dataset too.

Settings:
  episodes=100  attempts=1000   episodes to keep; episodes to begin at most (default: 10 for each)
  cameras=front image_size=96,96       adds pictures to the observation, even if the policy ignores them
  camera_hz=10 camera_delay_s=0.02     of each camera, as env.camera_hz and env.camera_delay_s
  state=joint,finger,tool       records only elements of the state whose names begin so: a VLA that
                                learns from them must find the cube in the pictures, as on a real robot
  environment_state=cube,goal   records these elements once more, as observation.environment_state: LeRobot's
                                ACT and Diffusion then need no camera
  images=png|video              pictures without loss, or smaller, as h264 video
  robot=<name>  seed=0  num_envs=50  device=cpu  torch_threads=1  lease_wait_s=0  --json

Examples:
  robot-rl collect task=pick_cube episodes=50 out=demos/pick_cube
  robot-rl collect task=pick_cube episodes=200 bias_m=0.015 noise_m=0.01 out=demos/mediocre
  robot-rl collect policy=runs/<folder> episodes=200 out=demos/improved
  robot-rl collect policy=runs/<folder> keep.fastest=0.8 keep.smoothest=0.8 out=demos/chosen
  robot-rl collect policy=runs/<folder> cameras=front images=video out=demos/for_a_vla
  robot-rl collect label=demos/improved out=demos/labelled
  robot-rl collect env.kind=process env.python=metaworld/bin/python env.id=my_suites:meta_world
                   env.settings.name=pick-place-v3 env.settings.max_episode_steps=150
                   env.expert=metaworld.policies:SawyerPickPlaceV3Policy out=demos/pick_place
"""

_FREE = ("episodes", "attempts", "keep.fastest", "keep.smoothest")
"""Settings that may change when a collection continues: they only select episodes."""
_OF_CAMERAS = ("cameras", "image_size", "camera_hz", "camera_delay_s")
"""Settings that are those of `EnvConfig`, if they are given."""
_OF_LABELS = ("out", "label", "policy", "num_envs", "images", "torch_threads", "lease_wait_s")
"""Settings that may be given with `label`."""
_EXISTS = "Choose another folder, or remove it first."
_NO_SEARCH = SearchConfig()


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """The actor, the env, and which episodes are kept."""

    out: str
    """New folder for the dataset."""
    task: str | None = None
    """The policy's own task if None."""
    policy: str | None = None
    """Folder of a run or of a saved policy; None for the scripted expert."""
    label: str | None = None
    """A store or a dataset, whose episodes get the labels of the expert; nothing else is recorded."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """An environment of others, with its expert, in the place of `task` and `robot`."""
    robot: str | None = None
    """The robot of the policy or of the task if None."""
    episodes: int = 100
    """How many are kept."""
    attempts: int | None = None
    """Largest number of episodes to begin; ten times `episodes` if None."""
    keep: KeepConfig = field(default_factory=KeepConfig)
    bias_m: float = 0.0
    noise_m: float = 0.01
    seed: int = 0
    num_envs: int = 50
    cameras: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None
    """Height and width of pictures; if None those of the policy's run, or 96 x 96."""
    camera_hz: tuple[float, ...] = ()
    """Pictures per second; if empty as in the policy's run, or one at each control step."""
    camera_delay_s: tuple[float, ...] = ()
    """How long after it is taken a picture is shown; if empty as in the policy's run, or none."""
    state: tuple[str, ...] = ()
    """Recorded elements of the state, by the beginnings of their names; all if empty."""
    environment_state: tuple[str, ...] = ()
    """Elements that are recorded once more, as `environment_state`; none if empty."""
    images: Literal["png", "video"] = "png"
    """Format of pictures: without loss, or as h264 video, which is smaller."""
    device: str = "cpu"
    """Device of a policy."""
    torch_threads: int = 1
    search: SearchConfig = _NO_SEARCH
    """Of a policy: looks ahead in a world model."""
    lease_wait_s: float = 0.0
    """Longest wait for a free slot of the simulator."""

    def __post_init__(self) -> None:
        if self.num_envs < 1 or self.seed < 0:
            raise ConfigError(
                f"collect: got num_envs {self.num_envs} and seed {self.seed}, allowed: 1 or more, 0 or more"
            )
        require(bool(self.out), "out", self.out, "a new folder")
        check_num_envs(self.num_envs)
        require(self.episodes >= 1, "episodes", self.episodes, "1 or more")
        require(abs(self.bias_m) <= 0.2, "bias_m", self.bias_m, "-0.2 to 0.2 metres")
        require(0 <= self.noise_m <= 0.2, "noise_m", self.noise_m, "0 to 0.2 metres")
        require(self.torch_threads >= 1, "torch_threads", self.torch_threads, "1 or more")
        require(self.lease_wait_s >= 0, "lease_wait_s", self.lease_wait_s, "0 or more")
        allowed = f"{self.episodes} or more, as many as episodes"
        require(self.attempts is None or self.attempts >= self.episodes, "attempts", self.attempts, allowed)
        searches = self.search.world is not None
        require(searches or self.search == _NO_SEARCH, "search", self.search, "nothing without search.world")
        require(not searches or self.policy is not None, "search.world", self.search.world, "with policy=")
        if self.label is not None:
            self._refuse_others(_OF_LABELS, "label=")
            return
        if self.env != EnvConfig():
            self._check_env()
        elif self.policy is None and self.task is None:
            raise ConfigError(
                "task: missing. Give it as `task=<text>`. Or give policy=runs/<folder>, which has a task."
            )
        check_names(self.task, self.robot, at="")
        if self.policy is not None and (self.bias_m, self.noise_m) != (0.0, 0.01):
            raise ConfigError(
                f"bias_m: got {self.bias_m} and noise_m {self.noise_m} with policy={self.policy}, allowed: "
                "neither. They are the scripted expert's: leave them out, or leave policy out."
            )

    def _check_env(self) -> None:
        """Refuses an environment without an expert, and settings of our tasks with it."""
        if self.env.kind == "sim" or self.env.expert is None:
            raise ConfigError(
                "env: allowed: env.kind=gym or process, env.id=<id> and env.expert=<module:function>, whose "
                "episodes are recorded. Tasks of ours have settings of their own: task=, robot=, cameras=."
            )
        ours = ("task", "policy", "robot", "bias_m", "noise_m", *_OF_CAMERAS)
        self._refuse_others({setting.name for setting in fields(self)} - set(ours), "env.*")

    def _refuse_others(self, allowed: Collection[str], with_: str) -> None:
        """Refuses settings that are no part of `allowed`, where something else decides them."""
        for setting in fields(self):
            usual: Any = setting.default
            usual = setting.default_factory() if callable(setting.default_factory) else usual
            got = getattr(self, setting.name)
            require(setting.name in allowed or got == usual, setting.name, got, f"left out with {with_}")


def run(argv: list[str]) -> int:
    """Collects episodes and prints their statistics."""
    return run_command(argv, _HELP, _run)


def _run(words: list[str]) -> Outcome:
    options = config(words)
    out = Path(options.out)
    if options.label is not None:
        return 0, _label(options, Path(options.label))
    if not is_published(out, _asked(options)):
        _collect(options)
    facts = read_json(out / COLLECTED, DatasetError, _EXISTS)
    remove(out)
    _print_facts(out, facts)
    return 0, facts


def _collect(options: CollectConfig) -> None:
    """Plays episodes until enough are kept, and writes the dataset."""
    import torch  # the learner and the simulator: not for --help

    from robot_rl.rollout.envs import simulation
    from robot_rl.sched.opened import opened
    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.train.collect import collect, num_passed

    torch.set_num_threads(options.torch_threads)
    env_config, acting_in = _env_and_actor(options)
    keep = options.keep
    keep = replace(keep, success=options.policy is not None if keep.success is None else keep.success)
    attempts = options.episodes if keep.takes_all else options.attempts or 10 * options.episodes
    who = f"policy {options.policy} in" if options.policy else "expert of"
    print(f"{who} {env_config.name}: {options.episodes} episodes", file=sys.stderr)
    if waits := making(options.num_envs):
        print(waits, file=sys.stderr)
    settings = _identity(options) | as_json({"env": asdict(env_config), "policy_crc32": _crc_of(options)})
    if options.search.world is not None:
        settings["world_crc32"] = _crc_of_world(options.search.world)
    device, holder = simulation(env_config, options.num_envs), f"collect {env_config.name}"
    with opened(device, holder=holder, wait_s=options.lease_wait_s) as env:
        chosen(env.state_names, options.state, at="state")  # finds a mistake before the collection
        with acting_in(env) as actor, collecting(Path(options.out), settings, images=options.images) as into:
            if into.batches:
                print(f"goes on: {into.kept()}", file=sys.stderr)
            done = min(num_passed(into.batches, keep), options.episodes)
            with (
                ProgressDisplay() as display,
                display.phase("collect", options.episodes, unit="episodes", start=done) as progress,
            ):
                found = collect(
                    env,
                    actor,
                    keep,
                    into,
                    episodes=options.episodes,
                    attempts=attempts,
                    state=options.state,
                    source="demo" if options.policy is None else "sim",
                    on_batch=lambda passed, note: progress.update(passed, note=note),
                )
            asked = {"task": env_config.name, "policy": options.policy, "seed": options.seed}
            facts = {**asked, **_facts(found, keep), "out": options.out, "settings": _asked(options)}
            facts |= {"seeds": found.seeds, "env": asdict(env_config)}
            into.publish(found.places.tolist(), facts)


def _label(options: CollectConfig, folder: Path) -> dict[str, Any]:
    """Writes the episodes of a recording with the labels of an expert; returns and prints how many."""
    import torch  # the simulator and a teacher: not for --help

    from robot_rl.data.lerobot.edit import write_new
    from robot_rl.data.store.reader import open_source
    from robot_rl.rollout.envs import make_expert, simulation
    from robot_rl.sched.opened import opened
    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.train.relabel import features_of, labels_of, open_recording, relabelled

    torch.set_num_threads(options.torch_threads)
    recording = open_recording(folder, num_envs=options.num_envs)
    env_config = replace(recording.env, expert=options.policy or recording.env.expert)
    device, holder = simulation(env_config, len(recording.lanes)), f"collect label={folder}"
    steps, source = int(recording.source.lengths().sum()), recording.source
    with opened(device, holder=holder, wait_s=options.lease_wait_s) as env:
        expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
        with ProgressDisplay() as display, display.phase("label", steps) as progress:
            labels = labels_of(recording, env, expert, on_step=progress.update)
    whole = relabelled(recording, labels)
    write_new(Path(options.out), source.meta, features_of(recording), whole, images=options.images)
    lengths = open_source(options.out).lengths()
    left_out, labelled = len(source) - len(lengths), int(lengths.sum())
    print(f"{options.out}: {len(lengths):,} episodes, {labelled:,} labels; {left_out:,} cut short, left out")
    asked = {"label": options.label, "policy": options.policy, "out": options.out}
    return {**asked, "episodes": len(lengths), "env_steps": labelled, "cut_short": left_out}


def config(words: list[str]) -> CollectConfig:
    """Returns the settings, checked as far as possible without learner and simulator."""
    from robot_rl.config import load  # Hydra: not for --help

    options = load(CollectConfig, words, config_name="collect")
    out = Path(options.out)
    if out.exists():
        if not is_published(out, _asked(options)):
            raise DatasetError(f"out: {options.out!r} exists already. {_EXISTS}")
        return options
    check_settings(out, _identity(options))
    if options.policy is not None:
        read_head(policy_folder(options.policy))
    check_room(out, at="out")
    return options


def _asked(options: CollectConfig) -> dict[str, Any]:
    """Returns all settings but `out` and `lease_wait_s`, and an env or a search that is not given."""
    left_out = ["out", "lease_wait_s"]
    left_out += ["env"] * (options.env == EnvConfig()) + ["search"] * (options.search == _NO_SEARCH)
    given = {name: value for name, value in asdict(options).items() if name not in left_out}
    return as_json(given)


def _identity(options: CollectConfig) -> dict[str, Any]:
    """Returns the settings that decide which episodes are played and which are within the limits."""
    return {name: value for name, value in _asked(options).items() if name not in _FREE}


def _crc_of(options: CollectConfig) -> int | None:
    """Returns a checksum of the policy, because its folder may hold another one later."""
    if options.policy is None:
        return None
    return zlib.crc32(json.dumps(read_head(policy_folder(options.policy))).encode())


def _crc_of_world(folder: str) -> int:
    """Returns a checksum of a world model as it was fitted, without what an audit adds to its report."""
    head = head_of(Path(folder))
    fitted = {**head, "report": {name: head["report"][name] for name in ("version", "real_steps")}}
    return zlib.crc32(json.dumps(fitted).encode())


def _env_and_actor(
    options: CollectConfig,
) -> tuple[EnvConfig, Callable[[VectorEnv], AbstractContextManager[Actor]]]:
    """Returns the settings of the env, and a function that makes the actor for a while."""
    from robot_rl.core.machine import check_device
    from robot_rl.train.collect import env_of_robot, expert_actor, open_policy, policy_actor
    from robot_rl.train.search import looking_ahead

    def with_cameras(env: EnvConfig) -> EnvConfig:
        asked = {name: getattr(options, name) for name in (*_OF_CAMERAS, "environment_state")}
        return replace(env, **{name: value for name, value in asked.items() if value})

    if options.policy is None:
        how: dict[str, Any] = {"bias_m": options.bias_m, "noise_m": options.noise_m, "seed": options.seed}

        def expert(env: VectorEnv) -> AbstractContextManager[Actor]:
            return nullcontext(expert_actor(env, **how))

        if options.task is None:  # then there is an env: CollectConfig says so
            return options.env, expert
        return with_cameras(EnvConfig(task=options.task, robot=options.robot)), expert
    check_device(options.device)
    policy, meta, env = open_policy(options.policy)
    if options.robot is not None:
        env = env_of_robot(options.policy, meta, env, options.robot)
    env = replace(env, task=options.task or env.task).demonstrated()

    @contextmanager
    def acting(env: VectorEnv) -> Generator[Actor]:
        how: dict[str, Any] = {"real": env, "n_exec": meta.n_exec}
        how |= {"holder": f"collect {options.policy}: search", "wait_s": options.lease_wait_s}
        module: Any = policy
        with looking_ahead(module.to(options.device), options.search, **how) as found:
            yield policy_actor(env, found, meta, seed=options.seed, device=options.device)

    return with_cameras(env), acting


def _facts(found: Collected, keep: KeepConfig) -> dict[str, Any]:
    """Returns the statistics of the episodes, for --json."""
    started, kept = found.started, found.kept
    return {
        "episodes": len(kept),
        "env_steps": int(started.steps[kept].sum()),
        "success": float(started.success[kept].mean()),
        "keep": asdict(keep),
        "refused": found.refused,
        "spare": found.spare,
        "started": started.to_json(),
    }


def _print_facts(folder: Path, facts: dict[str, Any]) -> None:
    started = facts["started"]
    low, _, high = started["steps"]
    smooth, _, rough = started["roughness"]
    print(
        f"{folder}: {facts['episodes']} episodes, {facts['env_steps']:,} control steps, "
        f"success {facts['success']:.1%}; {describe_refused(facts['refused'], started['episodes'])}"
    )
    print(
        f"all episodes that were begun: success {started['success']:.1%}, {low:.0f} to {high:.0f} steps, "
        f"roughness {smooth:.2g} to {rough:.2g} (10 to 90 %)"
    )
