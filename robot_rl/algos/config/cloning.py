"""Settings of what learns from recorded chunks: cloning, distilling, and how far a frame is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from robot_rl.core.errors import require

Matmul = Literal["bf16", "fp32"]
"""How products of float32 matrices are computed, see `matmul_precision`."""


Precision = Literal["fp32", "bf16", "fp16"]
"""What a loss and its gradient are computed in, by autocast."""


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """How the base policy is cloned."""

    lr: float = 1e-3
    """Highest learning rate."""
    warmup_updates: int = 100
    """Updates over which the learning rate rises to `lr`."""
    final_lr_ratio: float = 0.01
    """Learning rate at the end of the cosine, as a share of `lr`."""
    weight_decay: float = 1e-6
    ema_decay: float = 0.995
    """Share of the average kept at each update; the average of the first updates is shorter."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 switches clipping off."""
    matmul: Matmul = "bf16"
    """`bf16`: products of float32 matrices in bfloat16 where the processor can; `fp32`: never."""
    accumulate: int = 1
    """Pieces that a batch is taken in, one after another: the memory of one piece, the same update."""
    precision: Precision = "fp32"
    """`bf16` and `fp16` compute the loss by autocast in half precision; `fp16` scales it (GPUs)."""

    def __post_init__(self) -> None:
        require(self.lr > 0, "bc.algorithm.lr", self.lr, "above 0")
        require(self.warmup_updates >= 0, "bc.algorithm.warmup_updates", self.warmup_updates, "0 or more")
        require(0 <= self.final_lr_ratio <= 1, "bc.algorithm.final_lr_ratio", self.final_lr_ratio, "0 to 1")
        require(self.weight_decay >= 0, "bc.algorithm.weight_decay", self.weight_decay, "0 or more")
        require(0 <= self.ema_decay < 1, "bc.algorithm.ema_decay", self.ema_decay, "0 to below 1")
        require(self.grad_clip >= 0, "bc.algorithm.grad_clip", self.grad_clip, "0 or more")
        require(self.matmul in ("bf16", "fp32"), "bc.algorithm.matmul", self.matmul, "bf16, fp32")
        require(self.accumulate >= 1, "bc.algorithm.accumulate", self.accumulate, "1 or more")
        kinds = get_args(Precision)
        require(self.precision in kinds, "bc.algorithm.precision", self.precision, ", ".join(kinds))


@dataclass(frozen=True, kw_only=True)
class ProgressConfig:
    """What the critics are, and how fast they learn."""

    gamma_step: float = 0.98
    """Discount per control step."""
    folds: int = 2
    """Parts of the episodes; those of a part are valued by critics of the others."""
    num: int = 2
    """Critics of a part."""
    width: int = 256
    depth: int = 2
    atoms: int = 51
    """Values between 0 and 1, whose probabilities are learned (C51)."""
    tau: float = 0.01
    """Share of the way that the target critics follow at each update."""
    lr: float = 3e-4
    weight_decay: float = 0.0
    matmul: Matmul = "bf16"
    """`bf16`: products of float32 matrices in bfloat16 where the processor can (GPU: TF32); `fp32`: never."""

    def __post_init__(self) -> None:
        at = "demos.filter.algorithm"
        require(0 < self.gamma_step < 1, f"{at}.gamma_step", self.gamma_step, "above 0, below 1")
        require(self.folds >= 2, f"{at}.folds", self.folds, "2 or more")
        for name in ("num", "width", "depth"):
            require(getattr(self, name) >= 1, f"{at}.{name}", getattr(self, name), "1 or more")
        require(self.atoms >= 2, f"{at}.atoms", self.atoms, "2 or more")
        require(0 < self.tau <= 1, f"{at}.tau", self.tau, "above 0, at most 1")
        require(self.lr > 0, f"{at}.lr", self.lr, "above 0")
        require(self.weight_decay >= 0, f"{at}.weight_decay", self.weight_decay, "0 or more")
        require(self.matmul in ("bf16", "fp32"), f"{at}.matmul", self.matmul, "bf16, fp32")


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Which frames of the demonstrations are cloned."""

    updates: int = 0
    """Of the critics; 0 leaves them out, and every frame is cloned."""
    batch: int = 256
    max_fall: float = 0.1
    """Frames within whose chunk the progress falls by more than this are not cloned."""
    min_progress: float = 0.0
    """Nor are frames that are less far: what fails from the start has nothing to lose. 0 is GR-RL's."""
    algorithm: ProgressConfig = field(default_factory=ProgressConfig)

    def __post_init__(self) -> None:
        require(self.updates >= 0, "demos.filter.updates", self.updates, "0 or more")
        require(self.batch >= 1, "demos.filter.batch", self.batch, "1 or more")
        require(0 <= self.max_fall <= 1, "demos.filter.max_fall", self.max_fall, "0 to 1")
        require(0 <= self.min_progress < 1, "demos.filter.min_progress", self.min_progress, "0 to below 1")


@dataclass(frozen=True, kw_only=True)
class DistilConfig:
    """How a student learns to do in one call what the improved policy does in several."""

    updates: int = 0
    """0 keeps the policy as it is."""
    batch: int = 256
    lr: float = 1e-3
    """At first; it falls to 0 as a cosine."""

    def __post_init__(self) -> None:
        require(self.updates >= 0, "distil.updates", self.updates, "0 or more")
        require(self.batch >= 1, "distil.batch", self.batch, "1 or more")
        require(self.lr > 0, "distil.lr", self.lr, "above 0")
