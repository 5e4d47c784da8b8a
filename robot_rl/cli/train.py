"""`robot-rl train`: demonstrations, behaviour cloning, reinforcement learning and evaluation in one run."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.cli.command import resumed, run_command
from robot_rl.cli.finetune import length, table
from robot_rl.config import options
from robot_rl.core.room import check_room
from robot_rl.train.record import check_kind

if TYPE_CHECKING:
    from robot_rl.hal.device import DeviceSpec
    from robot_rl.train.config import RunConfig
    from robot_rl.train.phases import Summary

SUMMARY = "collect demonstrations, clone them, improve the policy by RL, evaluate: one run"

_HELP = """\
Usage: robot-rl train [recipe=<name>] [base=<name>] [key=value ...] [-m] [--json]
       robot-rl train resume=runs/<folder>

Collects demonstrations from a scripted expert, clones a base policy from them, improves it by
reinforcement learning, and evaluates both policies on held-out seeds. `stages` changes this list:
  stages=demos,clone,evaluate                       behaviour cloning only
  stages=look,evaluate,online,evaluate              RL without demonstrations
  stages=demos,finetune,evaluate,online,evaluate    fine-tunes a small VLA instead of cloning
With --json the last line of output is one JSON object, the content of summary.json in the run
folder.

{recipes}
{bases}

A base is a task, its demonstrations, and the policy cloned from them. A recipe has its own base;
base=<name> uses the recipe's method on another. `method` says how RL improves the base: residual,
ppo, grpo, latent, chunked, direct, rl100, sequence or qarl. Its settings are method.<name>=<value>.
`robot-rl doctor --list recipe` describes the recipes; --list base, method and task do the same.

Examples:
  robot-rl train recipe=smoke                        all stages in under a minute
  robot-rl train recipe=pick_cube seed=3             a Panda arm learns to lift a cube
  robot-rl train recipe=pick_cube demos.bias_m=0.02  from an expert that aims 2 cm away from the cube
  robot-rl train recipe=reach stages=demos,clone,evaluate    behaviour cloning only
  robot-rl train recipe=scratch                      without demonstrations
  robot-rl train recipe=two_robots                   a Panda and a gantry at once, one policy for both
  robot-rl train recipe=finetune_then_rl             a small VLA is fine-tuned, then improved
  robot-rl train recipe=crossq env.id=Hopper-v5      on any Gymnasium environment
  robot-rl train recipe=latent base=pick_cube        RL on the noise that the base decodes
  robot-rl train -m recipe=smoke seed=0,1,2          three runs, as many at once as there are cores
  robot-rl train -m recipe=smoke seed=0,1,2 sweep.jobs=1       one after another
  robot-rl train recipe=reach replay.reuse=runs/<folder>     also learns from an earlier run
  robot-rl train recipe=online                       one arm learns in real time, corrected by a script
  robot-rl train recipe=online station=sim_arm human.input=keyboard    over ROS 2, corrected by you
  robot-rl train resume=runs/<folder>                continues after a crash, to the same result

Settings (config.yaml of the run folder has all of them, as --cfg job prints them):
  seed  out  device  torch_threads  num_envs  n_exec  lease_wait_s  stages
  env.task  env.robot  env.formula  env.reward  env.horizon_s  env.control_hz  env.randomize  env.looks
  env.variation  env.num_threads
  env.kind=gym|process  env.id  env.settings.max_episode_steps=200  env.expert  env.python  env.workers
  env.instruction=task  env.common_actions
  sources.<name>.task  sources.<name>.robot  sources.<name>.num_envs  sources.<name>.env_steps
  sources.<name>.share  sources.<name>.station  sources.<name>.real_time  sources.<name>.human
  sources.<name>.world  sources.<name>.cameras  sources.<name>.control_hz  sources.<name>.needs.labels.<name>
  demos.episodes  demos.bias_m  demos.noise_m  demos.disturb  demos.path
  demos.read.episodes=0-79  demos.read.cameras=front  demos.read.on_damage=skip  demos.read.rename=a:action
  policy=flow|diffusion|token|gaussian|small_vla  with policy.horizon  policy.width  policy.depth
  bc.updates  bc.batch  bc.algorithm.lr
  demos.mirror  demos.filter.updates  demos.by=human  bc.policy
  finetune.policy  finetune.updates | finetune.minutes  finetune.heldout  finetune.options.<name>
  method=residual   with method.env_steps  method.utd  method.batch  method.scale  method.demo_ratio
  method=ppo        method.exploration.process  method.decisions  method.distil.updates
  method=direct     method.algorithm.actor.kind  method.algorithm.critic.width
  transport=process|ray  ahead  ray.address  ray.cpus  ray.labels.<name>  restarts  silence_s
  station  needs.real  needs.labels.<name>  priority  preempt_s  turn_s
  real_time  human.input  human.reward  human.reset  human.ratio  human.classifier
  replay.record  replay.reuse  replay.reuse_ratio  replay.read.episodes (and others as demos.read)
  evaluate.episodes  evaluate.num_envs  evaluate.every_env_steps
  checkpoint.every_s  video.episodes  video.failures
