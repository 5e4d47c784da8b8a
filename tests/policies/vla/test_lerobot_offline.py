"""Without a network: what is missing, and where to put it."""

import shutil

import pytest

from robot_rl.core.errors import CheckpointError
from robot_rl.policies.vla import tiny
from robot_rl.policies.vla.lerobot import LeRobotPolicy
from robot_rl.policies.vla.lerobot_files import CHECKSUMS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_hub")]


def fetch(name: str, what: str = "") -> str:
    return rf"(?s){what}'{name}' is no folder, and cannot be fetched.*`hf download {name} --local-dir FOLDER`"


def test_a_checkpoint_on_the_hub(facts_of) -> None:
    with pytest.raises(
        CheckpointError, match=fetch("lerobot/smolvla_base") + r".*as pretrained \(for .*: policy=FOLDER\)"
    ):
        LeRobotPolicy.from_pretrained("lerobot/smolvla_base", facts_of())


@pytest.mark.parametrize(
    ("kind", "what", "name"),
    [
        ("smolvla", "the VLM", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"),
        ("pi0", "the tokenizer", "google/paligemma-3b-pt-224"),
        ("pi05", "the tokenizer", "google/paligemma-3b-pt-224"),
    ],
)
def test_what_a_new_policy_reads_from_the_hub(kind, what, name, facts_of) -> None:
    with pytest.raises(
        CheckpointError, match=fetch(name, f"{what} ") + ".*: vlm=FOLDER .*options.vlm=FOLDER"
    ):
        LeRobotPolicy.create(facts_of(), {"type": kind})


def test_a_vlm_whose_weights_are_asked_for(tiny_vlm, facts_of) -> None:
    options = tiny.options("smolvla", tiny_vlm)
    options["config"]["load_vlm_weights"] = True
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors.*vlm=FOLDER"):
        LeRobotPolicy.create(facts_of(), options)


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_a_lerobot_checkpoint_that_names_a_hub_tokenizer(kind, tiny_policy, tiny_vlm, tmp_path) -> None:
    folder = tmp_path / "run"
    policy = tiny_policy(kind)
    policy.save(folder)
    shutil.rmtree(folder / ("vlm" if kind == "smolvla" else "tokenizer"))
    for name in ("config.json", "policy_preprocessor.json"):
        text = (folder / name).read_text()
        for inside in ("vlm", "tokenizer"):
            text = text.replace(str(folder / inside), "somebody/words")
        (folder / name).write_text(text)
    (folder / CHECKSUMS).unlink()  # LeRobot writes none
    with pytest.raises(CheckpointError, match=fetch("somebody/words") + ".*vlm=FOLDER"):
        LeRobotPolicy.load(folder)
    LeRobotPolicy.load(folder, vlm=str(tiny_vlm))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "processor_config.json"])
def test_a_file_that_a_folder_lacks(file, tiny_vlm, tmp_path, facts_of) -> None:
    vlm = shutil.copytree(tiny_vlm, tmp_path / "vlm")
    (vlm / file).unlink()
    options = {**tiny.options("smolvla", tiny_vlm), "vlm": str(vlm)}
    with pytest.raises(CheckpointError, match=rf"the VLM in .*vlm lacks {file}"):
        LeRobotPolicy.create(facts_of(), options)


def test_weights_of_a_backbone(facts_of, monkeypatch) -> None:
    from urllib.error import URLError

    def no_network(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    monkeypatch.setattr("torch.hub.get_dir", lambda: "/nonexistent")
    monkeypatch.setattr("os.makedirs", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match=r"backbone .*pretrained_backbone_weights=null"):
        LeRobotPolicy.create(facts_of(), {"type": "act", "config": {"chunk_size": 4}})
