"""Value heads: targets by hand, and gradients against autograd of the losses as the papers have them."""

import math

import pytest
import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.critics import Critics
from robot_rl.algos.heads import C51, Gaussian, Head, HLGauss, Quantiles, Value, make_head
from robot_rl.algos.losses import td_loss

VALUES: list[Value] = ["mse", "c51", "hl_gauss", "quantile", "gaussian"]


def head_of(value: Value) -> Head:
    return make_head(value, num=3, atoms=7, low=-3.0, high=3.0).double()


def outputs(head: Head, seed: int = 0) -> Tensor:
    return torch.randn(3, 5, head.outputs, dtype=torch.float64, generator=Generator().manual_seed(seed))


def target_of(head: Head, seed: int = 1) -> Tensor:
    generator = Generator().manual_seed(seed)
    following = head.distribution(outputs(head, seed + 1))[0]
    reward, bootstrap, bonus = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    return head.target(reward, bootstrap.sigmoid(), following, 0.1 * bonus, generator)


@pytest.mark.parametrize("value", VALUES)
def test_the_values_gradient_is_autograds(value: Value) -> None:
    head = head_of(value)
    out = outputs(head).requires_grad_()
    share = torch.randn(3, 5, dtype=torch.float64, generator=Generator().manual_seed(9))
    expected = torch.autograd.grad((share * head.value(out)).sum(), out)[0]
    torch.testing.assert_close(head.value_gradient(out.detach(), share), expected)


def loss_of(head: Head, out: Tensor, target: Tensor) -> Tensor:
    """The loss, with the operations of torch that the papers' formulas name."""
    if isinstance(head, C51 | HLGauss):
        wanted = head.histogram(target) if isinstance(head, HLGauss) else target
        return -(wanted * out.log_softmax(dim=-1)).sum(dim=-1).mean(dim=1).sum()
    if isinstance(head, Quantiles):
        difference = target[:, None, :] - out.unsqueeze(-1)
        huber = nn.functional.huber_loss(difference, torch.zeros_like(difference), reduction="none")
        tilt = (head.levels[:, None] - (difference.detach() < 0).double()).abs()
        return (tilt * huber).mean(dim=-1).sum(dim=-1).mean(dim=1).sum()
    if isinstance(head, Gaussian):
        mean, std = out[..., 0], nn.functional.softplus(out[..., 1])
        fixed, spread = std.detach(), std.detach().mean(dim=1, keepdim=True)  # the first batch is the average
        weight = (spread**2 / (fixed**2 + 0.1)).clamp(0.1, 10)
        huber = nn.functional.huber_loss(mean, target[:, 0].expand_as(mean), delta=50.0, reduction="none")
        drawn = (target[:, 1] - mean.detach()).clamp(min=-3 * spread, max=3 * spread)
        return (weight * (huber + std * (fixed**2 - drawn**2) / (fixed + 0.1))).mean(dim=1).sum()
    return td_loss(head.value(out), target)


@pytest.mark.parametrize("value", VALUES)
def test_the_losss_gradient_is_autograds(value: Value) -> None:
    head = head_of(value)
    out, target = outputs(head).requires_grad_(), target_of(head)
    expected = torch.autograd.grad(loss_of(head, out, target), out)[0]
    torch.testing.assert_close(head.td(out.detach(), target)[1], expected)


