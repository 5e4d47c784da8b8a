"""LeRobot's flow VLAs under the policy contract: LeRobot's own numbers, and an exact density."""

import json
import math

import pytest
import torch

from robot_rl.core.errors import ConfigError
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.vla.lerobot_flow import LeRobotFlowPolicy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_hub")]

FLOWS = ("smolvla", "pi0", "pi05")
META = PolicyMeta(
    task="tidy",
    robot="arm",
    control_hz=20.0,
    state_names=(),
    action_names=(),
    instruction="",
    n_exec=1,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def flow_of(tiny_policy):
    """Makes a tiny flow policy whose output is far from zero noise, in evaluation mode."""

    def make(kind: str, **flow) -> LeRobotFlowPolicy:
        return tiny_policy(kind, LeRobotFlowPolicy, flow=flow).eval()

    return make


@pytest.mark.parametrize("kind", FLOWS)
def test_without_noise_it_is_lerobots_own_sampling(kind, flow_of, demo_of) -> None:
    policy = flow_of(kind)
    demo = demo_of(policy.horizon)
    z = torch.randn(3, policy.horizon, 32, generator=seeded())
    ours = policy.sample(policy.encode(demo.obs), z=z).actions
    theirs = policy.policy.predict_action_chunk(policy.preprocess(demo.obs), noise=z)
    torch.testing.assert_close(ours, policy.postprocess(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FLOWS)
@pytest.mark.parametrize("stochastic_steps", ["one", "all"])
def test_the_ratio_of_an_unchanged_policy_is_one(kind, stochastic_steps, flow_of, demo_of) -> None:
    policy = flow_of(kind, stochastic_steps=stochastic_steps)
    demo = demo_of(policy.horizon)
    sample = policy.sample(policy.encode(demo.obs), mode="explore", record=True, generator=seeded())
    assert sample.chain is not None
    scored = policy.grid.steps if stochastic_steps == "all" else 1
    assert sample.chain.x.shape == (3, policy.grid.steps + 1, policy.horizon, 32)
    encoded = policy.train().encode(demo.obs)
    log_prob, entropy = policy.log_prob(encoded, sample.chain)  # training mode or not
    assert policy.training
    assert log_prob.shape == entropy.shape == (3, scored)
    torch.testing.assert_close(
        (log_prob - sample.chain.log_prob).exp(), torch.ones(3, scored), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("kind", FLOWS)
def test_the_density_is_that_of_all_the_noise_there_is(kind, flow_of, demo_of) -> None:
    """By hand: the real dims are Gaussian about LeRobot's velocity, the padding takes its Euler step."""
    policy = flow_of(kind, stochastic_steps="all", eta=0.3)
    demo = demo_of(policy.horizon)
    chain = policy.sample(policy.encode(demo.obs), mode="explore", record=True, generator=seeded()).chain
    assert chain is not None
    k, steps = 2, policy.grid.steps
    t, delta = 1 - k / steps, 1 / steps
    before, after = chain.x[:, k], chain.x[:, k + 1]
    with torch.no_grad():
        velocity = policy.velocity(policy.encode(demo.obs))(before, k)
    euler = before - delta * velocity
    torch.testing.assert_close(after[..., 4:], euler[..., 4:], rtol=1e-5, atol=1e-5)
    sigma = 0.3 * math.sqrt(t / (1 - t))
    mean = euler - sigma**2 * delta / (2 * t) * (before + (1 - t) * velocity)
    normal = torch.distributions.Normal(mean[..., :4], sigma * math.sqrt(delta))
    expected = normal.log_prob(after[..., :4]).mean(dim=(1, 2))
    torch.testing.assert_close(chain.log_prob[:, k], expected, rtol=1e-4, atol=1e-4)
    chunk = policy.sample(policy.encode(demo.obs), mode="explore", generator=seeded()).actions
    torch.testing.assert_close(chunk, policy.postprocess(chain.x[:, -1, :, :4]))


@pytest.mark.parametrize("kind", FLOWS)
def test_scoring_some_rows_is_scoring_them_among_others(kind, flow_of, demo_of) -> None:
    policy = flow_of(kind, stochastic_steps="all")
    demo = demo_of(policy.horizon)
    chain = policy.sample(policy.encode(demo.obs), mode="explore", record=True, generator=seeded()).chain
    assert chain is not None
    last = {key: value[2:] for key, value in demo.obs.items()}
    part = type(chain)(chain.x[2:], chain.index[2:], chain.log_prob[2:], chain.grid)
    whole = policy.log_prob(policy.encode(demo.obs), chain)[0]
    torch.testing.assert_close(policy.log_prob(policy.encode(last), part)[0], whole[2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FLOWS)
def test_the_log_probability_teaches_vlm_and_expert(kind, flow_of, demo_of) -> None:
    policy = flow_of(kind)
    demo = demo_of(policy.horizon)
    chain = policy.sample(policy.encode(demo.obs), mode="explore", record=True, generator=seeded()).chain
    assert chain is not None
    assert not chain.x.requires_grad
    policy.log_prob(policy.encode(demo.obs), chain)[0].sum().backward()
    taught = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert any("vision" in name for name in taught)
    assert any("expert" in name and "q_proj" in name for name in taught)
    assert any("action_in_proj" in name for name in taught)


def test_the_vlm_sees_an_observation_once(flow_of, demo_of, monkeypatch) -> None:
    policy = flow_of("smolvla", stochastic_steps="all")
    demo = demo_of(policy.horizon)
    vlm = policy.policy.model.vlm_with_expert
    seen: list[int] = []
    embed = vlm.embed_image
    monkeypatch.setattr(vlm, "embed_image", lambda picture: (seen.append(len(picture)), embed(picture))[1])
    encoded = policy.encode(demo.obs)
    chain = policy.sample(encoded, mode="explore", record=True, generator=seeded()).chain
    assert chain is not None
    policy.log_prob(encoded, chain)
    policy.velocity(encoded)(chain.x[:, 0], 0)
    assert seen == [3, 3]  # two cameras, three rows each; not times four steps, nor times four questions


@pytest.mark.parametrize("kind", FLOWS)
def test_noise_decides_the_chunk(kind, flow_of, demo_of) -> None:
    policy = flow_of(kind)
    demo = demo_of(policy.horizon)
    z = torch.randn(3, policy.horizon, 4, generator=seeded())
    first = policy.sample(policy.encode(demo.obs), z=z).actions
    assert torch.equal(policy.sample(policy.encode(demo.obs), z=z).actions, first)
    assert not torch.equal(policy.sample(policy.encode(demo.obs), z=-z).actions, first)
    padded = torch.nn.functional.pad(z, (0, 28))
    assert torch.equal(policy.sample(policy.encode(demo.obs), z=padded).actions, first)
    zeros = policy.sample(policy.encode(demo.obs), z=torch.zeros_like(z)).actions
    assert torch.equal(policy.sample(policy.encode(demo.obs), mode="mean").actions, zeros)
    with pytest.raises(ValueError, match=r"z has shape \(3, 2, 4\), allowed"):
        policy.sample(policy.encode(demo.obs), z=z[:, :2])
    explored = policy.sample(policy.encode(demo.obs), z=z, mode="explore", generator=seeded()).actions
    assert not torch.equal(explored, first)


@pytest.mark.parametrize("kind", FLOWS)
def test_features_begin_with_the_state_and_depend_on_pictures(kind, flow_of, demo_of) -> None:
    policy = flow_of(kind)
    demo = demo_of(policy.horizon)
    features = policy.encode(demo.obs)["features"]
    assert features.shape == (3, policy.feature_dim)
    assert torch.equal(features[:, :5], policy.preprocess(demo.obs)["observation.state"])
    other = {**demo.obs, "wrist.rgb": 255 - demo.obs["wrist.rgb"]}
    assert not torch.equal(policy.encode(other)["features"][:, 5:], features[:, 5:])


def test_a_checkpoint_keeps_the_process(flow_of, demo_of, tmp_path) -> None:
    policy = flow_of("smolvla", steps=3, eta=0.2)
    demo = demo_of(policy.horizon)
    save_policy(tmp_path / "ours", policy, meta=META)
    loaded, _ = load_policy(tmp_path / "ours")
    expected = policy.sample(policy.encode(demo.obs), mode="explore", record=True, generator=seeded())
    again = loaded.sample(loaded.encode(demo.obs), mode="explore", record=True, generator=seeded())
    assert torch.equal(again.actions, expected.actions)
    assert expected.chain is not None
    loaded.log_prob(loaded.encode(demo.obs), expected.chain)  # the grid is the very same


@pytest.mark.parametrize("kind", FLOWS)
def test_lerobot_samples_in_as_many_steps(kind, flow_of, tmp_path) -> None:
    flow_of(kind, steps=3).save(tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["num_steps" if kind == "smolvla" else "num_inference_steps"] == 3
    assert LeRobotFlowPolicy.load(tmp_path / "run").grid.steps == 3


def test_only_flows_are_flows(tiny_policy) -> None:
    with pytest.raises(ConfigError, match=r"policy\.flow: FlowSDE: needs at least 2 denoising steps"):
        tiny_policy("smolvla", LeRobotFlowPolicy, flow={"steps": 1})
    with pytest.raises(ConfigError, match=r"'act' is no flow policy, allowed: smolvla, pi0, pi05"):
        tiny_policy("act", LeRobotFlowPolicy)
