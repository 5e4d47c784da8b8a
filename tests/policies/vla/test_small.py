"""The small VLA: units, modes, what it reads, how it learns, and that every learner can use it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.language import encode_text
from robot_rl.core.policy import Chain, DemoBatch
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.facts import DatasetFacts
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.chunk import ProcessConfig
from robot_rl.policies.real_time import RealTimeChunks, RealTimeConfig
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.policies.vla.small import SmallVLA

NAMES = ("shoulder", "elbow", "grip")
TEXT = "lift the cube"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def facts(**changes: Any) -> DatasetFacts:
    """Returns facts of a made-up arm: joints in radians, actions in [-0.2, 0.6]."""
    meta = EpisodesMeta(
        task="t", robot="r", control_hz=30.0, instruction=TEXT, state_names=NAMES, action_names=NAMES
    )
    state = {"mean": np.full(3, 0.1), "std": np.full(3, 0.2)}
    action = {
        "min": np.full(3, -0.2),
        "max": np.full(3, 0.6),
        "q01": np.full(3, -0.1),
        "q99": np.full(3, 0.5),
    }
    known = DatasetFacts(
        meta=meta,
        features={"state": Feature("float32", (3,)), "front.rgb": Feature("uint8", (32, 48, 3))},
        stats={"state": state, "action": action},
        instructions=(TEXT,),
    )
    return replace(known, **changes)


def make(**options: Any) -> SmallVLA:
    policy = SmallVLA.create(facts(), {"preset": "tiny", "horizon": 8, **options}, generator=seeded())
    policy.measure([demonstration(64)])
    return policy


def observation(batch: int = 6, *, seed: int = 1) -> dict[str, Tensor]:
    generator = seeded(seed)
    return {
        "state": 0.1 + 0.2 * torch.randn(batch, 3, generator=generator),
        "front.rgb": torch.randint(0, 255, (batch, 32, 48, 3), dtype=torch.uint8, generator=generator),
        "instruction": torch.from_numpy(encode_text([TEXT] * batch)),
    }


def demonstration(batch: int = 6, horizon: int = 8) -> DemoBatch:
    actions = 0.2 + 0.2 * torch.randn(batch, horizon, 3, generator=seeded(2)).clamp(-2, 2)
    valid = torch.ones(batch, horizon, dtype=torch.bool)
    valid[0, 5:] = False
    return DemoBatch(observation(batch), actions, valid)


META = PolicyMeta(
    task="t",
    robot="r",
    control_hz=30.0,
    state_names=NAMES,
    action_names=NAMES,
    instruction=TEXT,
    n_exec=4,
)


def trained(updates: int = 12, **options: Any) -> SmallVLA:
    """Returns a policy that saw a few updates: no gate and no velocity is at zero any more."""
    policy = make(**options)
    learner = BehaviourCloning(policy, BCConfig(lr=5e-3, warmup_updates=2), 0, total_updates=updates)
    for _ in range(updates):
        learner.update(demonstration())
    return policy.eval()


# --- sizes and options ---------------------------------------------------------------------------


def test_presets() -> None:
    tiny = make()
    assert sum(p.numel() for p in tiny.parameters()) < 300_000
    small = SmallVLA.create(facts(), {"preset": "small"})
    assert 1e6 < sum(p.numel() for p in small.parameters()) < 10e6
    assert tiny.config.cameras == ("front",)
    assert tiny.config.picture == (32, 48)
    assert tiny.config.instruction == TEXT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "large"}, "no preset 'large'. Known: small, tiny."),
        ({"widht": 3}, "no option 'widht'. Did you mean 'width'?"),
        ({"cameras": ("fornt",)}, "no camera 'fornt'. Did you mean 'front'?"),
        ({"width": 33}, "heads: got 2, allowed: a divisor of width 33"),
        ({"picture": (8, 8)}, "picture: got (8, 8), allowed: height and width, 16 pixels or more"),
        ({"horizons": (4, 16)}, "horizons: got (4, 16), allowed: rising, the last equal to the horizon 8"),
        ({"horizons": (4, 2, 8)}, "horizons: got (4, 2, 8), allowed: rising"),
        ({"process": "ddim"}, "process: got 'ddim', allowed: flow_ode, flow_sde"),
        ({"scored": 9}, "scored: got 9, allowed: 1 to the horizon 8"),
        ({"process": "flow_sde", "steps": 1}, "FlowSDE: needs at least 2 denoising steps"),
        ({"dropout": 1.0}, "dropout: got 1.0, allowed: 0 to below 1"),
        ({"agreement_first": 9}, "agreement_first: got 9, allowed: 1 to the horizon 8"),
        ({"draws": 0}, "draws: got 0, allowed: 1 or more"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(**options)


def test_cameras_of_two_sizes_are_refused() -> None:
    features = {**facts().features, "wrist.rgb": Feature("uint8", (48, 48, 3))}
    with pytest.raises(
        DatasetError, match=r"camera 'wrist': pictures of \(48, 48\), small_vla reads \(32, 48\)"
    ):
        SmallVLA.create(facts(features=features), {"preset": "tiny"})
    seeing = SmallVLA.create(
        facts(features=features), {"preset": "tiny", "cameras": ["wrist"], "picture": [48, 48]}
    )
    assert seeing.config.cameras == ("wrist",)


# --- acting --------------------------------------------------------------------------------------


def test_actions_are_in_the_dataset_s_units_and_range() -> None:
    obs = observation(50)
    obs["state"].clamp_(-0.2, 0.6)  # a joint outside the range may stay there
    policy = trained()
    out = policy.sample(policy.encode(obs), generator=seeded()).actions
    assert out.shape == (50, 8, 3)
    assert out.min() >= -0.2
    assert out.max() <= np.float32(0.6)
    assert out.std() > 0.05


def test_modes() -> None:
    policy, obs = trained(), observation()
    z = torch.randn(6, 8, 3, generator=seeded())
    with torch.no_grad():
        decoded = policy.sample(policy.encode(obs), z=z).actions
        assert torch.equal(decoded, policy.sample(policy.encode(obs), z=z).actions)
        assert not torch.equal(decoded, policy.sample(policy.encode(obs), z=z + 1).actions)
        drawn = [policy.sample(policy.encode(obs), generator=seeded(seed)).actions for seed in (0, 0, 1)]
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])
        mean = policy.sample(policy.encode(obs), mode="mean").actions
        assert torch.equal(
            mean, policy.sample(policy.encode(obs), z=z, mode="mean", generator=seeded(4)).actions
        )
    with pytest.raises(ValueError, match="no mode 'best'"):
        cast("Any", policy).sample(policy.encode(obs), mode="best")
    with pytest.raises(ValueError, match=r"z has shape \(6, 7, 3\), allowed \(6, 8, 3\)"):
        policy.sample(policy.encode(obs), z=z[:, :7])


def test_the_mean_is_one_step_from_zero_noise() -> None:
    policy, obs = trained(), observation()
    context = policy.encode(obs)
    time = policy._embed_time(torch.ones(1))
    condition = (context["condition"] + time)[:, None]
    velocity = policy.expert(torch.zeros(6, 1, 8, 3), condition, policy.cache(context)).mix[:, 0]
    by_hand = policy.normaliser.unaction(-velocity, obs["state"])
    assert torch.allclose(policy.sample(policy.encode(obs), mode="mean").actions, by_hand, atol=1e-6)


def test_denoising_by_hand() -> None:
    # Three Euler steps from z: x - (1/3) v(x, t), at t = 1, 2/3, 1/3.
    policy, obs = trained(steps=3), observation()
    z = torch.randn(6, 8, 3, generator=seeded())
    context, x = policy.encode(obs), z
    for t in (1.0, 2 / 3, 1 / 3):
        condition = (context["condition"] + policy._embed_time(torch.tensor([t])))[:, None]
        x = x - policy.expert(x[:, None], condition, policy.cache(context)).mix[:, 0] / 3
    by_hand = policy.normaliser.unaction(x, obs["state"])
    assert torch.allclose(policy.sample(policy.encode(obs), z=z).actions, by_hand, atol=1e-5)


def test_a_row_acts_the_same_alone_and_among_many() -> None:
    policy, obs = trained(horizons=(2, 4, 8)), observation(9)
    z = torch.randn(9, 8, 3, generator=seeded())
    many = policy.sample(policy.encode(obs), z=z)
    alone = policy.sample(policy.encode({name: value[4:5] for name, value in obs.items()}), z=z[4:5])
    assert many.n_exec is not None
    assert alone.n_exec is not None
    assert torch.allclose(many.actions[4:5], alone.actions, atol=1e-5)
    assert many.n_exec[4] == alone.n_exec[0]


def test_training_mode_does_not_change_how_it_acts() -> None:
    policy, obs = trained(), observation()
    z = torch.randn(6, 8, 3, generator=seeded())
    acting = policy.sample(policy.encode(obs), z=z).actions
    assert torch.equal(policy.sample(policy.train().encode(obs), z=z).actions, acting)


def test_it_looks_and_listens() -> None:
    policy, obs = trained(), observation()
    seen = policy.sample(policy.encode(obs), mode="mean").actions
    other = observation(seed=5)
    for key, changed in (
        ("front.rgb", other["front.rgb"]),
        ("instruction", torch.from_numpy(encode_text(["now something else entirely"] * 6))),
        ("state", other["state"]),
    ):
        assert not torch.allclose(
            policy.sample(policy.encode({**obs, key: changed}), mode="mean").actions, seen, atol=1e-5
        ), key


def test_its_own_instruction_stands_in() -> None:
    policy, obs = trained(), observation()
    said = policy.sample(policy.encode(obs), mode="mean").actions
    del obs["instruction"]
    assert torch.equal(policy.sample(policy.encode(obs), mode="mean").actions, said)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("front.rgb", None, "no 'front.rgb', which this policy reads. Did you mean 'top.rgb'?"),
        ("state", None, "no 'state', which this policy reads."),
        (
            "front.rgb",
            torch.zeros(6, 64, 48, 3, dtype=torch.uint8),
            "'front.rgb': uint8 (64, 48, 3), this policy reads uint8 (32, 48, 3). Resize the pictures",
        ),
        ("front.rgb", torch.zeros(6, 32, 48, 3), "float32 (32, 48, 3), this policy reads uint8 (32, 48, 3)"),
        ("state", torch.zeros(6, 4), "'state': 4 elements, this policy was made for 3. Use the robot"),
        (
            "instruction",
            torch.zeros(6, 10),
            "'instruction': float32 (6, 10), allowed uint8 (rows, 192 bytes or fewer)",
        ),
    ],
)
def test_another_observation_is_refused(key: str, value: Tensor | None, message: str) -> None:
    obs = {**observation(), "top.rgb": torch.zeros(6, 1)}
    if value is None:
        del obs[key]
    else:
        obs[key] = value
    with pytest.raises(DatasetError, match=re.escape(message)):
        make(relative_actions=False).encode(obs)


def test_how_much_to_execute_comes_from_several_horizons_only() -> None:
    obs = observation()
    plain, mixed = trained(updates=2), trained(horizons=(2, 4, 8), agreement_first=1)
    assert plain.sample(plain.encode(obs)).n_exec is None
    several = mixed.sample(mixed.encode(obs), generator=seeded()).n_exec
    assert several is not None
    assert several.dtype == torch.int64
    # Beyond step 4 one horizon is left, which cannot agree with anybody.
    assert 1 <= several.min() <= several.max() <= 4
    cautious = trained(horizons=(2, 4, 8), agreement_first=1, agreement_ratio=1e-6)
    least = cautious.sample(cautious.encode(obs), generator=seeded()).n_exec
    assert least is not None
    assert least.tolist() == [1] * 6


# --- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"horizons": (2, 4, 8)}, {"relative_actions": False}])
def test_it_learns_a_chunk_for_each_picture(options: dict[str, Any]) -> None:
    # Two pictures, two chunks: what to do is in the picture alone.
    # Both weigh the same here: 70 updates have to do for both modes.
    policy, batch = make(**options, state_noise=0.0, regression=1.0, steps=10), demonstration(16)
    bright = torch.arange(16) % 2 == 1
    batch.obs["front.rgb"][:] = torch.where(bright, 200, 40)[:, None, None, None].to(torch.uint8)
    batch.obs["state"][:] = 0.1
    batch.actions[:] = torch.where(bright, 0.4, 0.0)[:, None, None]
    learner = BehaviourCloning(policy, BCConfig(lr=5e-3, warmup_updates=5), 0, total_updates=70)
    for _ in range(70):
        learner.update(batch)
    policy.load_state_dict(learner.policy_weights())
    for mode in ("mean", "ode"):
        policy.eval()
        out = policy.sample(policy.encode(batch.obs), mode=mode, generator=seeded()).actions
        assert (out - batch.actions).abs().mean() < 0.08, mode


def test_steps_beyond_the_episode_do_not_count() -> None:
    for options in ({}, {"horizons": (2, 4, 8)}):
        policy, batch = trained(updates=3, **options), demonstration()
        before = policy.bc_loss(batch, seeded())
        batch.actions[0, 5:] = 0.55
        assert torch.equal(policy.bc_loss(batch, seeded()), before)
        batch.actions[0, 4] = 0.55
        assert not torch.equal(policy.bc_loss(batch, seeded()), before)


def test_loss_by_hand() -> None:
    # An untrained expert predicts 0: the flow's error is the mean of (noise - action)^2, the
    # regression's that of |action|, over valid steps.
    policy, batch = make(relative_actions=False, draws=1, regression=2.0).eval(), demonstration()
    weight = batch.valid[..., None].float().expand_as(batch.actions)
    scaled = (batch.actions - 0.2) / 0.3  # quantiles -0.1 to 0.5
    noise = torch.randn(scaled.shape, generator=seeded())
    flow = ((noise - scaled).square() * weight).sum() / weight.sum()
    regression = (scaled.abs() * weight).sum() / weight.sum()
    assert policy.bc_loss(batch, seeded()).item() == pytest.approx((flow + 2 * regression).item(), rel=1e-5)
    # Horizons 4 and 8: each has an error over its own steps, the mix that of the longest, as all are 0;
    # an even gate costs nothing.
    several = make(relative_actions=False, draws=1, regression=0.0, horizons=(4, 8)).eval()
    assert several.expert.gate is not None
    torch.nn.init.zeros_(several.expert.gate.weight)
    short = ((noise - scaled).square() * weight)[:, :4].sum() / weight[:, :4].sum()
    assert several.bc_loss(batch, seeded()).item() == pytest.approx((short + 2 * flow).item(), rel=1e-5)


def test_training_varies_what_it_sees_and_acting_does_not() -> None:
    policy, batch = trained(updates=3, draws=1), demonstration()
    assert policy.bc_loss(batch, seeded()) == policy.bc_loss(batch, seeded())
    still = policy.bc_loss(batch, seeded())
    policy.train()
    assert policy.bc_loss(batch, seeded()) == policy.bc_loss(batch, seeded())
    assert policy.bc_loss(batch, seeded()) != still
    quiet = {
        "random_shift_px": 0,
        "colour_jitter": 0.0,
        "dropout": 0.0,
        "state_noise": 0.0,
        "state_dropout": 0.0,
    }
    plain = make(**quiet)
    assert plain.train().bc_loss(batch, seeded()) == plain.eval().bc_loss(batch, seeded())


def test_state_noise_is_of_every_size_up_to_its_own() -> None:
    policy, batch = make(state_noise=0.5, state_dropout=0.0), demonstration(128)
    batch.obs["state"][:] = 0.1
    seen: list[torch.Tensor] = []
    policy.state_in.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    policy.eval().bc_loss(batch, seeded())
    policy.train().bc_loss(batch, seeded())
    exact, noisy = seen
    assert len(exact.unique(dim=0)) == 1
    size = (noisy - exact).square().mean(dim=1).sqrt()
    assert size.min() < 0.02
    assert size.square().mean().sqrt() == pytest.approx(0.5 / 3**0.5, rel=0.15)  # uniform from 0 to 0.5


@pytest.mark.parametrize("horizons", [(), (2, 4, 8)])
def test_half_precision_is_the_same_loss(horizons: tuple[int, ...]) -> None:
    policy, batch = trained(updates=3, horizons=horizons), demonstration()
    exact = policy.bc_loss(batch, seeded())
    with torch.autocast("cpu", torch.bfloat16):
        rounded = policy.bc_loss(batch, seeded())
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    assert rounded.item() != exact.item()


def test_unmeasured_relative_actions_are_not_learned() -> None:
    policy = SmallVLA.create(facts(), {"preset": "tiny", "horizon": 8})
    with pytest.raises(ConfigError, match="relative actions were never measured"):
        policy.bc_loss(demonstration())
    # A gripper that no state element is named after stays absolute, and needs no measuring.
    meta = replace(facts().meta, action_names=("x", "y", "z"))
    SmallVLA.create(facts(meta=meta), {"preset": "tiny", "horizon": 8}).bc_loss(demonstration())


def test_a_wrong_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bc_loss: actions has shape \(6, 4, 3\), allowed \(6, 8, 3\)"):
        make().bc_loss(demonstration(horizon=4))


# --- the contract --------------------------------------------------------------------------------


def test_features_describe_the_observation() -> None:
    policy, obs = trained(), observation()
    features = policy.encode(obs)["features"]
    assert features.shape == (6, policy.feature_dim)
    assert torch.equal(features, policy.encode(obs)["features"])
    for key in ("state", "front.rgb"):
        other = policy.encode({**obs, key: observation(seed=5)[key]})["features"]
        assert not torch.allclose(other, features, atol=1e-4), key


def test_a_residual_learns_on_it() -> None:
    base = trained()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    policy, obs = ResidualPolicy(base, ResidualHeadConfig(width=16), 0.1, generator=seeded()), observation()
    chunk = policy.sample(policy.encode(obs), z=torch.zeros(6, 8, 3)).actions
    assert torch.equal(policy.refine(policy.encode(obs), chunk[:, 0]), chunk[:, 0])
    learner = BehaviourCloning(policy, BCConfig(lr=1e-2, warmup_updates=1), 0, total_updates=30)
    losses = [float(learner.update(demonstration())["loss"]) for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert not torch.equal(policy.refine(policy.encode(obs), chunk[:, 0]), chunk[:, 0])
    assert all(torch.equal(value, before[name]) for name, value in policy.base.state_dict().items())


def test_chunks_continue_one_another_in_real_time() -> None:
    # Relative actions: what is left of the old chunk is measured from where the arm is now.
    policy, obs = RealTimeChunks(trained(steps=8), RealTimeConfig(max_guidance=20.0)), observation()
    z = torch.randn(6, 8, 3, generator=seeded())
    before = policy.sample(policy.encode(obs), z=torch.randn(6, 8, 3, generator=seeded(9))).actions
    moved = {**obs, "state": obs["state"] + 0.02}
    known = torch.full((6,), 8)
    after = policy.sample_after(policy.encode(moved), before, known, frozen=4, z=z).actions
    free = policy.sample(policy.encode(moved), z=z).actions
    assert (after - before)[:, :4].abs().mean() < 0.3 * (free - before)[:, :4].abs().mean()


def test_policy_gradients_reach_every_trained_weight() -> None:
    policy, obs = trained(process="flow_sde", stochastic_steps="all"), observation()
    chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded()).chain
    assert chain is not None
    policy.log_prob(policy.encode(obs), chain)[0].mean().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize("steps", ["one", "all"])
def test_another_process_has_the_same_weights_and_scores_its_own_chain(steps: str) -> None:
    policy, obs = trained(), observation()
    options = ProcessConfig(process="flow_sde", eta=0.7, stochastic_steps=steps, scored=2)
    twin = policy.with_process(options)
    z = torch.randn(6, 8, 3, generator=seeded())
    assert torch.equal(
        twin.sample(twin.encode(obs), z=z).actions, policy.sample(policy.encode(obs), z=z).actions
    )
    explored = twin.sample(twin.encode(obs), z=z, mode="explore", record=True, generator=seeded())
    assert not torch.equal(explored.actions, policy.sample(policy.encode(obs), z=z, mode="explore").actions)
    chain = cast(Chain, explored.chain)
    log_prob, _ = twin.log_prob(twin.encode(obs), chain)
    torch.testing.assert_close(log_prob, chain.log_prob)  # the first ratio is 1
    # What comes behind the two scored actions counts for nothing; the last x is no network's input.
    later = chain.x.clone()
    later[:, -1, 2:] += 1.0
    assert torch.equal(twin.log_prob(twin.encode(obs), replace(chain, x=later))[0], log_prob)
    with pytest.raises(ValueError, match="of 2 actions in 5 steps, this policy is"):
        policy.with_process(replace(options, scored=None)).log_prob(policy.encode(obs), chain)
    assert {id(p) for p in twin.parameters()} == {id(p) for p in policy.parameters()}
    assert policy.config.process == "flow_ode"


def test_what_is_saved_is_complete(tmp_path: Path) -> None:
    policy, obs = trained(horizons=(2, 4, 8)), observation()
    z = torch.randn(6, 8, 3, generator=seeded())
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded, _ = load_policy(tmp_path / "policy", expect=META)
    assert isinstance(loaded, SmallVLA)
    assert loaded.config == policy.config
    for mode in ("ode", "mean"):
        before, after = (p.sample(p.encode(obs), z=z, mode=mode) for p in (policy, loaded))
        assert torch.equal(before.actions, after.actions)
        assert before.n_exec is not None
        assert after.n_exec is not None
        assert torch.equal(before.n_exec, after.n_exec)
    assert torch.equal(policy.bc_loss(demonstration(), seeded()), loaded.bc_loss(demonstration(), seeded()))
    assert (tmp_path / "policy" / "policy.safetensors").stat().st_size < 2_000_000


def test_an_interrupted_training_goes_on_as_if_nothing_had_happened() -> None:
    def learner(policy: SmallVLA) -> BehaviourCloning:
        return BehaviourCloning(policy, BCConfig(), 0, total_updates=8)

    whole = learner(make())
    losses = [float(whole.update(demonstration())["loss"]) for _ in range(6)]
    first = learner(make())
    for _ in range(3):
        first.update(demonstration())
    second = learner(make())
    second.load_state_dict(first.state_dict())
    assert [float(second.update(demonstration())["loss"]) for _ in range(3)] == losses[3:]
    third, saved = learner(make()), first.state_dict()
    for part in ("policy", "average"):  # as a checkpoint of before 2026-11-25 has them
        saved[part] = {
            name.replace("image_encoders.", "eyes.").replace("text_encoder.", "ears."): tensor
            for name, tensor in saved[part].items()
        }
        assert "ears.queries" in saved[part]
    third.load_state_dict(saved)
    assert [float(third.update(demonstration())["loss"]) for _ in range(3)] == losses[3:]
    del saved["average"]["ears.queries"]
    with pytest.raises(KeyError, match=r"text_encoder\.queries"):
        third.load_state_dict(saved)
