"""Chunk policies: flow matching and diffusion over the actions of the next H control steps.

Outside the policy, actions are the environment's, in [-1, 1]; inside, the chain lives in the
normaliser's scale. The chain is stored unclamped, so that its density is the sampler's; only the
output is clamped. B envs, H chunk length, A action dim, K denoising steps, S scored transitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from robot_rl.core.errors import nearest
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Mode
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chain import Net, denoise, score
from robot_rl.policies.encoded import EncodedPolicy, valid_mean
from robot_rl.policies.networks import DenoiseNet, initialise, sinusoidal
from robot_rl.policies.processes import DDIM, DDPM, FlowODE, FlowSDE, Process, normal_like
from robot_rl.policies.spec import check_chunk, check_mode

PROCESSES = {"flow": ("flow_ode", "flow_sde"), "diffusion": ("ddpm", "ddim"), "one_step": ("flow_ode",)}
"""Which processes each kind of policy can use; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class ChunkPolicyConfig:
    """A flow or diffusion policy over chunks of actions."""

    kind: str = "flow"
    """`flow`, `diffusion` or `one_step`."""
    horizon: int = 16
    """H, the number of control steps that a chunk covers."""
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
    process: str | None = None
    """`flow_ode`, `flow_sde`, `ddpm` or `ddim`; None takes the first of the kind."""
    eta: float = 0.5
    """Noise of `flow_sde` (at least 0) and `ddim` (in [0, 1]) in mode `explore`."""
    stochastic_steps: str = "one"
    """`one` or `all` steps of `flow_sde` are stochastic."""
    train_steps: int = 20
    """T, the noise levels of diffusion, at least `steps`."""
    std_floor: float = 0.1
    """Smallest noise of a stochastic diffusion step."""
    log_prob_std_floor: float = 0.1
    """Smallest noise in the log-probability of a diffusion step."""
    cameras: tuple[str, ...] = ()
    """Cameras the policy sees besides the state; reads `<camera>.rgb`."""
    image_features: int = 64
    """Features per camera."""
    random_shift_px: int = 4
    """Largest shift of training images, in pixels; 0 switches it off."""

    def __post_init__(self) -> None:
        if self.kind not in PROCESSES:
            raise ValueError(f"policy kind: {self.kind!r} is unknown.{nearest(self.kind, PROCESSES)}")
        if self.kind == "one_step" and self.steps != 1:
            raise ValueError(f"policy steps must be 1 for kind 'one_step', got {self.steps}")
        for name in ("horizon", "width", "depth", "steps", "train_steps", "image_features"):
            if getattr(self, name) < 1:
                raise ValueError(f"policy {name} must be at least 1, got {getattr(self, name)}")
        if self.time_dim < 2 or self.time_dim % 2:
            raise ValueError(f"policy time_dim must be even and at least 2, got {self.time_dim}")
        if self.random_shift_px < 0:
            raise ValueError(f"policy random_shift_px must be at least 0, got {self.random_shift_px}")
        allowed = PROCESSES[self.kind]
        if self.process is not None and self.process not in allowed:
            raise ValueError(
                f"policy process: {self.process!r} does not fit kind {self.kind!r}."
                f"{nearest(self.process, allowed)}"
            )
        make_process(self).grid(self.steps)  # refuses options and steps the process cannot have


