"""What the networks of an ensemble compute: with gradients all at once, without them one after the other."""

import numpy as np
import pytest
import torch

from robot_rl.worlds.config import EnsembleConfig
from robot_rl.worlds.ensemble import Ensemble, Layer, through
from robot_rl.worlds.env import WorldEnv
from robot_rl.worlds.saved import World

SIZES = EnsembleConfig(members=3, width=32, depth=2, stride=4)


def test_a_layer_by_hand() -> None:
    layer = Layer(2, 1, 2, is_hidden=True, rng=torch.Generator())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[1.0, 3.0]], [[3.0, 1.0]]]))
        layer.bias.zero_()
        layer.gain.copy_(torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]]))
        layer.shift.copy_(torch.tensor([[[0.0, 0.0]], [[0.0, 1.0]]]))
    x = torch.full((2, 1, 1), 100.0)
    # Layer norm makes -1 and 1 of 100 and 300; gain and shift follow, then y / (1 + exp(-y)).
    silu = {y: y / (1 + np.exp(-y)) for y in (-1.0, 1.0, 2.0)}
    by_hand = [[[silu[-1.0], silu[2.0]]], [[silu[1.0], silu[-1.0]]]]
    assert through([layer], x).detach().numpy() == pytest.approx(np.array(by_hand), abs=1e-5)
    with torch.no_grad():
        assert through([layer], x).numpy() == pytest.approx(np.array(by_hand), abs=1e-5)


@pytest.mark.parametrize("aside", [(), (1, 3)])
def test_members_say_the_same_with_and_without_gradients(aside: tuple[int, ...]) -> None:
    model, rng = Ensemble(SIZES, 4, 2, aside=aside, seed=1), torch.Generator().manual_seed(0)
    x = torch.randn((1, 50, len(model.reads)), generator=rng)
    steps = torch.randint(1, 5, (50,), generator=rng)
    learned = model.outputs(x.expand(3, -1, -1), steps)
    with torch.inference_mode():
        asked = model.outputs(x, steps)
    assert learned[0].requires_grad
    for a, b in zip(learned, asked, strict=True):
        assert a.shape == b.shape == (3, 50, 4)
        assert b.numpy() == pytest.approx(a.detach().numpy(), abs=1e-5)


def test_a_row_is_the_same_alone_and_among_others(world: World) -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (300, 8, 2)).astype(np.float32)

    def seen(rows: int) -> np.ndarray:
        env = WorldEnv(world, rows, autoreset="disabled", settings={"gate": False, "noise": 1.0})
        env.reset(seed=list(range(rows)))
        return env.step_chunk(actions[:rows], 8).obs["state"]

    most = seen(300)
    for rows in (1, 33, 128, 129):
        assert np.array_equal(seen(rows), most[:rows])
