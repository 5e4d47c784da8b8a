"""Settings of world models, without torch: a mistake is reported before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from robot_rl.core.errors import ConfigError, require, require_fields
from robot_rl.sim.config import EnvConfig

SHRINK = 8
"""Pixels on a side of a cell of a code."""

Measure = Literal["disagreement", "samples"]
"""What a gate looks at: how far the members are apart, or two samples of one member."""


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig:
    """Kind and size of the model; every kind has several members."""

    kind: Literal["ensemble", "diffusion"] = "ensemble"
    """Networks that predict a state (`ensemble.py`), or draw all states of a stride (`diffusion.py`)."""
    members: int = 5
    width: int = 200
    depth: int = 4
    """Hidden layers."""
    stride: int = 4
    """k: control steps that are predicted at once; 16 or so for `diffusion`."""
    marks: tuple[str, ...] | None = None
    """Bodies that nothing can touch, such as a goal: physics must not read where they are, of `ensemble`;
    null: those of the simulated scene."""
    denoise: int = 4
    """Steps from noise to a stride, of `diffusion`."""

    def __post_init__(self) -> None:
        require(2 <= self.members <= 64, "model.members", self.members, "2 to 64: one has no disagreement")
        require(self.width >= 8, "model.width", self.width, "8 or more")
        require(1 <= self.depth <= 12, "model.depth", self.depth, "1 to 12")
        require(1 <= self.stride <= 32, "model.stride", self.stride, "1 to 32")
        require(1 <= self.denoise <= 100, "model.denoise", self.denoise, "1 to 100")


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """A model of others, which a process of another Python serves; it is measured as ours are."""

    id: str | None = None
    """`module:function` that returns the model; None: ours."""
    python: str | None = None
    """Path of its Python; this one if null."""
    settings: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Arguments of the function."""
    timeout_s: float = 60.0
    """Longest time of a call."""
    rows: int = 256
    """Most rows of a call; more are asked for one part after the other."""

    def __post_init__(self) -> None:
        is_name = self.id is None or all(self.id.partition(":"))
        require(is_name, "served.id", self.id, "module:function, or null")
        require(self.timeout_s > 0, "served.timeout_s", self.timeout_s, "above 0")
        require(self.rows >= 1, "served.rows", self.rows, "1 or more")


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How a world model is fitted."""

    updates: int = 6000
    batch: int = 256
    """Windows of each member in an update."""
    lr: float = 1e-3
    weight_decay: float = 1e-5
    ahead: int = 4
    """Strides that a member goes on from its own predictions, in the last part, and after which held-out
    errors choose weights; `diffusion` learns single strides alone."""
    ahead_from: float = 0.7
    """Share of the updates after which that begins."""
    noise: float = 0.01
    """Noise on the states that are read, in units of their change in a stride."""
    recent: float = 0.0
    """Share of each batch from the newest quarter of the episodes, after a refit; 0: all alike."""
    select_every: int = 300
    """Updates between two looks at held-out episodes."""

    def __post_init__(self) -> None:
        for name in ("updates", "batch", "ahead", "select_every"):
            require(getattr(self, name) >= 1, f"fit.{name}", getattr(self, name), "1 or more")
        require(self.lr > 0, "fit.lr", self.lr, "above 0")
        require(self.noise >= 0, "fit.noise", self.noise, "0 or more")
        for name in ("ahead_from", "recent"):
            require(0 <= getattr(self, name) <= 1, f"fit.{name}", getattr(self, name), "0 to 1")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Pictures in the model: which, and how they are learned."""

    cameras: tuple[str, ...] = ()
    """Those of the episodes that are modelled; none: the state alone."""
    members: int = 2
    """Networks that predict codes of pictures; each episode has one of them."""
    channels: int = 8
    """Of a code, for each camera."""
    codec_width: int = 32
    width: int = 48
    """Of the networks' first level."""
    codec_updates: int = 2000
    """Updates of the autoencoder, before the others."""
    updates: int = 2000
    """Updates of each network."""
    batch: int = 16
    lr: float = 2e-3
    noise: float = 0.1
    """Largest noise on the codes that are read, in deviations."""
    denoise: int = 4
    """Steps from noise to a code, where one is drawn."""

    def __post_init__(self) -> None:
        require(2 <= self.members <= 8, "images.members", self.members, "2 to 8: one has no disagreement")
        for name in ("codec_width", "width"):
            value = getattr(self, name)
            require(value >= 8 and value % 8 == 0, f"images.{name}", value, "8 or more, a multiple of 8")
        for name in ("channels", "codec_updates", "updates", "batch", "denoise"):
            require(getattr(self, name) >= 1, f"images.{name}", getattr(self, name), "1 or more")
        require(self.lr > 0, "images.lr", self.lr, "above 0")
        require(self.noise >= 0, "images.noise", self.noise, "0 or more")

    def check_shown(self, env: EnvConfig, at: str) -> None:
        """Refuses cameras that an env does not show, pictures that come late, and sizes that have no code.

        Raises:
            ConfigError: `at` is where these settings are.
        """
        if not self.cameras:
            return
        is_shown = set(self.cameras) <= set(env.cameras)
        require(is_shown, f"{at}.cameras", list(self.cameras), f"names of env.cameras, {list(env.cameras)}")
        for name in ("camera_hz", "camera_delay_s"):
            allowed = f"left out with {at}.cameras: imagined pictures are never late"
            require(not getattr(env, name), f"env.{name}", list(getattr(env, name)), allowed)
        check_pixels(env.image_size, f"{at}.cameras", "env.image_size=[64,64], or [128,128]")


