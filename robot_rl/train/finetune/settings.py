"""Settings of fine-tuning, both as a run and as a stage of one; without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from robot_rl.algos.config.cloning import BCConfig, Precision
from robot_rl.core.errors import ConfigError, require

Size = Literal["tiny", "small", "full"]


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
class Recipe:
    """How a policy is trained unless the configuration says otherwise."""

    lr: float = 1e-3
    weight_decay: float = 1e-4
    grad_clip: float = 1.0


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
class FinetuneSettings:
    """A policy, how it learns from episodes, and what it is compared with."""

    at: ClassVar[str] = "finetune."
    """Begins the keys of messages."""

    policy: str = "small_vla"
    """A policy by name, a folder with a saved one, or a LeRobot model `<owner>/<name>` of the hub."""
    size: Size = "small"
    """Of a new policy: `tiny` for tests, `small` for a laptop, `full` as its authors have it."""
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Settings of the policy itself, such as `options.depth=4`."""
    horizon: int = 16
    """H, control steps of a chunk: of a new policy, and of the errors."""
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

    def __post_init__(self) -> None:
        for name in ("horizon", "heldout", "stride", "batch"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        for name in ("curve_points", "cache_gb", "workers"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._require("updates", self.updates is None or self.updates >= 1, "1 or more, or null")
        self._require("minutes", self.minutes is None or self.minutes > 0, "above 0")
        if self.updates is not None and self.minutes is not None:
            raise ConfigError(
                f"{self.at}minutes: got {self.minutes:g} with {self.at}updates={self.updates}, allowed: "
                "one of the two. Leave minutes out for the same bytes every time, or updates for a length in "
                "time."
            )
        try:
            self.learning(Recipe(), updates=1)  # refuses what the algorithm cannot have
        except ValueError as error:
            raise ConfigError(f"{self.at}{str(error).removeprefix('bc.algorithm.')}") from error

    def check_precision(self, device: str) -> None:
        """Refuses what the learner's device cannot compute in."""
        if self.precision == "fp16" and device == "cpu":
            raise ConfigError(
                f"{self.at}precision: got 'fp16' with device=cpu, allowed: fp32, bf16. Use "
                f"{self.at}precision=bf16."
            )

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

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        require(holds, f"{self.at}{name}", getattr(self, name), allowed)
