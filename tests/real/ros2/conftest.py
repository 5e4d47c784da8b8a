"""A ROS domain per test, on this machine only."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_DOMAINS = itertools.count(os.getpid())
_DISCOVERY = ("ROS_DISTRO", "ROS_STATIC_PEERS", "ROS_LOCALHOST_ONLY", "CYCLONEDDS_URI")


def own_domain(patch: pytest.MonkeyPatch) -> int:
    domain = next(_DOMAINS) % 100 + 1
    patch.setenv("ROS_DOMAIN_ID", str(domain))
    patch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    for name in _DISCOVERY:
        patch.delenv(name, raising=False)
    return domain


@pytest.fixture
def ros_domain(monkeypatch: pytest.MonkeyPatch) -> int:
    """A domain of its own for this test and the processes it starts."""
    pytest.importorskip("cyclonedds")
    return own_domain(monkeypatch)


def start_peer(*arguments: str, script: str = "peer.py") -> "subprocess.Popen[str]":
    """Starts a peer in a process of its own; it has opened its node when this returns."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def start() -> Callable[..., "subprocess.Popen[str]"]:
    return start_peer


def stop_peer(process: "subprocess.Popen[str]") -> None:
    process.communicate(timeout=20)  # closes its input, upon which it closes its node


@pytest.fixture(scope="module")
def peer(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    """One peer for the tests of a module (its PEER, if it names one), and the domain they all use."""
    pytest.importorskip("cyclonedds")
    with pytest.MonkeyPatch.context() as patch:
        own_domain(patch)
        process = start_peer(script=getattr(request.module, "PEER", "peer.py"))
        try:
            yield process
        finally:
            stop_peer(process)
