"""The door of a policy server, and the robot's end: who gets in, what is said, and what a cut does."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import CheckpointError, ConfigError, DeviceError
from robot_rl.real import remote
from robot_rl.real.link import Link
from robot_rl.real.messages import Ask, Frame, Hello, Refusal, Reply
from robot_rl.real.remote import Door, DoorConfig, PolicyClient, RemoteConfig, ServerGoneError, read_token

FACTS = {"task": "reach", "robot": "panda", "control_hz": 20.0, "action_names": ["x", "y"], "horizon": 4}
OBS = {"state": np.arange(3.0, dtype=np.float32)[None]}


def make_token(path: Path, token: str) -> str:
    path.touch(0o600)
    path.write_text(token)
    return str(path)


class Echo:
    """A server without a policy: it answers with the observation's state, negated."""

    def __init__(self, config: DoorConfig, facts: dict[str, Any] | None = None) -> None:
        self.door = Door(config, facts or FACTS)
        self.refused: list[str] = []
        self.links: list[Link] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stop.is_set():
            connection = self.door.next_connection(0.02)
            if connection is not None:
                try:
                    self.links.append(self.door.admit(connection))
                except DeviceError as error:
                    self.refused.append(str(error))
            for link in self.links:
                for message in link.receive():
                    assert isinstance(message, Ask)
                    link.send(Reply(number=message.number, actions=-message.obs["state"]))

    def refusals(self, count: int) -> list[str]:
        """Returns what was said of those that were refused, once there are so many."""
        until_s = time.monotonic() + 5.0
        while len(self.refused) < count and time.monotonic() < until_s:
            time.sleep(0.005)
        assert len(self.refused) == count
        return self.refused

    def close(self) -> None:
        self.stop.set()
        self.thread.join()
        self.door.close()
        for link in self.links:
            link.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BACK_OFF_S", (0.01, 0.05))


@pytest.fixture
def serve() -> Iterator[Callable[..., Echo]]:
    servers: list[Echo] = []

    def start(*, facts: dict[str, Any] | None = None, port: int = 0, **fields: Any) -> Echo:
        servers.append(Echo(DoorConfig(port=port, **fields), facts))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def tls(pki: Path, **fields: Any) -> dict[str, Any]:
    return {"cert": str(pki / "server.pem"), "key": str(pki / "server.key"), **fields}


def ask(client: PolicyClient, rows: int = 1) -> Reply:
    return client.ask("sample", obs={"state": np.ones((rows, 3), np.float32)}, arrays={})


def test_a_token_over_the_loopback(serve: Callable[..., Echo], token: str) -> None:
    server = serve(token_file=token)
    with closing(PolicyClient(RemoteConfig(address=server.door.address, token_file=token))) as client:
        assert client.facts == FACTS
        reply = client.ask("sample", obs=OBS, arrays={})
        np.testing.assert_array_equal(reply.actions, -OBS["state"])


@pytest.mark.parametrize("secret", ["token", "certificate", "both"])
def test_tls(serve: Callable[..., Echo], pki: Path, token: str, secret: str) -> None:
    known: dict[str, Any] = {"token_file": token} if secret != "certificate" else {}
    asked = {"client_ca": str(pki / "authority.pem")} if secret != "token" else {}
    shown: dict[str, Any] = {"cert": str(pki / "robot.pem"), "key": str(pki / "robot.key")} if asked else {}
    server = serve(**tls(pki, **known, **asked))
    assert server.door.address.startswith("tls://")
    config = RemoteConfig(address=server.door.address, ca=str(pki / "authority.pem"), **known, **shown)
    with closing(PolicyClient(config)) as client:
        assert ask(client).actions.tolist() == [[-1.0, -1.0, -1.0]]


