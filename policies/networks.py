"""Networks: MLPs, the denoiser, a small image encoder, and the observation encoder they share.

B envs, H chunk length, A action dim, F feature dim, W width, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.arrays import multiplies_bfloat16
from robot_rl.core.errors import DatasetError, nearest
from robot_rl.core.names import PRIVILEGED
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.onnx_encoder import OnnxEncoder

SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 4.0
"""Periods of the time embedding, for times in [0, 1] (openpi)."""
_LARGE = 128  # rows and columns from which a product is worth the rounding, some 20 us


class Linear(nn.Linear):
    """A linear layer whose large products are taken in bfloat16 where torch's matmul precision is `medium`.

    On a CPU, torch itself does so on processors with AMX alone, and rounds the matrices again for each of the
    three products of an update. Sums, weights, gradients and what is returned are float32.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)

    def forward(self, input: Tensor) -> Tensor:
        is_large = input.ndim == 2 and min(*input.shape, self.out_features) >= _LARGE
        if not (is_large and input.device.type == "cpu" and torch.get_float32_matmul_precision() == "medium"):
            return super().forward(input)
        return _RoundedProduct.apply(input, self.weight) + self.bias


class _RoundedProduct(torch.autograd.Function):
    """x (B, I) times the transpose of weight (O, I), and its gradients, of matrices that are rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        halves = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(*halves)
        return torch.mm(halves[0], halves[1].T).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_out = grads[0].bfloat16()
        to_x = torch.mm(to_out, weight).float() if ctx.needs_input_grad[0] else None
        return to_x, torch.mm(to_out.T, x).float() if ctx.needs_input_grad[1] else None


class Trunk(nn.Module):
    """Hidden layers after the input layer, and the output layer: maps (N, W) to (N, outputs).

    With `residual`, each hidden layer adds to the one before. With `layernorm`, every hidden
    layer is normalised before its activation.
    """

    def __init__(
        self, outputs: int, *, width: int, depth: int, layernorm: bool = False, residual: bool = False
    ) -> None:
        super().__init__()
        self.residual = residual
        self.first = _Activate(width, layernorm=layernorm)
        self.hidden = nn.ModuleList(
            nn.Sequential(Linear(width, width), _Activate(width, layernorm=layernorm))
            for _ in range(depth - 1)
        )
        self.out = nn.Linear(width, outputs)

    def forward(self, h: Tensor) -> Tensor:
        h = self.first(h)
        for layer in self.hidden:
            h = h + layer(h) if self.residual else layer(h)
        return self.out(h)


class MLP(nn.Module):
    """`depth` hidden layers of `width` units with SiLU, from (..., inputs) to (..., outputs)."""

    def __init__(self, inputs: int, outputs: int, *, width: int, depth: int, **trunk: bool) -> None:
        """Args: trunk: layernorm and residual, see `Trunk`."""
        super().__init__()
        self.input = Linear(inputs, width)
        self.trunk = Trunk(outputs, width=width, depth=depth, **trunk)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(self.input(x))


class DenoiseNet(nn.Module):
    """Predicts velocity or noise of a chunk, given features and time.

    The same function as one MLP over the concatenated inputs; the first layer is split so that
    the parts of the observation and of the time are computed once per chunk, not once per step.
    """

    def __init__(
        self,
        features: int,
        horizon: int,
        action_dim: int,
        *,
        width: int,
        depth: int,
        time_dim: int,
        **trunk: bool,
    ) -> None:
        """Args: trunk: layernorm and residual, see `Trunk`."""
        super().__init__()
        flat = horizon * action_dim
        self.chunk_in = nn.Linear(flat, width)
        self.features_in = nn.Linear(features, width, bias=False)
        self.time_in = nn.Sequential(
            nn.Linear(time_dim, 2 * time_dim), nn.SiLU(), nn.Linear(2 * time_dim, width, bias=False)
        )
        self.trunk = Trunk(flat, width=width, depth=depth, **trunk)

    def condition(self, features: Tensor) -> Tensor:
        """Returns the features' part of the first layer, (B, W)."""
        return self.features_in(features)

    def embed_time(self, sinusoids: Tensor) -> Tensor:
        """Returns the time's part of the first layer, (N, W), from `sinusoidal` (N, time_dim)."""
        return self.time_in(sinusoids)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Predicts (N, H, A) for `x` (N, H, A); `condition` (N, W) sums features and time."""
        return self.trunk(self.chunk_in(x.flatten(1)) + condition).view(x.shape)


class NoiseNet(nn.Module):
    """Learned standard deviation of a denoising step, per action element, within bounds (ReinFlow).

    Deviation: SiLU in the hidden layers, not tanh. It begins at the bounds' geometric mean.
    """

    def __init__(
        self, features: int, time_dim: int, horizon: int, action_dim: int, *, bounds: tuple[float, float]
    ) -> None:
        """Args: bounds: smallest and largest standard deviation."""
        super().__init__()
        self.net = MLP(features + time_dim, horizon * action_dim, width=64, depth=2)
        self._shape = (horizon, action_dim)
        low, high = (math.log(bound) for bound in bounds)
        self._centre, self._half_range = (low + high) / 2, (high - low) / 2

    def begin(self) -> None:
        """Makes the deviation the same everywhere."""
        zero_last_layer(self.net)

    def forward(self, features: Tensor, sinusoids: Tensor) -> Tensor:
        """Returns (N, H, A) for features (N, F) and the time's sinusoids, (N, time_dim) or (time_dim,)."""
        inputs = torch.cat([features, sinusoids.expand(len(features), -1)], dim=-1)
        log_std = self._centre + self._half_range * self.net(inputs).tanh()
        return log_std.exp().view(-1, *self._shape)


