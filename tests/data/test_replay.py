"""Replay: windows hold the numbers they should, and never cross an end, a lane or the write position."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.data.demos import Episodes, EpisodesMeta
from robot_rl.data.parts import OfSource
from robot_rl.data.replay import SOURCES, Mixture, ReplayBuffer, StepBatch, TransitionBatch

SHAPES: dict[str, Any] = {"state": ((1,), np.float32)}


def step(value: float, *, terminated: bool = False, truncated: bool = False, **changes: Any) -> StepBatch:
    """One env: obs [v], base action [10 v], action [100 v], reward v, leading to obs [v + 1]."""
    one = np.array([[value]], np.float32)
    fields: dict[str, Any] = {
        "obs": {"state": one},
        "base_action": 10 * one,
        "action": 100 * one,
        "reward": one[0],
        "terminated": np.array([terminated]),
        "truncated": np.array([truncated]),
        "next_obs": {"state": one + 1},
        "next_base_action": 10 * (one + 1),
    }
    return StepBatch(**(fields | changes))


def windows(
    buffer: ReplayBuffer | Mixture | OfSource, *, n_step: int = 3, gamma: float = 0.5
) -> dict[float, tuple[float, ...]]:
    """Samples until every window was met: first obs -> reward, bootstrap, last obs, last base action."""
    batch = buffer.sample(2000, n_step=n_step, gamma_step=gamma, rng=np.random.default_rng(0))
    columns = (batch.reward, batch.bootstrap, batch.next_obs["state"][:, 0], batch.next_base_action[:, 0])
    rows = zip(batch.obs["state"][:, 0].tolist(), *(column.tolist() for column in columns), strict=True)
    return {row[0]: row[1:] for row in rows}


def test_windows_by_hand() -> None:
    buffer = ReplayBuffer(20, 1, SHAPES, 1)
    for value in (1, 2, 3):
        buffer.add(step(value, terminated=value == 3))
    for value in (11, 12):
        buffer.add(step(value, truncated=value == 12))
    buffer.add(step(21))
    assert len(buffer) == 6
    assert windows(buffer) == {
        # 1 + 2/2 + 3/4 = 2.75; the task ended: no bootstrap.
        1.0: (2.75, 0.0, 4.0, 40.0),
        2.0: (3.5, 0.0, 4.0, 40.0),
        3.0: (3.0, 0.0, 4.0, 40.0),
        # The clock ended it after two steps: 11 + 12/2 = 17, bootstrap 1/4 from the final observation.
        11.0: (17.0, 0.25, 13.0, 130.0),
        12.0: (12.0, 0.5, 13.0, 130.0),
        # The newest step: one step, bootstrap 1/2 from what it led to.
        21.0: (21.0, 0.5, 22.0, 220.0),
    }


def test_chunks_by_hand() -> None:
    buffer = ReplayBuffer(20, 1, SHAPES, 1, latent_dim=2)
    for value in (1, 2, 3):  # chunks of two begin at 1 and 3
        noise = np.full((1, 2), float(value))
        buffer.add(step(value, truncated=value == 3, latent=noise, decides=np.array([value != 2])))
    rng = np.random.default_rng(0)
    batch = buffer.sample_chunks(50, horizon=2, gamma_step=0.5, rng=rng, rows=buffer.decisions())
    assert batch.latent is not None
    columns = (
        batch.action[..., 0],
        batch.valid,
        batch.reward,
        batch.bootstrap,
        batch.next_obs["state"][:, 0],
    )
    rows = zip(batch.obs["state"][:, 0].tolist(), *(column.tolist() for column in columns), strict=True)
    assert {row[0]: row[1:] for row in rows} == {
        1.0: ([100.0, 200.0], [True, True], 2.0, 0.25, 3.0),  # 1 + 2 / 2
        3.0: ([300.0, 300.0], [True, False], 3.0, 0.5, 4.0),  # the clock ended it: the last action repeats
    }
    assert (batch.latent == batch.obs["state"]).all()


def test_the_ring_forgets_the_oldest_and_its_windows_stop_at_the_write_position() -> None:
    buffer = ReplayBuffer(4, 1, SHAPES, 1)
    for value in range(1, 8):
        buffer.add(step(value))
    assert len(buffer) == 4
    # Steps 4 to 7 remain: 4 + 5/2 + 6/4 = 8, 5 + 6/2 + 7/4 = 9.75, 6 + 7/2 = 9.5, 7.
    assert windows(buffer) == {
        4.0: (8.0, 0.125, 7.0, 70.0),
        5.0: (9.75, 0.125, 8.0, 80.0),
        6.0: (9.5, 0.25, 8.0, 80.0),
        7.0: (7.0, 0.5, 8.0, 80.0),
    }


def test_a_final_observation_takes_one_frame() -> None:
    buffer = ReplayBuffer(4, 1, SHAPES, 1)
    for value in range(1, 8):
        buffer.add(step(value, truncated=value == 5))
    # Four frames: 5, the final observation of its episode, 6, 7.
    assert windows(buffer, n_step=1) == {
        5.0: (5.0, 0.5, 6.0, 60.0),
        6.0: (6.0, 0.5, 7.0, 70.0),
        7.0: (7.0, 0.5, 8.0, 80.0),
    }
    assert len(buffer) == 3


def counting(buffer: ReplayBuffer, steps: int, num_envs: int, rng: np.random.Generator) -> None:
    """Obs [env, t]: t is the env's own clock, over all its episodes; reward t."""
    clock = np.zeros(num_envs)
    for _ in range(steps):
        obs = np.stack([np.arange(num_envs), clock], axis=1).astype(np.float32)
        terminated, truncated = rng.random(num_envs) < 0.2, rng.random(num_envs) < 0.1
        buffer.add(
            StepBatch(
                obs={"state": obs},
                base_action=obs,
                action=obs,
                reward=clock,
                terminated=terminated,
                truncated=truncated & ~terminated,
                next_obs={"state": obs + np.array([0, 0.5])},  # a final observation is no later step's first
                next_base_action=obs,
            )
        )
        clock += 1


