"""What the cameras of simulations show: pictures as rare and as late as those of real cameras.

B simulations, C cameras, L pictures in flight, n numbers of a state. Times are whole physics steps since the
cameras of a simulation began, with its episode. A picture waits as the state that it shows: one that nobody
looks at is never drawn, and a checkpoint holds no pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.arrays import Array, namespace, to_numpy
from robot_rl.core.errors import ConfigError
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.cameras import Camera
from robot_rl.sim.config import EnvConfig

Numbers = NDArray[np.int64]
_FINEST = 1000
"""Largest denominator of a period in physics steps: 30 Hz at 200 Hz is 20 / 3."""
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class CameraClock:
    """When a camera takes pictures, and when they are shown.

    Picture k is taken k periods after the beginning, rounded down to a physics step, and shown at the first
    observation that is a delay later. The first one is shown from the beginning.
    """

    period: Fraction
    """Physics steps; at least a control step."""
    delay: int
    """Physics steps."""

    @classmethod
    def of(cls, hz: float, delay_s: float, *, timestep_s: float, num_substeps: int) -> CameraClock:
        """Returns the clock of a camera; `hz` is 0 for a picture at each control step, of `num_substeps`.

        Raises:
            ConfigError: the camera is faster than the control rate.
        """
        period = Fraction(1.0 / (hz * timestep_s) if hz else num_substeps).limit_denominator(_FINEST)
        if period < num_substeps:
            raise ConfigError(
                f"env.camera_hz: got {hz:g}, allowed: at most {1.0 / (num_substeps * timestep_s):g}, the "
                "control rate. A faster camera has a new picture at each control step: leave it out, "
                "and give the mean age of a picture as env.camera_delay_s."
            )
        return cls(period=period, delay=int(np.ceil(delay_s / timestep_s - _ROUNDING)))

    @property
    def num_in_flight(self) -> int:
        """Most pictures from the one that is shown to the newest."""
        return int(self.delay / self.period) + 2

    def newest(self, now: Numbers) -> Numbers:
        """Returns the number of the newest picture that is taken by `now`; below 0 before the beginning."""
        return ((now + 1) * self.period.denominator - 1) // self.period.numerator

    def shown(self, now: Numbers) -> Numbers:
        """Returns the number of the picture that is shown at `now`."""
        return np.maximum(self.newest(now - self.delay), 0)

    def taken(self, number: Numbers) -> Numbers:
        """Returns when a picture is taken."""
        return number * self.period.numerator // self.period.denominator


class Pictures:
    """Draws what cameras show, each picture once, and steps physics through the instants that they see."""

    def __init__(
        self, config: EnvConfig, backend: Backend, num_envs: int, num_substeps: int, threads: int
    ) -> None:
        """Opens renderers in `threads` threads if there are cameras; a control step has `num_substeps`.

        Raises:
            ConfigError: a camera is faster than the control rate.
            ModelError: the scene has no camera of a given name.
            RenderError: this machine cannot draw.
        """
        self._names, self._depth, self._backend = config.own_cameras, config.depth, backend
        self._substeps = num_substeps
        self._clocks = clocks_of(config, backend.timestep_s, num_substeps)
        height, width = config.image_size
        by_engine = config.renderer == "engine"
        cameras = [
            Camera(name=name, height=height, width=width, by_engine=by_engine) for name in config.own_cameras
        ]
        self._black = black_pictures(config)
        self._renderer = backend.renderer(cameras, threads) if cameras else None
        self._pictures: dict[str, Array] = {}
        """The newest picture of every simulation, by its key."""
        self._drawn = np.full((len(cameras), num_envs), -1, np.int64)
        """Number of the picture that was drawn last."""
        self._now = np.zeros(num_envs, np.int64)
        """Physics steps since the cameras began."""
        self._waiting = {
            i: np.zeros((num_envs, clock.num_in_flight, backend.state_size))
            for i, clock in enumerate(self._clocks)
            if clock.delay or clock.period != self._substeps  # others show the present state
        }
        """Camera -> states (B, L, n) that its pictures show; picture k is in column k modulo L."""

    def begin(self, ids: Array) -> None:
        """Lets cameras begin with the present state, of a new episode or a given one."""
        if not self._names:
            return
        rows = to_numpy(ids)
        self._now[rows] = 0
        self._drawn[:, rows] = -1
        for states in self._waiting.values():
            states[rows] = to_numpy(self._backend.read_states())[rows, None]

    def step(self, active: Array | None) -> Array:
        """Advances all or the active simulations by one control step, and keeps the states that cameras see.

        Returns which of them diverged, (B,) bool.
        """
        if not self._names:
            return self._backend.step(self._substeps, active)
        due = self._due(active)
        self._now += self._substeps if active is None else self._substeps * to_numpy(active)
        stops = {self._substeps}.union(*(at.tolist() for _, at in due.values())) - {0}
        diverged, done = None, 0
        for stop in sorted(stops):
            found = self._backend.step(stop - done, active)
            diverged, done = found if diverged is None else diverged | found, stop
            for camera, (column, at) in due.items():
                (rows,) = np.nonzero(at == stop)
                self._waiting[camera][rows, column[rows]] = to_numpy(self._backend.read_states())[rows]
        assert diverged is not None, "a control step has physics steps"
        return diverged

    def _due(self, active: Array | None) -> dict[int, tuple[Numbers, Numbers]]:
        """Returns, for each camera, which column its next picture has and after how many steps it is taken.

        Each (B,); 0 steps where none is taken in this control step.
        """
        due: dict[int, tuple[Numbers, Numbers]] = {}
        for camera, states in self._waiting.items():
            clock, now = self._clocks[camera], self._now
            number = clock.newest(now + self._substeps)
            is_due = number > clock.newest(now)
            is_due = is_due if active is None else is_due & to_numpy(active)
            due[camera] = number % states.shape[1], np.where(is_due, clock.taken(number) - now, 0)
        return due

    def show(self, ids: Array) -> dict[str, Array]:
        """Returns what the cameras of simulations show now: fresh arrays, the renderer's or NumPy's."""
        black = {key: np.repeat(picture, len(ids), axis=0) for key, picture in self._black.items()}
        if not self._names:
            return black
        rows = to_numpy(ids)
        for camera, clock in enumerate(self._clocks):
            number = clock.shown(self._now[rows])
            is_new = number != self._drawn[camera, rows]
            if is_new.any():
                self._draw(camera, rows[is_new], number[is_new])
        shown: dict[str, Array] = {}
        for key, pictures in self._pictures.items():
            shown[key] = pictures[namespace(pictures).asarray(rows, device=pictures.device)]
        return shown | black

    def _draw(self, camera: int, rows: Numbers, number: Numbers) -> None:
        states = self._waiting.get(camera)
        seen = None if states is None else states[rows, number % states.shape[1]]
        name, renderer = self._names[camera], self._renderer
        assert renderer is not None, "there are cameras"
        draw = partial(renderer.render_batch, rows, name, states=seen)
        found = {f"{name}.rgb": draw()}
        if self._depth:
            found[f"{name}.depth"] = draw(depth=True)
        for key, pictures in found.items():
            xp, device = namespace(pictures), pictures.device
            if key not in self._pictures:
                shape = (self._drawn.shape[1], *pictures.shape[1:])
                self._pictures[key] = xp.zeros(shape, dtype=pictures.dtype, device=device)
            self._pictures[key][xp.asarray(rows, device=device)] = pictures
        self._drawn[camera, rows] = number

    @property
    def num_columns(self) -> int:
        """Columns of `rows`."""
        return bool(self._waiting) + sum(states[0].size for states in self._waiting.values())

    def rows(self) -> Array:
        """Returns what decides on the pictures to come in addition to the present state, (B, m) float64.

        No columns where all cameras show the present state.
        """
        if not self._waiting:
            return np.zeros((len(self._now), 0))
        waiting = [states.reshape(len(states), -1) for states in self._waiting.values()]
        return np.concatenate([self._now[:, None], *waiting], axis=1)

    def put(self, ids: Array, rows: Array) -> None:
        """Lets cameras go on from rows (b, m) of `rows`; what they show is drawn again."""
        if not self._names:
            return
        at, first = to_numpy(ids), 1
        self.begin(ids)
        if self._waiting:
            self._now[at] = rows[:, 0].astype(np.int64)
        for states in self._waiting.values():
            columns = states[0].size
            states[at] = rows[:, first : first + columns].reshape(len(rows), *states.shape[1:])
            first += columns

    def close(self) -> None:
        """Frees the renderers."""
        if self._renderer is not None:
            self._renderer.close()


def clocks_of(config: EnvConfig, timestep_s: float, num_substeps: int) -> list[CameraClock]:
    """Returns the clock of each camera; one number stands for all of them.

    Raises:
        ConfigError: a camera is faster than the control rate.
    """

    def each(values: Sequence[float]) -> Sequence[float]:
        return values if len(values) > 1 else [*values, 0.0][:1] * len(config.cameras)

    rates, delays = each(config.camera_hz), each(config.camera_delay_s)
    return [
        CameraClock.of(hz, delay_s, timestep_s=timestep_s, num_substeps=num_substeps)
        for name, hz, delay_s in zip(config.cameras, rates, delays, strict=True)
        if name in config.own_cameras
    ]


def black_pictures(config: EnvConfig) -> dict[str, Array]:
    """Returns what the cameras that a robot does not have show, (1, h, w, ...) by key; depth is 0."""
    size = (1, *config.image_size)
    black: dict[str, Array] = {}
    for name in config.missing_cameras:
        black[f"{name}.rgb"] = np.zeros((*size, 3), np.uint8)
        if config.depth:
            black[f"{name}.depth"] = np.zeros(size, np.float32)
    return black
