"""CycloneDDS as rmw_cyclonedds_cpp uses it: one participant, raw CDR bytes, one thread that waits.

Samples are written by the C function itself, which runs without Python's lock; no serializer of
cyclonedds-python is used (it is pure Python).
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

from robot_rl.real.ros2.api import QoS, Ros2Error
from robot_rl.real.ros2.discovery import MAX_PARTICIPANTS, Discovery
from robot_rl.real.ros2.types import SampleError, Types

try:
    from cyclonedds import core, domain, pub, qos, sub, topic
except ImportError as error:
    raise Ros2Error(
        "ros2: neither rclpy nor cyclonedds can be imported. Source your ROS 2 installation, or "
        "pip install -e '.[ros2]' (cyclonedds has wheels for x86-64 Linux, macOS and Windows, "
        "Python < 3.14; elsewhere it needs ROS 2 or the C library)."
    ) from error

logger = logging.getLogger(__name__)

OnSample = Callable[[bytes, Any], None]
"""Gets the CDR bytes of a sample and its SampleInfo."""

WRITE_TIMEOUT_S = 0.02
"""After this a reliable writer with slow readers drops a sample: it must not stop a control loop."""
VENDORS = {
    b"\x01\x01": "RTI Connext",
    b"\x01\x0f": "Fast DDS",
    b"\x01\x10": "CycloneDDS",
    b"\x01\x12": "RustDDS",
}
CYCLONE = b"\x01\x10"

_ROOM = (
    f"A host has room for {MAX_PARTICIPANTS + 1} ROS processes of a domain: end some, or use another "
    "ROS_DOMAIN_ID. If that is not it: is CYCLONEDDS_URI valid, and is there a network?"
)
_SLOW_S = 0.1
"""A slower callback is logged: an arm without messages for this long stops."""
_FOREVER_NS = (1 << 63) - 1
_AT_ONCE = 64
_ANY = core.ViewState.Any | core.InstanceState.Any | core.SampleState.Any
_RETCODE_TIMEOUT = -10
_MAKING_TOPICS = threading.Lock()
"""cyclonedds-python completes a type with its first topic: only one thread at a time may do that."""
READING_POLICIES = threading.Lock()
"""It reads the policies of an endpoint into class variables: only one thread at a time may do that."""


class _Sample(ctypes.Structure):
    _fields_ = (("octets", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _function(name: str, *arguments: Any) -> Any:
    # Indexing makes a new function object: cyclonedds-python sets other argument types on its own.
    function = core.Entity._dll_handle[name]
    function.argtypes = arguments
    function.restype = ctypes.c_int32
    return function


_take: Any = vars(sub)["ddspy_take"]  # C, not in its public names
_write = _function("dds_write", ctypes.c_int32, ctypes.c_void_p)
_attach = _function("dds_waitset_attach", ctypes.c_int32, ctypes.c_int32, ctypes.c_ssize_t)
_detach = _function("dds_waitset_detach", ctypes.c_int32, ctypes.c_int32)
_wait = _function("dds_waitset_wait", ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_delete = _function("dds_delete", ctypes.c_int32)


class _Peer(NamedTuple):
    participant: bytes | None
    user_data: bytes


class _Endpoint:
    """A reader or writer of this process, and the endpoints that it is matched with."""

    def __init__(self, entity: Any, handles: Callable[[], list[int]], policies: Callable[[int], Any]) -> None:
        self.entity = entity
        self.guid: bytes = entity.guid.bytes
        self._handles, self._policies = handles, policies
        self._peers: dict[int, _Peer] = {}

    def matched(self) -> list[int]:
        """Returns the handles of the matched endpoints."""
        while True:
            try:
                return [handle % 2**64 for handle in self._handles()]  # as samples have it, without a sign
            except core.DDSException:
                return []  # closed: nothing is matched
            except IndexError:
                continue  # cyclonedds-python counts first and reads then: one more came in between

    def participant_of(self, handle: int) -> bytes | None:
        """Returns the GUID of a matched endpoint's participant."""
        return self._peer(handle).participant

    def user_data_of(self, handle: int) -> bytes:
        """Returns the user data of a matched endpoint."""
        return self._peer(handle).user_data

    def _peer(self, handle: int) -> _Peer:
        if handle not in self._peers:
            with READING_POLICIES:
                found = self._policies(handle)  # slow: all policies
            if found is None:
                return _Peer(None, b"")  # gone
            user_data = found.qos[qos.Policy.Userdata]
            self._peers[handle] = _Peer(found.participant_key.bytes, user_data.data if user_data else b"")
        return self._peers[handle]


