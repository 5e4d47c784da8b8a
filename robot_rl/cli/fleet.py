"""`robot-rl fleet`: a web page of devices, leases, the line for them, arms and runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import ConfigError, DeviceError, require

SUMMARY = "a web page of devices, their holders, arms with stop buttons, and runs"

_HELP = """\
Usage: robot-rl fleet [port=8642] [runs=runs] [host=127.0.0.1 cert=<file> key=<file>]

Serves a page of this machine: devices and who holds them, who waits, arms that are up with their cameras,
their scene and a button that stops each, devices that stopped with a button that clears them, and the newest
runs with their curves. It prints the address to open, with the token that the page needs; the token is this
user's and stays.

It is the hub of a fleet, too: machines that `robot-rl agent` joins to it are on the page, and runs reach
their arms through it.

host=  another address than loopback makes the page reachable from elsewhere; it then needs cert= and key=
       (PEM), because the token would travel in the clear otherwise. names= are the names under which it is
       reached there.

A stop button is no safety device: you still need an e-stop button.
"""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Where the page is served, and whose runs it shows."""

    port: int = 8642
    host: str = "127.0.0.1"
    names: tuple[str, ...] = ()
    """Further names of the host, as in its address."""
    cert: str | None = None
    key: str | None = None
    runs: str = "runs"
    """Folder of run folders."""

    def __post_init__(self) -> None:
        require(1 <= self.port <= 65535, "port", self.port, "1 to 65535")
        has_tls = self.cert is not None and self.key is not None
        if (self.cert is None) != (self.key is None):
            raise ConfigError("cert: give cert=<file> and key=<file>, or neither.")
        if self.host not in _LOOPBACK and not has_tls:
            raise ConfigError(
                f"host: got {self.host!r} without cert= and key=, allowed: 127.0.0.1. From elsewhere the "
                "token would be sent in the clear."
            )
        for name in ("cert", "key"):
            file = getattr(self, name)
            require(file is None or Path(file).is_file(), name, file, "a PEM file")


def run(argv: list[str]) -> int:
    """Serves the page until Ctrl-C."""
    return run_command(argv, _HELP, _fleet)


def _fleet(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra: not for --help

    options = load(FleetConfig, words, config_name="fleet")
    try:
        from robot_rl.fleet.server import make_app, serve, token_of_machine
        from robot_rl.rollout.hub_config import token_path
    except ModuleNotFoundError as error:
        raise ConfigError(f"fleet: {error}. Install it: pip install 'robot_rl[fleet]'.") from error
    token = token_of_machine()
    hosts = frozenset({*_LOOPBACK, options.host, *options.names})
    app = make_app(Path(options.runs), token, hosts)
    scheme = "http" if options.cert is None else "https"
    at = f"[{options.host}]" if ":" in options.host else options.host
    address = f"open {scheme}://{at}:{options.port}/?token={token}   (Ctrl-C ends it)"
    cert, key = (None if file is None else Path(file) for file in (options.cert, options.key))

    def up() -> None:
        print(address, file=sys.stderr, flush=True)
        joins = f"robot-rl agent hub.address={scheme}://<this machine>:{options.port} hub.token_file=<copy>"
        print(f"machines join with `{joins}`, a copy of {token_path()}", file=sys.stderr, flush=True)

    try:
        serve(app, host=options.host, port=options.port, cert=cert, key=key, up=up)
    except OSError as error:
        raise DeviceError(
            f"fleet: port {options.port}: {error.strerror or error}. Choose another: port=8643."
        ) from error
    return 0, {"port": options.port}