def tensors(batch: TransitionBatch) -> dict[str, torch.Tensor]:
    """Returns every tensor of a batch by name."""
    assert batch.origin is not None
    nested = {"obs": batch.obs, "next_obs": batch.next_obs, "origin": vars(batch.origin)}
    flat = {f"{name}.{key}": value for name, part in nested.items() for key, value in part.items()}
    return flat | {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


def test_lanes_stay_apart_and_steps_are_drawn_uniformly() -> None:
    rng = np.random.default_rng(1)
    buffer = ReplayBuffer(120, 4, {"state": ((2,), np.float32)}, 2)
    counting(buffer, 100, 4, rng)
    batch = buffer.sample(60_000, n_step=5, gamma_step=1.0, rng=rng)
    first, after = batch.obs["state"].numpy(), batch.next_obs["state"].numpy()
    np.testing.assert_array_equal(first[:, 0], after[:, 0])
    # Undiscounted, reward is the sum of the clocks t, t + 1, ... of the m steps of the window.
    steps = np.ceil(after[:, 1] - first[:, 1])
    np.testing.assert_allclose(batch.reward, steps * first[:, 1] + steps * (steps - 1) / 2, rtol=1e-5)
    assert steps.min() == 1
    assert steps.max() == 5
    counts = np.unique(first, axis=0, return_counts=True)[1]
    assert len(counts) == len(buffer)
    # Each is drawn 60,000 / len times, within six times the square root of that.
    expected = 60_000 / len(buffer)
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_some_lanes_only() -> None:
    buffer = ReplayBuffer(40, 3, SHAPES, 1)
    for value in (1, 2):
        buffer.add(step(value, lanes=np.array([2])))
    buffer.add(step(7, lanes=np.array([0])))
    assert windows(buffer)[1.0] == (2.0, 0.25, 3.0, 30.0)
    assert windows(buffer)[7.0] == (7.0, 0.5, 8.0, 80.0)


def test_lane_0_of_two_actors_is_two_lanes() -> None:
    """Steps 1, 2 of the first and 50, 51 of the second take turns; n_step 2, gamma 1/2."""
    buffer = ReplayBuffer(40, 1, SHAPES, 1, actors=2)
    for value in (1, 50, 2, 51):
        buffer.add(step(value, actor=int(value >= 50), lanes=np.array([0])))
    assert windows(buffer, n_step=2) == {
        1.0: (2.0, 0.25, 3.0, 30.0),  # 1 + 2/2
        2.0: (2.0, 0.5, 3.0, 30.0),
        50.0: (75.5, 0.25, 52.0, 520.0),  # 50 + 51/2
        51.0: (51.0, 0.5, 52.0, 520.0),
    }


def test_an_episode_in_the_lane_of_an_unfinished_one_is_not_its_end() -> None:
    buffer, rows = ReplayBuffer(40, 1, SHAPES, 1), episodes()
    buffer.add(step(70))
    buffer.add_episodes(
        rows, base_action=10 * rows.obs["state"], final_base_action=10 * rows.final_obs["state"]
    )
    assert windows(buffer)[70.0] == (70.0, 0.5, 71.0, 710.0)


def test_chunks_say_whether_the_data_cuts_them_short() -> None:
    """Chunks of 3: an end within makes one whole (1, 2, 3); the newest step, 13, cuts those at 12 and 13."""
    buffer = ReplayBuffer(20, 1, SHAPES, 1)
    for value in (1, 2, 3, 11, 12, 13):
        buffer.add(step(value, terminated=value == 3))
    how: dict[str, Any] = {"horizon": 3, "gamma_step": 0.5, "rng": np.random.default_rng(0)}
    batch = buffer.sample_chunks(200, **how)
    assert batch.whole is not None
    rows = zip(batch.obs["state"][:, 0].tolist(), batch.whole.tolist(), strict=True)
    assert dict(rows) == {1: True, 2: True, 3: True, 11: True, 12: False, 13: False}
    whole = batch.whole_rows()
    assert set(whole.obs["state"][:, 0].tolist()) == {1, 2, 3, 11}
    assert len(whole.action) == len(whole) == int(batch.whole.sum())
    # 11 + 12/2 + 13/4 = 20.25
    assert set(whole.reward.tolist()) == {2.75, 3.5, 3.0, 20.25}
    demo = ReplayBuffer(20, 1, SHAPES, 1)
    demo.add(step(50, terminated=True))
    mixed = Mixture({"demo": (demo, 0.5), "online": (buffer, 0.5)}).sample_chunks(100, **how)
    assert mixed.whole is not None
    assert mixed.whole[:50].all()
    assert not mixed.whole[50:].all()


def test_sources_are_kept() -> None:
    buffer = ReplayBuffer(10, 1, SHAPES, 1)
    buffer.add(step(1, source="human"))
    batch = buffer.sample(2, n_step=1, gamma_step=0.9, rng=np.random.default_rng(0))
    assert [SOURCES[i] for i in batch.source] == ["human", "human"]


def episodes() -> Episodes:
    """Rows 1, 2 (terminated), then 11, 12, 13 (truncated); final observations 3 and 14."""
    values = np.array([1, 2, 11, 12, 13], np.float32)
    return Episodes(
        meta=EpisodesMeta(
            task="t", robot="r", control_hz=10.0, instruction="i", state_names=("s",), action_names=("a",)
        ),
        obs={"state": values[:, None]},
        action=100 * values[:, None],
        reward=values,
        terminated=np.array([0, 1, 0, 0, 0], bool),
        truncated=np.array([0, 0, 0, 0, 1], bool),
        success=np.array([0, 1, 0, 0, 0], bool),
        episode_index=np.array([0, 0, 1, 1, 1]),
        final_obs={"state": np.array([[3], [14]], np.float32)},
    )


def test_episodes_become_windows() -> None:
    rows = episodes()
    buffer = ReplayBuffer.from_episodes(
        rows, base_action=10 * rows.obs["state"], final_base_action=10 * rows.final_obs["state"]
    )
    assert len(buffer) == 5
    assert windows(buffer) == {
        1.0: (2.0, 0.0, 3.0, 30.0),
        2.0: (2.0, 0.0, 3.0, 30.0),
        # 11 + 12/2 + 13/4 = 20.25; the clock ended it: bootstrap 1/8 from the final observation 14.
        11.0: (20.25, 0.125, 14.0, 140.0),
        12.0: (18.5, 0.25, 14.0, 140.0),
        13.0: (13.0, 0.5, 14.0, 140.0),
    }


def test_an_episode_that_no_lane_can_hold() -> None:
    rows = episodes()
    buffer = ReplayBuffer(4, 2, SHAPES, 1)
    with pytest.raises(DatasetError, match=r"episode 0 has 2 steps, a lane holds 1\. Raise the capacity"):
        buffer.add_episodes(rows, base_action=rows.action, final_base_action=rows.final_obs["state"])


def test_a_restored_buffer_is_the_same() -> None:
    rng = np.random.default_rng(2)
    buffer, other = (ReplayBuffer(60, 3, {"state": ((2,), np.float32)}, 2) for _ in range(2))
    counting(buffer, 30, 3, rng)
    state = buffer.state_dict()
    counting(other, 7, 3, rng)
    other.load_state_dict(state)
    assert len(other) == len(buffer)
    for continued in (buffer, other):
        counting(continued, 5, 3, np.random.default_rng(3))
    one, two = (b.sample(64, n_step=3, gamma_step=0.9, rng=np.random.default_rng(4)) for b in (buffer, other))
    for name, value in tensors(one).items():
        assert value.equal(tensors(two)[name]), name


def test_a_state_of_another_buffer_is_refused() -> None:
    state = ReplayBuffer(60, 3, SHAPES, 1).state_dict()
    with pytest.raises(
        CheckpointError, match=r"3 lanes of 21 frames, this run has 2 of 31\. Resume with the same"
    ):
        ReplayBuffer(60, 2, SHAPES, 1).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"holds observations \['state'\], this run has \['goal'\]"):
        ReplayBuffer(60, 3, {"goal": ((1,), np.float32)}, 1).load_state_dict(state)


