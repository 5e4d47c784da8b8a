"""The policy contract over LeRobot's flow VLAs: SmolVLA, pi0 and pi0.5.

LeRobot's convention is ours: time runs from 1 (noise) to 0 (action), x_t = t noise + (1 - t) action,
the network predicts noise - action, an Euler step subtracts it (`VLAFlowMatching.forward`,
`euler_integrate`). So these models walk our processes, and without noise the walk is LeRobot's own.
The VLM sees each observation once; its keys and values serve every step of sampling and scoring.

The model denoises D = `max_action_dim` numbers a step, of which the first A are the action. The chain
lives there, (B, K + 1, H, D), because the velocity of the first A depends on the rest. Only
the first A get a stochastic step's noise, and the log-probability is over them: it is then the
density of all the noise there is. The rest, whose velocity no loss ever trained, take the Euler step.
B rows, H chunk length, S scored transitions, N rows of a network call, P prefix tokens, W its width.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import ConfigError
from robot_rl.core.policy import Chain, ChunkSample, Encoded, Mode, rows_of
from robot_rl.policies.chain import Net, denoise, score, scored_grid
from robot_rl.policies.config import ProcessConfig
from robot_rl.policies.processes import Process, flow_process, normal_like
from robot_rl.policies.spec import check_mode
from robot_rl.policies.vla.lerobot import LeRobotPolicy
from robot_rl.policies.vla.lerobot_build import FlowOptions, Parts
from robot_rl.policies.vla.lerobot_files import extra, module_of
from robot_rl.policies.vla.lerobot_fit import STATE
from robot_rl.policies.vla.lora import LoraOptions

_OBS = "obs."
"""Begins the names of what was observed itself."""
_TOKENS, _MASK = "observation.language.tokens", "observation.language.attention_mask"


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
        self.flow: FlowOptions = replace(flow, steps=getattr(self.config, steps))
        self._make_process()

    def _make_process(self) -> None:
        """Makes the process and the grid that `flow` names."""
        flow = self.flow
        try:
            self.process: Process = flow_process(
                flow.process, eta=flow.eta, stochastic_steps=flow.stochastic_steps
            )
            assert flow.steps is not None
            self.grid = scored_grid(self.process, flow.steps, flow.scored)
        except ValueError as error:
            raise ConfigError(f"policy.flow: {error}") from error

    def with_process(self, options: ProcessConfig, *, generator: Generator | None = None) -> Self:
        """Returns a policy that shares this one's weights, and explores in another way.

        `generator` has nothing to draw: the process adds no weights.

        Raises:
            ConfigError: a process that LeRobot's flows do not have.
        """
        twin = copy.copy(self)
        twin._load_state_dict_pre_hooks = OrderedDict()  # a hook holds its module, weakly
        twin.hook_tied()
        twin.flow = self.flow.exploring(options)
        twin._make_process()
        return twin

    @property
    def explorable(self) -> FlowOptions:
        """What a method's process is put on."""
        return self.flow

    @property
    def feature_dim(self) -> int:
        """F, the length of the encoded `features`."""
        return self.state_dim + self._vlm_width

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Runs the VLM over pictures and words, as LeRobot's `sample_actions` begins.

        It keeps each layer's keys and values, which of the P tokens are none of padding, and the state
        where the action expert reads it (pi0). The `features` (B, S + W) are the normalised state, then
        the mean of the VLM's tokens.
        """
        with self.acting():
            batch = self.preprocess(obs)
            cache, mask, hidden = self._prefix(batch)
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weight).sum(dim=1) / weight.sum(dim=1)
            encoded = {"features": torch.cat([batch[STATE], pooled.float()], dim=-1), "mask": mask}
            if self.policy_type == "pi0":
                encoded["state"] = self.policy.prepare_state(batch)
        for i, (keys, values, window) in enumerate(cache):
            assert window is None, "a VLM that forgets its first tokens"
            encoded |= {f"keys.{i}": keys, f"values.{i}": values}
        return Encoded(encoded | {_OBS + name: value for name, value in obs.items()})

    def sample(
        self,
        encoded: Encoded,
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
            rows = len(encoded["mask"])
            noise = self._noise(rows, z, mode)
            if noise is None:
                shape = (rows, self.horizon, self.config.max_action_dim)
                noise = normal_like(torch.empty(shape, device=self.device), generator)
            path = denoise(
                self._net(encoded),
                self.process,
                self.grid,
                noise,
                explore=mode == "explore",
                record=record,
                generator=generator,
                action_dim=self.action_dim,
                scored=self.flow.scored,
            )
            return ChunkSample(self.from_chain(path.x, encoded), path.chain)

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns log-probability and entropy of the chain's stochastic steps, (B, S) each."""
        with self.acting():
            net, scored = self._net(encoded), self.flow.scored
            return score(net, self.process, self.grid, chain, action_dim=self.action_dim, scored=scored)

    def velocity(self, encoded: Encoded) -> Net:
        """Returns the velocity network bound to an observation."""
        return self._net(encoded)

    def to_chain(self, actions: Tensor, encoded: Encoded) -> Tensor:
        """Maps chunks (B, H, A) in the dataset's units to the model's scale, padded, (B, H, D)."""
        valid = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
        obs = {name.removeprefix(_OBS): value for name, value in encoded.items() if name.startswith(_OBS)}
        scaled = self.preprocess(obs, actions, valid)["action"]
        return nn.functional.pad(scaled, (0, self.config.max_action_dim - scaled.shape[-1]))

    def from_chain(self, x: Tensor, encoded: Encoded) -> Tensor:
        """Maps the end of a chain (B, H, D) to the dataset's units, (B, H, A)."""
        return self.postprocess(x[..., : self.action_dim])

    @property
    def _vlm_width(self) -> int:
        model = self.policy.model
        if self.policy_type == "smolvla":
            return model.vlm_with_expert.config.text_config.hidden_size
        return model.paligemma_with_expert.paligemma.config.text_config.hidden_size

    def _net(self, encoded: Encoded) -> Net:
        """Returns the velocity network bound to the observations."""
        read = Encoded({name: value for name, value in encoded.items() if not name.startswith(_OBS)})
        every, cache = torch.arange(len(read["mask"]), device=self.device), _cache(read)
        times = torch.tensor(self.grid.times[:-1], dtype=torch.float32, device=self.device)

        def velocity(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
            # `rows` may name an observation more than once.
            seen = read if rows is None or torch.equal(rows, every) else rows_of(read, rows)
            known = {"state": seen["state"]} if "state" in seen else {}
            return self.policy.model.denoise_step(
                prefix_pad_masks=seen["mask"],
                past_key_values=cache if seen is read else _cache(seen),
                x_t=x,
                timestep=times[k].expand(len(x)),
                **known,
            )

        return velocity

    def _prefix(self, batch: dict[str, Any]) -> tuple[Any, Tensor, Tensor]:
        """Returns the cache of keys and values, the mask (B, P), and the last layer's output (B, P, W)."""
        policy, model, is_smol = self.policy, self.policy.model, self.policy_type == "smolvla"
        pictures = (policy.prepare_images if is_smol else policy._preprocess_images)(batch)
        known = {"state": policy.prepare_state(batch)} if is_smol else {}
        embedded, pad, attention = model.embed_prefix(*pictures, batch[_TOKENS], batch[_MASK], **known)
        mask = module_of(self.config, "modeling").make_att_2d_masks(pad, attention)  # (B, P, P)
        vlm = model.vlm_with_expert if is_smol else model.paligemma_with_expert
        if not is_smol:
            vlm.paligemma.model.language_model.config._attn_implementation = "eager"  # as LeRobot does
            mask = extra("lerobot.policies.common.vla_utils").prepare_attention_masks_4d(mask)
        (hidden, _), cache = vlm.forward(
            attention_mask=mask,
            position_ids=torch.cumsum(pad, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return cache, pad, hidden


def _cache(encoded: Encoded) -> Any:
    """Returns every layer's keys and values as transformers keeps them."""
    layers = sum(name.startswith("keys.") for name in encoded)
    pairs = tuple((encoded[f"keys.{i}"], encoded[f"values.{i}"]) for i in range(layers))
    return extra("transformers").DynamicCache(pairs)
