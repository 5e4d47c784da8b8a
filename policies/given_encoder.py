"""Weights of image encoders that a user gives: a file of tensors, read strictly."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from robot_rl.core.errors import CheckpointError
from robot_rl.core.refusal import refusing
from robot_rl.policies.networks import ObservationEncoder

_OF_POLICY = "encoder.images."
"""Begins the names of the image encoders' tensors in a saved policy."""


@refusing(CheckpointError)
def load_image_encoders(encoder: ObservationEncoder, path: Path) -> str:
    """Loads the image encoders, one of each camera; returns the SHA-256 of the file.

    Args:
        encoder: whose image encoders take the tensors.
        path: a safetensors file. Either `policy.safetensors` of a saved policy, whose cameras are taken in
            their order and whose other tensors are left; or the tensors of one encoder, which every camera
            takes.

    Raises:
        CheckpointError: no such file, or a tensor is missing, unexpected or of another shape or type.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file. Name a safetensors file: a saved policy has one.")
    blob = path.read_bytes()
    try:
        given = load(blob)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}.") from error
    own = encoder.images.state_dict()
    found = {
        name.removeprefix(_OF_POLICY): value for name, value in given.items() if name.startswith(_OF_POLICY)
    }
    if not found:  # one encoder, the same for each camera
        found = {f"{i}.{name}": value for i in range(len(encoder.images)) for name, value in given.items()}
    if problems := differences(own, found):
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(
            f"{path}: the tensors do not fit the image encoders of {len(encoder.images)} cameras: "
            f"{'; '.join(problems[:6])}{more}. Use the cameras and the policy.image_encoder of that file."
        )
    encoder.images.load_state_dict(found)
    return hashlib.sha256(blob).hexdigest()


def differences(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Says which tensors are missing, unexpected, or of another shape or type."""
    problems = [f"{name} is missing" for name in own if name not in given]
    problems += [f"{name} is unexpected" for name in given if name not in own]

    def shown(tensor: Tensor) -> Any:
        return f"{tensor.dtype} {tuple(tensor.shape)}"

    return problems + [
        f"{name} is {shown(given[name])}, not {shown(own[name])}"
        for name in own
        if name in given and shown(own[name]) != shown(given[name])
    ]
