"""Settings of what differs between episodes, and from the model; without MuJoCo."""

from __future__ import annotations

from dataclasses import dataclass

from robot_rl.core.errors import ConfigError, require

Range = tuple[float, float]
MOST_DELAY_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class DomainConfig:
    """What each episode draws of the arm, of what is sensed and of the line (domain randomisation).

    A range is lowest and highest value; those of scales are of the model's own numbers, so they also vary a
    robot file that was measured. `curriculum` begins with none of it. docs/transfer.md
    """

    friction: Range = (0.0, 0.0)
    """Dry friction added to each arm joint, as a share of the joint's largest effort."""
    damping: Range = (1.0, 1.0)
    """Scale of the damping of each arm joint and of its servo."""
    stiffness: Range = (1.0, 1.0)
    """Scale of the stiffness of each arm servo."""
    armature: Range = (1.0, 1.0)
    """Scale of the armature of each arm joint."""
    payload_kg: Range = (0.0, 0.0)
    """Mass added to the body of the tool, whose weight the arm's controller does not compensate."""
    joint_noise_rad: float = 0.0
    """Standard deviation of each observed arm joint position, in each step; m of a slide. The observed tool
    moves with the joints, as it is computed from them."""
    joint_bias_rad: float = 0.0
    """Largest error of each arm joint's encoder, the same for a whole episode, likewise."""
    object_noise_m: float = 0.0
    """Standard deviation of each observed coordinate of a thing, in each step; rad of a hinge."""
    object_bias_m: float = 0.0
    """Largest error of each of them, the same for a whole episode."""
    delay_steps: int = 0
    """Most control steps between a command and its effect; each episode draws 0 to this."""
    assist_n: float = 0.0
    """With `curriculum`: largest virtual force that pulls the task's thing to its goal, which is withdrawn as
    the ranges widen. Evaluation has none."""
    curriculum: bool = False
    """Widen all ranges, and those of `env.looks`, step by step while training succeeds, and narrow them when
    it fails; evaluation, demonstrations and whole-episode sources have the full ranges. Without it, so has
    training."""
    scale: float = 0.0
    """Of the curriculum's beginning: 0 is no difference, 1 the full ranges."""
    step: float = 0.01
    """How much the scale changes at once."""
    window: int = 200
    """Episodes after which the scale may change, by their mean success."""
    widen_above: float = 0.95
    narrow_below: float = 0.9

    def __post_init__(self) -> None:
        for name in ("friction", "payload_kg", "damping", "stiffness", "armature"):
            low, high = getattr(self, name)
            lowest = 0.0 if name in ("friction", "payload_kg") else 0.01
            allowed = f"lowest and highest, from {lowest:g}, such as [{lowest + 0.1:g}, {lowest + 1.1:g}]"
            require(lowest <= low <= high, f"env.domain.{name}", [low, high], allowed)
        for name in ("joint_noise_rad", "joint_bias_rad", "object_noise_m", "object_bias_m", "assist_n"):
            require(getattr(self, name) >= 0, f"env.domain.{name}", getattr(self, name), "0 or more")
        steps = self.delay_steps
        require(0 <= steps <= MOST_DELAY_STEPS, "env.domain.delay_steps", steps, f"0 to {MOST_DELAY_STEPS}")
        require(0 <= self.scale <= 1, "env.domain.scale", self.scale, "0 to 1")
        require(0 < self.step <= 1, "env.domain.step", self.step, "above 0, at most 1")
        require(self.window >= 1, "env.domain.window", self.window, "1 or more")
        low, high = self.narrow_below, self.widen_above
        require(0 <= low <= high <= 1, "env.domain.narrow_below", low, f"0 to widen_above={high:g}")
        if self.assist_n and not self.curriculum:
            raise ConfigError(
                f"env.domain.assist_n: got {self.assist_n:g}, allowed: 0 without env.domain.curriculum=true, "
                "which withdraws the force."
            )

    @property
    def is_on(self) -> bool:
        """Whether anything differs."""
        return self != DomainConfig()
