"""Faults done to a chain in motion, what has to follow, and how the chain is made whole again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from arm_chain import BROADCASTER, Chain
from arm_modes import Mode, rival_message
from arm_shim import missing, until

from robot_rl.core.errors import DeviceError
from robot_rl.real.ros2.node import open_node
from robot_rl.real.station import StationConfig

_HOUR_S = 3600
_NOBODY = 65534
_RAMP_S = 0.4
"""Brake ramp at the acceleration limits, and the 50 ms of a busy machine."""
TICK_S = 0.05
"""How late the driver host's watchdogs may be."""
_SOON_S = 5.0
_AWAY_RAD = 0.8
"""Homing takes more than a second from there."""
_PERSON = "a person"


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A fault and what followed."""

    begun_ns: int
    """When the arm had to begin to stop (monotonic)."""
    reached_s: float
    """From the fault to its outcome; NaN if nobody could see the moment."""
    frozen_s: float = 0.0
    """How long the arm itself did nothing."""
    said: str = ""
    """What a rival was told."""


def alone_s(mode: Mode, station: StationConfig) -> float:
    """Nobody is left who could hold the arm: it does what it was told last, for so long."""
    return 2.0 / station.supervisor.command_hz + mode.alone_s


# Strikes: each begins with the arm in motion.


def _now_ns() -> int:
    return time.monotonic_ns()


def _since_s(begun_ns: int) -> float:
    return 1e-9 * (_now_ns() - begun_ns)


def _is_away(chain: Chain) -> None:
    until(lambda: not chain.is_active(chain.mode.controller), f"{chain.mode.controller} is inactive", _SOON_S)


def _is_stopped(chain: Chain) -> None:
    assert chain.status.phase == "stopped", f"the supervisor is {chain.status.phase}, not stopped"


def kill_policy(chain: Chain) -> Struck:
    assert chain.policy is not None
    begun_ns = _now_ns()
    chain.policy.kill()
    held_s = chain.event("hold", r"^the policy is gone", begun_ns)
    chain.event("stop", r"^the policy is gone: no plan for", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=held_s)


def kill_supervisor(chain: Chain) -> Struck:
    """The driver holds the arm, and a new supervisor does not drive before a person has cleared."""
    begun_ns, log = _now_ns(), len(chain.driver_log.read_text())
    chain.kill(chain.station_processes.supervisor_pid)
    until(lambda: chain.driver_says("the supervisor is gone", log), "the driver stops", _SOON_S)
    _is_away(chain)
    seconds = _since_s(begun_ns)
    chain.restart_supervisor()
    until(lambda: chain.status.phase != "waiting", "the new supervisor sees the arm", _SOON_S)
    try:
        chain.watcher.control("start", by="the campaign")
    except DeviceError as error:
        if "refused" not in str(error):
            raise
    else:
        raise AssertionError("a new supervisor drives, and no person has cleared")
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def kill_driver(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.kill(chain.station_processes.driver_pid)
    seconds = chain.event("stop", r"^the driver is gone", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def kill_arm(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.kill(chain.arm_pid)
    return _stale(chain, begun_ns)


def cut_cable(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.set_cable(plugged=False)
    return _stale(chain, begun_ns)


def silence_states(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.switch(deactivate=(BROADCASTER,))
    return _stale(chain, begun_ns)


def _stale(chain: Chain, begun_ns: int) -> Struck:
    seconds = chain.event("stop", r"^the newest joint state is \d+ ms old", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def freeze_arm(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    os.kill(chain.arm_pid, signal.SIGSTOP)
    struck = _stale(chain, begun_ns)
    time.sleep(0.5)
    os.kill(chain.arm_pid, signal.SIGCONT)
    return Struck(begun_ns=begun_ns, reached_s=struck.reached_s, frozen_s=_since_s(begun_ns))


def step_clock(chain: Chain) -> Struck:
    """Steps an hour forward, an hour back: nothing may happen."""
    begun_ns = _now_ns()
    for shift_s in (_HOUR_S, -_HOUR_S, 0):
        _step_clock(chain, shift_s)
    processes = chain.station_processes
    for pid in (processes.driver_pid, processes.supervisor_pid):
        assert "wall_clock.so" in Path(f"/proc/{pid}/maps").read_text(), f"{pid} has the true clock"
    _drives_on(chain, begun_ns, "the wall clock mattered")
    return Struck(begun_ns=begun_ns, reached_s=math.nan)


def _step_clock(chain: Chain, shift_s: int) -> None:
    chain.shim.set_clock(shift_s)
    plan = chain.status.plan + 6
    until(lambda: abs(chain.said()[-1]["wall_s"] - time.time() - shift_s) < 60, "the step is seen")
    until(lambda: chain.status.plan > plan, "the policy drives on")


def _drives_on(chain: Chain, begun_ns: int, why_not: str) -> None:
    stops = [event for event in chain.events(begun_ns) if event["event"] in ("hold", "stop", "pause")]
    assert not stops, f"{why_not}: {stops}"


def freeze_camera(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    os.kill(chain.camera_pid(), signal.SIGSTOP)
    seconds = chain.event("pause", r"^pause by policy", begun_ns)
    assert chain.status.phase == "paused"
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def nan_action(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.tell_policy("nan")
    seconds = chain.event("stop", r"^plan \d+: not finite", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def far_action(chain: Chain) -> Struck:
    """The policy asks for 10 rad in two joints, and back; the second time a person stops the arm at speed."""
    begun_ns = _now_ns()
    seconds = _limited(chain)
    plan = chain.status.plan

    def drives_on() -> bool:
        faults = [event for event in chain.events(begun_ns) if event["event"] in ("hold", "stop")]
        assert not faults, f"a limited command is no reason to stop: {faults}"
        return chain.status.plan > plan + 16

    until(drives_on, "the policy drives on", _SOON_S)
    _limited(chain)
    time.sleep(0.2)
    stopped_ns = _now_ns()
    chain.watcher.control("stop", by=_PERSON)
    chain.event("stop", rf"^stop by {_PERSON}", stopped_ns)
    return Struck(begun_ns=stopped_ns, reached_s=seconds)


def _limited(chain: Chain) -> float:
    begun_ns = _now_ns()
    chain.tell_policy("far")
    until(lambda: chain.status.limited, "the supervisor limits", _SOON_S)
    return _since_s(begun_ns)


def second_commander(chain: Chain) -> Struck:
    """Another node streams to our command topic: where the arm is, so that it holds against us."""
    begun_ns = _now_ns()
    node = open_node("rival", domain_id=chain.domain_id)
    try:
        publisher = node.create_publisher(chain.mode.kind, chain.mode.topic)

        def fight() -> bool:
            state = chain.status.state
            assert state is not None
            position_rad = np.asarray(state.position_rad, float)
            joints = chain.station.joints
            message = rival_message(node, chain.command, position_rad, joints, chain.newest_sent)
            if chain.mode.kind.startswith("std_msgs"):
                chain.rival_said.append(np.array(message.data, float))
            publisher.publish(message)
            return any(event["event"] == "stop" for event in chain.events(begun_ns))

        until(fight, "the driver stops", _SOON_S)
        seconds = chain.event("stop", r"/rival commands this arm too", begun_ns)
    finally:
        node.close()
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def switch_controller(chain: Chain) -> Struck:
    """Somebody switches our controller off, as with `ros2 control switch_controllers`."""
    begun_ns = _now_ns()
    chain.switch(deactivate=(chain.mode.controller,))
    seconds = chain.event("stop", rf"{chain.mode.controller} is inactive", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


# A process that lives and does nothing

Way = Literal["stopped", "busy", "loop"]
"""SIGSTOP; a loop that keeps Python's lock; a loop in the main thread beside which other threads run."""