@pytest.mark.parametrize("value", VALUES)
def test_an_end_has_no_value_after_it(value: Value) -> None:
    head = head_of(value)
    reward, nothing = torch.full((5,), 0.5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    following = head.distribution(outputs(head))[0]
    target = head.target(reward, nothing, following, torch.ones_like(reward), Generator())
    error, _ = head.td(outputs(head), target)
    torch.testing.assert_close(head.value(outputs(head)) - error, reward.expand(3, 5), atol=1e-3, rtol=0)


def test_the_projection_splits_a_moved_atom_between_its_neighbours() -> None:
    head = C51(3, 0.0, 2.0)  # atoms 0, 1, 2
    args = torch.tensor([0.25]), torch.tensor([0.5]), torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([0.5])
    # 0.25 + 0.5 (z + 0.5) = 0.5, 1, 1.5: halves of 0.2 go to atoms 0 and 1, 0.3 to 1, halves of 0.5 to 1 and 2.
    torch.testing.assert_close(head.target(*args, Generator()), torch.tensor([[0.1, 0.65, 0.25]]))


@pytest.mark.parametrize(("reward", "expected"), [(9.0, [0.0, 0.0, 1.0]), (-9.0, [1.0, 0.0, 0.0])])
def test_the_projection_ends_at_the_range(reward: float, expected: list[float]) -> None:
    head, one = C51(3, 0.0, 2.0), torch.ones(1)
    target = head.target(reward * one, one, torch.tensor([[0.2, 0.3, 0.5]]), 0 * one, Generator())
    torch.testing.assert_close(target, torch.tensor([expected]))


def test_the_histogram_is_the_gaussians() -> None:
    head = HLGauss(3, 0.0, 2.0)  # bins of width 1 around 0, 1, 2; standard deviation 0.75
    inner, outer = math.erf(0.5 / 0.75 / math.sqrt(2)), math.erf(1.5 / 0.75 / math.sqrt(2))
    side = (outer - inner) / 2 / outer
    torch.testing.assert_close(head.histogram(torch.tensor([1.0])), torch.tensor([[side, inner / outer, side]]))


def test_quantiles_by_hand() -> None:
    head = Quantiles(2)  # levels 0.25, 0.75
    out, target = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[0.5, 3.0]])
    # Quantile 0: d = 0.5, 3 -> 0.25 (0.5 + 1) / 2; quantile 1: d = -0.5, 2 -> (0.25 (-0.5) + 0.75) / 2.
    torch.testing.assert_close(head.td(out, target)[1], torch.tensor([[[-0.1875, -0.3125]]]))


def test_the_gaussians_draw_is_kept_within_three_average_deviations() -> None:
    head = Gaussian(1)
    raw = math.log(math.expm1(2.0))  # softplus gives 2
    out = torch.tensor([[[1.0, raw]]])
    near, far = (head.td(out, torch.tensor([[1.0, drawn]]))[1][0, 0, 1].item() for drawn in (7.0, 700.0))
    # weight 4 / 4.1, (4 - 6^2) / 2.1, and the slope of softplus at raw: 1 - exp(-2).
    assert near == far == pytest.approx(4 / 4.1 * (4 - 36) / 2.1 * (1 - math.exp(-2)))


def test_the_gaussian_learns_mean_and_deviation() -> None:
    head, generator = Gaussian(1), Generator().manual_seed(0)
    out = torch.zeros(1, 256, 2)
    nothing = torch.zeros(256)
    for _ in range(3000):  # returns of mean 2 and deviation 0.8; the noise is cut at 3, which costs 1 %
        after = torch.tensor([2.0, 0.8]).expand(256, 2)
        _, to_out = head.td(out, head.target(nothing, nothing + 1, after, nothing, generator))
        out -= 0.02 * len(nothing) * to_out.mean(dim=1, keepdim=True)
    mean, std = head.distribution(out)[0, 0]
    assert mean.item() == pytest.approx(2.0, abs=0.02)
    assert std.item() == pytest.approx(0.8, rel=0.03)


def test_the_average_deviation_is_in_the_checkpoint() -> None:
    head, other = Gaussian(3), Gaussian(3)
    head.td(outputs(head).float(), torch.zeros(5, 2))
    other.load_state_dict(head.state_dict())
    assert other.average_std.equal(head.average_std)
    assert (head.average_std > 0).all()


def constant(head: Head, *outs: list[float]) -> Critics:
    """Critics that answer their last bias, whatever they are asked."""
    critics = Critics(2, 1, num=len(outs), width=4, head=head)
    with torch.no_grad():
        for layer in critics.layers:
            layer.zero_()
        critics.layers[-1].copy_(torch.tensor(outs))
    return critics


def test_the_smaller_of_two_distributions_is_kept_whole() -> None:
    low, high = [0.0, 0.0, 0.0], [-9.0, -9.0, 9.0]
    critics = constant(C51(3, 0.0, 2.0), high, low)
    pair = torch.zeros(4, 2), torch.zeros(4, 1)
    third = torch.full((4, 3), 1 / 3)
    torch.testing.assert_close(critics.distribution(*pair, [0, 1], "min"), third)
    # The mean of two distributions is their mixture.
    mixture = torch.tensor([1 / 6, 1 / 6, 2 / 3]).expand(4, 3)
    torch.testing.assert_close(critics.distribution(*pair, [0, 1], "mean"), mixture, atol=1e-6, rtol=0)
    torch.testing.assert_close(critics.pessimistic(*pair, Generator()), torch.ones(4))
