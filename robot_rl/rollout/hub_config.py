"""Where the fleet's hub is; without torch and aiohttp, so that mistakes are refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from robot_rl.core.errors import require
from robot_rl.real.remote import is_loopback, read_token
from robot_rl.sched.lease_file import default_path


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """The fleet's hub, which `robot-rl fleet` serves, and through which machines reach each other."""

    address: str | None = None
    """https://<host>:8642; http:// for a hub of this machine alone."""
    token_file: str | None = None
    """Holds the hub's token, and only its owner may read it; that of this user on this machine if None."""
    ca: str | None = None
    """Authority that signed the hub's certificate (PEM); those that the system trusts if None."""
    most_mbit_s: float = 0.0
    """Most that a run sends to each arm's machine of what acts there, and an agent of steps and scenes, in
    megabits per second; any amount if 0."""
    alone_s: float = 60.0
    """An arm whose learner cannot be reached acts on so long, then rests and is free for others."""
    pictures: Literal["send", "stay"] = "send"
    """`stay`: the arm's machine sends what the frozen base makes of pictures, and keeps the pictures until
    `robot-rl replay fetch <run>` asks for them."""

    def __post_init__(self) -> None:
        require(self.alone_s > 0, "hub.alone_s", self.alone_s, "above 0")
        require(self.most_mbit_s >= 0, "hub.most_mbit_s", self.most_mbit_s, "above 0, or 0 for any amount")
        if self.address is None:
            require(self.token_file is None and self.ca is None, "hub", self, "an address first: hub.address")
            return
        parts = urlsplit(self.address)
        allowed = "https://<host>:<port>, or http://127.0.0.1:<port> of this machine"
        require(
            parts.scheme in ("http", "https") and bool(parts.hostname), "hub.address", self.address, allowed
        )
        is_open = parts.scheme == "http" and not is_loopback(parts.hostname or "")
        require(not is_open, "hub.address", self.address, f"{allowed}: the token would travel in the open")

    def token(self) -> str:
        """Returns the hub's token.

        Raises:
            ConfigError: there is no such file, others may read it, or it is too short.
        """
        path = token_path() if self.token_file is None else Path(self.token_file).expanduser()
        remedy = (
            f"Copy {token_path().name} of the machine where `robot-rl fleet` runs, which prints its path."
        )
        return read_token(str(path), at="hub.token_file", remedy=remedy)


def token_path() -> Path:
    """Returns the file with the token of this user's hub."""
    return default_path().parent / "fleet.token"