def _hang(chain: Chain, pid: int, way: Way) -> None:
    if way == "stopped":
        os.kill(pid, signal.SIGSTOP)
    else:
        chain.shim.hang(pid, is_whole=way == "busy")


def _wake(chain: Chain, pid: int, way: Way) -> None:
    if way == "stopped":
        os.kill(pid, signal.SIGCONT)
    else:
        chain.shim.unhang()


def _rest(chain: Chain, begun_ns: int, notice_s: float) -> None:
    """Waits until the arm has to be at rest: what it does when somebody wakes up again is judged as well."""
    time.sleep(max(0.0, notice_s + _RAMP_S + 4.0 * chain.mode.settle_s - _since_s(begun_ns)))


def hang_policy(way: Way) -> Callable[[Chain], Struck]:
    def strike(chain: Chain) -> Struck:
        assert chain.policy is not None
        with chain.shim.alone():
            begun_ns = _now_ns()
            _hang(chain, chain.policy.pid, way)
            struck = _policy_is_silent(chain, begun_ns)
            _wake(chain, chain.policy.pid, way)
        return struck

    return strike


def block_policy(chain: Chain) -> Struck:
    """What the policy writes, it waits for: recordings and lines."""
    assert chain.policy is not None
    begun_ns = _now_ns()
    chain.shim.set_disk("blocked", f"{chain.logs}/", chain.policy.pid)
    struck = _policy_is_silent(chain, begun_ns)
    chain.shim.set_disk("well")
    return struck