def test_a_mixture_has_exact_counts() -> None:
    demo, online = (ReplayBuffer(20, 1, SHAPES, 1) for _ in range(2))
    demo.add(step(1, source="demo"))
    online.add(step(2))
    mixture = Mixture({"demo": (demo, 0.25), "online": (online, 0.75)})
    batch: TransitionBatch = mixture.sample(256, n_step=1, gamma_step=0.9, rng=np.random.default_rng(0))
    assert len(batch) == 256
    assert batch.source.tolist() == [0] * 64 + [1] * 192
    assert Mixture({"a": (demo, 1 / 3), "b": (demo, 1 / 3), "c": (demo, 1 / 3)}).counts(100) == {
        "a": 33,
        "b": 34,
        "c": 33,
    }


def test_parts_without_a_share_divide_the_rest_by_their_steps() -> None:
    demo, online, person = (ReplayBuffer(20, 1, SHAPES, 1) for _ in range(3))
    mixture = Mixture({"person": (person, 0.25), "demo": (demo, None), "online": (online, None)})
    person.add(step(1, source="human"))
    for _ in range(3):
        demo.add(step(1))
    assert mixture.counts(16) == {"person": 4, "demo": 12, "online": 0}
    online.add(step(2))
    # Three quarters of 16 rows, of which 1 of 4 steps is online.
    assert mixture.counts(16) == {"person": 4, "demo": 9, "online": 3}


