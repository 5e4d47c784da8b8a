"""The state of a learner's parts: a copy, by name, and back again bit for bit."""

from typing import Any

import torch
from torch import Generator, nn

from robot_rl.algos.learner import restore, saved
from robot_rl.algos.optim import Optimiser


def parts(value: float) -> dict[str, Any]:
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, value)
    return {
        "nets": [net],
        "optimisers": {"net": Optimiser(net.parameters(), lr=0.1)},
        "draws": Generator().manual_seed(int(value)),
        "temperature": nn.Parameter(torch.tensor(value)),
        "target": None,
    }


def test_what_was_saved_stays_and_comes_back() -> None:
    first, second = parts(1.0), parts(2.0)
    state = saved(first)
    assert list(state) == ["nets", "optimisers", "draws", "temperature"]  # what is None is left out
    first["nets"][0].weight.data.fill_(5.0)
    first["temperature"].data.fill_(5.0)
    assert state["nets"][0]["weight"].item() == 1.0
    assert state["temperature"].item() == 1.0
    restore(second, state)
    assert second["nets"][0].weight.item() == 1.0
    assert second["temperature"].item() == 1.0
    assert torch.rand((), generator=second["draws"]) == torch.rand((), generator=Generator().manual_seed(1))


def test_an_optimiser_goes_on_as_it_would_have() -> None:
    first, second = parts(1.0), parts(1.0)
    gradients = [torch.ones(1, 1), torch.ones(1)]
    first["optimisers"]["net"].apply(gradients)
    restore(second, saved(first))
    for each in (first, second):
        each["optimisers"]["net"].apply(gradients)
    assert second["nets"][0].weight.equal(first["nets"][0].weight)
