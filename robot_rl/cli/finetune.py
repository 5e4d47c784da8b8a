"""`robot-rl finetune`: a policy learns from a dataset, measured on episodes that it never saw."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.cli.resume import resumed
from robot_rl.config.words import quoted
from robot_rl.core.room import check_room
from robot_rl.train.record import check_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from robot_rl.hal.device import DeviceSpec
    from robot_rl.train.finetune.config import FinetuneConfig
    from robot_rl.train.finetune.settings import FinetuneSettings

SUMMARY = "a policy learns from a LeRobot dataset; errors on held-out episodes"

_HELP = """\
Usage: robot-rl finetune dataset=<folder> [policy=small_vla] [key=value ...] [--json]
       robot-rl finetune resume=runs/<folder>

Trains a policy on a LeRobotDataset (v3, v2.1, or a sealed store) and measures it on the last episodes,
which nothing is learned from. Beside it stand baselines: the mean action, the present joints, the last action
repeated, ridge regression, nearest neighbours, and LeRobot's ACT trained for the same processor time.
It ends with a table of their errors: of all actions, with a 95 % interval over held-out episodes, of the
first and the last action of a chunk, and of the joints that move. An error of 1 is one standard deviation
of the training actions. The last line says whether anything trained beats the best of the others; the
report shows the errors at more places in the chunk and by group of joints.

policy=  small_vla                our own small vision-language-action policy, from scratch
         act diffusion            LeRobot's, from scratch (extra `lerobot`)
         smolvla pi0 pi05         LeRobot's; tokenizer and VLM come from the hub, for size=tiny from here
         <folder>                 a run folder, a policy/ of one, or a LeRobot checkpoint
         <owner>/<name>           a LeRobot model of the hub

Examples:
  robot-rl finetune dataset=demos/pick_cube                         as long as it helps, beside all baselines
  robot-rl finetune dataset=demos/pick_cube minutes=2 baselines=false   a first look
  robot-rl finetune dataset=demos/pick_cube options.state_noise=0 options.state_dropout=0
      for simulated episodes, whose states are exact; try it with `robot-rl evaluate policy=<run folder>`
  robot-rl finetune dataset=demos/pick_cube policy=smolvla size=tiny updates=50
  robot-rl finetune dataset=demos/pick_cube policy=lerobot/smolvla_base lora.rank=16 device=cuda
  robot-rl finetune dataset=demos/pick_cube policy=runs/<folder> lr=1e-4
  robot-rl finetune dataset=demos/pick_cube robot=panda             refuses data of other joints
  robot-rl finetune -m dataset=demos/pick_cube seed=0,1,2           several runs, side by side where cores
      allow, and a table; sweep.jobs=1 one after another
  robot-rl finetune resume=runs/<folder>                            goes on after a crash, to the same result

