"""Settings of PPO: from rollouts, and offline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from robot_rl.algos.config.cloning import Matmul
from robot_rl.algos.config.off_policy import ChunkCriticConfig
from robot_rl.core.errors import require, require_fields

Reduction = Literal["per_step", "joint", "single"]
_WORLDS = {True: "the folder of a world model with scorer=world", False: "none but with scorer=world"}
"""Of a gate that asks a world model, or does not."""


Regulariser = Literal["none", "w2", "bc"]
"""What keeps the policy near its first weights: `w2`, the same chunk from the same noise (ReinFlow);
`bc`, the imitation loss on that one's chunks."""


@dataclass(frozen=True, kw_only=True)
class ChainPPOConfig:
    """How the policy learns from its rollouts."""

    reduction: Reduction = "single"
    """What the ratio is of, see `losses.chain_ratio`."""
    gamma_step: float = 0.99
    """Discount per control step."""
    lam: float = 0.95
    """Lambda of the advantages, per decision."""
    actor_lr: float = 1e-4
    critic_lr: float = 1e-3
    weight_decay: float = 0.0
    epochs: int = 5
    """Passes over each rollout."""
    batch: int = 512
    """Decisions in a minibatch, at most."""
    clip: float = 0.05
    """Range of the ratio of the last, least noisy transition. Log-probabilities are means over the
    elements of a chunk: the ratio is that root of the density's."""
    clip_high: float | None = None
    """Range above 1, where it is another; None: the same."""
    clip_first: float | None = None
    """Range of the first, noisiest transition of `per_step`, from which it rises; None: the same."""
    clip_rate: float = 3.0
    """How late it rises."""
    denoising_discount: float = 1.0
    """Weight of each transition relative to the next, less noisy one (`per_step`)."""
    target_kl: float | None = 0.02
    """KL of a minibatch, on the ratio's scale, beyond which the policy waits for the next rollout; or null.
    It grows with the square of the ratio's root: 0.001 of a mean over 20 elements is 0.4 of the chunk."""
    stale_limit: float = 5.0
    """Largest weight of a decision that older weights than the learner's made. It is weighed by how probable
    the learner made it as it came, on the ratio's scale, and ratios count from there (decoupled PPO, Hilton
    et al. 2022; AReaL, Fu et al. 2025, which leaves out what is above its limit: here it is clamped)."""
    critic_warmup: int = 1
    """Rollouts from which the value alone learns, at first; what several sources bring in a turn is one."""
    value_clip: float | None = None
    """Largest move of a value away from that before the updates that still counts (PPO2); or null."""
    privileged: bool = False
    """The value also reads the privileged state (`env.privileged`), which no policy sees (asymmetric
    actor-critic, Pinto et al. 2018)."""
    scale_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    entropy_weight: float = 0.0
    regulariser: Regulariser = "none"
    regulariser_weight: float = 0.1
    grad_clip: float = 1.0
    """Largest norm of a gradient; 0 switches clipping off."""
    width: int = 256
    """Units of a hidden layer of the value."""
    depth: int = 2
    """Its hidden layers."""
    matmul: Matmul = "bf16"
    """Of the value's products; those of the policy stay float32, or the ratio would not begin at 1."""

    def __post_init__(self) -> None:
        at = "method.algorithm."
        require_fields(self, at, "per_step, joint, single", "reduction")
        require_fields(self, at, "none, w2, bc", "regulariser")
        require_fields(self, at, "1 or more", "epochs", "batch", "width", "depth")
        require_fields(self, at, "above 0", "actor_lr", "critic_lr", "stale_limit")
        require_fields(self, at, "0 to 1", "gamma_step", "lam", "denoising_discount")
        require_fields(self, at, "0 or more", "weight_decay", "critic_warmup", "entropy_weight")
        require_fields(self, at, "0 or more", "regulariser_weight", "grad_clip", "clip_rate")
        clips = (name for name in ("clip", "clip_high", "clip_first") if getattr(self, name) is not None)
        require_fields(self, at, "above 0, below 1", *clips)
        require_fields(self, at, "above 0, or null for none", "target_kl", "value_clip")
        if self.clip_first is not None:
            require(self.clip_high is None, at + "clip_high", self.clip_high, "null with clip_first")
        if self.reduction != "per_step":
            unless, discount = "without reduction=per_step", self.denoising_discount
            require(self.clip_first is None, at + "clip_first", self.clip_first, f"null {unless}")
            require(discount == 1, at + "denoising_discount", discount, f"1 {unless}")


