"""What a run keeps and what it takes from earlier ones: each step once, whatever happened in between."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from robot_rl.core.errors import DatasetError
from robot_rl.core.policy import ChunkSample, Policy
from robot_rl.data.demos import load_episodes
from robot_rl.data.episode import SOURCES, Feature, Starts
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.edit import merge
from robot_rl.data.lerobot.writer import record_checksums
from robot_rl.data.reading import ReadingConfig
from robot_rl.data.store.reader import open_source
from robot_rl.data.store.seal import seal
from robot_rl.data.store.writer import StoreWriter
from robot_rl.data.transitions import StepBatch
from robot_rl.train.earlier import check_earlier, open_earlier
from robot_rl.train.recorded import ReplayConfig
from robot_rl.train.recording import Recorder, pool_of
from tests.plain import Plain

META = EpisodesMeta(
    task="count",
    robot="point",
    control_hz=50.0,
    instruction="go",
    state_names=("x",),
    action_names=("a", "b"),
)
FEATURES = {"state": Feature("float32", (1,)), "cam.rgb": Feature("uint8", (8, 8, 3))}
LANES = 3


def turn(number: int, keys: Any = FEATURES) -> StepBatch:
    """Control step `number` of three envs; env k ends every 4 + k steps, in turn by task and clock."""
    lanes = np.arange(LANES)
    value = (100 * lanes + number).astype(np.float32)
    ends = (number + 1) % (4 + lanes) == 0
    by_task = (number // (4 + lanes)) % 2 == 0

    def seen(values: Any) -> dict[str, Any]:
        picture = np.broadcast_to(values[:, None, None, None] % 200, (LANES, 8, 8, 3)).astype(np.uint8)
        return {key: {"state": values[:, None], "cam.rgb": picture}[key] for key in keys}

    return StepBatch(
        obs=seen(value),
        action=np.stack([value, -value], axis=1),
        base_action=np.stack([value, value], axis=1) / 2,
        reward=value,
        terminated=ends & by_task,
        truncated=ends & ~by_task,
        next_obs=seen(value + 1),
        next_base_action=np.zeros((LANES, 2), np.float32),
        success=ends & by_task,
        policy_version=number // 3,
    )


def content(folder: Path) -> dict[tuple[float, int], tuple[Any, ...]]:
    """Returns all steps of a store, in the order of their episodes: (state, stamp) -> the rest."""
    source, found = open_source(folder), {}
    for index in range(len(source)):
        episode = source.read(index)
        for step in range(len(episode)):
            is_last = step == len(episode) - 1
            key = (float(episode.obs["state"][step, 0]), int(episode.stamp_ns[step]))
            assert key not in found, "a step is there twice"
            found[key] = (
                index,
                step,
                *(getattr(episode, name)[step].tolist() for name in ("action", "base_action", "reward")),
                *(bool(getattr(episode, name)[step]) for name in ("terminated", "truncated", "success")),
                SOURCES[episode.source[step]],
                int(episode.policy_version[step]),
                float(episode.final_obs["state"][0]) if is_last and episode.final_obs else None,
                int(np.asarray(episode.obs["cam.rgb"][step])[0, 0, 0]) if "cam.rgb" in episode.obs else None,
            )
    return found


def record(folder: Path, turns: int) -> dict[tuple[float, int], tuple[Any, ...]]:
    with Recorder(folder, META, FEATURES) as recorder:
        for number in range(turns):
            recorder.add(turn(number))
    return content(folder)


def test_every_control_step_is_kept_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    found = record(tmp_path / "store", 9)
    assert len(found) == 9 * LANES
    # Env 0 ends at its turns 3 and 7; at 50 Hz turn 3 begins at 60 ms. It is the first episode's last step.
    assert found[3.0, 60_000_000][:10] == (0, 3, [3, -3], [1.5, 1.5], 3.0, True, False, True, "sim", 1)
    assert found[3.0, 60_000_000][10] == 4.0
    assert found[7.0, 140_000_000][5:8] == (False, True, False)
    assert found[205.0, 100_000_000][10] == 206.0  # env 2 ends every sixth turn
    assert found[208.0, 160_000_000][10] is None  # nobody knows yet where that led to


@pytest.mark.parametrize(("marked", "killed"), [(0, 5), (6, 6), (6, 13), (11, 12)])
def test_a_resumed_recorder_ends_as_the_unbroken_one(tmp_path: Path, marked: int, killed: int) -> None:
    """Steps recorded after the checkpoint are made again, and are in the store once."""
    expected = record(tmp_path / "unbroken", 20)
    with Recorder(tmp_path / "store", META, FEATURES) as recorder:
        state = recorder.state_dict()
        for number in range(killed):
            if number == marked:
                state = recorder.state_dict()
            recorder.add(turn(number))
        if marked == killed:
            state = recorder.state_dict()
    with Recorder(tmp_path / "store", META, FEATURES) as recorder:
        recorder.load_state_dict(state)
        for number in range(marked, 20):
            recorder.add(turn(number))
            if number == 15:
                recorder.state_dict()
    assert content(tmp_path / "store") == expected


def test_a_store_that_was_sealed_after_the_checkpoint_is_not_recorded_twice(tmp_path: Path) -> None:
    with Recorder(tmp_path / "store", META, {"state": FEATURES["state"]}) as recorder:
        state = recorder.state_dict()
        for number in range(5):
            recorder.add(turn(number, ["state"]))
        recorder._writer.seal()
    with (
        Recorder(tmp_path / "store", META, {"state": FEATURES["state"]}) as recorder,
        pytest.raises(DatasetError, match="episode 0 was sealed after the checkpoint that is resumed"),
    ):
        recorder.load_state_dict(state)


class Planner(Plain):
    """Proposes, as action h of a chunk, (state, h)."""

    horizon, action_dim = 4, 2

    def sample(self, obs: dict[str, Tensor], **_: Any) -> ChunkSample:
        state = obs["state"].expand(-1, 4)
        return ChunkSample(torch.stack([state, torch.arange(4.0).expand_as(state)], dim=-1))


def test_earlier_experience_is_relabelled_with_the_present_base(tmp_path: Path) -> None:
    record(tmp_path / "store", 7)
    features = {"state": FEATURES["state"]}
    sources = open_earlier(ReplayConfig(reuse=(str(tmp_path / "store"),)), META, features)
    pool = pool_of(sources, features, cast(Policy, Planner()), n_exec=3, seed=0, device="cpu")
    # Env 0: 4 steps and 3 of which the last leads nowhere yet; env 1: 5 and 1 of 2; env 2: 6 and 0 of 1.
    assert len(pool) == 4 + 2 + 5 + 1 + 6 + 0
    batch = pool.sample(300, n_step=1, gamma_step=0.9, rng=np.random.default_rng(0))
    origin = batch.origin
    assert origin is not None
    for row in range(300):
        step, state = int(origin.step[row]), float(batch.obs["state"][row, 0])
        first = state - step
        assert batch.base_action[row].tolist() == [first + 3 * (step // 3), step % 3]
        assert batch.next_base_action[row].tolist() == [first + 3 * ((step + 1) // 3), (step + 1) % 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"action_names": ("a", "grip")},
            r"replay.reuse: .*store does not fit this run: its joints \(action\) differ: it has b and lacks "
            r"grip\. Leave it out, or give this run the env settings it was recorded with",
        ),
        ({"action_names": ("b", "a")}, r"its joints \(action\) are in another order: a, b"),
        ({"state_names": ("x", "y")}, "its state elements differ: it lacks y"),
        ({"control_hz": 20.0}, "it was recorded at 50 Hz, not 20 Hz"),
        ({"task": "reach"}, "it was recorded with task 'count', not 'reach'"),
        ({"robot": "panda"}, "it was recorded with robot 'point', not 'panda'"),
    ],
)
def test_experience_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    record(tmp_path / "store", 2)
    with pytest.raises(DatasetError, match=message):
        open_earlier(ReplayConfig(reuse=(str(tmp_path / "store"),)), replace(META, **changes), FEATURES)


def test_an_observation_that_was_not_recorded_and_an_empty_store_are_refused(tmp_path: Path) -> None:
    record(tmp_path / "store", 2)
    wider = {**FEATURES, "top.rgb": Feature("uint8", (8, 8, 3))}
    with pytest.raises(DatasetError, match=r"its observation 'top.rgb' is missing, not uint8 \(8, 8, 3\)"):
        open_earlier(ReplayConfig(reuse=(str(tmp_path / "store"),)), META, wider)
    StoreWriter(tmp_path / "empty", META, FEATURES).close()
    with pytest.raises(DatasetError, match="empty does not fit this run: it holds no steps"):
        open_earlier(ReplayConfig(reuse=(str(tmp_path / "empty"),)), META, FEATURES)
    with pytest.raises(DatasetError):
        open_earlier(ReplayConfig(reuse=(str(tmp_path),)), META, FEATURES)


def test_what_the_policy_wanted_is_kept_beside_what_was_sent(tmp_path: Path) -> None:
    one = {"state": Feature("float32", (1,))}
    with Recorder(tmp_path, META, one, person=True) as recorder:
        steps = turn(0, one)
        recorder.add(replace(steps, policy_action=steps.action + 5.0, source="human", stamp_ns=77))
    episode = open_source(tmp_path).read(1)
    np.testing.assert_array_equal(episode.obs["policy_action"], episode.action + 5.0)
    assert SOURCES[episode.source[0]] == "human"
    assert episode.stamp_ns.tolist() == [77]


def test_what_safety_let_through_is_kept_beside_what_was_commanded(tmp_path: Path) -> None:
    one = {"state": Feature("float32", (1,))}
    target_rad = np.array([[0.1, 0.2, 0.3], [1.1, 1.2, 1.3], [2.1, 2.2, 2.3]])
    with Recorder(tmp_path, META, one, joints=3) as recorder:
        recorder.add(replace(turn(0, one), executed_target_rad=target_rad))
        recorder.add(replace(turn(1, one), executed_target_rad=target_rad + 0.5))
    first = open_source(tmp_path).read(0)
    wanted = np.stack([target_rad[0], target_rad[0] + 0.5]).astype(np.float32)
    np.testing.assert_array_equal(first.obs["executed_target_rad"], wanted)
    assert first.action.shape == (2, 2)


def test_the_row_of_a_bank_is_kept_with_its_episode(tmp_path: Path) -> None:
    one = {"state": Feature("float32", (1,))}
    starts = Starts(classes=("own", "reaching", "near_object", "grasped", "near_goal"), bank=None)
    with Recorder(tmp_path, META, one, starts=starts) as recorder:
        for number in range(2):
            recorder.add(replace(turn(number, one), reset_row=np.array([[1, 5], [0, -1], [4, 1999]])))
    found = [open_source(tmp_path).read(lane).obs["reset_row"].tolist() for lane in range(LANES)]
    assert found == [[[1, 5]] * 2, [[0, -1]] * 2, [[4, 1999]] * 2]


def test_the_class_of_a_start_is_read_from_a_sealed_recording(tmp_path: Path) -> None:
    one = {"state": Feature("float32", (1,))}
    starts = Starts(classes=("own", "grasped"), bank=None)
    with Recorder(tmp_path, META, one, starts=starts) as recorder:
        for number in range(8):  # lane 0 ends every 4 steps
            recorder.add(replace(turn(number, one), reset_row=np.array([[number // 4, 5], [0, -1], [1, 7]])))
    seal(tmp_path)
    source = open_source(tmp_path)
    whole = [number for number in range(len(source)) if source.read(number).is_complete]
    found = load_episodes(tmp_path, read=ReadingConfig(episodes=",".join(map(str, whole))))
    assert found.start is not None
    assert found.start.tolist() == [starts.of(source.read(n).obs["reset_row"])[0] for n in whole]
    assert set(found.start) == {"own", "grasped"}
    assert "reset_row" not in found.obs


def test_words_and_new_beginnings_cut_episodes_short(tmp_path: Path) -> None:
    one = {"state": Feature("float32", (1,))}

    def step(number: int, **changes: Any) -> StepBatch:
        whole = turn(number, one)
        rows = {name: value[:1] for name, value in vars(whole).items() if isinstance(value, np.ndarray)}
        seen = {"obs": {"state": whole.obs["state"][:1]}, "next_obs": {"state": whole.next_obs["state"][:1]}}
        return replace(whole, **(rows | seen | changes))  # lane 0 ends every 4 steps

    with Recorder(tmp_path, META, one) as recorder:
        recorder.add(step(0))
        recorder.add(step(1, instruction="go"))  # what it does anyway
        recorder.add(step(2, instruction="go slowly"))
        recorder.add(step(3, instruction="go slowly"))  # ends
        recorder.add(step(4, instruction="go slowly"))
        state = recorder.state_dict()
        recorder.add(step(5, instruction="go slowly", begins=True))
    with Recorder(tmp_path, META, one) as recorder:
        recorder.load_state_dict(state)
        recorder.add(step(5, instruction="go slowly", begins=True))
    source = open_source(tmp_path)
    assert [(len(e), e.meta.instruction, e.is_complete) for e in map(source.read, range(len(source)))] == [
        (2, "go", False),
        (2, "go slowly", True),
        (1, "go slowly", False),
        (1, "go slowly", False),
    ]


def test_imagined_steps_are_not_reused(tmp_path: Path) -> None:
    with Recorder(tmp_path / "store", META, FEATURES) as recorder:
        for number in range(7):
            recorder.add(replace(turn(number), source="world" if number == 3 else "sim"))
    with pytest.raises(DatasetError, match=r"replay\.reuse: .*store: it has imagined steps"):
        check_earlier(ReplayConfig(reuse=(str(tmp_path / "store"),)), META, FEATURES)


def test_what_is_reused_is_read_as_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the first three episodes the second is damaged."""
    store = tmp_path / "store"
    record(store, 7)
    whole = open_source(store).lengths()
    folder = str(merge([open_source(store)], tmp_path / "set"))
    path = next((tmp_path / "set/data").rglob("*.parquet"))
    table = pq.read_table(path)
    at = table.schema.get_field_index("action")
    rows, field = table["action"].to_pylist(), table.schema.field(at)
    rows[table["episode_index"].to_pylist().index(1)][0] = float("nan")
    pq.write_table(table.set_column(at, field, pa.array(rows, field.type)), path)
    record_checksums(tmp_path / "set")
    with pytest.raises(DatasetError, match=r"replay\.reuse: .*set is damaged: .*episode 1: "):
        check_earlier(ReplayConfig(reuse=(folder,)), META, FEATURES)
    asked = ReplayConfig(reuse=(folder,), read=ReadingConfig(on_damage="skip", episodes="0-2"))
    check_earlier(asked, META, FEATURES)
    assert "left out: " in caplog.text
    (source,) = open_earlier(asked, META, FEATURES)
    assert source.lengths().tolist() == [whole[0], whole[2]]
    with pytest.raises(DatasetError, match=r"on_damage.* is for datasets.*robot-rl replay seal"):
        open_earlier(ReplayConfig(reuse=(str(store),), read=ReadingConfig(on_damage="skip")), META, FEATURES)
