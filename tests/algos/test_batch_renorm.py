"""Batch (re)normalisation by hand, its way back against autograd, and critics that learn with it."""

import copy
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Generator, Tensor

from robot_rl.algos.batch_renorm import BatchRenorm
from robot_rl.algos.critics import Critics, EnsembleMLP
from robot_rl.algos.losses import td_loss
from robot_rl.algos.optim import Optimiser


def norm(*, warmup: int, mean: float = 0.0, variance: float = 1.0) -> BatchRenorm:
    layer = BatchRenorm(1, 2, warmup=warmup).double()
    layer.mean.fill_(mean)
    layer.variance.fill_(variance)
    return layer


X = torch.tensor([[0.0, 1.0], [2.0, 5.0]], dtype=torch.float64)  # means 1 and 3, deviations 1 and 2


def test_at_first_it_is_batch_norm() -> None:
    layer = norm(warmup=1)
    y, _ = layer(X)
    torch.testing.assert_close(y[0], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(layer.mean[0], torch.tensor([0.01, 0.03]).double())
    torch.testing.assert_close(layer.variance[0], torch.tensor([1.0, 1.03]).double())


def test_then_the_batch_is_seen_with_the_averages() -> None:
    y, _ = norm(warmup=0, mean=2.0, variance=1.0)(X)
    # Within the limits r and d undo the batch's own statistics: y = (x - 2) / 1.
    torch.testing.assert_close(y[0], X - 2.0, atol=5e-3, rtol=0)


def test_within_limits() -> None:
    y, _ = norm(warmup=0, mean=100.0, variance=1.0)(10.0 * X)
    # r = 10 and 20, kept at 3; d = -90 and -70, kept at -5.
    torch.testing.assert_close(y[0], torch.tensor([[-8.0, -8.0], [-2.0, -2.0]]).double(), atol=1e-3, rtol=0)


def norms(net: EnsembleMLP) -> list[BatchRenorm]:
    return [cast("BatchRenorm", layer) for layer in net.renorms]


def network(warmup: int) -> EnsembleMLP:
    generator = Generator().manual_seed(1)
    net = EnsembleMLP(
        3, 2, num=2, width=6, batchnorm=True, renorm_warmup=warmup, matmul="fp32", generator=generator
    ).double()
    for layer in norms(net):
        layer.mean.normal_(generator=generator)
        layer.variance.uniform_(0.5, 2.0, generator=generator)
        for own in (layer.scale, layer.shift):
            own.data.normal_(generator=generator)
    return net


def usual(net: EnsembleMLP, layers: Sequence[Tensor], x: Tensor, n: int, *, warm: bool) -> Tensor:
    """The network in torch's words, in training; its averages stay."""
    hidden = x
    for i, layer in enumerate(norms(net)):
        mean, std = hidden.mean(dim=0), (hidden.var(dim=0, correction=0) + 1e-3).sqrt()
        r, d = torch.ones_like(std), torch.zeros_like(std)
        if warm:
            average_std = (layer.variance[n] + 1e-3).sqrt()
            r = (std / average_std).detach().clamp(1 / 3, 3)
            d = ((mean - layer.mean[n]) / average_std).detach().clamp(-5, 5)
        scale, shift = layers[6 + 2 * i][n], layers[7 + 2 * i][n]
        hidden = ((hidden - mean) / std * r + d) * scale + shift
        hidden = hidden @ layers[2 * i][n] + layers[2 * i + 1][n]
        hidden = hidden.relu() if i < 2 else hidden
    return hidden


@pytest.mark.parametrize("warm", [False, True])
def test_gradients_are_autograds(warm: bool) -> None:
    net = network(warmup=0 if warm else 1)
    generator = Generator().manual_seed(2)
    x = torch.randn(8, 3, dtype=torch.float64, generator=generator).requires_grad_()
    to_out = torch.randn(2, 8, 2, dtype=torch.float64, generator=generator)
    expected = torch.stack([usual(net, net.in_order, x, n, warm=warm) for n in range(2)])
    *peers, by_x = torch.autograd.grad((to_out * expected).sum(), [*net.in_order, x])
    with torch.no_grad():
        out, paths = net.answer(x, trains=True)
        torch.testing.assert_close(out, expected)
        to_x = torch.zeros_like(x)
        for mine, peer in zip(net.gradients(to_out, paths, to_x), peers, strict=True):
            torch.testing.assert_close(mine, peer)
        torch.testing.assert_close(to_x, by_x)


def test_outside_of_training_it_goes_by_the_averages() -> None:
    net = network(warmup=1)
    x = torch.randn(5, 3, dtype=torch.float64, generator=Generator().manual_seed(3))
    with torch.no_grad():
        out, paths = net.answer(x)
        plain = EnsembleMLP(3, 2, num=2, width=6, matmul="fp32").double()
        for own, folded in zip(plain.in_order, net.plain(), strict=True):
            own.copy_(folded)
    for n in range(2):
        hidden = x
        for i, layer in enumerate(norms(net)):
            hidden = (hidden - layer.mean[n]) / (layer.variance[n] + 1e-3).sqrt()
            hidden = hidden * layer.scale[n] + layer.shift[n]
            hidden = hidden @ net.layers[2 * i][n] + net.layers[2 * i + 1][n]
            hidden = hidden.relu() if i < 2 else hidden
        torch.testing.assert_close(out[n], hidden)
    x.requires_grad_()
    to_out = torch.randn(2, 5, 2, dtype=torch.float64, generator=Generator().manual_seed(4))
    expected = torch.autograd.grad((to_out * plain(x)).sum(), x)[0]
    with torch.no_grad():
        torch.testing.assert_close(net.input_gradient(to_out, paths), expected)


def test_unit_weights_by_hand() -> None:
    """Weights (3, 4) and bias 10 become (0.6, 0.8) and 2; the norm that reads the unit sees a fifth of it."""
    net = EnsembleMLP(2, 1, width=1, depth=1, batchnorm=True, matmul="fp32")
    weight, bias, last, _ = net.layers
    reads, behind = norms(net)
    with torch.no_grad():
        weight.copy_(torch.tensor([[[3.0], [4.0]]]))
        bias.fill_(10.0)
        last.fill_(7.0)
    for norm_ in (reads, behind):
        norm_.mean.fill_(20.0)
        norm_.variance.fill_(50.0)
    net.scale_to_unit_weights()
    assert weight.flatten().tolist() == pytest.approx([0.6, 0.8])
    assert (bias.item(), last.item()) == pytest.approx((2.0, 7.0))
    assert (behind.mean.item(), behind.variance.item()) == pytest.approx((4.0, 2.0))
    assert (reads.mean[0].tolist(), reads.variance[0].tolist()) == ([20.0, 20.0], [50.0, 50.0])


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_unit_weights_answer_as_those_before(
    trains: bool, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epsilon is what a unit's scale is compared with; here it is too small to matter."""
    monkeypatch.setattr("robot_rl.algos.batch_renorm._EPS", 1e-12)
    net = network(warmup=0 if warm else 2)
    x = torch.randn(64, 3, dtype=torch.float64, generator=Generator().manual_seed(3))
    with torch.no_grad():
        units = copy.deepcopy(net)
        units.scale_to_unit_weights()
        assert not units.layers[0].equal(net.layers[0])
        for mine, before in zip(units.layers[-2:], net.layers[-2:], strict=True):
            assert mine.equal(before)
        torch.testing.assert_close(units.answer(x, trains=trains)[0], net.answer(x, trains=trains)[0])


def test_unit_weights_need_a_batch_norm() -> None:
    with pytest.raises(AssertionError, match="another function"):
        EnsembleMLP(3, 2, width=6).scale_to_unit_weights()


def test_the_joint_pass_trains_on_the_present_rows_alone() -> None:
    critics = Critics(2, 1, num=2, width=8, layernorm=False, batchnorm=True, matmul="fp32").double()
    generator = Generator().manual_seed(5)
    features, after = torch.randn(2, 6, 2, dtype=torch.float64, generator=generator)
    action, next_action = torch.randn(2, 6, 1, dtype=torch.float64, generator=generator)
    both = torch.cat([torch.cat([features, action], dim=1), torch.cat([after, next_action], dim=1)])
    both.requires_grad_()
    q = torch.stack([usual(critics, critics.in_order, both, n, warm=False)[:, 0] for n in range(2)])
    target = 0.5 * q[:, 6:].amin(dim=0).detach()
    *peers, by_both = torch.autograd.grad(td_loss(q[:, :6], target), [*critics.in_order, both])
    to_both = torch.zeros_like(both)
    with torch.no_grad():
        error, gradients = critics.joint_td_gradients(
            (features, action),
            (after, next_action),
            lambda out: 0.5 * critics.aggregate(out, "min")[:, 0],
            to_both,
        )
    torch.testing.assert_close(to_both, by_both)
    torch.testing.assert_close(error, q[:, :6].detach() - target)
    for mine, peer in zip(gradients, peers, strict=True):
        torch.testing.assert_close(mine, peer)


def test_values_are_learned_faster_than_one_bias_moves() -> None:
    """Without a shift the mean of the values would be one bias, and rise by the rate at each update."""
    critics = Critics(2, 1, num=1, width=64, layernorm=False, batchnorm=True)
    optimiser, generator = Optimiser(critics.parameters(), lr=1e-3), Generator().manual_seed(6)
    pairs = torch.randn(300, 64, 3, generator=generator).split([2, 1], dim=-1)
    for features, action in zip(*pairs, strict=True):
        optimiser.apply(critics.td_gradients(features, action, torch.full((64,), 10.0))[1])
    assert critics.q(pairs[0][-1], pairs[1][-1]).mean() > 3.0


def test_autograd_is_refused() -> None:
    with pytest.raises(AssertionError, match="use `answer`"):
        network(1)(torch.zeros(2, 3).double())


def test_averages_are_in_the_checkpoint() -> None:
    net, twin = network(1), EnsembleMLP(3, 2, num=2, width=6, batchnorm=True, matmul="fp32").double()
    x = torch.randn(8, 3, dtype=torch.float64, generator=Generator().manual_seed(2))
    net.answer(x, trains=True)
    twin.load_state_dict(net.state_dict())
    with torch.no_grad():
        assert twin.answer(x)[0].equal(net.answer(x)[0])
