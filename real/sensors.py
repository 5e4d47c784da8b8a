"""Cameras and tracked objects of a policy, from the ROS graph or from the driver.

Stamps are monotonic, of the arrival. A publisher's own stamp only shows what is new: the same stamp twice is
the same picture, and a camera that repeats itself grows stale.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image as Pictures

from robot_rl.core.errors import ConfigError
from robot_rl.real.drivers.host import SENSORS_SOCKET
from robot_rl.real.link import connect
from robot_rl.real.messages import Array, Frame, MessageError
from robot_rl.real.ros2.api import SENSOR, Message, Node, nanoseconds
from robot_rl.real.ros2.node import open_node
from robot_rl.real.ros2.parameters import Parameters
from robot_rl.real.station import CameraConfig, Ros2Config, StationConfig

Clock = Callable[[], int]
_CHANNELS: dict[str, tuple[Any, int]] = {
    "rgb8": (np.uint8, 3),
    "bgr8": (np.uint8, 3),
    "rgba8": (np.uint8, 4),
    "bgra8": (np.uint8, 4),
    "mono8": (np.uint8, 1),
    "8UC1": (np.uint8, 1),
    "8UC3": (np.uint8, 3),
    "16UC1": (np.uint16, 1),
    "mono16": (np.uint16, 1),
    "32FC1": (np.float32, 1),
}
"""Supported encodings of sensor_msgs/Image: element type and channels."""
_DEPTH_HEADER_BYTES = 12
"""compressed_depth_image_transport puts its ConfigHeader before the PNG."""


class PictureError(ConfigError):
    """A picture that cannot be read."""


class Sensors(Protocol):
    """The newest frame of every camera and object."""

    def read(self) -> Mapping[str, Frame]:
        """Returns the newest frames; a name is missing until its first frame."""
        ...

    @property
    def mistakes(self) -> Mapping[str, str]:
        """Why the newest picture of a name could not be read; the frame before it grows stale."""
        ...

    def close(self) -> None: ...


class Ros2Sensors:
    """Cameras and objects on the ROS graph, decoded on the node's thread.

    Subscriptions are best effort: they match reliable and best-effort publishers.
    """

    def __init__(self, station: StationConfig, node: Node, *, clock_ns: Clock = time.monotonic_ns) -> None:
        """Subscribes to the cameras and objects with a topic; closes the node at the end."""
        self._node, self._clock_ns = node, clock_ns
        self._frames: dict[str, Frame] = {}
        self._stamps: dict[str, int] = {}
        self.mistakes: dict[str, str] = {}
        for name, camera in station.cameras.items():
            if camera.topic:
                kind = "sensor_msgs/msg/CompressedImage" if camera.compressed else "sensor_msgs/msg/Image"
                self._subscribe(kind, camera.topic, frame_name(name), self._picture(camera))
        for name, tracked in station.objects.items():
            if tracked.topic:
                self._subscribe("geometry_msgs/msg/PoseStamped", tracked.topic, name, _pose)

    def read(self) -> Mapping[str, Frame]:
        return dict(self._frames)

    def close(self) -> None:
        self._node.close()

    def _subscribe(self, kind: str, topic: str, name: str, decode: Callable[[Message], Array]) -> None:
        def on_message(message: Message) -> None:
            own = nanoseconds(message.header.stamp)
            stamp_ns = self._clock_ns()
            if own and own == self._stamps.get(name):
                return
            self._stamps[name] = own
            try:
                array = decode(message)
            except PictureError as error:
                self.mistakes[name] = f"{topic}: {error}"
                return
            self._frames[name] = Frame(name=name, stamp_ns=stamp_ns, array=array)

        self._node.create_subscription(kind, topic, on_message, SENSOR)

    def _picture(self, camera: CameraConfig) -> Callable[[Message], Array]:
        decode = decode_compressed if camera.compressed else decode_image
        return lambda message: cropped(decode(message), camera.crop)


class LinkSensors:
    """Cameras and objects that come through the driver's process, received on its own thread."""

    def __init__(self, station: StationConfig, path: Path) -> None:
        """Connects.

        Raises:
            LinkError: no driver host listens at `path`.
        """
        self._crops = {frame_name(name): camera.crop for name, camera in station.cameras.items()}
        self._link = connect(path)
        self._frames: dict[str, Frame] = {}
        self.mistakes: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
        self._thread.start()

    def read(self) -> Mapping[str, Frame]:
        return dict(self._frames)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        while not self._closing.is_set() and not self._link.closed:
            self._link.wait(0.1)
            try:
                messages = self._link.receive()
            except MessageError:
                return  # the link is closed; frames grow stale, and staleness stops the policy
            for message in messages:
                if isinstance(message, Frame):
                    self._take(message)

    def _take(self, frame: Frame) -> None:
        try:
            array = cropped(frame.array, self._crops.get(frame.name))
        except PictureError as error:
            self.mistakes[frame.name] = str(error)
        else:
            self._frames[frame.name] = replace(frame, array=array)


