"""Which machine of the fleet a run acts on, also where several runs choose at one moment."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from robot_rl.core.errors import DeviceError
from robot_rl.rollout import on_node
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import Connection, connected, machines
from robot_rl.rollout.hub_devices import nodes_for
from robot_rl.rollout.on_node import NodeJob, NodeSource
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.weights import Publisher
from robot_rl.sched.needs import Need
from tests.fleet.test_nodes import Served, hub

__all__ = ["hub"]
WEST = Need(kind="robot", labels={"cell": "west"})


def arm(name: str = "arm-west", *, holder: str = "") -> dict[str, Any]:
    known: dict[str, Any] = {
        "name": name,
        "kind": "robot",
        "real": True,
        "slots": 1,
        "labels": {"cell": "west"},
    }
    known |= {"caps": [], "control_hz": 20.0}
    return {**known, "held": [{"slots": 1, "holder": holder, "pid": 1}] if holder else []}


def machine(name: str, *devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "jobs": [], "acting": [], "devices": list(devices), **more}


def test_a_run_knows_which_arm_is_nearest_to_what_it_needs() -> None:
    nodes = [machine("lab", arm(holder="train of ann")), machine("den", arm())]
    assert list(nodes_for(WEST, nodes)) == ["den", "lab"], "the free one first"
    assert list(nodes_for(replace(WEST, node="lab"), nodes)) == ["lab"]
    with pytest.raises(
        DeviceError, match=r"Nearest is arm-west@lab, held by 'train of ann': its cell is west"
    ):
        nodes_for(Need(kind="robot", labels={"cell": "east"}), nodes)
    with pytest.raises(DeviceError, match=r"it is on lab, not attic"):
        nodes_for(Need(kind="robot", node="attic"), nodes)
    with pytest.raises(DeviceError, match=r"no machine is connected to the hub\. `robot-rl agent` joins one"):
        nodes_for(WEST, [])


def test_a_job_without_a_lease_is_about_to_take_one() -> None:
    two = arm("arm-1"), arm("arm-2")
    assert nodes_for(WEST, [machine("lab", *two)]) == {"lab": 1}
    assert nodes_for(WEST, [machine("lab", *two, jobs=["a"])]) == {"lab": 1}
    acting = machine("lab", arm("arm-1", holder="a"), arm("arm-2"), jobs=["a"], acting=["a"])
    assert nodes_for(WEST, [acting]) == {"lab": 1}, "its lease is counted once"
    assert nodes_for(WEST, [machine("lab", *two, jobs=["a", "b"])]) == {"lab": None}
    assert nodes_for(WEST, [machine("lab", arm("arm-1", holder="ann"), arm("arm-2"))]) == {"lab": 0}
    stopped = {**arm("arm-1"), "stopped": {"reason": "a limit"}}
    assert nodes_for(WEST, [machine("lab", stopped, arm("arm-2"))]) == {"lab": 0}


@contextmanager
def shown(at: HubConfig, *nodes: dict[str, Any], broken: str = "") -> Generator[None]:
    """Connects machines whose agents show something, and begin nothing; jobs on the one `broken` fail."""
    over, ready = threading.Event(), threading.Event()

    async def answer(way: Connection, name: str) -> None:
        async for job, kind, _ in way.messages():
            if kind == "begin" and name == broken:
                await way.send(job, "failed", "its cell is locked.")
            elif kind in ("rest", "end"):
                await way.send(job, "ended", None)

    async def stay() -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            answers = list[asyncio.Task[None]]()
            for node in nodes:
                way = await stack.enter_async_context(connected(at, "agent", {"node": node["name"]}))
                await way.send("", "look", node)
                answers.append(tasks.create_task(answer(way, node["name"])))
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.01)
            for one in answers:
                one.cancel()

    thread = threading.Thread(target=asyncio.run, args=(stay(),))
    thread.start()
    try:
        assert ready.wait(10.0)
        until(lambda: all(one["devices"] for one in machines(at)) and len(machines(at)) == len(nodes))
        yield
    finally:
        over.set()
        thread.join(10.0)


def until(true: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def take(turn: Callable[[], str]) -> None:
    """Takes turns until one raises."""
    until(lambda: turn() == "nowhere")


def jobs(at: HubConfig) -> dict[str, list[str]]:
    return {one["name"]: one["jobs"] for one in machines(at)}


@pytest.fixture
def source(hub: Served) -> Iterator[Callable[..., Any]]:
    """Returns what begins a source, by name, and one turn of its loop."""
    publisher, made = Publisher(), list[NodeSource]()
    publisher.offer(0, lambda: {"weight": torch.zeros(1)})

    def begin(name: str, need: Need = WEST) -> Callable[[], str]:
        job = NodeJob(name=name, source="arm", holder=name, config="", files={})
        one = NodeSource(job, hub.joined, need=need, wait_s=0.02, away_s=20.0)
        made.append(one)

        def turn() -> str:
            one.collect(publisher)
            return one.node

        return turn

    yield begin
    for one in made:
        one.close()


def test_runs_that_choose_at_one_moment_get_an_arm_each(
    hub: Served, source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs see three free arms on two machines; each sees them before the others have begun."""
    with shown(hub.joined, machine("den", arm()), machine("lab", arm("arm-1"), arm("arm-2"))):
        before = machines(hub.joined)
        looks = {"left": 3}

        def seen(at: HubConfig) -> list[dict[str, Any]]:
            looks["left"] -= 1
            return before if looks["left"] >= 0 else machines(at)

        monkeypatch.setattr(on_node, "machines", seen)
        turns = [source(f"run-{number}") for number in range(3)]

        def are_placed() -> bool:
            for turn in turns:
                turn()
            return sum(map(len, jobs(hub.joined).values())) == 3

        until(are_placed)
        assert looks["left"] < 0, "those who were late looked again"
        assert {name: len(found) for name, found in jobs(hub.joined).items()} == {"den": 1, "lab": 2}


def test_where_no_arm_is_free_runs_stand_in_line(hub: Served, source: Callable[..., Any]) -> None:
    with shown(hub.joined, machine("lab", arm(holder="train of ann"))):
        for number in range(2):
            assert source(f"run-{number}")() == "lab"
        until(lambda: jobs(hub.joined) == {"lab": ["run-0", "run-1"]})


def test_a_machine_that_cannot_act_is_left_for_another(hub: Served, source: Callable[..., Any]) -> None:
    with shown(hub.joined, machine("den", arm()), machine("lab", arm()), broken="den"):
        turn = source("run-a")
        assert turn() == "den"
        until(lambda: turn() == "lab")
        until(lambda: jobs(hub.joined) == {"den": [], "lab": ["run-a"]})


def test_a_source_ends_where_no_machine_can_act(hub: Served, source: Callable[..., Any]) -> None:
    with shown(hub.joined, machine("den", arm()), broken="den"):
        for need in (WEST, replace(WEST, node="den")):
            turn = source("run-a", need)
            with pytest.raises(ActorError, match=r"^den: its cell is locked\.$"):
                take(turn)
    with pytest.raises(ActorError, match="no machine is connected"):
        source("run-b", replace(WEST, node="lab"))()
