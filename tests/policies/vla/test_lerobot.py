"""LeRobot's policies between LeRobot's pipelines, and folders that either side loads."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.language import INSTRUCTION
from robot_rl.core.policy import Chain, DemoBatch
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.vla import tiny
from robot_rl.policies.vla.lerobot import LeRobotPolicy
from robot_rl.policies.vla.lerobot_build import relocate
from robot_rl.policies.vla.lerobot_files import CHECKSUMS, quiet

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_hub")]

KINDS = ("act", "diffusion", "smolvla", "pi0", "pi05")
META = PolicyMeta(
    task="tidy",
    robot="arm",
    control_hz=20.0,
    state_names=(),
    action_names=(),
    instruction="pick up the bottle",
    n_exec=1,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chunk(policy: Any, demo: DemoBatch) -> torch.Tensor:
    return policy.sample(policy.encode(demo.obs), generator=seeded()).actions


def opened_by_lerobot(folder: Path, demo: DemoBatch, cameras: dict[str, str]) -> torch.Tensor:
    """The chunk of LeRobot's own classes, loaded from the folder by LeRobot's own functions."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    with quiet():
        config = PreTrainedConfig.from_pretrained(folder)
        policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
        pre, post = make_pre_post_processors(config, pretrained_path=str(folder))
    batch = {"observation.state": demo.obs["state"], "task": ["open the drawer"] * len(demo.actions)}
    for ours, theirs in cameras.items():
        batch[f"observation.images.{theirs}"] = demo.obs[f"{ours}.rgb"].permute(0, 3, 1, 2) / 255
    inputs = pre(batch)
    if config.type == "diffusion":
        inputs["observation.state"] = inputs["observation.state"].unsqueeze(1)
    seed = torch.randint(2**62, (), generator=seeded()).item()
    torch.manual_seed(seed)  # as `sample` seeds what LeRobot draws
    return post(policy.predict_action_chunk(inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_lerobot_loads_and_so_do_we(kind, tiny_policy, demo_of, tmp_path) -> None:
    policy = tiny_policy(kind)
    demo = demo_of(policy.horizon)
    expected = chunk(policy, demo)
    policy.save(tmp_path / "run")
    torch.testing.assert_close(
        opened_by_lerobot(tmp_path / "run", demo, {"front": "front", "wrist": "wrist"}), expected
    )
    shutil.move(tmp_path / "run", tmp_path / "moved")
    loaded = LeRobotPolicy.load(tmp_path / "moved")
    assert torch.equal(chunk(loaded, demo), expected)
    assert loaded.instruction == "pick up the bottle"
    save_policy(tmp_path / "ours", policy, meta=META)
    again, _ = load_policy(tmp_path / "ours")
    assert torch.equal(chunk(again, demo), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_lerobots(kind, tiny_policy, demo_of, facts_of) -> None:
    policy, facts = tiny_policy(kind), facts_of()
    demo = demo_of(policy.horizon)
    inputs = policy.preprocess(demo.obs, demo.actions, demo.valid)
    stats = facts.stats["state"]
    mean, std, low, high = (torch.tensor(stats[n]).float() for n in ("mean", "std", "min", "max"))
    if kind == "diffusion":
        expected = 2 * (demo.obs["state"] - low) / (high - low) - 1
    elif kind == "pi05":
        low, high = (torch.tensor(stats[n]).float() for n in ("q01", "q99"))
        expected = 2 * (demo.obs["state"] - low) / (high - low) - 1
    else:
        expected = (demo.obs["state"] - mean) / std
    torch.testing.assert_close(inputs["observation.state"].view(3, -1), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs["action_is_pad"], ~demo.valid)
    picture = demo.obs["wrist.rgb"].permute(0, 3, 1, 2) / 255
    if kind in ("act", "diffusion"):  # these normalise pictures, by mean 0.4 and std 0.2
        picture = (picture - 0.4) / 0.2
    torch.testing.assert_close(
        inputs["observation.images.wrist"].view(picture.shape), picture, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(policy.postprocess(inputs["action"]), demo.actions, rtol=1e-4, atol=1e-4)
    if kind in ("smolvla", "pi0", "pi05"):
        tokenizer = policy._parts.step("tokenizer_processor").input_tokenizer
        mask = inputs["observation.language.attention_mask"][0]
        text = tokenizer.decode(inputs["observation.language.tokens"][0][mask])
        assert text.startswith("Task: open the drawer, State: " if kind == "pi05" else "open the drawer\n")


@pytest.mark.parametrize("kind", ["act", "smolvla"])
def test_padded_steps_are_not_learned(kind, tiny_policy, demo_of) -> None:
    policy = tiny_policy(kind).train()
    demo = demo_of(policy.horizon)
    loss = policy.bc_loss(demo, seeded())
    demo.actions[~demo.valid] += 7.0
    assert torch.equal(policy.bc_loss(demo, seeded()), loss)
    demo.actions[demo.valid] += 7.0
    assert not torch.equal(policy.bc_loss(demo, seeded()), loss)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_the_global_generator_is_left_alone(kind, tiny_policy, demo_of) -> None:
    policy = tiny_policy(kind)
    demo = demo_of(policy.horizon)
    policy.train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    optimiser = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(6):
        optimiser.zero_grad()
        loss = policy.bc_loss(demo, seeded())
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    policy.sample(policy.encode(demo.obs), generator=seeded())
    assert policy.training  # LeRobot's prediction would have left it in evaluation mode
    assert torch.equal(torch.get_rng_state(), before)


def test_training_goes_on_exactly_where_it_was_saved(tiny_policy, demo_of, tmp_path) -> None:
    policy = tiny_policy("smolvla", lora={"rank": 2, "dropout": 0.1}).train()
    demo = demo_of(policy.horizon)
    learner = BehaviourCloning(policy, BCConfig(matmul="fp32"), seed=3)
    learner.update(demo)
    save_policy(tmp_path / "ours", policy, meta=META)
    state = learner.state_dict()
    expected = float(learner.update(demo)["loss"])
    resumed, _ = load_policy(tmp_path / "ours")
    again = BehaviourCloning(cast("LeRobotPolicy", resumed).train(), BCConfig(matmul="fp32"), seed=9)
    again.load_state_dict(state)
    assert float(again.update(demo)["loss"]) == expected


def test_the_instruction_of_the_policy_stands_in_for_a_missing_one(tiny_policy, demo_of) -> None:
    policy = tiny_policy("smolvla", instruction="open the drawer")
    demo = demo_of(policy.horizon)
    expected = chunk(policy, demo)
    del demo.obs[INSTRUCTION]
    assert torch.equal(chunk(policy, demo), expected)
    policy.instruction = "pick up the bottle"
    assert not torch.equal(chunk(policy, demo), expected)


# Loading is strict --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny_policy, tmp_path_factory):
    """Folders of a tiny policy by type, without checksums as LeRobot's own, to be damaged."""
    root = tmp_path_factory.mktemp("saved")
    made = {}

    def folder(kind: str, to: Path) -> Path:
        if kind not in made:
            tiny_policy(kind).save(root / kind)
            made[kind] = root / kind
        shutil.copytree(made[kind], to, ignore=shutil.ignore_patterns(CHECKSUMS))
        return to

    return folder


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_no_tensor_is_missing_unused_or_of_another_shape(kind, saved, tmp_path) -> None:
    folder = saved(kind, tmp_path / "run")
    weights = folder / "model.safetensors"
    whole = load_file(weights)
    name = "model.action_out_proj.weight"
    for tensors, message in (
        ({n: t for n, t in whole.items() if n != name}, "action_out_proj.weight is missing"),
        ({**whole, "model.other.weight": whole[name].clone()}, "other.weight is unexpected"),
        ({**whole, name: whole[name][:3].clone()}, r"action_out_proj.weight is \(3, \d+\), not \(32, \d+\)"),
        ({f"x{n}": t for n, t in whole.items()}, r"is missing; .* and \d+ more. Nothing was loaded"),
    ):
        save_file(tensors, weights)
        with pytest.raises(CheckpointError, match=message):
            LeRobotPolicy.load(folder)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors are missing or damaged"):
        LeRobotPolicy.load(folder)
    weights.unlink()  # LeRobot's own pi0 returns an untrained model here
    with pytest.raises(CheckpointError, match=r"model.safetensors are missing or damaged"):
        LeRobotPolicy.load(folder)


def test_weights_under_the_names_of_openpi_are_loaded_whole(tiny_policy, demo_of, tmp_path) -> None:
    policy = tiny_policy("pi0")
    vlm = policy.policy.model.paligemma_with_expert.paligemma
    with torch.no_grad():
        vlm.lm_head.weight.copy_(vlm.model.language_model.embed_tokens.weight)  # tied there
    policy.save(tmp_path / "run")
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    theirs = {n.removeprefix("model."): t for n, t in tensors.items() if "language_model.embed" not in n}
    assert len(theirs) == len(tensors) - 1
    save_file(theirs, tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / CHECKSUMS).unlink()  # OpenPI writes none
    demo = demo_of(policy.horizon)
    assert torch.equal(chunk(LeRobotPolicy.load(tmp_path / "run"), demo), chunk(policy, demo))


@pytest.mark.parametrize("kind", ["act", "smolvla"])
def test_half_precision_reaches_neither_loss_nor_actions(kind, tiny_policy, demo_of) -> None:
    policy = tiny_policy(kind)
    demo = demo_of(policy.horizon)
    full = chunk(policy, demo)
    with torch.autocast("cpu", torch.bfloat16):
        loss, half = policy.bc_loss(demo, seeded()), chunk(policy, demo)
    assert loss.dtype == half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.1)
    assert torch.equal(chunk(policy, demo), full)  # the statistics are in full precision still


def test_statistics_must_be_there(saved, tmp_path) -> None:
    folder = saved("act", tmp_path / "run")
    state = next(folder.glob("policy_preprocessor*normalizer*.safetensors"))
    tensors = load_file(state)
    save_file({n: t for n, t in tensors.items() if not n.startswith("observation.state.")}, state)
    with pytest.raises(CheckpointError, match=r"no statistics of 'observation\.state'.*MEAN_STD"):
        LeRobotPolicy.load(folder)
    state.unlink()
    with pytest.raises(CheckpointError, match=r"statistics policy_preprocessor_step_3.* are missing"):
        LeRobotPolicy.load(folder)


def test_a_folder_without_pipelines_or_of_another_type_is_refused(saved, tmp_path) -> None:
    folder = saved("act", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"a policy of type 'act', expected pi0"):
        LeRobotPolicy.load(folder, type="pi0")
    (folder / "policy_preprocessor.json").unlink()
    with pytest.raises(CheckpointError, match=r"policy_preprocessor\.json .*migrate_policy_normalization"):
        LeRobotPolicy.load(folder)
    (folder / "config.json").write_text('{"type": "groot"}')
    (folder / "policy_preprocessor.json").write_text('{"steps": []}')
    with pytest.raises(CheckpointError, match=r"'groot', expected one of act, diffusion"):
        LeRobotPolicy.load(folder)


def test_tied_weights_are_stored_once_and_loaded_whole(tiny_vlm, tiny_policy, demo_of, tmp_path) -> None:
    vlm = shutil.copytree(tiny_vlm, tmp_path / "vlm")
    config = json.loads((vlm / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (vlm / "config.json").write_text(json.dumps(config))
    policy = tiny_policy("smolvla", vlm=str(vlm), config={"train_expert_only": True})
    head = policy.policy.model.vlm_with_expert.vlm.lm_head.weight
    embedding = policy.policy.model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr(), "the case tests nothing"
    expected = chunk(policy, demo := demo_of(policy.horizon))
    policy.save(tmp_path / "run")
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert len(stored) == len(dict(policy.named_parameters()))
    assert torch.equal(chunk(LeRobotPolicy.load(tmp_path / "run"), demo), expected)
    assert torch.equal(opened_by_lerobot(tmp_path / "run", demo, {c: c for c in policy.cameras}), expected)
    save_policy(tmp_path / "ours", policy, meta=META)
    assert torch.equal(chunk(load_policy(tmp_path / "ours")[0], demo), expected)


def test_lerobot_finds_the_tokenizer_of_a_moved_folder_once_told(tiny_policy, demo_of, tmp_path) -> None:
    tiny_policy("smolvla").save(tmp_path / "made")
    folder = (tmp_path / "made").rename(tmp_path / "moved")
    demo, cameras = demo_of(16), {"front": "front", "wrist": "wrist"}
    with pytest.raises((OSError, ValueError)):
        opened_by_lerobot(folder, demo, cameras)
    relocate(folder)
    expected = chunk(LeRobotPolicy.load(folder), demo)
    assert torch.equal(opened_by_lerobot(folder, demo, cameras), expected)


@pytest.mark.parametrize("kind", ["act", "smolvla"])
def test_no_changed_bit_of_a_saved_folder_is_read(kind, tiny_policy, tmp_path) -> None:
    policy = tiny_policy(kind)
    policy.save(tmp_path / "run")
    LeRobotPolicy.load(tmp_path / "run")
    files = [path for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()]
    assert {"config.json", "model.safetensors", "robot_rl.json", CHECKSUMS} <= {path.name for path in files}
    rng = np.random.default_rng(0)
    for path in files:
        content = path.read_bytes()
        where, bit = int(rng.integers(len(content))), int(rng.integers(8))
        path.write_bytes(content[:where] + bytes([content[where] ^ (1 << bit)]) + content[where + 1 :])
        with pytest.raises(CheckpointError, match=r"altered|damaged") as caught:
            LeRobotPolicy.load(tmp_path / "run")
        assert path.name in str(caught.value) or path.name == CHECKSUMS
        path.write_bytes(content)
    files[0].unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        LeRobotPolicy.load(tmp_path / "run")


def test_a_damaged_normaliser_of_lerobots_own_folder_is_one_sentence(saved, tmp_path) -> None:
    folder = saved("act", tmp_path / "run")
    state = next(folder.glob("policy_preprocessor*.safetensors"))
    state.write_bytes(b"\xff" * 8 + state.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="LeRobot refuses the pipelines"):
        LeRobotPolicy.load(folder)


# A checkpoint for another dataset -----------------------------------------------------------------


def test_fine_tuning_takes_cameras_sizes_and_statistics_of_the_dataset(
    saved, facts_of, demo_of, tmp_path
) -> None:
    folder = saved("smolvla", tmp_path / "run")
    facts = facts_of(state=7, action=3, cameras=("top", "side"))
    with pytest.raises(CheckpointError, match=r"sees the cameras front, wrist; the dataset has top, side"):
        LeRobotPolicy.from_pretrained(folder, facts)
    policy = LeRobotPolicy.from_pretrained(folder, facts, rename={"top": "front", "side": "wrist"})
    assert (policy.state_dim, policy.action_dim, policy.cameras) == (7, 3, ("top", "side"))
    demo = demo_of(16, state=7, action=3, cameras=("top", "side"))
    inputs = policy.preprocess(demo.obs, demo.actions, demo.valid)
    mean, std = (torch.tensor(facts.stats["action"][n]).float() for n in ("mean", "std"))
    torch.testing.assert_close(inputs["action"], (demo.actions - mean) / std, rtol=1e-4, atol=1e-4)
    assert "observation.images.front" in inputs
    expected = chunk(policy, demo)
    policy.save(tmp_path / "tuned")
    # The renaming is in LeRobot's pipeline: either side takes the dataset's own names.
    assert torch.equal(opened_by_lerobot(tmp_path / "tuned", demo, {"top": "top", "side": "side"}), expected)
    again = LeRobotPolicy.from_pretrained(tmp_path / "tuned", facts)  # and needs no rename any more
    assert torch.equal(chunk(again, demo), expected)


def test_statistics_of_the_checkpoint_are_kept_on_request(saved, facts_of, tmp_path) -> None:
    folder = saved("act", tmp_path / "run")
    facts = facts_of()
    moved = {**facts.stats, "action": {n: v + 100 for n, v in facts.stats["action"].items()}}
    facts = type(facts)(
        meta=facts.meta, features=facts.features, stats=moved, instructions=facts.instructions
    )
    zero = torch.zeros(1, 16, 4)
    own = LeRobotPolicy.from_pretrained(folder, facts, normalisation="checkpoint").postprocess(zero)
    new = LeRobotPolicy.from_pretrained(folder, facts).postprocess(zero)
    torch.testing.assert_close(new, own + 100)
    smol = saved("smolvla", tmp_path / "smol")
    with pytest.raises(CheckpointError, match=r"'observation\.state' have 5 elements, the dataset has 7"):
        LeRobotPolicy.from_pretrained(smol, facts_of(state=7), normalisation="checkpoint")


def test_one_camera_of_two_is_enough_for_a_vla(saved, facts_of, demo_of, tmp_path) -> None:
    policy = LeRobotPolicy.from_pretrained(
        saved("pi0", tmp_path / "run"), facts_of(), rename={"front": "wrist", "wrist": None}
    )
    assert policy.cameras == ("front",)
    demo = demo_of(8)
    del demo.obs["wrist.rgb"]
    assert chunk(policy, demo).shape == (3, 8, 4)
    with pytest.raises(ValueError, match=r"lacks front\.rgb; it has state"):
        policy.sample(policy.encode({"state": demo.obs["state"]}))


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chunk_sise": 8}, "has no option 'chunk_sise'. Did you mean 'chunk_size'"),
        ({"chunk_size": 8, "n_action_steps": 9}, "LeRobot refuses the configuration"),
        ({"chunk_size": "long"}, "LeRobot refuses the configuration"),
    ],
)
def test_configurations_lerobot_refuses(config, message, tiny_policy) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_policy("act", config=config)


def test_more_than_one_observation_is_refused(tiny_policy) -> None:
    with pytest.raises(ConfigError, match=r"n_obs_steps is 2, allowed 1"):
        tiny_policy("diffusion", config={"n_obs_steps": 2})


def test_what_lerobots_own_sampling_cannot_do_is_said(tiny_policy, demo_of) -> None:
    act = tiny_policy("act")
    demo = demo_of(16)
    with pytest.raises(ValueError, match=r"no recorded chain.*lerobot_flow"):
        act.sample(act.encode(demo.obs), mode="explore")
    with pytest.raises(ValueError, match="ACT decodes no noise"):
        act.sample(act.encode(demo.obs), z=torch.zeros(3, 16, 4))
    with pytest.raises(ValueError, match="no density"):
        act.log_prob(act.encode(demo.obs), Chain(*(torch.zeros(1),) * 3, grid=None))
    with pytest.raises(ValueError, match="lerobot_flow"):
        _ = tiny_policy("smolvla").feature_dim
    with pytest.raises(ConfigError, match="use 'lerobot_flow'"):
        tiny_policy("smolvla", flow={"eta": 0.1})
    with pytest.raises(ValueError, match=r"actions has shape \(3, 15, 4\), allowed \(3, 16, 4\)"):
        act.bc_loss(demo_of(15))


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_features_have_the_length_they_say(kind, tiny_policy, demo_of) -> None:
    policy = tiny_policy(kind)
    features = policy.encode(demo_of(16).obs)["features"]
    assert features.shape == (3, policy.feature_dim)
    assert features.std(dim=0).mean() > 0


def test_noise_of_diffusion_decides_its_chunk(tiny_policy, demo_of) -> None:
    policy, demo = tiny_policy("diffusion"), demo_of(16)
    z = torch.randn(3, 16, 4, generator=seeded())
    first, same = (policy.sample(policy.encode(demo.obs), z=z).actions for _ in range(2))
    assert torch.equal(first, same)
    assert not torch.equal(policy.sample(policy.encode(demo.obs), z=-z).actions, first)
    zeros = policy.sample(policy.encode(demo.obs), z=torch.zeros_like(z)).actions
    assert torch.equal(policy.sample(policy.encode(demo.obs), mode="mean").actions, zeros)


def test_a_full_disk_leaves_the_older_folder(tiny_policy, tmp_path, monkeypatch) -> None:
    policy = tiny_policy("act")
    policy.save(tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("robot_rl.policies.vla.lerobot_files.save_file", full)
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint: .*No space left"):
        policy.save(tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_a_new_policy_has_room_for_a_long_state(
    kind, tiny_vlm, small_pi, facts_of, demo_of, tmp_path
) -> None:
    sizes = {"state": 33, "action": 34}
    policy = LeRobotPolicy.create(facts_of(**sizes), tiny.options(kind, tiny_vlm), generator=seeded())
    demo = demo_of(policy.horizon, **sizes)
    assert policy.bc_loss(demo, seeded()).isfinite()
    assert chunk(policy, demo).shape == (3, policy.horizon, 34)
    policy.save(tmp_path / "run")
    assert torch.equal(chunk(LeRobotPolicy.load(tmp_path / "run"), demo), chunk(policy.eval(), demo))
    misspelt = {"pretrained": str(tmp_path / "run"), "config": {"num_step": 2}}
    with pytest.raises(ConfigError, match=f"LeRobot's {kind} has no option 'num_step'"):
        LeRobotPolicy.check(facts_of(**sizes), misspelt)
    with pytest.raises(CheckpointError, match=r"state has 40 elements .*takes at most 33"):
        LeRobotPolicy.load(tmp_path / "run", facts_of(state=40, action=34))
