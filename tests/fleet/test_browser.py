"""The fleet page in a real browser: what it shows of an arm, and its stop button with confirmation."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from robot_rl.bench.trials import command_line
from robot_rl.real.launch import StationProcesses
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import machines
from robot_rl.sched.leases import LeaseStore

pytestmark = [pytest.mark.slow, pytest.mark.alone]
WAIT_S = 30.0


@pytest.fixture
def browser() -> Generator[Any]:
    if not (shutil.which("chromedriver") and shutil.which("chromium")):
        assert not os.environ.get("CI"), "CI runs `make browser` first"
        pytest.skip("needs Debian's chromium and chromium-driver: make browser")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1100"):
        options.add_argument(word)
    options.binary_location = str(shutil.which("chromium"))
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """Serves the page in a process of its own; yields its address, with the token."""
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    odd = tmp_path / "runs" / "<img src=x onerror=document.title='broken'>"
    odd.mkdir(parents=True)
    (odd / "metrics.jsonl").write_text('{"step": 1, "updates": 1, "phase": "bc", "wall_s": 1.0}\n')
    words = command_line("fleet", f"port={port}", f"runs={tmp_path / 'runs'}")
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        yield server.stderr.readline().split()[1]
        server.terminate()


def until(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.1)


def test_a_person_sees_an_arm_and_stops_it(page: str, browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    def text(selector: str) -> str:
        return browser.execute_script(f"return document.querySelector({selector!r})?.innerText ?? ''")

    def click(selector: str) -> None:
        browser.find_element(By.CSS_SELECTOR, selector).click()

    with (
        StationProcesses("sim_in_process", tmp_path / "station", token=1) as station,
        station.client() as arm,
    ):
        browser.get(page)
        until(lambda: "sim_in_process" in text(".card"))
        assert "token" not in browser.current_url  # it is in the cookie by now
        assert "paused" in text(".card")
        assert "rad" in text(".card")
        assert "cpu" in text("#devices")
        button = browser.find_element(By.CSS_SELECTOR, ".card button")
        time.sleep(2.5)
        assert button.is_displayed()  # what did not change is not drawn again: no click on it is lost
        until(lambda: "<img src=x" in text("#runs"))
        assert browser.title == "robot_rl fleet"  # a name is text, whatever it looks like
        click(".card button")
        until(lambda: "Stop sim_in_process?" in text("#confirm"))
        click("#cancel")
        assert arm.wait().phase == "paused"
        click(".card button")
        browser.find_element(By.ID, "by").send_keys("ann")
        click("#go")
        until(lambda: "stopped" in text(".card"))
        assert "ann" in text(".card")
        assert arm.wait().phase == "stopped"
        assert not browser.find_elements(By.CSS_SELECTOR, ".card button")  # a stopped arm needs none
        assert not browser.get_log("browser")  # neither errors nor refused content


def test_a_person_sees_another_machine_and_clears_its_arm(page: str, browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    def text(selector: str) -> str:
        return browser.execute_script(f"return document.querySelector({selector!r})?.innerText ?? ''")

    state = {**os.environ, "ROBOT_RL_STATE": str(tmp_path / "lab")}
    subprocess.run(command_line("devices", "add=sim_in_process"), env=state, check=True, capture_output=True)
    stops = LeaseStore(tmp_path / "lab" / "leases.db")
    stops.stop("arm-sim_in_process", "a protective stop", "deploy")
    hub = [f"hub.address={page.split('/?')[0]}", f"hub.token_file={tmp_path / 'state' / 'fleet.token'}"]
    with (
        subprocess.Popen(command_line("agent", "name=here", *hub)) as same,
        subprocess.Popen(command_line("agent", "name=lab", *hub), env=state) as joined,
        ExitStack() as ends,
    ):
        ends.callback(same.terminate)
        ends.callback(joined.terminate)
        browser.get(page)
        until(lambda: "1 other machine" in text("#totals"))
        at = HubConfig(address=page.split("/?")[0], token_file=str(tmp_path / "state" / "fleet.token"))
        until(lambda: [one["is_here"] for one in machines(at)] == [True, False])
        time.sleep(2.0)
        assert not browser.find_elements(By.CSS_SELECTOR, "[data-device='cpu on here']"), "it is shown once"
        row = '[data-device="arm-sim_in_process on lab"]'
        until(lambda: "a protective stop" in text(row))
        assert text(row).rstrip().endswith("lab")
        browser.find_element(By.CSS_SELECTOR, f"{row} button").click()
        until(lambda: "Clear arm-sim_in_process on lab?" in text("#confirm"))
        browser.find_element(By.ID, "by").send_keys("ann")
        browser.find_element(By.ID, "go").click()
        until(lambda: "a protective stop" not in text(row))
        assert not stops.stopped()
    until(lambda: "0 other machines" in text("#totals"))
    assert not text(row)
    assert not browser.get_log("browser")
