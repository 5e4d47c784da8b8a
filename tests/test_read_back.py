"""What counts as a read, and what does not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.read_back import reads_back

HOST, ELSEWHERE = torch.device("cpu"), torch.zeros(2, device="meta")
"""`meta` is a device without values; a copy from there is refused after it was counted."""


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.to("cpu"),
        lambda x: x.to("cpu", copy=True),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.to(device="cpu", dtype=torch.float64),
        lambda x: x.to(torch.device("cpu")),
        lambda x: x.to(
            torch.device("cpu"),
            copy=True,
        ),
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
    ],
)
def test_a_read_counts_once(read: Callable[[Tensor], object]) -> None:
    with reads_back() as reads:
        read(torch.ones(2))
    assert len(reads) == 1
    assert "tests/test_read_back.py" in reads[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.to(torch.float64),
        lambda x: x.to(HOST),
        lambda x: x.to(device=x.device, dtype=torch.float64),
        lambda x: x.to("meta"),
        lambda x: x.to(device=None, dtype=torch.float64),
        lambda x: x.to(torch.zeros(1)),
        lambda x: ("cpu", x.to(HOST)),
        lambda x: torch.zeros(2).copy_(x),
        lambda x: x * 2,
    ],
)
def test_what_stays_on_its_device_counts_nothing(call: Callable[[Tensor], object]) -> None:
    with reads_back() as reads:
        call(torch.ones(2))
    assert reads == []


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.to("cpu"),
        lambda x: x.to(HOST, non_blocking=True),
        lambda x: x.to(torch.zeros(1)),
        lambda x: torch.zeros(2).copy_(x, non_blocking=True),
    ],
)
def test_from_another_device_every_copy_to_the_host_counts(read: Callable[[Tensor], object]) -> None:
    with reads_back() as reads, pytest.raises(NotImplementedError):
        read(ELSEWHERE)
    assert len(reads) == 1


def test_a_module_counts_once_for_each_tensor() -> None:
    with reads_back() as reads:
        nn.Linear(2, 2).to("cpu")
    assert [read.split(":")[0] for read in reads] == ["to at tests/test_read_back.py"] * 2
