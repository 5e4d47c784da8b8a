"""Processes against numbers computed by hand, against diffusers, and against known distributions."""

import math

import pytest
import torch
from torch import Tensor

from robot_rl.policies.chain import Net, denoise, score
from robot_rl.policies.processes import (
    DDIM,
    DDPM,
    FlowODE,
    FlowSDE,
    Process,
    alphas_cumprod,
    gaussian_entropy,
    gaussian_log_prob,
)


def value(number: float) -> Tensor:
    return torch.full((1, 1, 1), number, dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear_net(slope: float, offset: float) -> Net:
    def predict(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        return slope * x + offset

    return predict


def run_ode(process: Process, net: Net, z: Tensor, steps: int) -> Tensor:
    return denoise(net, process, process.grid(steps), z, explore=False, record=False).x


def test_euler_on_a_linear_field() -> None:
    # v = 2 x + 1 from 0.5. One step: 0.5 - 1 * 2 = -1.5.
    # Two steps of 0.5: 0.5 - 0.5 * 2 = -0.5, then -0.5 - 0.5 * (2 * -0.5 + 1) = -0.5.
    net = linear_net(2.0, 1.0)
    assert run_ode(FlowODE(), net, value(0.5), 1).item() == pytest.approx(-1.5)
    assert run_ode(FlowODE(), net, value(0.5), 2).item() == pytest.approx(-0.5)


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_flow_reaches_the_action_of_the_exact_field(steps: int) -> None:
    # All data at c = 0.3: v = (x - c) / t, straight lines, so any number of Euler steps is exact.
    grid = FlowODE().grid(steps)

    def net(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        assert isinstance(k, int)
        return (x - 0.3) / grid.times[k]

    assert run_ode(FlowODE(), net, value(-1.7), steps).item() == pytest.approx(0.3)


def test_sde_step_by_hand() -> None:
    # K = 2, eta 0.5, x = 0.4, v = 0.2, delta 0.5. sigma = 0.5 sqrt(0.5 / 0.5) = 0.5 in both steps.
    # Step 1, t = 0.5: action 0.4 - 0.1 = 0.3, noise 0.4 + 0.1 = 0.5;
    #   mean = 0.3 * 1 + 0.5 * (0 - 0.25 * 0.5 / 1) = 0.2375; std = 0.5 sqrt(0.5) = 0.3535534.
    # Step 0, t = 1 (sigma of t = 0.5): action 0.2, noise 0.4;
    #   mean = 0.2 * 0.5 + 0.4 * (0.5 - 0.25 * 0.5 / 2) = 0.275.
    process = FlowSDE(eta=0.5)
    grid = process.grid(2)
    for k, expected in ((0, 0.275), (1, 0.2375)):
        mean, std = process.step(value(0.2), value(0.4), grid, k)
        assert mean.item() == pytest.approx(expected)
        assert std == pytest.approx(0.3535534)


def test_sde_without_noise_is_euler_to_the_bit() -> None:
    x, v = torch.randn(2, 3, 5, 4, generator=seeded())
    for steps in (2, 4, 10):
        still, ode = FlowSDE(eta=0.0), FlowODE()
        for k in range(steps):
            mean, std = still.step(v, x, still.grid(steps), k)
            assert std is None
            assert torch.equal(mean, ode.step(v, x, ode.grid(steps), k)[0])
    nearly = FlowSDE(eta=1e-4)
    mean, std = nearly.step(v, x, nearly.grid(4), 2)
    assert torch.allclose(mean, ode.ode_step(v, x, ode.grid(4), 2), atol=1e-7)
    assert std == pytest.approx(1e-4 * math.sqrt(0.5 / 0.5) * 0.5)  # sigma sqrt(delta), t = 0.5


def test_sde_keeps_the_distribution_of_the_ode() -> None:
    # Data N(0.4, 0.2^2): the exact velocity is linear in x, and any eta must end at that law.
    process = FlowSDE(eta=0.7, stochastic_steps="all")
    grid = process.grid(100)

    def net(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        assert isinstance(k, int)
        t = grid.times[k]
        variance = (1 - t) ** 2 * 0.04 + t * t
        return (t - (1 - t) * 0.04) / variance * (x - (1 - t) * 0.4) - 0.4

    z = torch.randn(20_000, 1, 1, generator=seeded())
    end = denoise(net, process, grid, z, explore=True, record=False, generator=seeded(1)).x
    assert end.mean().item() == pytest.approx(0.4, abs=0.01)
    assert end.std().item() == pytest.approx(0.2, abs=0.01)


def test_one_stochastic_step_per_chunk() -> None:
    process = FlowSDE(eta=0.5, stochastic_steps="one")
    grid, net = process.grid(4), linear_net(0.5, 0.1)
    z = torch.randn(64, 2, 3, generator=seeded())
    chain = denoise(net, process, grid, z, explore=True, record=True, generator=seeded(1)).chain
    assert chain is not None
    assert chain.index.shape == (64, 1)
    assert set(chain.index.flatten().tolist()) == {0, 1, 2, 3}
    for k in range(4):
        euler = process.ode_step(net(chain.x[:, k], k), chain.x[:, k], grid, k)
        moved = (chain.x[:, k + 1] != euler).flatten(1).any(dim=1)
        assert torch.equal(moved, chain.index[:, 0] == k)


def test_ddpm_coefficients_are_the_posterior() -> None:
    # Ho et al. 2020: mean = sqrt(abar') beta / (1 - abar) x0 + sqrt(alpha) (1 - abar') / (1 - abar) x,
    # variance (1 - abar') / (1 - abar) beta, with abar' of the level below.
    process = DDPM(train_steps=10, std_floor=1e-9, log_prob_std_floor=1e-9)
    grid, abar = process.grid(10), alphas_cumprod(10)
    for k in range(9):
        level = 9 - k
        below = abar[level - 1]
        alpha = abar[level] / below
        action_gain = math.sqrt(below) * (1 - alpha) / (1 - abar[level])
        x_gain = math.sqrt(alpha) * (1 - below) / (1 - abar[level])
        std = math.sqrt((1 - below) / (1 - abar[level]) * (1 - alpha))
        assert grid.columns["action_gain"][k] == pytest.approx(action_gain, abs=1e-9)
        assert grid.columns["x_gain"][k] == pytest.approx(x_gain, abs=1e-9)
        assert grid.columns["std"][k] == pytest.approx(std, abs=1e-9)
    assert (grid.columns["action_gain"][9], grid.columns["x_gain"][9]) == (1.0, 0.0)


def test_ddpm_step_by_hand_clips_the_action_and_floors_the_noise() -> None:
    # The last step returns the predicted action, clipped: x / sqrt(abar) - ... is far beyond 1.
    process = DDPM(train_steps=4, std_floor=0.1)
    mean, std = process.step(value(0.0), value(3.0), process.grid(4), 3)
    assert mean.item() == 1.0
    assert std == 0.1


@pytest.mark.parametrize("eta", [0.0, 0.6])
def test_ddim_matches_diffusers(eta: float) -> None:
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler  # takes seconds

    scheduler = DDIMScheduler(20, beta_schedule="squaredcos_cap_v2", clip_sample=True)
    scheduler.set_timesteps(20)
    process = DDIM(eta=eta, train_steps=20)
    grid = process.grid(20)
    x, noise = torch.randn(2, 2, 3, 4, generator=seeded(), dtype=torch.float64)
    for k in (1, 7, 18, 19):
        zeros = torch.zeros_like(x)
        theirs = scheduler.step(
            noise,
            19 - k,
            x,
            eta=eta,
            use_clipped_model_output=True,
            variance_noise=zeros,
            return_dict=False,
        )
        mean, _ = process.step(noise, x, grid, k)
        assert torch.allclose(mean, theirs[0], atol=1e-4)
    assert torch.equal(
        process.ode_step(noise, x, grid, 5),
        DDIM(eta=0.0).step(noise, x, DDIM(eta=0.0).grid(20), 5)[0],
    )


def test_ddim_with_eta_one_is_ddpm() -> None:
    assert DDIM(eta=1.0).grid(7).columns == DDPM().grid(7).columns


def test_ddim_strides_from_the_noisiest_level() -> None:
    # T = 10, K = 3: levels round(10) - 1, round(6.67) - 1, round(3.33) - 1 = 9, 6, 2.
    assert DDIM(train_steps=10).grid(3).times == (1.0, 0.7, 0.3, 0.0)


def test_ddim_without_noise_is_deterministic_and_finds_the_action() -> None:
    process = DDIM(eta=0.0, train_steps=20)
    grid, abar = process.grid(5), alphas_cumprod(20)

    def net(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        assert isinstance(k, int)
        level = round(grid.times[k] * 20) - 1
        return (x - math.sqrt(abar[level]) * 0.3) / math.sqrt(1 - abar[level])

    runs = [
        denoise(net, process, grid, value(1.2), explore=True, record=True, generator=seeded(i))
        for i in range(2)
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    assert runs[0].x.item() == pytest.approx(0.3, abs=1e-6)
    assert runs[0].chain is not None
    assert runs[0].chain.index.shape == (1, 0)


@pytest.mark.parametrize("process", [FlowODE(), FlowSDE()])
def test_flow_training_target(process: Process) -> None:
    actions, noise = torch.randn(2, 256, 2, 3, generator=seeded())
    out = process.corrupt(actions, noise, seeded(1))
    t = out.time.view(-1, 1, 1)
    assert torch.equal(out.target, noise - actions)
    assert torch.allclose(out.x - t * out.target, actions, atol=1e-5)  # x0 = x - t v
    assert 0.4 < out.time.mean() < 0.6
    assert out.time.min() >= 0
    assert out.time.max() < 1


def test_diffusion_training_target() -> None:
    actions, noise = torch.randn(2, 256, 2, 3, generator=seeded())
    out = DDPM(train_steps=5).corrupt(actions, noise, seeded(1))
    assert torch.equal(out.target, noise)
    assert sorted(set(out.time.tolist())) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    abar = torch.tensor(alphas_cumprod(5))[(out.time * 5).round().long() - 1].view(-1, 1, 1)
    assert torch.allclose(out.x, abar.sqrt() * actions + (1 - abar).sqrt() * noise, atol=1e-6)


def test_a_predicted_velocity_takes_the_same_steps_as_the_noise_it_stands_for() -> None:
    actions, noise = torch.randn(2, 64, 2, 3, generator=seeded(), dtype=torch.float64).clamp(-1.0, 1.0)
    by_noise, by_velocity = DDPM(train_steps=5), DDPM(train_steps=5, prediction="velocity")
    for level, k in ((4, 0), (0, 4)):
        abar = alphas_cumprod(5)[level]
        x = abar**0.5 * actions + (1 - abar) ** 0.5 * noise
        velocity = abar**0.5 * noise - (1 - abar) ** 0.5 * actions
        expected, _ = by_noise.step(noise, x, by_noise.grid(5), k)
        mean, _ = by_velocity.step(velocity, x, by_velocity.grid(5), k)
        torch.testing.assert_close(mean, expected)
    out = by_velocity.corrupt(actions, noise, seeded(1))
    abar = torch.tensor(alphas_cumprod(5))[(out.time * 5).round().long() - 1].view(-1, 1, 1)
    torch.testing.assert_close(out.target, abar.sqrt() * noise - (1 - abar).sqrt() * actions)
    with pytest.raises(ValueError, match=r"DDPM: prediction must be 'noise' or 'velocity', got 'x0'"):
        DDPM(prediction="x0")


def test_gaussian_log_prob_and_entropy_by_hand() -> None:
    # log N(1; 0, 2) = -1/8 - ln 2 - ln(2 pi) / 2 = -0.125 - 0.6931472 - 0.9189385 = -1.7370857,
    # log N(0; 0, 2) = -1.6120857, mean -1.6745857. Entropy 0.5 + 0.9189385 + 0.6931472 = 2.1120857.
    x = torch.tensor([[[1.0, 0.0]]])
    for std in (2.0, torch.tensor(2.0)):
        assert gaussian_log_prob(x, torch.zeros_like(x), std).item() == pytest.approx(-1.6745857)
        assert gaussian_entropy(std, like=x).item() == pytest.approx(2.1120857)


def test_step_takes_one_index_per_row() -> None:
    x, v = torch.randn(2, 4, 2, 3, generator=seeded())
    for process in (FlowODE(), FlowSDE(), DDPM(), DDIM(eta=0.3)):
        grid = process.grid(4)
        mean, std = process.step(v, x, grid, torch.tensor([3, 0, 2, 1]))
        for row, k in enumerate((3, 0, 2, 1)):
            one, one_std = process.step(v[row : row + 1], x[row : row + 1], grid, k)
            assert torch.allclose(mean[row : row + 1], one, atol=1e-6)
            assert (std is None) == (one_std is None)
            if isinstance(std, Tensor):
                assert std[row].item() == pytest.approx(one_std)


def test_scoring_on_another_grid_is_refused() -> None:
    net, z = linear_net(0.5, 0.0), torch.zeros(2, 1, 1)
    process = FlowSDE(stochastic_steps="all")
    path = denoise(net, process, process.grid(4), z, explore=True, record=True, generator=seeded())
    assert path.chain is not None
    with pytest.raises(ValueError, match=r"sampled by FlowSDE\(.*\) in 4 steps, this policy is .* in 5"):
        score(net, process, process.grid(5), path.chain)
    score(net, process, process.grid(4), path.chain)  # an equal grid is the same grid


def test_scoring_a_deterministic_chain_is_refused() -> None:
    net, z = linear_net(0.5, 0.0), torch.zeros(2, 1, 1)
    for process in (FlowODE(), FlowSDE(eta=0.0), DDIM(eta=0.0)):
        grid = process.grid(2)
        path = denoise(net, process, grid, z, explore=True, record=True)
        assert path.chain is not None
        with pytest.raises(ValueError, match=r"no stochastic step .* mode='explore'"):
            score(net, process, grid, path.chain)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"FlowSDE: eta must be at least 0, got -1"):
        FlowSDE(eta=-1.0)
    with pytest.raises(ValueError, match=r"stochastic_steps must be 'one' or 'all', got 'two'"):
        FlowSDE(stochastic_steps="two")
    with pytest.raises(ValueError, match=r"needs at least 2 denoising steps, got 1"):
        FlowSDE().grid(1)
    with pytest.raises(ValueError, match=r"denoising steps must be at least 1, got 0"):
        FlowODE().grid(0)
    with pytest.raises(ValueError, match=r"DDIM: eta must be in \[0, 1\], got 1.5"):
        DDIM(eta=1.5)
    with pytest.raises(ValueError, match=r"DDPM: eta is 1 by definition, got 0.5"):
        DDPM(eta=0.5)
    with pytest.raises(ValueError, match=r"DDPM: 21 denoising steps, allowed 1 to train_steps = 20"):
        DDPM().grid(21)
    with pytest.raises(ValueError, match=r"train_steps must be at least 1, got 0"):
        DDPM(train_steps=0)
    with pytest.raises(ValueError, match=r"DDPM: std_floor must be above 0, got 0"):
        DDPM(std_floor=0.0)
