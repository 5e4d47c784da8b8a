"""Acting on the machines of a Ray cluster: a Ray actor for each source, wherever there is room.

    learner                              Ray actor, on some node
    collect() -- act(version, weights) --> any source <- env, policy; under a lease of that node's simulator
    collect() <-- segment, tally ----------

Weights are put into Ray's object store once for each version, and each node fetches them once. An actor that
died, or whose node did, is begun again on a node that is there: the run goes on, episodes that it was in are
cut. Ray places and moves; leases decide what may act, on the node that acts. Neither compiled graphs nor
RDT are used. Ray checks who may join a cluster (its token authentication), and its messages are pickled: a
cluster is one user's machines.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from robot_rl import __version__
from robot_rl.core.errors import ConfigError
from robot_rl.data.transitions import Segment
from robot_rl.hal.device import DeviceSpec, LeaseLike
from robot_rl.rollout.process import Turn
from robot_rl.rollout.ray_config import RayConfig
from robot_rl.rollout.revival import ActorError, LostActorError, Revival
from robot_rl.rollout.sources import Elsewhere, Source
from robot_rl.rollout.weights import Published, Snapshot, newest_of
from robot_rl.sched.leases import LeaseStore

if TYPE_CHECKING:
    import ray

Build = Callable[[Sequence[LeaseLike]], Source]
"""Makes the source on its node, under leases of that node; it is pickled, as for `ProcessSource`."""
logger = logging.getLogger(__name__)


class RaySource(Elsewhere):
    """A `Source` that runs another source in a Ray actor."""

    is_ahead = False

    def __init__(
        self,
        build: Build,
        config: RayConfig,
        *,
        spec: DeviceSpec,
        holder: str,
        ahead: int,
        lease_wait_s: float,
        wait_s: float,
        restarts: int = 0,
        holds_up: bool = True,
    ) -> None:
        """Starts nothing yet: the actor begins with the first weights.

        Args:
            build: makes the source on its node.
            config: which nodes.
            spec: the simulator that is leased there.
            holder: of that lease.
            ahead: turns of the loop that the actor may be ahead; 0: it acts when it is asked, and what it
                collects is what it would collect here.
            lease_wait_s: how long to wait for the lease.
            wait_s: how long `collect` waits for a segment, or for a node with room.
            restarts: how many actors in a row may be lost before that is an error.
            holds_up: whether `collect` waits on, until there is a segment: a loop without arms has nothing
                else to do.
        """
        super().__init__()
        self._begin_with = build, spec.name, spec.slots, holder, lease_wait_s
        self._place_s, self._due_s = config.place_s + lease_wait_s, 0.0
        self._config, self._ahead = config, ahead
        self._wait_s, self._holds_up = wait_s, holds_up
        self.revival = Revival(restarts)
        self.node, self.pid = "", 0
        """Where it acts, and its process there."""
        self._actor: Any = None
        self._about: Any = None
        """Which node it acts on, until that is known."""
        self._weights: tuple[int, Any] | None = None
        self._pending = deque["ray.ObjectRef[Turn]"]()

    def collect(self, published: Published) -> Segment | None:
        """Returns the next segment; None if there is none yet, where the loop has more to do.

        Raises:
            ActorError: the source failed, too many actors were lost, or no node has what it needs.
            WeightsError: nothing was published.
        """
        ray = _ray(self._config)
        while True:
            try:
                turn = self._turn(ray, published)
                if turn is not None or not self._holds_up:
                    break
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
                if getattr(error, "actor_init_failed", False):  # another try would end the same
                    raise ActorError(f"actor: it did not begin: {_last_line(error)}") from error
                self._lost(error)
            except ray.exceptions.RayTaskError as error:  # of the source: another try would end the same
                raise ActorError(f"actor: {error.cause}") from error
        if turn is None:
            return None
        self.revival.well()
        turn.segment.begins, self._begins = self._begins or turn.segment.begins, False
        self.episodes.merge(turn.tally)
        return turn.segment

    def _turn(self, ray: Any, published: Published) -> Turn | None:
        """Returns the next turn of the actor, which begins if there is none and it may."""
        if self._actor is None:
            if not self.revival.is_due(None if self._holds_up else self._wait_s):
                return None
            self._begin(ray)
        if self._about is not None and not self._is_placed(ray):
            return None
        actor: Any = self._actor
        while len(self._pending) <= self._ahead:
            version, weights = self._publish(ray, published)
            self._pending.append(actor.act.remote(version, [weights]))
        ready, _ = ray.wait([self._pending[0]], timeout=None if self._holds_up else self._wait_s)
        return ray.get(self._pending.popleft()) if ready else None

    def _begin(self, ray: Any) -> None:
        """Asks for an actor on a node that has what it needs."""
        config = self._config
        options: dict[str, Any] = {"num_cpus": config.cpus, "max_restarts": 0}
        if config.labels:
            options["label_selector"] = config.labels
        self._actor = ray.remote(_Acting).options(**options).remote(*self._begin_with)
        self._about, self._due_s = self._actor.about.remote(), time.monotonic() + self._place_s

    def _is_placed(self, ray: Any) -> bool:
        """Returns whether the actor has begun.

        Raises:
            ActorError: no node has what it needs, or the node has another version.
        """
        left_s = max(0.0, self._due_s - time.monotonic())
        ready, _ = ray.wait([self._about], timeout=left_s if self._holds_up else min(left_s, self._wait_s))
        if ready:
            self.node, self.pid, version = ray.get(self._about)
            self._about = None
            if version != __version__:
                raise ActorError(
                    f"ray: node {self.node} has robot_rl {version}, this one {__version__}. "
                    "Install one on all."
                )
        elif time.monotonic() >= self._due_s:
            ray.kill(self._actor)
            self._actor = self._about = None
            why = _no_room(ray, self._config)
            if not self.node:
                raise ActorError(why)
            self.revival.lost(LostActorError(why))  # there was room before
        return bool(ready)

    def _publish(self, ray: Any, published: Published) -> tuple[int, Any]:
        newest = newest_of(published)
        if self._weights is None or self._weights[0] != newest.version:
            self._weights = newest.version, ray.put(newest)
        return self._weights

    def _lost(self, error: Exception) -> None:
        self._actor, self._about, self._begins = None, None, True
        self._pending.clear()
        self.revival.lost(LostActorError(f"ray: the source on {self.node} is lost: {_first_line(error)}"))

    def close(self) -> None:
        """Ends the actor; the cluster stays."""
        if self._actor is None:
            return
        ray = _ray(self._config)
        if self._about is None:  # it acts; otherwise it waits for room, and has nothing to close
            try:
                ray.get(self._actor.close.remote(), timeout=10.0)
            except ray.exceptions.RayError as error:
                logger.warning("ray: %s", _first_line(error))
        ray.kill(self._actor)
        self._actor = self._about = None


class _Acting:
    """The actor: a source, and the weights that it was sent last. It is `Published` for that source."""

    def __init__(self, build: Build, device: str, slots: int, holder: str, wait_s: float) -> None:
        self.newest: Snapshot | None = None
        self._held = ExitStack()
        spec = DeviceSpec(name=device, kind="sim", slots=slots)
        lease = self._held.enter_context(LeaseStore().hold(spec, holder=holder, slots=1, wait_s=wait_s))
        self._source = build([lease])

    def about(self) -> tuple[str, int, str]:
        """Returns the node, the process, and the version of this package there."""
        import ray

        return str(ray.get_runtime_context().get_node_id())[:8], os.getpid(), __version__

    def act(self, version: int, weights: list[Any]) -> Turn:
        """Acts once; the weights are fetched if they are others than those that act."""
        import ray

        if self.newest is None or self.newest.version != version:
            self.newest = ray.get(weights[0])
        segment = self._source.collect(self)
        assert segment is not None, "simulations do not wait"
        return Turn(segment, self._source.episodes.drain())

    def close(self) -> None:
        self._source.close()
        self._held.close()


def _ray(config: RayConfig) -> Any:
    """Returns the package, joined to the cluster.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    if (
        config.address is not None
    ):  # read as Ray is imported; a cluster has a token unless it was begun without
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"transport: ray: {error}. Install it: pip install 'robot_rl[ray]'.") from error
    if not ray.is_initialized():
        how: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
        try:
            ray.init(address=config.address or "local", namespace="robot_rl", **how)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"ray.address: {config.address}: {_first_line(error)} `ray start --head` begins a cluster, "
                "`ray start --address=<host:port>` joins one."
            ) from error
    return ray


def _no_room(ray: Any, config: RayConfig) -> str:
    """Returns why no node is enough: which label is missing, or how busy they are."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    lacking = sorted(
        name for name, value in config.labels.items() if all(n["Labels"].get(name) != value for n in nodes)
    )
    if lacking:
        words = ", ".join(f"{name}={config.labels[name]}" for name in lacking)
        return (
            f"ray.labels: none of {len(nodes)} nodes has {words}. `ray start --labels` gives a node labels."
        )
    free = ray.available_resources().get("CPU", 0.0)
    return (
        f"ray.cpus: asked for {config.cpus:g}; after {config.place_s:g} s no source has begun, {free:g} are "
        f"free on {len(nodes)} nodes. Lower ray.cpus, add a node, or wait longer: ray.place_s=600. "
        "`ray status` shows who uses them."
    )


def _last_line(error: Exception) -> str:
    """Returns what the error of another process ends with: its own message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
