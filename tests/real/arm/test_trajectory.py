"""Trajectories: every reason to refuse one, and hand-computed samples."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robot_rl.real.arm.trajectory import Code, Motion, TrajectoryRules, Verdict, refusal, tolerances

JOINTS = ("a", "b")
S = 10**9

# Messages are attribute objects; these have what a transport's would.


def stamp(value_s: float) -> SimpleNamespace:
    nanoseconds = round(1e9 * value_s)
    return SimpleNamespace(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)


def point(
    time_s: float,
    positions: Sequence[float] = (),
    velocities: Sequence[float] = (),
    accelerations: Sequence[float] = (),
    effort: Sequence[float] = (),
) -> SimpleNamespace:
    return SimpleNamespace(
        positions=np.array(positions, float),
        velocities=np.array(velocities, float),
        accelerations=np.array(accelerations, float),
        effort=np.array(effort, float),
        time_from_start=stamp(time_s),
    )


def trajectory(names: Sequence[str], points: Sequence[Any], stamp_s: float = 0.0) -> SimpleNamespace:
    header = SimpleNamespace(stamp=stamp(stamp_s), frame_id="")
    return SimpleNamespace(header=header, joint_names=list(names), points=list(points))


def tolerance(name: str, position: float = 0.0, velocity: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(name=name, position=position, velocity=velocity, acceleration=0.0)


def goal(
    message: Any, path: Sequence[Any] = (), end: Sequence[Any] = (), goal_time_s: float = 0.0
) -> SimpleNamespace:
    return SimpleNamespace(
        trajectory=message,
        path_tolerance=list(path),
        goal_tolerance=list(end),
        goal_time_tolerance=stamp(goal_time_s),
    )


def two_points(**changes: Any) -> SimpleNamespace:
    last: dict[str, Any] = {"time_s": 2.0, "positions": [1.0, 2.0], **changes}
    return trajectory(JOINTS, [point(1.0, [0.5, 1.0]), point(**last)])


def motion(message: Any, *, start_ns: int = 0, now_ns: int = 0, velocity: float = 0.0) -> Motion:
    return Motion(
        message,
        JOINTS,
        start_ns=start_ns,
        now_ns=now_ns,
        position_rad=np.zeros(2),
        velocity_rad_s=np.full(2, velocity),
    )


# --- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "no names": (trajectory([], [point(1.0, [])]), -2, "Empty joint names on incoming trajectory."),
    "unknown joint": (
        trajectory(["a", "c"], [point(1.0, [0, 0])]),
        -2,
        "Incoming joint c doesn't match the controller's joints.",
    ),
    "a joint twice": (
        trajectory(["a", "a"], [point(1.0, [0, 0])]),
        -2,
        "Duplicate joint names on incoming trajectory.",
    ),
    "a joint missing": (
        trajectory(["a"], [point(1.0, [0])]),
        -2,
        "Joints on incoming trajectory don't match the controller joints.",
    ),
    "no points": (trajectory(JOINTS, []), -1, "Empty trajectory received."),
    "over already": (
        trajectory(JOINTS, [point(1.0, [0, 0])], stamp_s=98.0),
        -3,
        "Received trajectory with non-zero start time (98.000000) that ends in the past (99.000000)",
    ),
    "moving at the end": (
        two_points(velocities=[0.0, 0.25]),
        -1,
        "Velocity of last trajectory point of joint b is not zero: 0.250000000000000",
    ),
    "time stands still": (
        two_points(time_s=1.0),
        -1,
        "Time between points 0 and 1 is not strictly increasing, it is 1.000000 and 1.000000 respectively",
    ),
    "positions missing": (
        two_points(positions=[]),
        -1,
        "Mismatch between joint_names size (2) and positions (0) at point #1.",
    ),
    "velocities too short": (
        two_points(velocities=[0.0]),
        -1,
        "Mismatch between joint_names size (2) and velocities (1) at point #1.",
    ),
    "accelerations too long": (
        two_points(accelerations=[0.0] * 3),
        -1,
        "Mismatch between joint_names size (2) and accelerations (3) at point #1.",
    ),
    "not finite": (two_points(positions=[1.0, np.nan]), -1, "positions at point #1 are not finite."),
    "effort": (
        two_points(effort=[0.0, 0.0]),
        -1,
        "Trajectories with effort fields are currently not supported.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_trajectory_is_refused(name: str) -> None:
    message, code, text = REFUSED[name]
    assert refusal(message, JOINTS, 100 * S) == Verdict(Code(code), text)


def test_a_trajectory_is_accepted() -> None:
    assert refusal(two_points(), JOINTS, 100 * S) is None
    swapped = trajectory(["b", "a"], [point(1.0, [0, 0])], stamp_s=99.5)  # it ends at 100.5
    assert refusal(swapped, JOINTS, 100 * S) is None


def test_rules_relax() -> None:
    relaxed = TrajectoryRules(allow_partial_joints_goal=True, allow_nonzero_velocity_at_trajectory_end=True)
    partial = trajectory(["b"], [point(1.0, [0.5], [0.25])])
    assert refusal(partial, JOINTS, 0, relaxed) is None


# --- what lies between way points ----------------------------------------------------------------


def test_without_velocities_lines_from_the_present_state() -> None:
    move = motion(two_points(), velocity=3.0)  # the first way point has no velocity: 3 is not used
    assert move.sample(S // 2).position_rad.tolist() == [0.25, 0.5]
    assert move.sample(S // 2).velocity_rad_s.tolist() == [0.5, 1.0]
    assert move.sample(3 * S // 2).position_rad.tolist() == [0.75, 1.5]
    assert not move.sample(2 * S - 1).is_over
    assert move.sample(2 * S).is_over
    assert move.sample(9 * S).position_rad.tolist() == [1.0, 2.0]
    assert move.sample(9 * S).velocity_rad_s.tolist() == [0.0, 0.0]


def test_velocities_make_cubics() -> None:
    """From rest to rest over 2 s: 3 u^2 - 2 u^3 of the way; at u = 1/4 that is 5/32, the speed 9/16."""
    message = trajectory(JOINTS, [point(2.0, [1.0, -1.0], [0.0, 0.0])])
    sample = motion(message).sample(S // 2)
    assert sample.position_rad == pytest.approx([5 / 32, -5 / 32])
    assert sample.velocity_rad_s == pytest.approx([9 / 16, -9 / 16])  # (6 u - 6 u^2) / 2 s


def test_a_cubic_begins_with_the_present_velocity() -> None:
    """p = t - 2 t^2 + t^3 is 0 at 0 and 1, with velocities 1 and 0."""
    message = trajectory(JOINTS, [point(1.0, [0.0, 0.0], [0.0, 0.0])])
    sample = motion(message, velocity=1.0).sample(S // 2)
    assert sample.position_rad == pytest.approx([0.125] * 2)  # 0.5 - 0.5 + 0.125
    assert sample.velocity_rad_s == pytest.approx([-0.25] * 2)  # 1 - 2 + 0.75


def test_accelerations_make_quintics() -> None:
    """From rest to rest over 1 s: 10 u^3 - 15 u^4 + 6 u^5, 106/1024 at 1/4; speed 30 (u - u^2)^2."""
    rest = [0.0, 0.0]
    message = trajectory(JOINTS, [point(1.0, rest, rest, rest), point(2.0, [1.0, 2.0], rest, rest)])
    sample = motion(message).sample(5 * S // 4)
    assert sample.position_rad == pytest.approx([106 / 1024, 212 / 1024])
    assert sample.velocity_rad_s == pytest.approx([30 * (3 / 16) ** 2, 60 * (3 / 16) ** 2])


def test_a_quintic_meets_all_six_ends() -> None:
    """Differences of five samples 1 ms apart, at either end."""
    start, end = point(1.0, [0.3, 0], [0.2, 0], [-0.5, 0]), point(1.5, [-0.1, 0], [0, 0], [0.7, 0])
    move, step_s = motion(trajectory(JOINTS, [start, end])), 1e-3
    for first, sign, ends in ((S, 1, (0.3, 0.2, -0.5)), (3 * S // 2 - 1, -1, (-0.1, 0.0, 0.7))):
        p = [float(move.sample(first + sign * k * 10**6).position_rad[0]) for k in range(4)]
        assert p[0] == pytest.approx(ends[0], abs=1e-6)
        speed = sign * (-11 * p[0] + 18 * p[1] - 9 * p[2] + 2 * p[3]) / (6 * step_s)
        assert speed == pytest.approx(ends[1], abs=1e-3)
        assert (2 * p[0] - 5 * p[1] + 4 * p[2] - p[3]) / step_s**2 == pytest.approx(ends[2], abs=0.02)


def test_joints_come_in_any_order_and_missing_ones_stay() -> None:
    swapped = motion(trajectory(["b", "a"], [point(1.0, [4.0, 2.0])]))
    assert swapped.sample(S // 2).position_rad.tolist() == [1.0, 2.0]
    partial = motion(trajectory(["b"], [point(1.0, [4.0])]))
    assert partial.sample(S // 2).position_rad.tolist() == [0.0, 2.0]


def test_a_later_start_begins_to_move_at_once() -> None:
    """As in ros2_control: what leads to the first way point starts when the message comes."""
    move = motion(trajectory(JOINTS, [point(1.0, [3.0, 0.0])]), start_ns=2 * S, now_ns=0)
    assert move.sample(S).position_rad.tolist() == [1.0, 0.0]
    assert move.end_ns == 3 * S


def test_a_start_in_the_past_drops_what_is_over() -> None:
    move = motion(two_points(), start_ns=-3 * S // 2, now_ns=0)  # the first way point was at -0.5 s
    assert move.sample(0).position_rad.tolist() == [0.75, 1.5]


# --- tolerances ----------------------------------------------------------------------------------


def test_tolerances_of_a_goal() -> None:
    message = goal(
        two_points(),
        path=[tolerance("b", 0.2)],
        end=[tolerance("a", -1.0, 0.3)],
        goal_time_s=2.0,
    )
    found = tolerances(message, JOINTS, TrajectoryRules(path_tolerance_rad=0.1))
    assert not isinstance(found, Verdict)
    assert found.path_rad.tolist() == [0.1, 0.2]
    assert found.goal_rad.tolist() == [0.0, 0.05]
    assert found.goal_rad_s.tolist() == [0.3, 0.01]
    assert found.goal_time_s == 2.0


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (tolerance("z", 0.1), "path_tolerance of z: the controller has no such joint."),
        (
            tolerance("a", -0.5),
            "path_tolerance of a: got -0.5, allowed: above 0, 0 for the default, -1 for none.",
        ),
    ],
)
def test_wrong_tolerances_are_refused(entry: Any, text: str) -> None:
    found = tolerances(goal(two_points(), path=[entry]), JOINTS, TrajectoryRules())
    assert found == Verdict(Code.INVALID_GOAL, text)
