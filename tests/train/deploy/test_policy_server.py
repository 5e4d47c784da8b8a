"""An arm whose policy is computed in another process, which is killed while the arm moves."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from robot_rl.policies.async_executor import AsyncExecutor
from robot_rl.policies.checkpoint import PolicyMeta, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.real.launch import StationProcesses
from robot_rl.real.remote import RemoteConfig
from robot_rl.real.sensors import open_sensors
from robot_rl.real.station import STATIONS, load_station
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.deploy.env import StationEnv
from robot_rl.train.deploy.remote import open_remote

_COMMAND = "import sys; from robot_rl.cli.main import main; sys.exit(main())"


class ServerProcess:
    """`robot-rl serve-policy` over TLS, at a port of its own."""

    def __init__(self, run: Path, pki: Path, token: str) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        tls = [f"cert={pki / 'server.pem'}", f"key={pki / 'server.key'}"]
        self._words = [f"run={run}", f"port={self.port}", f"token_file={token}", "device=cpu", *tls, "--json"]
        self.config = RemoteConfig(
            address=f"tls://127.0.0.1:{self.port}", ca=str(pki / "authority.pem"), token_file=token
        )
        self.start()
        assert self.process.stderr is not None
        first = self.process.stderr.readline()
        if not first.startswith(f"tls://127.0.0.1:{self.port}: "):
            pytest.fail(first + self.process.communicate()[1])

    def start(self) -> None:
        """Does not wait until it listens."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "serve-policy", *self._words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, how: signal.Signals) -> str:
        """Returns what it printed."""
        self.process.send_signal(how)
        return self.process.communicate(timeout=20)[0]


@pytest.fixture
def server(tmp_path: Path, pki: Path, token: str, station_env: StationEnv) -> Iterator[ServerProcess]:
    env = station_env
    policy = FlowPolicy(
        ChunkPolicyConfig(horizon=16),
        state_dim=len(env.state_names),
        action_dim=len(env.action_names),
        generator=torch.Generator().manual_seed(0),
    )
    meta = PolicyMeta(
        task=env.task,
        robot=env.robot,
        control_hz=env.control_hz,
        state_names=env.state_names,
        action_names=env.action_names,
        instruction=env.instruction,
        n_exec=8,
    )
    save_policy(tmp_path / "run" / "policy" / "final", policy, meta=meta)
    process = ServerProcess(tmp_path / "run", pki, token)
    yield process
    if process.process.poll() is None:
        process.end(signal.SIGKILL)


@pytest.fixture
def station_env(tmp_path: Path) -> Iterator[StationEnv]:
    content = yaml.safe_load((STATIONS / "sim_in_process.yaml").read_text())
    content["supervisor"] |= {"max_state_age_s": 5.0, "stop_after_s": 20.0}  # the machine is busy
    content["limits"]["max_observation_age_s"] = 5.0
    content["objects"] = {name: {"max_age_s": 5.0} for name in content["objects"]}
    path = tmp_path / "patient.yaml"
    path.write_text(yaml.safe_dump(content))
    station = load_station(str(path))
    with StationProcesses(str(path), tmp_path / "station") as processes:
        sensors = open_sensors(station, processes.sockets)
        config = EnvConfig(task="pick_cube", horizon_s=300.0, num_threads=1)
        with closing(StationEnv(station, config, processes.client(), sensors)) as env:
            yield env


@pytest.mark.slow
def test_the_arm_holds_while_a_killed_server_is_away_and_goes_on(
    server: ServerProcess, station_env: StationEnv
) -> None:
    env = station_env
    policy, meta = open_remote(server.config)
    executor = AsyncExecutor(policy, n_exec=meta.n_exec, control_hz=env.control_hz, ensemble=None)
    path: list[np.ndarray] = []

    def play(steps: int) -> None:
        nonlocal obs
        for _ in range(steps):
            obs, *_ = env.step(executor.act(obs).action)
            path.append(env.measured.state.position_rad)

    try:
        obs, _ = env.reset(seed=5)
        play(20)
        assert executor.held_steps == 0
        server.end(signal.SIGKILL)
        play(40)  # the last chunk ends after at most 16, and the servos settle
        assert executor.held_steps >= 20
        assert np.ptp(path[-8:], axis=0).max() < 0.02  # rad: at rest
        server.start()
        held = -1
        while executor.held_steps > held:  # torch takes seconds to load, on a busy machine many
            assert len(path) < 2000
            held = executor.held_steps
            play(1)
        before = path[-1]
        play(15)
        assert executor.held_steps == held
        assert np.abs(path[-1] - before).max() > 0.02
        assert policy.lost == 1
    finally:
        policy.close()
        executor.close()
    counts = json.loads(server.end(signal.SIGTERM).splitlines()[-1])
    assert counts["chunks"] >= 2
    assert counts["errors"] == 0
