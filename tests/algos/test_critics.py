"""The ensemble's written-out way back against numerical differences; aggregation by hand."""

import copy

import pytest
import torch
from torch import nn

from robot_rl.algos.critics import Aggregate, Critics, EnsembleMLP
from robot_rl.algos.losses import td_loss


def network(depth: int, *, layernorm: bool, num: int = 2) -> EnsembleMLP:
    generator = torch.Generator().manual_seed(1)
    net = EnsembleMLP(
        3, 2, num=num, width=6, depth=depth, layernorm=layernorm, matmul="fp32", generator=generator
    )
    return net.double()


@pytest.mark.parametrize("layernorm", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gradients_are_numerical_differences(depth: int, layernorm: bool) -> None:
    net = network(depth, layernorm=layernorm)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def answer(x: torch.Tensor, *layers: torch.Tensor) -> torch.Tensor:
        # The layers are the net's own: gradcheck changes them in place.
        return net(x)

    assert torch.autograd.gradcheck(answer, (x, *net.in_order))


@pytest.mark.parametrize("layernorm", [False, True])
def test_it_is_the_usual_network(layernorm: bool) -> None:
    net = network(2, layernorm=layernorm)
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for n in range(2):
        hidden, parameters = x, [p[n] for p in net.parameters()]
        for i in (0, 2):
            hidden = hidden @ parameters[i] + parameters[i + 1]
            hidden = (nn.functional.layer_norm(hidden, (6,)) if layernorm else hidden).relu()
        torch.testing.assert_close(net(x)[n], hidden @ parameters[4] + parameters[5])


def test_the_same_net_asked_in_part() -> None:
    net = network(2, layernorm=True, num=3)
    x = torch.randn(4, 3, dtype=torch.float64)
    some, _ = net.answer(x, [2, 0])
    torch.testing.assert_close(some, net(x)[[2, 0]])


def test_bf16_products_stay_close() -> None:
    nets = [
        EnsembleMLP(8, 1, width=256, matmul=matmul, generator=torch.Generator().manual_seed(0))
        for matmul in ("bf16", "fp32")
    ]
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    # bfloat16 has 8 bits of mantissa: products differ by some 0.4 %, their sums by less.
    torch.testing.assert_close(nets[0](x), nets[1](x), rtol=0.02, atol=0.01)


def test_gradients_of_bf16_products_stay_close() -> None:
    found: list[list[torch.Tensor]] = []
    for matmul in ("bf16", "fp32"):
        draws = torch.Generator().manual_seed(0)
        net = EnsembleMLP(8, 1, num=2, width=256, depth=3, matmul=matmul, generator=draws)
        with torch.no_grad():
            for layer in net.layers:
                layer.abs_()  # no unit is off: rounding would switch some of them, and their gradients
        out, path = net.answer(torch.rand(64, 8, generator=torch.Generator().manual_seed(1)))
        to_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        to_x = torch.zeros(64, 8)
        found.append([*net.gradients(to_out, path, to_x), to_x])
        assert to_x.equal(net.input_gradient(to_out, path))
    for half, full in zip(*found, strict=True):
        assert float((half - full).norm() / full.norm()) < 0.02


def features_and_action() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(6, 2, generator=generator), torch.randn(6, 1, generator=generator)


def constant_critics(*values: float) -> Critics:
    """Critics that answer their last bias, whatever they are asked."""
    critics = Critics(2, 1, num=len(values), width=4)
    with torch.no_grad():
        for layer in critics.layers:
            layer.zero_()
        critics.layers[-1].copy_(torch.tensor(values)[:, None])
    return critics


def test_pessimism_is_the_smaller_of_two_drawn() -> None:
    critics, generator = constant_critics(1.0, 2.0, 6.0), torch.Generator().manual_seed(0)
    seen = {tuple(critics.pessimistic(*features_and_action(), generator).tolist()) for _ in range(50)}
    # Of critics 0 and 1 or 2: 1; of 1 and 2: 2. The whole batch has the same two.
    assert seen == {(1.0,) * 6, (2.0,) * 6}
    assert constant_critics(3.0).pessimistic(*features_and_action(), generator).tolist() == [3.0] * 6


def test_td_gradients_are_those_of_the_td_loss() -> None:
    critics = Critics(2, 1, num=3, width=8, generator=torch.Generator().manual_seed(4))
    features, action = features_and_action()
    target = torch.linspace(-1, 1, 6)
    error, gradients = critics.td_gradients(features, action, target)
    q = critics(torch.cat([features, action], dim=1)).squeeze(-1)
    torch.testing.assert_close(error, q.detach() - target)
    for mine, peer in zip(gradients, torch.autograd.grad(td_loss(q, target), critics.in_order), strict=True):
        torch.testing.assert_close(mine, peer)


def test_the_td_gradient_by_the_features_by_hand() -> None:
    """Two critics of one unit: q = v relu(2 f + a), v = 3 and -1; f = 1, a = 1, so that q = 9 and -3.

    The loss is the sum of (q - 5)^2 = 16 and 64; its gradient by f 2 * 4 * 3 * 2 + 2 * -8 * -1 * 2 = 48 + 32,
    that by a half of it. In the other row the units are off. The loss is a mean over two rows.
    """
    critics = Critics(1, 1, num=2, width=1, depth=1, layernorm=False)
    with torch.no_grad():
        for layer, value in zip(
            critics.layers, ([2.0, 1.0] * 2, [0.0] * 2, [3.0, -1.0], [0.0] * 2), strict=True
        ):
            layer.copy_(torch.tensor(value).view(layer.shape))
    rows = torch.tensor([[1.0], [-1.0]])
    to_x = torch.ones(2, 2)
    error, gradients = critics.td_gradients(rows, rows, torch.full((2,), 5.0), to_x)
    assert error.tolist() == [[4.0, -5.0], [-8.0, -5.0]]
    assert to_x.tolist() == [[1.0 + 40.0, 1.0 + 20.0], [1.0, 1.0]]  # it is added to what is there
    for mine, plain in zip(
        gradients, critics.td_gradients(rows, rows, torch.full((2,), 5.0))[1], strict=True
    ):
        assert mine.equal(plain)


@pytest.mark.parametrize("layernorm", [False, True])
def test_the_td_gradient_by_the_features_is_a_numerical_difference(layernorm: bool) -> None:
    critics = Critics(2, 1, num=3, width=6, layernorm=layernorm, matmul="fp32").double()
    features, action = (x.double() for x in features_and_action())
    target, to_x = torch.linspace(-1, 1, 6).double(), torch.zeros(6, 3).double()
    critics.td_gradients(features, action, target, to_x)
    x, step = torch.cat([features, action], dim=1), 1e-6
    for row in range(6):
        for column in range(3):
            moved = [x.clone(), x.clone()]
            moved[0][row, column] += step
            moved[1][row, column] -= step
            above, below = (float(td_loss(critics(one).squeeze(-1), target).detach()) for one in moved)
            assert float(to_x[row, column]) == pytest.approx((above - below) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("how", ["mean", "min"])
def test_the_action_gradient_is_autograds(how: Aggregate) -> None:
    critics = Critics(2, 1, num=3, width=8, generator=torch.Generator().manual_seed(4))
    features, action = features_and_action()
    value, gradient = critics.action_gradient(features, action, how)
    action.requires_grad_()
    q = critics(torch.cat([features, action], dim=1)).squeeze(-1)
    expected = q.mean(dim=0) if how == "mean" else q.amin(dim=0)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), action)[0])


