"""`robot-rl serve-sim-arm`: a simulated arm with the ROS 2 interface of a real one."""

from __future__ import annotations

import sys

from robot_rl.cli.command import Outcome, run_command, stopped_by_signals

SUMMARY = "run a simulated arm behind ros2_control's interface, in real time"

_HELP = """\
Usage: robot-rl serve-sim-arm [task=pick_cube] [key=value ...] [--json]

Runs MuJoCo in real time behind the topics, actions and services of ros2_control, on this machine's
ROS graph, with or without ROS installed. Ctrl-C ends it and prints how late its cycles began.

The connection and the arm:
  rate_hz=200            update rate of the controller manager, 1 to 1000
  delay_ms=0 jitter_ms=0 loss=0      of every message: commands, states and pictures
  robot=<name or file>   such as a file with measured joints (docs/transfer.md)
  friction_n_m=0         dry friction in every joint       encoder_noise_rad=0
  cameras=front,side     also overhead, left, right, wrist; camera_hz=15 image_size=96,96
  seed=0                 of the first episode and of all noise
  seconds=null           how long it runs; log=truth.npz keeps commands and measurements of every cycle

The ROS graph:
  domain_id=null namespace="" transport=auto|rclpy|dds use_sim_time=false

What it offers:
  joint_states                           sensor_msgs/JointState
  joint_trajectory_controller            ~/joint_trajectory, ~/controller_state and the action
                                         ~/follow_joint_trajectory
  forward_position_controller            ~/commands (std_msgs/Float64MultiArray); inactive at the start
  forward_velocity_controller            ~/commands; inactive at the start
  gripper_controller                     ~/commands, ~/gripper_cmd (action)
  servo_node                             ~/delta_twist_cmds, ~/pose_target_cmds, as of MoveIt Servo
  controller_manager                     ~/list_controllers, ~/switch_controller, and seven more
  sim_arm                                ~/safety_status; Trigger services ~/protective_stop,
                                         ~/clear_protective_stop, ~/power_off, ~/power_on, ~/reset (of
                                         the episode in parameter episode_seed)
  objects/<name>/pose, <camera>/image_raw, <camera>/image_raw/compressed, robot_description

Examples:
  robot-rl serve-sim-arm
  robot-rl serve-sim-arm delay_ms=20 loss=0.05 cameras=front
  ros2 control list_controllers
  ros2 topic pub --once /joint_trajectory_controller/joint_trajectory trajectory_msgs/JointTrajectory \\
    '{joint_names: [...], points: [{positions: [...], time_from_start: {sec: 2}}]}'
  robot-rl deploy run=runs/<folder> station=sim_arm      in another terminal
"""


def run(argv: list[str]) -> int:
    """Serves and prints the number of cycles and their delays."""
    return run_command(argv, _HELP, _serve)


def _serve(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra, numpy and the simulator: not for --help
    from robot_rl.real.arm.config import SimArmConfig
    from robot_rl.real.arm.server import serve

    config = load(SimArmConfig, words, config_name="serve-sim-arm")
    with stopped_by_signals() as stop:
        facts = serve(config, stop, lambda name: print(f"{name}: {config.task}, ready", file=sys.stderr))
    late, cost = facts["late_us"], facts["cost_us"]
    print(
        f"{facts['cycles']} cycles at {config.rate_hz:g} Hz: {facts['missed']} missed, begun late by "
        f"{late['p50']:.0f} us (median), {late['p99']:.0f} us (99 %), {late['max']:.0f} us (worst); "
        f"{cost['p50']:.0f} us of work each, {facts['cpu_share']:.0%} of a core"
    )
    if "pictures" in facts:
        share = facts["cameras_cpu_share"]
        print(f"{facts['pictures']} pictures, {facts['pictures_hz']:g} a second; {share:.0%} of a core")
    if facts["stop_reason"]:
        print(f"stopped: {facts['stop_reason']}")
    if facts["log"]:
        print(f"log: {facts['log']}")
    return 0, facts
