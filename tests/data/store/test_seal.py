"""Sealing into the dataset, at any crash once; what is no store yet becomes one."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Feature
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.store import seal as sealing
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.seal import SealOptions, seal
from robot_rl.data.store.writer import StoreWriter

FORMAT_1 = Path(__file__).parents[1] / "format_1"


def pictures(bench: Any, value: int) -> dict[str, Any]:
    return {key: bench.picture(key, value) for key in ("front.rgb", "wrist.rgb")}


def test_a_sealed_episode_is_the_same_episode(bench: Any) -> None:
    bench.with_cameras()  # PNG in the journal and in the dataset, so that they can be compared
    with bench.writer(device="arm-1") as writer:
        for episode in range(3):
            bench.append(writer, episode, 0, pictures=pictures(bench, 9 * episode), source="human")
            bench.append(writer, episode, 1, source="human")
            final = bench.obs(episode, 3) | pictures(bench, 200)
            bench.append(writer, episode, 2, terminated=True, success=True, final_obs=final)
    before = [StoreReader(bench.folder).read(i) for i in range(3)]
    done = seal(bench.folder, SealOptions(images="png"))
    assert (done.episodes, done.steps, done.trimmed_segments, done.refused) == (3, 9, 1, ())
    reader = StoreReader(bench.folder)
    assert [reader.sealed(i) for i in range(3)] == [0, 1, 2]
    assert list((bench.folder / "journal").glob("*.log")) == []
    for i, was in enumerate(before):
        now = reader.read(i)
        for name in ("action", "base_action", "reward", "terminated", "truncated", "success", "source"):
            np.testing.assert_array_equal(getattr(now, name), getattr(was, name))
        np.testing.assert_array_equal(now.policy_version, was.policy_version)
        np.testing.assert_array_equal(now.stamp_ns, was.stamp_ns)
        assert (now.device, now.meta.instruction, now.is_complete) == ("arm-1", "reach the ball", True)
        for key in ("state", "force"):
            np.testing.assert_array_equal(now.obs[key], was.obs[key])
            np.testing.assert_array_equal(now.final_obs[key], was.final_obs[key])
        for key in ("front.rgb", "wrist.rgb"):
            np.testing.assert_array_equal(now.obs[key][np.arange(3)], was.obs[key][np.arange(3)])
            np.testing.assert_array_equal(now.picture_stamp_ns[key], was.picture_stamp_ns[key])
            assert now.final_obs[key][0, 0, 0] == 200
    assert seal(bench.folder).episodes == 0
    with bench.writer() as writer:
        assert writer.begin_episode() == 3


def test_a_reader_keeps_its_numbers_while_episodes_are_sealed(bench: Any) -> None:
    writer = bench.writer()
    bench.episode(writer, 0, 4, lane=0)
    bench.append(writer, 1, 0, lane=1)
    bench.episode(writer, 2, 2, lane=0)
    writer.flush()
    reader = StoreReader(bench.folder)
    assert reader.lengths().tolist() == [4, 1, 2]
    done = writer.seal()
    assert (done.episodes, done.trimmed_segments) == (2, 0)  # the first segment holds a part of episode 1
    bench.append(writer, 1, 1, lane=1)
    bench.episode(writer, 3, 3, lane=0)
    writer.flush()
    reader.refresh()
    assert reader.lengths().tolist() == [4, 2, 2, 3]
    assert [reader.sealed(i) for i in range(4)] == [0, None, 1, None]
    assert [int(reader.read(i).obs["state"][0, 0]) for i in range(4)] == [0, 1, 2, 3]
    assert reader.columns(["obs.state"])["obs.state"][:, 0].tolist() == [1, 1, 3, 3, 3]  # of the journal
    assert sorted(StoreReader(bench.folder).lengths().tolist()) == [2, 2, 3, 4]
    bench.append(writer, 1, 2, lane=1, truncated=True)
    assert writer.seal().trimmed_segments == 2
    reader.refresh()
    assert reader.lengths().tolist() == [4, 3, 2, 3]
    assert reader.read(1).obs["state"][:, 1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("crash_at", [0, 2, 3])
def test_a_crash_while_sealing_leaves_every_episode_once(
    bench: Any, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    """The process ends after so many episodes, or before the journal is trimmed."""
    with bench.writer() as writer:
        for episode in range(3):
            bench.episode(writer, episode, 2 + episode)
    written = 0
    read = StoreReader.read

    def crashing_read(self: StoreReader, episode: int) -> Any:
        nonlocal written
        if written == crash_at:
            raise KeyboardInterrupt
        written += 1
        return read(self, episode)

    def crashing_trim(*_: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StoreReader, "read", crashing_read)
        patched.setattr(sealing, "_trim", crashing_trim)
        with pytest.raises(KeyboardInterrupt):
            seal(bench.folder)
    reader = StoreReader(bench.folder)
    assert sorted(reader.lengths().tolist()) == [2, 3, 4]
    assert sum(reader.sealed(i) is not None for i in range(3)) == crash_at
    assert seal(bench.folder).episodes == 3 - crash_at
    reader = StoreReader(bench.folder)
    assert reader.lengths().tolist() == [2, 3, 4]
    assert [int(reader.read(i).obs["state"][0, 0]) for i in range(3)] == [0, 1, 2]
    assert len(Dataset(bench.folder)) == 3
    assert list((bench.folder / "journal").glob("*.log")) == []


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_first_seal_that_was_interrupted_at_any_write_is_no_damage(
    bench: Any, kills: Any, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    """Nothing is lost: `verify` says sound, whoever wants the dataset is told to seal, and that goes on."""
    with bench.writer() as writer:
        for episode in range(2):
            bench.episode(writer, episode, 3)
    with kills(bench.folder) as copies:
        seal(bench.folder)
    assert len(copies) > 40
    told: set[bool] = set()
    for copy in copies[::every]:
        assert main(["replay", "verify", str(copy)]) == 0
        said = capsys.readouterr().out
        assert said.endswith("\nsound\n")
        info = copy / "meta/info.json"
        if not info.exists() or not json.loads(info.read_text())["total_episodes"]:
            remedy = f"nothing is sealed in it yet. Its episodes are in the journal.*replay seal {copy}`"
            told.add(bool(re.search(f"note: {copy}: {remedy}", said)))
            with pytest.raises(DatasetError, match=remedy):
                Dataset(copy)
            assert main(["replay", "compact", str(copy)]) == 2
            assert "nothing is sealed yet" in capsys.readouterr().err
        assert main(["replay", "seal", str(copy)]) == 0
        assert [int(Dataset(copy).read(i).obs["state"][0, 0]) for i in range(2)] == [0, 1]
        assert main(["replay", "verify", str(copy)]) == 0
        capsys.readouterr()
    assert told == {False, True}  # before and after there was a dataset at all


def test_damage_of_a_dataset_that_was_only_begun_is_found(
    bench: Any, kills: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with bench.writer() as writer:
        bench.episode(writer, 0, 3)
    with kills(bench.folder) as copies:
        seal(bench.folder)
    begun = next(copy for copy in copies if (copy / "meta/info.json").exists())
    own = begun / "meta/robot_rl.json"
    own.write_text(own.read_text().replace("gantry", "gentry").replace("Reach", "Roach"))
    assert main(["replay", "verify", str(begun)]) == 1
    assert "meta/robot_rl.json: it does not match its checksum" in capsys.readouterr().out


def test_ctrl_c_while_sealing_says_that_nothing_is_lost(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with bench.writer() as writer:
        bench.episode(writer, 0, 3)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(StoreReader, "read", interrupted)
    assert main(["replay", "seal", str(bench.folder)]) == 130
    said = "interrupted. Every episode is in the journal or in the dataset; the same command continues.\n"
    assert capsys.readouterr().err == said


def test_a_dataset_that_is_no_store_needs_no_seal(capsys: pytest.CaptureFixture[str]) -> None:
    """The message advised `robot-rl collect`, the command that had made it."""
    for action in ("seal", "repair"):
        assert main(["replay", action, str(FORMAT_1)]) == 2
        assert capsys.readouterr().err == (
            f"error: {FORMAT_1}: no meta/store.json in it, so this is a dataset and no store: there is "
            f"nothing to seal or to repair. Use it as it is: `robot-rl replay info {FORMAT_1}`, `robot-rl "
            f"finetune dataset={FORMAT_1}`.\n"
        )


def test_damage_stays_in_the_journal_and_is_named(bench: Any, flip: Any) -> None:
    with bench.writer() as writer:
        for episode in range(3):
            bench.episode(writer, episode, 2)
            writer.flush()
    record = StoreReader(bench.folder).index.episodes[1].steps[0]
    flip(1, record.offset + 70)
    done = seal(bench.folder)
    assert (done.episodes, done.trimmed_segments) == (2, 0)
    assert "the checksum of steps 0 to 1 of episode 1 does not match" in done.refused[0]
    assert sorted(StoreReader(bench.folder).lengths().tolist()) == [2, 2, 2]


def test_what_a_crash_cut_short_is_sealed_as_cut_short(bench: Any) -> None:
    with bench.writer() as writer:
        bench.append(writer, 0, 0)
        bench.append(writer, 0, 1)
    assert seal(bench.folder).episodes == 1
    episode = StoreReader(bench.folder).read(0)
    assert (len(episode), episode.is_complete) == (2, False)


# --- what was no store -----------------------------------------------------------------------------


def dataset_writer(folder: Path, **changes: Any) -> StoreWriter:
    """Opens a dataset to record into, with what it has."""
    source = Dataset(folder)
    features = changes.pop("features", source.features)
    return StoreWriter(folder, source.meta, features, flush_s=1e6, picture="png")


def test_a_dataset_of_format_1_is_upgraded_and_the_original_kept(tmp_path: Path) -> None:
    folder = tmp_path / "demos"
    shutil.copytree(FORMAT_1, folder)
    before = Dataset(FORMAT_1)
    old = [before.read(i) for i in range(len(before))]
    with dataset_writer(folder) as writer:
        obs = {key: np.asarray(old[0].obs[key][0]) for key in before.features}
        writer.append(obs=obs, action=old[0].action[0], truncated=True, final_obs=obs)
    kept = tmp_path / "demos.format-1"
    for path in FORMAT_1.rglob("*"):
        if path.is_file():
            assert (kept / path.relative_to(FORMAT_1)).read_bytes() == path.read_bytes()
    reader = StoreReader(folder)
    assert len(reader) == len(old) + 1
    assert seal(folder).episodes == 1
    reader = StoreReader(folder)
    assert reader.lengths().tolist() == [*map(len, old), 1]
    for i, was in enumerate(old):
        now = reader.read(i)
        np.testing.assert_array_equal(now.action, was.action)
        for key in was.obs:
            np.testing.assert_array_equal(now.obs[key][:], was.obs[key][:])
            np.testing.assert_array_equal(now.final_obs[key], was.final_obs[key])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demos", "demos.format-1"]


def test_a_crash_in_an_upgrade_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the exchange, the original has the temporary name; the next writer gives it its own."""
    folder = tmp_path / "demos"
    shutil.copytree(FORMAT_1, folder)
    rename = Path.rename

    def crash(self: Path, target: Any) -> Path:
        if self.name == ".upgrading-demos" and target.name == "demos.format-1":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            dataset_writer(folder)
    with dataset_writer(folder):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demos", "demos.format-1"]
    assert len(StoreReader(folder)) == len(Dataset(FORMAT_1)) == len(Dataset(tmp_path / "demos.format-1"))