class _SeveralSensors:
    """Sensors from more than one source."""

    def __init__(self, parts: list[Sensors]) -> None:
        self._parts = parts

    def read(self) -> Mapping[str, Frame]:
        return {name: frame for part in self._parts for name, frame in part.read().items()}

    @property
    def mistakes(self) -> Mapping[str, str]:
        return {name: why for part in self._parts for name, why in part.mistakes.items()}

    def close(self) -> None:
        for part in self._parts:
            part.close()


def open_sensors(station: StationConfig, folder: Path) -> Sensors:
    """Returns all sensors of a station: those with a topic from the ROS graph, the others from the driver.

    The driver host has its sockets in `folder`.

    Raises:
        DeviceError: the driver host or ROS 2 is missing.
    """
    entries = [*station.cameras.values(), *station.objects.values()]
    parts: list[Sensors] = []
    if not all(entry.topic for entry in entries):
        parts.append(LinkSensors(station, folder / SENSORS_SOCKET))
    if any(entry.topic for entry in entries):
        parts.append(Ros2Sensors(station, open_station_node(station, "sensors")))
    return parts[0] if len(parts) == 1 else _SeveralSensors(parts)


def open_station_node(station: StationConfig, role: str) -> Node:
    """Returns a new node in the station's namespace, `robot_rl_<role>`, with its parameters."""
    config = station.ros2 or Ros2Config()
    node = open_node(
        f"robot_rl_{role}",
        namespace=config.namespace,
        transport=config.transport,
        domain_id=config.domain_id,
        remap=config.remap,
        use_sim_time=config.use_sim_time,
    )
    Parameters(node)
    return node


def frame_name(camera: str) -> str:
    """Returns the name of a station's camera in observations: `front` gives `front.rgb`."""
    return camera if "." in camera else f"{camera}.rgb"


def decode_image(message: Message) -> Array:
    """Returns uint8 (h, w, 3) of a colour or grey Image, float32 (h, w) metres of a depth one.

    Raises:
        PictureError: an unknown encoding, or too few bytes.
    """
    encoding, height, width = str(message.encoding), int(message.height), int(message.width)
    if encoding not in _CHANNELS:
        raise PictureError(f"encoding {encoding!r}, allowed: {', '.join(sorted(_CHANNELS))}.")
    kind, channels = _CHANNELS[encoding]
    dtype = np.dtype(kind).newbyteorder(">" if message.is_bigendian else "<")
    octets, step = np.asarray(message.data, np.uint8), int(message.step)
    row_bytes = width * channels * dtype.itemsize
    if step < row_bytes or len(octets) < height * step:
        raise PictureError(
            f"{len(octets)} bytes in rows of {step}, need {height} rows of {row_bytes} for {encoding}."
        )
    rows = np.ascontiguousarray(octets[: height * step].reshape(height, step)[:, :row_bytes])
    pixels = rows.view(dtype).reshape(height, width, channels)
    if encoding in ("16UC1", "mono16", "32FC1"):
        return _metres(pixels[..., 0])
    if encoding.startswith("bgr") or encoding == "8UC3":  # OpenCV's order where none is named
        pixels = pixels[..., [2, 1, 0]]
    return np.repeat(pixels, 3, axis=2) if channels == 1 else np.ascontiguousarray(pixels[..., :3])


def decode_compressed(message: Message) -> Array:
    """Returns uint8 (h, w, 3) of a JPEG or PNG, float32 (h, w) metres of a 16-bit PNG.

    Raises:
        PictureError: bytes that are no picture.
    """
    octets = bytes(message.data)
    if "compressedDepth" in str(message.format):
        octets = octets[_DEPTH_HEADER_BYTES:]
    try:
        picture = Pictures.open(io.BytesIO(octets))
        if picture.mode.startswith("I"):
            return _metres(np.asarray(picture))
        return np.asarray(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise PictureError(f"{len(octets)} bytes of {message.format!r} are no picture: {error}.") from error


def cropped(picture: Array, crop: tuple[int, int, int, int] | None) -> Array:
    """Returns the part of a picture at (top, left, height, width) in pixels.

    Raises:
        PictureError: the picture is smaller than that.
    """
    if crop is None:
        return picture
    top, left, height, width = crop
    if top + height > picture.shape[0] or left + width > picture.shape[1]:
        raise PictureError(f"crop {crop} of a picture of {picture.shape[0]} x {picture.shape[1]} pixels.")
    return np.ascontiguousarray(picture[top : top + height, left : left + width])


def _metres(depth: Array) -> Array:
    """Returns float32 metres; integers are millimetres (REP 118)."""
    scale = 1e-3 if depth.dtype.kind in "ui" else 1.0
    return (depth * scale).astype(np.float32)


def _pose(message: Message) -> Array:
    place, turn = message.pose.position, message.pose.orientation
    return np.array([place.x, place.y, place.z, turn.w, turn.x, turn.y, turn.z])