def _policy_is_silent(chain: Chain, begun_ns: int) -> Struck:
    held_s = chain.event("hold", r"^no plan for", begun_ns)
    chain.event("stop", r"^the policy is silent: no plan for", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=held_s)


def hang_supervisor(way: Way) -> Callable[[Chain], Struck]:
    def strike(chain: Chain) -> Struck:
        with chain.shim.alone():
            return _leave_unwatched(chain, way)

    return strike


def stop_supervisor_homing(chain: Chain) -> Struck:
    """SIGSTOP while the arm is on its way home, which no policy plans."""
    chain.tell_policy("away")
    home_rad = np.asarray(chain.station.home_rad)

    def is_away() -> bool:
        state = chain.status.state
        return state is not None and float(np.abs(state.position_rad - home_rad).max()) > _AWAY_RAD

    until(is_away, "the arm is away from home", 15.0)
    chain.tell_policy("rest")
    time.sleep(0.1)
    chain.watcher.control("pause", by=_PERSON)
    time.sleep(0.4)
    chain.tell_policy("homing")
    until(lambda: chain.status.phase == "homing", "the arm moves home", _SOON_S)
    time.sleep(0.3)
    assert chain.status.phase == "homing", f"the arm is {chain.status.phase} already"
    return _leave_unwatched(chain, "stopped")


