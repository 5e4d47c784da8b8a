"""Batched rigid poses: 7 numbers, position in metres and unit quaternion (w, x, y, z)."""

from robot_rl.core.arrays import Array, like, namespace


def compose(a_from_b: Array, b_from_c: Array) -> Array:
    """Returns the poses `a_from_c`, (n, 7)."""
    position = a_from_b[:, :3] + rotate(a_from_b[:, 3:], b_from_c[:, :3])
    turned = quaternion_product(a_from_b[:, 3:], b_from_c[:, 3:])
    return namespace(position).concat([position, turned], axis=1)


def inverse(a_from_b: Array) -> Array:
    """Returns the poses `b_from_a`, (n, 7)."""
    xp, back = namespace(a_from_b), a_from_b[:, 3:] * like((1.0, -1.0, -1.0, -1.0), a_from_b)
    return xp.concat([-rotate(back, a_from_b[:, :3]), back], axis=1)


def rotate(quaternion: Array, vector: Array) -> Array:
    """Returns the vectors (n, 3) turned by the quaternions (n, 4)."""
    scalar, axis = quaternion[:, :1], quaternion[:, 1:]
    twice = 2.0 * cross(axis, vector)
    return vector + scalar * twice + cross(axis, twice)


def quaternion_product(a: Array, b: Array) -> Array:
    """Returns the Hamilton products (n, 4): first turn by b, then by a."""
    xp = namespace(a)
    scalar = a[:, :1] * b[:, :1] - xp.sum(a[:, 1:] * b[:, 1:], axis=1, keepdims=True)
    vector = a[:, :1] * b[:, 1:] + b[:, :1] * a[:, 1:] + cross(a[:, 1:], b[:, 1:])
    return xp.concat([scalar, vector], axis=1)


def yaw_quaternion(yaw_rad: Array) -> Array:
    """Returns (n, 4) quaternions of rotations about z by (n,) or (n, 1) angles."""
    xp = namespace(yaw_rad)
    half = 0.5 * xp.reshape(yaw_rad, (-1,))
    zero = xp.zeros_like(half)
    return xp.stack([xp.cos(half), zero, zero, xp.sin(half)], axis=1)


def free_pose(position_m: Array, yaw_rad: Array) -> Array:
    """Returns (n, 7) poses turned about z only, as the position of a free joint."""
    return namespace(position_m).concat([position_m, yaw_quaternion(yaw_rad)], axis=1)


def cross(a: Array, b: Array, out: Array | None = None) -> Array:
    """Returns a x b over the last axis, of a's shape; np.cross costs three times as much on small arrays."""
    product = namespace(a).empty_like(a) if out is None else out
    product[..., 0] = a[..., 1] * b[..., 2] - a[..., 2] * b[..., 1]
    product[..., 1] = a[..., 2] * b[..., 0] - a[..., 0] * b[..., 2]
    product[..., 2] = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    return product