@dataclass(frozen=True, kw_only=True)
class PlainPPOConfig:
    """How a Gaussian policy learns from its control steps; defaults of rsl_rl where it has them."""

    gamma_step: float = 0.99
    """Discount per control step."""
    lam: float = 0.95
    """Lambda of the advantages, per control step."""
    lr: float = 1e-3
    """Of policy and value; the first one, with `target_kl`."""
    target_kl: float | None = 0.01
    """KL of a minibatch that the learning rate aims at: above twice of it the rate is divided by 1.5, below
    half of it multiplied by 1.5. null leaves the rate as it is."""
    lr_range: tuple[float, float] = (1e-5, 1e-2)
    """Least and largest rate of that rule."""
    epochs: int = 5
    """Passes over each rollout."""
    minibatches: int = 4
    """Parts of a rollout that are an update each."""
    clip: float = 0.2
    """Range of the ratio."""
    value_clip: float | None = 0.2
    """Largest move of a value away from that before the updates that still counts (PPO2); or null."""
    entropy_weight: float = 0.0
    learns_std: bool = True
    """The standard deviation learns; else it stays as it begins, policy.initial_std."""
    grad_clip: float = 1.0
    """Largest norm of the gradient of the policy, and of that of the value; 0 switches clipping off."""
    weight_decay: float = 0.0
    scale_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    privileged: bool = False
    """The value also reads the privileged state (`env.privileged`), which no policy sees (asymmetric
    actor-critic, Pinto et al. 2018)."""
    width: int = 128
    """Units of a hidden layer of the value."""
    depth: int = 2
    """Its hidden layers."""
    matmul: Matmul = "bf16"
    """Of the value's products; those of the policy stay float32, or the ratio would not begin at 1."""

    def __post_init__(self) -> None:
        at = "method.algorithm."
        require_fields(self, at, "1 or more", "epochs", "minibatches", "width", "depth")
        require_fields(self, at, "above 0", "lr")
        require_fields(self, at, "0 to 1", "gamma_step", "lam")
        require_fields(self, at, "0 or more", "entropy_weight", "weight_decay", "grad_clip")
        require_fields(self, at, "above 0, below 1", "clip")
        require_fields(self, at, "above 0, or null for none", "target_kl", "value_clip")
        low, high = self.lr_range
        require(0 < low <= high, at + "lr_range", self.lr_range, "two numbers above 0, the smaller first")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(ChainPPOConfig):
    """How it learns from groups of episodes; defaults of SimpleVLA-RL (Li et al. 2025) where it has them.

    What is of the value (`gamma_step`, `lam`, `critic_*`, `value_clip`, `width`, `depth`, `matmul`) counts
    with method.reward=process alone. Deviations: every episode weighs the same (`returns.episode_weight`);
    the published clip is of the ratio of single tokens, each an element of an action. So it is here with
    process `token` and `per_step`; on a chain, as in pi_RL, it is of the mean log-probability over the
    elements of the executed actions, a root of the chunk's.
    """

    clip: float = 0.2
    clip_high: float | None = 0.28
    target_kl: float | None = None


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """When a candidate is judged, and how."""

    every: int = 100
    """Updates that make a candidate; the last one may have had fewer."""
    margin: float | None = 0.05
    """By how much of its size the score has to rise; null accepts every candidate."""
    scorer: Literal["critics", "simulator", "world"] = "simulator"
    """Mean Q in states of the data; the success of episodes, whose control steps are counted; or that of
    imagined episodes, in a world model that is believed."""
    world: str | None = None
    """Folder of the world model, for scorer=world."""
    states: int = 1024
    """Of the data, for scorer=critics."""
    episodes: int = 50
    """For scorer=simulator and scorer=world."""

    def __post_init__(self) -> None:
        require_fields(self, "gate.", "critics, simulator, world", "scorer")
        is_asked = self.scorer == "world"
        require(is_asked == (self.world is not None), "gate.world", self.world, _WORLDS[is_asked])
        require_fields(self, "gate.", "0 or more, or null", "margin")
        require_fields(self, "gate.", "1 or more", "every", "states", "episodes")


@dataclass(frozen=True, kw_only=True)
class IQLConfig:
    """What the critics are, and how fast they learn."""

    expectile: float = 0.7
    """tau of the value: 0.5 is the mean over the data's actions, towards 1 the best of them."""
    critics: ChunkCriticConfig = field(default_factory=lambda: ChunkCriticConfig(aggregate="min"))
    """The sizes are the value's as well."""
    gamma_step: float = 0.99
    """Discount per control step."""
    tau: float = 0.005
    """Share of the way that the target critics follow at each update."""
    lr: float = 3e-4
    grad_clip: float = 1.0
    """Largest norm of a gradient; 0 switches clipping off."""

    def __post_init__(self) -> None:
        require_fields(self, "iql.", "above 0, below 1", "expectile")
        require_fields(self, "iql.", "0 to 1", "gamma_step")
        require_fields(self, "iql.", "above 0, at most 1", "tau")
        require_fields(self, "iql.", "above 0", "lr")
        require_fields(self, "iql.", "0 or more", "grad_clip")


@dataclass(frozen=True, kw_only=True)
class OfflinePPOConfig:
    """How the policy learns from the demonstrations alone."""

    critic_updates: int = 10_000
    """Of the critics, before the policy changes."""
    updates: int = 2000
    """Of the policy; 0 leaves the base, and the critics out."""
    batch: int = 256
    """States of the data in an update."""
    actor_lr: float = 1e-5
    clip: float = 0.05
    """Range of the ratio, whose log-probabilities are means over the executed actions (the paper: 0.25)."""
    target_kl: float | None = 0.02
    """KL of a batch beyond which the policy waits for the gate; or null."""
    iql: IQLConfig = field(default_factory=IQLConfig)
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        require_fields(self, "offline.", "0 or more", "critic_updates", "updates")
        require_fields(self, "offline.", "2 or more", "batch")
        require_fields(self, "offline.", "above 0", "actor_lr")
        require_fields(self, "offline.", "above 0, below 1", "clip")
        require_fields(self, "offline.", "above 0, or null for none", "target_kl")

    @property
    def total_updates(self) -> int:
        """Of the critics, then of the policy."""
        return self.critic_updates + self.updates if self.updates else 0
