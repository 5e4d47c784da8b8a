"""Who commands what: switching, and that no two controllers have one joint."""

import pytest

from robot_rl.real.arm.controllers import (
    ForwardPositionController,
    ForwardVelocityController,
    GripperController,
    JointStateBroadcaster,
    JointTrajectoryController,
)
from robot_rl.real.arm.manager import ControllerManager

JTC, POSITION, VELOCITY = (
    "joint_trajectory_controller",
    "forward_position_controller",
    "forward_velocity_controller",
)
CONFLICT = (
    "Resource conflict for controller 'forward_position_controller'. Command interface 'a/position' is "
    "already claimed by 'joint_trajectory_controller': deactivate it in the same request."
)


@pytest.fixture(name="manager")
def make_manager(make_loop) -> ControllerManager:
    joints = ("a", "b")
    controllers = [
        JointStateBroadcaster(),
        JointTrajectoryController(joints),
        ForwardPositionController(joints),
        ForwardVelocityController(joints),
        GripperController(("finger",)),
    ]
    return ControllerManager(controllers, make_loop().body, ["joint_state_broadcaster", JTC])


def test_the_start(manager: ControllerManager) -> None:
    assert manager.states == {
        "joint_state_broadcaster": "active",
        JTC: "active",
        POSITION: "inactive",
        VELOCITY: "inactive",
        "gripper_controller": "inactive",
    }
    assert manager.claimed() == {"a/position": JTC, "b/position": JTC}


def test_a_second_controller_of_a_joint_is_refused_by_name(manager: ControllerManager) -> None:
    assert manager.switch([POSITION], [], strict=True) == (False, CONFLICT)
    assert not manager.is_active(POSITION)
    # Another interface of the same joint is no better.
    done, text = manager.switch([VELOCITY], [], strict=True)
    assert not done
    assert "'a/velocity' is already claimed by 'joint_trajectory_controller'" in text
    done, text = manager.switch([POSITION, VELOCITY], [JTC], strict=True)
    assert not done
    assert "'a/velocity' is already claimed by 'forward_position_controller'" in text
    assert manager.is_active(JTC)  # nothing has changed


def test_a_switch(manager: ControllerManager) -> None:
    assert manager.switch([POSITION, "gripper_controller"], [JTC], strict=True) == (True, "")
    assert manager.claimed() == {
        "a/position": POSITION,
        "b/position": POSITION,
        "finger/position": "gripper_controller",
    }


def test_best_effort_does_what_it_can(manager: ControllerManager) -> None:
    done, text = manager.switch([POSITION, "gripper_controller", "ghost"], [VELOCITY], strict=False)
    assert done
    assert manager.is_active("gripper_controller")
    assert not manager.is_active(POSITION)
    assert text == (
        "Could not deactivate controller 'forward_velocity_controller': it is inactive. "
        f"{CONFLICT} Could not activate controller 'ghost': it is not loaded."
    )


def test_strict_refuses_what_is_already_so(manager: ControllerManager) -> None:
    text = "Could not activate controller 'joint_trajectory_controller': it is active."
    assert manager.switch([JTC], [], strict=True) == (False, text)
    assert manager.switch([JTC], [JTC], strict=True) == (True, "")  # a restart


def test_unload_and_load(manager: ControllerManager) -> None:
    assert manager.unload(JTC) == (
        False,
        "controller 'joint_trajectory_controller' is active: deactivate it first.",
    )
    assert manager.unload("ghost") == (False, "controller 'ghost' is not loaded.")
    assert manager.unload(VELOCITY) == (True, "")
    assert VELOCITY not in manager.states
    assert manager.switch([VELOCITY], [JTC], strict=True)[0] is False
    assert manager.load(VELOCITY) == (True, "")
    assert manager.load(VELOCITY) == (
        False,
        "a controller named 'forward_velocity_controller' was already loaded.",
    )
    assert manager.switch([VELOCITY], [JTC], strict=True)[0] is False  # it is not configured
    assert manager.configure(VELOCITY) == (True, "")
    assert manager.configure(VELOCITY) == (
        False,
        "controller 'forward_velocity_controller' is inactive, not unconfigured.",
    )
    assert manager.switch([VELOCITY], [JTC], strict=True) == (True, "")
    done, text = manager.load("ghost")
    assert not done
    assert text.startswith("no controller 'ghost'. This arm has: joint_state_broadcaster, ")
