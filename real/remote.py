"""A policy on another computer: the robot's end, without torch, and the door of the server.

    robot: PolicyClient --Hello, Ask-->          Door, then `robot_rl.train.serve`: computer with the GPU
                        <--Offer, Reply, Refusal--

TLS 1.3. The client trusts a server whose certificate `ca` signed. The server accepts clients with a
certificate that `client_ca` signed, or with a token; it requires both if it has both settings. Without TLS a
server listens on the loopback only (`tcp://127.0.0.1:...`), and still requires a token.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from robot_rl.core.errors import CheckpointError, ConfigError, DeviceError, require
from robot_rl.core.policy import Mode
from robot_rl.real.link import MAX_MESSAGE_BYTES, Link
from robot_rl.real.messages import Array, Ask, Hello, Message, MessageError, Offer, Refusal, Reply

logger = logging.getLogger(__name__)

VERSION = 1
"""Raised when `Hello`, `Offer`, `Ask` or `Reply` change their meaning."""
DEFAULT_PORT = 7710
IDENTITY = ("task", "robot", "control_hz", "state_names", "action_names")
"""Facts that must be equal for a server's policy and an arm."""
_HANDSHAKE_S = 5.0
_HELLO_BYTES = 4096
_MIN_TOKEN_LETTERS = 16
_BACK_OFF_S = (0.1, 2.0)
"""Pauses between attempts to connect again: the first and the longest."""
_MOST_DROPS = 3
"""A question at which the connection ends this often causes that: it is not asked again."""
_SILENT_MS = 5000
"""After this time without an acknowledgement by TCP the peer counts as gone."""


class ServerGoneError(DeviceError):
    """A policy server that cannot be reached now, but may come back."""


@dataclass(frozen=True, kw_only=True)
class DoorConfig:
    """The address of a policy server, and the clients that it accepts."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for every network of this computer, which needs TLS."""
    port: int = DEFAULT_PORT
    """0 takes any that is free."""
    token_file: str | None = None
    """Clients must know its first line."""
    cert: str | None = None
    """The server's certificate (PEM, with its chain); with `key` it turns TLS on."""
    key: str | None = None
    client_ca: str | None = None
    """Clients must show a certificate signed by this authority."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "port", self.port, "0 to 65535")
        require(
            (self.cert is None) == (self.key is None), "key", self.key, "given with `cert`, and only then"
        )
        require(self.client_ca is None or self.cert is not None, "client_ca", self.client_ca, "with `cert`")
        if self.cert is None and not is_loopback(self.host):
            raise ConfigError(
                f"host: {self.host} is not this computer's loopback, and without `cert` and `key` all would "
                "travel in the open. Give both, or listen at 127.0.0.1."
            )
        if self.token_file is None and self.client_ca is None:
            raise ConfigError(
                "token_file: nothing says who may ask. Give token_file=<file>, or client_ca=<file> with TLS."
            )


@dataclass(frozen=True, kw_only=True)
class RemoteKeys:
    """The credentials of a policy client, and how it trusts the server."""

    token_file: str | None = None
    ca: str | None = None
    """Authority that signed the server's certificate; those that the system trusts if None."""
    cert: str | None = None
    """This robot's certificate, where the server requires one."""
    key: str | None = None
    patience_s: float = 60.0
    """How long a question may stay unanswered, by a server that is gone or silent, before the run ends;
    the arm holds meanwhile."""

    def __post_init__(self) -> None:
        require(
            (self.cert is None) == (self.key is None), "key", self.key, "given with `cert`, and only then"
        )
        require(self.patience_s > 0, "patience_s", self.patience_s, "above 0")


