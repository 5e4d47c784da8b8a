"""Arms of another machine: who gets in, what is placed where, and that a cut cable loses no step."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from robot_rl.cli.main import main
from robot_rl.config import build, dump
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.data.episode import SOURCES
from robot_rl.data.store.reader import open_source
from robot_rl.fleet.agent import Agent, AgentConfig
from robot_rl.fleet.server import ORDER, make_app
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import NAME, HubRefusedError, machines
from robot_rl.rollout.on_node import _Remote, job_name
from robot_rl.rollout.spool import Spool
from robot_rl.sched.leases import LeaseStore
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.runs import SMALL, folder_of, patient_station

HOSTS = frozenset({"127.0.0.1"})
TOKEN = "a token of the tests"
_PROGRAM = "from robot_rl.cli.main import main; import sys; sys.exit(main())"


class Served:
    """A hub on a port of this machine, which can be cut off and put back."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, 0
        (folder / "token").touch(0o600)
        (folder / "token").write_text(TOKEN)
        self.begin()

    @property
    def joined(self) -> HubConfig:
        return HubConfig(**self.config)

    @property
    def config(self) -> dict[str, Any]:
        return {"address": f"http://127.0.0.1:{self.port}", "token_file": str(self.folder / "token")}

    def begin(self) -> None:
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._over = asyncio.Event()

        async def serve() -> None:
            runner = web.AppRunner(make_app(self.folder, TOKEN, HOSTS), shutdown_timeout=0.2)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
            await site.start()
            self.port = runner.addresses[0][1]
            ready.set()
            await self._over.wait()
            await runner.cleanup()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),), daemon=True)
        self._thread.start()
        assert ready.wait(10.0)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        self._loop.close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "here"))
    served = Served(tmp_path)
    yield served
    served.end()


def begin_agent(hub: Served, name: str = "lab") -> subprocess.Popen[bytes]:
    """Starts the agent of another machine: a process with other state, whose log is `<name>.log`."""
    words = [f"hub.{key}={value}" for key, value in hub.config.items()]
    with (hub.folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "agent", f"name={name}", *words],
            env={**os.environ, "ROBOT_RL_STATE": str(hub.folder / name)},
            stderr=log,
        )


@contextlib.contextmanager
def agent(hub: Served, name: str = "lab") -> Generator[None]:
    process = begin_agent(hub, name)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 0


def until(true: Any, limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def enter_station(hub: Served, monkeypatch: pytest.MonkeyPatch, name: str = "lab") -> None:
    with monkeypatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(hub.folder / name))
        assert main(["devices", f"add={patient_station(hub.folder)}"]) == 0


