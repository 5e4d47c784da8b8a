"""Collecting until enough episodes pass: which are kept, what is counted, whose policy acts."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robot_rl.cli.collect import CollectConfig, _env_and_actor
from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError
from robot_rl.core.policy import ChunkSample, Encoded
from robot_rl.core.seeding import EVAL_SEED_START
from robot_rl.data.collecting import collecting, is_published, remove
from robot_rl.data.demos import load_episodes
from robot_rl.data.episodes import Episodes
from robot_rl.data.keep import KeepConfig
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.vector import Obs
from robot_rl.policies.checkpoint import PolicyMeta, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.spec import SavedPolicy
from robot_rl.sim.vector import EnvConfig
from robot_rl.testing.devices import FakeEnv
from robot_rl.train.collect import Actor, Collection, collect, open_policy, policy_actor
from tests.plain import Plain

META = PolicyMeta(
    task="count",
    robot="point",
    control_hz=20.0,
    state_names=("step", "episode", "seed", "x0", "x1"),
    action_names=("d0", "d1"),
    instruction="Count to the end.",
    n_exec=2,
)
SETTINGS = {"seed": 0, "keep.success": None}


def shaking(env: FakeEnv) -> Actor:
    """Acts (a, a) and (-a, -a) in turn, where a is a hundredth of the episode's seed: roughness 4 a^2."""

    def act(obs: Obs) -> Any:
        step, seed = obs["state"][:, :1], obs["state"][:, 2:3]
        return np.repeat(np.where(step % 2 == 0, seed, -seed) / 100.0, 2, axis=1).astype(np.float32)

    return Actor(lambda seeds: None, act, first_seed=20)


def collected(
    out: Path, keep: KeepConfig, *, episodes: int, attempts: int = 40, act: Any = None, **how: Any
) -> tuple[Collection, Episodes]:
    # Env 0 succeeds after 3 steps, env 1 after 5, env 2 runs out of time after 4; seeds from 20 on in turn.
    env = FakeEnv(3, terminate_after=[3, 5, None], truncate_after=[None, None, 4], autoreset="disabled")
    shakes = shaking(env)
    actor = shakes if act is None else replace(shakes, act=lambda obs: act(shakes.act(obs)))
    with collecting(out, SETTINGS) as into:
        found = collect(env, actor, keep, into, episodes=episodes, attempts=attempts, **how)
        into.publish(found.places.tolist(), {"settings": SETTINGS})
    return found, load_episodes(out)