def test_a_question_larger_than_the_socket_and_many_records(
    serve: Callable[..., Echo], pki: Path, token: str
) -> None:
    server = serve(**tls(pki, token_file=token))
    config = RemoteConfig(address=server.door.address, ca=str(pki / "authority.pem"), token_file=token)
    with closing(PolicyClient(config)) as client:
        reply = ask(client, rows=500_000)  # 6 MB there and back
    assert reply.actions.shape == (500_000, 3)
    assert (reply.actions == -1).all()


def test_a_wrong_token_is_one_line_on_both_sides(
    serve: Callable[..., Echo], token: str, tmp_path: Path
) -> None:
    server = serve(token_file=token)
    other = make_token(tmp_path / "other", "another secret of some length")
    address = server.door.address
    with pytest.raises(DeviceError, match=rf"policy server {address}: refused: wrong token$"):
        PolicyClient(RemoteConfig(address=address, token_file=other))
    with pytest.raises(
        DeviceError, match=r"refused: no token: this server asks for one \(token_file=<file>\)"
    ):
        PolicyClient(RemoteConfig(address=address))
    first, second = server.refusals(2)
    assert first == "refused 127.0.0.1: wrong token"
    assert second.startswith("refused 127.0.0.1: no token")


def test_a_stranger_without_the_right_certificate(serve: Callable[..., Echo], pki: Path) -> None:
    server = serve(**tls(pki, client_ca=str(pki / "authority.pem")))
    base = RemoteConfig(address=server.door.address, ca=str(pki / "authority.pem"))
    with pytest.raises(DeviceError, match="the server refuses our certificate"):
        PolicyClient(base)
    with pytest.raises(DeviceError, match="the server refuses our certificate"):
        PolicyClient(replace(base, cert=str(pki / "stranger.pem"), key=str(pki / "stranger.key")))
    assert all("certificate" in reason for reason in server.refusals(2))


def test_a_server_that_nobody_vouches_for(serve: Callable[..., Echo], pki: Path, token: str) -> None:
    server = serve(**tls(pki, token_file=token))
    with pytest.raises(DeviceError, match="its certificate is not to be trusted"):
        PolicyClient(
            RemoteConfig(address=server.door.address, ca=str(pki / "stranger.pem"), token_file=token)
        )


def test_a_server_whose_certificate_is_of_another_host(
    serve: Callable[..., Echo], pki: Path, token: str
) -> None:
    server = serve(
        **tls(pki, token_file=token, cert=str(pki / "authority.pem"), key=str(pki / "authority.key"))
    )
    with pytest.raises(DeviceError, match="not to be trusted: IP address mismatch"):
        PolicyClient(
            RemoteConfig(address=server.door.address, ca=str(pki / "authority.pem"), token_file=token)
        )