def check_pixels(size: tuple[int, int], at: str, remedy: str) -> None:
    """Refuses pictures whose sides (height, width) the codec cannot halve three times, and the networks once.

    Raises:
        ConfigError: `at` begins the message, `remedy` is what to say instead.
    """
    if any(side % (2 * SHRINK) or side < 4 * SHRINK for side in size):
        raise ConfigError(
            f"{at}: got pictures of {size[0]} x {size[1]} pixels, allowed: multiples of {2 * SHRINK} from "
            f"{4 * SHRINK} up. Say {remedy}."
        )


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    """Limits beyond which a model is not believed."""

    gate: float = 0.995
    """Quantile of the disagreement on held-out episodes above which an imagined episode is cut."""
    coverage_within: float = 0.12
    """How far the coverage of an interval may be from its level, on the third split, at depths up to 8."""
    min_rank: float = 0.2
    """Smallest rank correlation of disagreement and error at a depth; below it, the gate is blind."""
    max_false_success: float = 0.10
    """Largest share of real failures that succeed when their actions are replayed in the model."""
    max_bias: float = 0.15
    """Largest difference of imagined and real success of one policy, once both are known."""
    max_shift: float = 3.0
    """Largest disagreement on the newest real episodes, as a multiple of that on the third split."""

    def __post_init__(self) -> None:
        require(0.5 < self.gate <= 1, "trust.gate", self.gate, "above 0.5, up to 1")
        for name in ("coverage_within", "max_false_success", "max_bias"):
            require(0 < getattr(self, name) <= 1, f"trust.{name}", getattr(self, name), "above 0, up to 1")
        require(-1 <= self.min_rank <= 1, "trust.min_rank", self.min_rank, "-1 to 1")
        require(self.max_shift > 0, "trust.max_shift", self.max_shift, "above 0")


@dataclass(frozen=True, kw_only=True)
class StartsConfig:
    """Weights of the kinds of starts."""

    initial: float = 0.25
    """First states of real episodes."""
    keyframe: float = 0.5
    """Two to six strides before a failed episode ended; `replay` where none failed."""
    replay: float = 0.25
    """Any state of real episodes."""
    drop: float = 0.0
    """Before the states in which success becomes less probable most, by what became of episodes near them."""
    classes: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """First states of the episodes that began in a class of a start bank, such as `grasped`; weights by name.
    Of experience that runs recorded, and of method=imagined."""

    def __post_init__(self) -> None:
        kinds = ("initial", "keyframe", "replay", "drop")
        require_fields(self, "starts.", "0 or more", *kinds)
        for name, weight in self.classes.items():
            require(weight >= 0, f"starts.classes.{name}", weight, "0 or more")
        total = sum(getattr(self, kind) for kind in kinds) + sum(self.classes.values())
        require(total > 0, "starts", "0 for all", "one above 0")


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """How a world model is made of episodes."""

    model: EnsembleConfig = field(default_factory=EnsembleConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    outcome: Literal["predicate", "classifier"] | None = None
    """Who sees success: the task's own predicate, or classifiers of recorded states; the first that fits, if
    null."""
    outcome_vote: float = 0.6
    """Share of the classifiers that must see success in a state; of no effect where the predicate fits."""

    def __post_init__(self) -> None:
        require(0 < self.outcome_vote <= 1, "outcome_vote", self.outcome_vote, "above 0, up to 1")
        is_used = self.outcome != "predicate" or self.outcome_vote == WorldSettings.outcome_vote
        require(is_used, "outcome_vote", self.outcome_vote, "left out with outcome=predicate: it has no vote")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Settings of a search."""

    world: str | None = None
    """Folder of the world model; none: no search."""
    candidates: int = 16
    """Chunks to choose from, the policy's own among them."""
    strides: int = 0
    """How far ahead, in strides of the model; 0: as long as a real episode."""
    gamma_step: float = 0.98
    """Discount of a control step: sooner is better."""

    def __post_init__(self) -> None:
        require(self.candidates >= 2, "search.candidates", self.candidates, "2 or more")
        require(self.strides >= 0, "search.strides", self.strides, "0 or more")
        require(0 < self.gamma_step <= 1, "search.gamma_step", self.gamma_step, "above 0, up to 1")
