"""Collecting until enough episodes pass: which are kept, what is counted, whose policy acts."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.core.policy import ChunkSample, Mode
from robot_rl.core.seeding import EVAL_SEED_START
from robot_rl.data.keep import KeepConfig
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.fake import FakeEnv
from robot_rl.hal.vector import Obs
from robot_rl.policies.checkpoint import PolicyMeta, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.spec import SavedPolicy
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.collect import Actor, Collection, collect, open_policy, policy_actor

META = PolicyMeta(
    task="count",
    robot="point",
    control_hz=20.0,
    state_names=("step", "episode", "seed", "x0", "x1"),
    action_names=("d0", "d1"),
    instruction="Count to the end.",
    n_exec=2,
)


def shaking(env: FakeEnv) -> Actor:
    """Acts (a, a) and (-a, -a) in turn, where a is a hundredth of the episode's seed: roughness 4 a^2."""

    def act(obs: Obs) -> Any:
        step, seed = obs["state"][:, :1], obs["state"][:, 2:3]
        return np.repeat(np.where(step % 2 == 0, seed, -seed) / 100.0, 2, axis=1).astype(np.float32)

    return Actor(lambda seeds: None, act, first_seed=20)


def collected(keep: KeepConfig, *, episodes: int, attempts: int = 40, **how: Any) -> Collection:
    # Env 0 succeeds after 3 steps, env 1 after 5, env 2 runs out of time after 4; seeds from 20 on in turn.
    env = FakeEnv(3, terminate_after=[3, 5, None], truncate_after=[None, None, 4], autoreset="disabled")
    return collect(env, shaking(env), keep, episodes=episodes, attempts=attempts, **how)


def seeds(found: Collection) -> list[int]:
    return found.episodes.obs["state"][found.episodes.bounds()[0], 2].astype(int).tolist()


def test_the_first_that_pass_are_kept_in_the_order_of_their_seeds() -> None:
    told: list[tuple[int, str]] = []
    found = collected(KeepConfig(success=True), episodes=3, on_batch=lambda *now: told.append(now))
    found.episodes.check()
    assert seeds(found) == [20, 21, 23]  # 22 fails; 24 passes and is not needed
    assert found.refused["success"] == 2
    assert found.spare == 1
    assert told == [(2, "refused 1 of 3: success 1"), (3, "refused 2 of 6: success 2")]
    assert found.started.steps.tolist() == [3, 5, 4, 3, 5, 4]
    assert found.started.roughness[1] == pytest.approx(4 * 0.21**2)


def test_shares_are_of_all_that_were_played() -> None:
    # Three batches make 9 episodes; the fastest third are those of env 0: 20, 23, 26.
    found = collected(KeepConfig(fastest=1 / 3), episodes=3)
    assert seeds(found) == [20, 23, 26]
    assert found.refused["fastest"] == 6
    # Six succeed: 20, 21, 23, 24, 26, 27. The smoother half shake least.
    found = collected(KeepConfig(success=True, smoothest=0.5), episodes=3)
    assert seeds(found) == [20, 21, 23]
    assert found.refused["smoothest"] == 3
    assert found.episodes.action[:, 0].tolist()[:3] == pytest.approx([0.2, -0.2, 0.2])


def test_too_few_say_which_setting_to_loosen() -> None:
    message = (
        r"collect: 2 of 5 episodes passed; refused 3 of 5: success 1, max_steps 2\. Loosen that setting of "
        r"keep, allow more attempts than 5, or ask for fewer episodes\."
    )
    with pytest.raises(DatasetError, match=message):
        collected(KeepConfig(success=True, max_steps=4), episodes=5, attempts=5)


def policy() -> FlowPolicy:
    return FlowPolicy(
        ChunkPolicyConfig(horizon=4, width=8, depth=1, steps=2),
        state_dim=5,
        action_dim=2,
        normaliser=Normaliser.fit(
            {"state": np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)},
            np.linspace(-1, 1, 18, dtype=np.float32).reshape(9, 2),
        ),
        generator=torch.Generator().manual_seed(0),
    )


class NoisePolicy(nn.Module):
    """Acts by its initial noise, so that actions show which seed they came from."""

    horizon, action_dim = 3, 2

    def sample(self, obs: dict[str, Tensor], *, z: Tensor, **_: Any) -> ChunkSample:
        return ChunkSample(z.clamp(-1, 1))

    def refine(self, obs: dict[str, Tensor], action: Tensor, *, mode: Mode, **_: Any) -> Tensor:
        assert mode == "ode"  # nothing is explored
        return action / 2


def test_a_policy_acts_the_same_in_every_collection_and_never_on_held_out_seeds() -> None:
    def run(num_envs: int) -> Collection:
        env = FakeEnv(num_envs, terminate_after=6, autoreset="disabled")
        actor = policy_actor(env, cast(SavedPolicy, NoisePolicy()), META, seed=3)
        assert actor.first_seed + 10**9 < EVAL_SEED_START
        return collect(env, actor, KeepConfig(success=True), episodes=4, attempts=8)

    found = run(2).episodes
    assert found.action.tobytes() == run(2).episodes.action.tobytes() == run(3).episodes.action.tobytes()
    assert len(np.unique(found.action, axis=0)) == 24  # other noise in every episode and decision
    assert abs(found.action).max() == 0.5  # refined


def test_a_policy_of_another_task_is_refused() -> None:
    with pytest.raises(CheckpointError, match="policy: the policy was trained with task = 'reach'"):
        policy_actor(FakeEnv(1, autoreset="disabled"), policy(), replace(META, task="reach"), seed=0)


def test_a_run_a_policy_of_it_and_a_saved_policy_are_opened(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_policy(run / "policy" / "final", policy(), meta=META)
    shown = EnvConfig(task="count", robot="point", state=META.state_names)
    assert open_policy(str(run))[1:] == (META, shown)
    (run / "config.yaml").write_text("env: {task: reach, horizon_s: 2.0}\n")
    assert open_policy(str(run))[2] == EnvConfig(task="reach", horizon_s=2.0)
    assert open_policy(str(run / "policy" / "final"))[2].horizon_s == 2.0
    save_policy(tmp_path / "finetuned" / "policy", policy(), meta=META)
    assert open_policy(str(tmp_path / "finetuned"))[1] == META
    with pytest.raises(CheckpointError, match=r"policy: '.*' holds no policy\. Give the folder of a run"):
        open_policy(str(tmp_path))
