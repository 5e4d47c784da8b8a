"""Datasets survive the disk exactly; every damaged one is refused with what, where and remedy."""

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.demos import ChunkSampler, Episodes, EpisodesMeta, load_episodes, save_episodes
from robot_rl.data.lerobot.checksums import record
from robot_rl.data.reading import ReadingConfig

META = EpisodesMeta(
    task="pick_cube",
    robot="panda",
    control_hz=20.0,
    instruction="pick up the cube",
    state_names=("joint_1", "joint_2", "cube_x"),
    action_names=("x", "gripper"),
)
LENGTHS = (3, 1, 2)


def episodes(lengths: tuple[int, ...] = LENGTHS, *, cameras: bool = False) -> Episodes:
    """Row r has state [r, r + 0.25, r + 0.5] and action [r / 10, -r / 10]; the first episode succeeds."""
    index = np.repeat(np.arange(len(lengths)), lengths)
    steps, rows = len(index), np.arange(len(index), dtype=np.float32)
    last = np.zeros(steps, bool)
    last[np.cumsum(lengths) - 1] = True
    rng = np.random.default_rng(0)
    obs: dict[str, Any] = {"state": rows[:, None] + np.array([0, 0.25, 0.5], np.float32)}
    final: dict[str, Any] = {"state": -np.ones((len(lengths), 3), np.float32)}
    if cameras:
        for store, count in ((obs, steps), (final, len(lengths))):
            store["front.rgb"] = rng.integers(0, 256, (count, 8, 10, 3), dtype=np.uint8)
            store["front.depth"] = rng.random((count, 8, 10), dtype=np.float32)
    return Episodes(
        meta=META,
        obs=obs,
        action=np.stack([rows / 10, -rows / 10], axis=1),
        reward=rows,
        terminated=last & (index == 0),
        truncated=last & (index != 0),
        success=last & (index == 0),
        episode_index=index,
        final_obs=final,
    )


def edit_info(folder: Path, change: Any) -> None:
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))
    record(folder)


def edit_table(folder: Path, change: Any) -> None:
    path = folder / "data/chunk-000/file-000.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    record(folder)


@pytest.mark.parametrize("cameras", [False, True])
def test_the_disk_keeps_every_number(tmp_path: Path, cameras: bool) -> None:
    written = episodes(cameras=cameras)
    read = load_episodes(save_episodes(tmp_path / "demos", written), expect=META)
    assert read.meta == META
    for field in ("action", "reward", "terminated", "truncated", "success", "episode_index"):
        np.testing.assert_array_equal(getattr(read, field), getattr(written, field))
    for field in ("obs", "final_obs"):
        assert getattr(read, field).keys() == getattr(written, field).keys()
        for key, value in getattr(written, field).items():
            np.testing.assert_array_equal(getattr(read, field)[key], value)
            assert getattr(read, field)[key].dtype == value.dtype


def test_datasets_of_format_1_are_read() -> None:
    # Written by this test's `episodes(cameras=True)` and robot_rl at commit edb5f25.
    read, written = load_episodes(Path(__file__).parent / "format_1", expect=META), episodes(cameras=True)
    np.testing.assert_array_equal(read.action, written.action)
    for field in ("obs", "final_obs"):
        for key, value in getattr(written, field).items():
            np.testing.assert_array_equal(getattr(read, field)[key], value)


def test_an_episode_without_a_final_observation_is_named(tmp_path: Path) -> None:
    folder = save_episodes(tmp_path / "demos", episodes())
    path = folder / "final/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[1]["observation.state"] = None
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(path)), path)
    record(folder)
    with pytest.raises(DatasetError, match=r"last step of episode 1 led to\. Leave it out"):
        load_episodes(folder)


def test_columns_have_lerobots_names(tmp_path: Path) -> None:
    folder = save_episodes(tmp_path / "demos", episodes(cameras=True))
    table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    names = {"observation.state", "observation.images.front", "action", "next.reward", "next.done"}
    assert names < set(table.column_names)
    assert table["frame_index"].to_pylist() == [0, 1, 2, 0, 0, 1]
    # At 20 Hz the third step of an episode begins 2 / 20 = 0.1 s after the first.
    np.testing.assert_allclose(table["timestamp"].to_numpy(), [0, 0.05, 0.1, 0, 0, 0.05])
    assert table["next.done"].to_pylist() == [False, False, True, True, False, True]
    info = json.loads((folder / "meta/info.json").read_text())
    assert (info["fps"], info["robot_type"], info["total_episodes"]) == (20, "panda", 3)
    assert info["features"]["observation.state"]["names"] == list(META.state_names)
    ranges = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet")
    assert ranges["dataset_to_index"].to_pylist() == [3, 4, 6]


