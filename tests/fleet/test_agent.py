"""Agent, hub and what runs send, with a job that moves nothing: order, cuts, peers that misbehave."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from robot_rl.core.lock import ProcessLock
from robot_rl.fleet import agent as agents
from robot_rl.fleet import hub as hubs
from robot_rl.fleet.agent import Agent, AgentConfig
from robot_rl.fleet.server import AGE, make_app
from robot_rl.rollout import hub_connection
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import Connection, Pace, TakenError, connected, machines
from robot_rl.rollout.on_node import NodeJob, _Remote
from robot_rl.rollout.spool import Spool
from robot_rl.rollout.weights import Snapshot

TOKEN = "a token of the tests"
Use = Callable[[HubConfig, Agent], Awaitable[Any]]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(agents, "_PROGRAM", "tests.fleet.fake_job")
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN)


@pytest.fixture
def said() -> list[str]:
    """What the agent has told the people at its machine."""
    return []


@pytest.fixture
def together(tmp_path: Path, said: list[str]) -> Callable[[Use], Any]:
    """Runs a test with a hub and an agent of this machine, in one loop."""

    async def run(use: Use) -> Any:
        server = TestServer(make_app(tmp_path, TOKEN, frozenset({"127.0.0.1"})))
        await server.start_server()
        hub = HubConfig(address=str(server.make_url("")).rstrip("/"), token_file=str(tmp_path / "token"))
        agent = Agent(AgentConfig(hub=hub, name="lab", runs=str(tmp_path / "runs")), said.append)
        serves = asyncio.create_task(agent.run())
        try:
            async with asyncio.timeout(60.0):
                while agent._hub is None:
                    await asyncio.sleep(0.01)
                return await use(hub, agent)
        finally:
            serves.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serves
            await server.close()

    return lambda use: asyncio.run(run(use))


class Run:
    """The run's end of a job."""

    def __init__(self, connection: Connection) -> None:
        self.send = connection.send
        self._messages, self._kept = connection.messages(), list[tuple[str, Any]]()

    async def get(self, *kinds: str) -> tuple[str, Any]:
        """Returns the next message of one of these kinds; the others are kept."""
        for at, message in enumerate(self._kept):
            if message[0] in kinds:
                return self._kept.pop(at)
        async for kind, body in self._messages:
            if kind in kinds:
                return kind, body
            self._kept.append((kind, body))
        raise ConnectionError

    async def turns(self, upto: int, *, acknowledges: bool = True) -> list[int]:
        numbers = list[int]()
        while not numbers or numbers[-1] < upto:
            numbers.append((await self.get("turn"))[1]["number"])
            if acknowledges:
                await self.send("has", numbers[-1])
        return numbers

    async def begin(self, *, has: int | None = None, alone_s: float = 30.0, **job: Any) -> str:
        """Begins the job, or goes on with it; returns what the agent answers first."""
        await self.send("begin", {"alone_s": alone_s, "has": has})
        kind, _ = await self.get("needs", "begun")
        self._kept.clear()  # it was on its way to the connection before
        if kind == "needs":
            content = {
                "source": "arm",
                "holder": "test",
                "stays": None,
                "files": {"policy": b"p"},
                "weights": b"w",
            }
            await self.send("content", {**content, "config": json.dumps(job)})
            await self.get("begun")
        return kind


@asynccontextmanager
async def joined(hub: HubConfig, job: str = "run-arm") -> AsyncGenerator[Run]:
    async with connected(hub, "job", {"node": "lab", "job": job}) as connection:
        yield Run(connection)


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.02)


def job_folder(job: str = "run-arm") -> Path:
    return agents.default_path().parent / "jobs" / job


