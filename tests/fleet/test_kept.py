"""Recordings that stay on arms' machines: fetched whole, in part, again, and when they cannot be."""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.config import build, dump
from robot_rl.core.errors import ConfigError, DatasetError, DeviceError
from robot_rl.core.files import with_checksum_line
from robot_rl.data.episode import Feature
from robot_rl.data.store.check import verify
from robot_rl.data.store.journal import segment_numbers, segment_path
from robot_rl.data.store.lock import WriterLock
from robot_rl.data.store.reader import open_source
from robot_rl.data.store.seal import seal
from robot_rl.data.transitions import StepBatch
from robot_rl.fleet.agent import AgentConfig
from robot_rl.fleet.kept import Kept
from robot_rl.rollout import fetch as fetching
from robot_rl.rollout.fetch import PART_BYTES, fetch, kept_folder
from robot_rl.rollout.hub_connection import machines
from robot_rl.rollout.wire import decode_turn
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.stay import bring
from robot_rl.train.recording import Recorder
from tests.fleet.test_nodes import Served, agent, hub, run_of, until
from tests.runs import SMALL, folder_of, patient_station
from tests.train.test_recording import META

__all__ = ["hub"]
JOB = "run-1-arm"
FEATURES = {"state": Feature("float32", (1,)), "cam.rgb": Feature("uint8", (64, 64, 3))}


def record(folder: Path, episodes: int, *, bright: int = 0) -> None:
    """Appends episodes of ten steps, whose pictures do not compress: each has about 10 kB."""
    rng = np.random.default_rng([bright, episodes])
    with Recorder(folder, replace(META, state_names=("x",)), FEATURES) as recorder:
        for step in range(10 * episodes):
            seen = [
                {
                    "state": np.ones((1, 1), np.float32),
                    "cam.rgb": rng.integers(0, 256, (1, 64, 64, 3), np.uint8),
                }
                for _ in range(2)
            ]
            action, ends = np.zeros((1, 2), np.float32), np.array([step % 10 == 9])
            recorder.add(
                StepBatch(
                    obs=seen[0],
                    next_obs=seen[1],
                    action=action,
                    base_action=action,
                    next_base_action=action,
                    reward=np.zeros(1, np.float32),
                    terminated=ends,
                    truncated=np.zeros(1, bool),
                )
            )


def journal_of(folder: Path) -> bytes:
    numbers = segment_numbers(folder / "journal")
    return b"".join(segment_path(folder / "journal", number).read_bytes() for number in numbers)


@pytest.fixture
def recording(hub: Served) -> Iterator[Path]:
    """A recording at the machine `lab`, whose agent is there."""
    folder = hub.folder / "lab" / "kept" / JOB
    record(folder, 2)
    with agent(hub):
        until(lambda: any(JOB in node.get("kept", ()) for node in machines(hub.joined)))
        yield folder


@pytest.mark.slow
def test_a_recording_is_copied_and_then_only_what_was_added(hub: Served, recording: Path) -> None:
    out, seen = hub.folder / "run" / "experience" / "arm", list[tuple[int, int]]()
    folder, sent = fetch(hub.joined, "lab", JOB, out, lambda *now: seen.append(now))
    assert folder == out
    first = journal_of(recording)
    assert journal_of(out) == first
    assert seen[-1] == (len(first), len(first))
    assert seen == sorted(seen)
    assert not verify(out).problems
    assert open_source(out).lengths().tolist() == [10, 10]
    assert sent >= len(first)
    before = sum(1 for _ in hub.folder.rglob("*.log"))
    record(recording, 1)  # the same job goes on: another segment, another list of segments
    folder, sent = fetch(hub.joined, "lab", JOB, out)
    assert folder == out
    assert journal_of(out) == journal_of(recording)
    assert sent <= len(journal_of(recording)) - len(first) + PART_BYTES
    assert open_source(out).lengths().tolist() == [10, 10, 10]
    assert sum(1 for _ in hub.folder.rglob("*.log")) > before
    assert [path.name for path in out.parent.iterdir()] == ["arm"], "nothing else is left there"


