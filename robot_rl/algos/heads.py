"""Value heads: how a critic's outputs describe the return, and how they learn it.

A head reads the outputs of an ensemble as one distribution of the return per row. Its gradients are
written out, by the network's outputs, so that `EnsembleMLP` carries them the rest of the way.

    out (N, B, O) -> distribution (N, B, D) -> mean (N, B)
    target: reward + bootstrap * (next distribution + bonus), from one distribution (B, D)

N critics, B batch, O outputs, D numbers that describe a distribution, K atoms or quantiles.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.config.off_policy import Value
from robot_rl.algos.returns import td_target


class Head(nn.Module):
    """The mean return itself, by squared error (`losses.td_loss`); the other heads override."""

    outputs = 1
    """O, for each network."""

    def distribution(self, out_NBO: Tensor) -> Tensor:
        """Returns the numbers (N, B, D) that describe each row's return."""
        return out_NBO

    def mean(self, distribution: Tensor) -> Tensor:
        """Returns the mean (...) of distributions (..., D)."""
        return distribution[..., 0]

    def value(self, out_NBO: Tensor) -> Tensor:
        """Returns the mean return (N, B)."""
        return self.mean(self.distribution(out_NBO))

    def value_gradient(self, out_NBO: Tensor, share_NB: Tensor) -> Tensor:
        """Returns the derivative (N, B, O) of the sum over all of share * value."""
        return share_NB.unsqueeze(-1)

    def target(
        self, reward_B: Tensor, bootstrap_B: Tensor, next_BD: Tensor, bonus_B: Tensor, generator: Generator
    ) -> Tensor:
        """Returns what `td` learns from, (B,) or (B, ...).

        Args:
            reward_B: discounted reward of the window.
            bootstrap_B: gamma^m, or 0 where the task ended.
            next_BD: distribution of the return after it.
            bonus_B: added to that return: the entropy's part, or 0.
            generator: of heads that draw from the distribution.
        """
        return td_target(reward_B, bootstrap_B, self.mean(next_BD) + bonus_B)

    def td(self, out_NBO: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the error of the mean (N, B), and the loss's derivative (N, B, O) by the outputs.

        The loss is a mean over the batch and a sum over critics: each learns as it would alone.
        """
        error_NB = out_NBO[..., 0] - target
        return error_NB, (error_NB * (2.0 / len(target))).unsqueeze(-1)


class _Atoms(Head):
    """Probabilities of K fixed returns, learned by cross-entropy."""

    def __init__(self, atoms: int, low: float, high: float) -> None:
        super().__init__()
        self.outputs = atoms
        self.low, self.high = low, high
        self.atoms = nn.Buffer(torch.linspace(low, high, atoms), persistent=False)

    def value_gradient(self, out_NBO: Tensor, share_NB: Tensor) -> Tensor:
        # v = sum p_k z_k and dp_k / dlogit_j = p_k (1[j = k] - p_j): dv / dlogit_k = p_k (z_k - v).
        p = out_NBO.softmax(dim=-1)
        return p * (self.atoms - (p @ self.atoms).unsqueeze(-1)) * share_NB.unsqueeze(-1)

    def _cross_entropy(self, out_NBO: Tensor, target_BK: Tensor) -> tuple[Tensor, Tensor]:
        to_out = out_NBO.softmax(dim=-1).sub_(target_BK)
        return to_out @ self.atoms, to_out / len(target_BK)


class C51(_Atoms):
    """Probabilities of K returns (Bellemare et al. 2017); the target is projected onto them."""

    def distribution(self, out_NBO: Tensor) -> Tensor:
        return out_NBO.softmax(dim=-1)

    def mean(self, distribution: Tensor) -> Tensor:
        return distribution @ self.atoms

    def target(
        self, reward_B: Tensor, bootstrap_B: Tensor, next_BD: Tensor, bonus_B: Tensor, generator: Generator
    ) -> Tensor:
        """Returns probabilities (B, K): each moved atom's is split between its two neighbours."""
        moved_BK = td_target(reward_B[:, None], bootstrap_B[:, None], self.atoms + bonus_B[:, None])
        last = self.outputs - 1
        place_BK = (moved_BK.clamp(self.low, self.high) - self.low) * (last / (self.high - self.low))
        below_BK = place_BK.floor().clamp_(max=last - 1)
        above_share_BK = (place_BK - below_BK) * next_BD
        index_BK = below_BK.long()
        projected = torch.zeros_like(next_BD).scatter_add_(1, index_BK, next_BD - above_share_BK)
        return projected.scatter_add_(1, index_BK + 1, above_share_BK)

    def td(self, out_NBO: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self._cross_entropy(out_NBO, target)


class HLGauss(_Atoms):
    """Probabilities of K bins, of which a Gaussian around the target is learned (Farebrother et al. 2024).

    The atoms are the middles of the bins, whose width is that between atoms; the Gaussian's standard
    deviation is 0.75 of it, as there. Targets are kept between the first and the last atom.
    """

    def __init__(self, atoms: int, low: float, high: float) -> None:
        super().__init__(atoms, low, high)
        width = (high - low) / (atoms - 1)
        self.edges = nn.Buffer(torch.linspace(low - width / 2, high + width / 2, atoms + 1), persistent=False)
        self._scale = 1.0 / (0.75 * width * math.sqrt(2.0))

    def distribution(self, out_NBO: Tensor) -> Tensor:
        """Returns the means (N, B, 1): the target needs no more."""
        return (out_NBO.softmax(dim=-1) @ self.atoms).unsqueeze(-1)

    def td(self, out_NBO: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self._cross_entropy(out_NBO, self.histogram(target))

    def histogram(self, target_B: Tensor) -> Tensor:
        """Returns the Gaussian's probability of each bin, (B, K), within the bins' range."""
        middle_B1 = target_B.clamp(self.low, self.high)[:, None]
        below = torch.erf((self.edges - middle_B1) * self._scale)
        return (below[:, 1:] - below[:, :-1]) / (below[:, -1:] - below[:, :1])


class Quantiles(Head):
    """K quantiles of the return, at (k + 1/2) / K (QR-DQN, Dabney et al. 2018), Huber from 1 on."""

    def __init__(self, atoms: int) -> None:
        super().__init__()
        self.outputs = atoms
        self.levels = nn.Buffer((torch.arange(atoms) + 0.5) / atoms, persistent=False)

    def mean(self, distribution: Tensor) -> Tensor:
        return distribution.mean(dim=-1)

    def value_gradient(self, out_NBO: Tensor, share_NB: Tensor) -> Tensor:
        return (share_NB / self.outputs).unsqueeze(-1).expand_as(out_NBO)

    def target(
        self, reward_B: Tensor, bootstrap_B: Tensor, next_BD: Tensor, bonus_B: Tensor, generator: Generator
    ) -> Tensor:
        """Returns equally likely returns (B, K)."""
        return td_target(reward_B[:, None], bootstrap_B[:, None], next_BD + bonus_B[:, None])

    def td(self, out_NBO: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        # Loss: sum over quantiles i of the mean over j of |level_i - 1[d < 0]| huber(d), d = target_j - q_i.
        difference = target[:, None, :] - out_NBO.unsqueeze(-1)
        tilt = (self.levels[:, None] - (difference < 0).to(out_NBO.dtype)).abs_()
        to_out = tilt.mul_(difference.clamp_(-1.0, 1.0)).mean(dim=-1)
        return out_NBO.mean(dim=-1) - target.mean(dim=-1), to_out * (-1.0 / len(target))


class Gaussian(Head):
    """Mean and standard deviation of the return (DSAC-T, Duan et al. 2023).

    The mean learns from the mean of the target, by Huber of 50; the standard deviation from a drawn
    return, kept within 3 average standard deviations of the present mean; each row is weighted by
    how sure it is. Deviations: no target policy; and the standard deviation is pulled to the squared
    difference and not, as Huber has it, to half of it, so that it is the return's.
    """

    outputs = 2
    _FLOOR = 0.1
    _HUBER = 50.0

    def __init__(self, num: int, rate: float = 0.005) -> None:
        """Args: num: N; rate: share of the way that the average standard deviation follows."""
        super().__init__()
        self._rate = rate
        self.average_std = nn.Buffer(torch.zeros(num))  # 0: none yet

    def distribution(self, out_NBO: Tensor) -> Tensor:
        """Returns mean and standard deviation (N, B, 2)."""
        return torch.stack([out_NBO[..., 0], nn.functional.softplus(out_NBO[..., 1])], dim=-1)

    def value_gradient(self, out_NBO: Tensor, share_NB: Tensor) -> Tensor:
        return torch.stack([share_NB, torch.zeros_like(share_NB)], dim=-1)

    def target(
        self, reward_B: Tensor, bootstrap_B: Tensor, next_BD: Tensor, bonus_B: Tensor, generator: Generator
    ) -> Tensor:
        """Returns the target's mean and a draw from it, (B, 2); the noise is kept within 3."""
        noise_B = torch.empty_like(bonus_B).normal_(generator=generator).clamp_(-3.0, 3.0)
        after = torch.stack([next_BD[:, 0], next_BD[:, 0] + next_BD[:, 1] * noise_B], dim=-1)
        return td_target(reward_B[:, None], bootstrap_B[:, None], after + bonus_B[:, None])

    def td(self, out_NBO: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mean_NB, raw_NB = out_NBO.unbind(dim=-1)
        std_NB = nn.functional.softplus(raw_NB)
        average_N1 = self._follow(std_NB.mean(dim=1)).unsqueeze(-1)
        variance_NB = std_NB.square()
        weight_NB = (average_N1.square() / (variance_NB + self._FLOOR)).clamp_(0.1, 10.0)
        weight_NB /= len(target)
        error_NB = mean_NB - target[:, 0]
        drawn_NB = torch.maximum(torch.minimum(target[:, 1] - mean_NB, 3 * average_N1), -3 * average_N1)
        to_std = weight_NB * (variance_NB - drawn_NB.square()) / (std_NB + self._FLOOR)
        to_mean = weight_NB * error_NB.clamp(-self._HUBER, self._HUBER)
        # d softplus(x) / dx = sigmoid(x)
        return error_NB, torch.stack([to_mean, to_std * raw_NB.sigmoid()], dim=-1)

    def _follow(self, std_N: Tensor) -> Tensor:
        """Returns the average standard deviation (N,), with the present one in it."""
        begun = self.average_std > 0
        self.average_std.copy_(torch.where(begun, self.average_std.lerp(std_N, self._rate), std_N))
        return self.average_std


def make_head(value: Value, *, num: int, atoms: int, low: float, high: float) -> Head:
    """Returns the head of `num` critics; not every head uses the atoms and the range."""
    if value == "c51":
        return C51(atoms, low, high)
    if value == "hl_gauss":
        return HLGauss(atoms, low, high)
    if value == "quantile":
        return Quantiles(atoms)
    return Gaussian(num) if value == "gaussian" else Head()
