"""Adapters: what learns, that merging changes nothing, and who can read them apart."""

import pytest
import torch

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.policies.vla.lerobot import LeRobotPolicy
from robot_rl.policies.vla.lora import load_adapters

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_hub")]

ATTENTION = {"rank": 2, "targets": r".*\.(q|k|v|o)_proj"}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chunk(policy, demo) -> torch.Tensor:
    return policy.sample(policy.encode(demo.obs), generator=seeded()).actions


def trained(policy, demo):
    """Some steps, large enough that adapters and heads are far from where they began."""
    optimiser = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=3e-2)
    policy.train()
    for _ in range(3):
        optimiser.zero_grad()
        policy.bc_loss(demo, seeded()).backward()
        optimiser.step()
    return policy.eval()


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_only_adapters_and_heads_learn(kind, tiny_policy, demo_of) -> None:
    policy = tiny_policy(kind, lora={"rank": 2})
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trained(policy, demo_of(policy.horizon))
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    adapters = {n for n in moved if ".lora_" in n}
    heads = {n.split(".")[2] for n in moved - adapters}
    # Query and value of both layers of the expert, two matrices each.
    assert len(adapters) == 2 * 2 * 2
    assert all("expert" in n and ("q_proj" in n or "v_proj" in n) for n in adapters)
    assert {"action_in_proj", "action_out_proj"} <= heads
    assert heads <= {
        "action_in_proj",
        "action_out_proj",
        "state_proj",
        *(f"{prefix}time_mlp_{end}" for prefix in ("", "action_") for end in ("in", "out")),
    }


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_merged_weights_act_the_same_and_lerobot_loads_them(kind, tiny_policy, demo_of, tmp_path) -> None:
    policy = tiny_policy(kind, lora=ATTENTION)
    demo = demo_of(policy.horizon)
    first = chunk(policy, demo)
    expected = chunk(trained(policy, demo), demo)
    assert (expected - first).abs().max() > 1e-2
    policy.save(tmp_path / "run")
    merged = LeRobotPolicy.load(tmp_path / "run")
    assert not any("lora" in name for name in merged.state_dict())
    torch.testing.assert_close(chunk(merged, demo), expected, rtol=1e-5, atol=1e-5)
    again = LeRobotPolicy.load(tmp_path / "run", lora=ATTENTION)  # and adapters on top of them
    torch.testing.assert_close(chunk(again, demo), expected, rtol=1e-5, atol=1e-5)


def test_adapters_apart_are_read_by_us_and_by_peft(tiny_policy, demo_of, tmp_path) -> None:
    import peft

    policy = tiny_policy("smolvla", lora=ATTENTION)
    demo = demo_of(policy.horizon)
    expected = chunk(trained(policy, demo), demo)
    policy.save_adapters(tmp_path / "adapters")
    ours = tiny_policy("smolvla", lora=ATTENTION)
    assert not torch.equal(chunk(ours, demo), expected)
    load_adapters(ours.policy, tmp_path / "adapters")
    assert torch.equal(chunk(ours, demo), expected)

    plain = tiny_policy("smolvla")
    wrapped = peft.PeftModel.from_pretrained(plain.policy, str(tmp_path / "adapters"))
    plain.policy = wrapped.base_model.model
    torch.testing.assert_close(chunk(plain, demo), expected, rtol=1e-5, atol=1e-5)


def test_adapters_of_another_rank_or_layer_are_refused(tiny_policy, tmp_path) -> None:
    tiny_policy("smolvla", lora=ATTENTION).save_adapters(tmp_path)
    other = tiny_policy("smolvla", lora={**ATTENTION, "rank": 3})
    with pytest.raises(CheckpointError, match="of other layers or another rank"):
        load_adapters(other.policy, tmp_path)
    with pytest.raises(CheckpointError, match="no adapters"):
        tiny_policy("smolvla").save_adapters(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: a file or folder is not there"):
        load_adapters(other.policy, tmp_path)


def test_targets_that_match_nothing_name_what_there_is(tiny_policy) -> None:
    with pytest.raises(ConfigError, match=r"matches none of the \d+ linear layers, such as .*lm_expert"):
        tiny_policy("smolvla", lora={"targets": "nothing"})
    # ACT's attention is torch's, in one piece: its output layer is never called, so it is no target.
    with pytest.raises(ConfigError, match="matches none"):
        tiny_policy("act", lora={"targets": r".*\.out_proj"})
    act = tiny_policy("act", lora={"targets": r".*\.linear1"})
    assert any(".lora_A." in name for name, p in act.named_parameters() if p.requires_grad)
