"""What a fine-tuning run is: one frozen configuration, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from robot_rl.algos.config.cloning import BCConfig, Precision
from robot_rl.core.errors import ConfigError, nearest, require
from robot_rl.core.registry import table
from robot_rl.data.reading import OnDamage, ReadingConfig
from robot_rl.train.config import CheckpointConfig, check_device

Size = Literal["tiny", "small", "full"]

EVAL_BATCH = 64
"""Held-out chunks predicted at once."""
MINUTES = 10.0
"""Longest search for the number of updates, where neither that nor minutes are given."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a policy is trained unless the configuration says otherwise."""

    lr: float = 1e-3
    weight_decay: float = 1e-4
    grad_clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of a pretrained LeRobot policy instead of all its weights."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights that the policy leaves open."""
    alpha: float = 16.0
    """Scale of the adapters; their product is scaled by alpha / rank."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "0 or more")
        require(self.alpha > 0, "lora.alpha", self.alpha, "above 0")


@dataclass(frozen=True, kw_only=True)
class ActConfig:
    """The baseline that learns: LeRobot's ACT, without pretrained weights."""

    lrs: tuple[float, ...] = (1e-5, 1e-4, 3e-4)
    """Learning rates tried on validation episodes; 1e-5 is LeRobot's own."""
    batches: tuple[int, ...] = (8, 32)
    """Batch sizes tried with each; 8 is LeRobot's own."""
    trial: float = 0.05
    """Length of each trial, as a share of the policy's training time."""

    def __post_init__(self) -> None:
        require(bool(self.lrs) and min(self.lrs) > 0, "act.lrs", self.lrs, "one or more above 0")
        require(bool(self.batches) and min(self.batches) >= 1, "act.batches", self.batches, "1 or more each")
        require(0 < self.trial <= 1, "act.trial", self.trial, "above 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """A policy, a dataset, and how the one learns from the other."""

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
    policy: str = "small_vla"
    """A policy by name, a folder with a saved one, or a LeRobot model `<owner>/<name>` of the hub."""
    size: Size = "small"
    """Of a policy made anew: `tiny` for tests, `small` for a laptop, `full` as its authors have it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the policy itself, such as `options.depth=4`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    robot: str | None = None
    """A robot that the dataset's joints must fit; nothing is compared if None."""
    horizon: int = 16
    """H, control steps of a chunk: of a policy made anew, and of the errors."""
    history: int | tuple[int, ...] = 0
    """Control steps over which the change of the state is given beside it, to every learner: one number,
    or several, as `[1,4]`; 0: not."""
    last_action: bool = False
    """Gives the last action too, and its change over `history`; `small_vla` predicts distances from it."""
    picture: tuple[int, int] | None = None
    """Height and width that pictures are read at; None: what the policy is made for."""
    cache: str | None = None
    """Folder in which decoded pictures stay for later runs; None: in the run folder, until it ends."""
    cache_gb: float = 8.0
    """Pictures that would take more are decoded again at every use."""
    workers: int = 0
    """Processes that read ahead, for GPUs; their time is not in the comparison."""
    heldout: int = 4
    """Episodes at the end of the dataset that nothing is learned from."""
    stride: int = 4
    """Errors are measured at every so many control steps of the held-out episodes."""
    updates: int | None = None
    """Learner updates; None: as many as fit into `minutes`, or, without both, as many passes over
    the data as did best on validation episodes among the training ones."""
    minutes: float | None = None
    """How long the policy's training takes by the clock, instead of `updates`; the number of updates is
    measured before. With `baselines` the run takes 2 to 3 times as long: ACT has as much processor time."""
    batch: int = 32
    lr: float | None = None
    """Highest learning rate; None: the policy's own."""
    warmup_updates: int = 100
    """Updates over which the learning rate rises, at most a tenth of all."""
    final_lr_ratio: float = 0.01
    """Learning rate at the end of the cosine, as a share of `lr`."""
    weight_decay: float | None = None
    """None: the policy's own."""
    grad_clip: float | None = None
    """Largest norm of the gradient, 0 for any; None: the policy's own."""
    ema_decay: float = 0.999
    """Of the average that acts."""
    accumulate: int = 1
    """Pieces that a batch is taken in, one after another: the memory of one piece, the same update."""
    precision: Precision = "fp32"
    """`bf16`: autocast in bfloat16; `fp16`: in float16 with a scaled loss, on GPUs."""
    baselines: bool = True
    """Also measures nearest neighbours, and trains ACT for the same processor time."""
    act: ActConfig = field(default_factory=ActConfig)
    curve_points: int = 12
    """Looks at the held-out error during training; it is shown, and never chosen by."""
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
        for name in ("horizon", "heldout", "stride", "batch", "torch_threads", "metrics_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2147483647")
        require(self.curve_points >= 0, "curve_points", self.curve_points, "0 or more")
        require(self.updates is None or self.updates >= 1, "updates", self.updates, "1 or more, or null")
        require(self.cache_gb >= 0, "cache_gb", self.cache_gb, "0 or more")
        lags = self.lags
        require(
            all(lag >= 1 for lag in lags) and len(set(lags)) == len(lags),
            "history",
            self.history,
            "0 or more, or a list of different numbers from 1",
        )
        require(self.workers >= 0, "workers", self.workers, "0 or more")
        require(self.minutes is None or self.minutes > 0, "minutes", self.minutes, "above 0")
        if self.updates is not None and self.minutes is not None:
            raise ConfigError(
                f"minutes: got {self.minutes:g} beside updates={self.updates}, allowed: one of the two. "
                "Leave minutes out for the same bytes every time, or updates for a length in time."
            )
        picture = self.picture
        require(picture is None or min(picture) >= 8, "picture", picture, "height and width, 8 or more")
        if self.precision == "fp16" and self.device == "cpu":
            raise ConfigError(
                "precision: got 'fp16' with device=cpu, allowed: fp32, bf16. Use precision=bf16."
            )
        try:
            self.learning(Recipe(), updates=1)  # refuses what the algorithm cannot have
        except ValueError as error:
            raise ConfigError(str(error).removeprefix("bc.algorithm.")) from error
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

    def learning(self, own: Recipe, *, updates: int) -> BCConfig:
        """Returns the settings of the algorithm for so many updates: these, or else the policy's own."""
        return BCConfig(
            lr=own.lr if self.lr is None else self.lr,
            weight_decay=own.weight_decay if self.weight_decay is None else self.weight_decay,
            grad_clip=own.grad_clip if self.grad_clip is None else self.grad_clip,
            warmup_updates=min(self.warmup_updates, updates // 10),
            final_lr_ratio=self.final_lr_ratio,
            ema_decay=self.ema_decay,
            accumulate=self.accumulate,
            precision=self.precision,
        )
