"""The live scene without a browser: what is shown of an arm, and what passes between page and viewer."""

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, WSMsgType, WSServerHandshakeError
from aiohttp.test_utils import TestServer
from yarl import URL

from robot_rl.config import dump
from robot_rl.fleet import scenes, shown, state
from robot_rl.fleet.agent import Agent, AgentConfig
from robot_rl.fleet.scene_feed import Scene
from robot_rl.fleet.scenes import _policy
from robot_rl.fleet.server import make_app
from robot_rl.hal.arm import ArmState
from robot_rl.real.launch import ABOUT
from robot_rl.real.station import load_station
from robot_rl.rollout.hub_config import HubConfig
from tests.fleet.fake_viewer import LARGE_BYTES
from tests.real.supervisor.rig import two_joint_station

TOKEN = "a token of the tests"
Use = Callable[[ClientSession, str], Awaitable[Any]]
PANDA_RAD = np.array([0.3, -0.2, 0.1, -2.0, 0.2, 1.9, 0.5])


@pytest.fixture
def arm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("v")
    (folder / "station.yaml").write_text(dump(two_joint_station()))
    (folder / ABOUT).write_text(json.dumps({"station": "bench", "file": str(folder / "station.yaml")}))
    monkeypatch.setattr(state, "socket_folders", lambda: [folder])
    for module in (scenes, shown):
        monkeypatch.setattr(module, "SCENE", "tests.fleet.fake_viewer")
    monkeypatch.setenv("ROBOT_RL_STATE", str(folder))
    return folder


@pytest.fixture(params=["arms", "nodes/lab"])
def where(request: pytest.FixtureRequest) -> str:
    """An arm of the page's machine, or of one whose agent is connected."""
    return request.param


def served(
    runs: Path, use: Use, *, token: str = TOKEN, agents: list[asyncio.Task[None]] | None = None
) -> Any:
    """Serves the page, with an agent, which joins `agents`, while `use` talks to it."""

    async def serve() -> Any:
        server = TestServer(make_app(runs, TOKEN, frozenset({"127.0.0.1"})))
        await server.start_server()
        (runs / "token").touch(0o600)
        (runs / "token").write_text(TOKEN)
        at = str(server.make_url("")).rstrip("/")
        agent = Agent(AgentConfig(hub=HubConfig(address=at, token_file=str(runs / "token")), name="lab"))
        serves = asyncio.create_task(agent.run())
        if agents is not None:
            agents.append(serves)
        try:
            async with ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
                while agent._hub is None:
                    await asyncio.sleep(0.01)
                return await use(session, at)
        finally:
            if not serves.cancelling():
                serves.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serves
            await server.close()

    return asyncio.run(serve())


