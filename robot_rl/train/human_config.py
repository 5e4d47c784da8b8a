"""Settings of the person at the arm of a run, and of the script that imitates one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from robot_rl.core.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True)
class ScriptedPersonConfig:
    """Attention and skill of the scripted person."""

    patience_s: float = 0.8
    """Without progress for so long, the episode looks bad; at once where the gripper closes too early."""
    reaction_s: float = 0.3
    """From seeing that to taking over."""
    lag_s: float = 0.1
    """Between what the person sees and what their hand does."""
    speed: float = 0.8
    """Share of the expert's speed."""
    noise: float = 0.1
    """Standard deviation of the hand, in the env's [-1, 1], without the gripper."""
    misjudges_m: float = 0.005
    """Standard deviation between episodes of where they think the object is."""
    gives_back: float = 0.5
    """Progress after which they let go."""
    longest_s: float = 5.0
    """They let go after so long in any case."""
    attention: float = 1.0
    """Probability of watching an episode, at first."""
    half_life_s: float = 600.0
    """Arm time in which that probability halves."""

    def __post_init__(self) -> None:
        for name in ("patience_s", "speed", "gives_back", "longest_s", "half_life_s"):
            require(getattr(self, name) > 0, f"human.scripted.{name}", getattr(self, name), "above 0")
        for name in ("reaction_s", "lag_s", "noise", "misjudges_m"):
            require(getattr(self, name) >= 0, f"human.scripted.{name}", getattr(self, name), "0 or more")
        require(0 <= self.attention <= 1, "human.scripted.attention", self.attention, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class HumanConfig:
    """The person at the arm."""

    input: Literal["none", "scripted", "keyboard", "gamepad", "leader"] = "none"
    """Their input device: none; a script that imitates a person; keyboard, gamepad, or a leader arm."""
    reward: Literal["task", "key", "classifier"] = "task"
    """The judge of success: the task's predicate, the person, a classifier of pictures."""
    classifier: str | None = None
    """Folder that `robot-rl reward train` wrote, for reward=classifier."""
    reset: Literal["automatic", "assisted"] = "automatic"
    """Who puts the scene back: a program, or the person, who then confirms."""
    ratio: float = 0.25
    """Share of each batch that comes from the steps a person drove."""
    leader: str = ""
    """LeRobot's name of the leader arm, for input=leader: so101_leader, koch_leader, ..."""
    leader_options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Fields of LeRobot's own config class of it: port, id, ..."""
    scripted: ScriptedPersonConfig = field(default_factory=ScriptedPersonConfig)

    def __post_init__(self) -> None:
        require(0 <= self.ratio < 1, "human.ratio", self.ratio, "0 to below 1")
        if self.reward == "classifier" and self.classifier is None:
            raise ConfigError(
                "human.classifier: missing, human.reward=classifier needs it. "
                "`robot-rl reward train data=<folder> out=<folder>` makes one."
            )
        if self.input == "leader" and not self.leader:
            raise ConfigError("human.leader: missing, human.input=leader needs it: human.leader=so101_leader")
        if self.input == "none" and (self.reward == "key" or self.reset == "assisted"):
            raise ConfigError(
                f"human.input: got 'none' with human.reward={self.reward} and human.reset={self.reset}, "
                "which need a person. Use human.input=keyboard, or human.reward=task human.reset=automatic."
            )