class Writer(_Endpoint):
    """Writes ready CDR on one topic."""

    def __init__(self, entity: Any, topic: str) -> None:
        super().__init__(
            entity, lambda: entity.get_matched_subscriptions(), entity.get_matched_subscription_data
        )
        self._topic = topic
        self.dropped = 0
        """Samples that readers were too slow to take."""

    def write(self, octets: bytearray) -> None:
        """Writes a sample; its length is a multiple of four.

        Raises:
            Ros2Error: the node is closed.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(octets))
        sample = _Sample(address, len(octets))
        code = _write(self.entity._ref, ctypes.addressof(sample))
        if code == _RETCODE_TIMEOUT:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning(
                    "ros2: %s: a sample is dropped, as others will be: a reader was too slow for %g s",
                    self._topic,
                    WRITE_TIMEOUT_S,
                )
        elif code < 0:
            raise Ros2Error(f"ros2: writing failed: {core.DDSException(code)}. Is the node closed?")


class Reader(_Endpoint):
    """Takes samples of one topic."""

    def __init__(self, entity: Any, condition: Any) -> None:
        super().__init__(
            entity, lambda: entity.get_matched_publications(), entity.get_matched_publication_data
        )
        self.condition = condition


class Participant:
    """One participant of a domain and the thread that waits for what arrives."""

    def __init__(self, settings: Discovery, types: Types, *, name: str) -> None:
        _Domains.enter(settings)
        self._settings = settings
        self._types = types
        user_data = qos.Qos(qos.Policy.Userdata(b"enclave=/;"))
        try:
            self.entity: Any = domain.DomainParticipant(settings.domain_id, qos=user_data)
        except core.DDSException as error:
            _Domains.leave(settings.domain_id)
            raise Ros2Error(f"ros2: no participant in domain {settings.domain_id}: {error}{_ROOM}") from error
        self.guid: bytes = self.entity.guid.bytes
        self._publisher = pub.Publisher(self.entity)
        self._subscriber = sub.Subscriber(self.entity)
        self._topics: dict[tuple[str, str, bool], Any] = {}
        self._waitset: Any = core.WaitSet(self.entity)
        self._guard: Any = core.GuardCondition(self.entity)
        self._handlers: dict[int, tuple[Reader | None, Callable[..., None], str]] = {}
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._endpoints: set[Reader | Writer] = set()  # cyclonedds-python deletes unreferenced ones
        self.bad_samples: Counter[str] = Counter()
        """Samples that no message could be made of, per topic of the wire."""
        self.failures: Counter[str] = Counter()
        """Callbacks that raised, per topic of the wire."""
        self.slow: Counter[str] = Counter()
        """Callbacks for which all others had to wait, per topic of the wire."""
        self._closed = False
        _attach(self._waitset._ref, self._guard._ref, 0)
        self._thread = threading.Thread(target=self._run, name=f"ros2 {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_thread(self) -> bool:
        """Returns whether the caller is a callback."""
        return threading.current_thread() is self._thread

    def writer(
        self, name: str, kind: str, quality: QoS, user_data: bytes = b"", *, opaque: bool = False
    ) -> Writer:
        """Returns a writer on a topic by its name on the wire; `opaque` for bytes of another layout."""
        policies = self._policies(kind, quality, user_data)
        make = partial(pub.DataWriter, self._publisher, qos=policies)
        writer = Writer(self._endpoint(make, name, kind, opaque), name)
        self._endpoints.add(writer)
        return writer

    def reader(
        self,
        name: str,
        kind: str,
        quality: QoS,
        on_sample: OnSample,
        user_data: bytes = b"",
        *,
        opaque: bool = False,
    ) -> Reader:
        """Returns a reader; `on_sample` runs on this participant's thread."""
        policies = self._policies(kind, quality, user_data)
        make = partial(sub.DataReader, self._subscriber, qos=policies)
        entity = self._endpoint(make, name, kind, opaque)
        reader = Reader(entity, core.ReadCondition(entity, _ANY))
        self._endpoints.add(reader)
        self.watch(reader.condition, on_sample, reader, name)
        return reader

    def watch(
        self, condition: Any, callback: Callable[..., None], reader: Reader | None = None, name: str = ""
    ) -> None:
        """Calls back on this thread of ours when a condition holds, with each new sample of a reader."""
        with self._lock:
            key = next(self._keys)
            self._handlers[key] = (reader, callback, name)
        _attach(self._waitset._ref, condition._ref, key)

    def close_endpoint(self, endpoint: Reader | Writer) -> None:
        """Ends a reader or writer; its peers see that at once."""
        if isinstance(endpoint, Reader):
            with self._lock:
                for key, (reader, _, _) in list(self._handlers.items()):
                    if reader is endpoint:
                        del self._handlers[key]
            _detach(self._waitset._ref, endpoint.condition._ref)
        _delete(endpoint.entity._ref)
        self._endpoints.discard(endpoint)

    def close(self) -> None:
        """Ends everything; peers see it at once. All other callbacks have ended when it returns."""
        if self._closed:
            return
        self._closed = True
        self._guard.set(True)
        if not self.on_thread() and self._thread.ident is not None:
            self._thread.join()
        _delete(self.entity._ref)
        _Domains.leave(self._settings.domain_id)

    def _endpoint(self, make: Callable[[Any], Any], name: str, kind: str, opaque: bool) -> Any:
        key = (name, kind, opaque)
        try:
            with _MAKING_TOPICS:
                if key not in self._topics:
                    self._topics[key] = topic.Topic(self.entity, name, self._types.idl(kind, opaque=opaque))
            return make(self._topics[key])
        except core.DDSException as error:
            raise Ros2Error(f"ros2: {name} of {kind}: {error} Is the node closed?") from error

    def _policies(self, kind: str, quality: QoS, user_data: bytes) -> Any:
        if self._types.distro != "humble":
            user_data += f"typehash={self._types.type_hash(kind)};".encode()
        policy = qos.Policy
        reliable = policy.Reliability.Reliable(int(WRITE_TIMEOUT_S * 1e9))
        history = policy.History.KeepLast(quality.depth)
        chosen: list[Any] = [
            policy.DataRepresentation(use_cdrv0_representation=True),  # what every rmw writes
            reliable if quality.reliable else policy.Reliability.BestEffort,
            policy.Durability.TransientLocal if quality.transient_local else policy.Durability.Volatile,
            history,
            policy.WriterDataLifecycle(autodispose=False),
        ]
        if quality.transient_local:
            chosen.append(policy.DurabilityService(0, history, -1, -1, -1))
        if user_data:
            chosen.append(policy.Userdata(user_data))
        return qos.Qos(*chosen)

    def _run(self) -> None:
        keys = (ctypes.c_ssize_t * 256)()
        address = ctypes.addressof(keys)
        waitset = self._waitset._ref
        while not self._closed:
            count = _wait(waitset, address, len(keys), _FOREVER_NS)
            if count < 0:
                logger.error("ros2: waiting failed: %s", core.DDSException(count))
                return
            for key in keys[: min(count, len(keys))]:
                handler = self._handlers.get(key)
                if handler is not None:
                    self._handle(*handler)

    def _handle(self, reader: Reader | None, callback: Callable[..., None], name: str) -> None:
        samples: Any = ((),)
        if reader is not None:
            samples = _take(reader.entity._ref, _ANY, _AT_ONCE)
            if isinstance(samples, int):
                return  # closed meanwhile
        for sample in samples:
            if sample and not sample[1].valid_data:
                continue
            begun_s = time.monotonic()
            try:
                callback(*sample)
            except SampleError as error:
                if _is_first(self.bad_samples, name):
                    logger.error("ros2: %s: a sample is ignored, and others like it: %s", name, error)
            except Exception:
                if _is_first(self.failures, name):
                    logger.exception("ros2: the callback of %s failed; more of it is counted only", name)
            took_s = time.monotonic() - begun_s
            if took_s > _SLOW_S and _is_first(self.slow, name):
                logger.warning(
                    "ros2: a callback of %s took %.2f s, and all others of this node waited; more of it "
                    "is counted only",
                    name or "discovery",
                    took_s,
                )


