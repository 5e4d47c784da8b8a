"""What a driver is. It runs in a process of its own (`robot_rl.real.drivers.host`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from robot_rl.real.messages import ArmState, Command, Frame, Plan


class Driver(Protocol):
    """One arm with its gripper, as its vendor or ros2_control offers it.

    No method blocks for longer than a control period but `wait`, `connect`, `start`, `stop`, `clear`,
    `reset` and `close`. Errors are DeviceErrors; the host stops the arm on any of them. Limits are the
    supervisor's; a driver still refuses what is not finite or of another length.

    The host calls from four threads: `wait` on one, `frames` on another, `start`, `stop`, `clear` and
    `reset` one after another on a third, all else on its own. So `hold` works while `start` waits; a
    `start` that does not come back for 5 s is given up for a `stop`, which a fifth thread then does.
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
        ...

    def wait(self, timeout_s: float) -> bool:
        """Waits for a newer state, or a new stop reason; returns whether there is one."""
        ...

    def read(self) -> ArmState | None:
        """Returns the newest state; None before the first. The same object means nothing new."""
        ...

    def frames(self) -> Sequence[Frame]:
        """Returns the camera pictures and tracked poses that are new since the last call."""
        ...

    def start(self) -> None:
        """Makes the arm listen to commands: activates its controller, where it has one."""
        ...

    def send(self, command: Command) -> None:
        """Sends one target."""
        ...

    def send_plan(self, plan: Plan) -> None:
        """Sends a whole chunk, for arms that interpolate by themselves (JointTrajectory)."""
        ...

    def hold(self) -> None:
        """Makes the arm stay where it is, now: the last command is overridden, goals are cancelled.

        Joints near their last target stay at that, so that a loaded arm does not sink. The host holds an
        arm again and again until it is seen at rest: without a command between, at the same place.
        """
        ...

    def stop(self, reason: str) -> None:
        """Holds and takes the arm out of our control: its controllers are deactivated.

        The host tries one that fails again, until it is done.
        """
        ...

    def clear(self, by: str) -> None:
        """Asks the arm to lift its own protective stop; only ever on the word of a person."""
        ...

    def reset(self, seed: int) -> None:
        """Puts the scene of a simulated arm back, to the start of episode `seed`.

        Raises:
            DeviceError: a real scene is put back by a person.
        """
        ...

    def close(self) -> None:
        """Ends the connection; the arm stays where it is, its servos stiff."""
        ...
