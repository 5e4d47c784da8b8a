"""The policy contract over LeRobot's flow VLAs: SmolVLA, pi0 and pi0.5.

LeRobot's convention is ours: time runs from 1 (noise) to 0 (action), x_t = t noise + (1 - t) action,
the network predicts noise - action, an Euler step subtracts it (`VLAFlowMatching.forward`,
`euler_integrate`). So these models walk our processes, and without noise the walk is LeRobot's own.
The VLM sees each observation once; its keys and values serve every step of sampling and scoring.

The model denoises D = `max_action_dim` numbers a step, of which the first A are the action. The chain
lives there, (B, K + 1, H, D), because what the model says of the first A depends on the rest. Only
the first A get a stochastic step's noise, and the log-probability is over them: it is then the
density of all the noise there is. The rest, whose velocity no loss ever trained, take the Euler step.
B rows, H chunk length, S scored transitions, N rows of a network call, P prefix tokens, W its width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import ConfigError
from robot_rl.core.policy import Chain, ChunkSample, Mode
from robot_rl.policies.chain import Net, denoise, score
from robot_rl.policies.processes import FlowODE, FlowSDE, Process, normal_like
from robot_rl.policies.spec import check_mode
from robot_rl.policies.vla.lerobot import LeRobotPolicy
from robot_rl.policies.vla.lerobot_build import FlowOptions, Parts
from robot_rl.policies.vla.lerobot_files import extra, module_of
from robot_rl.policies.vla.lerobot_fit import STATE
from robot_rl.policies.vla.lora import LoraOptions

_TOKENS, _MASK = "observation.language.tokens", "observation.language.attention_mask"


@dataclass(frozen=True)
class Prefix:
    """What the VLM made of the observations."""

    cache: Any
    """Keys and values of every layer, a transformers `DynamicCache`."""
    mask: Tensor
    """(B, P): which tokens are none of padding."""
    hidden: Tensor
    """(B, P, W): the last layer's output."""
    state: Tensor | None
    """(B, max_state_dim), normalised, where the action expert reads it (pi0)."""

    def rows(self, rows: Tensor) -> Prefix:
        """Returns the prefix of each of `rows` (N,), which may name an observation more than once."""
        if torch.equal(rows, torch.arange(len(self.mask), device=rows.device)):
            return self
        layers = tuple((keys[rows], values[rows], window) for keys, values, window in self.cache)
        cache = type(self.cache)(layers)
        state = None if self.state is None else self.state[rows]
        return Prefix(cache, self.mask[rows], self.hidden[rows], state)


