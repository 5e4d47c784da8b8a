"""A device around an env: simulators, foreign environments and stations.

EnvDevice.open(lease) -> LeasedEnv -> the env inside
                         checks token and health, reports success and failure, parks when closed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from robot_rl.core.clock import Clock
from robot_rl.core.errors import DeviceError, LeaseError, SafetyStopError
from robot_rl.hal.device import DeviceSpec, Fence, LeaseLike
from robot_rl.hal.health import Health, HealthConfig, HealthMonitor
from robot_rl.hal.vector import Array, Obs, VectorEnv

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SHOWN = (
    "num_envs", "observation_space", "action_space", "single_observation_space", "single_action_space",
    "metadata", "render_mode", "task", "robot", "instruction", "control_hz", "caps", "state_names",
    "action_names", "limits", "xp", "device", "reset_classes",
)  # fmt: skip


class LeasedEnv(VectorEnv):
    """An env that refuses commands under an overtaken lease, and while its device is quarantined.

    A device that is not trusted any longer, such as a world model, refuses the next reset. A chunk is checked
    at every control step. Every success and failure is reported to the device's `HealthMonitor`. Attributes
    that the contract does not name are those of the env inside.
    """

    def __init__(
        self,
        env: VectorEnv,
        fence: Fence,
        lease: LeaseLike,
        monitor: HealthMonitor,
        *,
        require_trusted: Callable[[], None] = lambda: None,
    ) -> None:
        """Wraps an env that was just opened; `require_trusted`: that of its `DeviceSpec`."""
        self.env = env
        for name in _SHOWN:
            setattr(self, name, getattr(env, name))
        self.says_success = env.says_success
        self._fence, self._token, self._slot_ids = fence, lease.token, lease.slot_ids
        self._monitor, self._require_trusted = monitor, require_trusted

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def _command(self, act: Callable[[], T]) -> T:
        """Commands the device under the lease.

        Raises:
            LeaseError: the lease was overtaken.
            DeviceError: the device is quarantined, or the command failed.
        """
        self._fence.check(self._token, self._slot_ids)
        self._monitor.require_usable()
        try:
            done = act()
        except SafetyStopError as error:
            self._monitor.stop(str(error))
            raise
        except DeviceError as error:
            self._monitor.failure(str(error))
            raise
        self._monitor.success()
        self.says_success = self.env.says_success  # known from the first success on
        return done

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        self._require_trusted()
        return self._command(lambda: self.env.reset(seed=seed, options=options))

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        return self._command(lambda: self.env.step_masked(actions, active))

    def step_unseen(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        return self._command(lambda: self.env.step_unseen(actions, active))

    def get_state(self) -> Array:
        return self.env.get_state()

    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        return self._command(lambda: self.env.set_state(rows, mask))

    def state_dict(self) -> dict[str, Any]:
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        return self._command(lambda: self.env.load_state_dict(state))

    def render(self) -> Any:
        return self.env.render()

    def park(self) -> None:
        self._command(self.env.park)

    def safe_stop(self) -> None:
        """Stops under any lease; commands are refused until a person calls `recover` of its monitor."""
        try:
            self.env.safe_stop()
        finally:  # the brake comes first
            self._monitor.stop("safe_stop")

    def close_extras(self, **kwargs: Any) -> None:
        """Parks the device if it is well, and closes the env.

        A device that failed or stopped stays where it is, for a person to look at. A failed park is logged.
        """
        try:
            if self._monitor.health().state == "ok" and not self.env.closed:
                self.park()
        except Exception as error:
            logger.error("%s is not parked: %s", self.robot, error)
        finally:
            self.env.close(**kwargs)


def open_under(leases: Iterable[LeaseLike], device: EnvDevice) -> LeasedEnv:
    """Opens a device under the one of the leases that is for it.

    Raises:
        LeaseError: there is none.
        DeviceError: the device is quarantined.
    """
    for lease in leases:
        if lease.device == device.spec.name:
            return device.open(lease)
    raise LeaseError(f"device {device.spec.name}: opened without a lease of it; acquire one first.")


class EnvDevice:
    """A device whose env a function makes: a simulator, a foreign environment, a station."""

    def __init__(
        self,
        spec: DeviceSpec,
        make: Callable[[LeaseLike], VectorEnv],
        *,
        health: HealthConfig | None = None,
        clock: Clock | None = None,
        on_stop: Callable[[str], None] | None = None,
    ) -> None:
        """Makes nothing yet.

        Args:
            spec: what is leased.
            make: returns a fresh env for a lease; the env is the device's from then on.
            health: when failures quarantine the device, and what ends a quarantine.
            clock: of its health.
            on_stop: called with the reason of a stop that needs a person, who has to clear the device.
        """
        self.spec = spec
        self.monitor = HealthMonitor(spec.name, health, clock, on_stop=on_stop)
        self._make, self._fence = make, Fence(spec.name, spec.slots)
        self._open: list[tuple[LeaseLike, VectorEnv]] = []

    def open(self, lease: LeaseLike) -> LeasedEnv:
        """Returns a fresh env; those of older leases of its slots are closed. See `Device`."""
        self.monitor.require_usable()
        self.spec.require_trusted()
        self._fence.admit(lease)
        for held in list(self._open):
            if held[0].token < lease.token and set(held[0].slot_ids) & set(lease.slot_ids):
                self._open.remove(held)
                held[1].close()
        env = self._make(lease)
        self._open.append((lease, env))
        return LeasedEnv(env, self._fence, lease, self.monitor, require_trusted=self.spec.require_trusted)

    def health(self) -> Health:
        return self.monitor.health()

    def safe_stop(self) -> None:
        """Stops every open env and refuses all commands until a person calls `monitor.recover`."""
        try:
            for _, env in self._open:
                if not env.closed:
                    env.safe_stop()
        finally:  # the brake comes first
            self.monitor.stop("safe_stop")

    def close(self) -> None:
        while self._open:
            self._open.pop()[1].close()
