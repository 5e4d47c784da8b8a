"""Flow and diffusion policies: modes, shapes, gradients, clamping, and that they learn."""

import numpy as np
import pytest
import torch

from robot_rl.core.policy import DemoBatch
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chunk import ChunkPolicy, ChunkPolicyConfig, DiffusionPolicy, FlowPolicy

CLASSES = {"flow": FlowPolicy, "diffusion": DiffusionPolicy}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(kind: str, process: str | None = None, **options: object) -> ChunkPolicy:
    sizes = {"horizon": 3, "width": 32, "depth": 2, "time_dim": 8, **options}
    config = ChunkPolicyConfig(kind=kind, process=process, **sizes)  # pyright: ignore[reportArgumentType]
    return CLASSES[kind](config, state_dim=4, action_dim=2, generator=seeded())


def observation(batch: int = 5) -> dict[str, torch.Tensor]:
    return {"state": torch.randn(batch, 4, generator=seeded(1))}


@pytest.mark.parametrize("kind", ["flow", "diffusion"])
def test_modes(kind: str) -> None:
    policy, obs = make(kind), observation()
    z = torch.randn(5, 3, 2, generator=seeded(2))
    ode = policy.sample(policy.encode(obs), z=z)
    assert ode.actions.shape == (5, 3, 2)
    assert ode.chain is None
    assert torch.equal(ode.actions, policy.sample(policy.encode(obs), z=z).actions)
    mean = policy.sample(policy.encode(obs), mode="mean").actions
    assert torch.equal(mean, policy.sample(policy.encode(obs), z=z, mode="mean").actions)
    assert torch.equal(mean, policy.sample(policy.encode(obs), z=torch.zeros_like(z)).actions)
    first = policy.sample(policy.encode(obs), generator=seeded(3)).actions
    assert torch.equal(first, policy.sample(policy.encode(obs), generator=seeded(3)).actions)
    assert not torch.equal(first, policy.sample(policy.encode(obs), generator=seeded(4)).actions)