"""


def run(argv: list[str]) -> int:
    """Trains one run and prints its summary."""
    help_text = _HELP.format(recipes=_listed("Recipes", "recipe"), bases=_listed("Bases", "base"))
    return run_command(argv, help_text, lambda words: (0, result(words)))


def config(words: list[str]) -> RunConfig:
    """Returns the settings of a run, checked as far as possible without the learner."""
    from robot_rl.config import load, read  # Hydra: not for --help
    from robot_rl.train.config import RunConfig

    folder = resumed(words)
    if folder is None:
        settings = load(RunConfig, words, config_name="train")
        check_room(Path(settings.out) / "run", at="out")
        from robot_rl.train.before import check_before_learner  # MuJoCo

        check_before_learner(settings)
        return settings
    check_kind(folder, "train", at="resume")
    check_room(folder / "checkpoints", at="resume")
    return read(RunConfig, folder / "config.yaml")


def devices(config: RunConfig) -> list[tuple[DeviceSpec, int]] | None:
    """Returns the devices that a run needs; None if it must run alone, because it needs the terminal."""
    from robot_rl.train.devices import devices_of_training, gpu_of

    return None if config.has_arm else devices_of_training(config) + gpu_of(config.device)


def result(words: list[str]) -> dict[str, Any]:
    """Trains one run and returns the content of its summary.json."""
    folder, settings = resumed(words), config(words)
    print(
        f"task {settings.task}, recipe {settings.recipe}, seed {settings.seed}: {_plan(settings)}, "
        f"learner on {settings.device}",
        file=sys.stderr,
    )
    from robot_rl.train.phases import resume, run  # the learner: seconds

    summary = resume(folder) if folder else run(settings)
    if summary.finetune is not None:
        from rich.console import Console

        Console().print(table(summary.finetune["predictors"]))
        print(summary.finetune["verdict"]["text"])
    print(
        f"{summary.task}: {_outcome(summary)} after "
        f"{_steps_by_source(summary)} control steps and {summary.train_minutes:.1f} minutes "
        f"({summary.episodes} held-out episodes); see {summary.run}/report.html"
    )
    return summary.to_json()


def _plan(settings: RunConfig) -> str:
    """Describes the stages of a run."""
    base = settings.bc.policy
    described = {
        "demos": _demonstrations(settings),
        "look": f"{settings.demos.episodes} episodes of random actions{_of_each(settings)}",
        "clone": f"the base {base}" if base else f"{settings.bc.updates:,} cloning updates",
        "finetune": f"fine-tuning of {settings.finetune.policy}, {length(settings.finetune)}",
        "online": f"{settings.env_steps:,} control steps of {settings.method.title} on {_envs(settings)}",
    }
    return ", ".join(described[stage] for stage in settings.plan if stage in described)


def _outcome(summary: Summary) -> str:
    """Describes the result: success, or the return if the env reports no success."""
    if summary.says_success:
        name, form, before, after = "success", ".1%", summary.base_success, summary.final_success
    else:
        name, form, before, after = "return", ".1f", summary.base_return, summary.final_return or 0.0
    return f"{_moved(before, after, name, form)}{_by_robot(summary)}"


def _steps_by_source(summary: Summary) -> str:
    """Says who made the control steps that the run took."""
    words = {"real": "real", "human": "human", "sim": "simulated", "unknown": "earlier"}
    words |= {"world": "imagined", "demo": "demonstrated"}
    counts = summary.control_steps
    parts = [f"{counts[kind]:,} {word}" for kind, word in words.items() if counts.get(kind)]
    return " and ".join(parts) or "0"


def _moved(before: float | None, after: float, name: str, form: str) -> str:
    return f"{name} {'' if before is None else f'{before:{form}} before, '}{after:{form}}"


def _by_robot(summary: Summary) -> str:
    """Describes the result of each robot, if there are several."""
    found = [
        _moved(one["base"]["success"] if "base" in one else None, one["final"]["success"], name, ".1%")
        for name, one in summary.sources.items()
        if "final" in one
    ]
    return f" ({'; '.join(found)})" if found else ""


def _envs(settings: RunConfig) -> str:
    """Returns how many envs collect, and of which sources if there are several."""
    if not settings.sources:
        return f"{settings.num_envs} envs"
    each = {name: "an arm" if one.is_arm else f"{one.batch} envs" for name, one in settings.sources.items()}
    return " and ".join(f"{what} of {name}" for name, what in each.items())


def _of_each(settings: RunConfig) -> str:
    if "" in settings.scenes:
        return ""
    return " of each task" if "," in settings.task else " of each robot"


def _demonstrations(settings: RunConfig) -> str:
    """Returns the number of demonstrations, or their dataset: its size is not known yet."""
    path, number = settings.demos.path, settings.demos.episodes
    return f"demonstrations of {path}" if path else f"{number} demonstrations{_of_each(settings)}"


def _listed(title: str, group: str) -> str:
    """Returns the names of a group of configs, wrapped for the help."""
    return textwrap.fill(", ".join(options(group)), 100, initial_indent=f"{title}: ", subsequent_indent="  ")
