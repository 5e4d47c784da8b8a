"""Cameras of the simulated arm, in their own process: drawing must not delay the control loop.

    arm --state row, ROS time--> cameras: set_state, draw --line--> JPEG, publish

The arm sends states at the rate of the cameras and never waits; slow cameras draw the newest state. The line
is as bad as that of the arm's other messages; a picture is on its way from the moment that it shows, so that
drawing adds nothing to a delay that is longer.
"""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
from PIL import Image

from robot_rl.config import build, plain
from robot_rl.core.errors import RenderError, RobotRLError
from robot_rl.core.registry import resolve
from robot_rl.real.arm.channel import Channel
from robot_rl.real.arm.config import SimArmConfig
from robot_rl.real.arm.topics import set_stamp
from robot_rl.real.link import Link
from robot_rl.real.messages import Answer, Array, Frame
from robot_rl.real.plant import Plant
from robot_rl.real.ros2.api import Message, Node, Publisher, QoS
from robot_rl.real.ros2.node import open_node

_START_S = 90.0
"""Longest start: the search for OpenGL starts a process for each candidate."""
_JPEG_QUALITY = 90
_LINE_STREAM = 3
"""Of the draws of the pictures' line: the arm has those before it."""
_QOS = QoS(depth=2)
"""Reliable, as with most drivers: it matches all subscribers."""


class Cameras:
    """The arm's end of the line to the cameras."""

    def __init__(self, config: SimArmConfig) -> None:
        """Starts the process and waits until it has drawn.

        Raises:
            RenderError: it cannot; the message names what to install, or the missing camera.
        """
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", "robot_rl.real.arm.cameras"]
        with theirs:
            self._process = subprocess.Popen(
                [*words, str(theirs.fileno()), json.dumps(plain(config))], pass_fds=[theirs.fileno()]
            )
        self._link = Link(ours)
        self.num_published, self.seconds, self.cpu_s = 0, 0.0, 0.0
        """Pictures of all cameras, since the first of them; processor seconds of their process meanwhile."""
        self._link.wait(_START_S)
        answers = [message for message in self._link.receive() if isinstance(message, Answer)]
        if not answers or not answers[0].done:
            self.close()
            why = answers[0].message if answers else f"no picture within {_START_S:.0f} s"
            raise RenderError(f"cameras={list(config.cameras)}: {why}")

    def show(self, row: Array, ros_ns: int) -> None:
        """Sends a state of the plant; it is dropped if the cameras have not fetched the last one."""
        self._link.send(Frame(name="state", stamp_ns=ros_ns, array=row))
        for message in self._link.receive():
            if isinstance(message, Frame):
                num_published, self.seconds, self.cpu_s = message.array.tolist()
                self.num_published = round(num_published)

    def close(self) -> None:
        self._link.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class CameraTopics:
    """Publishes pictures of one camera: raw and compressed, each if it has subscribers."""

    def __init__(self, node: Node, camera: str) -> None:
        self._node, self._name = node, camera
        self._raw: Publisher = node.create_publisher("sensor_msgs/msg/Image", f"{camera}/image_raw", _QOS)
        self._jpeg: Publisher = node.create_publisher(
            "sensor_msgs/msg/CompressedImage", f"{camera}/image_raw/compressed", _QOS
        )

    @property
    def is_wanted(self) -> bool:
        return bool(self._raw.num_subscriptions or self._jpeg.num_subscriptions)

    def publish(self, picture: Array, ros_ns: int) -> None:
        """Publishes uint8 (h, w, 3)."""
        if self._raw.num_subscriptions:
            height, width, _ = picture.shape
            self._raw.publish(
                self._stamped(
                    "sensor_msgs/msg/Image",
                    ros_ns,
                    height=height,
                    width=width,
                    encoding="rgb8",
                    step=3 * width,
                    data=picture.reshape(-1),
                )
            )
        if self._jpeg.num_subscriptions:
            octets = io.BytesIO()
            Image.fromarray(picture).save(octets, "JPEG", quality=_JPEG_QUALITY)
            data = np.frombuffer(octets.getvalue(), np.uint8)
            self._jpeg.publish(
                self._stamped(
                    "sensor_msgs/msg/CompressedImage", ros_ns, format="rgb8; jpeg compressed bgr8", data=data
                )
            )

    def _stamped(self, kind: str, ros_ns: int, **fields: Any) -> Message:
        message = self._node.message(kind, **fields)
        message.header.frame_id = self._name
        set_stamp(message.header.stamp, ros_ns)
        return message


def serve(link: Link, config: SimArmConfig, plant: Plant) -> None:
    """Draws and publishes until the arm's process ends."""
    node = open_node(
        "sim_arm_cameras",
        namespace=config.namespace,
        transport=config.transport,
        domain_id=config.domain_id,
    )
    topics = {camera: CameraTopics(node, camera) for camera in config.cameras}
    seed = np.random.SeedSequence(config.seed).spawn(_LINE_STREAM + 1)[_LINE_STREAM]
    line = Channel[tuple[str, Array, int]](config.channel, np.random.default_rng(seed))
    link.send(Answer(operation="start", done=True))
    num_published, begun_s, begun_cpu_s = 0, 0.0, 0.0
    while not link.closed:
        link.wait(line.wait_s(time.monotonic_ns(), 1.0))
        taken_ns = time.monotonic_ns()
        frames = [message for message in link.receive() if isinstance(message, Frame)]
        wanted = [camera for camera in topics if topics[camera].is_wanted]
        if frames and wanted:
            plant.set_state(frames[-1].array)
            for camera in wanted:
                line.send((camera, plant.picture(camera), frames[-1].stamp_ns), taken_ns)
        due = line.receive(time.monotonic_ns())
        for camera, picture, ros_ns in due:
            topics[camera].publish(picture, ros_ns)
        if due:
            now_s, cpu_s = time.monotonic(), time.process_time()
            if not num_published:
                begun_s, begun_cpu_s = now_s, cpu_s
            num_published += len(due)
            facts = np.array([num_published, now_s - begun_s, cpu_s - begun_cpu_s])
            link.send(Frame(name="published", stamp_ns=due[-1][2], array=facts))
    node.close()


def main(words: list[str]) -> int:
    """Runs the cameras' process: the socket's number and the arm's settings as JSON."""
    link = Link(socket.socket(fileno=int(words[0])))
    config = build(SimArmConfig, json.loads(words[1]))
    try:
        plant: Plant = resolve("plant", config.plant)(config.task, config.robot, image_size=config.image_size)
        for camera in config.cameras:
            plant.picture(camera)
        serve(link, config, plant)
    except RobotRLError as error:
        link.send(Answer(operation="start", done=False, message=str(error)))
        return 2
    except KeyboardInterrupt:
        return 0  # from the terminal: it ends the arm, too
    plant.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