@pytest.mark.parametrize(
    ("kind", "process"), [("flow", "flow_sde"), ("diffusion", "ddpm"), ("diffusion", "ddim")]
)
def test_explore_is_noisy_and_ode_is_not(kind: str, process: str) -> None:
    policy, obs, z = make(kind, process), observation(), torch.randn(5, 3, 2, generator=seeded(2))
    draws = [
        policy.sample(policy.encode(obs), z=z, mode="explore", generator=seeded(i)).actions for i in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    a, b = (policy.sample(policy.encode(obs), z=z, generator=seeded(i)).actions for i in (0, 1))
    assert torch.equal(a, b)


def test_the_chain_is_not_clamped_but_the_output_is() -> None:
    policy = make("flow", "flow_sde", stochastic_steps="all")
    z = 5.0 * torch.randn(5, 3, 2, generator=seeded(2))
    sample = policy.sample(
        policy.encode(observation()), z=z, mode="explore", record=True, generator=seeded(3)
    )
    assert sample.chain is not None
    assert sample.chain.x.shape == (5, 5, 3, 2)
    assert torch.equal(sample.chain.x[:, 0], z)
    assert sample.chain.x[:, -1].abs().max() > 1.5
    assert torch.equal(sample.actions, sample.chain.x[:, -1].clamp(-1, 1))
    assert sample.chain.grid is policy.grid


def test_actions_leave_in_env_units() -> None:
    # Data in [0.2, 0.6]: centre 0.4, half-range 0.2, so no chunk leaves that range.
    actions = np.array([[0.2, 0.2], [0.6, 0.6]], np.float32)
    normaliser = Normaliser.fit({"state": np.zeros((2, 4), np.float32)}, actions)
    config = ChunkPolicyConfig(horizon=3, width=16, depth=1, time_dim=8)
    policy = FlowPolicy(config, state_dim=4, action_dim=2, normaliser=normaliser)
    out = policy.sample(
        policy.encode(observation()), z=50.0 * torch.randn(5, 3, 2, generator=seeded())
    ).actions
    assert out.min().item() == pytest.approx(0.2)
    assert out.max().item() == pytest.approx(0.6)


@pytest.mark.parametrize("kind", ["flow", "diffusion"])
def test_it_learns_a_chunk_that_depends_on_the_state(kind: str) -> None:
    policy = make(kind, width=64, steps=5)
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    generator = seeded(5)
    for _ in range(600):
        state = torch.randn(64, 4, generator=generator)
        actions = 0.5 * state[:, None, :2].tanh().expand(-1, 3, -1)
        batch = DemoBatch({"state": state}, actions, torch.ones(64, 3, dtype=torch.bool))
        loss = policy.bc_loss(batch, generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    state = torch.randn(256, 4, generator=generator)
    with torch.no_grad():
        out = policy.sample(policy.encode({"state": state}), generator=generator).actions
    error = (out - 0.5 * state[:, None, :2].tanh()).square().mean().sqrt()
    assert error < 0.12  # the actions' own spread is 0.31


@pytest.mark.parametrize("kind", ["flow", "diffusion"])
def test_bc_loss_ignores_what_is_not_valid(kind: str) -> None:
    policy, obs = make(kind), observation(4)
    actions = torch.rand(4, 3, 2, generator=seeded()) - 0.5
    valid = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)

    def last_layer_gradient(actions: torch.Tensor) -> torch.Tensor:
        policy.zero_grad()
        policy.bc_loss(DemoBatch(obs, actions, valid), seeded(1)).backward()
        assert policy.net.trunk.out.bias.grad is not None
        return policy.net.trunk.out.bias.grad.view(3, 2)

    assert (last_layer_gradient(actions).abs() > 0).all()
    valid[:, 2] = False
    assert torch.equal(last_layer_gradient(actions)[2], torch.zeros(2))
    none = DemoBatch(obs, actions, torch.zeros(4, 3, dtype=torch.bool))
    assert policy.bc_loss(none, seeded()).item() == 0.0


def test_bc_loss_by_hand() -> None:
    # A network that returns zero predicts v = 0, so the loss is the mean square of noise - action
    # over the valid steps.
    policy = make("flow")
    for parameter in policy.net.trunk.out.parameters():
        torch.nn.init.zeros_(parameter)
    actions = torch.rand(2, 3, 2, generator=seeded())
    valid = torch.tensor([[True, True, False], [True, False, False]])
    noise = torch.randn(2, 3, 2, generator=seeded(9))
    loss = policy.bc_loss(DemoBatch(observation(2), actions, valid), seeded(9))
    expected = (noise - actions).square()[valid].mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_gradients() -> None:
    policy, obs = make("flow", "flow_sde"), observation()
    z = torch.randn(5, 3, 2, generator=seeded(2)).mul_(0.1).requires_grad_()
    policy.sample(
        policy.encode(obs), z=z
    ).actions.sum().backward()  # latent steering may differentiate the decoder
    assert z.grad is not None
    assert z.grad.abs().min() > 0
    sample = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded())
    assert not sample.actions.requires_grad
    assert sample.chain is not None
    assert not sample.chain.log_prob.requires_grad
    log_prob, entropy = policy.log_prob(policy.encode(obs), sample.chain)
    assert log_prob.shape == entropy.shape == (5, 1)
    policy.zero_grad()
    log_prob.sum().backward()
    assert policy.net.chunk_in.weight.grad is not None
    assert policy.net.chunk_in.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["flow", "diffusion"])
