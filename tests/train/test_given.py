"""What is refused of a policy that LeRobot saved, before anything is opened; no LeRobot is needed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.cli import evaluate
from robot_rl.config import build
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.policies.vla.lerobot_saved import GivenFolder, lerobot_folder, read_lerobot_folder
from robot_rl.train.before import check_before_learner
from robot_rl.train.config import RunConfig
from robot_rl.train.given import check_given, find_given, meta_of

META = EpisodesMeta(
    task="t",
    robot="r",
    control_hz=20.0,
    instruction="i",
    state_names=("a", "b"),
    action_names=("x",),
)
FEATURES = {
    "state": Feature("float32", (2,)),
    "environment_state": Feature("float32", (3,)),
    "front.rgb": Feature("uint8", (16, 24, 3)),
}
STATE = {"observation.state": {"type": "STATE", "shape": [2]}}
FRONT = {"observation.images.front": {"type": "VISUAL", "shape": [3, 16, 24]}}
APART = {"observation.environment_state": {"type": "ENV", "shape": [3]}}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Writes what LeRobot writes of a policy, without the weights."""

    def write(kind: str = "act", inputs: Any = None, action: int = 1, data: Any = None, **more: Any) -> Path:
        folder = tmp_path / "lerobot" / "checkpoints" / "last" / "pretrained_model"
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "type": kind,
            "input_features": {**STATE, **FRONT} if inputs is None else inputs,
            "output_features": {"action": {"type": "ACTION", "shape": [action]}},
            "chunk_size": 8,
            "n_action_steps": 4,
            **more,
        }
        (folder / "config.json").write_text(json.dumps(config))
        if data is not None:
            root = tmp_path / "data"
            (root / "meta").mkdir(parents=True, exist_ok=True)
            (root / "meta" / "info.json").write_text(json.dumps(data))
            (folder / "train_config.json").write_text(json.dumps({"dataset": {"root": str(root)}}))
        return tmp_path / "lerobot"

    return write


def run_of(base: Path, method: str = "residual", **changes: Any) -> RunConfig:
    words = {"bc": {"policy": str(base)}, "n_exec": 4, "method": {"kind": method}, **changes}
    return build(RunConfig, words)


def checked(config: RunConfig, features: Any = FEATURES, meta: EpisodesMeta = META) -> None:
    given = find_given(config)
    assert given is not None
    check_given(config, given, meta, features)


def test_what_a_folder_says(saved: Callable[..., Path]) -> None:
    folder = lerobot_folder(saved(inputs={**STATE, **FRONT, **APART}))
    assert folder is not None
    assert folder.name == "pretrained_model"
    given = read_lerobot_folder(folder)
    assert given == GivenFolder(
        folder=folder,
        type="act",
        inputs={
            "observation.state": (2,),
            "observation.images.front": (3, 16, 24),
            "observation.environment_state": (3,),
        },
        action_dim=1,
        horizon=8,
        n_exec=4,
        scheduler="",
        dataset=None,
    )
    assert given.cameras == {"front": (16, 24)}
    assert given.kind == "lerobot_act"
    assert replace(given, type="pi05").kind == "lerobot_flow"


def test_cameras_have_the_names_that_the_preprocessor_renames(saved: Callable[..., Path]) -> None:
    seen = {"observation.images.camera1": {"type": "VISUAL", "shape": [3, 16, 24]}}
    folder = lerobot_folder(saved("smolvla", {**STATE, **seen}))
    assert folder is not None
    renames = {"observation.images.front": "observation.images.camera1"}
    step = {"registry_name": "rename_observations_processor", "config": {"rename_map": renames}}
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    assert list(read_lerobot_folder(folder).cameras) == ["front"]


def test_what_fits_is_taken(saved: Callable[..., Path]) -> None:
    names = {"observation.state": {"names": {"motors": ["a", "b"]}}, "action": {"names": ["x"]}}
    base = saved(inputs={**STATE, **FRONT, **APART}, data={"fps": 20, "features": names})
    checked(run_of(base))


