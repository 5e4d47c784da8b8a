"""Control over ROS 2: jitter of the supervisor, and latency from an observation to its command.

    simulated arm <--ROS 2--> driver host <--> supervisor <--> policy: this process, at 20 Hz

Each box is a process. At every step the policy samples a chunk from a flow network of `pick_cube`'s size
(with random weights, on which the time does not depend). The arm follows a slow sinusoid.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from robot_rl.bench.metronome import alone, metronome
from robot_rl.bench.trials import command_line, processor_s
from robot_rl.core.errors import DeviceError, require
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.real.client import ArmClient
from robot_rl.real.launch import StationProcesses
from robot_rl.real.link import Link, connect
from robot_rl.real.messages import ArmState, Plan, Status
from robot_rl.real.ros2.node import open_node
from robot_rl.real.station import STATIONS, StationConfig, load_station
from robot_rl.real.supervisor.main import SUPERVISOR_SOCKET

Array = NDArray[Any]

POLICY_HZ = 20.0
STATE_DIM, HORIZON = 40, 8
"""Sizes of the policy of `recipe=pick_cube`."""
_AMPLITUDE_RAD, _SWING_HZ = 0.15, 0.2
_WARM_UP_S = 2.0
"""Not measured: processes fill their caches."""
_READY_S = 60.0
_QUANTILES = {"p50": 50.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}
_RESEARCH = (
    "compare: JointState round trip of two such processes at 1 kHz p50 0.16-0.29 ms, p99 0.9-2.3 ms; genuine "
    "rclpy on Cyclone p50 0.30 ms, p99 3.4 ms, on Fast DDS 0.29 and 4.0 ms (2 such cores, load 1.4 to 3)"
)


def run(
    *, seconds: float = 600.0, rates_hz: tuple[float, ...] = (100.0, 500.0), figure: str = "control.png"
) -> dict[str, Any]:
    """Measures each rate; returns rows.

    Args:
        seconds: for each rate.
        rates_hz: of the supervisor; the arm measures at 200 Hz or more.
        figure: file for the distribution of periods; none if empty.

    Raises:
        RobotRLError: ROS 2 or the simulated arm is missing, or the arm was stopped.
    """
    require(seconds >= 1, "seconds", seconds, "1 or more")
    require(all(10 <= rate <= 1000 for rate in rates_hz), "rates_hz", rates_hz, "10 to 1000 each")
    measured = [_measure(rate, seconds) for rate in rates_hz]
    rows = [one.row() for one in measured]
    if figure:
        _draw(Path(figure), measured)
    first = rows[0]
    return {
        "title": f"Control over ROS 2, {seconds:g} s for each rate, policy at {POLICY_HZ:g} Hz",
        "rows": rows,
        **{f"missed_{row['command_hz']:g}hz": row["missed"] for row in rows},
        "latency_p50_ms": first["latency_p50_ms"],
        "latency_p99_ms": first["latency_p99_ms"],
        "seconds": seconds,
        "cpus": os.cpu_count(),
        "figure": figure or None,
        "notes": [
            "missed: cycles that began more than a period late; jitter: |period - nominal|, from the time "
            "stamps of the supervisor for all cycles",
            "bare: a second process with the same rate and priority that only wakes up, so it shows what the "
            "machine misses; missed_alone: missed cycles while that process was on time",
            "latency: from the driver's receipt of a joint state to its command, received by another process "
            "from the ROS graph; last 30 s. policy_latency: from the joint state that the policy observed to "
            "the first command of its plan",
            _RESEARCH,
        ],
    }


@dataclass(kw_only=True)
class Measured:
    """The measurements at one rate."""

    command_hz: float
    stamps_ns: list[int] = field(default_factory=lambda: list[int]())
    """Time stamps of the supervisor's cycles."""
    bare_ns: Array = field(default_factory=lambda: np.zeros(0))
    """Wake-ups of the metronome."""
    observed_ns: dict[int, int] = field(default_factory=lambda: dict[int, int]())
    """Plan number -> receipt of its joint state."""
    heard: deque[tuple[int, bytes]] = field(default_factory=lambda: deque[tuple[int, bytes]]())
    """Commands on the ROS graph: time of receipt, and the bytes of the targets."""
    late_plans: int = 0
    flight: dict[str, Array] = field(default_factory=lambda: dict[str, Array]())
    supervisor: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    cpu: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    load: float = 0.0

    @property
    def periods_ms(self) -> Array:
        return 1e-6 * np.diff(np.array(self.stamps_ns, float))

    def row(self) -> dict[str, Any]:
        nominal_ms = 1e3 / self.command_hz
        periods_ms, bare_ms = self.periods_ms, 1e-6 * np.diff(self.bare_ns)
        late = np.flatnonzero(periods_ms > 2 * nominal_ms)
        stamps_ns = np.array(self.stamps_ns)
        missed_ns = np.stack([stamps_ns[late], stamps_ns[late + 1]], axis=1)
        return {
            "command_hz": self.command_hz,
            "cycles": len(self.stamps_ns),
            "missed": len(late),
            "missed_alone": alone(missed_ns, self.bare_ns, 1e6 * nominal_ms),
            "bare_missed": int((bare_ms > 2 * nominal_ms).sum()),
            **_quantiles("jitter", np.abs(periods_ms - nominal_ms), "ms"),
            **_quantiles("bare_jitter", np.abs(bare_ms - nominal_ms), "ms"),
            **_quantiles("latency", self._latency_ms(), "ms"),
            **_quantiles("policy_latency", self._policy_latency_ms(), "ms"),
            "late_plans": self.late_plans,
            **{f"cpu_{name}": share for name, share in self.cpu.items()},
            "cycle_cost_us": self.supervisor["cost_us"]["p50"],
            "scheduling": self.supervisor["scheduling"],
            "load": self.load,
        }

    def _heard_ns(self) -> tuple[Array, Array]:
        """Returns the flight rows whose commands were received from the graph, and the times."""
        when = {targets: stamp_ns for stamp_ns, targets in self.heard}
        sent = [row.tobytes() for row in self.flight["sent_rad"]]
        # Targets at rest are equal: their commands look the same.
        times = Counter(sent)
        rows = [row for row, targets in enumerate(sent) if targets in when and times[targets] == 1]
        return np.array(rows, int), np.array([when[sent[row]] for row in rows], float)

    def _latency_ms(self) -> Array:
        rows, heard_ns = self._heard_ns()
        return 1e-6 * (heard_ns - self.flight["state_stamp_ns"][rows])

    def _policy_latency_ms(self) -> Array:
        rows, heard_ns = self._heard_ns()
        plans = self.flight["plan"]
        begins = np.flatnonzero(np.diff(plans, prepend=plans[0]) > 0)
        at = dict(zip(rows.tolist(), heard_ns.tolist(), strict=True))
        taken = [
            at[row] - self.observed_ns[int(plans[row])]
            for row in begins.tolist()
            if row in at and int(plans[row]) in self.observed_ns
        ]
        return 1e-6 * np.array(taken, float)