def test_what_is_empty_leaves_its_share_to_the_others() -> None:
    arm, bench, demo = (ReplayBuffer(20, 1, SHAPES, 1) for _ in range(3))
    parts = {
        "human": (OfSource(arm, "human"), 0.25),
        "arm": (arm, 0.25),
        "bench": (bench, 0.25),
        "demo": (demo, 0.25),
    }
    mixture = Mixture({**parts})
    bench.add(step(1))
    demo.add(step(2, source="demo"))
    assert mixture.counts(16) == {"human": 0, "arm": 0, "bench": 8, "demo": 8}
    arm.add(step(3))  # nobody took over yet: all steps of the arm stand in
    assert mixture.counts(16) == {"human": 4, "arm": 4, "bench": 4, "demo": 4}
    mixture.sample(16, n_step=1, gamma_step=0.9, rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ReplayBuffer(3, 2, SHAPES, 1),
            ValueError,
            "got capacity 3 for 2 envs, allowed: at least 2 steps",
        ),
        (
            lambda: ReplayBuffer(9, 1, SHAPES, 1).sample(
                4, n_step=1, gamma_step=0.9, rng=np.random.default_rng(0)
            ),
            DatasetError,
            "nothing to sample from. Add steps",
        ),
        (
            lambda: ReplayBuffer(9, 1, SHAPES, 2).add(step(1)),
            ValueError,
            r"actions of shape \(1, 1\), allowed \(at most 1 envs, 2 elements\)",
        ),
        (
            lambda: ReplayBuffer(9, 1, SHAPES, 1).add(step(1, source="humna")),
            ValueError,
            "Did you mean 'human'",
        ),
        (
            lambda: ReplayBuffer(9, 1, SHAPES, 1).add(step(1, lanes=np.array([1]))),
            ValueError,
            r"got lanes \[1\], allowed 0 to 0",
        ),
        (
            lambda: ReplayBuffer(9, 1, SHAPES, 1).add(step(1, actor=1)),
            ValueError,
            "got a step of actor 1, allowed 0 to 0",
        ),
        (
            lambda: ReplayBuffer(9, 1, SHAPES, 1).add(step(1, obs={})),
            ValueError,
            r"the step lacks observation 'state', it has \[\]",
        ),
        (
            lambda: Mixture({"a": (ReplayBuffer(9, 1, SHAPES, 1), 0.4)}),
            ValueError,
            r"got shares \{'a': 0.4\}, allowed: none below 0, summing to 1",
        ),
        (
            lambda: Mixture(
                {"a": (ReplayBuffer(9, 1, SHAPES, 1), 1.0), "b": (ReplayBuffer(9, 1, SHAPES, 1), None)}
            ),
            ValueError,
            "allowed: none below 0, summing to less than 1 together with None",
        ),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
