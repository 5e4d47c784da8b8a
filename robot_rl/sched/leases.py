"""Leases of devices between processes of one machine, in one SQLite file.

A lease keeps two jobs from driving one arm. It ends unless it is renewed, and its fencing token is
larger than those of all earlier leases of the device. The device itself refuses older tokens
(`robot_rl.hal.device.Fence`), so that a holder that slept through the end of its lease does no harm.

A lease ends by `release`, by expiry, or at once when its holder's process has ended. The process is known
by its id and start time, and only on the same boot of the same host and in the same process namespace.
Leases of holders elsewhere (a container that shares the file) end by expiry alone.

Lease times are seconds since the machine was started, sleep included (`BootClock`). All processes share
them and nobody can set them, so a step of the wall clock neither ends a lease nor prolongs one. Leases of
another boot of this host are over. The lease of a holder with another clock (a container with a time
namespace, another host that shares the file) counts for its whole life after its last change that we saw,
and began when one of our clock first saw it.
Wall-clock times are shown to people only.

A waiter has a ticket: its place in the line. A ticket that was not renewed for 5 s (60 s, if its process
is known to live), by a clock that stands still while the machine sleeps, was given up. A waiter that had
only been stopped puts the same ticket back and has its old place again.

The tokens of a device that remembers them itself (`DeviceSpec.last_token`) go on from the largest it has
seen, so that those of several lease files can be compared.

A lease whose holder promised it can be taken by a larger priority, or by an equal one when the holder's turn
is over, after a time to finish and to park (`robot_rl.sched.preemption`).

A device that latched is leased to nobody until a person clears it (`lease_file.Stop`), also after a restart
of the process or of the machine.

Devices of one name and of different machines are different devices: a lease file is for one host.
Deleting the file starts the tokens again; do it with every device switched off.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from robot_rl.core.clock import Clock, MonotonicClock
from robot_rl.core.errors import LeaseError
from robot_rl.sched import preemption
from robot_rl.sched.held import HeldLease
from robot_rl.sched.lease import DEFAULT_TTL_S, BootClock, Holder, Lease, clock_time, this_process
from robot_rl.sched.lease_file import (
    LeaseFile,
    Line,
    Stop,
    Waiter,
    add_stop,
    clear_stop,
    default_path,
    find_stops,
    taken_slots,
    unchanged_s,
)
from robot_rl.sched.preemption import Preemption

if TYPE_CHECKING:
    from robot_rl.hal.device import DeviceSpec  # and Gymnasium, which holding a lease does not need

__all__ = ["DEFAULT_TTL_S", "BootClock", "GivenUpError", "HeldLease", "Lease", "LeaseStore", "default_path"]


T = TypeVar("T")

_POLL_S = 0.1


class GivenUpError(LeaseError):
    """The caller does not wait any more: its `given_up` returned True."""


@dataclass(frozen=True)
class _Asker:
    """Who asks for a lease, and for which."""

    holder: str
    process: Holder
    ttl_s: float
    priority: int


class LeaseStore:
    """All leases of this host. It is cheap to make; every call opens and closes the file."""

    def __init__(
        self,
        path: Path | None = None,
        clock: Clock | None = None,
        *,
        process: Holder | None = None,
        is_alive: Callable[[Holder], bool | None] | None = None,
    ) -> None:
        """Opens or creates the file, `default_path()` if None.

        Tests give a clock, the process that asks, and `is_alive`, which returns None for unknown.

        Raises:
            LeaseError: the file cannot be made or read, or is of another version.
        """
        self._file = LeaseFile(path or default_path())
        self._clock = clock or BootClock()
        self._given_process = process
        self._is_alive = is_alive or (lambda holder: holder.is_alive(seen_from=self._process))
        self._line = Line(clock or MonotonicClock(), lambda: self._process, self._is_alive)

    @property
    def path(self) -> Path:
        """The file; SQLite keeps two files of its own in the same folder."""
        return self._file.path

    @property
    def _process(self) -> Holder:
        # Not kept: a store that was made before a fork may be used after it.
        return self._given_process or this_process()

    def acquire(
        self,
        spec: DeviceSpec | Sequence[DeviceSpec],
        *,
        holder: str,
        slots: int | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        priority: int = 0,
        wait_s: float = 0.0,
        preempt_s: float | None = None,
        preemptible: bool = False,
        turn_s: float | None = None,
        given_up: Callable[[], bool] | None = None,
    ) -> Lease:
        """Takes slots of a device, or of the first of several that has them free.

        Args:
            spec: the device, and how many slots it has; or several, the preferred one first: the caller then
                stands in the lines of all.
            holder: name of the caller, for the errors of others.
            slots: how many; None for all of them, exclusively.
            ttl_s: life unless renewed.
            priority: of the waiters, the larger goes first, then the earlier. A caller that does not wait
                never overtakes an equal one that does.
            wait_s: how long to wait for free slots.
            preempt_s: ask holders of smaller priority, who are preemptible, to give up within so many
                seconds, and those of the same priority whose turn is over; None: nobody is asked. It needs
                a `wait_s` as long.
            preemptible: whether the holder looks at `HeldLease.preemption`, and gives up in time.
            turn_s: of a preemptible holder: after so long it gives up for the same priority too; None: never.
                The turn of a holder with another clock counts from when one of ours first saw its lease.
            given_up: asked before each try; True ends the wait, and nothing is taken.

        Raises:
            GivenUpError: `given_up` returned True.
            LeaseError: not enough free slots, with who has them since when and until when; or the device has
                stopped, and nobody has cleared it.
        """
        specs = list(spec) if isinstance(spec, Sequence) else [spec]
        asker = _Asker(holder, self._process, ttl_s, priority)
        _check([(one, slots) for one in specs], ttl_s)
        if preempt_s is not None and not 0 <= preempt_s <= wait_s:
            at = f"lease of {', '.join(one.name for one in specs)}"
            raise LeaseError(f"{at}: got preempt_s {preempt_s}, allowed: 0 to wait_s={wait_s:g}, or None.")

        if turn_s is not None and not preemptible:
            raise LeaseError(
                f"lease of {specs[0].name}: got turn_s {turn_s}, allowed: with preemptible only."
            )

        def take(rows: sqlite3.Connection, tickets: Mapping[str, int]) -> Lease | str:
            found = self._first(rows, specs, slots, asker, tickets)
            if isinstance(found, Lease):
                if preemptible:
                    preemption.promise(rows, found, priority, turn_s)
            elif preempt_s is not None:
                # one is needed: where it has asked before, else the preferred one whose holders are willing
                me = holder, asker.process
                order = sorted(specs, key=lambda one: not preemption.asked(rows, one.name, *me))
                any(self._asked(rows, one, slots, asker, tickets, preempt_s) for one in order)
            return found

        names = [one.name for one in specs]
        asks = preempt_s is not None
        return self._stand_in_line(names, take, priority, wait_s, asks=asks, given_up=given_up)

    def acquire_all(
        self,
        wanted: Sequence[tuple[DeviceSpec, int | None]],
        *,
        holder: str,
        ttl_s: float = DEFAULT_TTL_S,
        priority: int = 0,
        wait_s: float = 0.0,
    ) -> list[Lease]:
        """Takes slots of several devices at one moment, or of none.

        A caller that waits holds nothing: two that want the same devices in another order do not wait for
        each other. It stands in the lines of those that are not free, with a place from when it came; the
        others are not kept for it, since who holds what it waits for may need more of them.

        Args:
            wanted: devices, each once, and how many slots of each; None for all of them, exclusively.
            holder: as in `acquire`, like the rest.
            ttl_s: of each lease.
            priority: in all lines.
            wait_s: how long to wait until all are free.

        Raises:
            LeaseError: as `acquire`; the message names each device that is not free.
        """
        asker = _Asker(holder, self._process, ttl_s, priority)
        _check(wanted, ttl_s)

        def take(rows: sqlite3.Connection, tickets: Mapping[str, int]) -> list[Lease] | str:
            found = [self._free(rows, spec, slots, asker, tickets.get(spec.name)) for spec, slots in wanted]
            refusals = [one for one in found if isinstance(one, str)]
            if refusals:
                for (spec, _), one in zip(wanted, found, strict=True):
                    if spec.name in tickets and not isinstance(one, str):
                        self._line.leave(rows, tickets[spec.name])  # `keep` puts it back, at its place
                return "\n".join(refusals)
            return [
                self._grant(rows, spec, slots, asker, free)
                for (spec, slots), free in zip(wanted, found, strict=True)
                if not isinstance(free, str)
            ]

        return self._stand_in_line([spec.name for spec, _ in wanted], take, priority, wait_s)

    def _stand_in_line(
        self,
        names: Sequence[str],
        take: Callable[[sqlite3.Connection, Mapping[str, int]], T | str],
        priority: int,
        wait_s: float,
        *,
        asks: bool = False,
        given_up: Callable[[], bool] | None = None,
    ) -> T:
        """Returns what `take` does once that is no refusal; `asks`: it may ask holders to give up."""
        deadline_s = time.monotonic() + wait_s
        tickets = dict[str, int]()
        try:
            while True:
                if given_up is not None and given_up():
                    raise GivenUpError(f"lease of {', '.join(names)}: the caller gave up waiting.")
                with self._file.transaction() as rows:
                    # Who finds it free needs no place in line.
                    found = None if tickets or asks else take(rows, {})
                    if found is None or (isinstance(found, str) and wait_s > 0):
                        for name in names if wait_s > 0 else ():
                            tickets[name] = self._line.keep(rows, name, priority, tickets.get(name))
                        found = take(rows, tickets)
                if not isinstance(found, str):
                    return found
                if time.monotonic() >= deadline_s:
                    raise LeaseError(found)
                time.sleep(_POLL_S)
        finally:
            if tickets:
                with self._file.transaction() as rows:
                    for ticket in tickets.values():
                        self._line.leave(rows, ticket)
                    if asks:
                        preemption.create(rows)
                        for name in names:
                            preemption.forgive(rows, self._process, name)

    def renew(self, lease: Lease, ttl_s: float | None = None) -> Lease:
        """Extends a lease by `ttl_s` (its own if None) from now.

        A lease that expired is extended too if no other has taken its slots: its token is still their newest.

        Raises:
            LeaseError: released or overtaken.
        """
        ttl_s = lease.ttl_s if ttl_s is None else ttl_s
        expires_s = self._clock.now_s() + ttl_s
        with self._file.transaction() as rows:
            changed = rows.execute(
                "UPDATE leases SET expires_s = ?, ttl_s = ? WHERE device = ? AND token = ?",
                (expires_s, ttl_s, lease.device, lease.token),
            ).rowcount
            newer = rows.execute(
                "SELECT holder FROM leases WHERE device = ? AND token > ? ORDER BY token DESC",
                (lease.device, lease.token),
            ).fetchone()
        if not changed:
            has_it = f"; {newer[0]!r} has it now" if lease.exclusive and newer is not None else ""
            raise LeaseError(
                f"lease of {lease.device}: token {lease.token} is no longer held{has_it}. It was released, "
                f"or it expired at {clock_time(lease.expires_s)} and its slots were freed for others. Stop "
                "commanding it and acquire a new lease; `robot-rl devices` shows who has it."
            )
        return replace(lease, expires_s=expires_s, ttl_s=ttl_s)

    def release(self, lease: Lease) -> None:
        """Gives the slots back; nothing happens if they are no longer held."""
        with self._file.transaction() as rows:
            self._delete(rows, lease)

    @contextmanager
    def hold(
        self,
        spec: DeviceSpec | Sequence[DeviceSpec],
        *,
        holder: str,
        slots: int | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        priority: int = 0,
        wait_s: float = 0.0,
        preempt_s: float | None = None,
        preemptible: bool = False,
        turn_s: float | None = None,
        given_up: Callable[[], bool] | None = None,
    ) -> Generator[HeldLease]:
        """Acquires, renews in a thread, and releases at the end; arguments as in `acquire`."""
        lease = self.acquire(
            spec,
            holder=holder,
            slots=slots,
            ttl_s=ttl_s,
            priority=priority,
            wait_s=wait_s,
            preempt_s=preempt_s,
            preemptible=preemptible,
            turn_s=turn_s,
            given_up=given_up,
        )
        specs = spec if isinstance(spec, Sequence) else [spec]
        leased = next(one for one in specs if one.name == lease.device)
        held = HeldLease(self, lease, preemptible=preemptible, require_trusted=leased.require_trusted)
        try:
            yield held
        finally:
            held.end()

    @contextmanager
    def hold_all(
        self,
        wanted: Sequence[tuple[DeviceSpec, int | None]],
        *,
        holder: str,
        ttl_s: float = DEFAULT_TTL_S,
        priority: int = 0,
        wait_s: float = 0.0,
    ) -> Generator[list[HeldLease]]:
        """Acquires all, renews each in a thread, and releases them at the end; as in `acquire_all`."""
        leases = self.acquire_all(wanted, holder=holder, ttl_s=ttl_s, priority=priority, wait_s=wait_s)
        with ExitStack() as stack:
            held = list[HeldLease]()
            for lease in leases:
                stack.callback(self.release, lease)
            for lease, (spec, _) in zip(leases, wanted, strict=True):
                held.append(HeldLease(self, lease, require_trusted=spec.require_trusted))
                stack.callback(held[-1].end)
            yield held

    def active(self, device: str | None = None) -> list[Lease]:
        """Returns the leases that hold, of one device or of all, oldest first."""
        now_s, is_alive = self._clock.now_s(), cache(self._is_alive)
        with self._file.transaction() as rows:
            leases = self._read(rows, device, now_s)
        return [lease for lease in leases if not _is_over(lease, now_s, is_alive)]

    def waiting(self) -> list[Waiter]:
        """Returns who waits for devices, by device and place in its line."""
        with self._file.transaction() as rows:
            return self._line.waiters(rows)

    def stop(self, device: str, reason: str, holder: str) -> None:
        """Refuses all leases of a device from now on, until a person has cleared it.

        `reason` is a sentence; `holder` had the device.
        """
        with self._file.transaction() as rows:
            add_stop(rows, Stop(device=device, reason=reason, holder=holder, wall_s=time.time()))

    def stopped(self) -> dict[str, Stop]:
        """Returns the stops that nobody has cleared, by device."""
        with self._file.transaction() as rows:
            return find_stops(rows)

    def clear(self, device: str, by: str) -> Stop:
        """Allows leases of a stopped device again; returns its stop.

        Raises:
            ConfigError: no name was given, or the device did not stop.
        """
        with self._file.transaction() as rows:
            return clear_stop(rows, device, by)

    def preemption(self, lease: Lease) -> Preemption | None:
        """Returns who wants a lease that its holder promised to give up, if anybody does."""
        with self._file.transaction() as rows:
            preemption.create(rows)
            return preemption.find(rows, lease.device, lease.token, self._process, self._clock.now_s())

    def has_expired(self, lease: Lease) -> bool:
        """Returns whether the lease's time is up, renewable or not."""
        return lease.expires_s <= self._clock.now_s()

    # Inside a transaction

    def _first(
        self,
        rows: sqlite3.Connection,
        specs: Sequence[DeviceSpec],
        slots: int | None,
        asker: _Asker,
        tickets: Mapping[str, int],
    ) -> Lease | str:
        """Returns a lease of the first device that has what is asked for, or why none has.

        Raises:
            LeaseError: the only device has stopped.
        """
        refusals = list[str]()
        taken = dict[str, float]()
        if len(specs) > 1:  # those that are surely not free come last: to look at each takes time
            taken = taken_slots(rows, self._process, self._clock.now_s(), self._is_alive)
        most = {spec.name: 0 if slots is None else spec.slots - slots for spec in specs}
        for spec in sorted(specs, key=lambda one: taken.get(one.name, 0) > most[one.name]):
            try:
                found = self._free(rows, spec, slots, asker, tickets.get(spec.name))
            except LeaseError as error:  # it has stopped; another may do
                if len(specs) == 1:
                    raise
                found = str(error)
            if not isinstance(found, str):
                return self._grant(rows, spec, slots, asker, found)
            refusals.append(found)
        return "\n".join(refusals)

    def _asked(
        self,
        rows: sqlite3.Connection,
        spec: DeviceSpec,
        slots: int | None,
        asker: _Asker,
        tickets: Mapping[str, int],
        within_s: float,
    ) -> bool:
        """Asks holders of a device to give up; returns whether enough are willing, and nobody is ahead."""
        ahead = self._line.count_ahead(rows, spec.name, asker.priority, tickets.get(spec.name))
        if ahead or spec.name in find_stops(rows):
            return False
        now_s = self._clock.now_s()
        held = self._purge(rows, spec.name, now_s)
        missing = (spec.slots if slots is None else slots) - spec.slots + sum(lease.slots for lease in held)
        who: dict[str, Any] = {"priority": asker.priority, "by": asker.holder, "process": asker.process}
        return preemption.ask(rows, held, missing=missing, within_s=within_s, now_s=now_s, **who)

    def _free(
        self, rows: sqlite3.Connection, spec: DeviceSpec, slots: int | None, asker: _Asker, ticket: int | None
    ) -> list[int] | str:
        """Returns the slots that can be taken now, or the reason why there are too few.

        Raises:
            LeaseError: the device has stopped: waiting does not help.
        """
        if spec.name in (stops := find_stops(rows)):
            raise LeaseError(stops[spec.name].refusal())
        preemption.create(rows)
        held = self._purge(rows, spec.name, self._clock.now_s())
        ahead = self._line.count_ahead(rows, spec.name, asker.priority, ticket)
        taken = {slot for lease in held for slot in lease.slot_ids}
        free = [slot for slot in range(spec.slots) if slot not in taken]
        is_free = (
            not held if slots is None else len(free) >= slots and not any(lease.exclusive for lease in held)
        )
        if ahead or not is_free:
            return _refusal(spec, slots, held, len(free), ahead)
        return free

    def _grant(
        self, rows: sqlite3.Connection, spec: DeviceSpec, slots: int | None, asker: _Asker, free: list[int]
    ) -> Lease:
        """Writes a lease of as many of the free slots as are wanted."""
        now_s = self._clock.now_s()
        token = self._next_token(rows, spec)
        lease = Lease(
            device=spec.name,
            token=token,
            slot_ids=tuple(free if slots is None else free[:slots]),
            exclusive=slots is None,
            holder=asker.holder,
            process=asker.process,
            since_s=now_s,
            expires_s=now_s + asker.ttl_s,
            ttl_s=asker.ttl_s,
        )
        ids = ",".join(map(str, lease.slot_ids))
        text = lease.process.to_text()
        rows.execute(
            "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (spec.name, token, ids, slots is None, asker.holder, text, now_s, lease.expires_s, asker.ttl_s),
        )
        return lease

    def _next_token(self, rows: sqlite3.Connection, spec: DeviceSpec) -> int:
        """Returns a new token of the device, larger than all before, and notes it."""
        found = rows.execute("SELECT last_token FROM devices WHERE name = ?", (spec.name,)).fetchone()
        seen = 0 if spec.last_token is None else spec.last_token()
        token = 1 + max(seen, 0 if found is None else found[0])
        rows.execute("INSERT OR REPLACE INTO devices VALUES (?, ?)", (spec.name, token))
        return token

    def _purge(self, rows: sqlite3.Connection, device: str, now_s: float) -> list[Lease]:
        """Removes the leases of a device that are over, and returns the others."""
        held: list[Lease] = []
        for lease in self._read(rows, device, now_s):
            asked = preemption.find(rows, device, lease.token, self._process, now_s)
            if _is_over(lease, now_s, self._is_alive) or (asked is not None and asked.left_s <= 0):
                self._delete(rows, lease)
            else:
                held.append(lease)
        return held

    def _read(self, rows: sqlite3.Connection, device: str | None, now_s: float) -> list[Lease]:
        where, values = ("", ()) if device is None else (" WHERE device = ?", (device,))
        found = rows.execute(
            "SELECT device, token, slot_ids, exclusive, holder, process, since_s, expires_s, ttl_s "
            f"FROM leases{where} ORDER BY token",
            values,
        ).fetchall()
        leases = [
            Lease(
                device=name,
                token=token,
                slot_ids=tuple(int(slot) for slot in slot_ids.split(",")),
                exclusive=bool(exclusive),
                holder=holder,
                process=Holder.from_text(process),
                since_s=since_s,
                expires_s=expires_s,
                ttl_s=ttl_s,
            )
            for name, token, slot_ids, exclusive, holder, process, since_s, expires_s, ttl_s in found
        ]
        me = self._process
        return sorted((_by_clock_of(me, rows, lease, now_s) for lease in leases), key=lambda it: it.since_s)

    def _delete(self, rows: sqlite3.Connection, lease: Lease) -> None:
        rows.execute("DELETE FROM leases WHERE device = ? AND token = ?", (lease.device, lease.token))
        rows.execute("DELETE FROM seen WHERE row IN (?, ?)", (_row(lease), _row(lease, "since")))
        preemption.create(rows)
        preemption.withdraw(rows, lease.device, lease.token)


