"""Where the fleet's hub is; without torch and aiohttp, so that mistakes are refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from robot_rl.core.errors import ConfigError, require
from robot_rl.real.remote import is_loopback
from robot_rl.sched.lease_file import default_path


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """The fleet's hub, which `robot-rl fleet` serves, and through which machines reach each other."""

    address: str | None = None
    """https://<host>:8642; http:// for a hub of this machine alone."""
    token_file: str | None = None
    """Holds the hub's token; that of this user on this machine if None."""
    ca: str | None = None
    """Authority that signed the hub's certificate (PEM); those that the system trusts if None."""
    alone_s: float = 60.0
    """An arm whose learner cannot be reached acts on so long, then rests and is free for others."""

    def __post_init__(self) -> None:
        require(self.alone_s > 0, "hub.alone_s", self.alone_s, "above 0")
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
            ConfigError: there is no such file, or it is empty.
        """
        path = token_path() if self.token_file is None else Path(self.token_file).expanduser()
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"hub.token_file: {path}: {error.strerror}. Copy {token_path().name} of the machine where "
                "`robot-rl fleet` runs; that command prints its path."
            ) from error
        require(bool(token), "hub.token_file", str(path), "a file with a token")
        return token


def token_path() -> Path:
    """Returns the file with the token of this user's hub."""
    return default_path().parent / "fleet.token"
