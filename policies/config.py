"""Settings of the policies that are cloned, and of the adapters around them; without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from robot_rl.config.build import Choice
from robot_rl.core.errors import ConfigError, nearest, require_fields
from robot_rl.core.registry import TABLE, resolve, table
from robot_rl.policies.processes import DDIM, DDPM, FlowCFM, FlowNoise, Process, flow_process

PROCESSES = {
    "flow": ("flow_ode", "flow_sde", "flow_noise", "flow_cfm"),
    "diffusion": ("ddpm", "ddim"),
    "one_step": ("flow_ode",),
    "token": ("token",),
}
"""Which processes each kind of policy can use; the first is the default."""
SMALL_VLA = "small_vla"
"""The kind whose settings are in `policies.vla.config`, with torch."""
ENCODERS = ("plain", "keypoints")
"""Networks that encode a camera's picture."""


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """How a policy explores, and how its log-probability is computed; cloning does not depend on it."""

    process: str | None = None
    """`flow_ode`, `flow_sde`, `flow_noise`, `flow_cfm`, `ddpm`, `ddim` or `token`; None: the kind's first."""
    eta: float = 0.5
    """Noise of `flow_sde` (at least 0) and `ddim` (in [0, 1]) in mode `explore`."""
    stochastic_steps: str = "one"
    """`one` or `all` steps of `flow_sde` are stochastic."""
    sigma_min: float = 0.08
    """Smallest noise of a step of `flow_noise`."""
    sigma_max: float = 0.16
    """Largest."""
    pairs: int = 8
    """Draws of (noise, t) that score a chunk of `flow_cfm`."""
    tuned_steps: int = 0
    """Last diffusion steps, which learn and explore; a frozen copy takes those before. 0: all learn."""
    std_floor: float = 0.1
    """Smallest noise of a stochastic diffusion step."""
    log_prob_std_floor: float = 0.1
    """Smallest noise in the log-probability of a diffusion step."""
    scored: int | None = None
    """Log-probabilities are of the first so many actions, those that are executed; None means all."""
    temperature: float = 1.0
    """By which `token` divides the logits in mode `explore`; above 1 it explores more."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Choice):
    """The policy that a run clones: its kind, and the settings of that kind."""

    horizon: int = 16
    """H, the number of control steps that a chunk covers."""

    @classmethod
    def of_kind(cls, kind: str | None, at: str) -> type[Any]:
        if kind is None or kind in PROCESSES:
            return ChunkPolicyConfig
        if kind == GaussianPolicyConfig.kind:
            return GaussianPolicyConfig
        theirs = set(table("policy")) - set(TABLE["policy"])
        if kind not in (*theirs, SMALL_VLA):
            known = [*cls.kinds(), *sorted(theirs)]
            raise ConfigError(f"{at}: got {kind!r}, allowed: {', '.join(known)}.{nearest(kind, known)}")
        return resolve("policy", kind, at=at).config_class

    @classmethod
    def kinds(cls) -> list[str]:
        return [*PROCESSES, GaussianPolicyConfig.kind, SMALL_VLA]


@dataclass(frozen=True, kw_only=True)
class PictureSettings:
    """What a policy sees, and with which network."""

    cameras: tuple[str, ...] = ()
    """Cameras the policy sees in addition to the state; reads `<camera>.rgb`."""
    image_encoder: str = "plain"
    """`plain`: convolutions, spatial soft-argmax, a linear layer; `keypoints`: the positions and strengths of
    keypoints on opponent colours, which finds small coloured things."""
    image_features: int = 64
    """Features per camera of `plain`, and of a frozen graph."""
    frozen_graph: tuple[int, ...] = ()
    """Bytes and features of a frozen graph instead of `image_encoder`: `bc.encoder=<file>.onnx` says so."""
    random_shift_px: int = 4
    """Largest shift of training images, in pixels; 0 switches it off."""
    guess_weight: float = 0.0
    """Weight of the loss that holds the encoder's guess of the privileged state to the truth; needs
    env.privileged=true while it learns, not when it acts. 0: no guess."""

    def __post_init__(self) -> None:
        if self.image_encoder not in ENCODERS:
            near = nearest(self.image_encoder, ENCODERS)
            raise ValueError(f"policy image_encoder: {self.image_encoder!r} is unknown.{near}")
        require_fields(self, "policy ", "1 or more", "image_features")
        require_fields(self, "policy ", "0 or more", "random_shift_px", "guess_weight")
        sizes = self.frozen_graph
        if sizes and (len(sizes) != 2 or min(sizes) < 1):
            raise ValueError(f"policy frozen_graph: got {sizes}, allowed: two numbers above 0, or none")


@dataclass(frozen=True, kw_only=True)
class ChunkPolicyConfig(PictureSettings, ProcessConfig, PolicyConfig):
    """A flow, diffusion or token policy over chunks of actions."""

    kind: str = "flow"
    """`flow`, `diffusion`, `one_step` or `token`."""
    width: int = 256
    """Units of a hidden layer."""
    depth: int = 3
    """Number of hidden layers."""
    time_dim: int = 32
    """Size of the time embedding, even."""
    layernorm: bool = False
    """Normalises the hidden layers."""
    residual: bool = False
    """Adds each hidden layer to the one before."""
    steps: int = 4
    """K, the number of denoising steps when acting."""
    train_steps: int = 20
    """T, the noise levels of diffusion, at least `steps`."""
    prediction: str = "noise"
    """What the network of a diffusion policy predicts: `noise` (DPPO) or `velocity`. Where x is almost only
    noise, the predicted noise does not determine the chunk: a small network is wrong by its whole range."""
    bins: int = 256
    """V, the intervals of an action element that `token` chooses among."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in PROCESSES:
            raise ValueError(f"policy kind: {self.kind!r} is unknown.{nearest(self.kind, PROCESSES)}")
        if self.kind in ("one_step", "token") and self.steps != 1:
            raise ValueError(f"policy steps must be 1 for kind {self.kind!r}, got {self.steps}")
        require_fields(self, "policy ", "above 0", "temperature")
        require_fields(
            self, "policy ", "1 or more", "horizon", "width", "depth", "steps", "train_steps", "bins"
        )
        if self.time_dim < 2 or self.time_dim % 2:
            raise ValueError(f"policy time_dim must be even and at least 2, got {self.time_dim}")
        allowed = PROCESSES[self.kind]
        if self.process is not None and self.process not in allowed:
            raise ValueError(
                f"policy process: {self.process!r} does not fit kind {self.kind!r}."
                f"{nearest(self.process, allowed)}"
            )
        if self.scored is not None and not 1 <= self.scored <= self.horizon:
            raise ValueError(
                f"policy scored: got {self.scored}, allowed 1 to the horizon, {self.horizon}, or null for all"
            )
        if self.tuned_steps and self.kind != "diffusion":
            raise ValueError(
                f"policy tuned_steps: got {self.tuned_steps}, allowed 0 for kind {self.kind!r}: all steps of "
                "a flow learn"
            )
        if self.kind != "token":
            make_process(self).check(self.steps)  # refuses options and steps the process cannot have

    def exploring(self, options: ProcessConfig) -> Self:
        """Returns this configuration with another process.

        Raises:
            ValueError: the kind of policy cannot have that process.
        """
        return replace(self, **{field.name: getattr(options, field.name) for field in fields(ProcessConfig)})


