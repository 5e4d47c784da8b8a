"""Peers in other processes, and a network of their own for those that will not stay on loopback."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FASTDDS = ROOT / "build" / "interop" / "fastdds_peer"

NETWORK = """
ip link set lo up
ip link add wire0 type veth peer name wire1
ip address add 10.77.0.1/24 dev wire0
ip link set wire0 up
ip link set wire1 up
ip route add 239.255.0.0/16 dev wire0
echo ready
exec cat
"""
"""A loopback, and an interface on which multicast comes back to this host."""


class Peer:
    """A process that says what it does on standard output, and ends when standard input does."""

    def __init__(self, command: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (env or {}),
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def expect(self, beginning: str, timeout_s: float = 30.0) -> str:
        """Returns the first line that begins so."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            is_over = not self._reader.is_alive()
            for line in tuple(self.lines):
                if line.startswith(beginning):
                    return line
            if is_over:
                break
            time.sleep(0.02)
        raise AssertionError(
            f"no line {beginning!r} within {timeout_s} s; the peer said:\n" + "\n".join(self.lines)
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))


Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts peers; the test's end ends them."""
    peers: list[Peer] = []

    def begin(*command: str | Path, env: dict[str, str] | None = None) -> Peer:
        peers.append(Peer(command, env))
        return peers[-1]

    yield begin
    for peer in peers:
        peer.close()


@pytest.fixture
def fastdds() -> Path:
    """The peer on Fast DDS."""
    if not FASTDDS.exists():
        pytest.skip("the Fast DDS peer is not built: make interop-peer (Debian packages, half a minute)")
    return FASTDDS


@pytest.fixture
def namespace(start: Start) -> list[str]:
    """Words before a command that run it in a network namespace of this test."""
    is_root = os.geteuid() == 0
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("no network namespace: it needs the commands unshare (util-linux) and ip (iproute2)")
    user = [] if is_root else ["--user", "--map-root-user"]
    holder = start("unshare", *user, "--net", "sh", "-euc", NETWORK)
    try:
        holder.expect("ready", 10.0)
    except AssertionError as error:
        pytest.skip(f"no network namespace: this user or container may not make one ({error})")
    user = [] if is_root else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(holder.pid), *user, "--net"]
