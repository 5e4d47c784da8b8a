"""AdamW, clipping, averages and learning rates, by hand and against torch."""

import copy

import pytest
import torch

from robot_rl.algos.optim import Optimiser, _lowest_precision, cosine_lr, follow, matmul_precision


def test_optimiser_is_torch_adamw() -> None:
    torch.manual_seed(0)
    mine = torch.nn.Linear(4, 3)
    peer = copy.deepcopy(mine)
    optimiser = Optimiser(mine.parameters(), lr=0.01, weight_decay=0.1)
    reference = torch.optim.AdamW(peer.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(5):
        x = torch.randn(8, 4)
        optimiser.step(mine(x).square().mean())
        reference.zero_grad()
        peer(x).square().mean().backward()
        reference.step()
    for a, b in zip(mine.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_only_its_own_parameters_move() -> None:
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    Optimiser([a], lr=0.1).step((a * b).sum())
    # The first step of Adam is the learning rate: 1 - 0.1.
    torch.testing.assert_close(a.detach(), torch.full((2,), 0.9))
    assert b.tolist() == [1.0, 1.0]
    assert b.grad is None


def test_a_restored_optimiser_goes_on_alike() -> None:
    def build() -> tuple[torch.nn.Parameter, Optimiser]:
        p = torch.nn.Parameter(torch.ones(3))
        return p, Optimiser([p], lr=0.1, grad_clip=1.0)

    (p, one), (q, two) = build(), build()
    for _ in range(3):
        one.step(p.square().sum())
    two.load_state_dict(one.state_dict())
    q.data.copy_(p.data)
    one.step(p.pow(3).sum())
    two.step(q.pow(3).sum())
    assert torch.equal(p, q)


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 0.2), (10.0, 1.0)])
def test_gradients_are_clipped_to_their_common_norm(limit: float, factor: float) -> None:
    # The norm over both is sqrt(3^2 + 4^2) = 5. The moment that follows the gradient shows what was taken.
    optimiser = Optimiser(
        [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1, 1))],
        lr=0.1,
        grad_clip=limit,
        beta1=0.5,
    )
    optimiser.apply([torch.tensor([3.0]), torch.tensor([[4.0]])])
    first, second = optimiser.state_dict()["mean"]
    torch.testing.assert_close(first, torch.tensor([0.5 * 3.0 * factor]))
    torch.testing.assert_close(second, torch.tensor([[0.5 * 4.0 * factor]]))


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_that_the_device_skips_changes_nothing(clip: float) -> None:
    start, gradient = torch.linspace(-1.0, 1.0, 7), torch.linspace(2.0, -1.0, 7)
    found: list[tuple[torch.Tensor, dict[str, list[torch.Tensor]]]] = []
    for skips in ([None, None], [False, True, False], [True, False, True, False]):
        weight = torch.nn.Parameter(start.clone())
        optimiser = Optimiser([weight], lr=0.1, weight_decay=0.01, grad_clip=clip)
        for skip in skips:
            optimiser.apply([gradient.clone()], skips=None if skip is None else torch.tensor(skip))
        found.append((weight.detach(), optimiser.state_dict()))
    for weight, state in found[1:]:  # two steps in each
        assert weight.equal(found[0][0])
        assert all(state[name][0].equal(value[0]) for name, value in found[0][1].items())
    assert not found[0][0].equal(start)


def test_follow() -> None:
    target, online = torch.zeros(2), torch.ones(2)
    follow([target], [online], 0.25)
    follow([target], [online], 0.25)
    assert target.tolist() == [0.4375, 0.4375]  # 1 - 0.75^2


@pytest.mark.parametrize(
    ("step", "lr"),
    [(0, 0.25), (3, 1.0), (4, 1.0), (8, 0.55), (12, 0.1), (99, 0.1)],  # half-way: (1 + 0.1) / 2
)
def test_cosine(step: int, lr: float) -> None:
    assert cosine_lr(step, peak=1.0, warmup=4, total=12, floor=0.1) == pytest.approx(lr)


def test_the_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with matmul_precision("bf16"):
        pass
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(RuntimeError), matmul_precision("bf16"):
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_gpus_precision_does_not_depend_on_the_processor_beside_it(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    _lowest_precision.cache_clear()
    try:
        with matmul_precision("bf16"):
            if has_gpu:
                assert torch.backends.cuda.matmul.allow_tf32
            # What `high` is on a processor: float32, unless it has the products of `medium` too.
            inside = {(True, True): "medium", (True, False): "medium", (False, True): "high"}
            assert torch.get_float32_matmul_precision() == inside.get((has_bf16, has_gpu), "highest")
        with matmul_precision("fp32"):
            assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        _lowest_precision.cache_clear()


def test_a_gpus_precision_leaves_the_processors_products_alone() -> None:
    """Where a processor has no bfloat16, what a GPU needs changes no bit of its products."""
    if torch.cpu.get_capabilities().get("avx512_bf16", False):
        pytest.skip("this processor multiplies bfloat16")
    one, other = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected, before = one @ other, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert (one @ other).equal(expected)
    finally:
        torch.set_float32_matmul_precision(before)