class ImageEncoder(nn.Module):
    """Encodes one camera: convolutions, spatial soft-argmax, a linear layer with layer norm.

    The soft-argmax (Levine et al. 2016) returns where each channel is active, so the features do
    not depend on the image size. 2,100 to 40,000 pixels are sensible.
    """

    def __init__(self, outputs: int, *, channels: int = 32) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.project = nn.Sequential(nn.Linear(2 * channels, outputs), nn.LayerNorm(outputs))
        self.dim = outputs

    def forward(self, image: Tensor) -> Tensor:
        """Maps images (B, h, w, 3) in [0, 1] to (B, outputs)."""
        maps = self.convolutions(image.permute(0, 3, 1, 2) - 0.5)
        return self.project(spatial_soft_argmax(maps))


_SEEN = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (3.0, -3.0, 0.0), (1.5, 1.5, -3.0))
"""What a keypoint encoder sees (its rows) of red, green and blue."""


class _OpponentConv(nn.Conv2d):
    """A convolution over the colours of `_SEEN`, of pictures in red, green and blue (B, 3, h, w).

    These colours are sums of the three, so its weights are added up, and not pictures, which takes longer.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = torch.einsum("oshw,sc->ochw", self.weight, self.weight.new_tensor(_SEEN))
        return self._conv_forward(input, weight, self.bias)


class KeypointEncoder(nn.Module):
    """Encodes one camera as keypoints: where each channel is active, and how clearly.

    Its channels are red, green, blue and two opponent colours (red - green, yellow - blue). Each map is
    standardised over its picture before the soft-argmax, whose temperature is learned. Both make a small
    coloured thing as visible as a large grey one.
    """

    def __init__(self, *, channels: tuple[int, int] = (12, 24), keypoints: int = 32) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            _OpponentConv(len(_SEEN), channels[0], 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels[0], channels[1], 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels[1], keypoints, 3, padding=1),
        )
        self.log_sharpness = nn.Parameter(torch.zeros(keypoints))
        self.dim = 3 * keypoints

    def forward(self, image: Tensor) -> Tensor:
        """Maps images (B, h, w, 3) in [0, 1] to (B, 3 keypoints): x and y in [-1, 1], and strength."""
        return self.of_pixels(torch.add(image.new_tensor(-1.0), image, alpha=2.0).permute(0, 3, 1, 2))

    def of_pixels(self, rgb: Tensor) -> Tensor:
        """Maps pixels (B, 3, h, w) in [-1, 1] to what `forward` returns."""
        with torch.autocast(rgb.device.type, torch.bfloat16, enabled=rounds_to_bfloat16(rgb.device)):
            maps = self.convolutions(rgb)
        height, width = maps.shape[2:]
        # Channels stay last, as convolutions leave them: rearranging maps takes longer than convolutions.
        values = maps.permute(0, 2, 3, 1).flatten(1, 2).float()
        values = values - values.mean(dim=1, keepdim=True)
        variance = values.square().sum(dim=1, keepdim=True) / (height * width - 1)
        std = variance.clamp_min(1e-12).sqrt() + 1e-3  # a blank picture has no gradient, and not NaN
        top = values.amax(dim=1, keepdim=True)
        weights = ((values - top.detach()) * (self.log_sharpness.exp() / std)).exp()
        sides = (torch.linspace(-1.0, 1.0, n, device=weights.device) for n in (height, width))
        y, x = torch.meshgrid(*sides, indexing="ij")
        sums = torch.stack([x, y, torch.ones_like(x)]).flatten(1) @ weights
        strength = (top[:, 0] / std[:, 0] - 3.0) / 4.0
        return torch.cat([sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2], strength], dim=-1)


class Projection(nn.Sequential):
    """What a camera's features of a frozen graph become: a linear layer with layer norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, outputs), nn.LayerNorm(outputs))
        self.dim = outputs


