"""`robot-rl replay`: every action on a store and on a dataset, exit codes, mistakes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from robot_rl.cli.main import main
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.lock import WriterLock
from robot_rl.data.store.reader import open_source
from robot_rl.data.store.writer import StoreWriter

META = EpisodesMeta(
    task="Reach",
    robot="gantry",
    control_hz=50.0,
    instruction="reach",
    state_names=("x", "y"),
    action_names=("dx",),
)
STEPS = (4, 6, 5)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three episodes, two flushes: the second by a human and with success, the third cut short."""
    features = {"state": Feature("float32", (2,))}
    with StoreWriter(tmp_path / "store", META, features, flush_s=1e6, device="arm-1") as writer:
        for episode, steps in enumerate(STEPS):
            for step in range(steps):
                writer.append(
                    obs={"state": np.array([episode, step], np.float32)},
                    action=np.zeros(1),
                    truncated=step == steps - 1 and episode < 2,
                    success=step == 2 and episode == 1,
                    source="human" if episode == 1 else "real",
                    policy_version=10 * episode,
                )
            writer.flush()
    return tmp_path / "store"


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """Runs an action with --json; returns exit code, the object, and everything printed."""

    def run(*words: Any) -> tuple[int, Any, str]:
        code = main(["replay", *map(str, words), "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out.splitlines()[-1]), captured.out + captured.err

    return run


def test_info_counts(store: Path, replay: Any) -> None:
    code, found, text = replay("info", store)
    assert code == 0
    assert (found["kind"], found["episodes"], found["steps"], found["unfinished"]) == ("store", 3, 15, 1)
    assert found["minutes"] == pytest.approx(15 / 50 / 60)
    assert found["success"] == pytest.approx(1 / 3)
    assert (found["sealed_episodes"], found["journal_episodes"], found["lost_steps"]) == (0, 3, 0)
    groups = {group["source"]: group for group in found["groups"]}
    assert (groups["real"]["episodes"], groups["real"]["steps"], groups["real"]["last_version"]) == (2, 9, 20)
    assert (groups["human"]["steps"], groups["human"]["successes"], groups["human"]["device"]) == (
        6,
        1,
        "arm-1",
    )
    assert found["bytes"] >= found["journal_bytes"] > 1000
    assert "3 episodes (0 sealed, 3 in the journal, 1 unfinished), 15 steps" in text


def test_verify_repair_and_seal(store: Path, replay: Any) -> None:
    assert replay("verify", store)[0] == 0
    segment = store / "journal/000001.log"
    os.truncate(segment, segment.stat().st_size - 3)
    code, found, text = replay("verify", store)
    assert (code, found["sound"]) == (1, False)
    assert "damaged: journal/000001.log, byte" in text
    assert "5 steps of episode 2 lost" in text
    code, found, text = replay("repair", store)
    assert (code, len(found["repaired"])) == (0, 1)
    code, found, text = replay("verify", store)
    assert (code, found["sound"], found["journal"]["steps"]) == (0, True, 10)
    assert "lost earlier: journal/000001.log" in text
    assert replay("info", store)[1]["lost_steps"] == 5
    code, found, text = replay("seal", store)
    assert (code, found["episodes"], found["steps"]) == (0, 2, 10)
    code, found, text = replay("verify", store)
    assert (code, found["dataset"], found["journal"]["steps"]) == (0, [], 0)
    found = replay("info", store)[1]
    assert (found["sealed_episodes"], found["journal_episodes"], found["lost_steps"]) == (2, 0, 5)
    (store / "data/chunk-000/file-001.parquet").unlink()
    code, found, text = replay("verify", store)
    assert (code, found["dataset"][0]["kind"]) == (1, "unreadable-rows")


def test_merge_split_and_filter(store: Path, replay: Any, tmp_path: Path) -> None:
    code, found, _ = replay("merge", store, store, f"out={tmp_path / 'both'}")
    assert code == 0
    assert found["written"] == [{"path": str(tmp_path / "both"), "episodes": 6, "steps": 30}]
    one, two = tmp_path / "one", tmp_path / "two"
    replay("split", tmp_path / "both", f"{one}=0,2-3", f"{two}=5")
    assert open_source(one).lengths().tolist() == [4, 5, 4]
    assert open_source(two).lengths().tolist() == [5]
    replay("split", tmp_path / "both", f"{tmp_path / 'a'}=0.5", f"{tmp_path / 'b'}=0.5", "images=png")
    assert open_source(tmp_path / "b").lengths().tolist() == list(STEPS)
    for number, (test, lengths) in enumerate(
        {
            "success=true": [6, 6],
            "by=real": [4, 5, 4, 5],
            "min_steps=5": [6, 5] * 2,
            "episodes=1-2": [6, 5],
        }.items()
    ):
        replay("filter", tmp_path / "both", f"out={tmp_path / str(number)}", test)
        assert open_source(tmp_path / str(number)).lengths().tolist() == lengths


def test_info_says_what_is_in_it(store: Path, replay: Any) -> None:
    code, found, text = replay("info", store)
    assert (code, found["features"], found["instructions"]) == (0, {"state": [2]}, ["reach"])
    assert "observations: state 2; action 1" in text
    assert "instructions: 'reach'" in text
    assert "15 steps, 0.3 s, success 33%" in text


def test_info_of_a_run_folder_points_inside(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    store.rename(tmp_path / "run/experience")
    assert main(["replay", "info", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"this is a run folder. Its recordings are in {tmp_path / 'run/experience'}." in said
    (tmp_path / "run/experience").rename(tmp_path / "panda")
    (tmp_path / "run/experience").mkdir()
    (tmp_path / "panda").rename(tmp_path / "run/experience/panda")
    assert main(["replay", "info", str(tmp_path / "run")]) == 2
    assert f"Its recordings are in {tmp_path / 'run/experience/panda'}." in capsys.readouterr().err


def test_compact_joins_what_is_sealed_and_keeps_the_journal(store: Path, replay: Any) -> None:
    replay("seal", store)
    with StoreWriter(store, META, {"state": Feature("float32", (2,))}, flush_s=1e6) as writer:
        for step in range(2):
            obs = {"state": np.zeros(2, np.float32)}
            writer.append(obs=obs, action=np.zeros(1), truncated=step == 1)
    code, found, text = replay("compact", store)
    assert (code, found["files"] < found["files_before"]) == (0, True)
    assert f"became {found['files']}" in text
    info = replay("info", store)[1]
    assert (info["sealed_episodes"], info["journal_episodes"]) == (3, 1)
    assert replay("seal", store)[1]["episodes"] == 1
    assert open_source(store).lengths().tolist() == [*STEPS, 2]
    assert replay("verify", store)[0] == 0


def test_compact_waits_for_the_writer(store: Path, capsys: pytest.CaptureFixture[str], replay: Any) -> None:
    replay("seal", store)
    lock = WriterLock(store)
    try:
        assert main(["replay", "compact", str(store)]) == 2
    finally:
        lock.release()
    assert "is writing to this store" in capsys.readouterr().err


def test_verify_names_what_to_keep(store: Path, replay: Any, tmp_path: Path) -> None:
    replay("seal", store)
    table = store / "data/chunk-000/file-000.parquet"
    column = pq.ParquetFile(table).metadata.row_group(0).column(0)
    content = bytearray(table.read_bytes())
    content[
        (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1
    ] ^= 1
    table.write_bytes(content)
    code, found, text = replay("verify", store)
    assert (code, len(found["problems"])) == (1, 1)
    assert "damaged: episode 0: " in text
    assert "does not match its checksum" in text
    assert "1 problem\n" in text
    assert "repair" not in text  # that is for journals
    assert f"robot-rl replay filter {store} out=NEW episodes=1-2" in text
    assert replay("filter", store, f"out={tmp_path / 'new'}", "episodes=1-2")[0] == 0
    assert replay("verify", tmp_path / "new")[0] == 0


def test_help_of_one_action(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "filter", "--help"])
    text = capsys.readouterr().out
    assert "min_steps=20" in text
    assert "held_out" not in text
    assert "journal" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inf"], "replay: no action 'inf'. Did you mean 'info'?"),
        (["info"], "replay info: got 0 paths, allowed: one. Usage: robot-rl replay info PATH"),
        (["info", "nowhere"], "nowhere: no such folder. Give one that holds a store or a LeRobotDataset."),
        (["info", "."], "this is no store and no dataset. Nothing is recorded in it."),
        (["compact", "STORE"], "nothing is sealed yet, the journal has no files to join. Seal it first"),
        (["split", "STORE", "a=0-1", "b=1-2"], "split: episode 1 in a and in b. Give every episode to one"),
        (["compact", "nowhere", "speed=2"], "replay compact: no setting 'speed'. It takes none."),
        (
            ["verify", "nowhere", "speed=2"],
            "replay verify: no setting 'speed'. Known: cameras, episodes, rename",
        ),
        (
            ["verify", "STORE", "episodes=0"],
            "episodes is for datasets, and episodes of this store are in its",
        ),
        (["seal", "nowhere"], "nowhere: no meta/store.json in it, so it is no store"),
        (["repair", "nowhere"], "nowhere: no meta/store.json in it, so it is no store"),
        (["seal", "STORE", "codec=h265"], "replay seal.codec: got 'h265', allowed: h264, av1"),
        (["merge", "STORE"], "replay merge: out is missing"),
        (["split", "STORE"], "replay split: no parts"),
        (["split", "STORE", "new=0.x"], "replay split.new: got '0.x', allowed: a share such as 0.8"),
        (["filter", "STORE", "out=new", "sucess=true"], "no setting 'sucess'. Did you mean 'success'?"),
        (["filter", "STORE", "out=new", "success=yes"], "filter.success: got 'yes', allowed: true, false"),
        (["filter", "STORE", "out=new", "episodes=a-b"], "filter.episodes: got 'a', allowed: a whole number"),
    ],
)
def test_mistakes_end_with_2(
    store: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["replay", *[str(store) if word == "STORE" else word for word in words]]) == 2
    assert message in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "info",
        "verify",
        "repair",
        "seal",
        "compact",
        "merge",
        "split",
        "filter",
        "out=",
        "exit code 1",
        "Type first",
    ):
        assert word in text