def test_targets_follow() -> None:
    critics = Critics(2, 1, num=2, width=4, generator=torch.Generator().manual_seed(0))
    target = critics.target()
    before = target.layers[0].clone()
    with torch.no_grad():
        critics.layers[0].add_(1.0)
    target.follow_online(critics, 0.25)
    torch.testing.assert_close(target.layers[0], before + 0.25)
    assert not any(p.requires_grad for p in target.parameters())


def test_critics_differ_and_a_seed_is_a_seed() -> None:
    one, two = (Critics(2, 1, num=3, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    features, action = torch.ones(1, 2), torch.ones(1, 1)
    q = one.q(features, action)
    assert q.shape == (3, 1)
    assert q.unique().numel() == 3
    assert q.equal(two.q(features, action))


def test_copies_and_casts_keep_their_own_weights() -> None:
    net = network(2, layernorm=False)
    x = torch.randn(4, 3, dtype=torch.float64)
    before = net(x)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.layers[-1].add_(1.0)
    torch.testing.assert_close(twin(x), before + 1.0)
    torch.testing.assert_close(net(x), before)
    assert net.float()(x.float()).dtype == torch.float32
    net.load_state_dict(twin.state_dict())
    torch.testing.assert_close(net(x.float()), (before + 1.0).float())
