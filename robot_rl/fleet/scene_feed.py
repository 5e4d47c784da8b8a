"""The program that shows an arm's scene on the fleet page: `python -m robot_rl.fleet.scene_feed F`.

    supervisor  --F/supervisor.sock, joints--> this program --F/viewer-<pid>.sock--> server of the page
    driver host --F/sensors.sock, objects----'  MuJoCo's web viewer

F is the folder of the arm's sockets. The viewer draws in the browser, which gets the model once, and then
where everything is. The message `viewer` has the path of the viewer's socket.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from robot_rl.core.registry import resolve
from robot_rl.fleet.camera_feed import visit
from robot_rl.fleet.feed import Output, has_ended, run
from robot_rl.hal.arm import ArmState
from robot_rl.real.client import ArmClient
from robot_rl.real.drivers.host import SENSORS_SOCKET
from robot_rl.real.drivers.sim import TASK
from robot_rl.real.launch import about, station_at
from robot_rl.real.messages import Array
from robot_rl.real.sensors import Ros2Sensors, open_station_node
from robot_rl.real.station import StationConfig
from robot_rl.real.supervisor.main import SUPERVISOR_SOCKET
from robot_rl.sim.backends.viewer import ShownScene
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.scene import add_world
from robot_rl.sim.task import build_scene
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.deploy.measured import model_opening

_HZ = 20.0
_STAY_S = 0.7
"""A visit to the supervisor; one of a second would keep it alive when the arm's user is gone."""
_OBJECTS_S = 0.2
"""Between two visits to the driver, which bring pictures too where it has cameras."""
_VISIT_S = 0.05
"""Longest visit to the driver."""


class Scene:
    """The model of an arm, in the scene of its task where that is known, as it was measured last."""

    def __init__(self, station: StationConfig, task: str | None = None) -> None:
        """Builds it.

        Args:
            station: of the arm.
            task: what the arm does, if a program knows; a simulated arm has the scene of its own.

        Raises:
            RobotRLError: there is no such robot or task, or the robot is no arm.
        """
        self._gripper, robot = station.gripper, station.robot
        if station.driver == "sim" and station.sim is not None:
            task, robot = station.sim.task or TASK, station.sim.robot
        self._mirror = None if task is None else Mirror(EnvConfig(task=task, robot=robot))
        if self._mirror is None:
            self._robot = load_robot(station.robot)
            spec = self._robot.build()
            add_world(spec)
        else:
            self._robot = self._mirror.robot
            spec = build_scene(resolve("task", task or "", at="task")(), self._robot)
        self.shown = ShownScene(spec, self._robot)
        self.shown.qpos[self.shown.index.arm_qpos] = station.home_rad
        self._copied, self._poses = list[tuple[Array, Array]](), dict[str, Array]()
        if self._mirror is not None:
            self._follow(self._mirror)
        self.shown.place()

    def _follow(self, mirror: Mirror) -> None:
        """Has the mirror put objects to where they were measured, from the places of an episode's start."""
        mirror.begin(0)
        bind = mirror.env.backend.bind
        self._copied = [
            (shown, bind(name)[0])
            for name, shown in (
                ("qpos", self.shown.qpos),
                ("mocap_pos", self.shown.mocap_pos),
                ("mocap_quat", self.shown.mocap_quat),
            )
        ]
        self._copy()
        body_pos, body_quat = bind("xpos")[0], bind("xquat")[0]
        for name in mirror.objects:
            body = self.shown.index.tracked[name].body
            self._poses[name] = np.concatenate([body_pos[body], body_quat[body]])

    def _copy(self) -> None:
        for shown, placed in self._copied:
            shown[:] = placed

    def show(self, state: ArmState, poses: Mapping[str, Array]) -> None:
        """Puts the arm and the objects where they were measured; what was not stays where it is.

        Args:
            state: of the arm; joints that are not finite are not shown.
            poses: (7,) of objects: position and quaternion (w, x, y, z).
        """
        if not np.isfinite(state.position_rad).all():
            return
        opening = model_opening(self._robot, self._gripper, state.gripper)
        if self._mirror is None:
            self.shown.qpos[self.shown.index.arm_qpos] = state.position_rad
            self.shown.qpos[self.shown.index.finger_qpos] = opening
        else:
            self._poses |= {name: pose for name, pose in poses.items() if name in self._poses}
            self._mirror.show(state.position_rad, np.zeros_like(state.position_rad), opening, self._poses)
            self._copy()
        self.shown.place()


class Measurements:
    """The newest joints of an arm, and poses of its objects, by short visits."""

    def __init__(self, station: StationConfig, folder: Path) -> None:
        """Args: folder: of the arm's sockets.

        Raises:
            DeviceError: an object is on the ROS graph, and ROS 2 is missing.
        """
        self._folder = folder
        self._own = {name for name, tracked in station.objects.items() if not tracked.topic}
        has_pictures = any(not camera.topic for camera in station.cameras.values())
        self._period_s, self._due_s = _OBJECTS_S if has_pictures else 0.0, 0.0
        self._client: ArmClient | None = None
        self._leaves_s = 0.0
        self._poses = dict[str, Array]()
        self._ros: Ros2Sensors | None = None
        if any(tracked.topic for tracked in station.objects.values()):
            self._ros = Ros2Sensors(replace(station, cameras={}), open_station_node(station, "fleet"))

    def state(self) -> ArmState | None:
        """Returns the newest state; None before the first.

        Raises:
            DeviceError: the supervisor is gone, or says nothing.
        """
        now_s = time.monotonic()
        if self._client is None or now_s > self._leaves_s:
            self._leave()
            self._client = ArmClient(self._folder / SUPERVISOR_SOCKET)
            self._leaves_s = now_s + _STAY_S
        return self._client.wait().state

    def poses(self) -> Mapping[str, Array]:
        """Returns the newest pose (7,) of each object that was seen.

        Raises:
            LinkError: the driver's process is gone.
        """
        frames = {} if self._ros is None else dict(self._ros.read())
        now_s = time.monotonic()
        if self._own and now_s >= self._due_s:
            self._due_s = now_s + self._period_s
            frames |= visit(self._folder / SENSORS_SOCKET, self._own, _VISIT_S)
        self._poses |= {name: frame.array for name, frame in frames.items() if frame.array.shape == (7,)}
        return self._poses

    def close(self) -> None:
        self._leave()
        if self._ros is not None:
            self._ros.close()

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close()


def feed(folder: Path, out: Output) -> None:
    """Serves the scene of the arm whose sockets are in `folder`."""
    station, path = station_at(folder), folder / f"viewer-{os.getpid()}.sock"
    scene = Scene(station, about(folder).get("task"))
    with (
        contextlib.closing(Measurements(station, folder)) as measurements,
        scene.shown.served(path, station.name) as show,
    ):
        out.send("viewer", time.monotonic_ns(), str(path).encode())
        due_s = time.monotonic()
        while not has_ended(due_s - time.monotonic()) and show():
            due_s = time.monotonic() + 1.0 / _HZ
            if (state := measurements.state()) is not None:
                scene.show(state, measurements.poses())


if __name__ == "__main__":
    sys.exit(run(feed))
