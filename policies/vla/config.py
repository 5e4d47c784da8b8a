"""Options of the small VLA: sizes, acting, and regularisation for few episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

from robot_rl.core.errors import ConfigError, nearest, require, require_fields
from robot_rl.core.language import encode_text
from robot_rl.policies.config import PolicyConfig, ProcessConfig
from robot_rl.policies.processes import Process, flow_process
from robot_rl.policies.spec import as_tuple
from robot_rl.policies.vla.encoders import SMALLEST

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"width": 32, "depth": 1, "heads": 2, "context_depth": 1, "text_depth": 1, "channels": 4},
    "small": {},
}
"""Sizes by name: `tiny` for tests, `small` for a laptop."""


@dataclass(frozen=True, kw_only=True)
class SmallVLAConfig(PolicyConfig):
    """Sizes of the small VLA, how it acts, and what keeps it from overfitting few episodes."""

    kind: ClassVar[str] = "small_vla"
    horizon: int = 16
    """H, the number of control steps that a chunk covers."""
    cameras: tuple[str, ...] = ()
    """Cameras it sees; reads `<camera>.rgb`."""
    picture: tuple[int, int] = (96, 128)
    """Height and width of every camera's pictures, in pixels."""
    width: int = 128
    """W, size of a token."""
    depth: int = 3
    """Layers of the action expert."""
    heads: int = 4
    """Attention heads; divides `width`."""
    context_depth: int = 2
    """Layers over the context tokens."""
    image_encoder: Literal["grid", "keypoints"] = "grid"
    """`grid`: a picture is a grid of tokens. `keypoints`: it is one token, of where coloured things are."""
    channels: int = 32
    """Channels of the first convolution of `grid`."""
    guess_weight: float = 0.0
    """Weight of the loss that holds a guess of the privileged state, from keypoints, to the truth; needs
    env.privileged=true while it learns, not when it acts. 0: no guess."""
    text_depth: int = 1
    """Layers over the bytes of the instruction."""
    text_tokens: int = 4
    """Tokens that an instruction becomes."""
    instruction: str = ""
    """The instruction where the observation has none."""
    steps: int = 5
    """K, the number of denoising steps when acting."""
    decodes: Literal["flow", "regression"] = "flow"
    """What acts: the flow, from noise in `steps`, or the regression, in one. Exploring is of the flow."""
    process: str = "flow_ode"
    """`flow_ode`, or `flow_sde` for learners that score the chain."""
    eta: float = 0.5
    """Noise of `flow_sde` in mode `explore`."""
    stochastic_steps: str = "one"
    """`one` or `all` steps of `flow_sde` are stochastic."""
    scored: int | None = None
    """Log-probabilities are of the first so many actions, those that are executed; None means all."""
    horizons: tuple[int, ...] = ()
    """Mixture of Horizons: chunk lengths, ascending, the last equal to `horizon`; empty: only that."""
    agreement_ratio: float = 1.5
    """How much more the horizons may disagree than at the start of the chunk, before planning again."""
    agreement_first: int = 2
    """Steps at the start of the chunk that set the measure, and are always executed."""
    balance: float = 1e-3
    """Weight of the loss that keeps the gate from forgetting a horizon."""
    draws: int = 1
    """Noisy chunks per observation and update: they share the context, which costs most."""
    regression: float = 5.0
    """Weight of the L1 regression that mode `mean` decodes, against 1 for the flow; 0 leaves it out."""
    relative_actions: bool = True
    """Actions of the same name as a state element are learned as distances from that, or from the last
    action where the state has it."""
    linear: float = 0.0
    """Strength of a ridge regression from the state to the chunk, solved before training; the network
    learns what it leaves. 0: none."""
    random_shift_px: int = 6
    """Largest shift of training pictures, in pixels."""
    colour_jitter: float = 0.3
    """Largest change of contrast and brightness of training pictures."""
    dropout: float = 0.2
    """Share of the picture tokens' elements that training hides."""
    state_noise: float = 1.0
    """Most noise on the training states, in standard deviations of the data; each row draws its share."""
    state_dropout: float = 0.3
    """Share of the training observations that show the mean state, so that the pictures are learned too."""

    def __post_init__(self) -> None:
        at = "small_vla "
        require_fields(self, at, "1 or more", "horizon", "width", "depth", "heads", "text_tokens")
        require_fields(self, at, "1 or more", "channels", "draws")
        require_fields(self, at, "0 or more", "context_depth", "text_depth", "random_shift_px")
        require_fields(self, at, "0 or more", "regression", "balance", "colour_jitter", "state_noise")
        require_fields(self, at, "0 or more", "linear", "guess_weight")
        sees = self.image_encoder == "keypoints" and len(self.cameras) > 0
        guessed = self.guess_weight
        require(sees or guessed == 0, at + "guess_weight", guessed, "0 without keypoints of a camera")
        learned = self.decodes == "flow" or self.regression > 0
        require(learned, at + "regression", self.regression, "above 0 with decodes=regression")
        require_fields(self, at, "0 to below 1", "dropout", "state_dropout")
        require_fields(self, at, "above 0", "agreement_ratio")
        require_fields(self, at, "flow_ode, flow_sde", "process")
        divides = self.width % self.heads == 0
        require(divides, at + "heads", self.heads, f"a divisor of width {self.width}")
        require(
            len(self.picture) == 2 and min(self.picture) >= SMALLEST,
            "small_vla picture",
            self.picture,
            f"height and width, {SMALLEST} pixels or more",
        )
        rising = all(a < b for a, b in zip((0, *self.horizons), self.horizons, strict=False))
        require(
            not self.horizons or (rising and self.horizons[-1] == self.horizon),
            "small_vla horizons",
            self.horizons,
            f"rising, the last equal to the horizon {self.horizon}",
        )
        first, last = self.agreement_first, self.horizon
        is_fine = 1 <= first <= last or (first == 2 and not self.horizons)  # 2: the default
        require(is_fine, "small_vla agreement_first", first, f"1 to the horizon {last}")
        scored, allowed = self.scored, f"1 to the horizon {last}, or null for all"
        require(scored is None or 1 <= scored <= last, "small_vla scored", scored, allowed)
        encode_text([self.instruction])
        make_process(self).check(self.steps)  # refuses options and steps the process cannot have

    def exploring(self, options: ProcessConfig) -> Self:
        """Returns this configuration with another process.

        Raises:
            ConfigError: a process that the small VLA does not have, or options of another one.
        """
        require(options.tuned_steps == 0, "small_vla tuned_steps", options.tuned_steps, "0: all steps learn")
        return replace(
            self,
            process=options.process or "flow_ode",
            eta=options.eta,
            stochastic_steps=options.stochastic_steps,
            scored=options.scored,
        )


def make_process(config: SmallVLAConfig) -> Process:
    """Builds the process that a config names."""
    return flow_process(config.process, eta=config.eta, stochastic_steps=config.stochastic_steps)


def read_options(options: Mapping[str, Any], known: Mapping[str, Any]) -> SmallVLAConfig:
    """Returns the config of `options` over their preset, over what is `known` of the dataset.

    Raises:
        ConfigError: an unknown option or preset, or a value out of range.
    """
    options = dict(options)
    preset = options.pop("preset", "small")
    if preset not in PRESETS:
        raise ConfigError(f"small_vla: no preset {preset!r}.{nearest(str(preset), PRESETS)}")
    names = [field.name for field in fields(SmallVLAConfig)]
    for name in options:
        if name not in names:
            raise ConfigError(f"small_vla: no option {name!r}.{nearest(name, [*names, 'preset'])}")
    values = {**known, **PRESETS[preset], **options}
    try:
        return SmallVLAConfig(**{name: as_tuple(value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
