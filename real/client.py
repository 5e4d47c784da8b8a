"""The supervisor's client, for policies and watchers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from robot_rl.core.errors import DeviceError
from robot_rl.real.link import connect
from robot_rl.real.messages import Answer, Control, Operation, Plan, Status

_FRESH_S = 0.05
"""An older status is from before the socket was full, while the reader slept; a new one follows at once."""


class ArmClient:
    """One arm behind its supervisor; for one thread."""

    def __init__(self, path: Path, *, token: int = 0) -> None:
        """Connects to a supervisor; `token` is that of the arm's lease, 0 for a watcher, which may stop it.

        Raises:
            LinkError: there is no supervisor.
        """
        self._path, self._token = path, token
        self._link = connect(path)
        self._status: Status | None = None
        self._answers: list[Answer] = []
        self.on_status: Callable[[Status], None] | None = None
        """Gets every status as it is fetched, also those that a newer one has overtaken."""

    @property
    def status(self) -> Status:
        """The newest status; waits for the first."""
        self._fetch()
        if self._status is None or self._age_s() > _FRESH_S:
            return self.wait(time.monotonic_ns() - round(1e9 * _FRESH_S))
        return self._status

    def wait(self, newer_than_ns: int = -1, timeout_s: float = 1.0) -> Status:
        """Returns the newest status, once that is stamped after `newer_than_ns` and fresh.

        Raises:
            DeviceError: the supervisor is gone, or sends nothing for `timeout_s`.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            self._fetch()
            status = self._status
            if status is not None and status.stamp_ns > newer_than_ns and self._age_s() <= _FRESH_S:
                return status
            self._wait_until(until_s, "says nothing new")

    def send(self, plan: Plan) -> None:
        """Sends joint targets; they are dropped if the supervisor has not fetched those before.

        Raises:
            DeviceError: the supervisor is gone.
        """
        self._link.send(replace(plan, token=self._token))
        self._require_open()

    def control(
        self, operation: Operation, *, by: str = "", seed: int = 0, timeout_s: float = 20.0
    ) -> Answer:
        """Sends an order and returns the answer when it is done.

        Raises:
            DeviceError: it was refused, with the reason; or the supervisor is gone, or did not answer.
        """
        self._fetch()
        self._answers.clear()  # to orders that timed out
        until_s = time.monotonic() + timeout_s
        order = Control(operation=operation, by=by, seed=seed, token=self._token)
        while not self._link.send(order):
            self._wait_until(until_s, f"does not read: {operation} was not sent")
        while True:
            self._fetch()
            for answer in self._answers:
                if answer.operation == operation:
                    if not answer.done:
                        raise DeviceError(f"{operation}: refused: {answer.message}")
                    return answer
            self._wait_until(until_s, f"did not answer to {operation}")

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _age_s(self) -> float:
        assert self._status is not None
        return 1e-9 * (time.monotonic_ns() - self._status.stamp_ns)

    def _fetch(self) -> None:
        for message in self._link.receive():
            if isinstance(message, Status):
                self._status = message
                if self.on_status is not None:
                    self.on_status(message)
            elif isinstance(message, Answer):
                self._answers.append(message)
                self._status = None  # from before the order was done; the next one follows at once

    def _wait_until(self, until_s: float, what: str) -> None:
        self._require_open()
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise DeviceError(f"the supervisor at {self._path} {what}. Look at its supervisor.log.")
        self._link.wait(left_s)

    def _require_open(self) -> None:
        if self._link.closed:
            raise DeviceError(f"the supervisor at {self._path} is gone. Look at its supervisor.log.")
