"""The fleet page in a real browser: what it shows of an arm, and its stop button with confirmation."""

import io
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from robot_rl.bench.trials import command_line
from robot_rl.config import dump
from robot_rl.real.launch import StationProcesses
from robot_rl.real.station import CameraConfig, load_station
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
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,1100",
        "--enable-unsafe-swiftshader",
        "--use-angle=swiftshader",
    ):
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


def until(what: Callable[[], bool], limit_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.1)


def test_a_person_sees_an_arm_and_stops_it(page: str, browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    def text(selector: str) -> str:
        return _text(browser, selector)

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


def test_a_person_sees_what_cameras_see_and_that_a_picture_is_old(
    page: str, browser: Any, tmp_path: Path
) -> None:
    station = load_station("sim_in_process")
    file = tmp_path / "seen.yaml"
    file.write_text(
        dump(replace(station, name="seen", cameras={"left": CameraConfig(), "wrist": CameraConfig()}))
    )
    hub = [f"hub.address={page.split('/?')[0]}", f"hub.token_file={tmp_path / 'state' / 'fleet.token'}"]
    here, there = '[data-arm^="robot-rl-"]:not([data-arm$="on lab"])', '[data-arm$="on lab"]'
    other = {**os.environ, "ROBOT_RL_STATE": str(tmp_path / "lab")}  # else it is the hub's own machine
    with (
        StationProcesses(str(file), tmp_path / "station", token=1) as processes,
        subprocess.Popen(command_line("agent", "name=lab", *hub), env=other) as joined,
        ExitStack() as ends,
    ):
        ends.callback(joined.terminate)
        browser.get(page)
        for card in (here, there):  # the same arm, and by way of an agent
            for camera in ("left", "wrist"):
                figure = f"{card} [data-camera={camera}]"
                until(lambda figure=figure: _colours(browser, f"{figure} canvas") > 50)
                until(lambda figure=figure: "s old" in _text(browser, f"{figure} figcaption"))
        assert not _text(browser, "figure.old")
        until(lambda: "Hz of 100" in _text(browser, ".rate"))
        os.kill(processes.driver_pid, signal.SIGSTOP)  # its pictures stay as they are
        for card in (here, there):
            until(lambda card=card: "left" in _text(browser, f"{card} figure.old"))
            caption = f"{card} [data-camera=left] figcaption"
            until(lambda caption=caption: float(_text(browser, caption).split()[1]) > 3)
        os.kill(processes.driver_pid, signal.SIGCONT)
    until(lambda: "No arm is up" in _text(browser, "#arms"))
    refused = [line for line in browser.get_log("browser") if "404" not in line["message"]]
    assert not refused, "neither errors nor refused content but of the arm that is gone"


@pytest.mark.parametrize("where", ["here", "lab"])
def test_a_person_sees_the_scene_of_an_arm(page: str, browser: Any, tmp_path: Path, where: str) -> None:
    from selenium.webdriver.common.by import By

    link = ".card:not([data-arm$=' on lab']) a" if where == "here" else ".card[data-arm$=' on lab'] a"

    def cube() -> tuple[float, float] | None:
        """Returns where the red cube is in the window, in pixels."""
        seen = np.asarray(Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")).astype(int)
        rows, columns = np.nonzero((seen[..., 0] > 100) & (seen[..., 1:].max(axis=-1) < 60))
        return (float(rows.mean()), float(columns.mean())) if len(rows) > 10 else None

    def has_moved() -> bool:
        now = cube()
        return now is not None and float(np.hypot(now[0] - before[0], now[1] - before[1])) > 5.0

    browser.set_window_size(500, 450)  # drawn without a GPU
    with (
        StationProcesses("sim_in_process", tmp_path / "station", token=1) as station,
        station.client() as arm,
        _joined(page, tmp_path) if where == "lab" else nullcontext(),
    ):
        browser.get(page)
        until(lambda: "Scene" in _text(browser, link))
        browser.find_element(By.CSS_SELECTOR, link).click()
        until(lambda: len(browser.window_handles) == 2)
        browser.switch_to.window(browser.window_handles[1])
        until(lambda: cube() is not None, limit_s=90.0)
        before = cube() or (0.0, 0.0)
        arm.control("reset", seed=5)  # puts the cube elsewhere
        until(has_moved, limit_s=90.0)
        assert browser.title == "MuJoCo Web Viewer"
        assert "/scene/" in browser.current_url
        assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
        # What runs in its page can give no orders.
        order = "fetch(`${location.origin}/arms/x/stop`, {method: 'POST'})"
        stops = f"return {order}.then(() => 'sent', (error) => error.name)"
        assert browser.execute_script(stops) == "TypeError"
        assert "Content Security Policy" in browser.get_log("browser")[-1]["message"]


@contextmanager
def _joined(page: str, folder: Path) -> Generator[None]:
    """Has an agent with a state of its own join the page's hub as `lab`."""
    hub = [f"hub.address={page.split('/?')[0]}", f"hub.token_file={folder / 'state' / 'fleet.token'}"]
    environment = {**os.environ, "ROBOT_RL_STATE": str(folder / "lab")}
    with subprocess.Popen(command_line("agent", "name=lab", *hub), env=environment) as agent:
        try:
            yield
        finally:
            agent.terminate()


def _text(browser: Any, selector: str) -> str:
    return browser.execute_script(f"return document.querySelector({selector!r})?.innerText ?? ''")


def _colours(browser: Any, selector: str) -> int:
    """Returns how many colours a picture has; an empty one has one."""
    code = """
    const canvas = document.querySelector(arguments[0]);
    if (!canvas) return 0;
    const options = { willReadFrequently: true };
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", options);
    copy.drawImage(canvas, 0, 0);
    const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(new Uint32Array(pixels.buffer)).size;
    """
    return browser.execute_script(code, selector)


def test_a_person_sees_another_machine_and_clears_its_arm(page: str, browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    def text(selector: str) -> str:
        return _text(browser, selector)

    state = {**os.environ, "ROBOT_RL_STATE": str(tmp_path / "lab")}
    subprocess.run(command_line("devices", "add=sim_in_process"), env=state, check=True, capture_output=True)
    stops = LeaseStore(tmp_path / "lab" / "leases.db")
    stops.stop("arm-sim_in_process", "a protective stop", "deploy")
    folder = tmp_path / "lab runs" / "20261128-101500-tiny-seed0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 12345, "updates": 1, "phase": "bc", "wall_s": 1.0}\n')
    hub = [f"hub.address={page.split('/?')[0]}", f"hub.token_file={tmp_path / 'state' / 'fleet.token'}"]
    with (
        subprocess.Popen(command_line("agent", "name=here", *hub)) as same,
        subprocess.Popen(
            command_line("agent", "name=lab", f"runs={folder.parent}", *hub), env=state
        ) as joined,
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
        until(lambda: "12,345" in text('[data-run="20261128-101500-tiny-seed0 on lab"]'))
        assert text("#runs tbody tr:first-child").split("\t")[1] == "lab", "the newest is first"
        browser.find_element(By.CSS_SELECTOR, f"{row} button").click()
        until(lambda: "Clear arm-sim_in_process on lab?" in text("#confirm"))
        browser.find_element(By.ID, "by").send_keys("ann")
        browser.find_element(By.ID, "go").click()
        until(lambda: "a protective stop" not in text(row))
        assert not stops.stopped()
    until(lambda: "0 other machines" in text("#totals"))
    assert not text(row)
    assert not browser.get_log("browser")
