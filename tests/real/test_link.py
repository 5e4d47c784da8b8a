"""Links: bytes in any pieces, peers that do not read, that die, and that talk nonsense."""

import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.real.link import MAX_MESSAGE_BYTES, Link, LinkError, Listener, connect
from robot_rl.real.messages import Answer, Control, Frame, Message, MessageError, encode

BIG = Frame(name="front.rgb", stamp_ns=1, array=np.arange(3_000_000, dtype=np.uint32))


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with Link(left) as one, Link(right) as other:
        yield one, other


def control(number: int) -> Control:
    return Control(operation="start", by="test", seed=number)


def receive_until(link: Link, count: int, *, feed: Link | None = None) -> list[Message]:
    """Returns what has come once there are `count` messages; lets the sender send its rest."""
    got: list[Message] = []
    until_s = time.monotonic() + 5.0
    while len(got) < count and time.monotonic() < until_s:
        if feed is not None:
            feed.is_idle()
        got += link.receive()
    return got


def test_messages_arrive_whole_and_in_order(pair: tuple[Link, Link]) -> None:
    one, other = pair
    assert all(one.send(control(number)) for number in range(5))
    assert other.receive() == [control(number) for number in range(5)]
    assert other.receive() == []


def test_a_message_that_comes_in_single_bytes() -> None:
    left, right = socket.socketpair()
    octets = encode(control(1))
    with left, Link(right) as link:
        for byte in struct.pack("<I", len(octets)) + octets[:-1]:
            left.send(bytes([byte]))
            assert link.receive() == []
        left.send(octets[-1:])
        assert link.receive() == [control(1)]


def test_a_message_larger_than_the_socket_is_sent_in_parts(pair: tuple[Link, Link]) -> None:
    one, other = pair
    assert one.send(BIG)
    assert not one.is_idle()  # 12 MB do not fit into a socket
    (frame,) = receive_until(other, 1, feed=one)
    assert isinstance(frame, Frame)
    assert np.array_equal(frame.array, BIG.array)
    assert one.is_idle()


def test_what_the_peer_does_not_fetch_is_dropped_whole(pair: tuple[Link, Link]) -> None:
    one, other = pair
    one.send(BIG)
    assert not one.send(control(1))
    assert not one.send(control(2))
    assert one.dropped == 2
    receive_until(other, 1, feed=one)
    assert one.send(control(3))
    assert other.receive() == [control(3)]  # nothing of 1 and 2


def test_a_sender_never_waits(pair: tuple[Link, Link]) -> None:
    one, _ = pair
    sent = sum(one.send(control(number)) for number in range(20_000))
    assert sent + one.dropped == 20_000
    assert one.dropped > 0


def test_a_peer_that_closes_shows_at_once_and_its_last_words_are_heard(pair: tuple[Link, Link]) -> None:
    one, other = pair
    one.send(control(1))
    one.close()
    assert other.wait(0.0)
    assert other.receive() == [control(1)]
    assert other.closed
    assert not other.send(control(2))


def test_sending_to_a_closed_peer_closes_the_link(pair: tuple[Link, Link]) -> None:
    one, other = pair
    other.close()
    for number in range(3):
        one.send(control(number))
    assert one.closed


def test_a_killed_peer_shows_at_once(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "s")
    code = "import socket, time; s = socket.socket(socket.AF_UNIX); "
    code += f"s.connect({str(tmp_path / 's')!r}); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    link = listener.accept()
    assert link is not None
    assert link.peer() == f"process {child.pid}"
    assert not link.wait(0.0)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert link.wait(5.0)
    assert link.receive() == []
    assert link.closed
    listener.close()


@pytest.mark.parametrize(
    ("octets", "words"),
    [
        (struct.pack("<I", 3) + b"abc", "3 bytes are no message"),
        (
            struct.pack("<I", MAX_MESSAGE_BYTES + 1),
            f"{MAX_MESSAGE_BYTES + 1} bytes, allowed {MAX_MESSAGE_BYTES}",
        ),
    ],
)
def test_nonsense_closes_the_link(octets: bytes, words: str) -> None:
    left, right = socket.socketpair()
    with left, Link(right) as link:
        left.send(octets)
        with pytest.raises(MessageError, match=words):
            link.receive()
        assert link.closed


def test_waiting_ends_with_the_time_or_with_a_message(pair: tuple[Link, Link]) -> None:
    one, other = pair
    assert not other.wait(0.001)
    one.send(Answer(operation="stop", done=True))
    assert other.wait(5.0)


def test_a_listener_takes_peers_one_by_one(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "s")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert listener.accept() is None
    with connect(tmp_path / "s") as peer:
        link = listener.accept()
        assert link is not None
        assert link.peer() == f"process {os.getpid()}"
        peer.send(control(1))
        assert link.receive() == [control(1)]
        link.close()
    listener.close()
    assert not (tmp_path / "s").exists()


class MacSocket(socket.socket):
    """Answers as macOS does: SOL_LOCAL 0, LOCAL_PEERPID 2 (sys/un.h), a pid of four bytes."""

    def getsockopt(self, level: int, option: int, length: int = 0) -> Any:
        assert (level, option, length) == (0, 2, 0)
        return 4711


class Elsewhere(socket.socket):
    """A system that does not tell who is at the other end."""

    def getsockopt(self, *_: object) -> Any:
        raise OSError("Protocol not available")


@pytest.mark.parametrize(("kind", "name"), [(MacSocket, "process 4711"), (Elsewhere, "another process")])
def test_a_peer_has_a_name_where_linux_credentials_do_not_exist(
    kind: type[socket.socket], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    left, right = socket.socketpair()
    with right, Link(kind(fileno=left.detach())) as link:
        assert link.peer() == name


def test_a_peer_without_a_number_here_is_another_process() -> None:
    """Linux gives 0 for a process of another process namespace."""

    class Contained(socket.socket):
        def getsockopt(self, *_: object) -> Any:
            return struct.pack("3i", 0, 1000, 1000)

    left, right = socket.socketpair()
    with right, Link(Contained(fileno=left.detach())) as link:
        assert link.peer() == "another process"


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"nobody listens at .*/s: .*Start the supervisor or driver first"):
        connect(tmp_path / "s")


def test_a_path_that_is_too_long_is_explained(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"cannot listen at .*Use a shorter path .*100 letters"):
        Listener(tmp_path / ("x" * 120))


def test_who_comes_to_a_listener_that_hangs_does_not_wait(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hangs, ExitStack() as links:
        hangs.bind(str(tmp_path / "s"))
        hangs.listen(1)

        def come() -> None:
            for _ in range(10):
                links.callback(connect(tmp_path / "s").close)

        with pytest.raises(LinkError, match="nobody listens at"):
            come()