def test_turns_arrive_in_order_and_go_on_after_a_cut(together: Callable[[Use], Any]) -> None:
    async def use(hub: HubConfig, agent: Agent) -> None:
        async with joined(hub) as run:
            assert await run.begin() == "needs"
            assert await run.turns(20, acknowledges=False) == list(range(1, 21))
            await run.send("has", 15)
            await until(lambda: agent._jobs["run-arm"].spool.taken == 15)
        async with joined(hub) as run:
            assert await run.begin(has=17) == "begun", "it acted meanwhile"
            assert await run.turns(40) == list(range(18, 41))
            await run.send("end", None)
            await run.get("ended")
        assert not job_folder().exists()

    together(use)


def test_the_hub_knows_the_newest_runs_of_a_machine_when_they_change(
    together: Callable[[Use], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_RUNS_S", 0.05)
    file = tmp_path / "runs" / "20261128-101500-tiny-seed0" / "metrics.jsonl"
    file.parent.mkdir(parents=True)

    def write(step: int, share: float) -> None:
        row = {
            "step": step,
            "updates": 1,
            "phase": "bc",
            "wall_s": 1.0,
            "eval/success": share,
            "eval/episodes": 4,
        }
        with file.open("a") as rows:
            rows.write(json.dumps(row) + "\n")

    async def use(hub: HubConfig, agent: Agent) -> None:
        sent = list[str]()
        send = agent._send

        async def counted(job: str, kind: str, body: Any) -> None:
            sent.append(kind)
            await send(job, kind, body)

        monkeypatch.setattr(agent, "_send", counted)

        async def shown() -> list[Any]:
            (lab,) = await asyncio.to_thread(machines, hub)
            return lab["runs"]

        while not (runs := await shown()):
            await asyncio.sleep(0.05)
        assert (runs[0]["name"], runs[0]["curve"]) == (file.parent.name, [[100.0, 0.25]])
        write(200, 0.75)
        while len((await shown())[0]["curve"]) < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert sent.count("runs") <= 2, "what has not changed is not sent"

    write(100, 0.25)
    together(use)


def test_the_page_gets_pictures_of_another_machine(
    together: Callable[[Use], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("robot_rl.fleet.shown.CAMERAS", "tests.fleet.fake_cameras")
    cameras = ("front", "frozen", "blurred")

    async def use(hub: HubConfig, agent: Agent) -> None:
        here = {("arm", camera): tmp_path for camera in cameras}
        monkeypatch.setattr(agent._state, "folder_of", lambda arm, camera: here.get((arm, camera)))

        async def get(path: str) -> tuple[int, str, bytes]:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with ClientSession(hub.address, headers=headers) as session:
                while True:
                    async with session.get(path) as answer:
                        seen = answer.status, answer.headers.get(AGE, ""), await answer.read()
                    if b"nothing yet" not in seen[2]:
                        return seen
                    await asyncio.sleep(0.05)

        front, frozen, blurred = [await get(f"/nodes/lab/arm/cameras/{camera}") for camera in cameras]
        assert (front[0], front[2]) == (200, b"picture")
        assert 0 <= float(front[1]) < 5  # in hundredths of a second
        assert frozen[2] == b"old"
        assert float(frozen[1]) > 60
        assert (blurred[0], json.loads(blurred[2])) == (202, {"problem": "no picture: 3 bytes"})
        side = await get("/nodes/lab/arm/cameras/side")
        assert json.loads(side[2]) == {"problem": "no arm 'arm' with a camera 'side' is up"}
        assert (await get("/nodes/den/arm/cameras/front"))[0] == 404

    together(use)
    pid = (tmp_path / "pid").read_text()
    assert not Path(f"/proc/{pid}").exists(), "it ends with the agent"


def test_a_turn_on_its_way_to_the_connection_before_is_none_of_this_one(
    together: Callable[[Use], Any],
) -> None:
    """The run has 17 turns. If it took 28 here it would pass over those between, which are sent next."""

    async def use(hub: HubConfig, agent: Agent) -> None:
        job = NodeJob(name="run-arm", source="arm", holder="test", config="", files={})
        async with connected(hub, "agent", {"node": "den"}) as way:
            remote = _Remote(hub, "den", job, Snapshot(0, 0, {}), 17, lambda _: None, None)
            messages = way.messages()
            assert (await anext(messages))[1:] == ["begin", {"alone_s": 60.0, "has": 17}]
            await way.send("run-arm", "turn", {"number": 28, "turn": b"late"})
            await way.send("run-arm", "begun", None)
            for number in range(18, 30):
                await way.send("run-arm", "turn", {"number": number, "turn": b""})
            got = [await asyncio.to_thread(remote.take, 10.0) for _ in range(12)]
            await way.send("run-arm", "failed", "over")
            await asyncio.to_thread(remote.close, "rest")
        assert [(one.number, one.follows) for one in got if one] == [(at, True) for at in range(18, 30)]

    together(use)


def test_an_arm_without_its_run_rests_and_keeps_what_it_did(together: Callable[[Use], Any]) -> None:
    async def use(hub: HubConfig, agent: Agent) -> None:
        async with joined(hub) as run:
            await run.begin(alone_s=0.5)
            await run.turns(5)
        job = agent._jobs["run-arm"]
        await until(lambda: not job.acts)
        left = job.spool.newest
        assert left > 5
        async with joined(hub) as run:
            assert await run.begin(has=5) == "needs", "another process"
            assert await run.turns(left + 5) == list(range(6, left + 6))

    together(use)


@pytest.mark.parametrize("last", ["end", "rest", "alone"])
def test_a_run_that_leaves_at_once_leaves_no_arm_that_acts(together: Callable[[Use], Any], last: str) -> None:
    async def use(hub: HubConfig, agent: Agent) -> None:
        async with joined(hub) as run:
            await run.send("begin", {"alone_s": 0.5, "has": None})
            content = {
                "source": "arm",
                "holder": "test",
                "stays": None,
                "files": {},
                "weights": b"w",
                "config": "{}",
            }
            await run.send("content", content)
            if last != "alone":  # else the connection ends
                await run.send(last, None)
                await run.get("ended")
        await until(lambda: all(not job.acts for job in agent._jobs.values()) and not agent._tasks)
        await asyncio.sleep(0.7)
        assert all(not job.acts for job in agent._jobs.values())

    together(use)


def test_a_job_that_failed_is_not_begun_again_before_its_run_knows(together: Callable[[Use], Any]) -> None:
    async def use(hub: HubConfig, agent: Agent) -> None:
        async with joined(hub) as run:
            await run.begin(dies_after=10)
            await run.turns(3)
        await until(lambda: agent._jobs["run-arm"].failure)
        async with joined(hub) as run:
            assert await run.begin(has=3) == "begun"
            assert await run.turns(10) == list(range(4, 11)), "what it did comes first"
            assert "ended with exit code 3" in (await run.get("failed"))[1]
            await run.send("end", None)
            await run.get("ended")
        assert (job_folder() / "log.txt").exists(), "its log says more"
        assert not list((job_folder() / "turns").glob("0*"))

    together(use)


def test_messages_that_are_none_of_ours_end_nothing(together: Callable[[Use], Any]) -> None:
    async def use(hub: HubConfig, agent: Agent) -> None:
        async with joined(hub) as run, joined(hub, "run-other") as other:
            await run.begin()
            await other.send("has", "seven")
            await other.send("begin", None)
            await other.send("weights", 3)
            await other.send("stop", {"number": 1, "device": "arm", "by": "nobody"})  # runs give no orders
            await other.send("begin", {"alone_s": 1.0, "has": None})
            await other.get("needs")
            await other.send("content", {"files": {"../../policy": b"p"}})
            assert "allowed: names without a folder" in (await other.get("failed"))[1]
            await run.turns(30)
            assert agent._hub is not None

    together(use)


def test_a_run_that_fetches_nothing_holds_nobody_up(
    together: Callable[[Use], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_AWAY", 2000)

    async def use(hub: HubConfig, agent: Agent) -> None:
        async with joined(hub) as idle, joined(hub, "run-other") as run:
            await idle.begin(size=200_000)
            await run.begin()
            await run.turns(200)
            await run.send("end", None)
            await run.get("ended")

    together(use)


def test_a_peer_that_answers_no_ping_is_gone(
    together: Callable[[Use], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_connection, "HEARTBEAT_S", 0.4)

    async def use(hub: HubConfig, agent: Agent) -> None:
        port, is_cut = int(str(hub.address).rsplit(":", 1)[1]), asyncio.Event()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while octets := await reader.read(1 << 16):
                if not is_cut.is_set():
                    writer.write(octets)

        async def cable(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
            for one in (writer, far_writer):
                one.close()
                await one.wait_closed()

        server = await asyncio.start_server(cable, "127.0.0.1")
        through = replace(hub, address=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with joined(through) as run:
            await run.begin()
            await run.turns(5)
            is_cut.set()
            with pytest.raises(ConnectionError):
                await run.turns(10_000)
        server.close()

    together(use)


def test_the_hub_knows_the_agent_of_its_own_machine(together: Callable[[Use], Any]) -> None:
    async def use(hub: HubConfig, agent: Agent) -> None:
        async with connected(hub, "agent", {"node": "den"}) as den:
            await den.send("", "look", {"devices": [], "place": "another machine's"})
            looks = dict[str, Any]()

            async def look() -> None:
                found = await asyncio.to_thread(machines, hub)
                looks.update((one["name"], one) for one in found)

            while not all(looks.get(name, {}).get("place") for name in ("lab", "den")):
                await look()
            assert {name: one["is_here"] for name, one in looks.items()} == {"lab": True, "den": False}

    together(use)


@asynccontextmanager
async def beginning(
    hub: HubConfig, name: str = "lab"
) -> AsyncGenerator[tuple[asyncio.Task[None], list[str]]]:
    """Begins another agent; yields its task, and what it says."""
    says = list[str]()
    task = asyncio.create_task(Agent(AgentConfig(hub=hub, name=name), says.append).run())
    try:
        yield task, says
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_machine_has_its_name_for_itself(
    together: Callable[[Use], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_TAKEN_S", 0.3)

    async def use(hub: HubConfig, agent: Agent) -> None:
        async with beginning(hub) as (second, says):
            with pytest.raises(TakenError, match="node: 'lab' is connected already"):
                await second
        assert len(says) == 1, "once, in however many attempts"
        assert agent._hub is not None

    together(use)


def test_an_agent_gets_the_name_of_one_that_was_killed(
    together: Callable[[Use], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before shows nothing more, and its connection was cut without a word."""
    monkeypatch.setattr(hubs, "_SILENT_S", 1.2)

    async def use(hub: HubConfig, agent: Agent) -> None:
        async with connected(hub, "agent", {"node": "den"}), beginning(hub, "den") as (_, says):
            await until(lambda: len(says) == 2)
            assert "waits for it" in says[0]
            assert says[1].endswith("as den")

    together(use)


def age(folder: Path, days: float) -> None:
    then_s = time.time() - 86400.0 * days
    for path in (*folder.rglob("*"), folder):
        os.utime(path, times=(then_s, then_s))


def left_by_a_run(name: str, *, days: float) -> Path:
    """Returns the folder of a job with three turns that nobody has fetched since."""
    spool = Spool(job_folder(name) / "turns")
    for _ in range(3):
        spool.put(b"x")
    age(job_folder(name), days)
    return job_folder(name)


def test_what_no_run_has_fetched_for_too_long_is_deleted(
    together: Callable[[Use], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_CLEAN_S", 0.05)

    async def use(hub: HubConfig, agent: Agent) -> None:
        says = list[str]()
        agent._say = says.append
        job_folder("run-held").mkdir(parents=True)
        lock = ProcessLock(job_folder("run-held") / "lock")  # its process lives
        left_by_a_run("run-held", days=15)
        left_by_a_run("run-newer", days=13)
        async with joined(hub) as run:
            await run.send("begin", {"alone_s": 1.0, "has": None})
            await run.get("needs")
            age(job_folder(), 15)  # its run is there
            first = left_by_a_run("run-first", days=15)
            await until(lambda: not first.exists())
            second = left_by_a_run("run-second", days=15)
            await until(lambda: not second.exists())
        there = {path.name for path in first.parent.iterdir()}
        lock.release()
        assert there == {"run-arm", "run-held", "run-newer"}
        text = "deleted, with 3 turns that its run did not fetch for 14 days (keep_days)"
        assert says == [f"run-first: {text}", f"run-second: {text}"]
        await until(lambda: not job_folder("run-held").exists())
        await asyncio.sleep(0.3)
        assert job_folder().exists(), "its run left now, whatever the wall clock says"
        agent._jobs["run-arm"].alone_since_s = time.monotonic() - 86400.0 * 15
        await until(lambda: not job_folder().exists())
        assert not agent._jobs

    together(use)


def test_large_weights_let_an_order_pass(together: Callable[[Use], Any]) -> None:
    async def use(hub: HubConfig, agent: Agent) -> None:
        async with joined(hub) as run:
            await run.begin()
            big = bytes(range(256)) * 40_000  # 80 parts
            await asyncio.gather(run.send("weights", big), run.send("has", 1))
            await run.get("loaded")
            assert (job_folder() / "weights").read_bytes() == big

    together(use)


def test_who_is_at_the_arm_reads_what_a_job_logs(together: Callable[[Use], Any], said: list[str]) -> None:
    async def use(hub: HubConfig, agent: Agent) -> None:
        async with joined(hub) as run:
            await run.begin(logs=["put the cube back [Y]", "half a li", "ne"])
            await until(lambda: said[-1].endswith("half a line"))
            await run.send("end", None)
            await run.get("ended")

    together(use)
    shown = [line for line in said if line.startswith("run-arm: ") and not line.endswith(("begins", "ends"))]
    assert shown == ["run-arm: put the cube back [Y]", "run-arm: half a line", "run-arm: bye"]


def test_steps_and_weights_keep_to_the_rate_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept_s = 100.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        slept_s.append(round(seconds, 6))
        now_s += seconds

    monkeypatch.setattr(hub_connection.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(hub_connection.asyncio, "sleep", sleep)
    pace, free = Pace(4.0), Pace()  # 500 bytes in a millisecond

    def send(by: Pace, octets: int) -> None:
        with contextlib.suppress(StopIteration):
            by.wait(octets).send(None)

    send(pace, 25_000)
    now_s += 0.03  # what is not used is gone
    send(pace, 50_000)
    send(pace, 500)
    send(free, 10**9)
    assert slept_s == [0.05, 0.1, 0.001]


def test_slow_weights_let_what_was_taken_and_the_end_pass(
    together: Callable[[Use], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list[int]()
    send = Connection.send

    async def noted(connection: Connection, *values: Any, pace: Pace | None = None) -> bool:
        if values[0] == "weights":
            parts.append(len(values[1]))
        return await send(connection, *values, pace=pace)

    monkeypatch.setattr(Connection, "send", noted)

    async def use(hub: HubConfig, agent: Agent) -> None:
        job = NodeJob(name="run-arm", source="arm", holder="test", config="{}", files={})
        slow = replace(hub, most_mbit_s=0.5)
        remote = _Remote(slow, "lab", job, Snapshot(0, 0, {}), 0, lambda _: None, None)
        assert (await asyncio.to_thread(remote.take, 30.0)) is not None
        remote.offer(Snapshot(1, 1, {"w": torch.zeros(1_000_000)}))  # a minute
        await until(lambda: parts)
        taken = 0
        while taken < 10:
            arrived = await asyncio.to_thread(remote.take, 5.0)
            assert arrived is not None
            taken = arrived.number
        await until(lambda: agent._jobs["run-arm"].spool.taken >= 9)
        began_s = time.monotonic()
        await asyncio.to_thread(remote.close, "end")
        assert time.monotonic() - began_s < 20.0
        await until(lambda: not job_folder().exists())

    together(use)
