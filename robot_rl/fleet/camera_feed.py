"""The program that looks at an arm's cameras for the fleet page: `python -m robot_rl.fleet.camera_feed F`.

    driver host --F/sensors.sock--> this program --msgpack on stdout--> server of the page
    ROS graph   --topics----------'

F is the folder of the arm's sockets. It runs while somebody looks. Cameras of the driver are visited:
each visit fetches one new picture of each camera and leaves, so the driver's process copies a picture some
times a second, on the thread that sends pictures anyway. The names of the messages are those of cameras.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from robot_rl.fleet.feed import Output, has_ended, run
from robot_rl.real.drivers.host import SENSORS_SOCKET
from robot_rl.real.launch import station_at
from robot_rl.real.link import connect
from robot_rl.real.messages import Array, Frame
from robot_rl.real.sensors import PictureError, Ros2Sensors, cropped, frame_name, open_station_node
from robot_rl.real.station import StationConfig

_PERIOD_S = 0.3
"""Between two looks."""
_VISIT_S = 0.5
"""Longest visit: a camera that stands still delays the others by no more."""
_LARGEST_PX = (320, 240)
_QUALITY = 75
_FAR_M = 2.0
"""Depth that is drawn black; near is bright."""


def visit(path: Path, names: set[str], limit_s: float = _VISIT_S) -> dict[str, Frame]:
    """Returns one new frame of each name that sends one within `limit_s`, from the driver's socket `path`.

    Raises:
        LinkError: no driver host listens there.
        MessageError: it sends what is no message.
    """
    found = dict[str, Frame]()
    with connect(path) as link:
        until_s = time.monotonic() + limit_s
        while names - found.keys() and not link.closed and (left_s := until_s - time.monotonic()) > 0:
            link.wait(left_s)
            for message in link.receive():
                if isinstance(message, Frame):
                    found[message.name] = message
    return found


def jpeg(picture: Array) -> bytes:
    """Returns a picture as a small JPEG: uint8 (h, w, 3), or float32 (h, w) metres of a depth camera."""
    if picture.ndim == 2:
        near = 1.0 - np.nan_to_num(picture, nan=_FAR_M, posinf=_FAR_M) / _FAR_M
        picture = (255.0 * near.clip(0.0, 1.0)).astype(np.uint8)
    image, out = Image.fromarray(picture), io.BytesIO()
    image.thumbnail(_LARGEST_PX)
    image.save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()


class Cameras:
    """The cameras of one station: those of its driver, and those on the ROS graph."""

    def __init__(self, station: StationConfig, folder: Path) -> None:
        """Args: folder: of the arm's sockets.

        Raises:
            DeviceError: a camera is on the ROS graph, and ROS 2 is missing.
        """
        self._station, self._path = station, folder / SENSORS_SOCKET
        self._own = {frame_name(name) for name, camera in station.cameras.items() if not camera.topic}
        self._ros: Ros2Sensors | None = None
        if any(camera.topic for camera in station.cameras.values()):
            self._ros = Ros2Sensors(station, open_station_node(station, "fleet"))
        self._sent = dict[str, int]()

    def look(self) -> Iterator[tuple[str, int, bytes | str]]:
        """Yields the messages about each camera with a new picture, or with one that cannot be read.

        Raises:
            LinkError: the driver's process is gone.
        """
        frames = visit(self._path, self._own) if self._own else {}
        mistakes: Mapping[str, str] = {}
        if self._ros is not None:
            frames |= self._ros.read()
            mistakes = self._ros.mistakes
        for name, camera in self._station.cameras.items():
            frame = frames.get(frame_name(name))
            if frame is None:
                if why := mistakes.get(frame_name(name)):
                    yield name, 0, why
            elif self._sent.get(name) != frame.stamp_ns:
                self._sent[name] = frame.stamp_ns
                try:
                    array = frame.array if camera.topic else cropped(frame.array, camera.crop)
                except PictureError as error:
                    yield name, 0, str(error)
                else:
                    yield name, frame.stamp_ns, jpeg(array)

    def close(self) -> None:
        if self._ros is not None:
            self._ros.close()


def feed(folder: Path, out: Output) -> None:
    """Sends pictures of the arm whose sockets are in `folder`."""
    with contextlib.closing(Cameras(station_at(folder), folder)) as cameras:
        due_s = time.monotonic()
        while not has_ended(due_s - time.monotonic()):
            due_s = time.monotonic() + _PERIOD_S
            for message in cameras.look():
                out.send(*message)


if __name__ == "__main__":
    sys.exit(run(feed))