def test_another_version_is_said(
    serve: Callable[..., Echo], token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(token_file=token)
    with closing(Link(socket.create_connection(("127.0.0.1", server.door.port)))) as link:
        link.send(Hello(version=99, token=read_token(token)))
        reason = "this server speaks version 1 of the protocol, the client 99"
        assert remote.receive_one(link, 5.0) == Refusal(
            reason=f"{reason}. Install the same robot_rl on both."
        )


@pytest.mark.parametrize("octets", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\x7f", b"\x05\0\0\0abcde"])
def test_nonsense_is_refused_and_the_next_is_served(
    serve: Callable[..., Echo], token: str, octets: bytes
) -> None:
    server = serve(token_file=token)
    with closing(socket.create_connection(("127.0.0.1", server.door.port))) as stranger:
        stranger.settimeout(5.0)
        stranger.sendall(octets)
        while stranger.recv(4096):
            pass
    assert "no greeting" in server.refusals(1)[0]
    with closing(PolicyClient(RemoteConfig(address=server.door.address, token_file=token))) as client:
        ask(client)


def test_before_the_greeting_nobody_sends_much(serve: Callable[..., Echo], token: str) -> None:
    server = serve(token_file=token)
    with closing(Link(socket.create_connection(("127.0.0.1", server.door.port)))) as link:
        link.send(Frame(name="x", stamp_ns=0, array=np.zeros(5000, np.uint8)))
        assert "no greeting" in server.refusals(1)[0]


def test_a_policy_of_another_arm_is_refused(serve: Callable[..., Echo], token: str) -> None:
    config = RemoteConfig(address=serve(token_file=token).door.address, token_file=token)
    with closing(PolicyClient(config, {"robot": "panda", "action_names": ("x", "y")})):
        pass
    with pytest.raises(
        CheckpointError, match="made for action_names = \\['x', 'y'\\], this arm has \\('x',\\)"
    ):
        PolicyClient(config, {"action_names": ("x",)})


def test_a_server_that_comes_back_is_asked_again(serve: Callable[..., Echo], token: str) -> None:
    first = serve(token_file=token)
    with closing(PolicyClient(RemoteConfig(address=first.door.address, token_file=token))) as client:
        ask(client)
        first.close()
        threading.Timer(0.2, lambda: serve(token_file=token, port=first.door.port)).start()
        began_s = time.monotonic()
        ask(client)
        assert time.monotonic() - began_s > 0.15
        assert client.lost == 1


def test_a_server_that_comes_back_with_another_policy_is_refused(
    serve: Callable[..., Echo], token: str
) -> None:
    first = serve(token_file=token)
    with closing(PolicyClient(RemoteConfig(address=first.door.address, token_file=token))) as client:
        first.close()
        serve(token_file=token, port=first.door.port, facts={**FACTS, "horizon": 8})
        with pytest.raises(CheckpointError, match="another policy than before"):
            ask(client)


def test_patience_ends(serve: Callable[..., Echo], token: str) -> None:
    server = serve(token_file=token)
    config = RemoteConfig(address=server.door.address, token_file=token, patience_s=0.1)
    with closing(PolicyClient(config)) as client:
        server.close()
        with pytest.raises(DeviceError, match=r"no answer for 0.1 s \(patience_s\); start it again"):
            ask(client)
    with pytest.raises(ServerGoneError, match="nobody answers"):
        PolicyClient(config)


@contextmanager
def ended_after(client: PolicyClient, seconds: float) -> Generator[None]:
    """Closes a client that waits for too long, so that a test fails and does not hang."""
    timer = threading.Timer(seconds, client.close)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Dropper:
    """A server that lets everybody in and hangs up at each question, but for those it answers."""

    def __init__(self, token: str, answers: Callable[[int], bool] = lambda count: False) -> None:
        self._door = Door(DoorConfig(port=0, token_file=token), FACTS)
        self.address, self._answers = self._door.address, answers
        self.asked_s: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            connection = self._door.next_connection(0.02)
            if connection is None:
                continue
            with closing(self._door.admit(connection)) as link:
                while not (link.closed or self._stop.is_set()):
                    link.wait(0.02)
                    messages = link.receive()
                    if messages and isinstance(messages[-1], Ask):
                        self.asked_s.append(time.monotonic())
                        if not self._answers(len(self.asked_s)):
                            break
                        link.send(Reply(number=messages[-1].number, actions=np.zeros((1, 3))))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._door.close()


def test_a_question_that_ends_the_connection_is_not_asked_for_ever(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_BACK_OFF_S", (0.1, 2.0))
    with (
        closing(Dropper(token)) as server,
        closing(PolicyClient(RemoteConfig(address=server.address, token_file=token))) as client,
    ):
        with (
            ended_after(client, 5.0),
            pytest.raises(
                DeviceError,
                match=r"connection closed.* the end of 3 connections, .* same question \(sample\)",
            ),
        ):
            ask(client)
        # Three times, after pauses of 0.1 and 0.2 s.
        assert len(server.asked_s) == 3
        first_s, second_s = np.diff(server.asked_s)
        assert first_s >= 0.1
        assert second_s >= 0.2


def test_the_next_question_is_asked_anew(token: str) -> None:
    with (
        closing(Dropper(token, lambda count: count in (3, 6))) as server,
        closing(PolicyClient(RemoteConfig(address=server.address, token_file=token))) as client,
    ):
        for count in (3, 6):  # two drops at each question, and the third time an answer
            assert ask(client).actions.shape == (1, 3)
            assert len(server.asked_s) == count
        assert client.lost == 4


def test_patience_counts_from_the_first_ask(token: str) -> None:
    with closing(Door(DoorConfig(port=0, token_file=token), FACTS)) as door:
        silent: list[Link] = []
        stop = threading.Event()

        def let_in() -> None:
            while not stop.is_set():
                connection = door.next_connection(0.02)
                if connection is not None:
                    silent.append(door.admit(connection))  # and say nothing more

        thread = threading.Thread(target=let_in)
        thread.start()
        try:
            config = RemoteConfig(address=door.address, token_file=token, patience_s=0.3)
            with closing(PolicyClient(config)) as client:
                began_s = time.monotonic()
                words = r"silent for 0\.[23]\d* s\. It gave no answer for 0\.3 s \(patience_s\)"
                with ended_after(client, 5.0), pytest.raises(DeviceError, match=words):
                    ask(client)
                assert time.monotonic() - began_s >= 0.3
            assert len(silent) == 1
        finally:
            stop.set()
            thread.join()
            for link in silent:
                link.close()


def test_no_patience_is_refused() -> None:
    with pytest.raises(ConfigError, match="patience_s: got 0, allowed: above 0"):
        RemoteConfig(address="tls://gpu.lab", patience_s=0)


def test_closing_ends_another_threads_question(serve: Callable[..., Echo], token: str) -> None:
    server = serve(token_file=token)
    client = PolicyClient(RemoteConfig(address=server.door.address, token_file=token))
    server.close()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            ask(client)
        except ServerGoneError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    client.close()
    thread.join(5.0)
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "nothing says who may ask"),
        ({"token_file": "t", "host": "0.0.0.0"}, "not this computer's loopback"),
        ({"token_file": "t", "cert": "c"}, "key: got None, allowed: given with `cert`"),
        ({"client_ca": "c"}, "client_ca: got 'c', allowed: with `cert`"),
    ],
)
def test_a_door_that_would_be_open_is_not_built(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DoorConfig(**fields)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("gpu.lab:7710", "allowed: tls://<host>:<port>"),
        ("http://gpu.lab", "allowed: tls://<host>:<port>"),
        ("tls://gpu.lab:99999", "allowed: tls://<host>:<port>"),
        ("tcp://gpu.lab:7710", "leaves this computer without TLS. Use tls://gpu.lab"),
    ],
)
def test_addresses(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RemoteConfig(address=address)
    assert RemoteConfig(address="tls://[::1]").parts == ("tls", "::1", remote.DEFAULT_PORT)


def test_tokens_are_secrets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 letters, allowed: 16 or more"):
        read_token(make_token(tmp_path / "short", "abc"))
    path = tmp_path / "open"
    path.write_text("x" * 32)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"may be read by others\. `chmod 600"):
        read_token(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_token(str(tmp_path / "none"))


def test_a_certificate_that_is_none(tmp_path: Path, pki: Path) -> None:
    (tmp_path / "no.pem").write_text("no")
    with pytest.raises(ConfigError, match=r"no\.pem"):
        PolicyClient(RemoteConfig(address="tls://127.0.0.1", ca=str(tmp_path / "no.pem")))
    with pytest.raises(ConfigError, match=r"no\.pem"):
        Door(DoorConfig(**tls(pki, cert=str(tmp_path / "no.pem"), client_ca=str(pki / "authority.pem"))), {})


def test_old_tls_is_refused(serve: Callable[..., Echo], pki: Path, token: str) -> None:
    server = serve(**tls(pki, token_file=token))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        closing(socket.create_connection(("127.0.0.1", server.door.port))) as connection,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(connection)
