"""Batched rigid poses: 7 numbers, position in metres and unit quaternion (w, x, y, z)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def compose(a_from_b: Array, b_from_c: Array) -> Array:
    """Returns the poses `a_from_c`, (n, 7)."""
    position = a_from_b[:, :3] + rotate(a_from_b[:, 3:], b_from_c[:, :3])
    return np.concatenate([position, quaternion_product(a_from_b[:, 3:], b_from_c[:, 3:])], axis=1)


def rotate(quaternion: Array, vector: Array) -> Array:
    """Returns the vectors (n, 3) turned by the quaternions (n, 4)."""
    scalar, axis = quaternion[:, :1], quaternion[:, 1:]
    twice = 2.0 * np.cross(axis, vector)
    return vector + scalar * twice + np.cross(axis, twice)


def quaternion_product(a: Array, b: Array) -> Array:
    """Returns the Hamilton products (n, 4): first turn by b, then by a."""
    scalar = a[:, :1] * b[:, :1] - (a[:, 1:] * b[:, 1:]).sum(axis=1, keepdims=True)
    vector = a[:, :1] * b[:, 1:] + b[:, :1] * a[:, 1:] + np.cross(a[:, 1:], b[:, 1:])
    return np.concatenate([scalar, vector], axis=1)


def yaw_quaternion(yaw_rad: Array) -> Array:
    """Returns (n, 4) quaternions of rotations about z."""
    half = 0.5 * np.asarray(yaw_rad).reshape(-1)
    zero = np.zeros_like(half)
    return np.stack([np.cos(half), zero, zero, np.sin(half)], axis=1)


def free_pose(position_m: Array, yaw_rad: Array) -> Array:
    """Returns (n, 7) poses turned about z only, as the position of a free joint."""
    return np.concatenate([position_m, yaw_quaternion(yaw_rad)], axis=1)
