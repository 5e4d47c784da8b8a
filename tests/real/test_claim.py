"""Who has an arm on this machine: by its hardware, and under which fencing token."""

import os
import signal
import subprocess
import sys
import tempfile
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.errors import DeviceError, LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.real import claim as claim_module
from robot_rl.real.claim import Claim, hardware, keep_others_out, last_token, openers
from robot_rl.real.station import LeRobotConfig, Ros2Config, StationConfig, load_station
from robot_rl.sched.leases import LeaseStore
from tests.real.supervisor.rig import two_joint_station

OLD, NEW = 11, 12


@pytest.fixture(autouse=True)
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of this test's claims; domain 0."""
    monkeypatch.setenv("ROBOT_RL_CLAIMS", str(tmp_path))
    monkeypatch.delenv("ROS_DOMAIN_ID", raising=False)
    return tmp_path


def lerobot(port: str, name: str = "bench") -> StationConfig:
    config = LeRobotConfig(type="so101_follower", options={"port": port, "id": name})
    return two_joint_station(name=name, driver="lerobot", lerobot=config)


def ros2(name: str = "bench", **config: Any) -> StationConfig:
    return two_joint_station(name=name, driver="ros2", ros2=Ros2Config(**config))


# What counts as the same hardware


def test_a_serial_arm_is_its_port_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "by-id").symlink_to("/dev/ttyACM7")
    assert hardware(lerobot(str(tmp_path / "by-id"))) == hardware(lerobot("/dev/ttyACM7", "other"))
    assert hardware(lerobot("/dev/ttyACM7")) == ("/dev/ttyACM7",)
    assert hardware(lerobot("/dev/cu.usbmodem1")) == hardware(lerobot("/dev/tty.usbmodem1"))


def test_two_arms_of_one_robot_are_two_ports() -> None:
    config = LeRobotConfig(
        type="bi_so101_follower",
        options={
            "left_arm_port": "/dev/ttyACM1",
            "right": {"port": "/dev/ttyACM0"},
            "cameras": {"port": "x"},
        },
    )
    station = two_joint_station(driver="lerobot", lerobot=config)
    assert hardware(station) == ("/dev/ttyACM0", "/dev/ttyACM1")
    with Claim(station), pytest.raises(DeviceError, match="drives /dev/ttyACM1 already"):
        Claim(lerobot("/dev/ttyACM1"))


def test_an_arm_without_a_port_is_what_leads_to_it() -> None:
    near = LeRobotConfig(type="lekiwi", options={"remote_ip": "10.0.0.4", "id": "a", "cameras": {}})
    (name,) = hardware(two_joint_station(driver="lerobot", lerobot=near))
    assert name == 'lekiwi {"remote_ip": "10.0.0.4"}'


def test_a_ros_arm_is_its_joints_behind_a_manager_in_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    here = hardware(ros2())
    assert here == (
        "a of /controller_manager in ROS domain 0",
        "b of /controller_manager in ROS domain 0",
    )
    assert hardware(ros2("other", domain_id=0, command="trajectory")) == here
    left = hardware(ros2(namespace="left"))
    assert left[0] == "a of /left/controller_manager in ROS domain 0"
    # Remapped to another namespace's, or named in full, it is that one.
    switch = "controller_manager/switch_controller"
    assert hardware(ros2(remap={switch: f"/left/{switch}"})) == left
    assert hardware(ros2(controller_manager="/left/controller_manager")) == left
    monkeypatch.setenv("ROS_DOMAIN_ID", "7")
    assert hardware(ros2())[0].endswith("in ROS domain 7")
    assert hardware(ros2(domain_id=0)) == here


def test_an_arm_simulated_in_process_is_nobody_elses() -> None:
    station = load_station("sim_in_process")
    assert hardware(station) == ()
    with Claim(station) as one, Claim(station) as other:
        assert one.newest == other.newest == 0
    assert last_token(station) == 0


# One at a time


@pytest.mark.parametrize("first", [lerobot("/dev/ttyACM7"), ros2()], ids=["serial", "ros2"])
def test_a_renamed_copy_is_refused_while_the_first_lives(first: StationConfig) -> None:
    held = Claim(first)
    with pytest.raises(DeviceError) as caught:
        Claim(replace(first, name="copy"))
    text = str(caught.value)
    assert text.startswith(f"station copy: process {os.getpid()} on ")
    assert "(station bench, user " in text
    assert "an arm has one driver. End that one first, or wait" in text
    held.release()
    Claim(replace(first, name="copy")).release()


