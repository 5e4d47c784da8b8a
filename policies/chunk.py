"""Chunk policies: flow matching and diffusion over the actions of the next H control steps.

Outside the policy, actions are the environment's, in [-1, 1]; inside, the chain lives in the
normaliser's scale. The chain is stored unclamped, so that its density is the sampler's; only the
output is clamped. B envs, H chunk length, A action dim, K denoising steps, S scored transitions.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chain import Net, Std, check_chain, denoise, initial_noise, score, scored_grid
from robot_rl.policies.config import ChunkPolicyConfig, ProcessConfig, make_process
from robot_rl.policies.encoded import EncodedPolicy, valid_mean
from robot_rl.policies.networks import DenoiseNet, NoiseNet, initialise, sinusoidal
from robot_rl.policies.processes import FlowCFM, Process, flow_between, normal_like
from robot_rl.policies.spec import check_mode


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
        self.noise_net: NoiseNet | None = None
        if config.process == "flow_noise":
            bounds, sizes = (
                (config.sigma_min, config.sigma_max),
                (config.time_dim, config.horizon, action_dim),
            )
            self.noise_net = NoiseNet(self.encoder.dim, *sizes, bounds=bounds)
        self.process: Process = make_process(config)
        self.grid = scored_grid(self.process, config.steps, config.scored)
        times = torch.tensor(self.grid.times[:-1])
        self.grid_sinusoids = nn.Buffer(sinusoidal(times, config.time_dim), persistent=False)
        initialise(self, generator)
        if self.noise_net is not None:
            self.noise_net.begin()
        self.frozen_net = copy.deepcopy(self.net).requires_grad_(False) if config.tuned_steps else None

    def with_process(self, options: ProcessConfig, *, generator: Generator | None = None) -> Self:
        """Returns a policy that shares this one's weights, and explores in another way.

        What the process adds is new: its net of the noise, drawn from `generator`, or the frozen copy of
        the network as it is now.

        Raises:
            ValueError: the kind of policy cannot have that process.
        """
        twin = type(self)(
            self.config.exploring(options),
            state_dim=self.state_dim,
            action_dim=self.action_dim,
            normaliser=self.normaliser,
            generator=generator,
        ).to(self.grid_sinusoids.device)
        twin.encoder, twin.net = self.encoder, self.net
        if twin.frozen_net is not None:
            twin.frozen_net.load_state_dict(self.net.state_dict())
        return twin.train(self.training)

    def sample(
        self,
        encoded: Encoded,
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
            features = encoded["features"]
            path = denoise(
                self._net(features),
                self.process,
                self.grid,
                initial_noise(self, features, z, mode, generator),
                explore=mode == "explore",
                record=record,
                generator=generator,
                scored=self.config.scored,
                learned_std=self._std(features),
            )
            actions, chain = self.from_chain(path.x, encoded), path.chain
            if chain is not None and mode == "explore" and isinstance(self.process, FlowCFM):
                chain = self._with_pairs(features, chain, self.process.pairs, generator)
        return ChunkSample(actions, chain)

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns log-probability and entropy of the chain's stochastic steps, (B, S) each.

        Of `flow_cfm`: minus the error of the velocity at the chain's pairs, and zeros.
        """
        features = encoded["features"]
        if isinstance(self.process, FlowCFM):
            check_chain(chain, self.grid)
            return -self._pair_error(features, chain), torch.zeros_like(chain.log_prob)
        return score(
            self._net(features),
            self.process,
            self.grid,
            chain,
            scored=self.config.scored,
            learned_std=self._std(features),
        )

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the mean squared error of the predicted velocity or noise over valid steps."""
        features, actions = self._demonstration(batch, generator)
        corrupted = self.process.corrupt(actions, normal_like(actions, generator), generator)
        sinusoids = sinusoidal(corrupted.time, self.config.time_dim)
        condition = self.net.condition(features) + self.net.embed_time(sinusoids)
        error = (self.net(corrupted.x, condition) - corrupted.target).square()
        return valid_mean(error, batch.valid) + self.guess_loss(features, batch.obs)

    def to_chain(self, actions: Tensor, encoded: Encoded) -> Tensor:
        """Maps the environment's actions (..., A) to the scale that the chain lives in."""
        return self.normaliser.action(actions)

    def from_chain(self, x: Tensor, encoded: Encoded) -> Tensor:
        """Maps the end of a chain (..., A) to the environment's actions."""
        return self.normaliser.unaction(x.clamp(-1.0, 1.0)).clamp(-1.0, 1.0)

    def _net(self, features: Tensor) -> Net:
        """Returns the network bound to an observation; a frozen copy takes the steps that do not learn."""
        tuned = self._bound(self.net, features)
        if self.frozen_net is None:
            return tuned
        frozen = self._bound(self.frozen_net, features)
        first_tuned = self.grid.steps - self.config.tuned_steps

        def predict(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
            if isinstance(k, int) and k < first_tuned:  # a tensor names steps that are scored: they learn
                return frozen(x, k)
            return tuned(x, k, rows)

        return predict

    def _bound(self, net: DenoiseNet, features: Tensor) -> Net:
        """Returns a network bound to an observation; its time part is computed once."""
        condition = net.condition(features)
        times = net.embed_time(self.grid_sinusoids)

        def predict(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
            return net(x, (condition if rows is None else condition[rows]) + times[k])

        return predict

    def _std(self, features: Tensor) -> Std | None:
        """Returns the learned noise bound to an observation, if the process has one."""
        net = self.noise_net
        if net is None:
            return None

        def std(k: int | Tensor, rows: Tensor | None = None) -> Tensor:
            return net(features if rows is None else features[rows], self.grid_sinusoids[k])

        return std

    def _with_pairs(self, features: Tensor, chain: Chain, pairs: int, generator: Generator | None) -> Chain:
        """Draws the pairs (noise, t) that a chain is scored by, and scores it."""
        end = chain.x[:, -1]
        noise = normal_like(end.unsqueeze(1).expand(-1, pairs, -1, -1), generator)
        device = generator.device if generator is not None else end.device
        time = torch.rand(len(end), pairs, dtype=end.dtype, device=device, generator=generator).to(end.device)
        index = torch.arange(pairs, device=end.device).expand(len(end), -1)
        chain = Chain(chain.x, index, chain.log_prob.new_empty(0), chain.grid, noise, time)
        return replace(chain, log_prob=-self._pair_error(features, chain))

    def _pair_error(self, features: Tensor, chain: Chain) -> Tensor:
        """Returns the squared error of the velocity at each pair, (B, S), averaged over what is scored."""
        noise, time = chain.noise, chain.time
        assert noise is not None, "a chain of flow_cfm has its pairs"
        assert time is not None, "a chain of flow_cfm has its pairs"
        pairs = time.shape[1]
        actions = chain.x[:, -1].repeat_interleave(pairs, dim=0)
        corrupted = flow_between(actions, noise.flatten(0, 1), time.flatten())
        sinusoids = sinusoidal(corrupted.time, self.config.time_dim)
        condition = self.net.condition(features).repeat_interleave(pairs, dim=0)
        error = self.net(corrupted.x, condition + self.net.embed_time(sinusoids)) - corrupted.target
        return error[:, : self.config.scored].square().mean(dim=(-2, -1)).view(time.shape)


class FlowPolicy(ChunkPolicy):
    """Flow matching (Lipman et al. 2023; pi0's convention of time)."""

    kind: ClassVar[str] = "flow"

    def velocity(self, encoded: Encoded) -> Net:
        """Returns the velocity network bound to an observation."""
        return self._net(encoded["features"])


class DiffusionPolicy(ChunkPolicy):
    """Denoising diffusion (Chi et al. 2023) with a cosine schedule and noise prediction."""

    kind: ClassVar[str] = "diffusion"
