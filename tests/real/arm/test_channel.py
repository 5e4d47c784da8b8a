"""The bad line: delay, order, and how much is lost."""

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.real.arm.channel import Channel, ChannelConfig

MS = 1_000_000


def test_a_clean_line_gives_at_once() -> None:
    line = Channel[int](ChannelConfig(), np.random.default_rng(0))
    line.send(1, 5)
    line.send(2, 5)
    assert line.receive(4) == []
    assert line.receive(5) == [1, 2]
    assert line.receive(5) == []


def test_delay_and_order_under_jitter() -> None:
    line = Channel[int](ChannelConfig(delay_ms=20, jitter_ms=10), np.random.default_rng(0))
    arrived: list[tuple[int, int]] = []
    for now in range(0, 1100):
        if now < 1000:
            line.send(now, now * MS)
        arrived += [(now, sent) for sent in line.receive(now * MS)]
    assert [sent for _, sent in arrived] == list(range(1000))  # none overtakes
    waits = np.array([now - sent for now, sent in arrived])
    # Each waits 20 to 30 ms and no less than those before it: at one a millisecond the mean is well
    # above 25 ms, and the worst is 30 ms and the millisecond in which one looks.
    assert waits.min() >= 20
    assert waits.max() <= 31
    assert 26 < waits.mean() < 30


def test_it_says_when_to_look_again() -> None:
    line = Channel[int](ChannelConfig(delay_ms=20), np.random.default_rng(0))
    assert line.wait_s(0, 1.0) == 1.0
    line.send(1, 5 * MS)
    line.send(2, 8 * MS)
    assert line.wait_s(10 * MS, 1.0) == pytest.approx(0.015)  # 1 is due at 25 ms
    assert line.wait_s(10 * MS, 0.01) == 0.01
    assert line.wait_s(26 * MS, 1.0) == 0.0
    assert line.receive(26 * MS) == [1]
    assert line.wait_s(26 * MS, 1.0) == pytest.approx(0.002)


def test_jitter_alone_is_uniform() -> None:
    """Messages a second apart do not meet: half of them have come after half the jitter."""
    line = Channel[int](ChannelConfig(jitter_ms=10), np.random.default_rng(1))
    early = 0
    for k in range(2000):
        line.send(k, k * 1000 * MS)
        early += len(line.receive(k * 1000 * MS + 5 * MS))
        line.receive(k * 1000 * MS + 10 * MS)
    assert early / 2000 == pytest.approx(0.5, abs=0.05)  # deviation 0.011
    assert line.lost == 0


@pytest.mark.parametrize("loss", [0.05, 0.5])
def test_loss_is_independent(loss: float) -> None:
    line = Channel[int](ChannelConfig(loss=loss), np.random.default_rng(2))
    for k in range(10_000):
        line.send(k, k)
    got = np.zeros(10_000, bool)
    got[line.receive(10_000)] = True
    # Binomial: the deviation of the share is at most 0.005. The same for one lost after one lost.
    assert (~got).mean() == pytest.approx(loss, abs=0.02)
    assert line.lost == (~got).sum()
    again = (~got[1:])[~got[:-1]].mean()
    assert again == pytest.approx(loss, abs=0.05)


def test_the_same_seed_loses_the_same() -> None:
    def survivors() -> list[int]:
        line = Channel[int](ChannelConfig(loss=0.3, jitter_ms=4), np.random.default_rng(7))
        for k in range(100):
            line.send(k, k)
        return line.receive(10**9)

    assert survivors() == survivors()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"loss": 1.0}, "loss: got 1.0, allowed: 0 to below 1"),
        ({"delay_ms": -1.0}, "delay_ms: got -1.0, allowed: 0 or more"),
        ({"jitter_ms": -1.0}, "jitter_ms: got -1.0, allowed: 0 or more"),
    ],
)
def test_a_line_is_checked(values: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ChannelConfig(**values)
