"""A small vision-language-action policy that trains from scratch on a CPU.

Pictures, instruction and state become context tokens, read once per chunk; an action expert turns
noise into a chunk by flow matching, as pi0 and SmolVLA do, with the conventions of
`robot_rl.policies.processes`. Actions leave in the dataset's own units. With `horizons` the expert
is a Mixture of Horizons, which also decides how much of a chunk is executed.

In addition to noise, a share of the training chunks starts at zero noise and learns the L1 regression of
the action (ACT's loss): mode `mean` decodes exactly that, in one step.
B observations, H chunk length, A action dim, S state dim, W token width, G noisy chunks per row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import ConfigError, DatasetError, nearest, require
from robot_rl.core.language import INSTRUCTION, MAX_BYTES, encode_text
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.core.renamed import use_present_names
from robot_rl.data.demos import ChunkSampler, Episodes
from robot_rl.data.facts import DatasetFacts
from robot_rl.data.lerobot.stats import of_columns
from robot_rl.data.normalize import STD_FLOOR
from robot_rl.policies.chain import Net, denoise, initial_noise, score, scored_grid
from robot_rl.policies.chunk import ProcessConfig
from robot_rl.policies.encoded import valid_mean
from robot_rl.policies.networks import initialise, random_shift, sinusoidal, zero_last_layer
from robot_rl.policies.processes import FlowODE, Process, TimeGrid, normal_like
from robot_rl.policies.spec import Unrefined, check_demonstration, check_mode, read_config, read_size
from robot_rl.policies.vla.config import SmallVLAConfig, make_process, read_options
from robot_rl.policies.vla.encoders import (
    Block,
    InstructionEncoder,
    PictureEncoder,
    dropped,
    jitter_colour,
    to_pixels,
)
from robot_rl.policies.vla.expert import (
    ActionExpert,
    AdaptiveNorm,
    Cache,
    Velocities,
    agreed_prefix,
    balance_loss,
    disagreement,
)
from robot_rl.policies.vla.keypoints import KeypointContext
from robot_rl.policies.vla.scale import ChunkScale, relative_indices

TIME_DIM = 32
"""Size of the sinusoidal time embedding."""


class SmallVLA(Unrefined, nn.Module):
    """Flow matching over chunks of actions, given pictures, an instruction and the state."""

    kind: ClassVar[str] = SmallVLAConfig.kind
    config_class: ClassVar[type[Any]] = SmallVLAConfig
    earlier_names: ClassVar[dict[str, str]] = {"eyes": "image_encoders", "ears": "text_encoder"}
    """See `use_present_names`."""

    def __init__(
        self,
        config: SmallVLAConfig,
        *,
        state_dim: int,
        action_dim: int,
        relative_to: Iterable[int] | None = None,
        privileged_dim: int = 0,
        generator: Generator | None = None,
    ) -> None:
        """Builds the networks; their units are the identity until fitted or loaded.

        Args:
            config: sizes and options.
            state_dim: S.
            action_dim: A.
            relative_to: see `ChunkScale`; None: every action is absolute.
            privileged_dim: elements of the privileged state that it guesses; 0: no guess.
            generator: draws the first weights (None: torch's own).
        """
        super().__init__()
        self.config = config
        self.horizon, self.state_dim, self.action_dim = config.horizon, state_dim, action_dim
        self.feature_dim = 2 * config.width
        indices = (-1,) * action_dim if relative_to is None else tuple(relative_to)
        self.normaliser = ChunkScale(
            state_dim, action_dim, config.horizon, relative_to=indices, linear=config.linear
        )
        width = config.width
        is_grid = config.image_encoder == "grid"
        self.image_encoders = nn.ModuleDict(
            {
                _module_name(camera): PictureEncoder(*config.picture, channels=config.channels, outputs=width)
                for camera in (config.cameras if is_grid else ())
            }
        )
        self.privileged_dim = privileged_dim
        self.keypoints = None
        if not is_grid:
            self.keypoints = KeypointContext(
                len(config.cameras),
                state_dim,
                width=width,
                text_tokens=config.text_tokens,
                privileged_dim=privileged_dim,
            )
            self.privileged_mean = nn.Buffer(torch.zeros(privileged_dim))
            self.privileged_std = nn.Buffer(torch.ones(privileged_dim))
        self.text_encoder = InstructionEncoder(
            width=width,
            depth=config.text_depth,
            heads=config.heads,
            tokens=config.text_tokens,
            max_bytes=MAX_BYTES,
        )
        self.state_in = nn.Sequential(nn.Linear(state_dim, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, config.heads) for _ in range(config.context_depth))
        self.norm = nn.LayerNorm(width)
        self.time_in = nn.Sequential(nn.Linear(TIME_DIM, width), nn.SiLU(), nn.Linear(width, width))
        self.expert = ActionExpert(
            config.horizons or (config.horizon,),
            action_dim,
            width=width,
            depth=config.depth,
            heads=config.heads,
        )
        self.process: Process = make_process(config)
        self.grid = scored_grid(self.process, config.steps, config.scored)
        self.default_instruction = nn.Buffer(
            torch.from_numpy(encode_text([config.instruction])), persistent=False
        )
        _initialise(self, generator)

    @classmethod
    def create(
        cls, facts: DatasetFacts, options: Mapping[str, Any], *, generator: Generator | None = None
    ) -> Self:
        """Builds the policy for a dataset; relative actions still need `measure`.

        Args:
            facts: sizes, names and statistics of the training episodes.
            options: fields of `SmallVLAConfig`, and `preset`.
            generator: draws the first weights.

        Raises:
            ConfigError: an option that does not exist or does not fit.
            DatasetError: cameras of different sizes, or statistics missing.
        """
        config = read_options(options, _known(facts))
        allowed = "0: datasets do not show the privileged state; `robot-rl train` clones with it"
        require(config.guess_weight == 0, "small_vla guess_weight", config.guess_weight, allowed)
        for camera in config.cameras:
            _check_camera(facts, camera, config.picture)
        names = (facts.meta.state_names, facts.meta.action_names)
        policy = cls(
            config,
            state_dim=facts.features["state"].shape[0],
            action_dim=len(facts.meta.action_names),
            relative_to=relative_indices(*names) if config.relative_actions else None,
            generator=generator,
        )
        policy.normaliser.fit(facts.stats)
        return policy

    @classmethod
    def of_episodes(
        cls, config: SmallVLAConfig, episodes: Episodes, *, generator: Generator | None = None
    ) -> Self:
        """Builds the policy for episodes in memory, with their units.

        Args:
            config: sizes and options.
            episodes: what it will learn from, perhaps of several tasks.
            generator: draws the first weights.
        """
        columns = {"state": episodes.obs["state"], "action": episodes.action}
        if config.guess_weight:
            columns[PRIVILEGED] = episodes.obs[PRIVILEGED]
        stats, meta = of_columns(columns), episodes.meta
        policy = cls(
            config if config.instruction else replace(config, instruction=meta.instruction),
            state_dim=len(meta.state_names),
            action_dim=len(meta.action_names),
            relative_to=relative_indices(meta.state_names, meta.action_names)
            if config.relative_actions
            else None,
            privileged_dim=columns[PRIVILEGED].shape[1] if config.guess_weight else 0,
            generator=generator,
        )
        policy.normaliser.fit(stats)
        if policy.normaliser.needs_chunks:
            shown = replace(episodes, obs={"state": columns["state"]})
            windows = ChunkSampler(shown, config.horizon)
            policy.measure([windows.at(np.arange(len(windows)))])
        if config.guess_weight:
            policy.privileged_mean.copy_(torch.as_tensor(stats[PRIVILEGED]["mean"]))
            policy.privileged_std.copy_(torch.as_tensor(stats[PRIVILEGED]["std"]).clamp_min(STD_FLOOR))
        return policy

    def measure(self, batches: Iterable[DemoBatch]) -> None:
        """Measures what the dataset's statistics do not say, from chunks of the training data."""
        self.normaliser.measure(batches)

    def with_process(self, options: ProcessConfig, *, generator: Generator | None = None) -> Self:
        """Returns a policy that shares this one's weights, and explores in another way.

        `generator` has nothing to draw: the process adds no weights.

        Raises:
            ConfigError: a process that this policy does not have.
        """
        twin = copy.copy(self)
        twin.config = self.config.exploring(options)
        twin.process = make_process(twin.config)
        twin.grid = scored_grid(twin.process, twin.config.steps, twin.config.scored)
        return twin

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the expert's context; the `features` (B, 2 W) are the state's token and the others' mean.

        Raises:
            DatasetError: the observation lacks something, or has another size.
        """
        return self._encoded(obs)

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A) in the dataset's units, and how much of it the horizons agree on.

        `ode` decodes `z` without further noise, `explore` runs the process with its noise, `mean`
        decodes the regression: one step from zero noise. A recorded sample carries no gradient.

        Raises:
            ValueError: an unknown mode, or `z` of another shape.
        """
        check_mode(mode)
        if mode == "ode" and self.config.decodes == "regression":
            mode, z = "mean", None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not record):
            process, grid = (self.process, self.grid) if mode != "mean" else (FlowODE(), FlowODE().grid(1))
            net = _Net(self, encoded, grid)
            path = denoise(
                net,
                process,
                grid,
                initial_noise(self, encoded["features"], z, mode, generator),
                explore=mode == "explore",
                record=record,
                generator=generator,
                scored=self.config.scored,
            )
            actions = self.from_chain(path.x, encoded)
        return ChunkSample(actions, path.chain, net.agreed())

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns log-probability and entropy of the chain's stochastic steps, (B, S) each."""
        net = _Net(self, encoded, self.grid)
        return score(net, self.process, self.grid, chain, scored=self.config.scored)

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns flow matching over `draws` noisy chunks per row, plus the regression of mode `mean`.

        With several horizons: the sum of every horizon's and the mix's, plus the gate's balance.
        """
        check_demonstration(batch, self.horizon, self.action_dim)
        self.normaliser.check()
        config = self.config
        encoded = self._encoded(batch.obs, generator, augment=self.training)
        actions = self.to_chain(_held(batch.actions, batch.valid), encoded)
        repeated = actions.repeat_interleave(config.draws, dim=0)
        noisy = self.process.corrupt(repeated, normal_like(repeated, generator), generator)
        split = (len(actions), config.draws)
        x, time = noisy.x.unflatten(0, split), noisy.time.view(split)
        if config.regression > 0:
            x = torch.cat([x, torch.zeros_like(actions)[:, None]], dim=1)
            time = torch.cat([time, torch.ones_like(time[:, :1])], dim=1)
        condition = self._embed_time(time) + encoded["condition"][:, None]
        predicted = self.expert(x, condition, self.cache(encoded))
        flow = Velocities(*(part[:, : config.draws] for part in predicted))
        loss = self._loss(flow, noisy.target.unflatten(0, split), batch.valid, Tensor.square)
        if config.regression > 0:
            regressed = Velocities(*(part[:, config.draws :] for part in predicted))
            error = self._loss(regressed, -actions[:, None], batch.valid, Tensor.abs)
            loss = loss + config.regression * error
        if config.guess_weight > 0:
            loss = loss + config.guess_weight * self._guess_error(encoded["guess"], batch.obs)
        return loss

    def velocity(self, encoded: Encoded) -> Net:
        """Returns the velocity network bound to an observation."""
        return _Net(self, encoded, self.grid)

    def to_chain(self, actions: Tensor, encoded: Encoded) -> Tensor:
        """Maps chunks (B, H, A) in the dataset's units to the scale that the chain lives in."""
        return self.normaliser.action(actions, encoded["state"])

    def from_chain(self, x: Tensor, encoded: Encoded) -> Tensor:
        """Maps the end of a chain (B, H, A) to the dataset's units; see `ChunkScale.unaction`."""
        return self.normaliser.unaction(x, encoded["state"])

    def cache(self, encoded: Encoded) -> Cache:
        """Returns the keys and values of the context, for every layer of the expert."""
        return [(encoded[f"keys.{i}"], encoded[f"values.{i}"]) for i in range(self.config.depth)]

    def spec(self) -> dict[str, Any]:
        sizes = {"state_dim": self.state_dim, "action_dim": self.action_dim}
        relative_to = list(self.normaliser.relative_to)
        guessed = {"privileged_dim": self.privileged_dim} if self.privileged_dim else {}
        return {**sizes, **guessed, "relative_to": relative_to, "config": asdict(self.config)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        config = read_config(SmallVLAConfig, spec["config"], at=at)
        state_dim, action_dim = (read_size(spec, n, at=at) for n in ("state_dim", "action_dim"))
        guessed = read_size(spec, "privileged_dim", at=at) if "privileged_dim" in spec else 0
        how: dict[str, Any] = {"relative_to": spec["relative_to"], "privileged_dim": guessed}
        return cls(config, state_dim=state_dim, action_dim=action_dim, **how)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        use_present_names(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _encoded(
        self, obs: Mapping[str, Tensor], generator: Generator | None = None, *, augment: bool = False
    ) -> Encoded:
        """Encodes an observation; `augment` perturbs and drops parts of it, for training."""
        config, more = self.config, dict[str, Tensor]()
        scaled = self._state(obs, generator, augment=augment)
        state = condition = self.state_in(scaled)
        texts = self.text_encoder(self._instructions(obs, len(state)))
        tokens, pictures = [state[:, None], texts], list[Tensor]()
        for camera in config.cameras:
            pixels = self._pixels(obs, camera, generator, augment)
            if self.keypoints is not None:
                pictures.append(pixels)
                continue
            seen = self.image_encoders[_module_name(camera)](pixels)
            tokens.append(dropped(seen, config.dropout, generator) if augment else seen)
        if self.keypoints is not None:
            seen, meaning, guess = self.keypoints(scaled, texts, pictures)
            tokens.append(dropped(seen, config.dropout, generator) if augment else seen)
            condition = condition + meaning
            more |= {} if guess is None else {"guess": guess}
        h = torch.cat(tokens, dim=1)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        pooled = torch.cat([h[:, 0], h[:, 1:].mean(dim=1)], dim=-1)
        encoded = {"features": pooled, "condition": condition, "state": obs["state"], **more}
        for i, (keys, values) in enumerate(self.expert.cache(h)):
            encoded |= {f"keys.{i}": keys, f"values.{i}": values}
        return Encoded(encoded)

    def _state(self, obs: Mapping[str, Tensor], generator: Generator | None, *, augment: bool) -> Tensor:
        if "state" not in obs:
            raise DatasetError(f"observation: no 'state', which this policy reads.{nearest('state', obs)}")
        state = obs["state"]
        if state.shape[-1] != self.state_dim:
            raise DatasetError(
                f"observation 'state': {state.shape[-1]} elements, this policy was made for "
                f"{self.state_dim}. Use the robot that it was trained on."
            )
        state = self.normaliser.state(state)
        if augment and self.config.state_noise > 0:
            # From none to all of it: fine distances are learned from exact states, the rest from rough ones.
            size = self.config.state_noise * _uniform((len(state), 1), state, generator)
            state = state + size * normal_like(state, generator)
        if augment and self.config.state_dropout > 0:
            state = state * (_uniform((len(state), 1), state, generator) >= self.config.state_dropout)
        return state

    def _pixels(
        self, obs: Mapping[str, Tensor], camera: str, generator: Generator | None, augment: bool
    ) -> Tensor:
        """Returns a camera's pixels (B, 3, h, w) in [-1, 1], perturbed for training."""
        pictures = self._pictures(obs, camera)
        if augment and self.config.random_shift_px > 0:
            pictures = random_shift(pictures, pad_px=self.config.random_shift_px, generator=generator)
        pixels = to_pixels(pictures)
        if augment and self.config.colour_jitter > 0:
            pixels = jitter_colour(pixels, self.config.colour_jitter, generator)
        return pixels

    def _guess_error(self, guess: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        """Returns the mean absolute error of the guess, in standard deviations; NaN is of another task."""
        if PRIVILEGED not in obs:
            raise DatasetError(
                f"observation: no {PRIVILEGED!r}, which the guess is held to.{nearest(PRIVILEGED, obs)} "
                "Show it, env.privileged=true, or guess nothing: guess_weight=0."
            )
        truth = obs[PRIVILEGED]
        known = truth.isfinite()
        scaled = (truth.nan_to_num() - self.privileged_mean) / self.privileged_std
        return ((guess - scaled).abs() * known).sum() / known.sum().clamp_min(1)

    def _pictures(self, obs: Mapping[str, Tensor], camera: str) -> Tensor:
        key = f"{camera}.rgb"
        if key not in obs:
            raise DatasetError(
                f"observation: no {key!r}, which this policy reads.{nearest(key, obs)} "
                "Use the cameras that it was trained with."
            )
        pictures, (height, width) = obs[key], self.config.picture
        if pictures.dtype != torch.uint8 or tuple(pictures.shape[1:]) != (height, width, 3):
            raise DatasetError(
                f"observation {key!r}: {str(pictures.dtype).removeprefix('torch.')} "
                f"{tuple(pictures.shape[1:])}, this policy reads uint8 {(height, width, 3)}. "
                "Resize the pictures before they reach it."
            )
        return pictures

    def _instructions(self, obs: Mapping[str, Tensor], batch: int) -> Tensor:
        """Returns the instructions (B, L) of the observation, or the policy's own."""
        if INSTRUCTION not in obs:
            return self.default_instruction.expand(batch, -1)
        texts = obs[INSTRUCTION]
        if texts.dtype != torch.uint8 or texts.ndim != 2 or texts.shape[1] > self.text_encoder.max_bytes:
            raise DatasetError(
                f"observation {INSTRUCTION!r}: {str(texts.dtype).removeprefix('torch.')} "
                f"{tuple(texts.shape)}, allowed uint8 (rows, {self.text_encoder.max_bytes} bytes or fewer). "
                "Encode texts with robot_rl.core.language.encode_text."
            )
        return texts

    def _embed_time(self, time: Tensor) -> Tensor:
        """Maps times (...) to (..., W)."""
        return self.time_in(sinusoidal(time.flatten(), TIME_DIM)).unflatten(0, time.shape)

    def _loss(
        self, found: Velocities, target: Tensor, valid: Tensor, measure: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Returns the error over valid steps: of the mix, or of every horizon, mix and balance."""
        weight = valid[:, None].expand(target.shape[:-1])
        mix = valid_mean(measure(found.mix - target), weight)
        if not self.config.horizons:
            return mix
        reached = self.expert.reached
        errors = measure(found.each - target[:, :, None])
        each = sum(valid_mean(errors[:, :, m], weight & reached[m]) for m in range(len(self.config.horizons)))
        return each + mix + self.config.balance * balance_loss(found.gate, reached)


class _Net:
    """The expert with the encoding and grid it is called with; measures how far its horizons disagree."""

    def __init__(self, policy: SmallVLA, encoded: Encoded, grid: TimeGrid) -> None:
        self._policy, self._grid = policy, grid
        self._cache, self._condition = policy.cache(encoded), encoded["condition"]
        times = torch.tensor(grid.times[:-1], device=self._condition.device)
        self._times = policy._embed_time(times)
        self._disagreement: Tensor | None = None

    def __call__(self, x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        cache, condition = self._cache, self._condition
        if rows is not None:
            cache = [(keys[rows], values[rows]) for keys, values in cache]
            condition = condition[rows]
        found = self._policy.expert(x[:, None], (condition + self._times[k])[:, None], cache)
        if isinstance(k, int) and self._policy.config.horizons:
            # How far the step of each horizon alone would be from the mix, in units of the action.
            length = self._grid.times[k] - self._grid.times[k + 1]
            apart = length * disagreement(found).detach()
            self._disagreement = apart if self._disagreement is None else self._disagreement + apart
        return found.mix[:, 0]

    def agreed(self) -> Tensor | None:
        """Returns how many steps the horizons agree on, (B,); None with one horizon."""
        if self._disagreement is None:
            return None
        config = self._policy.config
        return agreed_prefix(
            self._disagreement,
            self._policy.expert.reached,
            ratio=config.agreement_ratio,
            first=config.agreement_first,
        )


def _held(actions: Tensor, valid: Tensor) -> Tensor:
    """Returns chunks whose last valid action is held to their end: the expert sees all H of them."""
    last = valid.sum(dim=1, keepdim=True).clamp_min(1) - 1
    step = torch.arange(actions.shape[1], device=actions.device).minimum(last)
    return actions.gather(1, step[..., None].expand_as(actions))


def _known(facts: DatasetFacts) -> dict[str, Any]:
    """Returns the options that the dataset decides unless the user does."""
    known: dict[str, Any] = {"cameras": facts.cameras, "instruction": facts.meta.instruction}
    if facts.cameras:
        known["picture"] = facts.features[f"{facts.cameras[0]}.rgb"].shape[:2]
    return known


def _check_camera(facts: DatasetFacts, camera: str, picture: tuple[int, int]) -> None:
    if camera not in facts.cameras:
        raise ConfigError(f"small_vla cameras: no camera {camera!r}.{nearest(camera, facts.cameras)}")
    shape = facts.features[f"{camera}.rgb"].shape
    if shape[:2] != picture:
        raise DatasetError(
            f"camera {camera!r}: pictures of {shape[:2]}, small_vla reads {picture} from every camera. "
            "Resize all cameras to one size when the dataset is loaded."
        )


def _module_name(camera: str) -> str:
    return camera.replace(".", "__")


def _uniform(shape: tuple[int, ...], like: Tensor, generator: Generator | None) -> Tensor:
    device = generator.device if generator is not None else like.device
    return torch.rand(shape, generator=generator, device=device).to(like.device)


def _initialise(policy: SmallVLA, generator: Generator | None) -> None:
    """Draws first weights: torch's defaults, small positions, and gates and velocities at zero."""
    initialise(policy, generator)
    for name, parameter in policy.named_parameters():
        if name.endswith(("position", "queries", "byte.weight")):
            nn.init.normal_(parameter, std=0.5 if name.endswith("queries") else 0.1, generator=generator)
    for module in policy.expert.modules():
        if isinstance(module, AdaptiveNorm):
            nn.init.zeros_(module.modulate.weight)
            nn.init.zeros_(module.modulate.bias)
    zero_last_layer(policy.expert.out)
