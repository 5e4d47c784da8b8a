"""Recordings that stay on arms' machines: fetched whole, in part, again, and when they cannot be."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.config import build, dump
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.core.files import with_checksum_line
from robot_rl.data.store.lock import WriterLock
from robot_rl.data.store.reader import open_source
from robot_rl.fleet.kept import Kept
from robot_rl.rollout import kept
from robot_rl.rollout.hub_connection import machines
from robot_rl.rollout.kept import fetch, kept_folder
from robot_rl.rollout.wire import decode_turn
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.stay import bring
from tests.fleet.test_nodes import Served, agent, hub, run_of, until
from tests.runs import SMALL, folder_of, patient_station

__all__ = ["hub"]
JOB = "run-1-arm"


@pytest.fixture
def recording(hub: Served) -> Iterator[Path]:
    """A recording at the machine `lab`, whose agent is there."""
    folder = hub.folder / "lab" / "kept" / JOB
    write(folder / "journal" / "000001.seg", os.urandom(200_000))
    write(folder / "journal" / "writer.lock", b"1")
    write(folder / "meta" / "store.json", b"{}")
    with agent(hub):
        until(lambda: any(JOB in node.get("kept", ()) for node in machines(hub.joined)))
        yield folder


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_recording_is_copied_and_then_only_what_is_new(hub: Served, recording: Path) -> None:
    out, seen = hub.folder / "run" / "experience", list[tuple[int, int]]()
    out.parent.mkdir()
    assert fetch(hub.joined, "lab", JOB, out, lambda *now: seen.append(now)) == 200_002
    assert content_of(out) == content_of(recording)
    assert seen[-1] == (200_002, 200_002)
    assert seen == sorted(seen)
    assert fetch(hub.joined, "lab", JOB, out) == 0
    write(recording / "journal" / "000002.seg", b"more")
    assert fetch(hub.joined, "lab", JOB, out) == 4
    assert content_of(out) == content_of(recording)
    assert [path.name for path in out.parent.iterdir()] == ["experience"], "nothing else is left there"


@pytest.mark.slow
def test_a_copy_that_was_cut_off_goes_on_where_it_was(
    hub: Served, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ask, answers = hub.folder / "copy", kept._Fetch._ask, list[bytes]()

    async def cut(self: Any, *question: Any) -> bytes:
        if len(answers) == 3:  # the list, and two parts
            raise DeviceError("cut")
        answers.append(await ask(self, *question))
        return answers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(kept._Fetch, "_ask", cut)
        with pytest.raises(DeviceError, match="cut"):
            fetch(hub.joined, "lab", JOB, out)
    assert not out.exists(), "what is not whole is no copy"
    assert fetch(hub.joined, "lab", JOB, out) == 200_002 - len(answers[1]) - len(answers[2])
    assert content_of(out) == content_of(recording)


@pytest.mark.slow
def test_what_is_not_there_is_named(hub: Served, recording: Path) -> None:
    with pytest.raises(DeviceError, match="no recording of 'run-2' is kept here"):
        fetch(hub.joined, "lab", "run-2", hub.folder / "copy")
    with pytest.raises(DeviceError, match="node: got 'attic', allowed: lab"):
        fetch(hub.joined, "attic", JOB, hub.folder / "copy")


@pytest.mark.parametrize("path", ["../../leases.db", "/etc/passwd", "a/../../b", ""])
def test_only_files_of_a_recording_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    write(kept_folder() / JOB / "file", b"1")

    async def send(kind: str, body: Any) -> bool:
        raise AssertionError("nothing is sent")

    with pytest.raises(ValueError, match="a file of a recording named"):
        _ = Kept(send).take("part", {"number": 1, "job": JOB, "path": path, "from": 0, "to": 9})


@pytest.mark.parametrize("job", ["..", "../jobs", ".", ""])
def test_only_jobs_have_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    write(kept_folder() / JOB / "file", b"1")
    sent = list[Any]()

    async def send(kind: str, body: Any) -> bool:
        sent.append(body)
        return True

    asyncio.run(Kept(send).take("kept", {"number": 1, "job": job}))
    assert sent == [{"number": 1, "refusal": f"no recording of {job!r} is kept here"}]


def test_old_recordings_are_deleted_unless_they_are_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    before_s = time.time() - 3.0 * 86400.0
    for job in ("old", "written", "new"):
        write(kept_folder() / job / "journal" / "000001.seg", b"1")
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
    with pytest.raises(ConfigError, match=r"hub\.pictures: got 'stay', allowed: send without cameras"):
        run_of(hub, **changes, hub={**hub.config, "pictures": "stay"})


def test_a_run_that_recorded_here_has_nothing_to_fetch(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(with_checksum_line(dump(build(RunConfig, SMALL).used())))
    with pytest.raises(ConfigError, match="recorded nothing elsewhere"):
        bring(tmp_path)


def test_a_recording_that_no_machine_has_is_missed(hub: Served, tmp_path: Path) -> None:
    config = run_of(hub, env=SEEING, policy=EYES, hub={**hub.config, "pictures": "stay"})
    (tmp_path / "config.yaml").write_text(with_checksum_line(dump(config.used())))
    with pytest.raises(DeviceError, match=r"no machine has a recording of .*Connected: none"):
        bring(tmp_path)


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
        assert not (run / "experience" / "arm").exists()
        assert main(["replay", "fetch", str(run)]) == 0
    assert "experience/arm: a copy of what its arm recorded" in capsys.readouterr().out
    assert max(sizes) < 1500, "a picture alone has 3072 bytes"
    brought = open_source(run / "experience" / "arm")
    assert int(brought.lengths().sum()) >= 60
    episode = brought.read(0)
    assert episode.obs["front.rgb"][0].shape == (32, 32, 3)
    assert np.ptp(episode.obs["front.rgb"][0]) > 50
