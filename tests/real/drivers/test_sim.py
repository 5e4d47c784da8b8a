"""The simulated arm in process, over a plant whose every number can be worked out by hand."""

import time

import numpy as np
import pytest

from robot_rl.core.errors import DeviceError
from robot_rl.hal.arm import ArmState
from robot_rl.real.drivers.sim import SimArm
from robot_rl.real.messages import Command, Plan
from tests.real.supervisor.rig import two_joint_station

TIMEOUT_S = 10.0


class Kinematic:
    """Joints that are where they were told at the next step, or hang below it by `sag`; a up to 2 rad."""

    joint_names = ("a", "b")
    position_limits_rad = (np.array([-2.0, -2.0]), np.array([2.0, 2.0]))

    def __init__(self) -> None:
        self.elapsed_s, self.made_s = 0.0, time.monotonic()
        self.position = self.sag = np.zeros(2)
        self.target, self.gripper = np.zeros(2), 1.0
        self.error: Exception | None = None

    def command(self, target_rad, gripper):
        self.target, self.gripper = np.array(target_rad), gripper

    def step(self, dt_s):
        if self.error is not None:
            raise self.error
        self.elapsed_s += dt_s
        self.position = self.target - self.sag

    def measure(self):
        return ArmState(
            stamp_ns=0, position_rad=self.position, velocity_rad_s=np.zeros(2), gripper=self.gripper / 2
        )

    def objects(self):
        return {"cube": np.arange(7.0)}

    def picture(self, camera):
        return np.full((4, 4, 3), round(self.position[0]), np.uint8)

    def state(self):
        return self.position

    def set_state(self, row):
        self.position = row

    def reset(self, seed):
        self.position = np.full(2, float(seed))

    def close(self):
        pass


@pytest.fixture
def plants():
    return []


@pytest.fixture
def arm(plants):
    def make():
        plants.append(Kinematic())
        return plants[-1]

    driver = SimArm(two_joint_station(cameras={"front": {}}), make)
    driver.connect()
    yield driver
    driver.close()


def command(*target_rad, gripper=0.5):
    return Command(number=1, stamp_ns=0, target_rad=np.array(target_rad), gripper=gripper)


def until(condition):
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.002)


def test_time_passes_as_on_the_clock(arm, plants):
    elapsed_s = plants[0].elapsed_s
    until(lambda: plants[0].elapsed_s - elapsed_s > 0.2)
    # Never faster than time since it was made: a step that came late makes up for what it missed.
    assert plants[0].elapsed_s <= time.monotonic() - plants[0].made_s
    assert arm.wait(TIMEOUT_S)
    assert 0 <= time.monotonic_ns() - arm.read().stamp_ns < 1e9 * TIMEOUT_S


def test_commands_move_it_once_it_is_started(arm, plants):
    with pytest.raises(DeviceError, match="the arm is not started"):
        arm.send(command(1.0, 1.0))
    arm.start()
    arm.send(command(1.0, 1.5))
    until(lambda: arm.read().position_rad.tolist() == [1.0, 1.5])
    with pytest.raises(DeviceError, match=r"target \[nan, 0.0\] is not finite"):
        arm.send(command(np.nan, 0.0))


def test_a_held_arm_stays_and_keeps_its_grip(arm, plants):
    arm.start()
    arm.send(command(1.0, 1.0, gripper=0.2))
    until(lambda: arm.read().position_rad[0] == 1.0)
    arm.hold()
    assert plants[0].target.tolist() == [1.0, 1.0]
    assert plants[0].gripper == 0.2  # not the 0.1 that it measures: what is gripped would fall


def test_a_loaded_arm_does_not_sink_with_a_hundred_holds(arm, plants):
    plants[0].sag = np.array([0.05, 0.0])
    arm.start()
    arm.send(command(1.0, 0.0))
    until(lambda: arm.read().position_rad[0] == 0.95)
    for _ in range(100):
        arm.hold()
        plants[0].step(0.0)
    arm.stop("test")
    arm.start()  # nobody else moves it in between
    assert plants[0].target.tolist() == [1.0, 0.0]
    plants[0].sag = np.array([0.3, 0.0])  # it was moved out of reach of a lead, 0.2 rad
    plants[0].step(0.0)
    arm.hold()
    assert plants[0].target.tolist() == [0.7, 0.0]


def test_a_reset_puts_the_scene_back_with_its_gripper(arm, plants):
    arm.reset(1)
    assert plants[0].target.tolist() == [1.0, 1.0]
    until(lambda: arm.read().position_rad[0] == 1.0)


def test_pictures_are_drawn_of_a_copy(arm, plants):
    arm.start()
    arm.send(command(2.0, 0.0))
    until(lambda: arm.read().position_rad[0] == 2.0)
    frames = {frame.name: frame.array for frame in arm.frames()}
    assert frames["cube"].tolist() == list(range(7))
    assert frames["front.rgb"][0, 0, 0] == 2
    assert len(plants) == 2
    until(lambda: arm.frames())
    assert len(plants) == 2


def test_a_plant_that_fails_is_told_to_whoever_waits(arm, plants):
    plants[0].error = ValueError("it diverged")
    until(lambda: arm._error is not None)
    with pytest.raises(DeviceError, match="sim: the plant failed: it diverged"):
        arm.wait(1.0)
    plants[0].error = None
    arm.clear("Ada")
    until(lambda: arm.wait(1.0))


def test_whole_plans_are_refused(arm):
    plan = Plan(number=4, start_ns=0, period_ns=1, targets_rad=np.zeros((1, 2)), gripper=np.zeros(1))
    with pytest.raises(DeviceError, match="plan 4: this arm takes targets one by one"):
        arm.send_plan(plan)