def test_cameras_reach_the_action_and_are_shifted_in_training(kind: str) -> None:
    policy = make(kind, cameras=("front",), image_features=8)
    image = torch.randint(0, 255, (5, 32, 32, 3), dtype=torch.uint8, generator=seeded())
    obs = {**observation(), "front.rgb": image}
    assert policy.encode(obs)["features"].shape == (5, 12)
    z = torch.zeros(5, 3, 2)
    changed = {**obs, "front.rgb": 255 - image}
    assert not torch.equal(
        policy.sample(policy.encode(obs), z=z).actions, policy.sample(policy.encode(changed), z=z).actions
    )
    batch = DemoBatch(obs, torch.zeros(5, 3, 2), torch.ones(5, 3, dtype=torch.bool))
    assert policy.train().bc_loss(batch, seeded()) != policy.eval().bc_loss(batch, seeded())


def test_refine_is_identity_and_features_are_the_normalised_state() -> None:
    policy, obs, action = make("flow"), observation(), torch.rand(5, 2)
    assert policy.refine(policy.encode(obs), action, mode="explore") is action
    assert torch.equal(policy.encode(obs)["features"], obs["state"])


def test_global_random_state_is_left_alone() -> None:
    policy, obs = make("flow", "flow_sde"), observation()
    before = torch.get_rng_state()
    policy.sample(policy.encode(obs), mode="explore", generator=seeded())
    batch = DemoBatch(obs, torch.zeros(5, 3, 2), torch.ones(5, 3, dtype=torch.bool))
    policy.bc_loss(batch, seeded())
    assert torch.equal(before, torch.get_rng_state())


def test_bad_inputs_are_named() -> None:
    policy, obs = make("flow"), observation()
    with pytest.raises(ValueError, match=r"z has shape \(5, 2, 2\), allowed \(5, 3, 2\)"):
        policy.sample(policy.encode(obs), z=torch.zeros(5, 2, 2))
    with pytest.raises(ValueError, match=r"no mode 'od'. Did you mean 'ode'"):
        policy.sample(policy.encode(obs), mode="od")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"actions has shape \(5, 9, 2\), allowed \(5, 3, 2\)"):
        policy.bc_loss(DemoBatch(obs, torch.zeros(5, 9, 2), torch.ones(5, 9, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"valid has shape \(5, 2\), allowed \(5, 3\)"):
        policy.bc_loss(DemoBatch(obs, torch.zeros(5, 3, 2), torch.ones(5, 2, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"FlowPolicy: needs kind 'flow', got 'diffusion'"):
        FlowPolicy(ChunkPolicyConfig(kind="diffusion"), state_dim=4, action_dim=2)
    with pytest.raises(ValueError, match=r"normaliser has state and action dims \(5, 2\)"):
        FlowPolicy(ChunkPolicyConfig(), state_dim=4, action_dim=2, normaliser=Normaliser({"state": 5}, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "flw"}, "kind: 'flw' is unknown. Did you mean 'flow'"),
        ({"horizon": 0}, "horizon: got 0, allowed: 1 or more"),
        ({"steps": 0}, "steps: got 0, allowed: 1 or more"),
        ({"time_dim": 7}, "time_dim must be even and at least 2, got 7"),
        ({"random_shift_px": -1}, "random_shift_px: got -1, allowed: 0 or more"),
        ({"process": "ddpm"}, "process: 'ddpm' does not fit kind 'flow'"),
        ({"process": "flow_sd"}, "Did you mean 'flow_sde'"),
        ({"process": "flow_sde", "steps": 1}, "needs at least 2 denoising steps"),
        ({"process": "flow_sde", "stochastic_steps": "some"}, "must be 'one' or 'all'"),
        ({"kind": "diffusion", "steps": 50}, "50 denoising steps, allowed 1 to train_steps = 20"),
        ({"kind": "diffusion", "process": "ddim", "eta": 2.0}, r"eta must be in \[0, 1\], got 2.0"),
        ({"kind": "diffusion", "std_floor": 0.0}, "std_floor must be above 0"),
    ],
)
def test_config_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkPolicyConfig(**options)  # pyright: ignore[reportArgumentType]
