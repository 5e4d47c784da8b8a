"""The fleet page without a browser: who gets in, what the state says, which orders are carried out."""

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestServer

from robot_rl.cli.main import main
from robot_rl.core.errors import LeaseError, StorageError
from robot_rl.fleet.server import COOKIE, ORDER, make_app, token_of_machine
from robot_rl.fleet.state import _thinned
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.lease_file import default_path
from robot_rl.sched.leases import LeaseStore

ARM = DeviceSpec(name="arm-west", kind="robot", real=True)
HOSTS = frozenset({"127.0.0.1"})
Use = Callable[[ClientSession, str], Awaitable[Any]]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("robot_rl.fleet.state.station_specs", lambda: [ARM])
    monkeypatch.setattr("robot_rl.fleet.state.socket_folders", lambda: [])


def with_page(runs: Path, use: Use, *, hosts: frozenset[str] = HOSTS) -> Any:
    """Serves the page while `use` talks to it."""

    async def serve() -> Any:
        server = TestServer(make_app(runs, "secret", hosts))
        await server.start_server()
        try:
            async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
                return await use(session, str(server.make_url("")))
        finally:
            await server.close()

    return asyncio.run(serve())


async def enter(session: ClientSession, at: str) -> None:
    async with session.get(f"{at}/?token=secret") as answer:
        assert answer.status == 200
        assert "robot_rl fleet" in await answer.text()


@pytest.mark.parametrize("path", ["/", "/state", "/fleet.js", "/?token=wrong"])
def test_without_the_token_there_is_nothing(tmp_path: Path, path: str) -> None:
    async def use(session: ClientSession, at: str) -> int:
        async with session.get(at + path) as answer:
            return answer.status

    assert with_page(tmp_path, use) == 401


def test_the_token_becomes_a_cookie_that_no_script_and_no_other_page_has(tmp_path: Path) -> None:
    async def use(session: ClientSession, at: str) -> str:
        async with session.get(f"{at}/?token=secret", allow_redirects=False) as answer:
            assert answer.status == 302
            assert answer.headers["Location"] == "/"
            return answer.headers["Set-Cookie"]

    cookie = with_page(tmp_path, use)
    assert cookie.startswith(f"{COOKIE}=secret;")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_another_name_of_this_host_and_a_path_out_of_the_page_are_refused(tmp_path: Path) -> None:
    async def use(session: ClientSession, at: str) -> tuple[int, ...]:
        async with session.get(f"{at}/?token=secret", headers={"Host": "elsewhere.example"}) as named:
            pass
        await enter(session, at)
        async with session.get(f"{at}/..%2fserver.py") as outside:
            return named.status, outside.status

    assert with_page(tmp_path, use) == (403, 404)


def test_the_page_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    async def use(session: ClientSession, at: str) -> str:
        await enter(session, at)
        async with session.get(at) as answer:
            return answer.headers["Content-Security-Policy"]

    assert with_page(tmp_path, use).startswith("default-src 'none'; script-src 'self'")


def test_the_state_has_holders_waiters_stops_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "robot_rl.sched.preemption.forgive", lambda rows, process, device: None
    )  # it waits on
    store, runs = LeaseStore(), tmp_path / "runs"
    store.acquire(ARM, holder="deploy <b>reach</b>", preemptible=True)
    with pytest.raises(LeaseError):
        store.acquire(ARM, holder="urgent", priority=2, wait_s=1e-9, preempt_s=1e-9)
    folder = runs / "20261127-101500-tiny-seed0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "updates": step, "phase": "residual", "wall_s": 1.0} | seen) + "\n"
            for step, seen in ((100, {"eval/success": 0.5, "eval/episodes": 4}), (250, {}))
        )
    )

    async def use(session: ClientSession, at: str) -> Any:
        await enter(session, at)
        async with session.get(f"{at}/state") as answer:
            return await answer.json()

    state = with_page(runs, use)
    (arm,) = (one for one in state["devices"] if one["name"] == "arm-west")
    assert (arm["free"], arm["slots"]) == (0, 1)
    assert arm["held"][0]["holder"] == "deploy <b>reach</b>"
    assert arm["held"][0]["wanted_by"] == "urgent"
    assert state["waiting"] == []  # it gave up
    (run,) = state["runs"]
    assert (run["state"], run["phase"], run["env_steps"], run["curve"]) == (
        "running",
        "residual",
        250,
        [[100.0, 0.5]],
    )


@pytest.mark.parametrize("count", [0, 1, 50, 51, 99, 1000])
def test_a_curve_has_few_points_and_its_first_and_last(count: int) -> None:
    curve = [[float(at), 0.5] for at in range(count)]
    thinned = _thinned(curve)
    assert len(thinned) == count if count <= 50 else 25 <= len(thinned) <= 50
    assert thinned[:1] == curve[:1]
    assert thinned[-1:] == curve[-1:]
    assert thinned == sorted(thinned)


def test_who_waits_is_shown_in_the_order_of_the_line(tmp_path: Path) -> None:
    store = LeaseStore()
    with store._file.transaction() as rows:
        for priority in (0, 3):
            store._line.keep(rows, "arm-west", priority, None)
    assert [(one.device, one.priority) for one in store.waiting()] == [("arm-west", 3), ("arm-west", 0)]


def test_orders_need_the_header_a_name_and_something_to_do(tmp_path: Path) -> None:
    LeaseStore().stop("arm-west", "The supervisor was gone.", "deploy")

    async def use(session: ClientSession, at: str) -> list[tuple[int, str]]:
        await enter(session, at)
        answers = []
        for path, headers, body in (
            ("devices/arm-west/clear", {}, {"by": "ann"}),
            ("devices/arm-west/clear", {ORDER: "1"}, {"name": "ann"}),
            ("devices/arm-west/clear", {ORDER: "1"}, {"by": " "}),
            ("arms/robot-rl-x/stop", {ORDER: "1"}, {"by": "ann"}),
            ("devices/arm-west/clear", {ORDER: "1"}, {"by": "ann"}),
        ):
            async with session.post(f"{at}/{path}", headers=headers, json=body) as answer:
                answers.append((answer.status, await answer.text()))
        return answers

    unmarked, nameless, blank, unknown, done = with_page(tmp_path, use)
    assert unmarked[0] == 403
    assert nameless[0] == 400
    assert blank[0] == 409
    assert "who looked at it" in blank[1]
    assert unknown[0] == 409
    assert "no arm 'robot-rl-x' is up" in unknown[1]
    assert done[0] == 200
    assert not LeaseStore().stopped()


def test_the_token_is_kept_and_for_this_user_alone() -> None:
    first = token_of_machine()
    assert len(first) >= 32
    assert token_of_machine() == first
    assert stat.S_IMODE((default_path().parent / "fleet.token").stat().st_mode) == 0o600


def test_a_token_that_is_none_lets_nobody_in() -> None:
    token_of_machine()
    path = default_path().parent / "fleet.token"
    path.write_text("")
    with pytest.raises(StorageError, match=r"holds no token. Remove it"):
        token_of_machine()
    assert [file.name for file in path.parent.glob("fleet.token*")] == ["fleet.token"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["port=0"], "port: got 0, allowed: 1 to 65535"),
        (["host=0.0.0.0"], "host: got '0.0.0.0' without cert= and key="),
        (["cert=x.pem"], "cert: give cert=<file> and key=<file>, or neither"),
        (["cert=x.pem", "key=y.pem"], "cert: got 'x.pem', allowed: a PEM file"),
        (["prt=1"], "prt: no such key. Did you mean 'port'?"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
