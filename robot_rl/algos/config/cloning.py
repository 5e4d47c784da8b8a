"""Settings of cloning, of distillation, and of the progress critics that filter demonstrations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from robot_rl.core.errors import require_fields

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
        at = "bc.algorithm."
        require_fields(self, at, "above 0", "lr")
        require_fields(self, at, "0 or more", "warmup_updates", "weight_decay", "grad_clip")
        require_fields(self, at, "0 to 1", "final_lr_ratio")
        require_fields(self, at, "0 to below 1", "ema_decay")
        require_fields(self, at, "1 or more", "accumulate")
        require_fields(self, at, "bf16, fp32", "matmul")
        require_fields(self, at, "fp32, bf16, fp16", "precision")


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
        at = "demos.filter.algorithm."
        require_fields(self, at, "above 0, below 1", "gamma_step")
        require_fields(self, at, "2 or more", "folds", "atoms")
        require_fields(self, at, "1 or more", "num", "width", "depth")
        require_fields(self, at, "above 0, at most 1", "tau")
        require_fields(self, at, "above 0", "lr")
        require_fields(self, at, "0 or more", "weight_decay")
        require_fields(self, at, "bf16, fp32", "matmul")


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Which frames of the demonstrations are cloned."""

    updates: int = 0
    """Of the critics; 0 leaves them out, and every frame is cloned."""
    batch: int = 256
    max_fall: float = 0.1
    """Frames within whose chunk the progress falls by more than this are not cloned."""
    min_progress: float = 0.0
    """Frames of less progress are not cloned either: a failure from the start cannot fall. 0 is GR-RL's."""
    algorithm: ProgressConfig = field(default_factory=ProgressConfig)

    def __post_init__(self) -> None:
        require_fields(self, "demos.filter.", "0 or more", "updates")
        require_fields(self, "demos.filter.", "1 or more", "batch")
        require_fields(self, "demos.filter.", "0 to 1", "max_fall")
        require_fields(self, "demos.filter.", "0 to below 1", "min_progress")


@dataclass(frozen=True, kw_only=True)
class DistilConfig:
    """How a student learns to do in one call what the improved policy does in several."""

    updates: int = 0
    """0 keeps the policy as it is."""
    batch: int = 256
    lr: float = 1e-3
    """At first; it falls to 0 as a cosine."""

    def __post_init__(self) -> None:
        require_fields(self, "distil.", "0 or more", "updates")
        require_fields(self, "distil.", "1 or more", "batch")
        require_fields(self, "distil.", "above 0", "lr")