def test_a_dataset_of_others_or_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "demos"
    shutil.copytree(FORMAT_1, folder)
    with pytest.raises(DatasetError, match=r"observation 'tactile' is missing, not float32 \(4,\)\. Record"):
        dataset_writer(folder, features={**Dataset(folder).features, "tactile": Feature("float32", (4,))})
    foreign = tmp_path / "foreign"
    shutil.copytree(FORMAT_1, foreign)
    (foreign / "meta/robot_rl.json").unlink()
    meta, features = Dataset(FORMAT_1).meta, Dataset(FORMAT_1).features
    with pytest.raises(DatasetError, match=r"robot_rl did not write this dataset.*replay merge"):
        StoreWriter(foreign, meta, features)


def test_a_changed_number_of_the_store_trims_nothing(bench: Any) -> None:
    """Sealing deletes the segments of what the dataset says that it has: an episode that was never sealed."""
    with bench.writer() as writer:
        bench.episode(writer, 0, 3)
    seal(bench.folder)
    with bench.writer() as writer:
        bench.episode(writer, 1, 3)
    logs = {path: path.read_bytes() for path in (bench.folder / "journal").glob("*.log")}
    path = bench.folder / "meta/episodes/chunk-000/file-000.parquet"
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)
    with pytest.raises(DatasetError, match="checksum"):
        seal(bench.folder)
    assert {path: path.read_bytes() for path in logs} == logs


def test_a_format_that_cannot_be_read_is_refused(bench: Any) -> None:
    folder = Path(shutil.copytree(FORMAT_1, bench.folder))
    own = folder / "meta/robot_rl.json"
    own.write_text(own.read_text()[:30])
    with pytest.raises(DatasetError, match=r"meta/robot_rl.json: no JSON .*Restore the file"):
        StoreWriter(folder, bench.meta, bench.features)