def _is_first(counter: Counter[str], name: str) -> bool:
    """Counts one more; returns whether it is the first, which is logged."""
    counter[name] += 1
    return counter[name] == 1


class _Domains:
    """The domains of this process: the participants of a domain share its sockets and settings."""

    _open: ClassVar[dict[int, tuple[Any, str, int]]] = {}
    _lock = threading.Lock()

    @classmethod
    def enter(cls, settings: Discovery) -> None:
        config = settings.config()
        with cls._lock:
            entity, present, users = cls._open.get(settings.domain_id, (None, config, 0))
            if present != config:
                raise Ros2Error(
                    f"ros2: domain {settings.domain_id} is open in this process with other "
                    "discovery settings (ROS_AUTOMATIC_DISCOVERY_RANGE, ROS_STATIC_PEERS). Close those first."
                )
            if entity is None:
                try:
                    entity = domain.Domain(settings.domain_id, config)
                except core.DDSException as error:
                    raise Ros2Error(
                        f"ros2: domain {settings.domain_id} cannot be opened: {error}{_ROOM}"
                    ) from error
            cls._open[settings.domain_id] = (entity, config, users + 1)

    @classmethod
    def leave(cls, domain_id: int) -> None:
        with cls._lock:
            entity, config, users = cls._open[domain_id]
            if users > 1:
                cls._open[domain_id] = (entity, config, users - 1)
                return
            del cls._open[domain_id]
            _delete(entity._ref)
