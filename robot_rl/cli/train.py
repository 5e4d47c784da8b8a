"""`robot-rl train`: demonstrations, cloning, reinforcement learning and evaluation, in one command."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.cli.finetune import length, table
from robot_rl.cli.resume import resumed
from robot_rl.config import options
from robot_rl.core.room import check_room
from robot_rl.train.record import check_kind

if TYPE_CHECKING:
    from robot_rl.hal.device import DeviceSpec
    from robot_rl.train.config import RunConfig
    from robot_rl.train.phases import Summary

SUMMARY = "demonstrations, behaviour cloning, reinforcement learning, evaluation: one run"

_HELP = """\
Usage: robot-rl train [recipe=<name>] [base=<name>] [key=value ...] [-m] [--json]
       robot-rl train resume=runs/<folder>

Collects demonstrations from a scripted expert, clones them into a base policy, improves it by
reinforcement learning, and evaluates both on held-out seeds. `stages` gives another list: with
demos,clone,evaluate it clones alone, with look,evaluate,online,evaluate it begins from nothing, with
demos,finetune,evaluate,online,evaluate it fine-tunes a small VLA in the place of cloning.
With --json the last line of output is one JSON object, the content of summary.json in the run
folder.

{recipes}
{bases}

A base is a task with its demonstrations and the policy cloned from them; a recipe names its own,
and base=<name> puts the same method on another. `method` says how the base is improved: residual,
ppo, grpo, latent, chunked, direct, rl100, sequence or qarl; the settings are in the section of
that name.

Examples:
  robot-rl train recipe=smoke                        the whole chain in under a minute
  robot-rl train recipe=pick_cube seed=3             a Panda arm learns to lift a cube
  robot-rl train recipe=pick_cube demos.bias_m=0.02  from a worse expert
  robot-rl train recipe=reach stages=demos,clone,evaluate    behaviour cloning only
  robot-rl train recipe=scratch                      without demonstrations
  robot-rl train recipe=two_robots                   a Panda and a gantry at once, one policy for both
  robot-rl train recipe=finetune_then_rl             a small VLA is fine-tuned, then improved
  robot-rl train recipe=crossq env.id=Hopper-v5      on any Gymnasium environment
  robot-rl train recipe=latent base=pick_cube        the same base, improved through its noise
  robot-rl train -m recipe=smoke seed=0,1,2          three runs, as many at once as there are cores
  robot-rl train -m recipe=smoke seed=0,1,2 sweep.jobs=1       one after another
  robot-rl train recipe=reach replay.reuse=runs/<folder>     learns from an earlier run too
  robot-rl train recipe=online                       one arm learns in real time, a script helps it
  robot-rl train recipe=online station=sim_arm human.input=keyboard    behind ROS 2, and you help it
  robot-rl train resume=runs/<folder>                goes on after a crash, to the same result

Settings (every one of them is in config.yaml of the run folder):
  seed  out  device  torch_threads  num_envs  n_exec  lease_wait_s  stages
  env.task  env.robot  env.reward  env.horizon_s  env.randomize  env.num_threads
  env.kind=gym  env.id  env.settings.max_episode_steps=200
  sources.<name>.robot  sources.<name>.num_envs  sources.<name>.env_steps  sources.<name>.share
  demos.episodes  demos.bias_m  demos.noise_m  demos.path
  demos.read.episodes=0-79  demos.read.cameras=front  demos.read.on_damage=skip  demos.read.rename=a:action
  policy=flow|diffusion|token|gaussian  and its own: policy.horizon  policy.width  policy.depth  policy.steps
  bc.updates  bc.batch  bc.algorithm.lr
  demos.mirror  demos.filter.updates  demos.by=human  bc.policy
  finetune.policy  finetune.updates | finetune.minutes  finetune.heldout  finetune.options.<name>
  method=residual   and its own: method.env_steps  method.utd  method.batch  method.scale  method.demo_ratio
  method=ppo        method.exploration.process  method.decisions  method.distil.updates
  method=direct     method.algorithm.actor.kind  method.algorithm.critic.width
  transport=process  ahead
  station  real_time  human.input  human.reward  human.reset  human.ratio  human.classifier
  replay.record  replay.reuse  replay.reuse_ratio  replay.read.episodes (and as of demos.read)
  evaluate.episodes  evaluate.num_envs  evaluate.every_env_steps
  checkpoint.every_s  video.episodes  video.failures
