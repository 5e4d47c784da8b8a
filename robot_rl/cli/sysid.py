"""`robot-rl sysid`: measures friction, damping and inertia of an arm's joints."""

from __future__ import annotations

import sys
from typing import Any

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import ConfigError

SUMMARY = "measure friction, damping, inertia and delay of an arm's joints"

_HELP = """\
Usage: robot-rl sysid record station=<name or file> [key=value ...] [--json]
       robot-rl sysid fit recording=<folder or file> [key=value ...] [--json]

record moves all joints of an arm about the station's home pose, slowly and fast, behind the safety
supervisor, and keeps what was sent and what was measured. Nothing may be in reach of the arm.
  seconds=20             how long                  amplitude_rad=0.2   from the home pose, at most
  low_hz=0.1 high_hz=3   range of frequencies      share=0.6           of the limits of speed and acceleration
  clearance_m=0.04       all moving parts stay so far above the base plane, by the model

fit simulates the arm with what it was sent, and finds dry friction, damping and armature of each
joint, and one delay, with which it moves as it was measured. It needs MuJoCo's sysid toolbox:
pip install -e '.[sysid]'
  robot=<name or file>   the model to begin with   delay=true          out=<folder>
It writes robot.yaml, which env.robot=, evaluate and serve-sim-arm take like any robot file, fit.json
(with 95 % intervals), and fit.svg: measured, simulated before, simulated after. Look at that figure.

Examples:
  robot-rl serve-sim-arm friction_n_m=2                 in another terminal: an arm to measure
  robot-rl sysid record station=sim_arm
  robot-rl sysid fit recording=runs/<date-time>-sysid-sim_arm
  robot-rl train recipe=pick_cube env.robot=runs/<date-time>-sysid-sim_arm/robot.yaml
"""


def run(argv: list[str]) -> int:
    """Records, or fits and prints what was found."""
    return run_command(argv or ["--help"], _HELP, _choose)


def _choose(words: list[str]) -> Outcome:
    commands = {"record": _record, "fit": _fit}
    if not words or words[0] not in commands:
        got = words[0] if words else ""
        raise ConfigError(
            f"sysid: no sub-command {got!r}, allowed: {', '.join(commands)}. `robot-rl sysid --help`"
        )
    return commands[words[0]](words[1:])


def _record(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra and the simulator: not for --help
    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.train.sysid.record import RecordConfig, record

    config = load(RecordConfig, words, config_name="sysid-record")
    with ProgressDisplay() as display:
        path, log, num_limited = record(config, display, _ask)
    print(
        f"{path}: {len(log.target_s)} targets and {len(log.measured_s)} measurements in {log.seconds:.1f} s; "
        f"safety changed {num_limited} targets"
    )
    result = {
        "recording": str(path),
        "targets": len(log.target_s),
        "measurements": len(log.measured_s),
        "seconds": round(log.seconds, 3),
        "limited": num_limited,
    }
    return 0, result


def _fit(words: list[str]) -> Outcome:
    from robot_rl.config import load
    from robot_rl.sim.robots.sysid import toolbox
    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.train.sysid.fit import FitConfig, fit

    config = load(FitConfig, words, config_name="sysid-fit")
    toolbox()  # before anything is read: it may not be installed
    with ProgressDisplay() as display:
        report = fit(config, display)
    _print(report)
    return 0, report


def _print(report: dict[str, Any]) -> None:
    measured, model, interval = report["measured"], report["model"], report["interval"]
    units = {
        "friction_n_m": "friction N m",
        "damping_n_m_s": "damping N m s",
        "armature_kg_m2": "armature kg m2",
    }
    print(f"{'joint':<14}" + "".join(f"{unit:>30}" for unit in units.values()) + f"{'error in deg':>20}")
    for index, joint in enumerate(report["joints"]):
        cells = "".join(
            f"{model[key][index]:>9.3g} -> {measured[key][index]:>7.3g} +- {interval[key][index]:<6.1g}"
            for key in units
        )
        before, after = report["rmse_before_deg"][index], report["rmse_deg"][index]
        print(f"{joint:<14}{cells}{before:>11.3f} -> {after:.3f}")
    print(
        f"delay {1e3 * report['delay_s']:.1f} ms; position error {report['rmse_all_before_deg']:.3f} deg "
        f"before, {report['rmse_all_deg']:.3f} deg after. Robot file: {report['robot']}"
    )


def _ask(question: str) -> None:
    """Waits for a person to press Enter."""
    print(question, file=sys.stderr)
    input("[Enter] ")
