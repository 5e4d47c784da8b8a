"""Pictures as tokens, and how training pictures are varied."""

import pytest
import torch

from robot_rl.policies.vla.encoders import PictureEncoder, dropped, jitter_colour, to_pixels


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(batch: int, height: int, width: int) -> torch.Tensor:
    shape = (batch, height, width, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(1))


@pytest.mark.parametrize(("height", "width"), [(96, 128), (16, 16), (30, 50), (97, 131)])
def test_one_token_per_16_pixels_and_one_of_keypoints(height: int, width: int) -> None:
    eyes = PictureEncoder(height, width, channels=4, outputs=8)
    tokens = eyes(to_pixels(pictures(2, height, width)))
    assert tokens.shape == (2, eyes.tokens, 8)
    assert eyes.tokens == eyes.position.shape[0]
    if (height, width) == (96, 128):
        assert eyes.tokens == 6 * 8 + 1


def test_a_picture_is_seen_the_same_alone_and_among_many() -> None:
    eyes = PictureEncoder(32, 48, channels=4, outputs=8).train()
    pixels = to_pixels(pictures(5, 32, 48))
    assert torch.allclose(eyes(pixels)[2:3], eyes(pixels[2:3]), atol=1e-5)


def test_pixels_by_hand() -> None:
    # Black, white, and 51 / 127.5 - 1 = -0.6; channels come first.
    picture = torch.tensor([[[[0, 255, 51]]]], dtype=torch.uint8)
    assert to_pixels(picture).flatten().tolist() == pytest.approx([-1.0, 1.0, -0.6])


def test_jitter_stays_within_its_strength() -> None:
    pixels = torch.rand(500, 3, 2, 2, generator=seeded()) * 2 - 1
    changed = jitter_colour(pixels, 0.2, seeded(2))
    # At most 0.2 of contrast on |1|, 0.2 of brightness, 0.1 of tint.
    assert 0.3 < (changed - pixels).abs().max() <= 0.5
    # One contrast for the whole picture: equal pixels stay equal.
    flat = jitter_colour(torch.full((4, 3, 2, 2), 0.5), 0.2, seeded(3))
    assert torch.equal(flat, flat[..., :1, :1].expand_as(flat))
    assert torch.equal(jitter_colour(pixels, 0.0, seeded()), pixels)


def test_dropout_keeps_the_mean_and_its_share() -> None:
    tokens = torch.ones(100, 100)
    out = dropped(tokens, 0.25, seeded())
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert out.max().item() == pytest.approx(4 / 3)
    assert dropped(tokens, 0.0, seeded()) is tokens