@dataclass(frozen=True, kw_only=True)
class RemoteConfig(RemoteKeys):
    """A policy server and its credentials."""

    address: str
    """tls://host:port, or tcp://127.0.0.1:port of a server on this computer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme, host, _ = self.parts
        if scheme == "tcp" and not is_loopback(host):
            raise ConfigError(
                f"policy: {self.address} leaves this computer without TLS. Use tls://{host}:<port>."
            )

    @property
    def parts(self) -> tuple[str, str, int]:
        """Scheme, host and port of the address."""
        scheme, host, port = "", None, None
        with contextlib.suppress(ValueError):
            parts = urlsplit(self.address)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        if scheme not in ("tls", "tcp") or not host:
            raise ConfigError(
                f"policy: got {self.address!r}, allowed: tls://<host>:<port>, or tcp://127.0.0.1:<port> of a "
                "server on this computer."
            )
        return scheme, host, port or DEFAULT_PORT


class Door:
    """The listening socket of a policy server, which checks every client."""

    def __init__(self, config: DoorConfig, facts: Mapping[str, Any]) -> None:
        """Listens.

        Raises:
            DeviceError: the port is taken.
            ConfigError: a certificate, key or token cannot be read.
        """
        self._facts = dict(facts)
        self._token = None if config.token_file is None else read_token(config.token_file)
        self._context = None if config.cert is None else _server_context(config)
        try:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            self._socket = socket.create_server((config.host, config.port), family=family, backlog=16)
        except OSError as error:
            raise DeviceError(
                f"policy server: cannot listen at {config.host}:{config.port}: {error}"
            ) from error
        scheme, host = "tcp" if self._context is None else "tls", config.host
        self.port: int = self._socket.getsockname()[1]
        self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def next_connection(self, timeout_s: float) -> socket.socket | None:
        """Waits for a client, which is not checked yet."""
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.accept()[0]
        except TimeoutError:
            return None

    def admit(self, connection: socket.socket) -> Link:
        """Checks a client and sends it the facts.

        Raises:
            DeviceError: it is refused; the client got the reason, and the connection is closed.
        """
        try:
            host = connection.getpeername()[0]
            connection.settimeout(_HANDSHAKE_S)
            if self._context is not None:
                connection = self._context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                connection.do_handshake()
        except OSError as error:
            _hang_up(connection)
            raise DeviceError(f"refused a client: {tls_reason(error)}") from error
        watch_peer(connection)
        link = Link(connection)
        link.max_message_bytes = _HELLO_BYTES
        reason = self._refusal(link)
        if reason:
            link.send(Refusal(reason=reason))
            link.close()
            raise DeviceError(f"refused {host}: {reason}")
        link.max_message_bytes = MAX_MESSAGE_BYTES
        link.send(Offer(facts=self._facts))
        return link

    def close(self) -> None:
        self._socket.close()

    def _refusal(self, link: Link) -> str:
        try:
            hello = receive_one(link, _HANDSHAKE_S)
        except DeviceError:
            return f"no greeting of this version: {link.error or 'another message came first'}"
        if not isinstance(hello, Hello):
            return "no greeting: another message came first"
        if self._token is not None and not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "wrong token" if hello.token else "no token: this server asks for one (token_file=<file>)"
        if hello.version != VERSION:
            return (
                f"this server speaks version {VERSION} of the protocol, the client {hello.version}. Install "
                "the same robot_rl on both."
            )
        return ""


class PolicyClient:
    """Asks a policy server, one question at a time; for one thread. Connects again by itself."""

    def __init__(self, config: RemoteConfig, expect: Mapping[str, Any] | None = None) -> None:
        """Connects; `expect` has the required facts of the policy, of `IDENTITY`.

        Raises:
            ServerGoneError: there is no server.
            DeviceError: the server refuses us, or `ca` did not sign its certificate.
            CheckpointError: its policy was made for another arm or task.
        """
        self.config = config
        self._token = "" if config.token_file is None else read_token(config.token_file)
        self._context = None
        if config.parts[0] == "tls":
            self._context = client_context(config.ca)
            if config.cert is not None:
                _load_chain(self._context, config.cert, config.key)
        self._expect = dict(expect or {})
        self._number = 0
        self._closing = threading.Event()
        self.lost = 0
        """How often the server was gone."""
        self.facts: dict[str, Any] = {}
        self._link = self._connect()

    def ask(
        self,
        what: Literal["sample", "sample_after", "refine"],
        *,
        obs: Mapping[str, Array],
        arrays: Mapping[str, Array],
        mode: Mode = "ode",
        frozen: int = 0,
    ) -> Reply:
        """Returns the answer; while the server is gone it waits, and asks again when the server is back.

        Raises:
            DeviceError: the server gave no answer for `patience_s`, refuses the question, or ended the
                connection each of the `_MOST_DROPS` times that it got the question.
            CheckpointError: the server that came back has another policy.
        """
        self._number += 1
        question = Ask(
            number=self._number, what=what, mode=mode, obs=dict(obs), arrays=dict(arrays), frozen=frozen
        )
        until_s = time.monotonic() + self.config.patience_s
        pauses, drops = back_off(*_BACK_OFF_S), 0
        while True:
            try:
                return self._answer(question, until_s)
            except ServerGoneError as error:
                self._link.close()  # so that a late answer is not that of a later question
                if self._closing.is_set():
                    raise
                self.lost, drops = self.lost + 1, drops + 1
                if drops == _MOST_DROPS:
                    raise DeviceError(
                        f"{error}. That was the end of {drops} connections, each time at the same question "
                        f"({what}), which is not asked again. Its log says why; start it again."
                    ) from error
                logger.warning("%s; the arm holds when its chunk ends", error)
                self._reconnect(error, until_s, pauses)

    def close(self) -> None:
        """Ends the connection, and the waiting of other threads."""
        self._closing.set()
        self._link.close()

    def _answer(self, question: Ask, until_s: float) -> Reply:
        self._link.send(question)
        while True:
            try:
                message = receive_one(self._link, until_s - time.monotonic(), self._closing)
            except ServerGoneError as error:
                raise ServerGoneError(f"{self._at()}: {error}") from error
            if isinstance(message, Reply) and message.number == question.number:
                return message
            if isinstance(message, Refusal):
                raise DeviceError(f"{self._at()}: {message.reason}")

    def _reconnect(self, error: ServerGoneError, until_s: float, pauses: Iterator[float]) -> None:
        """Connects again, each time after a longer pause, until it succeeds or `until_s`."""
        for pause_s in pauses:
            left_s = until_s - pause_s - time.monotonic()
            if left_s <= 0:
                raise DeviceError(
                    f"{error}. It gave no answer for {self.config.patience_s:g} s (patience_s); start it "
                    "again."
                ) from error
            if self._closing.wait(pause_s):
                raise error
            try:
                self._link = self._connect(min(left_s, _HANDSHAKE_S))
            except ServerGoneError as gone:
                error = gone
                continue
            logger.info("%s is back", self._at())
            return

    def _connect(self, timeout_s: float = _HANDSHAKE_S) -> Link:
        _, host, port = self.config.parts
        try:
            connection = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise ServerGoneError(f"{self._at()}: nobody answers: {error}") from error
        try:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_hostname=host)
        except ssl.SSLError as error:
            connection.close()
            raise DeviceError(f"{self._at()}: {tls_reason(error)}") from error
        except OSError as error:
            connection.close()
            raise ServerGoneError(f"{self._at()}: {error}") from error
        watch_peer(connection)
        link = Link(connection)
        link.send(Hello(version=VERSION, token=self._token))
        try:
            self._check(self._greeting(link, timeout_s))
        except BaseException:
            link.close()
            raise
        return link

    def _greeting(self, link: Link, timeout_s: float) -> dict[str, Any]:
        try:
            first = receive_one(link, timeout_s)
        except ServerGoneError as error:
            # In TLS 1.3 a server checks the client's certificate after the client's handshake.
            if "certificate" in link.error or "unknown ca" in link.error:
                raise DeviceError(
                    f"{self._at()}: the server refuses our certificate ({link.error}). Give cert=<file> "
                    "key=<file> that its client_ca signed."
                ) from None
            raise ServerGoneError(f"{self._at()}: {error}") from error
        if isinstance(first, Refusal):
            raise DeviceError(f"{self._at()}: refused: {first.reason}")
        if not isinstance(first, Offer):
            raise DeviceError(f"{self._at()}: no policy server: it says a {type(first).__name__}")
        return first.facts

    def _check(self, facts: dict[str, Any]) -> None:
        """Refuses a policy that is not for this arm, or not the same as before."""
        if self.facts and facts != self.facts:
            raise CheckpointError(
                f"{self._at()}: it serves another policy than before. End this run and begin a new one."
            )
        for name, want in self._expect.items():
            have = facts.get(name)
            if name == "robot" and facts.get("robots"):  # a policy for several
                have = want if want in facts["robots"] else facts["robots"]
            if name == "control_hz" and facts.get("rates"):
                rates = dict(zip(facts["robots"], facts["rates"], strict=True))
                have = rates.get(self._expect.get("robot"), have)
            if have != (list(want) if isinstance(want, tuple) else want):
                raise CheckpointError(
                    f"{self._at()}: its policy was made for {name} = {have!r}, this arm has {want!r}. "
                    "Serve the run of this arm and task."
                )
        self.facts = facts

    def _at(self) -> str:
        return f"policy server {self.config.address}"


def back_off(first_s: float, longest_s: float) -> Iterator[float]:
    """Yields the pause before each attempt to connect again: twice as long each time."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


