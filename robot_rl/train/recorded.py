"""Settings of recorded episodes: demonstrations, cloning, experience that is kept and reused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from robot_rl.algos.config.cloning import BCConfig, FilterConfig
from robot_rl.core.errors import ConfigError, require
from robot_rl.data.reading import ReadingConfig
from robot_rl.train.finetune.settings import LoraConfig


@dataclass(frozen=True, kw_only=True)
class DemosConfig:
    """Demonstrations: collected from the task's scripted expert, or read from a dataset."""

    episodes: int = 100
    """Episodes started; failures stay in, they are what the critic learns contrast from."""
    bias_m: float = 0.0
    """Of our tasks: offset of the expert's aim from the target, along world x."""
    noise_m: float = 0.01
    """Of our tasks: standard deviation of its aim between episodes, in x and y."""
    disturb: float = 0.0
    """Standard deviation of a slow push on its actions, the gripper's excepted, in 7 of 10 episodes. Kept is
    what the expert wanted (DART), which is cloned; a replay gets what was executed."""
    path: str | None = None
    """Folder of an existing dataset (`robot-rl collect`); nothing is collected then."""
    read: ReadingConfig = field(default_factory=ReadingConfig)
    """How `path` is read: `demos.read.episodes=0-79`, `demos.read.on_damage=skip`."""
    by: tuple[Literal["demo", "sim", "real", "human", "world"], ...] = ()
    """Whose steps of `path` are cloned: `human` for a person's corrections alone; empty: all."""
    mirror: bool = False
    """Each episode's left-right mirror image is a demonstration too."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Which frames are cloned; all of them are left to what learns from failures."""

    def __post_init__(self) -> None:
        require(self.episodes >= 1, "demos.episodes", self.episodes, "1 or more")
        require(abs(self.bias_m) <= 0.2, "demos.bias_m", self.bias_m, "-0.2 to 0.2 metres")
        require(0 <= self.noise_m <= 0.2, "demos.noise_m", self.noise_m, "0 to 0.2 metres")
        require(0 <= self.disturb <= 1, "demos.disturb", self.disturb, "0 to 1")
        _check_read(self.read, self.path is not None, "demos.read", "demos.path=<dataset>")
        if self.by and self.path is None:
            raise ConfigError(
                f"demos.by: got {', '.join(self.by)}, and the expert makes every demonstration of this run. "
                "Name a recording, demos.path=<dataset>, or leave demos.by out."
            )


@dataclass(frozen=True, kw_only=True)
class CloningSettings:
    """Behaviour cloning of the base policy."""

    updates: int = 4000
    """0 leaves the base as it is drawn: for methods that learn it themselves, as `chunked` does."""
    batch: int = 256
    algorithm: BCConfig = field(default_factory=BCConfig)
    policy: str | None = None
    """Folder of a base that is taken as it is: one that an earlier run cloned (`<run>/policy/base`), a small
    VLA (`<finetune run>/policy`), or what LeRobot saved (`<output_dir>/checkpoints/last/pretrained_model`).
    The section `policy` is not read then."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that PPO and GRPO train in the place of all weights of LeRobot's SmolVLA, pi0 or pi0.5."""
    encoder: str | None = None
    """File of tensors that the image encoders begin with: `policy.safetensors` of a policy with the same
    cameras and encoders, or those of one encoder, which every camera takes. Or `<file>.onnx`: a frozen
    encoder in the place of `policy.image_encoder`, see docs/policies.md."""

    def __post_init__(self) -> None:
        require(self.updates >= 0, "bc.updates", self.updates, "0 or more")
        require(self.batch >= 1, "bc.batch", self.batch, "1 or more")
        is_fine = self.lora.rank == 0 or self.policy is not None
        require(is_fine, "bc.lora.rank", self.lora.rank, "0 without bc.policy=<folder of LeRobot>")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Experience on the disk: what this run records, and what it reuses of earlier runs."""

    record: bool = True
    """Keep every control step of RL, and of DAgger with its labels, in `experience/` of the run folder, safe
    from a crash."""
    reuse: tuple[str, ...] = ()
    """Earlier experience: run folders that have an `experience/`, stores or LeRobot datasets."""
    read: ReadingConfig = field(default_factory=ReadingConfig)
    """How each of `reuse` is read, where it is a dataset or a sealed store."""
    reuse_ratio: float = 0.25
    """Share of each batch that comes from `reuse`, if there is any."""

    def __post_init__(self) -> None:
        require(0 < self.reuse_ratio < 1, "replay.reuse_ratio", self.reuse_ratio, "above 0, below 1")
        _check_read(self.read, bool(self.reuse), "replay.read", "replay.reuse=<dataset>")
        for path in self.reuse:
            if not Path(path).is_dir():
                raise ConfigError(
                    f"replay.reuse: no folder {path!r}. Give the folder of an earlier run that had "
                    "replay.record=true, a store, or a dataset."
                )


def _check_read(read: ReadingConfig, is_given: bool, at: str, remedy: str) -> None:
    """Refuses options of reading without a dataset to read."""
    if read.options(f"{at}.") and not is_given:
        raise ConfigError(f"{at}: says how a dataset is read, and there is none. Name it: {remedy}")
