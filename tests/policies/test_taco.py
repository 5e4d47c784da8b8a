"""Best of N by a pseudo-count: the count by hand, the choice, and the adapter's contract."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded
from robot_rl.data.episodes import Episodes, EpisodesMeta
from robot_rl.policies.best_of_n import BestOfN, candidate_noise
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.real_time import RealTimeChunks
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.policies.taco import CoinFlipConfig, CoinFlips, fit_coin_flips, successes

META = PolicyMeta(
    task="t",
    robot="r",
    control_hz=20.0,
    state_names=("a", "b", "c"),
    action_names=("x", "y"),
    instruction="i",
    n_exec=2,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flow(**options: Any) -> FlowPolicy:
    config = ChunkPolicyConfig(horizon=4, width=32, depth=2, time_dim=8, **options)
    return FlowPolicy(config, state_dim=3, action_dim=2, generator=seeded())


def scorer(config: CoinFlipConfig | None = None) -> CoinFlips:
    config = config or CoinFlipConfig(width=16, depth=2)
    return CoinFlips(config, feature_dim=3, action_dim=2, horizon=4, generator=seeded(1))


def observation(batch: int = 6) -> dict[str, Tensor]:
    return {"state": torch.randn(batch, 3, generator=seeded(3))}


def demonstrations(states: Tensor, actions: Tensor) -> list[DemoBatch]:
    valid = torch.ones(actions.shape[:2], dtype=torch.bool)
    return [DemoBatch({"state": states}, actions, valid)]


class Near(CoinFlips):
    """Counts chunks by how near their first action is to a value: what is chosen is known."""

    def inverse_count(self, features: Tensor, actions: Tensor) -> Tensor:
        return (actions[:, 0, 0] - 0.3).abs()


def near() -> Near:
    return Near(CoinFlipConfig(width=8, depth=1), feature_dim=3, action_dim=2, horizon=4)


# --- the count -----------------------------------------------------------------------------------


def test_n_identical_rows_count_as_n() -> None:
    # Three different rows, held 1, 4 and 16 times: 1/n is 1, .25 and .0625. With d coins the mean of n
    # signs squared, averaged over the coins, has a relative spread of at most sqrt(2 / d) = .1.
    copies = [1, 4, 16]
    states = torch.eye(3).repeat_interleave(torch.tensor(copies), dim=0)
    actions = torch.zeros(21, 4, 2)
    config = CoinFlipConfig(coins=200, width=64, depth=2, epochs=400, batch=32)
    policy = flow()
    fitted = fit_coin_flips(policy, demonstrations(states, actions), config, seed=2)
    rows = {"state": torch.eye(3)}
    with torch.no_grad():
        found = fitted.inverse_count(policy.encode(rows)["features"], torch.zeros(3, 4, 2))
    assert found.tolist() == pytest.approx([1 / n for n in copies], rel=0.3)
    # A chunk that the data does not hold counts for less than one that it holds often.
    with torch.no_grad():
        other = fitted.inverse_count(policy.encode(rows)["features"], torch.full((3, 4, 2), 0.7))
    assert (other[2] > found[2]).item()


def test_more_alike_rows_count_for_more() -> None:
    # 500 chunks near -.5 and 25 near +.5, all of the same observation.
    noise = 0.02 * torch.randn(525, 4, 2, generator=seeded(4))
    centre = torch.cat([torch.full((500,), -0.5), torch.full((25,), 0.5)])
    policy, states = flow(), torch.zeros(525, 3)
    config = CoinFlipConfig(width=64, depth=2, epochs=40, scale=1.0)
    fitted = fit_coin_flips(policy, demonstrations(states, noise + centre.view(-1, 1, 1)), config)
    features = policy.encode({"state": torch.zeros(3, 3)})["features"]
    chunks = torch.tensor([-0.5, 0.5, 0.0]).view(3, 1, 1).expand(3, 4, 2)
    with torch.no_grad():
        often, seldom, never = fitted.inverse_count(features, chunks).tolist()
    assert often < 0.5 * seldom
    assert seldom < never


def test_what_is_counted() -> None:
    # The prefix alone, standardised; a window that reaches beyond its episode within it is left out.
    counted = scorer(CoinFlipConfig(prefix=2, width=8, depth=1))
    features, chunk = torch.zeros(1, 3), torch.zeros(1, 4, 2)
    later = chunk.clone()
    later[:, 2:] = 1.0
    assert torch.equal(counted(features, chunk), counted(features, later))
    assert not torch.equal(counted(features, chunk), counted(features, later.flip(1)))
    states = torch.randn(3, 3, generator=seeded())
    valid = torch.tensor([[True, True, False, False], [True, False, False, False], [True] * 4])
    batch = DemoBatch({"state": states}, torch.zeros(3, 4, 2), valid)
    fitted = fit_coin_flips(flow(), [batch], CoinFlipConfig(prefix=2, width=8, depth=1, epochs=1))
    assert torch.allclose(fitted.input_mean[:3], states[[0, 2]].mean(dim=0))
    with pytest.raises(DatasetError, match=r"no demonstration has 4 actions to count.*prefix"):
        fit_coin_flips(flow(), [DemoBatch(batch.obs, batch.actions, valid & False)])


def test_fitting_repeats_and_leaves_the_policy_alone() -> None:
    policy = flow().train()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    batch = demonstrations(torch.randn(40, 3, generator=seeded()), torch.zeros(40, 4, 2))
    config = CoinFlipConfig(width=16, depth=2, epochs=2)
    first, second, other = (fit_coin_flips(policy, batch, config, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert not torch.equal(first.net.input.weight, other.net.input.weight)
    assert policy.training
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_successes_are_the_windows_of_successful_episodes() -> None:
    # Episodes of 3, 2 and 3 steps, of which the first and the last succeed; action = row number.
    rows = np.arange(8, dtype=np.float32)
    success = np.array([0, 0, 1, 0, 0, 0, 0, 1], bool)
    ends = np.array([0, 0, 1, 0, 1, 0, 0, 1], bool)
    episodes = Episodes(
        meta=EpisodesMeta(
            task="t",
            robot="r",
            control_hz=20.0,
            instruction="i",
            state_names=("a",),
            action_names=("x",),
        ),
        obs={"state": rows[:, None]},
        action=rows[:, None] / 10,
        reward=success.astype(np.float32),
        terminated=success,
        truncated=ends & ~success,
        success=success,
        episode_index=np.array([0, 0, 0, 1, 1, 2, 2, 2]),
        final_obs={"state": np.zeros((3, 1), np.float32)},
    )
    batches = list(successes(episodes, 2, batch=4))
    assert [len(batch.actions) for batch in batches] == [4, 2]
    states = torch.cat([batch.obs["state"] for batch in batches]).flatten()
    assert states.tolist() == [0, 1, 2, 5, 6, 7]
    actions = 10 * torch.cat([batch.actions for batch in batches])[..., 0]
    assert actions.tolist() == pytest.approx(torch.tensor([[0, 1], [1, 2], [2, 2], [5, 6], [6, 7], [7, 7]]))
    valid = torch.cat([batch.valid for batch in batches])
    assert valid[:, 1].tolist() == [True, True, False, True, True, False]


# --- the choice ----------------------------------------------------------------------------------


def test_it_returns_the_candidate_that_counts_most() -> None:
    base, obs = flow(), observation()
    z = torch.randn(6, 4, 2, generator=seeded())
    chosen = BestOfN(base, near(), 5).sample(base.encode(obs), z=z).actions
    repeated = {"state": obs["state"].repeat_interleave(5, dim=0)}
    all_chunks = base.sample(base.encode(repeated), z=candidate_noise(z, 5)).actions.view(6, 5, 4, 2)
    for row in range(6):
        distance = (all_chunks[row, :, 0, 0] - 0.3).abs()
        assert torch.equal(chosen[row], all_chunks[row, distance.argmin()])
    assert len({int((all_chunks[row, :, 0, 0] - 0.3).abs().argmin()) for row in range(6)}) > 1


def test_one_candidate_is_the_base_bit_for_bit() -> None:
    base, obs = flow(process="flow_sde"), observation()
    for mode in ("ode", "explore", "mean"):
        ours, theirs = (
            policy.sample(policy.encode(obs), mode=mode, generator=seeded(5)).actions
            for policy in (BestOfN(base, scorer(), 1), base)
        )
        assert torch.equal(ours, theirs)
    many = BestOfN(base, scorer(), 8).sample(base.encode(obs), mode="mean").actions
    assert torch.equal(many, base.sample(base.encode(obs), mode="mean").actions)


def test_candidates_are_independent_and_follow_from_their_row() -> None:
    z = torch.randn(300, 4, 2, generator=seeded())
    noise = candidate_noise(z, 4).view(300, 4, 8)
    assert torch.equal(noise[:, 0], z.flatten(1))
    assert torch.equal(candidate_noise(z[7:8], 4).view(4, 8), noise[7])
    assert torch.equal(
        candidate_noise(z[:20], 2).view(20, 2, 8), noise[:20, :2]
    )  # more candidates add to fewer
    assert noise.mean().item() == pytest.approx(0.0, abs=0.04)  # 9600 draws: 4 standard errors
    assert noise.std().item() == pytest.approx(1.0, abs=0.03)
    correlation = torch.corrcoef(noise.transpose(0, 1).flatten(1))  # of candidates, over rows
    assert (correlation - torch.eye(4)).abs().max() < 0.09  # 2400 pairs: 4 standard errors
    changed = z.clone()
    changed[:, 3, 1] += 1e-3
    assert (candidate_noise(changed, 4).view(300, 4, 8)[:, 1:] != noise[:, 1:]).any(dim=2).all()


def test_a_row_chooses_the_same_alone_and_among_many() -> None:
    policy = BestOfN(flow(), near(), 6)
    many, alone = ChunkExecutor(policy, 16, n_exec=2), ChunkExecutor(policy, 1, n_exec=2)
    seeds = np.arange(100, 116, dtype=np.uint64)
    many.reset(seeds=seeds)
    alone.reset(seeds=seeds[11:12])
    rng = np.random.default_rng(0)
    for _ in range(6):
        state = rng.normal(size=(16, 3)).astype(np.float32)
        wide = many.act({"state": state}).action[11]
        assert wide == pytest.approx(alone.act({"state": state[11:12]}).action[0], abs=1e-5)


def test_the_chosen_chain_is_recorded_and_scored() -> None:
    base, obs = flow(process="flow_sde", stochastic_steps="all"), observation()
    policy = BestOfN(base, near(), 5)
    sample = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded(2))
    chain = sample.chain
    assert isinstance(chain, Chain)
    assert chain.x.shape == (6, 5, 4, 2)
    assert torch.equal(base.from_chain(chain.x[:, -1], base.encode(obs)), sample.actions)
    ratio = (policy.log_prob(policy.encode(obs), chain)[0] - chain.log_prob).exp()
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


def test_the_pairs_that_stand_in_for_a_likelihood_are_those_of_the_choice() -> None:
    policy, obs = BestOfN(flow(process="flow_cfm", pairs=3), near(), 5), observation()
    chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded(2)).chain
    assert isinstance(chain, Chain)
    assert chain.noise is not None
    assert chain.noise.shape == (6, 3, 4, 2)
    ratio = (policy.log_prob(policy.encode(obs), chain)[0] - chain.log_prob).exp()
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


def test_what_the_base_vouches_for_goes_with_the_choice() -> None:
    class Vouching(FlowPolicy):
        def sample(self, encoded: Encoded, **options: Any) -> ChunkSample:
            actions = super().sample(encoded, **options).actions
            return ChunkSample(actions, n_exec=1 + (actions[:, 0, 0] > 0).long())

    config = ChunkPolicyConfig(horizon=4, width=32, depth=2, time_dim=8)
    base = Vouching(config, state_dim=3, action_dim=2, generator=seeded())
    sample = BestOfN(base, near(), 3).sample(base.encode(observation(40)), generator=seeded())
    assert sample.n_exec is not None
    assert torch.equal(sample.n_exec, 1 + (sample.actions[:, 0, 0] > 0).long())
    assert len(sample.n_exec.unique()) == 2


# --- the adapter ---------------------------------------------------------------------------------


def test_it_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    base = ResidualPolicy(flow(), ResidualHeadConfig(width=8), 0.2)
    batch = demonstrations(torch.randn(40, 3, generator=seeded()), torch.rand(40, 4, 2, generator=seeded()))
    counter = fit_coin_flips(base, batch, CoinFlipConfig(width=16, depth=2, epochs=2, prefix=3))
    policy, obs = BestOfN(base, counter, 7), observation()
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded, _ = load_policy(tmp_path / "policy", expect=META)
    assert isinstance(loaded, BestOfN)
    assert (loaded.n, loaded.scorer.config) == (7, counter.config)
    ours, theirs = (p.sample(p.encode(obs), generator=seeded(5)).actions for p in (policy, loaded))
    assert torch.equal(ours, theirs)
    spec = {**policy.spec(), "n": 0}
    with pytest.raises(CheckpointError, match="n must be a positive integer, got 0"):
        BestOfN.from_spec(spec, at="here")


def test_the_rest_is_the_bases() -> None:
    base, obs = flow(process="flow_sde"), observation()
    policy = BestOfN(base, scorer(), 4)
    batch = demonstrations(obs["state"], torch.zeros(6, 4, 2))[0]
    assert torch.equal(policy.encode(obs)["features"], base.encode(obs)["features"])
    assert torch.equal(policy.bc_loss(batch, seeded()), base.bc_loss(batch, seeded()))
    assert torch.equal(policy.refine(policy.encode(obs), batch.actions[:, 0]), batch.actions[:, 0])
    assert not any(parameter.requires_grad for parameter in policy.scorer.parameters())
    assert all(parameter.requires_grad for parameter in base.parameters())
    outer = ResidualPolicy(policy, ResidualHeadConfig(width=8))  # and it is a base like any other
    assert torch.equal(
        outer.sample(outer.encode(obs), generator=seeded()).actions,
        policy.sample(policy.encode(obs), generator=seeded()).actions,
    )


def test_bad_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        BestOfN(flow(), scorer(), 0)
    with pytest.raises(ValueError, match="base is RealTimeChunks, whose chunks would no longer continue"):
        BestOfN(RealTimeChunks(flow()), scorer(), 4)
    with pytest.raises(ValueError, match="prefix must be at most the horizon 4, got 5"):
        scorer(CoinFlipConfig(prefix=5))
    wrong: dict[str, Any] = {"coins": 0, "epochs": 0, "scale": 0.0, "lr": -1.0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"coin flips {name}: got {value}, allowed: "):
            CoinFlipConfig(**{name: value})
    with pytest.raises(ValueError, match="prefix: got 0, allowed: 1 or more, or null"):
        CoinFlipConfig(prefix=0)
    policy = BestOfN(flow(), scorer(), 4)
    with pytest.raises(ValueError, match=r"z has shape \(6, 3, 2\), allowed \(6, 4, 2\)"):
        policy.sample(policy.encode(observation()), z=torch.zeros(6, 3, 2))
    unknown: dict[str, Any] = {"mode": "best"}
    with pytest.raises(ValueError, match=r"no mode 'best'"):
        policy.sample(policy.encode(observation()), **unknown)
