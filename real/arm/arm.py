"""The simulated arm without ROS: a body, its controllers, its bad line, and the record of the truth.

    commands --line--> controllers --targets--> body --> plant
    states   <--line-- measured, with noise  <----------'

One cycle reads, takes the commands that are due, updates the controllers and writes. `lock` guards
everything here: services and actions run on their own threads. n joints, K objects.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.core.errors import require
from robot_rl.core.registry import resolve
from robot_rl.real.arm.body import POWER_OFF, Body
from robot_rl.real.arm.channel import Channel
from robot_rl.real.arm.config import SimArmConfig
from robot_rl.real.arm.controllers import (
    Controller,
    Cycle,
    ForwardPositionController,
    ForwardVelocityController,
    GripperController,
    JointStateBroadcaster,
    JointTrajectoryController,
)
from robot_rl.real.arm.manager import Answer, ControllerManager
from robot_rl.real.arm.servo import Servo
from robot_rl.real.plant import Plant
from robot_rl.telemetry.flight import FlightRecorder

Handler = Callable[[Any], None]
_LONGEST_S = 0.1
"""Longest time step of a cycle: after a longer stall the simulation is late, but continuous."""


class SimArm:
    """An arm that is simulated one cycle at a time."""

    def __init__(self, config: SimArmConfig) -> None:
        seeds = np.random.SeedSequence(config.seed).spawn(3)
        noise, commands, states = (np.random.default_rng(seed) for seed in seeds)
        make = resolve("plant", config.plant, at="plant")
        plant: Plant = make(
            config.task, config.robot, friction_n_m=config.friction_n_m, image_size=config.image_size
        )
        plant.reset(config.seed)
        self.config, self.plant = config, plant
        self.body = Body(plant, config.stop, encoder_noise_rad=config.encoder_noise_rad, rng=noise)
        joints = plant.joint_names
        self.trajectory = JointTrajectoryController(joints, config.trajectory)
        self.position = ForwardPositionController(joints)
        self.velocity = ForwardVelocityController(joints, timeout_s=config.velocity_timeout_s)
        self.gripper = GripperController(plant.finger_names)
        known: Sequence[Controller] = (
            JointStateBroadcaster(), self.trajectory, self.position, self.velocity, self.gripper,
        )  # fmt: skip
        names = [controller.name for controller in known]
        require(set(config.active) <= set(names), "active", config.active, f"of {', '.join(names)}")
        self.manager = ControllerManager(known, self.body, config.active)
        self.servo = Servo(config.servo)
        self.commands = Channel[tuple[Handler, Any]](config.channel, commands)
        """From the network: the handler of a message, and the message."""
        self.states = Channel[tuple[Handler, Any]](config.channel, states)
        """To the network: the function that publishes a message, and the message."""
        self.lock = threading.RLock()
        self.num_cycles = self.num_ignored = 0
        """Ignored are messages to inactive controllers, of a wrong length, or after a stop."""
        self.sim_ns = 0
        self._measure_scene()
        self._episode = config.seed
        self._halted = ""
        self._recorder = FlightRecorder(max(1, round(config.log_s * config.rate_hz)))

    def cycle(self, now_ns: int, ros_ns: int, dt_s: float) -> Cycle:
        """Reads, takes the messages that are due, updates, writes; returns the cycle with its state."""
        dt_s = min(dt_s, _LONGEST_S)
        with self.lock:
            cycle = Cycle(now_ns=now_ns, ros_ns=ros_ns, dt_s=dt_s, state=self.body.read(now_ns))
            self._measure_scene()
            for handler, message in self.commands.receive(now_ns):
                handler(message)
            if not self.body.stop_reason:
                self._follow_servo(cycle)
                self.manager.update(cycle)
            self.body.write(dt_s)
            if self.config.log is not None:
                self._record(cycle)  # before a stop forgets the command that caused it
            self._halt_if_stopped()
            self.num_cycles += 1
            self.sim_ns += round(1e9 * dt_s)
        return cycle

    def listens(self, controller: str) -> bool:
        """Returns whether a controller takes commands now; counts ignored commands."""
        counts = self.manager.is_active(controller) and not self.body.stop_reason
        self.num_ignored += not counts
        return counts

    def set_episode(self, seed: int) -> None:
        """Puts the scene back to the start of an episode; goals end, a stop stays."""
        with self.lock:
            self.manager.halt("The scene was reset.")
            self.servo.stop()
            self.commands.clear()
            self.body.reset(seed)
            self.body.read(0)
            self._episode = seed

    def stop(self, reason: str) -> Answer:
        with self.lock:
            self.body.trip(reason)
            self._halt_if_stopped()
            return True, f"stopped: {self.body.stop_reason}"

    def clear(self) -> Answer:
        with self.lock:
            if self.body.is_off:
                return False, "power is off: call power_on."
            return self._lifted(self.body.clear(), "clear")

    def power(self, *, on: bool) -> Answer:
        with self.lock:
            why_not = self.body.power(on=on)
            self._halt_if_stopped()
            return self._lifted(why_not, "power is on" if on else POWER_OFF)

    def save_log(self) -> Path | None:
        """Writes the record to `config.log`; None if none is kept."""
        if self.config.log is None or not self.num_cycles:
            return None
        path = Path(self.config.log)
        with self.lock:
            written = self._recorder.dump(
                path.parent, path.stem, joint_names=np.array(self.plant.joint_names)
            )
        assert written is not None, "one dump a run"
        os.replace(written, path)
        return path

    def close(self) -> None:
        self.plant.close()

    def _measure_scene(self) -> None:
        """Measures fingers and objects at the time of the joints."""
        self.fingers, self.objects = self.plant.fingers(), self.plant.objects()

    def _lifted(self, why_not: str, what: str) -> Answer:
        if not self.body.stop_reason:
            self._halted = ""
            self.commands.clear()  # commands from during the stop do not count after it
        return not why_not, why_not or what

    def _follow_servo(self, cycle: Cycle) -> None:
        """Hands Cartesian commands to the active controller of the joints' positions."""
        target = self.servo.update(cycle, self.body)
        if target is None:
            return
        for sink in (self.position, self.trajectory):
            if self.manager.is_active(sink.name):
                sink.set(target)
                return
        self.servo.stop()
        self.num_ignored += 1

    def _halt_if_stopped(self) -> None:
        """Ends the work of controllers, once for every stop."""
        if self.body.stop_reason and not self._halted:
            self.manager.halt(f"Aborted: {self.body.stop_reason}")
            self.servo.stop()
        self._halted = self.body.stop_reason

    def _record(self, cycle: Cycle) -> None:
        body, truth = self.body, self.body.truth
        self._recorder.record(
            stamp_ns=cycle.now_ns,
            dt_s=cycle.dt_s,
            episode=self._episode,
            position_rad=truth.position_rad,
            velocity_rad_s=truth.velocity_rad_s,
            effort_n_m=truth.effort_n_m if truth.effort_n_m is not None else np.zeros(0),
            commanded_rad=body.target_rad,
            applied_rad=body.applied_rad,
            gripper=truth.gripper,
            commanded_gripper=body.gripper,
            objects=np.array(list(self.objects.values())).reshape(-1, 7),
            stopped=bool(body.stop_reason),
        )