def test_files_of_a_viewer_come_with_a_policy_that_allows_no_orders(
    arm: Path, where: str, tmp_path: Path
) -> None:
    async def use(session: ClientSession, at: str) -> tuple[Any, ...]:
        scene = f"{at}/{where}/{arm.name}/scene/"
        async with session.get(scene) as page:
            html = await page.text()
        async with session.get(URL(f"{scene}assets/A[w].ttf?size=3", encoded=True)) as file:
            return html, page.headers, await file.text(), file.headers, scene

    html, of_page, asked, of_file, scene = served(tmp_path, use)
    assert html.index('<script src="/scene.js">') < html.index("<title>")
    assert "oncontextmenu" not in html
    policy = of_page["Content-Security-Policy"]
    (inline,) = [word for word in policy.split() if word.startswith("'sha256-")]
    assert (
        inline.removesuffix(";")
        == f"'sha256-{base64.b64encode(hashlib.sha256(b'draw();').digest()).decode()}'"
    )
    assert "script-src 'self' 'unsafe-eval' 'sha256-" in policy
    assert f"connect-src {scene} ws{scene.removeprefix('http')};" in policy
    assert asked == "/assets/A[w].ttf?size=3"
    rest = policy.partition("style-src")[2]
    assert rest.endswith("; sandbox allow-scripts allow-same-origin"), "it opens no page that gives orders"
    of_script = f"default-src 'none'; script-src 'self' 'unsafe-eval'; style-src{rest}"
    assert of_file["Content-Security-Policy"] == of_script, "a worker has the policy of its script"
    assert of_file["Cross-Origin-Opener-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in of_file, "other pages read no models"


def test_a_policy_names_the_viewer_alone_where_it_can() -> None:
    named = _policy(b"", URL("https://hub.lab:8642"), "/arms/x/scene/")
    assert "connect-src https://hub.lab:8642/arms/x/scene/ wss://hub.lab:8642/arms/x/scene/;" in named
    assert "connect-src 'self';" in _policy(b"", URL("http://[::1]:8642"), "/arms/x/scene/")


def test_streams_pass_both_ways_and_end_as_the_viewer_ends_them(
    arm: Path, where: str, tmp_path: Path
) -> None:
    async def use(session: ClientSession, at: str) -> list[Any]:
        async with session.ws_connect(f"{at}/{where}/{arm.name}/scene/state?sid=7") as stream:
            await stream.send_str("state_ack")
            await stream.send_bytes(b"\0\1")
            answers = [(await stream.receive()).data for _ in range(2)]
            await stream.send_str("end")
            last = await stream.receive()
            return [*answers, last.type, last.data]

    assert served(tmp_path, use) == ["/state?sid=7 state_ack", b"\0\1", WSMsgType.CLOSE, 4001]


def test_a_viewer_ends_when_pages_send_no_sign(
    arm: Path, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (scenes, shown):
        monkeypatch.setattr(module, "SCENE_IDLE_S", 0.4)
    monkeypatch.setattr(scenes, "_SIGN_S", 0.05)

    async def use(session: ClientSession, at: str) -> None:
        async with session.ws_connect(f"{at}/{where}/{arm.name}/scene/ui") as stream:
            for _ in range(10):
                await stream.send_bytes(b"a person moves")
                await asyncio.sleep(0.1)
            assert (arm / "begun").exists()
            async with asyncio.timeout(20.0):
                while (arm / "begun").exists():
                    await stream.send_str("state_ack")  # the page does it by itself
                    await asyncio.sleep(0.05)

    served(tmp_path, use)


def test_models_other_paths_and_other_pages_get_no_scene(arm: Path, where: str, tmp_path: Path) -> None:
    async def use(session: ClientSession, at: str) -> list[int]:
        scene, found = f"{at}/{where}/{arm.name}/scene", list[int]()
        for path in ("/drop", "/%64rop", "/..%2f..%2fstation.yaml", "/assets/%2e%2e/%2e%2e/x"):
            async with session.get(URL(scene + path, encoded=True)) as answer:
                found.append(answer.status)
        async with session.get(f"{at}/{where}/robot-rl-x/scene/") as answer:
            found.append(answer.status)
        with pytest.raises(WSServerHandshakeError) as refusal:
            await session.ws_connect(f"{scene}/ui", headers={"Origin": "http://127.0.0.1:1"})
        assert not (arm / "begun").exists()
        return [*found, refusal.value.status]

    unknown = 404 if where == "arms" else 503  # the agent says that it has no such arm
    assert served(tmp_path, use) == [404, 404, 404, 404, unknown, 403]


@pytest.mark.parametrize("path", ["", "ui"])
def test_a_scene_needs_the_token(arm: Path, where: str, tmp_path: Path, path: str) -> None:
    async def use(session: ClientSession, at: str) -> int:
        async with session.get(f"{at}/{where}/{arm.name}/scene/{path}") as answer:
            return answer.status

    assert served(tmp_path, use, token="wrong") == 401
    assert not (arm / "begun").exists()


def test_large_files_of_another_machine_come_whole_and_many_at_once(arm: Path, tmp_path: Path) -> None:
    async def use(session: ClientSession, at: str) -> list[bytes]:
        async def fetch(number: int) -> bytes:
            async with session.get(f"{at}/nodes/lab/{arm.name}/scene/large/{number}") as answer:
                return await answer.read()

        return await asyncio.gather(*(fetch(number) for number in range(6)))

    found = served(tmp_path, use)
    assert found == [bytes([number]) * LARGE_BYTES for number in range(6)]


def test_a_machine_that_is_gone_ends_the_streams_and_one_that_is_none_has_no_scene(
    arm: Path, tmp_path: Path
) -> None:
    async def use(session: ClientSession, at: str) -> tuple[Any, ...]:
        async with session.get(f"{at}/nodes/office/{arm.name}/scene/") as answer:
            none = answer.status, await answer.text()
        async with session.ws_connect(f"{at}/nodes/lab/{arm.name}/scene/ui") as stream:
            await stream.send_bytes(b"here")
            assert (await stream.receive()).data == b"here"
            agents[0].cancel()
            last = await stream.receive()
        async with session.get(f"{at}/nodes/lab/{arm.name}/scene/") as answer:
            return none, last.type, answer.status

    agents = list[asyncio.Task[None]]()
    none, last, after = served(tmp_path, use, agents=agents)
    assert none == (404, "no machine 'office' is connected")
    assert last in (WSMsgType.CLOSE, WSMsgType.CLOSED)
    assert after == 404


def state_at(position_rad: np.ndarray, gripper: float) -> ArmState:
    still = np.zeros_like(position_rad)
    return ArmState(stamp_ns=1, position_rad=position_rad, velocity_rad_s=still, gripper=gripper)


def test_a_simulated_arm_is_shown_in_its_scene_with_what_was_measured() -> None:
    scene = Scene(load_station("sim_in_process"))
    shown, index = scene.shown, scene.shown.index
    cube, goal = index.tracked["cube"], index.tracked["goal"]
    goal_before = shown.mocap_pos[goal.mocap].copy()
    pose = np.array([0.4, 0.1, 0.3, 1.0, 0.0, 0.0, 0.0])
    scene.show(state_at(PANDA_RAD, gripper=0.03), {"cube": pose, "unknown": pose})
    assert shown.qpos[index.arm_qpos] == pytest.approx(PANDA_RAD)
    assert shown.qpos[index.finger_qpos] == pytest.approx(0.03)
    assert shown.qpos[cube.qpos : cube.qpos + 7] == pytest.approx(pose)
    assert shown.body_pos[cube.body] == pytest.approx([0.4, 0.1, 0.3])
    assert shown.mocap_pos[goal.mocap] == pytest.approx(goal_before), "nothing was measured of it"
    scene.show(state_at(PANDA_RAD * np.nan, gripper=0.0), {})
    assert shown.qpos[index.arm_qpos] == pytest.approx(PANDA_RAD)


def test_an_arm_of_which_no_task_is_known_is_shown_alone_and_with_one_in_its_scene() -> None:
    station = replace(
        load_station("panda_ros2"), gripper=replace(load_station("panda_ros2").gripper, open=1.0, closed=0.0)
    )
    alone = Scene(station)
    assert alone.shown.qpos[alone.shown.index.arm_qpos] == pytest.approx(station.home_rad)
    assert not alone.shown.index.tracked
    alone.show(state_at(PANDA_RAD, gripper=0.5), {})
    assert alone.shown.qpos[alone.shown.index.arm_qpos] == pytest.approx(PANDA_RAD)
    assert alone.shown.qpos[alone.shown.index.finger_qpos] == pytest.approx(0.02), "half of 0.04 m"
    assert "cube" in Scene(station, "pick_cube").shown.index.tracked
