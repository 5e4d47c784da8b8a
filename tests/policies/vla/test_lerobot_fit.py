"""How a dataset fits a LeRobot checkpoint, without LeRobot; and the message where it is missing."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.policies.vla.lerobot import LeRobotPolicy, read_options
from robot_rl.policies.vla.lerobot_files import PIPELINES, hub_folder
from robot_rl.policies.vla.lerobot_fit import (
    check_sizes,
    dataset_stats,
    matched_cameras,
    padded_sizes,
)
from robot_rl.policies.vla.lora import LoraOptions

TWO = {"input_features": {"observation.images.camera1": {}, "observation.images.camera2": {}}}


def test_without_the_extra_the_error_names_it(facts_of, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lerobot"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(ConfigError, match=r"lerobot.* is not installed.*pip install -e '.\[lerobot\]'"):
        LeRobotPolicy.create(facts_of(), {"type": "act"})


def test_names_and_floors_of_the_statistics(facts_of) -> None:
    facts = facts_of(action=2, cameras=("front",))
    still = {"mean": [1.0, 2.0], "std": [0.5, 0.0], "min": [0.0, 2.0], "max": [3.0, 2.0]}
    stats = dataset_stats(
        type(facts)(
            meta=facts.meta,
            features=facts.features,
            stats={"action": {name: np.array(value) for name, value in still.items()}},
            instructions=facts.instructions,
        ),
        {"front": "camera1"},
    )
    assert stats.keys() == {"action", "observation.images.camera1"}
    np.testing.assert_allclose(stats["action"]["std"], [0.5, 1e-3])
    # A joint at 2 throughout gets 1e-3 to either side; one with a range keeps it.
    np.testing.assert_allclose(stats["action"]["min"], [0.0, 1.999])
    np.testing.assert_allclose(stats["action"]["max"], [3.0, 2.001])
    # No picture statistics in the dataset: ImageNet's.
    np.testing.assert_allclose(stats["observation.images.camera1"]["mean"][:, 0, 0], [0.485, 0.456, 0.406])


def test_cameras_of_other_names_are_refused_with_both(facts_of) -> None:
    with pytest.raises(
        CheckpointError, match=r"sees the cameras camera1, camera2; the dataset has front, wri"
    ):
        matched_cameras("smolvla", TWO, {}, {}, facts_of(), at="run")


def test_cameras_are_renamed_left_out_or_taken_from_the_checkpoint(facts_of) -> None:
    facts = facts_of()
    both = {"front": "camera1", "wrist": "camera2"}
    assert matched_cameras("act", TWO, {}, both, facts, at="run") == both
    earlier = {f"observation.images.{a}": f"observation.images.{b}" for a, b in both.items()}
    assert matched_cameras("act", TWO, earlier, {}, facts, at="run") == both
    left_out = {"front": "camera2", "wrist": None}
    assert matched_cameras("pi0", TWO, {}, left_out, facts, at="run") == {"front": "camera2"}
    with pytest.raises(CheckpointError, match="Say which is which"):
        matched_cameras("act", TWO, {}, left_out, facts, at="run")  # ACT needs each of its cameras
    with pytest.raises(CheckpointError, match="Say which is which"):
        matched_cameras("pi0", TWO, {}, {"front": "camera1", "wrist": "camera1"}, facts, at="run")


def test_other_sizes_are_refused_unless_the_type_pads(facts_of) -> None:
    table = {
        "input_features": {"observation.state": {"shape": [6]}},
        "output_features": {"action": {"shape": [6]}},
        "max_state_dim": 8,
        "max_action_dim": 8,
    }
    check_sizes("smolvla", table, facts_of(state=8, action=2), at="run")
    with pytest.raises(CheckpointError, match=r"state has 9 elements \(joint_0, .*takes at most 8"):
        check_sizes("smolvla", table, facts_of(state=9), at="run")
    with pytest.raises(
        CheckpointError, match=r"action has 4 elements .*takes 6\. Use a dataset of the robot"
    ):
        check_sizes("act", table, facts_of(state=6), at="run")


def test_a_new_policy_pads_to_what_the_dataset_needs(facts_of) -> None:
    wide = facts_of(state=33, action=40)
    for kind in ("smolvla", "pi0", "pi05"):
        assert padded_sizes(kind, wide, {}, at="") == {"max_state_dim": 33, "max_action_dim": 40}
    assert padded_sizes("pi0", facts_of(), {}, at="") == {"max_state_dim": 32, "max_action_dim": 32}
    assert padded_sizes("act", wide, {}, at="") == {}
    with pytest.raises(
        ConfigError, match=r"config\.max_action_dim is 32, the dataset has 40 elements\. Leave it"
    ):
        padded_sizes("pi0", wide, {"max_action_dim": 32}, at="")


@pytest.mark.parametrize("kind", ["act", "diffusion", "smolvla", "pi0", "pi05"])
def test_a_dataset_without_pictures(kind: str, facts_of) -> None:
    with pytest.raises(
        ConfigError, match=rf"policy {kind}: it needs at least one camera.*collect cameras=\[front"
    ):
        LeRobotPolicy.check(facts_of(cameras=()), {"type": kind})
    blind = {"front": None, "wrist": None}
    with pytest.raises(ConfigError, match="leaves out every one of the dataset's: front, wrist"):
        LeRobotPolicy.check(facts_of(), {"type": kind, "rename": blind})


def test_a_checkpoint_that_does_not_fit_is_refused_without_its_weights(facts_of, tmp_path) -> None:
    table = {"type": "smolvla", "max_state_dim": 32, "max_action_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(table | TWO))
    for name in PIPELINES:
        (tmp_path / f"{name}.json").write_text('{"steps": []}')
    options = {"pretrained": str(tmp_path), "rename": {"front": "camera1", "wrist": "camera2"}}
    LeRobotPolicy.check(replace(facts_of(state=32), stats={}), options)
    with pytest.raises(
        CheckpointError,
        match=r"state has 33 elements .*takes at most 32\. .*a new policy.*: policy=smolvla\.",
    ):
        LeRobotPolicy.check(replace(facts_of(state=33), stats={}), options)


def test_a_folder_that_is_not_there_is_no_hub_id() -> None:
    with pytest.raises(CheckpointError, match=r"no such folder for the checkpoint: '/nowhere/x'\. Give"):
        hub_folder("/nowhere/x", at="run", what="the checkpoint", remedy="")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "smolvia"}, "Did you mean 'smolvla'"),
        ({}, "say one of act, diffusion"),
        ({"type": "act", "normalisation": "none"}, "allowed: dataset, checkpoint"),
        ({"type": "act", "rename": {"front": "camera1"}}, "a new policy takes the dataset's cameras"),
        (
            {"type": "act", "typo": 1},
            r"^lerobot: no option 'typo'\. Did you mean 'type'\? .* go into options\.config\.<name>\.$",
        ),
        (
            {"type": "act", "lora": {"rang": 4}},
            r"lerobot: no option 'lora\.rang'\. Did you mean 'lora\.rank'",
        ),
        ({"type": "act", "lora": {"rank": 0}}, "lora.rank: got 0, allowed: 1 or more"),
        ({"type": "act", "lora": {"targets": "("}}, "is no pattern"),
        ({"type": "act", "flow": {"process": "sde"}}, "allowed: flow_sde, flow_ode"),
    ],
)
def test_options_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(options)


def test_options_are_read_from_plain_tables() -> None:
    chosen = read_options({"type": "pi0", "lora": {"rank": 4}, "rename": {"front": None}})
    assert chosen.lora == LoraOptions(rank=4)
    assert chosen.rename == {"front": None}
