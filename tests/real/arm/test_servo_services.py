"""What the simulated MoveIt Servo is told besides commands: their type, and to pause."""

import numpy as np

from robot_rl.real.arm.servo import PoseTarget, Servo, Twist

TWIST = Twist(0, np.array([0.5, 0, 0, 0, 0, 0]))
POSE = PoseTarget(0, np.array([0.1, 0, 0, 1.0, 0, 0, 0]))


def taken(servo: Servo, *commands: Twist | PoseTarget) -> int:
    """Returns how many of some commands are taken."""
    before = servo.num_refused
    for command in commands:
        servo.take(command)
    return len(commands) - (servo.num_refused - before)


def test_only_commands_of_the_type_that_was_switched_to_are_taken() -> None:
    servo = Servo()
    assert taken(servo, TWIST, POSE) == 2
    servo.switch(Twist)
    assert taken(servo, TWIST, POSE, POSE) == 1
    servo.switch(PoseTarget)
    assert taken(servo, TWIST, POSE, POSE) == 2


def test_a_paused_servo_takes_nothing_and_forgets_what_it_had(make_loop) -> None:
    loop, servo = make_loop(), Servo()
    servo.take(TWIST)
    servo.pause(is_on=True)
    assert taken(servo, TWIST, POSE) == 0
    assert servo.update(loop.cycle(servo_sink := Sink()), loop.body) is None
    assert servo_sink.cycles == 1
    servo.pause(is_on=False)
    assert taken(servo, TWIST) == 1


class Sink:
    """A controller that commands nothing."""

    def __init__(self) -> None:
        self.cycles = 0

    def update(self, cycle, body) -> None:
        self.cycles += 1