def receive_one(link: Link, timeout_s: float, closing: threading.Event | None = None) -> Message:
    """Waits for a message, and returns the newest.

    Raises:
        ServerGoneError: the peer is gone, or silent for `timeout_s`.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            messages = link.receive()
        except MessageError as error:
            raise ServerGoneError(str(error)) from error
        if messages:
            return messages[-1]
        left_s = until_s - time.monotonic()
        is_asked_to_end = closing is not None and closing.is_set()
        if link.closed or is_asked_to_end or left_s <= 0:
            why = link.error or ("connection closed" if link.closed else f"silent for {timeout_s:.3g} s")
            raise ServerGoneError(why)
        link.wait(min(left_s, 0.2))


def read_token(path: str, *, at: str = "token_file", remedy: str = "") -> str:
    """Returns the first line of a file that no other user may read.

    Args: at: the setting. remedy: how a person gets such a file.

    Raises:
        ConfigError: it is missing, readable by others, or too short to be a secret.
    """
    remedy = remedy or f"`openssl rand -hex 32 > {path}` makes one."
    try:
        mode, lines = Path(path).stat().st_mode, Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{at}: {path}: {getattr(error, 'strerror', None) or error}. {remedy}") from error
    token = lines[0].strip() if lines else ""
    if mode & 0o077:
        raise ConfigError(f"{at}: {path} may be read by others. `chmod 600 {path}`")
    if len(token) < _MIN_TOKEN_LETTERS:
        raise ConfigError(
            f"{at}: {path}: {len(token)} letters, allowed: {_MIN_TOKEN_LETTERS} or more. {remedy}"
        )
    return token


def watch_peer(connection: socket.socket) -> None:
    """Makes a connection send at once, and notice a cut network soon."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_USER_TIMEOUT": _SILENT_MS, "TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
    for name, value in options.items():
        with contextlib.suppress(OSError, AttributeError):  # not Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _server_context(config: DoorConfig) -> ssl.SSLContext:
    assert config.cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_chain(context, config.cert, config.key)
    if config.client_ca is not None:
        _load_authority(context, "client_ca", config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: str | None, *, at: str = "ca") -> ssl.SSLContext:
    """Returns the TLS 1.3 of a client.

    Args:
        ca: authority that signed the server's certificate (PEM); those that the system trusts if None.
        at: its setting.

    Raises:
        ConfigError: the file cannot be read, or has no certificate.
    """
    context = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca is not None:
        _load_authority(context, at, ca)
    return context


def _load_chain(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        raise ConfigError(f"cert: {cert} and key: {key}: {error}") from error


def _load_authority(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error}") from error


def _hang_up(connection: socket.socket) -> None:
    """Closes so that the peer gets the reason: to close with unread bytes would discard what was sent."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        while connection.recv(_HELLO_BYTES):
            pass
    connection.close()


def tls_reason(error: OSError) -> str:
    """Returns why TLS did not come about, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not to be trusted: {error.verify_message}"
    reason = getattr(error, "reason", None) or str(error)
    return f"TLS: {str(reason).lower().replace('_', ' ')}"


def is_loopback(host: str) -> bool:
    """Whether only programs of this computer reach that address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
