"""Real-time chunking: the next chunk continues the one that is executed while it is computed.

Black, Galliker, Levine 2025, "Real-time execution of action chunking flow policies", sections 3 and 4.
The part of the old chunk that will have been executed is frozen, the rest that both chunks cover
counts less and less, and the flow is steered so that its estimate of the chunk agrees with them
(in-painting by pseudo-inverse guidance: Song et al. 2023; Pokle et al. 2024).

The paper's time runs from 0 (noise) to 1 (action), ours from 1 to 0, and our velocity has the
other sign. With x = (1 - t) action + t noise and v = noise - action:

    estimate  a = x - t v(x, t)
    spread    r^2 = t^2 / (t^2 + (1 - t)^2), the variance of the action given x if actions are N(0, 1)
    pull      g = (da / dx)^T W (target - a), the gradient of -|target - a|_W^2 / 2
    guided    v - min(beta, t / ((1 - t) r^2)) g

because a term s added to the score of x changes v by -t / (1 - t) s, and s = g / r^2. For actions
that are N(0, 1), beta infinite and W = 1 the guided estimate is the target itself, whatever x.
B envs, H chunk length, A action dim, D action dim of the path, at least A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import require_fields
from robot_rl.core.policy import ChunkSample, Encoded, Mode
from robot_rl.policies.adapter import PolicyAdapter
from robot_rl.policies.chain import Net, denoise
from robot_rl.policies.processes import Process, TimeGrid
from robot_rl.policies.residual import ResidualPolicy
from robot_rl.policies.spec import build_module, check_chunk, check_mode, full_spec, read_config


@runtime_checkable
class GuidablePolicy(Protocol):
    """A flow policy that shows its velocity field, so that it can be steered."""

    @property
    def horizon(self) -> int: ...

    @property
    def process(self) -> Process: ...

    @property
    def grid(self) -> TimeGrid:
        """The grid it samples on."""
        ...

    def velocity(self, encoded: Encoded) -> Net:
        """Returns the network v(x, step) bound to an observation; differentiable in x."""
        ...

    def to_chain(self, actions: Tensor, encoded: Encoded) -> Tensor:
        """Maps the policy's chunks (B, H, A) to the scale of x, (B, H, D), where D > A is padding."""
        ...

    def from_chain(self, x: Tensor, encoded: Encoded) -> Tensor:
        """Maps the end of a path (B, H, D) to the policy's chunks (B, H, A)."""
        ...


@dataclass(frozen=True, kw_only=True)
class RealTimeConfig:
    """How strongly the next chunk is held to the one before."""

    max_guidance: float = 5.0
    """beta, the largest weight of the guidance (paper, section 4.1); 0 ignores the old chunk."""

    def __post_init__(self) -> None:
        require_fields(self, "real_time ", "0 or more", "max_guidance")


