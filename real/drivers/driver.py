"""The interface of a driver, which runs in its own process (`robot_rl.real.drivers.host`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from robot_rl.real.messages import ArmState, Command, Frame, Plan


class Driver(Protocol):
    """One arm with its gripper, as its vendor or ros2_control offers it.

    Only `wait`, `connect`, `start`, `stop`, `clear`, `reset` and `close` may block for longer than a
    control period. Errors are DeviceErrors; the host stops the arm on any of them. The supervisor keeps the
    limits; a driver still refuses targets that are not finite or of another length.

    The host calls from four threads: `wait` on one, `frames` on another, `start`, `stop`, `clear` and
    `reset` one after another on a third, the rest on its own. So `hold` works while `start` waits. A
    `start` that does not return for 5 s is given up for a `stop`, which a fifth thread then does.
    """

    @property
    def joint_names(self) -> tuple[str, ...]:
        """Arm joints in the order of every array here."""
        ...

    def connect(self) -> None:
        """Finds the arm, checks that its joints are the station's, and leaves it at rest.

        Raises:
            DeviceError: names what is missing and what to start.
        """

    def wait(self, timeout_s: float) -> bool:
        """Waits for a newer state, or a new stop reason; returns whether there is one."""
        ...

    def read(self) -> ArmState | None:
        """Returns the newest state, None before the first; the same object until there is a newer one."""
        ...

    def frames(self) -> Sequence[Frame]:
        """Returns the camera pictures and tracked poses that are new since the last call."""
        ...

    def start(self) -> None:
        """Makes the arm listen to commands: activates its controller, where it has one."""

    def send(self, command: Command) -> None:
        """Sends one target."""

    def send_plan(self, plan: Plan) -> None:
        """Sends a whole chunk, for arms that interpolate by themselves (JointTrajectory)."""

    def hold(self) -> None:
        """Makes the arm stay where it is, now: overrides the last command, cancels goals.

        Joints near their last target stay at that, so that a loaded arm does not sink. The host repeats a
        hold until the arm is seen at rest: without a command between, at the same place.
        """

    def stop(self, reason: str) -> None:
        """Holds and takes the arm out of our control: its controllers are deactivated.

        The host repeats a stop that fails until it is done.
        """

    def clear(self, by: str) -> None:
        """Asks the arm to lift its own protective stop; only a person orders that."""

    def reset(self, seed: int) -> None:
        """Puts the scene of a simulated arm back, to the start of episode `seed`.

        Raises:
            DeviceError: a real scene is put back by a person.
        """

    def close(self) -> None:
        """Ends the connection; the arm stays where it is, its servos stiff."""