@dataclass(frozen=True, kw_only=True)
class GaussianPolicyConfig(PictureSettings, PolicyConfig):
    """A Gaussian MLP policy."""

    kind: ClassVar[str] = "gaussian"
    horizon: int = 1
    """H, the number of control steps that a chunk covers."""
    width: int = 256
    """Units of a hidden layer."""
    depth: int = 2
    """Number of hidden layers."""
    layernorm: bool = False
    """Normalises the hidden layers."""
    residual: bool = False
    """Adds each hidden layer to the one before."""
    initial_std: float = 0.3
    """First standard deviation, in the normaliser's scale."""
    min_std: float = 0.01
    """Smallest standard deviation: exploration and the likelihood stay finite."""
    max_std: float = 2.0
    """Largest standard deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fields(self, "policy ", "1 or more", "horizon", "width", "depth")
        if not 0 < self.min_std <= self.initial_std <= self.max_std:
            raise ValueError(
                "policy initial_std must be between min_std and max_std, above 0; got "
                f"min_std={self.min_std}, initial_std={self.initial_std}, max_std={self.max_std}"
            )


@dataclass(frozen=True, kw_only=True)
class LatentActorConfig:
    """The network that chooses the noise."""

    bound: float = 1.5
    """Largest element of the noise; the paper has 1 to 2.5, and 0 decodes the middle of the noise."""
    repeat: bool = False
    """One noise vector for all H steps: fewer elements to learn, but not every base works with it."""
    width: int = 256
    """Units of a hidden layer."""
    depth: int = 2
    """Number of hidden layers."""
    layernorm: bool = False
    """Normalises the hidden layers."""

    def __post_init__(self) -> None:
        require_fields(self, "latent ", "1 or more", "width", "depth")
        if not 0 <= self.bound < float("inf"):
            raise ValueError(f"latent bound must be at least 0 and finite, got {self.bound}")


@dataclass(frozen=True, kw_only=True)
class ResidualHeadConfig:
    """The network that corrects the base, and how it explores."""

    width: int = 256
    """Units of a hidden layer."""
    depth: int = 2
    """Number of hidden layers."""
    layernorm: bool = True
    """Normalises the hidden layers."""
    explore_std: float = 0.05
    """Standard deviation of the exploration noise, in the env's [-1, 1]."""
    noise_clip: float = 0.3
    """Largest exploration noise."""

    def __post_init__(self) -> None:
        require_fields(self, "residual ", "1 or more", "width", "depth")
        require_fields(self, "residual ", "0 or more", "explore_std")
        require_fields(self, "residual ", "above 0", "noise_clip")


def make_process(config: ChunkPolicyConfig) -> Process:
    """Builds the process that a config names, of a path of denoising steps."""
    name = config.process or PROCESSES[config.kind][0]
    if name in ("flow_ode", "flow_sde"):
        return flow_process(name, eta=config.eta, stochastic_steps=config.stochastic_steps)
    if name == "flow_noise":
        return FlowNoise(sigma_min=config.sigma_min, sigma_max=config.sigma_max)
    if name == "flow_cfm":
        return FlowCFM(pairs=config.pairs)
    eta = 1.0 if name == "ddpm" else config.eta
    return (DDPM if name == "ddpm" else DDIM)(
        eta=eta,
        train_steps=config.train_steps,
        std_floor=config.std_floor,
        log_prob_std_floor=config.log_prob_std_floor,
        tuned_steps=config.tuned_steps,
        prediction=config.prediction,
    )
