"""Messages between processes over stream sockets: unix sockets on a host, TLS between hosts.

Neither end ever waits for the other: what the peer does not fetch is dropped, whole messages at a
time, and counted; a peer that is gone shows at once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
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
        """Smaller for a peer that has not said yet who it is."""
        self.closed = False
        """The peer is gone, or `close` was called."""
        self.error = ""
        """What the system said when the connection broke."""
        self.dropped = 0
        """Messages not sent because the peer did not fetch those before."""

    def send(self, message: Message) -> bool:
        """Sends a message, or drops it and returns False."""
        return self.send_encoded(encode(message))

    def send_encoded(self, octets: bytes) -> bool:
        """Sends what `encode` returned, or drops it: to encode once for many peers."""
        if self.closed or not self._flush():
            self.dropped += 1
            return False
        self._outbox = memoryview(_HEADER.pack(len(octets)) + octets)
        self._flush()
        return True

    def receive(self) -> list[Message]:
        """Returns all that has arrived, oldest first, without waiting.

        Raises:
            MessageError: something that is no message of ours; the link is closed then.
        """
        self._flush()
        self._fill()
        try:
            return list(self._messages())
        except MessageError:
            self.close()
            raise

    def is_idle(self) -> bool:
        """Returns whether all that was sent has gone out, after trying once more."""
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
        """Returns who is at the other end of a unix socket, as `process 1234` where the system tells."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> bool:
        """Sends what a full socket had refused; returns whether nothing is left."""
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
    """Waits at a unix socket for peers."""

    def __init__(self, path: Path) -> None:
        """Takes the path over: whoever listened there before is gone, or was asked to leave."""
        # The name appears when a connection would be taken, not before: others wait for it.
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
        """Returns the next peer, or None if nobody knocks."""
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
    """Opens a link to whoever listens at a unix socket.

    Raises:
        LinkError: nobody does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise LinkError(
            f"link: nobody listens at {path}: {error}. Start the supervisor or driver first."
        ) from error
    return Link(connection)