"""


def run(argv: list[str]) -> int:
    """Trains one run and prints its summary."""
    if {"-h", "--help"} & set(argv):
        print(_HELP.format(recipes=_listed("Recipes", "recipe"), bases=_listed("Bases", "base")), end="")
        return 0
    found = result([word for word in argv if word != "--json"])
    if "--json" in argv:
        print(json.dumps(found))
    return 0


def config(words: list[str]) -> RunConfig:
    """Returns the settings of a run, checked as far as that needs no learner."""
    from robot_rl.config import load, read  # Hydra: not for --help
    from robot_rl.train.config import RunConfig

    folder = resumed(words)
    if folder is None:
        settings = load(RunConfig, words, config_name="train")
        check_room(Path(settings.out) / "run", at="out")
        return settings
    check_kind(folder, "train", at="resume")
    check_room(folder / "checkpoints", at="resume")
    return read(RunConfig, folder / "config.yaml")


def devices(config: RunConfig) -> list[tuple[DeviceSpec, int]] | None:
    """Returns what a run takes of this machine; None if it is to be alone, with the terminal."""
    from robot_rl.train.devices import devices_of_training, gpu_of

    return None if config.has_arm else devices_of_training(config) + gpu_of(config.device)


def result(words: list[str]) -> dict[str, Any]:
    """Trains one run and returns the content of its summary.json."""
    folder, settings = resumed(words), config(words)
    print(
        f"task {settings.env.name}, recipe {settings.recipe}, seed {settings.seed}: {_plan(settings)}, "
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
        f"{_bill(summary)} control steps and {summary.train_minutes:.1f} minutes "
        f"({summary.episodes} held-out episodes); see {summary.run}/report.html"
    )
    return summary.to_json()


def _plan(settings: RunConfig) -> str:
    """Says what the stages come to."""
    said = {
        "demos": _demonstrations(settings),
        "look": f"{settings.demos.episodes} episodes of noise to look at{_of_each(settings)}",
        "clone": f"{settings.bc.updates:,} cloning updates",
        "finetune": f"fine-tuning of {settings.finetune.policy}, {length(settings.finetune)}",
        "online": f"{settings.env_steps:,} control steps of {settings.method.kind} RL on {_envs(settings)}",
    }
    return ", ".join(said[stage] for stage in settings.plan if stage in said)


def _outcome(summary: Summary) -> str:
    """Says what was reached: success, or the return where the env does not tell successes."""
    if summary.says_success:
        name, form, before, after = "success", ".1%", summary.base_success, summary.final_success
    else:
        name, form, before, after = "return", ".1f", summary.base_return, summary.final_return or 0.0
    return f"{_moved(before, after, name, form)}{_by_robot(summary)}"


def _bill(summary: Summary) -> str:
    """Says who made the control steps that the run took."""
    words = {"real": "real", "human": "human", "sim": "simulated", "unknown": "earlier"}
    words |= {"world": "imagined", "demo": "demonstrated"}
    bill = summary.control_steps
    parts = [f"{bill[kind]:,} {word}" for kind, word in words.items() if bill.get(kind)]
    return " and ".join(parts) or "0"


def _moved(before: float | None, after: float, name: str, form: str) -> str:
    return f"{name} {'' if before is None else f'{before:{form}} before, '}{after:{form}}"


def _by_robot(summary: Summary) -> str:
    """Says what each of several robots reached."""
    found = [
        _moved(told["base"]["success"] if "base" in told else None, told["final"]["success"], name, ".1%")
        for name, told in summary.sources.items()
    ]
    return f" ({'; '.join(found)})" if found else ""


def _envs(settings: RunConfig) -> str:
    """Says how many envs collect, and on which robots where they are several."""
    each = [
        f"{source.num_envs} envs{f' of {name}' if name else ''}" for name, source in settings.acting.items()
    ]
    return " and ".join(each)


def _of_each(settings: RunConfig) -> str:
    return " of each robot" if settings.sources else ""


def _demonstrations(settings: RunConfig) -> str:
    """Says how many demonstrations there are, or where: only their dataset knows how many it has."""
    path = settings.demos.path
    return (
        f"demonstrations of {path}"
        if path
        else f"{settings.demos.episodes} demonstrations{_of_each(settings)}"
    )


def _listed(title: str, group: str) -> str:
    """Returns the names of a group of configs, in lines of the help's width."""
    return textwrap.fill(", ".join(options(group)), 100, initial_indent=f"{title}: ", subsequent_indent="  ")
