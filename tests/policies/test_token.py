"""Action tokens: bins, likelihoods and cross-entropy by hand, what draws and what does not, whole runs."""

import math
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from robot_rl.config import build, load
from robot_rl.core.errors import ConfigError
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.policy import DemoBatch
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chunk import ChunkPolicyConfig, ProcessConfig
from robot_rl.policies.token import TokenPolicy
from robot_rl.sim.tasks import reach
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.runs import TINY, weights

OBS = {"state": torch.zeros(5000, 3)}


def policy(bins: int = 2, **options: Any) -> TokenPolicy:
    """Returns a policy of two steps of one element whose last bin is three times as likely as any other."""
    given: dict[str, Any] = {"steps": 1, "bins": bins, **options}
    config = ChunkPolicyConfig(kind="token", horizon=2, width=8, depth=1, **given)
    made = TokenPolicy(config, state_dim=3, action_dim=1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made.logits.weight.zero_()
        made.logits.bias.zero_()
        made.logits.bias[-1] = math.log(3.0)
    return made


def drawn(made: TokenPolicy, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return made.sample(made.encode(OBS), mode="explore", record=True, generator=generator)


def shares(values: Tensor) -> dict[float, float]:
    found, counts = values.unique(return_counts=True)
    return dict(zip(found.tolist(), (counts / values.numel()).tolist(), strict=True))


def test_cloning_trains_the_guess_of_the_privileged_state() -> None:
    config = ChunkPolicyConfig(
        kind="token", horizon=1, width=8, depth=1, steps=1, bins=2, cameras=("wrist",), guess_weight=1.0
    )
    sizes = {"state": 3, PRIVILEGED: 2}
    generator = torch.Generator().manual_seed(0)
    made = TokenPolicy(
        config, state_dim=3, action_dim=1, normaliser=Normaliser(sizes, 1), generator=generator
    )
    pictures = torch.zeros(4, 24, 24, 3, dtype=torch.uint8)
    truth = torch.tensor([[2.0, -1.0]]).expand(4, 2)
    obs = {"state": torch.zeros(4, 3), "wrist.rgb": pictures, PRIVILEGED: truth}
    batch = DemoBatch(obs=obs, actions=torch.zeros(4, 1, 1), valid=torch.ones(4, 1, dtype=torch.bool))
    optimiser = torch.optim.Adam(made.parameters(), lr=0.05)
    for _ in range(50):
        optimiser.zero_grad()
        made.bc_loss(batch, generator=generator).backward()
        optimiser.step()
    # The identity normaliser leaves the truth as it is; untrained, the error is about (2 + 1) / 2.
    with torch.no_grad():
        assert float(made.encoder.guess_error(made.encoder(obs), obs)) < 0.1


def test_actions_are_the_middles_of_bins_drawn_as_often_as_likely() -> None:
    found = shares(drawn(policy(bins=4)).actions)
    assert list(found) == [-0.75, -0.25, 0.25, 0.75]
    assert list(found.values()) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2], abs=0.015)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_every_token_has_its_likelihood_at_the_temperature(temperature: float) -> None:
    made = policy(temperature=temperature)
    likely = 3.0 ** (1 / temperature)
    high = likely / (1.0 + likely)  # the chance of the second of two bins
    sample = drawn(made)
    expected = torch.where(sample.actions.flatten(1) > 0, math.log(high), math.log(1.0 - high))
    assert torch.allclose(sample.chain.log_prob, expected, atol=1e-6)
    log_prob, entropy = made.log_prob(made.encode(OBS), sample.chain)
    assert torch.allclose(log_prob, expected, atol=1e-6)
    by_hand = -high * math.log(high) - (1.0 - high) * math.log(1.0 - high)
    assert entropy.unique().tolist() == pytest.approx([by_hand], abs=1e-6)


def test_without_exploration_the_likeliest_bin_acts_whatever_the_noise() -> None:
    made = policy(bins=4, temperature=5.0)
    for mode in ("ode", "mean"):
        for z in (None, torch.randn(5000, 2, 1)):
            assert shares(made.sample(made.encode(OBS), z=z, mode=mode).actions) == {0.75: 1.0}


def test_imitation_is_the_cross_entropy_of_the_demonstrated_bins() -> None:
    # Bins of two halves: -1 and -0.1 in the first, 0.0 and 1.0 in the second; the last step is not valid.
    actions = torch.tensor([[[-1.0], [0.0]], [[1.0], [-0.1]]])
    valid = torch.tensor([[True, True], [True, False]])
    loss = policy(temperature=3.0).bc_loss(DemoBatch({"state": torch.zeros(2, 3)}, actions, valid))
    assert loss.item() == pytest.approx(-(math.log(0.25) + 2 * math.log(0.75)) / 3, abs=1e-6)


