"""Services as rmw_cyclonedds_cpp lays them out, and calls to servers of other middlewares.

With CycloneDDS a request and its reply carry a header in the payload: the client and a number. Fast
DDS sends the bare message and has both in RTPS's inline QoS, which CycloneDDS neither sends nor
shows. So our clients can call a Fast DDS server, one call at a time; our servers cannot answer a Fast DDS
client, and log that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from robot_rl.real.ros2 import dds
from robot_rl.real.ros2.api import Message, QoS, Ros2Error
from robot_rl.real.ros2.dds import Participant, Reader, Writer
from robot_rl.real.ros2.graph import Endpoint, Graph
from robot_rl.real.ros2.names import reply_on_wire, request_on_wire
from robot_rl.real.ros2.types import SampleError, Types

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<Qq")  # the client's writer, as it calls it; the number of the request
_QOS = QoS(depth=100)  # no call of a burst is dropped
_CLIENT, _SERVER = "clientid", "serviceid"
_POLL_S = 0.005
_LOOK_S = 0.2
_REPLY_WAIT_S = 1.0
"""A client's reply reader may be found later than its request. rmw_cyclonedds_cpp waits 0.1 s, and loses the
reply if the machine is busy for longer."""


class Deferred:
    """A later reply: a service callback may return one and complete it from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reply: Callable[[Message], None] | None = None
        self._response: Message | None = None

    def complete(self, response: Message) -> None:
        """Replies, now or as soon as the callback has returned."""
        with self._lock:
            self._response, send = response, self._reply
        if send is not None:
            send(response)

    def attach(self, reply: Callable[[Message], None]) -> None:
        """Sets the way to reply; called by the service."""
        with self._lock:
            self._reply, response = reply, self._response
        if response is not None:
            reply(response)


class DdsService:
    """Answers requests of clients on CycloneDDS."""

    def __init__(
        self,
        participant: Participant,
        graph: Graph,
        types: Types,
        kind: str,
        name: str,
        callback: Callable[[Message], Message | Deferred],
    ) -> None:
        self._participant, self._graph = participant, graph
        self._name, self._callback = name, callback
        self._requests, self._responses = types.codec(f"{kind}_Request"), types.codec(f"{kind}_Response")
        self._seen: set[bytes] = set()
        self._ready: set[int] = set()
        self._opening = threading.Lock()  # a request may be there before the constructor has ended
        user_data = _identity(participant, _SERVER)
        self._writer = participant.writer(
            reply_on_wire(name), f"{kind}_Response", _QOS, user_data, opaque=True
        )
        with self._opening:
            self._reader = participant.reader(
                request_on_wire(name), f"{kind}_Request", _QOS, self._on_request, user_data, opaque=True
            )
        graph.add(writers=(self._writer.guid,), readers=(self._reader.guid,))
        graph.watch(request_on_wire(name), self._on_client)

    def close(self) -> None:
        self._graph.unwatch(self._on_client)
        self._graph.remove(self._writer.guid, self._reader.guid)
        self._participant.close_endpoint(self._reader)
        self._participant.close_endpoint(self._writer)

    def _on_client(self, client: Endpoint) -> None:
        if client.participant[:2] == dds.CYCLONE or client.guid in self._seen:
            return
        self._seen.add(client.guid)
        logger.error(
            "ros2: service %s: a client on %s is there, which a server without rclpy cannot answer: its "
            "calls will time out. Give it RMW_IMPLEMENTATION=rmw_cyclonedds_cpp, or run this server where "
            "rclpy can be imported.",
            self._name,
            _vendor_of(client.participant),
        )

    def _on_request(self, octets: bytes, info: Any) -> None:
        sender = info.publication_handle
        with self._opening:
            owner = self._reader.participant_of(sender)
        if owner is not None and owner[:2] != dds.CYCLONE:
            return  # refused when it was found
        if len(octets) < 4 + _HEADER.size:
            raise SampleError(f"a request of {len(octets)} bytes without the header of rmw_cyclonedds_cpp.")
        header = octets[4 : 4 + _HEADER.size]
        request = self._requests.decode(_without_header(octets))

        def reply(response: Message) -> None:
            octets = _with_header(self._responses.encode(response), header)
            if self._has_reader(sender):
                self._writer.write(octets)
                return
            # Not on this thread, which runs all callbacks of the node: an arm would miss its commands.
            threading.Thread(
                target=self._reply_later, args=(sender, octets), name=f"reply {self._name}", daemon=True
            ).start()

        response = self._callback(request)
        if isinstance(response, Deferred):
            response.attach(reply)
        else:
            reply(response)

    def _reply_later(self, sender: int, octets: bytearray) -> None:
        """Replies when the client's reader of replies is known: an earlier reply is lost."""
        end = time.monotonic() + _REPLY_WAIT_S
        while not self._has_reader(sender) and time.monotonic() < end:
            if sender not in self._reader.matched():
                break  # the client is gone
            time.sleep(_POLL_S)
        with contextlib.suppress(Ros2Error):  # closed meanwhile
            self._writer.write(octets)

    def _has_reader(self, sender: int) -> bool:
        """Returns whether the client's own reader of replies is known.

        The participant may have others, of a client that is closed and not yet gone.
        """
        if sender in self._ready:
            return True
        client = _identity_of(self._reader, sender, _CLIENT)
        if client in _identities(self._writer, _CLIENT):
            self._ready.add(sender)
            return True
        return not client  # unknown: there is nothing to wait for


