"""Who is connected to the supervisor: one commander, many watchers."""

from __future__ import annotations

import logging
import select
from collections import deque

from robot_rl.real.link import Link, Listener
from robot_rl.real.messages import Answer, Message, MessageError

logger = logging.getLogger(__name__)


class Client:
    """A process at the other end of a link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.name = link.peer()
        self._answers: deque[Answer] = deque()

    def answer(self, answer: Answer) -> None:
        """Sends an answer, later if the client is slow: unlike a status it is never dropped."""
        self._answers.append(answer)

    def tell(self, status: bytes) -> None:
        """Sends what was to be answered, then an encoded status."""
        while self._answers:
            if not self.link.send(self._answers[0]):
                return
            self._answers.popleft()
        self.link.send_encoded(status)


class Clients:
    """Takes clients in, and forgets those that went."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._clients: dict[int, Client] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self.commander: Client | None = None
        """Who may move the arm: the first that asked, until it goes."""

    def __len__(self) -> int:
        return len(self._clients)

    def hear(self) -> list[tuple[Client, Message]]:
        """Returns what clients said since the last call, oldest first of each."""
        # A closed file's number is given to the next client: forget the old one before.
        for handle in [handle for handle, client in self._clients.items() if client.link.closed]:
            self._drop(handle)
        heard: list[tuple[Client, Message]] = []
        for handle, _ in self._poll.poll(0):
            client = self._clients.get(handle)
            if client is None:
                self._accept()
                continue
            try:
                heard += [(client, message) for message in client.link.receive()]
            except MessageError as error:
                logger.error("%s: %s", client.name, error)
            if client.link.closed:
                self._drop(handle)
        return heard

    def take_command(self, client: Client) -> str:
        """Makes a client the commander; returns who is it already, if another one lives."""
        if self.commander is None and not client.link.closed:
            self.commander = client
        return "" if self.commander in (client, None) else self.commander.name

    def tell(self, status: bytes) -> None:
        """Sends an encoded status to all; who does not read misses it."""
        for client in self._clients.values():
            client.tell(status)

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
