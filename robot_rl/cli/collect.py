"""`robot-rl collect`: episodes of a scripted expert or of a policy, as a dataset on the disk."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from robot_rl.core.errors import ConfigError, DatasetError, require
from robot_rl.core.files import read_json
from robot_rl.core.names import chosen
from robot_rl.core.room import check_room
from robot_rl.data.collecting import COLLECTED, as_json, check_settings, collecting, is_published, remove
from robot_rl.data.keep import KeepConfig, describe_refused
from robot_rl.policies.saved import policy_folder, read_head
from robot_rl.sim.config import check_names, check_num_envs, making

if TYPE_CHECKING:
    from robot_rl.hal.vector import VectorEnv
    from robot_rl.sim.vector import EnvConfig
    from robot_rl.train.collect import Actor, Collection

SUMMARY = "episodes of a scripted expert or of a policy, as a LeRobot dataset"

_HELP = """\
Usage: robot-rl collect task=<name> out=<folder> [episodes=100] [bias_m=0] [noise_m=0.01] [key=value ...]
       robot-rl collect policy=<run> out=<folder> [episodes=100] [keep.<setting>=...] [key=value ...]

Runs the task's scripted expert, or a policy, and writes its episodes as a LeRobotDataset v3, which
`robot-rl train demos.path=<folder>` and `robot-rl finetune dataset=<folder>` learn from. The seeds of
the episodes are never those of an evaluation.

The expert: bias_m lets it aim beside the target, noise_m varies the aim between episodes: a base of
chosen quality. All its episodes are kept, failures included, unless keep says otherwise.

policy=  a run folder (its final policy), a policy/ of one such as runs/<folder>/policy/base, or any
         folder with a policy.json. Task, robot and env settings are the run's. Acts without
         exploration. Of its episodes only those that succeed are kept, unless keep.success=false.

Which episodes are kept (until there are `episodes` of them, or `attempts` were begun):
  keep.success=true|false     only episodes that succeed
  keep.max_steps=40           at most so many control steps
  keep.max_roughness=0.05     at most so much roughness: mean squared change of the action from one
                              control step to the next, actions being in [-1, 1]
  keep.fastest=0.5            of what is left, the half with the fewest control steps
  keep.smoothest=0.5          of what is left then, the smoother half
Each refused episode is counted for the first setting that refused it. The 10, 50 and 90 % points of
steps and roughness of all episodes are printed: limits can be chosen from a small collection.

Episodes are kept on the disk, in .collecting-<name> beside out, after every num_envs of them; the dataset
gets its place when it is whole. After a kill, a full disk or Ctrl-C the same command goes on where it
stopped, to the same dataset; episodes, attempts and the shares of keep may be others then. To give it
up, remove that folder; what is in its episodes/ is a dataset, too.

Settings:
  episodes=100  attempts=1000   how many are kept; how many are begun at most (10 for each, by itself)
  cameras=front image_size=96,96       pictures join the observation, a policy may look at them or not
  state=joint,finger,tool       records only these elements of the state, by the beginnings of their names:
                                a VLA that learns from it finds the cube in the pictures, as on a real robot
  images=png|video              pictures without loss, or as h264 video, which is smaller
  robot=<name>  seed=0  num_envs=50  device=cpu  torch_threads=1  lease_wait_s=0  --json

Examples:
  robot-rl collect task=pick_cube episodes=50 out=demos/pick_cube
  robot-rl collect task=pick_cube episodes=200 bias_m=0.015 noise_m=0.01 out=demos/mediocre
  robot-rl collect policy=runs/<folder> episodes=200 out=demos/improved
  robot-rl collect policy=runs/<folder> keep.fastest=0.8 keep.smoothest=0.8 out=demos/chosen
  robot-rl collect policy=runs/<folder> cameras=front images=video out=demos/for_a_vla
"""

_FREE = ("episodes", "attempts", "keep.fastest", "keep.smoothest")
"""Settings that may be others when a collection goes on: they choose among episodes, and change none."""
_EXISTS = "Choose another folder, or remove it first."


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """What to collect."""

    out: str
    """Folder of the dataset; must not exist."""
    task: str | None = None
    """The policy's own if None."""
    policy: str | None = None
    """Folder of a run or of a saved policy; the scripted expert acts if None."""
    robot: str | None = None
    """The policy's or the task's own if None."""
    episodes: int = 100
    """How many are kept."""
    attempts: int | None = None
    """How many are begun at most; ten for each that is kept if None."""
    keep: KeepConfig = field(default_factory=KeepConfig)
    bias_m: float = 0.0
    noise_m: float = 0.01
    seed: int = 0
    num_envs: int = 50
    cameras: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None
    """Height and width of pictures; 96 x 96, or those of the policy's run, if None."""
    state: tuple[str, ...] = ()
    """Elements of the state that are recorded, by the beginnings of their names; all if empty."""
    images: Literal["png", "video"] = "png"
    """How pictures are kept: without loss, or as h264 video, which is smaller."""
    device: str = "cpu"
    """Where a policy computes."""
    torch_threads: int = 1
    lease_wait_s: float = 0.0
    """How long to wait for a slot of the simulator that others hold."""

    def __post_init__(self) -> None:
        if self.num_envs < 1 or self.seed < 0:
            raise ConfigError(
                f"collect: got num_envs {self.num_envs} and seed {self.seed}, allowed: 1 or more, 0 or more"
            )
        check_num_envs(self.num_envs)
        require(self.episodes >= 1, "episodes", self.episodes, "1 or more")
        require(abs(self.bias_m) <= 0.2, "bias_m", self.bias_m, "-0.2 to 0.2 metres")
        require(0 <= self.noise_m <= 0.2, "noise_m", self.noise_m, "0 to 0.2 metres")
        require(self.torch_threads >= 1, "torch_threads", self.torch_threads, "1 or more")
        require(self.lease_wait_s >= 0, "lease_wait_s", self.lease_wait_s, "0 or more")
        allowed = f"{self.episodes} or more, as many as episodes"
        require(self.attempts is None or self.attempts >= self.episodes, "attempts", self.attempts, allowed)
        if self.policy is None and self.task is None:
            raise ConfigError(
                "task: missing. Give it as `task=<text>`. Or give policy=runs/<folder>, which has a task."
            )
        check_names(self.task, self.robot, at="")
        if self.policy is not None and (self.bias_m, self.noise_m) != (0.0, 0.01):
            raise ConfigError(
                f"bias_m: got {self.bias_m} and noise_m {self.noise_m} beside policy={self.policy}, allowed: "
                "neither. They are the scripted expert's: leave them out, or leave policy out."
            )