def run_of(at: Served, *, steps: int = 60, alone_s: float = 20.0, **changes: Any) -> RunConfig:
    words = {key: value for key, value in SMALL.items() if key != "num_envs"}
    learning = {key: value for key, value in SMALL["method"].items() if key != "env_steps"}
    source = {"station": "any", "needs": {"node": "lab"}, "env_steps": steps}
    made = {
        "method": learning,
        "sources": {"arm": source},
        "hub": {**at.config, "alone_s": alone_s},
        "out": str(at.folder / "runs"),
        "silence_s": 60.0,
    }
    return build(RunConfig, {**words, **made, **changes})


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the turns that the run took, in order."""
    numbers, take = list[int](), _Remote.take

    def noted(remote: _Remote, wait_s: float) -> Any:
        found = take(remote, wait_s)
        if found is not None:
            numbers.append(found.number)
        return found

    monkeypatch.setattr(_Remote, "take", noted)
    return numbers


class Meanwhile(threading.Thread):
    """Does something once the run has ten steps of the arm; `join` raises what went wrong."""

    def __init__(self, hub: Served, doing: Callable[[], None]) -> None:
        super().__init__()
        self._hub, self._doing = hub, doing
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            until(self._has_ten)
            self._doing()
        except BaseException as error:
            self._error = error

    def _has_ten(self) -> bool:
        files = (self._hub.folder / "lab").glob("jobs/*/turns/taken")
        return any(int(file.read_text() or 0) >= 10 for file in files)

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._error is not None:
            raise self._error


def steps_of(hub: Served) -> dict[str, int]:
    summary = json.loads((folder_of(hub.folder / "runs") / "summary.json").read_text())
    return summary["content"]["control_steps"] if "content" in summary else summary["control_steps"]


def leases_at(hub: Served, name: str = "lab") -> list[str]:
    return [lease.holder for lease in LeaseStore(hub.folder / name / "leases.db").active()]


# --- arms of another machine ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_learns_on_an_arm_of_another_machine(
    hub: Served, monkeypatch: pytest.MonkeyPatch, arrived: list[int]
) -> None:
    enter_station(hub, monkeypatch)
    held = list[str]()
    with agent(hub):
        until(lambda: machines(hub.joined))

        def look() -> None:
            held.extend(leases_at(hub))
            until(lambda: machines(hub.joined)[0]["acting"] == machines(hub.joined)[0]["jobs"] != [])

        looks = Meanwhile(hub, look)
        phases.run(run_of(hub))
        looks.join()
        until(lambda: not leases_at(hub))
    assert arrived[:60] == list(range(1, 61))
    assert steps_of(hub) == {"demo": 30, "sim": 60}
    assert held == [f"train small seed 0 arm, of {socket.gethostname()}"], "leased where the arm is"
    assert not list((hub.folder / "here" / "jobs").glob("*"))
    assert not list((hub.folder / "lab" / "jobs").glob("*")), "nothing is left behind"


@pytest.mark.slow
def test_a_person_at_an_arm_of_another_machine_takes_over(
    hub: Served, monkeypatch: pytest.MonkeyPatch, arrived: list[int]
) -> None:
    enter_station(hub, monkeypatch)
    arm = {"station": "any", "needs": {"node": "lab"}, "env_steps": 60, "human": True}
    person = {"input": "scripted", "scripted": {"patience_s": 0.05, "reaction_s": 0.0, "lag_s": 0.0}}
    with agent(hub):
        until(lambda: machines(hub.joined))
        phases.run(run_of(hub, sources={"arm": arm}, human=person, env={**SMALL["env"], "horizon_s": 2.0}))
    assert arrived[:60] == list(range(1, 61))
    steps = steps_of(hub)
    assert steps["human"] > 10
    assert steps["human"] + steps.get("sim", 0) == 60
    kept = open_source(folder_of(hub.folder / "runs") / "experience" / "arm")
    sources = [kept.read(number).source for number in range(len(kept))]
    assert sum(int((one == SOURCES.index("human")).sum()) for one in sources) == steps["human"]


@pytest.mark.slow
def test_one_run_has_simulations_on_ray_and_an_arm_of_another_machine(
    hub: Served, monkeypatch: pytest.MonkeyPatch, arrived: list[int]
) -> None:
    ray = pytest.importorskip("ray")
    enter_station(hub, monkeypatch)
    arm = {"station": "any", "needs": {"node": "lab"}, "env_steps": 40}
    sources = {"arm": arm, "simulations": {"num_envs": 4, "env_steps": 200}}
    how: dict[str, Any] = {"transport": "ray", "ray": {"cpus": 0.5}}
    try:
        with agent(hub):
            until(lambda: machines(hub.joined))
            phases.run(run_of(hub, sources=sources, **how))
    finally:
        ray.shutdown()
    assert arrived[:40] == list(range(1, 41))
    assert steps_of(hub) == {"demo": 30, "sim": 240}
    kept = folder_of(hub.folder / "runs") / "experience"
    assert {path.name for path in kept.iterdir()} >= {"arm", "simulations"}


@pytest.mark.slow
def test_what_an_arm_does_while_it_is_cut_off_arrives_later(
    hub: Served, monkeypatch: pytest.MonkeyPatch, arrived: list[int]
) -> None:
    enter_station(hub, monkeypatch)
    alone = list[int]()

    def cut() -> None:
        hub.end()
        (spool,) = (hub.folder / "lab").glob("jobs/*/turns")
        before = Spool(spool).newest
        until(lambda: Spool(spool).newest >= before + 40)
        alone.extend(range(before + 1, before + 41))
        hub.begin()

    with agent(hub):
        until(lambda: machines(hub.joined))
        cuts = Meanwhile(hub, cut)
        phases.run(run_of(hub, steps=160))
        cuts.join()
    assert arrived[:160] == list(range(1, 161)), "each once, in order"
    assert alone
    assert set(alone) <= set(arrived[:160]), "what was done meanwhile, too"
    assert steps_of(hub)["sim"] == 160


@pytest.mark.slow
def test_an_agent_that_is_killed_and_begun_again_loses_no_step(
    hub: Served, monkeypatch: pytest.MonkeyPatch, arrived: list[int]
) -> None:
    enter_station(hub, monkeypatch)
    with contextlib.ExitStack() as agents:

        def replace() -> None:
            first.kill()
            first.wait()
            agents.enter_context(agent(hub))

        first = begin_agent(hub)
        until(lambda: machines(hub.joined))
        replaces = Meanwhile(hub, replace)
        phases.run(run_of(hub, steps=120))
        replaces.join()
    assert first.returncode == -signal.SIGKILL
    assert arrived[:120] == list(range(1, 121)), "each once, in order"


@pytest.mark.slow
def test_an_arm_whose_learner_is_killed_rests_and_a_resumed_run_gets_its_steps(
    hub: Served, monkeypatch: pytest.MonkeyPatch, arrived: list[int]
) -> None:
    enter_station(hub, monkeypatch)
    config = hub.folder / "run.yaml"
    config.write_text(dump(run_of(hub, steps=160, alone_s=2.0).used()))
    learner = subprocess.Popen([sys.executable, "-c", _LEARN, str(config)], env=dict(os.environ))
    with agent(hub):
        Meanwhile(hub, learner.kill).join()
        until(lambda: not leases_at(hub))
        assert "its run was away for 2 s; the arm rests" in (hub.folder / "lab.log").read_text()
        (spool,) = (hub.folder / "lab").glob("jobs/*/turns")
        left = sorted(int(file.name) for file in spool.glob("0*"))
        phases.resume(folder_of(hub.folder / "runs"))
    learner.wait()
    assert left
    assert arrived[: len(left)] == left, "what nobody had fetched comes first"


_LEARN = """
import sys
from pathlib import Path
from robot_rl.config import read
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
phases.run(read(RunConfig, Path(sys.argv[1])))
"""


# --- what is refused -----------------------------------------------------------------------------


def test_who_has_not_the_token_or_another_version_stays_out(
    hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").touch(0o600)
    (tmp_path / "other").write_text("another token of 16 letters or more")
    wrong = replace(hub.joined, token_file=str(tmp_path / "other"))
    with pytest.raises(HubRefusedError, match="wrong token"):
        machines(wrong)
    with pytest.raises(HubRefusedError, match="wrong token"):
        asyncio.run(Agent(AgentConfig(hub=wrong, name="lab")).run())
    monkeypatch.setattr("robot_rl.rollout.hub_connection.__version__", "0.0.1")
    with pytest.raises(HubRefusedError, match=r"the hub has robot_rl .*, this machine 0\.0\.1\. Install one"):
        asyncio.run(Agent(AgentConfig(hub=hub.joined, name="lab")).run())


def test_a_token_that_others_may_read_is_none(hub: Served) -> None:
    file = hub.folder / "token"
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"hub\.token_file: .* may be read by others\. `chmod 600"):
        machines(hub.joined)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(ConfigError, match=r"5 letters, allowed: 16 or more\. Copy fleet\.token of"):
        machines(hub.joined)
    file.unlink()
    with pytest.raises(ConfigError, match=r"No such file or directory\. Copy fleet\.token of"):
        machines(hub.joined)


def test_a_hub_is_trusted_by_its_authority_over_tls_1_3(tmp_path: Path, token: str, pki: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki / "server.pem", pki / "server.key")

    async def ask(ca: str | None) -> list[Any]:
        server = TestServer(make_app(tmp_path, Path(token).read_text().strip(), HOSTS), scheme="https")
        await server.start_server(ssl=context)
        at = HubConfig(address=f"https://127.0.0.1:{server.port}", token_file=token, ca=ca)
        try:
            return await asyncio.to_thread(machines, at)
        finally:
            await server.close()

    assert asyncio.run(ask(str(pki / "authority.pem"))) == []
    for ca in (None, str(pki / "stranger.pem")):
        with pytest.raises(DeviceError, match="its certificate is not to be trusted"):
            asyncio.run(ask(ca))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(DeviceError, match="Cannot connect"):
        asyncio.run(ask(str(pki / "authority.pem")))
    with pytest.raises(ConfigError, match=r"hub\.ca: .*token"):
        asyncio.run(ask(token))


def test_a_job_has_a_name_that_can_be_a_folder() -> None:
    for parts in (("20261128-101500-small-seed0", "arm"), ("my run\n(2)", ""), ("..", "../x"), ("x" * 300,)):
        assert NAME.fullmatch(job_name(*parts)), parts
    assert job_name("my run", "arm") == "run-my-run-arm"
    assert job_name("7c2f00a1", "arm", "x" * 300) != job_name("7c2f00a1", "other", "x" * 300)


def test_a_run_without_its_machine_is_not_begun(hub: Served) -> None:
    with pytest.raises(DeviceError, match="no machine is connected to the hub"):
        phases.run(run_of(hub))
    assert not list((hub.folder / "runs").glob("*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hub": {}}, "sources.arm.needs.node: got 'lab', allowed: null without hub.address"),
        ({"hub": {"address": "http://10.0.0.7:8642"}}, "hub.address: .*: the token would travel in the open"),
        ({"hub": {"address": "8642"}}, "hub.address: got '8642', allowed: https://<host>:<port>"),
        ({"hub": {"token_file": "t"}}, "hub: .*, allowed: an address first"),
        (
            {"sources": {"arm": {"station": "sim_arm", "needs": {"node": "lab"}, "env_steps": 5}}},
            "sources.arm.needs: .*, allowed: nothing without station=any",
        ),
        (
            {"sources": {"arm": {"real_time": True, "env_steps": 5}}},
            "hub: .*, allowed: left out without needs.node",
        ),
        (
            {
                "sources": {
                    "arm": {"station": "any", "needs": {"node": "lab"}, "env_steps": 5, "human": True}
                },
                "human": {"input": "keyboard"},
            },
            "human.input: got 'keyboard', allowed: gamepad or scripted with needs.node",
        ),
        ({"hub": {"address": "https://hub:8642", "most_mbit_s": -1}}, "hub.most_mbit_s: got -1"),
    ],
)
def test_machines_that_cannot_be_reached_are_refused(
    hub: Served, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(hub, **changes)


# --- orders --------------------------------------------------------------------------------------


def test_the_page_gives_orders_to_another_machine(hub: Served) -> None:
    async def order(path: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}", ORDER: "1"}
        async with (
            ClientSession(hub.config["address"], headers=headers) as session,
            session.post(path, json={"by": "ann"}) as answer,
        ):
            return answer.status, await answer.json()

    LeaseStore(hub.folder / "lab" / "leases.db").stop("arm-west", "a protective stop", "deploy")
    with agent(hub):
        until(lambda: machines(hub.joined))
        assert asyncio.run(order("/nodes/lab/arm-west/clear")) == (200, {"done": True})
        status, said = asyncio.run(order("/nodes/lab/arm-west/clear"))
        assert status == 409
        assert "arm-west" in said["error"]
        status, said = asyncio.run(order("/nodes/lab/west/stop"))
        assert status == 409
        assert said["error"].startswith("stop: no arm 'west' is up. Up are: ")
    until(lambda: not machines(hub.joined))
    status, said = asyncio.run(order("/nodes/lab/west/stop"))
    assert (status, said["error"]) == (409, "node: got 'lab', allowed: none is here")
    assert not LeaseStore(hub.folder / "lab" / "leases.db").stopped()
