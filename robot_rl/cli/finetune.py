"""`robot-rl finetune`: trains a policy on a dataset and measures it on held-out episodes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.cli.command import resumed, run_command
from robot_rl.config.words import quoted
from robot_rl.core.room import check_room
from robot_rl.train.record import check_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from robot_rl.hal.device import DeviceSpec
    from robot_rl.train.finetune.config import FinetuneConfig
    from robot_rl.train.finetune.settings import FinetuneSettings

SUMMARY = "fine-tune a policy on a LeRobot dataset; errors on held-out episodes"

_HELP = """\
Usage: robot-rl finetune dataset=<folder> [policy=small_vla] [key=value ...] [--json]
       robot-rl finetune resume=runs/<folder>

Trains a policy on a LeRobotDataset (v3, v2.1, or a sealed store). The last episodes are held out: they
measure the error and train nothing. Baselines are measured too: the mean action, the present joints, the
last action repeated, ridge regression, nearest neighbours, and LeRobot's ACT, trained for the same
processor time. The table at the end has the error of each over all actions, with a 95 % interval over
held-out episodes, over the first and the last action of a chunk, and over the joints that move. An error
of 1 is one standard deviation of the training actions. The last line says whether a trained policy beats
the best baseline without training. The report has the errors at more places of the chunk and by joints.

policy=  small_vla                our own small vision-language-action policy, from scratch
         act diffusion            LeRobot's, from scratch (extra `lerobot`)
         smolvla pi0 pi05         LeRobot's, with tokenizer and VLM of the hub; size=tiny needs no hub
         <folder>                 a run folder, its policy/, or a LeRobot checkpoint
         <owner>/<name>           a LeRobot model on the hub

Examples:
  robot-rl finetune dataset=demos/pick_cube                         trains until it stops improving
  robot-rl finetune dataset=demos/pick_cube minutes=2 baselines=false   a quick test
  robot-rl finetune dataset=demos/pick_cube options.state_noise=0 options.state_dropout=0
      for simulated episodes, whose states are exact; then `robot-rl evaluate policy=<run folder>`
  robot-rl finetune dataset=demos/pick_cube policy=smolvla size=tiny updates=50
  robot-rl finetune dataset=demos/pick_cube policy=lerobot/smolvla_base lora.rank=16 device=cuda
  robot-rl finetune dataset=demos/pick_cube policy=runs/<folder> lr=1e-4
  robot-rl finetune dataset=demos/pick_cube robot=panda             refuses data of other joints
  robot-rl finetune -m dataset=demos/pick_cube seed=0,1,2           several runs at once, if there are
      enough cores, and a table; sweep.jobs=1 runs them one after another
  robot-rl finetune resume=runs/<folder>                            continues after a crash, to the same
      result

Which parts of the dataset are read:
  rename=actions:action,state:observation.state   names that are not LeRobot's (also as dataset.rename=)
  episodes=0-79,82  cameras=front,wrist           only these
  on_damage=skip                                  leaves damaged episodes out, and names them

Settings (config.yaml of the run folder has all of them, as --cfg job prints them):
  heldout  stride  horizon  picture  robot           episodes and chunks
  history  last_action                               past observations as inputs
  updates | minutes  batch  accumulate  precision  lr  warmup_updates  weight_decay  ema_decay  grad_clip
  size  options.<name>  lora.rank  lora.alpha          the policy
  baselines  act.lrs  act.batches  act.trial           the comparison
  seed  out  device  torch_threads  lease_wait_s  curve_points  metrics_rows  checkpoint.every_s
With updates= a run gives the same bytes every time. With minutes= the policy trains for that time: the number
of updates is measured first; with ACT the whole run takes 2 to 3 times as long. Without both, validation
episodes, a part of the training episodes, decide the number of updates. The report ends with the command that
repeats the run, with all changed settings.
"""

_LISTS = ("rename", "cameras")


def run(argv: list[str]) -> int:
    """Fine-tunes one policy and prints its summary."""
    return run_command(argv, _HELP, lambda words: (0, result(words)))


def config(words: list[str]) -> FinetuneConfig:
    """Returns the settings of a run, checked as far as possible without the learner."""
    from robot_rl.config import load, read  # Hydra: not for --help
    from robot_rl.train.finetune.config import FinetuneConfig
    from robot_rl.train.finetune.names import saved_folder

    folder = resumed(words)
    if folder is None:
        settings = load(FinetuneConfig, [spelled(word) for word in words], config_name="finetune")
        saved_folder(settings.policy)
        check_room(Path(settings.out) / "run", at="out")
        if settings.on_damage == "raise":  # else every file is read
            from robot_rl.train.finetune.split import open_data  # PyArrow

            open_data(settings)
        return settings
    check_kind(folder, "finetune", at="resume")
    check_room(folder / "checkpoints", at="resume")
    return read(FinetuneConfig, folder / "config.yaml")


def devices(config: FinetuneConfig) -> list[tuple[DeviceSpec, int]]:
    """Returns the devices that a run needs."""
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
    """Returns how long the policy trains and how long the whole run takes, in words."""
    if settings.updates:
        return f"{settings.updates:,} updates"
    minutes = settings.minutes
    if not minutes:
        return "until it stops improving"
    trained = f"the policy trains for {minutes:g} minutes"
    has_act = settings.policy != "act" and find_spec("lerobot") is not None
    if not settings.baselines or not has_act:
        return f"{trained}, plus the time to read pictures and to measure"
    return (
        f"{trained}, the run takes {2 * minutes:g} to {3 * minutes:g} with ACT (baselines=false: without it)"
    )


def table(predictors: Mapping[str, Any]) -> Table:
    """Returns the errors of the policy and of every baseline, as a table of 80 columns."""
    from robot_rl.cli.tables import table_of
    from robot_rl.telemetry.finetune import error_rows

    rows = error_rows(predictors, places=2, style=".3f")
    shown = [{key: row[key] for key in row if key != "still"} for row in rows]
    return table_of(shown, "held-out errors, in standard deviations of the training actions")


def spelled(word: str) -> str:
    """Returns a word that Hydra reads, from `episodes=0-9,12`, `cameras=a,b` or `dataset.rename={a: b}`."""
    key, sign, value = word.partition("=")
    if (short := key.removeprefix("dataset.")) in (*_LISTS, "episodes", "on_damage"):
        key = short
    if key == "episodes" and value not in ("null", ""):
        return f"{key}={quoted(_bare(value).strip('[]'))}"
    if key in _LISTS and value not in ("null", ""):
        parts = [_bare(part.strip()).replace(": ", ":") for part in value.strip("[]{}").split(",")]
        return f"{key}=[{','.join(quoted(part) for part in parts if part)}]"
    return key + sign + value


def _bare(text: str) -> str:
    """Returns text without its outer quotes: reports write settings with quotes."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