def test_a_part_of_the_state_is_written_by_name(tmp_path: Path) -> None:
    whole = episodes()
    part = whole.with_state(whole.meta.state_names[1:2], at="state")
    save_episodes(tmp_path / "part", part)
    read = load_episodes(tmp_path / "part")
    assert read.meta.state_names == whole.meta.state_names[1:2]
    assert (read.obs["state"] == whole.obs["state"][:, 1:2]).all()
    assert (read.final_obs["state"] == whole.final_obs["state"][:, 1:2]).all()
    assert (read.action == whole.action).all()


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    folder = save_episodes(tmp_path / "demos", episodes())
    with pytest.raises(DatasetError, match=r"demos: exists already\. Choose another folder"):
        save_episodes(folder, episodes())


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("robot_rl.data.lerobot.batch.publish", full)
    with pytest.raises(DatasetError, match=r"demos: the disk is full .*Make room"):
        save_episodes(tmp_path / "demos", episodes())
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_of_others_is_refused_before_its_names_are(tmp_path: Path) -> None:
    """Names could be mended, and what is missing could not."""
    folder = save_episodes(tmp_path / "demos", episodes())
    edit_info(folder, lambda info: info["features"].update({"actions": info["features"].pop("action")}))
    (folder / "meta/robot_rl.json").unlink()
    with pytest.raises(DatasetError, match=r"no meta/robot_rl.json in it.* collect out=<new folder>"):
        load_episodes(folder)


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no meta/info.json in it.*`robot-rl collect out="):
        load_episodes(tmp_path)


def test_nan_is_named_by_feature_row_and_episode(tmp_path: Path) -> None:
    folder = save_episodes(tmp_path / "demos", episodes())

    def spoil(table: Any) -> Any:
        values = table["observation.state"].to_pylist()
        values[4][1] = float("nan")
        field = table.schema.field("observation.state")
        return table.set_column(table.schema.get_field_index(field.name), field, pa.array(values, field.type))

    edit_table(folder, spoil)
    # Episodes of 3, 1 and 2 steps: row 4 is the first step of the third.
    said = r"episode 2: .*'observation.state' is NaN or infinite in row 0, element 1 \(joint_2\)\. Record it"
    with pytest.raises(DatasetError, match=said):
        load_episodes(folder)


def test_what_is_read_can_be_chosen(tmp_path: Path) -> None:
    """Episodes of 3, 1 and 2 steps; element 1 of the state is NaN in row 4, the first step of the third."""
    folder, whole = save_episodes(tmp_path / "demos", episodes(cameras=True)), episodes(cameras=True)

    def spoil(table: Any) -> Any:
        values = table["observation.state"].to_pylist()
        values[4][1] = float("nan")
        field = table.schema.field("observation.state")
        return table.set_column(table.schema.get_field_index(field.name), field, pa.array(values, field.type))

    edit_table(folder, spoil)
    said: list[str] = []
    read = load_episodes(folder, read=ReadingConfig(on_damage="skip", cameras=()), say=said.append)
    assert read.episode_index.tolist() == [0, 0, 0, 1]
    np.testing.assert_array_equal(read.action, whole.action[:4])
    assert "front.rgb" not in read.obs
    assert "front.rgb" not in read.final_obs
    assert [line.partition("demos: ")[2].partition(":")[0] for line in said] == ["episode 2"]
    part = load_episodes(folder, read=ReadingConfig(episodes="1"))
    np.testing.assert_array_equal(part.action, whole.action[3:4])
    np.testing.assert_array_equal(part.obs["front.rgb"], whole.obs["front.rgb"][3:4])
    np.testing.assert_array_equal(part.final_obs["front.depth"], whole.final_obs["front.depth"][1:2])
    with pytest.raises(DatasetError, match=r"demos: no episode is left\. `robot-rl replay verify"):
        load_episodes(folder, read=ReadingConfig(episodes="2", on_damage="skip"))


def test_nan_in_a_final_observation_is_not_written(tmp_path: Path) -> None:
    bad = episodes()
    bad.final_obs["state"][1, 0] = np.inf
    with pytest.raises(DatasetError, match=r"'final observation.state' is NaN or infinite of episode 1"):
        save_episodes(tmp_path / "demos", bad)


def test_a_missing_feature_is_named(tmp_path: Path) -> None:
    folder = save_episodes(tmp_path / "demos", episodes())
    edit_table(folder, lambda table: table.drop_columns(["next.success"]))
    with pytest.raises(DatasetError, match=r"feature 'next.success' is missing\..*collect the dataset again"):
        load_episodes(folder)


