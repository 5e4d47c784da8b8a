"""Settings of a simulated arm and of its line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from robot_rl.core.errors import require
from robot_rl.real.arm.body import StopConfig
from robot_rl.real.arm.channel import ChannelConfig
from robot_rl.real.arm.servo import ServoConfig
from robot_rl.real.arm.trajectory import TrajectoryRules


@dataclass(frozen=True, kw_only=True)
class SimArmConfig:
    """A simulated arm behind ros2_control's conventions."""

    task: str = "pick_cube"
    """Scene: a name of `robot-rl doctor --list task`."""
    robot: str | None = None
    """Name or file; the task's own if None."""
    plant: str = "mujoco"
    rate_hz: float = 200.0
    """Update rate of the controller manager."""
    seconds: float | None = None
    """How long to serve; until Ctrl-C if None."""
    seed: int = 0
    """Episode at the start, and of all noise."""
    delay_ms: float = 0.0
    """Delay of every message: commands, states and pictures each."""
    jitter_ms: float = 0.0
    """On top, uniform from 0 to this."""
    loss: float = 0.0
    """Share of messages that never arrive. Services and actions lose none."""
    friction_n_m: float = 0.0
    """Dry friction of every joint."""
    encoder_noise_rad: float = 0.0
    """Standard deviation of measured positions."""
    cameras: tuple[str, ...] = ()
    """Of the scene: front, side, overhead, left, right, wrist."""
    camera_hz: float = 15.0
    """Pictures a second of each camera."""
    image_size: tuple[int, int] = (96, 96)
    """Height and width in pixels."""
    object_hz: float = 50.0
    """Rate of tracked objects' poses."""
    namespace: str = ""
    domain_id: int | None = None
    """$ROS_DOMAIN_ID, else 0, if None."""
    transport: Literal["auto", "rclpy", "dds"] = "auto"
    """auto: rclpy where it can be imported, else the pip-only transport."""
    use_sim_time: bool = False
    """Publish /clock and stamp with simulated time, which stands when this process does."""
    velocity_timeout_s: float | None = 0.25
    """After this time without a message the forward velocity controller stops; null goes on for ever, like
    ros2_control's own."""
    active: tuple[str, ...] = ("joint_state_broadcaster", "joint_trajectory_controller", "gripper_controller")
    """Controllers that are active at the start."""
    log: str | None = None
    """File (.npz) for the commands and true states of every cycle; none if None."""
    log_s: float = 600.0
    """Length of the log: the last seconds."""
    stop: StopConfig = field(default_factory=StopConfig)
    trajectory: TrajectoryRules = field(default_factory=TrajectoryRules)
    servo: ServoConfig = field(default_factory=ServoConfig)

    def __post_init__(self) -> None:
        require(1 <= self.rate_hz <= 1000, "rate_hz", self.rate_hz, "1 to 1000")
        require(self.seconds is None or self.seconds > 0, "seconds", self.seconds, "above 0, or null")
        require(self.encoder_noise_rad >= 0, "encoder_noise_rad", self.encoder_noise_rad, "0 or more")
        timeout_s = self.velocity_timeout_s
        require(timeout_s is None or timeout_s > 0, "velocity_timeout_s", timeout_s, "above 0, or null")
        for key in ("camera_hz", "object_hz", "log_s"):
            require(getattr(self, key) > 0, key, getattr(self, key), "above 0")
        fastest = f"at most rate_hz={self.rate_hz:g}"
        is_slower = not self.cameras or self.camera_hz <= self.rate_hz
        require(is_slower, "camera_hz", self.camera_hz, fastest)
        is_log = self.log is None or self.log.endswith(".npz")
        require(is_log, "log", self.log, "a file that ends in .npz, or null")
        _ = self.channel

    @property
    def in_flight_s(self) -> float:
        """How long a measurement is on its way at most: taken, drawn, and sent over the line."""
        drawing_s = 1.0 / self.camera_hz if self.cameras else 0.0
        return drawing_s + 1e-3 * (self.delay_ms + self.jitter_ms)

    @property
    def channel(self) -> ChannelConfig:
        """The line in either direction."""
        return ChannelConfig(delay_ms=self.delay_ms, jitter_ms=self.jitter_ms, loss=self.loss)