def _measure(rate_hz: float, seconds: float) -> Measured:
    measured = Measured(command_hz=rate_hz, heard=deque(maxlen=round(40 * rate_hz)))
    with tempfile.TemporaryDirectory() as name, _own_graph() as domain:
        folder = Path(name)
        station = _write_station(folder / "station.yaml", rate_hz, domain)
        with (
            _sim_arm(max(200.0, rate_hz), domain) as arm,
            StationProcesses(str(folder / "station.yaml"), folder / "run") as processes,
            closing(processes.client()) as client,
            closing(connect(processes.sockets / SUPERVISOR_SOCKET)) as watch,
            closing(open_node("robot_rl_bench", domain_id=domain)) as node,
        ):
            assert station.ros2 is not None
            node.create_subscription(
                "std_msgs/msg/Float64MultiArray",
                f"{station.ros2.position_controller}/commands",
                lambda message: measured.heard.append(
                    (time.monotonic_ns(), np.asarray(message.data, float).tobytes())
                ),
            )
            pids = {
                "arm": arm.pid,
                "driver": processes.driver_pid,
                "supervisor": processes.supervisor_pid,
                "policy": os.getpid(),
            }
            with metronome(rate_hz, folder / "bare.npy"):
                _act(measured, station, client, watch, pids, seconds)
            client.control("stop", by="bench control")
            _await_flight(folder / "run" / "flight")
        measured.bare_ns = np.load(folder / "bare.npy")
        measured.supervisor = json.loads((folder / "run" / "supervisor.json").read_text())
        (flight,) = (folder / "run" / "flight").glob("*.npz")
        with np.load(flight) as kept:
            measured.flight = {key: kept[key] for key in ("sent_rad", "state_stamp_ns", "plan")}
    measured.load = round(os.getloadavg()[0], 2)
    return measured


