"""Poses of sites and readings of frame sensors from the poses of bodies, for engines that have only these.

B simulations, S sensors of frames, W bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import numpy as np
from mujoco import mjtObj, mjtSensor

from robot_rl.core.arrays import Array, namespace
from robot_rl.core.errors import ModelError
from robot_rl.sim.poses import cross, quaternion_product, rotate

_PARTS = {
    mjtSensor.mjSENS_FRAMEPOS: (0, 3),
    mjtSensor.mjSENS_FRAMEQUAT: (3, 4),
    mjtSensor.mjSENS_FRAMEXAXIS: (7, 3),
    mjtSensor.mjSENS_FRAMEYAXIS: (10, 3),
    mjtSensor.mjSENS_FRAMEZAXIS: (13, 3),
    mjtSensor.mjSENS_FRAMELINVEL: (16, 3),
    mjtSensor.mjSENS_FRAMEANGVEL: (19, 3),
}
"""Kind of sensor -> first number and size in the 22 of a frame."""
_ALL = 22


class Frames:
    """Reads the sensors of a model, as MuJoCo's `sensordata` (B, N), and the poses of its sites."""

    def __init__(self, model: mujoco.MjModel, asarray: Callable[[Any], Array]) -> None:
        """Sorts the sensors of frames and joints.

        Raises:
            ModelError: a sensor of another kind.
        """
        self._asarray = asarray
        sensors = [i for i in range(model.nsensor) if mjtSensor(int(model.sensor_type[i])) in _PARTS]
        of, within = (
            [(kinds[i], ids[i]) for i in sensors]
            for kinds, ids in (
                (model.sensor_objtype, model.sensor_objid),
                (model.sensor_reftype, model.sensor_refid),
            )
        )
        self._of, self._in = _Mounts(model, of, asarray), _Mounts(model, within, asarray)
        self._sites = _Mounts(model, [(mjtObj.mjOBJ_SITE, i) for i in range(model.nsite)], asarray)
        columns, first_joint = list[int](), _ALL * len(sensors)
        for i in range(model.nsensor):
            kind, thing = mjtSensor(int(model.sensor_type[i])), int(model.sensor_objid[i])
            if kind in _PARTS:
                first, size = _PARTS[kind]
                first += _ALL * sensors.index(i)
                columns += range(first, first + size)
            elif kind == mjtSensor.mjSENS_JOINTPOS:
                columns.append(first_joint + int(model.jnt_qposadr[thing]))
            elif kind == mjtSensor.mjSENS_JOINTVEL:
                columns.append(first_joint + model.nq + int(model.jnt_dofadr[thing]))
            else:
                name = model.sensor(i).name
                raise ModelError(
                    f"sensor {name!r}: env.engine=genesis reads sensors of joints and frames, and no "
                    f"{kind.name.removeprefix('mjSENS_').lower()}. Use env.engine=mujoco or mujoco_warp."
                )
        self._columns = asarray(np.array(columns, np.int64))

    def sites(self, position: Array, quaternion: Array) -> tuple[Array, Array]:
        """Returns positions (B, sites, 3) and matrices (B, sites, 9) of sites, given bodies (B, W, .)."""
        at, turned, _ = self._place(self._sites, position, quaternion)
        xp, shape = namespace(at), at.shape[:2]
        axes = [_turn(turned, self._axis(i, turned)) for i in range(3)]
        return at, xp.reshape(xp.stack(axes, axis=-1), (*shape, 9))

    def read(self, bodies: tuple[Array, Array, Array, Array], qpos: Array, qvel: Array) -> Array:
        """Returns the readings (B, N).

        Args:
            bodies: positions, quaternions, velocities of the origins and angular velocities, (B, W, .), in
                the world's frame.
            qpos: (B, nq).
            qvel: (B, nv).
        """
        position, quaternion, linear, angular = bodies
        xp = namespace(position)
        at, turned, lever = self._place(self._of, position, quaternion)
        origin, frame, frame_lever = self._place(self._in, position, quaternion)
        back = frame * self._asarray([1.0, -1.0, -1.0, -1.0])

        def of(mounts: _Mounts, lever: Array) -> tuple[Array, Array]:
            spin = angular[:, mounts.body]
            return linear[:, mounts.body] + cross(spin, lever), spin

        (speed, spin), (frame_speed, frame_spin) = of(self._of, lever), of(self._in, frame_lever)
        apart = at - origin
        relative = _product(back, turned)
        parts = [
            _turn(back, apart),
            relative,
            *(_turn(relative, self._axis(i, relative)) for i in range(3)),
            _turn(back, speed - frame_speed - cross(frame_spin, apart)),
            _turn(back, spin - frame_spin),
        ]
        frames = xp.reshape(xp.concat(parts, axis=2), (len(qpos), -1))
        return xp.concat([frames, qpos, qvel], axis=1)[:, self._columns]

    def _place(self, mounts: _Mounts, position: Array, quaternion: Array) -> tuple[Array, Array, Array]:
        """Returns positions, quaternions and levers from the bodies' origins, (B, S, .), in the world."""
        body = quaternion[:, mounts.body]
        local, xp = mounts.pose, namespace(position)
        offset = xp.broadcast_to(local[:, :3], (*body.shape[:2], 3))
        own = xp.broadcast_to(local[:, 3:], body.shape)
        lever = _turn(body, offset)
        return position[:, mounts.body] + lever, _product(body, own), lever

    def _axis(self, i: int, quaternion: Array) -> Array:
        xp = namespace(quaternion)
        return xp.broadcast_to(self._asarray(np.eye(3)[i]), (*quaternion.shape[:2], 3))


class _Mounts:
    """On which bodies frames are (S,), and their poses (S, 7) there; the world's for none."""

    def __init__(
        self, model: mujoco.MjModel, things: Sequence[tuple[int, int]], asarray: Callable[[Any], Array]
    ) -> None:
        body, pose = list[int](), list[Any]()
        for kind, i in things:
            is_site = kind == mjtObj.mjOBJ_SITE
            body.append(int(model.site_bodyid[i]) if is_site else max(0, int(i)))  # -1: none
            pose.append([*model.site_pos[i], *model.site_quat[i]] if is_site else [0, 0, 0, 1, 0, 0, 0])
        self.body = asarray(np.array(body, np.int64))
        self.pose = asarray(np.array(pose, float).reshape(len(body), 7))


def _turn(quaternion: Array, vector: Array) -> Array:
    """Returns vectors (B, S, 3) turned by quaternions (B, S, 4)."""
    xp = namespace(quaternion)
    flat = rotate(xp.reshape(quaternion, (-1, 4)), xp.reshape(vector, (-1, 3)))
    return xp.reshape(flat, vector.shape)


def _product(a: Array, b: Array) -> Array:
    xp = namespace(a)
    flat = quaternion_product(xp.reshape(a, (-1, 4)), xp.reshape(b, (-1, 4)))
    return xp.reshape(flat, b.shape)
