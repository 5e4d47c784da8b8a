"""The ensemble's written-out way back against numerical differences; aggregation by hand."""

import pytest
import torch
from torch import nn

from robot_rl.algos.critics import Critics, EnsembleMLP, aggregate


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
    names = [name for name, _ in net.named_parameters()]

    def answer(x: torch.Tensor, *layers: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, dict(zip(names, layers, strict=True)), (x,))

    assert torch.autograd.gradcheck(answer, (x, *net.parameters()))


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


def test_frozen_weights_pass_gradients_to_inputs_only() -> None:
    net = network(2, layernorm=True)
    x = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    frozen = torch.autograd.grad(net(x, frozen=True).sum(), x)[0]
    torch.testing.assert_close(frozen, torch.autograd.grad(net(x).sum(), x)[0])
    net(x, frozen=True).sum().backward()
    assert all(p.grad is None for p in net.parameters())


def test_bf16_products_stay_close() -> None:
    nets = [
        EnsembleMLP(8, 1, width=256, matmul=matmul, generator=torch.Generator().manual_seed(0))
        for matmul in ("bf16", "fp32")
    ]
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    # bfloat16 has 8 bits of mantissa: products differ by some 0.4 %, their sums by less.
    torch.testing.assert_close(nets[0](x), nets[1](x), rtol=0.02, atol=0.01)


def test_aggregate() -> None:
    q = torch.tensor([[1.0, 9.0], [2.0, 8.0], [6.0, 1.0]])
    assert aggregate(q, "min").tolist() == [1.0, 1.0]
    assert aggregate(q, "mean").tolist() == [3.0, 6.0]
    generator = torch.Generator().manual_seed(0)
    seen = {tuple(aggregate(q, "min_of_2", generator).tolist()) for _ in range(50)}
    # Of critics 0 and 1, 0 and 2, 1 and 2.
    assert seen == {(1.0, 8.0), (1.0, 1.0), (2.0, 1.0)}
    assert aggregate(q[:2], "min_of_2").tolist() == [1.0, 8.0]


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
