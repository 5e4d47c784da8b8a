"""Image encoders from a file: every tensor fits, or the message names those that do not."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from robot_rl.core.errors import CheckpointError
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.given_encoder import load_image_encoders
from robot_rl.policies.networks import KeypointEncoder, ObservationEncoder

CAMERAS = ("left", "wrist")


def encoder(kind: str = "keypoints") -> ObservationEncoder:
    return ObservationEncoder(Normaliser({"state": 2}, 1), cameras=CAMERAS, image_encoder=kind)


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def test_a_saved_policys_encoders_are_taken_camera_by_camera(tmp_path: Path) -> None:
    one, other = encoder(), encoder()
    state = {f"encoder.{name}": value for name, value in one.state_dict().items()} | {"head": torch.ones(3)}
    path = written(tmp_path / "policy.safetensors", state)
    digest = load_image_encoders(other, path)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    for name, value in one.images.state_dict().items():
        assert value.equal(other.images.state_dict()[name]), name


def test_one_encoder_serves_every_camera(tmp_path: Path) -> None:
    one, other = KeypointEncoder(), encoder()
    load_image_encoders(other, written(tmp_path / "eye.safetensors", one.state_dict()))
    for image in other.images:
        for name, value in one.state_dict().items():
            assert value.equal(image.state_dict()[name]), name


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    state = KeypointEncoder().state_dict()
    short = {name: value for name, value in state.items() if name != "log_sharpness"}
    with pytest.raises(CheckpointError, match=r"image encoders of 2 cameras: 0.log_sharpness is missing"):
        load_image_encoders(encoder(), written(tmp_path / "short.safetensors", short))
    wide = {**state, "log_sharpness": torch.ones(7)}
    with pytest.raises(CheckpointError, match=r"is torch.float32 \(7,\), not torch.float32 \(32,\)"):
        load_image_encoders(encoder(), written(tmp_path / "wide.safetensors", wide))
    with pytest.raises(
        CheckpointError, match=r"0.project.0.weight is missing; .*and \d+ more. Use the cameras"
    ):
        load_image_encoders(encoder("plain"), written(tmp_path / "kind.safetensors", state))
    (tmp_path / "cut.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"cut.safetensors: cannot be read as safetensors"):
        load_image_encoders(encoder(), tmp_path / "cut.safetensors")
    with pytest.raises(CheckpointError, match=r"none.safetensors: no such file"):
        load_image_encoders(encoder(), tmp_path / "none.safetensors")
