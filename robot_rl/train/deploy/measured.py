"""Measurements of an arm and its scene, and their prediction for when a command takes effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from robot_rl.core.errors import ConfigError, StaleObservationError
from robot_rl.hal.vector import Array, Obs
from robot_rl.real.messages import ArmState, Frame
from robot_rl.real.sensors import frame_name
from robot_rl.real.station import GripperConfig, StationConfig
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.pictures import black_pictures
from robot_rl.sim.robots.robot import RobotNames
from robot_rl.sim.vector import EnvConfig

_SHORTEST_S = 0.005
"""Shortest time between two readings that give a velocity."""
_FARTHEST_S = 0.25
"""Longest time that anything is predicted for."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One reading of the arm and of all frames."""

    state: ArmState
    frames: Mapping[str, Frame]


class Scene:
    """Keeps the newest readings, checks their age, and shows them to the mirror."""

    def __init__(self, station: StationConfig, config: EnvConfig, mirror: Mirror) -> None:
        self._station, self._mirror = station, mirror
        self.pictures = tuple(frame_name(camera) for camera in config.own_cameras)
        """Names of the frames that the policy sees as they are."""
        self._size, self._black = config.image_size, black_pictures(config)
        self._cameras = {frame_name(name): camera for name, camera in station.cameras.items()}
        pictures = {frame_name(name): camera.max_age_s for name, camera in station.cameras.items()}
        self._max_age_s = pictures | {name: tracked.max_age_s for name, tracked in station.objects.items()}
        self._earlier: dict[str, Frame] = {}
        self._speed_m_s: dict[str, Array] = {}

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the frames an observation is made of."""
        return (*self._mirror.objects, *self.pictures)

    def begin(self) -> None:
        """Forgets what moved: the scene was put back."""
        self._earlier, self._speed_m_s = {}, {}

    def check(self, measured: Measured, now_ns: int) -> None:
        """Passes what is complete, young enough to act on, and as the policy sees it.

        Raises:
            StaleObservationError: names what is too old, its age, and the limit.
            ConfigError: names the camera whose pictures are not like those of training.
        """
        ages = {"joint state": (measured.state.stamp_ns, self._station.limits.max_observation_age_s)}
        for name in self.needed:
            frame = measured.frames.get(name)
            ages[name] = (0 if frame is None else frame.stamp_ns, self._max_age_s[name])
        for name, (stamp_ns, limit_s) in ages.items():
            age_s = 1e-9 * (now_ns - stamp_ns)
            if age_s > limit_s:
                seen = f"{1e3 * age_s:.0f} ms old" if stamp_ns else "missing"
                raise StaleObservationError(
                    f"station {self._station.name}: {name} is {seen}, allowed is {1e3 * limit_s:.0f} ms. "
                    "The arm holds. Look for a slow camera, a busy bus or a lost connection."
                )
        for name in self.pictures:
            self._check_picture(name, measured.frames[name].array)

    def _check_picture(self, name: str, picture: Array) -> None:
        """Refuses what resizing does not make a picture of training."""
        at, (height, width) = f"station {self._station.name}: {name}", self._size
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise ConfigError(
                f"{at} is {picture.dtype} {picture.shape}, allowed: uint8 (height, width, 3) in the order "
                "red, green, blue. Look at what its topic or driver sends: depth, or channels first?"
            )
        rows, columns = picture.shape[:2]
        seen = f"{at} is {rows} x {columns} pixels, the policy sees {height} x {width}"
        if rows < height or columns < width:
            raise ConfigError(
                f"{seen}: allowed are as many or more, which are resized. Have the camera send larger "
                "pictures, or crop less of them."
            )
        camera = self._cameras[name]
        # A crop has whole pixels, so that its sides may be one off.
        if not camera.stretch and abs(rows * width - columns * height) > max(height, width):
            top, left, *_ = camera.crop or (0, 0)
            high, wide = min(rows, columns * height // width), min(columns, rows * width // height)
            crop = [top + (rows - high) // 2, left + (columns - wide) // 2, high, wide]
            raise ConfigError(
                f"{seen}: allowed are the same proportions. Give this camera `crop: {crop}` in the station "
                "file, or `stretch: true` if training resized such pictures, too."
            )

    def note(self, measured: Measured) -> None:
        """Notes where things are, once a control step: how fast they move follows from two of them."""
        for name in self._mirror.objects:
            frame, before = measured.frames[name], self._earlier.get(name)
            if before is not None:
                passed_s = 1e-9 * (frame.stamp_ns - before.stamp_ns)
                if passed_s < _SHORTEST_S:
                    continue
                self._speed_m_s[name] = (frame.array[:3] - before.array[:3]) / passed_s
            self._earlier[name] = frame

    def show(self, measured: Measured, at_ns: int | None = None) -> Obs:
        """Shows the mirror the state predicted for a time, or as measured; returns the observation."""
        state = measured.state
        arm_s = _ahead_s(state.stamp_ns, at_ns)
        position = state.position_rad + arm_s * state.velocity_rad_s
        poses: dict[str, Array] = {}
        for name in self._mirror.objects:
            frame = measured.frames[name]
            poses[name] = np.array(frame.array, float)
            poses[name][:3] += _ahead_s(frame.stamp_ns, at_ns) * self._speed_m_s.get(name, 0.0)
        obs = self._mirror.show(
            position, state.velocity_rad_s, self.from_station(state.gripper), poses, self._speed_m_s
        )
        pictures = {name: self._picture(measured.frames[name].array)[None] for name in self.pictures}
        return obs | pictures | {name: picture.copy() for name, picture in self._black.items()}

    def _picture(self, array: Array) -> Array:
        """Returns a picture in the size of training."""
        height, width = self._size
        if array.shape[:2] == self._size:
            return array.copy()
        return np.asarray(Image.fromarray(array).resize((width, height), Image.Resampling.BOX))

    def from_station(self, gripper: float) -> float:
        """Returns the robot model's number for a gripper opening."""
        return model_opening(self._mirror.robot, self._station.gripper, gripper)

    def to_station(self, gripper: Array) -> Array:
        """Returns the station's numbers for gripper openings of the robot model."""
        robot, own = self._mirror.robot, self._station.gripper
        return own.closed + (gripper - robot.gripper_closed) / _per_unit(robot, own)


def model_opening(robot: RobotNames, gripper: GripperConfig, opening: float) -> float:
    """Returns the robot model's number for an opening of a station's gripper."""
    return robot.gripper_closed + _per_unit(robot, gripper) * (opening - gripper.closed)


def _per_unit(robot: RobotNames, gripper: GripperConfig) -> float:
    """Numbers of the station's gripper to those of the robot's are a line through both ends."""
    return (robot.gripper_open - robot.gripper_closed) / (gripper.open - gripper.closed)


def _ahead_s(stamp_ns: int, at_ns: int | None) -> float:
    return 0.0 if at_ns is None else min(max(1e-9 * (at_ns - stamp_ns), 0.0), _FARTHEST_S)
