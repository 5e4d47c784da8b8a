"""Messages between processes over stream sockets: unix sockets on a host, TLS between hosts.

Neither end ever waits for the other: messages that the peer does not fetch are dropped as a whole, and
counted. A lost peer is noticed at once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from robot_rl.core.errors import DeviceError
from robot_rl.real.messages import Message, MessageError, decode, encode

_HEADER = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # Linux's SO_PEERCRED: pid, uid, gid
_MACOS_LOCAL, _MACOS_PEER_PID = 0, 0x002
"""SOL_LOCAL and LOCAL_PEERPID of macOS's sys/un.h, which Python has no names for."""
MAX_MESSAGE_BYTES = 64 << 20
"""Longer ones are refused: eight 4K pictures fit."""
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class LinkError(DeviceError):
    """A link that cannot be opened."""


class Link:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._inbox = bytearray()
        self._outbox = memoryview(b"")
        self.max_message_bytes = MAX_MESSAGE_BYTES
        """Smaller for a peer that is not identified yet."""
        self.closed = False
        """The peer is gone, or `close` was called."""
        self.error = ""
        """The system's error when the connection broke."""
        self.dropped = 0
        """Messages not sent because the peer did not fetch those before."""

    def send(self, message: Message) -> bool:
        """Sends a message, or drops it and returns False."""
        return self.send_encoded(encode(message))

    def send_encoded(self, octets: bytes) -> bool:
        """Sends an encoded message, or drops it: one encoding serves many peers."""
        if self.closed or not self._flush():
            self.dropped += 1
            return False
        self._outbox = memoryview(_HEADER.pack(len(octets)) + octets)
        self._flush()
        return True

    def receive(self) -> list[Message]:
        """Returns all messages that have arrived, oldest first, without waiting.

        Raises:
            MessageError: bytes that are no message of ours; the link is closed then.
        """
        self._flush()
        self._fill()
        try:
            return list(self._messages())
        except MessageError:
            self.close()
            raise

    def is_idle(self) -> bool:
        """Returns whether all sent messages have gone out, after one more try."""
        return self._flush()

    def wait(self, timeout_s: float) -> bool:
        """Waits until something arrives, can be sent, or the peer goes; returns whether any happened."""
        events = select.POLLIN if self._flush() else select.POLLIN | select.POLLOUT
        if self.closed:
            return True
        poll = select.poll()  # select knows 1024 files only
        poll.register(self._socket, events)
        return bool(poll.poll(1e3 * max(0.0, timeout_s)))

    def peer(self) -> str:
        """Returns the process at the other end of a unix socket, as `process 1234` if the system shows it."""
        credentials: int | None = getattr(socket, "SO_PEERCRED", None)
        try:
            if credentials is None:
                pid = self._socket.getsockopt(_MACOS_LOCAL, _MACOS_PEER_PID)
            else:
                octets = self._socket.getsockopt(socket.SOL_SOCKET, credentials, _CREDENTIALS.size)
                pid, _, _ = _CREDENTIALS.unpack(octets)
        except (OSError, struct.error):
            pid = 0
        return f"process {pid}" if pid > 0 else "another process"

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> bool:
        """Sends the bytes that a full socket had refused; returns whether nothing is left."""
        while self._outbox and not self.closed:
            try:
                self._outbox = self._outbox[self._socket.send(self._outbox) :]
            except _WOULD_BLOCK:
                break
            except OSError as error:
                self.error = str(error)
                self.close()
        return not self._outbox

    def _fill(self) -> None:
        while not self.closed:
            try:
                octets = self._socket.recv(1 << 18)
            except _WOULD_BLOCK:
                return
            except OSError as error:
                octets, self.error = b"", str(error)
            if not octets:
                self.close()
            self._inbox += octets
            if len(self._inbox) > _HEADER.size + self.max_message_bytes:
                return  # whole messages first: a peer may send faster than this reads

    def _messages(self) -> Iterator[Message]:
        start = 0
        while len(self._inbox) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._inbox, start)
            if length > self.max_message_bytes:
                raise MessageError(
                    f"link: a message of {length} bytes, allowed {self.max_message_bytes}: the peer is not "
                    "ours."
                )
            end = start + _HEADER.size + length
            if end > len(self._inbox):
                break
            yield decode(bytes(self._inbox[start + _HEADER.size : end]))
            start = end
        del self._inbox[:start]


class Listener:
    """Accepts peers at a unix socket."""

    def __init__(self, path: Path) -> None:
        """Replaces an earlier socket of this path."""
        # The name appears when the socket accepts connections, not before: others wait for it.
        early = path.with_name(f"{path.name}~")
        with contextlib.suppress(FileNotFoundError):
            early.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(early))
        except OSError as error:
            self._socket.close()
            raise LinkError(
                f"link: cannot listen at {path}: {error}. Use a shorter path (unix sockets allow about "
                "100 letters) in a folder that this user may write to."
            ) from error
        early.chmod(0o600)
        self._socket.listen()
        self._socket.setblocking(False)
        early.rename(path)
        self.path = path

    def accept(self) -> Link | None:
        """Returns the next peer, or None if there is none."""
        try:
            return Link(self._socket.accept()[0])
        except BlockingIOError:
            return None

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def connect(path: Path) -> Link:
    """Opens a link to the listener at a unix socket.

    Raises:
        LinkError: there is none, or so many wait to be let in that it must be hanging.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)  # else a full line would hold the caller for as long as it hangs
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise LinkError(
            f"link: nobody listens at {path}: {error}. Start the supervisor or driver first."
        ) from error
    return Link(connection)
