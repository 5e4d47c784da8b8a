"""The health of a device: a state machine that takes a faulty device out of a run and lets it back in.

    ok --failure--> suspect --too many, or too long--> quarantined --waited, or a person--> recovering
     ^                 |                                    ^                                  |  |
     +----successes----+                                    +-------------failure--------------+  |
     +---------------------------------------successes--------------------------------------------+

A stop that latched (`stop`) needs a person: time alone does not end that quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from robot_rl.core.clock import Clock, MonotonicClock
from robot_rl.core.errors import ConfigError, DeviceError, SafetyStopError, require

State = Literal["ok", "suspect", "quarantined", "recovering"]


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """When a device is doubted, taken out, and trusted again."""

    quarantine_after: int = 3
    """Failures, while suspect or before, that take the device out; the first makes it suspect."""
    suspect_timeout_s: float = 5.0
    """Longest time a device may stay suspect; then it is taken out."""
    clear_after: int = 5
    """Successes in a row that end the suspicion."""
    quarantine_s: float = 10.0
    """Time until a quarantined device may be tried again; doubles with every relapse."""
    max_quarantine_s: float = 300.0
    """Where the doubling ends."""
    recover_after: int = 3
    """Successes in a row that end the recovery."""

    def __post_init__(self) -> None:
        for name in ("quarantine_after", "clear_after", "recover_after"):
            require(getattr(self, name) >= 1, f"health.{name}", getattr(self, name), "1 or more")
        for name in ("suspect_timeout_s", "quarantine_s"):
            require(getattr(self, name) > 0, f"health.{name}", getattr(self, name), "above 0")
        first, last = self.quarantine_s, self.max_quarantine_s
        require(last >= first, "health.max_quarantine_s", last, f"quarantine_s ({first}) or more")


@dataclass(frozen=True, kw_only=True)
class Health:
    """A device's health at one moment."""

    state: State
    since_s: float
    """When it entered the state, in seconds of the monitor's clock."""
    reason: str = ""
    """Of the last failure; empty if there was none since the device was last ok."""
    needs_person: bool = False
    """Whether only `recover(by=...)` ends the quarantine."""
    counts: Mapping[str, int] = field(default_factory=lambda: dict[str, int]())
    """`success`, `failure`, `quarantine`, `recovery` since the monitor was made."""

    @property
    def usable(self) -> bool:
        """Whether a run may go on commanding the device."""
        return self.state in ("ok", "suspect")


class HealthMonitor:
    """The state machine; callers report every success and failure of the device here."""

    def __init__(
        self,
        device: str,
        config: HealthConfig | None = None,
        clock: Clock | None = None,
        *,
        on_stop: Callable[[str], None] | None = None,
    ) -> None:
        """Begins with a device that is ok.

        Args:
            device: its name.
            config: None: as usual.
            clock: None: the monotonic one.
            on_stop: called with the reason of a stop that needs a person, once until `recover`.
        """
        self._device, self._on_stop = device, on_stop
        self._config = config or HealthConfig()
        self._clock = clock or MonotonicClock()
        self._state: State = "ok"
        self._since_s = self._clock.now_s()
        self._reason = ""
        self._needs_person = False
        self._failures = self._successes = self._relapses = 0
        self._counts: dict[str, int] = {"success": 0, "failure": 0, "quarantine": 0, "recovery": 0}

    def health(self) -> Health:
        """Returns the present health; time alone may change it."""
        self._pass_time()
        return Health(
            state=self._state,
            since_s=self._since_s,
            reason=self._reason,
            needs_person=self._needs_person,
            counts=dict(self._counts),
        )

    def success(self) -> None:
        """Reports that the device did what it was asked."""
        self._pass_time()
        self._counts["success"] += 1
        self._successes += 1
        if self._state == "suspect" and self._successes >= self._config.clear_after:
            self._enter("ok")
        elif self._state == "recovering" and self._successes >= self._config.recover_after:
            self._counts["recovery"] += 1
            self._relapses = 0
            self._enter("ok")

    def failure(self, reason: str) -> None:
        """Reports a late or wrong answer, or none at all."""
        self._pass_time()
        self._counts["failure"] += 1
        self._successes = 0
        self._failures += 1
        self._reason = reason
        if self._state == "recovering":
            self._relapses += 1
            self._quarantine()
        elif self._state != "quarantined" and self._failures >= self._config.quarantine_after:
            self._quarantine()
        elif self._state == "ok":
            self._enter("suspect")

    def stop(self, reason: str) -> None:
        """Reports a latched stop, a protective stop or a disconnection that a person must look at."""
        self._counts["failure"] += 1
        self._reason = reason
        is_news, self._needs_person = not self._needs_person, True
        if self._state != "quarantined":
            self._quarantine()
        if is_news and self._on_stop is not None:
            self._on_stop(reason)

    def recover(self, by: str) -> None:
        """Lets a person end the quarantine; the device is then tried, not yet trusted."""
        if not by.strip():
            raise ConfigError(
                f"device {self._device}.recover: got by={by!r}, need the name of who looked at it."
            )
        self._needs_person = False
        if self._state == "quarantined":
            self._enter("recovering")

    def require_usable(self) -> None:
        """Passes unless the device is quarantined.

        Raises:
            DeviceError: says since when, why, and what ends it; a `SafetyStopError` where a person has to.
        """
        self._pass_time()
        if self._state != "quarantined":
            return
        age_s = self._clock.now_s() - self._since_s
        remedy = (
            "look at it, then call recover(by=<your name>)"
            if self._needs_person
            else f"it is tried again in {self._quarantine_s() - age_s:.1f} s"
        )
        kind = SafetyStopError if self._needs_person else DeviceError
        raise kind(f"device {self._device}: quarantined {age_s:.1f} s ago after {self._reason!r}; {remedy}.")

    def _pass_time(self) -> None:
        age_s = self._clock.now_s() - self._since_s
        if self._state == "suspect" and age_s >= self._config.suspect_timeout_s:
            self._quarantine()
        elif self._state == "quarantined" and not self._needs_person and age_s >= self._quarantine_s():
            self._enter("recovering")

    def _quarantine_s(self) -> float:
        return min(self._config.quarantine_s * 2.0 ** min(self._relapses, 30), self._config.max_quarantine_s)

    def _quarantine(self) -> None:
        self._counts["quarantine"] += 1
        self._enter("quarantined")

    def _enter(self, state: State) -> None:
        self._state, self._since_s = state, self._clock.now_s()
        self._successes = 0
        if state in ("ok", "recovering"):
            self._failures = 0
        if state == "ok":
            self._reason = ""
