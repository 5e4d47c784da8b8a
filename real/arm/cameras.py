"""Cameras of the simulated arm, in their own process: drawing must not delay the control loop.

    arm --state row, ROS time--> cameras: set_state, draw, JPEG, publish

The arm sends states at the rate of the cameras and never waits; slow cameras draw the newest state.
"""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from typing import Any

import numpy as np
from PIL import Image

from robot_rl.config import build, plain
from robot_rl.core.errors import RenderError, RobotRLError
from robot_rl.core.registry import resolve
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
        self._link.wait(_START_S)
        answers = [message for message in self._link.receive() if isinstance(message, Answer)]
        if not answers or not answers[0].done:
            self.close()
            why = answers[0].message if answers else f"no picture within {_START_S:.0f} s"
            raise RenderError(f"cameras={list(config.cameras)}: {why}")

    def show(self, row: Array, ros_ns: int) -> None:
        """Sends a state of the plant; it is dropped if the cameras have not fetched the last one."""
        self._link.send(Frame(name="state", stamp_ns=ros_ns, array=row))

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
    link.send(Answer(operation="start", done=True))
    while not link.closed:
        link.wait(1.0)
        frames = [message for message in link.receive() if isinstance(message, Frame)]
        wanted = [camera for camera in topics if topics[camera].is_wanted]
        if frames and wanted:
            plant.set_state(frames[-1].array)
            for camera in wanted:
                topics[camera].publish(plant.picture(camera), frames[-1].stamp_ns)
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