def _act(
    measured: Measured,
    station: StationConfig,
    client: ArmClient,
    watch: Link,
    pids: dict[str, int],
    seconds: float,
) -> None:
    """Observes, plans and sends at absolute times, as the policy."""
    policy, home = _policy(len(station.joints) + 1), np.array(station.home_rad)
    period_ns = round(1e9 / POLICY_HZ)
    client.control("home", by="bench control")
    client.control("start", by="bench control")
    begun_ns = due_ns = time.monotonic_ns()
    warm_ns, used = 0, dict[str, float]()
    number = 0
    while time.monotonic_ns() - begun_ns < 1e9 * (_WARM_UP_S + seconds):
        stamps = _drain(watch)
        if warm_ns:
            measured.stamps_ns += stamps
        elif time.monotonic_ns() - begun_ns >= 1e9 * _WARM_UP_S:
            warm_ns, used = time.monotonic_ns(), {name: processor_s(pid) for name, pid in pids.items()}
        state = _observed(client)
        client.send(_plan(policy, home, state, number, time.monotonic_ns() - begun_ns, period_ns))
        measured.observed_ns[number] = state.stamp_ns
        number, due_ns = number + 1, due_ns + period_ns
        left_ns = due_ns - time.monotonic_ns()
        if left_ns <= 0:
            measured.late_plans, due_ns = measured.late_plans + 1, time.monotonic_ns()
        time.sleep(max(0.0, 1e-9 * left_ns))
    wall_s = 1e-9 * (time.monotonic_ns() - warm_ns)
    measured.cpu = {name: round((processor_s(pid) - used[name]) / wall_s, 3) for name, pid in pids.items()}


def _observed(client: ArmClient) -> ArmState:
    status = client.status
    if status.phase not in ("running", "holding") or status.state is None:
        raise DeviceError(f"bench control: the arm is {status.phase}: {status.reason}")
    return status.state


def _plan(
    policy: FlowPolicy, home: Array, state: ArmState, number: int, elapsed_ns: int, period_ns: int
) -> Plan:
    """Samples a chunk, and plans the sinusoid of all joints."""
    vector = np.concatenate([state.position_rad, state.velocity_rad_s])
    with torch.inference_mode():
        shown = torch.zeros(1, STATE_DIM)
        shown[0, : len(vector)] = torch.from_numpy(vector)
        policy.sample(policy.encode({"state": shown}))
    times_s = 1e-9 * (elapsed_ns + period_ns * np.arange(1, HORIZON + 1))
    swing = _AMPLITUDE_RAD * np.sin(2 * np.pi * _SWING_HZ * times_s)
    return Plan(
        number=number,
        start_ns=time.monotonic_ns(),
        period_ns=period_ns,
        targets_rad=home + swing[:, None],
        gripper=np.full(HORIZON, state.gripper),
    )


