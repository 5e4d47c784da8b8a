"""Live cameras without a browser: who gets a picture, how old it is, and what runs while nobody looks."""

import asyncio
import contextlib
import io
import json
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestServer
from PIL import Image
from yarl import URL

from robot_rl.config import dump
from robot_rl.core.errors import DeviceError
from robot_rl.fleet import server, state
from robot_rl.fleet.camera_feed import Cameras, jpeg
from robot_rl.fleet.server import AGE, make_app
from robot_rl.real.drivers.feed import SensorFeed
from robot_rl.real.drivers.host import SENSORS_SOCKET
from robot_rl.real.launch import ABOUT, socket_folders, station_at
from robot_rl.real.messages import ArmState, Frame, Status
from robot_rl.real.station import CameraConfig
from tests.real.supervisor.rig import two_joint_station

RED = np.zeros((480, 640, 3), np.uint8) + np.array([200, 20, 20], np.uint8)
CAMERAS = {name: CameraConfig() for name in ("front", "frozen", "blurred", "dark")}
Get = Callable[[str], Awaitable[tuple[int, str, Any]]]


@pytest.fixture
def arm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The socket folder of a station with four cameras; its name is short, as sockets need."""
    folder = tmp_path_factory.mktemp("a")
    (folder / "station.yaml").write_text(dump(replace(two_joint_station(), cameras=CAMERAS)))
    (folder / ABOUT).write_text(json.dumps({"station": "bench", "file": str(folder / "station.yaml")}))
    monkeypatch.setattr(state, "socket_folders", lambda: [folder])
    monkeypatch.setattr(server, "CAMERAS", "tests.fleet.fake_cameras")
    return folder


def served(runs: Path, use: Callable[[Get], Awaitable[Any]], *, token: str = "secret") -> Any:
    """Serves the page while `use` fetches from it; an answer is status, age and content."""

    async def serve() -> Any:
        server = TestServer(make_app(runs, "secret", frozenset({"127.0.0.1"})))
        await server.start_server()
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with ClientSession(cookie_jar=CookieJar(unsafe=True), headers=headers) as session:

                async def get(path: str) -> tuple[int, str, Any]:
                    async with session.get(URL(f"{server.make_url('/')}{path}", encoded=True)) as answer:
                        is_json = answer.content_type == "application/json"
                        content = await answer.json() if is_json else await answer.read()
                        return answer.status, answer.headers.get(AGE, ""), content

                return await use(get)
        finally:
            await server.close()

    return asyncio.run(serve())


async def first(get: Get, path: str) -> tuple[int, str, Any]:
    """Returns the first answer that is not `nothing yet`."""
    async with asyncio.timeout(20.0):
        while (answer := await get(path))[2] == {"problem": "nothing yet"}:
            await asyncio.sleep(0.05)
    return answer


def test_a_picture_says_its_age_and_a_camera_that_stands_still_grows_old(arm: Path, tmp_path: Path) -> None:
    async def use(get: Get) -> list[tuple[int, str, Any]]:
        return [
            await first(get, f"arms/{arm.name}/cameras/{name}") for name in ("front", "frozen", "blurred")
        ]

    front, frozen, blurred = served(tmp_path, use)
    assert (front[0], front[2]) == (200, b"picture")
    assert 0 <= float(front[1]) < 5
    assert (frozen[0], frozen[2]) == (200, b"old")
    assert 60 <= float(frozen[1]) < 80
    assert blurred == (202, "", {"problem": "no picture: 3 bytes"})


def test_what_is_no_camera_of_an_arm_that_is_up_is_refused_and_nothing_is_started(
    arm: Path, tmp_path: Path
) -> None:
    (tmp_path / "station.yaml").write_text("name: other")
    paths = (
        f"arms/{arm.name}/cameras/side",
        "arms/robot-rl-other/cameras/front",
        f"arms/..%2f{tmp_path.name}/cameras/front",
        f"arms/{arm.name}/cameras/..%2f..%2fstation.yaml",
        f"arms/{arm.name}/cameras/%2e%2e/%2e%2e/station.yaml",
    )

    async def use(get: Get) -> list[int]:
        return [(await get(path))[0] for path in paths]

    assert served(tmp_path, use) == [404] * 5
    assert not (arm / "pid").exists()


def test_a_picture_needs_the_token(arm: Path, tmp_path: Path) -> None:
    async def use(get: Get) -> int:
        return (await get(f"arms/{arm.name}/cameras/front"))[0]

    assert served(tmp_path, use, token="wrong") == 401
    assert not (arm / "pid").exists()


def test_the_process_that_looks_ends_when_nobody_does_and_begins_again(
    arm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CAMERA_IDLE_S", 0.4)
    path = f"arms/{arm.name}/cameras/front"

    async def use(get: Get) -> tuple[int, int]:
        await first(get, path)
        before = int((arm / "pid").read_text())
        for _ in range(10):  # longer than it may be idle
            assert (await get(path))[0] == 200
            await asyncio.sleep(0.1)
        assert int((arm / "pid").read_text()) == before
        async with asyncio.timeout(20.0):
            while _is_there(before):
                await asyncio.sleep(0.02)
        await first(get, path)
        return before, int((arm / "pid").read_text())

    before, after = served(tmp_path, use)
    assert before != after
    assert not _is_there(after), "the server ends what it has begun"


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_why_there_are_no_pictures_is_shown(arm: Path, tmp_path: Path) -> None:
    (arm / "fails").touch()

    async def use(get: Get) -> Any:
        return await first(get, f"arms/{arm.name}/cameras/front")

    assert served(tmp_path, use) == (202, "", {"problem": "the driver is gone"})


@contextlib.contextmanager
def feeding(folder: Path, frames: Callable[[], list[Frame]]) -> Generator[None]:
    with contextlib.closing(SensorFeed(frames, folder / SENSORS_SOCKET, pytest.fail)):
        yield


def test_a_look_fetches_what_is_new_and_leaves(arm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robot_rl.fleet.camera_feed._VISIT_S", 0.3)
    station = station_at(arm)
    cropped = {
        **CAMERAS,
        "front": CameraConfig(crop=(0, 0, 100, 50)),
        "blurred": CameraConfig(crop=(0, 0, 999, 9)),
    }
    asked = list[int]()

    def frames() -> list[Frame]:
        asked.append(1)
        stamps = {"front": time.monotonic_ns(), "frozen": 7, "blurred": time.monotonic_ns(), "cube": 9}
        names = {name: name if name == "cube" else f"{name}.rgb" for name in stamps}
        return [Frame(name=names[name], stamp_ns=at, array=RED) for name, at in stamps.items()]

    with feeding(arm, frames), contextlib.closing(Cameras(replace(station, cameras=cropped), arm)) as cameras:
        first_look = {name: (stamp_ns, content) for name, stamp_ns, content in cameras.look()}
        second_look = {name: stamp_ns for name, stamp_ns, _ in cameras.look()}
        time.sleep(0.15)
        num_asked = len(asked)
        time.sleep(0.15)
        assert len(asked) == num_asked, "between looks the driver is asked for nothing"
    assert sorted(first_look) == ["blurred", "front", "frozen"], "nothing came from `dark`"
    assert first_look["frozen"][0] == 7
    assert first_look["blurred"] == (0, "crop (0, 0, 999, 9) of a picture of 480 x 640 pixels.")
    seen = first_look["front"][1]
    assert isinstance(seen, bytes)
    assert Image.open(io.BytesIO(seen)).size == (50, 100)
    assert sorted(second_look) == ["blurred", "front"], "the frozen one has nothing new"
    with pytest.raises(DeviceError, match="nobody listens at"):
        list(cameras.look())


def test_pictures_are_small_and_depth_is_grey() -> None:
    red = Image.open(io.BytesIO(jpeg(RED)))
    assert red.size == (320, 240)
    assert np.abs(np.asarray(red)[120, 160].astype(int) - [200, 20, 20]).max() <= 4
    depth = np.array([[0.0, 1.0, 2.0, 9.0, np.nan]], np.float32).repeat(16, 0).repeat(16, 1)
    grey = np.asarray(Image.open(io.BytesIO(jpeg(depth))))
    assert np.abs(grey[8, 8::16].astype(int) - [255, 127, 0, 0, 0]).max() <= 8  # 2 m and more is black


@pytest.mark.parametrize(("cycles", "rate_hz"), [(50, 100.0), (1, None)])
def test_the_rate_of_an_arm_is_that_of_its_cycles(cycles: int, rate_hz: float | None) -> None:
    class Client:
        """Sends one status each 10 ms, of which there may be no more; the last one is repeated."""

        on_status: Any = None
        sent = 0

        def wait(self, newer_than_ns: int = -1) -> Status:
            self.sent = min(self.sent + 1, cycles)
            state = ArmState(position_rad=np.zeros(2), velocity_rad_s=np.zeros(2), stamp_ns=0)
            fields: Any = {"phase": "paused", "plan": -1, "sent_gripper": 0.0, "limited": False}
            status = Status(stamp_ns=10_000_000 * self.sent, state=state, sent_rad=np.zeros(2), **fields)
            self.on_status(status)
            return status

    client: Any = Client()
    status, measured_hz = state._watched(client)
    assert measured_hz == pytest.approx(rate_hz)
    assert status.phase == "paused"


def test_folders_of_other_users_are_no_arms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "robot-rl-a").mkdir()
    (tmp_path / "robot-rl-a" / "supervisor.sock").touch()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert [folder.name for folder in socket_folders()] == ["robot-rl-a"]
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert socket_folders() == []
