"""`robot-rl deploy`: a policy of a run folder acts on an arm."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from robot_rl.core.room import check_room
from robot_rl.train.record import check_kind

if TYPE_CHECKING:
    from robot_rl.train.deploy.config import DeployConfig

SUMMARY = "a run's policy acts on an arm, behind its safety supervisor"

_HELP = """\
Usage: robot-rl deploy run=<folder> station=<name or file> [key=value ...] [--json]

Plays held-out episodes of a run's policy on a station: checks that robot, joints, rate, cameras and
objects are those of training, leases the arm, starts its driver and its supervisor (processes of
their own, which hold and stop the arm if this one dies), acts, records and reports. Ctrl-C brings the
arm to rest and keeps what was done.

  station=sim_in_process   a simulated arm within the driver: nothing else is needed
  station=sim_arm          the simulated arm that `robot-rl serve-sim-arm` serves over ROS 2
  station=my_cell.yaml     your own; see docs/real.md

  which=final|base  episodes=10             what is played
  policy=tls://<host>:<port>                computed by `robot-rl serve-policy` there; it is shown
                                            remote.token_file, remote.cert and remote.key, remote.ca
  export=onnx                               executed by ONNX Runtime: several times as fast, without rtc
  rtc=true|false  n_exec  ensemble          how chunks follow each other (rtc: where planning is slow)
  delay_ms=100                              planning takes at least so long, for experiments
  compensate=false                          act on what was measured, not on what will be
  record=false  video=false  out=runs       what is kept

Examples:
  robot-rl deploy run=runs/20261121-101500-pick_cube-seed3 station=sim_in_process
  robot-rl deploy run=runs/20261121-101500-pick_cube-seed3 station=sim_arm episodes=50 --json
  robot-rl arm stop                         from another terminal: brings the arm to rest
"""


def run(argv: list[str]) -> int:
    """Deploys and prints success, interval and latencies."""
    if {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    settings = config([word for word in argv if word != "--json"])
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
    if "--json" in argv:
        print(json.dumps(result))
    return 0


def config(words: list[str]) -> DeployConfig:
    """Returns the settings, checked as far as that needs neither learner nor arm."""
    from robot_rl.config import load  # Hydra: not for --help
    from robot_rl.train.deploy.config import DeployConfig

    settings = load(DeployConfig, words, config_name="deploy")
    check_kind(Path(settings.run), "train", at="run")
    check_room(Path(settings.out) / "run", at="out")
    return settings


def _ask(question: str) -> None:
    """Waits until a person has confirmed."""
    input(f"{question} [Enter] ")