class _Call:
    """One call that waits for its response."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.response: Message | None = None
        self.error: SampleError | None = None


class DdsClient:
    """Calls a service on any middleware."""

    def __init__(self, participant: Participant, graph: Graph, types: Types, kind: str, name: str) -> None:
        self._participant, self._graph, self._name = participant, graph, name
        self._requests, self._responses = types.codec(f"{kind}_Request"), types.codec(f"{kind}_Response")
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._bare_lock = threading.Lock()
        self._bare: _Call | None = None
        self._bare_servers: dict[int, bool] = {}
        user_data = _identity(participant, _CLIENT)
        self._writer = participant.writer(
            request_on_wire(name), f"{kind}_Request", _QOS, user_data, opaque=True
        )
        self._handle = self._writer.entity.instance_handle & 0xFFFF_FFFF_FFFF_FFFF
        self._reader = participant.reader(
            reply_on_wire(name), f"{kind}_Response", _QOS, self._on_reply, user_data, opaque=True
        )
        graph.add(writers=(self._writer.guid,), readers=(self._reader.guid,))

    def wait(self, timeout_s: float) -> bool:
        """Waits until a server is matched in both directions; returns whether there is one."""
        end = time.monotonic() + timeout_s
        while not (found := self._server()) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return bool(found)

    def call(self, request: Message, timeout_s: float) -> Message:
        """Calls and returns the response.

        Raises:
            Ros2Error: no server, no answer in time, or called from within a callback.
        """
        if self._participant.on_thread():
            raise Ros2Error(
                f"ros2: service {self._name} called from within a callback: the answer would arrive on this "
                "very thread. Call from another thread."
            )
        end = time.monotonic() + timeout_s
        if not self.wait(timeout_s):
            raise Ros2Error(
                f"ros2: nobody serves {self._name} (waited {timeout_s:g} s). Start the server; check "
                "ROS_DOMAIN_ID, namespace and remapping."
            )
        server = self._server()
        bare = bool(server) and server[:2] != dds.CYCLONE
        if not bare:
            return self._call_numbered(request, end, timeout_s)
        with self._bare_lock:  # bare replies have no number
            return self._call_bare(request, end, timeout_s, _vendor_of(server))

    def close(self) -> None:
        self._graph.remove(self._writer.guid, self._reader.guid)
        self._participant.close_endpoint(self._reader)
        self._participant.close_endpoint(self._writer)

    def _call_numbered(self, request: Message, end: float, timeout_s: float) -> Message:
        call = _Call()
        with self._lock:
            self._number += 1
            number = self._number
            self._calls[number] = call
        try:
            octets = self._requests.encode(request)
            self._writer.write(_with_header(octets, _HEADER.pack(self._handle, number)))
            return self._response(call, end, timeout_s, "CycloneDDS")
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def _call_bare(self, request: Message, end: float, timeout_s: float, vendor: str) -> Message:
        octets = self._requests.encode(request)
        self._bare = call = _Call()
        try:
            self._writer.write(octets)
            return self._response(call, end, timeout_s, vendor)
        finally:
            self._bare = None

    def _response(self, call: _Call, end: float, timeout_s: float, vendor: str) -> Message:
        while not call.done.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if not self._server():
                raise Ros2Error(
                    f"ros2: service {self._name} (on {vendor}): its server went before it answered; "
                    "whether it did what was asked is not known."
                )
            if time.monotonic() >= end:
                raise Ros2Error(
                    f"ros2: service {self._name} (on {vendor}) did not answer within {timeout_s:g} s. "
                    "Is its node busy?"
                )
        if call.error is not None:
            raise Ros2Error(
                f"ros2: service {self._name} (on {vendor}) sent an answer that cannot be read: {call.error} "
                "Is its package of another ROS distribution? Set ROS_DISTRO to that of the server."
            ) from call.error
        return call.response

    def _on_reply(self, octets: bytes, info: Any) -> None:
        if not self._calls and self._bare is None:
            return  # to another client, perhaps before this one is complete
        if self._is_bare(info.publication_handle):
            call, body = self._bare, octets
        else:
            if len(octets) < 4 + _HEADER.size:
                raise SampleError(f"a reply of {len(octets)} bytes without the header of rmw_cyclonedds_cpp.")
            handle, number = _HEADER.unpack_from(octets, 4)
            if handle != self._handle:
                return  # to another client
            with self._lock:
                call = self._calls.pop(number, None)
            body = _without_header(octets)
        if call is not None and not call.done.is_set():
            try:
                call.response = self._responses.decode(body)
            except SampleError as error:
                call.error = error
                raise
            finally:
                call.done.set()

    def _is_bare(self, handle: int) -> bool:
        if handle not in self._bare_servers:
            owner = self._reader.participant_of(handle)
            if owner is None:
                return self._bare is not None  # gone already: as the call in flight is sent
            self._bare_servers[handle] = owner[:2] != dds.CYCLONE
        return self._bare_servers[handle]

    def _server(self) -> bytes:
        """Returns the participant of a server matched both ways, one on CycloneDDS first; or nothing."""
        takes, replies = (_identities(endpoint, _SERVER) for endpoint in (self._writer, self._reader))
        both = [takes[server] for server in takes.keys() & replies]
        return min(both, key=lambda guid: guid[:2] != dds.CYCLONE, default=b"")


def _vendor_of(participant: bytes) -> str:
    """Returns the middleware of a participant: RTPS has it in the first two octets of the GUID."""
    return dds.VENDORS.get(participant[:2], f"middleware {participant[:2].hex()}")


def _identities(endpoint: Reader | Writer, key: str) -> dict[bytes, bytes]:
    """Returns the matched clients or servers, each with its participant."""
    found = {
        _identity_of(endpoint, handle, key): endpoint.participant_of(handle) for handle in endpoint.matched()
    }
    return {identity: owner for identity, owner in found.items() if owner is not None}


def _identity_of(endpoint: Reader | Writer, handle: int, key: str) -> bytes:
    """Returns what the two endpoints of a client or server have in common: at least their participant."""
    found = re.search(rf"{key}=[^;]*".encode(), endpoint.user_data_of(handle))
    return found.group() if found else endpoint.participant_of(handle) or b""


def _identity(participant: Participant, key: str) -> bytes:
    """Returns what pairs the two endpoints of a client or server for rmw_cyclonedds_cpp."""
    identity = participant.guid[:12] + os.urandom(4)
    return f"{key}={'.'.join(f'{octet:02x}' for octet in identity)};".encode()


def _with_header(octets: bytearray, header: bytes) -> bytearray:
    return octets[:4] + header + octets[4:]


def _without_header(octets: bytes) -> bytes:
    return octets[:4] + octets[4 + _HEADER.size :]