def _is_over(lease: Lease, now_s: float, is_alive: Callable[[Holder], bool | None]) -> bool:
    return lease.expires_s <= now_s or is_alive(lease.process) is False


def _by_clock_of(me: Holder, rows: sqlite3.Connection, lease: Lease, now_s: float) -> Lease:
    """Returns a lease; one of another clock began when we first saw it, and was renewed at its change."""
    if lease.process.shares_clock(me):
        return lease
    had_s = unchanged_s(rows, _row(lease, "since"), lease.since_s, me, now_s)
    left_s = lease.ttl_s - unchanged_s(rows, _row(lease), lease.expires_s, me, now_s)
    return replace(lease, since_s=now_s - had_s, expires_s=now_s + left_s)


def _check(wanted: Sequence[tuple[DeviceSpec, int | None]], ttl_s: float) -> None:
    """Refuses what no device can give.

    Raises:
        LeaseError: too many or too few slots, no life, or a device that cannot be trusted.
    """
    at = f"lease of {', '.join(spec.name for spec, _ in wanted)}"
    for spec, slots in wanted:
        if slots is not None and not 1 <= slots <= spec.slots:
            raise LeaseError(f"{at}: got slots {slots}, allowed 1 to {spec.slots}, or None for all.")
    if not ttl_s > 0:
        raise LeaseError(f"{at}: got ttl_s {ttl_s}, allowed: above 0.")
    for spec, _ in wanted:
        spec.require_trusted()


def _row(lease: Lease, of: str = "lease") -> str:
    return f"{of} {lease.device} {lease.token}"


def _refusal(spec: DeviceSpec, slots: int | None, held: list[Lease], free: int, ahead: int) -> str:
    wanted = "all alone" if slots is None else f"{slots} slot{'s' * (slots > 1)}"
    holders = "; ".join(lease.describe() for lease in held) or "nobody"
    queue = f", {ahead} waiting before you" if ahead else ""
    return (
        f"lease of {spec.name}: wanted {wanted}, {free} of {spec.slots} slots are free{queue}. "
        f"Held by {holders}. Wait (lease_wait_s=600), end that process, or take another device: "
        "`robot-rl devices` shows all."
    )