What is read of the dataset (a stranger's names, damaged episodes):
  rename=actions:action,state:observation.state   names that are not LeRobot's (also as dataset.rename=)
  episodes=0-79,82  cameras=front,wrist           only these
  on_damage=skip                                  leaves damaged episodes out, and names them

Settings (every one of them is in config.yaml of the run folder):
  heldout  stride  horizon  picture  robot           what is learned, and what is measured
  history  last_action                               what of the past the learners see
  updates | minutes  batch  accumulate  precision  lr  warmup_updates  weight_decay  ema_decay  grad_clip
  size  options.<name>  lora.rank  lora.alpha          the policy itself
  baselines  act.lrs  act.batches  act.trial           the comparison
  seed  out  device  torch_threads  lease_wait_s  curve_points  metrics_rows  checkpoint.every_s
With updates= a run gives the same bytes every time. With minutes= the policy trains as long by the clock (the
number of updates is measured first), and the whole run takes 2 to 3 times as long with ACT beside it. Without
both, the number of updates is found on validation episodes among the training ones. The report ends with the
command that repeats the run, every changed setting in it.
"""


_LISTS = ("rename", "cameras")


def run(argv: list[str]) -> int:
    """Fine-tunes one policy and prints its summary."""
    if {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    found = result([word for word in argv if word != "--json"])
    if "--json" in argv:
        print(json.dumps(found))
    return 0


def config(words: list[str]) -> FinetuneConfig:
    """Returns the settings of a run, checked as far as that needs no learner."""
    from robot_rl.config import load, read  # Hydra: not for --help
    from robot_rl.train.finetune.config import FinetuneConfig
    from robot_rl.train.finetune.names import saved_folder

    folder = resumed(words)
    if folder is None:
        settings = load(FinetuneConfig, [spelled(word) for word in words], config_name="finetune")
        saved_folder(settings.policy)
        check_room(Path(settings.out) / "run", at="out")
        return settings
    check_kind(folder, "finetune", at="resume")
    check_room(folder / "checkpoints", at="resume")
    return read(FinetuneConfig, folder / "config.yaml")


def devices(config: FinetuneConfig) -> list[tuple[DeviceSpec, int]]:
    """Returns what a run takes of this machine."""
    from robot_rl.train.devices import devices_of_finetuning, gpu_of

    return devices_of_finetuning(config) + gpu_of(config.device)


def result(words: list[str]) -> dict[str, Any]:
    """Fine-tunes one policy and returns the content of its summary.json."""
    folder, settings = resumed(words), config(words)
    print(
        f"policy {settings.policy} ({settings.size}), dataset {settings.dataset}, seed {settings.seed}: "
        f"{length(settings)}, batch {settings.batch} on {settings.device}, "
        f"held out: the last {settings.heldout} episode{'s' * (settings.heldout > 1)}",
        file=sys.stderr,
    )
    from rich.console import Console

    from robot_rl.telemetry.finetune import duration
    from robot_rl.train.finetune import run as finetune  # the learner: seconds

    summary = finetune.resume(folder) if folder else finetune.run(settings)
    Console().print(table(summary.predictors))
    print(
        f"{summary.policy}: held-out error {summary.heldout_error:.4f} after {summary.updates:,} updates and "
        f"{duration(summary.minutes)}, over {summary.chunks:,} chunks of "
        f"{len(summary.heldout_episodes)} episodes; see {summary.run}/report.html"
    )
    print(summary.verdict["text"])
    return summary.to_json()


def length(settings: FinetuneSettings) -> str:
    """Says how long the policy trains, and how long the whole run takes."""
    if settings.updates:
        return f"{settings.updates:,} updates"
    minutes = settings.minutes
    if not minutes:
        return "as long as it helps"
    trained = f"the policy trains for {minutes:g} minutes"
    has_act = settings.policy != "act" and find_spec("lerobot") is not None
    if not settings.baselines or not has_act:
        return f"{trained}, reading pictures and measuring come to it"
    return (
        f"{trained}, the run takes {2 * minutes:g} to {3 * minutes:g} with ACT (baselines=false: without it)"
    )


def table(predictors: Mapping[str, Any]) -> Table:
    """Lays out the errors of the policy and of every baseline, in 80 columns."""
    from robot_rl.cli.tables import table_of
    from robot_rl.telemetry.finetune import error_rows

    rows = error_rows(predictors, places=2, style=".3f")
    shown = [{key: row[key] for key in row if key != "still"} for row in rows]
    return table_of(shown, "held-out errors, in standard deviations of the training actions")


def spelled(word: str) -> str:
    """Returns what Hydra understands: `episodes=0-9,12`, lists without brackets, `dataset.rename={a: b}`."""
    key, sign, value = word.partition("=")
    key = (
        key.removeprefix("dataset.")
        if key.removeprefix("dataset.") in (*_LISTS, "episodes", "on_damage")
        else key
    )
    if key == "episodes" and value not in ("null", ""):
        return f"{key}={quoted(_bare(value).strip('[]'))}"
    if key in _LISTS and value not in ("null", ""):
        parts = [_bare(part.strip()).replace(": ", ":") for part in value.strip("[]{}").split(",")]
        return f"{key}=[{','.join(quoted(part) for part in parts if part)}]"
    return key + sign + value


def _bare(text: str) -> str:
    """Returns text without the quotes around it, if it has some: as a report spells a setting."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
