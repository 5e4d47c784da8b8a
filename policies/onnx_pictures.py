"""A frozen image encoder as a graph of ONNX: what its file must be; without torch.

One input, a picture: float (N, 3, h, w) or (N, h, w, 3) in [0, 1], or uint8 in 0 to 255. One output, float
(N, D). N is free or 1; h and w are free or those of the pictures. Means and deviations of the encoder's own
training belong into the graph.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import CheckpointError
from robot_rl.core.refusal import refusing
from robot_rl.policies.onnx_saved import open_graph

Array = NDArray[Any]
SUFFIX = ".onnx"
_SETTING = "bc.encoder"
_ALLOWED = (
    "one input, float or uint8 (N, 3, h, w) or (N, h, w, 3), and one output, float (N, D) with a number D. "
    "Export it so."
)


@dataclass(frozen=True, kw_only=True)
class PictureInput:
    """How a graph takes pictures."""

    name: str
    is_float: bool
    """In [0, 1]; else uint8."""
    channels_first: bool
    one_row: bool
    """Whether it takes one picture at a time."""


@dataclass(frozen=True, kw_only=True)
class EncoderGraph:
    """A graph that fits."""

    content: bytes
    features: int
    """D."""
    sha256: str


@refusing(CheckpointError)
def read_encoder_graph(path: Path, size: tuple[int, int]) -> EncoderGraph:
    """Reads a graph, and runs it once.

    Args:
        path: of the file.
        size: height and width of the pictures.

    Raises:
        ConfigError: onnxruntime is not installed.
        CheckpointError: it is damaged, or its input or output is of another kind or size.
    """
    content = path.read_bytes()
    session = open_graph(content, at=str(path), setting=_SETTING)
    taken, features = signature_of(session, at=str(path))
    shape = session.get_inputs()[0].shape
    given = tuple(shape[2:] if taken.channels_first else shape[1:3])
    for own, need in zip(given, size, strict=True):
        if isinstance(own, int) and own != need:
            raise CheckpointError(
                f"{path}: the graph takes pictures of {given}, those of the run are {size}. Set "
                "env.image_size so, or export the graph for that size."
            )
    try:
        found = encoded(session, taken, np.full((1, *size, 3), 0.5, np.float32))
    except Exception as error:  # onnxruntime's own classes, derived from Exception alone
        why = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: it fails on a picture of {size}: {why}. Export it again.") from error
    if found.shape != (1, features) or not np.isfinite(found).all():
        raise CheckpointError(
            f"{path}: a grey picture gives {found.shape} and {int((~np.isfinite(found)).sum())} bad numbers, "
            f"allowed: {(1, features)}, all finite. Export it again."
        )
    return EncoderGraph(content=content, features=features, sha256=hashlib.sha256(content).hexdigest())


def signature_of(session: Any, *, at: str) -> tuple[PictureInput, int]:
    """Returns how a graph takes pictures, and the number of its features.

    Raises:
        CheckpointError: it has other inputs or outputs.
    """
    inputs, outputs = session.get_inputs(), session.get_outputs()

    def refuse() -> NoReturn:
        shown = [f"{entry.name} {entry.type} {entry.shape}" for entry in (*inputs, *outputs)]
        raise CheckpointError(f"{at}: the graph has {', '.join(shown)}; allowed: {_ALLOWED}")

    if len(inputs) != 1 or len(outputs) != 1:
        refuse()
    (picture,), (out,) = inputs, outputs
    shape, features = list(picture.shape), list(out.shape)
    kinds = ("tensor(float)", "tensor(uint8)")
    if picture.type not in kinds or out.type != kinds[0] or len(shape) != 4 or len(features) != 2:
        refuse()
    free = not isinstance(shape[0], int)
    if 3 not in (shape[1], shape[3]) or not (free or shape[0] == 1) or not isinstance(features[1], int):
        refuse()
    taken = PictureInput(
        name=picture.name,
        is_float=picture.type == kinds[0],
        channels_first=shape[1] == 3,
        one_row=not free,
    )
    return taken, features[1]


def encoded(session: Any, taken: PictureInput, pictures: Array) -> Array:
    """Returns the features (B, D) of pictures (B, h, w, 3), float32 in [0, 1]."""
    given = pictures if taken.is_float else np.rint(255.0 * pictures).astype(np.uint8)
    given = np.ascontiguousarray(given.transpose(0, 3, 1, 2)) if taken.channels_first else given
    parts = np.split(given, len(given)) if taken.one_row else [given]
    return np.concatenate([session.run(None, {taken.name: part})[0] for part in parts])
