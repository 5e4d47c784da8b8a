"""Networks: sizes, skips, augmentation, and first weights from a generator."""

import pytest
import torch
from torch import nn

from robot_rl.core.errors import DatasetError
from robot_rl.core.names import PRIVILEGED
from robot_rl.data.normalize import Normaliser
from robot_rl.policies import networks
from robot_rl.policies.networks import (
    MLP,
    DenoiseNet,
    ImageEncoder,
    KeypointEncoder,
    Linear,
    ObservationEncoder,
    initialise,
    random_shift,
    sinusoidal,
    spatial_soft_argmax,
    zero_last_layer,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layernorm", [False, True])
def test_mlp_has_depth_hidden_layers(residual: bool, layernorm: bool) -> None:
    mlp = MLP(5, 3, width=8, depth=3, layernorm=layernorm, residual=residual)
    linear = [m for m in mlp.modules() if isinstance(m, torch.nn.Linear)]
    assert [tuple(m.weight.shape) for m in linear] == [(8, 5), (8, 8), (8, 8), (3, 8)]
    assert sum(isinstance(m, torch.nn.LayerNorm) for m in mlp.modules()) == (3 if layernorm else 0)
    assert mlp(torch.zeros(2, 7, 5)).shape == (2, 7, 3)


def test_residual_adds_the_layer_before() -> None:
    # Hidden weights zero: without a skip the layer returns silu(0) = 0, with one it returns h.
    plain = MLP(2, 2, width=4, depth=2)
    skip = MLP(2, 2, width=4, depth=2, residual=True)
    skip.load_state_dict(plain.state_dict())
    for mlp in (plain, skip):
        for parameter in mlp.trunk.hidden.parameters():
            torch.nn.init.zeros_(parameter)
    x = torch.randn(3, 2, generator=seeded())
    assert torch.allclose(plain(x), plain.trunk.out.bias.expand(3, 2))
    expected = skip.trunk.out(torch.nn.functional.silu(skip.input(x)))
    assert torch.allclose(skip(x), expected)


def test_denoise_net_keeps_the_shape() -> None:
    net = DenoiseNet(6, 4, 3, width=16, depth=2, time_dim=8)
    condition = net.condition(torch.zeros(5, 6)) + net.embed_time(sinusoidal(torch.rand(5), 8))
    assert net(torch.zeros(5, 4, 3), condition).shape == (5, 4, 3)


def test_time_embedding_by_hand() -> None:
    # Periods 0.004 and 4: at t = 1 the angles are 2 pi / 0.004 (whole turns) and 2 pi / 4.
    out = sinusoidal(torch.tensor([0.0, 1.0], dtype=torch.float64), 4)
    assert out[0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert out[1].tolist() == pytest.approx([0.0, 1.0, 1.0, 0.0], abs=1e-9)


def test_soft_argmax_finds_the_peak() -> None:
    maps = torch.zeros(1, 2, 3, 5)
    maps[0, 0, 0, 4] = 100.0  # top right: x = 1, y = -1
    maps[0, 1, 1, 2] = 100.0  # centre
    assert spatial_soft_argmax(maps)[0].tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0], abs=1e-6)


def test_image_encoder_takes_any_size() -> None:
    encoder = ImageEncoder(16, channels=8)
    assert encoder(torch.rand(2, 32, 48, 3)).shape == (2, 16)
    assert encoder(torch.rand(2, 64, 64, 3)).shape == (2, 16)


def test_observation_encoder_puts_state_before_cameras() -> None:
    encoder = ObservationEncoder(Normaliser({"state": 3}, 1), cameras=("front", "wrist"), image_features=8)
    image = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    state = torch.randn(2, 3, generator=seeded())
    out = encoder({"state": state, "wrist.rgb": image, "front.rgb": image, "other": image})
    assert out.shape == (2, encoder.dim) == (2, 19)
    assert torch.equal(out[:, :3], state)


def test_missing_observation_is_named() -> None:
    encoder = ObservationEncoder(Normaliser({"state": 3}, 1), cameras=("front",))
    with pytest.raises(DatasetError, match=r"no 'front.rgb', .* Did you mean 'frnt.rgb'"):
        encoder({"state": torch.zeros(1, 3), "frnt.rgb": torch.zeros(1, 8, 8, 3)})
    with pytest.raises(DatasetError, match=r"no 'state'"):
        encoder({})


def test_random_shift_moves_and_repeats_the_border() -> None:
    image = torch.arange(16, dtype=torch.uint8).view(1, 4, 4, 1).repeat(200, 1, 1, 1)
    out = random_shift(image, pad_px=1, generator=seeded())
    assert out.dtype == torch.uint8
    assert {tuple(row.flatten().tolist()) for row in out[:, 1:3, 1:3]} == {
        tuple((4 * (r + dy) + c + dx) for r in (1, 2) for c in (1, 2))
        for dy in (-1, 0, 1)
        for dx in (-1, 0, 1)
    }
    assert torch.equal(random_shift(image, pad_px=1, generator=seeded()), out)
    assert torch.equal(random_shift(image, pad_px=0), image)
    with pytest.raises(ValueError, match=r"pad_px must be at least 0, got -1"):
        random_shift(image, pad_px=-1)


def test_zero_last_layer() -> None:
    mlp = MLP(3, 2, width=4, depth=2, layernorm=True)
    zero_last_layer(mlp)
    assert torch.equal(mlp(torch.randn(5, 3)), torch.zeros(5, 2))
    with pytest.raises(ValueError, match=r"SiLU has no linear layer"):
        zero_last_layer(torch.nn.SiLU())


