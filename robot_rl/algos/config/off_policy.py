"""Settings of learners from replayed steps: actors, critics, and their models and adversaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from robot_rl.algos.config.cloning import Matmul
from robot_rl.core.errors import require, require_fields

Aggregate = Literal["min", "mean"]
"""How several critics' values become one: `min` (TD3, SAC), or `mean`, without pessimism."""


Value = Literal["mse", "c51", "hl_gauss", "quantile", "gaussian"]
"""What a critic learns: the mean return, or one of four descriptions of its distribution."""


Norm = Literal["none", "layer", "batch"]


Variant = Literal["sac", "na"]


LOG_STD_RANGE = (-20.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critics: what they learn, with which networks, and how their values become one."""

    value: Value = "mse"
    """What is learned of the return: its mean (`mse`, `hl_gauss`) or its distribution."""
    atoms: int = 51
    """Atoms of `c51` and `hl_gauss`, quantiles of `quantile`."""
    low: float = -10.0
    """Smallest return of the atoms."""
    high: float = 10.0
    """Largest return of the atoms."""
    norm: Norm = "none"
    """`layer` (RLPD), `batch` (CrossQ, batch renormalisation)."""
    renorm_warmup: int = 100_000
    """Updates before batch norm becomes batch renormalisation."""
    unit_weights: bool = False
    """Scales the weights of each hidden unit to norm 1 after each update (XQC); with `norm` batch alone."""
    target: Literal["ema", "none"] = "ema"
    """`ema`: critics that follow give the target; `none`: the critics themselves, in one joint pass."""
    tau: float = 0.005
    """Share of the way that targets follow at each update."""
    num: int = 2
    drawn: int = 2
    """Critics drawn for each batch's target (REDQ)."""
    aggregate: Aggregate = "min"
    """How those drawn become the target's value."""
    actor_aggregate: Aggregate = "min"
    """How all become the value that the actor climbs."""
    width: int = 256
    depth: int = 2

    def __post_init__(self) -> None:
        at = "critic."
        require_fields(self, at, "1 or more", "num", "width", "depth", "drawn")
        require(self.drawn <= self.num, at + "drawn", self.drawn, f"at most critic.num, which is {self.num}")
        require_fields(self, at, "2 or more", "atoms")
        require(self.low < self.high, at + "low", self.low, f"below critic.high, which is {self.high}")
        require_fields(self, at, "above 0, at most 1", "tau")
        require_fields(self, at, "0 or more", "renorm_warmup")
        follows, allowed = self.norm != "batch" or self.target == "none", "none with critic.norm batch"
        require(follows, at + "target", self.target, f"{allowed}, which sees present and next rows as one")
        fits, allowed = not self.unit_weights or self.norm == "batch", "false without critic.norm batch"
        require(fits, at + "unit_weights", self.unit_weights, f"{allowed}, which takes the scale out again")


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The actor."""

    kind: Literal["gaussian", "deterministic"] = "gaussian"
    """`gaussian`: squashed, with a temperature (SAC); `deterministic` (TD3)."""
    norm: Norm = "none"
    width: int = 256
    depth: int = 2
    log_std_range: tuple[float, float] = LOG_STD_RANGE
    """Of the Gaussian, before it is squashed."""

    def __post_init__(self) -> None:
        require_fields(self, "actor.", "1 or more", "width", "depth")
        low, high = self.log_std_range
        require(low < high, "actor.log_std_range", self.log_std_range, "the smaller first")


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig:
    """Actor, critics and rates; the defaults are SAC's."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    gamma_step: float = 0.99
    n_step: int = 1
    """Longest window of rewards before the bootstrap, in control steps."""
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    encoder_lr: float = 3e-4
    """Of the encoder of pictures, which learns from the critics' loss; 0 leaves it as it begins."""
    beta1: float = 0.9
    """Adam's memory of the mean gradient (CrossQ: 0.5)."""
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    """Largest norm of a gradient; 0 leaves them."""
    actor_every: int = 1
    """Critic updates per update of actor and temperature."""
    entropy_backup: bool = True
    """Counts the next action's entropy as part of its value."""
    temperature_lr: float = 3e-4
    """0 keeps the initial temperature."""
    initial_temperature: float = 1.0
    target_entropy_per_action: float = -1.0
    """Entropy aimed at, per action element."""
    target_noise_std: float = 0.2
    """Noise on the target's action of a deterministic actor: similar actions get similar values."""
    target_noise_clip: float = 0.5
    matmul: Matmul = "bf16"
    """`bf16`: products of float32 matrices in bfloat16 where the processor can (GPU: TF32); `fp32`: never."""

    def __post_init__(self) -> None:
        at = "algorithm."
        require_fields(self, at, "1 or more", "n_step", "actor_every")
        require_fields(self, at, "above 0", "actor_lr", "critic_lr", "initial_temperature")
        require_fields(self, at, "0 or more", "temperature_lr", "encoder_lr", "weight_decay", "grad_clip")
        require_fields(self, at, "0 or more", "target_noise_std", "target_noise_clip")
        require_fields(self, at, "0 to 1", "gamma_step")
        require_fields(self, at, "0 to below 1", "beta1")
        require_fields(self, at, "bf16, fp32", "matmul")


@dataclass(frozen=True, kw_only=True)
class AdversaryConfig:
    """The adversary: how far it pushes, and its temperature."""

    bound: float = 0.2
    """Largest push, as a share of the env's [-1, 1]; 0 leaves the actor alone."""
    first: float = 1.0
    """Temperature at the beginning, in units of the return; high: random pushes."""
    last: float = 1e-3
    """Temperature at the end of the curriculum, and from there on."""
    curriculum: int = 50_000
    """Learner updates from `first` to `last`, along a geometric line; 0 begins with `last` (RARL)."""
    lr: float = 3e-4
    width: int = 256
    depth: int = 2

    def __post_init__(self) -> None:
        at = "algorithm.adversary."
        require_fields(self, at, "0 to 1", "bound")
        require_fields(self, at, "above 0", "last", "lr")
        require_fields(self, at, "0 or more", "curriculum")
        require_fields(self, at, "1 or more", "width", "depth")
        require(self.first >= self.last, at + "first", self.first, f"at least last, which is {self.last}")

    def temperature(self, updates: int) -> float:
        """Returns the adversary's temperature after so many updates."""
        done = min(1.0, updates / self.curriculum) if self.curriculum else 1.0
        return self.first ** (1.0 - done) * self.last**done


@dataclass(frozen=True, kw_only=True)
class QARLConfig(ActorCriticConfig):
    """The actor-critic, and its adversary."""

    adversary: AdversaryConfig = field(default_factory=AdversaryConfig)


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(ActorCriticConfig):
    """Actor, critics, and the model of one step."""

    credit: Literal["steps", "decisions"] = "steps"
    """`steps`: each action is judged alone, where the model puts it; `decisions`: the sequence as a whole,
    by critics of whole sequences and their J steps, without a model: plain SAC at the slower rate, where
    `n_step` does not count, nor what is of the model."""
    model_lr: float = 1e-3
    model_width: int = 256
    model_depth: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fields(self, "algorithm.", "above 0", "model_lr")
        require_fields(self, "algorithm.", "1 or more", "model_width", "model_depth")


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """How the correction is learned."""

    num_critics: int = 4
    """N; the target takes the smaller of two drawn for each batch."""
    width: int = 256
    """Units of a critic's hidden layer."""
    depth: int = 2
    """A critic's hidden layers."""
    layernorm: bool = True
    """Normalises the critics' hidden layers."""
    n_step: int = 3
    """Longest window of rewards before the bootstrap, in control steps."""
    gamma_step: float = 0.99
    """Discount per control step."""
    tau: float = 0.005
    """Share of the way that targets follow at each update."""
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    weight_decay: float = 0.0
    actor_every: int = 2
    """Critic updates per actor update."""
    critic_warmup: int = 1000
    """Updates of the critics alone, before the head moves from zero."""
    target_noise_std: float = 0.1
    """Noise on the target's action (TD3): similar actions get similar values."""
    target_noise_clip: float = 0.3
    grad_clip: float = 1.0
    """Largest norm of a gradient; 0 switches clipping off."""
    residual_l2: float = 0.0
    """Weight of the squared correction in the actor's loss."""
    privileged: bool = False
    """The critics also read the privileged state (`env.privileged`), which no policy sees (asymmetric
    actor-critic, Pinto et al. 2018)."""
    human_weight: float = 0.0
    """Weight, in the actor's loss, of the squared distance to what a person did, on the steps they drove."""
    matmul: Matmul = "bf16"
    """`bf16`: products of float32 matrices in bfloat16 where the processor can; `fp32`: never."""

    def __post_init__(self) -> None:
        at = "method.algorithm."
        require_fields(self, at, "1 or more", "num_critics", "width", "depth", "n_step", "actor_every")
        require_fields(self, at, "above 0", "actor_lr", "critic_lr")
        require_fields(self, at, "0 or more", "critic_warmup", "target_noise_std", "target_noise_clip")
        require_fields(self, at, "0 or more", "grad_clip", "weight_decay", "residual_l2", "human_weight")
        require_fields(self, at, "0 to 1", "gamma_step")
        require_fields(self, at, "above 0, at most 1", "tau")
        require_fields(self, at, "bf16, fp32", "matmul")


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Which variant learns, sizes and rates."""

    variant: Variant = "sac"
    """`sac`: critics of the noise by TD; `na`: critics of chunks by TD, and of the noise by distillation."""
    num_critics: int = 2
    """Of each kind; the smallest counts."""
    width: int = 256
    """Units of a critic's hidden layer."""
    depth: int = 2
    """A critic's hidden layers."""
    layernorm: bool = True
    """Normalises the critics' hidden layers."""
    gamma_step: float = 0.99
    """Discount per control step."""
    tau: float = 0.005
    """Share of the way that targets follow at each update."""
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    temperature_lr: float = 3e-4
    initial_temperature: float = 0.1
    target_entropy: float = 0.0
    """Entropy aimed at, of the whole latent as a share of its bound (paper: 0)."""
    actor_warmup: int = 0
    """Updates of the critics alone, while the base acts."""
    privileged: bool = False
    """The critics also read the privileged state (`env.privileged`), which no policy sees (asymmetric
    actor-critic, Pinto et al. 2018)."""
    grad_clip: float = 0.0
    """Largest norm of a gradient; 0 switches clipping off."""
    matmul: Matmul = "bf16"
    """`bf16`: products of float32 matrices in bfloat16 where the processor can (GPU: TF32); `fp32`: never."""

    def __post_init__(self) -> None:
        at = "method.algorithm."
        require_fields(self, at, "1 or more", "num_critics", "width", "depth")
        require_fields(self, at, "above 0", "actor_lr", "critic_lr", "temperature_lr", "initial_temperature")
        require_fields(self, at, "0 or more", "actor_warmup", "grad_clip")
        require_fields(self, at, "sac, na", "variant")
        require_fields(self, at, "0 to 1", "gamma_step")
        require_fields(self, at, "above 0, at most 1", "tau")
        require_fields(self, at, "bf16, fp32", "matmul")


@dataclass(frozen=True, kw_only=True)
class ChunkCriticConfig:
    """Sizes of the critics, and how their values become one."""

    num: int = 2
    width: int = 256
    """Units of a hidden layer."""
    depth: int = 2
    """Hidden layers."""
    layernorm: bool = True
    """Normalises the hidden layers."""
    aggregate: Aggregate = "mean"
    """Over the critics: `mean` (Q-chunking), or `min`, with pessimism."""
    prefix: bool = False
    """Values every beginning of a chunk, each with its own target; else the executed actions alone."""
    matmul: Matmul = "bf16"
    """`bf16`: products of float32 matrices in bfloat16 where the processor can (GPU: TF32); `fp32`: never."""

    def __post_init__(self) -> None:
        require_fields(self, "critics.", "1 or more", "num", "width", "depth")
        require_fields(self, "critics.", "mean, min", "aggregate")
        require_fields(self, "critics.", "bf16, fp32", "matmul")


@dataclass(frozen=True, kw_only=True)
class ChunkQConfig:
    """What is learned, and how fast."""

    actor: Literal["best_of_n", "fql"] = "fql"
    """What acts: the flow's chunk that the critics value most, or a one-step student."""
    candidates: int = 8
    """n of `best_of_n`, when acting and in targets (the paper: 32)."""
    alpha: float = 100.0
    """Weight of the student's distance to the flow, a mean over the elements of a chunk; `fql` only."""
    critics: ChunkCriticConfig = field(default_factory=ChunkCriticConfig)
    gamma_step: float = 0.99
    """Discount per control step."""
    tau: float = 0.005
    """Share of the way that the target critics follow at each update."""
    critic_lr: float = 3e-4
    flow_lr: float = 3e-4
    student_lr: float = 3e-4
    flow_ema: float = 0.995
    """Share of the flow's average kept at each update; 0 acts with the weights that learn."""
    grad_clip: float = 1.0
    """Largest norm of a gradient; 0 switches clipping off."""

    def __post_init__(self) -> None:
        at = "method.algorithm."
        require_fields(self, at, "best_of_n, fql", "actor")
        require_fields(self, at, "1 or more", "candidates")
        require_fields(self, at, "0 or more", "alpha", "grad_clip")
        require_fields(self, at, "above 0", "critic_lr", "flow_lr", "student_lr")
        require_fields(self, at, "0 to 1", "gamma_step")
        require_fields(self, at, "above 0, at most 1", "tau")
        require_fields(self, at, "0 to below 1", "flow_ema")