def _policy(action_dim: int) -> FlowPolicy:
    torch.set_num_threads(1)
    config = ChunkPolicyConfig(horizon=HORIZON)
    policy = FlowPolicy(config, state_dim=STATE_DIM, action_dim=action_dim).eval()
    with torch.inference_mode():
        for _ in range(20):  # the first samples are slow, and the arm would be held
            policy.sample(policy.encode({"state": torch.zeros(1, STATE_DIM)}))
    return policy


def _drain(watch: Link) -> list[int]:
    """Returns the stamps of all cycles since the last call."""
    return [message.stamp_ns for message in watch.receive() if isinstance(message, Status)]


@contextmanager
def _own_graph() -> Generator[int]:
    """Yields a ROS domain of its own, on this machine only."""
    domain = os.getpid() % 100 + 1
    ours = {
        "ROS_DOMAIN_ID": str(domain),
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
        "OMP_NUM_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield domain
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _write_station(path: Path, rate_hz: float, domain: int) -> StationConfig:
    """Writes `sim_arm` with another rate; targets differ in every cycle, so that each can be found."""
    content = yaml.safe_load((STATIONS / "sim_arm.yaml").read_text())
    content["name"] = f"bench_{os.getpid()}"
    content["objects"] = {}
    content["ros2"]["domain_id"] = domain
    content["supervisor"] = {"command_hz": rate_hz, "interpolate": "jerk_limited"}
    path.write_text(yaml.safe_dump(content))
    return load_station(str(path))


@contextmanager
def _sim_arm(rate_hz: float, domain: int) -> Generator[subprocess.Popen[str]]:
    command = command_line("serve-sim-arm", f"rate_hz={rate_hz}", f"domain_id={domain}")
    arm = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert arm.stderr is not None
    try:
        line = arm.stderr.readline()
        if "ready" not in line:
            arm.kill()
            raise DeviceError(f"bench control: the simulated arm did not start: {line}{arm.stderr.read()}")
        yield arm
    finally:
        arm.send_signal(signal.SIGTERM)
        try:
            arm.wait(_READY_S)
        except subprocess.TimeoutExpired:
            arm.kill()
            arm.wait()
        arm.stderr.close()


def _await_flight(folder: Path) -> None:
    """Waits for the flight record, which a stop writes."""
    until_s = time.monotonic() + _READY_S
    while not list(folder.glob("*.npz")):
        if time.monotonic() > until_s:
            raise DeviceError(f"bench control: the supervisor wrote no flight record to {folder}")
        time.sleep(0.05)


def _quantiles(name: str, values: Array, unit: str) -> dict[str, float | None]:
    if not len(values):
        return {f"{name}_{quantile}_{unit}": None for quantile in _QUANTILES}
    return {
        f"{name}_{quantile}_{unit}": round(float(np.percentile(values, percent)), 4)
        for quantile, percent in _QUANTILES.items()
    }


def _draw(path: Path, measured: list[Measured]) -> None:
    """Draws the errors of the periods, one panel for each rate."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8.6, 2.6 * len(measured)), layout="constrained")
    for one, axes in zip(measured, drawing.subplots(len(measured), squeeze=False)[:, 0], strict=True):
        nominal_ms = 1e3 / one.command_hz
        error_ms = one.periods_ms - nominal_ms
        axes.hist(error_ms, bins=200, color="#1f5fa8", log=True)
        axes.axvline(nominal_ms, color="#c2571a", linewidth=0.8, label="a missed deadline")
        axes.set_title(f"{one.command_hz:g} Hz: {len(error_ms):,} periods, {one.row()['missed']} missed")
        axes.set_xlabel("period - nominal, ms")
        axes.set_ylabel("periods")
        axes.legend(frameon=False)
    drawing.savefig(path, dpi=120)
