"""Instructions as tokens: padding is not seen, texts are encoded once, old weights are forgotten."""

import pytest
import torch
from torch import Tensor

from robot_rl.algos.optim import Optimiser
from robot_rl.core.language import encode_text
from robot_rl.policies.vla.encoders import CACHED_TEXTS, InstructionEncoder


def make() -> InstructionEncoder:
    torch.manual_seed(0)
    ears = InstructionEncoder(width=16, depth=2, heads=2, tokens=3, max_bytes=40)
    with torch.no_grad():
        for parameter in ears.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return ears


def texts(*words: str, length: int = 40) -> Tensor:
    return torch.from_numpy(encode_text(words, length))


def counted(ears: InstructionEncoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the texts of every call of `encode`."""
    calls: list[int] = []
    encode = ears.encode

    def spy(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return encode(rows)

    monkeypatch.setattr(ears, "encode", spy)
    return calls


def test_padding_is_not_seen() -> None:
    ears = make()
    alone = ears.encode(texts("open it", length=7))
    assert alone.shape == (1, 3, 16)
    assert torch.allclose(ears.encode(texts("open it")), alone, atol=1e-6)
    beside = ears.encode(texts("open it", "a much longer instruction than that"))
    assert torch.allclose(beside[:1], alone, atol=1e-6)
    assert not torch.allclose(beside[1:], alone, atol=1e-2)


def test_the_order_of_letters_matters() -> None:
    ears = make()
    assert not torch.allclose(ears.encode(texts("ab")), ears.encode(texts("ba")), atol=1e-3)


def test_no_instruction_is_an_instruction() -> None:
    empty = make().encode(texts(""))
    assert empty.isfinite().all()


def test_a_text_is_encoded_once_while_acting(monkeypatch: pytest.MonkeyPatch) -> None:
    ears = make()
    calls = counted(ears, monkeypatch)
    with torch.no_grad():
        first = ears(texts("push", "pull", "push"))
        again = ears(texts("pull", "lift", "push"))
    assert calls == [1, 1, 1]
    assert torch.equal(first[0], again[2])
    assert torch.equal(first[0], first[2])
    assert torch.equal(first[1], again[0])


def test_a_batch_of_one_text_is_encoded_once_while_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    ears = make()
    calls = counted(ears, monkeypatch)
    found = ears(texts(*["push"] * 8))
    assert calls == [1]
    found.sum().backward()
    assert ears.byte.weight.grad is not None
    assert ears.byte.weight.grad[ord("p")].abs().sum() > 0


@pytest.mark.parametrize("change", ["optimiser", "load", "assign"])
def test_new_weights_are_heard(change: str) -> None:
    ears = make()
    with torch.no_grad():
        before = ears(texts("push"))
    weights = {name: 1.5 * value for name, value in ears.state_dict().items()}
    if change == "optimiser":
        optimiser = Optimiser(ears.parameters(), lr=0.1)
        optimiser.step(ears(texts("push")).square().sum())
    else:
        ears.load_state_dict(weights, assign=change == "assign")
    with torch.no_grad():
        after = ears(texts("push"))
        assert not torch.allclose(after, before, atol=1e-3)
        assert torch.equal(after, ears.encode(texts("push")))


def test_what_is_remembered_is_bounded() -> None:
    ears = make()
    with torch.no_grad():
        ears(texts(*(f"task {number}" for number in range(CACHED_TEXTS + 20))))
    assert len(ears._known) == CACHED_TEXTS