def test_sampling_is_fast() -> None:
    buffer = ReplayBuffer(20_000, 16, {"state": ((40,), np.float32)}, 7)
    rng = np.random.default_rng(0)
    obs = np.zeros((16, 40), np.float32)
    for _ in range(1200):
        ended = rng.random(16) < 0.01
        buffer.add(
            StepBatch(
                obs={"state": obs},
                base_action=obs[:, :7],
                action=obs[:, :7],
                reward=obs[:, 0],
                terminated=ended,
                truncated=ended & False,
                next_obs={"state": obs},
                next_base_action=obs[:, :7],
            )
        )
    began = time.process_time()
    for _ in range(500):
        buffer.sample(256, n_step=3, gamma_step=0.99, rng=rng)
    assert 500 * 256 / (time.process_time() - began) > 300_000


def test_an_episode_that_was_cut_short_does_not_lead_into_the_next() -> None:
    # An arm whose process died: nobody said that the episode of 1 and 2 ended, and the next begins at 11.
    buffer = ReplayBuffer(20, 1, SHAPES, 1)
    buffer.add(step(1, begins=True))
    buffer.add(step(2))
    buffer.add(step(11, begins=True))
    assert windows(buffer) == {
        # 1 + 2/2 = 2; the value goes on from what step 2 led to: 1/4 of the value at 3.
        1.0: (2.0, 0.25, 3.0, 30.0),
        2.0: (2.0, 0.5, 3.0, 30.0),
        11.0: (11.0, 0.5, 12.0, 120.0),
    }
    buffer.add(step(12, truncated=True))
    buffer.add(step(21, begins=True))  # after an end there is nothing to cut
    assert windows(buffer)[12.0] == (12.0, 0.5, 13.0, 130.0)
    assert len(buffer) == 5


def test_the_steps_of_a_person_are_drawn_with_all_that_follows_them() -> None:
    buffer = ReplayBuffer(8, 1, SHAPES, 1)
    part = OfSource(buffer, "human", at_least=2)
    for value in range(1, 12):  # the ring of 9 frames forgets the first two
        buffer.add(step(value, source="human" if value in (2, 5, 9) else "sim"))
        if value == 4:
            assert set(windows(part)) == {1.0, 2.0, 3.0, 4.0}  # one human step: all stand in
    assert len(part) == 2
    assert windows(part, n_step=2) == {
        5.0: (5 + 6 / 2, 0.25, 7.0, 70.0),
        9.0: (9 + 10 / 2, 0.25, 11.0, 110.0),
    }
    chunks = part.sample_chunks(50, horizon=2, gamma_step=0.5, rng=np.random.default_rng(0), prefixes=(1,))
    assert chunks.action[..., 0].unique(dim=0).tolist() == [[500, 600], [900, 1000]]
    assert chunks.prefix is not None
    assert set(chunks.prefix.reward[:, 0].tolist()) == {5.0, 9.0}


def test_what_is_kept_of_observations_is_made_once() -> None:
    """Two episodes of two steps: six observations, of which four begin a step."""
    asked: list[float] = []

    def keep(obs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        asked.extend(obs["state"][:, 0].tolist())
        return {"features": 10 * obs["state"]}

    plain = ReplayBuffer(40, 1, SHAPES, 1)
    kept = ReplayBuffer(40, 1, {"features": SHAPES["state"]}, 1, keep=keep)
    assert plain.keeps_all
    assert not kept.keeps_all
    for value in (1, 2, 5, 6):
        for buffer in (plain, kept):
            buffer.add(step(value, truncated=value in (2, 6)))
    assert asked == [1, 2, 3, 5, 6, 7]
    how: dict[str, Any] = {"n_step": 2, "gamma_step": 0.5}
    one, other = (buffer.sample(50, **how, rng=np.random.default_rng(3)) for buffer in (plain, kept))
    torch.testing.assert_close(other.obs["features"], 10 * one.obs["state"])
    torch.testing.assert_close(other.next_obs["features"], 10 * one.next_obs["state"])
    torch.testing.assert_close(other.reward, one.reward)
