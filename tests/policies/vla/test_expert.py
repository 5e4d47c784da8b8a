"""The action expert and the Mixture of Horizons: numbers by hand, and who sees whom."""

import math

import pytest
import torch
from torch import Tensor

from robot_rl.policies.vla.expert import (
    ActionExpert,
    Velocities,
    agreed_prefix,
    balance_loss,
    disagreement,
    fuse,
)

WIDTH, ACTIONS = 16, 3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def expert(horizons: tuple[int, ...], seed: int = 0) -> ActionExpert:
    made = ActionExpert(horizons, ACTIONS, width=WIDTH, depth=2, heads=2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=seeded(seed)))
    return made


def reached(*horizons: int) -> Tensor:
    return torch.arange(horizons[-1]) < torch.tensor(horizons)[:, None]


# --- the mixture ---------------------------------------------------------------------------------


def test_fusion_by_hand() -> None:
    # Two horizons, two steps, one joint: 0.25 * 4 + 0.75 * 8 = 7, and only the longer one at step 1.
    each = torch.tensor([[[4.0], [0.0]], [[8.0], [5.0]]])
    gate = torch.tensor([[0.25, 0.0], [0.75, 1.0]])
    assert fuse(each, gate).flatten().tolist() == [7.0, 5.0]


def test_the_gate_is_a_softmax_over_the_horizons_that_reach_the_step() -> None:
    made = expert((1, 2))
    assert made.gate is not None
    with torch.no_grad():
        made.gate.weight.zero_()
    context = made.cache(normal(1, 5, WIDTH))
    even = made(normal(1, 1, 2, ACTIONS), normal(1, 1, WIDTH), context).gate[0, 0]
    assert even.tolist() == [[0.5, 0.0], [0.5, 1.0]]
    # Logits of step 0 are w . h: with one weight they differ, and the ratio is exp of the difference.
    made = expert((1, 2), seed=3)
    tokens: list[Tensor] = []
    assert made.gate is not None
    made.gate.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0]))
    gate = made(normal(1, 1, 2, ACTIONS), normal(1, 1, WIDTH), context).gate[0, 0]
    logits = made.gate(tokens[0])[0, 0, :, 0].tolist()  # step 0 of horizon 1, steps 0 and 1 of horizon 2
    by_hand = 1.0 / (1.0 + math.exp(logits[1] - logits[0]))
    assert gate[:, 0].tolist() == pytest.approx([by_hand, 1.0 - by_hand], abs=1e-6)
    assert gate[:, 1].tolist() == [0.0, 1.0]


def test_the_mix_is_the_gated_sum() -> None:
    made = expert((2, 5, 8))
    found = made(normal(4, 2, 8, ACTIONS), normal(4, 2, WIDTH), made.cache(normal(4, 6, WIDTH, seed=2)))
    assert found.each.shape == (4, 2, 3, 8, ACTIONS)
    assert torch.allclose(found.gate.sum(dim=2), torch.ones(4, 2, 8), atol=1e-6)
    assert torch.equal(found.gate > 0, reached(2, 5, 8).expand(4, 2, -1, -1))
    by_hand = sum(found.each[:, :, m] * found.gate[:, :, m, :, None] for m in range(3))
    assert isinstance(by_hand, Tensor)
    assert torch.allclose(found.mix, by_hand, atol=1e-6)
    assert found.each[:, :, 0, 2:].abs().max() == 0.0


def test_balance_loss_by_hand() -> None:
    # Horizons 1 and 2: only step 0 is shared. Mean weights 0.75 and 0.25 around 0.5:
    # variance 0.0625, squared coefficient of variation 0.0625 / 0.25 = 0.25.
    first = torch.tensor([[0.9, 0.0], [0.1, 1.0]])
    second = torch.tensor([[0.6, 0.0], [0.4, 1.0]])
    assert balance_loss(torch.stack([first, second]), reached(1, 2)).item() == pytest.approx(0.25)
    assert balance_loss(torch.tensor([[[0.5, 0.0], [0.5, 1.0]]]), reached(1, 2)).item() == 0.0
    # Horizons 1, 2, 3: step 0 has weights (1, 0, 0): variance 2/9 over 1/9 is 2. Step 1 has (0, 1/2, 1/2): 0.
    lazy = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.5, 0.0], [0.0, 0.5, 1.0]]])
    assert balance_loss(lazy, reached(1, 2, 3)).item() == pytest.approx(1.0)


