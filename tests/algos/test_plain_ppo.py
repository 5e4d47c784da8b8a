"""PlainPPO: advantages and gradients by hand, the first ratio, the rate, the scale, nothing read back."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from robot_rl.algos.losses import ppo_loss
from robot_rl.algos.plain_ppo import PlainPPO, PlainPPOConfig, Steps, followed_lr
from robot_rl.core.names import PRIVILEGED
from robot_rl.data.normalize import Normaliser
from robot_rl.data.rollout import StepRollout
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.gaussian import GaussianPolicy
from tests.kinds import META, seeded
from tests.read_back import reads_back

T, N, D, A = 5, 6, 4, 3


def make_policy(privileged: int = 0) -> GaussianPolicy:
    dims = {"state": D, **({PRIVILEGED: privileged} if privileged else {})}
    config = GaussianPolicyConfig(width=16, depth=1, initial_std=0.5)
    sizes: dict[str, Any] = {"state_dim": D, "action_dim": A, "normaliser": Normaliser(dims, A)}
    return GaussianPolicy(config, **sizes, generator=seeded())


def make_learner(policy: GaussianPolicy, **options: Any) -> PlainPPO:
    settings: dict[str, Any] = {"width": 16, "depth": 1, "matmul": "fp32", **options}
    cfg = PlainPPOConfig(**settings)
    return PlainPPO(policy, cfg, 3, observed=10)


@torch.no_grad()
def play(policy: GaussianPolicy, generator: torch.Generator, device: str = "cpu") -> StepRollout:
    """Returns a rollout of random observations, whose reward is near the first element of the state."""
    dims = policy.normaliser.feature_dims
    obs = {
        name: 2.0 + 3.0 * torch.randn(T + 1, N, dim, generator=generator).to(device)
        for name, dim in dims.items()
    }
    first = {name: value[0].cpu().numpy() for name, value in obs.items()}
    rollout = StepRollout.allocate(first, T, A, device)
    for name, value in obs.items():
        rollout.obs[name].copy_(value)
    mean, std = policy.moments(policy.encode({"state": obs["state"][:-1].flatten(0, 1)}))
    rollout.mean.copy_(mean.view(T, N, A))
    rollout.std.copy_(std)
    noise = torch.randn(T, N, A, generator=generator).to(device)
    rollout.drawn.copy_(rollout.mean + std * noise)
    rollout.reward.copy_(-(rollout.drawn[..., 0] - 0.1 * obs["state"][:-1, :, 0]).square())
    rollout.truncated[2, 1] = rollout.terminated[3, 2] = True
    rollout.put_final(2, {n: v[3].cpu().numpy() for n, v in obs.items()}, rollout.truncated[2].cpu().numpy())
    return rollout


class Tabled(PlainPPO):
    """Looks values up: the value of a state is its first element."""

    def _values(self, seen: Tensor) -> Tensor:
        return seen[..., 0]


def test_a_time_limit_bootstraps_from_the_final_observation_and_an_end_does_not() -> None:
    # gamma 0.5, lambda 0.5. Env 0 is truncated at t = 0 with final value 10, env 1 terminates there; both
    # show value 6 next, of a new episode, and end with value 8. Values at first 4; rewards 1, then 3.
    #   t = 1:  3 + 8/2 - 6 = 1 in both.
    #   t = 0:  truncated 1 + 10/2 - 4 = 2, terminated 1 - 4 = -3: nothing of the 1 is carried back.
    # Env 2 goes on: 1 + 6/2 - 4 = 0, and 0.25 of the 1.
    policy = make_policy()
    learner = Tabled(policy, PlainPPOConfig(gamma_step=0.5, lam=0.5, width=8), 3, observed=1)
    rollout = StepRollout.allocate({"state": torch.zeros(3, D).numpy()}, 2, A, "cpu")
    rollout.std.fill_(1.0)
    for t, value in enumerate((4.0, 6.0, 8.0)):
        rollout.obs["state"][t, :, 0] = value
    rollout.reward[0], rollout.reward[1] = 1.0, 3.0
    rollout.truncated[0, 0] = rollout.terminated[0, 1] = True
    final = torch.zeros(3, D)
    final[:, 0] = torch.tensor([10.0, 99.0, 99.0])
    rollout.put_final(0, {"state": final.numpy()}, rollout.truncated[0].numpy())
    assert rollout.num_final == 1
    steps = learner.prepare([rollout])
    advantage = torch.tensor([2.0, -3.0, 0.25, 1.0, 1.0, 1.0])
    torch.testing.assert_close(steps.target, advantage + torch.tensor([4.0, 4.0, 4.0, 6.0, 6.0, 6.0]))
    torch.testing.assert_close(steps.advantage, (advantage - advantage.mean()) / (advantage.std() + 1e-8))
    # Of a device all rows are kept, without asking which ended: of the others it is what was observed next.
    rollout.num_final = 0
    final[2, 0] = 6.0
    seen: Any = {"state": final}
    rollout.put_final(0, seen, rollout.truncated[0])
    assert rollout.num_final == 3
    torch.testing.assert_close(learner.prepare([rollout]).target, steps.target)


@pytest.mark.parametrize("privileged", [0, 2])
def test_rollouts_of_several_sources_are_the_rows_of_one(privileged: int) -> None:
    policy, generator = make_policy(privileged), seeded(4)
    parts = [play(policy, generator) for _ in range(2)]
    learner = make_learner(policy, privileged=bool(privileged))
    steps, alone = learner.prepare(parts), [learner.prepare([part]) for part in parts]
    assert len(steps) == 2 * T * N
    for name in ("features", "seen", "drawn", "mean", "log_prob", "value", "target"):
        whole = torch.cat([getattr(one, name) for one in alone])
        torch.testing.assert_close(getattr(steps, name), whole, rtol=1e-5, atol=1e-6)
    assert (steps.seen is steps.features) == (not privileged)
    advantage = steps.target - steps.value
    expected = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    torch.testing.assert_close(steps.advantage, expected, rtol=1e-4, atol=1e-5)
    before = {name: moments.state_dict()["count"] for name, moments in learner._moments.items()}
    learner.update(parts)
    for name, moments in learner._moments.items():
        assert moments.state_dict()["count"] == before[name] + 2 * T * N


def test_each_source_has_its_own_returns_for_the_scale_of_rewards() -> None:
    policy, generator = make_policy(), seeded(4)
    learner = make_learner(policy, scale_reward=True)
    for number in range(2):
        parts = [play(policy, generator) for _ in range(2)]
        parts[1].actor = 1
        learner.prepare(parts if number == 0 else parts[1:])
    first, second = (learner._scale.state_dict()["returns"][actor] for actor in (0, 1))
    assert first.shape == second.shape == (N,)
    assert not first.equal(second)


def test_the_first_ratio_is_one_and_stays_so_when_the_scale_moves() -> None:
    policy, generator = make_policy(), seeded(4)
    learner = make_learner(policy, target_kl=None)
    for _ in range(3):
        rollout = play(policy, generator)
        steps = learner.prepare([rollout])
        picked = steps.rows(torch.randperm(T * N, generator=generator)[:7])
        mean, std = policy.moments(policy.encode({"state": rollout.obs["state"][:-1].flatten(0, 1)}))
        whole = torch.distributions.Normal(mean[:, 0], std).log_prob(steps.drawn).sum(dim=1)
        torch.testing.assert_close(whole, steps.log_prob, atol=1e-5, rtol=0)
        before = copy.deepcopy(policy.state_dict())
        first = copy.deepcopy(learner).update_rows(picked, rollout.std)
        assert float(first.kl) == pytest.approx(0.0, abs=1e-6)
        torch.testing.assert_close(first.gain, picked.advantage, atol=1e-5, rtol=1e-5)  # times a ratio of 1
        assert not first.is_clipped.any()
        learner.update([rollout])
        assert not policy.state_dict()["encoder.normaliser.mean_state"].equal(
            before["encoder.normaliser.mean_state"]
        )


@pytest.mark.parametrize("learns_std", [True, False])
def test_the_gradient_is_that_of_the_clipped_objective(learns_std: bool) -> None:
    policy, generator = make_policy(), seeded(4)
    options: dict[str, Any] = {"value_clip": 0.05, "entropy_weight": 0.03}
    learner = make_learner(policy, clip=0.1, learns_std=learns_std, target_kl=None, grad_clip=0.0, **options)
    rollout = play(policy, generator)
    steps = learner.prepare([rollout])
    with torch.no_grad():  # away from the policy that acted, so that some ratios are clipped
        for parameter in (*policy.parameters(), *learner._value.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    mean, std = policy.moments(policy.encode({"state": rollout.obs["state"][:-1].flatten(0, 1)}))
    density = torch.distributions.Normal(mean[:, 0], std)
    log_prob = density.log_prob(steps.drawn).sum(dim=1)
    loss = ppo_loss(log_prob[:, None], steps.log_prob[:, None], steps.advantage, clip_low=0.1)
    loss = loss - 0.03 * density.entropy().sum(dim=1).mean()
    value = learner._value(steps.seen).flatten()
    moved = steps.value + (value - steps.value).clamp(-0.05, 0.05)
    errors = torch.maximum((value - steps.target).square(), (moved - steps.target).square())
    optimisers = learner._actor_optimiser, learner._critic_optimiser
    weights = [weight for each in optimisers for weight in each.parameters]
    wanted = torch.autograd.grad(loss + errors.mean(), weights)
    found: list[Tensor] = []
    for optimiser in optimisers:
        optimiser.apply = lambda gradients, **how: found.extend(gradients)
    is_clipped = learner.update_rows(steps, rollout.std).is_clipped
    assert is_clipped.any()
    assert not is_clipped.all()
    assert len(found) == len(wanted) == len(weights)
    assert any(weight is policy.log_std for weight in weights) == learns_std
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kl", "wanted"), [(0.021, 0.002), (0.02, 0.003), (0.005, 0.003), (0.0049, 0.0045), (0.0, 0.003)]
)
def test_the_rate_follows_the_kl(kl: float, wanted: float) -> None:
    """Around a target of 0.01: 0.003 / 1.5 above 0.02, 0.003 x 1.5 below 0.005."""
    found = followed_lr(torch.tensor(0.003, dtype=torch.float64), torch.tensor(kl), 0.01, (1e-5, 1e-2))
    assert float(found) == pytest.approx(wanted)


def test_the_rate_keeps_to_its_range() -> None:
    limits = (1e-3, 2e-3)
    assert float(followed_lr(torch.tensor(1e-3), torch.tensor(1.0), 0.01, limits)) == pytest.approx(1e-3)
    assert float(followed_lr(torch.tensor(2e-3), torch.tensor(1e-4), 0.01, limits)) == pytest.approx(2e-3)


def test_the_scale_is_that_of_all_rollouts_and_is_saved(tmp_path: Path) -> None:
    policy, generator = make_policy(), seeded(4)
    learner = make_learner(policy)
    seen: list[Tensor] = []
    for _ in range(3):
        rollout = play(policy, generator)
        seen.append(rollout.obs["state"][:-1].flatten(0, 1).clone())
        learner.update([rollout])
    # The ten rows before the first rollout have mean 0 and variance 1.
    rows, count = torch.cat(seen).double(), 10 + 3 * T * N
    mean = rows.sum(dim=0) / count
    square = rows.square().sum(dim=0) + 10 * 1.0
    std = (square / count - mean.square()).sqrt()
    torch.testing.assert_close(policy.normaliser.get_buffer("mean_state"), mean.float())
    torch.testing.assert_close(policy.normaliser.get_buffer("std_state"), std.float())
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded: Any = load_policy(tmp_path / "policy")[0]
    shown = {"state": torch.randn(9, D, generator=generator)}
    actions = [each.sample(each.encode(shown)).actions for each in (policy, loaded)]
    assert actions[0].equal(actions[1])


def test_the_value_reads_the_privileged_state_and_the_policy_does_not() -> None:
    policy = make_policy(privileged=2)
    learner = make_learner(policy, privileged=True)
    rollout = play(policy, seeded(4))
    before = learner.prepare([rollout])
    assert before.seen.shape[1] == before.features.shape[1] + 2 == D + 2
    rollout.obs[PRIVILEGED].add_(1.0)
    after = learner.prepare([rollout])
    assert after.features.equal(before.features)
    assert not after.value.equal(before.value)
    learner.update([rollout])
    scale = policy.normaliser.get_buffer(f"mean_{PRIVILEGED.replace('.', '__')}")
    assert (scale > 1.0).all()  # the rows have mean 3, those before 0
    again = {"state": rollout.obs["state"][0]}
    shown = {**again, PRIVILEGED: rollout.obs[PRIVILEGED][0]}
    assert policy.encode(shown)["features"].equal(policy.encode(again)["features"])


def test_an_epoch_has_every_row_once_and_minibatches_share_it_evenly() -> None:
    count = 11
    rows = torch.arange(count, dtype=torch.float32)
    steps = Steps(*[rows[:, None]] * 4, *[rows] * 4)
    parts = list(steps.shuffled(4, seeded(1)))
    assert sorted(len(part) for part in parts) == [2, 3, 3, 3]
    found = torch.cat([part.target for part in parts])
    assert found.sort().values.equal(rows)
    assert not found.equal(rows)
    assert all(part.seen is part.features and part.drawn[:, 0].equal(part.target) for part in parts)


@pytest.mark.parametrize("scale_reward", [True, False])
def test_an_update_reads_nothing_back(scale_reward: bool) -> None:
    policy = make_policy(privileged=2)
    learner = make_learner(policy, privileged=True, scale_reward=scale_reward)
    rollout = play(policy, seeded(4))
    with reads_back() as reads:
        metrics = learner.update([rollout])
        assert reads == []
        float(metrics["kl"])
    assert [read.split(" ")[0] for read in reads] == ["_local_scalar_dense"]


@pytest.mark.gpu
def test_an_update_on_a_gpu_does_not_wait_for_it() -> None:
    policy = make_policy().to("cuda")
    learner = make_learner(policy, scale_reward=True)
    generator = seeded(4)
    learner.update([play(policy, generator, "cuda")])  # allocates
    rollout = play(policy, generator, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics = learner.update([rollout])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0.0 <= float(metrics["kl"]) < 1.0


def test_it_learns_and_a_copy_learns_the_same() -> None:
    policy, generator = make_policy(), seeded(4)
    learner = make_learner(policy, lr=3e-3, minibatches=2, scale_reward=True)
    rewards: list[float] = []
    for i in range(30):
        rollout = play(policy, generator)
        rewards.append(float(rollout.reward.mean()))
        if i == 28:
            other = make_policy()
            copied = make_learner(other, lr=3e-3, minibatches=2, scale_reward=True)
            copied.load_state_dict(learner.state_dict())
            copied.update([rollout])
            learner.update([rollout])
            for name, value in policy.state_dict().items():
                assert value.equal(other.state_dict()[name]), name
        else:
            learner.update([rollout])
    assert sum(rewards[-5:]) > 0.7 * sum(rewards[:5])  # they are below zero: 30 % of the error is gone