class ChunkPolicy(EncodedPolicy):
    """Generates a chunk by denoising, given features of the observation."""

    config_class: ClassVar[type[Any]] = ChunkPolicyConfig

    def __init__(
        self,
        config: ChunkPolicyConfig,
        *,
        state_dim: int,
        action_dim: int,
        normaliser: Normaliser | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Builds the networks; `generator` draws their first weights (None: torch's own).

        Raises:
            ValueError: the config is of another kind, or the normaliser of other sizes.
        """
        if config.kind != self.kind:
            raise ValueError(f"{type(self).__name__}: needs kind {self.kind!r}, got {config.kind!r}")
        super().__init__(config, state_dim=state_dim, action_dim=action_dim, normaliser=normaliser)
        self.net = DenoiseNet(
            self.encoder.dim,
            config.horizon,
            action_dim,
            width=config.width,
            depth=config.depth,
            time_dim=config.time_dim,
            layernorm=config.layernorm,
            residual=config.residual,
        )
        self.process: Process = make_process(config)
        self.grid = self.process.grid(config.steps)
        times = torch.tensor(self.grid.times[:-1])
        self.register_buffer("grid_sinusoids", sinusoidal(times, config.time_dim), persistent=False)
        self.grid_sinusoids: Tensor
        initialise(self, generator)

    def sample(
        self,
        obs: dict[str, Tensor],
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A).

        `ode` decodes `z` without further noise, `mean` decodes zero noise, `explore` runs the
        process with its noise. A recorded sample carries no gradient.

        Raises:
            ValueError: an unknown mode, or `z` of another shape.
        """
        check_mode(mode)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not record):
            features = self.encoder(obs)
            noise = self._initial_noise(features, z, mode, generator)
            path = denoise(
                self._net(features),
                self.process,
                self.grid,
                noise,
                explore=mode == "explore",
                record=record,
                generator=generator,
            )
            actions = self.from_chain(path.x, obs)
        return ChunkSample(actions, path.chain)

    def log_prob(self, obs: dict[str, Tensor], chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns log-probability and entropy of the chain's stochastic steps, (B, S) each."""
        return score(self._net(self.encoder(obs)), self.process, self.grid, chain)

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the mean squared error of the predicted velocity or noise over valid steps."""
        features, actions = self._demonstration(batch, generator)
        corrupted = self.process.corrupt(actions, normal_like(actions, generator), generator)
        sinusoids = sinusoidal(corrupted.time, self.config.time_dim)
        condition = self.net.condition(features) + self.net.embed_time(sinusoids)
        error = (self.net(corrupted.x, condition) - corrupted.target).square()
        return valid_mean(error, batch.valid)

    def to_chain(self, actions: Tensor, obs: dict[str, Tensor]) -> Tensor:
        """Maps the environment's actions (..., A) to the scale that the chain lives in."""
        return self.normaliser.action(actions)

    def from_chain(self, x: Tensor, obs: dict[str, Tensor]) -> Tensor:
        """Maps the end of a chain (..., A) to the environment's actions."""
        return self.normaliser.unaction(x.clamp(-1.0, 1.0)).clamp(-1.0, 1.0)

    def _net(self, features: Tensor) -> Net:
        """Returns the network bound to an observation; its time part is computed once."""
        condition = self.net.condition(features)
        times = self.net.embed_time(self.grid_sinusoids)

        def predict(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
            return self.net(x, (condition if rows is None else condition[rows]) + times[k])

        return predict

    def _initial_noise(
        self, features: Tensor, z: Tensor | None, mode: Mode, generator: Generator | None
    ) -> Tensor:
        shape = (len(features), self.horizon, self.action_dim)
        if z is not None:
            check_chunk("sample", "z", z, shape)
            return torch.zeros_like(z) if mode == "mean" else z
        zeros = features.new_zeros(shape)
        return zeros if mode == "mean" else normal_like(zeros, generator)


class FlowPolicy(ChunkPolicy):
    """Flow matching (Lipman et al. 2023; pi0's convention of time)."""

    kind: ClassVar[str] = "flow"

    def velocity(self, obs: dict[str, Tensor]) -> Net:
        """Returns the velocity network bound to an observation."""
        return self._net(self.encoder(obs))


class DiffusionPolicy(ChunkPolicy):
    """Denoising diffusion (Chi et al. 2023) with a cosine schedule and noise prediction."""

    kind: ClassVar[str] = "diffusion"


def make_process(config: ChunkPolicyConfig) -> Process:
    """Builds the process that a config names."""
    name = config.process or PROCESSES[config.kind][0]
    if name == "flow_ode":
        return FlowODE()
    if name == "flow_sde":
        return FlowSDE(eta=config.eta, stochastic_steps=config.stochastic_steps)
    eta = 1.0 if name == "ddpm" else config.eta
    return (DDPM if name == "ddpm" else DDIM)(
        eta=eta,
        train_steps=config.train_steps,
        std_floor=config.std_floor,
        log_prob_std_floor=config.log_prob_std_floor,
    )
