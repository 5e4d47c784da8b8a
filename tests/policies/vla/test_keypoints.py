"""The small VLA with keypoints: what it reads, what it guesses, and that it does what it is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.language import INSTRUCTION, encode_text
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.policy import DemoBatch
from robot_rl.data.demos import ChunkSampler
from robot_rl.data.episodes import Episodes, EpisodesMeta
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.policies.conformance import check_policy
from robot_rl.policies.vla.config import SmallVLAConfig
from robot_rl.policies.vla.small import SmallVLA

LEFT, RIGHT = "go to the left", "go to the right"
META = EpisodesMeta(
    task="t",
    robot="r",
    control_hz=20.0,
    instruction=f"{LEFT}, {RIGHT}",
    state_names=("joint", "finger"),
    action_names=("tool.dx",),
)
ROWS = 40
QUIET: dict[str, Any] = {
    "random_shift_px": 0,
    "colour_jitter": 0.0,
    "dropout": 0.0,
    "state_noise": 0.0,
    "state_dropout": 0.0,
}


def two_tasks() -> Episodes:
    """Two episodes of equal observations, of which the first goes left and the second right.

    What a simulator hides has two elements in the first task and one in the second.
    """
    draw = np.random.default_rng(0)
    half = ROWS // 2
    state = draw.normal(size=(half, 2)).astype(np.float32)
    pictures = draw.integers(0, 255, (half, 16, 16, 3), dtype=np.uint8)
    hidden = draw.normal(size=(ROWS, 2)).astype(np.float32)
    hidden[half:, 1] = np.nan
    ends = np.zeros(ROWS, bool)
    ends[[half - 1, ROWS - 1]] = True
    obs = {
        "state": np.concatenate([state, state]),
        "front.rgb": np.concatenate([pictures, pictures]),
        PRIVILEGED: hidden,
        INSTRUCTION: encode_text([LEFT] * half + [RIGHT] * half),
    }
    return Episodes(
        meta=META,
        obs=obs,
        action=np.repeat([[-0.5], [0.5]], half, axis=0).astype(np.float32),
        reward=np.zeros(ROWS, np.float32),
        terminated=ends,
        truncated=np.zeros(ROWS, bool),
        success=ends,
        episode_index=np.repeat([0, 1], half),
        final_obs={key: value[:2] for key, value in obs.items()},
    )


def config(**changes: Any) -> SmallVLAConfig:
    small: dict[str, Any] = {"horizon": 1, "width": 16, "depth": 1, "heads": 2, "context_depth": 1}
    seen: dict[str, Any] = {"cameras": ("front",), "picture": (16, 16), "image_encoder": "keypoints"}
    values: dict[str, Any] = {**small, **seen, **QUIET, "guess_weight": 0.5, **changes}
    return SmallVLAConfig(**values)


def made(**changes: Any) -> SmallVLA:
    return SmallVLA.of_episodes(config(**changes), two_tasks(), generator=torch.Generator().manual_seed(0))


def batch() -> DemoBatch:
    return ChunkSampler(two_tasks(), 1).at(np.arange(ROWS))


def test_it_does_what_it_is_told_and_the_reverse_when_told_so() -> None:
    policy = made(decodes="regression")
    learner = BehaviourCloning(policy, BCConfig(lr=3e-3, warmup_updates=2), 0, total_updates=40)
    for _ in range(40):
        learner.update(batch())
    with learner.acting(), torch.no_grad():
        policy.eval()
        obs = batch().obs
        told = policy.sample(policy.encode(obs)).actions[:, 0, 0]
        swapped = {**obs, INSTRUCTION: obs[INSTRUCTION].flip(0)}
        otherwise = policy.sample(policy.encode(swapped)).actions[:, 0, 0]
    wanted = batch().actions[:, 0, 0]
    assert bool((told.sign() == wanted.sign()).all())
    assert bool((otherwise.sign() == -wanted.sign()).all())


def test_units_are_those_of_the_episodes() -> None:
    policy, episodes = made(), two_tasks()
    mean = torch.as_tensor(np.nanmean(episodes.obs[PRIVILEGED], axis=0))
    assert torch.allclose(policy.privileged_mean, mean, atol=1e-6)
    assert torch.allclose(policy.normaliser.state_mean, torch.as_tensor(episodes.obs["state"].mean(axis=0)))
    assert (float(policy.normaliser.low), float(policy.normaliser.high)) == (-0.5, 0.5)


def test_the_guess_is_held_to_what_the_task_has() -> None:
    policy = made()
    with torch.no_grad():
        policy.privileged_mean.copy_(torch.tensor([1.0, 2.0]))
        policy.privileged_std.copy_(torch.tensor([2.0, 4.0]))
    # Scaled truth: (3 - 1) / 2 = 1 and (-2 - 2) / 4 = -1; the NaN is of another task and does not count.
    truth = torch.tensor([[3.0, -2.0], [3.0, torch.nan]])
    guess = torch.tensor([[0.5, 0.0], [2.0, 9.0]])
    error = policy._guess_error(guess, {PRIVILEGED: truth})
    assert error.item() == pytest.approx((0.5 + 1.0 + 1.0) / 3)


def test_the_guess_adds_to_the_loss_by_its_weight() -> None:
    losses = [
        made(guess_weight=weight).bc_loss(batch(), torch.Generator().manual_seed(1)) for weight in (0.5, 1.5)
    ]
    policy = made()
    error = policy._guess_error(policy.encode(batch().obs)["guess"], batch().obs)
    assert (losses[1] - losses[0]).item() == pytest.approx(error.item(), rel=1e-4)


def test_the_regression_acts_where_it_was_chosen() -> None:
    policy = made(decodes="regression").eval()
    encoded, noise = policy.encode(batch().obs), torch.randn(ROWS, 1, 1)
    assert torch.equal(policy.sample(encoded, z=noise).actions, policy.sample(encoded, mode="mean").actions)
    flow = made().eval()
    encoded = flow.encode(batch().obs)
    apart = flow.sample(encoded, z=noise).actions - flow.sample(encoded, mode="mean").actions
    assert apart.abs().max().item() > 0.01


def test_it_keeps_the_contract(tmp_path: Path) -> None:
    obs = {
        key: value.nan_to_num() if value.is_floating_point() else value for key, value in batch().obs.items()
    }
    check_policy(
        lambda: made().eval(),
        lambda rows: {key: value[:rows] for key, value in obs.items()},
        save=(tmp_path / "policy", PolicyMeta(**vars(META), n_exec=1)),
    )


def test_what_is_hidden_is_needed_to_learn_and_not_to_act() -> None:
    policy, shown = made().eval(), batch()
    obs = {key: value for key, value in shown.obs.items() if key != PRIVILEGED}
    told = [policy.sample(policy.encode(one), z=torch.zeros(ROWS, 1, 1)).actions for one in (obs, shown.obs)]
    assert torch.equal(*told)
    with pytest.raises(DatasetError, match=r"no 'privileged.state', which the guess is held to"):
        policy.bc_loss(replace(shown, obs=obs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_encoder": "grid"},
            "small_vla guess_weight: got 0.5, allowed: 0 without keypoints of a camera",
        ),
        ({"cameras": ()}, "small_vla guess_weight: got 0.5, allowed: 0 without keypoints of a camera"),
        (
            {"decodes": "regression", "regression": 0.0},
            "small_vla regression: got 0.0, allowed: above 0 with decodes=regression",
        ),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert str(caught.value) == message


def test_relative_actions_are_measured_on_the_episodes() -> None:
    episodes = two_tasks()
    named = replace(episodes, meta=replace(META, action_names=("joint",)))
    policy = SmallVLA.of_episodes(config(guess_weight=0.0), named, generator=torch.Generator().manual_seed(0))
    distance = named.action[:, 0] - named.obs["state"][:, 0]
    low, high = (float(np.quantile(distance, share)) for share in (0.01, 0.99))
    assert float(policy.normaliser.centre) == pytest.approx((low + high) / 2, abs=1e-5)