def _leave_unwatched(chain: Chain, way: Way, *, logs: bool = True) -> Struck:
    """The supervisor hangs: the driver holds the arm, then latches; a person has to clear."""
    config, pid = chain.station.supervisor, chain.station_processes.supervisor_pid
    log, seconds = len(chain.driver_log.read_text()), math.nan
    begun_ns = _now_ns()
    _hang(chain, pid, way)
    if logs:
        until(lambda: chain.driver_says(r"(?i)hold", log), "the driver holds", config.stop_after_s)
        seconds = _since_s(begun_ns)
    time.sleep(max(0.0, config.stop_after_s - _since_s(begun_ns)))
    _is_away(chain)  # by the driver alone
    _rest(chain, begun_ns, config.hold_after_s + TICK_S)
    chain.shim.set_disk("well")
    _wake(chain, pid, way)
    chain.event("stop", "", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def block_supervisor(chain: Chain) -> Struck:
    """Nothing that the supervisor writes comes back; a person stops the arm."""
    chain.shim.set_disk("blocked", f"{chain.logs}/station-", chain.station_processes.supervisor_pid)
    time.sleep(0.1)
    begun_ns = _now_ns()
    chain.watcher.control("stop", by=_PERSON, timeout_s=_SOON_S)
    _is_stopped(chain)
    seconds = _since_s(begun_ns)
    _is_away(chain)
    chain.shim.set_disk("well")
    chain.event("stop", rf"^stop by {_PERSON}", begun_ns)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def block_driver(chain: Chain) -> Struck:
    """Nothing that the driver writes comes back, its log either; then the supervisor hangs."""
    chain.shim.set_disk("blocked", f"{chain.logs}/station-", chain.station_processes.driver_pid)
    time.sleep(0.1)
    return _leave_unwatched(chain, "stopped", logs=False)


def hang_driver(way: Way) -> Callable[[Chain], Struck]:
    def strike(chain: Chain) -> Struck:
        pid = chain.station_processes.driver_pid
        with chain.shim.alone():
            begun_ns = _now_ns()
            _hang(chain, pid, way)
            struck = _stale(chain, begun_ns)
            _rest(chain, begun_ns, alone_s(chain.mode, chain.station))
            _wake(chain, pid, way)
        _is_away(chain)
        return struck

    return strike


# A full disk under the station's logs


def _fill_disk(chain: Chain) -> int:
    """Drives on with a full disk, and returns when it began to."""
    begun_ns = _now_ns()
    chain.shim.set_disk("full", f"{chain.logs}/station-")
    plan = chain.status.plan
    until(lambda: chain.status.plan > plan + 6, "the policy drives with a full disk", _SOON_S)
    return begun_ns


def pause_on_full_disk(chain: Chain) -> Struck:
    chain.tell_policy("rest")
    _fill_disk(chain)
    begun_ns = _now_ns()
    chain.watcher.control("pause", by=_PERSON, timeout_s=_SOON_S)
    assert chain.status.phase == "paused"
    return Struck(begun_ns=begun_ns, reached_s=_since_s(begun_ns))


def hold_on_full_disk(chain: Chain) -> Struck:
    assert chain.policy is not None
    _fill_disk(chain)
    begun_ns = _now_ns()
    os.kill(chain.policy.pid, signal.SIGSTOP)
    until(lambda: chain.status.phase == "holding", "the arm is held", _SOON_S)
    seconds = _since_s(begun_ns)
    until(lambda: chain.status.phase == "stopped", "the arm is stopped", _SOON_S)
    os.kill(chain.policy.pid, signal.SIGCONT)
    _is_away(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def stop_on_full_disk(chain: Chain) -> Struck:
    _fill_disk(chain)
    begun_ns = _now_ns()
    chain.watcher.control("stop", by=_PERSON, timeout_s=_SOON_S)
    _is_stopped(chain)
    seconds = _since_s(begun_ns)
    _is_away(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def end_on_full_disk(chain: Chain) -> Struck:
    _fill_disk(chain)
    begun_ns = _now_ns()
    os.kill(chain.station_processes.supervisor_pid, signal.SIGTERM)
    _is_away(chain)
    seconds = _since_s(begun_ns)
    ended = chain.station_processes.supervisor_ended
    until(lambda: ended() is not None, "the supervisor ends", _SOON_S)
    assert ended() == 0, f"the supervisor ended with {ended()}"
    return Struck(begun_ns=begun_ns, reached_s=seconds)


# E-stop buttons


def press_button(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.button.press()
    seconds = chain.event("stop", r"(?i)e-?stop", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


def silence_button(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.button.set_alive(False)
    seconds = chain.event("stop", r"(?i)e-?stop", begun_ns)
    _is_stopped(chain)
    return Struck(begun_ns=begun_ns, reached_s=seconds)


# A second deployment


def rival(
    *, renamed: bool = False, other_state: bool = False, other_user: bool = False, far: bool = False
) -> Callable[[Chain], Struck]:
    """Returns the strike of a rival that has less and less in common with the first."""

    def strike(chain: Chain) -> Struck:
        place = Path(tempfile.mkdtemp(prefix="robot-rl-rival-", dir=chain.folder / "far" if far else None))
        place.chmod(0o777)
        facts = yaml.safe_load(chain.station_file.read_text())
        facts["name"] = "faults_copy" if renamed else facts["name"]
        (place / "station.yaml").write_text(yaml.safe_dump(facts))
        (place / "station.yaml").chmod(0o644)
        seen = Path("/tmp") / place.name if far else place  # as the rival sees it
        script = str(Path(__file__).with_name("arm_rival.py"))
        command = [sys.executable, script, str(seen / "station.yaml"), str(seen / "logs")]
        if other_user:
            command = [*_as_nobody(), *command]
        if far:
            assert chain.far_host is not None
            command = ["nsenter", "-t", str(chain.far_host.pid), "-n", "-m", "-u", *command]
        more = {"ROBOT_RL_STATE": str(seen / "state")} if other_state else {}
        if far:
            more["PYTHONPYCACHEPREFIX"] = "/tmp/cache"
        begun_ns = _now_ns()
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=90, env={**os.environ, **more}
        )
        assert done.stdout, f"the rival failed by itself: {done.stderr.strip()[-300:]}"
        said = json.loads(done.stdout.splitlines()[-1])
        assert "refused" in said, f"the rival got the arm: {said}; the first: {chain.events(begun_ns)}"
        _drives_on(chain, begun_ns, f"the rival was refused ({said['refused']}), and the first disturbed")
        for no_refusal in ("Traceback", "did not start", "did not answer"):
            assert no_refusal not in said["refused"], f"the rival failed, unrefused: {said['refused']}"
        plan = chain.status.plan
        until(lambda: chain.status.plan > plan + 6, "the first drives on", _SOON_S)
        return Struck(begun_ns=begun_ns, reached_s=float(said["seconds"]), said=said["refused"])

    return strike


def _as_nobody() -> list[str]:
    """Returns what makes a command another user's; who may read our checkout, if only root may."""
    plain = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    look = [*plain, sys.executable, "-c", "import robot_rl.core"]
    if subprocess.run(look, capture_output=True, check=False).returncode == 0:
        return plain
    return [*plain, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def needs_nobody() -> str:
    return "needs root, to be another user" if os.geteuid() != 0 else missing("setpriv")


def needs_namespaces() -> str:
    here = str(Path(__file__).resolve())
    if here.startswith("/tmp/"):
        return "needs a checkout outside of /tmp, of which the other host has its own"
    return missing("unshare", "nsenter", "ip", "mount")


# Mends


def clear(chain: Chain) -> None:
    chain.shim.heal()
    chain.clear()


def new_policy(chain: Chain) -> None:
    chain.end_policy()
    chain.clear()
    chain.start_policy()


def new_station(chain: Chain) -> None:
    chain.end_policy()
    chain.end_station()
    chain.start_station()
    chain.clear()
    chain.start_policy()


def new_supervisor(chain: Chain) -> None:
    chain.shim.heal()
    chain.end_policy()
    if chain.station_processes.supervisor_ended() is not None:
        chain.restart_supervisor()
    until(lambda: chain.status.phase != "waiting", "the new supervisor sees the arm")
    chain.clear()
    chain.start_policy()


def new_arm(chain: Chain) -> None:
    chain.end_arm()
    chain.start_arm()
    chain.clear()


def plug_in(chain: Chain) -> None:
    chain.set_cable(plugged=True)
    chain.clear()


def speak_again(chain: Chain) -> None:
    chain.switch(activate=(BROADCASTER,))
    chain.clear()


def thaw_camera(chain: Chain) -> None:
    os.kill(chain.camera_pid(), signal.SIGCONT)


def go_again(chain: Chain) -> None:
    chain.shim.heal()
    chain.clear()
    for word in ("home", "go"):
        chain.tell_policy(word)


def revive_button(chain: Chain) -> None:
    chain.button.set_alive(True)
    chain.clear()


def nothing(chain: Chain) -> None:
    """Nothing was broken."""
