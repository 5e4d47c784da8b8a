"""The box of the tool: two links of 0.5 m in a plane, and the Panda; 100 Hz, servos of 0.1 s."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import ConfigError
from robot_rl.real.kinematics import JointConfig, Kinematics, KinematicsConfig, Origin
from robot_rl.real.messages import ArmState, Array
from robot_rl.real.station import Ros2Config, StationConfig, load_station
from robot_rl.real.supervisor.limiter import Box, Limiter
from tests.real.supervisor.conftest import MakeRig
from tests.real.supervisor.rig import two_joint_station

Z = (0.0, 0.0, 1.0)
PLANAR = KinematicsConfig(
    joints={"a": JointConfig(axis=Z), "b": JointConfig(xyz=(0.5, 0.0, 0.0), axis=Z)},
    tool=Origin(xyz=(0.5, 0.0, 0.0)),
)
FOLLOWED = 1.0 - np.exp(-0.1)
"""Of a lead, in a cycle."""


def planar_station(
    low_m: tuple[float, float, float] = (0.5, -0.8, -0.1),
    high_m: tuple[float, float, float] = (1.1, 0.6, 0.1),
    **changes: Any,
) -> StationConfig:
    limits = {"workspace_low_m": low_m, "workspace_high_m": high_m, **changes.pop("limits", {})}
    return two_joint_station(kinematics=PLANAR, limits=limits, **changes)


def tool_m(*position_rad: float) -> Array:
    return Kinematics(PLANAR, ("a", "b")).tool_m(np.array(position_rad))


def driven(limiter: Limiter, position_rad: Array, asked_rad: Array, cycles: int) -> tuple[Array, Array]:
    """Returns all that was sent (cycles, n), and where the arm is then; no lead is too large."""
    sent: list[Array] = []
    limits = limiter.envelope.limits
    lead_rad = limits.lookahead_s * np.array(limits.velocity_rad_s) + 1e-9
    for _ in range(cycles):
        state = ArmState(stamp_ns=0, position_rad=position_rad, velocity_rad_s=np.zeros(len(asked_rad)))
        sent.append(limiter.filter(asked_rad, state)[0])
        assert (np.abs(sent[-1] - position_rad) <= lead_rad).all()
        position_rad = position_rad + FOLLOWED * (sent[-1] - position_rad)
    return np.array(sent), position_rad


def test_how_far_outside_is_the_distance_to_the_box() -> None:
    # Stretched out at 1.2 rad: (0.362, 0.932), 0.138 m before x = 0.5 and 0.332 m over y = 0.6: 0.359 m.
    box = Box(planar_station())
    positions = np.array([[0.0, 0.0], [1.2, 0.0]])
    assert box.outside_m(positions) == pytest.approx([0.0, np.hypot(0.5 - np.cos(1.2), np.sin(1.2) - 0.6)])


def test_a_box_without_a_chain_is_refused() -> None:
    box = {"workspace_low_m": (0.0, 0.0, 0.0), "workspace_high_m": (1.0, 1.0, 1.0)}
    with pytest.raises(ConfigError, match=r"limits\.workspace_low_m: .* Add kinematics: .* panda_ros2"):
        two_joint_station(limits=box)


def test_the_tool_waits_at_the_wall_and_comes_back(make_rig: MakeRig) -> None:
    # Asked for 1.4 and -1.1 rad, at (cos 1.4 + cos 0.3, sin 1.4 + sin 0.3) / 2 = (0.563, 0.641): 41 mm
    # beyond y = 0.6. It waits a millimetre before the wall.
    rig = make_rig(planar_station())
    policy = rig.started()
    box = Box(planar_station())
    for _ in range(60):  # 3 s; an arm far from its target is stopped after 0.5 s
        policy.link.send(rig.plan([1.4, -1.1]))
        rig.run(0.05)
    assert policy.status.phase == "running"
    assert policy.status.limited
    assert tool_m(*rig.arm.position_rad) == pytest.approx([0.563, 0.599, 0.0], abs=5e-3)
    still = np.array([command.target_rad for command in rig.arm.sent[-50:]])
    assert np.ptp(still, axis=0).max() < 1e-9
    for _ in range(30):
        policy.link.send(rig.plan([-0.3, 0.4]))
        rig.run(0.05)
    assert rig.arm.position_rad == pytest.approx([-0.3, 0.4], abs=1e-3)
    assert not policy.status.limited
    assert box.outside_m(np.array([command.target_rad for command in rig.arm.sent])).max() == 0.0


def test_a_tool_far_outside_stops_the_arm(make_rig: MakeRig) -> None:
    # Stretched out, y is the sine: at 0.70 rad 0.644, at 0.75 rad 0.682; over 0.6 by 0.044 and 0.082.
    rig = make_rig(planar_station())
    policy = rig.started()
    rig.arm.is_blocked = True  # somebody holds it there
    rig.arm.position_rad = np.array([0.70, 0.0])
    rig.run(0.02)
    assert policy.status.phase == "running"
    rig.arm.position_rad = np.array([0.75, 0.0])
    rig.run(0.02)
    assert policy.status.phase == "stopped"
    far = "the tool is 0.082 m outside of its box, allowed 0.05 m (limits.workspace_margin_m)"
    assert policy.status.reason == f"{far} (by the arm watchdog)"
    rig.run(0.2)
    policy.control("clear", by="Ada")
    rig.run(0.2)
    policy.control("start")
    rig.run(0.1)
    assert policy.answer.message == f"{far}. Bring it back by hand."
    rig.arm.is_blocked = False
    rig.arm.push(np.array([0.70, 0.0]))
    rig.run(0.02)
    policy.control("home")
    rig.run(3.0)
    assert policy.answer.done
    assert rig.arm.position_rad == pytest.approx([0.0, 0.0], abs=5e-3)


def test_from_slightly_outside_only_nearer_is_allowed() -> None:
    # At 0.68 rad the tool is sin(0.68) - 0.6 = 0.029 m too far.
    limiter, start = Limiter(planar_station(), ManualClock()), np.array([0.68, 0.0])
    box = Box(planar_station())
    limiter.rebase(start)
    sent, here = driven(limiter, start, start, 3)
    assert (sent == start).all()  # nobody asked for a move
    sent, here = driven(limiter, start, np.array([0.9, 0.3]), 100)
    outside_m = box.outside_m(np.vstack([start, sent]))
    assert (np.diff(outside_m) <= 1e-12).all()
    assert outside_m[0] == pytest.approx(np.sin(0.68) - 0.6)
    assert outside_m[-1] == 0.0
    sent, here = driven(limiter, here, np.array([0.2, 0.1]), 200)
    assert here == pytest.approx([0.2, 0.1], abs=1e-3)


def test_a_way_home_through_the_wall_is_told(make_rig: MakeRig) -> None:
    # The elbow on the other side: the tool at the same place, but in between 1 m away from the base, and
    # no point of the box is.
    home = (0.6, -1.2)
    rig = make_rig(planar_station((0.5, -0.1, -0.1), (0.9, 0.1, 0.1), home_rad=home, safe_rad=home))
    rig.arm.push(np.array([-0.6, 1.2]))
    person = rig.connect()
    rig.run(0.02)
    person.control("home")
    rig.run(8.0)
    assert person.answer.operation == "home"
    assert person.answer.message.startswith("the way there leads out of the box of the tool.")
    assert person.status.phase == "paused"


def test_every_point_of_a_trajectory_is_inside(make_rig: MakeRig) -> None:
    rig = make_rig(planar_station(driver="ros2", ros2=Ros2Config(command="trajectory")))
    policy = rig.started()
    policy.link.send(rig.plan(*([1.4, -1.1] for _ in range(40))))
    rig.run(0.05)
    (plan,) = rig.arm.plans
    assert any(getattr(message, "limited", False) for message in policy.said)
    assert Box(planar_station()).outside_m(plan.targets_rad).max() == 0.0
    # 2 rad/s is 0.1 rad in 50 ms.
    assert np.abs(np.diff(plan.targets_rad, axis=0)).max() <= 0.1 + 1e-9
    assert tool_m(*plan.targets_rad[-1]) == pytest.approx([0.563, 0.599, 0.0], abs=5e-3)


def panda_station() -> StationConfig:
    """Returns the Panda in a box of 0.35 x 0.5 x 0.48 m around home."""
    station = load_station("panda_ros2")
    box = {"workspace_low_m": (0.3, -0.25, 0.02), "workspace_high_m": (0.65, 0.25, 0.5)}
    return replace(station, limits=replace(station.limits, **box))


@pytest.mark.parametrize(
    ("make", "spread_rad"), [(planar_station, 1.0), (panda_station, 0.5)], ids=["planar", "panda"]
)
def test_random_targets_never_lead_out_and_those_inside_are_reached(
    make: Callable[[], StationConfig], spread_rad: float
) -> None:
    station, rng = make(), np.random.default_rng(1)
    limiter, box = Limiter(station, ManualClock()), Box(station)
    low, high = np.array(station.limits.position_low_rad), np.array(station.limits.position_high_rad)
    home = np.array(station.home_rad)
    near = np.clip(home + rng.uniform(-spread_rad, spread_rad, (400, len(home))), low, high)
    inside, outside = near[box.outside_m(near) == 0.0][:8], near[box.outside_m(near) > 0.0][:8]
    here, boxed = home, False
    limiter.rebase(here)
    for beyond, goal in zip(outside, inside, strict=True):
        wild, here = driven(limiter, here, rng.uniform(low, high), 20)
        stuck, here = driven(limiter, here, beyond, 40)
        boxed |= limiter.is_boxed
        back, here = driven(limiter, here, goal, 200)
        sent = np.vstack([wild, stuck, back])
        assert box.outside_m(sent).max() <= 1e-6
        assert ((sent >= low) & (sent <= high)).all()
        assert here == pytest.approx(goal, abs=1e-3)
    assert boxed