def test_first_weights_come_from_the_generator() -> None:
    nets = [MLP(3, 2, width=4, depth=2) for _ in range(3)]
    for net, seed in zip(nets, (7, 7, 8), strict=True):
        initialise(net, seeded(seed))
    a, b, c = (torch.cat([p.flatten() for p in net.parameters()]) for net in nets)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert nets[0].input.weight.abs().max() <= 3**-0.5  # torch's default bound, 1 / sqrt(inputs)


def test_keypoints_find_a_small_red_square() -> None:
    # 2 x 2 red pixels on grey, anywhere in 32 x 32. Always answering the centre errs by 8 pixels on average.
    draw, encoder = seeded(3), KeypointEncoder(channels=(4, 8), keypoints=8)
    head = torch.nn.Linear(encoder.dim, 2)
    initialise(torch.nn.ModuleList([encoder, head]), draw)

    def shown(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        corner = torch.randint(0, 31, (count, 2), generator=draw)
        image = torch.full((count, 32, 32, 3), 0.5)
        for row, (y, x) in enumerate(corner.tolist()):
            image[row, y : y + 2, x : x + 2] = torch.tensor([0.8, 0.2, 0.2])
        return image, corner / 15.0 - 1.0

    parameters = [*encoder.parameters(), *head.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(40):
        image, where = shown(32)
        optimiser.zero_grad()
        (head(encoder(image)) - where).abs().mean().backward()
        optimiser.step()
    assert all(p.grad is not None and bool(p.grad.any()) for p in parameters)
    image, where = shown(64)
    error_px = 15.0 * (head(encoder(image)) - where).abs().mean().detach()
    assert float(error_px) < 2.0


def test_keypoints_are_of_maps_over_opponent_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the class says it, colour by colour and map by map.
    monkeypatch.setattr(networks, "rounds_to_bfloat16", lambda device: False)
    encoder = KeypointEncoder(channels=(4, 6), keypoints=3)
    encoder.log_sharpness.data = torch.tensor([0.0, 0.5, -0.5])
    image = torch.rand(2, 20, 24, 3, generator=seeded())
    r, g, b = (2.0 * image - 1.0).unbind(dim=-1)
    maps = torch.stack([r, g, b, 3.0 * (r - g), 3.0 * ((r + g) / 2.0 - b)], dim=1)
    for layer in encoder.convolutions:
        if isinstance(layer, nn.Conv2d):
            maps = nn.functional.conv2d(maps, layer.weight, layer.bias, layer.stride, padding=1)
        else:
            maps = layer(maps)
    std, mean = torch.std_mean(maps, dim=(2, 3), keepdim=True)
    maps = (maps - mean) / (std + 1e-3)
    positions = spatial_soft_argmax(maps * encoder.log_sharpness.exp()[:, None, None])
    strength = (maps.amax(dim=(2, 3)) - 3.0) / 4.0
    found = encoder(image)
    assert torch.allclose(found[:, :6], positions, atol=1e-5)
    assert torch.allclose(found[:, 6:], strength, atol=1e-5)


def test_a_blank_picture_has_a_gradient_that_is_finite() -> None:
    encoder = KeypointEncoder(keypoints=4)
    encoder(torch.full((2, 16, 16, 3), 0.5)).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in encoder.parameters() if p.grad is not None)


def test_keypoints_do_not_depend_on_how_strong_a_map_is() -> None:
    encoder = KeypointEncoder(keypoints=4)
    image = torch.rand(2, 24, 24, 3, generator=seeded())
    before = encoder(image)
    last = encoder.convolutions[4]
    with torch.no_grad():
        for parameter in last.parameters():
            parameter *= 8.0  # a power of two: bfloat16 loses nothing more
    assert torch.allclose(encoder(image), before, atol=2e-2)  # 1e-3 is added to each standard deviation


def test_a_guess_of_the_privileged_state_joins_the_features() -> None:
    normaliser = Normaliser({"state": 3, PRIVILEGED: 2}, 1)
    normaliser.load_state_dict({**normaliser.state_dict(), "std_privileged__state": torch.tensor([2.0, 4.0])})
    encoder = ObservationEncoder(normaliser, cameras=("wrist",), image_encoder="keypoints", predicts=2)
    obs = {"state": torch.zeros(2, 3), "wrist.rgb": torch.zeros(2, 16, 16, 3, dtype=torch.uint8)}
    features = encoder(obs)  # needs no privileged state
    assert features.shape == (2, encoder.dim) == (2, 3 + 96 + 2)
    features = torch.zeros_like(features)
    features[:, -2:] = torch.tensor([1.0, 0.5])
    # In standard deviations: |1 - 4/2| = 1, |0.5 - 2/4| = 0 and |1 - 2/2| = 0, |0.5 + 4/4| = 1.5; their mean.
    truth = torch.tensor([[4.0, 2.0], [2.0, -4.0]])
    assert float(encoder.guess_error(features, {PRIVILEGED: truth})) == pytest.approx(2.5 / 4)


def test_large_products_are_rounded_where_torch_is_asked_for_less_precision() -> None:
    layer = Linear(160, 200)
    x = torch.randn(130, 160, generator=seeded(), requires_grad=True)
    found: list[list[torch.Tensor]] = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            y = layer(x)
            assert y.dtype == torch.float32
            to_all = torch.autograd.grad(y.square().sum(), [x, layer.weight, layer.bias])
            found.append([y.detach(), *to_all, layer(x[:100]).detach()])
    finally:
        torch.set_float32_matmul_precision(before)
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert found[0][0].equal(plain)
    # bfloat16 has 8 bits of mantissa: each factor is rounded by up to 0.4 %, at random.
    for full, half in zip(found[0][:-1], found[1][:-1], strict=True):
        assert 1e-4 < float((half - full).norm() / full.norm()) < 0.01
    torch.testing.assert_close(found[1][-1], found[0][-1], rtol=0.02, atol=0.02)
