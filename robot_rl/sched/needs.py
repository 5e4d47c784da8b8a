"""What a job needs of a device, in the words that devices have: never an address.

    Need(kind="robot", real=True, labels={"robot": "panda", "cell": "west"})

`choose` finds the devices that meet it, or says which word is missing at the nearest one, and who holds that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from robot_rl.core.errors import DeviceError, require

if TYPE_CHECKING:
    from robot_rl.hal.device import DeviceSpec  # and Gymnasium, which a need does not need


ANY = "any"
"""Station that stands for every arm of this machine, and node that stands for every machine."""
_ENDS_S = 5.0
"""How much longer than it was given a holder may take to let an arm go."""


@dataclass(frozen=True, kw_only=True)
class NeedsConfig:
    """What an arm must have, where any will do that the policy fits."""

    real: bool | None = None
    """Whether it moves matter; null: either."""
    labels: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Words of its station file, with these values."""
    node: str | None = None
    """A machine of the fleet, by the name that its agent has (`hub.address`), or `any` of them; null: this
    one, without a hub."""


class Taken(Protocol):
    """Slots of a device that somebody has: a `Lease`, or what another machine says of one."""

    @property
    def device(self) -> str: ...

    @property
    def slots(self) -> int: ...

    @property
    def holder(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Need:
    """A device that a job can use."""

    kind: str
    """`robot`, `sim`, `world`, `gpu` or `cpu`."""
    real: bool | None = None
    """Whether its commands move matter; None: either."""
    caps: frozenset[str] = frozenset()
    """All of these."""
    labels: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """All of these, with these values."""
    slots: int = 1
    """As many, free or not."""
    node: str | None = None
    """On this host; None: on any."""

    def misses(self, spec: DeviceSpec) -> Iterator[str]:
        """Yields what a device of the right kind lacks, in words; nothing if it meets the need."""
        has = spec.labels
        for name, value in self.labels.items():
            if has.get(name) != value:
                yield f"its {name} is {has[name]}, not {value}" if name in has else f"it has no {name}"
        if self.real is not None and spec.real != self.real:
            yield "it is real" if spec.real else "it is simulated"
        if spec.slots < self.slots:
            yield f"it has {spec.slots} slots, not {self.slots}"
        if self.node is not None and spec.node != self.node:
            yield f"it is on {spec.node}, not {self.node}"
        if not self.caps <= spec.caps:
            yield f"it cannot {', '.join(sorted(self.caps - spec.caps))}"


@dataclass(frozen=True, kw_only=True)
class LineConfig:
    """Who goes first at an arm that several want."""

    priority: int = 0
    """Of those who wait for an arm, the larger goes first; who has it lets it go for a larger one, at rest,
    and goes on when it is free again."""
    preempt_s: float | None = None
    """Who has an arm with a smaller priority, or had its turn, gets so many seconds to end its chunk and to
    park; null: it may finish."""
    turn_s: float | None = None
    """After so many seconds with an arm, those of the same priority go first who wait with `preempt_s`; null:
    it may finish."""

    def check_line(self) -> None:
        """Refuses times that no arm can keep.

        Raises:
            ConfigError: less than a second.
        """
        for name, value in (("preempt_s", self.preempt_s), ("turn_s", self.turn_s)):
            require(value is None or value >= 1, name, value, "1 or more, or null")

    def booking(self, wait_s: float) -> dict[str, Any]:
        """Returns how an arm is leased, as arguments of `LeaseStore.hold`.

        It waits for `wait_s`, or longer where holders are asked to give up.
        """
        return {
            "priority": self.priority,
            "wait_s": max(wait_s, 0.0 if self.preempt_s is None else self.preempt_s + _ENDS_S),
            "preempt_s": self.preempt_s,
            "preemptible": True,
            "turn_s": self.turn_s,
        }


def check_needs(station: str | None, needs: NeedsConfig, at: str = "") -> None:
    """Refuses needs where one station is named."""
    require(station == ANY or needs == NeedsConfig(), f"{at}needs", needs, f"nothing without station={ANY}")


def need_of(config: NeedsConfig) -> Need:
    """Returns the need of an arm."""
    node = None if config.node == ANY else config.node
    return Need(kind="robot", real=config.real, labels=config.labels, node=node)


def choose(need: Need, specs: Sequence[DeviceSpec], leases: Sequence[Taken] = ()) -> list[DeviceSpec]:
    """Returns the devices that meet a need: those with enough free slots first, of these the least able.

    Args:
        need: what a job needs.
        specs: all devices there are.
        leases: that are held now.

    Raises:
        DeviceError: none meets it, held or not; the message says what the nearest lacks, and who has it.
    """
    taken = dict[str, int]()
    for lease in leases:
        taken[lease.device] = taken.get(lease.device, 0) + lease.slots
    of_kind = [spec for spec in specs if spec.kind == need.kind]
    able = [spec for spec in of_kind if next(need.misses(spec), None) is None]
    if not able:
        raise DeviceError(_unmet(need, of_kind, leases))

    def rank(spec: DeviceSpec) -> tuple[bool, int, int, int]:
        free = spec.slots - taken.get(spec.name, 0)
        return free < need.slots, len(spec.caps), len(spec.labels), free

    return sorted(able, key=rank)


def _unmet(need: Need, of_kind: Sequence[DeviceSpec], leases: Sequence[Taken]) -> str:
    """Returns why no device meets a need."""
    if not of_kind:
        return f"needs: no device of kind {need.kind!r} is known. `robot-rl devices` lists all."
    nearest = min(of_kind, key=lambda spec: sum(1 for _ in need.misses(spec)))
    holders = ", ".join(repr(lease.holder) for lease in leases if lease.device == nearest.name) or "nobody"
    return (
        f"needs: none of {len(of_kind)} devices of kind {need.kind!r} is enough. Nearest is {nearest.name}, "
        f"held by {holders}: {'; '.join(need.misses(nearest))}. `robot-rl devices` lists all."
    )
