"""What a recording says of the starts of its episodes: enough to find each one in its bank again."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robot_rl.cli.main import main
from robot_rl.core.errors import DatasetError
from robot_rl.core.policy import ChunkSample, Policy
from robot_rl.data.episode import Episode
from robot_rl.data.episodes import together
from robot_rl.data.store.check import repair
from robot_rl.data.store.layout import STORE_JSON, change_store_json
from robot_rl.data.store.reader import StoreReader
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.resets.generate import GenerateSettings, generate
from robot_rl.resets.workbench import Workbench
from robot_rl.rollout.sources import InlineSource
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.bank_files import Bank
from robot_rl.sim.config import EnvConfig, ResetsConfig
from robot_rl.sim.vector import SimVectorEnv
from robot_rl.train.demos import joined, played
from robot_rl.train.recording import Recorder, recorded_of, starts_of
from tests.plain import Plain

MIX = {"own": 1.0, "grasped": 1.0, "near_goal": 1.0}


class Lower(Plain, nn.Module):
    """Moves the tool down: some of the pegs that begin in the hole are then in it."""

    horizon, action_dim = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def sample(self, obs: dict[str, Tensor], **_: Any) -> ChunkSample:
        return ChunkSample(torch.tensor([0.0, 0.0, -1.0]).expand(len(obs["state"]), 2, 3))


def env_in(bank: Path, num: int = 6) -> SimVectorEnv:
    resets = ResetsConfig(bank=str(bank), mix=MIX)
    return SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1, resets=resets, horizon_s=0.3), num)


def record(env: SimVectorEnv, folder: Path, turns: int) -> None:
    """Lets a policy act in an env and records it, as a run does."""
    policy, publisher = Lower(), Publisher()
    publisher.offer(0, lambda: {"weight": torch.zeros(1)})
    executor = ChunkExecutor(cast(Policy, policy), env.num_envs, n_exec=2)
    source = InlineSource(env, policy, executor, seed=4)
    starts = starts_of(env.config.resets, folder)
    with Recorder(folder, **recorded_of(env, is_arm=False), starts=starts) as recorder:
        for _ in range(turns):
            recorder.add(source.collect(publisher))


def test_episodes_that_were_played_say_in_which_class_they_began(folder: Path) -> None:
    resets = ResetsConfig(bank=str(folder), mix=MIX)
    config = EnvConfig(task="gantry_peg", num_threads=1, resets=resets, horizon_s=0.3)
    env, seeds = SimVectorEnv(config, 12, autoreset="disabled"), np.arange(12, dtype=np.uint64)
    kinds = env.reset(seed=list(range(12)))[1]["reset_class"]
    found = joined(env, played(env, seeds, lambda _: np.zeros((12, 3), np.float32)))
    assert found.start is not None
    assert found.start.tolist() == [env.reset_classes[kind] for kind in kinds]
    assert len(set(found.start)) > 1
    assert together([found, found]).start is not None
    assert together([found, replace(found, start=None)]).start is None
    plain = SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1, horizon_s=0.3), 2, autoreset="disabled")
    assert joined(plain, played(plain, seeds[:2], lambda _: np.zeros((2, 3), np.float32))).start is None


@pytest.fixture(name="store", scope="module")
def _store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes of six steps in each of six envs."""
    path = tmp_path_factory.mktemp("recorded") / "store"
    record(env_in(folder), path, 18)
    return path


def episodes(reader: StoreReader) -> Iterator[Episode]:
    return (reader.read(i) for i in range(len(reader)))


def test_every_recorded_episode_is_found_in_its_bank(bank: Bank, store: Path) -> None:
    reader = StoreReader(store)
    starts = reader.layout.starts
    assert starts is not None
    assert starts.classes == ("own", "reaching", "near_object", "grasped", "near_goal")
    key = asdict(bank.key) | {"varied": []}
    assert starts.bank == {"digest": bank.digest, "key": key}
    assert len(reader) >= 18
    env = SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1), 1, autoreset="disabled")
    found = set[str]()
    for episode in episodes(reader):
        name, row = starts.of(episode.obs["reset_row"])
        found.add(name)
        assert (row == -1) == (name == "own")
        if row >= 0:
            seen = env.set_state(bank.sets[name].states[[row]])["state"][0]
            np.testing.assert_array_equal(episode.obs["state"][0], seen)
    assert found == set(MIX)


def test_info_counts_episodes_and_successes_of_each_class(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: dict[str, list[bool]] = {}
    reader = StoreReader(store)
    starts = reader.layout.starts
    assert starts is not None
    for episode in episodes(reader):
        counts.setdefault(starts.of(episode.obs["reset_row"])[0], []).append(bool(episode.success.any()))
    assert {any(counts[name]) for name in counts} == {False, True}  # from the hole some, from far none
    assert main(["replay", "info", str(store), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    shown = {each["name"]: (each["episodes"], each["successes"]) for each in json.loads(last)["starts"]}
    assert shown == {name: (len(each), sum(each)) for name, each in counts.items()}
    own = counts["own"]
    assert any(line.startswith(f"starts: own {len(own)} episodes, success 0%; grasped") for line in lines)


def test_sealed_episodes_and_a_repaired_store_keep_their_starts(folder: Path, tmp_path: Path) -> None:
    record(env_in(folder, 2), tmp_path / "store", 12)
    before = StoreReader(tmp_path / "store").layout.starts
    (tmp_path / "store" / STORE_JSON).write_bytes(b"damaged")
    repair(tmp_path / "store")
    assert main(["replay", "seal", str(tmp_path / "store")]) == 0
    reader = StoreReader(tmp_path / "store")
    assert reader.layout.starts == before is not None
    assert reader.sealed(0) == 0
    assert reader.read(0).obs["reset_row"].shape == (6, 2)


def test_an_old_store_does_not_take_the_bank_of_later_rows_for_its_own(folder: Path, tmp_path: Path) -> None:
    """Nobody knows of which bank its first rows are; neither does a repair that reads the later segments."""
    store = tmp_path / "store"
    record(env_in(folder, 2), store, 6)
    change_store_json(store, lambda content: {k: v for k, v in content.items() if k != "starts"})
    old = StoreReader(store)
    assert old.layout.starts is None
    record(env_in(folder, 2), store, 6)
    gone_on = StoreReader(store)
    assert gone_on.layout.starts is None
    assert len(gone_on) == 2 * len(old)
    assert gone_on.read(3).obs["reset_row"].shape == (6, 2)
    first, *_ = sorted((store / "journal").glob("*.log"))
    first.unlink()
    (store / STORE_JSON).write_bytes(b"damaged")
    repair(store)
    assert StoreReader(store).layout.starts is None


def test_rows_of_another_bank_are_not_mixed_in(bank: Bank, folder: Path, tmp_path: Path) -> None:
    bench = Workbench(SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1), 32, autoreset="disabled"))
    settings = GenerateSettings(rows=12, seed=5, classes=("grasped", "near_goal"))
    other = generate(bench, settings)
    other.save(tmp_path / "other")
    assert other.digest != bank.digest
    record(env_in(folder, 2), tmp_path / "store", 1)
    wrong = (
        f"starts of bank {bank.digest} with own, reaching, .*, not of bank {other.digest} with own, grasped"
    )
    with pytest.raises(DatasetError, match=wrong):
        record(env_in(tmp_path / "other", 2), tmp_path / "store", 1)