def test_disagreement_by_hand() -> None:
    # Step 0: velocities (1, 0) and (3, 2), mix (2, 2): distances 1.5 and 0.5, mean 1. Step 1: one horizon, 0.
    each = torch.tensor([[[[[1.0, 0.0], [0.0, 0.0]], [[3.0, 2.0], [4.0, 4.0]]]]])
    gate = torch.tensor([[[[0.5, 0.0], [0.5, 1.0]]]])
    found = Velocities(torch.tensor([[[[2.0, 2.0], [4.0, 4.0]]]]), each, gate)
    assert disagreement(found).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("apart", "expected"),
    [
        ([1.0, 1.0, 1.9, 2.1, 0.1, 0.0], 3),  # the limit is 2 x 1: step 3 is over it
        (
            [1.0, 3.0, 3.9, 3.9, 3.9, 0.0],
            5,
        ),  # the limit is 2 x 2; step 5 has one horizon, which proves nothing
        ([1.0, 0.0, 1.1, 0.0, 0.0, 0.0], 2),  # the first 2 always
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 5),
    ],
)
def test_prefix_by_hand(apart: list[float], expected: int) -> None:
    found = agreed_prefix(torch.tensor([apart]), reached(3, 5, 6), ratio=2.0, first=2)
    assert found.tolist() == [expected]
    assert found.dtype == torch.int64


def test_a_horizon_is_the_expert_of_that_length() -> None:
    # One forward pass over all horizons gives what each would alone, on its own part of the chunk.
    made, x, condition = expert((2, 5, 8)), normal(4, 1, 8, ACTIONS), normal(4, 1, WIDTH)
    context = normal(4, 6, WIDTH, seed=2)
    found = made(x, condition, made.cache(context))
    for m, horizon in enumerate((2, 5, 8)):
        alone = ActionExpert((horizon,), ACTIONS, width=WIDTH, depth=2, heads=2)
        weights = {name: value for name, value in made.state_dict().items() if not name.startswith("gate.")}
        alone.load_state_dict(weights | {"position": weights["position"][:horizon]})
        own = alone(x[:, :, :horizon], condition, alone.cache(context))
        assert torch.allclose(own.mix, found.each[:, :, m, :horizon], atol=1e-5)


# --- the expert ----------------------------------------------------------------------------------


def test_chunks_of_a_row_do_not_see_one_another() -> None:
    made, context = expert((8,)), normal(2, 6, WIDTH, seed=2)
    x, condition = normal(2, 3, 8, ACTIONS), normal(2, 3, WIDTH)
    together = made(x, condition, made.cache(context)).mix
    for g in range(3):
        alone = made(x[:, g : g + 1], condition[:, g : g + 1], made.cache(context)).mix
        assert torch.allclose(alone[:, 0], together[:, g], atol=1e-5)


def test_it_reads_the_context_and_the_condition() -> None:
    made, x, condition, context = (
        expert((8,)),
        normal(2, 1, 8, ACTIONS),
        normal(2, 1, WIDTH),
        normal(2, 6, WIDTH),
    )
    found = made(x, condition, made.cache(context)).mix
    assert not torch.allclose(
        made(x, condition, made.cache(context + 1.0 * normal(2, 6, WIDTH, seed=9))).mix, found
    )
    assert not torch.allclose(made(x, condition + 1.0, made.cache(context)).mix, found)


def test_every_weight_gets_a_gradient() -> None:
    made = expert((2, 4))
    found = made(normal(2, 1, 4, ACTIONS), normal(2, 1, WIDTH), made.cache(normal(2, 6, WIDTH, seed=2)))
    found.mix.square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        # A bias on all keys shifts every score alike, and softmax does not notice.
        assert parameter.grad.abs().max() > 1e-8, name