class RealTimeChunks(PolicyAdapter):
    """Continues chunks of a flow policy; otherwise it is its base.

    `ChunkExecutor` calls `sample_after` with what is left of the plan and its own delay; `sample`
    has no old chunk to continue. Only its chains can be scored, continued chunks are not recorded.
    This adapter belongs outermost: its base may be a residual, not the other way round.
    """

    kind: ClassVar[str] = "real_time"

    def __init__(self, base: nn.Module, config: RealTimeConfig | None = None) -> None:
        """Wraps `base`, a flow policy or an adapter that leaves the chunks of one as they are.

        Raises:
            ValueError: the base shows no velocity field, does not act by it, or its chunks are of one step.
        """
        _flow(base)  # refuses a base without one
        super().__init__(base)
        self.config = config or RealTimeConfig()

    def sample_after(
        self,
        encoded: Encoded,
        before: Tensor,
        known: Tensor,
        *,
        frozen: int,
        z: Tensor,
        mode: Mode = "ode",
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A) that continues the one before; see `ContinuingPolicy`."""
        check_mode(mode)
        shape = (len(z), self.horizon, self.action_dim)
        check_chunk("sample_after", "z", z, shape)
        check_chunk("sample_after", "before", before, shape)
        if self.config.max_guidance == 0 or not known.any():
            return self.policy.sample(encoded, z=z, mode=mode, generator=generator)
        flow = _flow(self.base)
        # The pull is a derivative by x, also for callers that have derivatives switched off.
        with torch.inference_mode(False), torch.no_grad():
            # Autograd cannot keep tensors of inference mode.
            encoded = Encoded({name: value.clone() for name, value in encoded.items()})
            before, known = before.clone(), known.clone()
            target = flow.to_chain(before, encoded)
            padding = (0, target.shape[-1] - self.action_dim)
            weights = soft_mask(known, frozen=frozen, horizon=self.horizon).to(target)
            weights = nn.functional.pad(weights[..., None].expand_as(before), padding)
            net = flow.velocity(encoded)
            path = denoise(
                guided(net, flow.grid, target, weights, max_guidance=self.config.max_guidance),
                flow.process,
                flow.grid,
                nn.functional.pad(torch.zeros_like(z) if mode == "mean" else z.clone(), padding),
                explore=mode == "explore",
                record=False,
                generator=generator,
                action_dim=self.action_dim,
            )
            return ChunkSample(flow.from_chain(path.x, encoded))

    def spec(self) -> dict[str, Any]:
        return {"base": full_spec(self.policy), "config": asdict(self.config)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        config = read_config(RealTimeConfig, spec["config"], at=at)
        return cls(build_module(spec, "base", at=at), config)


def guided(net: Net, grid: TimeGrid, target: Tensor, weights: Tensor, *, max_guidance: float) -> Net:
    """Returns the velocity steered towards `target` (B, H, D) where `weights`, as large, say so.

    A row whose weights are all zero keeps its velocity to the bit.
    """

    def predict(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        assert isinstance(k, int)
        assert rows is None, "a walk takes one step for all rows"
        t = grid.times[k]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            velocity = net(x, k)
            estimate = x - t * velocity
            miss = (weights * (target - estimate)).detach()
            # As a sum: torch imports sympy, for seconds, when it is handed the outer gradient.
            (pull,) = torch.autograd.grad((estimate * miss).sum(), x)
        return velocity.detach() - guidance_weight(t, max_guidance) * pull

    return predict


def guidance_weight(t: float, max_guidance: float) -> float:
    """Returns min(max_guidance, t / ((1 - t) r^2)) for a time in (0, 1]."""
    if t >= 1:
        return max_guidance
    return min(max_guidance, (t * t + (1 - t) * (1 - t)) / (t * (1 - t)))


def soft_mask(known: Tensor, *, frozen: int, horizon: int) -> Tensor:
    """Returns how much each step of the old chunk counts, (B, H) (paper, equation 5).

    1 where it is frozen, then falling to 0 where the old chunk ends.

    Args:
        known: (B,), how many steps the old chunk has; a row with 0 has weights 0.
        frozen: how many of them are executed whatever comes.
        horizon: H.
    """
    step = torch.arange(horizon, device=known.device)
    known = known[:, None]
    share = ((known - step) / (known - frozen + 1).clamp_min(1)).clamp(0.0, 1.0)
    soft = share * torch.expm1(share) / (math.e - 1.0)
    return torch.where(step < known, torch.where(step < frozen, 1.0, soft), 0.0)


def _flow(base: nn.Module) -> GuidablePolicy:
    """Returns the policy whose velocity makes the chunks."""
    found = base.base if isinstance(base, ResidualPolicy) else base
    if not isinstance(found, GuidablePolicy):
        raise ValueError(
            f"real_time: {type(found).__name__} shows no velocity field to steer. Allowed: flow policies "
            "(flow, small_vla, lerobot_flow), or a residual on one of them."
        )
    decodes = getattr(getattr(found, "config", None), "decodes", "flow")
    if decodes != "flow":
        raise ValueError(
            f"real_time: {type(found).__name__} acts by its {decodes}, got decodes={decodes}. Allowed: "
            "decodes=flow, whose velocity is steered."
        )
    if found.horizon == 1:
        raise ValueError(
            "real_time: got chunks of 1 step, which leave nothing to continue. Allowed: 2 or more."
        )
    return found
