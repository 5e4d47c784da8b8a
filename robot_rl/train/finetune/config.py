"""What a run of `robot-rl finetune` is: one frozen configuration, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from robot_rl.config import plain
from robot_rl.core.errors import ConfigError, nearest
from robot_rl.core.machine import check_device
from robot_rl.core.registry import table
from robot_rl.data.reading import OnDamage, ReadingConfig
from robot_rl.train.config import CheckpointConfig, RunConfig
from robot_rl.train.finetune.settings import FinetuneSettings, LoraConfig

EVAL_BATCH = 64
"""Held-out chunks predicted at once."""
MINUTES = 10.0
"""Longest search for the number of updates, where neither that nor minutes are given."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(FinetuneSettings):
    """A policy, a dataset, and how the one learns from the other."""

    at: ClassVar[str] = ""

    dataset: str
    """Folder of a LeRobotDataset (v3 or v2.1) or of a sealed store."""
    rename: tuple[str, ...] = ()
    """Names in the dataset that are not LeRobot's, each `<name there>:<LeRobot's name>`: `actions:action`."""
    episodes: str | None = None
    """The only episodes that are read: `0-79,82`; None: all."""
    cameras: tuple[str, ...] | None = None
    """The only cameras that are read; None: all."""
    on_damage: OnDamage = "raise"
    """`skip`: damaged episodes are found first, named and left out."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    robot: str | None = None
    """A robot that the dataset's joints must fit; nothing is compared if None."""
    history: int | tuple[int, ...] = 0
    """Control steps over which the change of the state is given in addition, to every learner: one number,
    or several, as `[1,4]`; 0: not."""
    last_action: bool = False
    """Gives the last action too, and its change over `history`; `small_vla` predicts distances from it."""
    picture: tuple[int, int] | None = None
    """Height and width that pictures are read at; None: what the policy is made for."""
    metrics_rows: int = 200
    """Rows that each learning phase writes into metrics.jsonl."""
    seed: int = 0
    out: str = "runs"
    """Folder in which the run folder is made."""
    device: str = "cpu"
    torch_threads: int = 1
    lease_wait_s: float = 0.0
    """How long to wait for cores that other runs hold."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("torch_threads", "metrics_rows"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        self._require("out", bool(self.out), "a folder: out=runs, or out=. for this one")
        self._require("seed", 0 <= self.seed < 2**31, "0 to 2147483647")
        lags = self.lags
        self._require(
            "history",
            all(lag >= 1 for lag in lags) and len(set(lags)) == len(lags),
            "0 or more, or a list of different numbers from 1",
        )
        self._require(
            "picture", self.picture is None or min(self.picture) >= 8, "height and width, 8 or more"
        )
        self.check_precision(self.device)
        check_device(self.device)
        self.reading.options()  # refuses words that say nothing
        if not Path(self.dataset).is_dir():
            raise ConfigError(
                f"dataset: no folder {self.dataset!r}. Give a LeRobotDataset, or make one with "
                "`robot-rl collect task=pick_cube out=<folder>`."
            )
        if self.robot is not None and self.robot not in table("robot") and not Path(self.robot).is_file():
            raise ConfigError(
                f"robot: no robot and no file named {self.robot!r}.{nearest(self.robot, table('robot'))}"
            )

    @property
    def reading(self) -> ReadingConfig:
        """How the dataset is read."""
        return ReadingConfig(
            rename=self.rename, episodes=self.episodes, cameras=self.cameras, on_damage=self.on_damage
        )

    @property
    def lags(self) -> tuple[int, ...]:
        """What `history` stands for, as a list."""
        if isinstance(self.history, int):
            return (self.history,) if self.history else ()
        return self.history


@dataclass(frozen=True, kw_only=True)
class _StageConfig(FinetuneConfig):
    """The settings of `robot-rl finetune`, with the keys of a training run in its messages."""

    at: ClassVar[str] = "finetune."


def stage_config(config: RunConfig, dataset: Path) -> FinetuneConfig:
    """Returns what is learned from a dataset, and how: the run's section, and what the run has in common."""
    return _StageConfig(
        **{name: getattr(config.finetune, name) for name in plain(config.finetune)},
        **{name: getattr(config.demos.read, name) for name in plain(config.demos.read)},
        dataset=str(dataset),
        picture=config.env.image_size if config.env.cameras else None,
        metrics_rows=config.metrics_rows,
        seed=config.seed,
        device=config.device,
        torch_threads=config.torch_threads,
        checkpoint=config.checkpoint,
    )
