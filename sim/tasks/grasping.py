"""The part that scripted experts of grasping tasks share: above, down, close, carry."""

import math

from robot_rl.core.arrays import like, namespace, norm
from robot_rl.sim.task import Aim, Array, View

_ABOVE_M = 0.09
_ALIGNED_M = 0.015
_AT_TARGET_M = 0.012
_PRESS_M = 0.003
"""How far into a thing a suction cup is sent, so that it touches."""
SHUT_M = 0.015
"""Fingers around a thing are shut when they are wider than it by less than this."""
_ROUND_SHUT_M = 0.004
"""The same around a cylinder: it slips out of fingers that move away before both touch it."""
_ROUND_CENTRED_M = 0.006
"""Largest distance of the tool from a cylinder's axis at which the fingers begin to close on it."""
_GENTLE_M = 0.015
"""Longest lead on the way down to a place: a faster start shakes the arm sideways by a centimetre."""


def grasp_aim(
    view: View,
    thing: str,
    offset_m: Array,
    *,
    carry_to_m: Array,
    carry_yaw_rad: Array | float = 0.0,
    shut_width_m: Array | float = 0.055,
    top_m: Array | float = 0.02,
    centred_m: Array | float = 2 * _AT_TARGET_M,
) -> Aim:
    """Returns an aim that depends on the present state alone, so that a policy can imitate it.

    Args:
        view: needs `tool.pos`, `tool.xaxis`, `<thing>.pos` and `<thing>.xaxis`.
        thing: what to grasp.
        offset_m: (B, 3) error of the expert about the place of the thing.
        carry_to_m: (B, 3) target of the tool when the thing is held.
        carry_yaw_rad: its turn then.
        shut_width_m: fingers closer than this are shut, around something or nothing.
        top_m: height of the upper face, on which a suction cup comes down, above the thing's place.
        centred_m: largest distance of the tool from the thing's axis at which the fingers begin to close.
    """
    xp = namespace(carry_to_m)
    tool, target = view["tool.pos"], view[f"{thing}.pos"] + offset_m
    if not view.has_fingers:
        target[:, 2] += top_m - _PRESS_M
    error = tool - target
    sideways = norm(error[:, :2])
    at_target = (sideways < 2 * _AT_TARGET_M) & (xp.abs(error[:, 2]) < _AT_TARGET_M)
    holds = finger_width(view) < shut_width_m if view.has_fingers else error[:, 2] < _PRESS_M
    holding = at_target & holds
    aligned = (sideways < _ALIGNED_M) | ((sideways < 2 * _ALIGNED_M) & (error[:, 2] < 0.5 * _ABOVE_M))
    height = xp.where(aligned, target[:, 2], target[:, 2] + _ABOVE_M)
    position = xp.concat([target[:, :2], height[:, None]], axis=1)
    position[holding] = carry_to_m[holding]
    yaw = quarter_turn(heading(view[f"{thing}.xaxis"]) - heading(view["tool.xaxis"]))
    return Aim(
        position_m=position,
        yaw_rad=xp.where(holding, carry_yaw_rad, yaw),
        closed=holding | (at_target & (sideways < centred_m)),
    )


def carry_to(thing_m: Array, place_m: Array, *, clearance_m: float, aligned_m: float) -> Array:
    """Returns the motion (B, 3) of a held thing to a place: up, over the place, and down.

    Args:
        thing_m: (B, 3) the point of the thing that goes to the place.
        place_m: (B, 3)
        clearance_m: height above the place in which it moves sideways.
        aligned_m: largest sideways distance at which it begins to go down; three times as much on the way.
    """
    xp = namespace(thing_m)
    error = thing_m - place_m
    sideways = norm(error[:, :2])
    going_down = error[:, 2] < 0.9 * clearance_m
    down = (sideways < aligned_m) | (going_down & (sideways < 3 * aligned_m))
    clear = error[:, 2] > 0.75 * clearance_m
    move = xp.where((down | clear)[:, None], -error, 0.0)
    move[:, 2] = xp.where(down, xp.clip(-error[:, 2], -_GENTLE_M, None), clearance_m - error[:, 2])
    return move


def grip_width(view: View, thing: str) -> Array:
    """Returns the width (B,) of a box along the tool's y, on which the fingers close, in metres."""
    xp, half_m = namespace(view["tool.pos"]), view[f"{thing}.half_size"]
    apart = heading(view[f"{thing}.xaxis"]) - heading(view["tool.xaxis"])
    return 2.0 * xp.where(xp.abs(xp.cos(apart)) > math.sqrt(0.5), half_m[:, 1], half_m[:, 0])


def shut_width(view: View, thing: str) -> Array:
    """Returns the width (B,) below which the fingers are shut around a thing that a variation names."""
    wide_m = grip_width(view, thing)
    return wide_m + _where_round(view, thing, _ROUND_SHUT_M, SHUT_M)


def centring(view: View, thing: str) -> Array:
    """Returns `centred_m` (B,) of `grasp_aim` for a thing that a variation names."""
    return _where_round(view, thing, _ROUND_CENTRED_M, 2 * _AT_TARGET_M)


def _where_round(view: View, thing: str, if_round: float, else_: float) -> Array:
    is_round = view[f"{thing}.is_round"][:, 0]
    tool = view["tool.pos"]
    return namespace(tool).where(is_round, like(if_round, tool), like(else_, tool))


def finger_width(view: View) -> Array:
    """Returns how far apart the fingers are, (B,) metres."""
    return view["fingers.width"][:, 0]


def heading(axis: Array) -> Array:
    """Returns the angle of a horizontal direction about z, (B,)."""
    return namespace(axis).atan2(axis[:, 1], axis[:, 0])


def level(angle_rad: Array) -> Array:
    """Returns the horizontal directions (n, 3) of angles (n, 1) about z."""
    xp = namespace(angle_rad)
    return xp.concat([xp.cos(angle_rad), xp.sin(angle_rad), 0.0 * angle_rad], axis=1)


def half_turn(angle_rad: Array) -> Array:
    """Returns the same angle modulo 180 degrees, in [-90, 90): a shut gripper looks alike twice a turn."""
    return (angle_rad + math.pi / 2) % math.pi - math.pi / 2


def quarter_turn(angle_rad: Array) -> Array:
    """Returns the same angle modulo 90 degrees, in [-45, 45): a cube looks alike four times a turn."""
    quarter = math.pi / 2
    return (angle_rad + quarter / 2) % quarter - quarter / 2