def test_two_arms_of_one_manager_go_together_and_a_shared_joint_does_not() -> None:
    def station(*joints: str) -> StationConfig:
        return replace(ros2("-".join(joints)), joints=joints)

    with Claim(station("left1", "left2")), Claim(station("right1", "right2")):
        with pytest.raises(DeviceError, match="drives right2 of /controller_manager in ROS domain 0 already"):
            Claim(station("free", "right2"))
        Claim(station("free", "other")).release()  # what a refused one had taken is free again


def test_every_user_may_claim_what_another_has_used(claims: Path) -> None:
    Claim(lerobot("/dev/ttyACM7")).release()
    (path,) = claims.glob("*.claim")
    assert path.name.startswith("robot_rl.dev-ttyACM7.")
    assert path.stat().st_mode & 0o777 == 0o666


def test_a_link_in_the_place_of_a_claim_is_not_followed(claims: Path) -> None:
    Claim(lerobot("/dev/ttyACM7")).release()
    (path,) = claims.glob("*.claim")
    path.unlink()
    path.symlink_to(claims / "elsewhere")
    for use in (Claim, last_token):
        with pytest.raises(DeviceError, match=r"robot_rl\.dev-ttyACM7.*Look at its owner and rights"):
            use(lerobot("/dev/ttyACM7"))
    assert not (claims / "elsewhere").exists()


def test_claims_are_in_a_folder_that_all_users_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", "/home/ada/elsewhere")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/ada/state")
    monkeypatch.setenv("TMPDIR", "/home/ada/tmp")
    monkeypatch.delenv("ROBOT_RL_CLAIMS")
    path = claim_module._path("/dev/ttyACM7")
    assert path.parent == Path("/var/tmp")
    assert path.parent.stat().st_mode & 0o1777 == 0o1777  # all may write, none may delete another's


# Tokens


def test_a_token_is_remembered_and_an_older_one_refused() -> None:
    station = lerobot("/dev/ttyACM7")
    with Claim(station) as claim:
        claim.fence(NEW).check(NEW)
    assert last_token(replace(station, name="copy")) == NEW
    with Claim(replace(station, name="copy")) as claim:  # a new process, a renamed file, a new boot
        with pytest.raises(LeaseError, match=r"station copy: .* fencing token 11 refused, token 12"):
            claim.fence(OLD)
        fence = claim.fence(NEW)
        fence.check(NEW + 3)  # what comes later is remembered too
    assert last_token(station) == NEW + 3


def test_a_person_who_starts_an_arm_by_hand_needs_no_token() -> None:
    station = ros2()
    with Claim(station) as claim:
        claim.fence(NEW)
    with Claim(station) as claim:
        fence = claim.fence(0)
        fence.check(0)
        fence.check(3)
        with pytest.raises(LeaseError, match="token 0 refused, token 3"):
            fence.check(0)
    assert last_token(station) == NEW  # and nothing is forgotten by that


def test_a_write_that_a_power_cut_tears_lowers_nothing(claims: Path) -> None:
    station = lerobot("/dev/ttyACM7")
    with Claim(station) as claim:
        for token in (3, 4, NEW):
            claim.record(token)
    (path,) = claims.glob("*.claim")
    content = bytearray(path.read_bytes())
    # 3 went to the first slot (byte 4096), 4 to the second (8192), 12 to the first again.
    assert content[4096:].split(b"\0")[0].split()[1] == b"12"
    assert content[8192:].split()[1] == b"4"
    for at in range(8192, 8192 + 24):  # the next write goes there, and is cut short anywhere
        path.write_bytes(content[:at] + b"9" * (8192 + 24 - at))
        assert last_token(station) == NEW
    with Claim(station) as claim:
        claim.record(NEW + 1)
    assert last_token(station) == NEW + 1


def test_a_token_that_cannot_be_written_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with Claim(lerobot("/dev/ttyACM7")) as claim:
        fence = claim.fence(OLD)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DeviceError, match=r"token 12 cannot be written to .*No space left.*Free some"):
            fence.check(NEW)
        assert fence.newest == OLD
        fence.check(OLD)