def test_a_misnamed_feature_is_offered(tmp_path: Path) -> None:
    folder = save_episodes(tmp_path / "demos", episodes())
    old, new = "observation.state", "observation.stat"
    edit_table(folder, lambda t: t.rename_columns([new if n == old else n for n in t.column_names]))
    edit_info(folder, lambda info: info["features"].update({new: info["features"].pop(old)}))
    with pytest.raises(
        DatasetError, match=r"'observation.state' is missing\. Did you mean 'observation.stat'"
    ) as refused:
        load_episodes(folder)
    assert "demos.read.rename=<column>:observation.state, or collect" in str(refused.value)
    read = load_episodes(folder, read=ReadingConfig(rename=(f"{new}:{old}",)))
    np.testing.assert_array_equal(read.obs["state"], episodes().obs["state"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"robot": "viperx"}, r"this run: it was recorded with robot 'panda', not 'viperx'\. Collect"),
        ({"task": "reach"}, r"this run: it was recorded with task 'pick_cube', not 'reach'\. Collect"),
        ({"control_hz": 10.0}, r"this run: it was recorded at 20 Hz, not 10 Hz\. Collect"),
        ({"action_names": ("x",)}, r"its joints \(action\) differ: it has gripper\. Collect"),
        (
            {"state_names": ("joint_1", "joint_3", "cube_x")},
            r"its state elements differ: it has joint_2 and lacks joint_3\. Collect",
        ),
    ],
)
def test_data_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = save_episodes(tmp_path / "demos", episodes())
    with pytest.raises(DatasetError, match=message):
        load_episodes(folder, expect=dataclasses.replace(META, **change))


def test_a_shape_that_contradicts_info_is_refused(tmp_path: Path) -> None:
    folder = save_episodes(tmp_path / "demos", episodes())
    edit_info(folder, lambda info: info["features"]["action"].update(shape=[3]))
    with pytest.raises(DatasetError, match=r"'action' has shape \(2,\), meta/info.json says \(3,\)"):
        load_episodes(folder)


@pytest.mark.parametrize(
    ("field", "row", "message"),
    [
        ("truncated", 1, r"row 1 \(episode 0\) ends inside the episode"),
        ("terminated", 2, r"row 2 \(episode 0\) is the last row but does not end the episode"),
    ],
)
def test_ends_are_where_episodes_end(field: str, row: int, message: str) -> None:
    bad = episodes()
    getattr(bad, field)[row] ^= True
    with pytest.raises(DatasetError, match=message):
        bad.check()


def test_windows_repeat_the_last_action_and_say_so() -> None:
    sampler = ChunkSampler(episodes(), horizon=3)
    batch = sampler.sample(200, np.random.default_rng(0))
    assert batch.actions.shape == (200, 3, 2)
    first = {int(state[0]): k for k, state in enumerate(batch.obs["state"].numpy())}
    assert sorted(first) == [0, 1, 2, 3, 4, 5]
    # Episode 0 has rows 0 to 2: the window from row 1 holds rows 1, 2 and then row 2 again.
    np.testing.assert_allclose(batch.actions[first[1], :, 0], [0.1, 0.2, 0.2])
    assert batch.valid[first[1]].tolist() == [True, True, False]
    # Episode 1 is row 3 alone.
    np.testing.assert_allclose(batch.actions[first[3], :, 0], [0.3, 0.3, 0.3])
    assert batch.valid[first[3]].tolist() == [True, False, False]


def test_windows_of_some_steps_alone_end_where_another_takes_over() -> None:
    by = np.array([False, True, True, True, True, False])  # of the episodes of rows 0 to 2, 3, and 4 to 5
    sampler = ChunkSampler(episodes(), 2, by=by)
    assert len(sampler) == 4
    valid = sampler.rows(np.array([1, 2, 3, 4])).valid.tolist()
    assert valid == [[True, True], [True, False], [True, False], [True, False]]
    both = ChunkSampler(episodes(), 2, kept=np.arange(6) < 3, by=by).sample(50, np.random.default_rng(0))
    assert {int(row) for row in both.obs["state"][:, 0]} == {1, 2}


def test_who_made_a_step_is_read(tmp_path: Path) -> None:
    demonstrated = load_episodes(save_episodes(tmp_path / "demonstrated", episodes()))
    np.testing.assert_array_equal(demonstrated.source, [0] * 6)
    simulated = load_episodes(save_episodes(tmp_path / "simulated", episodes(), source="sim"))
    np.testing.assert_array_equal(simulated.source, [1] * 6)


def test_imagined_steps_are_nobodys_demonstration(tmp_path: Path) -> None:
    save_episodes(tmp_path / "imagined", episodes(), source=cast(Any, "world"))
    with pytest.raises(DatasetError, match="imagined: it has imagined steps, of a world model"):
        load_episodes(tmp_path / "imagined")


def test_what_was_recorded_beside_the_observation_is_none(tmp_path: Path) -> None:
    written = episodes()
    for name in ("policy_action", "executed_target_rad"):
        written.obs[name], written.final_obs[name] = written.action, written.action[:3]
    assert set(load_episodes(save_episodes(tmp_path / "demos", written)).obs) == {"state"}


def test_the_same_generator_gives_the_same_windows() -> None:
    sampler = ChunkSampler(episodes(), horizon=2)
    one, two = (sampler.sample(8, np.random.default_rng(3)) for _ in range(2))
    assert one.actions.equal(two.actions)


def test_a_horizon_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="got horizon 0, allowed: 1 or more"):
        ChunkSampler(episodes(), 0)


def test_episodes_that_reached_success() -> None:
    assert episodes().episode_success().tolist() == [True, False, False]
