"""`robot-rl deploy`: runs the policy of a run folder on an arm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.room import check_room
from robot_rl.train.record import check_kind

if TYPE_CHECKING:
    from robot_rl.train.deploy.config import DeployConfig

SUMMARY = "run a policy on an arm, behind a safety supervisor"

_HELP = """\
Usage: robot-rl deploy run=<folder> station=<name or file> [key=value ...] [--json]

Runs episodes of a run's policy on a station, with held-out seeds. Before that it checks that robot,
joints, rate, cameras and objects are those of training, leases the arm, and starts its driver and its
supervisor. Both are processes of their own: if this one dies, they hold and stop the arm. Ctrl-C
brings the arm to rest and keeps the finished episodes.

  station=sim_in_process   a simulated arm inside the driver: needs nothing else
  station=sim_arm          the simulated arm of `robot-rl serve-sim-arm`, over ROS 2
  station=my_cell.yaml     your own arm; see docs/real.md
  station=any              one of those that `robot-rl devices` lists: the first that is free of those that
                           the policy fits, with needs.real=true and needs.labels.cell=west if given

  which=final|base  episodes=10             the policy, and how often it tries
  robot=<name>                              of a run of several robots or tasks: which source acts here
  instruction=<text>                        other words than the task's own, for a policy that gets words
  policy=tls://<host>:<port>                `robot-rl serve-policy` on that host computes the actions;
                                            with remote.token_file, remote.cert, remote.key, remote.ca
  export=onnx                               runs the policy in ONNX Runtime: several times faster, no rtc
  rtc=true|false  n_exec  ensemble          how one chunk follows another (rtc: for slow planning)
  delay_ms=100                              planning takes at least this long, for experiments
  compensate=false                          plans from the measured state, not from the predicted one
  record=false  video=false  out=runs       what is kept
  lease_wait_s=600  priority=1              waits for an arm that others hold; larger priorities go first
  preempt_s=10                              takes it from a smaller one, which has so long to end its chunk
                                            and to park, and goes on later
  turn_s=600                                after so long with the arm, equal ones go first that wait with
                                            preempt_s

Examples:
  robot-rl deploy run=runs/20261121-101500-pick_cube-seed3 station=sim_in_process
  robot-rl deploy run=runs/20261121-101500-pick_cube-seed3 station=sim_arm episodes=50 --json
  robot-rl deploy run=runs/20261125-101500-four_tasks-seed3 station=sim_arm_cameras robot=open_drawer
  robot-rl arm stop                         in another terminal: brings the arm to rest
"""


def run(argv: list[str]) -> int:
    """Deploys and prints success, interval and latencies."""
    return run_command(argv, _HELP, _deploy)


def _deploy(words: list[str]) -> Outcome:
    settings = config(words)
    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.train.deploy.run import deploy  # the learner: not for --help

    print(f"policy {settings.which} of {settings.run} on {settings.station}", file=sys.stderr)
    with ProgressDisplay() as display:
        journal = deploy(settings, display, _ask)
    result = journal.to_json()
    low, high = result["ci"]
    for name, row in result["latency_ms"].items():
        print(f"{name:<12}" + "".join(f"{quantile} {value:7.1f} ms  " for quantile, value in row.items()))
    print(
        f"{result['task']} on {settings.station}: success {result['success']:.1%} of {result['episodes']} "
        f"episodes (95 % interval {low:.1%} to {high:.1%}); "
        f"{result['late_steps']} of {result['control_steps']} steps late; see {journal.folder}/deploy.json"
    )
    return 0, result


def config(words: list[str]) -> DeployConfig:
    """Returns the settings, checked as far as possible without the learner and the arm."""
    from robot_rl.config import load  # Hydra: not for --help
    from robot_rl.train.deploy.config import DeployConfig

    settings = load(DeployConfig, words, config_name="deploy")
    check_kind(Path(settings.run), "train", at="run")
    check_room(Path(settings.out) / "run", at="out")
    return settings


def _ask(question: str) -> None:
    """Waits for a person to press Enter."""
    input(f"{question} [Enter] ")
