"""What a scheduler knows about a device, and how a device refuses commands under an overtaken lease.

A robot, a simulator, a world model and a compute device are described by the same `DeviceSpec`
and, where they can be acted on, opened as the same `VectorEnv`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import gymnasium

from robot_rl.core.errors import ConfigError, DeviceError, LeaseError, nearest, require
from robot_rl.hal.health import Health
from robot_rl.hal.vector import VectorEnv

Kind = Literal["robot", "sim", "world", "gpu", "cpu"]

KINDS: tuple[str, ...] = get_args(Kind)
CAPS = frozenset({"set_state", "fork", "render", "batch"})


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One thing that can be leased."""

    name: str
    """Unique on its node; what a lease is taken on."""
    kind: Kind
    real: bool = False
    """Whether a command moves matter: only robots are, and a simulated arm is not."""
    caps: frozenset[str] = frozenset()
    """Of `set_state`, `fork`, `render`, `batch`; a real device has neither of the first two."""
    slots: int = 1
    """How many holders of one slot each fit side by side."""
    control_hz: float | None = None
    """Control rate; None where the task decides it."""
    labels: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Free words to choose by, such as version, model or station."""
    node: str = "localhost"
    """Host that the device is plugged into."""
    observation_space: gymnasium.Space[Any] | None = None
    """Of one env; None where the task decides it."""
    action_space: gymnasium.Space[Any] | None = None
    refusal: Callable[[], str] | None = field(default=None, compare=False, repr=False)
    """Returns why no lease of it is given now, a sentence, or an empty text; None: one is always given."""
    last_token: Callable[[], int] | None = field(default=None, compare=False, repr=False)
    """Returns the largest fencing token that the device itself remembers; None where it remembers none."""

    def __post_init__(self) -> None:
        at = f"device {self.name!r}"
        if not self.name or any(letter.isspace() for letter in self.name):
            raise ConfigError(f"{at}: name must be one word without blanks, such as 'arm1'.")
        if self.kind not in KINDS:
            raise ConfigError(f"{at}.kind: got {self.kind!r}.{nearest(self.kind, KINDS)}")
        for cap in sorted(self.caps - CAPS):
            raise ConfigError(f"{at}.caps: got {cap!r}.{nearest(cap, CAPS)}")
        require(self.slots >= 1, f"{at}.slots", self.slots, "1 or more")
        is_rate = self.control_hz is None or self.control_hz > 0
        require(is_rate, f"{at}.control_hz", self.control_hz, "above 0, or None")
        if self.real and self.kind != "robot":
            raise ConfigError(f"{at}: real is for kind 'robot', got kind {self.kind!r}; set real=False.")
        impossible = self.caps & {"set_state", "fork"}
        if self.real and impossible:
            raise ConfigError(
                f"{at}.caps: got {', '.join(sorted(impossible))}, but matter cannot be put into a state; "
                "remove it, or set real=False."
            )

    def require_trusted(self) -> None:
        """Passes unless no lease of the device is given now.

        Raises:
            DeviceError: says why.
        """
        if self.refusal is not None and (why := self.refusal()):
            raise DeviceError(why)

    def to_json(self) -> dict[str, Any]:
        """Returns what can be written down, ready for `json.dumps`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "real": self.real,
            "caps": sorted(self.caps),
            "slots": self.slots,
            "control_hz": self.control_hz,
            "labels": dict(self.labels),
            "node": self.node,
        }


class LeaseLike(Protocol):
    """A lease as a device sees it; `robot_rl.sched.leases.Lease` is one."""

    @property
    def device(self) -> str: ...

    @property
    def token(self) -> int:
        """Fencing token: a later lease of the device has a larger one."""
        ...

    @property
    def slot_ids(self) -> tuple[int, ...]:
        """Which slots of the device, counted from 0."""
        ...

    @property
    def holder(self) -> str:
        """The holder's name for itself, such as `train pick_cube seed 3`."""
        ...


class Device(Protocol):
    """Anything that can be leased and acted on."""

    @property
    def spec(self) -> DeviceSpec: ...

    def open(self, lease: LeaseLike) -> VectorEnv:
        """Returns an env that works until a newer lease of its slots is opened; closed, it parks the device.

        Raises:
            LeaseError: the lease is of another device, or older than one already seen.
            DeviceError: the device is disconnected or quarantined.
        """
        ...

    def health(self) -> Health: ...

    def safe_stop(self) -> None:
        """Brings the device to rest now and latches; may be called by anybody, any number of times."""
        ...

    def close(self) -> None:
        """Closes the device; may be called twice."""
        ...


class Fence:
    """Remembers the newest fencing token seen on every slot, and refuses commands under older ones.

    The lease store decides who may act; the fence is the device's own check. It holds even if
    an old holder slept through the end of its lease and wakes up in the middle of a command
    (Kleppmann, "Designing Data-Intensive Applications", section 8.4, fencing tokens).
    """

    def __init__(
        self, device: str, slots: int = 1, *, newest: int = 0, record: Callable[[int], None] | None = None
    ) -> None:
        """Makes the fence of a device.

        Args:
            device: its name.
            slots: of the device.
            newest: the newest token that the device remembers from before it was switched on.
            record: makes the device remember a new token; called before the token counts. If it raises,
                the token is refused.
        """
        self._device, self._record = device, record
        self._newest = [newest] * slots
        self._lock = threading.Lock()

    @property
    def newest(self) -> int:
        """The newest token of all slots."""
        return max(self._newest)

    def admit(self, lease: LeaseLike) -> None:
        """Checks a lease before it is opened, and its token from then on is the newest of its slots.

        Raises:
            LeaseError: another device's lease, a slot that does not exist, or an older token.
        """
        if lease.device != self._device:
            raise LeaseError(
                f"device {self._device}: got a lease of {lease.device!r}; acquire one of this device."
            )
        slots = len(self._newest)
        if not lease.slot_ids or not all(0 <= slot < slots for slot in lease.slot_ids):
            raise LeaseError(
                f"device {self._device}: the lease is of slots {lease.slot_ids}, "
                f"the device has 0 to {slots - 1}."
            )
        self.check(lease.token, lease.slot_ids)

    def check(self, token: int, slot_ids: Iterable[int] = (0,)) -> None:
        """Passes if no newer token has been seen on any of the slots, and remembers this one.

        Raises:
            LeaseError: names both tokens.
        """
        slots = tuple(slot_ids)
        with self._lock:
            newest = max(self._newest[slot] for slot in slots)
            if token < newest:
                raise LeaseError(
                    f"device {self._device}: command under fencing token {token} refused, token {newest} has "
                    "been seen since: the lease was overtaken. Acquire a new lease before commanding again."
                )
            if token > newest and self._record is not None:
                self._record(token)
            for slot in slots:
                self._newest[slot] = token
