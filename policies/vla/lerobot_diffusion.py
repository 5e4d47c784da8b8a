"""The policy contract over LeRobot's Diffusion: our process denoises with its network, and has a density.

LeRobot's schedule is ours (`squaredcos_cap_v2`, clipped actions), so its weights serve as they are. Two
things differ from LeRobot's own sampler: the noise levels of a short path, which here begin at the last one
of training, and the noise, which is derived again from a clipped action.
B rows, H chunk length, A action dim, N rows of a call.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor

from robot_rl.core.errors import ConfigError, require
from robot_rl.core.policy import Chain, ChunkSample, Encoded, Mode
from robot_rl.policies.chain import Net, denoise, score, scored_grid
from robot_rl.policies.config import ProcessConfig
from robot_rl.policies.processes import DDIM, DDPM, normal_like
from robot_rl.policies.spec import check_mode, read_config
from robot_rl.policies.vla.lerobot import LeRobotPolicy
from robot_rl.policies.vla.lerobot_build import Parts

STEPS = 10
"""Denoising steps where LeRobot's configuration takes all of training's."""
_NEEDED = {"prediction_type": "epsilon", "beta_schedule": "squaredcos_cap_v2", "clip_sample": True}


@dataclass(frozen=True, kw_only=True)
class DiffusionOptions(ProcessConfig):
    """How the chunk is denoised: `ddim` without noise, until a method explores by `ddpm` or `ddim`."""

    steps: int
    """K, the number of denoising steps."""
    train_steps: int
    """T, the noise levels of training."""

    def exploring(self, options: ProcessConfig) -> DiffusionOptions:
        """Returns these options with another process.

        Raises:
            ConfigError: a process that LeRobot's Diffusion does not have, or options of another one.
        """
        frozen = options.tuned_steps
        require(frozen == 0, "method.exploration.tuned_steps", frozen, "0: all steps learn")
        found = replace(self, **{one.name: getattr(options, one.name) for one in fields(ProcessConfig)})
        found.process_of().check(self.steps)
        return found

    def process_of(self) -> DDIM:
        """Returns the process that it names."""
        require(self.process in ("ddim", "ddpm"), "lerobot_diffusion process", self.process, "ddim, ddpm")
        return (DDPM if self.process == "ddpm" else DDIM)(
            eta=1.0 if self.process == "ddpm" else self.eta,
            train_steps=self.train_steps,
            std_floor=self.std_floor,
            log_prob_std_floor=self.log_prob_std_floor,
        )


class LeRobotDiffusionPolicy(LeRobotPolicy):
    """LeRobot's Diffusion, sampled and scored by our process; imitation is LeRobot's own."""

    kind: ClassVar[str] = "lerobot_diffusion"

    def __init__(self, parts: Parts, *, instruction: str = "", lora: Any = None, flow: Any = None) -> None:
        """Wraps model and pipelines; `create`, `from_pretrained` and `load` make them.

        Raises:
            ConfigError: a policy of another type, or one that was trained for another process.
        """
        if parts.config.type != "diffusion":
            raise ConfigError(f"policy.type: {parts.config.type!r} is no diffusion policy of LeRobot.")
        for name, allowed in _NEEDED.items():
            got = getattr(parts.config, name)
            require(got == allowed, f"lerobot_diffusion: config.{name}", got, str(allowed))
        super().__init__(parts, instruction=instruction, lora=lora, flow=flow)
        config = self.config
        steps = int(config.num_inference_steps or STEPS)
        config.num_inference_steps = steps  # is saved, so that LeRobot takes as many
        config.noise_scheduler_type = "DDIM"
        levels = int(config.num_train_timesteps)
        self.use_options(DiffusionOptions(process="ddim", eta=0.0, steps=steps, train_steps=levels))

    def use_options(self, options: DiffusionOptions) -> None:
        """Denoises so from now on."""
        self.options = options
        self.process = options.process_of()
        self.grid = scored_grid(self.process, options.steps, options.scored)

    @property
    def explorable(self) -> DiffusionOptions:
        """What a method's process is put on."""
        return self.options

    def with_process(self, options: ProcessConfig, *, generator: Generator | None = None) -> Self:
        """Returns a policy that shares this one's weights, and explores in another way.

        `generator` has nothing to draw: the process adds no weights.

        Raises:
            ConfigError: a process that LeRobot's Diffusion does not have.
        """
        twin = copy.copy(self)
        twin._load_state_dict_pre_hooks = OrderedDict()  # a hook holds its module, weakly
        twin.hook_tied()
        twin.use_options(self.options.exploring(options))
        return twin

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

        `ode` decodes `z` without further noise, `mean` decodes zero noise, `explore` runs the process with
        its noise. A recorded sample carries no gradient.

        Raises:
            ValueError: an unknown mode, or `z` of another shape.
        """
        check_mode(mode)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not record), self.acting():
            rows = len(encoded["features"])
            noise = self._noise(rows, z, mode)
            if noise is None:
                empty = torch.empty((rows, self.horizon, self.action_dim), device=self.device)
                noise = normal_like(empty, generator)
            path = denoise(
                self._net(encoded),
                self.process,
                self.grid,
                noise,
                explore=mode == "explore",
                record=record,
                generator=generator,
                scored=self.options.scored,
            )
            return ChunkSample(self.postprocess(path.x.clamp(-1.0, 1.0)), path.chain)

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns log-probability and entropy of the chain's stochastic steps, (B, S) each."""
        with self.acting():
            return score(self._net(encoded), self.process, self.grid, chain, scored=self.options.scored)

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "options": asdict(self.options)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        policy = super().from_spec(spec, at=at)
        policy.use_options(read_config(DiffusionOptions, spec["options"], at=f"{at}: options"))
        return policy

    def _net(self, encoded: Encoded) -> Net:
        """Returns the network bound to the observations."""
        features, options = encoded["features"], self.options
        levels = [round(time * options.train_steps) - 1 for time in self.grid.times[:-1]]
        level_of = torch.tensor(levels, dtype=torch.long, device=self.device)

        def noise(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
            seen = features if rows is None else features[rows]
            return self.policy.diffusion.unet(x, level_of[k].expand(len(x)), global_cond=seen)

        return noise