def seeds(episodes: Episodes) -> list[int]:
    return episodes.obs["state"][episodes.bounds()[0], 2].astype(int).tolist()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def interrupted_at(act: int, error: BaseException) -> Any:
    """Returns what lets an actor fail at so many calls; a batch takes five."""
    calls = 0

    def fail(action: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == act:
            raise error
        return action

    return fail


def test_the_first_that_pass_are_kept_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    found, kept = collected(
        tmp_path / "out", KeepConfig(success=True), episodes=3, on_batch=lambda *now: told.append(now)
    )
    assert seeds(kept) == [20, 21, 23]  # 22 fails; 24 passes and is not needed
    assert found.kept.tolist() == [0, 1, 3]
    assert found.refused["success"] == 2
    assert found.spare == 1
    assert told == [(2, "refused 1 of 3: success 1"), (3, "refused 2 of 6: success 2")]
    assert found.started.steps.tolist() == [3, 5, 4, 3, 5, 4]
    assert found.started.roughness[1] == pytest.approx(4 * 0.21**2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shares_are_of_all_that_were_played(tmp_path: Path) -> None:
    # Three batches make 9 episodes; the fastest third are those of env 0: 20, 23, 26.
    found, kept = collected(tmp_path / "fast", KeepConfig(fastest=1 / 3), episodes=3)
    assert seeds(kept) == [20, 23, 26]
    assert found.refused["fastest"] == 6
    # Six succeed: 20, 21, 23, 24, 26, 27. The smoother half shake least.
    found, kept = collected(tmp_path / "smooth", KeepConfig(success=True, smoothest=0.5), episodes=3)
    assert seeds(kept) == [20, 21, 23]
    assert found.refused["smoothest"] == 3
    assert kept.action[:, 0].tolist()[:3] == pytest.approx([0.2, -0.2, 0.2])


def test_too_few_say_which_setting_to_loosen_and_what_they_cost_is_not_lost(tmp_path: Path) -> None:
    keep, out = KeepConfig(success=True, max_steps=4), tmp_path / "out"
    message = (
        r"collect: 2 of 5 episodes passed; refused 3 of 5: success 1, max_steps 2\. Loosen that setting of "
        r"keep, allow more attempts than 5, or ask for fewer episodes\."
    )
    with pytest.raises(DatasetError, match=message) as caught:
        collected(out, keep, episodes=5, attempts=5)
    assert caught.value.__notes__ == [
        f"2 of the 5 episodes that have ended are kept in {tmp_path}/.collecting-out; the same command goes "
        "on with them, also with other episodes=, attempts= and shares of keep."
    ]
    # The second batch was filled up and is played again: 25 was not in it. 20, 23, 26, 29, 32 take 3 steps.
    found, kept = collected(out, keep, episodes=5)
    assert seeds(kept) == [20, 23, 26, 29, 32]
    assert len(found.started) == 15
    collected(tmp_path / "unbroken", keep, episodes=5)
    assert files(out) == files(tmp_path / "unbroken")


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_and_the_same_command_give_the_same_bytes(
    tmp_path: Path, kills: Any, every: int
) -> None:
    """Nothing is in the dataset's place before it is whole, and a batch that was kept is not played again."""
    keep = KeepConfig(success=True, smoothest=0.6)
    with kills(tmp_path) as copies:
        collected(tmp_path / "out", keep, episodes=4)  # three batches, and a share that drops one
    wanted = files(tmp_path / "out")
    assert len(copies) > 60
    replayed: list[int] = []
    for copy in copies[::every]:
        out, calls = copy / "out", 0
        if out.exists():
            left = list((copy / ".collecting-out").glob("*"))
            assert is_published(out, SETTINGS) or not left
            if left:
                remove(out)
        else:

            def count(action: Any) -> Any:
                nonlocal calls
                calls += 1
                return action

            collected(out, keep, episodes=4, act=count)
        assert files(copy) == {f"out/{name}": content for name, content in wanted.items()}
        replayed.append(calls // 5)
    assert replayed == sorted(replayed, reverse=True)
    assert len(set(replayed)) == (4 if every == 1 else 3)


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    keep, out = KeepConfig(), tmp_path / "deep" / "out"
    with pytest.raises(KeyboardInterrupt) as caught:
        collected(out, keep, episodes=6, act=interrupted_at(5, KeyboardInterrupt()))
    assert caught.value.__notes__ == ["Nothing was kept: no batch of episodes had ended."]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt) as caught:
        collected(out, keep, episodes=6, act=interrupted_at(7, KeyboardInterrupt()))
    folder = tmp_path / "deep" / ".collecting-out"
    assert caught.value.__notes__[0].startswith(f"3 of the 3 episodes that have ended are kept in {folder};")
    assert not out.exists()
    assert len(Dataset(folder / "episodes")) == 3


def test_a_full_disk_is_told_and_nothing_that_was_kept_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that waits for the disk fails once: before a batch, in one, and while all is copied."""
    keep, sync, kept = KeepConfig(success=True), os.fsync, set[str]()
    collected(tmp_path / "unbroken", keep, episodes=4)
    calls, failing = 0, 10**6

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    collected(tmp_path / "counted", keep, episodes=4)
    for failing in range(1, calls, 23):
        calls, out = 0, tmp_path / str(failing)
        with pytest.raises(DatasetError, match="the disk is full") as caught:
            collected(out, keep, episodes=4)
        kept.update(note.split(" episodes")[0] for note in getattr(caught.value, "__notes__", ()))
        if not out.exists():
            collected(out, keep, episodes=4)
        remove(out)
        assert files(out) == files(tmp_path / "unbroken")
    assert {"2 of the 3", "4 of the 6"} <= kept


def test_other_settings_do_not_go_on_with_these_episodes(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / ".collecting-out"
    with pytest.raises(KeyboardInterrupt):
        collected(out, KeepConfig(), episodes=6, act=interrupted_at(7, KeyboardInterrupt()))
    message = (
        rf"collect: got seed=1, but the episodes in {folder} were begun with seed=0\. Give these to go on "
        rf"with them, or give another out=\. To begin again, remove them: rm -r {folder}"
    )
    with pytest.raises(ConfigError, match=message), collecting(out, SETTINGS | {"seed": 1}):
        pass
    with collecting(out, SETTINGS) as into:
        assert [facts.steps.tolist() for facts in into.batches] == [[3, 5, 4]]
        with pytest.raises(DatasetError, match=r"process \d+ .* collects these episodes now\. Wait for"):
            collected(out, KeepConfig(), episodes=6)
    shutil.rmtree(folder / "begun")  # no batch counts: whoever comes next begins anew
    with collecting(out, SETTINGS | {"seed": 1}) as into:
        assert (into.batches, [path.name for path in folder.iterdir() if path.is_dir()]) == ([], [])


def test_what_was_kept_and_changed_since_is_refused(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / ".collecting-out"
    with pytest.raises(KeyboardInterrupt):
        collected(out, KeepConfig(), episodes=6, act=interrupted_at(7, KeyboardInterrupt()))
    path = folder / "begun" / "000000.json"
    path.write_text(path.read_text().replace("3", "4", 1))
    with pytest.raises(DatasetError, match=rf"000000\.json: damaged: .* remove them: rm -r {folder}"):
        collected(out, KeepConfig(), episodes=6)


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


class NoisePolicy(Plain, nn.Module):
    """Acts by its initial noise, so that actions show which seed they came from."""

    horizon, action_dim = 3, 2

    def sample(self, obs: dict[str, Tensor], *, z: Tensor, **_: Any) -> ChunkSample:
        return ChunkSample(z.clamp(-1, 1))

    def refine(self, encoded: Encoded, action: Tensor, **how: Any) -> Tensor:
        assert how["mode"] == "ode"  # nothing is explored
        return action / 2


def test_a_policy_acts_the_same_in_every_collection_and_never_on_held_out_seeds(tmp_path: Path) -> None:
    def run(num_envs: int) -> Episodes:
        env = FakeEnv(num_envs, terminate_after=6, autoreset="disabled")
        actor = policy_actor(env, cast(SavedPolicy, NoisePolicy()), META, seed=3)
        assert actor.first_seed + 10**9 < EVAL_SEED_START
        out = tmp_path / f"{num_envs} {len(list(tmp_path.iterdir()))}"
        with collecting(out, SETTINGS) as into:
            found = collect(env, actor, KeepConfig(success=True), into, episodes=4, attempts=8)
            into.publish(found.places.tolist(), {})
        return load_episodes(out)

    found = run(2)
    assert found.action.tobytes() == run(2).action.tobytes() == run(3).action.tobytes()
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


def test_a_policy_begins_as_the_task_says_and_on_the_cpu_whatever_it_learned_in(tmp_path: Path) -> None:
    """A machine without a GPU and without the run's bank of starts can collect with what it learned."""
    run = tmp_path / "run"
    save_policy(run / "policy" / "final", policy(), meta=META)
    resets = "{bank: elsewhere, evaluate: grasped}"
    env = f"{{task: reach, engine: mujoco_warp, engine_device: cuda, resets: {resets}}}"
    (run / "config.yaml").write_text(f"env: {env}\n")
    found, _ = _env_and_actor(CollectConfig(policy=str(run), out=str(tmp_path / "demos")))
    assert found == EnvConfig(task="reach")