@pytest.mark.parametrize(
    ("made", "meta", "message"),
    [
        (
            {"inputs": {**STATE, "observation.state": {"shape": [6]}}, "action": 6},
            META,
            r"another embodiment: observation\.state has 6 elements, here it is 2 \(a, b\); "
            r"action has 6 elements, here it is 1 \(x\)\. Take the task, robot and env\.state",
        ),
        ({"inputs": FRONT}, META, r"observation\.state has no elements, here it is 2 \(a, b\)"),
        (
            {"data": {"fps": 20, "features": {"observation.state": {"names": ["a", "elbow"]}}}},
            META,
            r"another embodiment: its state elements differ: it has elbow and lacks b",
        ),
        (
            {"data": {"fps": 20, "features": {"action": {"names": ["y"]}}}},
            META,
            r"its joints \(action\) differ: it has y and lacks x",
        ),
        ({"data": {"fps": 30, "features": {}}}, META, r"it was recorded at 30 Hz, not 20 Hz"),
        (
            {"inputs": {**STATE, "observation.effort": {"shape": [2]}}},
            META,
            r"it reads observation\.effort, which no env here shows",
        ),
    ],
)
def test_another_embodiment(
    made: dict[str, Any], meta: EpisodesMeta, message: str, saved: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        checked(run_of(saved(**made)), meta=meta)


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        (
            {"front.rgb": Feature("uint8", (96, 96, 3))},
            r"it reads camera front at 16 x 24 pixels, the run shows it at 96 x 96; it reads "
            r"observation\.environment_state with 3 elements, the run shows none\. Say "
            r"env\.cameras=\[front\] env\.image_size=\[16,24\] env\.environment_state=",
        ),
        (
            {"environment_state": Feature("float32", (2,))},
            r"the run shows it not at all; .* 3 elements, the run shows 2 elements of it",
        ),
    ],
)
def test_other_pictures(shown: dict[str, Feature], message: str, saved: Callable[..., Path]) -> None:
    base = saved(inputs={**STATE, **FRONT, **APART})
    with pytest.raises(ConfigError, match=message):
        checked(run_of(base), features={"state": FEATURES["state"], **shown})


@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        (
            "act",
            "latent",
            r"'lerobot_act', allowed: .*lerobot_flow, onnx with method=latent",
        ),
        ("act", "ppo", r"got 'lerobot_act', allowed: .*lerobot_flow, noise with method=ppo"),
        (
            "vqbet",
            "residual",
            r"got 'lerobot_vqbet', allowed: .*lerobot_act, lerobot_diffusion",
        ),
        ("smolvla", "direct", r"got 'lerobot_flow', allowed: .* Use method=residual"),
    ],
)
def test_a_method_that_cannot_improve_it(
    kind: str, method: str, message: str, saved: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(run_of(saved(kind), method))


def test_noise_that_cannot_be_steered(saved: Callable[..., Path]) -> None:
    more = {"chunk_size": None, "horizon": 8}
    with pytest.raises(ConfigError, match=r"noise_scheduler_type is DDPM, allowed with method=latent: DDIM"):
        checked(run_of(saved("diffusion", noise_scheduler_type="DDPM", **more), "latent"))
    checked(run_of(saved("diffusion", noise_scheduler_type="DDIM", **more), "latent"))


def test_chunks_that_are_too_short(saved: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"n_exec: got 9, allowed: 1 to the base's 8"):
        checked(run_of(saved(), n_exec=9))


def test_a_folder_without_a_policy_of_anybody(tmp_path: Path, saved: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"policy\.json"):
        check_before_learner(run_of(tmp_path))
    folder = lerobot_folder(saved())
    assert folder is not None
    (folder / "config.json").write_text('{"type": "act"}')
    with pytest.raises(CheckpointError, match=r"config\.json does not describe a policy: KeyError"):
        check_before_learner(run_of(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        check_before_learner(run_of(folder))


def test_the_command_refuses_before_the_learner_is_loaded(saved: Callable[..., Path]) -> None:
    config = run_of(saved(), env={"task": "reach"})
    with pytest.raises(CheckpointError, match=r"observation\.state has 2 elements, here it is \d\d \(joint1"):
        check_before_learner(config)


def test_evaluation_needs_to_know_the_task(saved: Callable[..., Path]) -> None:
    folder = lerobot_folder(saved())
    assert folder is not None
    with pytest.raises(CheckpointError, match=r"its dataset is not where .* says\. Name the dataset"):
        meta_of(read_lerobot_folder(folder), None)
    saved(data={"fps": 20})
    with pytest.raises(CheckpointError, match=r"data names no task\. Name the dataset .* dataset=<folder>"):
        meta_of(read_lerobot_folder(folder), None)
    assert evaluate.config([f"policy={folder}", "dataset=x"]).dataset == "x"