def rounds_to_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster there than in float32."""
    return device.type == "cuda" or multiplies_bfloat16()


class ObservationEncoder(nn.Module):
    """Turns an observation into features: the normalised state, then each camera's features.

    With `predicts` elements of the privileged state, a network guesses them from the features. A loss can
    hold it to the truth, and its guess joins the features.
    """

    def __init__(
        self,
        normaliser: Normaliser,
        *,
        cameras: Sequence[str] = (),
        image_features: int = 64,
        image_encoder: str = "plain",
        frozen_graph: Sequence[int] = (),
        predicts: int = 0,
    ) -> None:
        """Draws the encoders; `frozen_graph` has the bytes and features of a graph that all cameras share."""
        super().__init__()
        self.normaliser = normaliser
        self.keys = tuple(f"{camera}.rgb" for camera in cameras)
        self.frozen = OnnxEncoder(frozen_graph[0]) if frozen_graph else None
        if frozen_graph:
            encoders: list[Any] = [Projection(frozen_graph[1], image_features) for _ in cameras]
        else:
            encoders = [_image_encoder(image_encoder, image_features) for _ in cameras]
        self.images = nn.ModuleList(encoders)
        self.dim = normaliser.feature_dims["state"] + sum(encoder.dim for encoder in encoders)
        self.guess = MLP(self.dim, predicts, width=192, depth=2, layernorm=True) if predicts else None
        self.dim += predicts

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Returns features (B, F).

        Raises:
            DatasetError: the observation lacks the state or a camera, or has another size.
        """
        for key in ("state", *self.keys):
            if key not in obs:
                raise DatasetError(
                    f"observation: no {key!r}, which this policy reads.{nearest(key, obs)} "
                    "Make the environment with the cameras the policy was trained with."
                )
        used = self.normaliser.obs({key: obs[key] for key in ("state", *self.keys)})
        features = used["state"]
        if self.keys:
            seen = [used[key] if self.frozen is None else self.frozen(used[key]) for key in self.keys]
            encoded = [net(picture) for net, picture in zip(self.images, seen, strict=True)]
            features = torch.cat([features, *encoded], dim=-1)
        if self.guess is not None:
            features = torch.cat([features, self.guess(features)], dim=-1)
        return features

    def guess_error(self, features: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        """Returns the mean absolute error of the guess within `features`, in standard deviations."""
        truth = self.normaliser.obs({PRIVILEGED: obs[PRIVILEGED]})[PRIVILEGED]
        return (features[:, -truth.shape[-1] :] - truth).abs().mean()

    def augment(
        self, obs: Mapping[str, Tensor], *, pad_px: int, generator: Generator | None
    ) -> dict[str, Tensor]:
        """Returns the observation with every camera shifted at random (training only)."""
        return {
            name: random_shift(value, pad_px=pad_px, generator=generator)
            if name in self.keys and pad_px > 0
            else value
            for name, value in obs.items()
        }


def _image_encoder(name: str, features: int) -> KeypointEncoder | ImageEncoder:
    return KeypointEncoder() if name == "keypoints" else ImageEncoder(features)


def sinusoidal(time: Tensor, dim: int) -> Tensor:
    """Embeds times (N,) in [0, 1] as sines and cosines, (N, dim); `dim` is even."""
    half = dim // 2
    exponent = torch.linspace(0.0, 1.0, half, dtype=time.dtype, device=time.device)
    period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** exponent
    angle = 2.0 * math.pi * time[:, None] / period
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def spatial_soft_argmax(maps: Tensor) -> Tensor:
    """Returns the mean position of each channel's softmax: (B, C, h, w) to (B, 2 C) in [-1, 1]."""
    batch, channels, height, width = maps.shape
    weight = maps.flatten(2).softmax(dim=-1).view(batch, channels, height, width)
    rows = torch.linspace(-1.0, 1.0, height, dtype=maps.dtype, device=maps.device)
    columns = torch.linspace(-1.0, 1.0, width, dtype=maps.dtype, device=maps.device)
    y = (weight.sum(dim=3) * rows).sum(dim=-1)
    x = (weight.sum(dim=2) * columns).sum(dim=-1)
    return torch.cat([x, y], dim=-1)


def random_shift(images: Tensor, *, pad_px: int, generator: Generator | None = None) -> Tensor:
    """Shifts each image (B, h, w, C) by up to `pad_px` pixels, repeating the border (DrQ)."""
    if pad_px < 0:
        raise ValueError(f"random_shift: pad_px must be at least 0, got {pad_px}")
    batch, height, width = images.shape[:3]
    device = generator.device if generator is not None else images.device
    shape = (2, batch, 1)
    shift = torch.randint(-pad_px, pad_px + 1, shape, generator=generator, device=device)
    shift = shift.to(images.device)
    rows = (torch.arange(height, device=images.device) + shift[0]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + shift[1]).clamp(0, width - 1)
    every = torch.arange(batch, device=images.device).view(-1, 1, 1)
    return images[every, rows[:, :, None], columns[:, None, :]]


def zero_last_layer(module: nn.Module) -> None:
    """Sets the last linear layer of `module` to zero, so that it starts by returning zeros."""
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ValueError(f"zero_last_layer: {type(module).__name__} has no linear layer")
    for parameter in linear[-1].parameters():
        nn.init.zeros_(parameter)


def initialise(module: nn.Module, generator: Generator | None) -> None:
    """Draws torch's default weights again from `generator`; None keeps what is there."""
    if generator is None:
        return
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)


class _Activate(nn.Module):
    """SiLU, after layer norm if asked."""

    def __init__(self, width: int, *, layernorm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if layernorm else None

    def forward(self, h: Tensor) -> Tensor:
        return nn.functional.silu(h if self.norm is None else self.norm(h))