def test_lease_files_of_two_users_give_tokens_that_can_be_compared(tmp_path: Path) -> None:
    # Ada's file has given 1 to 3. Bob's is new: his first lease is 4, as the arm has seen 3. Ada's next is 5.
    station = ros2()
    spec = DeviceSpec(name="arm-bench", kind="robot", last_token=lambda: last_token(station))
    ada, bob = LeaseStore(tmp_path / "ada.db"), LeaseStore(tmp_path / "bob.db")
    given: list[int] = []
    for store in (ada, ada, ada, bob, ada):
        lease = store.acquire(spec, holder="deploy")
        with Claim(station) as claim:
            claim.fence(lease.token)
        given.append(lease.token)
        store.release(lease)
    assert given == [1, 2, 3, 4, 5]


# Programs that know nothing of claims


def test_a_port_that_another_program_has_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = tmp_path / "ttyACM7"
    port.write_text("")
    with port.open() as file:
        rival = subprocess.Popen(["sleep", "60"], stdin=file)
    try:
        assert openers(port) == [(rival.pid, "sleep")]
        with port.open():
            assert openers(port) == [(rival.pid, "sleep")]  # not we ourselves
        monkeypatch.setattr(claim_module, "openers", lambda path: openers(port))
        station = lerobot("/dev/ttyACM7")
        with pytest.raises(DeviceError, match=rf"process {rival.pid} \(sleep\) has /dev/ttyACM7 open"):
            Claim(station)
    finally:
        rival.kill()
        rival.wait()
    Claim(station).release()


def test_an_open_port_is_kept_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    name = os.ttyname(slave)
    second = os.open(name, os.O_RDWR | os.O_NOCTTY)
    asked: list[int] = []
    monkeypatch.setattr(claim_module.fcntl, "ioctl", lambda port, what: asked.append(what))
    try:
        keep_others_out(slave)
        assert asked == []  # a pseudo-terminal stays open at its other end
        with pytest.raises(BlockingIOError):
            keep_others_out(second)
        os.close(slave)
        monkeypatch.setattr(os, "ttyname", lambda port: "/dev/ttyACM7")
        keep_others_out(second)
        assert asked == [termios.TIOCEXCL]
    finally:
        os.close(second)
        os.close(master)


# Real processes

HOLD = """
import sys
from robot_rl.real.claim import Claim
from robot_rl.real.station import load_station
claim = Claim(load_station("so101"))
claim.fence(int(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_driver_frees_the_arm_and_a_stopped_one_keeps_it(tmp_path: Path) -> None:
    station = replace(load_station("so101"), name="copy")
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(NEW)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "ROBOT_RL_STATE": str(tmp_path / "another")},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        for _ in range(2):
            with pytest.raises(DeviceError, match=rf"process {child.pid} .*\(station so101, user .*ttyACM0"):
                Claim(station)
            child.send_signal(signal.SIGSTOP)
    finally:
        child.kill()
        child.communicate()
    with Claim(station) as claim:
        assert claim.newest == NEW


ASK_AS_NOBODY = """
import os
from robot_rl.core.errors import DeviceError
from robot_rl.real.claim import Claim, last_token
from robot_rl.real.station import load_station
station = load_station("so101")
os.setgid(65534)
os.setuid(65534)
try:
    with Claim(station) as claim:
        claim.fence(last_token(station) + 1)
        print("had it,", last_token(station), flush=True)
except DeviceError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_is_refused_and_then_goes_on_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> str:
        done = subprocess.run(
            [sys.executable, "-c", ASK_AS_NOBODY], capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # pytest's own folders are root's alone
        Path(name).chmod(0o1777)
        monkeypatch.setenv("ROBOT_RL_CLAIMS", name)
        station = load_station("so101")
        before = os.umask(0o077)
        try:
            with Claim(station) as claim:
                claim.fence(NEW)
                said = ask()
        finally:
            os.umask(before)
        assert f"process {os.getpid()} on " in said
        assert "user root) drives /dev/ttyACM0 already" in said
        assert ask() == "had it, 13\n"
        assert last_token(station) == 13
