"""Means between two rows of metrics.jsonl."""

import torch

from robot_rl.train.loop import Meter


def test_means_are_over_what_was_reported() -> None:
    meter = Meter()
    meter.add({"loss": torch.tensor(1.0), "lr": 0.5})
    meter.add({"loss": torch.tensor(4.0)})
    assert meter.take() == {"loss": 2.5, "lr": 0.5}  # (1 + 4) / 2, 0.5 / 1
    assert meter.take() == {}


def test_a_restored_meter_goes_on() -> None:
    first, second = Meter(), Meter()
    first.add({"loss": torch.tensor(1.0)})
    second.load_state_dict(first.state_dict())
    second.add({"loss": 2.0})
    assert second.take() == {"loss": 1.5}
