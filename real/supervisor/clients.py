"""The clients of the supervisor: one commander, many watchers."""

from __future__ import annotations

import logging
import select
import time
from collections import deque

from robot_rl.real.link import Link, Listener
from robot_rl.real.messages import Answer, Message, MessageError

logger = logging.getLogger(__name__)


class Client:
    """A process at the other end of a link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.name = link.peer()
        self.since_s = time.monotonic()
        self._answers: deque[Answer] = deque()

    def answer(self, answer: Answer) -> None:
        """Queues an answer: unlike a status it is never dropped."""
        self._answers.append(answer)

    def send_status(self, status: bytes) -> None:
        """Sends the queued answers, then an encoded status."""
        while self._answers:
            if not self.link.send(self._answers[0]):
                return
            self._answers.popleft()
        self.link.send_encoded(status)


class Clients:
    """Accepts clients, and forgets those that are gone."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._clients: dict[int, Client] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self.commander: Client | None = None
        """The client that may move the arm: the first that asked, until it is gone."""

    def __len__(self) -> int:
        return len(self._clients)

    def have_stayed(self, seconds: float) -> bool:
        """Whether one of them has been there for so long."""
        latest_s = time.monotonic() - seconds
        return any(client.since_s <= latest_s for client in self._clients.values())

    def receive(self) -> list[tuple[Client, Message]]:
        """Returns the new messages, the oldest of each client first."""
        # The next client may get a closed file's number: forget the old client first.
        for handle in [handle for handle, client in self._clients.items() if client.link.closed]:
            self._drop(handle)
        received: list[tuple[Client, Message]] = []
        for handle, _ in self._poll.poll(0):
            client = self._clients.get(handle)
            if client is None:
                self._accept()
                continue
            try:
                received += [(client, message) for message in client.link.receive()]
            except MessageError as error:
                logger.error("%s: %s", client.name, error)
            if client.link.closed:
                self._drop(handle)
        return received

    def take_command(self, client: Client) -> str:
        """Makes a client the commander; returns the present one's name if there is another."""
        if self.commander is None and not client.link.closed:
            self.commander = client
        return "" if self.commander in (client, None) else self.commander.name

    def send_status(self, status: bytes) -> None:
        """Sends an encoded status to all; a client that does not read misses it."""
        for client in self._clients.values():
            client.send_status(status)

    def close(self) -> None:
        for client in self._clients.values():
            client.link.close()
        self._clients.clear()
        self._listener.close()

    def _accept(self) -> None:
        link = self._listener.accept()
        if link is not None:
            self._clients[link.fileno()] = Client(link)
            self._poll.register(link, select.POLLIN)

    def _drop(self, handle: int) -> None:
        self._poll.unregister(handle)
        if self._clients.pop(handle) is self.commander:
            self.commander = None