@pytest.mark.slow
def test_a_recording_that_grows_is_copied_as_it_was_and_goes_on(hub: Served, recording: Path) -> None:
    (segment,) = (recording / "journal").glob("*.log")
    whole, out = segment.read_bytes(), hub.folder / "copy"
    segment.write_bytes(whole[: len(whole) // 2])
    fetch(hub.joined, "lab", JOB, out)
    assert journal_of(out) == whole[: len(whole) // 2]
    segment.write_bytes(whole)
    _, sent = fetch(hub.joined, "lab", JOB, out)
    assert journal_of(out) == whole
    assert sent <= len(whole) - len(whole) // 2 + PART_BYTES
    segment.write_bytes(whole[:-100])  # what a crash left unfinished is cut off there
    fetch(hub.joined, "lab", JOB, out)
    assert journal_of(out) == whole[:-100]


@pytest.mark.slow
def test_a_copy_that_was_cut_off_goes_on_where_it_was(
    hub: Served, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ask, answers = hub.folder / "copy", fetching._Fetch._ask, list[bytes]()

    async def cut(self: Any, *question: Any) -> bytes:
        if len(answers) == 3:  # the list, and two parts
            raise DeviceError("cut")
        answers.append(await ask(self, *question))
        return answers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(fetching._Fetch, "_ask", cut)
        with pytest.raises(DeviceError, match="cut"):
            fetch(hub.joined, "lab", JOB, out)
    _, sent = fetch(hub.joined, "lab", JOB, out)
    assert journal_of(out) == journal_of(recording)
    assert sent <= len(journal_of(recording))


@pytest.mark.slow
def test_a_copy_of_another_recording_stays_and_one_that_was_sealed_too(hub: Served, recording: Path) -> None:
    out = hub.folder / "copy"
    record(out, 1, bright=1)  # of the same job, before its agent deleted what was old
    mine = journal_of(out)
    folder, _ = fetch(hub.joined, "lab", JOB, out)
    assert folder == hub.folder / "copy-2"
    assert fetch(hub.joined, "lab", JOB, out)[0] == folder
    assert (journal_of(out), journal_of(folder)) == (mine, journal_of(recording))
    seal(out)
    with pytest.raises(DatasetError, match=r"copy: was sealed, and a copy goes on only as it came\. Move it"):
        fetch(hub.joined, "lab", JOB, out)


@pytest.mark.slow
def test_two_copies_at_once_are_refused(hub: Served, recording: Path) -> None:
    lock = WriterLock(hub.folder / "copy")
    with pytest.raises(DatasetError, match="is writing to this store, and a store has one writer"):
        fetch(hub.joined, "lab", JOB, hub.folder / "copy")
    lock.release()


@pytest.mark.slow
def test_what_is_not_there_is_named(hub: Served, recording: Path) -> None:
    with pytest.raises(DeviceError, match="no recording of 'run-2' is kept here"):
        fetch(hub.joined, "lab", "run-2", hub.folder / "copy")
    with pytest.raises(DeviceError, match="node: got 'attic', allowed: lab"):
        fetch(hub.joined, "attic", JOB, hub.folder / "copy")


@pytest.mark.parametrize("job", ["..", "../jobs", ".", "", "a\0b"])
def test_only_what_jobs_recorded_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    record(kept_folder() / JOB, 1)
    for kind, body in (("kept", {}), ("part", {"segment": 1, "from": 0, "to": 9})):
        sent = asked(kind, {"number": 1, "job": job, **body})
        assert sent["refusal"] == f"no recording of {job!r} is kept here"


@pytest.mark.parametrize("span", [(-1, 9), (0, -9), (1 << 70, 1 << 71), (10**9, 2 * 10**9)])
def test_a_part_that_cannot_be_is_refused_or_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: tuple[int, int]
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    record(kept_folder() / JOB, 1)
    body = {"number": 1, "job": JOB, "segment": 1, "from": span[0], "to": span[1]}
    sent = asked("part", body)
    assert sent["refusal"] or sent["octets"] == b""


def asked(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns what the agent answers."""
    sent = list[dict[str, Any]]()

    async def send(kind: str, body: Any) -> bool:
        sent.append(body)
        return True

    asyncio.run(Kept(send).answer(kind, body))
    (answer,) = sent
    return answer


def test_old_recordings_are_deleted_unless_they_are_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    before_s = time.time() - 3.0 * 86400.0
    for job in ("old", "written", "new"):
        record(kept_folder() / job, 1)
    lock = WriterLock(kept_folder() / "written")
    for job in ("old", "written"):
        for path in (kept_folder() / job).rglob("*"):
            os.utime(path, (before_s, before_s))

    async def send(kind: str, body: Any) -> bool:
        return True

    there = Kept(send)
    assert there.delete_old(2.0) == ["old"]
    assert there.jobs() == ["new", "written"]
    lock.release()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"env": {**SMALL["env"], "cameras": ["front"]}, "method": {"kind": "chunked"}},
    ],
)
def test_pictures_stay_only_where_an_encoder_does(hub: Served, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"hub\.pictures: got 'stay', allowed: send, but with env"):
        run_of(hub, **changes, hub={**hub.config, "pictures": "stay"})


def test_an_agent_is_not_asked_where_pictures_stay(hub: Served) -> None:
    with pytest.raises(
        ConfigError, match=r"hub\.pictures: got 'stay', allowed: send, as if left out: the run"
    ):
        AgentConfig(hub=replace(hub.joined, pictures="stay"), name="lab")


def test_a_run_that_recorded_here_has_nothing_to_fetch(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(with_checksum_line(dump(build(RunConfig, SMALL).used())))
    with pytest.raises(ConfigError, match="recorded nothing on other machines"):
        bring(tmp_path)


def test_an_arm_whose_machine_is_away_is_named(
    hub: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_of(hub, env=SEEING, policy=EYES, hub={**hub.config, "pictures": "stay"})
    (tmp_path / "config.yaml").write_text(with_checksum_line(dump(config.used())))
    assert main(["replay", "fetch", str(tmp_path)]) == 1
    assert "arm: no machine that is connected has a recording of it" in capsys.readouterr().out


SEEING = {**SMALL["env"], "cameras": ["front"], "image_size": [32, 32], "state": ["joint"]}
EYES = {**SMALL["policy"], "cameras": ["front"], "image_features": 8}


@pytest.mark.slow
def test_pictures_of_a_run_stay_on_the_arms_machine_until_they_are_fetched(
    hub: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(hub.folder / "lab"))
        station = patient_station(hub.folder, cameras={"front": {"max_age_s": 2.0}})
        assert main(["devices", f"add={station}"]) == 0
    sizes = list[int]()

    def measured(octets: bytes) -> Any:
        sizes.append(len(octets))
        return decode_turn(octets)

    monkeypatch.setattr("robot_rl.rollout.on_node.decode_turn", measured)
    with agent(hub):
        until(lambda: machines(hub.joined))
        config = run_of(hub, env=SEEING, policy=EYES, hub={**hub.config, "pictures": "stay"})
        phases.run(config)
        run = folder_of(hub.folder / "runs")
        assert not (run / "experience" / "arm-lab").exists()
        moved = run.rename(run.with_name("moved"))
        monkeypatch.chdir(moved)
        assert main(["replay", "fetch", "."]) == 0
    assert "experience/arm-lab: a copy of what its arm recorded" in capsys.readouterr().out
    assert max(sizes) < 1500, "a picture alone has 3072 bytes"
    brought = open_source(moved / "experience" / "arm-lab")
    assert int(brought.lengths().sum()) >= 60
    episode = brought.read(0)
    assert episode.obs["front.rgb"][0].shape == (32, 32, 3)
    assert np.ptp(episode.obs["front.rgb"][0]) > 50
