"""Pools: windows hold the numbers they should, whoever still writes, whatever was dropped or resumed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError
from robot_rl.data.episode import SOURCES, Episode
from robot_rl.data.episodes import Episodes, EpisodesMeta
from robot_rl.data.pool import EpisodePool, PoolBudget, Prioritised, Stratified
from robot_rl.data.replay import Mixture, ReplayBuffer
from robot_rl.data.transitions import ChunkBatch, TransitionBatch

META = EpisodesMeta(
    task="t", robot="r", control_hz=10.0, instruction="go", state_names=("s",), action_names=("a",)
)


def episode(
    first: float, steps: int, end: str = "terminated", *, source: str = "sim", **changes: Any
) -> Episode:
    """State v, base action 10 v, action 100 v, reward v, for v = first, first + 1, ...; leads to the next v.

    `end` is terminated, truncated, or open: nobody saw where the last step led to.
    """
    value = (first + np.arange(steps + 1)).astype(np.float32)
    last = np.arange(steps) == steps - 1
    fields: dict[str, Any] = {
        "meta": META,
        "obs": {"state": value[:-1, None]},
        "final_obs": {} if end == "open" else {"state": value[-1:]},
        "action": 100 * value[:-1, None],
        "base_action": 10 * value[:-1, None],
        "reward": value[:-1],
        "terminated": last & (end == "terminated"),
        "truncated": last & (end == "truncated"),
        "success": last & (end == "terminated"),
        "source": np.full(steps, SOURCES.index(source), np.uint8),
        "policy_version": np.arange(steps) // 2,
        "stamp_ns": np.arange(steps) * 100_000_000,
    }
    return Episode(**(fields | changes))


class Memory:
    """A source of the episodes in a list that grows while somebody reads."""

    def __init__(self, *episodes: Episode) -> None:
        self.episodes = list(episodes)
        self.meta, self.features = episodes[0].meta, episodes[0].features()
        self.reads = 0

    def __len__(self) -> int:
        return len(self.episodes)

    def lengths(self) -> Any:
        return np.array([len(episode) for episode in self.episodes])

    def read(self, episode: int) -> Episode:
        self.reads += 1
        return self.episodes[episode]

    def refresh(self) -> None:
        pass


class Counted:
    """Pictures drawn on demand; `drawn` counts them. The first pixel tells which it is."""

    def __init__(self, first: int, steps: int, size: tuple[int, int] = (4, 4)) -> None:
        self.first, self.steps, self.size = first, steps, size
        self.drawn = 0

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: Any) -> Any:
        value = self.first + np.asarray(step)
        assert (np.asarray(step) < self.steps).all()
        self.drawn += value.size
        pictures = np.zeros((*value.shape, *self.size, 3), np.uint8)
        pictures[..., 0, 0, :2] = np.stack([value % 256, value // 256], axis=-1)
        return pictures


def with_pictures(first: int, steps: int, end: str = "terminated", **changes: Any) -> Episode:
    """An episode that a camera saw: the picture of state v tells v; see `shown`."""
    plain = episode(first, steps, end, **changes)
    frames = Counted(first, steps)
    final = {} if end == "open" else {"cam.rgb": Counted(first, steps + 1)[steps]}
    return replace(plain, obs=plain.obs | {"cam.rgb": frames}, final_obs=plain.final_obs | final)


def shown(pictures: Any) -> Any:
    """Returns what the pictures of a batch tell."""
    pixel = np.asarray(pictures)[:, 0, 0].astype(np.int64)
    return pixel[:, 0] + 256 * pixel[:, 1]


def flat(*parts: Episode) -> Episodes:
    """Returns whole episodes as the flat arrays that `ReplayBuffer` takes."""
    columns = ("action", "reward", "terminated", "truncated", "success")
    return Episodes(
        meta=META,
        obs={"state": np.concatenate([part.obs["state"] for part in parts])},
        final_obs={"state": np.stack([part.final_obs["state"] for part in parts])},
        episode_index=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns},
    )


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def windows(pool: EpisodePool, *, n_step: int = 3, gamma: float = 0.5) -> dict[float, tuple[float, ...]]:
    """Samples until every window was met: first state -> reward, bootstrap, last state."""
    batch = pool.sample(2000, n_step=n_step, gamma_step=gamma, rng=rng())
    columns = (batch.reward, batch.bootstrap, batch.next_obs["state"][:, 0])
    rows = zip(batch.obs["state"][:, 0].tolist(), *(column.tolist() for column in columns), strict=True)
    return {row[0]: row[1:] for row in rows}


def same(one: TransitionBatch | ChunkBatch, two: TransitionBatch | ChunkBatch) -> bool:
    """Whether two batches are equal, bit for bit."""

    def tensors(batch: Any) -> list[torch.Tensor]:
        parts = [batch.obs, batch.next_obs, vars(batch.origin)]
        plain = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
        return plain + [value for part in parts for value in part.values()]

    return all(a.equal(b) for a, b in zip(tensors(one), tensors(two), strict=True))


def test_windows_by_hand() -> None:
    pool = EpisodePool(
        [Memory(episode(1, 3), episode(11, 2, "truncated"), episode(21, 3, "open"))], capacity=99
    )
    assert len(pool) == 7
    assert windows(pool) == {
        # 1 + 2/2 + 3/4 = 2.75; the task ended: no bootstrap.
        1.0: (2.75, 0.0, 4.0),
        2.0: (3.5, 0.0, 4.0),
        3.0: (3.0, 0.0, 4.0),
        # The clock ended it after two steps: 11 + 12/2 = 17, bootstrap 1/4 from the final observation.
        11.0: (17.0, 0.25, 13.0),
        12.0: (12.0, 0.5, 13.0),
        # Nobody saw where step 23 led to: 21 + 22/2 = 32, and 23 is the last that was seen.
        21.0: (32.0, 0.25, 23.0),
        22.0: (22.0, 0.5, 23.0),
    }


def test_a_window_of_a_pool_is_that_of_a_replay_buffer() -> None:
    generator = rng(7)
    parts = [
        episode(100 * k, int(generator.integers(1, 12)), ("terminated", "truncated")[k % 2])
        for k in range(30)
    ]
    pool = EpisodePool([Memory(*parts)], capacity=1000)
    rows = flat(*parts)
    buffer = ReplayBuffer.from_episodes(
        rows, base_action=10 * rows.obs["state"], final_base_action=10 * rows.final_obs["state"], source="sim"
    )
    assert len(pool) == len(buffer)
    for n_step in (1, 3, 20):
        one = pool.sample(300, n_step=n_step, gamma_step=0.9, rng=rng(n_step))
        two = buffer.sample(300, n_step=n_step, gamma_step=0.9, rng=rng(n_step))
        for name in ("action", "base_action", "reward", "bootstrap", "source"):
            assert getattr(one, name).equal(getattr(two, name)), name
        assert one.obs["state"].equal(two.obs["state"])
        assert one.next_obs["state"].equal(two.next_obs["state"])


def test_chunks_by_hand_and_they_never_cross_an_end() -> None:
    pool = EpisodePool(
        [Memory(episode(1, 3), episode(11, 5, "truncated"), episode(21, 3, "open"))], capacity=99
    )
    batch = pool.sample_chunks(500, horizon=3, gamma_step=0.5, rng=rng())
    rows = {
        float(batch.obs["state"][i, 0]): (
            (batch.action[i, :, 0] / 100).tolist(),
            batch.valid[i].tolist(),
            float(batch.reward[i]),
            float(batch.bootstrap[i]),
            float(batch.next_obs["state"][i, 0]),
        )
        for i in range(500)
    }
    assert len(rows) == len(pool) == 10
    assert rows[2.0] == ([2, 3, 3], [True, True, False], 3.5, 0.0, 4.0)
    # Three whole steps: 11 + 12/2 + 13/4 = 20.25, then the value of 14.
    assert rows[11.0] == ([11, 12, 13], [True] * 3, 20.25, 0.125, 14.0)
    assert rows[14.0] == ([14, 15, 15], [True, True, False], 21.5, 0.25, 16.0)
    assert rows[22.0] == ([22, 22, 22], [True, False, False], 22.0, 0.5, 23.0)


def test_every_row_says_where_it_comes_from() -> None:
    first = Memory(episode(1, 4), episode(11, 4, source="human"))
    pool = EpisodePool([first, Memory(episode(21, 4, source="real"))], capacity=99)
    batch = pool.sample(200, n_step=1, gamma_step=0.9, rng=rng())
    assert batch.origin is not None
    for i in range(200):
        source, index = pool.locate(int(batch.origin.episode[i]))
        value = {(0, 0): 1, (0, 1): 11, (1, 0): 21}[source, index] + int(batch.origin.step[i])
        assert float(batch.obs["state"][i, 0]) == value
        assert SOURCES[batch.source[i]] == {1: "sim", 11: "human", 21: "real"}[value // 10 * 10 + 1]
        assert batch.origin.policy_version[i] == batch.origin.step[i] // 2


def test_the_oldest_episodes_go_first() -> None:
    source = Memory(episode(1, 3), episode(11, 3))
    pool = EpisodePool([source], capacity=13)  # rows of two episodes of three steps and one of four
    source.episodes.append(episode(21, 4))
    assert pool.refresh() == 10
    assert sorted(windows(pool, n_step=1)) == [1, 2, 3, 11, 12, 13, 21, 22, 23, 24]
    source.episodes += [episode(31, 2), episode(41, 1)]
    pool.refresh()
    assert sorted(windows(pool, n_step=1)) == [21, 22, 23, 24, 31, 32, 41]
    # Of more than fits, the last are read, and only they.
    source.episodes += [episode(100 * k, 4) for k in range(1, 20)]
    reads = source.reads
    pool.refresh()
    assert source.reads - reads == 2
    assert sorted(windows(pool, n_step=1)) == [1800, 1801, 1802, 1803, 1900, 1901, 1902, 1903]


def test_any_sequence_of_growth_leaves_the_newest_and_nothing_twice() -> None:
    """Three writers at once, with ends of every kind; the pool is compared with all that was written."""
    generator = rng(3)
    lanes = [0, 1, 2]
    source = Memory(*(episode(1000 * lane, 1, "open") for lane in lanes))
    pool = EpisodePool([source], capacity=120, draw=Prioritised())
    for _ in range(150):
        for lane in lanes:
            index = [i for i, e in enumerate(source.episodes) if e.obs["state"][0, 0] // 1000 % 3 == lane][-1]
            last = source.episodes[index]
            value, steps = float(last.obs["state"][0, 0]), len(last)
            if last.is_complete:
                source.episodes.append(episode(value + 3000, 1, "open"))
            elif generator.random() < 0.7:
                end = ("open", "terminated", "truncated")[int(generator.choice(3, p=[0.8, 0.1, 0.1]))]
                source.episodes[index] = episode(value, steps + int(generator.integers(1, 4)), end)
        pool.refresh()
        seen = windows(pool, n_step=1) if len(pool) else {}
        assert len(seen) == len(pool) <= 120
        usable = {
            value
            for e in source.episodes
            for value in e.obs["state"][:, 0].tolist()[: len(e) if e.is_complete else -1]
        }
        assert set(seen) <= usable
    held = {pool.locate(number)[1] for number in pool._ring.places}
    assert held >= set(range(len(source) - 3, len(source)))  # the newest are all there
    # The sums of the tree are those of its leaves, after all that coming and going.
    assert pool._priorities is not None
    assert pool._priorities._tree.total == len(pool)


def test_a_growing_episode_is_read_again_and_keeps_its_place_and_priorities() -> None:
    source = Memory(episode(1, 3), episode(11, 3, "open"))
    pool = EpisodePool([source], capacity=50, draw=Prioritised(alpha=1.0, beta=0.0))
    batch = pool.sample(200, n_step=1, gamma_step=0.9, rng=rng())
    assert batch.origin is not None
    pool.update_priorities(batch.origin, batch.obs["state"][:, 0])
    source.episodes[1] = episode(11, 5, "truncated")
    assert pool.refresh() == 8
    assert windows(pool, n_step=2)[12.0] == (12 + 13 / 2, 0.25, 14.0)
    leaves = pool._priorities.leaves(0, 10) if pool._priorities else []
    # New steps have the largest priority so far, 12; rows 3 and 9 are where the episodes ended.
    np.testing.assert_allclose(leaves, [1, 2, 3, 0, 11, 12, 12, 12, 12, 0], atol=1e-5)


def test_priorities_by_hand() -> None:
    """Priorities 1, 2, 5 with alpha 1: P is 1/8, 2/8, 5/8; weights (3 P)^-1 over the largest, 8/3."""
    pool = EpisodePool([Memory(episode(1, 3))], capacity=9, draw=Prioritised(alpha=1.0, beta=1.0))
    batch = pool.sample(64, n_step=1, gamma_step=0.9, rng=rng())
    assert batch.weight is not None
    assert batch.weight.tolist() == [1.0] * 64
    priority = torch.tensor([0.0, 1.0, 2.0, 5.0])[batch.obs["state"][:, 0].long()]
    assert batch.origin is not None
    pool.update_priorities(batch.origin, priority)
    batch = pool.sample(80, n_step=1, gamma_step=0.9, rng=rng(1))
    values, counts = batch.obs["state"][:, 0].unique(return_counts=True)
    assert values.tolist() == [1, 2, 3]
    # One draw from each 80th of the sum: exactly in proportion.
    assert counts.tolist() == [10, 20, 50]
    assert batch.weight is not None
    weights = dict(zip(batch.obs["state"][:, 0].tolist(), batch.weight.tolist(), strict=True))
    assert weights == pytest.approx({1.0: 1.0, 2.0: 1 / 2, 3.0: 1 / 5}, rel=1e-4)


def test_priorities_of_dropped_steps_are_passed_over() -> None:
    source = Memory(episode(1, 3), episode(11, 3))
    pool = EpisodePool([source], capacity=8, draw=Prioritised())
    batch = pool.sample(64, n_step=1, gamma_step=0.9, rng=rng())
    source.episodes.append(episode(21, 3))
    pool.refresh()  # the first episode made room for the third, in the same rows
    assert batch.origin is not None
    pool.update_priorities(batch.origin, torch.full((64,), 50.0))
    batch = pool.sample(2000, n_step=1, gamma_step=0.9, rng=rng())
    values, counts = batch.obs["state"][:, 0].unique(return_counts=True)
    assert values.tolist() == [11, 12, 13, 21, 22, 23]
    # 50^0.6 = 10.456 against 1, of 2000 draws: 608.5 and 58.2 each.
    np.testing.assert_allclose(counts, [608.5] * 3 + [58.2] * 3, atol=1.5)


def test_strata_have_exact_shares() -> None:
    source = Memory(
        episode(0, 40, "truncated", source="sim"),
        episode(100, 4, source="human", meta=replace(META, instruction="stop")),
    )
    mixed = episode(200, 4, "truncated")
    mixed.source[2:] = SOURCES.index("human")  # a person took over in the middle
    source.episodes.append(mixed)

    def drawn(**how: Any) -> dict[str, int]:
        pool = EpisodePool([source], capacity=99, draw=Stratified(**how))
        values = pool.sample(300, n_step=1, gamma_step=0.9, rng=rng()).obs["state"][:, 0].long().tolist()
        edges = {"a": range(40), "b": range(100, 104), "c": range(200, 202), "d": range(202, 204)}
        return {name: sum(value in there for value in values) for name, there in edges.items()}

    human = drawn(by="source")
    assert human["a"] + human["c"] == 150
    assert human["b"] + human["d"] == 150
    assert 70 <= human["b"] <= 130  # four steps against two: 100, uniformly within the stratum
    assert drawn(by="success", shares={"success": 0.9, "failure": 0.1})["b"] == 270
    assert drawn(by="instruction")["b"] == 150
    # Versions 0 to 19 in equal parts of 15; the first two are also those of the short episodes.
    assert drawn(by="policy_version")["a"] >= 270
    pool = EpisodePool([source], capacity=99, draw=Stratified(by="source", shares={"real": 1.0}))
    with pytest.raises(DatasetError, match=r"100% of each batch is to be of source 'real', and no step is"):
        pool.sample(4, n_step=1, gamma_step=0.9, rng=rng())


def test_a_chunk_of_an_episode_without_an_end_is_not_whole_at_its_end() -> None:
    """Chunks of 2 of 1, 2, 3, which end, and of 11, 12, 13, whose recording broke off.

    Nobody knows what 13 led to, so a chunk of 12 and 13 is cut short.
    """
    pool = EpisodePool([Memory(episode(1, 3), episode(11, 3, "open"))], capacity=20)
    batch = pool.sample_chunks(200, horizon=2, gamma_step=0.9, rng=rng())
    assert batch.whole is not None
    rows = zip(batch.obs["state"][:, 0].tolist(), batch.whole.tolist(), strict=True)
    assert dict(rows) == {1: True, 2: True, 3: True, 11: True, 12: False}


def test_a_mixture_of_pools_and_buffers_names_the_part() -> None:
    buffer = ReplayBuffer(20, 1, {"state": ((1,), np.float32)}, 1)
    rows = flat(episode(1, 3))
    buffer.add_episodes(rows, base_action=rows.action, final_base_action=rows.final_obs["state"])
    pool = EpisodePool([Memory(episode(11, 3))], capacity=9, draw=Prioritised(alpha=1.0, beta=1.0))
    mixture = Mixture({"online": (buffer, 0.75), "earlier": (pool, 0.25)})
    batch = mixture.sample(64, n_step=1, gamma_step=0.9, rng=rng())
    assert batch.origin is not None
    assert [mixture.names[i] for i in batch.origin.pool] == ["online"] * 48 + ["earlier"] * 16
    assert batch.weight is not None
    assert batch.weight.tolist() == [1.0] * 64
    mixture.update_priorities(batch.origin, batch.obs["state"][:, 0] - 10)
    later = mixture.sample(240, n_step=1, gamma_step=0.9, rng=rng()).obs["state"][180:, 0]
    assert later.unique(return_counts=True)[1].tolist() == [10, 20, 30]


def test_the_base_is_asked_again() -> None:
    def relabel(number: int, read: Episode) -> Any:
        return -np.arange(len(read) + 1, dtype=np.float32)[:, None] - 100 * number

    pool = EpisodePool([Memory(episode(1, 3), episode(11, 3, "open"))], capacity=20, relabel=relabel)
    batch = pool.sample(100, n_step=1, gamma_step=0.9, rng=rng())
    rows = {
        float(batch.obs["state"][i, 0]): (float(batch.base_action[i, 0]), float(batch.next_base_action[i, 0]))
        for i in range(100)
    }
    assert rows == {1: (0, -1), 2: (-1, -2), 3: (-2, -3), 11: (-100, -101), 12: (-101, -102)}


@pytest.mark.parametrize("draw", [None, Prioritised(), Stratified(by="success")])
def test_a_restored_pool_draws_the_same_although_its_sources_went_on(draw: Any) -> None:
    source = Memory(*(episode(100 * k, 6, ("truncated", "terminated")[k % 2]) for k in range(6)))
    source.episodes.append(episode(900, 5, "open"))
    pool = EpisodePool([source], capacity=45, draw=draw)
    for k in range(3):
        source.episodes.insert(6 + k, episode(1000 * (k + 1), 3))
        source.episodes[-1], source.episodes[6 + k] = source.episodes[6 + k], source.episodes[-1]
        source.episodes[6], source.episodes[-1] = source.episodes[6], source.episodes[-1]
    source.episodes[6] = next(e for e in source.episodes if e.obs["state"][0, 0] == 900)
    pool.refresh()
    if draw == Prioritised():
        batch = pool.sample(64, n_step=2, gamma_step=0.9, rng=rng(2))
        assert batch.origin is not None
        pool.update_priorities(batch.origin, batch.reward.abs())
    state = pool.state_dict()
    expected = pool.sample(128, n_step=2, gamma_step=0.9, rng=rng(5))
    source.episodes[6] = episode(900, 9, "truncated")
    source.episodes.append(episode(7000, 4))
    other = EpisodePool([source], capacity=45, draw=draw)
    other.load_state_dict(state)
    assert same(other.sample(128, n_step=2, gamma_step=0.9, rng=rng(5)), expected)
    # And both go on alike.
    assert other.refresh() == pool.refresh()
    both = [p.sample_chunks(128, horizon=3, gamma_step=0.9, rng=rng(6)) for p in (pool, other)]
    assert same(*both)


def test_pictures_pass_through_a_cache_within_its_bytes() -> None:
    parts = [with_pictures(10 * k, 6, ("terminated", "truncated", "open")[k % 3]) for k in range(9)]
    frame = 4 * 4 * 3 + 5  # a picture, and where it is
    rows = 70
    numbers = rows * (1 + 1 + 4 + 4 + 4 + 4 + 4 + 4 + 4)  # two flags, four counters, action, base, state
    budget = PoolBudget(ram_bytes=numbers + 4 * rows + 20 * frame)
    pool = EpisodePool([Memory(*parts)], capacity=rows, budget=budget)
    assert pool.metrics()["ram_bytes"] == budget.ram_bytes
    for seed in range(60):
        batch = pool.sample(8, n_step=2, gamma_step=0.9, rng=rng(seed))
        assert shown(batch.obs["cam.rgb"]).tolist() == batch.obs["state"][:, 0].long().tolist()
        assert shown(batch.next_obs["cam.rgb"]).tolist() == batch.next_obs["state"][:, 0].long().tolist()
    metrics = pool.metrics()
    # 20 of about 60 rows fit: a third of what is asked for is there.
    assert 0.2 < metrics["hit_rate"] < 0.5
    assert metrics["evictions"] == metrics["decoded"] - 20
    tier = pool._frames._tiers["cam.rgb"][0]
    assert tier._slots.shape == (20, 4, 4, 3)


def test_with_room_no_picture_is_decoded_twice(tmp_path: Any) -> None:
    parts = [with_pictures(10 * k, 6) for k in range(5)]
    source, frames = Memory(*parts), [part.obs["cam.rgb"] for part in parts]
    disk = PoolBudget(ram_bytes=3000, disk_bytes=10_000, folder=str(tmp_path))
    for budget in (PoolBudget(), disk):
        before = sum(frame.drawn for frame in frames)
        pool = EpisodePool([source], capacity=35, budget=budget)
        for seed in range(50):
            batch = pool.sample(8, n_step=1, gamma_step=0.9, rng=rng(seed))
            assert shown(batch.obs["cam.rgb"]).tolist() == batch.obs["state"][:, 0].long().tolist()
        assert sum(frame.drawn for frame in frames) - before == 30
    metrics = pool.metrics()
    assert 0 < metrics["hit_rate"] < 0.9
    assert metrics["disk_hit_rate"] > 0.1
    assert metrics["disk_evictions"] == 0
    assert not list(tmp_path.iterdir())  # scratch files have no name: a crash leaves none


def test_an_episode_in_the_place_of_another_shows_its_own_pictures() -> None:
    source = Memory(with_pictures(10, 3), with_pictures(20, 3), with_pictures(30, 2, "open"))
    pool = EpisodePool([source], capacity=12)
    for new in (None, with_pictures(30, 3, "open"), with_pictures(30, 4), with_pictures(40, 3)):
        if new is not None and new.obs["state"][0, 0] == 30:
            source.episodes[2] = new
        elif new is not None:
            source.episodes.append(new)
        pool.refresh()
        batch = pool.sample(100, n_step=2, gamma_step=0.9, rng=rng())
        for obs in (batch.obs, batch.next_obs):
            assert shown(obs["cam.rgb"]).tolist() == obs["state"][:, 0].long().tolist()


def test_numbers_beyond_the_budget_lie_on_disk(tmp_path: Any) -> None:
    source = Memory(*(episode(10 * k, 5) for k in range(5)))
    plain = EpisodePool([source], capacity=30)
    small = PoolBudget(ram_bytes=700, disk_bytes=400, folder=str(tmp_path))
    pool = EpisodePool([source], capacity=30, budget=small)
    # 30 rows of 18 bytes are in memory with one column of 4; the other two are on disk.
    assert (pool.metrics()["ram_bytes"], pool.metrics()["disk_bytes"]) == (30 * 22, 30 * 8)
    assert isinstance(pool._ring.columns["obs.state"], np.memmap)
    one, two = (p.sample(50, n_step=3, gamma_step=0.9, rng=rng()) for p in (plain, pool))
    assert same(one, two)


def mistakes() -> list[tuple[Any, type[Exception], str]]:
    source = Memory(episode(1, 3))
    other = Memory(episode(1, 3, meta=replace(META, action_names=("b",))))
    wide = Memory(with_pictures(1, 3))
    pool = EpisodePool([source], capacity=9)
    unknown: dict[str, Any] = {"by": "joy"}
    return [
        (
            lambda: EpisodePool([source, other], capacity=9),
            DatasetError,
            r"source 1 does not fit source 0: its joints \(action\) differ: it has b and lacks a\. Make",
        ),
        (
            lambda: EpisodePool([wide, source], capacity=9),
            DatasetError,
            "source 1 does not fit source 0: observation 'cam.rgb' is missing, not uint8",
        ),
        (
            lambda: EpisodePool([source], capacity=9, keys=["goal"]),
            DatasetError,
            r"no observation 'goal' is recorded, there are \['state'\]",
        ),
        (
            lambda: EpisodePool([source], capacity=3),
            DatasetError,
            "an episode takes 4 rows, the pool has 3. Raise the capacity",
        ),
        (
            lambda: EpisodePool([source], capacity=100, budget=PoolBudget(ram_bytes=2000)),
            DatasetError,
            "needs 400 bytes; left are 200 bytes of memory and 0 bytes of disk. Lower the capacity",
        ),
        (
            lambda: EpisodePool([Memory(episode(1, 1, "open"))], capacity=9).sample(
                4, n_step=1, gamma_step=0.9, rng=rng()
            ),
            DatasetError,
            "nothing to sample from. Give it a source with steps",
        ),
        (lambda: PoolBudget(disk_bytes=1, folder="/nowhere"), ConfigError, "no folder '/nowhere'. Make it"),
        (lambda: Prioritised(alpha=2.0), ConfigError, r"prioritised\.alpha: got 2\.0, allowed: 0 to 1"),
        (lambda: Stratified(**unknown), ConfigError, "stratified.by: got 'joy', allowed: source, success"),
        (
            lambda: Stratified(by="source", shares={"sim": 0.5}),
            ConfigError,
            r"shares: got \{'sim': 0.5\}, allowed: none below 0, summing to 1",
        ),
        (
            lambda: EpisodePool([source], capacity=10).load_state_dict(pool.state_dict()),
            CheckpointError,
            "the checkpoint has 9 rows, 1 sources and priorities: False; this run has 10 rows",
        ),
        (
            lambda: EpisodePool([Memory(episode(1, 2))], capacity=9).load_state_dict(pool.state_dict()),
            CheckpointError,
            "episode 0 of source 0 had 3 steps when the checkpoint was made, and has 2 now",
        ),
    ]


@pytest.mark.parametrize(("call", "error", "message"), mistakes())
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_priorities_must_be_numbers() -> None:
    pool = EpisodePool([Memory(episode(1, 3))], capacity=9, draw=Prioritised())
    batch = pool.sample(4, n_step=1, gamma_step=0.9, rng=rng())
    assert batch.origin is not None
    with pytest.raises(DatasetError, match="got priority nan, allowed: finite, 0 or more"):
        pool.update_priorities(batch.origin, torch.tensor([1.0, float("nan"), 1.0, 1.0]))
    with pytest.raises(ValueError, match="made without priorities"):
        EpisodePool([Memory(episode(1, 3))], capacity=9).update_priorities(batch.origin, torch.ones(4))