def run(argv: list[str]) -> int:
    """Collects and prints what was collected."""
    if {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    options = config([word for word in argv if word != "--json"])
    out = Path(options.out)
    if not is_published(out, _asked(options)):
        _collect(options)
    told = read_json(out / COLLECTED, DatasetError, _EXISTS)
    remove(out)
    print(_told(out, told))
    if "--json" in argv:
        print(json.dumps(told))
    return 0


def _collect(options: CollectConfig) -> None:
    """Plays episodes until there are enough of them, and writes the dataset."""
    import torch  # the learner and the simulator: not for --help

    from robot_rl.rollout.envs import simulation
    from robot_rl.sched.opened import opened
    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.train.collect import collect, num_passed

    torch.set_num_threads(options.torch_threads)
    env_config, make_actor = _cast(options)
    keep = options.keep
    keep = replace(keep, success=options.policy is not None if keep.success is None else keep.success)
    attempts = options.episodes if keep.takes_all else options.attempts or 10 * options.episodes
    who = f"policy {options.policy} in" if options.policy else "expert of"
    print(f"{who} {env_config.task}: {options.episodes} episodes", file=sys.stderr)
    if waits := making(options.num_envs):
        print(waits, file=sys.stderr)
    settings = _identity(options) | as_json({"env": asdict(env_config), "policy_crc32": _crc_of(options)})
    device, holder = simulation(env_config, options.num_envs), f"collect {env_config.task}"
    with opened(device, holder=holder, wait_s=options.lease_wait_s) as env:
        chosen(env.state_names, options.state, at="state")  # a mistake is not worth the collection
        actor = make_actor(env)
        with collecting(Path(options.out), settings, images=options.images) as into:
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
            asked = {"task": env_config.task, "policy": options.policy, "seed": options.seed}
            facts = {**asked, **_facts(found, keep), "out": options.out, "settings": _asked(options)}
            into.publish(found.places.tolist(), facts)


def config(words: list[str]) -> CollectConfig:
    """Returns the settings, checked as far as that needs neither learner nor simulator."""
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
    """Returns all settings but the folder, and how long to wait for others."""
    left_out = ("out", "lease_wait_s")
    return {name: value for name, value in as_json(asdict(options)).items() if name not in left_out}


def _identity(options: CollectConfig) -> dict[str, Any]:
    """Returns the settings that say which episodes are played, and which of them are within the limits."""
    return {name: value for name, value in _asked(options).items() if name not in _FREE}


def _crc_of(options: CollectConfig) -> int | None:
    """Returns a checksum of the policy: another one may have taken its place."""
    if options.policy is None:
        return None
    return zlib.crc32(json.dumps(read_head(policy_folder(options.policy))).encode())


def _cast(options: CollectConfig) -> tuple[EnvConfig, Callable[[VectorEnv], Actor]]:
    """Returns where to collect, and what makes the one who acts there."""
    from robot_rl.sim.vector import EnvConfig
    from robot_rl.train.collect import expert_actor, open_policy, policy_actor
    from robot_rl.train.config import check_device

    def seen(env: EnvConfig) -> EnvConfig:
        size, cameras = options.image_size or env.image_size, options.cameras or env.cameras
        return replace(env, cameras=cameras, image_size=size)

    if options.policy is None:
        how: dict[str, float] = {"bias_m": options.bias_m, "noise_m": options.noise_m}
        assert options.task is not None, "CollectConfig has one of the two"
        env = EnvConfig(task=options.task, robot=options.robot)
        return seen(env), partial(expert_actor, **how, seed=options.seed)
    check_device(options.device)
    policy, meta, env = open_policy(options.policy)
    env = replace(env, task=options.task or env.task, robot=options.robot or env.robot)
    make = partial(policy_actor, policy=policy, meta=meta, seed=options.seed, device=options.device)
    return seen(env), make


def _facts(found: Collection, keep: KeepConfig) -> dict[str, Any]:
    """Returns what --json prints of the episodes."""
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


def _told(folder: Path, facts: dict[str, Any]) -> str:
    started = facts["started"]
    low, _, high = started["steps"]
    smooth, _, rough = started["roughness"]
    lines = [
        f"{folder}: {facts['episodes']} episodes, {facts['env_steps']:,} control steps, "
        f"success {facts['success']:.1%}; {describe_refused(facts['refused'], started['episodes'])}",
        f"all that were begun: success {started['success']:.1%}, {low:.0f} to {high:.0f} steps, "
        f"roughness {smooth:.2g} to {rough:.2g} (10 to 90 %)",
    ]
    return "\n".join(lines)
