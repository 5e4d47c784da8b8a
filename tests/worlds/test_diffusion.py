"""Strides that are drawn at once by a flow; numbers by hand, and a system that can be learned."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.core.errors import ConfigError
from robot_rl.hal.conformance import check_vector_env
from robot_rl.worlds.config import EnsembleConfig
from robot_rl.worlds.diffusion import Diffusion
from robot_rl.worlds.ensemble import num_inputs
from robot_rl.worlds.env import WorldEnv
from robot_rl.worlds.fit import Fitter, new_model, open_loop
from robot_rl.worlds.history import AUDIT, History, Window, Windows
from robot_rl.worlds.saved import World, load_world
from tests.worlds.conftest import FIT, SMALL, SPEED, point_history

DRAWS = replace(SMALL, kind="diffusion", stride=8)
NOISE = 0.02


def fitted(history: History) -> Diffusion:
    model = new_model(DRAWS, history, seed=0)
    assert isinstance(model, Diffusion)
    Fitter(model, history, replace(FIT, ahead=1), seed=0).run()
    return model


@pytest.fixture(scope="module")
def sure(history: History) -> Diffusion:
    return fitted(history)


@pytest.fixture(scope="module")
def noisy() -> tuple[Diffusion, History]:
    history = point_history(noise=NOISE)
    return fitted(history), history


def test_mean_and_deviation_of_a_gaussian_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of x = (1 - t) z + t y, with y ~ N(2, 0.5^2) and z ~ N(0, 1), the mean of y is
    # 2 + t 0.5^2 (x - 2 t) / ((1 - t)^2 + t^2 0.5^2). Its flow takes 0 to 2, 1 to 2.5 and -1 to 1.5.
    model = Diffusion(replace(DRAWS, denoise=100), 1, 1)
    with torch.no_grad():
        for parameter in model.layers["straight"].parameters():
            parameter.zero_()
    model.rest.fill_(3.0)
    model.scale.fill_(10.0)

    def clean(x_MBF: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
        return 2.0 + t * 0.25 * (noisy - 2.0 * t) / ((1.0 - t) ** 2 + t**2 * 0.25)

    monkeypatch.setattr(model, "clean", clean)
    window = Window(
        state=np.full((1, 1), 7.0, np.float32),
        past_state=np.full((1, 1), 7.0, np.float32),
        past_action=np.zeros((1, 8, 1), np.float32),
        has_past=np.zeros(1, bool),
    )
    found = model.predict(window, np.zeros((1, 8, 1), np.float32), np.array([5]))
    assert found.mean.numpy() == pytest.approx(np.full((3, 1, 1), 7.0 + 2.0 * 3.0 * 10.0), rel=1e-3)
    assert found.std.numpy() == pytest.approx(np.full((3, 1, 1), 0.5 * 3.0 * 10.0), rel=0.03)
    assert float(found.uncertainty) == pytest.approx(0.0, abs=1e-5)


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # One element, two control steps, of which one is known: changes 6 and 60 are 2 and 20 in units of rest.
    # A network that predicts 5 errs by 3 in the first; the second does not count: 9 for each of 2 members.
    model = Diffusion(replace(DRAWS, members=2, stride=2), 1, 1)
    with torch.no_grad():
        for parameter in model.layers["straight"].parameters():
            parameter.zero_()
    model.rest.fill_(3.0)
    seen = list[Tensor]()

    def clean(x_MBF: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
        seen.append(noisy)
        return torch.full_like(noisy, 5.0)

    monkeypatch.setattr(model, "clean", clean)
    inputs = num_inputs(2, 1, 1)
    changes = torch.tensor([6.0, 60.0]).expand(2, 1, 2)[..., None]
    loss = model.loss(
        torch.zeros(2, 1, inputs),
        torch.ones(2, 1, dtype=torch.int64),
        changes,
        torch.ones(2, 1, 2),
        torch.full((2, 1, 1), 0.25),
    )
    assert float(loss) == pytest.approx(18.0)
    assert seen[0].tolist() == [[[0.75 + 0.25 * 2.0, 0.0]]] * 2


def test_a_linear_system_is_learned(sure: Diffusion, history: History) -> None:
    windows = Windows(history, history.split(AUDIT), stride=8, strides=2)
    errors, _, _ = open_loop(sure, windows, windows.rows)
    assert np.sqrt((errors[0] ** 2).mean()) < 0.03  # of the change in a stride
    assert np.sqrt((errors[1] ** 2).mean()) < 0.05


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_the_state_after_m_steps_is_that_of_the_first_m_actions(
    sure: Diffusion, history: History, steps: int
) -> None:
    windows = Windows(history, history.split(AUDIT), stride=8)
    rows, actions = windows.rows[:50], windows.actions(windows.rows[:50])
    m = np.full(len(rows), steps)
    found = sure.predict(windows.at(rows), actions, m).mean
    need = history.state[rows, :2] + SPEED * actions[:, :steps].sum(axis=1)
    assert found.mean(dim=0)[:, :2].numpy() == pytest.approx(need, abs=0.2 * SPEED)
    assert np.array_equal(found[0, :, 2:].numpy(), history.state[rows, 2:])  # the goal is copied
    changed = actions.copy()
    changed[:, steps:] = -1.0
    assert torch.equal(found, sure.predict(windows.at(rows), changed, m).mean)


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_the_deviation_is_about_that_of_the_noise(noisy: tuple[Diffusion, History], steps: int) -> None:
    model, history = noisy  # whose noise is correlated within a stride: it sums up
    windows = Windows(history, history.split(AUDIT), stride=8)
    rows = windows.rows[:200]
    found = model.predict(windows.at(rows), windows.actions(rows), np.full(len(rows), steps))
    stated = float(found.std[..., :2].square().mean().sqrt())
    assert 0.5 < stated / (NOISE * np.sqrt(steps)) < 2.0


def test_a_fit_that_was_cut_short_goes_on_to_the_same_losses(history: History) -> None:
    short = replace(FIT, updates=8, select_every=4, ahead=1)

    def fitter() -> Fitter:
        return Fitter(new_model(DRAWS, history, seed=0), history, short, seed=0)

    whole = fitter()
    losses = [float(whole.update()) for _ in range(8)]
    first = fitter()
    for _ in range(3):
        first.update()
    second = fitter()
    second.load_state_dict(first.state_dict())
    assert [float(second.update()) for _ in range(5)] == losses[3:]


def test_it_is_saved_and_imagines(sure: Diffusion, world: World, tmp_path: Path) -> None:
    replace(world, model=sure).save(tmp_path / "point")
    again = load_world(tmp_path / "point")
    assert isinstance(again.model, Diffusion)
    seen = []
    for one in (replace(world, model=sure), again):
        env = WorldEnv(one, 4, autoreset="disabled", settings={"gate": False})
        env.reset(seed=1)
        seen.append(env.step_chunk(np.full((4, 16, 2), 0.2, np.float32), 16).obs["state"])
    assert np.array_equal(seen[0], seen[1])
    check_vector_env(lambda n: WorldEnv(again, n, settings={"strides": 2, "noise": 1.0}))


def test_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.denoise: got 0, allowed: 1 to 100"):
        EnsembleConfig(kind="diffusion", denoise=0)
