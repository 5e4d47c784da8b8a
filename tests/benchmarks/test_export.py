"""Exported policies against torch, and policy servers against none: milliseconds, taken in turns."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.export import ExportedPolicy, export_policy
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.real.remote import DoorConfig, RemoteConfig
from robot_rl.train.deploy.remote import open_remote
from robot_rl.train.serve import PolicyServer

STATE, ACTIONS, HORIZON, SAMPLES = 40, 8, 8, 1000


def policy_of(steps: int, cameras: tuple[str, ...] = ()) -> ResidualPolicy:
    config = ChunkPolicyConfig(horizon=HORIZON, steps=steps, cameras=cameras)
    base = FlowPolicy(config, state_dim=STATE, action_dim=ACTIONS)
    return ResidualPolicy(base, ResidualHeadConfig()).eval()


def observation(cameras: tuple[str, ...] = ()) -> dict[str, Tensor]:
    obs = {"state": torch.randn(1, STATE)}
    return obs | {f"{name}.rgb": torch.randint(0, 256, (1, 96, 96, 3), dtype=torch.uint8) for name in cameras}


def taken_ms(work: Callable[[], Any], samples: int) -> np.ndarray:
    taken = np.empty(samples)
    for sample in range(samples):
        began_s = time.perf_counter()
        work()
        taken[sample] = 1e3 * (time.perf_counter() - began_s)
    return taken


def in_turns(works: dict[str, Callable[[], Any]], samples: int) -> dict[str, np.ndarray]:
    """Times A B A B A B: a machine that slows down slows both."""
    rounds: dict[str, list[np.ndarray]] = {name: [] for name in works}
    for work in works.values():
        taken_ms(work, 20)
    for _ in range(3):
        for name, work in works.items():
            rounds[name].append(taken_ms(work, samples // 3))
    return {name: np.concatenate(parts) for name, parts in rounds.items()}


def quantiles(taken: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Returns p50 and p99 in milliseconds of each."""
    return {
        name: [round(float(q), 3) for q in np.percentile(times, [50, 99])] for name, times in taken.items()
    }


@pytest.mark.benchmark
@pytest.mark.parametrize("steps", [1, 4])
def test_an_exported_policy_is_faster_than_torch(
    tmp_path: Path, steps: int, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip("onnxruntime")
    policy, obs, z = policy_of(steps), observation(), torch.randn(1, HORIZON, ACTIONS)
    export_policy(tmp_path / "export", policy, {name: value.numpy() for name, value in obs.items()})
    runtime, action = ExportedPolicy(tmp_path / "export"), z[:, 0].clamp(-1, 1)
    with torch.inference_mode():
        chunks = in_turns(
            {
                "torch": lambda: policy.sample(policy.encode(obs), z=z),
                "onnxruntime": lambda: runtime.sample(runtime.encode(obs), z=z),
            },
            SAMPLES,
        )
        refined = in_turns(
            {
                "torch": lambda: policy.refine(policy.encode(obs), action),
                "onnxruntime": lambda: runtime.refine(runtime.encode(obs), action),
            },
            SAMPLES,
        )
    record_property(f"chunk of {steps} steps", quantiles(chunks))
    record_property("refine", quantiles(refined))
    for taken in (chunks, refined):
        assert np.median(taken["onnxruntime"]) < np.median(taken["torch"])


@pytest.mark.benchmark
@pytest.mark.parametrize("cameras", [(), ("front", "side")])
def test_a_policy_server_on_this_computer(
    pki: Path, token: str, cameras: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    """Policy and TLS in one process: both ends share its interpreter, so this is an upper bound."""
    policy, obs = policy_of(4, cameras), observation(cameras)
    z = torch.randn(1, HORIZON, ACTIONS)
    meta = PolicyMeta(
        task="reach",
        robot="panda",
        control_hz=20.0,
        state_names=(),
        action_names=(),
        instruction="",
        n_exec=4,
    )
    door = DoorConfig(port=0, cert=str(pki / "server.pem"), key=str(pki / "server.key"), token_file=token)
    server, stop = PolicyServer(policy, meta, door), threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    config = RemoteConfig(address=server.address, ca=str(pki / "authority.pem"), token_file=token)
    remote, _ = open_remote(config, real_time=False)
    with closing(remote), torch.inference_mode():
        taken = in_turns(
            {
                "here": lambda: policy.sample(policy.encode(obs), z=z),
                "over TLS": lambda: remote.sample(remote.encode(obs), z=z),
            },
            SAMPLES,
        )
    stop.set()
    thread.join()
    record_property(f"{len(cameras)} cameras of 96x96", quantiles(taken))
    added_ms = np.median(taken["over TLS"]) - np.median(taken["here"])
    assert added_ms < 10.0