def test_the_first_actions_alone_are_scored() -> None:
    whole, first = policy(), policy(scored=1)
    sample = drawn(whole)
    assert sample.chain.log_prob.shape == (5000, 2)
    assert drawn(first).chain.log_prob.shape == (5000, 1)
    with pytest.raises(ValueError, match=r"log_prob: the chain was sampled by Token\(bins=2.* of 2 actions"):
        first.log_prob(first.encode(OBS), sample.chain)
    with pytest.raises(ValueError, match="temperature=2"):
        policy(temperature=2.0).log_prob(whole.encode(OBS), sample.chain)


def test_another_temperature_shares_the_weights() -> None:
    made = policy()
    hot = made.with_process(ProcessConfig(process="token", temperature=2.0, scored=1))
    assert hot.logits is made.logits
    assert (hot.config.temperature, made.config.temperature) == (2.0, 1.0)
    with pytest.raises(ValueError, match="process: 'flow_sde' does not fit kind 'token'"):
        made.with_process(ProcessConfig(process="flow_sde"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 4}, "steps must be 1 for kind 'token', got 4"),
        ({"bins": 0}, "bins: got 0, allowed: 1 or more"),
        ({"temperature": 0.0}, "temperature: got 0.0, allowed: above 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(**options)


# --- whole runs -----------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    **TINY,
    "num_envs": 8,
    "policy": {"kind": "token", "horizon": 8, "width": 16, "depth": 1, "steps": 1, "bins": 16},
}
LEARNER: dict[str, Any] = {"reduction": "per_step", "batch": 8, "epochs": 2, "width": 16, "depth": 1}
SECTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"env_steps": 300, "group": 4, "keep": [0.0, 1.0]},
    "ppo": {"env_steps": 300, "decisions": 5},
}


def tiny(out: Path, method: str, **changes: Any) -> RunConfig:
    algorithm = {**LEARNER, **changes.pop("algorithm", {})}
    section = {**SECTIONS[method], "exploration": {"process": "token"}, "algorithm": algorithm, **changes}
    return replace(build(RunConfig, {**RUN, "method": {"kind": method, **section}}), out=str(out))


@pytest.mark.parametrize("method", SECTIONS)
def test_a_base_of_tokens_is_cloned_and_improved(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_runs: None
) -> None:
    monkeypatch.setattr(reach, "GOAL_RADIUS_M", 0.2)  # a policy that knows nothing sometimes gets there
    folder = Path(phases.run(tiny(tmp_path, method)).run)
    assert weights(folder, "final") != weights(folder, "base")
    rows = read_metrics(folder / "metrics.jsonl")
    first = next(row for row in rows if f"{method}/kl" in row)
    assert 0 <= first[f"{method}/kl"] < 0.1


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("ppo", {"algorithm": {"reduction": "single"}}, "got 'single', allowed: per_step, a ratio for each"),
        ("ppo", {"algorithm": {"regulariser": "w2"}}, "regulariser: got 'w2', allowed: none, bc with"),
        ("ppo", {"exploration": {"process": "flow_sde"}}, "process: 'flow_sde' does not fit kind 'token'"),
        (
            "ppo",
            {"distil": {"updates": 5}},
            r"method\.distil\.updates: got 5, allowed: 0 with policy.kind=token",
        ),
    ],
)
def test_what_tokens_cannot_do_is_refused(
    method: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(tmp_path, method, **changes)


def test_methods_that_need_noise_refuse_tokens() -> None:
    able = "flow, diffusion, one_step, small_vla, lerobot_diffusion, lerobot_flow, onnx"
    message = f"policy.kind: got 'token', allowed: {able} with method=latent"
    with pytest.raises(ConfigError, match=message):
        build(RunConfig, {**RUN, "method": {"kind": "latent"}})


@pytest.mark.parametrize("recipes", [("grpo_token", "grpo"), ("ppo_token", "flow_sde")])
def test_recipes_share_all_but_the_policy_with_pick_cube(recipes: tuple[str, str]) -> None:
    config, usual = (load(RunConfig, [f"recipe={name}"], config_name="train") for name in recipes)
    for name in ("demos", "bc", "n_exec", "env", "method.kind"):
        assert attrgetter(name)(config) == attrgetter(name)(usual)