class LeRobotFlowPolicy(LeRobotPolicy):
    """SmolVLA, pi0 or pi0.5, sampled and scored by our processes; imitation is LeRobot's own."""

    kind: ClassVar[str] = "lerobot_flow"

    def __init__(
        self,
        parts: Parts,
        *,
        instruction: str = "",
        lora: LoraOptions | None = None,
        flow: FlowOptions | None = None,
    ) -> None:
        """Wraps model and pipelines; `create`, `from_pretrained` and `load` make them.

        A LeRobot folder (`save`) keeps the number of steps, not process and noise; our checkpoints
        (`save_policy`) keep all.

        Raises:
            ConfigError: a type that is no flow, or options its process cannot have.
        """
        if parts.config.type not in ("smolvla", "pi0", "pi05"):
            raise ConfigError(
                f"policy.type: {parts.config.type!r} is no flow policy, allowed: smolvla, pi0, pi05. "
                "Use policy 'lerobot' for it."
            )
        flow = flow or FlowOptions()
        super().__init__(parts, instruction=instruction, lora=lora, flow=flow)
        steps = "num_steps" if self.policy_type == "smolvla" else "num_inference_steps"
        if flow.steps is not None:
            setattr(self.config, steps, flow.steps)  # is saved, so that LeRobot takes as many
        try:
            self.process: Process = (
                FlowODE()
                if flow.process == "flow_ode"
                else FlowSDE(eta=flow.eta, stochastic_steps=flow.stochastic_steps)
            )
            self.grid = self.process.grid(getattr(self.config, steps))
        except ValueError as error:
            raise ConfigError(f"policy.flow: {error}") from error

    @property
    def feature_dim(self) -> int:
        """F, the length of `features`."""
        return self.state_dim + self._vlm_width

    def sample(
        self,
        obs: dict[str, Tensor],
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A) in the dataset's units.

        `ode` is LeRobot's own sampling, `mean` decodes zero noise, `explore` runs the process with
        its noise. `z` is (B, H, A), with zeros for the padding, or (B, H, D). A recorded sample
        carries no gradient; dropout is off.

        Raises:
            ValueError: an unknown mode, or `z` of another shape.
        """
        check_mode(mode)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not record), self.acting():
            batch = self.preprocess(obs)
            noise = self._noise(len(batch[STATE]), z, mode)
            if noise is None:
                shape = (len(batch[STATE]), self.horizon, self.config.max_action_dim)
                noise = normal_like(torch.empty(shape, device=self.device), generator)
            path = denoise(
                self._net(self.prefix(batch)),
                self.process,
                self.grid,
                noise,
                explore=mode == "explore",
                record=record,
                generator=generator,
                action_dim=self.action_dim,
            )
            return ChunkSample(self.from_chain(path.x, obs), path.chain)

    def log_prob(self, obs: dict[str, Tensor], chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns log-probability and entropy of the chain's stochastic steps, (B, S) each."""
        with self.acting():
            net = self._net(self.prefix(self.preprocess(obs)))
            return score(net, self.process, self.grid, chain, action_dim=self.action_dim)

    def features(self, obs: dict[str, Tensor]) -> Tensor:
        """Returns (B, S + W): the normalised state, then the mean of the VLM's tokens."""
        with self.acting():
            batch = self.preprocess(obs)
            prefix = self.prefix(batch)
            weight = prefix.mask.unsqueeze(-1).to(prefix.hidden.dtype)
            pooled = (prefix.hidden * weight).sum(dim=1) / weight.sum(dim=1)
            return torch.cat([batch[STATE], pooled.float()], dim=-1)

    def velocity(self, obs: dict[str, Tensor]) -> Net:
        """Returns the velocity network bound to an observation."""
        with self.acting():
            return self._net(self.prefix(self.preprocess(obs)))

    def to_chain(self, actions: Tensor, obs: dict[str, Tensor]) -> Tensor:
        """Maps chunks (B, H, A) in the dataset's units to the model's scale, padded, (B, H, D)."""
        valid = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
        scaled = self.preprocess(obs, actions, valid)["action"]
        return nn.functional.pad(scaled, (0, self.config.max_action_dim - scaled.shape[-1]))

    def from_chain(self, x: Tensor, obs: dict[str, Tensor]) -> Tensor:
        """Maps the end of a chain (B, H, D) to the dataset's units, (B, H, A)."""
        return self.postprocess(x[..., : self.action_dim])

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        """Runs the VLM over pictures and words, as LeRobot's `sample_actions` begins."""
        return self._smolvla_prefix(batch) if self.policy_type == "smolvla" else self._pi_prefix(batch)

    @property
    def _vlm_width(self) -> int:
        model = self.policy.model
        if self.policy_type == "smolvla":
            return model.vlm_with_expert.config.text_config.hidden_size
        return model.paligemma_with_expert.paligemma.config.text_config.hidden_size

    def _net(self, prefix: Prefix) -> Net:
        """Returns the velocity network bound to the observations."""
        times = torch.tensor(self.grid.times[:-1], dtype=torch.float32, device=self.device)

        def velocity(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
            seen = prefix if rows is None else prefix.rows(rows)
            known = {} if seen.state is None else {"state": seen.state}
            return self.policy.model.denoise_step(
                prefix_pad_masks=seen.mask,
                past_key_values=seen.cache,
                x_t=x,
                timestep=times[k].expand(len(x)),
                **known,
            )

        return velocity

    def _smolvla_prefix(self, batch: dict[str, Any]) -> Prefix:
        model, pictures = self.policy.model, self.policy.prepare_images(batch)
        state = self.policy.prepare_state(batch)
        embedded, pad, attention = model.embed_prefix(*pictures, batch[_TOKENS], batch[_MASK], state=state)
        (hidden, _), cache = model.vlm_with_expert.forward(
            attention_mask=self._square(pad, attention),
            position_ids=torch.cumsum(pad, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return Prefix(cache, pad, hidden, None)

    def _pi_prefix(self, batch: dict[str, Any]) -> Prefix:
        model, pictures = self.policy.model, self.policy._preprocess_images(batch)
        state = self.policy.prepare_state(batch) if self.policy_type == "pi0" else None
        embedded, pad, attention = model.embed_prefix(*pictures, batch[_TOKENS], batch[_MASK])
        vlm = model.paligemma_with_expert
        vlm.paligemma.model.language_model.config._attn_implementation = "eager"  # as LeRobot does
        additive = extra("lerobot.policies.common.vla_utils").prepare_attention_masks_4d
        (hidden, _), cache = vlm.forward(
            attention_mask=additive(self._square(pad, attention)),
            position_ids=torch.cumsum(pad, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return Prefix(cache, pad, hidden, state)

    def _square(self, pad: Tensor, attention: Tensor) -> Tensor:
        """Returns which token sees which, (B, P, P)."""
        return module_of(self.config, "modeling").make_att_2d_masks(pad, attention)
